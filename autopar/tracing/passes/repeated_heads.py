"""Pass keys and values to attention at their own number of heads, without copies.

Models with grouped heads repeat `k` heads of keys and values `h / k` times to the `h` heads of the queries. With
`enable_gqa` the kernel does this itself. Keys and values then take `k / h` of the memory, and their gradients are
summed inside the kernel. Where keys and values are repeated differently, they stay so, with the reason in the note.

Input::

    wide = reshape(expand(unsqueeze(k, 2), [B, 2, 4, T, D]), [B, 8, T, D])    # v likewise
    y = scaled_dot_product_attention(q, wide, wide_v)
Output::

    y = scaled_dot_product_attention(q, k, v, enable_gqa=True)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.tracing.passes.edit import arguments_of, insert, set_attention_arguments
from autopar.tracing.passes.read_masks import ATTENTION_NOTE

aten = torch.ops.aten

_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_COPIES = (aten.clone.default, aten.contiguous.default, aten.alias.default, aten._to_copy.default, aten.detach.default)


@dataclass(frozen=True)
class _Repeated:
    """Tensor that repeats each slice along `dim` `times` times in a row; `make` inserts it without repeats."""

    dim: int
    times: int
    make: Callable[[], Node]


def repeated_heads(graph: Graph) -> None:
    """Rewrite the calls of fused attention in place, and extend their notes."""
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        changed, reason = _own_heads(node)
        if changed:
            set_attention_arguments(node, changed)
        node.meta[ATTENTION_NOTE] = replace(node.meta[ATTENTION_NOTE], heads=reason)


def _own_heads(node: Node) -> tuple[dict[str, Any], str]:
    """Return the arguments of attention without repeats, or the reason why they stay repeated."""
    arguments = arguments_of(node)
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if query.meta["val"].dim() != 4 or key.meta["val"].dim() != 4 or value.meta["val"].dim() != 4:
        return {}, ""
    found = [_repeats(one) for one in (key, value)]
    # Repeats along another dim than the heads are no grouped attention.
    along = [one if one is not None and one.dim == 1 else None for one in found]
    if along == [None, None]:
        return {}, ""
    missing = next((name for name, one in zip(("keys", "values"), along, strict=True) if one is None), None)
    if missing is not None:
        return {}, f"heads stay repeated: {missing} are not repeated alike"
    keys, values = along
    assert keys is not None, "returned above"
    assert values is not None, "returned above"
    if keys.times != values.times:
        return {}, f"heads stay repeated: {keys.times} times in keys, {values.times} times in values"
    if query.meta["val"].shape[1] % key.meta["val"].shape[1]:
        return {}, "heads stay repeated: queries have fewer heads"
    if query.meta["val"].shape[0] != key.meta["val"].shape[0]:
        return {}, "heads stay repeated: queries have another batch"
    return {"key": keys.make(), "value": values.make(), "enable_gqa": True}, ""


def _repeats(node: Node) -> _Repeated | None:
    """Return the repeats of a tensor, found behind ops that move dims or copy; else None."""
    if node.op != "call_function":
        return None
    if node.target in _RESHAPES:
        return _repeats_of_reshape(node)
    if node.target is aten.expand.default:
        return _repeats_of_expand(node)
    if node.target is aten.repeat_interleave.self_int:
        arguments = arguments_of(node)
        source, times, dim = arguments["self"], arguments["repeats"], arguments["dim"]
        if dim is None or not isinstance(times, int) or times < 2:
            return None
        return _Repeated(dim % source.meta["val"].dim(), times, lambda: source)
    if node.target in (aten.transpose.int, aten.permute.default):
        return _repeats_of_permute(node)
    if node.target in _COPIES:
        copied = node.args[0]
        assert isinstance(copied, Node), node
        found = _repeats(copied)
        return found and _Repeated(found.dim, found.times, lambda: _same_op(node, found))
    return None


def _same_op(node: Node, found: _Repeated) -> Node:
    """Insert the op of `node` on the tensor without repeats."""
    keywords: dict[str, Any] = dict(node.kwargs)
    return insert(node, node.target, found.make(), *node.args[1:], **keywords)


def _repeats_of_permute(node: Node) -> _Repeated | None:
    source = node.args[0]
    assert isinstance(source, Node), node
    found = _repeats(source)
    if found is None:
        return None
    order = list(range(node.meta["val"].dim()))
    if node.target is aten.permute.default:
        order = [dim % len(order) for dim in arguments_of(node)["dims"]]
    else:
        first, second = (arguments_of(node)[name] % len(order) for name in ("dim0", "dim1"))
        order[first], order[second] = order[second], order[first]
    return _Repeated(order.index(found.dim), found.times, lambda: _same_op(node, found))


def _repeats_of_expand(node: Node) -> _Repeated | None:
    # `expand` repeats one slice for all: `times` is the whole extent.
    source = node.args[0]
    assert isinstance(source, Node), node
    old, new = tuple(source.meta["val"].shape), tuple(node.meta["val"].shape)
    if len(old) != len(new):
        return None
    longer = [dim for dim in range(len(new)) if old[dim] != new[dim]]
    return _Repeated(longer[0], new[longer[0]], lambda: source) if len(longer) == 1 else None


def _repeats_of_reshape(node: Node) -> _Repeated | None:
    """Return the repeats of `reshape(expand(unsqueeze(x)))`, which joins the new dim to the one before it."""
    wide = node.args[0]
    while isinstance(wide, Node) and wide.target in (aten.clone.default, aten.contiguous.default):
        wide = wide.args[0]
    if not isinstance(wide, Node) or wide.target is not aten.expand.default:
        return None
    added = wide.args[0]
    assert isinstance(added, Node), wide
    narrow, old, new = (tuple(one.meta["val"].shape) for one in (added, wide, node))
    longer = [dim for dim in range(len(old)) if len(narrow) == len(old) and narrow[dim] != old[dim]]
    if len(longer) != 1 or longer[0] == 0:
        return None
    dim = longer[0]
    if new != (*old[: dim - 1], old[dim - 1] * old[dim], *old[dim + 1 :]):
        return None

    def without() -> Node:
        if added.target is aten.unsqueeze.default and arguments_of(added)["dim"] % len(narrow) == dim:
            source: Node = arguments_of(added)["self"]
            return source
        return insert(added, aten.squeeze.dim, added, dim, before=added.next)

    return _Repeated(dim - 1, old[dim], without)
