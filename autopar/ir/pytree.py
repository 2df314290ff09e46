"""Flatten any nested value into tensors and a frozen description, and rebuild it.

`torch.utils._pytree` needs every class registered. Models pass dataclasses, `ModelOutput`s and cache objects that
nobody registered. Here the children of an object are its attributes. A list, dict or object that occurs twice is one
container, so cycles end.
"""

from __future__ import annotations

import array
import collections
import copy
import enum
import math
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


class UnsupportedValueError(Exception):
    """A value contains an item, at `path`, that cannot be flattened."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path
        self.problem = problem


@dataclass(frozen=True)
class TensorLeaf:
    """Tensor number `index` of the flattened value."""

    index: int


@dataclass(frozen=True, eq=False)
class Constant:
    """Value without tensors, kept as it is."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and _equal(self.value, other.value)

    # The value may be unhashable.
    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Shared:
    """Second occurrence of the container with this number in the same value."""

    number: int


@dataclass(frozen=True)
class Original:
    """Container of the arguments, by its number there, in a result of the call."""

    number: int


@dataclass(frozen=True)
class Items:
    """Tuple (also named) or list."""

    kind: type
    children: tuple[Node, ...]
    # None for tuples: they are values, not containers that a call can change.
    number: int | None = None


@dataclass(frozen=True)
class Mapped:
    """Dict; `template` is an empty one of the same class with the same attributes."""

    kind: type
    keys: tuple[Any, ...]
    children: tuple[Node, ...]
    number: int
    template: Any = field(compare=False, repr=False)


@dataclass(frozen=True)
class Object(Mapped):
    """Any other object with tensors, or an argument whose attributes the call may set; keys name attributes."""


Node = TensorLeaf | Constant | Shared | Original | Items | Mapped


@dataclass(frozen=True)
class Flattened:
    """Flattened value: its tensors, the path of each, its structure, and its containers by number."""

    tensors: tuple[torch.Tensor, ...]
    paths: tuple[str, ...]
    node: Node
    containers: tuple[Any, ...]


def flatten(
    value: Any, *, deep: bool, originals: Mapping[int, int] | None = None, kept: Collection[int] = ()
) -> Flattened:
    """Flatten a value into tensors and a description of its structure.

    `deep`: flatten objects without tensors too (arguments, which a call may fill), else only those whose id is in
    `kept`. `originals`: id of a container of the arguments -> its number; such a container is not entered.
    """
    flattener = _Flattener(deep, originals or {}, kept)
    node = flattener.visit(value, "")
    return Flattened(tuple(flattener.tensors), tuple(flattener.paths), node, tuple(flattener.containers))


def attributes(value: Any) -> dict[str, Any]:
    """Return all attributes that an instance stores, in `__dict__` or in slots."""
    found = {}
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    found.update(getattr(value, "__dict__", {}))
    return found


# Objects with attributes that are no data of a call: they count as one constant.
_OPAQUE = (
    *(torch.nn.Module, type, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(types.ModuleType, enum.Enum, torch.dtype, torch.device, torch.Generator),
)
# Containers without attributes that the caller may change between two calls.
_MUTABLE = (set, bytearray, collections.deque, array.array)


class _Flattener:
    def __init__(self, deep: bool, originals: Mapping[int, int], kept: Collection[int]) -> None:
        self.deep = deep
        self.originals = originals
        self.kept = kept
        # Number of containers so far that must not become part of a constant.
        self.references = 0
        self.tensors: list[torch.Tensor] = []
        self.paths: list[str] = []
        self.containers: list[Any] = []
        self.numbers: dict[int, int] = {}

    def visit(self, value: Any, path: str) -> Node:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            self.paths.append(path)
            return TensorLeaf(len(self.tensors) - 1)
        if value is None or type(value) in (bool, int, float, complex, str, bytes):
            return Constant(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise UnsupportedValueError(path, "a number that depends on the data in a tensor")
        if isinstance(value, tuple):
            names = getattr(value, "_fields", range(len(value)))
            children = self._children(zip(names, value, strict=True), path)
            # A tuple without tensors or containers is one constant, which compares faster.
            frozen = all(isinstance(child, Constant) for child in children)
            return Constant(value) if frozen else Items(type(value), children)
        if id(value) in self.kept:
            self.references += 1
        if id(value) in self.originals:
            self.references += 1
            return Original(self.originals[id(value)])
        if id(value) in self.numbers:
            return Shared(self.numbers[id(value)])
        if isinstance(value, list):
            number = self._enter(value)
            return Items(type(value), self._children(enumerate(value), path), number)
        if isinstance(value, dict):
            number = self._enter(value)
            children = self._children(value.items(), path)
            return Mapped(type(value), tuple(value), children, number, _template(value, dict.fromkeys(value)))
        return self._other(value, path)

    def _children(self, items: Iterable[tuple[Any, Any]], path: str) -> tuple[Node, ...]:
        return tuple(self.visit(child, _join(path, name)) for name, child in items)

    def _enter(self, value: Any) -> int:
        number = len(self.containers)
        self.containers.append(value)
        self.numbers[id(value)] = number
        return number

    def _other(self, value: Any, path: str) -> Node:
        unordered = isinstance(value, (set, frozenset))
        if (unordered or isinstance(value, collections.deque)) and any(isinstance(x, torch.Tensor) for x in value):
            why = "which has no order: use a tuple or a dict" if unordered else "which is not searched: use a list"
            raise UnsupportedValueError(path, f"a {type(value).__name__} of tensors, {why}")
        if isinstance(value, Iterator):
            raise UnsupportedValueError(path, f"a {type(value).__name__}, which can be read only once: use a tuple")
        if isinstance(value, _OPAQUE):
            return Constant(value)
        stored = attributes(value)
        if not stored or hasattr(value, "__array__"):
            # A snapshot, because later calls are compared with it and the caller may change the original.
            changes = isinstance(value, _MUTABLE) or hasattr(value, "__array__")
            return Constant(copy.copy(value) if changes else value)
        before, first = len(self.tensors) + self.references, len(self.containers)
        number = self._enter(value)
        children = self._children(stored.items(), path)
        if not self.deep and id(value) not in self.kept and len(self.tensors) + self.references == before:
            # No tensors below: a constant after all, so its containers lose their numbers.
            for container in self.containers[first:]:
                del self.numbers[id(container)]
            del self.containers[first:]
            return Constant(value)
        return Object(type(value), tuple(stored), children, number, _template(value, dict.fromkeys(stored)))


def _template(value: Any, nothing: dict[Any, None]) -> Any:
    """Return a shallow copy that keeps none of the children alive (they may be large, or fake tensors)."""
    if type(value) is dict:
        return {}
    empty = copy.copy(value)
    assign(empty, nothing)
    return empty


def assign(container: Any, children: Mapping[Any, Any]) -> None:
    """Set the items of a list or dict, or the attributes of an object, to `children`; remove the others."""
    if isinstance(container, list):
        container[:] = children.values()
    elif isinstance(container, dict):
        # Item by item: subclasses may override item assignment, but not `clear` and `update`.
        for key in [key for key in container if key not in children]:
            del container[key]
        for key, child in children.items():
            container[key] = child
    else:
        for name in [name for name in attributes(container) if name not in children]:
            object.__delattr__(container, name)
        # Frozen dataclasses refuse `setattr`.
        for name, child in children.items():
            object.__setattr__(container, name, child)


def shallow_state(container: Any) -> dict[Any, Any]:
    """Return the children of a container by index, key or attribute name, as `assign` takes them."""
    if isinstance(container, list):
        return dict(enumerate(container))
    return dict(container) if isinstance(container, dict) else attributes(container)


def unflatten(
    node: Node,
    tensors: Sequence[torch.Tensor],
    originals: Sequence[Any] = (),
    reused: Mapping[int, Any] | None = None,
) -> tuple[Any, dict[int, Any]]:
    """Return the value that `flatten` described, with other tensors, and its containers by number.

    `reused`: number -> a container to fill instead of a new one.
    """
    made: dict[int, Any] = {}
    filled = reused or {}

    def build(node: Node) -> Any:
        if isinstance(node, TensorLeaf):
            return tensors[node.index]
        if isinstance(node, Constant):
            return node.value
        if isinstance(node, Shared):
            return made[node.number]
        if isinstance(node, Original):
            return originals[node.number]
        if isinstance(node, Items):
            return build_items(node)
        container = copy.copy(node.template) if node.number not in filled else filled[node.number]
        # Before the children, which may contain it.
        made[node.number] = container
        assign(container, {key: build(child) for key, child in zip(node.keys, node.children, strict=True)})
        return container

    def build_items(node: Items) -> Any:
        if node.number is None:
            children = [build(child) for child in node.children]
            if node.kind is tuple:
                return tuple(children)
            make: Callable[[Any], Any] = getattr(node.kind, "_make", node.kind)
            return make(children)
        items: list[Any] = filled[node.number] if node.number in filled else node.kind()
        made[node.number] = items
        items[:] = [build(child) for child in node.children]
        return items

    return build(node), made


def difference(traced: Node, given: Node, path: str = "") -> str | None:
    """Return the first difference in the structure of two values as text; None if there is none."""
    if traced == given:
        return None
    containers = (Items, Mapped)
    if isinstance(traced, containers) and isinstance(given, containers) and traced.kind is given.kind:
        mine, yours = (range(len(n.children)) if isinstance(n, Items) else n.keys for n in (traced, given))
        if mine != yours:
            where = f"{path}: " if path else ""
            one, other = (
                "items " + ", ".join(map(str, names)) if names else "nothing in it" for names in (mine, yours)
            )
            return f"{where}traced with {one}, called with {other}"
        for name, a, b in zip(mine, traced.children, given.children, strict=True):
            if (found := difference(a, b, _join(path, name))) is not None:
                return found
    return f"{path}: traced with {describe(traced)}, called with {describe(given)}"


def describe(node: Node) -> str:
    """Return the kind of a node as words for messages."""
    if isinstance(node, TensorLeaf):
        return "a tensor"
    if isinstance(node, Constant):
        return repr(node.value)
    if isinstance(node, (Items, Mapped)):
        return f"a {node.kind.__name__}"
    return "an object that it also holds elsewhere"


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _equal(a: object, b: object) -> bool:
    """Return True if a model cannot distinguish the two: 1 is not True, and 0.0 is not -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, float) and isinstance(b, float):
        # Two NaNs are equal here: a call with NaN is the call that was traced with NaN.
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if isinstance(a, complex) and isinstance(b, complex):
        return _equal(a.real, b.real) and _equal(a.imag, b.imag)
    if a is b:
        return True
    # Numpy's `==` compares element by element.
    if hasattr(a, "__array__"):
        same_kind = getattr(a, "shape", None) == getattr(b, "shape", None) and a.dtype == b.dtype  # type: ignore[attr-defined]
        return same_kind and a.tobytes() == b.tobytes()  # type: ignore[attr-defined]
    return bool(a == b)
