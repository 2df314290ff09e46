"""Ops that run along one dim, or a few, and leave the others alone: scans, sorting, Fourier transforms, histograms."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar.rules.call import Call
from autopar.rules.ops._names import Names, text, whole, wrap
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "TABLE"]


def _dims(call: Call, argument: str) -> set[int]:
    """The dims that the op runs along; all where it does not say, the last ones where it gives their sizes."""
    rank = call.operand(0).rank
    if argument.lstrip("-").isdigit():
        return {wrap(int(argument), rank)} if rank else set()
    given = call[argument]
    if given is None:
        sizes = call.get("s")
        return set(range(rank - len(sizes) if sizes else 0, rank))
    return {wrap(dim, rank) for dim in ([given] if isinstance(given, int) else given)} if rank else set()


def _along(call: Call, argument: str = "dim", *kinds: str) -> str:
    """The dims along which the op runs are whole; in each output they stay, change their size, or go."""
    names = Names()
    shape = call.operand(0).shape
    dims = _dims(call, argument)
    left = [whole(name) if i in dims else name for i, name in enumerate(names.some(len(shape)))]
    operands: list[list[str] | None] = []
    for spec in call.operands:
        sizes = () if spec is None else spec.shape
        read = [_resized(left[i], shape[i], size, i in dims, names) for i, size in enumerate(sizes)]
        operands.append(None if spec is None else read)
    outputs = []
    for spec in call.outputs:
        assert spec is not None, f"{call.op} has no such output"
        if spec.rank < len(shape):
            outputs.append([name for i, name in enumerate(left) if i not in dims])
        else:
            outputs.append([_resized(left[i], shape[i], size, i in dims, names) for i, size in enumerate(spec.shape)])
    return text(operands, outputs)


def _resized(name: str, before: int, after: int, along: bool, names: Names) -> str:
    if not along or before == after:
        return name
    return "1" if after == 1 else names.whole()


def _along_samples(op: torch._ops.OpOverload, tries: Tries, argument: str = "dim", *kinds: str) -> Iterable[Sample]:
    names = {each.name: str(each.type) for each in op._schema.arguments}
    for shape, dim in (((5, 7), 0), ((3, 4, 5), -2), ((7,), 0), ((4, 6), -1)):
        if argument not in names:
            yield make_sample(op, [Draw(shape, tries.kind)], {}, tries)
        elif "List" in names[argument]:
            yield make_sample(op, [Draw(shape, tries.kind)], {argument: [dim]}, tries)
        else:
            yield make_sample(op, [Draw(shape, tries.kind)], {argument: dim}, tries)
    yield from _special(op, tries, names, argument)


def _special(op: torch._ops.OpOverload, tries: Tries, names: dict[str, str], argument: str) -> Iterable[Sample]:
    """What some of these ops have besides a dim."""
    source = Draw((4, 6), tries.kind)
    if "prepend" in names:
        for n in (1, 2):
            tensors = [source, Draw((4, 2)), Draw((4, 1))]
            yield make_sample(op, tensors, {"n": n}, tries)
            yield make_sample(op, [source, Draw((4, 1)), None], {"n": n, "dim": 1}, tries)
    if "k" in names:
        yield make_sample(op, [source], {"k": 3, "dim": 0}, tries)
    if "n" in names and "norm" in names:
        for n in (4, 9):
            yield make_sample(op, [source], {"n": n, argument: 0, "norm": "ortho"}, tries)
    if "s" in names:
        yield make_sample(op, [Draw((3, 4, 6), tries.kind)], {"s": [5, 4], argument: [0, 2]}, tries)
        yield make_sample(op, [Draw((3, 4, 6), tries.kind)], {argument: [1, 2]}, tries)
        if "Optional" in names[argument]:
            yield make_sample(op, [Draw((4, 6), tries.kind)], {argument: None}, tries)
            yield make_sample(op, [Draw((3, 4, 6), tries.kind)], {"s": [5, 4], argument: None}, tries)


def _histc(call: Call) -> str:
    """Counts add up, if the range does not come from the numbers themselves."""
    names = Names()
    dims = names.some(call.operand(0).rank)
    if call["min"] == call["max"]:
        dims = [whole(name) for name in dims]
    return text([dims], [[names.whole()]])


def _histc_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    numbers = torch.arange(20, dtype=torch.float64) % 7
    for shape in ((20,), (4, 5)):
        for low, high in ((0, 6), (1, 4), (0, 0)):
            yield make_sample(op, [numbers.reshape(shape)], {"bins": 7, "min": low, "max": high})


FAMILIES = {
    "along": OpFamily(_along, _along_samples),
    "histc": OpFamily(_histc, _histc_samples),
}

TABLE = """
aten.cumsum.default                                         along; linear 0
aten.{cumprod,logcumsumexp,cummax,cummin}.default           along
aten.{sort,argsort}.{default,stable}                        along
aten.topk.default                                           along
aten.msort.default                                          along 0
aten.diff.default                                           along; linear 0+1+2
aten.{trapz,trapezoid,cumulative_trapezoid}.dx              along; linear 0
aten.gradient.scalarint                                     along; linear 0; try spacing=0.5
aten.flip.default                                           along dims; linear 0
aten.fliplr.default                                         a b! ... -> a b! ...; linear 0
aten.flipud.default                                         along 0; linear 0
aten.{fft_fft,fft_ifft}.default                             along; linear 0; try complex
aten.{fft_rfft,fft_ihfft}.default                           along; linear 0
aten.{fft_irfft,fft_hfft}.default                           along; linear 0; try complex
aten.{fft_fft2,fft_ifft2,fft_fftn,fft_ifftn}.default        along; linear 0; try complex
aten.{fft_rfft2,fft_rfftn}.default                          along; linear 0
aten.{fft_irfft2,fft_irfftn}.default                        along; linear 0; try complex
aten.{fft_fftshift,fft_ifftshift}.default                   along; linear 0
aten.histc.default                                          histc
aten.bincount.default                                       n!, n!? -> k!; try count
"""
