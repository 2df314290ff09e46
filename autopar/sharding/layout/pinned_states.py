"""What pins say of the axes that split no dim of a tensor: `+ partial(tp)`, `+ broadcast(dp)`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.precedence import glob_matches
from autopar.sharding.layout.source import SourceSpan, layout_error
from autopar.sharding.layout.syntax import Axes, Pin

__all__ = ["UNPINNED", "PinnedStates", "check_states", "states_of"]


@dataclass(frozen=True)
class PinnedStates:
    """The axes along which a tensor is a partial sum, or broadcast; and the line that says so."""

    partial: frozenset[str] = frozenset()
    broadcast: frozenset[str] = frozenset()
    span: SourceSpan | None = None

    @property
    def axes(self) -> frozenset[str]:
        return self.partial | self.broadcast


UNPINNED = PinnedStates()


def states_of(layout: Layout, name: str) -> PinnedStates:
    """What the pins of a tensor say; those without a word about states say nothing."""
    found: list[PinnedStates] = []
    for statement in layout:
        if isinstance(statement, Pin) and statement.states and glob_matches(statement.glob, name):
            found.append(_of_pin(statement))
    for other in found[1:]:
        if (other.partial, other.broadcast) != (found[0].partial, found[0].broadcast):
            raise layout_error(
                "E2", f"two pins of {name} say different things about its sums", "drop one", found[0].span, other.span
            )
    return found[0] if found else UNPINNED


def _of_pin(pin: Pin) -> PinnedStates:
    axes: dict[str, list[str]] = {"partial": [], "broadcast": []}
    for state in pin.states:
        axes[state.state] += state.axes
    every = [*axes["partial"], *axes["broadcast"]]
    for axis in every:
        if every.count(axis) > 1:
            raise layout_error(
                "E3",
                f"axis '{axis}' stands twice in this pin: an axis does one thing to a tensor",
                "name it once",
                pin.span,
            )
    return PinnedStates(frozenset(axes["partial"]), frozenset(axes["broadcast"]), pin.span)


def check_states(states: PinnedStates, name: str, splits: Iterable[tuple[str, Axes]]) -> None:
    """E3 where an axis is to split a dim of the tensor as well; `splits` are the axes of each of its dims."""
    for dim, axes in splits:
        for axis in axes:
            if axis in states.axes:
                raise layout_error(
                    "E3",
                    f"axis '{axis}' splits the dim '{dim}' of {name}, and is pinned to make it partial or broadcast",
                    f"let another axis split it, or none: '{dim} -> none' in the pin",
                    states.span,
                )
