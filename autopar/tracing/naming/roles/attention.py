"""Name the dims of attention, fused or written out: `batch`, `heads`, `kv_heads`, `seq`, `head_dim`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from autopar.rules.notation import FactorKind, Operand
from autopar.tracing.naming.bind_graph import BoundNode, ValueKey
from autopar.tracing.naming.roles.structure import Proposal, Structure, op_name

# Most ops between the softmax of attention and its products, masks included.
FAR = 80


def attention(structure: Structure) -> Iterator[Proposal]:
    """Yield names for the dims of each attention, fused or written out."""
    for bound in structure.binding.nodes:
        if "attention" in op_name(bound):
            keys = bound.operands[:3]
            if None not in keys:
                yield from _fused(structure, *(structure.dims(k) for k in keys if k is not None))
        elif "softmax" in op_name(bound) and bound.operands[0] is not None and bound.outputs[0] is not None:
            yield from _unfused(structure, bound, bound.operands[0], bound.outputs[0])


# -- fused ------------------------------------------------------------------------------------------------------------


def _fused(
    structure: Structure, query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]
) -> Iterator[Proposal]:
    if min(len(query), len(key), len(value)) < 3:
        return
    yield query[-1], "head_dim"
    yield value[-1], "head_dim"
    yield query[-2], "seq"
    yield key[-2], "seq"
    for dims in (query, key):
        heads = _heads(structure, dims)
        if heads is not None:
            yield from _name_heads(structure, heads, shared=dims is key and heads != _heads(structure, query))
    if len(query) > 3 and not structure.space.parts(query[0]):
        yield query[0], "batch"


def _heads(structure: Structure, dims: tuple[int, ...]) -> int | None:
    """Return the heads of a query or key: dim -3, or the minor part of a merged batch; else None."""
    if len(dims) > 3:
        return dims[-3]
    parts = structure.space.parts(dims[-3])
    return parts[-1] if parts and structure.name(dims[-3]) is None else None


def _name_heads(structure: Structure, heads: int, shared: bool) -> Iterator[Proposal]:
    if structure.space.size(heads) == 1:
        # A dim of extent 1 cannot be split, and has no name.
        return
    yield heads, "kv_heads" if shared else "heads"
    parts = structure.space.parts(heads)
    if len(parts) == 2:
        yield parts[0], "kv_heads"
        yield parts[1], "group"


# -- unfused ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Product:
    """Product of two activations: its dims by the operands that have them."""

    # In both operands and the result.
    shared: tuple[int, ...]
    # In the first of the operands and the result.
    query: tuple[int, ...]
    # In the second and the result.
    other: tuple[int, ...]
    summed: tuple[int, ...]

    def turned(self) -> _Product:
        return _Product(self.shared, self.other, self.query, self.summed)


def _unfused(structure: Structure, softmax: BoundNode, scores: ValueKey, weights: ValueKey) -> Iterator[Proposal]:
    """Yield names for a softmax between two products: scores of queries and keys, and a mix of values."""
    columns = {structure.factor_dim(softmax, factor) for factor in softmax.rule.whole if factor in softmax.factors}
    mixes = _products(structure, [*structure.users.get(weights, ())], _users)
    second = next((mix for mix in mixes if columns & {*mix.summed}), mixes[0] if mixes else None)
    products = _products(structure, [structure.maker[scores]] if scores in structure.maker else [], _makers)
    if second is None or not products:
        return
    fitting = [product for product in products if columns & {*product.other, *product.query}] or products
    first = next(
        (product for product in fitting if _atoms(structure, product.shared) == _atoms(structure, second.shared)),
        fitting[0],
    )
    if columns & {*first.query}:
        first = first.turned()
    if {*first.other} & {*second.other} - {*first.query}:
        second = second.turned()
    mixed = [dim for dim in (*second.query, *second.other) if dim not in first.query]
    yield from ((dim, "head_dim") for dim in (*first.summed, *mixed))
    beside = structure.atoms_beside({*first.summed, *mixed})
    yield from _scores(structure, first, beside)


def _scores(structure: Structure, product: _Product, beside: set[int]) -> Iterator[Proposal]:
    """Yield names in a product of queries and keys; heads are dims that weights have `beside` head_dim."""
    shared = list(_maximal(structure, product.shared, beside))
    alone = list(_maximal(structure, product.query, beside))
    if not beside and len(product.shared) > 1:
        # No weight made the queries: the minor batch dim of the product is taken as the heads.
        shared = [product.shared[-1]]
    for heads in shared:
        yield from _name_heads(structure, heads, shared=bool(alone))
    for heads in alone:
        yield heads, "group" if shared else "heads"
    named = {*beside, *shared, *alone}
    for dim in (*_maximal(structure, product.query, named, inside=False), *product.other):
        yield dim, "seq"
    for dim in _maximal(structure, product.shared[:1], named, inside=False):
        if not structure.space.parts(dim):
            yield dim, "batch"


def _atoms(structure: Structure, dims: Iterable[int]) -> set[int]:
    return {atom for dim in dims for atom in structure.space.atoms(dim)}


def _maximal(structure: Structure, dims: Iterable[int], atoms: set[int], inside: bool = True) -> Iterator[int]:
    """Yield the largest classes, among `dims` and their parts, with all atoms inside (or outside) `atoms`."""
    for dim in dims:
        if all((atom in atoms) is inside for atom in structure.space.atoms(dim)):
            yield dim
        else:
            yield from _maximal(structure, structure.space.parts(dim), atoms, inside)


def _makers(structure: Structure, bound: BoundNode) -> Iterator[BoundNode]:
    yield from (structure.maker[key] for key in bound.operands if key in structure.maker)


def _users(structure: Structure, bound: BoundNode) -> Iterator[BoundNode]:
    yield from (user for key in bound.outputs if key is not None for user in structure.users.get(key, ()))


def _products(
    structure: Structure, pending: list[BoundNode], onward: Callable[[Structure, BoundNode], Iterator[BoundNode]]
) -> list[_Product]:
    """Return the nearest products of two activations, nearest first, without a linear layer between."""
    seen = {id(bound) for bound in pending}
    found = []
    while pending and len(seen) < FAR:
        bound = pending.pop(0)
        product = _product(structure, bound)
        if product is not None:
            found.append(product)
        elif not structure.contracted_dims(bound):
            fresh = {id(other): other for other in onward(structure, bound) if id(other) not in seen}
            seen.update(fresh)
            pending.extend(fresh.values())
    return found


def _product(structure: Structure, bound: BoundNode) -> _Product | None:
    """Return the dims of a product that sums over two activations; None for other ops."""
    if len(bound.rule.operands) < 2 or bound.outputs[0] is None:
        return None
    pairs = {}
    for factor, kind in bound.rule.kinds.items():
        holders = tuple(i for i, operand in enumerate(bound.rule.operands) if operand and factor in operand.factors)
        activations = all(_is_activation(structure, bound.operands[i]) for i in holders)
        if kind is FactorKind.SUM and len(holders) == 2 and activations:
            pairs[factor] = holders
    if not pairs:
        return None
    holders = next(iter(pairs.values()))
    summed = [factor for factor, pair in pairs.items() if pair == holders]
    left, right = ({*operand.factors} if (operand := bound.rule.operands[i]) else set() for i in holders)
    output = bound.rule.outputs[0]

    def dims(keep: Callable[[str], bool]) -> tuple[int, ...]:
        """Those of the result, which may differ from those of the operands: scores have `seq` twice."""
        return tuple(dim for factor, dim in _own_dims(structure, output, bound.outputs[0]) if keep(factor))

    read = [_own_dims(structure, bound.rule.operands[i], bound.operands[i]) for i in holders]
    return _Product(
        dims(lambda factor: factor in left and factor in right),
        dims(lambda factor: factor in left and factor not in right),
        dims(lambda factor: factor in right and factor not in left),
        tuple(dict.fromkeys(dim for pairs in read for factor, dim in pairs if factor in summed)),
    )


def _own_dims(structure: Structure, operand: Operand | None, key: ValueKey | None) -> list[tuple[str, int]]:
    """Return the factors that are a dim of their own in a value, with these dims."""
    if operand is None or key is None:
        return []
    return [(term[0], dim) for term, dim in zip(operand.terms, structure.dims(key), strict=True) if len(term) == 1]


def _is_activation(structure: Structure, key: ValueKey | None) -> bool:
    """Return True for a value computed from an input, or by a linear layer from weights (learned queries)."""
    for _ in range(FAR):
        if not structure.is_weight(key):
            return True
        bound = structure.maker.get(key) if key is not None else None
        if bound is None:
            return False
        if "linear" in op_name(bound):
            return True
        key = bound.operands[0] if bound.operands else None
    return False


# -- by named dims ----------------------------------------------------------------------------------------------------


def head_dims(structure: Structure) -> Iterator[Proposal]:
    """Yield `head_dim` for dims beside `heads` with the extent of a named one.

    A rotary embedding can separate the head dim into two classes, before and after it.
    """
    extents = {structure.space.size(dim) for dim, name in structure.names.items() if name == "head_dim"}

    def may_be(dim: int) -> bool:
        named = any(map(structure.name, structure.space.within(dim)))
        return not named and structure.space.size(dim) in extents

    for dims in map(structure.dims, structure.binding.dims):
        if any(structure.name(dim) in ("heads", "kv_heads") for dim in dims):
            yield from ((dim, "head_dim") for dim in dims if may_be(dim))


def head_parts(structure: Structure) -> Iterator[Proposal]:
    """Yield `heads head_dim` for the two parts of a dim that a layer sums away to make `d_model`."""

    def apart(first: int, second: int) -> bool:
        # Some tensor has both as dims of its own; concatenated pieces have the second alone.
        numbers = structure.space.tensors(first) & structure.space.tensors(second)
        return any({first, second} <= {*structure.dims(structure.binding.numbers[number])} for number in numbers)

    for bound in structure.binding.nodes:
        if "conv" in op_name(bound) or list(map(structure.name, structure.new_dims(bound))) != ["d_model"]:
            continue
        for dim in structure.contracted_dims(bound):
            parts = structure.space.parts(dim)
            if len(parts) == 2 and not any(map(structure.name, parts)) and apart(*parts):
                yield parts[0], "heads"
                yield parts[1], "head_dim"
