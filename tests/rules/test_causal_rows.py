"""Causal attention of some of the queries: the values and gradients of the whole, and nowhere a mask of the scores."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.rules.notation import parse_rule
from autopar.rules.shard_call import attention, last_rows
from autopar.rules.shard_call.last_rows import causal_rows
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from tests.masks import Masks

OP = torch.ops.aten.scaled_dot_product_attention.default
RULE = parse_rule("b h s e!, b h t! e!, b h t! v -> b h s v; linear 2; lower s causal_rows")


def rows_of(given: Sequence[Tensor], start: int, stop: int, **arguments: Any) -> Tensor:
    """The attention of some of the rows, as a rank of several computes it."""
    query, key, value = given
    names = {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "scale": None, "enable_gqa": False, **arguments}
    piece = FactorSlice("s", 1, start, stop, query.shape[-2])
    part = {"query": query.narrow(-2, start, stop - start), "key": key, "value": value}
    local = LocalCall(OP, {**part, **names}, RULE, {}, {})
    found: Tensor = causal_rows(local, piece).run()
    return found


def bounds_of(rows: int, shards: int) -> list[tuple[int, int]]:
    step = -(-rows // shards)
    return [(min(i * step, rows), min((i + 1) * step, rows)) for i in range(shards)]


def whole_and_shards(given: Sequence[Tensor], shards: int, **arguments: Any) -> list[tuple[Tensor, Tensor]]:
    """Outputs, then the gradients of each operand."""
    leaves = [x.detach().requires_grad_() for x in given]
    whole = functional.scaled_dot_product_attention(*leaves, is_causal=True, **arguments)
    weight = torch.linspace(-1, 1, whole.numel(), dtype=whole.dtype).reshape(whole.shape)
    pieces = [rows_of(leaves, *bounds, **arguments) for bounds in bounds_of(given[0].shape[-2], shards)]
    found = torch.cat(pieces, -2)
    gradients = [torch.autograd.grad((each * weight).sum(), leaves) for each in (whole, found)]
    return [(whole, found), *zip(*gradients, strict=True)]


def difference(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    for one, other in pairs:
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    return max(
        float((one - other).detach().abs().max() / one.detach().abs().max().clamp(min=1)) for one, other in pairs
    )


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


SHAPES = {
    "plain": ((2, 4, 24, 8), (2, 4, 24, 8), (2, 4, 24, 8)),
    "one head": ((24, 8), (24, 8), (24, 8)),
    "no batch": ((4, 24, 8), (4, 24, 8), (4, 24, 8)),
    "five dims": ((2, 3, 4, 12, 8), (2, 3, 4, 12, 8), (2, 3, 4, 12, 8)),
    "more keys": ((2, 4, 12, 8), (2, 4, 19, 8), (2, 4, 19, 8)),
    "fewer keys": ((2, 4, 24, 8), (2, 4, 15, 8), (2, 4, 15, 8)),
    "one key": ((2, 4, 6, 8), (2, 4, 1, 8), (2, 4, 1, 8)),
    "wide values": ((2, 4, 12, 8), (2, 4, 12, 8), (2, 4, 12, 13)),
    "narrow values": ((2, 4, 12, 8), (2, 4, 12, 8), (2, 4, 12, 3)),
    "one head of keys": ((2, 4, 12, 8), (2, 1, 12, 8), (2, 1, 12, 8)),
    "one batch of keys": ((2, 4, 12, 8), (1, 4, 12, 8), (4, 12, 8)),
}
GROUPED = {
    "groups": ((2, 6, 24, 8), (2, 2, 24, 8), (2, 2, 24, 8)),
    "groups, wide values": ((2, 6, 13, 8), (2, 3, 13, 8), (2, 3, 13, 11)),
    "groups of all": ((2, 4, 12, 8), (2, 1, 12, 8), (2, 1, 12, 8)),
    "groups, no batch": ((6, 12, 8), (2, 12, 8), (2, 12, 8)),
}


@pytest.fixture(params=["fused", "written out"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With the fused kernel and without; blocks are small, so that there are several."""
    monkeypatch.setattr(last_rows, "BLOCK_ROWS", 5)
    with contextlib.nullcontext() if request.param == "fused" else sdpa_kernel(SDPBackend.MATH):
        yield request.param


@pytest.mark.parametrize("shards", [2, 4, 5])
@pytest.mark.parametrize("name", [*SHAPES, *GROUPED])
def test_shards_are_the_whole(name: str, shards: int, kernels: str) -> None:
    grouped = name in GROUPED
    given = drawn(*(GROUPED if grouped else SHAPES)[name])
    assert difference(whole_and_shards(given, shards, enable_gqa=grouped)) < 5e-15
    assert difference(whole_and_shards(given, shards, enable_gqa=grouped, scale=0.7)) < 5e-15


@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str
)
def test_shorter_numbers(dtype: torch.dtype, least: float, kernels: str) -> None:
    given = drawn(*GROUPED["groups"], dtype=dtype)
    assert difference(whole_and_shards(given, 4, enable_gqa=True)) < least


@pytest.mark.parametrize("shards", [2, 4])
def test_no_mask(shards: int, kernels: str) -> None:
    """Neither in the forward nor in the backward; the fused kernels make nothing of the size of the scores at all."""
    rows = 64
    leaves = [x.requires_grad_() for x in drawn(*[(1, 1, rows, 4)] * 3)]
    for start, stop in bounds_of(rows, shards):
        with Masks() as made:
            rows_of(leaves, start, stop).sum().backward()
        least = rows * rows // shards
        assert made.truths < least
        assert kernels != "fused" or made.numel < least


def test_gradients_that_nobody_wants_and_gradients_of_few_strides() -> None:
    q, k, v = drawn(*SHAPES["plain"])
    k.requires_grad_()
    rows_of((q, k, v), 6, 12).sum().backward()
    mask = torch.ones(6, 12, dtype=torch.bool).tril(6)
    expected = functional.scaled_dot_product_attention(q[..., 6:12, :], k[..., :12, :], v[..., :12, :], mask)
    assert k.grad is not None
    assert difference([(torch.autograd.grad(expected.sum(), k)[0], k.grad)]) < 5e-15


def test_a_second_derivative_is_an_error() -> None:
    leaves = [x.requires_grad_() for x in drawn(*SHAPES["plain"])]
    (first,) = torch.autograd.grad(rows_of(leaves, 6, 12).square().sum(), leaves[:1], create_graph=False)
    assert first.isfinite().all()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(rows_of(leaves, 6, 12).square().sum(), leaves[:1], create_graph=True)


def test_dropout_keeps_its_mask() -> None:
    """No kernel gives what would be merged. Dropping nothing that is seen leaves the later keys out."""
    given = drawn(*[(1, 1, 8, 4)] * 3)
    eyes = given[0], given[1], torch.eye(8, dtype=torch.float64)[None, None]
    weights = rows_of(eyes, 4, 8, dropout_p=0.5)
    assert not weights.triu(5).any()
    assert (weights != 0).any()


@pytest.mark.filterwarnings("ignore")  # of the compiler about itself
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend: str, transposed: bool, kernels: str) -> None:
    """Inductor generates code for the strides that the fused kernel is said to give."""
    if backend == "inductor" and (kernels != "fused" or not (shutil.which("c++") or shutil.which("g++"))):
        pytest.skip("slow without being of use, or without a C++ compiler")
    torch._dynamo.reset()

    def step(*leaves: Tensor) -> Tensor:
        return rows_of(leaves, 7, 14, enable_gqa=True)

    given = drawn((2, 4, 14, 8), (2, 2, 14, 8), (2, 2, 14, 8))
    compiled: Any = torch.compile(step, backend=backend, fullgraph=True)
    found = []
    for run in (step, compiled):
        leaves = [x.detach().requires_grad_() for x in given]
        moved = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves] if transposed else leaves
        out = run(*moved)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert difference(list(zip(*found, strict=True))) < 5e-15


# -- GPUs: which kernel, and that it takes what it is given ------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "expected"),
    [
        ((9, 0), torch.bfloat16, 128, "flash"),
        ((8, 0), torch.float16, 256, "flash"),
        ((9, 0), torch.bfloat16, 264, "efficient"),
        ((9, 0), torch.float32, 128, "efficient"),
        ((7, 0), torch.float16, 64, "efficient"),
        ((7, 0), torch.bfloat16, 64, "none"),
        ((9, 0), torch.float64, 64, "none"),
    ],
)
def test_kernel_of_a_gpu(
    capability: tuple[int, int], dtype: torch.dtype, width: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert attention.fused_kernel("cuda", 0, dtype, width) == expected
    with sdpa_kernel(SDPBackend.MATH):
        assert attention.fused_kernel("cuda", 0, dtype, width) == "none"


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
@pytest.mark.parametrize("name", ["plain", "wide values", "more keys", "groups", "groups, wide values", "one head"])
def test_calls_of_a_gpu(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: shapes alone, forward and backward, and one call of one kernel that masks by itself."""
    for chooser in ("fused_kernel", "kernel_for"):
        monkeypatch.setattr(last_rows, chooser, lambda *kind: kernel)
    shapes = {**SHAPES, **GROUPED}[name]
    dtype = torch.bfloat16 if kernel == "flash" else torch.float32
    called = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "attention" in str(func):
                called.append(str(func))
            return func(*args, **(kwargs or {}))

    with Calls():
        leaves = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in shapes]
        out = rows_of(leaves, 6, 12, enable_gqa=name in GROUPED)
        assert (tuple(out.shape), out.dtype) == ((*shapes[0][:-2], 6, shapes[2][-1]), dtype)
        if kernel == "flash":  # of the other torch has no shapes
            gradients = torch.autograd.grad(out.sum(), leaves)
            assert [tuple(x.shape) for x in gradients] == list(shapes)
    kind = "_scaled_dot_product_flash_attention" if kernel == "flash" else "_efficient_attention"
    assert len(called) == (2 if kernel == "flash" else 1)
    assert all(kind in op for op in called), called
