"""Convolutions: batch, channels and groups; space by windows, or by patches that lie side by side."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch

from autopar.rules.call import Call
from autopar.rules.notation import Halo
from autopar.rules.ops._names import Names, as_list, compound, text, whole
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "TABLE"]


def _convolution(call: Call) -> str:
    """Channels that go in are summed, those that come out and groups are parallel; space goes by windows."""
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
    weight = [_grouped(call, own), *(summed or ["1"]), *(whole(name) for name in names.some(len(space)))]
    return _written(call, weight, [_grouped(call, summed), *space], [_grouped(call, own), *space], *halos)


def _transposed(call: Call) -> str:
    """Each input makes a patch of outputs. Patches side by side can be split between, else space is whole."""
    inputs, outputs = call.operand(1).shape[:2]
    added = as_list(call["output_padding"], call.operand(1).rank - 2)
    names = Names("bgio")
    taps, read, made = [], [], []
    for halo, extra in zip(_geometry(call), added, strict=True):
        name, tap = names.one(), names.whole()
        taps.append(tap)
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
    """The channels of one group; none where a group has a single one."""
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

GEOMETRIES = (
    (1, 1, 0, 1),
    (3, 1, 1, 1),
    (3, 2, 1, 1),
    (2, 1, 1, 3),
    (3, 3, 0, 1),
    (1, 2, 0, 1),
    (2, 3, 0, 1),
)
"""Kernel, stride, padding, dilation of the last dim; the dim before it has those of the line before."""

CHANNELS = ((4, 5, 1), (6, 6, 3), (3, 3, 3), (3, 6, 3))
"""Channels in, channels out, groups."""


def _samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    found = re.search(r"(\d)d", op._schema.name)
    for count in (int(found.group(1)),) if found else (1, 2):
        numbers = {1: range(len(GEOMETRIES)), 2: range(1, 4), 3: range(2, 3)}[count]
        for number in numbers:
            dims = [GEOMETRIES[number - 1], *[GEOMETRIES[number]] * 2][-count:]
            for channels in CHANNELS if number == 2 else CHANNELS[:1]:
                yield from _calls(op, count, dims, channels)


def _calls(
    op: torch._ops.OpOverload, count: int, dims: Sequence[tuple[int, int, int, int]], channels: tuple[int, int, int]
) -> Iterable[Sample]:
    """With a bias and a batch, and without; both ways where an argument says which."""
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


FAMILIES = {"convolution": OpFamily(_convolution, _samples), "transposed": OpFamily(_transposed, _samples)}

TABLE = """
aten.{conv1d,conv2d,conv3d}.{default,padding}               convolution
aten.conv_transpose1d.default                               transposed
aten.{conv_transpose2d,conv_transpose3d}.input              transposed
aten.convolution.default                                    convolution
"""
