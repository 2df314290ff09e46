"""What a layout says about one tensor: which axes split which of its atoms.

Every named dim of the tensor asks the layout for its rule; the most specific one wins (`precedence`). Then the dims
claim their axes, in the order of their priorities; a dim whose axes are taken, or whose extent they do not divide,
takes the next alternative of its rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from autopar.layout.language import Layout as LayoutText
from autopar.layout.precedence import Specificity, glob_matches, matches, specificity
from autopar.layout.source import layout_error, unknown_name
from autopar.layout.state import Atoms
from autopar.layout.syntax import Axes, Block, DimRule, Hole, NotSplit, Pin, Scope, Split

__all__ = ["HasAtoms", "Wanted", "atoms_of", "check_words", "resolve"]


class NamedAtom(Protocol):
    @property
    def dim(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def names(self) -> tuple[str, ...]: ...


class HasAtoms(Protocol):
    """A tensor as the resolver sees it: its name and its atoms, with the names of the dims that they belong to."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def atoms(self) -> tuple[NamedAtom, ...]: ...


Wanted = tuple[Axes | None, ...]
"""For each atom the axes that split it; None where the layout leaves it open."""


@dataclass(frozen=True)
class _Entry:
    """One named dim of a tensor: its name and the atoms that it covers."""

    name: str
    atoms: tuple[int, ...]


@dataclass(frozen=True)
class _Claim:
    entry: _Entry
    rule: DimRule
    order: int


def atoms_of(tensor: HasAtoms) -> Atoms:
    """A tensor's atoms as states know them."""
    counts = [0] * len(tensor.shape)
    for atom in tensor.atoms:
        counts[atom.dim] += 1
    return Atoms(tuple(atom.size for atom in tensor.atoms), tuple(counts))


def resolve(layout: LayoutText, tensor: HasAtoms, kind: str, axes: Mapping[str, int]) -> Wanted:
    """What the layout wants of a tensor in its role as `kind` (param, use, act, input, output, buffer ...)."""
    claims: list[_Claim] = []
    one_dim: tuple[Specificity, DimRule] | None = None
    for entry in _entries(tensor):
        found = _rule_for(layout, tensor, entry, kind)
        if found is None:
            continue
        rank, rule, where = found
        if rule.dims == ("*",) and isinstance(where, Scope) and where.kind in ("param", "grad", "opt"):
            one_dim = rank, rule  # in storage, a bare * with axes means one dim: the first that is free and divisible
        else:
            claims.append(_Claim(entry, rule, len(claims)))
    taken: dict[str, _Claim] = {}
    wanted: list[Axes | None] = [None] * len(tensor.atoms)
    for claim in sorted(claims, key=lambda claim: (claim.rule.place.priority, claim.order)):
        _grant(claim, tensor, axes, taken, wanted)
    if one_dim is not None:
        _grant_one_dim(one_dim[1], tensor, axes, taken, wanted)
    return tuple(() if axes is None and tensor.atoms[i].size == 1 else axes for i, axes in enumerate(wanted))


def _entries(tensor: HasAtoms) -> list[_Entry]:
    """The outermost named dims of a tensor, with their atoms."""
    entries: dict[tuple[int, str], list[int]] = {}
    for i, atom in enumerate(tensor.atoms):
        if atom.names:
            entries.setdefault((atom.dim, atom.names[0]), []).append(i)
    return [_Entry(name, tuple(members)) for (_, name), members in entries.items()]


def _rule_for(
    layout: LayoutText, tensor: HasAtoms, entry: _Entry, kind: str
) -> tuple[Specificity, DimRule, Pin | Scope | None] | None:
    """The most specific rule for a dim; for one without a rule of its own, that of the dims it is made of."""
    names = [entry.name, *dict.fromkeys(name for i in entry.atoms for name in tensor.atoms[i].names[1:])]
    for name in names:
        found = [item for item in _rules_about(layout, tensor, kind) if any(matches(p, name) for p in item[0].dims)]
        ranked = [
            (max(specificity(where, pattern) for pattern in rule.dims if matches(pattern, name)), rule, where)
            for rule, where in found
        ]
        if not ranked:
            continue
        best = max(rank for rank, _, _ in ranked)
        winners = [(rule, where) for rank, rule, where in ranked if rank == best]
        for rule, _ in winners[1:]:
            if rule.place != winners[0][0].place:
                raise layout_error(
                    "E2",
                    f"two rules say different things about the dim '{name}' of {tensor.name}",
                    "drop one of the lines, or make one more specific: a kind, dims in [...], an @name",
                    winners[0][0].span,
                    rule.span,
                )
        inner_only = name != entry.name and best.exactness == 0
        if not inner_only:
            return best, *winners[0]
    return None


def _rules_about(layout: LayoutText, tensor: HasAtoms, kind: str) -> Iterator[tuple[DimRule, Pin | Scope | None]]:
    """All rules whose place includes this tensor in this role."""
    dims = {name for atom in tensor.atoms for name in atom.names}
    for statement in layout:
        if isinstance(statement, DimRule):
            yield statement, None
        elif isinstance(statement, Pin) and glob_matches(statement.glob, tensor.name):
            yield from ((rule, statement) for rule in statement.rules)
        elif isinstance(statement, Block):
            for scope in statement.scopes:
                if scope.kind is not None and scope.kind != kind:
                    continue
                if scope.glob is not None and not glob_matches(scope.glob, tensor.name):
                    continue
                if set(scope.dims) <= dims:
                    yield from ((rule, scope) for rule in statement.rules)


def _grant(
    claim: _Claim,
    tensor: HasAtoms,
    axes: Mapping[str, int],
    taken: dict[str, _Claim],
    wanted: list[Axes | None],
) -> None:
    """Give a dim the first of its alternatives that can be had."""
    refused = ""
    for term in claim.rule.place.terms:
        if isinstance(term, Hole):
            return
        if isinstance(term, NotSplit):
            for i in claim.entry.atoms:
                wanted[i] = ()
            return
        rival = next((taken[axis] for axis in term.axes if axis in taken), None)
        if rival is not None and rival.rule.place.priority == claim.rule.place.priority:
            raise layout_error(
                "E3",
                f"the dims '{rival.entry.name}' and '{claim.entry.name}' of {tensor.name} both claim "
                f"axis '{'*'.join(term.axes)}'",
                "let one give way: a lower priority, as in 'seq -> tp | none !1'",
                rival.rule.span,
                claim.rule.span,
            )
        granted = None if rival is not None else _spread(claim.entry, term, tensor, axes)
        if granted is None:
            refused = _why_not(claim.entry, term, tensor, axes, rival)
            continue
        for i in claim.entry.atoms:
            wanted[i] = granted.get(i, ())
        taken.update((axis, claim) for axis in term.axes)
        return
    raise layout_error(
        "E4",
        f"the dim '{claim.entry.name}' of {tensor.name} can take no alternative of its rule: {refused}",
        "add one, as in 'tp | none', allow uneven shards with 'pad', or choose a mesh that divides it",
        claim.rule.span,
    )


def _spread(entry: _Entry, term: Split, tensor: HasAtoms, axes: Mapping[str, int]) -> dict[int, Axes] | None:
    """The term's axes dealt to the atoms of a dim, major first; None where an axis divides no atom that is its turn."""
    granted: dict[int, Axes] = {}
    atoms = list(entry.atoms)
    left = {i: tensor.atoms[i].size for i in atoms}
    for axis in term.axes:
        while len(atoms) > 1 and left[atoms[0]] == 1:
            atoms.pop(0)
        atom = atoms[0]
        if left[atom] % axes[axis] and not (term.pad and len(entry.atoms) == 1):
            return None
        left[atom] = -(-left[atom] // axes[axis])
        granted[atom] = (*granted.get(atom, ()), axis)
    return granted


def _why_not(entry: _Entry, term: Split, tensor: HasAtoms, axes: Mapping[str, int], rival: _Claim | None) -> str:
    if rival is not None:
        return f"axis '{'*'.join(term.axes)}' is taken by '{rival.entry.name}'"
    extents = " x ".join(str(tensor.atoms[i].size) for i in entry.atoms)
    count = 1
    for axis in term.axes:
        count *= axes[axis]
    return f"{'*'.join(term.axes)} = {count} does not divide {extents}"


def _grant_one_dim(
    rule: DimRule,
    tensor: HasAtoms,
    axes: Mapping[str, int],
    taken: Mapping[str, _Claim],
    wanted: list[Axes | None],
) -> None:
    """`param { * -> fsdp }`: one dim of the tensor, the first that is not split and that the axes divide."""
    for i, axes_of in enumerate(wanted):
        wanted[i] = () if axes_of is None else axes_of
    for term in rule.place.terms:
        if not isinstance(term, Split):
            return
        if any(axis in taken for axis in term.axes):
            continue
        count = 1
        for axis in term.axes:
            count *= axes[axis]
        for i, atom in enumerate(tensor.atoms):
            free = not any(wanted[j] for j, other in enumerate(tensor.atoms) if other.dim == atom.dim)
            if free and atom.size > 1 and atom.size % count == 0:
                wanted[i] = term.axes
                return
    raise layout_error(
        "E4",
        f"no dim of {tensor.name}, of shape {list(tensor.shape)}, can be split as its rule says",
        "add an alternative, as in '* -> fsdp | none'",
        rule.span,
    )


def check_words(layout: LayoutText, dims: set[str], tensors: set[str], axes: Mapping[str, int]) -> None:
    """E1 for dims, axes and names of tensors that neither the model nor the mesh has; a strategy may name any dim."""
    for statement in layout:
        rules = statement.rules if isinstance(statement, Block | Pin) else ()
        rules = (statement,) if isinstance(statement, DimRule) else rules
        for rule in rules:
            for pattern in rule.dims:
                if layout.strategy is None and not any(matches(pattern, dim) for dim in dims):
                    raise unknown_name("dim", pattern, dims, rule.span)
            for term in rule.place.terms:
                for axis in term.axes if isinstance(term, Split) else ():
                    if axis not in axes:
                        raise unknown_name("axis", axis, axes, rule.span)
        globs = [statement.glob] if isinstance(statement, Pin) else []
        globs += [scope.glob for scope in statement.scopes if scope.glob] if isinstance(statement, Block) else []
        for glob in globs:
            if not any(glob_matches(glob, name) for name in tensors):
                raise unknown_name("tensor", glob, tensors, getattr(statement, "span", None))
