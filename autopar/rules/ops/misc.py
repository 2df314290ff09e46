"""Ops of no other family: spectra of frames, grids of coordinates, positions in a flattened tensor, sums of areas."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar.rules.call import Call
from autopar.rules.ops._names import Names, text, wrap
from autopar.rules.ops.elementwise import aligned_dims
from autopar.rules.ops.index import all_whole
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "TABLE"]


def _spectrogram(call: Call) -> str:
    """Signals one by one; frames overlap, so time is whole."""
    names = Names()
    batch = names.some(call.operand(0).rank - 1)
    window = None if call.operands[1] is None else [names.whole()]
    return text(
        [[*batch, names.whole()], window],
        [[*batch, *(names.whole() for _ in range(call.output.rank - len(batch)))]],
        "linear 0 1",
    )


def _spectrogram_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for shape in ((3, 20), (20,)):
        yield make_sample(op, [Draw(shape), Draw((6,))], {"n_fft": 6, "hop_length": 2, "return_complex": True})


def _meshgrid(call: Call) -> str:
    """Every coordinate is shown along all others; `xy` swaps the first two."""
    names = Names()
    dims = names.some(len(call.operands))
    lines = [
        [] if spec is not None and spec.rank == 0 else [name] for name, spec in zip(dims, call.operands, strict=True)
    ]
    out = list(dims)
    if call.get("indexing") == "xy" and len(out) > 1:
        out[:2] = out[1::-1]
    return text(lines, [out] * len(dims))


def _meshgrid_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for sizes in ((5,), (5, 4), (3, 4, 5)):
        for indexing in ("ij", "xy") if "indexing" in str(op) else ("ij",):
            given = {"indexing": indexing} if "indexing" in str(op) else {}
            yield make_sample(op, [[Draw((size,)) for size in sizes]], given)


def _take(call: Call) -> str:
    """Positions in the tensor as one row."""
    names = Names()
    found = names.some(call.operand(1).rank)
    return text([[names.whole() for _ in call.operand(0).shape], found], [found])


def _take_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for shape, index in (((5, 4), (3, 4)), ((7,), (5,))):
        yield make_sample(op, [Draw(shape), Draw(index, "index", 7)], {})


def _diagonal_scatter(call: Call) -> str:
    """Two dims hold the diagonal; the rest is parallel."""
    rank = call.operand(0).rank
    taken = {wrap(call["dim1"], rank), wrap(call["dim2"], rank)}
    names = Names()
    left = [names.whole() if dim in taken else names.one() for dim in range(rank)]
    return text([left, [*(name for dim, name in enumerate(left) if dim not in taken), names.whole()]], [left])


def _diagonal_scatter_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for shape, part, offset, dim1, dim2 in (((5, 5), (5,), 0, 0, 1), ((3, 4, 5), (4, 3), 1, 0, -1)):
        yield make_sample(op, [Draw(shape), Draw(part)], {"offset": offset, "dim1": dim1, "dim2": dim2})


def _broadcast(call: Call) -> str:
    """All operands in the one shape to which they broadcast."""
    names = Names()
    dims = names.some(call.output.rank)
    read = aligned_dims([spec.shape for spec in call.operands if spec is not None], dims, call.output.shape)
    return f"{', '.join(read)} -> {text([], [dims] * len(read)).removeprefix(' -> ')}"


def _broadcast_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for shapes in (((5, 7), (5, 7)), ((5, 7), (7,), ()), ((5, 1), (1, 7)), ((5,),)):
        yield make_sample(op, [[Draw(shape) for shape in shapes]], {})


def _diagonal_matrix(call: Call) -> str:
    """A matrix of which this is the diagonal, or the diagonal of a matrix."""
    return "a! -> b! c!" if call.operand(0).rank == 1 else "a! b! -> c!"


def _diagonal_matrix_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for shape, diagonal in (((5,), 0), ((5,), 1), ((5, 5), 0), ((4, 5), -1)):
        yield make_sample(op, [Draw(shape)], {"diagonal": diagonal}, tries)


def _blocks_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    yield make_sample(op, [[Draw((4, 5)), Draw((3, 7))]], {}, tries)


FAMILIES = {
    "broadcast": OpFamily(_broadcast, _broadcast_samples),
    "diagonal_matrix": OpFamily(_diagonal_matrix, _diagonal_matrix_samples),
    "blocks": OpFamily(all_whole, _blocks_samples),
    "spectrogram": OpFamily(_spectrogram, _spectrogram_samples),
    "meshgrid": OpFamily(_meshgrid, _meshgrid_samples),
    "take": OpFamily(_take, _take_samples),
    "diagonal_scatter": OpFamily(_diagonal_scatter, _diagonal_scatter_samples),
}

TABLE = """
aten.broadcast_tensors.default                       broadcast; linear *
aten.diag.default                                    diagonal_matrix; linear 0
aten.block_diag.default                              blocks; linear *
aten.stft.{default,center}                           spectrogram
aten.meshgrid.{default,indexing}                     meshgrid; linear *
aten.take.default                                    take; linear 0
aten.diagonal_scatter.default                        diagonal_scatter; linear 0+1
"""
