"""Keys and values that are repeated for the heads of the queries: attention takes them as they were before.

`h` heads made of `k` by repeating each `h / k` times are what `enable_gqa` means, without the copies: keys and values
stay a `1 / (h / k)` part in memory, and their gradients are summed inside the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar.tracing.passes.edit import arguments_of, insert

__all__ = ["own_heads"]

aten = torch.ops.aten

_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_COPIES = (aten.clone.default, aten.contiguous.default, aten.alias.default, aten._to_copy.default, aten.detach.default)
HEADS = -3


@dataclass(frozen=True)
class _Repeated:
    """A tensor whose entries along `dim` each stand `times` times in a row, and how to make it unrepeated."""

    dim: int
    times: int
    make: Callable[[], Node]


def own_heads(node: Node) -> tuple[dict[str, Any], str]:
    """The arguments of attention with keys and values at their own heads; or why they stay as they are."""
    arguments = arguments_of(node)
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if query.meta["val"].dim() != 4 or key.meta["val"].dim() != 4 or value.meta["val"].dim() != 4:
        return {}, ""
    found = [_repeated(one) for one in (key, value)]
    along = [one if one is not None and one.dim == 1 else None for one in found]
    if along == [None, None]:
        return {}, ""
    missing = next((name for name, one in zip(("keys", "values"), along, strict=True) if one is None), None)
    if missing is not None:
        return {}, f"heads stay repeated: {missing} are not repeated alike"
    keys, values = along
    assert keys is not None, "both are there"
    assert values is not None, "both are there"
    if keys.times != values.times:
        return {}, f"heads stay repeated: {keys.times} times in keys, {values.times} times in values"
    if query.meta["val"].shape[1] % key.meta["val"].shape[1]:
        return {}, "heads stay repeated: queries have fewer heads"
    if query.meta["val"].shape[0] != key.meta["val"].shape[0]:
        return {}, "heads stay repeated: queries have another batch"
    return {"key": keys.make(), "value": values.make(), "enable_gqa": True}, ""


def _repeated(node: Node) -> _Repeated | None:
    """How a tensor is repeated, if it is: seen through ops that move dims."""
    if node.op != "call_function":
        return None
    if node.target in _RESHAPES:
        return _joined(node)
    if node.target is aten.expand.default:
        return _expanded(node)
    if node.target is aten.repeat_interleave.self_int:
        return _interleaved(node)
    if node.target in (aten.transpose.int, aten.permute.default):
        return _moved(node)
    if node.target in _COPIES:
        source = node.args[0]
        assert isinstance(source, Node), node
        found = _repeated(source)
        return found and _Repeated(found.dim, found.times, lambda: _again(node, found))
    return None


def _again(node: Node, found: _Repeated) -> Node:
    """The same op on what is not repeated."""
    keywords: dict[str, Any] = dict(node.kwargs)
    return insert(node, node.target, found.make(), *node.args[1:], **keywords)


def _moved(node: Node) -> _Repeated | None:
    source = node.args[0]
    assert isinstance(source, Node), node
    found = _repeated(source)
    if found is None:
        return None
    order = list(range(node.meta["val"].dim()))
    if node.target is aten.permute.default:
        order = [dim % len(order) for dim in arguments_of(node)["dims"]]
    else:
        first, second = (arguments_of(node)[name] % len(order) for name in ("dim0", "dim1"))
        order[first], order[second] = order[second], order[first]
    return _Repeated(order.index(found.dim), found.times, lambda: _again(node, found))


def _expanded(node: Node) -> _Repeated | None:
    """One head for all."""
    source = node.args[0]
    assert isinstance(source, Node), node
    old, new = tuple(source.meta["val"].shape), tuple(node.meta["val"].shape)
    if len(old) != len(new):
        return None
    longer = [dim for dim in range(len(new)) if old[dim] != new[dim]]
    return _Repeated(longer[0], new[longer[0]], lambda: source) if len(longer) == 1 else None


def _interleaved(node: Node) -> _Repeated | None:
    arguments = arguments_of(node)
    source, times, dim = arguments["self"], arguments["repeats"], arguments["dim"]
    if dim is None or not isinstance(times, int) or times < 2:
        return None
    return _Repeated(dim % source.meta["val"].dim(), times, lambda: source)


def _joined(node: Node) -> _Repeated | None:
    """`reshape(expand(unsqueeze(x)))`: the new dim and the one before it become one."""
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
    return _Repeated(dim - 1, old[dim], lambda: _without(added, dim))


def _without(added: Node, dim: int) -> Node:
    """A tensor without a dim of extent 1, which most often was added just before."""
    source = added.args[0]
    if added.target is aten.unsqueeze.default and isinstance(source, Node):
        rank = added.meta["val"].dim()
        if arguments_of(added)["dim"] % rank == dim:
            return source
    return insert(added, aten.squeeze.dim, added, dim, before=added.next)
