"""Pooling, resizing and sampling of images: space by windows where a window says what is read, else whole."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from autopar.rules.call import Call
from autopar.rules.notation import Halo
from autopar.rules.ops._names import Names, as_list, compound, text, whole
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "TABLE"]


def _spatial(name: str) -> int:
    """How many dims an op slides over: its name says it."""
    found = re.search(r"(\d)d", name)
    assert found is not None, f"{name} does not say how many dims it pools"
    return int(found.group(1))


# -- windows ----------------------------------------------------------------------------------------------------------


def _pool(call: Call) -> str:
    """Leading dims are parallel; positions of maxima count in the whole image, so with them space is whole."""
    count = _spatial(call.op)
    names = Names()
    left = names.some(call.operand(0).rank)
    right = list(left)
    clauses = []
    for i, halo in enumerate(_geometry(call, count), len(left) - count):
        if halo.pointwise and len(call.outputs) == 1:
            continue
        lowering = _lowering(call, halo, call.operand(0).shape[i], call.output.shape[i])
        if len(call.outputs) > 1 or lowering is None:
            left[i], right[i] = whole(left[i]), names.whole()
        else:
            clauses.append(f"halo {left[i]} {halo}")
            clauses += [f"lower {left[i]} {lowering}"] if lowering != "window" else []
    mean = "avg_pool" in call.op and call.operand(0).differentiable  # of integers it is rounded
    alone = (
        "max_pool" in call.op and len(call.outputs) == 1 and all(halo.kernel == 1 for halo in _geometry(call, count))
    )
    return text([left], [right] * len(call.outputs), "linear 0" if mean or alone else "", *clauses)


def _geometry(call: Call, count: int) -> list[Halo]:
    kernel = as_list(call["kernel_size"], count)
    stride = as_list(call["stride"], count) or kernel
    dilation = as_list(call.get("dilation", 1), count)
    return [Halo(*one) for one in zip(kernel, stride, as_list(call["padding"], count), dilation, strict=True)]


def _lowering(call: Call, halo: Halo, extent: int, made: int) -> str | None:
    """How a mean over a window at the edge is divided decides whether a window can be cut out."""
    if "avg_pool" not in call.op or call.get("divisor_override"):
        return "window"
    overhangs = (made - 1) * halo.stride - halo.padding + halo.kernel > extent + halo.padding
    if call["count_include_pad"]:
        return None if overhangs else "window"
    if not overhangs and not halo.padding:
        return "window"
    return "window_mean" if call.operand(0).differentiable else None


WINDOWS = ((3, 2, 1, 1), (2, 2, 0, 1), (3, 1, 1, 1), (2, 3, 1, 2), (1, 1, 0, 1))
"""Kernel, stride, padding, dilation."""


def _pool_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    count = _spatial(op._schema.name)
    average = "avg" in op._schema.name
    names = {argument.name for argument in op._schema.arguments}
    for kernel, stride, padding, dilation in WINDOWS if count < 3 else WINDOWS[:1]:
        for leading in ((2,), (2, 3)):
            space = (10, 7, 5)[:count]
            given: dict[str, Any] = {"kernel_size": [kernel] * count, "padding": [padding] * count}
            given |= {"dilation": dilation, "stride": [] if stride == kernel else [stride] * count}
            for extra in _ways(names, average and leading == (2,)):
                arguments = {name: value for name, value in {**given, **extra}.items() if name in names}
                yield make_sample(op, [Draw((*leading, *space))], arguments, tries)


def _ways(names: set[str], average: bool) -> list[dict[str, Any]]:
    ways: list[dict[str, Any]] = [{}, {"ceil_mode": True}]
    if average:
        ways += [{"count_include_pad": False}, {"count_include_pad": False, "ceil_mode": True}]
        ways += [{"divisor_override": 5, "ceil_mode": True}] if "divisor_override" in names else []
    return ways


# -- adaptive pooling -------------------------------------------------------------------------------------------------


def _adaptive(call: Call) -> str:
    """To one: a mean over the dim; to a divisor: over parts of it; else the parts overlap, or positions are asked."""
    count = _spatial(call.op)
    shape, out = call.operand(0).shape, call.output.shape
    names = Names()
    left = names.some(len(shape))
    right = list(left)
    contracted = []
    for i in range(len(shape) - count, len(shape)):
        size, made = shape[i], out[i]
        if size == made and len(call.outputs) == 1:
            continue
        if len(call.outputs) > 1 or size % max(made, 1) or size == 0:
            left[i], right[i] = whole(left[i]), "1" if made == 1 else names.whole()
        else:
            parts = names.one()
            contracted.append(parts)
            left[i], right[i] = (parts, "1") if made == 1 else (compound([left[i], parts]), left[i])
    clause = f"mean {' '.join(contracted)}" if contracted else ""
    return text([left], [right] * len(call.outputs), clause, "localise output_size" if len(call.outputs) == 1 else "")


def _adaptive_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    count = _spatial(op._schema.name)
    for sizes in ([1, 1, 1], [5, 2, 1], [3, 3, 5], [10, 1, 2]):
        for leading in ((2,), (2, 3)):
            yield make_sample(op, [Draw((*leading, *(10, 6, 5)[:count]))], {"output_size": sizes[:count]}, tries)


# -- resizing ---------------------------------------------------------------------------------------------------------


def _resize(call: Call) -> str:
    """A dim that keeps its size is parallel, and so are copies: of the nearest neighbour, or of a single pixel."""
    count = _spatial(call.op)
    shape, out = call.operand(0).shape, call.output.shape
    start = len(shape) - count
    scales = call.get("scale_factors") or [value for name, value in call.arguments if name.startswith("scales")]
    scales = scales or [None] * count
    # Antialiasing does not treat the parts of a dim like the whole, even one that keeps its size.
    exact = "_aa." not in call.op and all(
        scale is None or scale * size == made
        for scale, size, made in zip(scales, shape[start:], out[start:], strict=True)
    )
    names = Names()
    left = names.some(len(shape))
    right = list(left)
    for i in range(start, len(shape)):
        if not exact or (shape[i] > 1 and not _copied(call, shape[i], out[i])):
            left[i], right[i] = whole(left[i]), names.whole()
        elif shape[i] != out[i]:
            left[i], right[i] = ("1", left[i]) if shape[i] == 1 else (left[i], compound([left[i], names.one()]))
    return text([left], [right], "localise resized" if exact else "")


def _copied(call: Call, size: int, made: int) -> bool:
    """Whether each pixel of a dim is repeated alike, or stays alone."""
    return made == size if "nearest" not in call.op else made % size == 0


def _resize_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    count = _spatial(op._schema.name)
    names = {argument.name for argument in op._schema.arguments}
    for before, after in (((4, 5, 3), (8, 5, 7)), ((5, 4, 4), (7, 8, 4)), ((6, 5, 1), (3, 10, 3))):
        if "_aa." in str(op) and (1 in before[-2:] or before[-1] == after[-1]):
            continue
        tensor = Draw((2, 3, *before[-count:]))
        for corners in (False, True) if "align_corners" in names else (False,):
            given = {"output_size": list(after[-count:]), "align_corners": corners}
            yield make_sample(op, [tensor], {name: value for name, value in given.items() if name in names})
    if "scale_factors" in names:
        for scales in ([2.0, 1.0, 3.0], [1.5, 1.3, 1.0], [1.1, 2.0, 2.0]):
            arguments: dict[str, Any] = {"output_size": None, "scale_factors": scales[:count]}
            arguments |= {"align_corners": False} if "align_corners" in names else {}
            yield make_sample(op, [Draw((2, 3, *(4, 5, 3)[:count]))], arguments)


# -- patches and grids ------------------------------------------------------------------------------------------------


def _patches(call: Call, direction: str) -> str:
    """Overlapping patches of an image, `(c k)` by their number, or an image summed from them."""
    names = Names("cykxl")
    rank = call.operand(0).rank - (3 if direction == "out" else 2)
    batch = names.some(rank)
    image, patches = [*batch, "c", "y!", "x!"], [*batch, "(c k!)", "l!"]
    return text([image], [patches]) if direction == "out" else text([patches], [image])


def _patches_samples(op: torch._ops.OpOverload, tries: Tries, direction: str) -> Iterable[Sample]:
    for kernel, dilation, padding, stride in (((3, 2), (1, 1), (1, 0), (1, 1)), ((2, 2), (1, 2), (0, 1), (2, 1))):
        arguments: dict[str, Any] = {"kernel_size": kernel, "dilation": dilation, "padding": padding, "stride": stride}
        arguments = {name: list(value) for name, value in arguments.items()}
        image = torch.empty((2, 3, 6, 5), device="meta")
        patches = torch.ops.aten.im2col.default(image, *arguments.values())
        for first in (0, 1):
            if direction == "out":
                yield make_sample(op, [Draw(tuple(image.shape[first:]))], arguments)
            else:
                yield make_sample(op, [Draw(tuple(patches.shape[first:]))], {"output_size": [6, 5], **arguments})


def _grid(call: Call) -> str:
    """An image read at the positions of a grid, each for itself."""
    names = Names("bc")
    rank = call.operand(0).rank
    image = [names.whole() for _ in range(rank - 2)]
    places = names.some(rank - 2)
    return text([["b", "c", *image], ["b", *places, names.whole()]], [["b", "c", *places]])


def _grid_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    volumes = (2, 3) if op._schema.name.endswith("grid_sampler") else (_spatial(op._schema.name),)
    for count in volumes:
        for mode, edge, corners in ((0, 0, False), (0, 1, True), (1, 2, False)):
            tensors = [Draw((2, 3, *(5, 4, 3)[:count])), Draw((2, *(3, 6, 4)[:count], count), "unit")]
            way = {"interpolation_mode": mode, "padding_mode": edge, "align_corners": corners}
            yield make_sample(op, tensors, way)


def _unpool(call: Call) -> str:
    """Positions count in the whole image that is made."""
    names = Names()
    leading = names.some(call.operand(0).rank - _spatial(call.op))
    space = call.operand(0).shape[len(leading) :]
    read = [[*leading, *(names.whole() for _ in space)] for _ in range(2)]
    return text(read, [[*leading, *(names.whole() for _ in space)]])


def _unpool_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    count = _spatial(op._schema.name)
    for leading in ((2,), (2, 3)):
        drawn = [Draw((*leading, *(2,) * (count - 1), 4)), Draw((*leading, *(2,) * (count - 1), 4), "index", 4)]
        yield make_sample(op, drawn, {"output_size": [4] * (count - 1) + [8]}, tries)


FAMILIES = {
    "unpool": OpFamily(_unpool, _unpool_samples),
    "pool": OpFamily(_pool, _pool_samples),
    "adaptive": OpFamily(_adaptive, _adaptive_samples),
    "resize": OpFamily(_resize, _resize_samples),
    "patches": OpFamily(_patches, _patches_samples),
    "grid": OpFamily(_grid, _grid_samples),
}

TABLE = """
aten.{max_pool1d,max_pool2d,max_pool3d}.default             pool
aten.{max_pool1d_with_indices,max_pool2d_with_indices,max_pool3d_with_indices}.default  pool
aten.max_unpool2d.default                                   unpool; linear 0
aten.{avg_pool1d,avg_pool2d,avg_pool3d}.default             pool
aten.{adaptive_avg_pool1d,adaptive_avg_pool2d,adaptive_avg_pool3d}.default  adaptive; linear 0
aten.{_adaptive_avg_pool2d,_adaptive_avg_pool3d}.default    adaptive; linear 0
aten.{adaptive_max_pool1d,adaptive_max_pool2d,adaptive_max_pool3d}.default  adaptive
aten.{upsample_nearest1d,upsample_nearest2d,upsample_nearest3d}.{default,vec}  resize; linear 0
aten.{_upsample_nearest_exact1d,_upsample_nearest_exact2d,_upsample_nearest_exact3d}.{default,vec}  resize; linear 0
aten.{upsample_linear1d,upsample_bilinear2d,upsample_trilinear3d,upsample_bicubic2d}.{default,vec}  resize; linear 0
aten.{_upsample_bilinear2d_aa,_upsample_bicubic2d_aa}.{default,vec}  resize; linear 0
aten.im2col.default                                         patches out; linear 0
aten.col2im.default                                         patches in; linear 0
aten.{grid_sampler,grid_sampler_2d,grid_sampler_3d}.default  grid; linear 0
"""
