"""Compile each kind of repeated layer once, instead of the whole graph.

The ops of a layer become a call of a module, with the parameters and values that enter it as inputs. Layers with equal
ops share one compiled module, so that the time of compilation does not grow with their number. Buckets of parameters
stay between the calls, and their collectives run beside the layers as they do without compilation.

Input::

    w, = bucket_end(s); a = linear(x, w); b = relu(a)
    v, = bucket_end(t); c = linear(b, v); d = relu(c)
Output::

    w, = bucket_end(s); b = layer_0(x, w)
    v, = bucket_end(t); d = layer_1(b, v)        # the same compiled module
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from autopar.ir.fx_graphs import body_of, boundary, put_call
from autopar.lowering.modules.bucket_ends import BucketEnd, BucketStart, RegatherWatch
from autopar.lowering.modules.shard_ops import ReshardModule
from autopar.lowering.passes.pipeline_parts import OP

__all__ = ["compile_layers"]

PLAIN = int | float | bool | str | None | torch.dtype | torch.device | torch.layout | torch.memory_format


def compile_layers(
    module: GraphModule, layers: Iterable[Iterable[str]], compiled: Callable[[nn.Module], nn.Module]
) -> int:
    """Replace the ops of each layer by a call of a compiled module, in place; return the number of such layers.

    Left as they are: a layer with ops that keep a state or draw numbers, one whose memory is freed and filled again,
    and one whose ops are in the body of a loop or a checkpoint.
    """
    modules: dict[str, nn.Module] = dict(module.named_modules())
    if any(isinstance(one, RegatherWatch) for one in modules.values()):
        return 0
    known: dict[Hashable, nn.Module] = {}
    count = 0
    for ops in map(frozenset, layers):
        nodes = _contiguous(module, ops, modules)
        inputs, results = boundary(nodes)
        key = _key(nodes, inputs, results, modules)
        if not nodes or key is None:
            continue
        if key not in known:
            known[key] = compiled(body_of(nodes, inputs, results, modules))
        name = f"layer_{count}"
        module.add_submodule(name, known[key])
        with module.graph.inserting_before(nodes[-1].next):
            call = module.graph.call_module(name, tuple(inputs))
        put_call(module.graph, nodes, results, call)
        count += 1
    module.recompile()
    return count


def _is_of_bucket(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.op == "call_module" and isinstance(modules.get(str(node.target)), BucketEnd | BucketStart)


def _contiguous(module: GraphModule, ops: frozenset[str], modules: Mapping[str, nn.Module]) -> list[Node]:
    """Return the nodes of some ops after moving all others out of their stretch; nothing where that is impossible."""
    own = [node for node in module.graph.nodes if node.meta.get(OP) in ops and not _is_of_bucket(node, modules)]
    if not own:
        return []
    inside, after = set(own), set[Node]()
    every = list(module.graph.nodes)
    span = every[every.index(own[0]) : every.index(own[-1]) + 1]
    for node in span:
        if not (inside | after).isdisjoint(node.all_input_nodes):
            if node not in inside:
                after.add(node)
            elif not after.isdisjoint(node.all_input_nodes):
                return []
    for node in span:
        if node not in inside and node not in after:
            own[0].prepend(node)
    for node in reversed([node for node in span if node in after]):
        own[-1].append(node)
    return own


def _key(
    nodes: Sequence[Node], inputs: Sequence[Node], results: Sequence[Node], modules: Mapping[str, nn.Module]
) -> Hashable | None:
    """Return a key that is equal for layers which one module can run; None for layers that none can."""
    places = {node: place for place, node in enumerate((*inputs, *nodes))}
    found: list[Hashable] = []
    for node in nodes:
        target: Hashable = node.target
        if node.op == "call_module":
            one = modules[str(node.target)]
            if not isinstance(one, ReshardModule):
                return None
            bound = one.conversion
            target = bound.forward, bound.backward, bound.shape, bound.result_shape
        arguments = _plain((node.args, node.kwargs), places)
        if arguments is None:
            return None
        found.append((node.op, target, arguments))
    return tuple(found), tuple(places[node] for node in results)


def _plain(value: Any, places: Mapping[Node, int]) -> Hashable | None:
    """Return arguments of a node with places for nodes; None if one of them has no value to compare."""
    if isinstance(value, Node):
        return "node", places[value]
    if isinstance(value, list | tuple):
        items = [_plain(item, places) for item in value]
        return None if None in items else tuple(items)
    if isinstance(value, dict):
        return _plain([*value, *value.values()], places)
    # With the type: 1, 1.0 and True are equal.
    return (type(value), value) if isinstance(value, PLAIN) else None
