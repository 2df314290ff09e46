"""Attention on one shard: causal attention of some of the queries, and grouped heads beside a mask.

In causal attention the last query sees all keys, each one before it sees one key less. Fused kernels of GPUs know this
form. That of CPUs does not: it works on the keys before the first query and on the square of the rest, and the two are
merged by the logarithms of the sums of their weights. Where there is no fused kernel, blocks of queries are written out
in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional

from autopar.rules.shard_call.local_call import FactorSlice, LocalCall

__all__ = [
    "aligned",
    "attend_last_rows",
    "attention_with_all_heads",
    "broadcast_lead",
    "causal_rows",
    "check_first_derivative",
    "fused_kernel",
    "in_sum_dtype",
    "repeat_masked_heads",
    "widened",
    "with_all_heads",
    "with_heads",
    "with_most_memory",
]


aten = torch.ops.aten

# Fused kernels of GPUs take heads of a multiple of so many dims.
GPU_ALIGNMENT = 8
# The widest head that FlashAttention takes.
GPU_WIDEST = 256
# `custom_mask_type` of the memory-efficient kernel: the last query sees all keys.
LOWER_RIGHT = 2
# Queries that are written out at a time: enough to keep a device busy, and few of the scores live at once.
BLOCK_ROWS = 256


def attend_last_rows(query: Tensor, key: Tensor, value: Tensor, scale: float | None, grouped: bool) -> Tensor:
    """Return the attention of `rows` queries that are the last ones of as many positions as there are keys.

    `query` is `... rows e`, `key` `... keys e`, `value` `... keys v`, with at most as many rows as keys. Leading dims
    broadcast; `grouped`: the last of them has fewer heads in keys and values, as `enable_gqa` says.
    """
    leads = [tuple(x.shape[:-2]) for x in (query, key, value)]
    if grouped:
        leads = [leads[0], *((*lead[:-1], leads[0][-1]) for lead in leads[1:])]
    shape = (*broadcast_lead(leads), query.shape[-2], value.shape[-1])
    scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
    kernel = fused_kernel(query.device.type, query.device.index, query.dtype, max(query.shape[-1], value.shape[-1]))
    if kernel == "efficient" and torch.compiler.is_compiling():
        kernel = "none"  # torch 2.13 does not know the shapes of what its backward gives
    q, k, v = with_heads(query, key, value, grouped, shares=kernel in ("cpu", "flash"))
    if kernel == "flash":
        found = _flash(q, k, v, scale)
    elif kernel == "efficient":
        found = _efficient(q, k, v, scale)
    elif kernel == "cpu":
        width = max(q.shape[-1], v.shape[-1])
        merged: Tensor = _Merged.apply(*(widened(x, width) for x in (q, k, v)), scale)  # type: ignore[no-untyped-call]
        found = merged[..., : v.shape[-1]]
    else:
        found = _Written.apply(q, k, v, scale)  # type: ignore[no-untyped-call]
    return found.reshape(shape)


def broadcast_lead(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


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
    lead = broadcast_lead(x.shape[:-2] for x in tensors)
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


# -- fused kernels of GPUs --------------------------------------------------------------------------------------------


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    width = aligned(max(q.shape[-1], v.shape[-1]))
    padded = [widened(x, width) for x in (q, k, v)]
    # For this op causal means that the last query sees all keys, unlike for `scaled_dot_product_attention`.
    found: Tensor = aten._scaled_dot_product_flash_attention.default(*padded, 0.0, True, False, scale=scale)[0]
    return found[..., : v.shape[-1]]


def _efficient(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    widths = [aligned(x.shape[-1]) for x in (q, k, v)]
    padded = [widened(x, width).transpose(1, 2) for x, width in zip((q, k, v), widths, strict=True)]
    saves = torch.is_grad_enabled() and any(x.requires_grad for x in padded)
    nothing = (None,) * 5  # no bias, all sequences of one length
    found: Tensor = aten._efficient_attention_forward.default(
        *padded, *nothing, 0.0, LOWER_RIGHT, saves, scale=scale, seqlen_k=None
    )[0]
    return found.transpose(1, 2)[..., : v.shape[-1]]


# -- the fused kernel of CPUs -----------------------------------------------------------------------------------------


class _Merged(torch.autograd.Function):
    """Merge of two parts of attention; each part's backward takes the merged result, so gradients are the whole's."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        found, sums = _cpu(q, *_last(k, v, q.shape[-2]), True, scale)
        before = k.shape[-2] - q.shape[-2]
        if before:
            first, first_sums = _cpu(q, k[..., :before, :], v[..., :before, :], False, scale)
            total = torch.logaddexp(sums, first_sums)
            shares = [(part - total).exp()[..., None] for part in (sums, first_sums)]
            found, sums = (found * shares[0] + first * shares[1]).to(q.dtype), total
        ctx.save_for_backward(q, k, v, found, sums)
        ctx.scale = scale
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("fused causal attention")
        q, k, v, found, sums = ctx.saved_tensors
        if gradient.stride(-1) != 1 or 0 in gradient.stride():
            gradient = gradient.contiguous()
        back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        last = _last(k, v, q.shape[-2])
        gradients = back(gradient, q, *last, found, sums, 0.0, True, scale=ctx.scale)
        before = k.shape[-2] - q.shape[-2]
        if not before:
            return (*gradients, None)
        early = back(gradient, q, k[..., :before, :], v[..., :before, :], found, sums, 0.0, False, scale=ctx.scale)
        joined = [torch.cat(pair, -2) for pair in zip(early[1:], gradients[1:], strict=True)]
        return early[0] + gradients[0], *joined, None


def _last(k: Tensor, v: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return k[..., k.shape[-2] - rows :, :], v[..., v.shape[-2] - rows :, :]


def _cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, causal, scale=scale
    )
    return found


# -- written out ------------------------------------------------------------------------------------------------------


class _Written(torch.autograd.Function):
    """Attention in blocks of queries; the backward computes their weights again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        parts = [_weights(q, k, start, scale) @ in_sum_dtype(v[..., :seen, :]) for start, seen in _blocks(q, k)]
        found = torch.cat(parts, -2).to(q.dtype)
        ctx.save_for_backward(q, k, v, found)
        ctx.scale = scale
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("fused causal attention")
        q, k, v, found = ctx.saved_tensors
        of_q, of_k, of_v = [], torch.zeros_like(in_sum_dtype(k)), torch.zeros_like(in_sum_dtype(v))
        for start, seen in _blocks(q, k):
            weights = _weights(q, k, start, ctx.scale)
            own, result = (in_sum_dtype(x[..., start : start + BLOCK_ROWS, :]) for x in (gradient, found))
            of_v[..., :seen, :] += weights.transpose(-1, -2) @ own
            moved = own @ in_sum_dtype(v[..., :seen, :]).transpose(-1, -2) - (own * result).sum(-1, keepdim=True)
            of_scores = weights * moved * ctx.scale
            of_q.append(of_scores @ in_sum_dtype(k[..., :seen, :]))
            of_k[..., :seen, :] += of_scores.transpose(-1, -2) @ in_sum_dtype(q[..., start : start + BLOCK_ROWS, :])
        return torch.cat(of_q, -2).to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None


def _blocks(q: Tensor, k: Tensor) -> list[tuple[int, int]]:
    """Yield the start of each block of queries, and the number of keys that its last one sees."""
    rows, keys = q.shape[-2], k.shape[-2]
    return [(start, keys - rows + min(start + BLOCK_ROWS, rows)) for start in range(0, rows, BLOCK_ROWS)]


def _weights(q: Tensor, k: Tensor, start: int, scale: float) -> Tensor:
    """Return the attention weights of a block of queries over the keys that it sees."""
    own = in_sum_dtype(q[..., start : start + BLOCK_ROWS, :])
    rows = own.shape[-2]
    seen = k.shape[-2] - q.shape[-2] + start + rows
    scores = (own * scale) @ in_sum_dtype(k[..., :seen, :]).transpose(-1, -2)
    later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
    square = scores[..., seen - rows :].masked_fill(later, -torch.inf)
    return torch.cat([scores[..., : seen - rows], square], -1).softmax(-1)


def in_sum_dtype(x: Tensor) -> Tensor:
    """Return the tensor in the dtype that sums are made in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def check_first_derivative(what: str) -> None:
    """Raise in the backward of a backward, whose kernels have no derivative."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{what} has no second derivative")


# -- rows that know their position -------------------------------------------------------------------------------------


def causal_rows(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Run queries `start` to `stop` of causal attention: query `i` sees keys `0` to `i`."""
    given = local.arguments
    if not given["is_causal"]:
        return local
    keys = given["key"].shape[-2]
    if given["dropout_p"] > 0:
        return _masked(local, piece)
    if piece.start >= keys or not piece.length:  # each sees all of them
        return local.with_arguments(is_causal=False)
    seen = min(piece.stop, keys)
    if piece.start == 0 and seen == piece.stop:
        return local.with_arguments(**_first(local, seen))
    return replace(local, op=_rows, arguments={**given, "start": piece.start})


def _first(local: LocalCall, seen: int) -> dict[str, torch.Tensor]:
    """Return the first keys and values, which are those seen."""
    return {name: local.arguments[name].narrow(-2, 0, seen) for name in ("key", "value")}


def _masked(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Return attention with an explicit mask; with dropout no kernel gives the weights' sums for a merge."""
    seen = min(piece.stop, local.arguments["key"].shape[-2])
    device = local.arguments["query"].device
    mask = torch.ones(piece.length, seen, dtype=torch.bool, device=device).tril(piece.start)
    return local.with_arguments(**_first(local, seen), attn_mask=mask, is_causal=False)


def _rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    enable_gqa: bool,
    start: int,
    **rest: object,
) -> torch.Tensor:
    """Return queries from `start` on; those after the last key see all keys."""
    keys = key.shape[-2]
    masked = min(query.shape[-2], keys - start)
    seen = start + masked
    first = query.narrow(-2, 0, masked)
    found = attend_last_rows(first, key.narrow(-2, 0, seen), value.narrow(-2, 0, seen), scale, enable_gqa)
    if masked == query.shape[-2]:
        return found
    others = query.narrow(-2, masked, query.shape[-2] - masked)
    later = torch.ops.aten.scaled_dot_product_attention.default(others, key, value, scale=scale, enable_gqa=enable_gqa)
    return torch.cat([found, later], -2)


# -- grouped heads -----------------------------------------------------------------------------------------------------


# On CUDA the kernel that takes a mask wants as many heads of keys as of queries; with fewer, torch computes all scores
# by plain products and keeps them. There the heads are repeated just before the kernel; the CPU's kernel takes both.
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


def repeat_masked_heads(graph: Graph, device_type: str) -> None:
    """Repeat heads before attention with a mask, in place, where the kernels of a device need it."""
    if device_type == "cuda":
        for node in graph.find_nodes(op="call_function", target=SDPA):
            node.target = with_most_memory(node)


def with_most_memory(node: Node) -> Any:
    """Return the target of a node in its form of most memory: with all heads, beside a mask."""
    if node.target is not SDPA or not node.kwargs.get("enable_gqa"):
        return node.target
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    return node.target if mask is None else attention_with_all_heads
