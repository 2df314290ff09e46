"""Windows over space: convolutions, pooling, resizing and sampling of images."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autopar.rules.call import Call
from autopar.rules.notation import Halo
from autopar.rules.ops._names import Names, as_list, compound, text, whole
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "TABLE"]


# -- convolutions ------------------------------------------------------------------------------------------------------


def _convolution(call: Call) -> str:
    """Write the rule: input channels are summed, output channels and groups parallel, space read by windows."""
    if call.get("transposed"):
        return _transposed(call)
    outputs, inputs = call.operand(1).shape[:2]
    names = Names("bgio")
    space, halos = [], []
    for halo in _geometry(call):
        space.append(names.one())
        if not halo.pointwise:
            halos.append(f"halo {space[-1]} {halo}")
    own, summed = _channel("o", outputs // call["groups"]), _channel("i", inputs)
    # Taps of the kernel are whole: each shard of space needs all of them.
    weight = [_grouped(call, own), *(summed or ["1"]), *(whole(name) for name in names.some(len(space)))]
    return _written(call, weight, [_grouped(call, summed), *space], [_grouped(call, own), *space], *halos)


def _transposed(call: Call) -> str:
    """Write the rule: each input makes a patch of outputs; space splits only between patches that do not overlap."""
    inputs, outputs = call.operand(1).shape[:2]
    added = as_list(call["output_padding"], call.operand(1).rank - 2)
    names = Names("bgio")
    taps, read, made = [], [], []
    for halo, extra in zip(_geometry(call), added, strict=True):
        name, tap = names.one(), names.whole()
        taps.append(tap)
        # Patches lie side by side: each output belongs to one input.
        if halo.stride == halo.kernel and halo.padding == extra == 0 and 1 in (halo.dilation, halo.kernel):
            read.append(name)
            made.append(compound([name, tap]) if halo.kernel > 1 else name)
        else:
            read.append(whole(name))
            made.append(names.whole())
    own, summed = _channel("o", outputs), _channel("i", inputs // call["groups"])
    weight = [_grouped(call, summed), *(own or ["1"]), *taps]
    return _written(call, weight, [_grouped(call, summed), *read], [_grouped(call, own), *made])


def _geometry(call: Call) -> list[Halo]:
    kernel = call.operand(1).shape[2:]
    stride, dilation = as_list(call["stride"], len(kernel)), as_list(call["dilation"], len(kernel))
    if call["padding"] == "same":
        padding = [spread * (size - 1) // 2 for spread, size in zip(dilation, kernel, strict=True)]
    else:
        padding = [0] * len(kernel) if call["padding"] == "valid" else as_list(call["padding"], len(kernel))
    return [Halo(*one) for one in zip(kernel, stride, padding, dilation, strict=True)]


def _channel(name: str, count: int) -> list[str]:
    """Return the channels of one group; none where a group has a single one."""
    return [name] if count > 1 else []


def _grouped(call: Call, channel: list[str]) -> str:
    factors = ["g", *channel] if call["groups"] > 1 else channel
    return compound(factors) if factors else "1"


def _written(call: Call, weight: list[str], read: list[str], made: list[str], *clauses: str) -> str:
    batch = ["b"] if call.operand(0).rank == call.operand(1).rank else []
    bias = None if call.operands[2] is None else made[:1]
    groups = "localise groups=g" if call["groups"] > 1 else ""
    return text([[*batch, *read], weight, bias], [[*batch, *made]], "linear 0+2 1+2", groups, *clauses)


# -- samples ----------------------------------------------------------------------------------------------------------

# Kernel, stride, padding, dilation of the last dim; the dim before it has those of the line before.
GEOMETRIES = (
    (1, 1, 0, 1),
    (3, 1, 1, 1),
    (3, 2, 1, 1),
    (2, 1, 1, 3),
    (3, 3, 0, 1),
    (1, 2, 0, 1),
    (2, 3, 0, 1),
)

# Channels in, channels out, groups.
CHANNELS = ((4, 5, 1), (6, 6, 3), (3, 3, 3), (3, 6, 3))


def _samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    found = re.search(r"(\d)d", op._schema.name)
    for count in (int(found.group(1)),) if found else (1, 2):
        numbers = {1: range(len(GEOMETRIES)), 2: range(1, 4), 3: range(2, 3)}[count]
        for number in numbers:
            # Neighbouring dims get unlike geometries, so that mixed-up dims are noticed.
            dims = [GEOMETRIES[number - 1], *[GEOMETRIES[number]] * 2][-count:]
            for channels in CHANNELS if number == 2 else CHANNELS[:1]:
                yield from _calls(op, count, dims, channels)


def _calls(
    op: torch._ops.OpOverload, count: int, dims: Sequence[tuple[int, int, int, int]], channels: tuple[int, int, int]
) -> Iterable[Sample]:
    """Yield calls with and without bias and batch; both directions where an argument names one."""
    inputs, outputs, groups = channels
    kernel, stride, padding, dilation = (list(values) for values in zip(*dims, strict=True))
    names = {argument.name: str(argument.type) for argument in op._schema.arguments}
    space = (10, 7, 4)[:count]

    def sample(batch: tuple[int, ...], bias: bool, transposed: bool, **arguments: object) -> Sample:
        weight = (inputs, outputs // groups) if transposed else (outputs, inputs // groups)
        given = {"stride": stride, "dilation": dilation, "groups": groups, "transposed": transposed}
        given |= {"output_padding": [0] * count, **arguments}
        tensors = [Draw((*batch, inputs, *space)), Draw((*weight, *kernel)), Draw((outputs,)) if bias else None]
        return make_sample(op, tensors, {name: value for name, value in given.items() if name in names})

    for transposed in (False, True) if "transposed" in names else ("transpose" in op._schema.name,):
        words = ["valid", *(["same"] if set(stride) == {1} else [])]
        for amount in words if names["padding"] == "str" else [padding]:
            yield sample((2,), True, transposed, padding=amount)
            yield sample((2,) if "transposed" in names else (), False, transposed, padding=amount)
    if "output_padding" in names and max(stride) > 1:
        yield sample((2,), False, True, padding=padding, output_padding=[step - 1 for step in stride])


def _spatial(name: str) -> int:
    """Return the number of spatial dims, which the op's name states."""
    found = re.search(r"(\d)d", name)
    assert found is not None, f"{name} does not say how many dims it pools"
    return int(found.group(1))


# -- windows ----------------------------------------------------------------------------------------------------------


def _pool(call: Call) -> str:
    """Write the rule: leading dims are parallel. Positions of maxima keep space whole."""
    count = _spatial(call.op)
    names = Names()
    left = names.some(call.operand(0).rank)
    right = list(left)
    clauses = []
    for i, halo in enumerate(_pool_geometry(call, count), len(left) - count):
        # A window of one element reads no neighbour.
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
        "max_pool" in call.op
        and len(call.outputs) == 1
        and all(halo.kernel == 1 for halo in _pool_geometry(call, count))
    )
    return text([left], [right] * len(call.outputs), "linear 0" if mean or alone else "", *clauses)


def _pool_geometry(call: Call, count: int) -> list[Halo]:
    kernel = as_list(call["kernel_size"], count)
    stride = as_list(call["stride"], count) or kernel
    dilation = as_list(call.get("dilation", 1), count)
    return [Halo(*one) for one in zip(kernel, stride, as_list(call["padding"], count), dilation, strict=True)]


def _lowering(call: Call, halo: Halo, extent: int, made: int) -> str | None:
    """Return the function that runs a part of a window; None where the divisor of a mean at the edge forbids it."""
    if "avg_pool" not in call.op or call.get("divisor_override"):
        return "window"
    overhangs = (made - 1) * halo.stride - halo.padding + halo.kernel > extent + halo.padding
    if call["count_include_pad"]:
        return None if overhangs else "window"
    if not overhangs and not halo.padding:
        return "window"
    return "window_mean" if call.operand(0).differentiable else None


# Kernel, stride, padding, dilation.
WINDOWS = ((3, 2, 1, 1), (2, 2, 0, 1), (3, 1, 1, 1), (2, 3, 1, 2), (1, 1, 0, 1))


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
    """Write the rule: a mean over a dim, or over its equal parts; overlapping parts keep the dim whole."""
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
    """Write the rule: dims of unchanged size are parallel, and so are copies of a pixel."""
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
    """Return True if each pixel of a dim is repeated equally often, or is the only one."""
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
    """Write the rule of overlapping patches, `(c k)` by their number, or of the image that they sum to."""
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
    """Write the rule: output positions are parallel, the image that they read stays whole."""
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
    """Write the rule: positions count in the whole output, so space is whole."""
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
aten.{conv1d,conv2d,conv3d}.{default,padding}               convolution
aten.conv_transpose1d.default                               transposed
aten.{conv_transpose2d,conv_transpose3d}.input              transposed
aten.convolution.default                                    convolution
"""

FAMILIES = {
    "unpool": OpFamily(_unpool, _unpool_samples),
    "pool": OpFamily(_pool, _pool_samples),
    "adaptive": OpFamily(_adaptive, _adaptive_samples),
    "resize": OpFamily(_resize, _resize_samples),
    "patches": OpFamily(_patches, _patches_samples),
    "grid": OpFamily(_grid, _grid_samples),
    "convolution": OpFamily(_convolution, _samples),
    "transposed": OpFamily(_transposed, _samples),
}
