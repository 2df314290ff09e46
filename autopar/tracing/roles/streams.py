"""`d_model d_ff`: the residual stream, and what is born and summed away beside it."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.tracing.binding import ValueKey
from autopar.tracing.roles.structure import Proposal, Structure, op_name

__all__ = ["layers", "streams"]


def streams(structure: Structure) -> Iterator[Proposal]:
    """`d_model`: what a residual stream `x + f(x)` carries and `f` sums away; of feature maps, `channels`."""
    for bound in structure.binding.nodes:
        if op_name(bound) != "add" or len(bound.operands) != 2 or bound.outputs[0] is None:
            continue
        left, right = bound.operands
        if left is None or right is None or structure.is_weight(left) or structure.is_weight(right):
            continue
        dims = structure.dims(bound.outputs[0])
        if structure.dims(left) != dims or structure.dims(right) != dims:
            continue
        pairs = ((near, far) for near, far in ((left, right), (right, left)) for near in _unscaled(structure, near))
        summed = next((found for pair in pairs if (found := _summed_between(structure, *pair) & set(dims))), set())
        maps = {structure.name(dim) for dim in dims} & {"height", "width", "depth"}
        for dim in summed:
            yield dim, "channels" if maps else "d_model"


SCALING = ("mul", "div", "clone", "_to_copy", "dropout", "native_dropout")


def _unscaled(structure: Structure, key: ValueKey) -> Iterator[ValueKey]:
    """A value, and what it is a multiple of: some residual streams are scaled before the sum."""
    for _ in range(4):
        yield key
        bound = structure.maker.get(key)
        if bound is None or op_name(bound) not in SCALING:
            return
        source = next((k for k in bound.operands if k is not None and not structure.is_weight(k)), None)
        if source is None or structure.dims(source) != structure.dims(key):
            return
        key = source


def _summed_between(structure: Structure, left: ValueKey, right: ValueKey) -> set[int]:
    """The dims summed away against weights on the way from one value to the other; empty when there is no way."""
    first, last = sorted((left, right), key=lambda key: structure.order.get(key, -1))
    start = structure.order.get(first, -1)
    seen = {last}
    pending = [last]
    summed: set[int] = set()
    reached = False
    while pending:
        bound = structure.maker.get(pending.pop())
        if bound is None:
            continue
        summed.update(structure.factor_dim(bound, factor) for factor in structure.contractions(bound))
        for key in bound.operands:
            reached |= key == first
            if key is not None and key not in seen and structure.order.get(key, -1) > start:
                seen.add(key)
                pending.append(key)
    return summed if reached else set()


def layers(structure: Structure) -> Iterator[Proposal]:
    """`d_ff`: born in one linear layer and summed away in a later one, or one of the halves of what was born, summed
    away onto the stream. Normalised on the way it is a stream again."""
    made: set[int] = set()
    into_stream: set[int] = set()
    summed: dict[int, None] = {}
    normalised: set[int] = set()
    for bound in structure.binding.nodes:
        if "conv" in op_name(bound) and bound.call.operand(1).shape[2:] != (1,):
            continue  # channels are what stands between convolutions, but for the pointwise ones of sequence models
        if "norm" in op_name(bound):
            normalised.update(
                structure.factor_dim(bound, factor) for factor in bound.rule.whole if factor in bound.factors
            )
        to_stream = any(structure.name(structure.factor_dim(bound, f)) == "d_model" for f in structure.born(bound))
        for factor in structure.contractions(bound):
            summed[structure.factor_dim(bound, factor)] = None
            if to_stream and structure.is_inner(structure.factor_dim(bound, factor)):
                into_stream.add(structure.factor_dim(bound, factor))
        for factor in structure.born(bound):
            made.update(structure.space.within(structure.factor_dim(bound, factor)))
    streams = {structure.space.size(dim) for dim, name in structure.names.items() if name == "d_model"}
    for dim in summed:
        inside = [structure.name(part) for part in structure.space.within(dim)]
        if (dim in made or dim in into_stream) and not any(inside):
            stream = dim in normalised and structure.space.size(dim) in streams
            yield dim, "d_model" if stream else "d_ff"
