"""Kernels of attention over ranges of keys: each gives a result with the logarithms of the sums of its weights.

Results over several ranges are merged by these sums. With the merged result and sums the backward of a range gives its
share of the gradients of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from autopar.rules.shard_call.attention import in_sum_dtype

__all__ = [
    "BACKWARD",
    "FORWARD",
    "KeyRange",
    "StoredRange",
    "add_rows",
    "finite_sums",
    "merged",
    "prefers_cudnn",
    "take_rows",
]

aten = torch.ops.aten

# Stretch of a shard: its first row, their number, and whether the order is reversed.
StoredRange = tuple[int, int, bool]


def take_rows(x: Tensor, ranges: tuple[StoredRange, ...]) -> Tensor:
    """Return some rows, ascending by position; one range in its own order is no copy."""
    found = [x.narrow(-2, begin, count) for begin, count, _ in ranges]
    found = [one.flip(-2) if flips else one for one, (_, _, flips) in zip(found, ranges, strict=True)]
    return found[0] if len(found) == 1 else torch.cat(found, -2)


def add_rows(into: Tensor, ranges: tuple[StoredRange, ...], more: Tensor) -> None:
    """Add values to the rows that `take_rows` returns."""
    at = 0
    for begin, count, flips in ranges:
        part = more.narrow(-2, at, count)
        into.narrow(-2, begin, count).add_(part.flip(-2) if flips else part)
        at += count


@dataclass(frozen=True)
class KeyRange:
    """Keys that rows see: all of them, those up to each row, or those in a window up to each row."""

    ranges: tuple[StoredRange, ...]
    causal: bool = False
    window: int = 0
    # Positions from the last key to the last row; of a window alone it may be more than 0.
    behind: int = 0
    # Added to the scores; the kernel that is written out takes it, and that of the CPU where each row sees a key.
    bias: Tensor | None = field(default=None, compare=False)

    @property
    def is_lower_right(self) -> bool:
        """Return whether the last row sees all keys up to the last one, the causal form of GPU kernels."""
        return self.causal and not self.behind


def merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge the results of rows over several ranges of keys by the logarithms of their sums."""
    found, total = parts[0]
    for more, sums in parts[1:]:
        joined = torch.logaddexp(total, sums)
        found = found * (total - joined).exp()[..., None] + more * (sums - joined).exp()[..., None]
        total = joined
    return found, total


def finite_sums(sums: Tensor) -> Tensor:
    """Return the logarithms of sums with zeros for rows that see no key, so that their weights are zeros."""
    return sums.masked_fill(sums == -torch.inf, 0.0)


# -- kernels: result and sums of one call, and its gradients -----------------------------------------------------------


def _hidden(rows: Tensor, keys: int, part: KeyRange) -> Tensor:
    """Return the keys that each row does not see."""
    count = rows.shape[-2]
    # Of row `i`, the key at its own position.
    own = keys - count + part.behind
    seen = torch.ones(count, keys, dtype=torch.bool, device=rows.device).tril(own)
    return ~(seen.triu(own - part.window + 1) if part.window else seen)


def _mask(rows: Tensor, keys: Tensor, part: KeyRange) -> Tensor | None:
    if part.bias is not None:
        return part.bias.to(rows.dtype)
    if not part.window:
        return None
    zeros = torch.zeros(rows.shape[-2], keys.shape[-2], dtype=rows.dtype, device=rows.device)
    return zeros.masked_fill(_hidden(rows, keys.shape[-2], part), -torch.inf)


def _cpu(rows: Tensor, keys: Tensor, values: Tensor, part: KeyRange, scale: float) -> tuple[Tensor, Tensor]:
    mask = _mask(rows, keys, part)
    found: tuple[Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu.default(
        rows, keys, values, 0.0, part.causal and mask is None, attn_mask=mask, scale=scale
    )
    return found


def _cpu_backward(
    gradient: Tensor,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    found: Tensor,
    sums: Tensor,
    part: KeyRange,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    mask = _mask(rows, keys, part)
    made: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        *(gradient, rows, keys, values, found, sums, 0.0, part.causal and mask is None), attn_mask=mask, scale=scale
    )
    return made


def _flash(rows: Tensor, keys: Tensor, values: Tensor, part: KeyRange, scale: float) -> tuple[Tensor, Tensor]:
    # For this op causal means that the last row sees all keys. It has the heads inside of the rows.
    q, k, v = (x.transpose(1, 2) for x in (rows, keys, values))
    found, sums, *_ = aten._flash_attention_forward.default(
        *(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, part.is_lower_right, False), scale=scale, **_sides(part)
    )
    return found.transpose(1, 2), sums


def _flash_backward(
    gradient: Tensor,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    found: Tensor,
    sums: Tensor,
    part: KeyRange,
    scale: float,
) -> tuple[Tensor, ...]:
    given, q, k, v, out = (x.transpose(1, 2) for x in (gradient, rows, keys, values, found))
    # Without dropout the state of the generator is not read.
    state = torch.empty(2, dtype=torch.uint64, device=rows.device)
    unused = torch.empty((), dtype=torch.uint64, device=rows.device)
    made = aten._flash_attention_backward.default(
        *(
            given,
            q,
            k,
            v,
            out,
            sums.contiguous(),
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            part.is_lower_right,
            state,
            unused,
        ),
        scale=scale,
        **_sides(part),
    )
    return tuple(x.transpose(1, 2) for x in made)


def _cudnn(rows: Tensor, keys: Tensor, values: Tensor, part: KeyRange, scale: float) -> tuple[Tensor, Tensor]:
    if not _is_for_cudnn(rows, keys, part):
        return _flash(rows, keys, values, part, scale)
    found, sums, *_ = aten._scaled_dot_product_cudnn_attention.default(
        rows, keys, values, None, True, 0.0, part.causal, False, scale=scale
    )
    return found, sums[..., 0]


def _cudnn_backward(
    gradient: Tensor,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    found: Tensor,
    sums: Tensor,
    part: KeyRange,
    scale: float,
) -> tuple[Tensor, ...]:
    if not _is_for_cudnn(rows, keys, part):
        return _flash_backward(gradient, rows, keys, values, found, sums, part, scale)
    # Without dropout the state of the generator is not read.
    state = torch.empty((), dtype=torch.int64, device=rows.device)
    lengths = None, None, rows.shape[-2], keys.shape[-2]
    made: tuple[Tensor, ...] = aten._scaled_dot_product_cudnn_attention_backward.default(
        *(gradient, rows, keys, values, found, sums[..., None].contiguous(), state, state, None),
        *(*lengths, 0.0, part.causal),
        scale=scale,
    )
    return made


def _is_for_cudnn(rows: Tensor, keys: Tensor, part: KeyRange) -> bool:
    """Return whether cuDNN takes a range: it has no windows, and its causal form begins with the first key."""
    return not part.window and (not part.causal or (not part.behind and rows.shape[-2] == keys.shape[-2]))


def prefers_cudnn(index: int | None, dtype: torch.dtype, width: int) -> bool:
    """Return whether torch takes cuDNN's attention for heads of this width on a GPU."""
    device = torch.device("cuda", index) if index is not None else torch.device("cuda")
    probe = torch.empty(1, 1, 128, width, dtype=dtype, device=device, requires_grad=True)
    return bool(torch._fused_sdp_choice(probe, probe, probe, is_causal=True) == SDPBackend.CUDNN_ATTENTION.value)


# What torch.compiler.assume_constant_result does, without loading the compiler: it cannot ask a device.
prefers_cudnn._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _sides(part: KeyRange) -> dict[str, int]:
    # Counted from the key that stands as far from the last one as the row from the last row.
    left, right = part.window - 1 - part.behind, part.behind
    return {"window_size_left": left, "window_size_right": right} if part.window else {}


def _scores(rows: Tensor, keys: Tensor, part: KeyRange, scale: float) -> Tensor:
    scores = (in_sum_dtype(rows) * scale) @ in_sum_dtype(keys).transpose(-1, -2)
    scores = scores if part.bias is None else scores + part.bias
    return scores.masked_fill(_hidden(rows, keys.shape[-2], part), -torch.inf) if part.causal else scores


def _written(rows: Tensor, keys: Tensor, values: Tensor, part: KeyRange, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(rows, keys, part, scale)
    # A mask may hide all keys of a range from a row.
    weights = scores.softmax(-1) if part.bias is None else aten._safe_softmax.default(scores, -1)
    return weights @ in_sum_dtype(values), scores.logsumexp(-1)


def _written_backward(
    gradient: Tensor,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    found: Tensor,
    sums: Tensor,
    part: KeyRange,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    given, result = in_sum_dtype(gradient), in_sum_dtype(found)
    sums = sums if part.bias is None else finite_sums(sums)
    weights = (_scores(rows, keys, part, scale) - sums[..., None]).exp()
    moved = given @ in_sum_dtype(values).transpose(-1, -2) - (given * result).sum(-1, keepdim=True)
    of_scores = weights * moved * scale
    of_keys = of_scores.transpose(-1, -2) @ in_sum_dtype(rows)
    return of_scores @ in_sum_dtype(keys), of_keys, weights.transpose(-1, -2) @ given


FORWARD: dict[str, Any] = {"cpu": _cpu, "flash": _flash, "cudnn": _cudnn, "written": _written}
BACKWARD: dict[str, Any] = {
    "cpu": _cpu_backward,
    "flash": _flash_backward,
    "cudnn": _cudnn_backward,
    "written": _written_backward,
}
