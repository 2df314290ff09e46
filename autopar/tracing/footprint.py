"""What each op of a graph does to memory, seen by running it: forward and backward, once per distinct call.

The op runs alone on fake tensors (shapes without memory), with hooks on what autograd saves and a count of the bytes
that live, so that each op's own autograd formula says what it keeps and what it needs in between. There is no table.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autopar.rules.call import arguments_by_name, operands_of
from autopar.tracing.exported import Exported

__all__ = ["Footprint", "LiveBytes", "footprints"]


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
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def footprints(exported: Exported) -> Mapping[str, Footprint]:
    """The footprint of every op of a traced graph, by the name of its node."""
    found: dict[str, Footprint] = {}
    known: dict[Any, Footprint] = {}
    trained = _trained(exported)
    for node in exported.graph_module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        key = _key(node, trained)
        if key not in known:
            known[key] = _Probe(node, trained).run()
        found[node.name] = known[key]
    return found


def _trained(exported: Exported) -> frozenset[Node]:
    """The nodes through which a gradient flows."""
    leaves = {p.node for p in exported.placeholders if p.requires_grad} if exported.grad_enabled else set[str]()
    found: set[Node] = set()
    for node in exported.graph_module.graph.nodes:
        if node.op == "placeholder":
            if node.name in leaves:
                found.add(node)
        elif node.op == "call_function" and any(source in found for source in node.all_input_nodes):
            values = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
            made = any(value.is_floating_point() or value.is_complex() for value in values)
            if made and node.target is not torch.ops.aten.detach.default:
                found.add(node)
    return frozenset(found)


def _key(node: Node, trained: frozenset[Node]) -> Any:
    def described(value: Any) -> Any:
        if not isinstance(value, Node):
            return str(value)
        val = value.meta["val"]
        shape = tuple(val.shape), val.stride(), val.dtype, value in trained
        return shape if isinstance(val, Tensor) else str(val)

    leaves = tree_leaves((node.args, node.kwargs), is_leaf=lambda value: isinstance(value, Node))
    return node.target, tuple(map(described, leaves)), str(tree_map(lambda value: 0, (node.args, node.kwargs)))


class _Probe:
    """One op, alone, on fake tensors of a CPU: fused kernels keep the same values there as elsewhere."""

    def __init__(self, node: Node, trained: frozenset[Node]) -> None:
        self.node = node
        self.trained = trained
        self.packed: list[Tensor] = []

    def run(self) -> Footprint:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad(), hooks:
            made: dict[Node, Tensor] = {}
            args, kwargs = torch.fx.node.map_arg(
                (self.node.args, self.node.kwargs), lambda source: self._input(source, made)
            )
            target: Any = self.node.target
            operands = operands_of(target, arguments_by_name(target, args, kwargs))
            return self._measure(operands, lambda: target(*args, **_on_cpu(target, kwargs)))

    def _pack(self, tensor: Tensor) -> Tensor:
        self.packed.append(tensor)
        return tensor

    def _input(self, source: Node, made: dict[Node, Tensor]) -> Any:
        val = source.meta["val"]
        if not isinstance(val, Tensor):
            return val
        if source not in made:
            fake = torch.empty_strided(val.size(), val.stride(), dtype=val.dtype, device="cpu")
            # Not a leaf: some ops treat leaves in another way.
            made[source] = fake.requires_grad_().view_as(fake) if source in self.trained else fake
        return made[source]

    def _measure(self, operands: list[Any], call: Any) -> Footprint:
        places = {_address(value): i for i, value in reversed(list(enumerate(operands))) if isinstance(value, Tensor)}
        self.packed.clear()
        counter = LiveBytes()
        counter.known |= set(places)
        with counter:
            result = call()
        outputs = [value if isinstance(value, Tensor) else None for value in _flat(result)]
        aliases = tuple(None if value is None else places.get(_address(value)) for value in outputs)
        owned = {_address(value): i for i, value in enumerate(outputs) if value is not None}
        keeps = {places[_address(tensor)] for tensor in self.packed if _address(tensor) in places}
        kept_outputs = {owned[_address(t)] for t in self.packed if _address(t) in owned and _address(t) not in places}
        inside = {
            _address(tensor): tensor.untyped_storage().nbytes()
            for tensor in self.packed
            if _address(tensor) not in places and _address(tensor) not in owned
        }
        forward = max(0, counter.peak - max(counter.live, 0))
        temporary, passes = self._backward(operands, outputs, counter)
        return Footprint(
            aliases,
            tuple(sorted(keeps)),
            tuple(sorted(kept_outputs)),
            sum(inside.values()),
            forward,
            temporary,
            passes,
        )

    def _backward(
        self, operands: list[Any], outputs: list[Tensor | None], counter: LiveBytes
    ) -> tuple[int, frozenset[int]]:
        """What the backward holds in between, and the operands whose gradient is that of an output."""
        starts = [value for value in outputs if value is not None and value.requires_grad]
        wanted = [(i, value) for i, value in enumerate(operands) if isinstance(value, Tensor) and value.requires_grad]
        if not starts or not wanted:
            return 0, frozenset()
        given = [torch.empty_like(value) for value in starts]
        counter.known |= {_address(gradient) for gradient in given}
        before = counter.live
        counter.peak = before
        with counter:
            gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
                starts, [value for _, value in wanted], given, allow_unused=True
            )
        shared = {_address(gradient) for gradient in given}
        fresh = {
            _address(gradient): gradient.untyped_storage().nbytes()
            for gradient in gradients
            if gradient is not None and _address(gradient) not in shared
        }
        passes = frozenset(
            i
            for (i, _), gradient in zip(wanted, gradients, strict=True)
            if gradient is not None and _address(gradient) in shared
        )
        return max(0, counter.peak - before - sum(fresh.values())), passes


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _flat(result: Any) -> list[Any]:
    return [item for part in result for item in _flat(part)] if isinstance(result, (tuple, list)) else [result]


def _on_cpu(target: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    changed = dict(kwargs)
    if "device" in changed:
        changed["device"] = torch.device("cpu")
    if target is torch.ops.aten.scaled_dot_product_attention.default and "dropout_p" in changed:
        changed["dropout_p"] = 0.0  # with dropout only the CPU falls back to the unfused kernel
    return changed
