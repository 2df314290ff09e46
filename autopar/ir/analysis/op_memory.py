"""Memory of ops and values that autograd saves in eager mode, measured on fake tensors.

Each op runs alone on fake tensors (shapes without memory), with hooks on saved tensors and a count of live bytes. So
its own autograd formula yields the tensors that it saves and the temporary memory; there is no table per op. Equal
calls are measured once. `saved_values` runs the whole graph in the same way, for the values that it saves.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autopar.ir.analysis.host_memory import ON_HOST
from autopar.ir.exported import Exported
from autopar.ir.fx_graphs import checkpoint_regions
from autopar.ir.values import ROUTED
from autopar.rules.call import arguments_by_name, operands_of
from autopar.rules.shard_call.device_kernels import with_most_memory


def differentiable(exported: Exported) -> frozenset[Node]:
    """Return the nodes that gradients flow through: they depend on a trained parameter or input."""
    leaves = {p.node for p in exported.placeholders if p.requires_grad} if exported.grad_enabled else set[str]()
    found: set[Node] = set()
    known: dict[Hashable, frozenset[int]] = {}
    for node in exported.graph_module.graph.nodes:
        if node.op == "placeholder" and node.name in leaves:
            found.add(node)
        if node.op != "call_function" or found.isdisjoint(node.all_input_nodes):
            continue
        if node.target is operator.getitem:
            # Not every result of an op has a gradient: running statistics have none.
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
    """Return the positions of an op's results that have a gradient."""
    results = range(len(node.meta["val"]))

    def given(source: Node) -> Any:
        val = source.meta["val"]
        return fake_input(tuple(val.size()), val.dtype, source in trained) if isinstance(val, Tensor) else val

    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), given)
            made = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, NotImplementedError, TypeError):
        # The op has no kernel for this device: assume that gradients flow.
        return frozenset(results)
    return frozenset(place for place in results if isinstance(made[place], Tensor) and made[place].requires_grad)


def fake_input(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    trained: bool,
    strides: tuple[int, ...] | None = None,
    device: str = "cpu",
) -> Tensor:
    """Return a tensor without memory; call it under a fake tensor mode, or for a meta device."""
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    made = torch.empty(shape, **options) if strides is None else torch.empty_strided(shape, strides, **options)
    # A view, not a leaf: some ops treat leaves differently.
    return made.requires_grad_().view_as(made) if trained else made


def call_key(node: Node, trained: Set[Node]) -> Hashable:
    """Return a key that is equal for calls that differ only in names."""

    def described(value: Any) -> Any:
        if not isinstance(value, Node):
            return str(value)
        val = value.meta["val"]
        shape = tuple(val.shape), val.stride(), val.dtype, value in trained
        return shape if isinstance(val, Tensor) else str(val)

    leaves = tree_leaves((node.args, node.kwargs), is_leaf=lambda value: isinstance(value, Node))
    return node.target, tuple(map(described, leaves)), str(tree_map(lambda value: 0, (node.args, node.kwargs)))


@dataclass(frozen=True)
class Footprint:
    """Memory of one call of an op; operands and outputs by position, in the order of its rule."""

    # For each output the operand whose memory it shares; None for memory of its own.
    aliases: tuple[int | None, ...]
    # Operands, and outputs, that are saved for the backward.
    keeps: tuple[int, ...]
    keeps_outputs: tuple[int, ...]
    # Other saved tensors, such as the logsumexp of attention.
    internal_bytes: int
    # Peak of temporary memory in the forward, beyond results and saved tensors.
    forward_bytes: int
    # Peak of temporary memory in the backward, beyond the resulting gradients.
    backward_bytes: int
    # Operands whose gradient shares the memory of the incoming gradient.
    passes: frozenset[int]


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count of the bytes of all storages that ops have allocated and not yet freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.known: set[int] = set()
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        return result

    def count(self, tensor: Tensor) -> None:
        """Count a tensor's storage from now on, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known or hasattr(storage, ON_HOST):
            return
        self.known.add(key)
        self.sizes[key] = size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        # Storages are freed outside of any op, so only a finalizer sees it.
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.known.discard(key)
        self.live -= self.sizes.pop(key)


def footprints(exported: Exported, twins: Mapping[str, str]) -> Mapping[str, Footprint]:
    """Return the footprint of every op of a traced graph, by the name of its node.

    `twins` has the same step of an earlier layer, for nodes of repeated layers.
    """
    found: dict[str, Footprint] = {}
    known: dict[Any, Footprint] = {}
    trained = differentiable(exported)
    nodes = {node.name: node for node in exported.graph_module.graph.nodes}
    for node in nodes.values():
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        twin = nodes.get(twins.get(node.name, ""))
        if twin is not None and twin.name in found and _inputs_of(node, trained) == _inputs_of(twin, trained):
            found[node.name] = found[twin.name]
            continue
        groups = _groups_of(node)
        key = groups, call_key(node, trained)
        if key not in known:
            known[key] = _stored_sparsely(_probe(node, trained), groups)
        found[node.name] = known[key]
    return found


def _groups_of(node: Node) -> int:
    """Return the number of groups of the routed rows of an op; 1 for others."""
    return max((one.meta.get(ROUTED, 1) for one in (node, *node.all_input_nodes)), default=1)


def _stored_sparsely(footprint: Footprint, groups: int) -> Footprint:
    """Return the footprint of an op that was probed on rows for all groups, of which one is stored."""
    inside = footprint.internal_bytes // groups, footprint.forward_bytes // groups, footprint.backward_bytes // groups
    return replace(footprint, internal_bytes=inside[0], forward_bytes=inside[1], backward_bytes=inside[2])


def _inputs_of(node: Node, trained: Set[Node]) -> list[tuple[bool, Any, int]]:
    """Return what may differ between the inputs of equal steps of two layers: gradients, strides, groups of rows."""
    values = [(source, source.meta["val"]) for source in node.all_input_nodes]
    return [
        (source in trained, x.stride() if isinstance(x, Tensor) else None, source.meta.get(ROUTED, 1))
        for source, x in values
    ]


def _probe(node: Node, trained: frozenset[Node]) -> Footprint:
    """Return the footprint of one op, run alone on fake tensors."""
    # Fused kernels of the CPU save the same values as others; on a meta device attention would save its scores. Only
    # ops without a CPU kernel in this dtype run on meta.
    try:
        with silent_failures():
            return _probe_on("cpu", node, trained)
    except (RuntimeError, NotImplementedError):
        return _probe_on("meta", node, trained)


@contextmanager
def silent_failures() -> Iterator[None]:
    """Silence the log of fake tensors, for ops that a device may lack: torch logs each failure as an error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _probe_on(device: str, node: Node, trained: frozenset[Node]) -> Footprint:
    made: dict[Node, Any] = {}

    def given(source: Node) -> Any:
        val = source.meta["val"]
        if not isinstance(val, Tensor):
            return val
        if source not in made:
            made[source] = fake_input(tuple(val.size()), val.dtype, source in trained, tuple(val.stride()), device)
        return made[source]

    with FakeTensorMode(allow_non_fake_inputs=True):
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), given)
        target: Any = node.target
        run = with_most_memory(node, trained.__contains__)
        operands = operands_of(target, arguments_by_name(target, args, kwargs))
        return measure(operands, lambda: run(*args, **arguments_on(device, kwargs)))


def measure(operands: Sequence[Any], call: Callable[[], Any]) -> Footprint:
    """Run a call and its backward on fake operands, and return its footprint."""
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    # Of an operand that is given twice the first place counts.
    places = {address_of(value): i for i, value in reversed(list(enumerate(operands))) if isinstance(value, Tensor)}
    counter = LiveBytes()
    counter.known |= set(places)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with counter:
            result = call()
        outputs = [value if isinstance(value, Tensor) else None for value in tree_leaves(result)]
        # Else temporary results would count as live until the end.
        del result
        owned = {address_of(value): i for i, value in enumerate(outputs) if value is not None}
        kept = {address_of(tensor): tensor.untyped_storage().nbytes() for tensor in packed}
        packed.clear()
        forward = max(0, counter.peak - counter.live)
        temporary, passes = _backward(operands, outputs, counter)
    return Footprint(
        tuple(None if value is None else places.get(address_of(value)) for value in outputs),
        tuple(sorted(places[address] for address in kept if address in places)),
        tuple(sorted(owned[address] for address in kept if address in owned and address not in places)),
        sum(size for address, size in kept.items() if address not in places and address not in owned),
        forward,
        temporary,
        passes,
    )


def _backward(operands: Sequence[Any], outputs: list[Tensor | None], counter: LiveBytes) -> tuple[int, frozenset[int]]:
    """Return the temporary bytes of the backward, and the operands whose gradient is that of an output."""
    starts = [value for value in outputs if value is not None and value.requires_grad]
    wanted = [(i, value) for i, value in enumerate(operands) if isinstance(value, Tensor) and value.requires_grad]
    if not starts or not wanted:
        return 0, frozenset()
    given = [torch.empty_like(value) for value in starts]
    counter.known |= {address_of(gradient) for gradient in given}
    before = counter.peak = counter.live
    with counter:
        inputs = [value for _, value in wanted]
        gradients: Sequence[Tensor | None] = torch.autograd.grad(starts, inputs, given, allow_unused=True)
    shared = {address_of(gradient) for gradient in given}
    found = [(i, gradient) for (i, _), gradient in zip(wanted, gradients, strict=True) if gradient is not None]
    fresh = {address_of(one): one.untyped_storage().nbytes() for _, one in found if address_of(one) not in shared}
    passes = frozenset(i for i, gradient in found if address_of(gradient) in shared)
    return max(0, counter.peak - before - sum(fresh.values())), passes


def address_of(tensor: Tensor) -> int:
    """Return a number that tensors with the same storage share."""
    address: int = tensor.untyped_storage()._cdata
    return address


def arguments_on(device: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for a run of a node's op on fake tensors of a device."""
    changed = dict(kwargs)
    if "device" in changed:
        changed["device"] = torch.device(device)
    return changed


# -- saved tensors of a graph ------------------------------------------------------------------------------------------


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
        target = with_most_memory(node, lambda one: any(x.requires_grad for x in _tensors(self.results[one])))
        self.packed.clear()
        try:
            with silent_failures():
                result = target(*args, **arguments_on("cpu", kwargs))
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
                size = tensor.untyped_storage().nbytes() // _groups_of(node)
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
