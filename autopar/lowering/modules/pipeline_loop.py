"""Run the micro-batches through the stages of a pipeline: the parts of this stage, in the order of the schedule.

A part sends each value that another stage reads, and receives its gradient. Messages stand in the program of the stage
in an order that all stages share; a receive is posted there, or ahead of it where messages have tags, and waited for
where its value is read. As in the loop without stages, the backward of a micro-batch runs within the forward of the
module where the results that need a gradient are scalar sums.
`orders` gives the tasks of each stage, the same ones that the cost model prices. A stage gathers its parameters and
reduces their gradients beside the tasks (`loop_buckets`). It sends a tied parameter to others before the first
micro-batch, and adds up their gradients after the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.lowering.collectives.stage_messages import (
    Crossing,
    MessageExchange,
    ResultMessage,
    StageGroup,
    StageMessages,
    receive,
    send,
)
from autopar.lowering.modules.gradient_sums import GradientSums
from autopar.lowering.modules.late_weights import LateWeights
from autopar.lowering.modules.loop_buckets import BucketPass, LoopBuckets, with_arrivals
from autopar.lowering.modules.micro_loop import (
    any_rank,
    common_factor,
    expected_gradients,
    first_derivative,
    generator_states,
    remember_gradients,
    restored_generators,
)
from autopar.lowering.modules.pipeline_part import PartResult, PartWays, PipelinePart, TiedInput
from autopar.sharding.options import sum_dtype
from autopar.sharding.schedules import BackwardHalf, Route, StageMessage, StageTask, TaskKind, orders, stage_program

__all__ = ["PipelineLoop"]


class PipelineLoop(nn.Module):
    """Parts of this stage, run once for each micro-batch; all stages return the results of all of them."""

    def __init__(
        self,
        parts: Mapping[int, PipelinePart],
        crossings: Sequence[Crossing],
        count: int,
        results: Sequence[PartResult],
        stages: StageGroup,
        shared: Iterable[int],
        absent: Iterable[int],
        tied: Iterable[TiedInput],
        casts_to_float16: bool,
        late: LateWeights,
    ) -> None:
        super().__init__()
        self.bodies = nn.ModuleDict({str(number): part.body for number, part in parts.items()})
        self.parts = dict(parts)
        self.count = count
        self.results = tuple(results)
        self.stages = stages
        # Places of inputs whose gradients add up over the stages, and of parameters that other stages store.
        self.shared, self.absent = tuple(shared), tuple(absent)
        # In one order on all stages; and the number of those that other stages have.
        self.tied = tuple(tied)
        self.received = sum(one.source != stages.stage for one in self.tied)
        self.casts_to_float16 = casts_to_float16
        # Gradients of weights that the last backward of a part has put off.
        self.late = late
        self.expected: tuple[float, ...] = ()
        self.buckets = LoopBuckets()
        self.everybody: str | None = None
        # Bodies of the first micro-batch, which wait for gathers.
        self.first = {number: part.body for number, part in parts.items()}
        routes = [Route(one.source, target, one.differentiable) for one in crossings for target in one.targets]
        every = orders(len(stages.ranks), count, stages.schedule, stages.chunks, stages.more, halves=True)
        self.program = stage_program(stages.stage, every, routes)
        self.messages = StageMessages(stages, crossings, self.program)
        self.ways = {number: PartWays.of(number, part, self.messages) for number, part in parts.items()}
        made = [(stages.stage_of(one.source), one.joined_shape, one.dtype) for one in self.results]
        self.result_messages = ResultMessage.of(made)

    @property
    def notes(self) -> tuple[str, ...]:
        return self.buckets.notes

    def take_buckets(self, buckets: LoopBuckets) -> None:
        """Gather and reduce these buckets, whose inputs are stored parameters."""
        self.buckets = buckets
        for number, part in self.parts.items():
            places = {place: 1 + own for own, place in enumerate(part.inputs)}
            reads = {one: tuple(places[place] for place in one.places if place in places) for one in buckets.every}
            self.first[number] = with_arrivals(part.body, reads)

    @property
    def needed(self) -> tuple[int, ...]:
        """Places of the results that need a gradient."""
        return tuple(place for place, one in enumerate(self.results) if one.differentiable)

    @property
    def sums(self) -> tuple[int, ...]:
        """Places of the sums that need a gradient: those that the backwards begin at."""
        return tuple(place for place in self.needed if self.results[place].result.kind == "sum")

    @property
    def is_scheduled(self) -> bool:
        """True if each backward may run as soon as the schedule has it."""
        return bool(self.sums) and not any(self.results[place].shape for place in self.sums)

    # A compiler would trace the messages; it compiles what stands before and after.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled() and self.needed:
            found: tuple[Tensor, ...] = _Pipeline.apply(self, *inputs)  # type: ignore[no-untyped-call]
            return found
        given = BucketPass(self.buckets, inputs)
        run = _Run(self, [*given.inputs, *self.received_tied(given)], None, given)
        run.forwards()
        return run.joined(inputs)

    def received_tied(self, given: BucketPass) -> list[Tensor]:
        """Send tied inputs to other stages; return those that other stages have."""
        stages, found = self.stages, list[Tensor]()
        inputs = given.inputs
        sent: list[tuple[Any, Tensor]] = []
        for one in self.tied:
            if one.source == stages.stage:
                given.arrive(one.place)
                x = inputs[one.place].detach().contiguous()
                sent += [(send(x, stages.groups[0], self.messages.places[target]), x) for target in one.targets]
            else:
                x = inputs[0].new_empty(one.shape, dtype=one.dtype)
                receive(x, stages.groups[0], self.messages.places[one.source]).wait()
                found.append(x.requires_grad_(one.differentiable))
        for work, _ in sent:
            work.wait()
        return found

    def extra_repr(self) -> str:
        held = ", ".join(map(str, self.parts))
        return f"{self.stages.schedule}, stage {self.stages.stage} of {len(self.stages.ranks)} with part {held}"


class _Pipeline(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loop: PipelineLoop, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.loop, ctx.generators = loop, generator_states(inputs)
        given = BucketPass(loop.buckets, inputs)
        received = loop.received_tied(given)
        leaves = [*given.leaves(), *received]
        ctx.is_float16 = loop.casts_to_float16 or any(x.dtype == torch.float16 for x in leaves)
        ctx.run = run = _Run(loop, leaves, GradientSums(leaves), given)
        if loop.is_scheduled:
            made = {place: leaves[0].new_empty((), dtype=loop.results[place].dtype) for place in loop.sums}
            ctx.expected = expected = expected_gradients(loop.expected, made, ctx.is_float16)
            run.scheduled(lambda place, number: expected.get(place), is_float16=ctx.is_float16)
        else:
            run.forwards()
        ctx.save_for_backward(*inputs, *received)
        found = run.joined(inputs)
        ctx.mark_non_differentiable(*(x for place, x in enumerate(found) if place not in loop.needed))
        return found

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        loop: PipelineLoop = ctx.loop
        run: _Run = ctx.run
        given = {place: x for place, x in enumerate(gradients) if x is not None and place in loop.needed}

        def of_part(place: int, number: int) -> Tensor | None:
            return loop.results[place].result.gradient(given[place], number) if place in given else None

        if not loop.is_scheduled:
            run.backwards(of_part)
            return (None, *run.gradients())
        factor = common_factor(ctx.expected, given)
        remember_gradients(loop, [given.get(place) for place in ctx.expected], factor is not None, ctx.is_float16)
        assert run.sums is not None, "it recorded gradients"
        overflows = ctx.is_float16 and factor is not None and factor != 1 and not run.sums.are_finite()
        runs_again = factor is None or bool(run.sums.is_used or overflows)
        if not any_rank(runs_again, loop.everybody, gradients) and factor is not None:
            return (None, *run.gradients(factor))
        saved = ctx.saved_tensors
        own = BucketPass(loop.buckets, saved, run.given.is_synchronised)
        leaves = own.leaves()
        again = _Run(loop, leaves, GradientSums(leaves), own)
        with restored_generators(ctx.generators):
            again.scheduled(of_part, is_final=True)
        return (None, *again.gradients())


# Gradient of the part of a result in one micro-batch; None if it has none.
_Upstream = Callable[[int, int], Tensor | None]


@dataclass
class _Alive:
    """Forward of a part that its backward has not used yet."""

    sent: list[Tensor]
    results: list[Tensor]
    received: list[Tensor]


def _is_backward(item: StageTask | StageMessage) -> bool:
    return item.backward if isinstance(item, StageMessage) else item.kind is TaskKind.BACKWARD


class _Run:
    """One pass of all micro-batches through the parts of this stage."""

    def __init__(
        self,
        loop: PipelineLoop,
        leaves: Sequence[Tensor],
        sums: GradientSums | None,
        given: BucketPass | None = None,
    ) -> None:
        self.loop = loop
        self.given = given or BucketPass(LoopBuckets(), ())
        self.leaves = leaves
        self.sums = sums
        self.alive: dict[tuple[int, int], _Alive] = {}
        self.late: dict[tuple[int, int], list[Any]] = {}
        like = leaves[0] if leaves else torch.empty(0)
        self.messages = MessageExchange(loop.messages, like, sums is not None)
        self.values: dict[int, list[Tensor]] = {}

    def scheduled(self, upstream: _Upstream, is_float16: bool = False, is_final: bool = False) -> None:
        assert self.sums is not None, "it records gradients"
        self.given.reduce(self.sums, is_float16, is_final)
        with torch.enable_grad(), self.given.casts.kept():
            for item in self.loop.program:
                self._run(item, upstream)
        self._end()

    def _end(self) -> None:
        self._add_tied()
        self.messages.finish()
        self.given.finish()

    def forwards(self) -> None:
        with torch.set_grad_enabled(self.sums is not None), self.given.casts.kept():
            for item in self.loop.program:
                if not _is_backward(item):
                    self._run(item, lambda place, number: None)
        self.messages.finish()

    def backwards(self, upstream: _Upstream) -> None:
        assert self.sums is not None, "it records gradients"
        self.given.reduce(self.sums, is_final=True)
        with self.given.casts.kept():
            for item in self.loop.program:
                if _is_backward(item):
                    self._run(item, upstream)
        self._end()

    def _run(self, item: StageTask | StageMessage, upstream: _Upstream) -> None:
        if isinstance(item, StageMessage):
            self.messages.exchange(item)
        elif item.kind is TaskKind.FORWARD:
            self._forward(item)
        else:
            with self.given.closing(item):
                if item.half is BackwardHalf.WEIGHTS:
                    self._weight_gradients(item)
                else:
                    self._backward(item, upstream)

    def _forward(self, task: StageTask) -> None:
        loop, messages, number = self.loop, self.messages, task.micro_batch
        here = loop.stages.part_of(task)
        part, ways = loop.parts[here], loop.ways[here]
        records = self.sums is not None
        received = []
        for route, is_differentiable in ways.received:
            x = messages.received(route, number, backward=False)
            received.append(x.requires_grad_() if records and is_differentiable else x)
        body = part.body if number else loop.first[here]
        found = body(number, *[self.leaves[place] for place in part.inputs], *received)
        sent = found[: len(part.sent)]
        results = [
            loop.results[place].result.part(x) for place, x in zip(part.results, found[len(sent) :], strict=True)
        ]
        for (routes, _), x in zip(ways.sent, sent, strict=True):
            for route in routes:
                messages.put(route, number, x.detach(), backward=False)
        for place, x in zip(part.results, results, strict=True):
            self._keep(place, x.detach())
        if records:
            self.alive[here, number] = _Alive(sent, results, received)

    def _keep(self, place: int, x: Tensor) -> None:
        """Add a value to a sum, or keep it to be joined."""
        known = self.values.get(place)
        if known is None:
            self.values[place] = [x.clone() if self.loop.results[place].result.kind == "sum" else x]
        elif self.loop.results[place].result.kind == "sum":
            known[0] += x
        else:
            known.append(x)

    def _backward(self, task: StageTask, upstream: _Upstream) -> None:
        loop, messages, number = self.loop, self.messages, task.micro_batch
        here = loop.stages.part_of(task)
        part, ways, alive = loop.parts[here], loop.ways[here], self.alive.pop((here, number))
        roots: list[Tensor] = []
        gradients: list[Tensor] = []
        for (routes, is_differentiable), x in zip(ways.sent, alive.sent, strict=True):
            if not is_differentiable:
                continue
            first, *others = [messages.received(route, number, backward=True) for route in routes]
            total = sum(others, first)
            if x.requires_grad:
                roots.append(x)
                gradients.append(total)
        for place, x in zip(part.results, alive.results, strict=True):
            gradient = upstream(place, number) if x.requires_grad else None
            if gradient is not None:
                roots.append(x)
                gradients.append(gradient)
        leaves = [x for x in alive.received if x.requires_grad]
        assert self.sums is not None, "it records gradients"
        found = self.sums.add(roots, gradients, others=leaves) if roots else [None] * len(leaves)
        if task.half is BackwardHalf.INPUTS:
            self.late[here, number] = loop.late.take()
        back = (route for route, is_differentiable in ways.received if is_differentiable)
        for route, leaf, gradient in zip(back, leaves, found, strict=True):
            messages.put(route, number, torch.zeros_like(leaf) if gradient is None else gradient, backward=True)

    # The operands have a graph, and their products need none.
    @torch.no_grad()
    def _weight_gradients(self, task: StageTask) -> None:
        assert self.sums is not None, "it records gradients"
        for one in self.late.pop((self.loop.stages.part_of(task), task.micro_batch)):
            for place in one.add(self.sums):
                self.given.added(place)

    def _add_tied(self) -> None:
        """Send the gradients of tied inputs to the stage that has them, and add them up there."""
        stages, places, sums = self.loop.stages, self.loop.messages.places, self.sums
        assert sums is not None, "it records gradients"
        sent: list[tuple[Any, Tensor]] = []
        for one in (one for one in self.loop.tied if one.differentiable):
            if one.source != stages.stage:
                total = sums.take(one.place).contiguous()
                sent.append((send(total, stages.groups[1], places[one.source]), total))
                continue
            for target in one.targets:
                total = self.leaves[one.place].new_empty(one.shape, dtype=sum_dtype(one.dtype))
                receive(total, stages.groups[1], places[target]).wait()
                sums.put(one.place, total)
        for work, _ in sent:
            work.wait()

    # -- results of all stages

    def joined(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the results; the stage that has one sends it to all others."""
        stages = self.loop.stages
        found: dict[int, Tensor] = {}
        for one in self.loop.result_messages:
            mine = [self._joined(place) for place in one.places] if one.source == stages.stage else []
            found.update(zip(one.places, one.share(stages, mine, inputs[0]), strict=True))
        return tuple(found[place] for place in range(len(self.loop.results)))

    def _joined(self, place: int) -> Tensor:
        values, result = self.values.pop(place), self.loop.results[place].result
        return (values[0] if result.kind == "sum" else result.join(values)).contiguous()

    def gradients(self, factor: Tensor | None = None) -> list[Tensor | None]:
        """Return the gradients of the inputs of this stage; those of shared ones add up over the stages."""
        sums = self.sums
        assert sums is not None, "it records gradients"
        for place in self.loop.shared:
            if self.leaves[place].requires_grad:
                total = sums.total(place).contiguous().clone()
                dist.all_reduce(total, group=self.loop.stages.groups[0])
                sums.replace(place, total)
        found = sums.found(factor)
        for place in self.loop.absent:
            if self.leaves[place].requires_grad:
                found[place] = torch.zeros_like(self.leaves[place])
        return self.given.handed(found, factor)[: len(self.leaves) - self.loop.received]
