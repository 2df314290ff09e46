"""Ops that run on shards with a little communication of their own, where their rules keep a factor whole or need halos.

`communicating` says whether an op has such a lowering for a factor; `split_of` what that is under a choice, with its
messages: reshards, as conversions are. Choices, prices and the generated graph all read these two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.sharding.atoms import atoms_of
from autopar.sharding.lowered_ops.base import LoweredOp, LoweredOpContext, OpMessage
from autopar.sharding.lowered_ops.batch_norm import BatchNorm
from autopar.sharding.lowered_ops.cross_entropy import CrossEntropy
from autopar.sharding.lowered_ops.halo import Window
from autopar.sharding.lowered_ops.moments import Moments
from autopar.sharding.lowered_ops.normalisation import LayerNorm, RmsNorm
from autopar.sharding.lowered_ops.softmax import Softmax
from autopar.sharding.sharding import Sharding

__all__ = ["LoweredOp", "LoweredOpContext", "OpMessage", "communicating", "split_of"]

LOWERINGS: Mapping[str, LoweredOp] = {
    "aten.cross_entropy_loss.default": CrossEntropy(),
    "aten.softmax.int": Softmax(),
    "aten._softmax.default": Softmax(),
    "aten.log_softmax.int": Softmax(log=True),
    "aten._log_softmax.default": Softmax(log=True),
    "aten.layer_norm.default": LayerNorm(),
    "aten.native_layer_norm.default": LayerNorm(),
    "aten.rms_norm.default": RmsNorm(),
    "aten._fused_rms_norm.default": RmsNorm(),
    **{f"aten.var.{overload}": Moments() for overload in ("correction", "dim")},
    **{f"aten.var_mean.{overload}": Moments(with_mean=True) for overload in ("correction", "dim")},
    **{f"aten.std.{overload}": Moments(root=True) for overload in ("correction", "dim")},
    **{f"aten.std_mean.{overload}": Moments(root=True, with_mean=True) for overload in ("correction", "dim")},
    "aten._native_batch_norm_legit_functional.default": BatchNorm(),
    "aten._native_batch_norm_legit.no_stats": BatchNorm(),
    **{f"aten.conv{n}d.{overload}": Window() for n in (1, 2, 3) for overload in ("default", "padding")},
    "aten.convolution.default": Window(),
    **{f"aten.{kind}_pool{n}d.default": Window() for n in (1, 2, 3) for kind in ("max", "avg")},
}


def communicating(node: NamedNode, factor: str) -> LoweredOp | None:
    """The lowering that runs an op whose `factor` is split, where its rule alone does not allow it."""
    lowering = None if node.rule.random else LOWERINGS.get(node.op)  # these draw nothing
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
        LOWERINGS[node.op], node, axes, at, own, shape, tuple(tensor.shape), tensor.dtype, tensor.requires_grad
    )
