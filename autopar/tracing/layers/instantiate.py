"""Put the ops of a recorded layer in place of each equal layer of a program graph.

Both recorded calls of equal layers must run the same ops on their arguments, on their own tensors and on one value each
from elsewhere, and only their results may be used outside. Then every equal call runs these ops.

Input::

    layer_begins([x], 0)
    y = linear(x, p_layers_0_weight)
    layer_ends([y], 0)
    layer_begins([y], 1)
    z = linear(y, p_layers_1_weight)
    layer_ends([z], 1)
    u = getitem(equal_layer([z], [z], 2), 0)
Output::

    y = linear(x, p_layers_0_weight)
    z = linear(y, p_layers_1_weight)
    u = linear(z, p_layers_2_weight)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind
from torch.fx import Node

from autopar.tracing.export.program_graph import LIFTED, ProgramGraph, ProgramInput
from autopar.tracing.layers.bodies import LayerBody, check_equal, layer_bodies, moved_meta
from autopar.tracing.layers.calls import LayerCall, LayerCalls, LayersDifferError
from autopar.tracing.layers.ops import equal_layer_op, layer_marks


def instantiate(program: ProgramGraph, calls: LayerCalls, model: nn.Module) -> ProgramGraph:
    """Replace the ops that stand for layers by those of recorded ones, in place; add the tensors of these layers."""
    if calls.problem is not None:
        raise calls.problem
    graph = program.graph
    whole = replace(program, inputs=_all_inputs(program, calls, model))
    own = _own_tensors(whole, calls)
    bodies = layer_bodies(whole, calls, own)
    constants = _Constants(whole)
    checked: set[tuple[LayerCall, ...]] = set()
    for node in graph.find_nodes(op="call_function", target=equal_layer_op()):
        number: Any = node.args[2]
        call = calls.calls[number]
        first, second = (bodies[one.number] for one in call.recorded)
        if call.recorded not in checked:
            check_equal(first, second, call.signature.kind)
            checked.add(call.recorded)
        tensors = {node: own[call.layer][name] for node, name in second.own.items()}
        _put(second, node, call, tensors | constants.for_call(second, call))
    for mark in layer_marks():
        for node in graph.find_nodes(op="call_function", target=mark):
            graph.erase_node(node)
    return replace(whole, inputs=tuple(constants.inputs), constants=constants.tensors)


def _put(body: LayerBody, place: Node, call: LayerCall, own: Mapping[Node, Node]) -> None:
    """Replace one op by the ops of a recorded layer, whose tensors `own` maps to those of the call."""
    graph = place.graph
    given: Any = place.args[0]
    copies = dict(own)

    def taken(source: Node) -> Node:
        if source in body.arguments:
            first, *rest = (given[position] for position in body.arguments[source])
            if any(one is not first for one in rest):
                raise LayersDifferError(f"{call.layer} takes two tensors for one", call.signature.kind.layers)
            found: Node = first
            return found
        return copies.get(source, source)

    with graph.inserting_before(place):
        for node in body.nodes:
            copies[node] = graph.node_copy(node, taken)
            copies[node].meta = moved_meta(node, body, place, call)
    for item in list(place.users):
        position: Any = item.args[1]
        item.replace_all_uses_with(taken(body.results[position]))
        graph.erase_node(item)
    graph.erase_node(place)


# -- tensors -----------------------------------------------------------------------------------------------------------


def _own_tensors(program: ProgramGraph, calls: LayerCalls) -> dict[str, dict[str, Node]]:
    """Return the placeholders of each layer's tensors by name within the layer."""
    found: dict[str, dict[str, Node]] = {path: {} for path in calls.kinds}
    for one in program.inputs:
        parts = one.name.split(".")
        for depth in range(1, len(parts)):
            layer = found.get(".".join(parts[:depth]))
            if layer is not None and one.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                layer[".".join(parts[depth:])] = one.node
    return found


class _Constants:
    """Constants that the forward makes of numbers: each layer has its own."""

    def __init__(self, program: ProgramGraph) -> None:
        self.inputs = list(program.inputs)
        self.tensors = dict(program.constants)
        self.names = {one.node: one.name for one in program.inputs}

    def for_call(self, body: LayerBody, call: LayerCall) -> dict[Node, Node]:
        """Return new constants of a call for those of a recorded layer."""
        made = {}
        for node, tensor in body.constants.items():
            name = self.names[node]
            if name.startswith(f"{body.layer}."):
                name = call.layer + name.removeprefix(body.layer)
            # A number that no other has; the constants are numbered in the end.
            name = LIFTED.sub(rf"\g<1>{len(self.inputs)}", name)
            made[node] = _placeholder(node, node)
            self.inputs.append(ProgramInput(made[node], InputKind.CONSTANT_TENSOR, name))
            self.tensors[name] = tensor
        return made


def _all_inputs(program: ProgramGraph, calls: LayerCalls, model: nn.Module) -> tuple[ProgramInput, ...]:
    """Return the inputs of a full export: also the tensors that the model did not have meanwhile."""
    names = [(InputKind.PARAMETER, name) for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [(InputKind.BUFFER, name) for name, _ in model.named_buffers(remove_duplicate=False)]
    place = {key: number for number, key in enumerate(names)}
    known = {(one.kind, one.name): one for one in program.inputs if (one.kind, one.name) in place}
    others = [one for one in program.inputs if (one.kind, one.name) not in place]
    if list(known) != sorted(known, key=place.__getitem__):
        raise LayersDifferError("the export has its tensors in another order than the model", calls.kinds)
    absent = {f"{path}.": f"{kind.layers[0]}." for path, kind in calls.kinds.items() if path not in calls.whole}
    # Placeholders stand in their order from the first node on.
    before = program.inputs[0].node.prev
    found = []
    for key in names:
        one = known.get(key)
        if one is None:
            parts = key[1].split(".")
            prefix = next((path for k in range(len(parts)) if (path := ".".join(parts[:k]) + ".") in absent), None)
            if prefix is None:
                # The export has no input for it: it is the second name of a tensor.
                continue
            like = known[key[0], absent[prefix] + key[1].removeprefix(prefix)]
            one = ProgramInput(_placeholder(before, like.node), *key)
        found.append(one)
        before = one.node
    return (*found, *others)


def _placeholder(before: Node, like: Node) -> Node:
    """Insert a placeholder for a tensor of the same kind."""
    with before.graph.inserting_after(before):
        made = before.graph.placeholder("placeholder")
    val = like.meta["val"]
    with val.fake_mode:
        made.meta["val"] = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)
    made.meta["val"].requires_grad_(val.requires_grad)
    return made
