"""What ops hold on one rank.

Most hold their share of what the whole op holds. Those that run on shards with messages of their own run other ops:
what these hold is seen by running their lowerings on fake tensors.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from autopar.cost.step.lowered_step import LoweredStep
from autopar.ir.analysis.differentiable import fake_input
from autopar.ir.analysis.op_memory import Footprint, measure
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.rules.call import arguments_by_name, takes_tensors
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.sharding.assignment import OpAssignment
from autopar.sharding.atoms import atoms_of
from autopar.sharding.lowered_ops import LoweredOpContext
from autopar.sharding.lowered_ops.base import OpMessage, Send
from autopar.sharding.reshard.reshard import StepKind

__all__ = ["LocalFootprints", "local_footprint", "lowered_footprint"]


class LocalFootprints:
    """The footprints of the ops of a plan, each worked out once."""

    def __init__(self, wired: LoweredStep) -> None:
        self.graph, self.plan, self.reshard_plan = wired.graph, wired.plan, wired.reshard_plan
        self.found: dict[str, Footprint] = {}
        self.known: dict[Any, Footprint] = {}

    def of(self, node: NamedNode) -> Footprint:
        found = self.found.get(node.name)
        if found is None:
            op_assignment = self.plan.assignment.ops[node.name]
            whole = self.graph.footprints[node.node]
            key = id(whole), op_assignment.choice, op_assignment.operands
            found = self.known.get(key) or self._made(node, op_assignment)
            self.found[node.name] = self.known[key] = found
        return found

    def _made(self, node: NamedNode, op_assignment: OpAssignment) -> Footprint:
        return local_footprint(self.graph, node, op_assignment, self.reshard_plan.ops[node.name].split, self.plan.axes)


def local_footprint(
    graph: NamedGraph,
    node: NamedNode,
    op_assignment: OpAssignment,
    split: LoweredOpContext | None,
    axes: SubMesh,
) -> Footprint:
    """Of one rank."""
    if split is not None and not exchanges_edges(split):
        return lowered_footprint(graph, node, op_assignment, split, axes)
    whole = graph.footprints[node.node]
    share = 1 / prod(axes[axis] for axis in op_assignment.choice.axes)
    return replace(
        whole,
        internal_bytes=round(whole.internal_bytes * share),
        forward_bytes=round(whole.forward_bytes * share),
        backward_bytes=round(whole.backward_bytes * share),
    )


def exchanges_edges(split: LoweredOpContext) -> bool:
    """Whether its messages are the edges of neighbours: then the op itself runs on what is put together."""
    return any(step.kind is StepKind.HALO_EXCHANGE for message in split.messages() for step in message.reshard.forward)


def lowered_footprint(
    graph: NamedGraph, node: NamedNode, op_assignment: OpAssignment, split: LoweredOpContext, axes: SubMesh
) -> Footprint:
    """Of one rank, in bytes of that rank."""
    source = next(found for found in graph.exported.graph_module.graph.nodes if found.name == node.node)
    target: Any = source.target
    with FakeTensorMode(allow_non_fake_inputs=True):
        operands = [
            None if name is None else _operand(graph, name, op_assignment, i, axes)
            for i, name in enumerate(node.operands)
        ]
        left = iter(operands)
        arguments = arguments_by_name(target, source.args, source.kwargs)
        for name, is_list in takes_tensors(target).items():
            value = arguments[name]
            if is_list:
                arguments[name] = None if value is None else [_taken(item, next(left)) for item in value]
            else:
                arguments[name] = _taken(value, next(left))
        pieces = {factor: _piece(node, op_assignment, factor, axes) for factor in node.sizes}
        sizes = {factor: pieces[factor].length for factor in node.sizes if factor not in split.factors}
        local = LocalCall(target, arguments, node.rule, dict(node.sizes), {**node.sizes, **sizes})
        sends = tuple(map(_sent, split.messages()))
        return measure(operands, lambda: split.lowering.run(split, local, pieces, sends))


def _operand(graph: NamedGraph, name: str, op_assignment: OpAssignment, position: int, axes: SubMesh) -> Tensor:
    tensor, layout = graph.tensors[name], op_assignment.operands[position]
    atoms = atoms_of(tensor)
    shape = tensor.shape if layout is None else atoms.fold(layout.largest_sizes(atoms, axes))
    return fake_input(shape, tensor.dtype, tensor.requires_grad)


def _taken(given: Any, made: Tensor | None) -> Any:
    return made if isinstance(given, Node) else given


def _piece(node: NamedNode, op_assignment: OpAssignment, factor: str, axes: SubMesh) -> FactorSlice:
    """What the first rank has of a factor."""
    length = node.sizes[factor]
    for (name, _), used in op_assignment.choice.splits:
        if name == factor:
            length = -(-length // prod(axes[axis] for axis in used))
    return FactorSlice(factor, 0, 0, length, node.sizes[factor])


def _sent(message: OpMessage) -> Send:
    """What comes back of a message: of the right shape, with a gradient where the message has one."""
    found = message.reshard
    shape = found.atoms.fold(found.target.largest_sizes(found.atoms, found.axes))

    def send(x: Tensor) -> Tensor:
        if not message.differentiable:
            return x.detach().new_empty(shape)
        received: Tensor = _Received.apply(x, shape)  # type: ignore[no-untyped-call]
        return received

    return send


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.shape = x.shape
        return x.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_empty(ctx.shape), None
