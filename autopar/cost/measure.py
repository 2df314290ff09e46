"""Measurements on the machine at hand: products, memory, the start of an op, collectives on the real process group.

All ranks measure at once, as they work at once in training: what they share, they share here too. Every time is a
median, of the faster half of the repetitions (what else the machine does only adds to them) and then of ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import mean, median

import torch
import torch.distributed as dist

from autopar.cost.calibrate import CANDIDATES, Measured, Measurements, Timed

__all__ = ["Budget", "measure", "steps_of"]

Tick = Callable[[str], None]
"""Called after every measurement, with what comes next."""

SMALLEST_BYTES = 1024
ITEM_BYTES = 4


@dataclass(frozen=True)
class Budget:
    """How much is measured."""

    largest_bytes: int
    """Of a collective's buffer."""
    largest_product: int
    """Rows, columns and reduction."""
    seconds_each: float
    """Of repeating one measurement, about."""


@dataclass(frozen=True)
class _Place:
    """Where this process stands."""

    device: torch.device
    rank: int
    ranks: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node


def measure(budget: Budget, tick: Tick) -> Measurements:
    """All of it; with a process group, every rank must call this, and gets the same."""
    place = _place()
    name, memory = _described(place)
    tick("the start of an op")
    launch = _launch(place, budget)
    tick("memory")
    stream = _stream(place, budget)
    products = []
    for dtype in _dtypes(place):
        for rows, reduction, columns in _products(budget.largest_product):
            tick(f"product {rows} x {reduction} x {columns} in {str(dtype).removeprefix('torch.')}")
            products.append(_product(place, budget, dtype, rows, reduction, columns))
    found = Measurements(name, memory, launch, stream, tuple(products), (), place.nodes, place.ranks_per_node)
    found = replace(found, busy_cores=_ranks_per_core(place) >= 1)
    if place.ranks == 1:
        return found
    collectives = []
    for level, ranks, group in _groups(place):
        for kind in CANDIDATES:
            for size, left_out in _sizes(budget.largest_bytes):
                tick(f"{kind} of {size} bytes by {ranks}")
                collectives.append(_collective(place, budget, kind, level, ranks, group, size, left_out))
    tick("two ranks alone")
    return replace(found, collectives=tuple(collectives), lone_bytes_per_second=_lone(place, budget))


def steps_of(budget: Budget, ranks: int, ranks_per_node: int) -> int:
    """About how many times `tick` is called."""
    groups = len(_counts(ranks_per_node)) + len(_counts(ranks // ranks_per_node))
    products = 3 * len(list(_products(budget.largest_product)))
    return 3 + products + groups * len(CANDIDATES) * len(list(_sizes(budget.largest_bytes)))


def _place() -> _Place:
    together = dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if together else 1
    on_gpu = torch.cuda.is_available() and (not together or "nccl" in dist.get_backend())
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return _Place(device, rank, ranks, local if ranks % local == 0 else ranks)


def _described(place: _Place) -> tuple[str, float]:
    """The device's name, and the memory that each rank has."""
    if place.device.type == "cuda":
        properties = torch.cuda.get_device_properties(place.device)
        return properties.name, float(properties.total_memory)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / place.ranks_per_node
    return f"CPU process, {torch.get_num_threads()} thread", memory


# -- time -------------------------------------------------------------------------------------------------------------


@contextmanager
def _still(place: _Place) -> Iterator[None]:
    """The device has nothing left to do, before and after."""
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    yield
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)


def _own_seconds(place: _Place, budget: Budget, run: Callable[[], object]) -> float:
    """The time of a call that waits for no other rank. Undisturbed, it has a core to itself; in training, only a part
    of one where there are more ranks than cores."""
    return max(1.0, _ranks_per_core(place)) * _seconds(place, budget, run)


def _ranks_per_core(place: _Place) -> float:
    """0 of ranks that compute on GPUs."""
    if place.device.type != "cpu":
        return 0.0
    return place.ranks_per_node * torch.get_num_threads() / len(os.sched_getaffinity(0))


def _undisturbed(times: list[float]) -> float:
    """The median of the faster half; -1 of none."""
    return median(sorted(times)[: (len(times) + 1) // 2]) if times else -1.0


def _in_turns(times: list[float]) -> float:
    """The mean, for ranks that share cores: each is in the others' way, and over a step that adds up."""
    return mean(times) if times else -1.0


def _seconds(
    place: _Place,
    budget: Budget,
    run: Callable[[], object],
    active: bool = True,
    summary: Callable[[list[float]], float] = _undisturbed,
) -> float:
    """The time of a call; ranks that are not active wait for the others."""
    times: list[float] = []
    if active:
        run()
    _together(place)
    first = _timed(place, run, 1) if active else 0.0
    # As often on every rank: the slowest decides. A GPU is given several calls at a time, so that none waits for us.
    longest = max(1e-9, *_of_all(place, first))
    inside = max(1, min(20, int(1e-3 / longest))) if place.device.type == "cuda" else 1
    repetitions = max(3, min(50, int(budget.seconds_each / (longest * inside))))
    _together(place)
    if active:
        times = [_timed(place, run, inside) for _ in range(repetitions)]
    return median(spent for spent in _of_all(place, summary(times)) if spent >= 0)


def _timed(place: _Place, run: Callable[[], object], count: int) -> float:
    with _still(place):
        start = time.perf_counter()
        for _ in range(count):
            run()
        if place.device.type == "cuda":
            torch.cuda.synchronize(place.device)
        return (time.perf_counter() - start) / count


def _together(place: _Place) -> None:
    if place.ranks > 1:
        dist.barrier()


def _of_all(place: _Place, value: float) -> list[float]:
    if place.ranks == 1:
        return [value]
    found: list[float] = [0.0] * place.ranks
    dist.all_gather_object(found, value)
    return found


# -- the device -------------------------------------------------------------------------------------------------------


def _launch(place: _Place, budget: Budget) -> float:
    x = torch.zeros(1, device=place.device)
    count = 200

    def run() -> None:
        for _ in range(count):
            x.add_(1.0)

    return _own_seconds(place, budget, run) / count


def _stream(place: _Place, budget: Budget) -> float:
    """Two tensors read, one written: larger than the caches of a core, small enough to go undisturbed."""
    size = 2**28 if place.device.type == "cuda" else 2**23
    one, other, target = (torch.zeros(size // ITEM_BYTES, device=place.device) for _ in range(3))
    return 3 * size / _own_seconds(place, budget, lambda: torch.add(one, other, out=target))


def _dtypes(place: _Place) -> tuple[torch.dtype, ...]:
    on_gpu = (torch.float32, torch.bfloat16, torch.float16)
    return on_gpu if place.device.type == "cuda" else (torch.float32, torch.bfloat16, torch.float64)


def _products(largest: int) -> Iterator[tuple[int, int, int]]:
    """Square ones, and some with a short or a long side."""
    size = 64
    while size <= largest:
        yield size, size, size
        if size >= 4 * 64:
            yield size, size // 4, size
            yield size // 4, size, size
        size *= 2


def _product(place: _Place, budget: Budget, dtype: torch.dtype, rows: int, reduction: int, columns: int) -> Timed:
    left = torch.ones(rows, reduction, device=place.device, dtype=dtype)
    right = torch.ones(reduction, columns, device=place.device, dtype=dtype)
    seconds = _own_seconds(place, budget, lambda: left @ right)
    return Timed(str(dtype).removeprefix("torch."), rows, reduction, columns, seconds)


# -- collectives ------------------------------------------------------------------------------------------------------


def _counts(units: int) -> list[int]:
    """Powers of two that divide, and the number itself."""
    powers = [1 << bit for bit in range(1, units.bit_length()) if units % (1 << bit) == 0]
    return sorted({*powers, *([units] if units > 1 else [])})


def _groups(place: _Place) -> Iterator[tuple[int, int, dist.ProcessGroup]]:
    """Level, size and this rank's group: inside nodes, then one rank of each node."""
    inside = place.ranks_per_node
    for count in _counts(inside):
        starts = range(0, place.ranks, count)
        yield 0, count, _mine(place, [list(range(start, start + count)) for start in starts])
    for count in _counts(place.nodes):
        nodes = range(0, place.nodes, count)
        groups = [[(node + i) * inside + one for i in range(count)] for node in nodes for one in range(inside)]
        yield 1, count, _mine(place, groups)


def _mine(place: _Place, groups: list[list[int]]) -> dist.ProcessGroup:
    made = [(dist.new_group(ranks), ranks) for ranks in groups]  # every rank makes all of them
    mine: list[dist.ProcessGroup] = [group for group, ranks in made if place.rank in ranks]
    return mine[0]


def _sizes(largest: int) -> Iterator[tuple[int, bool]]:
    """Each twice the last; every other one is left out of the fit."""
    size, left_out = SMALLEST_BYTES, False
    while size <= largest:
        yield size, left_out
        size *= 2
        left_out = not left_out


def _collective(
    place: _Place,
    budget: Budget,
    kind: str,
    level: int,
    ranks: int,
    group: dist.ProcessGroup,
    size: int,
    left_out: bool,
) -> Measured:
    run = _call(kind, group, size, place.device)
    summary = _in_turns if _ranks_per_core(place) > 1 else _undisturbed
    return Measured(kind, level, ranks, float(size), _seconds(place, budget, run, summary=summary), left_out)


def _call(kind: str, group: dist.ProcessGroup, size: int, device: torch.device) -> Callable[[], object]:
    """One collective over a buffer of so many bytes, ready to be called."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    whole = torch.zeros(max(ranks, size // ITEM_BYTES // ranks * ranks), device=device)
    piece = torch.zeros(whole.numel() // ranks, device=device)
    other = torch.empty_like(whole)
    first = dist.get_global_rank(group, 0)
    pieces = list(whole.chunk(ranks)) if me == 0 else None
    following, before = (dist.get_global_rank(group, (me + step) % ranks) for step in (1, -1))

    def send() -> None:
        pair = [dist.P2POp(dist.isend, whole, following, group), dist.P2POp(dist.irecv, other, before, group)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_single(whole, piece, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(piece, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, first, group=group),
        "reduce": lambda: dist.reduce(whole, first, group=group),
        "gather": lambda: dist.gather(piece, pieces, first, group=group),
        "scatter": lambda: dist.scatter(piece, pieces, first, group=group),
        "send": send,
    }
    return calls[kind]


def _lone(place: _Place, budget: Budget) -> float | None:
    """What two neighbours send each other while the others rest; None where there are no others."""
    if place.ranks_per_node < 3:
        return None
    group = dist.new_group([0, 1])
    active = place.rank < 2
    size = budget.largest_bytes
    run = _call("all_gather", group, size, place.device) if active else (lambda: None)
    return size / 2 / _seconds(place, budget, run, active)
