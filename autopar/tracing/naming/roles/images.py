"""`batch channels height width`: the dims of feature maps."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.tracing.naming.roles.structure import Proposal, Structure, op_name

__all__ = ["channels", "images"]

SPATIAL = {1: ("seq",), 2: ("height", "width"), 3: ("depth", "height", "width")}
KERNEL = {1: ("kernel",), 2: ("kernel_height", "kernel_width"), 3: ("kernel_depth", "kernel_height", "kernel_width")}


def images(structure: Structure) -> Iterator[Proposal]:
    """`batch channels height width` from the first convolutions; heights and widths of later maps follow by ties."""
    for bound in structure.binding.nodes:
        if "conv" not in op_name(bound) or bound.operands[0] is None or bound.operands[1] is None:
            continue
        dims, weight = structure.dims(bound.operands[0]), structure.dims(bound.operands[1])
        space_rank = len(weight) - 2
        if len(dims) != space_rank + 2:
            continue
        for name, dim in zip(KERNEL.get(space_rank, ()), weight[2:], strict=False):
            yield dim, name
        for key in (bound.operands[0], bound.outputs[0]):
            spatial = structure.dims(key)[2:] if key else ()
            for name, dim in zip(SPATIAL.get(space_rank, ()), spatial, strict=False):
                yield dim, name
        if not structure.space.parts(dims[0]):
            yield dims[0], "batch"
        if space_rank > 1 and bound.operands[0] in structure.kinds:
            yield dims[1], "channels"


def channels(structure: Structure) -> Iterator[Proposal]:
    """Every feature dim of a convolution over a window that is not the stream of a transformer."""
    for bound in structure.binding.nodes:
        if "conv" not in op_name(bound) or bound.operands[0] is None or bound.operands[1] is None:
            continue
        weight = structure.dims(bound.operands[1])
        pointwise = set(bound.call.operand(1).shape[2:]) == {1}
        mixes = any(True for _ in structure.contractions(bound))
        if len(weight) == 3 and (pointwise or not mixes):
            continue  # sequence models use these as layers like any other
        for key in (bound.operands[0], bound.outputs[0]):
            if key is not None and len(structure.dims(key)) == len(weight):
                dim = structure.dims(key)[1]
                inside = {structure.name(part) for part in structure.space.within(dim)}
                if not inside - {None, "channels"}:
                    yield dim, "channels"
