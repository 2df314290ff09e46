"""Published training runs: their sizes, and the line that compares the mesh of the publication."""

from __future__ import annotations

from math import prod

import pytest

from autopar.ir.precision import PRESETS
from autopar.solver.mesh_shape import Shape
from benchmarks.trained import RUNS, Run, measure


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run.shape_published is not None])
def test_published_meshes_have_all_devices_and_the_whole_batch(name: str) -> None:
    run, shape = RUNS[name], RUNS[name].shape_published
    assert shape is not None
    assert prod(shape.mesh.values()) == run.devices
    assert shape.data * shape.expert * shape.count * shape.rows == run.batch


def test_a_token_of_a_long_sequence_has_the_flops_of_its_scores() -> None:
    """By hand: 6 for each parameter outside of the input table, and 6 of each layer for half of the scores."""
    run = RUNS["405b-131072-tokens"]
    width, inner, words = 16384, 53248, 128256
    layer = 2 * width * width + 2 * width * 1024 + 3 * width * inner + 2 * width
    parameters = 126 * layer + words * width + width
    attention = 6 * 126 * run.seq * width
    assert run.flops(run.model()[0]) == pytest.approx(128 * 131072 * (6 * parameters + attention), rel=1e-9)
    # 16 million tokens at the published 380 TFLOP/s.
    assert run.flops(run.model()[0]) / run.devices / 380e12 == pytest.approx(10.9, abs=0.1)


def test_tokens_of_a_device_are_published_flops() -> None:
    run = RUNS["deepseek-v3-2048"]
    model, _ = run.model()
    hours = 1e12 / run.tokens_published / 3600 if run.tokens_published else 0.0
    assert hours == pytest.approx(180_000, rel=1e-3)
    found = run.published_tflops(model)
    # 37 billion parameters of a token, and attention.
    assert found is not None
    assert 1543 * 6 * 36e9 < found * 1e12 < 1.3 * 1543 * 6 * 37e9


@pytest.mark.slow
def test_a_run_is_compared_on_its_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    small = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
    run = Run(8, small, 8, 16, 100.0, seq=32768, shape_published=Shape(2, 2, 2, 4, 1, context=2))
    measure("a run", run, "h100", 200.0, PRESETS["bf16"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("a run: ")
    shares = [float(line.split("published 100: ")[1].split()[0]) for line in (lines[0], lines[-1])]
    assert lines[-1].startswith("  on the mesh of the published run: ")
    # The proposed mesh is the faster one.
    assert 0 < shares[1] <= shares[0] + 0.01
