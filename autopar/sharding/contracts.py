"""Contracts of a layout, checked on the final assignment: `forbid`, `warn`, `same` and `limit halo`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from autopar.errors import AutoparWarning
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedTensor
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.matching import glob_matches
from autopar.sharding.layout.source import layout_error
from autopar.sharding.layout.syntax import Guard, Limit, Same
from autopar.sharding.lowered_ops import LoweredOpContext, lowered_context
from autopar.sharding.lowered_ops.halo import Window, received_share
from autopar.sharding.op_pins import kinds_of
from autopar.sharding.reshard_insertion import InsertedReshard
from autopar.sharding.sharding import Sharding


@dataclass(frozen=True)
class _Sent:
    """Collective with its tensor and its op, as a message shows it."""

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
    """Raise E6 for a guard or limit that is broken, E7 for a `same` that differs."""
    sent = [
        _Sent(step.kind.value, step.axes, direction, graph.tensors[one.tensor], one.op, one.bytes_of(step))
        for one in inserted
        for direction, step in one.collectives()
    ]
    for statement in layout:
        if isinstance(statement, Guard):
            # A collective over more axes than those of the guard is over these too.
            broken = [
                one
                for one in sent
                if one.kind == statement.collective
                and set(statement.axes) <= set(one.axes)
                and is_guarded(statement, one.tensor, graph, one.direction)
            ]
            _check_guard(statement, broken)
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
    # Points at the caller of the planner, not at this check.
    warnings.warn(str(error), AutoparWarning, stacklevel=4)


def is_guarded(guard: Guard, tensor: NamedTensor, graph: NamedGraph, direction: str) -> bool:
    """Return whether the scope of a guard covers collectives on a tensor in one direction."""
    scope, dims = guard.scope, {name for atom in tensor.atoms for name in atom.names}
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
    # Compared as text, by physical dims: tensors whose dims have other names may share a sharding.
    texts: dict[str, str] = {}
    for name in (*left, *right):
        sharding = assignment.stored.get(name, assignment.values.get(name))
        texts[name] = "unused" if sharding is None else sharding_text(graph.tensors[name], sharding)
    first = left[0]
    for name, text in texts.items():
        if text != texts[first]:
            raise layout_error(
                "E7",
                f"{first} and {name} are to share one layout, but {first} is {texts[first]} and {name} is {text}",
                "give both the same rules, or drop the line",
                same.span,
            )


def sharding_text(tensor: NamedTensor, sharding: Sharding) -> str:
    """Return the axes of each physical dim, as `[dp*tp, none]`."""
    dims: list[list[str]] = [[] for _ in tensor.shape]
    for atom, axes in zip(tensor.atoms, sharding.splits, strict=True):
        dims[atom.dim].extend(axes)
    return f"[{', '.join('*'.join(axes) or 'none' for axes in dims)}]"


def _check_halo(limit: Limit, graph: NamedGraph, assignment: Assignment) -> None:
    for node in graph.nodes:
        op_assignment = assignment.ops[node.name]
        split = lowered_context(graph, node, op_assignment.choice.splits, op_assignment.operands, assignment.axes)
        for factor, share in () if split is None else _over_halo_limit(limit, split):
            raise layout_error(
                "E6",
                f"{node.name} split by {factor} gets {100 * share:.0f}% of a shard's extent from its neighbours, "
                f"more than {limit.percent:g}%",
                "split this op over fewer ranks, or by another dim",
                limit.span,
            )


def _over_halo_limit(limit: Limit, split: LoweredOpContext) -> list[tuple[str, float]]:
    """Return the factors with a larger halo, as a share of a shard's extent."""
    assert limit.percent is not None, limit
    # Only windows that slide along a split dim, as in a convolution, read the edges of the neighbours.
    shares = received_share(split) if isinstance(split.lowering, Window) else {}
    return [(factor, share) for factor, share in shares.items() if 100 * share > limit.percent]


def exceeds_halo(limit: Limit, split: LoweredOpContext) -> bool:
    """Return whether an op on shards reads more from its neighbours than a limit allows."""
    return bool(_over_halo_limit(limit, split))
