"""Write measured and fitted constants as the text of a cluster file, and the measured times as CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autopar.cost.calibration.fit import (
    CollectiveFit,
    Measurements,
    MultiplyFit,
    TimedCollective,
    fit_attention,
    fit_ops,
    fit_sustained,
)
from autopar.cost.collective_algorithms import Library
from autopar.cost.compute.matmul_time import MatmulUnit
from autopar.cost.hardware.cluster import AttentionRates, Cluster, Device

# The fill of links without a pipeline, of an algorithm with one on others: one byte, so that filling takes no time.
NO_FILL = "1 B"
# Link names of level 0 (inside nodes) and level 1 (across nodes).
LINKS = ("inside", "across")
# A cluster file without measured tables.
NO_TABLES: Mapping[str, str] = MappingProxyType({})


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
    tables: Mapping[str, str] = NO_TABLES,
) -> str:
    """Return a cluster file for `load_cluster`; constants without a measurement come from the shipped cluster.

    One process measures no links: `links` are then the lines and sources of another file. `tables` are the names of CSV
    files, by the place of a table in the cluster file.
    """
    inherited = []
    note = []
    if shipped is not None:
        note = [f"# [inherited]: not measured on this machine, but as in the cluster {shipped.name}"]
        text = f"the cluster {shipped.name} that autopar ships, where its sources are: not measured on this machine"
        inherited = [f"inherited = {{ text = {_quoted(text)}, date = {date} }}"]
    lines = [
        f"name = {_quoted(name)}",
        f"description = {_quoted(description)}",
        "",
        *note,
        *_device(measurements, products, None if shipped is None else shipped.device),
        *_tables("device.tables", tables),
        *_levels(measurements, fits),
        *_library(measurements, fits, None if shipped is None else shipped.library),
        *_tables("library.tables", tables),
        *links[0],
        "[sources]",
        *links[1],
        *inherited,
        f"measured = {{ text = {_quoted(how)}, date = {date} }}",
    ]
    return "\n".join(lines) + "\n"


def times_table(collectives: Sequence[TimedCollective]) -> str:
    """Return all measured times as CSV, with a column for those in the fit."""
    lines = ["kind,level,ranks,buffer_bytes,seconds,fitted"]
    for one in collectives:
        fitted = "no" if one.left_out else "yes"
        lines.append(f"{one.kind},{LINKS[one.level]},{one.ranks},{one.buffer_bytes:.0f},{one.seconds:.6g},{fitted}")
    return "\n".join(lines) + "\n"


def _tables(table: str, files: Mapping[str, str]) -> list[str]:
    own = [(place.rpartition("."), file) for place, file in files.items()]
    lines = [f'{key} = "{file} [measured]"' for (folder, _, key), file in own if folder == table]
    return [f"[{table}]", *lines, ""] if lines else []


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _measured(value: float, unit: str) -> str:
    return f'"{value:.4g} {unit} [measured]"'


def _inherited(value: float, unit: str) -> str:
    return f'"{value:.6g} {unit} [inherited]"'


def _device(measurements: Measurements, products: MultiplyFit, shipped: Device | None) -> list[str]:
    stream = measurements.stream_bytes_per_second / 1e9
    memory = [f"hbm = {_measured(stream, 'GB/s')}"]
    if shipped is not None:
        bandwidth = _inherited(shipped.hbm_bytes_per_second / 1e9, "GB/s")
        memory = [f"hbm = {bandwidth}", f"stream = {_measured(stream, 'GB/s')}"]
    shipped_peaks = {} if shipped is None else shipped.peak_flops
    attention = None if shipped is None else shipped.attention
    return [
        "[device]",
        f"name = {_quoted(measurements.device)}",
        f"memory = {_measured(measurements.memory_bytes / 1e9, 'GB')}",
        *memory,
        f"launch = {_measured(measurements.launch_seconds * 1e6, 'us')}",
        *_optimizer(shipped),
        *_start(shipped),
        *_overhead(measurements),
        *_sustained(fit_sustained(products, measurements.chain), shipped),
        *_host_link(shipped),
        *([f"core = {_measured(100 * measurements.core_fraction, '%')}"] if measurements.core_fraction < 1 else []),
        "",
        "[device.peak]",
        *(f"{dtype} = {_measured(peak / 1e9, 'GFLOP/s')}" for dtype, peak in products.peak_flops.items()),
        *(
            f"{dtype} = {_inherited(peak / 1e9, 'GFLOP/s')}"
            for dtype, peak in shipped_peaks.items()
            if dtype not in products.peak_flops
        ),
        "",
        *(_tiled_matrix(products.matrix) if products.matrix else _plain_matrix(products, measurements.processors)),
        "",
        *_attention(fit_attention(measurements.attentions, products.peak_flops, attention), shipped is not None),
        *_op_rates(measurements),
    ]


def _overhead(measurements: Measurements) -> list[str]:
    """Return the overhead of every op: `op` for a device that launches its own ops, else `host`."""
    if not measurements.own_host:
        spent = measurements.overhead_seconds
        return [f"host = {_measured(spent * 1e6, 'us')}"] if spent > 0 else []
    more = measurements.overhead_seconds - measurements.launch_seconds
    return [f"op = {_measured(more * 1e6, 'us')}"] if more > 0 else []


def _optimizer(shipped: Device | None) -> list[str]:
    """Return the rate of an optimizer's step, which is not measured."""
    if shipped is None or shipped.optimizer_bytes_per_second is None:
        return []
    return [f"optimizer = {_inherited(shipped.optimizer_bytes_per_second / 1e9, 'GB/s')}"]


def _start(shipped: Device | None) -> list[str]:
    """Return the start of a kernel, which is shorter than the time between two ops that a program runs."""
    return (
        []
        if shipped is None or not shipped.start_seconds
        else [f"start = {_inherited(shipped.start_seconds * 1e6, 'us')}"]
    )


def _host_link(shipped: Device | None) -> list[str]:
    """Return the link to the host and its memory, which are not measured."""
    if shipped is None or shipped.host_link_bytes_per_second is None:
        return []
    rate = f"host_link = {_inherited(shipped.host_link_bytes_per_second / 1e9, 'GB/s')}"
    memory = shipped.host_memory_bytes
    return [rate] if memory is None else [rate, f"host_memory = {_inherited(memory / 1e9, 'GB')}"]


def _sustained(measured: float, shipped: Device | None) -> list[str]:
    # A few seconds of layers do not heat a GPU to its power limit: take the shipped share where it is less.
    if shipped is not None and shipped.sustained_fraction < measured:
        return [f"sustained = {_inherited(100 * shipped.sustained_fraction, '%')}"]
    return [f"sustained = {_measured(100 * measured, '%')}"] if measured < 1 else []


def _plain_matrix(products: MultiplyFit, processors: int) -> list[str]:
    # Tiles of 1 x 1 make the waves so short that the formula is that of `fit_products` without tiles.
    return [
        "[device.matrix]",
        f'processors = "{processors} [measured]"',
        f"start = {_measured(products.start_seconds * 1e6, 'us')}",
        f'fill = "{products.fill} [measured]"',
        'split = "0 us [measured]"',
        *([f'passes = "{products.passes:.3g} [measured]"'] if products.passes else []),
        "aligned = {}",
        "",
        "[[device.matrix.tile]]",
        'rows = "1 [measured]"',
        'columns = "1 [measured]"',
        'reached = "100 % [measured]"',
    ]


def _tiled_matrix(matrix: MatmulUnit) -> list[str]:
    # Only the peaks are measured: the fit took tiles and overheads of the shipped device as given.
    aligned = ", ".join(f"{unit} = {_inherited(100 * share, '%')}" for unit, share in matrix.aligned_fraction.items())
    lines = [
        "[device.matrix]",
        f'processors = "{matrix.processors} [inherited]"',
        f"start = {_inherited(matrix.start_seconds * 1e6, 'us')}",
        f'fill = "{matrix.fill} [inherited]"',
        f"split = {_inherited(matrix.split_seconds * 1e6, 'us')}",
        f"throttled = {_inherited(100 * matrix.throttled_fraction, '%')}",
        f"aligned = {{ {aligned} }}" if aligned else "aligned = {}",
    ]
    for tile in matrix.tile:
        reached = _inherited(100 * tile.reached_fraction, "%")
        lines += ["", "[[device.matrix.tile]]", f'rows = "{tile.rows} [inherited]"']
        lines += [f'columns = "{tile.columns} [inherited]"', f"reached = {reached}"]
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
    lines = [f"{key} = {_measured(100 * share, '%')}" for key, share in shares.items()]
    rows = f'rows = "{fit.rows} [{"inherited" if is_shipped else "measured"}]"'
    softmax = [f'softmax = "{fit.softmax} [measured]"'] if fit.softmax else []
    return ["[device.attention]", rows, *lines, *softmax, ""]


def _op_rates(measurements: Measurements) -> list[str]:
    """Return the tables of ops that are slower than the memory stream."""
    lines: list[str] = []
    for direction, rates in zip(("forward", "backward"), fit_ops(measurements), strict=True):
        found = [f"{op} = {_measured(rate / 1e9, 'GB/s')}" for op, rate in rates.items()]
        lines += [f"[device.{direction}]", *found, ""] if found else []
    return lines


def _levels(measurements: Measurements, fits: Sequence[CollectiveFit]) -> list[str]:
    lines: list[str] = []
    for level in _used(fits):
        rate = _fastest(fits, level)
        inside = level == 0
        lines += ["[[level]]", f'name = "{"node" if inside else "network"}"', f'link = "{LINKS[level]}"']
        if inside and measurements.nodes > 1:
            lines.append(f'units = "{measurements.ranks_per_node} [measured]"')
        # Two ranks alone can be faster than all together: the port has their rate, the backplane that of all.
        together = rate * measurements.ranks_per_node
        alone = rate * _lone_speedup(measurements, fits) if inside else together
        lines += ['ports = "1 [measured]"', f"port = {_measured(alone / 1e9, 'GB/s')}"]
        if inside and alone > rate:
            lines.append(f"backplane = {_measured(together / 1e9, 'GB/s')}")
        lines.append("")
    return lines


def _lone_speedup(measurements: Measurements, fits: Sequence[CollectiveFit]) -> float:
    """Return how much faster two ranks gather while all others are idle; at least 1."""
    pairs = [fit for fit in fits if (fit.kind, fit.level) == ("all_gather", 0) and 2 in fit.ranks]
    if measurements.lone_bytes_per_second is None or not pairs:
        return 1.0
    return max(1.0, measurements.lone_bytes_per_second / pairs[0].bytes_per_second)


def _library(measurements: Measurements, fits: Sequence[CollectiveFit], shipped: Library | None) -> list[str]:
    lines = ["[library]", 'name = "as measured"'] if fits else []
    if fits and measurements.fills_cores:
        # All processors of the device: what is sent beside the compute makes it as much longer.
        lines.append(f'processors = "{measurements.processors} [measured]"')
    # One process cannot measure how a collective loads the host and the processors of the device.
    if fits and shipped is not None:
        host = ", ".join(f"{kind} = {_inherited(spent * 1e6, 'us')}" for kind, spent in shipped.host_seconds.items())
        lines += [f"host = {{ {host} }}"] if host else []
        if shipped.processors and measurements.processors > 1:
            lines.append(f'processors = "{shipped.processors} [inherited]"')
    rows: dict[tuple[str, int], dict[int, CollectiveFit]] = {}
    one_node = _used(fits) == [0]
    for fit in fits:
        # On one node each group size has a row of its own; on several nodes a row has all levels.
        rows.setdefault((fit.kind, fit.ranks[0] if one_node else 0), {})[fit.level] = fit
    for (kind, ranks), row in rows.items():
        sizes = sorted(size for other, size in rows if other == kind)
        lines += [*_algorithm(kind, row, fits), *_group_sizes(ranks, sizes), ""]
    return lines


def _algorithm(kind: str, row: dict[int, CollectiveFit], fits: Sequence[CollectiveFit]) -> list[str]:
    inside = row[min(row)]
    # All levels have the algorithm and the base of the innermost one; across nodes, base beyond that counts as hops.
    hops = {
        level: fit.hop_seconds
        if fit.level == inside.level or fit.hop_seconds
        else max(0.0, fit.base_seconds - inside.base_seconds)
        for level, fit in row.items()
    }
    shares = {level: 100 * fit.bytes_per_second / _fastest(fits, fit.level) for level, fit in row.items()}
    kinds = [kind, "halo_exchange"] if kind == "send" else [kind]
    pipelined = any(fit.pipelined for fit in row.values())
    no_fill = {level: f'"{NO_FILL} [measured]"' for level, fit in row.items() if pipelined and not fit.pipelined}
    return [
        "[[library.algorithm]]",
        f'name = "{inside.algorithm}"',
        f"collectives = [{', '.join(map(_quoted, kinds))}]",
        f"base = {_measured(inside.base_seconds * 1e6, 'us')}",
        f"hop = {_by_link({level: _measured(hop * 1e6, 'us') for level, hop in hops.items()})}",
        f"bandwidth = {_by_link({level: _measured(share, '%') for level, share in shares.items()})}",
        f"pipelined = {str(pipelined).lower()}",
        *([f"fill = {_by_link(no_fill)}"] if no_fill else []),
    ]


def _group_sizes(ranks: int, sizes: Sequence[int]) -> list[str]:
    # A size between two measured ones is priced as the larger, a size above all as the largest.
    place = sizes.index(ranks)
    least = [f'least = "{sizes[place - 1] + 1} [measured]"'] if place else []
    most = [f'most = "{ranks} [measured]"'] if place < len(sizes) - 1 else []
    return [*least, *most]


def _by_link(values: dict[int, str]) -> str:
    return "{ " + ", ".join(f"{LINKS[level]} = {value}" for level, value in values.items()) + " }"


def _used(fits: Sequence[CollectiveFit]) -> list[int]:
    return sorted({fit.level for fit in fits})


def _fastest(fits: Sequence[CollectiveFit], level: int) -> float:
    return max(fit.bytes_per_second for fit in fits if fit.level == level)
