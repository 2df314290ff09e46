"""Plans of a short graph on ranks that split batch, experts and model, at several prices of memory."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from autopar.cost.hardware.cluster import Cluster
from autopar.ir.graph import NamedGraph
from autopar.ir.short_graph import ShortGraph
from autopar.ir.values import NamedNode, NamedTensor
from autopar.mesh import SubMesh
from autopar.rules.ops.routed import COMBINE, DISPATCH
from autopar.sharding.assignment import StepPlan
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.choices import Passing, Site, group_sites, passings_of, sites_of
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.syntax import Axes, DimRule, Hole, MicroBatches, Pin, SplitTerm, TensorPattern
from autopar.sharding.options import TrainingOptions
from autopar.sharding.time_slice import sites_in_time, slice_in_time
from autopar.solver.model.build import plan_of
from autopar.solver.model.cost_tables import CostTables
from autopar.solver.model.objective import MOMENTS, Sum
from autopar.solver.search.joined_axes import AxisRoles, kind_of
from autopar.solver.search.lagrangian import LagrangianSearch
from autopar.solver.search.phases import Incumbent, SearchPhases
from autopar.solver.segments import with_equal_layers
from autopar.solver.setting import MicroBatchedCall, PlanningProblem

__all__ = ["BATCH", "CONTEXT", "DATA", "EXPERT", "MODEL", "short_plans"]

BATCH = "batch"
# Axes of a proposed mesh: ranks that split the batch, those of them that split the experts too, ranks that split the
# sequence, and ranks that split the model.
DATA, EXPERT, CONTEXT, MODEL = "dp", "ep", "cp", "tp"
# Prices of saved memory at which plans of the short graph are made: shares of the step's time for all of the memory.
# The first one separates plans of equal time. At the last one recomputing everything is worth its time.
MEMORY_PRICES = (0.02, 0.4, 4.0)
# Relative precision of the multipliers at which these plans are made.
PRECISION = 1e-2


def short_plans(
    short: ShortGraph, cluster: Cluster, options: TrainingOptions, micro: MicroBatches, axes: SubMesh, in_flight: int
) -> Iterator[StepPlan]:
    """Yield different plans on the axes of a shape, whose first stage keeps so many micro-batches."""
    graph = short.graph
    call = MicroBatchedCall(graph, micro, in_flight=float(in_flight))
    sliced = slice_in_time(graph, micro)
    setting = PlanningProblem.of(sliced, axes, cluster, replace(options, micro_batches=micro.count), call)
    batch = [axis for axis in (DATA, EXPERT) if axes.get(axis, 1) > 1]
    bound_layout = BoundLayout(sliced, _batch_layout(sliced, tuple(batch)), axes)
    incumbent = Incumbent(setting, math.inf, time.monotonic(), None, bound_layout)
    ways = _roles(short, sliced, micro, EXPERT in axes) if batch or CONTEXT in axes else None
    work = SearchPhases(setting, bound_layout, incumbent, CostTables(setting), math.inf, ways=ways)
    model = work.model(is_limited=True, recompute={})
    search = LagrangianSearch(model, lambda chosen: (math.inf, 0.0), math.inf, gap=PRECISION)
    multipliers = search.highest_multipliers(math.inf)[: search.count]
    weights, _ = search.hinges.weights(multipliers)
    least = search.elimination.least(weights)
    scale = search.hinges.seconds(least.sums) / max(float(least.sums[Sum.KEPT_GIB]), 1e-9)
    seen: list[StepPlan] = []
    for price in MEMORY_PRICES:
        chosen = search.elimination.candidate(weights + price * scale * MOMENTS[0])
        plan = with_equal_layers(short, call.plan(plan_of(model, chosen)))
        if not any(plan.assignment == one.assignment for one in seen):
            seen.append(plan)
            yield plan


def _batch_layout(graph: NamedGraph, axes: Axes) -> Layout:
    """Return the layout that splits the batch over axes, but for routed rows: they may go to the ranks of experts."""
    if not axes:
        return Layout(())
    routed = (tensor.name for tensor in graph.tensors.values() if tensor.routed)
    is_open = (DimRule(("*",), TensorPattern((Hole(),))),)
    batch = DimRule((BATCH,), TensorPattern((SplitTerm(axes),)))
    return Layout((batch, *(Pin(name, is_open) for name in routed)))


def _roles(short: ShortGraph, sliced: NamedGraph, micro: MicroBatches, has_experts: bool) -> AxisRoles | None:
    """Return the sites of ops that each axis may split; None for all. `has_experts`: one axis is for experts.

    Ranks that split the batch split the site of an op that micro-batches split. If they split another one, each
    micro-batch moves activations, and what is sent of parameters is less. That pays for large parameters, for rows that
    are routed to other ranks anyway, and for tables of vectors, which stand outside of the layers. An axis for experts
    splits their groups wherever routed rows meet parameters. One for the sequence splits nothing else, where there is
    one.
    """
    split = sites_in_time(short.graph, micro)
    if any(_has_large_parameters(short.graph, node) for node in short.graph.nodes if split[node.name]):
        return None
    inside = {op for ops in short.graph.ops_of_layers.values() for op in ops}
    sites: dict[object, dict[str, tuple[Site, ...]]] = {}
    passes: dict[object, dict[str, tuple[Passing, ...]]] = {}
    for node in sliced.nodes:
        kind, every, passings = kind_of(node), _sites(node), passings_of(sliced, node)
        is_table = node.name not in inside and _reads_parameters(sliced, node)
        of_sites, of_passes = sites.setdefault(kind, {}), passes.setdefault(kind, {})
        for axis, is_free in (
            (DATA, is_table or (bool(node.routed) and not has_experts)),
            (EXPERT, is_table or bool(node.routed)),
        ):
            is_fixed = bool(split[node.name]) and not is_free
            own, passing = (tuple(sorted(split[node.name])), ()) if is_fixed else (every, passings)
            if axis == EXPERT and node.routed:
                # Rows are sent where experts begin and end: there the axis may split tokens too.
                at_ends = split[node.name] if node.op in (str(DISPATCH), str(COMBINE)) else ()
                own, passing = (*sorted(at_ends), *(one for one in group_sites(node) if one in every)), ()
            # Ops of one kind have the sites of all of them.
            of_sites[axis] = tuple(dict.fromkeys((*of_sites.get(axis, ()), *own)))
            of_passes[axis] = tuple(dict.fromkeys((*of_passes.get(axis, ()), *passing)))
        of_sequence = _sequence_sites(sliced, node)
        of_sites[CONTEXT] = tuple(dict.fromkeys((*of_sites.get(CONTEXT, ()), *(of_sequence or every))))
        of_passes[CONTEXT] = tuple(dict.fromkeys((*of_passes.get(CONTEXT, ()), *(() if of_sequence else passings))))
        of_sites[MODEL], of_passes[MODEL] = every, passings
    return AxisRoles(sites, passes)


def _sequence_sites(graph: NamedGraph, node: NamedNode) -> tuple[Site, ...]:
    """Return the sites of a folded sequence longer than one."""
    if graph.fold is None:
        return ()
    ends = (
        *zip(node.rule.operands, node.operands, strict=False),
        *zip(node.rule.outputs, node.outputs, strict=True),
    )
    found = set[Site]()
    for operand, name in ends:
        tensor = None if name is None else graph.tensors[name]
        sites = None if tensor is None else sites_of(node, operand, tensor)
        if tensor is not None and sites is not None:
            named = zip(tensor.atoms, sites, strict=True)
            found.update(site for atom, site in named if site is not None and graph.fold.dim in atom.names)
    return tuple(site for site in _sites(node) if site in found)


def _sites(node: NamedNode) -> tuple[Site, ...]:
    """Return the sites longer than one."""
    every = ((factor, atom, one) for factor, extents in node.atoms.items() for atom, one in enumerate(extents))
    return tuple((factor, atom) for factor, atom, one in every if one > 1)


def _reads_parameters(graph: NamedGraph, node: NamedNode) -> bool:
    return any(name is not None and graph.tensors[name].kind == "param" for name in node.operands)


def _has_large_parameters(graph: NamedGraph, node: NamedNode) -> bool:
    """Return whether a parameter of an op has more bytes than its largest activation in all micro-batches."""
    tensors = [graph.tensors[name] for name in (*node.operands, *node.outputs) if name is not None]
    parameters = [_bytes(one) for one in tensors if one.kind == "param"]
    activations = [_bytes(one) for one in tensors if one.kind != "param"]
    return max(parameters, default=0.0) > max(activations, default=math.inf)


def _bytes(tensor: NamedTensor) -> float:
    return prod(tensor.shape) * tensor.element_bytes
