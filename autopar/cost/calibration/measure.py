"""Measure a machine: matrix products, memory, ops, and collectives on the real process group.

All ranks measure at once, as they work at once in training, so that shared cores and links are shared here too. Every
time is a median: of the faster half of the repetitions, since other load only adds time, and then over the ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import mean, median

import torch
import torch.distributed as dist
from torch import nn

from autopar.cost.calibration.fit import CANDIDATES, Measurements, TimedChain, TimedCollective, TimedProduct
from autopar.cost.calibration.op_trials import (
    NUMEL_CPU,
    NUMEL_GPU,
    TRIALS,
    AttentionTrial,
    attention_trials,
    more_attention_trials,
    overhead_seconds,
    time_attention,
    time_op,
)
from autopar.rules.torch_versions import all_gather_single, reduce_scatter_single

# Called before every measurement, with its name.
Tick = Callable[[str], None]

SMALLEST_BYTES = 1024
ITEM_BYTES = 4
# Compute time of a core between two collectives, as in small models trained on a few CPU processes.
COMPUTE_SECONDS = 2e-3
# Repetitions of that compute by which crowding of the cores is measured: 0.4 s in all.
CROWDING_REPEATS = 200


@dataclass(frozen=True)
class MeasuringBudget:
    """Limits of a calibration: collective buffer bytes, product extent, seconds per measurement."""

    largest_bytes: int
    largest_product: int
    seconds_each: float
    # Measure grids of products and attentions for tables.
    tables: bool = False

    @property
    def short(self) -> MeasuringBudget:
        """Return the budget of measurements of which there are many."""
        return replace(self, seconds_each=self.seconds_each / 4)


@dataclass(frozen=True)
class RankPlace:
    """Place of this process: its device, its rank, and the ranks beside it."""

    device: torch.device
    rank: int
    ranks: int
    ranks_per_node: int
    # Wall seconds of a rank per second of its own computing, while all ranks compute.
    crowding: float = 1.0

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"


# -- all measurements -------------------------------------------------------------------------------------------------


def measure(budget: MeasuringBudget, tick: Tick) -> Measurements:
    """Measure everything; with a process group every rank must call this, and all get the same result."""
    place = place_here()
    if place.on_gpu:
        properties = torch.cuda.get_device_properties(place.device)
        name, memory, processors = properties.name, float(properties.total_memory), properties.multi_processor_count
    else:
        name, processors = f"CPU process, {torch.get_num_threads()} thread", 1
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / place.ranks_per_node
    tick("the start of an op")
    launch = _launch(place, budget)
    tick("memory")
    # Two tensors are read and one is written, each larger than the caches of a core.
    size = 2**28 if place.on_gpu else 2**24
    one, other = (torch.rand(size // ITEM_BYTES, device=place.device) for _ in range(2))
    stream = 3 * size / own_seconds(place, budget, partial(torch.add, one, other))
    products = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16 if place.on_gpu else torch.float64):
        for (rows, reduction, columns), left_out in product_sizes(budget.largest_product, budget.tables).items():
            tick(f"product {rows} x {reduction} x {columns} in {_name(dtype)}")
            # Random values: constant bits draw less power, and a GPU at its power limit would run faster on them.
            left = torch.randn(rows, reduction, device=place.device).to(dtype)
            right = torch.randn(reduction, columns, device=place.device).to(dtype)
            each = budget.short if budget.tables else budget
            seconds = own_seconds(place, each, partial(torch.matmul, left, right))
            products.append(TimedProduct(_name(dtype), rows, reduction, columns, seconds, left_out))
    found = Measurements(
        name,
        memory,
        launch,
        stream,
        tuple(products),
        (),
        place.nodes,
        place.ranks_per_node,
        core_fraction=1.0 / max(1.0, ranks_per_core(place)),
        fills_cores=ranks_per_core(place) >= 1.0,
        own_host=place.on_cpu,
        processors=processors,
    )
    found = _add_ops(place, budget, tick, found).of_device()
    if place.ranks == 1:
        return found
    collectives = []
    for level, ranks, group in _groups(place):
        for size, left_out in buffer_sizes(budget.largest_bytes):
            tick(f"collectives of {size} bytes by {ranks}")
            calls = {kind: _collective_call(kind, group, size, place.device) for kind in CANDIDATES}
            for kind, seconds in collective_seconds(place, budget, calls).items():
                collectives.append(TimedCollective(kind, level, ranks, float(size), seconds, left_out))
    tick("two ranks alone")
    lone = _lone_bytes_per_second(place, budget)
    return replace(found, collectives=tuple(collectives), lone_bytes_per_second=lone)


def steps_of(budget: MeasuringBudget, ranks: int, ranks_per_node: int) -> int:
    """Return about how often `measure` calls `tick`."""
    groups = len(_group_sizes(ranks_per_node)) + len(_group_sizes(ranks // ranks_per_node))
    products = 3 * len(product_sizes(budget.largest_product, budget.tables))
    alone = 5 + len(TRIALS) + len(_attentions("cuda" if torch.cuda.is_available() else "cpu", budget.tables))
    return alone + products + groups * len(list(buffer_sizes(budget.largest_bytes)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- the device -------------------------------------------------------------------------------------------------------


def _launch(place: RankPlace, budget: MeasuringBudget) -> float:
    x = torch.zeros(1, device=place.device)
    count = 200

    def run() -> None:
        for _ in range(count):
            x.add_(1.0)

    return own_seconds(place, budget, run) / count


def product_sizes(largest: int, tables: bool) -> dict[tuple[int, int, int], bool]:
    """Return rows, reduction and columns of products, and whether each is left out of the fit.

    Square products, some with one short side, and two that mostly read and write: a few rows by a matrix larger than
    the caches, and the gradient of that matrix. For tables also a grid, every other one of which is left out.
    """
    sizes = [64 << i for i in range(max(0, largest // 64).bit_length())]
    found = {}
    for size in sizes:
        found[size, size, size] = False
        if size >= 4 * 64:
            found[size, size // 4, size] = found[size // 4, size, size] = False
    for rows, reduction in ((32, largest), (largest, 32)):
        found[rows, reduction, 4 * largest] = False
    if tables:
        for (i, rows), (j, reduction), (k, columns) in product(enumerate(sizes), repeat=3):
            found.setdefault((rows, reduction, columns), (i + j + k) % 2 == 1)
    return found


def _attentions(device_type: str, tables: bool) -> tuple[AttentionTrial, ...]:
    """Return the attentions to time: with few sizes, or with a grid of which they are a part."""
    return more_attention_trials(device_type) if tables else attention_trials(device_type)


def _add_ops(place: RankPlace, budget: MeasuringBudget, tick: Tick, found: Measurements) -> Measurements:
    """Return the measurements with times of single ops, attention and a chain of layers."""
    seconds = partial(own_seconds, place, budget.short)
    tick("a small op")
    overhead = overhead_seconds(place.device, seconds)
    ops = []
    for trial in TRIALS:
        tick(trial.name)
        ops.append(time_op(trial, NUMEL_CPU if place.on_cpu else NUMEL_GPU, place.device, seconds))
    attentions = []
    for attention in _attentions(place.device.type, budget.tables):
        tick("attention")
        attentions.append(time_attention(attention, place.device, seconds))
    tick("layers")
    chain = _chain(place, budget)
    return replace(found, overhead_seconds=overhead, ops=tuple(ops), attentions=tuple(attentions), chain=chain)


def _chain(place: RankPlace, budget: MeasuringBudget) -> TimedChain:
    """Time forward and backward of layers whose operands exceed the caches of a core."""
    width, rows, dtype = (512, 1024, torch.float32) if place.on_cpu else (4096, 8192, torch.float16)
    layers = 4
    chain = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(place.device, dtype)
    x = torch.rand(rows, width, device=place.device).to(dtype)

    def step() -> None:
        torch.autograd.grad(chain(x).sum(), list(chain.parameters()))

    seconds = own_seconds(place, budget, step)
    # The first layer needs no gradient of its input: one product less than three for each layer.
    return TimedChain(3 * layers - 1, rows, width, seconds, _name(dtype))


# -- collectives ------------------------------------------------------------------------------------------------------


def _group_sizes(units: int) -> list[int]:
    """Return the powers of two that divide a number of units, and the number itself."""
    powers = [1 << bit for bit in range(1, units.bit_length()) if units % (1 << bit) == 0]
    return sorted({*powers, *([units] if units > 1 else [])})


def _groups(place: RankPlace) -> Iterator[tuple[int, int, dist.ProcessGroup]]:
    """Yield level, size and this rank's group: ranks inside nodes, then one rank of each node."""
    inside = place.ranks_per_node
    for count in _group_sizes(inside):
        starts = range(0, place.ranks, count)
        yield 0, count, _own_group(place, [list(range(start, start + count)) for start in starts])
    for count in _group_sizes(place.nodes):
        nodes = range(0, place.nodes, count)
        groups = [[(node + i) * inside + one for i in range(count)] for node in nodes for one in range(inside)]
        yield 1, count, _own_group(place, groups)


def _own_group(place: RankPlace, groups: list[list[int]]) -> dist.ProcessGroup:
    # torch.distributed requires every rank to create every group, in the same order.
    made = [(dist.new_group(ranks), ranks) for ranks in groups]
    own: list[dist.ProcessGroup] = [group for group, ranks in made if place.rank in ranks]
    return own[0]


def buffer_sizes(largest: int) -> Iterator[tuple[int, bool]]:
    """Yield buffer bytes, doubling; the flag leaves every other size out of the fit."""
    size, left_out = SMALLEST_BYTES, False
    while size <= largest:
        yield size, left_out
        size *= 2
        left_out = not left_out


def _collective_call(kind: str, group: dist.ProcessGroup, size: int, device: torch.device) -> Callable[[], object]:
    """Return a function that runs one collective over a buffer of `size` bytes."""
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
        "all_gather": lambda: all_gather_single(whole, piece, group=group),
        "reduce_scatter": lambda: reduce_scatter_single(piece, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, first, group=group),
        "reduce": lambda: dist.reduce(whole, first, group=group),
        "gather": lambda: dist.gather(piece, pieces, first, group=group),
        "scatter": lambda: dist.scatter(piece, pieces, first, group=group),
        "send": send,
    }
    return calls[kind]


def _lone_bytes_per_second(place: RankPlace, budget: MeasuringBudget) -> float | None:
    """Return the rate between two ranks while all others are idle; None with fewer than three ranks."""
    if place.ranks_per_node < 3:
        return None
    group = dist.new_group([0, 1])
    active = place.rank < 2
    size = budget.largest_bytes
    run = _collective_call("all_gather", group, size, place.device) if active else (lambda: None)
    return size / 2 / seconds_of(place, budget, run, active)


# -- times of calls ---------------------------------------------------------------------------------------------------


def place_here() -> RankPlace:
    distributed = dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if distributed else 1
    on_gpu = torch.cuda.is_available() and (not distributed or "nccl" in dist.get_backend())
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    place = RankPlace(device, rank, ranks, local if ranks % local == 0 else ranks)
    return replace(place, crowding=_crowding(place))


def own_seconds(place: RankPlace, budget: MeasuringBudget, run: Callable[[], object]) -> float:
    """Return the seconds of a call that waits for no other rank, on cores that ranks may share."""
    shared = ranks_per_core(place)
    if shared <= 1 or torch.get_num_threads() > 1:
        return max(1.0, shared) * seconds_of(place, budget, run)
    # With more ranks than cores, wall time depends on the scheduler: scale the processor time instead.
    return place.crowding * seconds_of(place, budget, run, clock=time.process_time)


def _crowding(place: RankPlace) -> float:
    """Return wall seconds per computed second: at least the ranks of a core, more on throttled machines."""
    if ranks_per_core(place) <= 1:
        return 1.0
    _compute()
    _barrier(place)
    start = time.perf_counter()
    for _ in range(CROWDING_REPEATS):
        _compute()
    spent = mean(_gather(place, time.perf_counter() - start))
    return max(ranks_per_core(place), spent / (CROWDING_REPEATS * COMPUTE_SECONDS))


def ranks_per_core(place: RankPlace) -> float:
    """Return how many threads of ranks share a core; 0 for ranks on GPUs."""
    if not place.on_cpu:
        return 0.0
    return place.ranks_per_node * torch.get_num_threads() / len(os.sched_getaffinity(0))


def collective_seconds(
    place: RankPlace, budget: MeasuringBudget, runs: Mapping[str, Callable[[], object]]
) -> dict[str, float]:
    """Return the seconds of calls that wait for other ranks.

    Where ranks share cores, a waiting call delays ranks that still compute. The time is then the mean increase of a
    compute-and-call over the compute alone: a mean, since a step adds up all delays. The calls take turns, so that
    drift of the machine affects all alike.
    """
    if ranks_per_core(place) <= 1:
        return {name: seconds_of(place, budget, run) for name, run in runs.items()}
    _barrier(place)
    longest = max(_gather(place, sum(_time(place, run, 1, time.perf_counter) for run in runs.values())))
    room = longest + len(runs) * ranks_per_core(place) * COMPUTE_SECONDS
    rounds = max(3, min(50, int(len(runs) * budget.seconds_each / room)))
    totals = dict.fromkeys(runs, 0.0)
    alone = 0.0
    _barrier(place)
    for _ in range(rounds):
        alone += _time(place, _compute, 1, time.perf_counter)
        for name, run in runs.items():
            totals[name] += _time(place, partial(_compute, run), 1, time.perf_counter)
    found = {}
    for name, total in totals.items():
        more = mean(_gather(place, total - alone)) / rounds
        found[name] = max(more, total / rounds / 100)
    return found


def _compute(then: Callable[[], object] = lambda: None) -> None:
    """Occupy a core for `COMPUTE_SECONDS`, then call `then`."""
    square = torch.ones(128, 128)
    until = time.process_time() + COMPUTE_SECONDS
    while time.process_time() < until:
        torch.mm(square, square)
    then()


def seconds_of(
    place: RankPlace,
    budget: MeasuringBudget,
    run: Callable[[], object],
    active: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of a call; ranks that are not active wait for the others."""
    if active:
        run()
    _barrier(place)
    first = _time(place, run, 1, time.perf_counter) if active else 0.0
    # All ranks must repeat equally often: the slowest decides. A GPU gets batches of calls, so that it never idles.
    longest = max(1e-9, *_gather(place, first))
    batch = max(1, min(20, int(1e-3 / longest))) if place.on_gpu else 1
    repetitions = max(3, min(50, int(budget.seconds_each / (longest * batch))))
    _barrier(place)
    times = sorted(_time(place, run, batch, clock) for _ in range(repetitions)) if active else []
    fast = median(times[: (len(times) + 1) // 2]) if times else -1.0
    return median(spent for spent in _gather(place, fast) if spent >= 0)


def _time(place: RankPlace, run: Callable[[], object], count: int, clock: Callable[[], float]) -> float:
    if place.on_gpu:
        torch.cuda.synchronize(place.device)
    start = clock()
    for _ in range(count):
        run()
    if place.on_gpu:
        torch.cuda.synchronize(place.device)
    return (clock() - start) / count


def _barrier(place: RankPlace) -> None:
    if place.ranks > 1:
        dist.barrier()


def _gather(place: RankPlace, value: float) -> list[float]:
    """Return the value of every rank."""
    if place.ranks == 1:
        return [value]
    found: list[float] = [0.0] * place.ranks
    dist.all_gather_object(found, value)
    return found
