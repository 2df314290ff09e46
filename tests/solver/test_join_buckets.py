"""Tiny parameters are stored so that they share the buckets of others."""

from __future__ import annotations

import random
from dataclasses import replace

import autopar
from autopar.cost.evaluate import evaluate
from autopar.cost.hardware.cluster import load_cluster
from autopar.ir.values import NamedTensor
from autopar.mesh import SubMesh
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout
from autopar.sharding.options import TrainingOptions
from autopar.solver.model.build import build, plan_of
from autopar.solver.model.objective import Sum
from autopar.solver.search.join_buckets import JoinedBuckets
from autopar.solver.search.lagrangian import LagrangianSearch
from autopar.solver.setting import PlanningProblem
from examples.gpt import gpt

CLUSTER, AXES = load_cluster("h100"), {"dp": 8, "tp": 4}


def is_tiny(tensor: NamedTensor) -> bool:
    return len(tensor.shape) == 1


def test_tiny_parameters_join_others() -> None:
    graph = autopar.trace(*gpt(layers=2, d_model=2048, heads=16, vocab=512, seq=512, batch=64, device="meta"))
    setting = PlanningProblem.of(graph, SubMesh.of(AXES), CLUSTER, TrainingOptions())
    model = build(setting, BoundLayout(graph, Layout(()), setting.axes))

    def seconds(chosen: list[int]) -> float:
        return evaluate(graph, plan_of(model, chosen), CLUSTER).step_seconds

    search = LagrangianSearch(model, lambda chosen: (seconds(list(chosen)), 0.0), float("inf"))
    search.run()
    best = min(search.found.values(), key=lambda one: one.seconds).chosen
    tiny = [model.place["held", tensor.name] for tensor in graph.parameters if is_tiny(tensor)]

    def collectives(chosen: list[int]) -> int:
        sent = evaluate(graph, plan_of(model, chosen), CLUSTER).communication
        return sum(one.count for one in sent if one.of == "parameters")

    draw, buckets, fewer = random.Random(0), JoinedBuckets(model), 0
    for _ in range(10):
        chosen = list(best)
        for place in tiny:
            chosen[place] = draw.randrange(len(model.variables[place].states))
        joined = buckets.joined(chosen)
        changed = {place for place, (one, other) in enumerate(zip(chosen, joined, strict=True)) if one != other}
        assert changed <= set(tiny)
        assert not model.sums(joined)[Sum.FORBIDDEN]
        assert seconds(joined) <= seconds(chosen) * (1 + 1e-4)
        assert collectives(joined) <= collectives(chosen)
        fewer += collectives(joined) <= 0.8 * collectives(chosen)
        assert buckets.joined(joined) == joined
    assert fewer >= 5


def test_only_what_is_tiny_beside_its_layer_is_stored_anew() -> None:
    graph = autopar.trace(*gpt(layers=2, d_model=64, heads=4, vocab=128, seq=32, batch=8, device="meta"))
    setting = PlanningProblem.of(graph, SubMesh.of(AXES), CLUSTER, TrainingOptions())
    model = build(setting, BoundLayout(graph, Layout(()), setting.axes))
    draw, buckets, some = random.Random(0), JoinedBuckets(model), set[str]()
    tensors = graph.tensors
    for _ in range(10):
        chosen = [draw.randrange(len(variable.states)) for variable in model.variables]
        pairs = zip(model.variables, chosen, buckets.joined(chosen), strict=True)
        changed = {variable.name for variable, one, other in pairs if one != other}
        assert all(is_tiny(tensors[name]) for name in changed)
        some |= changed
    assert some, "biases join their weights"


def test_a_small_layer_is_gathered_again_as_a_whole() -> None:
    graph = autopar.trace(*gpt(layers=2, d_model=1024, heads=16, vocab=512, seq=512, batch=64, device="meta"))
    setting = PlanningProblem.of(graph, SubMesh.of(AXES), CLUSTER, TrainingOptions())
    model = build(setting, BoundLayout(graph, Layout(()), setting.axes), regather=True)
    buckets = JoinedBuckets(model)
    search = LagrangianSearch(model, lambda chosen: (1.0, 0.0), float("inf"))
    search.run()
    kept = buckets.joined(search.looked[-1].chosen)
    held = {one.name: place for place, one in enumerate(model.variables) if one.kind == "held"}
    weights = [name for name in held if name.startswith("blocks.0") and len(graph.tensors[name].shape) == 2]
    for name in weights:
        states = model.variables[held[name]].states
        kept[held[name]] = next(i for i, one in enumerate(states) if any(one.layout.splits) and not one.again)
    assert buckets.gathered_again(kept) is None
    part = list(kept)
    states = model.variables[held[weights[0]]].states
    part[held[weights[0]]] = states.index(replace(states[part[held[weights[0]]]], again=True))
    whole = buckets.gathered_again(part)
    assert whole is not None
    assert buckets.gathered_again(whole) is None

    def sent(chosen: list[int]) -> tuple[int, float]:
        costs = evaluate(graph, plan_of(model, buckets.joined(chosen)), CLUSTER)
        return sum(one.count for one in costs.communication if one.of == "parameters"), costs.limited_bytes

    assert sent(whole)[0] < sent(part)[0]
    assert sent(whole)[1] <= sent(part)[1]
