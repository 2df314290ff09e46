"""Prices of replicas that drift: bytes by hand, memory, and waits against an independent Monte Carlo."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cost.gradient_sync import late_seconds
from autopar.cost.hardware.cluster import Jitter, load_cluster
from autopar.errors import ClusterError
from autopar.files import data_folder
from autopar.mesh import Mesh
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.replicas import Drift

STEP = 0.1
SOMETIMES = Jitter(share_fraction=1 / 8, by_seconds=0.05)
LINES = ("mean", "mean every 16", "mean every 100", "ring", "exponential", "server(2), stale 1", "server(2), stale 4")
LINES = (*LINES, "server(2), stale 16", "server(2), stale any")
# ms of a step of 100 ms: `b_price.py` of the design, Python's own random numbers, 2000 steps (600 for 64 replicas).
MONTE_CARLO = {
    4: (120.8, 110.7, 107.5, 119.0, 118.1, 108.2, 106.8, 106.3, 106.5),
    16: (143.5, 114.2, 109.4, 126.7, 124.7, 110.9, 107.2, 106.4, 106.3),
    64: (149.9, 116.8, 109.8, 128.6, 127.3, 114.1, 107.3, 106.3, 106.5),
}


def drift_of(line: str, replicas: int) -> Drift:
    statement = parse_layout(f"drift pod -> {line}").drift
    assert statement is not None
    return Drift(statement, Mesh(pod=replicas, dp=1))


@pytest.mark.parametrize("replicas", MONTE_CARLO)
@pytest.mark.parametrize("line", LINES)
def test_waits_are_those_of_a_monte_carlo(replicas: int, line: str) -> None:
    found = STEP + late_seconds(SOMETIMES, 1, drift_of(line, replicas), STEP)
    assert 1e3 * found == pytest.approx(MONTE_CARLO[replicas][LINES.index(line)], rel=0.04)


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_ranks_that_wait_for_each_other_in_every_step(ranks: int) -> None:
    """The latest of n is late by `by * (1 - (1 - share)^n)`; meetings after each step cost replicas the same."""
    exact = 0.05 * (1 - (7 / 8) ** ranks)
    assert late_seconds(SOMETIMES, ranks) == pytest.approx(exact, rel=0.01)
    assert late_seconds(SOMETIMES, 1, drift_of("mean", ranks)) == pytest.approx(exact, rel=0.04)
    if ranks == 4:  # the same ranks, as replicas of two
        assert late_seconds(SOMETIMES, 2, drift_of("mean", 2)) == pytest.approx(exact, rel=0.06)


def test_normal_jitter() -> None:
    """The expected largest of 16 normal numbers is 1.766 deviations above the mean (Tippett, 1925)."""
    jitter = Jitter(deviation_seconds=0.01)
    assert late_seconds(jitter, 16) == pytest.approx(0.01766, rel=0.01)
    assert late_seconds(jitter, 1) == pytest.approx(0.0, abs=1e-6)
    assert late_seconds(jitter, 1, drift_of("mean", 16)) == pytest.approx(0.01766, rel=0.04)
    rare, rarer = (late_seconds(jitter, 1, drift_of(f"mean every {h}", 16)) for h in (500, 2000))
    assert rarer == pytest.approx(rare / 2)


def test_late_meetings_wait_less() -> None:
    line = "mean every 16"
    waits = [late_seconds(SOMETIMES, 1, drift_of(f"{line}{more}", 16), STEP) for more in ("", ", late 4", ", late 8")]
    assert waits == sorted(waits, reverse=True)
    assert waits[2] < 0.9 * waits[0]


def test_a_cluster_file_says_how_steps_vary(tmp_path: Path) -> None:
    text = (data_folder("cost_models") / "h100.toml").read_text()
    path = tmp_path / "mine.toml"
    head, rest = text.split("\n", 1)
    path.write_text(f'jitter = {{ share = "12.5 %", by = "50 ms" }}\n{head}\n{rest}')
    assert load_cluster(path).jitter == SOMETIMES
    assert load_cluster("h100").jitter is None
    path.write_text(f'jitter = {{ shares = "12.5 %" }}\n{head}\n{rest}')
    with pytest.raises(ClusterError, match="unknown key 'shares'; did you mean 'share'"):
        load_cluster(path)
