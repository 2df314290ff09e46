"""Buckets on real ranks: the same gradients as one conversion per parameter, with fewer collectives."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.lowering import emit
from autopar.lowering.modules import bucket
from autopar.lowering.passes.bucket_parameters import put_in_buckets
from autopar.mesh import Mesh
from examples.gpt import gpt
from tests.runtime.launcher import in_turn, launch
from tests.runtime.sent import Counted
from tests.runtime.training import gradients, whole, worst


def models(layout: str, mesh: str, limit_bytes: int) -> tuple[nn.Module, nn.Module, nn.Module, dict[str, Tensor]]:
    """A GPT, it with a conversion for every parameter, and it with buckets."""
    torch.manual_seed(0)
    model, inputs = gpt(batch=8, seq=12, vocab=104)
    model = model.double()
    found = []
    for limit in (0, limit_bytes):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(emit, "put_in_buckets", lambda *given, limit=limit: put_in_buckets(*given, limit_bytes=limit))
            found.append(autopar.parallelize(model, mesh, inputs, layout=layout, outputs="full"))
    return model, *found, inputs  # type: ignore[return-value]


def backward(layout: str, mesh: str, limit_bytes: int) -> tuple[float, float, dict[str, int], dict[str, int]]:
    model, single, bucketed, inputs = models(layout, mesh, limit_bytes)
    model(**inputs).backward()
    counts = []
    for parallel in (single, bucketed):
        with Counted() as sent:
            parallel(**inputs).backward()
        counts.append(dict(sent.counts))
    expected = gradients(model)
    return worst(gradients(bucketed), gradients(single)), worst(gradients(bucketed), expected), counts[0], counts[1]


def accumulation(layout: str, mesh: str) -> float:
    model, _, bucketed, inputs = models(layout, mesh, 10000)
    for _ in range(3):
        model(**inputs).backward()
        bucketed(**inputs).backward()
    return worst(gradients(bucketed), gradients(model))


def autograd_grad(layout: str, mesh: str) -> tuple[float, bool]:
    """Of some parameters only, and twice through one graph; nothing is written to `.grad`."""
    model, _, bucketed, inputs = models(layout, mesh, 10000)
    names = ["blocks.0.up.weight", "blocks.1.attention.qkv.bias", "tokens.weight"]
    found = []
    for each in (model, bucketed):
        loss = each(**inputs)
        for _ in range(2):
            given = torch.autograd.grad(loss, [each.get_parameter(name) for name in names], retain_graph=True)
        found.append({name: whole(gradient) for name, gradient in zip(names, given, strict=True)})
    return worst(found[1], found[0]), all(parameter.grad is None for parameter in bucketed.parameters())


class Ops(TorchDispatchMode):
    """The products and the sums over ranks of a backward, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.names += [kind for kind in ("mm", "all_reduce") if kind in name]
        return func(*args, **(kwargs or {}))


def later_calls() -> tuple[list[list[str]], dict[str, int], float]:
    """What the backwards of three calls do, each by other weights; then two calls in one backward."""
    model, _, bucketed, inputs = models("ddp", "dp=2", 30_000)
    found = []
    for _ in range(3):
        bucketed.zero_grad()
        loss = bucketed(**inputs)
        with Ops() as ops:
            loss.backward()
        found.append(ops.names)
        with torch.no_grad():
            for each in (model, bucketed):
                each.get_parameter("tokens.weight").mul_(1.01)
    bucketed.zero_grad()
    other = {name: value.roll(1, 1) for name, value in inputs.items()}
    with Counted() as sent:
        (bucketed(**inputs) + 2 * bucketed(**other)).backward()
    (model(**inputs) + 2 * model(**other)).backward()
    return found, dict(sent.counts), worst(gradients(bucketed), gradients(model))


def sent_alone(layout: str, mesh: str, alone_bytes: int) -> tuple[float, dict[str, int]]:
    """Four backwards, the third without sending, where tensors from some size on are sent from where they lie."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "ALONE_BYTES", alone_bytes)
        model, _, bucketed, inputs = models(layout, mesh, 50_000)
        with Counted() as sent:
            for turn in range(4):
                model(**inputs).backward()
                with bucketed.no_sync() if turn == 2 else nullcontext():
                    bucketed(**inputs).backward()
        return worst(gradients(bucketed), gradients(model)), dict(sent.counts)


ZERO3 = "batch -> dp\n* -> none\nparam, grad, opt { * -> dp | none }"

CASES = [
    ("ddp", "dp=2"),
    ("fsdp", "fsdp=2"),
    pytest.param("megatron", "dp=2,tp=2", marks=pytest.mark.slow),
    pytest.param("fsdp_tp", "fsdp=2,tp=2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layout", "mesh"), CASES)
@pytest.mark.parametrize("limit_bytes", [10_000, pytest.param(25 * 2**20, marks=pytest.mark.slow)])
def test_gradients_are_those_of_single_conversions(layout: str, mesh: str, limit_bytes: int) -> None:
    for unlike_single, unlike_model, single, bucketed in launch(
        backward, layout, mesh, limit_bytes, ranks=Mesh(mesh).size
    ):
        assert unlike_single < 1e-12
        assert unlike_model < 1e-12
        assert sum(bucketed.values()) < sum(single.values())


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [
        pytest.param("zero1", "dp=2", id="zero1"),
        pytest.param("fsdp", "fsdp=2", id="fsdp"),
        pytest.param(f"{ZERO3}\nregather @*", "dp=2", id="gathered again"),
        pytest.param("fsdp_tp", "fsdp=2,tp=2", id="fsdp_tp", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("alone_bytes", [4000, pytest.param(1, marks=pytest.mark.slow)])
def test_large_tensors_are_sent_from_where_they_lie(layout: str, mesh: str, alone_bytes: int) -> None:
    for error, sent in launch(sent_alone, layout, mesh, alone_bytes, ranks=Mesh(mesh).size):
        assert error < 1e-12
        scattered = sent["reduce_scatter_tensor_coalesced"]
        assert scattered > 0
        # Gathers on Gloo are one for each tensor.
        assert sent["all_gather_into_tensor"] > scattered + sent.get("reduce_scatter_tensor", 0)


def test_data_parallel_reduces_all_gradients_at_once() -> None:
    _, _, single, bucketed = launch(backward, "ddp", "dp=2", 25 * 2**20, ranks=2)[0]
    parameters = len(list(gpt()[0].parameters()))
    beside = single["all_reduce"] - parameters
    assert bucketed["all_reduce"] <= beside + 2


def test_in_later_calls_gradients_are_sent_as_early_as_in_the_first() -> None:
    for ops, sent, error in launch(later_calls, ranks=2):
        first, *others = ops
        places = [[place for place, name in enumerate(each) if name == "all_reduce"] for each in ops]
        assert len(places[0]) > 4
        assert first[places[0][0] :].count("mm") > 4  # beside most of the backward
        assert others == [first, first]
        assert sent["all_reduce"] == len(places[0])  # the gradients of two calls are added up and sent once
        assert error < 1e-12


@pytest.mark.slow
def test_accumulation_and_gradients_of_some() -> None:
    for mesh, layout in (("dp=2", "ddp"), ("fsdp=2", "fsdp")):
        given = (layout, mesh)
        for found in launch(in_turn, (accumulation, given), (autograd_grad, given), ranks=2):
            assert found["accumulation"] < 1e-12
            error, untouched = found["autograd_grad"]
            assert error < 1e-12
            assert untouched
