"""Values of the graph that autograd saves for the backward in eager mode, exactly.

The graph runs on fake tensors (shapes without memory) under `saved_tensors_hooks`, so each op's own autograd formula
yields the tensors that it saves; there is no table per op. A view counts as its base, because they share memory.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves, tree_map

from autopar.ir.analysis.op_memory import address_of, arguments_on, silent_failures
from autopar.ir.exported import Exported
from autopar.ir.fx_graphs import checkpoint_regions
from autopar.rules.shard_call.attention import with_most_memory


@dataclass(frozen=True)
class InternalSave:
    """Saved tensor that is no value of the graph, such as the logsumexp of attention."""

    node: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


@dataclass(frozen=True)
class SavedTensors:
    """Saved tensors of a graph; `values` are names of nodes, in the order of the graph, that own their memory."""

    values: tuple[str, ...]
    internal: tuple[InternalSave, ...]


def saved_values(exported: Exported) -> SavedTensors:
    """Run the traced forward on fake tensors and return the saved tensors.

    All tensors are on the CPU, whatever the device of the model: its fused kernels save the same values as others. On a
    meta device attention would save its scores.
    """
    if not exported.grad_enabled:
        return SavedTensors((), ())
    run = _SavingRun()
    graph = exported.graph_module.graph
    requires_grad = {p.node: p.requires_grad for p in exported.placeholders}
    inside = {node: number for number, nodes in checkpoint_regions(graph) for node in nodes}
    hooks = torch.autograd.graph.saved_tensors_hooks(run.pack, lambda tensor: tensor)
    with FakeTensorMode(), torch.enable_grad(), hooks:
        for node in graph.nodes:
            if node.op == "placeholder":
                run.place(node, _like_on_cpu(node.meta["val"]).requires_grad_(requires_grad[node.name]))
            elif node.op == "call_function":
                run.call(node, recomputed=node in inside)
        for _, nodes in checkpoint_regions(graph):
            run.keep_inputs(nodes)
    return run.saved(graph)


class _SavingRun:
    def __init__(self) -> None:
        # All results stay alive, so that no address of a storage is used twice.
        self.results: dict[Node, Any] = {}
        # The first node with a storage, by its address.
        self.owners: dict[int, Node] = {}
        # Saved values, by the node whose backward needs them.
        self.kept: dict[Node, set[Node]] = {}
        self.internal: dict[Node, list[torch.Tensor]] = {}
        self.packed: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.packed.append(tensor)
        return tensor

    def place(self, node: Node, result: Any) -> None:
        self.results[node] = result
        if isinstance(result, torch.Tensor):
            self.owners.setdefault(address_of(result), node)
        elif isinstance(result, (tuple, list)):
            items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
            for index, element in enumerate(result):
                if isinstance(element, torch.Tensor) and index in items:
                    self.owners.setdefault(address_of(element), items[index])

    def call(self, node: Node, recomputed: bool) -> None:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.results.__getitem__)
        target = with_most_memory(node)
        self.packed.clear()
        try:
            with silent_failures():
                result = target(*args, **arguments_on("cpu", node, kwargs))
        except (RuntimeError, NotImplementedError):
            if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs))):
                raise
            # Some ops have kernels for GPUs only. Without a gradient through them they save nothing.
            result = tree_map(_like_on_cpu, node.meta["val"])
        self.place(node, result)
        # The backward recomputes a region, so its ops save nothing.
        if recomputed:
            return
        for tensor in self.packed:
            owner = self.owners.get(address_of(tensor))
            if owner is not None:
                self.kept.setdefault(node, set()).add(owner)
            else:
                self.internal.setdefault(node, []).append(tensor)

    def keep_inputs(self, nodes: list[Node]) -> None:
        """Save the values that enter a checkpointed region, for each of its results."""
        inside = set(nodes)
        entering = [source for node in nodes for source in node.all_input_nodes if source not in inside]
        addresses = [address_of(tensor) for source in entering for tensor in _tensors(self.results[source])]
        owners = {self.owners[address] for address in addresses if address in self.owners}
        for node in nodes:
            if any(user not in inside for user in node.users):
                self.kept.setdefault(node, set()).update(owners)

    def saved(self, graph: Graph) -> SavedTensors:
        alive = self._leading_to_outputs(graph)
        kept = set().union(*(owners for node, owners in self.kept.items() if node in alive))
        internal: dict[int, InternalSave] = {}
        for node, tensors in self.internal.items():
            for tensor in tensors if node in alive else ():
                size = tensor.untyped_storage().nbytes()
                if size:
                    save = InternalSave(node.name, tuple(tensor.shape), tensor.dtype, size)
                    internal.setdefault(address_of(tensor), save)
        return SavedTensors(tuple(node.name for node in graph.nodes if node in kept), tuple(internal.values()))

    def _leading_to_outputs(self, graph: Graph) -> set[Node]:
        """Return the nodes whose backward can run after the forward; tensors that others saved are freed."""
        alive: set[Node] = set()
        for node in reversed(graph.nodes):
            if node.op != "call_function" or not any(t.requires_grad for t in _tensors(self.results[node])):
                continue
            if any(user.op == "output" or user in alive for user in node.users):
                alive.add(node)
        return alive


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _like_on_cpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
