"""Move small sums over ranks to the two ends of a call: before its graph, or after it.

The number of targets in a batch depends on the inputs alone. It is sent before the graph, with the numbers by which
ranks compare their calls. A loss is a result of the graph; the caller waits for the other ranks' parts when it reads
the value, which a backward does not. A loss is divided by the number of targets after the graph, too: the forward waits
for no number. So a forward waits for nothing if it has no other collective, and `torch.compile` meets no collective.

Input::

    count = all_reduce(sum(targets >= 0))
    loss = all_reduce(div(nll, count))
    other = mul(x, count)
Output::

    def graph(x, targets, early_0):
        return nll, mul(x, early_0)     # nll is summed after the graph, and divided by early_0
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from autopar.ir.values import NamedTensor
from autopar.lowering.collectives.local_reshard import LocalReshard
from autopar.lowering.hoisted_sums import ROOM, HoistedSums, LateResult
from autopar.lowering.passes.join_small_sums import small_sum
from autopar.lowering.passes.pipeline_parts import VALUE
from autopar.lowering.passes.recompute_regions import REGION
from autopar.sharding.reshard.reshard import StepKind

__all__ = ["SLICED", "move_to_ends"]

# Most ops of the graph before the graph: shifting, flattening, comparing and counting targets takes ten.
MOST_NODES = 64
# Key of the reshard that a slice before the graph stands for.
SLICED = "sliced"
_ATEN = torch.ops.aten
_BY_NUMBERS = (_ATEN.neg.default, _ATEN.div.Scalar, _ATEN.mul.Scalar)


@dataclass
class _FoundSums:
    # Nodes that depend only on inputs without a gradient.
    given: set[Node]
    # Nodes that depend only on those and on sums of them.
    known: set[Node]
    early: list[Node]
    # Map each result to the sums of which it is a linear function, which is applied to the parts instead.
    late: dict[Node, list[Node]]
    # Map results to the division by an early sum that is made after the graph.
    divisions: dict[Node, Node]


def move_to_ends(
    graph: Graph, modules: dict[str, nn.Module], inputs: Iterable[str], tensors: Mapping[str, NamedTensor]
) -> HoistedSums:
    """Take the sums out of a graph that can be made before and after it, in place.

    `inputs`: the placeholders that are inputs without a gradient.
    """
    found = _find(graph, modules, frozenset(inputs), tensors)
    (output,) = graph.find_nodes(op="output")
    late = []
    for node, sums in found.late.items():
        places = tuple(place for place, value in enumerate(output.args[0]) if value is node)
        by = _early_divisor(found.divisions.get(node), found)
        divisor = None if by is None else found.early.index(by)
        late.append(LateResult(places, _reshard_of(sums[0], modules), divisor))
    sums = [one for each in found.late.values() for one in each]
    notes = tuple(
        tuple(note for node in nodes for note in modules[str(node.target)].notes)  # type: ignore[union-attr]
        for nodes in (found.early, sums)
    )
    early = tuple(_reshard_of(node, modules) for node in found.early)
    before, used = _graph_before(graph, modules, found.early) if early else (None, ())
    for division in found.divisions.values():
        _replace(division, division.args[0], modules)
    taken, (*_, last) = [], graph.find_nodes(op="placeholder")
    for number, node in enumerate(found.early):
        if node in graph.nodes:  # else only divisions read it
            with graph.inserting_after(last):
                last = graph.placeholder(f"early_{number}")
            _replace(node, last, modules)
            taken.append(number)
    for node in sums:
        _replace(node, node.args[0], modules)
    return HoistedSums(before, used, early, tuple(taken), tuple(late), notes)  # type: ignore[arg-type]


def _replace(node: Node, other: Any, modules: dict[str, nn.Module]) -> None:
    """Replace a node by a value, and drop the nodes that only it used."""
    node.replace_all_uses_with(other)
    dead = [node]
    while dead:
        one = dead.pop()
        if one.op == "placeholder" or one.users:
            continue
        dead.extend(one.all_input_nodes)
        if one.op == "call_module":
            del modules[str(one.target)]
        one.graph.erase_node(one)


def _find(
    graph: Graph, modules: Mapping[str, nn.Module], inputs: frozenset[str], tensors: Mapping[str, NamedTensor]
) -> _FoundSums:
    found = _FoundSums(set(), set(), [], {}, {})
    room = ROOM
    for node in graph.nodes:
        operands = node.all_input_nodes
        if node.op == "placeholder":
            if node.name in inputs:
                found.given.add(node)
        elif node.meta.get(REGION) is not None or not operands:
            continue
        elif small_sum(node, modules) is not None:
            numbers = 2 * prod(_reshard_of(node, modules).shape)  # complex numbers take two places
            if operands[0] in found.given and numbers <= room and len(_made_for([node])) <= MOST_NODES:
                room -= numbers
                found.early.append(node)
                found.known.add(node)
        elif _is_plain(node, modules):
            if found.given.issuperset(operands):
                found.given.add(node)
            elif all(one in found.given or one in found.known for one in operands):
                found.known.add(node)
    (output,) = graph.find_nodes(op="output")
    room = ROOM
    for result in dict.fromkeys(value for value in output.args[0] if isinstance(value, Node)):
        sums = _linear(result, found, modules)
        if sums and not any(one in found.early for one in sums):
            numbers = 2 * prod(_reshard_of(sums[0], modules).shape)
            if numbers <= room:
                room -= numbers
                found.late[result] = sums
                division = _late_division(result, found, tensors)
                if division is not None:
                    found.divisions[result] = division
    return found


def _late_division(result: Node, found: _FoundSums, tensors: Mapping[str, NamedTensor]) -> Node | None:
    """Return the division by an early sum among the factors of a late result that can be made after the graph.

    It must keep the dtype; in float16, sums that are not divided yet may be too large.
    """
    node = result
    while node.op == "call_function" and node.target not in (_ATEN.add.Tensor, _ATEN.sub.Tensor):
        if _early_divisor(node, found) is not None:
            names = [one.meta.get(VALUE) for one in (node, node.args[0]) if isinstance(one, Node)]
            kinds = [None if name is None else tensors[name].dtype for name in names]
            return node if kinds[0] is not None and kinds == [kinds[0]] * 2 and kinds[0] is not torch.float16 else None
        factors = [one for one in node.args if isinstance(one, Node) and not _is_constant(one, found)]
        node = factors[0]
    return None


def _early_divisor(node: Node | None, found: _FoundSums) -> Node | None:
    """Return the early sum that a node divides by, also by a copy in another dtype; None for other nodes."""
    by = node.args[1] if node is not None and node.target is _ATEN.div.Tensor else None
    if isinstance(by, Node) and by.target is _ATEN._to_copy.default and set(by.kwargs) == {"dtype"}:
        by = by.args[0]
    return by if isinstance(by, Node) and by in found.early else None


def _linear(node: Node, found: _FoundSums, modules: Mapping[str, nn.Module]) -> list[Node]:
    """Return the sums over one group of which a node is a linear function, with no other use; none if it is not."""
    if len(node.users) != 1 or node.meta.get(REGION) is not None:
        return []
    if small_sum(node, modules) is not None:
        return [node]
    if node.op != "call_function" or node.kwargs:
        return []
    parts = [_linear(one, found, modules) if isinstance(one, Node) else [] for one in node.args]
    if node.target in (_ATEN.add.Tensor, _ATEN.sub.Tensor) and all(parts):
        sums = [one for part in parts for one in part]
    elif node.target is _ATEN.mul.Tensor and any(_is_constant(one, found) for one in node.args):
        sums = parts[0] or parts[1]
    elif node.target in _BY_NUMBERS or (node.target is _ATEN.div.Tensor and _is_constant(node.args[1], found)):
        sums = parts[0]
    else:
        return []
    conversions = [_reshard_of(one, modules) for one in sums]
    shapes = {one.result_shape for one in conversions} | {node.meta.get("local_shape")}
    return sums if len(shapes) == 1 and len({one.forward[0].group for one in conversions}) == 1 else []


def _is_constant(value: Any, found: _FoundSums) -> bool:
    return not isinstance(value, Node) or value in found.given or value in found.known


def _is_plain(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a node is deterministic, changes nothing, and sends nothing."""
    if node.op == "call_module":
        conversion = getattr(modules[str(node.target)], "conversion", None)
        return isinstance(conversion, LocalReshard) and all(move.local for move in conversion.forward)
    if node.target is operator.getitem:
        return True
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and not node.target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def _reshard_of(node: Node, modules: Mapping[str, nn.Module]) -> LocalReshard:
    found = modules[str(node.target)].conversion
    assert isinstance(found, LocalReshard), node
    return found


def _made_for(nodes: Sequence[Node]) -> set[Node]:
    """Return the nodes and all nodes that they depend on, without placeholders."""
    found: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found and node.op != "placeholder":
            found.add(node)
            left.extend(node.all_input_nodes)
    return found


def _piece_of(node: Node, modules: Mapping[str, nn.Module]) -> tuple[int, int, int] | None:
    """Return the dim, begin and end of the slice that a reshard takes; None for other nodes.

    As an op it makes no copy: nothing keeps the slice.
    """
    module = modules[str(node.target)] if node.op == "call_module" else None
    conversion = getattr(module, "conversion", None)
    if not isinstance(conversion, LocalReshard) or [move.kind for move in conversion.forward] != [StepKind.SLICE]:
        return None
    (move,) = conversion.forward
    if (move.before, move.after) != (conversion.shape, conversion.result_shape):
        return None
    return move.atom, move.start, move.start + move.after[move.atom]


def _graph_before(
    graph: Graph, modules: Mapping[str, nn.Module], sums: Sequence[Node]
) -> tuple[GraphModule, tuple[int, ...]]:
    """Return the graph of this rank's parts of the sums, and the inputs that it reads."""
    parts = [node.all_input_nodes[0] for node in sums]
    wanted = _made_for(parts)
    read = {one for node in (*wanted, *sums) for one in node.all_input_nodes}
    before, copies = Graph(), dict[Node, Node]()
    inputs = graph.find_nodes(op="placeholder")
    for node in graph.nodes:
        if node in wanted or (node in read and node.op == "placeholder"):
            piece = _piece_of(node, modules)
            if piece is None:
                copies[node] = before.node_copy(node, copies.__getitem__)
            else:
                made = before.call_function(_ATEN.slice.Tensor, (copies[node.all_input_nodes[0]], *piece))
                made.meta[SLICED] = _reshard_of(node, modules).reshard
                copies[node] = made
    before.output(tuple(copies[part] for part in parts))
    used = {str(node.target): modules[str(node.target)] for node in before.find_nodes(op="call_module")}
    return GraphModule(used, before), tuple(place for place, node in enumerate(inputs) if node in copies)
