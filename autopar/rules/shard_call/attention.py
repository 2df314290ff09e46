"""Attention on one shard: the fused kernels of devices, the heads that they take, and grouped heads on GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "SDPA",
    "aligned",
    "attention_on_gpu",
    "attention_with_all_heads",
    "check_first_derivative",
    "fused_kernel",
    "in_sum_dtype",
    "lead_of",
    "widened",
    "with_all_heads",
    "with_heads",
]


aten = torch.ops.aten

# Fused kernels of GPUs take heads of a multiple of so many dims.
GPU_ALIGNMENT = 8
# The widest head that FlashAttention takes.
GPU_WIDEST = 256
# Queries that are written out at a time: enough to keep a device busy, and few of the scores live at once.
BLOCK_ROWS = 256


def lead_of(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> tuple[int, ...]:
    """Return the leading dims of the result of attention; `grouped`: query heads share heads of keys."""
    leads = [tuple(x.shape[:-2]) for x in (query, key, value)]
    if grouped:
        leads = [leads[0], *((*lead[:-1], leads[0][-1]) for lead in leads[1:])]
    return tuple(torch.broadcast_shapes(*leads))  # type: ignore[no-untyped-call]


def with_heads(query: Tensor, key: Tensor, value: Tensor, grouped: bool, shares: bool) -> list[Tensor]:
    """Return all as `batch heads rows width`; `shares`: query heads may share a head of keys in the kernel."""
    tensors = [query, key, value]
    leads = [x.shape[:-2] for x in tensors]
    heads = [lead[-1] if lead else 1 for lead in leads]
    divides = heads[0] % heads[1] == 0 if grouped else heads[1] == 1
    same_batch = all(len(lead) == 2 and lead[0] == leads[0][0] for lead in leads)
    if same_batch and heads[1] == heads[2] and (heads[0] == heads[1] or (shares and divides)):
        return tensors
    if grouped:
        tensors[1:] = [x.repeat_interleave(heads[0] // x.shape[-3], -3) for x in tensors[1:]]
    lead = lead_of(query, key, value, grouped)
    batch = (prod(lead[:-1]), lead[-1] if lead else 1)
    return [x.expand(*lead, *x.shape[-2:]).reshape(*batch, *x.shape[-2:]) for x in tensors]


def widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1]))


def aligned(width: int) -> int:
    """Return the width to which fused kernels of GPUs take heads."""
    return -(-width // GPU_ALIGNMENT) * GPU_ALIGNMENT


def fused_kernel(device_type: str, index: int | None, dtype: torch.dtype, width: int) -> str:
    """Return the fused kernel for such tensors: `flash`, `efficient`, `cpu`, or none."""
    if device_type == "cpu":
        return "cpu" if torch._C._get_flash_sdp_enabled() else "none"
    if device_type != "cuda":
        return "none"
    capability = torch.cuda.get_device_capability(index)
    half = dtype is torch.float16 or (dtype is torch.bfloat16 and capability >= (8, 0))
    if half and capability >= (8, 0) and width <= GPU_WIDEST and torch._C._get_flash_sdp_enabled():
        return "flash"
    efficient = (half or dtype is torch.float32) and torch._C._get_mem_efficient_sdp_enabled()
    return "efficient" if efficient else "none"


# What torch.compiler.assume_constant_result does, without loading the compiler: it cannot ask a device.
fused_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined]


def in_sum_dtype(x: Tensor) -> Tensor:
    """Return the tensor in the dtype that sums are made in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def check_first_derivative(what: str) -> None:
    """Raise in the backward of a backward, whose kernels have no derivative."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{what} has no second derivative")


# -- grouped heads -----------------------------------------------------------------------------------------------------


# On CUDA kernels that take a mask, or float32, want as many heads of keys as of queries; with fewer, torch computes all
# scores by plain products and keeps them. There the heads are repeated just before the kernel. The CPU's takes both.
SDPA = aten.scaled_dot_product_attention.default


def with_all_heads(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of attention with keys and values repeated to the queries' heads."""
    if not arguments["enable_gqa"]:
        return dict(arguments)
    heads = arguments["query"].shape[-3]
    pairs = {name: arguments[name] for name in ("key", "value")}
    repeated = {
        name: x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], -3) for name, x in pairs.items()
    }
    return {**arguments, **repeated, "enable_gqa": False}


def attention_on_gpu(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
) -> Tensor:
    """Run `scaled_dot_product_attention` so that a fused kernel takes it."""
    takes_groups = attn_mask is None and query.dtype in (torch.float16, torch.bfloat16)
    run: Any = SDPA if takes_groups else attention_with_all_heads
    result: Tensor = run(query, key, value, attn_mask, *rest, **options)
    return result


def attention_with_all_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run `scaled_dot_product_attention` with as many heads of keys as of queries."""
    given = with_all_heads({"query": query, "key": key, "value": value, "enable_gqa": enable_gqa})
    operands = given["query"], given["key"], given["value"]
    result: Tensor = SDPA(*operands, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=given["enable_gqa"])
    return result
