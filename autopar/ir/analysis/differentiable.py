"""Through which values of a traced graph gradients flow."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Set
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from autopar.ir.exported import Exported

__all__ = ["call_key", "differentiable", "fake_input"]


def differentiable(exported: Exported) -> frozenset[Node]:
    """What depends on a parameter or an input that requires a gradient, in a way that autograd follows."""
    leaves = {p.node for p in exported.placeholders if p.requires_grad} if exported.grad_enabled else set[str]()
    found: set[Node] = set()
    known: dict[Hashable, frozenset[int]] = {}
    for node in exported.graph_module.graph.nodes:
        if node.op == "placeholder" and node.name in leaves:
            found.add(node)
        if node.op != "call_function" or found.isdisjoint(node.all_input_nodes):
            continue
        if node.target is operator.getitem:
            source, place = node.args
            assert isinstance(source, Node), node
            key = call_key(source, found)
            if key not in known:
                known[key] = _followed(source, found)
            if place in known[key] and _has_floats(node):
                found.add(node)
        elif node.target is not torch.ops.aten.detach.default and _has_floats(node):
            found.add(node)
    return frozenset(found)


def _has_floats(node: Node) -> bool:
    values = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    return any(value.is_floating_point() or value.is_complex() for value in values)


def _followed(node: Node, trained: Set[Node]) -> frozenset[int]:
    """The results of an op that have a gradient: running statistics, for one, have none."""
    results = range(len(node.meta["val"]))

    def given(source: Node) -> Any:
        val = source.meta["val"]
        return fake_input(tuple(val.size()), val.dtype, source in trained) if isinstance(val, Tensor) else val

    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), given)
            made = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, NotImplementedError, TypeError):
        return frozenset(results)  # an op for other devices alone
    return frozenset(place for place in results if isinstance(made[place], Tensor) and made[place].requires_grad)


def fake_input(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    trained: bool,
    strides: tuple[int, ...] | None = None,
    device: str = "cpu",
) -> Tensor:
    """A tensor without memory, under a fake tensor mode."""
    if strides is None:
        made = torch.empty(shape, dtype=dtype, device=device)
    else:
        made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    # Not a leaf: some ops treat leaves in another way.
    return made.requires_grad_().view_as(made) if trained else made


def call_key(node: Node, trained: Set[Node]) -> Hashable:
    """The same for calls that are equal but for names."""

    def described(value: Any) -> Any:
        if not isinstance(value, Node):
            return str(value)
        val = value.meta["val"]
        shape = tuple(val.shape), val.stride(), val.dtype, value in trained
        return shape if isinstance(val, Tensor) else str(val)

    leaves = tree_leaves((node.args, node.kwargs), is_leaf=lambda value: isinstance(value, Node))
    return node.target, tuple(map(described, leaves)), str(tree_map(lambda value: 0, (node.args, node.kwargs)))
