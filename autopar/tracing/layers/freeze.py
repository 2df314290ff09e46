"""Freeze the attributes of modules: values that are equal only if code that reads the attributes cannot differ.

Two objects of Python classes are equal if their classes and attributes are. A module or tensor of the layer itself is
its name in the layer, so that equal layers have equal values. What cannot be looked into is equal to itself alone.
"""

from __future__ import annotations

import enum
import functools
import struct
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

_PLAIN = (
    type(None),
    bool,
    int,
    str,
    bytes,
    complex,
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
    CodeType,
    enum.Enum,
)
_ITSELF = (type, BuiltinFunctionType, ModuleType)
# Number of values of one attribute that are looked at; a longer list, such as a vocabulary, is equal to itself alone.
_MOST = 5000
_CONTAINERS = (OrderedDict, dict, list, torch.Size, tuple, set, frozenset)
# Flag of CPython for classes that a class statement made; size of a pointer in bytes.
_HEAP_TYPE = 1 << 9
_POINTER = struct.calcsize("P")


class Freezer:
    """Values of the attributes of the modules of one model; each object is looked at once."""

    def __init__(self) -> None:
        # By identity: the object, which stays alive, and its value. Only objects without parts of a layer.
        self._known: dict[int, tuple[Any, Hashable]] = {}

    def freeze(self, value: Any, own: Mapping[int, str]) -> Hashable:
        """Return the value of an attribute; `own` has the names of the layer's modules and tensors, by identity."""
        return _Look(self._known, own).at(value)


class _Look:
    """One look at an attribute."""

    def __init__(self, known: dict[int, tuple[Any, Hashable]], own: Mapping[int, str]) -> None:
        self.known = known
        self.own = own
        self.count = 0
        self.names_own = False
        # Objects that are being looked at, by identity: their depth.
        self.open: dict[int, int] = {}

    def at(self, value: Any) -> Hashable:
        self.count += 1
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, float):
            return type(value), value.hex()
        if isinstance(value, (torch.Tensor, nn.Module)):
            name = self.own.get(id(value))
            self.names_own |= name is not None
            return ("own", name) if name is not None else _itself(value)
        if isinstance(value, _ITSELF) or self.count > _MOST:
            return _itself(value)
        if id(value) in self.open:
            return "around", len(self.open) - self.open[id(value)]
        if id(value) in self.known:
            return self.known[id(value)][1]
        outer, self.names_own = self.names_own, False
        self.open[id(value)] = len(self.open)
        found = self._inside(value)
        del self.open[id(value)]
        # Inside of another object a value may refer to what is around it.
        if not self.names_own and not self.open:
            self.known[id(value)] = value, found
        self.names_own |= outer
        return found

    def _inside(self, value: Any) -> Hashable:
        if isinstance(value, FunctionType):
            cells = [self._cell(cell) for cell in value.__closure__ or ()]
            rest = (value.__defaults__, value.__kwdefaults__, value.__dict__)
            return "function", value.__code__, id(value.__globals__), tuple(cells), self.at(rest)
        if isinstance(value, MethodType):
            return "method", self.at(value.__func__), self.at(value.__self__)
        if isinstance(value, functools.partial):
            return "partial", self.at((value.func, value.args, value.keywords))
        kind = next((base for base in _CONTAINERS if isinstance(value, base)), object)
        if not _adds_attributes_alone(type(value), kind):
            return _itself(value)
        if isinstance(value, dict):
            return type(value), self._all(value), self._all(value.values()), self._attributes(value)
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(self._all(value)), self._attributes(value)
        items = self._all(value) if isinstance(value, (list, tuple)) else ()
        return type(value), items, self._attributes(value)

    def _cell(self, cell: Any) -> Hashable:
        try:
            return self.at(cell.cell_contents)
        except ValueError:
            return "empty"

    def _all(self, values: Iterable[Any]) -> tuple[Hashable, ...]:
        return tuple(map(self.at, values))

    def _attributes(self, value: Any) -> Hashable:
        found = dict(getattr(value, "__dict__", {}))
        for name in (name for base in type(value).__mro__ for name in _slots(base)):
            if hasattr(value, name):
                found[name] = getattr(value, name)
        return tuple((name, self.at(one)) for name, one in found.items())


def _itself(value: Any) -> Hashable:
    return "itself", id(value)


def _adds_attributes_alone(cls: type, kind: type) -> bool:
    """Return True if all state of the objects of a class is in their attributes, and in `kind` that it extends."""
    if cls is kind:
        return cls is not object
    slots = [name for base in cls.__mro__ for name in _slots(base)]
    # Beside its slots a Python class has at most two pointers: to the attributes and to weak references.
    hidden = cls.__basicsize__ - kind.__basicsize__ - _POINTER * (len(slots) + 2)
    return hidden <= 0 and all(base.__flags__ & _HEAP_TYPE for base in cls.__mro__[: cls.__mro__.index(kind)])


def _slots(cls: type) -> tuple[str, ...]:
    found = cls.__dict__.get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    own = f"_{cls.__name__.lstrip('_')}"
    # Python stores a private slot under the name of its class.
    return tuple(
        own + name if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    )
