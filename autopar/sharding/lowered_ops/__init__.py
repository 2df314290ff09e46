"""Ops that run on shards with a little communication of their own, where their rules keep a factor whole or need halos.

`communicating` says whether an op has such a lowering for a factor; `split_of` what that is under a choice, with its
messages: reshards, as conversions are. Choices, prices and the generated graph all read these two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.sharding.atoms import atoms_of
from autopar.sharding.lowered_ops.base import LoweredOp, LoweredOpContext, OpMessage
from autopar.sharding.sharding import Sharding

__all__ = ["LoweredOp", "LoweredOpContext", "OpMessage", "communicating", "lowered_ops", "split_of"]


@cache
def lowered_ops() -> Mapping[str, LoweredOp]:
    """Return the lowered op of every op that has one: the `LOWERED_OPS` tables of the modules of this package."""
    found: dict[str, LoweredOp] = {}
    for module in iter_modules(__path__):
        table = getattr(import_module(f"{__name__}.{module.name}"), "LOWERED_OPS", {})
        assert not found.keys() & table.keys(), f"two lowered ops for {sorted(found.keys() & table.keys())}"
        found |= table
    return found


def communicating(node: NamedNode, factor: str) -> LoweredOp | None:
    """The lowering that runs an op whose `factor` is split, where its rule alone does not allow it."""
    lowering = None if node.rule.random else lowered_ops().get(node.op)  # these draw nothing
    return lowering if lowering is not None and node.source == "table" and lowering.takes(node, factor) else None


def split_of(
    graph: NamedGraph,
    node: NamedNode,
    splits: Iterable[tuple[tuple[str, int], tuple[str, ...]]],
    operands: tuple[Sharding | None, ...],
    axes: SubMesh,
    at: Mapping[str, int] | None = None,
) -> LoweredOpContext | None:
    """What a lowering has to know of a choice (its splits and the layouts it takes); None where none is at work.

    It is that of the rank `at` these coordinates; where shards are uneven, the first rank has the longest.
    """
    own: dict[str, tuple[str, ...]] = {}
    for (factor, _), used in splits:
        if communicating(node, factor) is not None:
            own[factor] = (*own.get(factor, ()), *used)
    if not own:
        return None
    name, layout = node.operands[0], operands[0]
    assert name is not None, node.name
    assert layout is not None, node.name
    tensor = graph.tensors[name]
    atoms = atoms_of(tensor)
    at = dict.fromkeys(axes, 0) if at is None else at
    shape = atoms.fold(layout.local_sizes(atoms, axes, at))
    return LoweredOpContext(
        lowered_ops()[node.op], node, axes, at, own, shape, tuple(tensor.shape), tensor.dtype, tensor.requires_grad
    )
