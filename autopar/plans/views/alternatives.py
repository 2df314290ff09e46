"""Alternatives of a tensor or op of a plan, each with the step time it would cause.

Each alternative adds one line to the plan: one axis splits another dim of the tensor, none, or another factor of the
op. The ops that the line touches keep their choices or are completed by propagation, whichever is faster; all else
stays. The result prices that one change. A search with the line finds the best plan in which the rest changes too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf

from autopar.cost.costs import Costs
from autopar.errors import LayoutError
from autopar.ir.values import NamedNode, NamedTensor
from autopar.plans.fit_rules import Splits, is_uneven, rules_for
from autopar.plans.format import bytes_text, seconds_text, table
from autopar.plans.record import PlanRecord
from autopar.plans.to_layout import choice_words
from autopar.sharding.assignment import Assignment, StepPlan
from autopar.sharding.choices import Choice, can_split, shardings_of
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.syntax import Axes, Block, DimRule, Kind, OpPin, Pin, PinState, Scope, print_statement
from autopar.sharding.propagation import reassign_ops, reassign_storage

__all__ = ["MOST_PRICED", "Alternative", "alternatives", "forced", "shown"]

STORED: tuple[Kind, ...] = ("param", "grad", "opt")
FORCED = "<forced>"
# Per tensor and per op: pricing more takes minutes on a large model.
MOST_PRICED = 12


@dataclass(frozen=True)
class Alternative:
    """A line that could be added to a plan, with the plan that it makes or the reason why it is infeasible."""

    change: str
    plan: PlanRecord | None
    why: str = ""


def alternatives(plan: PlanRecord, name: str) -> tuple[Alternative, ...]:
    """Return the alternatives of the tensor and op of this name, fastest first, infeasible ones last."""
    found: list[Alternative] = []
    known: list[tuple[StepPlan, tuple[DimRule, ...], Costs]] = [(plan.decided, (), plan.costs)]
    for line in (*islice(_of_tensor(plan, name), MOST_PRICED), *islice(_of_op(plan, name), MOST_PRICED)):
        one = forced(plan, line)
        if one.plan is not None:
            rules = () if isinstance(line, OpPin) else line.rules
            key = one.plan.decided, rules, one.plan.costs
            # For a parameter, a pin of storage and use may equal a pin of storage alone.
            if any(key[0] == other[0] or (rules and key[1:] == other[1:]) for other in known):
                continue
            known.append(key)
        found.append(one)
    return tuple(sorted(found, key=lambda one: inf if one.plan is None else one.plan.step_seconds))


def shown(plan: PlanRecord, found: Sequence[Alternative], alike: int = 1) -> str:
    """Return the alternatives as a table below the plan; `alike` is the number of equal layers."""
    if not found:
        return "no alternatives: no other split is possible here"
    rows = [("step", "", "memory", "fits", "")]
    rows.append((seconds_text(plan.step_seconds), "", bytes_text(plan.memory_bytes), _yes(plan.fits), "unchanged"))
    for one in found:
        if one.plan is not None:
            more = one.plan.step_seconds - plan.step_seconds
            sign = "+" if more >= 0 else "−"
            step, size = seconds_text(one.plan.step_seconds), bytes_text(one.plan.memory_bytes)
            rows.append((step, f"{sign}{seconds_text(abs(more))}", size, _yes(one.plan.fits), _short(one.change)))
    place = f", in one of {alike} equal layers" if alike > 1 else ""
    title = f"alternatives: each adds one line to the plan{place}; the rest is unchanged"
    lines = [title, *table(rows, right=(0, 1, 2))]
    return "\n".join([*lines, *(f"  {one.change} is infeasible: {one.why}" for one in found if one.plan is None)])


def _short(change: str) -> str:
    """Shorten a storage block: `param`, `grad` and `opt` repeat the name of the parameter."""
    scopes, brace, rules = change.partition(" { ")
    return f"storage only: {rules.removesuffix(' }')}" if brace and "," in scopes else change


def _yes(fits: bool) -> str:
    return "yes" if fits else "no"


def _of_tensor(plan: PlanRecord, name: str) -> Iterator[Pin | Block]:
    axes = plan.decided.axes
    tensor = plan.graph.tensors.get(name)
    if tensor is None:
        return
    scopes = tuple(Scope(kind, glob=name) for kind in STORED)
    yield from (Pin(name, rules_for(tensor, splits, axes)) for splits in _layouts(plan, tensor))
    yield from (Block(scopes, rules_for(tensor, splits, axes)) for splits in _storages(plan, tensor))


def _of_op(plan: PlanRecord, name: str) -> Iterator[OpPin]:
    for node in plan.graph.nodes:
        if node.name == name:
            for choice in _choices(plan, node):
                words, uneven = choice_words(node, choice, plan.decided.axes)
                yield OpPin(name, words, uneven=uneven)


def forced(plan: PlanRecord, line: Pin | Block | OpPin) -> Alternative:
    """Return the fastest plan with a line added."""
    change = " ".join(print_statement(line).replace("\n}", " }").replace("\n  ", ", ").replace("{,", "{").split())
    ways: list[Assignment] = []
    why = ""
    for way in _ways(plan, line):
        try:
            ways.append(way())
        except LayoutError as error:
            why = why or str(error).splitlines()[0]
    decided = [replace(plan.decided, assignment=way) for n, way in enumerate(ways) if way not in ways[:n]]
    plans = [replace(plan, decided=one, bound_seconds=None, origin=change) for one in decided]
    if not plans:
        return Alternative(change, None, why)
    return Alternative(change, min(plans, key=lambda one: one.step_seconds))


def _ways(plan: PlanRecord, line: Pin | Block | OpPin) -> Iterator[Callable[[], Assignment]]:
    """Yield reassignments with the line: ops keep their choices, or uses of parameters stay, or all is free."""
    graph, known, axes = plan.graph, plan.decided.assignment, plan.decided.axes
    if isinstance(line, Block):
        (name,) = {scope.glob for scope in line.scopes if scope.glob is not None}
        use = Block((Scope("use", glob=name),), rules_for(graph.tensors[name], known.values[name].splits, axes))
        broadcast = _in_order(known.values[name].broadcast, axes)
        states = (Pin(name, (), (PinState("broadcast", broadcast),)),) if broadcast else ()
        yield lambda: reassign_storage(graph, Layout((line, use, *states), FORCED), known, name)
        return
    nodes = [node for node in graph.nodes if line.glob in (node.name, *node.operands, *node.outputs)]
    if isinstance(line, OpPin):
        nodes = [node for node in nodes if node.name == line.glob]
    ops = {node.name for node in nodes}
    said = Layout((line, *_results(plan, ops, line.glob if isinstance(line, Pin) else "")), FORCED)
    if isinstance(line, Pin):
        words = [(node.name, choice_words(node, known.ops[node.name].choice, axes)) for node in nodes]
        pins = (OpPin(name, choice, uneven=uneven) for name, (choice, uneven) in words)
        yield lambda: reassign_ops(graph, Layout((*said, *pins), FORCED), known, ops)
    # Ops choose freely around the pin, but parameters keep the shardings in which they are used.
    yield lambda: reassign_ops(graph, said, known, ops)
    yield lambda: reassign_ops(graph, said, known, ops, uses_stay=False)


def _results(plan: PlanRecord, ops: Collection[str], but: str) -> Iterator[Pin]:
    """Yield pins of the results of some ops, as the plan has them."""
    axes = plan.decided.axes
    values = plan.decided.assignment.values
    for node in plan.graph.nodes:
        for name in node.outputs if node.name in ops else ():
            if name is None or name == but or name not in values:
                continue
            value = values[name]
            states = (("partial", value.partial), ("broadcast", value.broadcast))
            pinned = [PinState(word, _in_order(held, axes)) for word, held in states if held]  # type: ignore[arg-type]
            yield Pin(name, rules_for(plan.graph.tensors[name], value.splits, axes), tuple(pinned))


def _in_order(held: Collection[str], axes: Collection[str]) -> Axes:
    return tuple(axis for axis in axes if axis in held)


# -- of a tensor


def _storages(plan: PlanRecord, tensor: NamedTensor) -> Iterator[Splits]:
    """Yield storages of a parameter with one axis moved; its use stays."""
    if tensor.kind == "param" and tensor.name in plan.decided.assignment.values:
        now = plan.layout_of(tensor.name).splits
        yield from (splits for splits in dict.fromkeys(_moved(tensor, now, plan)) if splits != now)


def _layouts(plan: PlanRecord, tensor: NamedTensor) -> Iterator[Splits]:
    """Yield layouts: one axis moved, stored as used, used as stored, reduced, whole."""
    values = plan.decided.assignment.values
    if tensor.kind in ("buffer", "constant") or tensor.name not in values:
        return
    now, value = plan.layout_of(tensor.name).splits, values[tensor.name]
    seen = {_real(now, plan)} if now == value.splits and not value.partial else set[Splits]()
    for splits in (now, value.splits, *_moved(tensor, now, plan), ((),) * len(now)):
        if _real(splits, plan) not in seen:
            seen.add(_real(splits, plan))
            yield splits


def _real(splits: Splits, plan: PlanRecord) -> Splits:
    """Return the splits without axes of one rank, which split nothing."""
    return tuple(tuple(axis for axis in split if plan.decided.axes[axis] > 1) for split in splits)


def _moved(tensor: NamedTensor, now: Splits, plan: PlanRecord) -> Iterator[Splits]:
    axes = plan.decided.axes
    for axis in (name for name, size in axes.items() if size > 1):
        without = [tuple(one for one in split if one != axis) for split in now]
        yield tuple(without)
        for i, atom in enumerate(tensor.atoms):
            split = _in_order({*without[i], axis}, axes)
            if axis not in now[i] and not is_uneven(atom, split, axes):
                yield (*without[:i], split, *without[i + 1 :])


# -- of an op


def _choices(plan: PlanRecord, node: NamedNode) -> Iterator[Choice]:
    """Yield choices in which one axis splits another factor, or none."""
    axes = plan.decided.axes
    now = plan.decided.assignment.ops[node.name].choice
    sites = [(factor, atom) for factor in node.atoms for atom in range(len(node.atoms[factor]))]
    for axis in (name for name, size in axes.items() if size > 1):
        splits = {site: tuple(one for one in used if one != axis) for site, used in now.splits}
        passes = tuple(one for one in now.passes if one[0] != axis)
        for site in (None, *sites):
            if site is not None and (node.atoms[site[0]][site[1]] == 1 or axis in now.of(site)):
                continue
            moved = splits if site is None else {**splits, site: _in_order({*splits.get(site, ()), axis}, axes)}
            choice = Choice(tuple(sorted((s, used) for s, used in moved.items() if used)), passes)
            allowed = site is None or can_split(node, site, choice.of(site), axes)
            if choice != now and allowed and shardings_of(plan.graph, node, choice) is not None:
                yield choice
