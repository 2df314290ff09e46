"""Tables of measured times: what they change, between their rows and beyond them, and what is refused, word by word."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopar
from autopar.cost.calibration.fit import Measurements, TimedCollective, TimedProduct
from autopar.cost.calibration.measure import buffer_sizes, product_sizes
from autopar.cost.calibration.measured_tables import errors_of, measured_rows, with_tables, without_tables
from autopar.cost.calibration.op_trials import TimedAttention, more_attention_trials
from autopar.cost.compute.attention_time import AttentionShape, measured_shape, seconds_of_attention
from autopar.cost.compute.fastest_rate import fastest_flops_per_second
from autopar.cost.compute.matmul_time import MatmulShape
from autopar.cost.compute.product_time import seconds_of_product
from autopar.cost.compute.rates import peak_of
from autopar.cost.hardware.cluster import Cluster, load_cluster
from autopar.cost.hardware.describe import describe, links_of, standalone
from autopar.cost.measured.interpolation import Ratios, place
from autopar.cost.measured.tables import (
    AttentionTime,
    CollectiveTime,
    ProductTime,
    table_text,
)
from autopar.cost.network import Network
from autopar.errors import ClusterError
from autopar.mesh import SubMesh
from examples.gpt import gpt

BF16 = torch.bfloat16
TWO_LEVELS = Path(__file__).with_name("two_levels.toml")
ROWS, LENGTHS, BYTES = (64, 512, 4096), (128, 1024, 8192), (2**12, 2**20, 2**28)
GROUPS = {"8": 2, "2x1": 8, "2x8": 1}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def network(cluster: Cluster, outer: int = 2, inner: int = 8) -> Network:
    return Network(cluster, SubMesh({"outer": outer, "inner": inner}))


def axes_of(units: str) -> tuple[str, ...]:
    return {"8": ("inner",), "2x1": ("outer",), "2x8": ("outer", "inner")}[units]


def as_predicted(cluster: Cluster, times: float = 1.0) -> Cluster:
    """Return a cluster with tables of what its formulas say, or of so many times that."""
    device = replace(cluster.device, sustained_fraction=1.0)
    products = [
        ProductTime("bfloat16", 1, m, n, k, times * seconds_of_product(device, MatmulShape(1, m, n, k), BF16))
        for m in ROWS
        for n in ROWS
        for k in ROWS
    ]
    attentions = []
    for causal in (False, True):
        for rows in LENGTHS:
            shape = measured_shape(32, rows, rows, 64, causal, 2)
            both = (times * seconds for seconds in seconds_of_attention(device, shape, BF16))
            attentions.append(AttentionTime("bfloat16", causal, 32, rows, rows, 64, *both))
    links = network(cluster)
    collectives = [
        CollectiveTime(kind, units, groups, size, times * links.library_seconds(kind, axes_of(units), size))
        for kind in KINDS
        for units, groups in GROUPS.items()
        for size in BYTES
    ]
    return with_tables(cluster, (products, attentions, collectives))


def step(cluster: Cluster) -> autopar.Costs:
    model, inputs = gpt(layers=2, d_model=512, heads=8, vocab=1024, seq=512, batch=64, device="meta")
    plan = autopar.plan(model, "dp=2,tp=8", inputs, layout="megatron", cluster=cluster, precision="bf16", cache=False)
    return plan.costs


# -- what they change --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def h100() -> Cluster:
    return load_cluster("h100")


def test_a_table_of_what_the_formulas_say_changes_nothing(h100: Cluster) -> None:
    plain, same = step(h100), step(as_predicted(h100))
    for one in ("step_seconds", "exposed_seconds"):
        assert getattr(same, one) == pytest.approx(getattr(plain, one), rel=1e-9)
    assert same.compute.forward_seconds == pytest.approx(plain.compute.forward_seconds, rel=1e-9)


@pytest.mark.parametrize(("m", "n", "k"), [(64, 512, 4096), (100, 3000, 777), (8, 16, 24), (20000, 9000, 64000)])
def test_twice_the_seconds_of_products_double(h100: Cluster, m: int, n: int, k: int) -> None:
    twice = as_predicted(h100, 2.0)
    for batch in (1, 6):
        product = MatmulShape(batch, m, n, k)
        ratio = seconds_of_product(twice.device, product, BF16) / seconds_of_product(h100.device, product, BF16)
        assert ratio == pytest.approx(2.0 if batch == 1 else 1.0), "batches are in no row"
    product = MatmulShape(1, m, n, k)
    seconds = [seconds_of_product(cluster.device, product, torch.float16) for cluster in (twice, h100)]
    assert seconds[0] == seconds[1], "another dtype keeps its formula"


@pytest.mark.parametrize("causal", [False, True])
def test_twice_the_seconds_of_attention_double(h100: Cluster, causal: bool) -> None:
    twice = as_predicted(h100, 2.0)
    for queries, keys in ((128, 128.0), (300, 5000.0), (10, 9.0), (30_000, 40_000.0)):
        shape = AttentionShape(16, queries, keys, 128, causal, 1e6)
        both = (seconds_of_attention(cluster.device, shape, BF16) for cluster in (twice, h100))
        for after, before in zip(*both, strict=True):
            assert after == pytest.approx(2 * before)


@pytest.mark.parametrize("kind", [*KINDS, "halo_exchange", "ring_pass"])
def test_twice_the_seconds_of_collectives_double(h100: Cluster, kind: str) -> None:
    plain, twice = network(h100), network(as_predicted(h100, 2.0))
    for axes in (("inner",), ("outer",), ("outer", "inner")):
        for size in (1.0, 2.0**12, 3e5, 2.0**34):
            assert twice.seconds(kind, axes, size) == pytest.approx(2 * plain.seconds(kind, axes, size))
    assert twice.seconds("broadcast", ("inner",), 1e6) == plain.seconds("broadcast", ("inner",), 1e6), "in no row"
    assert twice.seconds(kind, ("inner",), 0.0) == 0.0


def test_groups_of_other_sizes_follow_their_neighbours(h100: Cluster) -> None:
    plain = network(h100, 1, 8)
    rows = [
        CollectiveTime("all_reduce", units, 1, 2**20, factor * plain.seconds("all_reduce", ("inner",), 2.0**20))
        for units, factor in (("8", 3.0),)
    ]
    four = network(h100, 1, 4)
    cluster = with_tables(h100, ([], [], rows))
    seconds = network(cluster, 1, 4).seconds("all_reduce", ("inner",), 2.0**20)
    assert seconds == pytest.approx(3 * four.seconds("all_reduce", ("inner",), 2.0**20))
    # Nodes are another level: no row is of groups that join any.
    for axes in (("outer",), ("outer", "inner")):
        both = (network(one, 4, 8).library_seconds("all_reduce", axes, 2.0**20) for one in (cluster, h100))
        assert len(set(both)) == 1


def test_a_plan_computes_and_communicates_longer(h100: Cluster) -> None:
    """Products, attention and collectives; ops by bytes are in no table."""
    plain, twice = step(h100), step(as_predicted(h100, 2.0))
    assert twice.step_seconds > plain.step_seconds
    assert 1.2 < twice.compute.forward_seconds / plain.compute.forward_seconds < 2.0
    before, after = (sum(part.seconds for part in one.communication) for one in (plain, twice))
    assert after == pytest.approx(2 * before, rel=0.02)


def test_a_slower_device_takes_longer_by_its_table_too(h100: Cluster) -> None:
    device = as_predicted(h100, 3.0).device
    slow = device.at_speed(0.5)
    for product in (MatmulShape(1, 512, 512, 512), MatmulShape(1, 5000, 300, 4000)):
        before, after = (seconds_of_product(one, product, BF16) for one in (device, slow))
        assert 1.0 < after / before <= 2.0 + 1e-9, "the memory stream of a formula may be the limit"
    # At a row of the table the time is twice the measured one.
    shape = measured_shape(32, 1024, 1024, 64, True, 2)
    both = (seconds_of_attention(replace(one, sustained_fraction=1.0), shape, BF16)[0] for one in (slow, device))
    assert next(both) == pytest.approx(2 * next(both))


def test_other_links_have_no_measured_times(h100: Cluster) -> None:
    twice = as_predicted(h100, 2.0)
    slower = tuple(replace(level, ports=1) for level in h100.level)
    assert twice.with_links(h100.level) is twice
    plain, changed = (network(one.with_links(slower)) for one in (h100, twice))
    assert changed.seconds("all_reduce", ("inner",), 1e6) == plain.seconds("all_reduce", ("inner",), 1e6)


def test_a_bound_holds_where_a_measured_product_is_faster_than_the_peak(h100: Cluster) -> None:
    fast = as_predicted(h100, 0.25)
    product = MatmulShape(1, 4096, 4096, 4096)
    assert product.flops / seconds_of_product(fast.device, product, BF16) > peak_of(fast.device, BF16)
    assert product.flops / seconds_of_product(fast.device, product, BF16) <= fastest_flops_per_second(fast.device, BF16)
    assert fastest_flops_per_second(h100.device, BF16) == peak_of(h100.device, BF16)


# -- interpolation -----------------------------------------------------------------------------------------------------


def test_ratios_between_and_beyond_rows() -> None:
    line = Ratios.of([(place(16.0), 4.0, 1.0), (place(4.0), 1.0, 1.0)])
    assert [line.at(place(size)) for size in (1.0, 4.0, 8.0, 16.0, 999.0)] == pytest.approx([1.0, 1.0, 2.0, 4.0, 4.0])
    square = Ratios.of([(place(a, b), a * b, 1.0) for a in (2.0, 8.0) for b in (2.0, 8.0)])
    assert square.at(place(4.0, 4.0)) == pytest.approx(16.0)
    assert square.at(place(8.0, 99.0)) == pytest.approx(64.0)
    assert square.least == pytest.approx(4.0)
    assert 4.0 < square.at(place(3.0, 5.0)) < 64.0
    assert Ratios.of([(place(3.0, 5.0), 1.5, 1.0)]).at(place(0.0, 0.1)) == pytest.approx(1.5)


# -- files -------------------------------------------------------------------------------------------------------------

PRODUCTS = table_text([ProductTime("bfloat16", 1, 64, 64, 64, 1e-5), ProductTime("bfloat16", 1, 64, 64, 128, 2e-5)])
ATTENTION = table_text([AttentionTime("bfloat16", True, 8, 128, 128, 64, 1e-5, 3e-5)])
COLLECTIVES = table_text([CollectiveTime("all_reduce", "2x4", 1, 1024, 1e-5)])


def written(folder: Path, **texts: str) -> Path:
    """Write a cluster file with its tables."""
    texts = {"products": PRODUCTS, "attention": ATTENTION, "collectives": COLLECTIVES} | texts
    for name, text in texts.items():
        (folder / f"my-{name}.csv").write_text(text)
    of_device = 'products = "my-products.csv [made_up]"\nattention = "my-attention.csv [made_up]"\n'
    text = TWO_LEVELS.read_text().replace("[[level]]", f"[device.tables]\n{of_device}\n[[level]]", 1)
    text = text.replace("[sources]", '[library.tables]\ncollectives = "my-collectives.csv"\n\n[sources]')
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_files_are_read(tmp_path: Path) -> None:
    cluster = load_cluster(written(tmp_path))
    assert seconds_of_product(cluster.device, MatmulShape(1, 64, 64, 64), BF16) == pytest.approx(1e-5)
    assert Network(cluster, SubMesh({"dp": 2, "tp": 4})).seconds("all_reduce", ("dp", "tp"), 1024) == pytest.approx(
        1e-5
    )
    tables = cluster.device.tables
    assert tables.products is not None
    assert tables.attention is not None
    assert (len(tables.products.rows), tables.attention.rows[0].causal) == (2, True)
    assert cluster.cited["device.tables.products"] == "made_up"
    assert "library.tables.collectives" in cluster.uncited


def test_a_changed_table_is_another_cluster(tmp_path: Path) -> None:
    before = load_cluster(path := written(tmp_path))
    assert load_cluster(path) is before
    (tmp_path / "my-products.csv").write_text(PRODUCTS.replace("1e-05", "3e-05"))
    os.utime(tmp_path / "my-products.csv", (1, 1))
    after = load_cluster(path)
    assert seconds_of_product(after.device, MatmulShape(1, 64, 64, 64), BF16) == pytest.approx(3e-5)
    assert repr(after) != repr(before), "the key of cached plans"


def test_where_numbers_come_from(tmp_path: Path) -> None:
    text = describe(load_cluster(written(tmp_path)))
    assert "  measured  products: 2 rows of my-products.csv [made_up]; else by the formula" in text
    assert "            collectives: 1 rows of my-collectives.csv [no source]; else by the formula" in text
    prices = {tuple(line.split()[:4]): line for line in text.splitlines() if " x 4 " in line}
    scaled = {(key[0], key[1]) for key, line in prices.items() if "*" in line}
    assert scaled == {("all_reduce", "2"), ("all_reduce", "16")}, "rows on the same levels are neighbours"
    assert "  * scaled to measured times" in text
    assert "    gives device.memory, .hbm, .launch; device.peak.float32, .bfloat16; device.tables.products" in text
    assert "  without a source: library.tables.collectives; level.0.ports, .units; level.1.ports" in text


def test_a_copy_elsewhere_has_the_same_tables(tmp_path: Path) -> None:
    path = written(tmp_path)
    (tmp_path / "other").mkdir()
    copy = tmp_path / "other" / "copy.toml"
    copy.write_text(standalone(path))
    assert load_cluster(copy).device == load_cluster(path).device
    assert any(str(tmp_path / "my-collectives.csv") in line for line in links_of(path)[0])


MISTAKES = [
    ("products", "64,64,128", "64,64,0", "'reduction' is not a whole number from 1 up: '0'", "give a whole number"),
    ("products", "64,64,128", "64,64,many", "'reduction' is not a whole number from 1 up: 'many'", "give a whole"),
    ("products", "2e-05", "-2e-05", "'seconds' is not a number of seconds above 0: '-2e-05'", "give a number"),
    ("products", "2e-05", "nan", "'seconds' is not a number of seconds above 0: 'nan'", "give a number"),
    (
        "products",
        "bfloat16,1,64,64,128",
        "bf16,1,64,64,128",
        "there is no dtype 'bf16'; did you mean 'bfloat16'?",
        "one of float64, ",
    ),
    ("products", "64,64,128,2e-05", "64,64,128", "the row has 5 cells and not 6", "give dtype,batch,rows,columns"),
    ("products", "64,64,128", "64,64,64", "line 2 has the same sizes", "keep one of the two rows"),
    ("attention", ",yes,", ",true,", "'causal' is not yes or no: 'true'", "give yes or no"),
    (
        "attention",
        "128,128",
        "128,256",
        "causal attention of 128 queries and 256 keys has two meanings",
        "give as many",
    ),
    ("collectives", "all_reduce", "allreduce", "there is no collective 'allreduce'; did you mean 'all_reduce'?", "one"),
    ("collectives", "2x4", "2 x 4", "'units' is impossible: '2 x 4'", "as in 2x8"),
    ("collectives", "2x4", "2x2x4", "'2x2x4' has 3 levels, and the cluster has 2", "give the units of node, network"),
    ("collectives", "2x4", "2x8", "'2x8' is impossible: 'node' joins 4 units", "give at most 4"),
    ("collectives", "2x4", "1x1", "'1x1' is impossible: a group has 2 ranks at least", "leave the row out"),
]


@pytest.mark.parametrize(("table", "right", "wrong", "message", "fix"), MISTAKES)
def test_mistakes(tmp_path: Path, table: str, right: str, wrong: str, message: str, fix: str) -> None:
    text = {"products": PRODUCTS, "attention": ATTENTION, "collectives": COLLECTIVES}[table].replace(right, wrong)
    with pytest.raises(ClusterError) as error:
        load_cluster(written(tmp_path, **{table: text}))
    # The last row that has the wrong text, after the line of column names.
    line = max(i for i, line in enumerate(text.splitlines(), 1) if wrong in line)
    shown = text.splitlines()[line - 1]
    assert str(error.value).startswith(f"{message}\n  my-{table}.csv:{line} | {shown}\nfix: {fix}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            "the columns are missing\n  my-products.csv:1 | \nfix: name them dtype,batch,rows,columns,",
        ),
        ("a,b\n1,2\n", "the columns are a, b\n  my-products.csv:1 | a,b\nfix: name them dtype,"),
        (PRODUCTS.splitlines()[0], "the table has no rows\n  my-products.csv:1 | dtype,"),
    ],
)
def test_tables_without_rows_or_columns(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ClusterError) as error:
        load_cluster(written(tmp_path, products=text))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("my-products.csv", "my-products.txt", "'device.tables.products' does not name a CSV file\n  mine.toml:"),
        ("my-products.csv", "nowhere.csv", "nowhere.csv cannot be read: "),
        ('[made_up]"\nattention', '[elsewhere]"\nattention', "there is no source 'elsewhere'\n  mine.toml:"),
        ("attention =", "attentions =", "unknown key 'attentions'; did you mean 'attention'?\n  mine.toml:"),
    ],
)
def test_mistakes_of_the_file_that_names_a_table(tmp_path: Path, right: str, wrong: str, message: str) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text().replace(right, wrong, 1))
    with pytest.raises(ClusterError) as error:
        load_cluster(path)
    assert message in str(error.value)


# -- a real calibration ------------------------------------------------------------------------------------------------

CALIBRATED = Path(__file__).with_name("calibrated_cpu.toml")
RANKS = 4


def calibrated() -> Measurements:
    """Return what `autopar calibrate --tables` measured on 4 processes of 2 cores, from the tables that it wrote."""
    device, library = load_cluster(CALIBRATED).device.tables, load_cluster(CALIBRATED).library.tables
    assert device.products is not None
    assert device.attention is not None
    assert library.collectives is not None
    sizes = product_sizes(1024, tables=True)
    products = [
        TimedProduct(one.dtype, m, k, n, one.seconds, sizes[m, k, n])
        for one in device.products.rows
        for m, k, n in [(one.rows, one.reduction, one.columns)]
    ]
    left_out = {(one.causal, one.rows, one.head_dim): one.left_out for one in more_attention_trials("cpu")}
    attentions = [
        TimedAttention(
            one.causal,
            one.forward_seconds,
            one.backward_seconds,
            measured_shape(one.heads, one.queries, one.keys, one.head_dim, one.causal, 4).flops,
            one.dtype,
            one.head_dim,
            one.heads,
            one.queries,
            left_out[one.causal, one.queries, one.head_dim],
        )
        for one in device.attention.rows
    ]
    buffers = {float(size): is_left_out for size, is_left_out in buffer_sizes(2**24)}
    collectives = [
        TimedCollective(one.collective, 0, one.joined[0], one.bytes, one.seconds, buffers[one.bytes])
        for one in library.collectives.rows
    ]
    return Measurements(
        "CPU", 1e9, 0.0, 1e9, tuple(products), tuple(collectives), 1, RANKS, attentions=tuple(attentions)
    )


def test_tables_are_nearer_than_formulas_to_measurements_that_neither_knows() -> None:
    cluster, found = load_cluster(CALIBRATED), calibrated()
    formulas = errors_of(without_tables(cluster), found)
    tables = errors_of(with_tables(cluster, measured_rows(found, fitted_only=True)), found)
    for kind in ("products", "attention"):
        formula, table = formulas[kind][1], tables[kind][1]
        assert formula is not None
        assert table is not None
        assert table < 0.7 * formula
    # Single sizes of collectives vary by as much as the formula is off.
    kinds = [kind for kind in formulas if kind not in ("products", "attention")]
    formula, table = (sum(one[kind][1] or 0.0 for kind in kinds) / len(kinds) for one in (formulas, tables))
    assert table < formula
    # All rows together are what was measured.
    for inside, outside in errors_of(cluster, found).values():
        assert (inside, outside) == (pytest.approx(0, abs=1e-4), pytest.approx(0, abs=1e-4))
