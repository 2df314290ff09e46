"""Footprint of ops on one rank: saved operands, temporaries, and gradients that are passed on.

Most ops have a share of the whole op's footprint. A lowered op, with collectives inside, runs other ops: its footprint
is found by running its lowering on fake tensors.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from autopar.cost.lowered_step import LoweredStep
from autopar.ir.analysis.op_memory import Footprint, fake_input, measure
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.rules.call import arguments_by_name, takes_tensors
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.sharding.assignment import OpAssignment
from autopar.sharding.lowered_ops import LoweredOpContext
from autopar.sharding.lowered_ops.base import OpMessage, Send
from autopar.sharding.reshard.reshard import StepKind
from autopar.sharding.sharding import atoms_of


class LocalFootprints:
    """Footprints of the ops of a plan on one rank; those of equal ops are computed once."""

    def __init__(self, step: LoweredStep) -> None:
        self.graph, self.plan, self.reshard_plan = step.graph, step.plan, step.reshard_plan
        self.by_name: dict[str, Footprint] = {}
        self.by_key: dict[Any, Footprint] = {}

    def of(self, node: NamedNode) -> Footprint:
        found = self.by_name.get(node.name)
        if found is None:
            op_assignment = self.plan.assignment.ops[node.name]
            key = id(self.graph.footprints[node.node]), op_assignment.choice, op_assignment.operands
            found = self.by_key.get(key)
            if found is None:
                lowered_op = self.reshard_plan.ops[node.name].split
                found = local_footprint(self.graph, node, op_assignment, lowered_op, self.plan.axes)
            self.by_name[node.name] = self.by_key[key] = found
        return found


def local_footprint(
    graph: NamedGraph,
    node: NamedNode,
    op_assignment: OpAssignment,
    lowered_op: LoweredOpContext | None,
    axes: SubMesh,
) -> Footprint:
    """Return the footprint of an op on one rank."""
    if lowered_op is not None and not _exchanges_halos(lowered_op):
        return _lowered_footprint(graph, node, op_assignment, lowered_op, axes)
    whole = graph.footprints[node.node]
    share = 1 / prod(axes[axis] for axis in op_assignment.choice.axes)
    return replace(
        whole,
        internal_bytes=round(whole.internal_bytes * share),
        forward_bytes=round(whole.forward_bytes * share),
        backward_bytes=round(whole.backward_bytes * share),
    )


def _exchanges_halos(lowered_op: LoweredOpContext) -> bool:
    """Return True for a window op, which runs unchanged on its shard joined with its neighbours' edges."""
    steps = (step for message in lowered_op.messages() for step in message.reshard.forward)
    return any(step.kind is StepKind.HALO_EXCHANGE for step in steps)


def _lowered_footprint(
    graph: NamedGraph, node: NamedNode, op_assignment: OpAssignment, lowered_op: LoweredOpContext, axes: SubMesh
) -> Footprint:
    """Run the lowering of an op on fake tensors of one rank and return its footprint in bytes."""
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
                arguments[name] = None if value is None else [_argument(item, next(left)) for item in value]
            else:
                arguments[name] = _argument(value, next(left))
        slices = {factor: _first_slice(node, op_assignment, factor, axes) for factor in node.sizes}
        sizes = {factor: slices[factor].length for factor in node.sizes if factor not in lowered_op.factors}
        local = LocalCall(target, arguments, node.rule, dict(node.sizes), {**node.sizes, **sizes})
        sends = tuple(map(_fake_send, lowered_op.messages()))
        return measure(operands, lambda: lowered_op.lowering.run(lowered_op, local, slices, sends))


def _operand(graph: NamedGraph, name: str, op_assignment: OpAssignment, position: int, axes: SubMesh) -> Tensor:
    tensor, layout = graph.tensors[name], op_assignment.operands[position]
    atoms = atoms_of(tensor)
    shape = tensor.shape if layout is None else atoms.fold(layout.largest_sizes(atoms, axes))
    return fake_input(shape, tensor.dtype, tensor.requires_grad)


def _argument(value: Any, operand: Tensor | None) -> Any:
    return operand if isinstance(value, Node) else value


def _first_slice(node: NamedNode, op_assignment: OpAssignment, factor: str, axes: SubMesh) -> FactorSlice:
    """Return the first rank's slice of a factor, which is the largest."""
    length = node.sizes[factor]
    for (name, _), used in op_assignment.choice.splits:
        if name == factor:
            length = -(-length // prod(axes[axis] for axis in used))
    return FactorSlice(factor, 0, 0, length, node.sizes[factor])


def _fake_send(message: OpMessage) -> Send:
    """Return a function with the shapes of a message, and its gradient, that sends nothing."""
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
