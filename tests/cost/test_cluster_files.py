"""Cluster files: what they are read as, and what they say to mistakes, word by word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autopar.cost.hardware.cluster import Cluster, cluster_names, load_cluster
from autopar.cost.hardware.describe import describe, standalone
from autopar.cost.hardware.toml_reader import COUNT, measure_of, parse_quantity
from autopar.errors import ClusterError

TWO_LEVELS = Path(__file__).with_name("two_levels.toml")


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("memory_bytes", "80 GiB", 80 * 2**30),
        ("memory_bytes", "80 GB [datasheet]", 80e9),
        ("port_bytes_per_second", "400 Gb/s", 50e9),
        ("port_bytes_per_second", "25 GB/s", 25e9),
        ("port_bytes_per_second", "1.5e3 MiB/s", 1.5e3 * 2**20),
        ("base_seconds", "6.6 us", 6.6e-6),
        ("base_seconds", "6.6 µs", 6.6e-6),
        ("base_seconds", "0 ns", 0.0),
        ("peak_flops", "989 TFLOP/s", 989e12),
        ("bandwidth_fraction", "92 %", 0.92),
    ],
)
def test_units(field: str, text: str, value: float) -> None:
    measured = measure_of(field)
    assert measured is not None
    quantity = parse_quantity(text, measured[0])
    assert not isinstance(quantity, str)
    assert quantity.value == pytest.approx(value, rel=1e-12)
    assert quantity.source == ("datasheet" if "[" in text else None)


def test_a_count_has_no_unit() -> None:
    assert parse_quantity("8 GPUs", COUNT) == "'8 GPUs' is not a count: it has no unit"


def test_the_file_is_read() -> None:
    cluster = load_cluster(TWO_LEVELS)
    node, network = cluster.level
    assert (node.units, node.ports, node.rate_bytes_per_second) == (4, 2, 40e9)
    assert (network.units, network.ports, network.rate_bytes_per_second) == (None, 4, 25e9)
    assert cluster.device.peak_flops == {"float32": 10e12, "bfloat16": 100e12}
    ring, torus, _ = cluster.library.algorithm
    assert ring.hop(network) == pytest.approx(13e-6)  # its own addition for these links
    assert torus.hop(network) == pytest.approx(11e-6)  # that of any
    assert cluster.sources["made_up"].date == "2026-01-31"
    assert set(cluster.uncited) == {"level.0.units", "level.0.ports", "level.1.ports"}


# What the file says, what it is made to say, and the message. {line} is the line that holds the mistake.
MISTAKES = [
    (
        'memory = "16 GiB [made_up]"',
        'memory = "16 GiB/s [made_up]"',
        "'16 GiB/s [made_up]' is not a size: the units are B, KB, MB, GB, TB, PB, KiB, MiB, GiB, TiB",
        'as in "80 GiB"',
    ),
    ('memory = "16 GiB [made_up]"', "memory = 16", "'device.memory' is not a size with its unit", 'as in "80 GiB"'),
    (
        'hbm = "1 TB/s [made_up]"',
        'hbm = "fast"',
        "'fast' is not a bandwidth",
        'as in "450 GB/s"',
    ),
    (
        'hbm = "1 TB/s [made_up]"',
        'hbm = "-1 TB/s"',
        "'-1 TB/s' is impossible: a bandwidth is more than 0",
        'as in "450 GB/s"',
    ),
    (
        'launch = "5 us [made_up]"',
        'lunch = "5 us"',
        "unknown key 'lunch'; did you mean 'launch'?",
        None,
    ),
    (
        'launch = "5 us [made_up]"',
        'launch = "5 us [madeup]"',
        "there is no source 'madeup'; did you mean 'made_up'?",
        'under [sources], as in datasheet = { text = "...", date = 2026-01-31 }',
    ),
    (
        'launch = "5 us [made_up]"',
        'launch = "5 us, I think"',
        "'5 us, I think' is not a time: the units are s, ms, us, µs, ns",
        'as in "2.5 us"',
    ),
    ("units = 4", "units = 0", "'0' is impossible: a count is more than 0", 'as in "8 [datasheet]"'),
    ("units = 4", 'units = "4.5"', "'4.5' is impossible: a count is a whole number", 'as in "8 [datasheet]"'),
    (
        'achieved = "40 GB/s [made_up]"',
        'achieved = "60 GB/s"',
        "'achieved' is impossible: it is more than the port gives",
        "give what is achieved of one port in one direction",
    ),
    (
        'link = "bus"',
        'link = "buss"',
        "library 'Library' knows no links of kind 'buss'; did you mean 'bus'?",
        "its kinds of links are bus, wire",
    ),
    (
        'bandwidth = { wire = "50 % [made_up]" }',
        'bandwidth = { wire = "150 %" }',
        "'150 %' is impossible: a share is more than 0 and at most 100 %",
        'as in "92 %"',
    ),
    ('name = "torus"', 'name = "doughnut"', "there is no algorithm 'doughnut'", None),
    (
        'collectives = ["all_reduce", "all_gather", "reduce_scatter"]',
        'collectives = ["all_reduce", "all_gathers"]',
        "there is no collective 'all_gathers'; did you mean 'all_gather'?",
        None,
    ),
    ('name = "network"', 'name = "node"', "two levels are called 'node'", "give each level another name"),
    ("units = 4", "", "level 'node' lacks 'units'", "only the outermost level joins any number"),
    (
        'name = "two-levels"',
        "name = two-levels",
        "this is not TOML: Invalid value",
        None,
    ),
    ('name = "two-levels"', "name = 7", "'name' is not a text in quotes", 'write name = "..."'),
    (
        'made_up = { text = "made up for the tests", date = 2026-01-31 }',
        'made_up = "made up"',
        "'sources.made_up' is not a table",
        None,
    ),
]


@pytest.mark.parametrize(("before", "after", "message", "fix"), MISTAKES, ids=lambda case: str(case)[:30])
def test_mistakes(tmp_path: Path, before: str, after: str, message: str, fix: str | None) -> None:
    lines = TWO_LEVELS.read_text().splitlines()
    # A line that is taken away is told where its table begins.
    line = lines.index(before) + 1
    lines[line - 1] = after
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(lines))
    with pytest.raises(ClusterError) as error:
        load_cluster(path)
    told, place, *rest = str(error.value).splitlines()
    assert told == message
    if after:
        assert place == f"  mine.toml:{line} | {after}"
    else:
        assert place.startswith("  mine.toml:")
        assert "[[level]]" in place
    assert rest[-1].startswith("fix: ")
    if fix is not None:
        assert rest[-1] == f"fix: {fix}"


WIRES = '    "{}",'


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0111", "1011", "1101"], "'wires' is not a table of 4 rows of 4 digits"),
        (["0111", "1011", "1101", "1x10"], "'wires' is not a table of 4 rows of 4 digits"),
        (["0110", "1011", "1101", "1110"], "'wires' is impossible: 0 from unit 0 to 3, 1 back"),
        (["1110", "1011", "1101", "0110"], "'wires' is impossible: 1 from unit 0 to 0, 1 back"),
        (["0111", "1011", "1101", "1110"], "'wires' is impossible: row 0 has more links than the 2 ports"),
    ],
)
def test_mistakes_in_wires(tmp_path: Path, rows: list[str], message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TWO_LEVELS.read_text().replace("ports = 2\n", f"ports = 2\nwires = {rows}\n".replace("'", '"')))
    with pytest.raises(ClusterError) as error:
        load_cluster(path)
    assert str(error.value).startswith(f"{message}\n  mine.toml:19 | wires = ")


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="there is no cluster 'h10'; did you mean 'h100'"):
        load_cluster("h10")
    with pytest.raises(ClusterError, match="cannot be read"):
        load_cluster(tmp_path / "none.toml")
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\ndescription = ""\ndevice = "h1000"\nlibrary = "nccl-hopper"\n')
    with pytest.raises(ClusterError, match=r"(?s)there is no device 'h1000'; did you mean 'h100'\?\n  mine.toml:3"):
        load_cluster(path)


# -- the clusters that autopar ships ----------------------------------------------------------------------------------


@pytest.fixture(params=cluster_names())
def shipped(request: pytest.FixtureRequest) -> Cluster:
    return load_cluster(request.param)


def test_every_shipped_number_has_a_source_with_a_date(shipped: Cluster) -> None:
    # The size of a tile is the name of a kernel, not a measurement.
    assert [name for name in shipped.uncited if not re.search(r"matrix.tile.\d+.(rows|columns)$", name)] == []
    for name, source in shipped.sources.items():
        assert source.text, name
        assert len(source.date) == len("2026-01-31"), name
        assert "TODO" not in source.text, name


def test_every_shipped_cluster_says_what_checks_it(shipped: Cluster) -> None:
    assert shipped.checked
    assert f"checked   by {shipped.checked}" in describe(shipped)


def test_a_cluster_of_a_user_need_not_say_what_checks_it(tmp_path: Path) -> None:
    text = Path("cost_models/h200-efa.toml").read_text(encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(line for line in text.splitlines() if not line.startswith("checked")), encoding="utf-8")
    assert "checked   by nothing that the file names" in describe(load_cluster(path))


def test_a_shipped_cluster_as_one_file_is_the_same(shipped: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(standalone(shipped.name), encoding="utf-8")
    assert load_cluster(path) == shipped
