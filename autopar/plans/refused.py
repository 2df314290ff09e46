"""Errors of a search that found no plan: the closest mesh, the line that sets the limit, what would suffice."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory.peak import memory_limit, size_text
from autopar.errors import AutoparError, LayoutError
from autopar.mesh import Mesh
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.source import excerpts
from autopar.solver.infeasible import NoFeasiblePlan

__all__ = ["closest_of", "in_a_micro_batch", "with_all_memory", "with_its_line", "with_micro_batches"]


def closest_of(refused: Sequence[tuple[Mesh, AutoparError]], count: int) -> AutoparError:
    """Return the error to raise when no mesh works: the one that needs the least memory, else the first.

    `count` is that of all meshes; the time may be up before the last one.
    """
    short = [(mesh, error) for mesh, error in refused if isinstance(error, NoFeasiblePlan)]
    if not short or count == 1:
        return refused[0][1]
    mesh, error = min(short, key=lambda one: math.inf if one[1].least_bytes is None else one[1].least_bytes)
    late = "" if len(refused) == count else f" of which {len(refused)} were searched in time"
    what = f"of {count} meshes{late}, {mesh} comes closest: {error.what}"
    return NoFeasiblePlan(what, error.least_bytes, error.lines, error.fix)


def with_micro_batches(error: AutoparError, smaller: AutoparError) -> AutoparError:
    """Add what a step in micro-batches takes, where that is less and too much as well; `smaller` is their error."""
    if not isinstance(error, NoFeasiblePlan) or not isinstance(smaller, NoFeasiblePlan):
        return error
    whole, least = error.least_bytes, smaller.least_bytes
    if whole is None or least is None or least >= whole:
        return error
    return NoFeasiblePlan(f"{error.what}; in micro-batches it is {size_text(least)}", least, error.lines, smaller.fix)


def in_a_micro_batch(error: LayoutError, said: Layout | None) -> LayoutError:
    """Add the number of micro-batches to an error about a dim that axes do not divide: sizes are those of one."""
    micro = None if said is None else said.micro_batches
    if micro is None or error.code != "E4":
        return error
    what, *rest = str(error).split("\n")
    return LayoutError("E4", "\n".join((f"{what}, in one of {micro.count} micro-batches", *rest)))


def with_its_line(error: NoFeasiblePlan, given: Layout, limit: int, cluster: Cluster) -> NoFeasiblePlan:
    """Add the line of the layout that sets the memory limit."""
    lowest = memory_limit(given, cluster.device.memory_bytes)
    if error.least_bytes is None or lowest is None or int(lowest[1]) > limit:
        return error
    shown = excerpts(lowest[0].span)
    lines = (*error.lines, "the limit is set here", *shown) if shown else error.lines
    return NoFeasiblePlan(error.what, error.least_bytes, lines, error.fix)


def with_all_memory(error: NoFeasiblePlan, has_bytes: float) -> NoFeasiblePlan:
    """Add the fix `memory='100%'`, where the whole memory of a device suffices and the default limit does not."""
    if error.least_bytes is None or error.least_bytes > has_bytes:
        return error
    fix = f"{error.fix}; a device has {size_text(has_bytes)}, and memory='100%', --memory 100%, plans for all of it"
    return NoFeasiblePlan(error.what, error.least_bytes, error.lines, fix)
