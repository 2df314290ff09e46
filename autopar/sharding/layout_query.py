"""What a layout asks of the tensors of a graph: where each is, how it is held, what states it is pinned to.

Tensors that are cut alike, and of which the same statements speak, are asked the same: it is worked out once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode, NamedTensor
from autopar.mesh import SubMesh
from autopar.sharding.atoms import atoms_of
from autopar.sharding.layout.gather_policy import GatherPolicy, gather_policy_of, recompute_of
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.parameter_storage import stored_splits
from autopar.sharding.layout.pinned_states import PinnedStates, check_states, states_of
from autopar.sharding.layout.resolve import SplitRequest, resolve
from autopar.sharding.layout.same import groups_of, shared
from autopar.sharding.layout.source import layout_error
from autopar.sharding.layout.statement_index import StatementIndex
from autopar.sharding.layout.syntax import OpPin, Same
from autopar.sharding.op_pins import pin_of
from autopar.sharding.options import Recompute
from autopar.sharding.sharding import Sharding

__all__ = ["BoundLayout", "StoredTensor"]

T = TypeVar("T")


@dataclass(frozen=True)
class StoredTensor:
    """How an input, a parameter or a buffer is held, and how ops find it."""

    stored: Sharding
    value: Sharding
    use: SplitRequest | None = None
    """Of a parameter, what the layout says of its use."""
    gather_policy: GatherPolicy | None = None


class BoundLayout:
    """One layout, asked about the tensors and ops of one graph on one mesh."""

    def __init__(self, graph: NamedGraph, layout: Layout, axes: SubMesh) -> None:
        self.graph = graph
        self.axes = axes
        self.groups: tuple[tuple[str, ...], ...] = ()
        """The tensors of each `same`."""
        self.returned = frozenset(graph.outputs)
        if any(isinstance(statement, Same) for statement in layout):
            tensors = {tensor.name: (tensor, self.kinds(tensor)) for tensor in graph.tensors.values()}
            self.groups = tuple(groups_of(layout, list(tensors)))
            layout = shared(layout, tensors, axes)
        self.layout = layout
        self._of_tensors = StatementIndex(
            Layout(tuple(one for one in layout if not isinstance(one, OpPin)), layout.name)
        )
        self._of_ops = StatementIndex(Layout(tuple(one for one in layout if isinstance(one, OpPin)), layout.name))
        self._known: dict[tuple[str, int], Any] = {}
        self._numbers: dict[str, int] = {}
        self._forms: dict[Hashable, int] = {}

    def kinds(self, tensor: NamedTensor) -> tuple[str, ...]:
        """The kinds of rules that say how a tensor is laid out."""
        if tensor.kind == "activation":
            return ("output",) if tensor.name in self.returned else ("act",)
        return {"param": ("param", "use"), "input": ("input",)}.get(tensor.kind, ("buffer",))

    def pin(self, node: NamedNode) -> OpPin | None:
        """The pin of an op's choice."""
        return pin_of(self._of_ops.about(node.name), node)

    def pinned(self) -> frozenset[str]:
        """The ops whose choices are pinned."""
        return frozenset(node.name for node in self.graph.nodes if self.pin(node) is not None)

    def recompute(self) -> dict[str, Recompute]:
        """What repeated layers compute again."""
        return recompute_of(self.layout, (path for repeat in self.graph.repeats for path in repeat.module_paths))

    def everything(self) -> Hashable | None:
        """Equal for layouts that come to the same. None where that is not known: where ops are pinned, where tensors
        take over from others, and where something is asked that cannot be had."""
        if self.groups or any(isinstance(statement, OpPin) for statement in self.layout):
            return None
        tensors = self.graph.tensors.values()
        try:
            return (
                tuple(map(self.states, tensors)),
                tuple(self.wanted(one) if one.kind == "activation" else self.held(one) for one in tensors),
                tuple(self.recompute().items()),
            )
        except LayoutError:
            return None

    def states(self, tensor: NamedTensor) -> PinnedStates:
        """The axes along which a tensor is pinned to be partial, or broadcast."""
        return self._once(self._states, tensor)

    def held(self, tensor: NamedTensor) -> StoredTensor:
        """Of a tensor that is no result of an op."""
        return self._once(self._held, tensor)

    def wanted(self, tensor: NamedTensor) -> SplitRequest:
        """For each atom of a result the axes that split it; None where that is open."""
        return self._once(self._wanted, tensor)

    def _once(self, make: Callable[[Layout, NamedTensor], T], tensor: NamedTensor) -> T:
        key = make.__name__, self._alike(tensor)
        if key not in self._known:
            self._known[key] = make(self._of_tensors.about(tensor.name), tensor)
        found: T = self._known[key]
        return found

    def _alike(self, tensor: NamedTensor) -> int:
        """Equal for tensors that are asked the same."""
        found = self._numbers.get(tensor.name)
        if found is None:
            part = self._of_tensors.about(tensor.name)
            cut = tensor.atoms, len(tensor.shape), tensor.requires_grad, tensor.dtype is torch.bool
            key = id(part), tensor.kind, tensor.name in self.returned, cut
            found = self._numbers[tensor.name] = self._forms.setdefault(key, len(self._forms))
        return found

    def _states(self, part: Layout, tensor: NamedTensor) -> PinnedStates:
        states = states_of(part, tensor.name)
        if states.partial and (tensor.kind != "activation" or tensor.dtype is torch.bool):
            what = "truths do" if tensor.dtype is torch.bool else f"what is held as {tensor.kind} does"
            raise layout_error(
                "E5",
                f"{tensor.name} cannot be pinned to be partial: {what} not add up",
                "drop '+ partial'",
                states.span,
            )
        for kind in self.kinds(tensor) if states.axes else ():
            wanted = resolve(part, tensor, kind, self.axes)
            names = (atom.names[-1] if atom.names else "1" for atom in tensor.atoms)
            check_states(states, tensor.name, [(name, axes or ()) for name, axes in zip(names, wanted, strict=True)])
        return states if tensor.requires_grad else replace(states, broadcast=frozenset())

    def _held(self, part: Layout, tensor: NamedTensor) -> StoredTensor:
        broadcast = self.states(tensor).broadcast
        held = _closed(resolve(part, tensor, self.kinds(tensor)[0], self.axes))
        if tensor.kind in ("buffer", "constant"):
            held = Sharding.replicated(atoms_of(tensor))  # small, and equal on all ranks
        if tensor.kind != "param":
            return StoredTensor(held, replace(held, broadcast=broadcast))
        stored = Sharding(stored_splits(part, tensor, self.axes))
        use = resolve(part, tensor, "use", self.axes)
        value = _closed(use)
        gather_policy = gather_policy_of(part, tensor, value.splits, self.axes)
        return StoredTensor(stored, replace(value, broadcast=broadcast), use, gather_policy)

    def _wanted(self, part: Layout, tensor: NamedTensor) -> SplitRequest:
        (kind,) = self.kinds(tensor)
        return resolve(part, tensor, kind, self.axes)


def _closed(wanted: SplitRequest) -> Sharding:
    return Sharding(tuple(axes or () for axes in wanted))
