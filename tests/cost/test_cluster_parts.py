"""Parts of a cluster: units of one level with devices or speeds of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cost.hardware.cluster import load_cluster, load_device
from autopar.cost.hardware.describe import describe, links_of, standalone
from autopar.errors import ClusterError

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


def test_a_slower_device_takes_longer_for_everything() -> None:
    device = load_device("h100")
    slow = device.at_speed(0.5)
    assert slow.peak_flops["bfloat16"] == device.peak_flops["bfloat16"] / 2
    assert (slow.stream, slow.launch_seconds) == (device.stream / 2, device.launch_seconds * 2)
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
