"""Replace ops on ranks that have no elements of a split factor.

Shards have the ceiling size, so the last ones may be empty. Such a rank adds zero to a sum and has no elements of a
split result. Many ops refuse empty tensors, so the module returns the empty result without running the op. It still
depends on its operands, so that the collectives of the backward run on all ranks alike. If the op adds something to
the sum (a bias), it runs on a slice of zeros.

Input::

    y = conv2d(x_empty, w)
Output::

    y = empty_shard_op(x_empty, w)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Node

from autopar.rules.call import flat_results
from autopar.rules.shard_call.local_call import call_by_name, nothing

__all__ = ["EmptyShardOp", "Result", "has_node", "nodes_of", "reached"]


# Shape and dtype of a result, and the operands that its gradient reaches.
Result = tuple[tuple[int, ...], torch.dtype, frozenset[int]]


class EmptyShardOp(nn.Module):
    """Op on a rank that has no elements of it."""

    def __init__(self, op: str, results: tuple[Result | None, ...], single: bool, saves: bool) -> None:
        super().__init__()
        self.op = op
        self.results = results
        self.single = single
        self.saves = saves

    def forward(self, *tensors: Tensor) -> Any:
        made = [None if result is None else self._made(result, tensors) for result in self.results]
        return made[0] if self.single else made

    def _made(self, result: Result, tensors: Sequence[Tensor]) -> Tensor:
        shape, dtype, reached = result
        given = [x if i in reached else x.detach() for i, x in enumerate(tensors)]
        return nothing(shape, dtype, given, self.saves)

    def extra_repr(self) -> str:
        return f"{self.op}: this rank has nothing of it"


def nodes_of(arguments: Mapping[str, Any]) -> tuple[Node, ...]:
    """Return the nodes among an op's arguments, with lists flattened."""
    listed = [each for value in arguments.values() for each in (value if isinstance(value, list | tuple) else [value])]
    return tuple(value for value in listed if isinstance(value, Node))


def has_node(value: Any) -> bool:
    """Return whether an argument is a node, or a list with one at any depth."""
    if isinstance(value, list | tuple):
        return any(map(has_node, value))
    return isinstance(value, Node)


def reached(
    op: torch._ops.OpOverload, arguments: Mapping[str, Any], trained: Callable[[Node], bool]
) -> tuple[list[frozenset[int]], bool]:
    """Return, for each result of an op, the operands that its gradient reaches; and whether its backward saves tensors.

    Not all results have a gradient (`ones_like`). All ranks must find the same operands, or their backwards run in
    different orders. So the op runs whole on tensors without memory, and autograd's graph is read.
    """
    leaves: list[Tensor] = []
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    def leaf(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [leaf(each) for each in value]
        if not isinstance(value, Node):
            return value
        given = value.meta["val"]
        made = torch.empty(given.shape, dtype=given.dtype, device=given.device)
        leaves.append(made.requires_grad_(trained(value)))
        return made.clone()  # an op may give back what it takes, which then has no history

    with FakeTensorMode(), torch.enable_grad():
        given = {name: leaf(value) for name, value in arguments.items()}
        with saved_tensors_hooks(save, lambda tensor: tensor):
            results = flat_results(call_by_name(op, given))
    return [_leaves_of(result, leaves) for result in results], bool(saved)


def _leaves_of(result: Tensor | None, leaves: Sequence[Tensor]) -> frozenset[int]:
    todo = [result.grad_fn] if result is not None and result.grad_fn is not None else []
    seen, found = set(todo), set[int]()
    while todo:
        function = todo.pop()
        variable = getattr(function, "variable", None)
        found.update(i for i, leaf in enumerate(leaves) if leaf is variable)
        following = {step for step, _ in function.next_functions if step is not None} - seen
        seen |= following
        todo += following
    return frozenset(found)
