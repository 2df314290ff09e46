"""A layout on one graph and mesh: shardings of its tensors, pinned choices of its ops, recomputation of its layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, TypeVar

import torch

from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode, NamedTensor
from autopar.mesh import SubMesh
from autopar.sharding.layout.check import check_layout
from autopar.sharding.layout.fill_open import fill_holes, groups_of, options_of, spell_out_same
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.matching import StatementIndex
from autopar.sharding.layout.parameter_storage import GatherPolicy, gather_policy_of, recompute_of, stored_splits
from autopar.sharding.layout.resolve import PinnedStates, SplitRequest, check_states, resolve, states_of
from autopar.sharding.layout.source import layout_error
from autopar.sharding.layout.syntax import Axes, Block, OpPin, Recompute
from autopar.sharding.op_pins import kinds_of, pin_of, with_constraints, words_of
from autopar.sharding.sharding import MICRO, Sharding, atoms_of

# Every tensor is resolved under every combination of picks, so their number bounds the time to build a model.
MAX_PICKS = 256

T = TypeVar("T")


@dataclass(frozen=True)
class StoredTensor:
    """Storage of an input, a parameter or a buffer, and the sharding in which ops find it."""

    stored: Sharding
    value: Sharding
    # Parameters only.
    use: SplitRequest | None = None
    gather_policy: GatherPolicy | None = None


class BoundLayout:
    """Layout on one graph and mesh, read by propagation and by the solver.

    Tensors with equal atoms that match the same statements share one result. With `constrained=False` the layout
    stands as given: unchecked, and without the pins of `autopar.constrain`. All errors come with the first question.
    """

    def __init__(self, graph: NamedGraph, given: Layout, axes: SubMesh, constrained: bool = True) -> None:
        self.graph = graph
        self.given = given
        self.axes = axes
        self.constrained = constrained
        self.groups = tuple(groups_of(given, list(graph.tensors)))  # the tensors of each `same`
        self._returned = frozenset(graph.outputs)
        self._results: dict[tuple[str, int], Any] = {}
        self._forms: dict[str, int] = {}
        self._numbers: dict[Hashable, int] = {}

    # -- the layout as a whole

    @cached_property
    def whole(self) -> Layout:
        """The given layout with the pins of the model, checked against graph and mesh."""
        if not self.constrained:
            return self.given
        whole = with_constraints(self.given, self.graph, self.axes)
        check_layout(whole, words_of(self.graph), self.axes)
        return whole

    @cached_property
    def layout(self) -> Layout:
        """The whole layout with a block for each tensor that takes axes over by `same`."""
        if not self.groups:
            return self.whole
        tensors = {tensor.name: (tensor, self.kinds(tensor)) for tensor in self.graph.tensors.values()}
        return spell_out_same(self.whole, tensors, self.axes)

    @property
    def is_empty(self) -> bool:
        return not self.layout.statements

    @cached_property
    def recompute(self) -> dict[str, Recompute]:
        """Levels of the layers that the layout names, by module path."""
        return recompute_of(self.layout, self.graph.ops_of_layers)

    def equivalence_key(self) -> Hashable | None:
        """Return a value that is equal for layouts of equal meaning.

        None where the layout pins ops, shares axes by `same`, or cannot be satisfied: these are never looked up.
        """
        if self.groups or any(isinstance(statement, OpPin) for statement in self.layout):
            return None
        tensors = self.graph.tensors.values()
        try:
            return (
                tuple(map(self.states, tensors)),
                tuple(self.request(one) if one.kind == "activation" else self.storage(one) for one in tensors),
                tuple((layer, level) for layer, level in self.recompute.items() if level != "none"),
            )
        except LayoutError:
            return None

    # -- one tensor

    def kinds(self, tensor: NamedTensor) -> tuple[str, ...]:
        """Return the kinds of scopes that may speak of a tensor, that of its storage first."""
        return kinds_of(tensor, self._returned)

    def states(self, tensor: NamedTensor) -> PinnedStates:
        """Return the axes along which a tensor is pinned to be partial or broadcast."""
        return self._once("states", tensor, lambda part: self._states(part, tensor))

    def request(self, tensor: NamedTensor, kind: str | None = None) -> SplitRequest:
        """Return the axes that split each atom of a tensor; None where open, as every `?` is."""
        kind = kind or self.kinds(tensor)[0]
        return self._once(f"request {kind}", tensor, lambda part: resolve(part, tensor, kind, self.axes))

    def requests(self, tensor: NamedTensor, kind: str | None = None) -> tuple[SplitRequest, ...]:
        """Return the distinct requests for a tensor under all picks for `?{tp, dp*tp}` and `tp?`."""
        # The common search has no layout: nothing is resolved for its thousands of tensors.
        if self.is_empty:
            return ((None,) * len(tensor.atoms),)
        kind = kind or self.kinds(tensor)[0]
        return self._once(
            f"requests {kind}",
            tensor,
            lambda _: self._picked(tensor, lambda part: resolve(part, tensor, kind, self.axes)),
        )

    def stored_requests(self, tensor: NamedTensor) -> tuple[SplitRequest, ...]:
        """Return the requests for the registered parameter, with `grad` and `opt` blocks."""
        if not self._has_storage_blocks:
            return self.requests(tensor, "param")
        return self._once(
            "stored", tensor, lambda _: self._picked(tensor, lambda part: stored_splits(part, tensor, self.axes))
        )

    def storage(self, tensor: NamedTensor) -> StoredTensor:
        """Return the storage of a tensor that no op produces, with open atoms whole."""
        return self._once("storage", tensor, lambda part: self._storage(part, tensor))

    def close(self, tensor: NamedTensor, produced: Sharding) -> tuple[Sharding, ...]:
        """Return the shardings that the layout allows for a value; open atoms stay as produced."""
        states = self.states(tensor)
        return tuple(close_request(request, states, produced) for request in self.requests(tensor))

    def allows_value(self, tensor: NamedTensor, sharding: Sharding) -> bool:
        """Return whether consumers may find a value in this sharding."""
        if self.is_empty:
            return True
        states = self.states(tensor)
        if states.span is not None and (sharding.partial, sharding.broadcast) != (states.partial, states.broadcast):
            return False
        return any_matches(self.requests(tensor), sharding)

    def allows_use(self, tensor: NamedTensor, sharding: Sharding, pinned: bool) -> bool:
        """Return whether an op, pinned or not, may take a stored tensor in this sharding."""
        if self.is_empty:
            return True
        if not self.states(tensor).broadcast <= sharding.broadcast:
            return False
        return pinned or tensor.kind != "param" or any_matches(self.requests(tensor, "use"), sharding)

    def constrains(self, tensor: NamedTensor) -> bool:
        """Return whether the layout restricts the sharding of a value at all."""
        if self.is_empty:
            return False
        if any(tensor.name in group for group in self.groups) or self.states(tensor).span is not None:
            return True
        return any(
            axes is not None and atom.names
            for request in self.requests(tensor)
            for axes, atom in zip(request, tensor.atoms, strict=True)
        )

    def stored_key(self, tensor: NamedTensor) -> Hashable:
        """Return a value that is equal for tensors that the layout restricts equally."""
        if self.is_empty:
            return None
        states = self.states(tensor)
        stored = self.stored_requests(tensor) if tensor.kind == "param" else ()
        return self.requests(tensor), stored, states.partial, states.broadcast, states.span is not None

    # -- one op

    def pin(self, node: NamedNode) -> OpPin | None:
        """Return the pin of an op's choice."""
        return pin_of(self._op_parts.about(node.name), node)

    def pinned_ops(self) -> frozenset[str]:
        """Return the ops whose choices are pinned."""
        return frozenset(node.name for node in self.graph.nodes if self.pin(node) is not None)

    def op_key(self, node: NamedNode) -> Hashable:
        """Return a value that is equal for ops that the layout restricts equally."""
        if self.is_empty:
            return None
        tensors = (self.graph.tensors[name] for name in dict.fromkeys(node.operands) if name is not None)
        # Requests for values are in the keys of the values.
        uses = ((self.requests(t, "use"), self.states(t).broadcast) for t in tensors if t.kind != "activation")
        pin = self.pin(node)
        return tuple(uses), None if pin is None else pin.choice

    # -- results by the part of the layout about a tensor

    @cached_property
    def _tensor_layout(self) -> Layout:
        return Layout(tuple(one for one in self.layout if not isinstance(one, OpPin)), self.layout.name)

    @cached_property
    def _parts(self) -> StatementIndex:
        return StatementIndex(self._tensor_layout)

    @cached_property
    def _op_parts(self) -> StatementIndex:
        return StatementIndex(Layout(tuple(one for one in self.layout if isinstance(one, OpPin)), self.layout.name))

    @cached_property
    def _parts_by_pick(self) -> tuple[StatementIndex, ...]:
        # Pins of ops have no `?`, so these are the decisions of the whole layout.
        options = options_of(self._tensor_layout, self.axes)
        count = prod(map(len, options))
        if count > MAX_PICKS:
            raise LayoutError(
                "E7",
                f"E7: the layout leaves {count:,} ways to pick from its '?{{...}}' and 'axis?'\n"
                f"fix: at most {MAX_PICKS:,}: choose some of them, or leave some open with '?'",
            )
        if not options:
            return (self._parts,)
        return tuple(StatementIndex(fill_holes(self._tensor_layout, self.axes, picks)) for picks in product(*options))

    @cached_property
    def _has_storage_blocks(self) -> bool:
        blocks = (statement for statement in self.layout if isinstance(statement, Block))
        return any(scope.kind in ("grad", "opt") for block in blocks for scope in block.scopes)

    def _picked(self, tensor: NamedTensor, resolved: Callable[[Layout], SplitRequest]) -> tuple[SplitRequest, ...]:
        # A pick that this tensor cannot satisfy is left out; the layout is wrong only if no pick is left.
        found: dict[SplitRequest, None] = {}
        refused: LayoutError | None = None
        for parts in self._parts_by_pick:
            try:
                found[resolved(parts.about(tensor.name))] = None
            except LayoutError as error:
                refused = error
        if not found and refused is not None:
            raise refused
        return tuple(found)

    def _once(self, question: str, tensor: NamedTensor, answer: Callable[[Layout], T]) -> T:
        part = self._parts.about(tensor.name)
        form = self._forms.get(tensor.name)
        if form is None:
            # Everything of a tensor that an answer depends on, but for its name in errors, which are not stored.
            cut = tensor.atoms, len(tensor.shape), tensor.requires_grad, tensor.dtype is torch.bool
            # The index gives one object per part, so that its identity stands for its statements.
            key = id(part), tensor.kind, tensor.name in self._returned, cut
            form = self._forms[tensor.name] = self._numbers.setdefault(key, len(self._numbers))
        if (question, form) not in self._results:
            self._results[question, form] = answer(part)
        found: T = self._results[question, form]
        return found

    def _states(self, part: Layout, tensor: NamedTensor) -> PinnedStates:
        states = states_of(part, tensor.name)
        if states.partial and (tensor.kind != "activation" or tensor.dtype is torch.bool):
            why = "booleans have no sum" if tensor.dtype is torch.bool else f"it is a {tensor.kind}, no result of an op"
            raise layout_error(
                "E5",
                f"{tensor.name} cannot be pinned to be partial: {why}",
                "drop '+ partial'",
                states.span,
            )
        for kind in self.kinds(tensor) if states.axes else ():
            names = (atom.names[-1] if atom.names else "1" for atom in tensor.atoms)
            splits = (axes or () for axes in self.requests(tensor, kind)[0])
            check_states(states, tensor.name, list(zip(names, splits, strict=True)))
        # Broadcast differs from replicated in the gradient only.
        return states if tensor.requires_grad else replace(states, broadcast=frozenset())

    def _storage(self, part: Layout, tensor: NamedTensor) -> StoredTensor:
        broadcast = self.states(tensor).broadcast
        held = _unsplit_where_open(self.request(tensor))
        if tensor.kind in ("buffer", "constant"):
            held = Sharding.replicated(atoms_of(tensor))  # small, and equal on all ranks
        if tensor.kind != "param":
            return StoredTensor(held.without([MICRO]), replace(held, broadcast=broadcast))
        stored = Sharding(stored_splits(part, tensor, self.axes))
        use = self.request(tensor, "use")
        value = _unsplit_where_open(use)
        gather_policy = gather_policy_of(part, tensor, value.splits, self.axes)
        return StoredTensor(stored, replace(value, broadcast=broadcast), use, gather_policy)


def matches(request: SplitRequest, splits: tuple[Axes, ...]) -> bool:
    """Return whether splits agree with a request wherever it is not open."""
    return all(want is None or want == have for want, have in zip(request, splits, strict=True))


def any_matches(requests: Iterable[SplitRequest], sharding: Sharding) -> bool:
    """Return whether a sharding agrees with one of several requests."""
    return any(matches(request, sharding.splits) for request in requests)


def close_request(request: SplitRequest, states: PinnedStates, produced: Sharding) -> Sharding:
    """Return the sharding of a request, with open atoms as produced."""
    claimed = {axis for axes in request if axes for axis in axes} | states.axes
    splits = tuple(
        tuple(axis for axis in produced.splits[i] if axis not in claimed) if axes is None else axes
        for i, axes in enumerate(request)
    )
    return Sharding(splits, states.partial, states.broadcast)


def _unsplit_where_open(request: SplitRequest) -> Sharding:
    return Sharding(tuple(axes or () for axes in request))
