"""Lowered ops: they run on shards with collectives of their own, where a rule keeps a factor whole or needs halos.

`lowered_op_of` finds the lowered op for a factor. `lowered_context` binds it to a choice, with its messages, which are
reshards. Choices, prices and the generated graph all read these two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.sharding.lowered_ops.base import LoweredOp, LoweredOpContext, OperandShard, OpMessage
from autopar.sharding.sharding import Sharding, atoms_of

__all__ = ["LoweredOp", "LoweredOpContext", "OpMessage", "communicating", "lowered_ops", "split_of"]


@cache
def lowered_ops() -> Mapping[str, LoweredOp]:
    """Return all lowered ops: the `LOWERED_OPS` tables of the modules of this package."""
    # Imported at the first call: the modules import this package.
    found: dict[str, LoweredOp] = {}
    for module in iter_modules(__path__):
        table = getattr(import_module(f"{__name__}.{module.name}"), "LOWERED_OPS", {})
        assert not found.keys() & table.keys(), f"two lowered ops for {sorted(found.keys() & table.keys())}"
        found |= table
    return found


def lowered_op_of(node: NamedNode, factor: str) -> LoweredOp | None:
    """Return the lowered op that splits `factor` of a node, if its rule alone cannot."""
    # Lowered ops draw no random numbers.
    # Messages have fixed sizes, routed rows have not.
    lowering = None if node.rule.random or node.routed else lowered_ops().get(node.op)
    return lowering if lowering is not None and node.source == "table" and lowering.takes(node, factor) else None


def lowered_context(
    graph: NamedGraph,
    node: NamedNode,
    splits: Iterable[tuple[tuple[str, int], tuple[str, ...]]],
    operands: tuple[Sharding | None, ...],
    axes: SubMesh,
    at: Mapping[str, int] | None = None,
) -> LoweredOpContext | None:
    """Return the lowered op of a choice; None where the rule alone suffices.

    `at` are the coordinates of a rank, by default of one with the longest shards.
    """
    own: dict[str, tuple[str, ...]] = {}
    splits = tuple(splits)
    for (factor, _), used in splits:
        # An axis of one rank splits nothing.
        used = tuple(axis for axis in used if axes[axis] > 1)
        if used and lowered_op_of(node, factor) is not None:
            own[factor] = (*own.get(factor, ()), *used)
    if not own:
        return None
    at = SubMesh.of(axes).longest if at is None else at
    shards: list[OperandShard | None] = []
    for name, sharding in zip(node.operands, operands, strict=True):
        if name is None or sharding is None:
            shards.append(None)
            continue
        tensor = graph.tensors[name]
        atoms = atoms_of(tensor)
        shape = atoms.fold(sharding.local_sizes(atoms, axes, at))
        shards.append(OperandShard(shape, tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
    return LoweredOpContext(lowered_ops()[node.op], node, axes, at, own, tuple(splits), tuple(shards))
