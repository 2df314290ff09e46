"""`vocab position types`: the rows of tables, by what they are looked up with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from autopar.tracing.naming.bind_graph import ValueKey
from autopar.tracing.naming.roles.structure import LOOKUPS, Proposal, Structure, op_name

__all__ = ["columns", "looked_up", "tables", "untied_heads"]

KEEPS_VALUES = frozenset(
    [
        "reshape",
        "view",
        "slice",
        "clone",
        "_to_copy",
        "where",
        "clamp",
        "expand",
        "unsqueeze",
        "squeeze",
        "masked_fill",
        "select",
        "cat",
        "slice_scatter",
        "select_scatter",
        "index_put",
        "permute",
        "transpose",
        "alias",
        "detach",
        "copy",
        "constant_pad_nd",
        "pad",
        "clamp_min",
        "to",
        "roll",
        "split",
        "flip",
        "unbind",
        "stack",
        "chunk",
        "repeat",
        "repeat_interleave",
    ]
)
PICKS_VALUES = ("gather", "index", "index_select")
CONSTANTS = ("full", "zeros", "ones", "zeros_like", "new_zeros", "full_like")
# Ops that say where something is found, and how many results they have then.
CHOICES = {"topk": 2, "max": 2, "min": 2, "sort": 2, "argsort": 1, "argmax": 1, "argmin": 1, "multinomial": 1}


def tables(structure: Structure) -> Iterator[Proposal]:
    """`vocab` are the rows of a table looked up by the user's ids, `position` those looked up by positions."""
    found = {rows: origin for rows, origin, _ in looked_up(structure)}
    size = structure.space.size
    positions = {size(rows) for rows, origin in found.items() if origin == "positions"}
    largest = _largest(structure, found)
    for rows, origin in found.items():
        if origin == "ids":
            yield rows, "vocab" if size(rows) == largest or _is_output(structure, rows) else "types"
        elif origin == "buffer" and not positions:
            yield rows, "position"  # a table of relative positions
        elif origin != "choice":
            yield rows, "position" if origin == "positions" else "types"


def _largest(structure: Structure, found: Mapping[int, str]) -> int:
    return max((structure.space.size(rows) for rows, origin in found.items() if origin == "ids"), default=0)


def looked_up(structure: Structure) -> Iterator[tuple[int, str, int]]:
    """The rows of each table, what they are looked up by, and the rank of the table."""
    for bound in structure.binding.nodes:
        if op_name(bound) not in LOOKUPS or not structure.is_weight(bound.operands[0]):
            continue
        table, indices = bound.operands[0], next((k for k in bound.operands[1:] if k is not None), None)
        if table is None or indices is None or not structure.values[table].is_floating_point():
            continue
        indexed = [name for _, name in bound.rule.indices if name in bound.factors]
        dims = structure.dims(table)
        rows = structure.factor_dim(bound, indexed[0]) if indexed else dims[0]
        yield rows, _origin(structure, indices, structure.space.size(rows)), len(dims)


def columns(structure: Structure) -> set[int]:
    """The dims beside the rows of the tables that ids look up."""
    found: set[int] = set()
    for bound in structure.binding.nodes:
        table = bound.operands[0] if op_name(bound) in ("embedding", "embedding_bag", "bags") else None
        if table is not None and structure.is_weight(table):
            found.update(structure.dims(table)[1:])
    return found


def _is_output(structure: Structure, dim: int) -> bool:
    """Return whether a linear layer also makes a dim: a table tied to the head."""
    return any(
        structure.factor_dim(bound, factor) == dim
        for bound in structure.binding.nodes
        for factor in structure.born(bound)
    )


def untied_heads(structure: Structure) -> Iterator[Proposal]:
    """A head that is not tied makes a dim of the extent of the vocabulary that no later layer sums away."""
    vocab = _largest(structure, {rows: origin for rows, origin, _ in looked_up(structure)})
    made: set[int] = set()
    summed: set[int] = set()
    for bound in structure.binding.nodes:
        made.update(structure.factor_dim(bound, factor) for factor in structure.born(bound))
        summed.update(structure.factor_dim(bound, factor) for factor in structure.contractions(bound))
    for dim in sorted(made - summed):
        if structure.space.size(dim) == vocab and not structure.space.parts(dim):
            yield dim, "vocab"


def _origin(structure: Structure, key: ValueKey, rows: int) -> str:
    """Where indices come from: the user's "ids", "positions" counted in the model, a "choice" between computed
    numbers, a "buffer", or "constants"."""
    found = "constants"
    seen = {key}
    pending = [key]
    named = {p.node: p.name for p in structure.inputs}
    while pending:
        here = pending.pop()
        if here in named and "position" not in named[here]:
            return "ids"
        if here in structure.kinds:  # positions are given as such, or a buffer counts the rows of the table
            counts = here in named or rows in structure.values[here].shape
            found = "positions" if counts or found == "positions" else "buffer"
        bound = structure.maker.get(here)
        if bound is None:
            continue
        operation = op_name(bound)
        if operation in CHOICES and len(bound.outputs) == CHOICES[operation]:
            return "choice"
        if operation in ("arange", "cumsum"):
            found = "positions"
        elif operation in KEEPS_VALUES or (operation in ("add", "sub", "mul") and len(seen) < 20):
            onward = [k for k in bound.operands if k is not None and k not in seen and _is_integer(structure, k)]
            pending.extend(onward)
            seen.update(onward)
        elif operation in PICKS_VALUES and bound.operands[0] is not None:
            pending.append(bound.operands[0])
        elif operation not in CONSTANTS and found == "constants":
            found = "positions"
    return found


def _is_integer(structure: Structure, key: ValueKey) -> bool:
    dtype = structure.values[key].dtype
    return not dtype.is_floating_point and dtype is not torch.bool
