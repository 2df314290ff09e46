"""`micro N halves` on real ranks: results of the whole batch, and messages of one half while the other computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.errors import LayoutError
from examples.gpt import gpt
from examples.hf import hf
from tests.runtime.launcher import launch
from tests.runtime.sent import Counted
from tests.runtime.training import gradients, whole, worst

SMALL = {"batch": 8, "seq": 12, "vocab": 104}
MEGATRON = "batch -> dp; (heads, d_ff, vocab) -> tp; * -> none"
STAGES = "(heads, d_ff, vocab) -> tp; * -> none"
FSDP = "batch -> dp; * -> none; param { * -> dp }"
PRODUCTS = ("mm", "addmm", "bmm", "linear")


def small(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = gpt(**SMALL, layers=4, dropout=dropout)
    return model.to(dtype), inputs


def parallel(model: nn.Module, mesh: str, inputs: Any, layout: str, **options: Any) -> Any:
    return autopar.parallelize(model, mesh, inputs, layout=layout, **options)


def step(layout: str, mesh: str) -> tuple[float, float]:
    """Errors of loss and gradients over two steps, the second one scaled."""
    model, inputs = small()
    split, error = parallel(model, mesh, inputs, layout), 0.0
    for scale in (1.0, 3.0):
        expected, found = model(**inputs) * scale, split(**inputs) * scale
        error = max(error, float((expected - found).abs()))
        expected.backward()
        found.backward()
    return error, worst(gradients(split), gradients(model))


@pytest.mark.parametrize(
    ("layout", "mesh", "ranks"),
    [
        ("micro 2 halves; megatron", "dp=1,tp=2", 2),
        ("micro 1 halves; megatron_sp", "dp=1,tp=2", 2),
        (f"micro 2 halves; {FSDP}; regather @*; recompute selective @blocks.0; recompute full @blocks.1", "dp=2", 2),
        pytest.param(f"micro 2 halves; {MEGATRON}; recompute full @blocks.*", "dp=1,tp=2", 2, marks=pytest.mark.slow),
        pytest.param(f"micro 2 halves; {MEGATRON}; recompute selective @*", "dp=2,tp=2", 4, marks=pytest.mark.slow),
        pytest.param(f"micro 1 halves; {MEGATRON}; recompute offload @*", "dp=1,tp=2", 2, marks=pytest.mark.slow),
        pytest.param("micro 1 halves; fsdp_tp(fsdp=dp)", "dp=2,tp=2", 4, marks=pytest.mark.slow),
        (f"micro 2 halves; pipeline pp 1f1b; {STAGES}", "pp=2,tp=1", 2),
        pytest.param(f"micro 2 halves; pipeline pp interleaved(2); {STAGES}", "pp=2,tp=2", 4, marks=pytest.mark.slow),
        pytest.param(
            f"micro 2 halves; pipeline pp zero_bubble; {STAGES}; recompute full @blocks.*",
            "pp=2,tp=2",
            4,
            marks=pytest.mark.slow,
        ),
        pytest.param("micro 2 halves; batch -> dp; vocab -> tp; * -> none", "dp=2,tp=2", 4, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_gradients_are_those_of_the_whole_batch(layout: str, mesh: str, ranks: int) -> None:
    for error, off in launch(step, layout, mesh, ranks=ranks):
        assert error < 1e-12
        assert off < 1e-12


def dropped() -> tuple[float, float]:
    model, inputs = small(dropout=0.3)
    found = {}
    for layout in (f"micro 2 halves; {MEGATRON}", f"micro 4; {MEGATRON}"):
        split = parallel(model.train(), "dp=1,tp=2", inputs, layout)
        torch.manual_seed(1)
        loss = split(**inputs)
        loss.backward()
        found[layout] = whole(loss).detach(), gradients(split)
    (first, own), (second, other) = found.values()
    return float((first - second).abs()), worst(own, other)


def test_halves_draw_the_numbers_of_as_many_micro_batches() -> None:
    for error, off in launch(dropped, ranks=2):
        assert error < 1e-12
        assert off < 1e-12


def in_half_precision() -> float:
    model, inputs = small(torch.float32)
    split = parallel(model, "dp=1,tp=2", inputs, f"micro 2 halves; {MEGATRON}", precision="bf16")
    model(**inputs).backward()
    split(**inputs).backward()
    return worst(gradients(split), gradients(model))


def test_gradients_add_up_in_half_precision() -> None:
    assert max(launch(in_half_precision, ranks=2)) < 0.05


# -- experts -----------------------------------------------------------------------------------------------------------


def experts(layout: str) -> tuple[float, dict[str, int]]:
    torch.manual_seed(0)
    config = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 8, "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}
    model, inputs = hf("mixtral", 8, 6, train=True, dropout=0.0, vocab_size=64, **config)
    model, given = model.to(torch.float32), {**inputs, "labels": inputs["input_ids"].clone()}
    split = parallel(model, "ep=2", given, layout)
    model(**given).loss.backward()
    with Counted() as counted:
        split(**given).loss.backward()
    return worst(gradients(split), gradients(model)), dict(counted.counts)


def test_rows_of_experts_are_exchanged_by_halves() -> None:
    rest = "batch -> ep; @*experts* { expert -> ep }"
    plain, halves = (launch(experts, f"micro 1{word}; {rest}", ranks=2) for word in ("", " halves"))
    for (_, before), (off, after) in zip(plain, halves, strict=True):
        assert off < 1e-4
        assert after["all_to_all_single"] == 2 * before["all_to_all_single"]


# -- the order of messages and products --------------------------------------------------------------------------------


class Overlap(TorchDispatchMode):
    """Notes of each collective on activations if there is a product between its start and its end."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[int, int] = {}
        self.products = 0
        self.found: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        self.products += name in PRODUCTS
        if namespace == "_c10d_functional" and isinstance(result, Tensor) and result.numel() > 2000:
            place = result.untyped_storage().data_ptr()
            if name != "wait_tensor":
                self.running[place] = self.products
            elif place in self.running:
                self.found.append(self.products > self.running.pop(place))
        return result


def overlaps(layout: str) -> list[bool]:
    model, inputs = small()
    split = parallel(model, "dp=1,tp=2", inputs, layout)
    split(**inputs).backward()
    with Overlap() as mode:
        loss = split(**inputs)
        loss.backward()
    return mode.found


def test_messages_of_a_half_run_beside_products_of_the_other() -> None:
    plain, halves = (launch(overlaps, f"micro 1{word}; {MEGATRON}", ranks=2)[0] for word in ("", " halves"))
    assert len(halves) == 2 * len(plain) >= 32
    assert not any(plain)
    # All but the first and the last one of each direction.
    assert sum(halves) >= len(halves) - 4


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "layout", "words"),
    [
        ("pp=2", "micro 1 halves; pipeline pp 1f1b", ("a pipeline of 2 stages runs micro-batches", "'micro 4'")),
        ("dp=2", "micro 3 halves; ddp", ("micro 3 in halves does not divide it", "'micro 2 halves'")),
        ("dp=2", "micro 2 halfs; ddp", ("found 'halfs'", "'micro 8 halves'")),
    ],
)
def test_what_is_refused(mesh: str, layout: str, words: tuple[str, ...]) -> None:
    model, inputs = gpt(**SMALL, device="meta")
    with pytest.raises(LayoutError) as refused:
        autopar.plan(model, mesh, inputs, layout=layout, cache=False)
    assert all(word in str(refused.value) for word in words)
