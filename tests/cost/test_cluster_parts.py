"""Parts of a cluster: units of one level with devices or speeds of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cost.hardware.cluster import load_cluster, load_device
from autopar.cost.hardware.describe import describe, links_of, standalone
from autopar.cost.network import Network
from autopar.cost.unequal_devices import rank_kinds, with_slowest_links
from autopar.errors import ClusterError
from autopar.mesh import Mesh

TWO_LEVELS = Path(__file__).with_name("two_levels.toml")
PART = """
[[part]]
name = "old"
level = "node"
units = 2
device = "a100-80"

[[part]]
name = "warm"
level = "node"
units = 1
speed = "50 % [made_up]"
"""


def written(folder: Path, part: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(TWO_LEVELS.read_text().replace("[sources]", f"{part}\n[sources]"), encoding="utf-8")
    return path


def test_parts_are_read(tmp_path: Path) -> None:
    cluster = load_cluster(written(tmp_path, PART))
    old, warm = cluster.part
    assert (old.name, old.level, old.units, old.speed_fraction) == ("old", "node", 2, 1.0)
    assert old.device == load_device("a100-80")
    assert (warm.device, warm.speed_fraction) == (cluster.device, 0.5)
    assert cluster.sources["a100-80-datasheet"].text.startswith("NVIDIA A100 datasheet")
    assert "warm: 1 unit of node, Device: 17.18 GB, at 50 % of its speed" in describe(cluster)


def test_the_outermost_level_is_the_default(tmp_path: Path) -> None:
    (part,) = load_cluster(written(tmp_path, '[[part]]\nname = "old"\nunits = 3\ndevice = "v100"\n')).part
    assert part.level == "network"


def test_parts_as_one_file_are_the_same(tmp_path: Path) -> None:
    path = written(tmp_path, PART.replace('[[part]]\nname = "warm"', '[[part]]\nname = "warm"\ndevice = "a100-80"'))
    whole = tmp_path / "whole.toml"
    whole.write_text(standalone(path), encoding="utf-8")
    one, other = load_cluster(whole), load_cluster(path)
    assert replace(one, uncited=()) == replace(other, uncited=())
    assert sorted(one.uncited) == sorted(other.uncited)
    assert not any("part" in line for line in links_of(path)[0])


LINKS = PART.replace(
    'device = "a100-80"',
    """device = "a100-80"

[[part.links]]
name = "node"
ports = "1 [made_up]"
port = "2 GB/s [made_up]"
hop = { any = "7 us [made_up]" }""",
)


def test_a_part_has_links_of_its_own(tmp_path: Path) -> None:
    """Of its own level and inside it; over several parts all wait for the slowest."""
    path = written(tmp_path, LINKS)
    cluster = load_cluster(path)
    node, network = cluster.level
    slow, same = cluster.levels_of("old")
    assert same == network
    assert (slow.port_bytes_per_second, slow.achieved_bytes_per_second) == (2e9, None)
    assert dict(slow.hop_seconds) == {"any": 7e-6}
    assert (slow.units, slow.link) == (node.units, node.link)
    assert cluster.levels_of("warm") == cluster.levels_of("") == cluster.level
    # Two ranks of the part alone have its links; ranks of several parts the slowest.
    for mesh in ("dp=2", "dp=4"):
        for kind in rank_kinds(cluster, Mesh(mesh).whole, {}):
            assert kind.alone(cluster).level[0].rate_bytes_per_second == 2e9
    whole = tmp_path / "whole.toml"
    whole.write_text(standalone(path), encoding="utf-8")
    assert load_cluster(whole).part[0].links == cluster.part[0].links
    assert "links of node: 1 × 2 GB/s" in describe(cluster)


def test_links_inside_a_part_are_its_own(tmp_path: Path) -> None:
    """Nodes of a part with a slower network inside: a group within a node of others does not wait for it."""
    inner = 'name = "old"\nlevel = "network"\nunits = 1\n\n[[part.links]]\nname = "node"\nport = "1 GB/s [made_up]"\n'
    cluster = load_cluster(written(tmp_path, f"[[part]]\n{inner}"))
    old, plain = rank_kinds(cluster, Mesh("dp=2,tp=4").whole, {})
    assert (old.part, plain.part) == ("old", "")
    assert old.level[0].rate_bytes_per_second == 1e9
    assert plain.level[0] == cluster.level[0]
    between = with_slowest_links(cluster, Mesh("dp=2,tp=4").whole, {})
    assert between.level[0].rate_bytes_per_second == 1e9
    alone = cluster.with_device(cluster.device)
    assert with_slowest_links(alone, Mesh("dp=2,tp=4").whole, {}) is alone


def test_a_wan_is_one_more_network() -> None:
    """A library takes a connection between sites for a network, and its constants with it."""
    cluster = load_cluster("h100-two-sites")
    wan = cluster.level[-1]
    assert wan.link == "wan"
    as_network = replace(cluster, level=(*cluster.level[:-1], replace(wan, link="network")))
    prices = [
        Network(one, {"pod": 2}, {"pod": "wan"}).seconds("all_reduce", ("pod",), 1e9) for one in (cluster, as_network)
    ]
    assert prices[0] == prices[1] > 1.0


def test_a_slower_device_takes_longer_for_everything() -> None:
    device = load_device("h100")
    slow = device.at_speed(0.5)
    assert slow.peak_flops["bfloat16"] == device.peak_flops["bfloat16"] / 2
    assert (slow.stream, slow.launch_seconds) == (device.stream / 2, device.launch_seconds * 2)
    assert slow.optimizer_stream == device.optimizer_stream / 2
    assert slow.matrix is not None
    assert device.matrix is not None
    assert slow.matrix.start_seconds == device.matrix.start_seconds * 2
    assert (slow.memory_bytes, slow.host_seconds) == (device.memory_bytes, device.host_seconds)
    assert device.at_speed(1.0) is device


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('level = "node"', 'level = "nodes"', "there is no level 'nodes'; did you mean 'node'?"),
        ("units = 2", "units = 4", "the parts have more units than the level: 4 + 1, and 'node' joins 4"),
        ("units = 2", "units = 0", "'0' is impossible: a count is more than 0"),
        ('device = "a100-80"', 'device = "a100-88"', "there is no device 'a100-88'; did you mean 'a100-80'"),
        ('name = "old"', 'name = "warm"', "two parts are called 'warm'"),
        ("units = 2", "unit = 2", "unknown key 'unit'; did you mean 'units'?"),
        ('speed = "50 % [made_up]"', 'speed = "150 %"', "'150 %' is impossible: a share is more than 0 and at most"),
        ('speed = "50 % [made_up]"', "speed = 0.5", "'part[1].speed' is not a share with its unit"),
        ("units = 2", 'units = 2\nlinks = [{ name = "network" }]', "part 'old' has no links of level 'network'"),
        ("units = 2", 'units = 2\nlinks = [{ name = "node", link = "ib" }]', "unknown key 'link'"),
        (
            "units = 2",
            'units = 2\nlinks = [{ name = "node", achieved = "9 TB/s" }]',
            "'achieved' is impossible: it is more than the port gives",
        ),
    ],
)
def test_mistakes(tmp_path: Path, before: str, after: str, message: str) -> None:
    with pytest.raises(ClusterError) as error:
        load_cluster(written(tmp_path, PART.replace(before, after, 1)))
    told, place, fix = str(error.value).splitlines()
    assert told.startswith(message)
    assert place.startswith("  mine.toml:")
    assert fix.startswith("fix: ")


def test_parts_of_two_levels_are_a_mistake(tmp_path: Path) -> None:
    part = PART.replace('level = "node"', 'level = "network"', 1)
    with pytest.raises(ClusterError, match="the parts stand on two levels, 'network' and 'node'"):
        load_cluster(written(tmp_path, part))
