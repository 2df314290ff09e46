"""What each op of a graph does to memory, seen by running it: forward and backward, once per distinct call.

The op runs alone on fake tensors (shapes without memory), with hooks on what autograd saves and a count of the bytes
that live, so that each op's own autograd formula says what it keeps and what it needs in between. There is no table.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autopar.ir.exported import Exported
from autopar.rules.call import arguments_by_name, operands_of
from autopar.rules.shard_call.grouped_heads import with_most_memory


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


@dataclass(frozen=True)
class Footprint:
    """What one call of an op does to memory; operands and outputs by position, in the order of its rule."""

    aliases: tuple[int | None, ...]
    """For each output the operand whose memory it shares."""
    keeps: tuple[int, ...]
    """The operands that it keeps for the backward."""
    keeps_outputs: tuple[int, ...]
    internal_bytes: int
    """What else it keeps (attention's logsumexp ...)."""
    forward_bytes: int
    """The most that it holds in between, beyond what it gives and keeps."""
    backward_bytes: int
    """The same in the backward, beyond the gradients that it gives."""
    passes: frozenset[int]
    """The operands whose gradient shares the memory of the gradient that the op is given."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that ops have made and that are not yet let go of."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.known: set[int] = set()
        self.sizes: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        return result

    def count(self, tensor: Tensor) -> None:
        """Count a tensor's storage from now on, if it is not counted yet."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        size = storage.nbytes()
        self.known.add(key)
        self.sizes[key] = weakref.ref(storage), size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key)

    def recount(self) -> None:
        """See to storages that were resized, which no op tells of."""
        for key, (reference, size) in list(self.sizes.items()):
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self.sizes[key] = reference, storage.nbytes()
                self.live += storage.nbytes() - size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        self.known.discard(key)
        self.live -= self.sizes.pop(key)[1]


def footprints(exported: Exported) -> Mapping[str, Footprint]:
    """The footprint of every op of a traced graph, by the name of its node."""
    found: dict[str, Footprint] = {}
    known: dict[Any, Footprint] = {}
    trained = differentiable(exported)
    for node in exported.graph_module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        key = call_key(node, trained)
        if key not in known:
            known[key] = _probe(node, trained)
        found[node.name] = known[key]
    return found


def _probe(node: Node, trained: frozenset[Node]) -> Footprint:
    """One op of a graph, alone, on fake tensors of a CPU: fused kernels keep the same values there as elsewhere.

    What a CPU cannot do in this dtype (models write some ops for GPUs alone) is probed without a device.
    """
    try:
        with untold_failures():
            return _probe_on("cpu", node, trained)
    except (RuntimeError, NotImplementedError):
        return _probe_on("meta", node, trained)


@contextmanager
def untold_failures() -> Iterator[None]:
    """Trying what a device may not be able to do: torch logs each op that fails on fake tensors as an error."""
    told = logging.getLogger("torch._subclasses.fake_tensor")
    before, told.disabled = told.disabled, True
    try:
        yield
    finally:
        told.disabled = before


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
        run = with_most_memory(node)
        operands = operands_of(target, arguments_by_name(target, args, kwargs))
        return measure(operands, lambda: run(*args, **_on(device, target, kwargs)))


def measure(operands: Sequence[Any], call: Callable[[], Any]) -> Footprint:
    """Run a call and its backward on its operands, which are fake."""
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    places = {_address(value): i for i, value in reversed(list(enumerate(operands))) if isinstance(value, Tensor)}
    counter = LiveBytes()
    counter.known |= set(places)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with counter:
            result = call()
        outputs = [value if isinstance(value, Tensor) else None for value in _flat(result)]
        del result
        owned = {_address(value): i for i, value in enumerate(outputs) if value is not None}
        kept = {_address(tensor): tensor.untyped_storage().nbytes() for tensor in packed}
        packed.clear()
        forward = max(0, counter.peak - counter.live)
        temporary, passes = _backward(operands, outputs, counter)
    return Footprint(
        tuple(None if value is None else places.get(_address(value)) for value in outputs),
        tuple(sorted(places[address] for address in kept if address in places)),
        tuple(sorted(owned[address] for address in kept if address in owned and address not in places)),
        sum(size for address, size in kept.items() if address not in places and address not in owned),
        forward,
        temporary,
        passes,
    )


def _backward(operands: Sequence[Any], outputs: list[Tensor | None], counter: LiveBytes) -> tuple[int, frozenset[int]]:
    """What the backward holds in between, and the operands whose gradient is that of an output."""
    starts = [value for value in outputs if value is not None and value.requires_grad]
    wanted = [(i, value) for i, value in enumerate(operands) if isinstance(value, Tensor) and value.requires_grad]
    if not starts or not wanted:
        return 0, frozenset()
    given = [torch.empty_like(value) for value in starts]
    counter.known |= {_address(gradient) for gradient in given}
    before = counter.peak = counter.live
    with counter:
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
            starts, [value for _, value in wanted], given, allow_unused=True
        )
    shared = {_address(gradient) for gradient in given}
    found = [(i, gradient) for (i, _), gradient in zip(wanted, gradients, strict=True) if gradient is not None]
    fresh = {_address(one): one.untyped_storage().nbytes() for _, one in found if _address(one) not in shared}
    passes = frozenset(i for i, gradient in found if _address(gradient) in shared)
    return max(0, counter.peak - before - sum(fresh.values())), passes


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _flat(result: Any) -> list[Any]:
    return [item for part in result for item in _flat(part)] if isinstance(result, (tuple, list)) else [result]


def _on(device: str, target: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    changed = dict(kwargs)
    if "device" in changed:
        changed["device"] = torch.device(device)
    if target is torch.ops.aten.scaled_dot_product_attention.default and "dropout_p" in changed:
        changed["dropout_p"] = 0.0  # with dropout only the CPU falls back to the unfused kernel
    return changed
