"""The text of a cluster file, of what was measured and fitted."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.calibration.fit import (
    CollectiveFit,
    Measurements,
    MultiplyFit,
    TimedCollective,
    fit_attention,
    fit_ops,
    fit_sustained,
)
from autopar.cost.compute.matmul_time import MatmulUnit
from autopar.cost.hardware.cluster import AttentionRates, Cluster, Device
from autopar.cost.hardware.topology import Library

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
    shipped: Cluster | None = None,
) -> str:
    """A file that `load_cluster` reads. One process measures no links: those of another file, and its sources.

    What cannot be measured is inherited from the shipped cluster of such devices, and said to be.
    """
    lines = [
        f"name = {_quoted(name)}",
        f"description = {_quoted(description)}",
        "",
        *([f"# [inherited]: not measured on this machine, but as in the cluster {shipped.name}"] if shipped else []),
        *_device(measurements, products, None if shipped is None else shipped.device),
        *_levels(measurements, fits),
        *_library(measurements, fits, None if shipped is None else shipped.library),
        *links[0],
        "[sources]",
        *links[1],
        *([_inherited_source(shipped, date)] if shipped else []),
        f"measured = {{ text = {_quoted(how)}, date = {date} }}",
    ]
    return "\n".join(lines) + "\n"


def times_table(collectives: Sequence[TimedCollective]) -> str:
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


def _inherited_source(shipped: Cluster, date: str) -> str:
    text = f"the cluster {shipped.name} that autopar ships, where its sources are: not measured on this machine"
    return f"inherited = {{ text = {_quoted(text)}, date = {date} }}"


def _kept(value: float, unit: str) -> str:
    """A number of the shipped cluster."""
    return f'"{value:.6g} {unit} [inherited]"'


def _device(measurements: Measurements, products: MultiplyFit, shipped: Device | None) -> list[str]:
    stream = measurements.stream_bytes_per_second / 1e9
    memory = [f"hbm = {_number(stream, 'GB/s')}"]
    if shipped is not None:
        memory = [f"hbm = {_kept(shipped.hbm_bytes_per_second / 1e9, 'GB/s')}", f"stream = {_number(stream, 'GB/s')}"]
    return [
        "[device]",
        f"name = {_quoted(measurements.device)}",
        f"memory = {_number(measurements.memory_bytes / 1e9, 'GB')}",
        *memory,
        f"launch = {_number(measurements.launch_seconds * 1e6, 'us')}",
        *_overhead(measurements),
        *_sustained(fit_sustained(products, measurements.chain), shipped),
        "",
        "[device.peak]",
        *(f"{dtype} = {_number(peak / 1e9, 'GFLOP/s')}" for dtype, peak in products.peak_flops.items()),
        *_other_peaks(products, shipped),
        "",
        *(_tiled_matrix(products.matrix) if products.matrix else _plain_matrix(products, measurements.processors)),
        "",
        *_attention(
            fit_attention(measurements.attentions, products.peak_flops, None if shipped is None else shipped.attention),
            shipped is not None,
        ),
        *_rates(measurements),
    ]


def _overhead(measurements: Measurements) -> list[str]:
    """What any op takes: of a device that starts its ops itself, or of the host beside it."""
    if not measurements.own_host:
        spent = measurements.overhead_seconds
        return [f"host = {_number(spent * 1e6, 'us')}"] if spent > 0 else []
    more = measurements.overhead_seconds - measurements.launch_seconds
    return [f"op = {_number(more * 1e6, 'us')}"] if more > 0 else []


def _sustained(measured: float, shipped: Device | None) -> list[str]:
    """A few seconds of layers do not bring a GPU to its limit of power: the shipped share, if that is less."""
    if shipped is not None and shipped.sustained_fraction < measured:
        return [f"sustained = {_kept(100 * shipped.sustained_fraction, '%')}"]
    return [f"sustained = {_number(100 * measured, '%')}"] if measured < 1 else []


def _other_peaks(products: MultiplyFit, shipped: Device | None) -> list[str]:
    others = {} if shipped is None else dict(shipped.peak_flops)
    return [
        f"{dtype} = {_kept(peak / 1e9, 'GFLOP/s')}"
        for dtype, peak in others.items()
        if dtype not in products.peak_flops
    ]


def _plain_matrix(products: MultiplyFit, processors: int) -> list[str]:
    """Tiles of one number, so that no wave of them is noticed."""
    return [
        "[device.matrix]",
        f'processors = "{processors} [measured]"',
        f"start = {_number(products.start_seconds * 1e6, 'us')}",
        f'fill = "{products.fill} [measured]"',
        'split = "0 us [measured]"',
        "aligned = {}",
        "",
        "[[device.matrix.tile]]",
        'rows = "1 [measured]"',
        'columns = "1 [measured]"',
        'reached = "100 % [measured]"',
    ]


def _tiled_matrix(matrix: MatmulUnit) -> list[str]:
    """The measured products are in the peaks."""
    aligned = ", ".join(f"{unit} = {_kept(100 * share, '%')}" for unit, share in matrix.aligned_fraction.items())
    lines = [
        "[device.matrix]",
        f'processors = "{matrix.processors} [inherited]"',
        f"start = {_kept(matrix.start_seconds * 1e6, 'us')}",
        f'fill = "{matrix.fill} [inherited]"',
        f"split = {_kept(matrix.split_seconds * 1e6, 'us')}",
        f"aligned = {{ {aligned} }}" if aligned else "aligned = {}",
    ]
    for tile in matrix.tile:
        lines += ["", "[[device.matrix.tile]]", f'rows = "{tile.rows} [inherited]"']
        lines += [f'columns = "{tile.columns} [inherited]"', f"reached = {_kept(100 * tile.reached_fraction, '%')}"]
    return lines


def _attention(fit: AttentionRates | None, is_shipped: bool) -> list[str]:
    if fit is None:
        return []
    shares = {
        "forward": fit.forward_fraction,
        "backward": fit.backward_fraction,
        "causal": fit.causal_fraction,
        "causal_backward": fit.causal_backward_fraction,
    }
    lines = [f"{key} = {_number(100 * share, '%')}" for key, share in shares.items()]
    rows = f'rows = "{fit.rows} [{"inherited" if is_shipped else "measured"}]"'
    softmax = [f'softmax = "{fit.softmax} [measured]"'] if fit.softmax else []
    return ["[device.attention]", rows, *lines, *softmax, ""]


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


def _library(measurements: Measurements, fits: Sequence[CollectiveFit], shipped: Library | None) -> list[str]:
    lines = ["[library]", 'name = "as measured"'] if fits else []
    if fits and shipped is not None:  # what a collective takes of the host, and of the device beside it
        host = ", ".join(f"{kind} = {_kept(spent * 1e6, 'us')}" for kind, spent in shipped.host_seconds.items())
        lines += [f"host = {{ {host} }}"] if host else []
        takes = shipped.processors and measurements.processors > 1
        lines += [f'processors = "{shipped.processors} [inherited]"'] if takes else []
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
