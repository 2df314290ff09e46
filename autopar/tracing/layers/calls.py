"""Record the calls of equal layers during an export: the first ones in full, all others as one op each.

Calls of one kind of layer with equal arguments are equal. The first two run as they are, between a mark before and a
mark after; their ops must be the same. Any other call becomes one op, which `instantiate` replaces by the recorded
ops. The model runs its own code around the layers, so what it does with their results is traced as it is.

    layer_begins([x], 0)
    ... the ops of layer 0, which make y
    layer_ends([y], 0)
    layer_begins([y], 1)
    ... the ops of layer 1, which make z
    layer_ends([z], 1)
    u = equal_layer([z], [z], 2)[0]
    v = equal_layer([u], [z], 3)[0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from autopar.ir.exported import autocast_state
from autopar.tracing.layers.kinds import Attribute, LayerKind
from autopar.tracing.layers.ops import equal_layer_op, layer_marks

# Recorded calls of equal ones: a second one shows that the first was not special.
RECORDED = 2

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.memory_format, torch.layout)


class LayersDifferError(Exception):
    """Layers of a kind are not equal after all.

    Layers of `full` cannot be equal to others; those of `recorded` differ from the recorded ones; attributes of `read`
    must be the same in layers of one kind.
    """

    def __init__(
        self,
        reason: str,
        full: Iterable[str] = (),
        *,
        recorded: Iterable[str] = (),
        read: Iterable[Attribute] = (),
    ) -> None:
        super().__init__(reason)
        self.full = frozenset(full)
        self.recorded = frozenset(recorded)
        self.read = frozenset(read)


@dataclass(frozen=True)
class Results:
    """Results of a recorded call."""

    structure: TreeSpec
    # One by leaf: ("argument", position), ("new", position in `tensors`), or ("plain", value).
    leaves: tuple[tuple[str, Any], ...]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Signature:
    """Facts in which equal calls agree."""

    kind: LayerKind
    structure: TreeSpec
    leaves: tuple[Any, ...]
    grad_enabled: bool
    autocast: tuple[Any, ...]


@dataclass(eq=False)
class LayerCall:
    """Call of a layer in an export."""

    number: int
    layer: str
    signature: Signature
    tensors: Sequence[Tensor]
    # The recorded calls that it is equal to; empty for a recorded one.
    recorded: tuple[LayerCall, ...] = ()
    # Of a recorded call.
    results: Results | None = None


@dataclass(eq=False)
class LayerCalls:
    """Calls of the layers of an export, in order."""

    kinds: Mapping[str, LayerKind]
    # Layers that have their tensors: these can be recorded.
    whole: frozenset[str]
    calls: list[LayerCall] = field(default_factory=list)
    # True within the forward of the model, and within a recorded layer.
    is_open: bool = False
    is_recording: bool = False
    # Attributes that differ among the layers of a kind and were read in a recorded one.
    read: set[Attribute] = field(default_factory=set)
    # The first problem: code of the model may catch the exception.
    problem: LayersDifferError | None = None

    def differ(self, error: LayersDifferError) -> LayersDifferError:
        """Return the exception to raise for a problem: the first one."""
        self.problem = self.problem or error
        return self.problem

    def call(self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of a layer, recorded or by one op."""
        kind = self.kinds[path]
        if any(call.layer == path for call in self.calls):
            raise self.differ(LayersDifferError(f"{path} is called twice", kind.layers))
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        values = _values(leaves, tensors)
        if values is None:
            raise self.differ(LayersDifferError(f"{path} takes an object, which it may change", kind.layers))
        signature = Signature(kind, structure, values, torch.is_grad_enabled(), autocast_state())
        call = LayerCall(len(self.calls), path, signature, tensors)
        self.calls.append(call)
        equal = [other for other in self.calls if other.results is not None and other.signature == signature]
        if len(equal) < RECORDED:
            return self._record(call, forward, args, kwargs)
        call.recorded = tuple(equal)
        # A tensor that all recorded layers take may also reach them in another way than as an argument.
        if any(a is b and a is not c for a, b, c in zip(*(one.tensors for one in (*equal, call)), strict=True)):
            raise self.differ(LayersDifferError(f"{path} takes another tensor than the layers before", kind.layers))
        return self._as_before(call)

    def _record(
        self, call: LayerCall, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if call.layer not in self.whole:
            raise self.differ(LayersDifferError(f"{call.layer} has other arguments", recorded={call.layer}))
        kind = call.signature.kind
        versions = [tensor._version for tensor in call.tensors]
        begins, ends = layer_marks()
        begins(call.tensors, call.number)
        self.is_recording = True
        try:
            result = forward(*args, **kwargs)
        finally:
            self.is_recording = False
        if self.read:
            raise self.differ(LayersDifferError(f"{call.layer} reads an attribute of its own", read=self.read))
        if versions != [tensor._version for tensor in call.tensors]:
            raise self.differ(LayersDifferError(f"{call.layer} changes its input in place", kind.layers))
        call.results = _results(call, result)
        if call.results is None:
            raise self.differ(LayersDifferError(f"{call.layer} returns an object or a view", kind.layers))
        ends(list(call.results.tensors), call.number)
        return result

    def _as_before(self, call: LayerCall) -> Any:
        results = call.recorded[-1].results
        assert results is not None, "the call was recorded"
        made = equal_layer_op()(call.tensors, list(results.tensors), call.number)
        if [one.requires_grad for one in made] != [one.requires_grad for one in results.tensors]:
            raise self.differ(
                LayersDifferError(f"some results of {call.layer} have no gradient", call.signature.kind.layers)
            )
        sources = {"argument": call.tensors, "new": made}
        leaves = [value if word == "plain" else sources[word][value] for word, value in results.leaves]
        return tree_unflatten(leaves, results.structure)


def _values(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """Return the leaves of arguments as values: of tensors all but their data; None if a leaf is an object."""
    first = {id(tensor): position for position, tensor in reversed(list(enumerate(tensors)))}
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            layout = tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device
            found.append((first[id(leaf)], type(leaf), leaf.requires_grad, leaf.is_leaf, *layout))
        elif isinstance(leaf, _PLAIN):
            found.append((type(leaf), leaf))
        else:
            return None
    return tuple(found)


def _results(call: LayerCall, result: Any) -> Results | None:
    """Return the results of a recorded call; None if a leaf is an object, or shares memory with another tensor."""
    leaves, structure = tree_flatten(result)
    arguments = {id(tensor): position for position, tensor in reversed(list(enumerate(call.tensors)))}
    made: dict[int, int] = {}
    tensors: list[Tensor] = []
    found: list[tuple[str, Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            if not isinstance(leaf, _PLAIN):
                return None
            found.append(("plain", leaf))
        elif id(leaf) in arguments:
            found.append(("argument", arguments[id(leaf)]))
        else:
            if id(leaf) not in made:
                made[id(leaf)] = len(tensors)
                tensors.append(leaf)
            found.append(("new", made[id(leaf)]))
    # A change of a view in place would also be one of its base.
    given = {tensor.untyped_storage()._cdata for tensor in call.tensors}
    own = [tensor.untyped_storage()._cdata for tensor in tensors]
    if not own or len({*own, *given}) < len(own) + len(given):
        return None
    return Results(structure, tuple(found), tuple(tensors))
