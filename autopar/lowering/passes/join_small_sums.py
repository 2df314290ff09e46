"""Join consecutive small sums into one collective: a loss and the number of its targets, for example.

Starting a collective, and waiting for the slowest rank, costs more than sending a few numbers. A sum may wait for the
next one if nothing has used it until then.

Input::

    a = all_reduce(x)
    b = all_reduce(y)
Output::

    joined = joined_sums(x, y)
    a = joined[0]
    b = joined[1]
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from autopar.lowering.collectives.local_reshard import LocalReshard, convert, restored, send, summed_together
from autopar.sharding.reshard.reshard import StepKind

__all__ = ["JoinedSums", "join_totals", "joined", "small_sum"]

# Elements. A smaller sum takes longer to start than to send.
FEW = 1024


class JoinedSums(nn.Module):
    """Several sums over one group."""

    def __init__(self, conversions: tuple[LocalReshard, ...], notes: tuple[str, ...]) -> None:
        super().__init__()
        self.conversions = conversions
        self.notes = notes

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = _JoinedSumsFunction.apply(self.conversions, *tensors)  # type: ignore[no-untyped-call]
        return found

    def extra_repr(self) -> str:
        return "\n".join(str(conversion.reshard) for conversion in self.conversions)


class _JoinedSumsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, conversions: tuple[LocalReshard, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        total = torch.ops._c10d_functional.wait_tensor(send(conversions[0].forward[0], joined(tensors)))
        pieces = torch.split(total, [x.numel() for x in tensors])
        # Separate tensors: autograd forbids in-place changes of several views of one.
        found = [
            restored(piece, x.dtype, copy=True).reshape(one.result_shape)
            for piece, x, one in zip(pieces, tensors, conversions, strict=True)
        ]
        ctx.conversions = conversions
        ctx.mark_non_differentiable(*(x for x in found if not (x.is_floating_point() or x.is_complex())))
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return (None, *gradients)
        # For gradients of gradients: each is summed like the sums themselves.
        pairs = zip(gradients, ctx.conversions, strict=True)
        return (None, *(None if x is None else convert(x, one, backward=True) for x, one in pairs))


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Join several tensors into one, in their dtype or one that holds the values of all."""
    common = summed_together(x.dtype for x in tensors)
    return torch.cat([x.reshape(-1).to(common) for x in tensors])


@dataclass
class _SumGroup:
    members: list[Node]
    first_use: int


def join_totals(graph: Graph, modules: dict[str, nn.Module]) -> None:
    """Replace sums that can run together by one module, in place."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    groups: list[_SumGroup] = []
    open_groups: dict[Any, _SumGroup] = {}
    for node in graph.nodes:
        conversion = small_sum(node, modules)
        if conversion is None:
            continue
        used = min((places[user] for user in node.users), default=len(places))
        key = conversion.forward[0].group, node.meta.get("region")  # what is computed again has sums of its own
        group = open_groups.get(key)
        if group is None or group.first_use < places[node]:
            group = open_groups[key] = _SumGroup([], used)
            groups.append(group)
        group.members.append(node)
        group.first_use = min(group.first_use, used)
    for number, group in enumerate(group for group in groups if len(group.members) > 1):
        _join(graph, modules, f"totals_{number}", group.members)


def small_sum(node: Node, modules: Mapping[str, nn.Module]) -> LocalReshard | None:
    """Return the reshard of a node that sums few numbers in the forward and nothing in the backward; else None."""
    conversion = getattr(modules.get(str(node.target)), "conversion", None) if node.op == "call_module" else None
    if not isinstance(conversion, LocalReshard) or conversion.backward or len(conversion.forward) != 1:
        return None
    is_sum = conversion.forward[0].kind is StepKind.ALL_REDUCE
    return conversion if is_sum and 0 < prod(conversion.shape) <= FEW else None


def _join(graph: Graph, modules: dict[str, nn.Module], name: str, members: list[Node]) -> Node:
    conversions = tuple(modules[str(node.target)].conversion for node in members)
    notes = tuple(note for node in members for note in modules[str(node.target)].notes)  # type: ignore[union-attr]
    modules[name] = JoinedSums(conversions, notes)  # type: ignore[arg-type]
    with graph.inserting_after(members[-1]):
        joined = graph.call_module(name, tuple(node.args[0] for node in members))
    last = joined
    for i, node in enumerate(members):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (joined, i))
        last.meta.update(node.meta)
        node.replace_all_uses_with(last)
        del modules[str(node.target)]
        graph.erase_node(node)
    joined.meta.update({key: members[-1].meta.get(key) for key in ("origin", "region", "kept")})
    return joined
