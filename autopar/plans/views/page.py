"""Report page: one file that needs no network, with data, style and script inside."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any, Literal

from autopar.cost.costs import Costs
from autopar.cost.evaluate import evaluate
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.lowered_step import LoweredStep, lower_step
from autopar.cost.memory.peak import MemoryMoment, memory_over_time
from autopar.cost.step_errors import shipped_errors
from autopar.cost.tasks import Task, TaskBuilder
from autopar.cost.time_range import time_range
from autopar.cost.timeline import step_timeline
from autopar.files import write_text
from autopar.ir.graph import NamedGraph
from autopar.ir.precision import OWN
from autopar.ir.values import NamedNode, NamedTensor
from autopar.plans.record import PlanRecord
from autopar.plans.views.confidence import range_data, within_noise_of
from autopar.plans.views.notes import notes
from autopar.plans.views.stages import other_stages, stage_rows
from autopar.plans.views.summary import cost_rows, differences, exposed_label
from autopar.sharding.assignment import StepPlan
from autopar.sharding.buckets import Bucket
from autopar.sharding.sharding import Sharding, atoms_of

__all__ = ["ComparedPlan", "Page", "contents", "page", "report"]


WAYS: tuple[Literal["forward"], Literal["backward"]] = ("forward", "backward")


@dataclass(frozen=True)
class ComparedPlan:
    """Another plan for the same graph and mesh, listed for comparison."""

    name: str
    step_seconds: float
    memory_bytes: float
    fits: bool
    # Its time and that of the plan may be in either order.
    within_noise: bool = False


def contents(
    graph: NamedGraph,
    plan: StepPlan,
    cluster: Cluster,
    *,
    title: str,
    memory_bytes: float | None = None,
    gap: float | None = None,
    claimed: bool = False,
    within_layout: bool = False,
    rivals: Sequence[ComparedPlan] = (),
) -> dict[str, Any]:
    """Return everything on the page; `memory_bytes` is the limit of a device, by default its memory."""
    costs = evaluate(graph, plan, cluster)
    tensors = _Tensors(graph, plan)
    wired = lower_step(graph, plan)
    fullest = max(costs.stages, key=lambda stage: stage.memory.peak_bytes, default=None)
    here = wired if fullest is None else wired.at(costs.stages.index(fullest))
    limit = cluster.device.memory_bytes if memory_bytes is None else memory_bytes
    return {
        "title": title,
        "cluster": cluster.name,
        "axes": [{"name": name, "size": size} for name, size in plan.mesh.items()],
        "precision": None if plan.options.precision == OWN else plan.options.precision.text,
        "gap": gap,
        "claimed": claimed,
        "within_layout": within_layout,
        "costs": _costs(costs, exposed_label(plan)),
        "range": range_data(time_range(graph, plan, cluster, costs, shipped_errors())),
        "memory": _memory(costs, limit, memory_over_time(here, None if fullest is None else fullest.memory)),
        "rivals": [asdict(rival) for rival in rivals],
        "dims": _dims(graph, plan),
        "sections": _sections(graph, plan, tensors, _OpTraffic(wired, cluster)),
        "tensors": tensors.described,
        "timeline": _timeline(wired, cluster),
        "notes": [],
        "stages": {"head": "", "rows": []},
        "beside": {"rows": [], "differing": []},
    }


def _costs(costs: Costs, exposed: str) -> dict[str, Any]:
    compute = costs.compute
    return {
        "step_seconds": costs.step_seconds,
        "mfu": costs.mfu,
        "parts": {
            "forward": compute.forward_seconds,
            "backward": compute.backward_seconds,
            "recompute": compute.recompute_seconds,
            "optimizer": compute.optimizer_seconds,
            "communication of values": costs.waited_seconds,
            exposed: costs.exposed_seconds,
            "waiting for the host": costs.waiting_seconds,
            "exposed copies to the host and back": costs.copies_seconds,
            "waiting for other stages": costs.bubble_seconds,
        },
        "communication": [
            {**asdict(one), "axes": list(one.axes)}
            for one in sorted(costs.communication, key=lambda one: -one.seconds)
            if one.count
        ],
    }


def _memory(costs: Costs, limit: float, moments: Sequence[MemoryMoment]) -> dict[str, Any]:
    found = costs.memory
    kinds = {
        "parameters": found.parameters_bytes,
        "copies of parameters": found.copies_bytes,
        "optimizer": found.optimizer_bytes,
        "gradients": found.gradients_bytes,
        "saved for the backward": found.saved_bytes,
        "inputs": found.inputs_bytes,
    }
    return {
        "limit_bytes": limit,
        "peak_bytes": found.peak_bytes,
        "peak_at": found.peak_at,
        "kinds": kinds,
        "moments": [[one.doing, one.bytes, one.gradients_bytes] for one in moments],
    }


# -- tensors and ops --------------------------------------------------------------------------------------------------


class _Tensors:
    """Table of tensors and shardings; equal ones share one entry."""

    def __init__(self, graph: NamedGraph, plan: StepPlan) -> None:
        self.graph = graph
        self.axes = plan.axes
        self.described: list[dict[str, Any]] = []
        self.places: dict[tuple[str, Sharding], int] = {}

    def place(self, name: str, layout: Sharding) -> int:
        key = name, layout
        if key not in self.places:
            self.places[key] = len(self.described)
            self.described.append(self._describe(self.graph.tensors[name], layout))
        return self.places[key]

    def _describe(self, tensor: NamedTensor, layout: Sharding) -> dict[str, Any]:
        atoms = atoms_of(tensor)
        first = dict.fromkeys(self.axes, 0)
        dims = [
            {"name": dim, "axes": [axis for atom in members for axis in layout.splits[atom]]}
            for dim, members in zip(tensor.dims, atoms.members, strict=True)
        ]
        return {
            "name": tensor.name,
            "kind": tensor.kind,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "local": list(atoms.fold(layout.local_sizes(atoms, self.axes, first))),
            "dims": dims,
            "atoms": [list(pair) for pair in zip(atoms.sizes, map(list, layout.splits), strict=True)],
            "members": [len(members) for members in atoms.members],
            "states": {axis: layout.state(axis).name.lower() for axis in self.axes},
        }


def _sections(graph: NamedGraph, plan: StepPlan, tensors: _Tensors, sending: _OpTraffic) -> list[dict[str, Any]]:
    """Return the ops by section: those outside of repeated layers, and one layer of each stack."""
    # Layers of one stack are equal, so one stands for all of them.
    later = {name for repeat in graph.repeats for layer in repeat.layers[1:] for name in layer}
    stack = {name: number for number, repeat in enumerate(graph.repeats) for name in repeat.layers[0]}
    shown = [node for node in graph.nodes if node.node not in later]
    found: list[dict[str, Any]] = []
    for number, nodes in groupby(shown, key=lambda node: stack.get(node.node)):
        repeat = None if number is None else graph.repeats[number]
        paths = [] if repeat is None else [path for path in repeat.module_paths if path]
        title = "" if repeat is None else f"{paths[0]} … {paths[-1]}" if paths else "a repeated layer"
        found.append(
            {
                "title": title,
                "count": 1 if repeat is None else repeat.count,
                "ops": [_op(node, plan, tensors, sending.of(node.name)) for node in nodes],
            }
        )
    return found


def _op(node: NamedNode, plan: StepPlan, tensors: _Tensors, sent: list[dict[str, Any]]) -> dict[str, Any]:
    op_assignment = plan.assignment.ops[node.name]
    operands = [
        tensors.place(name, layout)
        for name, layout in zip(node.operands, op_assignment.operands, strict=True)
        if name is not None and layout is not None
    ]
    results = [
        tensors.place(name, layout)
        for name, layout in zip(node.outputs, op_assignment.results, strict=True)
        if name is not None and layout is not None
    ]
    return {
        "name": node.name,
        "op": node.op,
        "rule": str(node.rule),
        "choice": str(op_assignment.choice) or "nothing is split",
        "operands": operands,
        "results": results,
        "sends": sent,
    }


class _OpTraffic:
    """Traffic of each op with its price: operands and results, its own collectives, its parameters.

    Parameters of many ops share a bucket: the traffic of the bucket appears at each of these ops.

    """

    def __init__(self, wired: LoweredStep, cluster: Cluster) -> None:
        self.graph, plan = wired.graph, wired.plan
        self.prices = TaskBuilder.of(self.graph, cluster, plan.axes, plan.options, wired.half)
        self.prices.on_mesh(plan.mesh)
        self.reshard_plan = wired.reshard_plan
        self.buckets: dict[str, list[Bucket]] = {}
        for bucket in wired.buckets:
            for op in dict.fromkeys(one.op for one in bucket.members):
                self.buckets.setdefault(op, []).append(bucket)

    def of(self, op: str) -> list[dict[str, Any]]:
        wired = self.reshard_plan.ops[op]
        values = [one for one in wired.before if self.graph.tensors[one.tensor].kind != "param"]
        found: list[dict[str, Any]] = []
        for way in WAYS:
            for one in (*values, *wired.inside, *wired.after):
                found += [_sent(task, task.name, 1) for task in self.prices.reshard(one, way) if task.kind != "copy"]
            for bucket in self.buckets.get(op, ()):
                own = ", ".join(dict.fromkeys(one.tensor for one in bucket.members if one.op == op))
                tasks = (task for task in self.prices.bucket(bucket.members, way) if task.kind != "copy")
                found += [_sent(task, own, len(bucket.members)) for task in tasks]
        return found


def _sent(task: Task, tensor: str, together: int) -> dict[str, Any]:
    """Return one collective as plain data; bytes and seconds of a bucket are those of the whole bucket."""
    return {
        "tensor": tensor,
        "kind": task.kind,
        "axes": list(task.axes),
        "bytes": task.bytes,
        "seconds": task.seconds,
        "direction": task.direction,
        "beside": task.overlapped,
        "together": together,
    }


def _dims(graph: NamedGraph, plan: StepPlan) -> list[dict[str, Any]]:
    """Return the number of tensors by axes for each named dim, split dims first."""
    counts: dict[str, dict[str, int]] = {}
    layouts = {**plan.assignment.values, **plan.assignment.stored}
    for name, layout in layouts.items():
        tensor = graph.tensors[name]
        for atom, axes in zip(tensor.atoms, layout.splits, strict=True):
            for dim in atom.names[:1]:
                over = "*".join(axes) or "none"
                counts.setdefault(dim, {}).setdefault(over, 0)
                counts[dim][over] += 1
    named = [dim for dim in graph.dims.values() if dim.name in counts]
    named.sort(key=lambda dim: set(counts[dim.name]) == {"none"})
    return [{"name": dim.name, "sizes": list(dim.sizes), "over": counts[dim.name]} for dim in named]


def _timeline(step: LoweredStep, cluster: Cluster) -> dict[str, Any]:
    """Return the events as rows: stream, start and length in microseconds, name, 1 for the backward, axes."""
    line, plan = step_timeline(step, cluster), step.plan
    names: dict[str, int] = {}
    rows = []
    for event in line.events:
        task = event.task
        over = f" over {'*'.join(task.axes)}" if task.axes else ""
        name = f"{task.name}: {task.kind}{over}, {task.direction}"
        place = names.setdefault(name, len(names))
        start, length = round(event.start_seconds * 1e6, 2), round(task.seconds * 1e6, 2)
        axes = [list(plan.mesh).index(axis) for axis in task.axes if axis in plan.mesh]
        # Rows of numbers keep the page small: a long step has many events.
        rows.append([line.streams.index(event.stream), start, length, place, int(task.direction != "forward"), axes])
    return {"streams": list(line.streams), "names": list(names), "events": rows, "seconds": line.seconds}


_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Page:
    """HTML page for a notebook or a browser."""

    text: str = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write the page to a file, as in `report.html`."""
        write_text(path, self.text)

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self.text)}" style="width:100%;height:40rem;border:0"></iframe>'


def report(
    plan: PlanRecord, experts: Mapping[str, PlanRecord] | None = None, beside: Mapping[str, PlanRecord] | None = None
) -> Page:
    """Return the page of a plan, compared with other plans for the same model and mesh.

    Parameters:
        experts: published strategies, of which time and memory are shown.
        beside: plans that stand side by side with this one.
    """
    rivals = [
        ComparedPlan(name, one.step_seconds, one.memory_bytes, one.fits, within_noise_of(plan, one))
        for name, one in (experts or {}).items()
    ]
    shown = contents(
        plan.graph,
        plan.decided,
        plan.cluster,
        title=f"{type(plan.graph.model).__name__} on {plan.mesh}",
        memory_bytes=plan.limit_bytes,
        gap=plan.gap,
        claimed=plan.claimed,
        within_layout=plan.within_layout,
        rivals=rivals,
    )
    head, rows = stage_rows(plan)
    shown.update(notes=notes(plan), stages={"head": head, "rows": rows})
    if beside:
        shown["beside"] = _beside(plan, beside)
    return Page(page(shown))


def _beside(plan: PlanRecord, others: Mapping[str, PlanRecord]) -> dict[str, Any]:
    """Return the costs of plans as rows, and for each other plan the tensors that are sharded differently."""
    differing = []
    for name, other in others.items():
        found = differences(plan, other)
        rows = [[tensor, here, there] for tensor, (here, there) in found.items()]
        differing.append({"name": name, "rows": rows, "rest": other_stages(plan, other)})
    return {"rows": cost_rows({"this plan": plan, **others}), "differing": differing}


def page(shown: dict[str, Any]) -> str:
    """Return the text of the page for the data of `contents`."""
    parts = {name: (_HERE / name).read_text(encoding="utf-8") for name in ("page.html", "style.css", "script.js")}
    # No text in the data may end the script element: `</script>` in a name would.
    data = json.dumps(shown, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Template(parts["page.html"]).substitute(
        title=html.escape(str(shown["title"])), style=parts["style.css"], script=parts["script.js"], data=data
    )
