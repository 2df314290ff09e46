"""Random small problems for the planner: a model of a few ops, a cluster, a layout, and what else is settled."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

import autopar
from autopar.cost.hardware.cluster import Cluster, load_cluster
from autopar.ir.graph import NamedGraph
from autopar.mesh import SubMesh
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout, parse_layout
from autopar.sharding.options import TrainingOptions
from autopar.solver.setting import PlanningProblem
from autopar.solver.solve import SolvedPlan, solve_plan

__all__ = ["Drawn", "drawn", "program"]

H100 = load_cluster("h100")

SIZES = (32, 64, 96)

BODIES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, w: x @ w,
    "active": lambda x, w: (x @ w).tanh(),
    "scaled": lambda x, w: x * w[0],
    "residual": lambda x, w: x + x * w[0],
    "gated": lambda x, w: (x * w[0]) * x.sigmoid(),
}
SHORT = ("product", "product", "scaled")
"""Of one op, or of two: with several layers there are few enough assignments to list them."""
ENDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "square": lambda x: x.square().sum(),
    "as it is": lambda x: x,
}


class Layer(nn.Module):
    """What one parameter does to a value."""

    def __init__(self, body: str, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width, device="meta"))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return BODIES[self.body](x, self.weight)


class Small(nn.Module):
    """A few layers, of which two may have one parameter, or be equal and follow each other."""

    def __init__(self, bodies: list[str], width: int, end: str, tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(body, width) for body in bodies)
        if tied:
            for layer in self.layers:
                layer.weight = self.layers[0].weight
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return ENDS[self.end](x)


@dataclass(frozen=True)
class Drawn:
    """One problem."""

    graph: NamedGraph
    axes: Mapping[str, int]
    cluster: Cluster
    layout: Layout
    options: TrainingOptions

    @property
    def setting(self) -> PlanningProblem:
        return PlanningProblem.of(self.graph, SubMesh.of(self.axes), self.cluster, self.options)

    @property
    def bound_layout(self) -> BoundLayout:
        return BoundLayout(self.graph, self.layout, self.axes)

    def solved(self, limit_bytes: float = float("inf")) -> SolvedPlan:
        return solve_plan(
            self.graph,
            self.axes,
            self.cluster,
            layout=self.layout,
            options=self.options,
            memory_bytes=limit_bytes,
            strategies=False,
            time_limit=600,
        )


def random_cluster(draw: random.Random) -> Cluster:
    """Faster or slower in all that counts, so that now the one and now the other is best."""
    device = replace(H100.device, launch_seconds=H100.device.launch_seconds * 10 ** draw.uniform(-4, 0))
    device = replace(device, host_seconds=device.host_seconds * 10 ** draw.uniform(-6, 0))
    library = replace(H100.library, overlap_fraction=draw.choice([0.0, 0.3, 1.0]))
    algorithms = tuple(
        replace(one, base_seconds=one.base_seconds * 10 ** draw.uniform(-5, 0), hop_seconds={})
        for one in library.algorithm
    )
    return replace(H100, device=device, library=replace(library, algorithm=algorithms))


@cache
def program(seed: int, most_layers: int) -> NamedGraph:
    """A model of one layer, or of a few, traced."""
    draw = random.Random(seed)
    count = draw.randint(1, most_layers)
    body = draw.choice(list(BODIES) if count == 1 else SHORT)
    bodies = [body if draw.random() < 0.7 else draw.choice(SHORT) for _ in range(count)]
    width, rows = draw.choice(SIZES), draw.choice((16, 128, 1024))
    end = draw.choice(list(ENDS)) if count == 1 else draw.choice(("as it is", "as it is", "square"))
    model = Small(bodies, width, end, tied=draw.random() < 0.3)
    return autopar.trace(model, (torch.empty(rows, width, device="meta"),))


def drawn(graph: NamedGraph, axes: Mapping[str, int], draw: random.Random, lines: int = 2) -> Drawn:
    """`lines`: the most that the layout says."""
    options = TrainingOptions(
        micro_batches=draw.choice([1, 1, 3]),
        optimizer=draw.choice(["sgd", "adamw"]),
        compiled=draw.random() < 0.3,
        outputs=draw.choice(["sharded", "sharded", "full"]),
    )
    return Drawn(graph, axes, random_cluster(draw), _layout(draw, graph, axes, lines), options)


def _layout(draw: random.Random, graph: NamedGraph, axes: Mapping[str, int], most: int) -> Layout:
    """Lines about some dims; what they do not say is open."""
    names, places = sorted(graph.dims), [*axes, "none", "*".join(axes)]
    lines: dict[str, str] = {}
    for number in range(draw.randint(most // 3, most)):
        kind = draw.choice(["param", "use", "act", "input"] if number < 2 else ["use", "act", "input", ""])
        name = draw.choice(names)
        place = draw.choice(places)
        rule = f"{name} -> none" if place == "none" else f"{name} -> {place} | none !{number}"
        lines[f"{kind} {name}"] = f"{kind} {{ {rule} }}" if kind else rule
    return parse_layout("\n".join(lines.values())) if lines else Layout(())
