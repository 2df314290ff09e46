"""The text of a cluster file, of what was measured and fitted."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.calibrate import (
    CollectiveFit,
    Measured,
    Measurements,
    MultiplyFit,
    fit_attention,
    fit_ops,
    fit_sustained,
)
from autopar.cost.cluster import Attention

__all__ = ["cluster_text", "times_table"]

FREE = "1 B"
"""A pipeline that needs no filling."""
LINKS = ("inside", "across")


def cluster_text(
    name: str,
    description: str,
    measurements: Measurements,
    products: MultiplyFit,
    fits: Sequence[CollectiveFit],
    date: str,
    how: str,
    links: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> str:
    """A file that `load_cluster` reads. One process measures no links: those of another file, and its sources."""
    lines = [
        f"name = {_quoted(name)}",
        f"description = {_quoted(description)}",
        "",
        *_device(measurements, products),
        *_levels(measurements, fits),
        *_library(measurements, fits),
        *links[0],
        "[sources]",
        *links[1],
        f"measured = {{ text = {_quoted(how)}, date = {date} }}",
    ]
    return "\n".join(lines) + "\n"


def times_table(collectives: Sequence[Measured]) -> str:
    """All times, as CSV."""
    lines = ["kind,level,ranks,buffer_bytes,seconds,fitted"]
    for one in collectives:
        fitted = "no" if one.left_out else "yes"
        lines.append(f"{one.kind},{LINKS[one.level]},{one.ranks},{one.buffer_bytes:.0f},{one.seconds:.6g},{fitted}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _number(value: float, unit: str) -> str:
    return f'"{value:.4g} {unit} [measured]"'


def _device(measurements: Measurements, products: MultiplyFit) -> list[str]:
    stream = measurements.stream_bytes_per_second / 1e9
    sustained = fit_sustained(products, measurements.chain)
    overhead = measurements.overhead_seconds - measurements.launch_seconds
    return [
        "[device]",
        f"name = {_quoted(measurements.device)}",
        f"memory = {_number(measurements.memory_bytes / 1e9, 'GB')}",
        f"hbm = {_number(stream, 'GB/s')}",
        f"launch = {_number(measurements.launch_seconds * 1e6, 'us')}",
        *([f"op = {_number(overhead * 1e6, 'us')}"] if overhead > 0 else []),
        *([f"sustained = {_number(100 * sustained, '%')}"] if sustained < 1 else []),
        "",
        "[device.peak]",
        *(f"{dtype} = {_number(peak / 1e9, 'GFLOP/s')}" for dtype, peak in products.peak_flops.items()),
        "",
        "[device.matrix]",
        'processors = "1 [measured]"',
        f"start = {_number(products.start_seconds * 1e6, 'us')}",
        f'fill = "{products.fill} [measured]"',
        'split = "0 us [measured]"',
        "aligned = {}",
        "",
        "[[device.matrix.tile]]",
        'rows = "1 [measured]"',
        'columns = "1 [measured]"',
        'reached = "100 % [measured]"',
        "",
        *_attention(fit_attention(measurements.attentions, products.peak_flops["float32"])),
        *_rates(measurements),
    ]


def _attention(fit: Attention | None) -> list[str]:
    if fit is None:
        return []
    shares = {
        "forward": fit.forward_fraction,
        "backward": fit.backward_fraction,
        "causal": fit.causal_fraction,
        "causal_backward": fit.causal_backward_fraction,
    }
    lines = [f"{key} = {_number(100 * share, '%')}" for key, share in shares.items()]
    return ["[device.attention]", f'rows = "{fit.rows} [measured]"', *lines, ""]


def _rates(measurements: Measurements) -> list[str]:
    """Of the ops that do not get all that the memory gives."""
    lines: list[str] = []
    for way, rates in zip(("forward", "backward"), fit_ops(measurements), strict=True):
        found = [f"{op} = {_number(rate / 1e9, 'GB/s')}" for op, rate in rates.items()]
        lines += [f"[device.{way}]", *found, ""] if found else []
    return lines


def _levels(measurements: Measurements, fits: Sequence[CollectiveFit]) -> list[str]:
    lines: list[str] = []
    for level in _used(fits):
        rate = _fastest(fits, level)
        inside = level == 0
        lines += ["[[level]]", f'name = "{"node" if inside else "network"}"', f'link = "{LINKS[level]}"']
        if inside and measurements.nodes > 1:
            lines.append(f'units = "{measurements.ranks_per_node} [measured]"')
        # What all ranks of a node send together is theirs to share, where two of them alone are faster.
        together = rate * measurements.ranks_per_node
        alone = rate * _faster_alone(measurements, fits) if inside else together
        lines += ['ports = "1 [measured]"', f"port = {_number(alone / 1e9, 'GB/s')}"]
        if inside and alone > rate:
            lines.append(f"backplane = {_number(together / 1e9, 'GB/s')}")
        lines.append("")
    return lines


def _faster_alone(measurements: Measurements, fits: Sequence[CollectiveFit]) -> float:
    """How many times faster two ranks gather while the others rest; at least 1."""
    pairs = [fit for fit in fits if (fit.kind, fit.level) == ("all_gather", 0) and 2 in fit.ranks]
    if measurements.lone_bytes_per_second is None or not pairs:
        return 1.0
    return max(1.0, measurements.lone_bytes_per_second / pairs[0].bytes_per_second)


def _library(measurements: Measurements, fits: Sequence[CollectiveFit]) -> list[str]:
    lines = ["[library]", 'name = "as measured"'] if fits else []
    # Of the one processor that a device is taken to be: what is sent beside the computing takes all of it, or nothing.
    lines += ['processors = "1 [measured]"', ""] if fits and measurements.busy_cores else [""]
    rows: dict[tuple[str, int], dict[int, CollectiveFit]] = {}
    one_node = _used(fits) == [0]
    for fit in fits:
        # On one node what was fitted to a size of a group is a row of its own; else a row holds all levels.
        rows.setdefault((fit.kind, fit.ranks[0] if one_node else 0), {})[fit.level] = fit
    for (kind, ranks), row in rows.items():
        lines += [*_algorithm(kind, row, fits), *_range(kind, ranks, list(rows)), ""]
    return lines


def _algorithm(kind: str, row: dict[int, CollectiveFit], fits: Sequence[CollectiveFit]) -> list[str]:
    inside = row[min(row)]
    # One algorithm for all levels: that which fits inside nodes. Its base there is its base everywhere.
    hops = {level: _hop(fit, inside) for level, fit in row.items()}
    kinds = [kind, "halo_exchange"] if kind == "send" else [kind]
    free = {level: f'"{FREE} [measured]"' for level, fit in row.items() if not fit.pipelined}
    return [
        "[[library.algorithm]]",
        f'name = "{inside.algorithm}"',
        f"collectives = [{', '.join(map(_quoted, kinds))}]",
        f"base = {_number(inside.base_seconds * 1e6, 'us')}",
        f"hop = {_by_link({level: _number(hop * 1e6, 'us') for level, hop in hops.items()})}",
        f"bandwidth = {_by_link({level: _share(fit, fits) for level, fit in row.items()})}",
        *([f"fill = {_by_link(free)}"] if free else []),
    ]


def _range(kind: str, ranks: int, rows: Sequence[tuple[str, int]]) -> list[str]:
    """Between two sizes that were measured, the larger one counts; beyond the largest, that one."""
    sizes = sorted(size for other, size in rows if other == kind)
    place = sizes.index(ranks)
    least = [f'least = "{sizes[place - 1] + 1} [measured]"'] if place else []
    most = [f'most = "{ranks} [measured]"'] if place < len(sizes) - 1 else []
    return [*least, *most]


def _hop(fit: CollectiveFit, inside: CollectiveFit) -> float:
    """Across nodes, what is beyond the base inside counts as hops."""
    if fit.level == inside.level or fit.hop_seconds:
        return fit.hop_seconds
    return max(0.0, fit.base_seconds - inside.base_seconds)


def _share(fit: CollectiveFit, fits: Sequence[CollectiveFit]) -> str:
    return _number(100 * fit.bytes_per_second / _fastest(fits, fit.level), "%")


def _by_link(values: dict[int, str]) -> str:
    return "{ " + ", ".join(f"{LINKS[level]} = {value}" for level, value in values.items()) + " }"


def _used(fits: Sequence[CollectiveFit]) -> list[int]:
    return sorted({fit.level for fit in fits})


def _fastest(fits: Sequence[CollectiveFit], level: int) -> float:
    return max(fit.bytes_per_second for fit in fits if fit.level == level)
