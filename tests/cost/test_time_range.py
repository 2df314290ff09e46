"""Ranges of step times: the measured runs that a plan is like, and plans that the noise does not tell apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cost.hardware.cluster import load_cluster
from autopar.cost.step_errors import RunKind, StepErrors, errors_of, read_errors, shipped_errors, write_errors
from autopar.cost.time_range import TimeRange, is_within_noise, time_range
from autopar.errors import AutoparError
from autopar.plans.views.confidence import noise_note, range_line, range_notes
from examples.gpt import gpt

ONE_NODE = StepErrors(RunKind("H100", "one", "one", "16"), 40, 8, 0.9, 1.3, 1.2)
SEVERAL = StepErrors(RunKind("H100", "several", "one", "16"), 30, 64, 0.8, 1.5, 1.25)
STAGES = StepErrors(RunKind("any", "several", "any", "16"), 90, 512, 0.7, 2.0, 1.4)
KNOWN = (ONE_NODE, SEVERAL, STAGES)


def plan_on(mesh: str, cluster: str = "h100", precision: str | None = "bf16") -> autopar.Plan:
    model, inputs = gpt(layers=2, d_model=64, heads=4, vocab=64, seq=16, batch=64, device="meta")
    return autopar.plan(model, mesh, inputs, layout="ddp", cluster=cluster, precision=precision, cache=False)


def range_of(plan: autopar.Plan) -> TimeRange | None:
    return time_range(plan.graph, plan.decided, plan.cluster, plan.costs, KNOWN)


def test_a_plan_takes_the_errors_of_runs_like_it() -> None:
    one, several = range_of(plan_on("dp=8")), range_of(plan_on("dp=16"))
    assert one is not None
    assert several is not None
    assert (one.errors, several.errors) == (ONE_NODE, SEVERAL)
    assert (one.extrapolated, several.extrapolated) == ((), ())
    assert one.low_seconds == pytest.approx(0.9 * one.step_seconds)
    assert one.high_seconds == pytest.approx(1.3 * one.step_seconds)


def test_an_axis_on_slow_links_is_on_several_nodes() -> None:
    found = range_of(plan_on("dp=2@network"))
    assert found is not None
    assert found.errors == SEVERAL


def test_plans_that_no_run_is_like_are_extrapolated() -> None:
    found = range_of(plan_on("dp=64", "b200"))
    assert found is not None
    assert found.errors == STAGES
    assert found.extrapolated == ("is on B200", "has such stages")
    assert range_of(plan_on("dp=8", precision=None)) is None, "no run computes in float32"
    wide = replace(KNOWN[0], kind=replace(KNOWN[0].kind, bits="any"))
    plan = plan_on("dp=32", precision=None)
    assert errors_of(RunKind("H100", "one", "one", "32"), (wide,)) == wide
    more = time_range(
        plan.graph, plan.decided, plan.cluster, plan.costs, (replace(SEVERAL, kind=STAGES.kind, devices=8),)
    )
    assert more is None, "still of 16 bits alone"


def test_more_devices_and_convolutions_are_extrapolated() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 2)).bfloat16()
    inputs = (torch.zeros(64, 4, 8, 8, dtype=torch.bfloat16),)
    plan = autopar.plan(model, "dp=32", inputs, layout="ddp", cluster="h100", cache=False)
    found = time_range(plan.graph, plan.decided, plan.cluster, plan.costs, (replace(SEVERAL, devices=8),))
    assert found is not None
    assert found.extrapolated == ("has more than 8 devices", "has convolutions or recurrences")


def test_processes_of_a_cpu_have_errors_of_their_own() -> None:
    plan = plan_on("dp=2", "local-cpu", precision=None)
    found = plan.time_range
    assert found is not None
    assert found.errors.kind.text == "CPU, one node"
    assert found.extrapolated == ("is on a machine that was not calibrated",)
    calibrated = replace(plan.cluster, name="mine")
    here = time_range(plan.graph, plan.decided, calibrated, plan.costs, shipped_errors())
    assert here is not None
    assert here.extrapolated == ()
    accelerators = [one for one in shipped_errors() if one.kind.device != "CPU"]
    assert time_range(plan.graph, plan.decided, plan.cluster, plan.costs, accelerators) is None
    assert range_line(None) == "  range   not known: no measured run is on such a device"


def test_a_plan_that_fills_the_memory() -> None:
    plan = plan_on("dp=8")
    cluster = load_cluster("h100")
    for share, fills in ((0.89, False), (0.91, True)):
        memory = plan.costs.memory.peak_bytes / share
        smaller = replace(cluster, device=replace(cluster.device, memory_bytes=memory))
        found = time_range(plan.graph, plan.decided, smaller, plan.costs, shipped_errors())
        assert found is not None
        assert found.fills_memory == fills
        (*_, note) = range_notes(replace(found, extrapolated=("is on B200",)))
        assert note.startswith("more than 90 % of the memory is in use: ") == fills


def test_noise() -> None:
    one, close, far = (TimeRange(seconds, ONE_NODE, ()) for seconds in (1.0, 1.19, 1.21))
    assert is_within_noise(one, close)
    assert is_within_noise(close, one)
    assert not is_within_noise(one, far)
    assert is_within_noise(one, replace(far, errors=SEVERAL)), "the larger noise of the two counts"


def test_lines() -> None:
    found = TimeRange(0.1, ONE_NODE, ("is on B200", "has experts"))
    line = "  range   90 ms to 130 ms, which held 80 % of 40 measured runs (H100, one node, no pipeline)"
    assert range_line(found) == line
    assert range_notes(found) == ["the range is extrapolated: no measured run is on B200, none has experts"]
    assert range_notes(replace(found, extrapolated=())) == []


def test_plans_that_the_noise_does_not_tell_apart() -> None:
    plan = plan_on("dp=8")
    assert plan.time_range is not None
    noise = 100 * (plan.time_range.errors.apart - 1)
    assert noise_note({"this": plan, "that": plan}) == [
        f"  note  as fast as this within the noise of {noise:.3g} %: that"
    ]
    assert noise_note({"this": plan}) == []
    assert noise_note({"this": plan, "slow": plan_on("dp=8", "local-cpu")}) == []


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    write_errors(path, KNOWN)
    assert read_errors(path) == KNOWN
    path.write_text("device,nodes\nH100,one\n")
    with pytest.raises(AutoparError, match=r"runs\.csv cannot be read: 'stages'"):
        read_errors(path)


def test_shipped_errors_are_of_enough_runs() -> None:
    known = shipped_errors()
    assert {one.kind.nodes for one in known if one.kind.device == "H100"} == {"one", "several"}
    assert all(one.runs >= 10 and 0 < one.low < one.high and one.apart > 1 for one in known)
