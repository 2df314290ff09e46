"""Mesh axes of each tensor by role (param, grad, opt, use, act), read from an assignment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedTensor
from autopar.mesh import SubMesh
from autopar.names import RESERVED
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.matching import POSITION
from autopar.sharding.layout.parameter_storage import GatherPolicy, storage_of
from autopar.sharding.layout.resolve import resolve
from autopar.sharding.layout.syntax import Axes, DimRule, NotSplit, SplitTerm, TensorPattern

__all__ = ["NONE", "Splits", "TensorAxes", "is_uneven", "rules_for", "wishes_of", "word_of"]

Splits = tuple[Axes, ...]

NONE = DimRule(("*",), TensorPattern((NotSplit(),)))


@dataclass(frozen=True)
class TensorAxes:
    """Axes that split the atoms of one tensor, by role; only a parameter has several roles."""

    tensor: NamedTensor
    roles: tuple[tuple[str, Splits], ...]
    partial: tuple[str, ...] = ()
    broadcast: tuple[str, ...] = ()

    def of(self, role: str) -> Splits:
        return dict(self.roles)[role]

    @property
    def is_one(self) -> bool:
        """Return True if the axes are the same in all roles."""
        return len({splits for _, splits in self.roles}) == 1

    @property
    def alike(self) -> object:
        """Return a key: equal for tensors on which rules without tensor names act alike."""
        return self.tensor.atoms, self.tensor.shape, self.roles

    def right_roles(self, layout: Layout, axes: SubMesh) -> frozenset[str]:
        """Return the roles in which a layout gives the tensor its decided axes."""
        try:
            if len(self.roles) == 1:
                ((role, splits),) = self.roles
                return frozenset({role} if _closed(layout, self.tensor, role, axes) == splits else ())
            use = {"use"} if _closed(layout, self.tensor, "use", axes) == self.of("use") else set()
        except LayoutError:
            return frozenset()
        try:
            stored = zip(("param", "grad", "opt"), storage_of(layout, self.tensor, axes), strict=True)
            held = tuple(stored)
        except LayoutError:
            return frozenset(use)
        same = all(self.of(role) == splits for role, splits in held)
        return frozenset(use | ({"param", "grad", "opt"} if same else set()))


def _closed(layout: Layout, tensor: NamedTensor, role: str, axes: SubMesh) -> Splits:
    return tuple(split or () for split in resolve(layout, tensor, role, axes))


def wishes_of(graph: NamedGraph, assignment: Assignment) -> dict[str, TensorAxes]:
    """Return the axes of every tensor that a layout can name."""
    return {tensor.name: wish for tensor in graph.tensors.values() for wish in _wish(graph, tensor, assignment)}


def _wish(graph: NamedGraph, tensor: NamedTensor, assignment: Assignment) -> Iterator[TensorAxes]:
    name = tensor.name
    if tensor.kind == "param":
        stored, value = assignment.stored[name].splits, assignment.values[name]
        held = _storage(name, stored, value.splits, assignment.gather_policies.get(name))
        yield TensorAxes(tensor, (*held, ("use", value.splits)), broadcast=_in_order(value.broadcast, assignment))
    elif tensor.kind == "input":
        yield TensorAxes(tensor, (("input", assignment.stored[name].splits),))
    elif tensor.kind == "activation" and name in assignment.values:
        value = assignment.values[name]
        role = "output" if name in graph.outputs else "act"
        states = _in_order(value.partial, assignment), _in_order(value.broadcast, assignment)
        yield TensorAxes(tensor, ((role, value.splits),), *states)


def _in_order(axes: frozenset[str], assignment: Assignment) -> tuple[str, ...]:
    return tuple(axis for axis in assignment.axes if axis in axes)


def _storage(name: str, opt: Splits, used: Splits, gather_policy: GatherPolicy | None) -> Iterator[tuple[str, Splits]]:
    """Return the axes of the roles `param`, `grad` and `opt`, given storage, use and gather policy."""
    policy = gather_policy or GatherPolicy(keep_gathered=False, defer_reduction=opt == used, regather=False)
    whole = all(part[: len(axes)] == axes for axes, part in zip(used, opt, strict=True))
    less = used if whole and used != opt else ((),) * len(opt)
    param = opt
    if policy.keep_gathered or (policy.defer_reduction and used != opt) or (not policy.defer_reduction and used == opt):
        param = less
    grad = used if policy.defer_reduction else opt if opt != used else param
    expected = policy.keep_gathered, policy.defer_reduction
    assert (param != opt and not policy.regather, grad == used) == expected, (name, policy)
    return iter((("param", param), ("grad", grad), ("opt", opt)))


# -- in the words of the language -------------------------------------------------------------------------------------


def word_of(tensor: NamedTensor, i: int) -> str:
    """Return the word of a rule for an atom: its innermost name, or its position."""
    names = tensor.atoms[i].names
    others = [name for k, atom in enumerate(tensor.atoms) if k != i for name in atom.names]
    if not names or names[-1] in others or names[-1] in RESERVED:
        return f"{POSITION}{i}"
    return names[-1]


def is_uneven(size: int, split: Axes, axes: SubMesh) -> bool:
    """Return True if the axes split an extent into pieces of different lengths."""
    for axis in split:
        if size % axes[axis]:
            return True
        size //= axes[axis]
    return False


def rules_for(tensor: NamedTensor, splits: Splits, axes: SubMesh) -> tuple[DimRule, ...]:
    """Return rules that leave nothing open: `(heads, d_ff) -> tp, * -> none`."""
    places: dict[SplitTerm, list[str]] = {}
    for i, split in enumerate(splits):
        if split:
            term = SplitTerm(split, pad=is_uneven(tensor.atoms[i].size, split, axes))
            places.setdefault(term, []).append(word_of(tensor, i))
    return (*(DimRule(tuple(dims), TensorPattern((term,))) for term, dims in places.items()), NONE)
