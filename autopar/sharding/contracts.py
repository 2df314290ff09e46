"""What a layout promises of the whole: `forbid` and `warn`, `same`, limits. Checked on what is about to run."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autopar.errors import AutoparWarning
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedTensor
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.matching import glob_matches
from autopar.sharding.layout.source import layout_error
from autopar.sharding.layout.syntax import Guard, Limit, Same, Scope
from autopar.sharding.lowered_ops import LoweredOpContext, split_of
from autopar.sharding.lowered_ops.halo import Window, received_share
from autopar.sharding.op_pins import kinds_of
from autopar.sharding.reshard_insertion import InsertedReshard
from autopar.sharding.sharding import Sharding


@dataclass(frozen=True)
class _Sent:
    """One collective: of what, for which op."""

    kind: str
    axes: tuple[str, ...]
    direction: str
    tensor: NamedTensor
    op: str
    bytes: int

    def __str__(self) -> str:
        over = "*".join(self.axes)
        return f"the {self.kind} over {over} of {self.tensor}, {self.direction}, for {self.op}: {self.bytes:,} bytes"


def check_contracts(
    layout: Layout, graph: NamedGraph, assignment: Assignment, inserted: Iterable[InsertedReshard]
) -> None:
    """Raise E6 for a guard or a limit that the decisions break, E7 for tensors that were to share one layout."""
    sent = [
        _Sent(
            step.kind.value,
            step.axes,
            direction,
            graph.tensors[conversion.tensor],
            conversion.op,
            step.numel * conversion.itemsize,
        )
        for conversion in inserted
        for direction, step in conversion.collectives()
    ]
    for statement in layout:
        if isinstance(statement, Guard):
            _check_guard(statement, [one for one in sent if _is_about(statement, one, graph)])
        elif isinstance(statement, Same):
            _check_same(statement, graph, assignment)
        elif isinstance(statement, Limit) and statement.quantity == "halo":
            _check_halo(statement, graph, assignment)


def _check_guard(guard: Guard, broken: list[_Sent]) -> None:
    if not broken:
        return
    count = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
    message = f"{guard.action} {guard.collective} over {'*'.join(guard.axes)} is broken by {broken[0]}{count}"
    fix = "split the tensor so that the op takes it as it is, or drop the line"
    error = layout_error("E6", message, fix, guard.span)
    if guard.action == "forbid":
        raise error
    warnings.warn(str(error), AutoparWarning, stacklevel=4)


def _is_about(guard: Guard, one: _Sent, graph: NamedGraph) -> bool:
    """A collective over more axes than the guard's is over those too."""
    if one.kind != guard.collective or not set(guard.axes) <= set(one.axes):
        return False
    return is_guarded(guard, one.tensor, graph, one.direction)


def is_guarded(guard: Guard, tensor: NamedTensor, graph: NamedGraph, direction: str) -> bool:
    """Whether a guard is about what is sent of a tensor in one direction."""
    scope: Scope = guard.scope
    dims = {name for atom in tensor.atoms for name in atom.names}
    # A parameter is sent in the backward as its gradient; any other value goes by the name of the value.
    is_grad = tensor.kind == "param" and direction != "forward"
    kinds = ("grad",) if is_grad else kinds_of(tensor, graph.outputs)
    return (
        (scope.kind is None or scope.kind in kinds)
        and (scope.glob is None or glob_matches(scope.glob, tensor.name))
        and set(scope.dims) <= dims
    )


def _check_same(same: Same, graph: NamedGraph, assignment: Assignment) -> None:
    left, right = ([name for name in graph.tensors if glob_matches(glob, name)] for glob in (same.left, same.right))
    first = left[0]
    for name in (*left, *right):
        if _layouts(name, graph, assignment) != _layouts(first, graph, assignment):
            raise layout_error(
                "E7",
                f"{first} and {name} are to share one layout, but {first} is {_layouts(first, graph, assignment)} and "
                f"{name} is {_layouts(name, graph, assignment)}",
                "give both the same rules, or drop the line",
                same.span,
            )


def _layouts(name: str, graph: NamedGraph, assignment: Assignment) -> str:
    """The layout of a tensor by physical dims: tensors of other dims may share it."""
    layout = assignment.stored.get(name, assignment.values.get(name))
    return "unused" if layout is None else layout_text(graph.tensors[name], layout)


def layout_text(tensor: NamedTensor, layout: Sharding) -> str:
    dims: list[list[str]] = [[] for _ in tensor.shape]
    for atom, axes in zip(tensor.atoms, layout.splits, strict=True):
        dims[atom.dim].extend(axes)
    return f"[{', '.join('*'.join(axes) or 'none' for axes in dims)}]"


def _check_halo(limit: Limit, graph: NamedGraph, assignment: Assignment) -> None:
    for op, factor, share in _halo_shares(graph, assignment):
        assert limit.percent is not None, limit
        if 100 * share > limit.percent:
            raise layout_error(
                "E6",
                f"{op} split by {factor} gets {100 * share:.0f}% of a shard's extent from its neighbours, "
                f"more than {limit.percent:g}%",
                "split this op over fewer ranks, or by another dim",
                limit.span,
            )


def _halo_shares(graph: NamedGraph, assignment: Assignment) -> Iterator[tuple[str, str, float]]:
    """For each op that slides a window along a split dim: how much of a shard's extent its neighbours send."""
    for node in graph.nodes:
        op_assignment = assignment.ops[node.name]
        split = split_of(graph, node, op_assignment.choice.splits, op_assignment.operands, assignment.axes)
        if split is not None:
            yield from ((node.name, factor, share) for factor, share in _received(split))


def _received(split: LoweredOpContext) -> Iterator[tuple[str, float]]:
    if isinstance(split.lowering, Window):
        yield from received_share(split).items()


def passes_halo(limit: Limit, split: LoweredOpContext) -> bool:
    """Whether an op that runs on shards so gets more from its neighbours than a limit allows."""
    assert limit.percent is not None, limit
    return any(100 * share > limit.percent for _, share in _received(split))
