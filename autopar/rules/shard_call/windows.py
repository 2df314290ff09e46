"""Compute parts of an output from the parts of the input that they read.

A window op (convolution, pooling) reads, for a piece of its output, a piece of its input with edges that belong to the
neighbours. The piece is cut out here, padded where it leaves the input, and the op itself pads that dim no more: any
stride, dilation and padding, and uneven pieces, come out exactly.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.rules.notation import Halo
from autopar.rules.ops._names import as_list
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall, narrow

__all__ = [
    "WindowReach",
    "arange_part",
    "numeric_padding",
    "own_part",
    "padded",
    "reach",
    "unpadded",
    "window",
    "window_mean",
]


@dataclass(frozen=True)
class WindowReach:
    """Positions `first` to `last` of the input that a slice of the output reads, and padding on both sides."""

    first: int
    last: int
    before: int
    after: int


def reach(halo: Halo, start: int, stop: int, extent: int) -> WindowReach:
    """Return the input positions that output positions `start` to `stop` read, for an input of this extent."""
    begin = start * halo.stride - halo.padding
    end = (stop - 1) * halo.stride - halo.padding + (halo.kernel - 1) * halo.dilation + 1
    first, last = (min(max(position, 0), extent) for position in (begin, end))
    before = min(max(-begin, 0), end - begin)
    return WindowReach(first, last, before, (end - begin) - before - (last - first))


def window(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Cut out what this piece of the output reads; the rest of the call stays as it is."""
    operand, halo = local.rule.operands[0], local.rule.halo(piece.factor)
    assert operand is not None, "a window op has an input"
    assert halo is not None, f"{local.rule}: a window needs its geometry"
    dim = operand.terms.index((piece.factor,))
    local = numeric_padding(local, (dim,))
    name = "input" if "input" in local.arguments else "self"
    whole = local.arguments[name]
    part = reach(halo, piece.start, piece.stop, whole.shape[dim])
    read = whole.narrow(dim, part.first, part.last - part.first)
    return unpadded(local.with_arguments(**{name: padded(local, read, dim, part.before, part.after)}), (dim,))


def unpadded(local: LocalCall, dims: Collection[int]) -> LocalCall:
    """Return the call with no padding of its own in these dims of its input."""
    if "padding" not in local.arguments:
        return local
    count = _spatial_dims(local)
    operand = local.rule.operands[0]
    assert operand is not None, "a window op has an input"
    padding = as_list(local.arguments["padding"], count)
    for dim in dims:
        padding[dim - len(operand.terms)] = 0
    return local.with_arguments(padding=padding)


def window_mean(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Average pooling that does not count the padding: sums by counts, both with the padding as zeros."""
    local = local.with_arguments(count_include_pad=True)
    ones = torch.ones_like(local.arguments["self"], requires_grad=False)
    counts = window(local.with_arguments(self=ones), piece).run()
    means = window(local, piece)
    return replace(means, finish=(*means.finish, lambda result: result / counts))


def padded(local: LocalCall, tensor: torch.Tensor, dim: int, before: int, after: int) -> torch.Tensor:
    """Return the tensor with the op's own padding: zeros, or less than any number for a maximum."""
    if not before and not after:
        return tensor
    value: float = 0
    if "max_pool" in str(local.op):
        value = float("-inf") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
    amounts = [0, 0] * (tensor.dim() - 1 - dim) + [before, after]
    return torch.nn.functional.pad(tensor, amounts, value=value)


def _spatial_dims(local: LocalCall) -> int:
    if "weight" in local.arguments:
        return int(local.arguments["weight"].dim()) - 2
    found = re.search(r"(\d)d", str(local.op))
    assert found is not None, f"{local.op} does not say how many dims it slides over"
    return int(found.group(1))


def numeric_padding(local: LocalCall, split: Collection[int]) -> LocalCall:
    """Return padding words as numbers; dims that are not split are padded here."""
    word = local.arguments.get("padding")
    if not isinstance(word, str):
        return local
    tensor, count = local.arguments["input"], _spatial_dims(local)
    if word == "same":
        kernel = local.arguments["weight"].shape[2:]
        dilation = as_list(local.arguments["dilation"], count)
        for dim, size, spread in zip(range(tensor.dim() - count, tensor.dim()), kernel, dilation, strict=True):
            total = spread * (size - 1)
            if total and dim not in split:
                tensor = padded(local, tensor, dim, total // 2, total - total // 2)
    arguments = {**local.arguments, "input": tensor, "padding": [0] * count}
    op = getattr(torch.ops.aten, f"conv{count}d").default
    return replace(local, op=op, arguments=arguments)


# -- dims that are born in an op --------------------------------------------------------------------------------------


def own_part(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Compute the whole output, cheap as it is, and keep this shard's part."""

    def keep(result: torch.Tensor) -> torch.Tensor:
        operand = local.rule.outputs[0]
        assert operand is not None, "the output has dims"
        return narrow(result, operand.terms, local.sizes, piece)

    return replace(local, finish=(*local.finish, keep))


def arange_part(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Run an `arange` that starts at this shard's first number."""
    given = local.arguments
    start, end, step = given.get("start", 0), given["end"], given.get("step", 1)
    dtype = given.get("dtype")
    # Without a dtype, whole numbers make integers, as in torch.
    whole = all(isinstance(number, int) for number in (start, end, step))
    integral = whole if dtype is None else not dtype.is_floating_point
    start, step = (int(start), int(step)) if integral else (float(start), float(step))
    first = start + piece.start * step
    last = first + (piece.length if integral else piece.length - 0.5) * step  # half a step short: no rounding up
    kept = {name: given[name] for name in ("dtype", "layout", "device", "pin_memory") if name in given}
    arguments: dict[str, Any] = {"start": first, "end": last, "step": step, **kept}
    return replace(local, op=torch.ops.aten.arange.start_step, arguments=arguments)
