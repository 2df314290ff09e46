"""On which device a parallel module runs, and which network interface Gloo is told."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autopar
from autopar.errors import AutoparError
from autopar.lowering.collectives.process_groups import device_type_of, keep_gloo_local
from tests.runtime.launcher import launch


def on(device: str) -> nn.Module:
    model = nn.Module()
    model.register_buffer("weight", rows(device)[0])
    return model


def rows(device: str) -> tuple[torch.Tensor, ...]:
    """Without memory, so that they may be on a device that this machine lacks."""
    with FakeTensorMode():
        return (torch.empty(2, 2, device=device),)


@pytest.fixture
def _with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("_with_a_gpu")
@pytest.mark.parametrize(
    ("model", "inputs", "found"),
    [
        ("cpu", "cpu", "cpu"),
        ("meta", "cpu", "cpu"),
        ("cpu", None, "cpu"),
        ("cuda", "cpu", "cuda"),
        ("cpu", "cuda", "cuda"),
        ("meta", "cuda", "cuda"),
        ("meta", "meta", "cuda"),
        ("meta", None, "cuda"),
    ],
)
def test_the_device_follows_model_and_inputs(model: str, inputs: str | None, found: str) -> None:
    assert device_type_of(on(model), inputs and rows(inputs)) == found


@pytest.fixture
def group() -> Iterator[None]:
    # With no backend named torch takes Gloo for the host alone, as it takes NCCL for GPUs alone.
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group", "_with_a_gpu")
def test_a_group_of_one_backend_decides() -> None:
    assert device_type_of(on("meta"), None) == "cpu"


def run_on_the_wrong_device() -> list[str]:
    model, x = nn.Linear(4, 4), torch.randn(4, 4)
    parallel = autopar.parallelize(model, "dp=2", (x,), layout="ddp")
    said = []
    for given in (x.to("meta"), x):
        try:
            parallel(given)
            said.append("")
        except AutoparError as error:
            said.append(str(error))
    return said


def test_an_input_on_another_device_is_refused_on_all_ranks() -> None:
    for said, nothing in launch(run_on_the_wrong_device, ranks=2):
        assert said == (
            "the input input is on meta, and this rank of Linear runs on cpu\n"
            'fix: give it as input.to("cpu"), or give parallelize the model and inputs on meta'
        )
        assert nothing == ""


@pytest.mark.parametrize(
    ("environment", "interface"),
    [
        ({}, "lo"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "lo"),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, None),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, "eth7"),
    ],
)
def test_gloo_is_kept_local_where_the_host_has_no_address(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], interface: str | None
) -> None:
    def fails(host: str) -> str:
        raise OSError

    monkeypatch.setattr(socket, "gethostbyname", fails)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    keep_gloo_local()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
