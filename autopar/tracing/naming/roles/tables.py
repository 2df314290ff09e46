"""Name the rows of tables (`vocab`, `position`, `types`) by the origin of their indices, and `expert`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch

from autopar.tracing.naming.bind_graph import BoundNode, ValueKey
from autopar.tracing.naming.roles.structure import LOOKUPS, Proposal, Structure, op_name

# Ops whose result has only values of their operands, or constants.
_KEEPS_VALUES = """
    reshape view slice clone _to_copy where clamp expand unsqueeze squeeze masked_fill select cat slice_scatter
    select_scatter index_put permute transpose alias detach copy constant_pad_nd pad clamp_min to roll split
    flip unbind stack chunk repeat repeat_interleave
"""
KEEPS_VALUES = frozenset(_KEEPS_VALUES.split())
PICKS_VALUES = ("gather", "index", "index_select")
CONSTANTS = ("full", "zeros", "ones", "zeros_like", "new_zeros", "full_like")
# Ops that return places, and the number of results with which they do.
CHOICES = {"topk": 2, "max": 2, "min": 2, "sort": 2, "argsort": 1, "argmax": 1, "argmin": 1, "multinomial": 1}


def tables(structure: Structure) -> Iterator[Proposal]:
    """Yield `vocab` for rows looked up by ids of the user, `position` for positions, else `types`."""
    found = {rows: origin for rows, origin, _ in table_lookups(structure)}
    size = structure.space.size
    positions = {size(rows) for rows, origin in found.items() if origin == "positions"}
    largest = _largest(structure, found)
    nodes = structure.binding.nodes
    made = {dim for bound in nodes for dim in structure.new_dims(bound)}
    for rows, origin in found.items():
        if origin == "ids":
            # A linear layer makes the rows of a table that is tied to the head.
            yield rows, "vocab" if size(rows) == largest or rows in made else "types"
        elif origin == "buffer" and not positions:
            # Without absolute positions it is a table of relative ones.
            yield rows, "position"
        elif origin != "choice":
            yield rows, "position" if origin == "positions" else "types"


def _largest(structure: Structure, found: Mapping[int, str]) -> int:
    return max((structure.space.size(rows) for rows, origin in found.items() if origin == "ids"), default=0)


def table_lookups(structure: Structure) -> Iterator[tuple[int, str, int]]:
    """Yield for each table its rows, the origin of its indices and its rank."""
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
    """Return the dims beside the rows of the tables that ids look up."""
    found: set[int] = set()
    for bound in structure.binding.nodes:
        table = bound.operands[0] if op_name(bound) in ("embedding", "embedding_bag", "bags") else None
        if table is not None and structure.is_weight(table):
            found.update(structure.dims(table)[1:])
    return found


def untied_heads(structure: Structure) -> Iterator[Proposal]:
    """Yield `vocab` for a dim of its extent that a layer makes and none sums away: an untied head."""
    vocab = _largest(structure, {rows: origin for rows, origin, _ in table_lookups(structure)})
    made: set[int] = set()
    summed: set[int] = set()
    for bound in structure.binding.nodes:
        made.update(structure.new_dims(bound))
        summed.update(structure.contracted_dims(bound))
    for dim in sorted(made - summed):
        if structure.space.size(dim) == vocab and not structure.space.parts(dim):
            yield dim, "vocab"


def _origin(structure: Structure, key: ValueKey, rows: int) -> str:
    """Return the origin of indices: `ids`, `positions`, `choice`, `buffer` or `constants`.

    `ids` are given by the user, `positions` are counted in the model, a `choice` is an argument of computed numbers.
    """

    def holds_integers(value: ValueKey) -> bool:
        dtype = structure.values[value].dtype
        return not dtype.is_floating_point and dtype is not torch.bool

    found = "constants"
    seen = {key}
    pending = [key]
    named = {p.node: p.name for p in structure.inputs}
    while pending:
        here = pending.pop()
        if here in named and "position" not in named[here]:
            return "ids"
        # An input named `position`, or a buffer with one entry per row of the table.
        if here in structure.kinds:
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
        # Sums of ids are ids (offsets of a joined vocabulary); 20 values bound the search through arithmetic.
        elif operation in KEEPS_VALUES or (operation in ("add", "sub", "mul") and len(seen) < 20):
            onward = [k for k in bound.operands if k is not None and k not in seen and holds_integers(k)]
            pending.extend(onward)
            seen.update(onward)
        elif operation in PICKS_VALUES and bound.operands[0] is not None:
            pending.append(bound.operands[0])
        elif operation not in CONSTANTS and found == "constants":
            found = "positions"
    return found


# -- experts -----------------------------------------------------------------------------------------------------------


def experts(structure: Structure) -> Iterator[Proposal]:
    """Yield `expert` for the leading dim of a stack of matrices with the extent of a router's choice."""
    # A router is a linear layer whose result is not summed by a later one.
    nodes = structure.binding.nodes
    routed = {dim for bound in nodes for dim in structure.new_dims(bound)}
    for bound in nodes:
        if op_name(bound) == "topk":
            whole = (structure.factor_dim(bound, factor) for factor in bound.rule.whole if factor in bound.factors)
            yield from ((dim, "expert") for dim in whole if dim in routed)
    routers: dict[int, list[int]] = defaultdict(list)
    summed = {dim for bound in nodes for dim in structure.contracted_dims(bound)}
    for bound in nodes:
        for dim in structure.new_dims(bound):
            if not any(map(structure.name, structure.space.parts(dim))) and dim not in summed:
                routers[structure.space.size(dim)].append(dim)
    for bound in nodes:
        for stack in _stacks(structure, bound):
            alike = routers[structure.space.size(stack)]
            chosen = [dim for dim in alike if structure.name(dim) == "expert"]
            chosen = chosen or [dim for dim in alike if structure.name(dim) is None]
            if chosen or structure.space.find(stack) in routers[structure.space.size(stack)]:
                yield stack, "expert"
                yield from ((dim, "expert") for dim in chosen)
    yield from _rows(structure)


def _rows(structure: Structure) -> Iterator[Proposal]:
    """Yield rows of tables, and matrices of stacks, that a choice looks up."""
    # A table of the experts' extent without a choice on its index may be any other table.
    extents = {structure.space.size(dim) for dim, name in structure.names.items() if name == "expert"}
    for rows, origin, rank in table_lookups(structure):
        if origin == "choice" and (rank > 2 or structure.space.size(rows) in extents):
            yield rows, "expert"


def _stacks(structure: Structure, bound: BoundNode) -> Iterator[int]:
    """Yield the leading dims of weights whose matrices an op multiplies one by one."""
    summed = set(structure.contracted_factors(bound))
    if not summed or "conv" in op_name(bound):
        return
    fixed = summed | set(structure.new_factors(bound))
    for operand, key in zip(bound.rule.operands, bound.operands, strict=False):
        if operand is None or key is None or not structure.is_weight(key) or len(operand.terms) < 3:
            continue
        leading = operand.terms[0]
        if len(leading) == 1 and leading[0] not in fixed and summed.intersection(operand.factors):
            yield structure.dims(key)[0]
