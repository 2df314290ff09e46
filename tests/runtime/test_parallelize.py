"""Models under layouts, on real processes: outputs, gradients and collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import autopar
from autopar.mesh import Mesh
from examples.gpt import gpt
from tests.gaps import number
from tests.runtime.launcher import launch

Counts = dict[tuple[str, str, str], int]


def compare_gpt(layout: str, mesh: str) -> tuple[float, Counts]:
    """The largest relative difference of loss and gradients from one process, and the collectives by kind."""
    torch.manual_seed(0)
    model, inputs = gpt(batch=8, seq=12, vocab=104)
    model = model.double()
    parallel = autopar.parallelize(model, mesh, inputs, layout=layout, outputs="full")
    expected, found = model(**inputs), parallel(**inputs)
    expected.backward()
    found.backward()
    worst = number(((found - expected) / expected).abs())
    for name, parameter in model.named_parameters():
        gradient: Any = parallel.get_parameter(name).grad
        assert parameter.grad is not None
        difference = (gradient.full_tensor() - parameter.grad).abs().max() / parameter.grad.abs().max().clamp_min(1e-6)
        worst = max(worst, number(difference))
    counts = Counter((c.direction, c.kind, "*".join(c.axes)) for c in parallel.collectives())
    return worst, dict(counts)


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [
        ("ddp", "dp=2"),
        ("fsdp", "fsdp=2"),
        ("megatron", "tp=2"),
        ("megatron_sp", "tp=2"),
        ("batch:rows; d_ff:cols; *:none", "rows=2,cols=1"),
        ("fsdp(fsdp=data)", "data=2"),
        ("megatron", "dp=2,tp=2"),
        ("fsdp_tp", "fsdp=2,tp=2"),
    ],
)
def test_loss_and_gradients_are_those_of_one_process(layout: str, mesh: str) -> None:
    ranks = Mesh(mesh).size
    for worst, _ in launch(compare_gpt, layout, mesh, ranks=ranks):
        assert worst < 1e-12


def test_megatron_sends_what_it_is_known_to_send() -> None:
    _, counts = launch(compare_gpt, "megatron", "tp=2", ranks=2)[0]
    layers = 2
    assert counts["forward", "all_reduce", "tp"] == 2 * layers + 1 + 2, "two a layer, the embedding's, the loss's"
    assert counts["backward", "all_reduce", "tp"] == 2 * layers + 1, "two a layer, and the head's"


def test_fsdp_gathers_each_parameter_once_and_scatters_its_gradient() -> None:
    _, counts = launch(compare_gpt, "fsdp", "fsdp=2", ranks=2)[0]
    model, _ = gpt()
    split = sum(1 for p in model.parameters() if any(size % 2 == 0 for size in p.shape))
    assert counts["forward", "all_gather", "fsdp"] == split
    assert counts["backward", "reduce_scatter", "fsdp"] == split
