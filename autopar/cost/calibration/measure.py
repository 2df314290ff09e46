"""Measurements on the machine at hand: products, memory, the start of an op, collectives on the real process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from autopar.cost.calibration.fit import CANDIDATES, Measurements, TimedChain, TimedCollective, TimedProduct
from autopar.cost.calibration.op_trials import (
    TRIALS,
    TimedAttention,
    TimedOp,
    attended,
    attention_trials,
    overhead_seconds,
    tried,
)
from autopar.cost.calibration.timing import (
    MeasuringBudget,
    RankPlace,
    own_seconds,
    place_here,
    ranks_per_core,
    seconds_of,
    waited_seconds,
)
from autopar.rules.torch_versions import all_gather_single, reduce_scatter_single

__all__ = ["MeasuringBudget", "measure", "steps_of"]

Tick = Callable[[str], None]
"""Called after every measurement, with what comes next."""

SMALLEST_BYTES = 1024
ITEM_BYTES = 4


def measure(budget: MeasuringBudget, tick: Tick) -> Measurements:
    """All of it; with a process group, every rank must call this, and gets the same."""
    place = place_here()
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
    found = replace(found, busy_cores=ranks_per_core(place) >= 1)
    found = replace(found, own_host=place.device.type == "cpu", processors=_processors(place))
    found = _tried(place, budget, tick, found)
    if place.ranks == 1:
        return found
    collectives = []
    for level, ranks, group in _groups(place):
        for size, left_out in _sizes(budget.largest_bytes):
            tick(f"collectives of {size} bytes by {ranks}")
            calls = {kind: _call(kind, group, size, place.device) for kind in CANDIDATES}
            for kind, seconds in waited_seconds(place, budget, calls).items():
                collectives.append(TimedCollective(kind, level, ranks, float(size), seconds, left_out))
    tick("two ranks alone")
    return replace(found, collectives=tuple(collectives), lone_bytes_per_second=_lone(place, budget))


def steps_of(budget: MeasuringBudget, ranks: int, ranks_per_node: int) -> int:
    """About how many times `tick` is called."""
    groups = len(_counts(ranks_per_node)) + len(_counts(ranks // ranks_per_node))
    products = 3 * len(list(_products(budget.largest_product)))
    alone = 5 + len(TRIALS) + len(attention_trials("cuda" if torch.cuda.is_available() else "cpu"))
    return alone + products + groups * len(list(_sizes(budget.largest_bytes)))


def _described(place: RankPlace) -> tuple[str, float]:
    """The device's name, and the memory that each rank has."""
    if place.device.type == "cuda":
        properties = torch.cuda.get_device_properties(place.device)
        return properties.name, float(properties.total_memory)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / place.ranks_per_node
    return f"CPU process, {torch.get_num_threads()} thread", memory


def _processors(place: RankPlace) -> int:
    if place.device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(place.device).multi_processor_count)


# -- the device -------------------------------------------------------------------------------------------------------


def _launch(place: RankPlace, budget: MeasuringBudget) -> float:
    x = torch.zeros(1, device=place.device)
    count = 200

    def run() -> None:
        for _ in range(count):
            x.add_(1.0)

    return own_seconds(place, budget, run) / count


def _stream(place: RankPlace, budget: MeasuringBudget) -> float:
    """Two tensors read, one made: larger than the caches of a core."""
    size = 2**28 if place.device.type == "cuda" else 2**24
    one, other = (torch.rand(size // ITEM_BYTES, device=place.device) for _ in range(2))
    return 3 * size / own_seconds(place, budget, lambda: torch.add(one, other))


def _dtypes(place: RankPlace) -> tuple[torch.dtype, ...]:
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


def _product(
    place: RankPlace, budget: MeasuringBudget, dtype: torch.dtype, rows: int, reduction: int, columns: int
) -> TimedProduct:
    # Not of one value: bits that do not change take less power, and a GPU at its limit of power runs faster on them.
    left = torch.randn(rows, reduction, device=place.device).to(dtype)
    right = torch.randn(reduction, columns, device=place.device).to(dtype)
    seconds = own_seconds(place, budget, lambda: left @ right)
    return TimedProduct(str(dtype).removeprefix("torch."), rows, reduction, columns, seconds)


def _tried(place: RankPlace, budget: MeasuringBudget, tick: Tick, found: Measurements) -> Measurements:
    """What a device takes beyond what is multiplied and moved."""
    seconds = partial(own_seconds, place, replace(budget, seconds_each=budget.seconds_each / 4))
    tick("a small op")
    overhead = overhead_seconds(place.device, seconds)
    ops: list[TimedOp] = []
    for trial in TRIALS:
        tick(trial.name)
        ops.append(tried(trial, TRIED_NUMEL if found.own_host else TRIED_NUMEL_GPU, place.device, seconds))
    attentions: list[TimedAttention] = []
    for attention in attention_trials(place.device.type):
        tick("attention")
        attentions.append(attended(attention, place.device, seconds))
    tick("layers")
    return replace(
        found, overhead_seconds=overhead, ops=tuple(ops), attentions=tuple(attentions), chain=_chain(place, budget)
    )


TRIED_NUMEL = 2**20
TRIED_NUMEL_GPU = 2**26
"""Beyond its caches, and far longer than a launch."""


def _chain(place: RankPlace, budget: MeasuringBudget) -> TimedChain:
    """Forward and backward of some layers, whose operands do not stay in a core's caches."""
    on_cpu = place.device.type == "cpu"
    width, rows, dtype = (512, 1024, torch.float32) if on_cpu else (4096, 8192, torch.float16)
    layers = 4
    chain = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(place.device, dtype)
    x = torch.rand(rows, width, device=place.device).to(dtype)

    def step() -> None:
        torch.autograd.grad(chain(x).sum(), list(chain.parameters()))

    seconds = own_seconds(place, budget, step)
    return TimedChain(3 * layers - 1, rows, width, seconds, str(dtype).removeprefix("torch."))


# -- collectives ------------------------------------------------------------------------------------------------------


def _counts(units: int) -> list[int]:
    """Powers of two that divide, and the number itself."""
    powers = [1 << bit for bit in range(1, units.bit_length()) if units % (1 << bit) == 0]
    return sorted({*powers, *([units] if units > 1 else [])})


def _groups(place: RankPlace) -> Iterator[tuple[int, int, dist.ProcessGroup]]:
    """Level, size and this rank's group: inside nodes, then one rank of each node."""
    inside = place.ranks_per_node
    for count in _counts(inside):
        starts = range(0, place.ranks, count)
        yield 0, count, _mine(place, [list(range(start, start + count)) for start in starts])
    for count in _counts(place.nodes):
        nodes = range(0, place.nodes, count)
        groups = [[(node + i) * inside + one for i in range(count)] for node in nodes for one in range(inside)]
        yield 1, count, _mine(place, groups)


def _mine(place: RankPlace, groups: list[list[int]]) -> dist.ProcessGroup:
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


def _lone(place: RankPlace, budget: MeasuringBudget) -> float | None:
    """What two neighbours send each other while the others rest; None where there are no others."""
    if place.ranks_per_node < 3:
        return None
    group = dist.new_group([0, 1])
    active = place.rank < 2
    size = budget.largest_bytes
    run = _call("all_gather", group, size, place.device) if active else (lambda: None)
    return size / 2 / seconds_of(place, budget, run, active)
