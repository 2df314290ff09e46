"""What a layout demands of each tensor and op; what it leaves open is for the solver."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode, NamedTensor
from autopar.mesh import SubMesh
from autopar.sharding.layout.check import check_layout
from autopar.sharding.layout.gather_policy import recompute_said
from autopar.sharding.layout.holes import filled, options_of
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.parameter_storage import storage_of
from autopar.sharding.layout.pinned_states import PinnedStates, check_states, states_of
from autopar.sharding.layout.resolve import SplitRequest, resolve
from autopar.sharding.layout.same import groups_of, shared
from autopar.sharding.layout.syntax import Block, OpPin
from autopar.sharding.op_pins import pin_of, with_constraints, words_of
from autopar.sharding.options import Recompute
from autopar.sharding.sharding import Sharding

__all__ = ["SearchLayout", "matches"]

MOST_PICKS = 256


def matches(wanted: SplitRequest, splits: tuple[tuple[str, ...], ...]) -> bool:
    """Whether splits are as wanted, wherever something is."""
    return all(want is None or want == have for want, have in zip(wanted, splits, strict=True))


def _any_matches(wanted: tuple[SplitRequest, ...], splits: tuple[tuple[str, ...], ...]) -> bool:
    return any(matches(one, splits) for one in wanted)


@dataclass(frozen=True)
class SearchLayout:
    """A layout, asked about one graph on one mesh."""

    graph: NamedGraph
    axes: SubMesh
    given: Layout
    free: bool = False
    """Whether what the model itself says does not count."""
    known: dict[Any, tuple[SplitRequest, ...]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def layout(self) -> Layout:
        """With what the model says, checked, and with what tensors share spelled out."""
        if self.free:
            return self.given
        whole = with_constraints(self.given, self.graph, self.axes)
        check_layout(whole, words_of(self.graph), self.axes)
        tensors = {tensor.name: (tensor, self.kinds(tensor)) for tensor in self.graph.tensors.values()}
        return shared(whole, tensors, self.axes)

    @cached_property
    def filled(self) -> tuple[Layout, ...]:
        """The layout, with every pick for what it leaves to choose from: `?{tp, dp*tp}`, `tp?`."""
        options = options_of(self.layout, self.axes)
        if prod(map(len, options)) > MOST_PICKS:
            raise LayoutError(
                "E7",
                f"E7: the layout leaves {prod(map(len, options)):,} ways to pick from its '?{{...}}' and 'axis?'\n"
                f"fix: at most {MOST_PICKS:,}: say some of them, or leave some wholly open with '?'",
            )
        return tuple(filled(self.layout, self.axes, picks) for picks in product(*options))

    @cached_property
    def tied(self) -> frozenset[str]:
        """The tensors that are to share a layout with another."""
        return frozenset(name for group in groups_of(self.given, list(self.graph.tensors)) for name in group)

    @cached_property
    def recompute(self) -> dict[str, Recompute]:
        """What is said of repeated layers."""
        if self.is_empty:
            return {}
        return recompute_said(self.layout, (path for repeat in self.graph.repeats for path in repeat.module_paths))

    @property
    def is_empty(self) -> bool:
        return not self.layout.statements

    def kinds(self, tensor: NamedTensor) -> tuple[str, ...]:
        """The kinds of rules that say how a tensor is laid out."""
        if tensor.kind == "activation":
            return ("output",) if tensor.name in self.graph.outputs else ("act",)
        return {"param": ("param", "use"), "input": ("input",)}.get(tensor.kind, ("buffer",))

    def wanted(self, tensor: NamedTensor, kind: str | None = None) -> tuple[SplitRequest, ...]:
        """For each atom the axes that are to split it; None where that is open. Several, where there are picks."""
        if self.is_empty:
            return ((None,) * len(tensor.atoms),)
        kind = kind or self.kinds(tensor)[0]
        key = tensor.name, kind
        if key not in self.known:
            self.known[key] = self._picked(lambda layout: resolve(layout, tensor, kind, self.axes))
        return self.known[key]

    def _picked(self, wanted: Callable[[Layout], SplitRequest]) -> tuple[SplitRequest, ...]:
        """What each pick comes to, but for those that cannot be had; an error where none can."""
        found: dict[SplitRequest, None] = {}
        refused: LayoutError | None = None
        for layout in self.filled:
            try:
                found[wanted(layout)] = None
            except LayoutError as error:
                refused = error
        if not found and refused is not None:
            raise refused
        return tuple(found)

    def states(self, tensor: NamedTensor) -> PinnedStates:
        states = states_of(self.layout, tensor.name)
        for kind in self.kinds(tensor) if states.axes else ():
            names = (atom.names[-1] if atom.names else "1" for atom in tensor.atoms)
            splits = (axes or () for axes in self.wanted(tensor, kind)[0])
            check_states(states, tensor.name, list(zip(names, splits, strict=True)))
        return states if tensor.requires_grad else replace(states, broadcast=frozenset())

    def value_agrees(self, tensor: NamedTensor, layout: Sharding) -> bool:
        """Whether consumers may find a value in this layout."""
        if self.is_empty:
            return True
        states = self.states(tensor)
        if states.span is not None and (layout.partial, layout.broadcast) != (states.partial, states.broadcast):
            return False
        return _any_matches(self.wanted(tensor), layout.splits)

    def is_bound(self, tensor: NamedTensor) -> bool:
        """Whether something is demanded of a value."""
        if self.is_empty:
            return False
        if tensor.name in self.tied or self.states(tensor).span is not None:
            return True
        return not all(
            want is None or not tensor.atoms[i].names for wanted in self.wanted(tensor) for i, want in enumerate(wanted)
        )

    def stored(self, tensor: NamedTensor) -> tuple[SplitRequest, ...]:
        """Of a parameter, as it is registered; what `grad` and `opt` say counts as a whole."""
        kinds = {scope.kind for statement in self.layout if isinstance(statement, Block) for scope in statement.scopes}
        if kinds & {"grad", "opt"}:
            return self._picked(lambda layout: storage_of(layout, tensor, self.axes)[2])
        return self.wanted(tensor, "param")

    def pin(self, node: NamedNode) -> OpPin | None:
        return None if self.is_empty else pin_of(self.layout, node)

    def allows_use(self, tensor: NamedTensor, layout: Sharding, pinned: bool) -> bool:
        """Whether an op may take what is held in this layout."""
        if self.is_empty:
            return True
        if not self.states(tensor).broadcast <= layout.broadcast:
            return False
        return pinned or tensor.kind != "param" or _any_matches(self.wanted(tensor, "use"), layout.splits)

    def closed(self, tensor: NamedTensor, produced: Sharding) -> tuple[Sharding, ...]:
        """The layouts that are demanded of a value; what is left open stays as it comes."""
        states = self.states(tensor)
        return tuple(_closed(wanted, states, produced) for wanted in self.wanted(tensor))

    # -- what tells apart tensors and ops of which different things are demanded

    def token(self, node: NamedNode) -> Hashable:
        if self.is_empty:
            return None
        held = [self.graph.tensors[name] for name in dict.fromkeys(node.operands) if name is not None]
        pin = pin_of(self.layout, node)
        uses = ((self.wanted(t, "use"), self.states(t).broadcast) for t in held if t.kind != "activation")
        return tuple(uses), None if pin is None else pin.choice

    def stored_token(self, tensor: NamedTensor) -> Hashable:
        if self.is_empty:
            return None
        states = self.states(tensor)
        stored = self.stored(tensor) if tensor.kind == "param" else ()
        return self.wanted(tensor), stored, states.partial, states.broadcast, states.span is not None


def _closed(wanted: SplitRequest, states: PinnedStates, produced: Sharding) -> Sharding:
    claimed = {axis for axes in wanted if axes for axis in axes} | states.axes
    splits = tuple(
        tuple(axis for axis in produced.splits[i] if axis not in claimed) if axes is None else axes
        for i, axes in enumerate(wanted)
    )
    return Sharding(splits, states.partial, states.broadcast)
