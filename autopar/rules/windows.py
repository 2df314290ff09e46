"""Parts of an output computed from the part of the input that they need.

A window op (convolution, pooling) reads, for a piece of its output, a piece of its input with edges that belong to the
neighbours. The piece is cut out here, padded where it leaves the input, and the op itself pads that dim no more: any
stride, dilation and padding, and uneven pieces, come out exactly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.rules.local import Local, Piece, narrow
from autopar.rules.writing import as_list

__all__ = ["arange_part", "own_part", "window", "window_mean"]


def window(local: Local, piece: Piece) -> Local:
    """Cut out what this piece of the output reads; the rest of the call stays as it is."""
    local = _with_numeric_padding(local, piece)
    operand, halo = local.rule.operands[0], local.rule.halo(piece.factor)
    assert operand is not None, "a window op has an input"
    assert halo is not None, f"{local.rule}: a window needs its geometry"
    name = "input" if "input" in local.arguments else "self"
    whole = local.arguments[name]
    dim = operand.terms.index((piece.factor,))
    start = piece.start * halo.stride - halo.padding
    stop = (piece.stop - 1) * halo.stride - halo.padding + (halo.kernel - 1) * halo.dilation + 1
    first, last = (min(max(end, 0), whole.shape[dim]) for end in (start, stop))
    before = min(max(-start, 0), stop - start)
    after = (stop - start) - before - (last - first)
    changes: dict[str, Any] = {name: _padded(local, whole.narrow(dim, first, last - first), dim, before, after)}
    if "padding" in local.arguments:
        count = _spatial_dims(local)
        padding = as_list(local.arguments["padding"], count)
        padding[dim - whole.dim()] = 0
        changes["padding"] = padding
    return local.with_arguments(**changes)


def window_mean(local: Local, piece: Piece) -> Local:
    """Average pooling that does not count the padding: sums by counts, both with the padding as zeros."""
    local = local.with_arguments(count_include_pad=True)
    ones = torch.ones_like(local.arguments["self"], requires_grad=False)
    counts = window(local.with_arguments(self=ones), piece).run()
    means = window(local, piece)
    return replace(means, finish=(*means.finish, lambda result: result / counts))


def _padded(local: Local, tensor: torch.Tensor, dim: int, before: int, after: int) -> torch.Tensor:
    if not before and not after:
        return tensor
    lowest = float("-inf") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
    value = lowest if "max_pool" in str(local.op) else 0
    amounts = [0, 0] * (tensor.dim() - 1 - dim) + [before, after]
    return torch.nn.functional.pad(tensor, amounts, value=value)


def _spatial_dims(local: Local) -> int:
    if "weight" in local.arguments:
        return int(local.arguments["weight"].dim()) - 2
    found = re.search(r"(\d)d", str(local.op))
    assert found is not None, f"{local.op} does not say how many dims it slides over"
    return int(found.group(1))


def _with_numeric_padding(local: Local, piece: Piece) -> Local:
    """Padding that is said by a word, with numbers: the dims that are not split are padded here."""
    word = local.arguments.get("padding")
    if not isinstance(word, str):
        return local
    tensor, count = local.arguments["input"], _spatial_dims(local)
    operand = local.rule.operands[0]
    assert operand is not None, "a convolution has an input"
    split = operand.terms.index((piece.factor,))
    if word == "same":
        kernel = local.arguments["weight"].shape[2:]
        dilation = as_list(local.arguments["dilation"], count)
        for dim, size, spread in zip(range(-count, 0), kernel, dilation, strict=True):
            total = spread * (size - 1)
            if total and dim + tensor.dim() != split:
                tensor = _padded(local, tensor, dim + tensor.dim(), total // 2, total - total // 2)
    arguments = {**local.arguments, "input": tensor, "padding": [0] * count}
    op = getattr(torch.ops.aten, f"conv{count}d").default
    return replace(local, op=op, arguments=arguments)


# -- dims that are born in an op --------------------------------------------------------------------------------------


def own_part(local: Local, piece: Piece) -> Local:
    """Compute the whole output, cheap as it is, and keep this shard's part."""

    def keep(result: torch.Tensor) -> torch.Tensor:
        operand = local.rule.outputs[0]
        assert operand is not None, "the output has dims"
        return narrow(result, operand.terms, local.sizes, piece)

    return replace(local, finish=(*local.finish, keep))


def arange_part(local: Local, piece: Piece) -> Local:
    """The numbers of this shard: an `arange` that starts further on."""
    given = local.arguments
    start, end, step = given.get("start", 0), given["end"], given.get("step", 1)
    integral = _is_integral(given.get("dtype"), (start, end, step))
    start, step = (int(start), int(step)) if integral else (float(start), float(step))
    first = start + piece.start * step
    last = first + (piece.length if integral else piece.length - 0.5) * step  # half a step short: no rounding up
    kept = {name: given[name] for name in ("dtype", "layout", "device", "pin_memory") if name in given}
    arguments: dict[str, Any] = {"start": first, "end": last, "step": step, **kept}
    return replace(local, op=torch.ops.aten.arange.start_step, arguments=arguments)


def _is_integral(dtype: torch.dtype | None, numbers: Sequence[float]) -> bool:
    if dtype is not None:
        return not dtype.is_floating_point
    return all(isinstance(number, int) for number in numbers)
