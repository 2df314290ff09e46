"""Name the residual stream (`d_model`) and the dims of layers beside it (`d_ff`, `low_rank`)."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from autopar.tracing.naming.bind_graph import BoundNode, ValueKey
from autopar.tracing.naming.roles.structure import Proposal, Structure, op_name
from autopar.tracing.naming.roles.tables import columns


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
        for start in _scaled_sources(structure, near):
            between = _path(structure, start, far)
            if between is not None:
                summed = {dim for bound in between for dim in structure.contracted_dims(bound)}
                for dim in dims:
                    if summed & {*structure.space.atoms(dim), dim} and _path(structure, start, far, dim) is None:
                        yield dim
                return


SPACE = {"height", "width", "depth"}
# Layers may mix positions as they mix features (MLP-Mixer); such a dim keeps its name.
POSITIONS = {"seq", *SPACE}
SCALING = ("mul", "div", "clone", "_to_copy", "dropout", "native_dropout")


def _scaled_sources(structure: Structure, key: ValueKey) -> Iterator[ValueKey]:
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


def _path(structure: Structure, first: ValueKey, last: ValueKey, without: int | None = None) -> list[BoundNode] | None:
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
        if barred and barred.intersection(structure.contracted_dims(bound)):
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
        to_stream = "d_model" in map(structure.name, structure.new_dims(bound))
        for dim in structure.contracted_dims(bound):
            summed[dim] = None
            if to_stream and structure.is_inner(dim):
                into_stream.add(dim)
        for dim in structure.new_dims(bound):
            made.update(structure.space.within(dim))
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
        made = structure.new_dims(bound)
        heads = any(
            structure.name(atom) in ("heads", "kv_heads") for dim in made for atom in structure.space.atoms(dim)
        )
        for dim in structure.contracted_dims(bound):
            if structure.name(dim) is not None or structure.space.parts(dim):
                continue
            sources = [key for key in bound.operands if key is not None and not structure.is_weight(key)]
            makers = [_linear_maker(structure, key, dim) for key in sources if dim in structure.dims(key)]
            extents = [
                prod(map(size, made)),
                *(prod(map(size, structure.contracted_dims(maker))) for maker in makers if maker),
            ]
            if makers and None not in makers and (heads or size(dim) <= min(extents)):
                yield dim, "low_rank"


CUTS = ("slice", "split", "split_with_sizes", "narrow", "chunk")


def _linear_maker(structure: Structure, key: ValueKey, dim: int) -> BoundNode | None:
    """Return the linear layer that made a dim, if only linear ops, norms and cuts follow it; else None."""
    while (bound := structure.maker.get(key)) is not None:
        if dim in structure.new_dims(bound):
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
        summed, made = structure.contracted_dims(bound), structure.new_dims(bound)
        for these, others in ((summed, made), (made, summed)):
            atoms = {structure.name(atom) for dim in others for atom in structure.space.atoms(dim)}
            if "heads" in atoms and len(these) == 1:
                yield these[0], "d_model"
