"""Whole models under layouts whose ops communicate inside: gradients of one process, and what is sent."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.mesh import Mesh
from autopar.sharding.reshard_insertion import StepCollective
from examples.gpt import gpt
from examples.moe import moe
from examples.resnet import resnet
from tests.gaps import number
from tests.runtime.launcher import launch

TILES = "batch:dp; height:sy; width:sx; *:none"


def compare(
    model: nn.Module, inputs: dict[str, Any], layout: str, mesh: str
) -> tuple[float, tuple[StepCollective, ...]]:
    """The largest relative difference of loss, gradients and buffers from one process, and what is sent of values."""
    model = model.double()
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    parallel = autopar.parallelize(model, mesh, inputs, layout=layout, outputs="full")
    expected, found = model(**inputs), parallel(**inputs)
    expected.sum().backward()
    found.sum().backward()
    pairs = [(expected, found)]
    for name, parameter in model.named_parameters():
        gradient: Any = parallel.get_parameter(name).grad
        pairs.append((parameter.grad, gradient.full_tensor()))
    pairs += [(buffer, parallel.get_buffer(name)) for name, buffer in model.named_buffers()]
    worst = max(number((a - b).abs().max() / a.abs().max().clamp_min(1e-6)) for a, b in pairs)
    tensors = parallel.graph.tensors
    return worst, tuple(item for item in parallel.collectives() if tensors[item.tensor].kind != "param")


def compare_resnet(layout: str, mesh: str, train: bool) -> tuple[float, tuple[StepCollective, ...]]:
    torch.manual_seed(0)
    return compare(*resnet(depth=10, width=4, image=64, batch=4, loss=True, train=train), layout, mesh)


def compare_moe(mesh: str) -> tuple[float, tuple[StepCollective, ...]]:
    torch.manual_seed(0)
    return compare(*moe(batch=8), "gshard_moe", mesh)


def compare_gpt(layout: str, mesh: str) -> tuple[float, tuple[StepCollective, ...]]:
    torch.manual_seed(0)
    return compare(*gpt(batch=4, seq=12, vocab=104), layout, mesh)


@pytest.mark.parametrize(
    ("layout", "mesh", "train"),
    [
        (TILES, "dp=1,sy=2,sx=2", True),
        pytest.param(TILES, "dp=2,sy=2,sx=1", True, marks=pytest.mark.slow),
        (TILES, "dp=1,sy=2,sx=1", False),
        pytest.param("ddp", "dp=2", True, marks=pytest.mark.slow),
        ("ddp", "dp=2", False),
    ],
)
def test_resnet_in_tiles_sends_halos_and_statistics(layout: str, mesh: str, train: bool) -> None:
    tiles = [axis for axis in ("sy", "sx") if f"{axis}=2" in mesh]
    for worst, sent in launch(compare_resnet, layout, mesh, train, ranks=Mesh(mesh).size):
        assert worst < 1e-11
        windows = [item for item in sent if item.kind == "halo_exchange"]
        convolutions = 10  # with the pooling; those of 1x1 read nothing of their neighbours
        halos = Counter(item.axes for item in windows if item.direction == "forward")
        assert halos == {(axis,): convolutions for axis in tiles}
        others = [item for item in sent if item.kind != "halo_exchange"]
        assert {item.kind for item in others} <= {"all_reduce"}
        small = 4 * 32 * 8  # a number for each channel, of each image where space is averaged at the end
        assert max(item.bytes for item in others) <= small
        statistics = [item for item in others if "batch_norm" in item.op]
        assert len(statistics) == (4 * 12 if train else 0), "two a layer, forward and backward"


@pytest.mark.parametrize("mesh", ["dp=1,ep=2", pytest.param("dp=2,ep=2", marks=pytest.mark.slow)])
def test_gshard_sends_two_all_to_alls_a_layer_and_direction(mesh: str) -> None:
    layers = 2
    for worst, sent in launch(compare_moe, mesh, ranks=Mesh(mesh).size):
        assert worst < 1e-11
        counts = Counter((item.direction, item.axes) for item in sent if item.kind == "all_to_all")
        assert counts == {("forward", ("ep",)): 2 * layers, ("backward", ("ep",)): 2 * layers}
        others = [item for item in sent if item.kind != "all_to_all"]
        assert {item.kind for item in others} == {"all_reduce"}
        assert {item.bytes for item in others} == {8}, "parts of the loss"


def test_megatron_sends_no_logits() -> None:
    for worst, sent in launch(compare_gpt, "megatron", "dp=1,tp=2", ranks=2):
        assert worst < 1e-11
        loss = [item for item in sent if "cross_entropy" in item.op]
        assert [(item.kind, item.direction) for item in loss] == [("all_reduce", "forward")] * 2
        targets = 4 * 12
        assert [item.bytes for item in loss] == [8 * targets, 2 * 8 * targets]


def test_a_sequence_that_is_split_gathers_keys_and_values_for_its_queries() -> None:
    layers = 2
    for worst, sent in launch(compare_gpt, "seq:sp; *:none", "sp=2", ranks=2):
        assert worst < 1e-11
        gathered = [item for item in sent if item.kind == "all_gather" and item.direction == "forward"]
        assert all("attention" in item.op for item in gathered)
        assert len(gathered) == 2 * layers
