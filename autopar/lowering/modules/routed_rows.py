"""Modules of routed rows on one rank that send them: exchanges of rows for groups, and reshards.

Rows stand by group, and within a group by their place among the rows of the rank (`sparse_rows`). A reshard from a
split of rows to a split of groups, or back, is one all-to-all whose sizes depend on the routing. An *exchange* holds
them: it is made once for a routing, by an all-to-all of counts, and serves all tensors in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autopar.lowering.collectives.local_reshard import LocalReshard, as_bytes, is_known, run_step
from autopar.lowering.collectives.local_steps import LocalStep, bind
from autopar.lowering.collectives.process_groups import Groups
from autopar.lowering.modules.shard_ops import ReshardModule
from autopar.rules.shard_call.sparse_rows import counts_of, ends_of, inverse_of
from autopar.sharding.reshard.reshard import Reshard, Step, StepKind
from autopar.sharding.sharding import OTHER, Atoms, Sharding

__all__ = ["ExchangePlaces", "PlacedExchange", "RoutedReshardModule", "RowExchange"]

# -- exchanges ---------------------------------------------------------------------------------------------------------


class Exchanged(NamedTuple):
    """One exchange of rows: what each rank sends and receives, and the order of rows before and after."""

    # Rows sent to and received from each rank, on the host.
    sizes: Tensor
    # Order in which rows are sent, and its inverse; both empty if they stand so already.
    before: Tensor
    before_inverse: Tensor
    # Order of the received rows, and its inverse.
    after: Tensor
    after_inverse: Tensor
    # Ends of the groups after the exchange.
    ends: Tensor


def _blocks(lengths: Tensor, order: Tensor, total: int) -> Tensor:
    """Return the order of rows that puts blocks of these lengths into an order."""
    starts = lengths.cumsum(0) - lengths
    moved = lengths.index_select(0, order)
    offsets = starts.index_select(0, order) - (moved.cumsum(0) - moved)
    return offsets.repeat_interleave(moved, output_size=total) + torch.arange(total, device=lengths.device)


def _send(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    return _sent(x, received, sent, group)()


def _sent(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Callable[[], Tensor]:
    """Start to send; the function that is returned waits."""
    ops = torch.ops._c10d_functional
    x = x.contiguous()
    known = is_known(x.dtype, gathered=False)
    given = x if known else as_bytes(x)
    begun = ops.all_to_all_single(given, list(received), list(sent), group)

    def arrive() -> Tensor:
        exchanged: Tensor = ops.wait_tensor(begun)
        return exchanged if known else exchanged.view(x.dtype)

    return arrive


def _swap_counts(sent: Tensor, ranks: int, group: str) -> tuple[Tensor, Tensor]:
    """Send each rank the counts of its groups; return the counts received, and all sizes on the host."""
    each = [sent.shape[0] // ranks] * ranks
    received = _send(sent, each, each, group)
    sizes = torch.stack([sent.view(ranks, -1).sum(1), received.view(ranks, -1).sum(1)])
    return received, sizes.cpu()


def _row_exchange(
    ends: Tensor, table: Tensor, by_group: Tensor, in_order: bool, ranks: int, group: str
) -> tuple[Tensor, ...]:
    counts = counts_of(ends)
    sent = counts.index_select(0, table)
    received, sizes = _swap_counts(sent, ranks, group)
    leaving, coming = (int(total) for total in sizes.sum(1).tolist())
    before = table.new_empty(0) if in_order else _blocks(counts, table, leaving)
    after = _blocks(received, by_group, coming)
    inverses = before if in_order else inverse_of(before), inverse_of(after)
    return sizes, before, inverses[0], after, inverses[1], ends_of(received.view(ranks, -1).sum(0))


class RowExchange(nn.Module):
    """Exchange rows for whole groups, where the rows of the ranks follow each other.

    `table`: groups of this rank by the rank that gets them, then by their order there. `sources`: place of each rank's
    rows among those of all.
    """

    def __init__(self, table: Tensor, sources: Sequence[int], group: str) -> None:
        super().__init__()
        self.ranks = len(sources)
        self.group = group
        self.in_order = torch.equal(table, torch.arange(table.shape[0]))
        own = table.shape[0] // self.ranks
        keys = torch.arange(own).repeat(self.ranks) * self.ranks + torch.tensor(sources).repeat_interleave(own)
        self.table = table
        self.by_group = keys.argsort()

    def forward(self, ends: Tensor, index: Tensor) -> Exchanged:
        table, by_group = self.table.to(ends.device), self.by_group.to(ends.device)
        if torch.compiler.is_compiling():
            op = torch.ops.autopar.row_exchange.default
            return Exchanged(*op(ends, table, by_group, self.in_order, self.ranks, self.group, index))
        return Exchanged(*_row_exchange(ends, table, by_group, self.in_order, self.ranks, self.group))


@dataclass(frozen=True)
class PlaceMaps:
    """Where groups and rows of a rank go, by their local numbers: the member of the group, the number there."""

    to_of_group: Tensor
    group: Tensor
    to_of_row: Tensor
    row: Tensor
    # Groups and rows of a rank after the exchange.
    groups_after: int
    rows_after: int


class PlacedExchange(nn.Module):
    """Exchange rows whose places matter: back into another split of rows, or from ranks whose rows interleave.

    It sends the place of each row as well.
    """

    def __init__(self, maps: PlaceMaps, ranks: int, group: str) -> None:
        super().__init__()
        self.maps = maps
        self.ranks = ranks
        self.group = group

    def forward(self, ends: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        maps, own, counts = self.maps, self.maps.groups_after, counts_of(ends)
        numbers = torch.arange(counts.shape[0], device=counts.device)
        group = numbers.repeat_interleave(counts, output_size=places.shape[0])
        to = maps.to_of_group.to(counts.device)[group] + maps.to_of_row.to(counts.device)[places]
        after_group = maps.group.to(counts.device)[group]
        before = to.argsort(stable=True)
        sent = torch.bincount(to * own + after_group, minlength=self.ranks * own)
        received, sizes = _swap_counts(sent, self.ranks, self.group)
        leaving, coming = sizes.tolist()
        there = maps.row.to(counts.device)[places].index_select(0, before)
        there = _send(there, coming, leaving, self.group)
        which = torch.arange(own, device=counts.device).repeat(self.ranks)
        which = which.repeat_interleave(received, output_size=there.shape[0])
        after = (which * maps.rows_after + there).argsort()
        ends = ends_of(received.view(self.ranks, -1).sum(0))
        found = Exchanged(sizes, before, inverse_of(before), after, inverse_of(after), ends)
        return (*found, there.index_select(0, after))


class ExchangePlaces(nn.Module):
    """Send the places of rows over an exchange that did without."""

    def __init__(self, maps: PlaceMaps, group: str) -> None:
        super().__init__()
        self.maps = maps
        self.group = group

    def forward(self, places: Tensor, index: Tensor, *exchange: Tensor) -> Tensor:
        there = self.maps.row.to(places.device)[places]
        return _routed(there, Exchanged(*exchange), index, self.group, back=False)


def _routed(x: Tensor, exchange: Exchanged, index: Tensor, group: str, back: bool) -> Tensor:
    """Send rows over an exchange, or back over it; `index` has the rows that stood before."""
    if not torch.compiler.is_compiling():
        return _begin_routed(x, exchange, group, back)()
    first, last = (exchange.after_inverse, exchange.before_inverse) if back else (exchange.before, exchange.after)
    like = index if back else exchange.after
    x = torch.ops.autopar.exchange_rows.default(x.index_select(0, first), exchange.sizes, like, group, back)
    return x.index_select(0, last)


def _begin_routed(x: Tensor, exchange: Exchanged, group: str, back: bool) -> Callable[[], Tensor]:
    """Start to send rows over an exchange, or back over it; the function that is returned waits."""
    first, last = (exchange.after_inverse, exchange.before_inverse) if back else (exchange.before, exchange.after)
    skipped = exchange.before.shape[0] == 0
    x = x if skipped and not back else x.index_select(0, first)
    sent, received = exchange.sizes.tolist()
    arrival = _sent(x, sent, received, group) if back else _sent(x, received, sent, group)
    return arrival if skipped and back else lambda: arrival().index_select(0, last)


# -- reshards ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RoutedStep:
    """Step of a reshard of routed rows: over an exchange, or a step that leaves the rows where they are."""

    step: LocalStep
    # Number of the exchange among those of the module, and the direction.
    exchange: int | None = None
    back: bool = False

    def begin(self, x: Tensor, exchanges: Sequence[tuple[Exchanged, Tensor]]) -> Callable[[], Tensor]:
        """Start to send rows over the exchange."""
        assert self.exchange is not None, "other steps run at once"
        return _begin_routed(x, exchanges[self.exchange][0], self.step.group, self.back)

    def run(self, x: Tensor, exchanges: Sequence[tuple[Exchanged, Tensor]]) -> Tensor:
        if self.exchange is not None:
            return _routed(x, *exchanges[self.exchange], self.step.group, self.back)
        if self.step.kind in (StepKind.ALL_REDUCE, StepKind.KEEP_ONE):
            move = replace(self.step, before=tuple(x.shape), after=tuple(x.shape))
            return run_step(move, x)
        # Rows come last, so that the numbers of the other dims hold for every number of rows.
        rows = x.shape[0]
        move = _with_rows(self.step, rows)
        moved = run_step(move, x.movedim(0, -1).reshape(move.before))
        return moved.reshape(-1, rows).t()


def _with_rows(step: LocalStep, rows: int) -> LocalStep:
    return replace(
        step,
        before=(*step.before[:-1], rows),
        after=(*step.after[:-1], rows),
        shapes=tuple((*shape[:-1], rows) for shape in step.shapes),
        sent=tuple(count * rows for count in step.sent),
        received=tuple(count * rows for count in step.received),
    )


class RoutedReshardModule(ReshardModule):
    """Reshard of routed rows, called with them and the exchanges that its steps go over.

    `exchanges`: splits of the rows before and after each exchange.
    """

    def __init__(self, reshard: Reshard, groups: Groups, note: str, exchanges: Sequence[tuple[Any, Any]]) -> None:
        super().__init__(LocalReshard.bind(reshard, groups), note)
        known = {pair: i for i, pair in enumerate(exchanges)}
        self.forward_steps = tuple(_step(step, reshard, groups, known) for step in reshard.forward)
        self.backward_steps = tuple(_step(step, reshard, groups, known) for step in reshard.backward)

    def forward(self, x: Tensor, *tensors: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            made: Tensor = _RoutedFunction.apply(x, self, False, *tensors)  # type: ignore[no-untyped-call]
            return made
        return self.run(x, False, tensors)

    def run(self, x: Tensor, backward: bool, tensors: Sequence[Tensor]) -> Tensor:
        return self._from(x, 0, backward, _exchanges(tensors))

    def begin(self, x: Tensor, backward: bool, tensors: Sequence[Tensor]) -> Callable[[], Tensor]:
        exchanges, steps = _exchanges(tensors), self.backward_steps if backward else self.forward_steps
        last = max((place for place, step in enumerate(steps) if step.exchange is not None), default=-1)
        if last < 0:
            return lambda: self._from(x, 0, backward, exchanges)
        for step in steps[:last]:
            x = step.run(x, exchanges)
        arrival = steps[last].begin(x, exchanges)
        return lambda: self._from(arrival(), last + 1, backward, exchanges)

    def _from(self, x: Tensor, first: int, backward: bool, exchanges: Sequence[tuple[Exchanged, Tensor]]) -> Tensor:
        """Run all steps from one on."""
        for step in (self.backward_steps if backward else self.forward_steps)[first:]:
            x = step.run(x, exchanges)
        shape = self.conversion.shape if backward else self.conversion.result_shape
        return x.reshape(x.shape[0], *shape[1:])


def _exchanges(tensors: Sequence[Tensor]) -> list[tuple[Exchanged, Tensor]]:
    """Return the exchanges that a reshard is called with, each with the rows that stood before it."""
    width = len(Exchanged._fields) + 1
    parts = [tensors[i : i + width] for i in range(0, len(tensors), width)]
    return [(Exchanged(*part[:-1]), part[-1]) for part in parts]


class _RoutedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: RoutedReshardModule, backward: bool, *tensors: Tensor) -> Tensor:
        ctx.module, ctx.is_backward = module, backward
        ctx.save_for_backward(*tensors)
        return module.run(x.view_as(x), backward, tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        found = _RoutedFunction.apply(gradient, ctx.module, not ctx.is_backward, *tensors)  # type: ignore[no-untyped-call]
        return found, None, None, *[None] * len(tensors)


def rows_of(atoms: Atoms, sharding: Sharding) -> tuple[tuple[str, ...], ...]:
    """Return the splits of the dim of rows."""
    return tuple(split for i, split in enumerate(sharding.splits) if atoms.role(i) != OTHER)


def _step(step: Step, reshard: Reshard, groups: Groups, known: dict[tuple[Any, Any], int]) -> _RoutedStep:
    atoms, group = reshard.atoms, None if step.local else groups.of(step.axes)
    name = "" if group is None else group.name
    members = () if group is None else group.members
    if step.kind is StepKind.ALL_TO_ALL and step.atom is not None and atoms.role(step.atom) != OTHER:
        ends = rows_of(atoms, step.before), rows_of(atoms, step.after)
        back = ends not in known
        move = LocalStep(step.kind, (), (), group=name, order=tuple(range(len(members))))
        return _RoutedStep(move, known[ends[::-1] if back else ends], back)
    plain, others = _without_rows(reshard)
    renamed = replace(
        step,
        before=_drop_rows(atoms, step.before),
        after=_drop_rows(atoms, step.after),
        atom=None if step.atom is None else others.index(step.atom),
        to_atom=None if step.to_atom is None else others.index(step.to_atom),
    )
    return _RoutedStep(replace(bind(renamed, plain, groups.coordinate, members), group=name))


def _without_rows(reshard: Reshard) -> tuple[Reshard, list[int]]:
    """Return the reshard of one row, which stands last, and the other atoms."""
    atoms = reshard.atoms
    others = [i for i in range(len(atoms.sizes)) if atoms.role(i) == OTHER]
    plain = Atoms.plain((*(atoms.sizes[i] for i in others), 1))
    ends = _drop_rows(atoms, reshard.source), _drop_rows(atoms, reshard.target)
    return replace(reshard, atoms=plain, source=ends[0], target=ends[1]), others


def _drop_rows(atoms: Atoms, sharding: Sharding) -> Sharding:
    splits = (split for i, split in enumerate(sharding.splits) if atoms.role(i) == OTHER)
    return Sharding((*splits, ()), sharding.partial, sharding.broadcast)


# -- under torch.compile -----------------------------------------------------------------------------------------------
# Sizes that depend on data stay inside of ops that the compiler does not look into.


_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "row_exchange(Tensor ends, Tensor table, Tensor by_group, bool in_order, int ranks, str group, Tensor index) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define("exchange_rows(Tensor x, Tensor sizes, Tensor like, str group, bool back) -> Tensor")


def _whole_exchange(
    ends: Tensor, table: Tensor, by_group: Tensor, in_order: bool, ranks: int, group: str, index: Tensor
) -> tuple[Tensor, ...]:
    found = _row_exchange(ends, table, by_group, in_order, ranks, group)
    if not in_order:
        return found
    every = torch.arange(index.shape[0], device=ends.device)
    return (found[0], every, every.clone(), *found[3:])


def _exchange_like(
    ends: Tensor, table: Tensor, by_group: Tensor, in_order: bool, ranks: int, group: str, index: Tensor
) -> tuple[Tensor, ...]:
    coming = torch.library.get_ctx().new_dynamic_size()
    sizes = torch.empty(2, ranks, dtype=torch.int64, device="cpu")
    before, after = ([index.new_empty(count) for _ in range(2)] for count in (index.shape[0], coming))
    return sizes, *before, *after, ends.new_empty(table.shape[0] // ranks)


def _exchange_rows(x: Tensor, sizes: Tensor, like: Tensor, group: str, back: bool) -> Tensor:
    sent, received = sizes.tolist()
    return _send(x, sent, received, group) if back else _send(x, received, sent, group)


_LIBRARY.impl("row_exchange", _whole_exchange, "CompositeExplicitAutograd")
_LIBRARY.impl("exchange_rows", _exchange_rows, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::row_exchange", _exchange_like, lib=_LIBRARY)
torch.library.register_fake(
    "autopar::exchange_rows",
    lambda x, sizes, like, group, back: x.new_empty(like.shape[0], *x.shape[1:]),
    lib=_LIBRARY,
)
