"""How a parameter is stored: what `param`, `grad` and `opt` of a layout come to together.

The registered parameter is what the optimizer must see, so it is the shard that `opt` asks for. Where `param` asks for
more than that shard, the rest is gathered when the model runs, and the gradient comes back reduce-scattered: ZeRO-1 and
ZeRO-2 where `param` is whole, ZeRO-3 where it is split as `opt` is.
"""

from __future__ import annotations

from autopar.mesh import SubMesh
from autopar.sharding.atoms import HasAtoms
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.precedence import glob_matches
from autopar.sharding.layout.resolve import resolve
from autopar.sharding.layout.source import layout_error
from autopar.sharding.layout.syntax import Axes, Block

__all__ = ["storage_of", "stored_splits"]

Splits = tuple[Axes, ...]


def stored_splits(layout: Layout, tensor: HasAtoms, axes: SubMesh) -> Splits:
    """The axes that split each atom of a parameter as it is registered."""
    return storage_of(layout, tensor, axes)[2]


def storage_of(layout: Layout, tensor: HasAtoms, axes: SubMesh) -> tuple[Splits, Splits, Splits]:
    """What `param`, `grad` and `opt` come to; `opt` and `grad` follow `param` where no block speaks of them."""
    param = _closed(layout, tensor, "param", axes)
    opt = _closed(layout, tensor, "opt", axes) if _block(layout, tensor, "opt") else param
    grad = _closed(layout, tensor, "grad", axes) if _block(layout, tensor, "grad") else param
    if not all(whole == part[: len(whole)] for whole, part in zip(param, opt, strict=True)):
        block = _block(layout, tensor, "opt") or _block(layout, tensor, "param")
        raise layout_error(
            "E7",
            f"the optimizer state of {tensor.name} cannot be laid out as 'opt' says, {_text(tensor, opt)}, when the "
            f"parameter is stored as 'param' says, {_text(tensor, param)}",
            "let 'opt' split what 'param' splits, or more",
            None if block is None else block.span,
        )
    if grad not in (param, opt):
        block = _block(layout, tensor, "grad")
        raise layout_error(
            "E7",
            f"the gradient of {tensor.name} cannot be laid out as 'grad' says, {_text(tensor, grad)}: it is stored as "
            f"the parameter is, {_text(tensor, param)}, or as its optimizer state, {_text(tensor, opt)}",
            "let 'grad' say what 'param' or 'opt' says",
            None if block is None else block.span,
        )
    return param, grad, opt


def _block(layout: Layout, tensor: HasAtoms, kind: str) -> Block | None:
    """A block that speaks of this tensor in this role by the name of the role."""
    dims = {name for atom in tensor.atoms for name in atom.names}
    for statement in layout:
        for scope in statement.scopes if isinstance(statement, Block) else ():
            named = scope.glob is None or glob_matches(scope.glob, tensor.name)
            if scope.kind == kind and named and set(scope.dims) <= dims:
                assert isinstance(statement, Block)
                return statement
    return None


def _closed(layout: Layout, tensor: HasAtoms, kind: str, axes: SubMesh) -> Splits:
    return tuple(axes_of or () for axes_of in resolve(layout, tensor, kind, axes))


def _text(tensor: HasAtoms, splits: Splits) -> str:
    parts = [
        f"{atom.names[0] if atom.names else atom.size} -> {'*'.join(axes)}"
        for atom, axes in zip(tensor.atoms, splits, strict=True)
        if axes
    ]
    return f"[{', '.join(parts) or '* -> none'}]"
