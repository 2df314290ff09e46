"""Make the emitted graph of new sizes from those of other sizes, by the numbers in which they differ.

Emitted graphs of one model at several sizes often differ in integers alone: shapes, ends of slices, offsets. Where each
of them is linear in each size, one graph serves the sizes between: its generated code reads the integers from the
module, and a module of other sizes shares the code. Products of sizes that vary freely, as batch * length, are linear
in each of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from math import prod
from types import CellType, FunctionType, MappingProxyType, MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from autopar.lowering.modules.run_state import RUN_STATE

__all__ = ["DiffersError", "Growth", "SizeTemplate", "differences"]

# Steps from an object to a part of it: names of attributes, keys and places.
Path = tuple[Any, ...]
# Integers of an object by step, then of its parts.
Tree = Mapping[Any, Any]

# Attributes of a module that torch keeps for hooks and that no generated module sets, and texts for people.
_LEFT_OUT = frozenset(("notes",))
# First of a step to a node of a graph, whose second is the place of the node.
_NODE = "node"
# Attribute of a generated module with an integer that depends on the size.
_NUMBER = "_of_size_"


class DiffersError(Exception):
    """Two objects differ in more than integers; the text says where."""


@dataclass(frozen=True)
class Growth:
    """Integer that grows with some sizes: linear in each, or of degree 2 in a single one if `second` is not 0.

    It is `value` at `low`. It rises by a term's number where the sizes of the term reach their ends, each `far` from
    `low`, on top of the terms of fewer of these sizes.
    """

    low: tuple[int, ...]
    far: tuple[int, ...]
    value: int
    terms: tuple[tuple[tuple[int, ...], int], ...]
    second: int = 0

    def at(self, sizes: Sequence[int]) -> int:
        more = [size - low for size, low in zip(sizes, self.low, strict=True)]
        # One denominator, so that the sum is exact.
        risen, whole = 0, prod(self.far)
        for grown, number in self.terms:
            risen += number * prod(more[i] if i in grown else far for i, far in enumerate(self.far))
        if self.second:
            # `second` is the second difference over half of `far`.
            half = self.far[0] // 2
            risen, whole = half * risen + more[0] * (more[0] - 2 * half) * self.second, half * whole
        found, rest = divmod(risen, whole)
        if rest:
            raise DiffersError(f"no integer at the sizes {tuple(sizes)}")
        return self.value + found


@dataclass(frozen=True)
class SizeTemplate:
    """An object at some sizes, and the integers in it that grow with the sizes."""

    source: Any
    numbers: Mapping[Path, Growth]
    # Of `source` with generated code that reads its integers from the module.
    recipe: _Recipe

    @classmethod
    def of(cls, low: Sequence[int], far: Sequence[int], corners: Mapping[tuple[int, ...], Any], middle: Any) -> Self:
        """Return the template of an object at the sizes `low` to `low + far`.

        Raise `DiffersError` if more than integers differ, or if one of several sizes has an integer of degree 2.

        Parameters:
            corners: the object at `low`, by the empty tuple, and at each other corner, by the numbers of the sizes
                that are at their end there.
            middle: the object at the middle of all sizes.
        """
        source = corners[()]
        changes: dict[tuple[Any, ...], dict[Path, tuple[int, int]]] = {}
        changes |= {at: differences(source, made) for at, made in corners.items() if at}
        changes["middle",] = differences(source, middle)
        known: dict[Growth, Growth] = {}
        numbers = {}
        for path in {path: None for found in changes.values() for path in found}:
            value = next(found[path][0] for found in changes.values() if path in found)
            values = {at: found[path][1] if path in found else value for at, found in changes.items()}
            number = _growth(tuple(low), tuple(far), {(): value, **values})
            # Equal ones are one object, which is computed once.
            numbers[path] = known.setdefault(number, number)
        readable, places = _readable(source, _tree_of(numbers), {})
        recipe = _Recipe.of(readable, places, {})
        assert isinstance(recipe, _Recipe), "an object of many parts"
        return cls(source, numbers, recipe)

    @property
    def is_linear(self) -> bool:
        return not any(number.second for number in self.numbers.values())

    def check(self, other: Any, *sizes: int) -> None:
        """Raise `DiffersError` unless this template gives `other` at its sizes."""
        found = differences(self.source, other)
        for path in {**self.numbers, **found}:
            number = self.numbers.get(path)
            expected = found[path][0] if number is None else number.at(sizes)
            got = number.value if number is not None and path not in found else found[path][1]
            if got != expected:
                raise DiffersError(f"{path} is {got} at the sizes {sizes}, expected {expected}")

    def at(self, *sizes: int) -> Any:
        """Return the object at other sizes; parts without such integers are shared."""
        return self.recipe.at(sizes, {})


def _growth(low: tuple[int, ...], far: tuple[int, ...], values: Mapping[tuple[Any, ...], int]) -> Growth:
    """Return the growth of an integer with these values at the corners and in the middle."""
    terms: dict[tuple[int, ...], int] = {}
    corners = sorted((at for at in values if at != ("middle",)), key=len)
    for at in corners:
        terms[at] = values[at] - sum(number for inner, number in terms.items() if set(inner) < set(at))
    value = terms.pop(())
    made = Growth(low, far, value, tuple((at, number) for at, number in terms.items() if number))
    parts = 2 ** len(far)
    rest = values["middle",] * parts - sum(
        number * parts // 2 ** len(at) for at, number in {(): value, **terms}.items()
    )
    if rest and len(far) > 1:
        raise DiffersError(f"an integer that is not linear in each of {len(far)} sizes")
    # On one size, `rest` is twice what the middle is above the line.
    return replace(made, second=-rest) if rest else made


# -- compare -----------------------------------------------------------------------------------------------------------


def differences(one: Any, other: Any) -> dict[Path, tuple[int, int]]:
    """Return the integers in which two objects differ, by path; raise `DiffersError` if they differ in more."""
    return _Comparison().compare(one, other, ())


class _Comparison:
    def __init__(self) -> None:
        # Differences within pairs of objects that were compared, by path from them; None while they are.
        self.known: dict[tuple[int, int], dict[Path, tuple[int, int]] | None] = {}
        # Keeps the temporary objects whose ids are keys.
        self.alive: list[Any] = []

    def compare(self, one: Any, other: Any, path: Path) -> dict[Path, tuple[int, int]]:
        if one is other:
            return {}
        if type(one) is int and type(other) is int:
            return {(): (one, other)} if one != other else {}
        if type(one) is not type(other) and not (isinstance(one, GraphModule) and isinstance(other, GraphModule)):
            raise DiffersError(f"{path}: {type(one).__name__} and {type(other).__name__}")
        if isinstance(one, Node):
            # A node that a module holds itself would stay that of another graph.
            inside = any(isinstance(step, tuple) for step in path)
            if not inside or one.name != other.name:
                raise DiffersError(f"{path}: the nodes {one} and {other}")
            return {}
        if isinstance(one, Tensor):
            if not _same_tensor(one, other):
                raise DiffersError(f"{path}: two tensors")
            return {}
        parts = _parts(one)
        if parts is None:
            if one != other:
                raise DiffersError(f"{path}: {one!r:.60} and {other!r:.60}")
            return {}
        key = id(one), id(other)
        if key not in self.known:
            self.known[key] = None
            self.alive += [one, other]
            self.known[key] = self._within(parts, _parts(other), path)
        found = self.known[key]
        if found is None:
            raise DiffersError(f"{path}: an object that contains itself")
        return found

    def _within(
        self, parts: Mapping[Any, Any], others: Mapping[Any, Any] | None, path: Path
    ) -> dict[Path, tuple[int, int]]:
        assert others is not None, "objects of one type have parts alike"
        if list(parts) != list(others):
            raise DiffersError(f"{path}: parts {list(parts)!s:.60} and {list(others)!s:.60}")
        return {
            (step, *rest): pair
            for step, part in parts.items()
            for rest, pair in self.compare(part, others[step], (*path, step)).items()
        }


def _parts(value: Any) -> Mapping[Any, Any] | None:
    """Return the parts of an object by step; None for a plain value."""
    if isinstance(value, GraphModule):
        nodes = {(_NODE, place): one for place, one in enumerate(map(_node_parts, value.graph.nodes))}
        return {**nodes, "_modules": value._modules}
    if isinstance(value, nn.Module):
        return {name: part for name, part in vars(value).items() if name not in _LEFT_OUT}
    if is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, FunctionType):
        inside = tuple(cell.cell_contents for cell in value.__closure__ or ())
        return {"code": value.__code__, "defaults": value.__defaults__, "closure": inside}
    if isinstance(value, dict | MappingProxyType):
        return dict(value)
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if isinstance(value, slice):
        return {"start": value.start, "stop": value.stop, "step": value.step}
    if isinstance(value, partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, MethodType):
        return {"__func__": value.__func__, "__self__": value.__self__}
    return None


def _fields(value: Any) -> Mapping[Any, Any]:
    names = [one.name for one in fields(value)]
    kept = getattr(value, "__dict__", {}).keys() - set(names)
    # A rebuilt object computes its cached properties anew; other attributes would be lost.
    other = sorted(name for name in kept if not isinstance(getattr(type(value), name, None), cached_property))
    if other:
        raise DiffersError(f"{type(value).__name__} has attributes that are no fields: {other}")
    return {one.name: getattr(value, one.name) for one in fields(value) if not _changes(one)}


def _changes(one: Field[Any]) -> bool:
    return RUN_STATE.items() <= one.metadata.items()


def _node_parts(node: Node) -> tuple[Any, ...]:
    return node.name, node.op, node.target, node.args, node.kwargs


def _same_tensor(one: Tensor, other: Tensor) -> bool:
    kinds = [(x.shape, x.dtype, x.device, x.requires_grad, type(x)) for x in (one, other)]
    if kinds[0] != kinds[1]:
        return False
    return one.device.type == "meta" or (type(one) is Tensor and torch.equal(one, other))


# -- rebuild -----------------------------------------------------------------------------------------------------------


def _tree_of(numbers: Mapping[Path, Growth]) -> Tree:
    tree: dict[Any, Any] = {}
    for path, number in numbers.items():
        at = tree
        for step in path[:-1]:
            at = at.setdefault(step, {})
        at[path[-1]] = number
    return tree


@dataclass(frozen=True, eq=False)
class _Recipe:
    """An object with integers that grow with sizes; what does not is looked up once."""

    value: Any
    # Of a module none, since its attributes change.
    parts: Mapping[Any, Any] | None
    growing: tuple[tuple[Any, _Recipe | Growth], ...]

    @classmethod
    def of(cls, value: Any, tree: Any, known: dict[int, _Recipe]) -> _Recipe | Growth:
        if isinstance(tree, Growth):
            return tree
        if id(value) not in known:
            is_module = isinstance(value, nn.Module)
            parts = vars(value) if is_module else _parts(value)
            assert parts is not None, "it has integers inside"
            growing = tuple((step, cls.of(parts.get(step), inner, known)) for step, inner in tree.items())
            known[id(value)] = cls(value, None if is_module else parts, growing)
        return known[id(value)]

    def at(self, sizes: Sequence[int], made: dict[int, Any]) -> Any:
        """Return a copy of the object at some sizes; an object that stands twice is one object again."""
        changed = {}
        for step, one in self.growing:
            if id(one) not in made:
                made[id(one)] = one.at(sizes) if isinstance(one, Growth) else one.at(sizes, made)
            changed[step] = made[id(one)]
        return _with_parts(self.value, changed, self.parts)


def _readable(value: Any, tree: Any, known: dict[int, tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return an object whose generated code reads its integers from the module, and the tree of its integers."""
    if isinstance(tree, Growth):
        return value, tree
    if id(value) not in known:
        parts = _parts(value)
        assert parts is not None, "it has integers inside"
        if is_dataclass(value) and any(map(_changes, fields(value))):
            raise DiffersError(f"{type(value).__name__} has a state, which two sizes would not share")
        of_nodes = {step: inner for step, inner in tree.items() if isinstance(value, GraphModule) and step[0] == _NODE}
        pairs = {step: _readable(parts[step], tree[step], known) for step in tree if step not in of_nodes}
        made = _with_parts(value, {step: part for step, (part, _) in pairs.items()}) if pairs else value
        places = {step: inner for step, (_, inner) in pairs.items()}
        if of_nodes:
            made, read = _reading_numbers(made, {step[1]: inner for step, inner in of_nodes.items()})
            places |= read
        known[id(value)] = made, places
    return known[id(value)]


def _reading_numbers(module: GraphModule, by_node: Mapping[int, Tree]) -> tuple[GraphModule, dict[str, Growth]]:
    """Return a generated module that reads the integers of its nodes from attributes, and these."""
    made = GraphModule(module, copy.deepcopy(module.graph))
    nodes = list(made.graph.nodes)
    first = next(node for node in nodes if node.op != "placeholder")
    names: dict[Growth, str] = {}
    readers: dict[str, Node] = {}

    def read(number: Growth) -> Node:
        name = names.setdefault(number, f"{_NUMBER}{len(names)}")
        if name not in readers:
            setattr(made, name, number.value)
            with made.graph.inserting_before(first):
                readers[name] = made.graph.create_node("get_attr", name)
        return readers[name]

    for place, tree in by_node.items():
        _, _, _, args, kwargs = _replaced(_node_parts(nodes[place]), tree, read)
        nodes[place].args, nodes[place].kwargs = args, kwargs
    made.recompile()
    return made, {name: number for number, name in names.items()}


def _replaced(value: Any, tree: Any, read: Callable[[Growth], Node]) -> Any:
    if isinstance(tree, Growth):
        return read(tree)
    parts = _parts(value)
    assert parts is not None, "it has integers inside"
    return _with_parts(value, {step: _replaced(parts[step], inner, read) for step, inner in tree.items()})


def _with_parts(value: Any, changed: Mapping[Any, Any], known: Mapping[Any, Any] | None = None) -> Any:
    """Return a copy of an object with some other parts, beside `known` ones; no constructor runs."""
    if isinstance(value, nn.Module):
        made = object.__new__(type(value))
        made.__dict__.update({**vars(value), **changed})
        return made
    parts = {**((_parts(value) or {}) if known is None else known), **changed}
    if isinstance(value, dict):
        return type(value)(parts)
    if isinstance(value, MappingProxyType):
        return MappingProxyType(parts)
    if isinstance(value, tuple | list):
        named = getattr(value, "_make", None)
        return type(value)(parts.values()) if named is None else named(parts.values())
    if isinstance(value, slice):
        return slice(*parts.values())
    if isinstance(value, partial):
        return partial(parts["func"], *parts["args"], **parts["keywords"])
    if isinstance(value, MethodType):
        return MethodType(parts["__func__"], parts["__self__"])
    if isinstance(value, FunctionType):
        cells = tuple(map(CellType, parts["closure"]))
        return FunctionType(value.__code__, value.__globals__, value.__name__, parts["defaults"], cells)
    made = object.__new__(type(value))
    for name, part in parts.items():
        object.__setattr__(made, name, part)
    return made
