"""On which device a parallel module runs, where its ranks meet, and over which network interface."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autopar
from autopar.errors import AutoparError, MeshError
from autopar.lowering.collectives.process_groups import device_mesh, device_type_of
from autopar.lowering.collectives.start_group import MPI_RANKS, choose_gloo_interface, interface_to, unused_part
from autopar.mesh import Mesh
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
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}, "lo"),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "first-node"}, None),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, "eth7"),
    ],
)
def test_gloo_is_kept_local_where_the_host_has_no_address(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], interface: str | None
) -> None:
    def only_numbers(host: str) -> str:
        if not host[0].isdigit():
            raise OSError
        return host

    monkeypatch.setattr(socket, "gethostbyname", only_numbers)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    choose_gloo_interface()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface


def test_the_interface_of_another_host_is_that_of_the_route() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.77", 9))  # an address for documentation: no host has it
        except OSError:
            pytest.skip("this machine has no network but its own")
        own = probe.getsockname()[0]
    found = interface_to("192.0.2.77")
    assert found is not None
    assert found != "lo"
    assert interface_to(own) in ("lo", found)


def test_ranks_of_a_restart_agree_on_an_unused_part_of_the_store() -> None:
    """Keys of earlier starts are there: of more ranks, of as many, and of a start that did not get far."""
    store = dist.HashStore()
    for start, ranks in enumerate((4, 3, 3, 4, 2)):
        store.set("autopar/number/1", "of a rank that was killed")
        parts: list[Any] = [None] * ranks

        def join(rank: int, ranks: int = ranks, parts: list[Any] = parts) -> None:
            time.sleep(0.05 * rank % 0.1)
            parts[rank] = unused_part(store, rank, ranks)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not any(part.check(["address"]) for part in parts)
        parts[0].set("address", str(start))
        assert {part.get("address").decode() for part in parts} == {str(start)}


def test_processes_of_mpi_use_its_group_or_are_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", *MPI_RANKS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setattr(dist, "is_mpi_available", lambda: False)
    with pytest.raises(
        MeshError, match=r"started by MPI \(OMPI_COMM_WORLD_RANK\)(.|\n)*fix: torchrun --nproc-per-node 2"
    ):
        device_mesh(Mesh("dp=2"))
    started: list[str] = []
    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", started.append)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(MeshError, match="the mesh dp=2 has 2 ranks, but 3 processes are running"):
        device_mesh(Mesh("dp=2"))
    assert started == ["mpi"]
    # torchrun's own variables count more than those of a launcher around it.
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(MeshError, match="3 processes are running"):
        device_mesh(Mesh("dp=2"))
    assert started == ["mpi", "gloo"]
