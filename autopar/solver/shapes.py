"""Search of mesh shapes: stages, ranks that split the batch, the experts or the model, and micro-batches.

A shape is `pp` stages of `dp` times `tp` ranks, with a number of micro-batches. Models with routed rows have shapes of
`dp` times `ep` ranks besides: all of them split the batch, and those along `ep` the experts. Models with a folded
sequence have shapes whose ranks along `cp` split it. All shapes of a number of devices are candidates. Each is first
priced at the least it may take: equal work on all ranks, and the waiting time of the best schedule. In this order a
shape gets plans of its short graph (`split_plans.py`), and from their costs its best stages. Of the numbers of ranks
for the experts the first and the best one get plans of their own. Halves hide what they send, so shapes in halves that
are the best so far get plans of their own besides. The search ends where no shape can be faster than the best one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TypeVar

import numpy as np

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.network import Network
from autopar.cost.unequal_devices import with_slowest_links
from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.ir.short_graph import ShortGraph, shorten
from autopar.mesh import SubMesh
from autopar.sharding.assignment import StepPlan
from autopar.sharding.layout.syntax import MicroBatches, Recompute
from autopar.sharding.options import TrainingOptions
from autopar.sharding.reshard.reshard import NoSteps
from autopar.sharding.time_slice import slice_in_time
from autopar.solver import Floats
from autopar.solver.infeasible import NoFeasiblePlan
from autopar.solver.mesh_shape import Shape, Split, divisors
from autopar.solver.segments import STAGES, ModelCosts, model_costs, on_axes, segments_of, stages_of
from autopar.solver.setting import PlanningProblem
from autopar.solver.shape_space import ShapeSpace
from autopar.solver.short_plans import BATCH, DATA
from autopar.solver.split_plans import SplitPlans
from autopar.solver.stage_design import SCHEDULES, ScheduleChoice, StageDesign, design_stages, least_seconds

__all__ = ["PricedShape", "ShapeSearch"]

# Shapes within this factor of the best one are followed by a search of their own, and at most so many.
NEARLY, MOST_FOLLOWED = 1.03, 2
# Costs of shapes that were not priced are at least this share of what others leave to them: times on more model ranks,
# times and bytes on more rows.
SLACK = 0.97

Size = TypeVar("Size", int, Split)
_Key = tuple[Split, int, bool, bool, bool, int]


@dataclass(frozen=True)
class PricedShape:
    """Shape with the best stages that were found."""

    shape: Shape
    costs: ModelCosts
    design: StageDesign
    # Under a plan that was made for halves.
    for_halves: bool = False

    @property
    def seconds(self) -> float:
        return self.design.seconds


@dataclass
class ShapeSearch:
    """Search of all shapes of a number of devices."""

    graph: NamedGraph
    short: ShortGraph
    cluster: Cluster
    options: TrainingOptions
    devices: int
    limit: float
    deadline: float
    found: list[PricedShape] = field(default_factory=list)
    # Costs on the ranks that were priced last, by split, rows, whether there are micro-batches, halves and plans for
    # halves, and plan.
    known: dict[_Key, ModelCosts] = field(default_factory=dict)
    # Those without recomputation, also where recomputation takes too long.
    plain: dict[_Key, ModelCosts] = field(default_factory=dict)
    # Seconds of one micro-batch in all segments, by split and rows.
    layer_seconds: dict[tuple[Split, int, bool], float] = field(default_factory=dict)
    # No shape but the first is priced after this time, also if none fits.
    gives_up: float = math.inf
    tried: int = 0

    @staticmethod
    def of(
        graph: NamedGraph, cluster: Cluster, options: TrainingOptions, devices: int, limit: float, deadline: float
    ) -> ShapeSearch | None:
        """Return the search; None for a model whose layers or batch cannot be split in time."""
        short = shorten(graph) if graph.exported.grad_enabled and options.micro_batches == 1 else None
        if short is None or BATCH not in graph.dims or graph.dims[BATCH].size < 2:
            return None
        found = ShapeSearch(graph, short, cluster, options, devices, limit, deadline)
        try:
            found.segments()
        except LayoutError:  # such as a loss over pairs of samples
            return None
        return found

    @cached_property
    def space(self) -> ShapeSpace:
        """All shapes."""
        return ShapeSpace(self.graph, self.options.precision, self.devices, self.limit, self.layers)

    @cached_property
    def plans(self) -> SplitPlans:
        """Plans of the short graph."""
        return SplitPlans(self.short, self.cluster, self.options, self.space)

    def segments(self) -> None:
        """Raise unless segments of the model may be stages."""
        every = segments_of(self.short.graph, self.some_micro)
        stages_of(self.short, self.some_micro, SubMesh({DATA: self.devices}), every)

    @property
    def best(self) -> float:
        return min((one.seconds for one in self.found), default=math.inf)

    @property
    def fastest(self) -> PricedShape:
        """The best shape so far, where there is one."""
        return min(self.found, key=lambda one: one.seconds)

    def run(self) -> list[PricedShape]:
        """Return the shapes that have plans, fastest first."""
        by_split: dict[Split, list[Shape]] = {}
        for shape in self.space:
            by_split.setdefault(shape.split, []).append(shape)
        # Experts first: what such shapes send grows least with the ranks.
        self._price_splits({split: every for split, every in by_split.items() if split.expert > 1})
        others = {split: every for split, every in by_split.items() if split.expert == 1}
        contexts = sorted({split.context for split in others})
        node = self.cluster.ranks_together(self.devices)
        # The fewest ranks for a sequence with which there is a micro-batch for each stage.
        least = self.devices / node / self.graph.dims[BATCH].size
        near = next((one for one in contexts if one >= least), max(contexts, default=1))
        for context in self._rising(contexts, near):
            # Beside other ranks for a sequence, the number for the model stays that of the best shape.
            model = self.fastest.shape.model if context != near and self.found else None
            splits = (one for one in others if one.context == context and model in (None, one.model))
            self._price_splits({split: others[split] for split in splits})
        return sorted(self.found, key=lambda one: one.seconds)

    def _price_splits(self, by_split: Mapping[Split, Sequence[Shape]]) -> None:
        """Price shapes of some splits, those first that fill a node."""
        node = self.cluster.ranks_together(self.devices)
        near = min(by_split, key=lambda split: abs(math.log(split.model * split.expert / node)), default=Split(1))
        for split in self._rising(by_split, near):
            self._price_split(split, by_split[split])
        while self.found and (best := self.fastest.shape).split in self.plans.lent:
            self._search_again(best)
            self._price_split(best.split, by_split[best.split])

    def _price_split(self, split: Split, shapes: Sequence[Shape]) -> None:
        self._price_all(shapes)
        if prod(split) == 1:
            return  # no activations are sent
        halved, before = self._in_halves(shapes), self.best
        self._price_all(halved)
        if self.best < before and split.expert == 1:
            self._price_all(halved, self.plans.for_halves(self.fastest.shape))

    def _search_again(self, shape: Shape) -> None:
        """Search plans of a split that has lent ones; forget what these cost."""
        split = shape.split
        self.plans.search_again(shape)
        self.known = {key: costs for key, costs in self.known.items() if key[0] != split}
        self.plain = {key: costs for key, costs in self.plain.items() if key[0] != split}
        self.layer_seconds = {key: seconds for key, seconds in self.layer_seconds.items() if key[0] != split}

    def _in_halves(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return shapes in halves like the best of these, or like the first of them where none was the best."""
        own = [one for one in self.found if one.shape in shapes]
        best = min((one.seconds for one in own), default=math.inf)
        like = [one.shape for one in own if one.seconds <= NEARLY * best] or self._in_order(shapes)[:1]
        return list(dict.fromkeys(halved for shape in like for halved in shape.in_halves()))

    def _rising(self, every: Iterable[Size], near: Size) -> Iterator[Size]:
        """Yield larger values from one on, then smaller ones, each until the step takes longer."""
        for ladder in (
            sorted(one for one in every if one >= near),
            sorted((one for one in every if one < near), reverse=True),
        ):
            for one in ladder:
                before = self.best
                yield one
                if one != near and self.best >= before and self.found:
                    break

    def promising(self) -> list[PricedShape]:
        """Return the best shape, and others that are nearly as fast; each mesh once, with its best micro-batches.

        A mesh without stages, which is searched by itself, is there with and without halves. One with stages is there
        under a plan that was made for halves, and under another one.
        """
        found: dict[tuple[tuple[tuple[str, int], ...], bool], PricedShape] = {}
        meshes: set[tuple[tuple[str, int], ...]] = set()
        for one in self.run():
            mesh, shape = tuple(one.shape.mesh.items()), one.shape
            if one.seconds <= NEARLY * self.best and (mesh in meshes or len(meshes) < MOST_FOLLOWED):
                meshes.add(mesh)
                found.setdefault((mesh, shape.halves if shape.stages == 1 else one.for_halves), one)
        return list(found.values())

    def alone(self) -> list[Shape]:
        """Return the shapes of one stage and whole batches whose parameters fit, those that fill a node first."""
        node = self.cluster.ranks_together(self.devices)
        every = [one for one in self.space if one.stages == one.count == one.context == 1]
        fitting = [one for one in every if self.space.stages_for(one.split) == 1]
        return sorted(fitting, key=lambda one: abs(math.log(one.model * one.expert / node)))

    def _price_all(self, shapes: Sequence[Shape], for_halves: Sequence[StepPlan] | None = None) -> None:
        """Price the shapes of as many model ranks that may be the best, with the plans of `price`."""
        for shape in self._in_order(shapes):
            now = time.monotonic()
            is_late = (now > self.deadline and bool(self.found)) or (now > self.gives_up and self.tried > 0)
            if not is_late and max(self._least_seconds(shape), self._likely_seconds(shape)) < self.best:
                self.price(shape, for_halves)

    def _in_order(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return shapes with as few stages as memory allows first: they rule most others out."""

        def order(shape: Shape) -> tuple[float, float]:
            return abs(math.log2(shape.stages / self.space.stages_for(shape.split))), self._least_seconds(shape)

        return sorted(shapes, key=order)

    def _least_seconds(self, shape: Shape) -> float:
        return least_seconds(self.ideal_seconds, shape.stages, shape.count, self.layers)

    @property
    def layers(self) -> int:
        """Number of segments that a stage may begin with: no fewer than there are layers."""
        return len(self.short.layers) + 1

    @property
    def some_micro(self) -> MicroBatches:
        batch = self.graph.dims[BATCH].size
        return MicroBatches(next(count for count in range(2, batch + 1) if batch % count == 0), BATCH)

    @cached_property
    def ideal_seconds(self) -> float:
        """Return the time of the whole model's ops on one rank with the whole batch, split equally over all.

        Ops of fewer rows take no less time for each row.
        """
        return self._seconds_of(self.short.graph)

    @cached_property
    def row_factor(self) -> float:
        """Return how many times as long a row takes by itself as in the whole batch: launches of short ops."""
        batch = self.graph.dims[BATCH].size
        sliced = slice_in_time(self.short.graph, MicroBatches(batch, BATCH))
        return batch * self._seconds_of(sliced, batch) / self.ideal_seconds

    def _seconds_of(self, graph: NamedGraph, micro_batches: int = 1) -> float:
        options = replace(self.options, micro_batches=micro_batches)
        setting, total = PlanningProblem.of(graph, SubMesh({}), self.cluster, options), 0.0
        for path, ops in segments_of(self.short.graph, self.some_micro):
            total += self.short.counts.get(path, 1) * sum(setting.whole_seconds[op] for op in ops)
        return total / self.devices

    @cached_property
    def _modes(self) -> tuple[Recompute, ...]:
        """Return the recompute modes that layers may have."""
        setting = PlanningProblem.of(self.short.graph, SubMesh({DATA: self.devices}), self.cluster, self.options)
        limit = self.cluster.device.host_memory_bytes
        # All micro-batches of a stage may be on its hosts at once.
        layers = self.short.graph.ops_of_layers
        moved = sum(self.short.counts.get(path, 1) * setting.movable_bytes(ops) for path, ops in layers.items())
        exceeds = limit is not None and moved / self.devices > limit
        return setting.modes[:3] if exceeds else setting.modes

    def _likely_seconds(self, shape: Shape) -> float:
        """Return the least time that the layers' times on fewer model ranks, of as many rows, leave to a shape."""
        least = 0.0
        own = shape.split
        for (split, rows, halves), every in self.layer_seconds.items():
            is_less = (
                halves == shape.halves
                and split.model <= own.model
                and split.expert == own.expert
                and split.context <= own.context
            )
            if rows >= shape.rows and is_less:
                each = every * shape.rows / rows * prod(split) / prod(own)
                work = shape.count * each / shape.stages
                least = max(least, least_seconds(work, shape.stages, shape.count, self.layers))
        return SLACK * least

    # -- one shape

    def price(self, shape: Shape, for_halves: Sequence[StepPlan] | None = None) -> None:
        """Find the best stages of a shape, under the plans of its split or under plans that were made for halves."""
        self.tried += 1
        try:
            plans = self.plans.of(shape) if for_halves is None else for_halves
        except (LayoutError, NoFeasiblePlan):
            return  # the model has no such split
        for number, plan in enumerate(plans):
            try:
                if self._price_plan(shape, plan, number, for_halves is not None):
                    return
            except NoSteps:
                continue  # it splits groups of rows over the batch's ranks, of which this shape has more than groups

    def _price_plan(self, shape: Shape, plan: StepPlan, number: int, for_halves: bool) -> bool:
        """Find the best stages of a shape under a plan; return True if plans of less memory are slower."""
        key = shape.split, shape.rows, shape.micro is not None, shape.halves, for_halves, number
        known = self.known.get(key)
        # The costs on other ranks that split the batch tell about what these would be.
        if known is not None and self._best_design(shape, known) is None:
            return False
        fewer = self._from_fewer_rows(shape, number, for_halves)
        if fewer is not None and self._best_design(shape, fewer) is None:
            return False
        alone = None
        if known is None:
            near = self.plain.get(key)
            if near is not None and self._is_too_long(near, shape, SLACK):
                return True
            alone = self.plain[key] = self._costs(shape, plan, self._modes[:1])
            if self._is_too_long(alone, shape):
                return True  # recomputation takes longer
            best = self._best_design(shape, alone) if shape.stages == 1 else None
            if best is not None:
                self.found.append(PricedShape(shape, alone, best, for_halves))
                return True
        costs = self.known[key] = self._costs(shape, plan, self._modes, known, alone)
        best = self._best_design(shape, costs)
        if best is None:
            return False
        self.found.append(PricedShape(shape, costs, best, for_halves))
        return not any(best.modes)

    def _is_too_long(self, costs: ModelCosts, shape: Shape, share: float = 1.0) -> bool:
        return all(share * self._least(costs, shape, choice) >= self.best for choice in _schedules(shape))

    def _from_fewer_rows(self, shape: Shape, number: int, for_halves: bool) -> ModelCosts | None:
        """Return the least costs that those of a plan on fewer rows leave to a shape; None where none are known.

        Saved bytes grow with the rows. Each row more takes as long as the last ones that were priced.
        """
        keys = ((shape.split, rows, True, shape.halves, for_halves, number) for rows in divisors(shape.rows)[:-1])
        before = [(key[1], self.known[key]) for key in keys if key in self.known]
        if not before:
            return None
        rows, costs = before[-1]
        fewer, others = before[-2] if len(before) > 1 else before[-1]
        share = (shape.rows - rows) / (rows - fewer) if rows > fewer else 0.0
        return costs.on_more_rows(shape.rows / rows, others, share, SLACK)

    def _best_design(self, shape: Shape, costs: ModelCosts) -> StageDesign | None:
        sends, best = self.sends(costs, shape), None
        for choice in _schedules(shape):
            if self._least(costs, shape, choice) >= min(self.best, math.inf if best is None else best.seconds):
                continue
            limits = [self.limit] * shape.stages
            beat = min(self.best, math.inf if best is None else best.seconds)
            made = design_stages(costs, self.cluster, shape.stages, shape.count, choice, limits, sends, beat)
            if made is not None and (best is None or made.seconds < best.seconds):
                best = made
        return best

    def _least(self, costs: ModelCosts, shape: Shape, choice: ScheduleChoice) -> float:
        _, chunks, _ = choice
        each = float(costs.seconds[0].sum()) / shape.stages
        fill = 2 if choice[0] == "zero_bubble" else chunks
        return each * (shape.count + (shape.stages - 1) / fill)

    def sends(self, costs: ModelCosts, shape: Shape) -> Floats:
        """Return the seconds of the values behind each segment."""
        sent = costs.column("sent_bytes")[0]
        if shape.stages == 1:
            return np.zeros(len(sent))
        mesh, links = SubMesh(shape.mesh), self.options.links
        network = Network(with_slowest_links(self.cluster, mesh, links), mesh, links)
        by_size = {size: network.seconds("send", (STAGES,), size) if size else 0.0 for size in set(sent.tolist())}
        return np.array([by_size[size] for size in sent.tolist()])

    def _costs(
        self,
        shape: Shape,
        plan: StepPlan,
        modes: Sequence[Recompute],
        known: ModelCosts | None = None,
        begun: ModelCosts | None = None,
    ) -> ModelCosts:
        """Return the costs of the segments under a plan of the short graph, given those on other ranks or none, and
        those of the first modes or none.
        """
        like = known and (known.like or known)
        plan = on_axes(plan, shape.axes, shape.micro)
        found = model_costs(self.short, plan, self.cluster, self.some_micro, modes, like, begun)
        key, seconds = (shape.split, shape.rows, shape.halves), float(found.seconds[0].sum())
        self.layer_seconds[key] = min(self.layer_seconds.get(key, math.inf), seconds)
        return found


def _schedules(shape: Shape) -> Sequence[ScheduleChoice]:
    return SCHEDULES if shape.stages > 1 else SCHEDULES[:1]
