"""How a parameter and its gradient are held from one use to the next, as `param`, `grad`, `keep` and `regather` say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.layout.language import Layout as LayoutText
from autopar.layout.precedence import glob_matches
from autopar.layout.resolve import HasAtoms
from autopar.layout.source import layout_error
from autopar.layout.storage import storage_of
from autopar.layout.syntax import Axes, Hold

__all__ = ["Holding", "holding_of"]


@dataclass(frozen=True)
class Holding:
    """What of a parameter lives on, beyond the shard that the optimizer sees."""

    lasting: bool
    """`param` asks for more than `opt` (ZeRO-1): what is gathered serves all micro-steps under `no_sync()`."""
    deferred: bool
    """Its gradient may wait for the last backward before the optimizer's step (DDP, ZeRO-1); else each reduces it."""
    again: bool
    """What is gathered of it is given up after the forward and gathered again."""


def holding_of(layout: LayoutText, tensor: HasAtoms, used: tuple[Axes, ...], axes: Mapping[str, int]) -> Holding:
    """Of a parameter that the forward takes as `used` splits it."""
    param, grad, opt = storage_of(layout, tensor, axes)
    again = _again(layout, tensor)
    return Holding(param != opt and not again, grad == used, again)


def _again(layout: LayoutText, tensor: HasAtoms) -> bool:
    """An exact name beats a pattern; the same word for word twice is a contradiction."""
    found = [hold for hold in layout if isinstance(hold, Hold) and hold.action != "recompute"]
    found = [hold for hold in found if glob_matches(hold.glob, tensor.name)]
    exact = [hold for hold in found if hold.glob == tensor.name]
    best = exact or found
    if len({hold.action for hold in best}) > 1:
        raise layout_error(
            "E2",
            f"{tensor.name} is to be kept and to be gathered again by equally specific lines",
            f"say 'keep @{tensor.name}' or 'regather @{tensor.name}'",
            best[-1].span,
        )
    return bool(best) and best[0].action == "regather"
