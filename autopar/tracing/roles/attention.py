"""`batch heads seq head_dim`: the dims of attention's operands, fused or written out."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.rules.notation import FactorKind
from autopar.tracing.binding import BoundNode, ValueKey
from autopar.tracing.roles.structure import Proposal, Structure, op_name

__all__ = ["attention", "head_dims"]


def attention(structure: Structure) -> Iterator[Proposal]:
    """`batch heads seq head_dim` from the operands of attention, fused or written out."""
    for bound in structure.binding.nodes:
        if "attention" in op_name(bound):
            keys = bound.operands[:3]
            if None not in keys:
                query, key, value = (structure.dims(k) for k in keys if k is not None)
                yield from _attention_dims(structure, query, key, value)
        elif "softmax" in op_name(bound):
            found = _written_out(structure, bound)
            if found is not None:
                yield from _attention_dims(structure, *found)


def _attention_dims(
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
        if heads is None:
            continue
        parts = structure.space.parts(heads)
        yield heads, "kv_heads" if dims is key and heads != _heads(structure, query) else "heads"
        if len(parts) == 2:
            yield parts[0], "kv_heads"
            yield parts[1], "group"
    if len(query) > 3 and not structure.space.parts(query[0]):
        yield query[0], "batch"


def _heads(structure: Structure, dims: tuple[int, ...]) -> int | None:
    """The heads among the dims of a query or key: third from the right, or the minor part of a merged batch."""
    if len(dims) > 3:
        return dims[-3]
    parts = structure.space.parts(dims[-3])
    return parts[-1] if parts and structure.name(dims[-3]) is None else None


PASS_THROUGH = frozenset(
    [
        "mul",
        "div",
        "add",
        "sub",
        "clone",
        "_to_copy",
        "masked_fill",
        "where",
        "tanh",
        "dropout",
        "native_dropout",
        "expand",
        "detach",
        "clamp",
        "maximum",
        "reshape",
        "view",
        "type_as",
        "slice",
        "softmax",
        "nan_to_num",
    ]
)


def _written_out(
    structure: Structure, softmax: BoundNode
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Query, key and value dims when a softmax stands between two products of activations."""
    if not softmax.call.operands or softmax.outputs[0] is None:
        return None
    second = _product_after(structure, softmax.outputs[0])
    first = _product_before(structure, softmax.operands[0])
    if second is None or first is None:
        return None
    scores = _product_dims(structure, first)
    mixed = _product_dims(structure, second)
    if scores is None or mixed is None:
        return None
    batch, query_seq, key_seq, head_dim = scores
    value_dim = mixed[2]
    return (*batch, query_seq, head_dim), (*batch, key_seq, head_dim), (*batch, key_seq, value_dim)


def _is_product(structure: Structure, bound: BoundNode) -> bool:
    """Whether an op multiplies and sums two activations."""
    if op_name(bound) not in ("matmul", "bmm", "einsum", "baddbmm"):
        return False
    return not any(map(structure.is_weight, bound.operands[-2:]))


def _product_after(structure: Structure, key: ValueKey) -> BoundNode | None:
    for _ in range(8):
        users = structure.users.get(key, [])
        for user in users:
            if _is_product(structure, user):
                return user
        onward = [user for user in users if op_name(user) in PASS_THROUGH and user.outputs[0] is not None]
        if not onward:
            return None
        key = onward[0].outputs[0] or key
    return None


def _product_before(structure: Structure, key: ValueKey | None) -> BoundNode | None:
    for _ in range(12):
        bound = structure.maker.get(key) if key is not None else None
        if bound is None or _is_product(structure, bound):
            return bound
        if op_name(bound) not in PASS_THROUGH:
            return None
        candidates = [k for k in bound.operands if k is not None and not structure.is_weight(k)]
        products = [k for k in candidates if _leads_to_product(structure, k)]
        key = next(iter(products or candidates), None)
    return None


def _leads_to_product(structure: Structure, key: ValueKey) -> bool:
    for _ in range(12):
        bound = structure.maker.get(key)
        if bound is None:
            return False
        if _is_product(structure, bound):
            return True
        if op_name(bound) not in PASS_THROUGH or bound.operands[0] is None:
            return False
        key = bound.operands[0]
    return False


def _product_dims(structure: Structure, bound: BoundNode) -> tuple[tuple[int, ...], int, int, int] | None:
    """Batch dims, rows, columns and contracted dim of a product of two activations."""
    key = bound.outputs[0]
    contracted = [f for f, kind in bound.rule.kinds.items() if kind is FactorKind.SUM]
    if key is None or len(contracted) != 1:
        return None
    dims = structure.dims(key)
    if len(dims) < 2:
        return None
    return dims[:-2], dims[-2], dims[-1], structure.factor_dim(bound, contracted[0])


def head_dims(structure: Structure) -> Iterator[Proposal]:
    """Before and after rotary embeddings a head dim may be two classes: beside `heads`, the same extent is the same."""
    extents = {structure.space.size(dim) for dim, name in structure.names.items() if name == "head_dim"}
    for dims in map(structure.dims, structure.binding.dims):
        if any(structure.name(dim) in ("heads", "kv_heads") for dim in dims):
            for dim in dims:
                if structure.name(dim) is None and structure.space.size(dim) in extents:
                    yield dim, "head_dim"
