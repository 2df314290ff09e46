"""Small changes to the decomposed graph, so that it runs on any strides and devices and says only what matters."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from autopar.ir.fx_graphs import aten, remove_dead
from autopar.tracing.annotations import constrain_op, named_op
from autopar.tracing.passes.bags_to_rows import bags_as_rows
from autopar.tracing.passes.edit import arguments_of, insert, replaced
from autopar.tracing.passes.mean_loss_to_sum import mean_losses_as_sums
from autopar.tracing.passes.paired_index import pair_aligned
from autopar.tracing.passes.read_masks import read_masks
from autopar.tracing.passes.undo_sort import undo_sorting

__all__ = ["drop_checks", "normalise"]


_CHECKS = (
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.default,
    aten._assert_async.msg,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_WRITES = (aten.slice_scatter.default, aten.select_scatter.default)
_FACTORIES: dict[Any, Any] = {
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
    aten.new_empty.default: aten.empty.memory_format,
}


def drop_checks(graph: Graph) -> None:
    """Erase checks, and what was computed for them alone."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _CHECKS:
            graph.erase_node(node)
    remove_dead(graph)


def normalise(
    graph: Graph,
    device: torch.device | None,
    known: Mapping[Node, Tensor] = MappingProxyType({}),
    sources: Mapping[Node, str] = MappingProxyType({}),
) -> None:
    """Change the graph in place. `known`: constants with their data; `sources`: what each placeholder is."""
    marks = {named_op(): "named", constrain_op(): "constrain"}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.alias.default:
            _replace(node, node.args[0])
        elif node.target in marks:
            source: Any = node.args[0]
            source.meta.setdefault(marks[node.target], []).append(node.args[1])
            _replace(node, source)
        elif node.target in _VIEWS:
            node.target = aten.reshape.default  # the inputs may have other strides than in the trace
        elif node.target is aten.cat.default:
            _drop_nothing(node)
        elif node.target is aten.copy.default:
            _replace_copy(graph, node)
        elif node.target is aten.type_as.default:
            _replace(node, _cast(graph, node.args[0], node))  # the other tensor is asked for its type only
        elif node.target in _WRITES and node.meta["val"].is_complex():
            _write_pairs(node)
        elif node.target in _FACTORIES:
            _replace(node, _made_anew(graph, node, device))  # the tensor is asked for its type only
        elif "device" in node.kwargs:
            _free_of_device(node, device)
    mean_losses_as_sums(graph)
    bags_as_rows(graph)
    undo_sorting(graph)
    read_masks(graph, known, sources)
    pair_aligned(graph)
    remove_dead(graph)


def _replace(node: Node, by: Any) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _replace_copy(graph: Graph, node: Node) -> None:
    """`copy` has no derivative in its functional form: it is an expand and a cast of what is copied."""
    value: Any = node.args[1]
    have, want = value.meta["val"], node.meta["val"]
    with graph.inserting_before(node):
        if have.shape != want.shape:
            value = _like(
                graph.call_function(aten.expand.default, (value, list(want.shape))), node, have.expand(want.shape)
            )
        value = _cast(graph, value, node)
    _replace(node, value)


def _write_pairs(node: Node) -> None:
    """A write into a slice has no derivative where numbers are complex: write real and imaginary parts."""
    arguments = arguments_of(node)
    rank = arguments["self"].meta["val"].dim()
    pairs = {}
    for name in ("self", "src"):
        settled = insert(node, aten.resolve_conj.default, arguments[name])
        pairs[name] = insert(node, aten.view_as_real.default, settled)
    rest = {name: value for name, value in arguments.items() if name not in pairs}
    written = insert(node, node.target, *pairs.values(), **{**rest, "dim": arguments["dim"] % rank})
    replaced(node, insert(node, aten.view_as_complex.default, written))


def _cast(graph: Graph, value: Any, node: Node) -> Any:
    """A value in the dtype and on the device of a node, which it stands in for."""
    have, want = value.meta["val"], node.meta["val"]
    changed = {name: getattr(want, name) for name in ("dtype", "device") if getattr(have, name) != getattr(want, name)}
    if not changed:
        return value
    with graph.inserting_before(node):
        return _like(graph.call_function(aten._to_copy.default, (value,), changed), node, want)


def _made_anew(graph: Graph, node: Node, device: torch.device | None) -> Node:
    """`x.new_zeros(size)` without `x`, which would have to be brought into a layout for nothing."""
    val = node.meta["val"]
    with graph.inserting_before(node):
        kwargs = {"dtype": val.dtype, "device": val.device}
        made = graph.call_function(_FACTORIES[node.target], tuple(node.args[1:]), kwargs)
    _free_of_device(made, device)
    return _like(made, node, val)


def _drop_nothing(node: Node) -> None:
    """`cat` takes tensors of shape [0], whatever the shape of the others: an empty cache, for instance."""
    tensors: Any = node.args[0]
    kept = [source for source in tensors if not _is_nothing(source.meta["val"])]
    if not kept or len(kept) == len(tensors):
        return
    if len(kept) == 1 and kept[0].meta["val"].dtype == node.meta["val"].dtype:
        _replace(node, kept[0])
    else:
        node.args = (kept, *node.args[1:])


def _is_nothing(val: torch.Tensor) -> bool:
    """Return whether a tensor has the shape [0]."""
    return tuple(val.shape) == (0,)


def _like(made: Node, node: Node, val: torch.Tensor) -> Node:
    made.meta.update(node.meta)
    made.meta["val"] = val
    return made


def _free_of_device(node: Node, device: torch.device | None) -> None:
    """Drop a device that only repeats where the model is, so that the graph follows the parameters."""
    inputs = [source.meta.get("val") for source in node.all_input_nodes]
    devices = {val.device for val in inputs if isinstance(val, torch.Tensor)}
    kwargs = dict(node.kwargs)
    if kwargs["device"] == device and devices <= {device}:
        del kwargs["device"]
    if not kwargs.get("pin_memory"):
        kwargs.pop("pin_memory", None)
    node.kwargs = kwargs
