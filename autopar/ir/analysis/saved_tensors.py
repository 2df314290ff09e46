"""Which values of the graph autograd saves for the backward, exactly, in eager mode.

The graph runs on fake tensors (shapes without memory) under `saved_tensors_hooks`, so that each op's own autograd
formula says what it keeps; there is no table per op. A view counts as the value it is a view of: they share memory.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves, tree_map

from autopar.ir.analysis.op_memory import untold_failures
from autopar.ir.exported import Exported
from autopar.ir.fx_graphs import checkpoint_regions
from autopar.rules.shard_call.grouped_heads import with_most_memory


@dataclass(frozen=True)
class InternalSave:
    """Memory that an op keeps for its backward and that is no value of the graph (attention's logsumexp ...)."""

    node: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


@dataclass(frozen=True)
class SavedTensors:
    """`values`: names of nodes, in the order of the graph, each the owner of its memory."""

    values: tuple[str, ...]
    internal: tuple[InternalSave, ...]


def saved_values(exported: Exported) -> SavedTensors:
    """Run the traced forward on fake tensors and see what is kept.

    On a CPU device, whatever the model stands on: fused kernels keep the same values there as elsewhere, while a meta
    device would fall back to attention that keeps its score matrices.
    """
    if not exported.grad_enabled:
        return SavedTensors((), ())
    run = _SavingRun()
    graph = exported.graph_module.graph
    requires_grad = {p.node: p.requires_grad for p in exported.placeholders}
    inside = {node: number for number, nodes in checkpoint_regions(graph) for node in nodes}
    with (
        FakeTensorMode(),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(run.pack, run.unpack),
    ):
        for node in graph.nodes:
            if node.op == "placeholder":
                run.place(node, _input(node.meta["val"], requires_grad[node.name]))
            elif node.op == "call_function":
                run.call(node, recomputed=node in inside)
        for _, nodes in checkpoint_regions(graph):
            run.keep_inputs(nodes)
    return run.saved(graph)


class _SavingRun:
    def __init__(self) -> None:
        self.results: dict[Node, Any] = {}  # kept, so that no address of a storage is used twice
        self.owners: dict[int, Node] = {}
        self.kept: dict[Node, set[Node]] = {}  # by the node whose backward needs them
        self.internal: dict[Node, list[torch.Tensor]] = {}
        self.packed: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.packed.append(tensor)
        return tensor

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def place(self, node: Node, result: Any) -> None:
        self.results[node] = result
        if isinstance(result, torch.Tensor):
            self.owners.setdefault(_address(result), node)
        elif isinstance(result, (tuple, list)):
            items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
            for index, element in enumerate(result):
                if isinstance(element, torch.Tensor) and index in items:
                    self.owners.setdefault(_address(element), items[index])

    def call(self, node: Node, recomputed: bool) -> None:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.results.__getitem__)
        target = with_most_memory(node)
        self.packed.clear()
        try:
            with untold_failures():
                result = target(*args, **_on_cpu(node, kwargs))
        except (RuntimeError, NotImplementedError):
            if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs))):
                raise
            # Models write some ops for GPUs alone, on numbers that no gradient flows through: they keep nothing.
            result = tree_map(_like_on_cpu, node.meta["val"])
        self.place(node, result)
        if recomputed:
            return
        for tensor in self.packed:
            owner = self.owners.get(_address(tensor))
            if owner is not None:
                self.kept.setdefault(node, set()).add(owner)
            else:
                self.internal.setdefault(node, []).append(tensor)

    def keep_inputs(self, nodes: list[Node]) -> None:
        """A checkpointed region keeps what enters it, for each of its results that leads to an output."""
        inside = set(nodes)
        entering = [source for node in nodes for source in node.all_input_nodes if source not in inside]
        addresses = [_address(tensor) for source in entering for tensor in _tensors(self.results[source])]
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
                    internal.setdefault(_address(tensor), save)
        return SavedTensors(tuple(node.name for node in graph.nodes if node in kept), tuple(internal.values()))

    def _leading_to_outputs(self, graph: Graph) -> set[Node]:
        """The nodes whose backward can be called once the forward is over; what others saved is free again."""
        alive: set[Node] = set()
        for node in reversed(graph.nodes):
            if node.op != "call_function" or not any(t.requires_grad for t in _tensors(self.results[node])):
                continue
            if any(user.op == "output" or user in alive for user in node.users):
                alive.add(node)
        return alive


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _input(val: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    made = torch.empty_strided(val.size(), val.stride(), dtype=val.dtype, device="cpu")
    return made.requires_grad_(requires_grad)


def _like_on_cpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")


def _on_cpu(node: Node, kwargs: dict[str, Any]) -> dict[str, Any]:
    changed = dict(kwargs)
    if "device" in changed:
        changed["device"] = torch.device("cpu")
    if node.target is torch.ops.aten.scaled_dot_product_attention.default and "dropout_p" in changed:
        changed["dropout_p"] = 0.0  # with dropout only the CPU falls back to the unfused kernel
    return changed
