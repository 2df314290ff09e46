"""Comparison of plans: costs, and tensors with different shardings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.errors import AutoparError
from autopar.plans.format import bytes_text, layout_text, percent_text, seconds_text, table
from autopar.plans.glob_cover import skeleton
from autopar.plans.record import PlanRecord

__all__ = ["MOST_DIFFERENCES", "cost_rows", "difference", "differences", "side_by_side"]

MOST_DIFFERENCES = 40


def difference(one: PlanRecord, other: PlanRecord) -> str:
    """Return the differences of a second plan."""
    return side_by_side({"this": one, "other": other})


def side_by_side(plans: Mapping[str, PlanRecord]) -> str:
    """Return a table of costs, then the tensors that differ from the first plan."""
    names = list(plans)
    lines = table(cost_rows(plans), right=range(1, len(names) + 1), indent="")
    for name in names[1:]:
        found = differences(plans[names[0]], plans[name])
        lines += [
            "",
            f"{names[0]} and {name} differ in {len(found)} kinds of tensors" if found else f"{name}: the same",
        ]
        rows = [("tensor", names[0], name), *((tensor, a, b) for tensor, (a, b) in found.items())]
        lines += table(rows[: MOST_DIFFERENCES + 1]) if found else []
        if len(found) > MOST_DIFFERENCES:
            lines.append(f"  and {len(found) - MOST_DIFFERENCES} more")
    return "\n".join(lines)


def cost_rows(plans: Mapping[str, PlanRecord]) -> list[Sequence[str]]:
    """Return rows of costs: step, its parts, memory, bytes by collective."""
    every = list(plans.values())
    rows: list[Sequence[str]] = [("", *plans)]
    rows.append(("step", *(seconds_text(plan.step_seconds) for plan in every)))
    rows.append(("  computing", *(seconds_text(plan.costs.compute.seconds) for plan in every)))
    rows.append(("  sending values", *(seconds_text(plan.costs.seconds_of("values")) for plan in every)))
    rows.append(("  parameters, not hidden", *(seconds_text(plan.costs.exposed_seconds) for plan in every)))
    rows.append(("memory", *(bytes_text(plan.memory_bytes) for plan in every)))
    rows.append(("fits", *("yes" if plan.fits else "no" for plan in every)))
    rows.append(("gap", *(_gap(plan) for plan in every)))
    totals = [_sent(plan) for plan in every]
    for key in dict.fromkeys(key for total in totals for key in total):
        rows.append((key, *(bytes_text(total[key]) if key in total else "-" for total in totals)))
    return rows


def _gap(plan: PlanRecord) -> str:
    return "-" if plan.gap is None else f"{percent_text(plan.gap)}{' by its file' if plan.claimed else ''}"


def _sent(plan: PlanRecord) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in plan.costs.communication:
        key = f"{one.kind}({'*'.join(one.axes)}) of {one.of}"
        found[key] = found.get(key, 0.0) + one.bytes
    return found


def differences(one: PlanRecord, other: PlanRecord) -> dict[str, tuple[str, str]]:
    """Return both shardings of each tensor that differs, repeated layers under one name."""
    found: dict[str, tuple[str, str]] = {}
    shared = [name for name in one.graph.tensors if name in other.graph.tensors]
    if not shared:
        raise AutoparError("the plans are for models that have no tensor in common\nfix: compare plans of one model")
    for name in shared:
        if not all(name in plan.decided.assignment.values for plan in (one, other)):
            continue
        tensor = one.graph.tensors[name]
        texts = tuple(_text(plan, name) for plan in (one, other))
        if texts[0] != texts[1]:
            # The first layer stands for all layers with the same difference.
            found.setdefault(skeleton(tensor.name), (texts[0], texts[1]))
    return found


def _text(plan: PlanRecord, name: str) -> str:
    tensor = plan.graph.tensors[name]
    text = layout_text(tensor, plan.layout_of(name))
    if tensor.kind == "param":
        used = layout_text(tensor, plan.decided.assignment.values[name])
        return text if used == text else f"{text} (used: {used})"
    return text
