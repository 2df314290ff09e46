"""Replace ops by equal ones that hold for any strides, any device and a shard of each operand.

`view` needs the strides of the trace, which a shard may not have. `type_as` and `new_zeros` use the dtype or device of
an operand, whose sharding does not matter. `copy` and complex slice writes have no derivative in functional form. An
explicit device that equals the model's would pin the graph to it.

Input::

    a = view(x, [6])
    b = new_zeros(x, [6], dtype=f32, device=cpu)
    c = type_as(y, x)
Output::

    a = reshape(x, [6])
    b = zeros([6], dtype=f32)
    c = _to_copy(y, dtype=f32)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.ir.fx_graphs import aten
from autopar.tracing.passes import edit
from autopar.tracing.passes.edit import arguments_of, insert

_FACTORIES: dict[Any, Any] = {
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
    aten.new_empty.default: aten.empty.memory_format,
}


def canonical_ops(graph: Graph, device: torch.device | None) -> None:
    """Rewrite each op of the table, and drop `device` from factories; None for a model on several devices."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _REWRITES:
            _REWRITES[node.target](node)
        elif node.target in _FACTORIES:
            val = node.meta["val"]
            made = insert(node, _FACTORIES[node.target], *node.args[1:], dtype=val.dtype, device=val.device)
            _drop_device(made, device)
            _replace(node, made)
        elif "device" in node.kwargs:
            _drop_device(node, device)


def _replace(node: Node, by: Any) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _replace_view(node: Node) -> None:
    node.target = aten.reshape.default


def _replace_copy(node: Node) -> None:
    value: Any = node.args[1]
    have, want = value.meta["val"], node.meta["val"]
    if have.shape != want.shape:
        value = insert(node, aten.expand.default, value, list(want.shape))
    _replace(node, _cast(value, node))


def _drop_empty_operands(node: Node) -> None:
    # `cat` accepts tensors of shape [0] beside any others, such as an empty cache; no rule could relate their dims.
    tensors: Any = node.args[0]
    kept = [source for source in tensors if tuple(source.meta["val"].shape) != (0,)]
    if not kept or len(kept) == len(tensors):
        return
    if len(kept) == 1 and kept[0].meta["val"].dtype == node.meta["val"].dtype:
        _replace(node, kept[0])
    else:
        node.args = (kept, *node.args[1:])


def _write_real_pairs(node: Node) -> None:
    """Write real and imaginary parts as a last dim of extent 2, where numbers are complex."""
    if not node.meta["val"].is_complex():
        return
    arguments = arguments_of(node)
    rank = arguments["self"].meta["val"].dim()
    pairs = {}
    for name in ("self", "src"):
        # view_as_real rejects tensors whose conjugation is only a bit.
        resolved = insert(node, aten.resolve_conj.default, arguments[name])
        pairs[name] = insert(node, aten.view_as_real.default, resolved)
    rest = {name: value for name, value in arguments.items() if name not in pairs}
    # A negative dim would count from the new last one.
    written = insert(node, node.target, *pairs.values(), **{**rest, "dim": arguments["dim"] % rank})
    edit.replace(node, insert(node, aten.view_as_complex.default, written))


def _cast(value: Any, node: Node) -> Any:
    """Return a value in the dtype and on the device of `node`, which it replaces."""
    have, want = value.meta["val"], node.meta["val"]
    changed = {name: getattr(want, name) for name in ("dtype", "device") if getattr(have, name) != getattr(want, name)}
    if not changed:
        return value
    made = insert(node, aten._to_copy.default, value, **changed)
    # The value of the replaced op: the fake values of its users were computed with its strides.
    made.meta["val"] = want
    return made


def _drop_device(node: Node, device: torch.device | None) -> None:
    """Drop a device that equals the model's, so that the graph runs where the parameters are."""
    inputs = [source.meta.get("val") for source in node.all_input_nodes]
    devices = {val.device for val in inputs if isinstance(val, torch.Tensor)}
    kwargs = dict(node.kwargs)
    # A copy from another device states a real move: it stays.
    if kwargs["device"] == device and devices <= {device}:
        del kwargs["device"]
    if not kwargs.get("pin_memory"):
        kwargs.pop("pin_memory", None)
    node.kwargs = kwargs


_REWRITES: dict[Any, Callable[[Node], None]] = {
    aten.alias.default: lambda node: _replace(node, node.args[0]),
    aten.view.default: _replace_view,
    aten._unsafe_view.default: _replace_view,
    aten.cat.default: _drop_empty_operands,
    aten.copy.default: _replace_copy,
    aten.type_as.default: lambda node: _replace(node, _cast(node.args[0], node)),
    aten.slice_scatter.default: _write_real_pairs,
    aten.select_scatter.default: _write_real_pairs,
}
