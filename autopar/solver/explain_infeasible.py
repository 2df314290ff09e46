"""Explain infeasibility: lines of the layout that conflict with each other, or with the memory limit."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace

from autopar.cost.memory.peak import size_text
from autopar.errors import AutoparError, LayoutError
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.source import excerpts, layout_error
from autopar.solver.infeasible import NoFeasiblePlan, OutOfTime, conflicting, spans_of
from autopar.solver.model.build import plan_of
from autopar.solver.model.objective import FORBIDDEN_SECONDS, Hinges, Sum
from autopar.solver.search.elimination import Elimination
from autopar.solver.search.joined_axes import MOST_AXES
from autopar.solver.search.phases import Incumbent, SearchPhases, search_least_memory

__all__ = ["infeasible_error"]

# Seconds that an explanation may take, also where the search was shorter.
LEAST_SECONDS = 10.0


def infeasible_error(work: SearchPhases) -> AutoparError:
    """Return the error for a search without a plan.

    Conflicting lines are searched until the deadline. Telling takes about as long as the search had, or
    `LEAST_SECONDS` if that is more.
    """
    incumbent = work.incumbent
    until = time.monotonic() + max(LEAST_SECONDS, work.deadline - incumbent.began)
    work = replace(work, gives_up=until, until_one_fits=False)
    fits_none = not math.isfinite(incumbent.least_bytes)
    if len(incumbent.setting.used) > MOST_AXES:  # the model of all choices takes too long to build
        if incumbent.broken is not None and fits_none:
            return incumbent.broken
    elif incumbent.broken is not None or (fits_none and time.monotonic() < work.deadline):
        try:
            broken = _broken(work, incumbent.bound_layout)
        except OutOfTime:
            broken = incumbent.broken
        if broken is not None:
            return _conflict(work, broken)
    if fits_none:
        what = f"no plan that fits in {size_text(incumbent.limit)} on each device was found within the time limit"
        return NoFeasiblePlan(what, fix=f"fix: more time, {_fix(incumbent)}")
    lines: list[str] = []
    is_late = incumbent.cannot_fit and time.monotonic() > work.deadline
    said = ""
    if not (incumbent.bound_layout.is_empty or is_late):
        with suppress(OutOfTime):
            said = _without_the_layout(work, lines)
    what = (
        f"no plan was found that fits in {size_text(incumbent.limit)} on each device: the least that was found takes "
        f"{size_text(incumbent.least_bytes)}{said}"
    )
    return NoFeasiblePlan(what, incumbent.least_bytes, lines, f"fix: {_fix(incumbent)}")


# Results that take this share of a device are worth a word.
MUCH = 0.05


def _fix(incumbent: Incumbent) -> str:
    """Return what to change so that a plan may fit."""
    said, setting = "more devices, a smaller batch, or more memory", incumbent.setting
    returned = [setting.whole_graph.tensors[name] for name in dict.fromkeys(setting.whole_graph.outputs)]
    has_loss = any(not one.shape and one.requires_grad for one in returned)
    each = sum(math.prod(one.shape) * one.element_bytes for one in returned) / setting.ranks
    if not has_loss or setting.options.outputs == "loss" or each < MUCH * incumbent.limit:
        return said
    return f"{said}; outputs='loss' leaves out the {size_text(each)} a device that the model returns beside its loss"


def _conflict(work: SearchPhases, broken: LayoutError) -> LayoutError:
    """Return lines that no plan keeps together, whatever its time and memory."""
    last = broken

    def can_be_had(bound_layout: BoundLayout) -> bool:
        nonlocal last
        found = _broken(work, bound_layout)
        last = found or last
        return found is None

    lines, is_smallest = conflicting(work.incumbent.bound_layout, can_be_had, work.deadline)
    if len(lines) < 2:
        return last
    what = "these lines cannot all be had; without any one of them, the others can"
    if not is_smallest:
        what = "some of these lines cannot all be had; there was no time to find out which"
    first, *_ = str(last).splitlines()
    return layout_error(
        "E7",
        f"{what}; in the plan that comes closest, {first.removeprefix(f'{last.code}: ')}",
        "drop one of these lines, or leave more open",
        *spans_of(lines),
    )


def _broken(work: SearchPhases, bound_layout: BoundLayout) -> LayoutError | None:
    """Return what the plan breaks which breaks least: a contract, or a reshard without steps; None if nothing."""
    other = _other(work, bound_layout)
    model = other.model()
    weights = 1e-9 * Hinges.of(work.setting).base
    weights[Sum.FORBIDDEN] = FORBIDDEN_SECONDS
    other.incumbent.can_run(plan_of(model, Elimination.of(model).candidate(weights)))
    return other.incumbent.broken


def _without_the_layout(work: SearchPhases, shown: list[str]) -> str:
    """Return whether the layout makes memory short; add the conflicting lines to `shown`."""
    incumbent = work.incumbent
    least_bytes = _least(work, BoundLayout(incumbent.setting.graph, Layout(()), incumbent.setting.axes)).least_bytes
    if not math.isfinite(least_bytes):  # nothing was found that can run
        return ""
    if least_bytes >= incumbent.least_bytes:
        return "; without the layout it is no less"
    if least_bytes > incumbent.limit:
        return f"; without the layout it is {size_text(least_bytes)}, which is too much as well"
    lines, is_smallest = conflicting(
        incumbent.bound_layout, lambda other: _least(work, other).plan is not None, work.deadline
    )
    told = "its lines are to blame"
    if is_smallest and lines:
        shown += excerpts(*spans_of(lines))
        told = "this line is to blame, and without it the others fit"
        if len(lines) > 1:
            told = "these lines are to blame, and without any one of them the others fit"
    return f"; {told}: without the layout, {size_text(least_bytes)} would do"


def _least(work: SearchPhases, bound_layout: BoundLayout) -> Incumbent:
    """Return the incumbent with least memory among plans that keep the other lines."""
    other = _other(work, bound_layout)
    search_least_memory(other, only_one=True)
    if other.incumbent.plan is None:
        other.lower_memory()
    return other.incumbent


def _other(work: SearchPhases, bound_layout: BoundLayout) -> SearchPhases:
    """Return the same search under another layout, with an incumbent of its own."""
    incumbent = Incumbent(work.setting, work.incumbent.limit, work.incumbent.began, None, bound_layout)
    return replace(work, bound_layout=bound_layout, incumbent=incumbent)
