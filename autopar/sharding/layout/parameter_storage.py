"""Storage of parameters: the splits of `param`, `grad` and `opt`, the gather policy and the recomputation of layers.

The optimizer sees the registered parameter, so that is the shard of `opt`. If `param` is larger than that shard, the
rest is gathered when the model runs, and the gradient is reduce-scattered. A whole `param` gives ZeRO-1 and ZeRO-2, one
that is split as `opt` gives ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from autopar.mesh import SubMesh
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.matching import glob_matches
from autopar.sharding.layout.resolve import resolve
from autopar.sharding.layout.source import layout_error
from autopar.sharding.layout.syntax import Axes, Block, GatherStatement, Recompute
from autopar.sharding.sharding import HasAtoms

Splits = tuple[Axes, ...]


def stored_splits(layout: Layout, tensor: HasAtoms, axes: SubMesh) -> Splits:
    """Return the axes that split each atom of a parameter as it is registered."""
    return storage_of(layout, tensor, axes)[2]


def storage_of(layout: Layout, tensor: HasAtoms, axes: SubMesh) -> tuple[Splits, Splits, Splits]:
    """Return the splits of `param`, `grad` and `opt`, by default those of `param`.

    Where `opt { * -> dp }` splits what `param` does not, it adds to the splits of `param`.
    """
    param = _closed(layout, tensor, "param", axes)
    opt = _closed(layout, tensor, "opt", axes) if _block(layout, tensor, "opt") else param
    if not _begins(opt, param):
        opt = _closed(layout, tensor, "opt", axes, param)
    grad = _closed(layout, tensor, "grad", axes) if _block(layout, tensor, "grad") else param
    if grad not in (param, opt):
        grad = _closed(layout, tensor, "grad", axes, param)
    # Gathering joins pieces of `opt` to a piece of `param`, so `opt` must begin with the axes of `param`.
    if not _begins(opt, param):
        block = _block(layout, tensor, "opt") or _block(layout, tensor, "param")
        raise layout_error(
            "E7",
            f"the optimizer state of {tensor.name} cannot have the splits of 'opt', {_text(tensor, opt)}, when the "
            f"parameter is stored with those of 'param', {_text(tensor, param)}",
            "let 'opt' split what 'param' splits, or more",
            None if block is None else block.span,
        )
    # A parameter has at most two storages, and its gradient must fit one of them.
    if grad not in (param, opt):
        block = _block(layout, tensor, "grad")
        raise layout_error(
            "E7",
            f"the gradient of {tensor.name} cannot have the splits of 'grad', {_text(tensor, grad)}: it is stored as "
            f"the parameter is, {_text(tensor, param)}, or as its optimizer state, {_text(tensor, opt)}",
            "give 'grad' the splits of 'param' or of 'opt'",
            None if block is None else block.span,
        )
    return param, grad, opt


def _begins(opt: Splits, param: Splits) -> bool:
    return all(whole == part[: len(whole)] for whole, part in zip(param, opt, strict=True))


def _block(layout: Layout, tensor: HasAtoms, kind: str) -> Block | None:
    """Return the first block with a scope of this kind that covers the tensor."""
    dims = {name for atom in tensor.atoms for name in atom.names}
    for statement in layout:
        for scope in statement.scopes if isinstance(statement, Block) else ():
            named = scope.glob is None or glob_matches(scope.glob, tensor.name)
            if scope.kind == kind and named and set(scope.dims) <= dims:
                assert isinstance(statement, Block)
                return statement
    return None


def _closed(layout: Layout, tensor: HasAtoms, kind: str, axes: SubMesh, begun: Splits | None = None) -> Splits:
    return tuple(axes_of or () for axes_of in resolve(layout, tensor, kind, axes, begun))


def _text(tensor: HasAtoms, splits: Splits) -> str:
    parts = [
        f"{atom.names[0] if atom.names else atom.size} -> {'*'.join(axes)}"
        for atom, axes in zip(tensor.atoms, splits, strict=True)
        if axes
    ]
    return f"[{', '.join(parts) or '* -> none'}]"


@dataclass(frozen=True)
class GatherPolicy:
    """Lifetime of the gathered copy of a parameter, and time of the reduction of its gradient."""

    # ZeRO-1: `param` is larger than `opt`, and one gathered copy serves all micro-batches under `no_sync()`.
    keep_gathered: bool
    # DDP and ZeRO-1: only the last backward before the optimizer's step reduces the gradient; else each one does.
    defer_reduction: bool
    # The gathered copy is freed after the forward and gathered again in the backward.
    regather: bool


def gather_policy_of(layout: Layout, tensor: HasAtoms, used: tuple[Axes, ...], axes: SubMesh) -> GatherPolicy:
    """Return the policy of a parameter that the forward uses with the splits `used`."""
    param, grad, opt = storage_of(layout, tensor, axes)
    regather = gather_action(layout, tensor) == "regather"
    return GatherPolicy(param != opt and not regather, grad == used, regather)


def gather_action(layout: Layout, tensor: HasAtoms) -> Literal["keep", "regather"] | None:
    """Return "keep" or "regather" for a parameter, None without a statement."""
    best = _about(layout, tensor.name, ("keep", "regather"))
    if len({one.action for one in best}) > 1:
        raise layout_error(
            "E2",
            f"{tensor.name} is to be kept and to be gathered again by equally specific lines",
            f"write 'keep @{tensor.name}' or 'regather @{tensor.name}'",
            best[-1].span,
        )
    return None if not best else "regather" if best[0].action == "regather" else "keep"


def recompute_of(layout: Layout, layers: Iterable[str]) -> dict[str, Recompute]:
    """Return the levels of the layers that the layout names, `none` included."""
    found: dict[str, Recompute] = {}
    for layer in dict.fromkeys(layers):
        best = _about(layout, layer, ("recompute",))
        levels = {one.level for one in best if one.level is not None}
        if len(levels) > 1:
            raise layout_error(
                "E2",
                f"the layer {layer} is to be computed again in two ways by equally specific lines",
                f"drop one, or write 'recompute full @{layer}', which beats a pattern",
                best[0].span,
                best[-1].span,
            )
        if levels:
            found[layer] = levels.pop()
    return found


def _about(layout: Layout, name: str, actions: tuple[str, ...]) -> list[GatherStatement]:
    """Return the statements about a name: an exact name beats a pattern."""
    found = [
        one
        for one in layout
        if isinstance(one, GatherStatement) and one.action in actions and glob_matches(one.glob, name)
    ]
    return [one for one in found if one.glob == name] or found
