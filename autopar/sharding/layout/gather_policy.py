"""What lives on from one use to the next, as `param`, `grad`, `keep`, `regather` and `recompute` say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from autopar.mesh import SubMesh
from autopar.sharding.atoms import HasAtoms
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.parameter_storage import storage_of
from autopar.sharding.layout.precedence import glob_matches
from autopar.sharding.layout.source import layout_error
from autopar.sharding.layout.syntax import Axes, GatherStatement
from autopar.sharding.options import Recompute

__all__ = ["GatherPolicy", "gather_policy_of", "held_as", "recompute_of"]


@dataclass(frozen=True)
class GatherPolicy:
    """Lifetime of the gathered copy of a parameter, and time of the reduction of its gradient."""

    # ZeRO-1: `param` asks for more than `opt`, and one gathered copy serves all micro-batches under `no_sync()`.
    keep_gathered: bool
    # DDP and ZeRO-1: only the last backward before the optimizer's step reduces the gradient; else each one does.
    defer_reduction: bool
    # The gathered copy is freed after the forward and gathered again in the backward.
    regather: bool


def gather_policy_of(layout: Layout, tensor: HasAtoms, used: tuple[Axes, ...], axes: SubMesh) -> GatherPolicy:
    """Of a parameter that the forward takes as `used` splits it."""
    param, grad, opt = storage_of(layout, tensor, axes)
    regather = held_as(layout, tensor) == "regather"
    return GatherPolicy(param != opt and not regather, grad == used, regather)


def held_as(layout: Layout, tensor: HasAtoms) -> Literal["keep", "regather"] | None:
    """What becomes of what is gathered of a parameter; None where the layout does not say."""
    best = _about(layout, tensor.name, ("keep", "regather"))
    if len({hold.action for hold in best}) > 1:
        raise layout_error(
            "E2",
            f"{tensor.name} is to be kept and to be gathered again by equally specific lines",
            f"say 'keep @{tensor.name}' or 'regather @{tensor.name}'",
            best[-1].span,
        )
    return None if not best else "regather" if best[0].action == "regather" else "keep"


def recompute_of(layout: Layout, layers: Iterable[str]) -> dict[str, Recompute]:
    """Return the levels of the layers that the layout names, `none` included."""
    found: dict[str, Recompute] = {}
    for layer in dict.fromkeys(layers):
        best = _about(layout, layer, ("recompute",))
        levels = {hold.level for hold in best if hold.level is not None}
        if len(levels) > 1:
            raise layout_error(
                "E2",
                f"the layer {layer} is to be computed again in two ways by equally specific lines",
                f"drop one, or say 'recompute full @{layer}', which beats a pattern",
                best[0].span,
                best[-1].span,
            )
        if levels:
            found[layer] = levels.pop()
    return found


def _about(layout: Layout, name: str, actions: tuple[str, ...]) -> list[GatherStatement]:
    """The holds about a name: an exact name beats a pattern."""
    holds = [hold for hold in layout if isinstance(hold, GatherStatement) and hold.action in actions]
    found = [hold for hold in holds if glob_matches(hold.glob, name)]
    return [hold for hold in found if hold.glob == name] or found
