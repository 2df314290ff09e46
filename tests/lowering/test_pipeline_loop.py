"""Messages of the stages of a pipeline: no stages wait for one another, even if each send waits for its receive."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.lowering.collectives import stage_messages
from autopar.lowering.collectives.stage_messages import Crossing, MessageExchange, ResultMessage, StageGroup
from autopar.lowering.modules.gradient_sums import GradientSums, leaves_of
from autopar.lowering.modules.late_weights import LateWeights
from autopar.lowering.modules.micro_loop import LoopResult
from autopar.lowering.modules.pipeline_loop import PipelineLoop, _Run
from autopar.lowering.modules.pipeline_part import PartResult, PipelinePart
from autopar.sharding.schedules import Route, Schedule, StageMessage, TaskKind, orders, stage_program

# One message: whether it is sent, the other stage, and its tag.
Action = tuple[bool, int, int]
# A message with its tag: "send", "post" of its receive, or "wait" for it.
TaggedAction = tuple[str, int]

SCHEDULES: list[tuple[Schedule, int, int]] = [
    ("gpipe", 1, 0),
    ("1f1b", 1, 0),
    ("1f1b", 1, 2),
    ("interleaved", 2, 0),
    ("interleaved", 3, 0),
    ("zero_bubble", 1, 0),
]


class Body(nn.Module):
    """Part that makes values of all that it reads."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, number: int, weight: Tensor, *received: Tensor) -> tuple[Tensor, ...]:
        x = weight * (number + sum(one.sum() for one in received))
        return tuple(x + place for place in range(self.count))


def crossings_of(draw: random.Random, parts: int) -> list[Crossing]:
    """A value into each part from the one before, some that skip parts, and some without a gradient."""
    routes: list[tuple[int, tuple[int, ...]]] = [(part, (part + 1,)) for part in range(parts - 1)]
    for _ in range(draw.randrange(4) if parts > 2 else 0):
        source = draw.randrange(parts - 1)
        later = range(source + 1, parts)
        routes.append((source, tuple(sorted(draw.sample(later, draw.randint(1, min(3, len(later))))))))
    draw.shuffle(routes)
    return [
        Crossing(f"x{number}", source, targets, (2,), torch.float32, number % 5 != 4)
        for number, (source, targets) in enumerate(routes)
    ]


def loop_of(
    stage: int,
    stages: int,
    count: int,
    schedule: tuple[Schedule, int, int],
    crossings: Sequence[Crossing],
    by_tag: bool = False,
) -> PipelineLoop:
    name, chunks, more = schedule
    groups: Any = ("values", "gradients")
    parts = {}
    for part in range(stage, stages * chunks, stages):
        received = tuple(one for one in crossings if part in one.targets)
        sent = tuple(one for one in crossings if one.source == part)
        is_last = part == stages * chunks - 1
        body: Any = Body(len(sent) + is_last)
        parts[part] = PipelinePart(body, (0,), received, sent, (0,) if is_last else ())
    result = PartResult(LoopResult("sum"), stages * chunks - 1, (), torch.float32, True)
    at = StageGroup(groups, tuple(range(stages)), stage, name, chunks, more, by_tag)
    with mock.patch.object(dist, "get_group_rank", lambda group, rank: rank):
        return PipelineLoop(parts, crossings, count, [result], at, (), (), (), False, LateWeights())


class Done:
    """StageMessage that has arrived; notes that a stage waits for it."""

    def __init__(self, waits: list[TaggedAction], tag: int | None = None) -> None:
        self.waits, self.tag = waits, tag

    def wait(self) -> None:
        if self.tag is not None:
            self.waits.append(("wait", self.tag))


def recorded(
    loop: PipelineLoop, patch: pytest.MonkeyPatch, run: Callable[[_Run], None]
) -> tuple[list[Action], list[TaggedAction]]:
    """The messages of the executor of one stage, in the order in which it posts them, and the same with its waits.

    Those received are ones.
    """
    found: list[Action] = []
    tagged: list[TaggedAction] = []

    def send(x: Tensor, group: Any, to: int, tag: int) -> Done:
        assert group == loop.stages.groups[tag // loop.count % 2], "gradients have a group of their own"
        found.append((True, to, tag))
        tagged.append(("send", tag))
        return Done(tagged)

    def receive(x: Tensor, group: Any, source: int, tag: int) -> Done:
        assert group == loop.stages.groups[tag // loop.count % 2], "gradients have a group of their own"
        found.append((False, source, tag))
        tagged.append(("post", tag))
        x.fill_(1.0)
        return Done(tagged, tag)

    with patch.context() as during:
        during.setattr(stage_messages, "send", send)
        during.setattr(stage_messages, "receive", receive)
        leaves = leaves_of([torch.ones(2, requires_grad=True)])
        run(_Run(loop, leaves, GradientSums(leaves)))
    return found, tagged


def scheduled(run: _Run) -> None:
    run.scheduled(lambda place, number: torch.ones(2))
    assert not run.alive
    assert not run.late
    assert not run.messages.made
    assert not run.messages.coming


def forwards_first(run: _Run) -> None:
    """All forwards, then all backwards, as for a model without a loss."""
    run.forwards()
    run.backwards(lambda place, number: torch.ones(2))


def stuck(programs: Sequence[Sequence[Action]]) -> list[int]:
    """The stages that wait forever, where each message blocks both its ends until it is the next one of both."""
    place = [0] * len(programs)

    def following(stage: int) -> Action | None:
        return programs[stage][place[stage]] if place[stage] < len(programs[stage]) else None

    waiting = list(range(len(programs)))
    while waiting:
        stage = waiting.pop()
        while (own := following(stage)) is not None:
            is_sent, other, tag = own
            if following(other) != (not is_sent, stage, tag):
                break
            place[stage] += 1
            place[other] += 1
            waiting.append(other)
    return [stage for stage in range(len(programs)) if following(stage) is not None]


def stuck_with_tags(programs: Sequence[Sequence[TaggedAction]]) -> list[int]:
    """The stages that wait forever, where a send blocks until its receive is posted, and a wait until it is sent."""
    place, done = [0] * len(programs), set[TaggedAction]()
    needed = {"send": "post", "wait": "send"}
    moves = True
    while moves:
        moves = False
        for stage, program in enumerate(programs):
            while place[stage] < len(program):
                kind, tag = program[place[stage]]
                if kind in needed and (needed[kind], tag) not in done:
                    break
                done.add((kind, tag))
                place[stage] += 1
                moves = True
    return [stage for stage, program in enumerate(programs) if place[stage] < len(program)]


def drawn(seed: int) -> Iterator[tuple[int, int, tuple[Schedule, int, int], list[Crossing]]]:
    """A program for each schedule."""
    draw = random.Random(seed)
    for schedule in SCHEDULES:
        stages, count = draw.randint(1, 8), draw.randint(1, 32)
        count = -(-count // stages) * stages if schedule[1] > 1 else count
        yield stages, count, schedule, crossings_of(draw, stages * schedule[1])


@pytest.mark.parametrize("run", [scheduled, forwards_first])
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 60), marks=pytest.mark.slow)])
def test_blocking_sends_never_wait_in_a_circle(
    seeds: range, run: Callable[[_Run], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random programs of the executor itself: 1 to 8 stages, 1 to 32 micro-batches, values that skip stages."""
    for seed in seeds:
        for stages, count, schedule, crossings in drawn(seed):
            loops = [loop_of(stage, stages, count, schedule, crossings) for stage in range(stages)]
            programs = [recorded(loop, monkeypatch, run)[0] for loop in loops]
            assert not stuck(programs), (seed, stages, count, schedule)
            remote = [(one, target) for one in crossings for target in one.targets if (one.source - target) % stages]
            assert sum(map(len, programs)) == 2 * count * sum(1 + one.differentiable for one, _ in remote)


@pytest.mark.parametrize("run", [scheduled, forwards_first])
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 16), marks=pytest.mark.slow)])
@pytest.mark.parametrize("most", [1, stage_messages.BYTES_AHEAD])
def test_receives_ahead_of_the_program_end_too(
    seeds: range, most: int, run: Callable[[_Run], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where tags match messages: of the next micro-batch, or of all; sends block until their receives are posted."""
    monkeypatch.setattr(stage_messages, "BYTES_AHEAD", most)
    for seed in seeds:
        for stages, count, schedule, crossings in drawn(seed):
            loops = [loop_of(stage, stages, count, schedule, crossings, by_tag=True) for stage in range(stages)]
            programs = [recorded(loop, monkeypatch, run)[1] for loop in loops]
            assert not stuck_with_tags(programs), (seed, stages, count, schedule)
            if most > 1:
                continue
            for stage, loop in enumerate(loops):
                strict = recorded(loop_of(stage, stages, count, schedule, crossings), monkeypatch, run)[1]
                ways = len({(one.message.route, one.message.backward) for one in loop.messages.envelopes.values()})
                assert most_coming(programs[stage]) <= most_coming(strict) + ways


def most_coming(program: Sequence[TaggedAction]) -> int:
    """The most receives that are posted and not waited for."""
    return max(accumulate({"post": 1, "wait": -1, "send": 0}[kind] for kind, _ in program), default=0)


def test_a_send_without_a_receive_is_stuck() -> None:
    """What the simulation must find: a stage that waits for a value before it posts the receive of its gradient."""
    assert stuck_with_tags([[("send", 0), ("wait", 1)], [("post", 0), ("wait", 0), ("send", 1)]]) == [0, 1]
    assert not stuck_with_tags([[("send", 0), ("post", 1), ("wait", 1)], [("post", 0), ("wait", 0), ("send", 1)]])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_few_sends_are_under_way(schedule: tuple[Schedule, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that waits for its gradient is alive anyway; of all others two are, whatever their number."""
    stages, count, exchange = 3, 24, MessageExchange.exchange
    crossings = [
        Crossing(f"x{part}", part, (part + 1,), (2,), torch.float32, True) for part in range(3 * schedule[1] - 1)
    ]
    crossings.append(Crossing("mask", 0, (2,), (2,), torch.float32, False))
    for stage in range(stages):
        most = [0, 0]

        def exchanged(one: MessageExchange, message: StageMessage, most: list[int] = most) -> None:
            exchange(one, message)
            in_flight = len({number for _, number in one.answered})
            most[0] = max(most[0], in_flight)
            most[1] = max(most[1], *(len(found) for found in one.sending.values()), 0)

        with monkeypatch.context() as during:
            during.setattr(MessageExchange, "exchange", exchanged)
            recorded(loop_of(stage, stages, count, schedule, crossings), during, scheduled)
        plan = orders(stages, count, *schedule)[stage]
        flight = [1 if task.kind is TaskKind.FORWARD else -1 for task in plan]
        assert most[0] <= max(accumulate(flight))
        assert most[1] <= 2


def test_small_results_of_a_stage_travel_together() -> None:
    results = [(1, (), torch.float32), (1, (), torch.int64), (0, (3,), torch.bool), (1, (64, 64), torch.float32)]
    found = ResultMessage.of(results)
    assert [(one.source, one.places) for one in found] == [(1, (1, 0)), (0, (2,)), (1, (3,))]
    values = {0: torch.tensor(0.1), 1: torch.tensor(-(2**40)), 2: torch.tensor([True, False, True])}
    values[3] = torch.randn(64, 64)
    wire: list[Tensor] = []

    def broadcast(x: Tensor, source: int, group: Any) -> None:
        if stage == source:
            wire.append(x.clone())
        else:
            x.copy_(wire[-1])

    groups: Any = ("values", "gradients")
    with mock.patch.object(dist, "broadcast", broadcast):
        for one in found:
            for stage in (one.source, 1 - one.source):
                at = StageGroup(groups, (0, 1), stage, "1f1b", 1, 0)
                mine = [values[place] for place in one.places] if stage == one.source else []
                for place, x in zip(one.places, one.share(at, mine, torch.empty(0)), strict=True):
                    assert x.dtype == values[place].dtype
                    assert torch.equal(x, values[place])
    assert len(wire) == 3


def test_messages_in_the_order_of_the_tasks_would_wait_in_a_circle() -> None:
    """Each stage sends right after a task and receives right before one: the order of `1f1b` until now."""
    programs: list[list[Action]] = []
    for stage in range(2):
        sent: list[Action] = []
        for task in orders(2, 4, "1f1b")[stage]:
            is_forward = task.kind.value == "forward"
            sent.append((is_forward == (stage == 0), 1 - stage, 2 * task.micro_batch + (not is_forward)))
        programs.append(sent)
    assert stuck(programs) == [0, 1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_program_of_a_chain_ends(schedule: tuple[Schedule, int, int]) -> None:
    """All sizes, with a value into each part from the one before."""
    name, chunks, more = schedule
    for stages, count in product(range(1, 9), (1, 2, 3, 5, 8, 13, 24, 32)):
        if chunks > 1 and count % stages:
            continue
        plan = orders(stages, count, name, chunks, more, halves=True)
        routes = [Route(part, part + 1, True) for part in range(stages * chunks - 1)]
        programs = []
        for stage in range(stages):
            items = stage_program(stage, plan, routes)
            assert tuple(item for item in items if not isinstance(item, StageMessage)) == plan[stage]
            messages = [item for item in items if isinstance(item, StageMessage)]
            found: list[Action] = []
            for one in messages:
                ends = [part % stages for part in routes[one.route][:2]]
                sender, reader = reversed(ends) if one.backward else ends
                tag = (2 * one.route + one.backward) * count + one.micro_batch
                found.append((sender == stage, reader if sender == stage else sender, tag))
            programs.append(found)
        assert not stuck(programs), (stages, count)
