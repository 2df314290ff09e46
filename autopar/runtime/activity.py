"""Activities of ranks, as errors tell them apart: rank 0 evaluates, rank 1 trains."""

from __future__ import annotations

__all__ = ["Activity", "activity_of"]


class Activity(str):
    """Fact in the form of a predicate: the rank is its subject in a message."""

    __slots__ = ()


def activity_of(training: tuple[bool, ...]) -> Activity:
    """Return what a rank does with a model, given the train mode of each of its modules."""
    if len(set(training)) == 1:
        return Activity("trains" if training[0] else "evaluates")
    modes = "".join("et"[mode] for mode in training)
    return Activity(f"trains {sum(training)} of {len(training)} modules ({modes})")
