"""Take any nested value apart into tensors and a frozen description, and put it together again.

`torch.utils._pytree` needs every class registered; models pass dataclasses, `ModelOutput`s and cache objects that
nobody registered. Here an object is its attributes, and a list, dict or object met twice is one object (so cycles
end, too).
"""

from __future__ import annotations

import array
import collections
import copy
import enum
import math
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


class UnsupportedValueError(Exception):
    """A value that holds something which cannot be taken apart; `path` says where."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path
        self.problem = problem


@dataclass(frozen=True)
class TensorLeaf:
    index: int


@dataclass(frozen=True, eq=False)
class Constant:
    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and _equal(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]  # the value may be unhashable


@dataclass(frozen=True)
class Shared:
    """The container with this number in the same value, met again."""

    number: int


@dataclass(frozen=True)
class Original:
    """A container of the call's arguments (with its number there), met in what the call left behind."""

    number: int


@dataclass(frozen=True)
class Items:
    """A tuple (also named) or a list."""

    kind: type
    children: tuple[Node, ...]
    number: int | None = None


@dataclass(frozen=True)
class Mapped:
    """A dict; `template` is an empty one of the same class with the same attributes."""

    kind: type
    keys: tuple[Any, ...]
    children: tuple[Node, ...]
    number: int
    template: Any = field(compare=False, repr=False)


@dataclass(frozen=True)
class Object:
    """Any other object that holds tensors, or an argument whose attributes the call may set."""

    kind: type
    names: tuple[str, ...]
    children: tuple[Node, ...]
    number: int
    template: Any = field(compare=False, repr=False)


Node = TensorLeaf | Constant | Shared | Original | Items | Mapped | Object


@dataclass(frozen=True)
class Flattened:
    tensors: tuple[torch.Tensor, ...]
    paths: tuple[str, ...]
    node: Node
    containers: tuple[Any, ...]


def flatten(
    value: Any, *, deep: bool, originals: Mapping[int, int] | None = None, kept: Collection[int] = ()
) -> Flattened:
    """Take `value` apart.

    `deep`: objects without tensors are taken apart too (arguments, which a call may fill), else only those whose id is
    in `kept`. `originals`: id of a container of the arguments -> its number; such a container is not entered.
    """
    flattener = _Flattener(deep, originals or {}, kept)
    node = flattener.visit(value, "")
    return Flattened(tuple(flattener.tensors), tuple(flattener.paths), node, tuple(flattener.containers))


def attributes(value: Any) -> dict[str, Any]:
    """All attributes an instance stores, in `__dict__` or in slots."""
    found = {}
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    found.update(getattr(value, "__dict__", {}))
    return found


_OPAQUE = (
    torch.nn.Module,
    type,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Generator,
)


_CHANGING = (set, bytearray, collections.deque, array.array)
"""Containers without attributes, which the caller may change between two calls."""


class _Flattener:
    def __init__(self, deep: bool, originals: Mapping[int, int], kept: Collection[int]) -> None:
        self.deep = deep
        self.originals = originals
        self.kept = kept
        self.references = 0  # how many containers that must not be frozen were met
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
            return self._tuple(value, path)
        if id(value) in self.kept:
            self.references += 1
        if id(value) in self.originals:
            self.references += 1
            return Original(self.originals[id(value)])
        if id(value) in self.numbers:
            return Shared(self.numbers[id(value)])
        if isinstance(value, list):
            number = self._enter(value)
            children = tuple(self.visit(child, _join(path, i)) for i, child in enumerate(value))
            return Items(type(value), children, number)
        if isinstance(value, dict):
            return self._dict(value, path)
        return self._other(value, path)

    def _enter(self, value: Any) -> int:
        number = len(self.containers)
        self.containers.append(value)
        self.numbers[id(value)] = number
        return number

    def _tuple(self, value: tuple[Any, ...], path: str) -> Node:
        names = getattr(value, "_fields", range(len(value)))
        children = tuple(self.visit(child, _join(path, name)) for name, child in zip(names, value, strict=True))
        if all(isinstance(child, Constant) for child in children):
            return Constant(value)
        return Items(type(value), children)

    def _dict(self, value: dict[Any, Any], path: str) -> Node:
        number = self._enter(value)
        children = tuple(self.visit(child, _join(path, key)) for key, child in value.items())
        return Mapped(type(value), tuple(value), children, number, _template(value, dict.fromkeys(value)))

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
            return Constant(_snapshot(value))
        held, first = len(self.tensors) + self.references, len(self.containers)
        number = self._enter(value)
        children = tuple(self.visit(child, _join(path, name)) for name, child in stored.items())
        if not self.deep and id(value) not in self.kept and len(self.tensors) + self.references == held:
            for container in self.containers[first:]:
                del self.numbers[id(container)]
            del self.containers[first:]
            return Constant(value)
        return Object(type(value), tuple(stored), children, number, _template(value, dict.fromkeys(stored)))


def _template(value: Any, nothing: dict[Any, None]) -> Any:
    """A shallow copy that keeps none of the children alive (they may be large, or belong to the trace)."""
    if type(value) is dict:
        return {}
    empty = copy.copy(value)
    assign(empty, nothing)
    return empty


def assign(container: Any, children: Mapping[Any, Any]) -> None:
    """Set the items of a list or dict, or the attributes of an object, to `children`, and remove the others."""
    if isinstance(container, list):
        container[:] = children.values()
    elif isinstance(container, dict):
        for key in [key for key in container if key not in children]:
            del container[key]
        for key, child in children.items():
            container[key] = child
    else:
        for name in [name for name in attributes(container) if name not in children]:
            object.__delattr__(container, name)
        for name, child in children.items():
            object.__setattr__(container, name, child)  # frozen dataclasses refuse setattr


def shallow_state(container: Any) -> dict[Any, Any]:
    """The children of a container by index, key or attribute name: what `assign` takes."""
    if isinstance(container, list):
        return dict(enumerate(container))
    return dict(container) if isinstance(container, dict) else attributes(container)


def unflatten(
    node: Node,
    tensors: Sequence[torch.Tensor],
    originals: Sequence[Any] = (),
    reused: Mapping[int, Any] | None = None,
) -> tuple[Any, dict[int, Any]]:
    """The value that `flatten` took apart, with other tensors, and its containers by number.

    `reused`: number -> a container to fill instead of making a new one.
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
        made[node.number] = container
        names = node.keys if isinstance(node, Mapped) else node.names
        assign(container, {name: build(child) for name, child in zip(names, node.children, strict=True)})
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
    """The first place where two values are built differently, as text; None if they are alike."""
    if traced == given:
        return None
    containers = (Items, Mapped, Object)
    if isinstance(traced, containers) and isinstance(given, containers) and traced.kind is given.kind:
        mine, yours = _names(traced), _names(given)
        if mine != yours:
            where = f"{path}: " if path else ""
            return f"{where}traced with {_listing(mine)}, called with {_listing(yours)}"
        for name, a, b in zip(mine, traced.children, given.children, strict=True):
            if (found := difference(a, b, _join(path, name))) is not None:
                return found
    return f"{path}: traced with {describe(traced)}, called with {describe(given)}"


def _names(node: Items | Mapped | Object) -> tuple[Any, ...]:
    if isinstance(node, Items):
        return tuple(range(len(node.children)))
    return node.keys if isinstance(node, Mapped) else node.names


def _listing(names: tuple[Any, ...]) -> str:
    return "nothing in it" if not names else "items " + ", ".join(map(str, names))


def describe(node: Node) -> str:
    if isinstance(node, TensorLeaf):
        return "a tensor"
    if isinstance(node, Constant):
        return repr(node.value)
    if isinstance(node, (Items, Mapped, Object)):
        return f"a {node.kind.__name__}"
    return "an object that it also holds elsewhere"


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _equal(a: object, b: object) -> bool:
    """Return True if a model cannot tell the two apart: 1 is not True, and 0.0 is not -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if isinstance(a, complex) and isinstance(b, complex):
        return _equal(a.real, b.real) and _equal(a.imag, b.imag)
    if a is b:
        return True
    if hasattr(a, "__array__"):  # numpy compares element by element
        same_kind = getattr(a, "shape", None) == getattr(b, "shape", None) and a.dtype == b.dtype  # type: ignore[attr-defined]
        return same_kind and a.tobytes() == b.tobytes()  # type: ignore[attr-defined]
    return bool(a == b)


def _snapshot(value: Any) -> Any:
    """A value that later changes of the original do not reach, to compare later calls with."""
    return copy.copy(value) if isinstance(value, _CHANGING) or hasattr(value, "__array__") else value
