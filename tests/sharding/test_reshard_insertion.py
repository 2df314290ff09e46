"""What a plan is said to convert and send is what its generated graph converts and sends: many graphs and layouts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.lowering.emit import emit
from autopar.lowering.modules.bucket_ends import BucketEnd
from autopar.lowering.passes.join_small_sums import JoinedSums
from autopar.mesh import Mesh
from autopar.sharding.assignment import StepPlan
from autopar.sharding.buckets import buckets_of, ways_of
from autopar.sharding.layout.language import choose_layout, parse_layout
from autopar.sharding.options import Outputs
from autopar.sharding.propagation import propagate
from autopar.sharding.reshard.reshard import Reshard, goes_in_bucket
from autopar.sharding.reshard_insertion import insert_reshards, inserted_reshards
from autopar.tracing.trace import trace
from examples.gpt import gpt
from examples.mlp import mlp
from examples.moe import moe
from examples.resnet import resnet
from tests.runtime.random_programs import Program, random_layout
from tests.traced import traced

TILES = "batch:dp; height:sy; width:sx; *:none"

CASES: Mapping[str, tuple[Callable[[], Any], tuple[tuple[str, str], ...]]] = {
    "mlp": (mlp, (("ddp", "dp=2"), ("fsdp", "fsdp=3"))),
    "gpt": (
        lambda: gpt(batch=4, seq=8, vocab=104),
        (("ddp", "dp=2"), ("megatron_sp", "dp=2,tp=2"), ("fsdp_tp", "fsdp=2,tp=2"), ("vocab:tp; *:none", "tp=2")),
    ),
    "resnet": (lambda: resnet(depth=10, width=4, image=64, batch=4, loss=True), ((TILES, "dp=2,sy=2,sx=2"),)),
    "moe": (lambda: moe(batch=8), (("gshard_moe", "dp=2,ep=2"),)),
}


@dataclass(frozen=True)
class FirstRank:
    """The groups of the first rank of a mesh, without processes."""

    axes: Mapping[str, int]
    device_type: str = "cpu"
    replicas: int = 1

    @property
    def coordinate(self) -> Mapping[str, int]:
        return dict.fromkeys(self.axes, 0)

    def levels(self, axes: tuple[str, ...]) -> tuple[Any, ...]:
        """Return no way to sum by level."""
        return ()

    def of(self, axes: tuple[str, ...]) -> Any:
        ordered = [axis for axis in self.axes if axis in axes]
        places = product(*(range(self.axes[axis]) for axis in ordered))
        members = tuple({**self.coordinate, **dict(zip(ordered, place, strict=True))} for place in places)
        return SimpleNamespace(name="*".join(ordered), members=members)


def sizes(mesh: str) -> dict[str, int]:
    return {axis: size for axis, size in Mesh(mesh).axes.items() if size is not None}


def check(graph: NamedGraph, layout: Any, axes: dict[str, int], outputs: Outputs, local_inputs: bool) -> int:
    """How many conversions there are; each of them stands in the generated graph, and no other does."""
    assignment = propagate(graph, layout, axes)
    listed = inserted_reshards(graph, assignment, outputs, local_inputs)
    emitted = emit(graph, assignment, FirstRank(axes), outputs, local_inputs)  # type: ignore[arg-type]
    assert emitted.inserted == listed
    generated: Counter[Reshard] = Counter()
    for node in emitted.graph_module.graph.nodes:
        module: Any = emitted.graph_module.get_submodule(node.target) if node.op == "call_module" else None
        if hasattr(module, "conversion"):
            generated[module.conversion.reshard] += 1
        elif isinstance(module, BucketEnd):
            generated.update(one.reshard for one in module.running.bucket.conversions)
        elif isinstance(module, JoinedSums):
            generated.update(one.reshard for one in module.conversions)
        elif hasattr(module, "split"):
            messages = module.split.messages()
            assert len(messages) == len(module.sends)
            generated.update(message.reshard for message in messages if message.reshard.forward)
    assert generated == Counter(one.reshard for one in listed)
    return len(listed)


@pytest.mark.parametrize("name", CASES)
def test_listed_is_emitted(name: str) -> None:
    make, layouts = CASES[name]
    model, inputs = make()
    graph = trace(model, inputs)
    for layout, mesh in layouts:
        axes = sizes(mesh)
        for outputs, local_inputs in (("sharded", False), ("full", True)):
            assert check(graph, choose_layout(layout, axes), axes, outputs, local_inputs) > 0  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_listed_is_emitted_under_random_layouts(seed: int) -> None:
    program = Program(seed)
    axes = {"a": 2, "b": 2}
    graph = trace(program, (program.example(),), dims=program.dims)
    draw, found = random.Random(seed), 0
    for _ in range(8):
        try:
            found += check(graph, parse_layout(random_layout(draw, graph.dims, axes)), axes, "full", False)
        except LayoutError:
            continue
    assert found > 0


def test_once_per_layout_and_again_at_the_outputs() -> None:
    model, inputs = gpt(batch=4, seq=8, vocab=104, loss=False)
    graph = trace(model, inputs)
    assignment = propagate(graph, choose_layout("megatron_sp", {"dp": 2, "tp": 2}), {"dp": 2, "tp": 2})
    sharded, full = (inserted_reshards(graph, assignment, outputs) for outputs in ("sharded", "full"))
    assert full[: len(sharded)] == sharded
    (gathered,) = full[len(sharded) :]
    assert gathered.op == "the outputs"
    assert gathered.tensor == graph.outputs[0]
    keys = [(one.tensor, one.reshard.source, one.reshard.target) for one in full]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(("layout", "mesh"), [("ddp", "dp=2"), ("fsdp", "fsdp=2"), ("megatron_sp", "dp=2,tp=2")])
def test_buckets_are_those_of_the_generated_graph(layout: str, mesh: str) -> None:
    graph = traced(gpt, layers=3, d_model=192, batch=4, seq=8, vocab=1024)
    axes = sizes(mesh)
    assignment = propagate(graph, choose_layout(layout, axes), axes)
    emitted = emit(graph, assignment, FirstRank(axes), "sharded", False)  # type: ignore[arg-type]
    modules: Any = emitted.graph_module.children()
    ends = [module.running.bucket for module in modules if isinstance(module, BucketEnd)]
    generated = Counter(tuple(one.reshard for one in bucket.conversions) for bucket in ends)
    plan = StepPlan(graph.fingerprint, assignment)
    ways = {
        bucket: [tuple(step.kind for step in way) for way in ways_of(bucket.members[0])]
        for bucket in buckets_of(graph, plan, insert_reshards(graph, assignment))
    }
    priced = [bucket for bucket, kinds in ways.items() if goes_in_bucket(*kinds)]
    assert generated == Counter(tuple(one.reshard for one in bucket.members) for bucket in priced)
    assert len(priced) > 1
