"""Parameters between their storage and their use: no_sync, precision, gathered again, gathered once for many steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.lowering.modules.bucket_ends import RegatherRelease
from examples.gpt import gpt
from tests.runtime.launcher import in_turn, launch
from tests.runtime.sent import Counted
from tests.runtime.training import gradients, worst

REGATHERED = """
batch -> dp; * -> none
param, grad, opt { * -> dp | none }
regather @*
"""
ZERO2 = """
batch -> dp; * -> none
grad, opt { * -> dp | none }
"""


def batches(count: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [gpt(batch=4, seq=12, vocab=104)[1] for _ in range(count)]


def pair(layout: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = gpt(batch=4, seq=12, vocab=104)[0].to(dtype)
    return model, autopar.parallelize(model, "dp=2", batches(1)[0], layout=layout, **options)


def accumulated(layout: str) -> tuple[float, list[int], list[dict[str, int]]]:
    """Two steps of three micro-steps, of which the last of each sends; parameters with a gradient after each."""
    model, parallel = pair(layout)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, parallel)]
    having: list[int] = []
    sent: list[dict[str, int]] = []
    error = 0.0
    for _ in range(2):
        for number, inputs in enumerate(batches(3)):
            model(**inputs).backward()
            with Counted() as seen:
                if number < 2:
                    with parallel.no_sync():
                        parallel(**inputs).backward()
                else:
                    parallel(**inputs).backward()
            having.append(len(gradients(parallel)))
            sent.append(dict(seen.counts))
        error = max(error, worst(gradients(parallel), gradients(model)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return error, having, sent


def mixed(layout: str, precision: str) -> tuple[float, float, dict[str, set[str]], set[str]]:
    model, parallel = pair(layout, torch.float32, precision=precision)
    inputs = batches(1)[0]
    expected = model(**inputs)
    expected.backward()
    with Counted() as seen:
        loss = parallel(**inputs)
        loss.backward()
    kinds = {str(each.dtype) for p in parallel.parameters() for each in (p, p.grad)}
    assert loss.dtype is torch.bfloat16
    return float((loss - expected).abs() / expected), worst(gradients(parallel), gradients(model)), seen.dtypes, kinds


CANARY = 4096
MARK = 0xA5


@contextmanager
def canaries() -> Iterator[list[bool]]:
    """Put marked bytes behind memory that is filled again; yield, for each that is freed, whether they are intact."""
    intact: list[bool] = []
    sizes: dict[int, int] = {}
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        used = sizes.pop(storage._cdata, None)
        if used is not None:
            intact.append(storage.tolist()[used:] == [MARK] * CANARY)
        if not size:
            return resize(storage, 0)
        found = resize(storage, size + CANARY)
        torch.empty(0, dtype=torch.uint8).set_(storage)[size:].fill_(MARK)
        sizes[storage._cdata] = size
        return found

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
    try:
        yield intact
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def again() -> tuple[float, float, int, dict[str, int], bool]:
    """Gradients of gathering again, also a second time through one graph; and that the memory is given up between."""
    model, parallel = pair(REGATHERED)
    inputs = batches(1)[0]
    model(**inputs).backward()
    loss = parallel(**inputs)
    release = [m for m in parallel.emitted.graph_module.modules() if isinstance(m, RegatherRelease)]
    whole = [tensor for m in release for tensor in m.running.again.whole]
    empty = bool(whole) and all(tensor.untyped_storage().size() == 0 for tensor in whole)
    with Counted() as backward:
        loss.backward(retain_graph=True)
    first = worst(gradients(parallel), gradients(model))
    empty = empty and all(tensor.untyped_storage().size() == 0 for tensor in whole)
    parallel.zero_grad()
    loss.backward()
    second = worst(gradients(parallel), gradients(model))
    with torch.no_grad():
        assert torch.allclose(parallel(**inputs), model(**inputs))
    return first, second, len(release), dict(backward.counts), empty


def frozen() -> float:
    """Only some parameters are trained; the backward still goes through the others."""
    torch.manual_seed(0)
    model, inputs = gpt(batch=4, seq=12, vocab=104)
    model = model.double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    parallel = autopar.parallelize(model, "dp=2", inputs, layout=REGATHERED)
    model(**inputs).backward()
    parallel(**inputs).backward()
    return worst(gradients(parallel), gradients(model))


def of_one_element_each() -> tuple[float, list[bool]]:
    """Parameters of which each rank holds one element or row: gathered, they lie strided over the bucket's buffer.

    Filling such a tensor in memory of its own size writes beyond it.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    parallel = autopar.parallelize(model, "dp=2", (x,), layout=REGATHERED, dims={"input": "batch d_in"})
    with canaries() as intact:
        for each in (model, parallel):
            for _ in range(3):
                each(x).square().sum().backward()
    return worst(gradients(parallel), gradients(model)), intact


def test_no_sync_sends_gradients_once() -> None:
    for layout, waits in (("ddp", True), ("zero1", True), (ZERO2, False), ("fsdp", False)):
        name = layout if "\n" not in layout else "zero2"
        for error, having, sent in launch(accumulated, layout.replace("fsdp", "fsdp(fsdp=dp)"), ranks=2):
            assert error < 1e-12, name
            micro, last = sent[0], sent[2]
            reducing = "all_reduce" if layout == "ddp" else "reduce_scatter_tensor"
            if waits:
                assert having[:3] == [0, 0, having[2]], name
                assert micro.get(reducing, 0) < last[reducing], name
            else:
                assert having[0] == having[2] > 0, name
                assert micro[reducing] == last[reducing], name
            if layout in ("zero1", ZERO2):  # gathered for the first of the three, and anew after the optimizer's step
                gathers = [each.get("all_gather_into_tensor", 0) for each in sent]
                assert gathers[0] > gathers[1] == gathers[2], (name, gathers)
                assert gathers[3:] == gathers[:3], name


@pytest.mark.parametrize("layout", ["ddp", "fsdp(fsdp=dp)", REGATHERED])
def test_master_weights_are_kept_and_gradients_summed_in_their_dtype(layout: str) -> None:
    for precision, expected in (("bf16", "float32"), ("bf16, reduce=bf16", "bfloat16")):
        for loss, error, sent, kinds in launch(mixed, layout, precision, ranks=2):
            assert loss < 2e-2
            assert error < 0.15  # bfloat16 has 8 bits
            assert kinds == {"torch.float32"}
            if layout == "ddp":
                assert expected in sent["all_reduce"]
            else:
                assert sent["reduce_scatter_tensor"] == {expected}
                assert sent["all_gather_into_tensor"] == {"bfloat16"}


def test_gathered_again() -> None:
    for found in launch(in_turn, (again, ()), (frozen, ()), (of_one_element_each, ()), ranks=2):
        first, second, buckets, backward, empty = found["again"]
        error, intact = found["of_one_element_each"]
        assert len(intact) >= 3
        assert all(intact), "a write beyond regathered memory"
        assert max(first, second, found["frozen"], error) < 1e-12
        assert empty
        assert backward["all_gather_into_tensor"] == buckets > 1


def code_of(layout: str) -> tuple[str, int]:
    _, parallel = pair(layout)
    sending = sum(1 for one in parallel.emitted.inserted if any(one.collectives()))
    return parallel.code, sending


def test_the_generated_code_says_what_is_sent() -> None:
    code, sending = launch(code_of, "(heads, d_ff, vocab) -> dp; * -> none", ranks=2)[0]
    lines = code.split("\n")
    places = [i for i, line in enumerate(lines) if line.strip().startswith("# blocks.0.down/linear[")]
    assert len(places) == 1
    assert lines[places[0]].strip() == (
        "# blocks.0.down/linear[batch seq d_model]: whole + partial(dp) -> whole: forward all_reduce(dp); "
        "for blocks.0.down/linear, rule `a b k, n k, n -> a b n`, gpt.py:43"
    )
    assert lines[places[0] + 1].strip().startswith("blocks_0_down_linear_all_reduce_dp = self.")
    noted = [line for line in lines if line.strip().startswith("# ") and ("all_reduce(" in line or "gather(" in line)]
    assert len(noted) == sending


# -- names that a graph writes in another way -------------------------------------------------------------------------


class Capitals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(8, 6))
        self.LayerNorm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.LayerNorm(x @ self.W.T).square().mean()


def capitals() -> tuple[dict[str, int], float]:
    """Collectives of a step, and the difference of the loss from one process, with parameters cast to bfloat16."""
    torch.manual_seed(0)
    model, x = Capitals(), torch.randn(4, 6)
    layout = "batch -> dp; * -> none; param, grad, opt { * -> dp }"
    parallel = autopar.parallelize(model, "dp=2", (x,), layout=layout, precision="bf16", outputs="full")
    with Counted() as seen:
        loss = parallel(x)
        loss.backward()
    return dict(seen.counts), abs(float(loss.detach()) - float(model(x).detach()))


def test_names_with_capitals_are_those_of_parameters() -> None:
    for counts, error in launch(capitals, ranks=2, seconds=60):
        assert counts == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
        assert error < 0.02
