"""Summary of a plan on one screen: dims, one layer, communication, time, memory; differences of several plans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import wrap

from autopar.errors import AutoparError
from autopar.ir.analysis.repeated_layers import RepeatedLayers
from autopar.ir.graph import count_text
from autopar.ir.precision import OWN
from autopar.plans.format import bytes_text, layout_text, percent_text, seconds_text, skeleton, table
from autopar.plans.record import PlanRecord, PricedCollective
from autopar.plans.views.confidence import noise_note, range_line
from autopar.plans.views.notes import notes
from autopar.plans.views.ranks import devices_text, unequal_ranks
from autopar.plans.views.stages import other_stages, schedule_rows, stage_table
from autopar.sharding.assignment import StepPlan
from autopar.sharding.layout.drift import print_drift


def summary(plan: PlanRecord) -> str:
    """Return the summary of a plan."""
    blocks = [
        _head(plan),
        _dims(plan),
        *_layers(plan),
        _outside(plan),
        _communication(plan),
        _time(plan),
        stage_table(plan),
        _replicas(plan),
        unequal_ranks(plan),
        _memory(plan),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _fits(fits: bool) -> str:
    return "fits" if fits else "DOES NOT FIT"


def _head(plan: PlanRecord) -> list[str]:
    model = type(plan.graph.model).__name__
    fits = _fits(plan.costs.limited_bytes <= plan.limit_bytes)
    best = "the best plan within the layout" if plan.within_layout else "the best plan"
    unproved = "no lower bound" if plan.bound_seconds is None else "no lower bound within the time limit"
    gap = unproved if plan.gap is None else f"at most {percent_text(plan.gap)} from {best}{plan.proof}"
    origin = f"from {plan.origin}" if plan.origin else ""
    share = percent_text(plan.limit_bytes / plan.cluster.device.memory_bytes)
    limit = f"{bytes_text(plan.limit_bytes)} per device, {share} of its memory"
    lines = [
        f"{model} on {plan.whole_mesh}: {devices_text(plan)} ({plan.cluster.name})",
        f"  step    {seconds_text(plan.step_seconds)}, {', '.join(filter(None, (gap, origin)))}",
        range_line(plan.time_range),
        f"  memory  {bytes_text(plan.memory_bytes)} of {limit}: {fits}",
    ]
    host_bytes, host_limit = plan.costs.memory.host_bytes, plan.costs.host_limit_bytes
    if host_bytes:
        of = "" if math.isinf(host_limit) else f" of {bytes_text(host_limit)}"
        lines.append(f"  host    {bytes_text(host_bytes)}{of} for each device: {_fits(plan.costs.fits_host)}")
    if plan.decided.options.precision != OWN:
        lines.insert(1, f"  runs    {plan.decided.options.precision.text}")
    lines += [*_in_time(plan), *_frozen(plan)]
    return lines + [f"  note    {one}" for one in notes(plan)]


def _in_time(plan: PlanRecord) -> list[str]:
    """Return a line about micro-batches; the table of the stages has the number of those without halves."""
    micro = plan.decided.micro
    if micro is None:
        return []
    if not micro.halves:
        line = f"  micro   the batch runs as {micro.count} micro-batches, one after the other"
        return [line] if plan.decided.assignment.pipelining is None else []
    whole = "the batch" if micro.count == 1 else f"each of {micro.count} micro-batches"
    return [f"  halves  {whole} runs as two halves, one beside the messages of the other"]


def exposed_label(plan: StepPlan) -> str:
    """Return the name of the communication beside the compute that is left: of halves also that of values."""
    micro = plan.micro
    return "exposed communication" if micro is not None and micro.halves else "exposed communication of parameters"


def _frozen(plan: PlanRecord) -> list[str]:
    """Return how many parameters are trained, where some are frozen."""
    graph, precision = plan.graph, plan.decided.options.precision
    kinds = dict.fromkeys(precision.stored(one.dtype, frozen=True) for one in graph.parameters if one.frozen)
    if not kinds:
        return []
    dtypes = " and ".join(str(kind).removeprefix("torch.") for kind in kinds)
    counts = f"{count_text(graph.trained_numel)} of {count_text(graph.numel)} parameters"
    return [f"  trains  {counts}; the others are frozen, stored in {dtypes}, without gradients and states"]


def dims_by_place(plan: PlanRecord) -> dict[str, list[str]]:
    """Return the dims that axes split, by axes; those split in most tensors first."""
    counts: dict[tuple[str, str], int] = {}
    for tensor in plan.graph.tensors.values():
        if tensor.name not in plan.decided.assignment.values:
            continue
        for atom, axes in zip(tensor.atoms, plan.layout_of(tensor.name).splits, strict=True):
            if axes and atom.names:
                key = "*".join(axes), atom.names[0]
                counts[key] = counts.get(key, 0) + 1
    found: dict[str, list[str]] = {}
    for place, dim in sorted(counts, key=lambda key: -counts[key]):
        found.setdefault(place, []).append(dim)
    return found


# Characters of a line of dims, so that rows with axes fit a terminal of 80.
WIDTH = 60


def _dims(plan: PlanRecord) -> list[str]:
    """Return rows of dims with equal axes; dims with several places list the most frequent first."""
    places: dict[str, list[str]] = {}
    for axes, dims in dims_by_place(plan).items():
        for dim in dims:
            places.setdefault(dim, []).append(axes)
    alike: dict[str, list[str]] = {}
    for dim, found in places.items():
        alike.setdefault(", or ".join(found), []).append(dim)
    groups = list(alike.items())
    whole = [dim for dim, known in plan.graph.dims.items() if dim not in places and known.source != "generated"]
    if whole:
        groups.append(("none", whole))
    rows = []
    for axes, dims in groups:
        lines = wrap(", ".join(dims), WIDTH, break_long_words=False)
        rows += [(line, "" if i else f"-> {axes}") for i, line in enumerate(lines)]
    return ["dims", *table(rows)]


# -- a layer


def collectives_by_place(collectives: Iterable[PricedCollective]) -> dict[tuple[str, str], list[PricedCollective]]:
    """Return the collectives by tensor and op."""
    found: dict[tuple[str, str], list[PricedCollective]] = {}
    for one in collectives:
        found.setdefault((one.tensor, one.op), []).append(one)
    return found


Row = tuple[str, str, str, str]
HEAD: Row = ("tensor", "dims", "layout", "sends")
WHOLE = "whole"


def layer_rows(plan: PlanRecord, names: Iterable[str], path: str = "", repeated: bool = False) -> list[Row]:
    """Return rows for the parameters of some ops and the values sent for them."""
    nodes = {node.name: node for node in plan.graph.nodes}
    sent = collectives_by_place(plan.collectives)
    rows: dict[str, Row] = {}
    for op in names:
        node = nodes[op]
        for name in dict.fromkeys((*node.operands, *node.outputs)):
            own = sent.get((name or "", op), [])
            tensor = plan.graph.tensors[name] if name is not None else None
            if tensor is None or (not own and tensor.kind != "param"):
                continue
            said = ", ".join(dict.fromkeys(_collective(one) for one in own))
            before = rows.get(tensor.name)
            if before is not None:
                said = ", ".join(filter(None, dict.fromkeys((before[3], said))))
            shown = tensor.name.removeprefix(path).lstrip("./") if _is_below(tensor.name, path) else tensor.name
            shown = skeleton(shown) if repeated and shown == tensor.name else shown
            rows[tensor.name] = shown, " ".join(tensor.dims), layout_text(tensor, plan.layout_of(tensor.name)), said
    return list(rows.values())


def _collective(one: PricedCollective) -> str:
    way = "→" if one.direction == "forward" else "←"
    return f"{way} {one.label} {bytes_text(one.bytes)}"


def _layers(plan: PlanRecord) -> Iterator[list[str]]:
    names = {node.node: node.name for node in plan.graph.nodes}
    for repeat in plan.graph.repeats:
        kinds: dict[tuple[Row, ...], list[int]] = {}
        for t, layer in enumerate(repeat.layers):
            ops = [names[one] for one in layer if one in names]
            rows = layer_rows(plan, ops, _shared_path(plan, ops, _path(repeat, t)), True)
            kinds.setdefault(tuple(rows), []).append(t)
        # The usual layer first; the others then show only the rows that differ from it.
        kinds = dict(sorted(kinds.items(), key=lambda one: -len(one[1])))
        usual = next(iter(kinds), ())
        for found, layers in kinds.items():
            first, last = _path(repeat, layers[0]) or "layer", _path(repeat, layers[-1])
            title = f"{first} ... {last}" if len(layers) > 1 else first
            if found is usual:
                yield [f"{title} (×{len(layers)})", *_rows(found)]
                continue
            other = [row for row in found if row not in usual]
            if other:
                yield [f"{title} (×{len(layers)}), where it differs", *table([HEAD, *other])]


def _is_quiet(row: Row) -> bool:
    return row[2] == WHOLE and not row[3]


def _rows(rows: Sequence[Row]) -> list[str]:
    """Return the rows as a table; whole parameters without traffic are counted only."""
    shown = [row for row in rows if not _is_quiet(row)]
    quiet = len(rows) - len(shown)
    more = [f"  and {len(shown) - MOST_ROWS} more"] if len(shown) > MOST_ROWS else []
    if quiet:
        what = "parameter" if quiet == 1 else "parameters"
        more.append(f"  {'and ' if shown else ''}{quiet} whole {what} without communication")
    return [*(table([HEAD, *shown[:MOST_ROWS]]) if shown else []), *more]


def _path(repeat: RepeatedLayers, t: int) -> str:
    return repeat.module_paths[t] if t < len(repeat.module_paths) else ""


def _is_below(name: str, path: str) -> bool:
    return bool(path) and name.startswith((f"{path}.", f"{path}/"))


def _shared_path(plan: PlanRecord, ops: Sequence[str], path: str) -> str:
    """Return the path of a layer; empty if parameters of the layer have names elsewhere."""
    nodes = {node.name: node for node in plan.graph.nodes}
    taken = {name for op in ops for name in nodes[op].operands if name is not None}
    own = [name for name in taken if plan.graph.tensors[name].kind == "param" and skeleton(name) != name]
    return path if all(_is_below(name, path) for name in own) else ""


def _outside(plan: PlanRecord) -> list[str]:
    inside = {name for repeat in plan.graph.repeats for layer in repeat.layers for name in layer}
    rows = layer_rows(plan, [node.name for node in plan.graph.nodes if node.node not in inside])
    title = "outside of repeated layers" if plan.graph.repeats else "tensors"
    told, quiet = [row for row in rows if not _is_quiet(row)], [row for row in rows if _is_quiet(row)]
    return [title, *_rows([*_once(told), *quiet])] if rows else []


def _once(rows: Iterable[Row]) -> list[Row]:
    """Merge rows that differ only in the numbers of a name, as in almost equal layers."""
    alike: dict[Row, list[str]] = {}
    for name, dims, layout, sends in rows:
        alike.setdefault((skeleton(name), dims, layout, sends), []).append(name)
    return [
        (names[0] if len(names) == 1 else f"{shown} (×{len(names)})", dims, layout, sends)
        for (shown, dims, layout, sends), names in alike.items()
    ]


MOST_ROWS = 40


# -- costs


def _communication(plan: PlanRecord) -> list[str]:
    rows = [("over", "collective", "of", "", "count", "bytes", "time")]
    for one in sorted(plan.costs.communication, key=lambda one: -one.seconds):
        over = "*".join(one.axes)
        size, seconds = bytes_text(one.bytes), seconds_text(one.seconds)
        rows.append((over, one.kind, one.of, one.direction, str(one.count), size, seconds))
    if len(rows) == 1:
        return ["communication", "  between stages alone" if plan.costs.stages else "  none"]
    return ["communication in a step", *table(rows, right=(4, 5, 6))]


def _time(plan: PlanRecord) -> list[str]:
    costs = plan.costs
    sent_at_meetings = 0.0 if costs.meetings is None else costs.meetings.sent_seconds
    parts = (
        ("forward", costs.compute.forward_seconds),
        ("backward", costs.compute.backward_seconds),
        ("recompute", costs.compute.recompute_seconds),
        ("optimizer", costs.compute.optimizer_seconds),
        ("communication of values", costs.waited_seconds),
        (exposed_label(plan.decided), costs.exposed_seconds),
        ("waiting for the host", costs.waiting_seconds),
        ("exposed copies to the host and back", costs.copies_seconds),
        ("waiting for other stages", costs.bubble_seconds),
        ("steps that end late, and waiting for them", costs.late_seconds),
        ("meetings of replicas", sent_at_meetings),
    )
    # An empty model takes no time: avoid a division by zero.
    step = costs.step_seconds or 1.0
    rows = [(name, seconds_text(s), percent_text(s / step)) for name, s in parts if s > 1e-4 * step]
    head = f"step time: {seconds_text(costs.step_seconds)}, {percent_text(costs.mfu)} of the devices' peak"
    return [head, *table(rows, right=(1, 2))]


def _replicas(plan: PlanRecord) -> list[str]:
    """Return what replicas that drift send and keep."""
    drift, costs = plan.decided.drift, plan.costs.meetings
    if drift is None or costs is None:
        return []
    rows = [
        ("sent by a rank, in a step", bytes_text(costs.sent_bytes), seconds_text(costs.sent_seconds)),
        ("steps that end late, and waiting for them", "", seconds_text(costs.late_seconds)),
        ("anchors and buffers of a rank", bytes_text(costs.memory_bytes), ""),
    ]
    names = f"{drift.replicas} replicas along {'*'.join(drift.axes)}, each {plan.mesh}"
    note = "  note    all else is of one replica; meetings change what is learned, so this prices the throughput alone"
    return [f"{print_drift(drift.statement)}: {names}", *table(rows, right=(1, 2)), note]


def _memory(plan: PlanRecord) -> list[str]:
    memory = plan.costs.memory
    kinds = (
        ("parameters", memory.parameters_bytes),
        ("copies of parameters", memory.copies_bytes),
        ("gradients", memory.gradients_bytes),
        ("optimizer", memory.optimizer_bytes),
        ("inputs", memory.inputs_bytes),
        ("saved for the backward", memory.saved_bytes),
        ("anchors of replicas", memory.meetings_bytes),
    )
    rows = [(name, bytes_text(size)) for name, size in kinds if size]
    head = f"peak memory per device: {bytes_text(memory.peak_bytes)}, at {memory.peak_at}"
    return [head, *table(rows, right=(1,))]


# -- comparison of plans -----------------------------------------------------------------------------------------------


MOST_DIFFERENCES = 40


def difference(one: PlanRecord, other: PlanRecord) -> str:
    """Return the differences of a second plan."""
    return side_by_side({"this": one, "other": other})


def side_by_side(plans: Mapping[str, PlanRecord]) -> str:
    """Return which plan is the fastest, a table of costs, then the tensors that differ from the first plan."""
    names = list(plans)
    lines = [verdict(plans), *noise_note(plans), ""]
    lines += table(cost_rows(plans), right=range(1, len(names) + 1), indent="")
    for name in names[1:]:
        found = differences(plans[names[0]], plans[name])
        lines += [
            "",
            f"{names[0]} and {name} differ in {len(found)} kinds of tensors"
            if found
            else f"{name}: the same shardings{other_stages(plans[names[0]], plans[name])}",
        ]
        rows = [("tensor", names[0], name), *((tensor, a, b) for tensor, (a, b) in found.items())]
        lines += table(rows[: MOST_DIFFERENCES + 1]) if found else []
        if len(found) > MOST_DIFFERENCES:
            lines.append(f"  and {len(found) - MOST_DIFFERENCES} more")
    return "\n".join(lines)


def verdict(plans: Mapping[str, PlanRecord]) -> str:
    """Return a line with the fastest plan that fits, and how much longer the others take."""
    ordered = sorted(plans, key=lambda name: (not plans[name].fits, plans[name].step_seconds))
    first = plans[ordered[0]]
    if not first.fits:
        least = min(ordered, key=lambda name: plans[name].memory_bytes)
        return f"none fits in the memory; {least} takes least, {bytes_text(plans[least].memory_bytes)}"
    others = [
        f"{name} × {plans[name].step_seconds / first.step_seconds:.2f}" if plans[name].fits else f"{name} does not fit"
        for name in ordered[1:]
    ]
    return "; ".join([f"fastest: {ordered[0]}, {seconds_text(first.step_seconds)} a step", *others])


def cost_rows(plans: Mapping[str, PlanRecord]) -> list[Sequence[str]]:
    """Return rows of costs: step, its parts, memory, bytes by collective."""
    every = list(plans.values())
    rows: list[Sequence[str]] = [("", *plans)]
    if any(plan.decided.options.precision != OWN for plan in every):
        rows.append(("precision", *(str(plan.decided.options.precision) for plan in every)))
    rows.append(("step", *(seconds_text(plan.step_seconds) for plan in every)))
    rows.append(("  compute", *(seconds_text(plan.costs.compute.seconds) for plan in every)))
    rows.append(("  communication of values", *(seconds_text(plan.costs.waited_seconds) for plan in every)))
    exposed = min((exposed_label(plan.decided) for plan in every), key=len)
    rows.append((f"  {exposed}", *(seconds_text(plan.costs.exposed_seconds) for plan in every)))
    waits = {
        "  waiting for the host": [plan.costs.waiting_seconds for plan in every],
        "  exposed copies to the host and back": [plan.costs.copies_seconds for plan in every],
        "  waiting for other stages": [plan.costs.bubble_seconds for plan in every],
    }
    for name, seconds in waits.items():
        if any(one > 1e-4 * plan.step_seconds for one, plan in zip(seconds, every, strict=True)):
            rows.append((name, *map(seconds_text, seconds)))
    rows += schedule_rows(every)
    rows.append(("memory", *(bytes_text(plan.memory_bytes) for plan in every)))
    rows.append(("fits", *("yes" if plan.fits else "no" for plan in every)))
    rows.append(("gap", *(_gap(plan) for plan in every)))
    totals = [_sent(plan) for plan in every]
    for key in dict.fromkeys(key for total in totals for key in total):
        rows.append((key, *(bytes_text(total[key]) if key in total else "-" for total in totals)))
    return rows


def _gap(plan: PlanRecord) -> str:
    return "-" if plan.gap is None else f"{percent_text(plan.gap)}{' as its file claims' if plan.claimed else ''}"


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
        raise AutoparError("the models of the plans have no tensor in common\nfix: compare plans of one model")
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
