"""Name the residual stream (`d_model`) and the dims of layers beside it (`d_ff`, `low_rank`)."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from autopar.tracing.naming.bind_graph import BoundNode, ValueKey
from autopar.tracing.naming.roles.structure import Proposal, Structure, op_name
from autopar.tracing.naming.roles.tables import columns

__all__ = ["around_heads", "layers", "low_ranks", "streams"]


def streams(structure: Structure) -> Iterator[Proposal]:
    """Yield `d_model` for dims of a sum `x + f(x)` that `f` sums away; `channels` for feature maps."""
    for bound in structure.binding.nodes:
        if op_name(bound) != "add" or len(bound.operands) != 2 or bound.outputs[0] is None:
            continue
        left, right = bound.operands
        if left is None or right is None or structure.is_weight(left) or structure.is_weight(right):
            continue
        dims = structure.dims(bound.outputs[0])
        if structure.dims(left) != dims or structure.dims(right) != dims:
            continue
        maps = {structure.name(dim) for dim in dims} & SPACE
        for dim in _stream_dims(structure, left, right, dims):
            if not {structure.name(atom) for atom in structure.space.atoms(dim)} & POSITIONS:
                yield dim, "channels" if maps else "d_model"


def _stream_dims(structure: Structure, left: ValueKey, right: ValueKey, dims: tuple[int, ...]) -> Iterator[int]:
    """Yield the dims that every path between the two operands sums away; none without a path."""
    # Either operand of the sum can be the input of the other branch.
    for near, far in ((left, right), (right, left)):
        for start in _unscaled(structure, near):
            between = _ways(structure, start, far)
            if between is not None:
                summed = {dim for bound in between for dim in _summed(structure, bound)}
                for dim in dims:
                    if summed & {*structure.space.atoms(dim), dim} and _ways(structure, start, far, dim) is None:
                        yield dim
                return


def _summed(structure: Structure, bound: BoundNode) -> Iterator[int]:
    """Yield the dims that an op sums away between an activation and a weight."""
    yield from (structure.factor_dim(bound, factor) for factor in structure.contractions(bound))


SPACE = {"height", "width", "depth"}
# Layers may mix positions as they mix features (MLP-Mixer); such a dim keeps its name.
POSITIONS = {"seq", *SPACE}
SCALING = ("mul", "div", "clone", "_to_copy", "dropout", "native_dropout")


def _unscaled(structure: Structure, key: ValueKey) -> Iterator[ValueKey]:
    """Yield a value, then the values it is a multiple of: some models scale the stream before the sum."""
    # Four ops: models scale a stream by a constant, cast it and drop out, hardly more.
    for _ in range(4):
        yield key
        bound = structure.maker.get(key)
        if bound is None or op_name(bound) not in SCALING:
            return
        source = next((k for k in bound.operands if k is not None and not structure.is_weight(k)), None)
        if source is None or structure.dims(source) != structure.dims(key):
            return
        key = source


def _ways(structure: Structure, first: ValueKey, last: ValueKey, without: int | None = None) -> list[BoundNode] | None:
    """Return the ops between `first` and `last`; None if no path exists that keeps the dim `without`."""
    start = structure.order.get(first, -1)
    barred = set() if without is None else {without, *structure.space.atoms(without)}
    seen = {last}
    pending = [last]
    passed: list[BoundNode] = []
    reached = first == last
    while pending:
        bound = structure.maker.get(pending.pop())
        if bound is None or op_name(bound).endswith("_like") or op_name(bound).startswith("new_"):
            # These ops use the shape of their operand alone.
            continue
        if barred and barred.intersection(_summed(structure, bound)):
            continue
        passed.append(bound)
        for key in bound.operands:
            reached |= key == first
            if key is not None and key not in seen and structure.order.get(key, -1) > start:
                seen.add(key)
                pending.append(key)
    return passed if reached else None


def layers(structure: Structure) -> Iterator[Proposal]:
    """Yield `d_ff` for dims that one linear layer makes and a later one sums away.

    A half of such a dim that is summed onto the stream counts too (gated layers). A normalised one of the stream's
    extent is `d_model` again.
    """
    made: set[int] = set()
    into_stream: set[int] = set()
    summed: dict[int, None] = {}
    normalised: set[int] = set()
    for bound in structure.binding.nodes:
        if "conv" in op_name(bound) and bound.call.operand(1).shape[2:] != (1,):
            # Dims between convolutions are channels, except pointwise ones, which sequence models use as linear.
            continue
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
    # The columns of a table that is tied to the head are narrower than the stream, and no hidden dim of a layer.
    made -= columns(structure)
    for dim in summed:
        inside = [structure.name(part) for part in structure.space.within(dim)]
        if (dim in made or dim in into_stream) and not any(inside):
            stream = dim in normalised and structure.space.size(dim) in streams
            yield dim, "d_model" if stream else "d_ff"


def low_ranks(structure: Structure) -> Iterator[Proposal]:
    """Yield `low_rank` for the inner dim of a weight written as a product of two narrower ones.

    Latent attention and adapters have them. Only linear ops, norms and cuts stand between the two weights. The dim is
    no wider than the dims before and after it; before heads it may be wider.
    """
    size = structure.space.size
    for bound in structure.binding.nodes:
        born = [structure.factor_dim(bound, factor) for factor in structure.born(bound)]
        heads = any(
            structure.name(atom) in ("heads", "kv_heads") for dim in born for atom in structure.space.atoms(dim)
        )
        for factor in structure.contractions(bound):
            dim = structure.factor_dim(bound, factor)
            if structure.name(dim) is not None or structure.space.parts(dim):
                continue
            sources = [key for key in bound.operands if key is not None and not structure.is_weight(key)]
            makers = [_maker_unbent(structure, key, dim) for key in sources if dim in structure.dims(key)]
            extents = [
                prod(map(size, born)),
                *(prod(map(size, _summed(structure, maker))) for maker in makers if maker),
            ]
            if makers and None not in makers and (heads or size(dim) <= min(extents)):
                yield dim, "low_rank"


CUTS = ("slice", "split", "split_with_sizes", "narrow", "chunk")


def _maker_unbent(structure: Structure, key: ValueKey, dim: int) -> BoundNode | None:
    """Return the linear layer that made a dim, if only linear ops, norms and cuts follow it; else None."""
    while (bound := structure.maker.get(key)) is not None:
        if dim in {structure.factor_dim(bound, factor) for factor in structure.born(bound)}:
            return bound
        if op_name(bound) in CUTS and bound.operands[0] is not None:
            dim = structure.dims(bound.operands[0])[structure.dims(key).index(dim)]
            key = bound.operands[0]
            continue
        having = {
            place: operand
            for place, operand in enumerate(bound.operands)
            if operand is not None and not structure.is_weight(operand) and dim in structure.dims(operand)
        }
        linear = any(having.keys() <= set(group) for group in bound.rule.linear) or bound.rule.linear_in_all
        if len(having) != 1 or not (linear or "norm" in op_name(bound)):
            return None
        (key,) = having.values()
    return None


def around_heads(structure: Structure) -> Iterator[Proposal]:
    """Yield `d_model` for dims that layers turn into heads or make of them, without a residual stream."""
    if "d_model" in structure.names.values():
        return
    for bound in structure.binding.nodes:
        summed, made = [*_summed(structure, bound)], [structure.factor_dim(bound, f) for f in structure.born(bound)]
        for these, others in ((summed, made), (made, summed)):
            atoms = {structure.name(atom) for dim in others for atom in structure.space.atoms(dim)}
            if "heads" in atoms and len(these) == 1:
                yield these[0], "d_model"
