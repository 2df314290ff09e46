"""Resolve a layout for one tensor: the axes that split each of its atoms, and its pinned partial sums and broadcasts.

Each named dim of the tensor takes the most specific rule about it (`matching`). Then the dims claim their axes in the
order of their priorities. A dim whose axes are taken, or do not divide its extent, tries the next alternative of its
rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from math import prod

from autopar.ir.values import FOLD_PIECES
from autopar.mesh import SubMesh
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.matching import POSITION, Specificity, glob_matches, matches, specificity
from autopar.sharding.layout.source import SourceSpan, layout_error
from autopar.sharding.layout.syntax import Axes, Block, DimRule, Hole, MicroBatches, NotSplit, Pin, Scope, SplitTerm
from autopar.sharding.sharding import MICRO, HasAtoms, longest, splits_evenly

# The axes that split each atom; None where the layout leaves an atom open.
SplitRequest = tuple[Axes | None, ...]

# A rule with its pin, or the scope of its block.
_Rule = tuple[DimRule, Pin | Scope | None]


@dataclass(frozen=True)
class _AxisClaim:
    """Named dim of a tensor, the atoms that it covers, and its most specific rule."""

    dim: str
    atoms: tuple[int, ...]
    rank: Specificity
    rule: DimRule
    where: Pin | Scope | None

    @property
    def means_one_dim(self) -> bool:
        # FSDP: in storage `* -> fsdp` splits one dim, the first without a rule of its own that the axes divide.
        storage = isinstance(self.where, Scope) and self.where.kind in ("param", "grad", "opt")
        return storage and self.rule.dims == ("*",)


def resolve(
    layout: Layout, tensor: HasAtoms, kind: str, axes: SubMesh, begun: Sequence[Axes] | None = None
) -> SplitRequest:
    """Return the request for a tensor in its role as `kind`, such as param or use.

    `begun`: splits that `* -> dp` in storage leaves as they are, on dims without a rule of their own, and adds to.
    """
    claims: list[_AxisClaim] = []
    one_dim: DimRule | None = None
    for claim in _claims(layout, tensor, kind):
        if claim.means_one_dim:
            one_dim = claim.rule
        else:
            claims.append(claim)
    taken: dict[str, _AxisClaim] = {}
    wanted: list[Axes | None] = [None] * len(tensor.atoms)
    for claim in sorted(claims, key=lambda claim: (claim.rule.place.priority, not _has_groups(claim, tensor))):
        _grant(claim, tensor, axes, taken, wanted, is_stored=kind not in ("use", "act"))
    # The bare `*` comes last, because it takes one of the dims that have no rule of their own.
    if one_dim is not None:
        spoken = {tensor.atoms[i].dim for claim in claims for i in claim.atoms}
        held = set[str]()
        kept = begun if begun and isinstance(one_dim.place.terms[0], SplitTerm) else ()
        for i, own in enumerate(kept):
            if own and wanted[i] is None and not any(axis in taken for axis in own):
                wanted[i] = own
                held.update(own)
                spoken.add(tensor.atoms[i].dim)
        _grant_one_dim(one_dim, tensor, axes, taken.keys(), spoken, wanted, held)
    # An atom of size 1 cannot be split, so it is not open.
    found = tuple(() if axes is None and tensor.atoms[i].size == 1 else axes for i, axes in enumerate(wanted))
    return found if kind not in ("input", "act", "output") else _split_in_time(layout, tensor, kind, found, axes)


def _split_in_time(layout: Layout, tensor: HasAtoms, kind: str, wanted: SplitRequest, axes: SubMesh) -> SplitRequest:
    """Return the request with the batch split into micro-batches first: each has rows of all ranks."""
    micro = layout.micro_batches
    if micro is None or axes.get(MICRO, 1) == 1:
        return wanted
    found = list(wanted)
    for i, atom in enumerate(tensor.atoms):
        # Of a batch in several parts the first one is split, so that a micro-batch has neighbouring rows.
        if atom.names[:1] != (micro.dim,) or (i and tensor.atoms[i - 1].names[:1] == (micro.dim,)):
            continue
        own = found[i]
        ranks = prod(axes[axis] for axis in own or ())
        is_even = splits_evenly(atom.size // micro.parts, own or (), axes, atom.by_share)
        if atom.size % micro.parts == 0 and is_even and atom.size:
            found[i] = (MICRO, *(own or ())) if own is not None or kind == "input" else None
        elif kind == "input":
            over = f" over {'*'.join(own)} = {ranks}" if own else ""
            apart = " in halves" if micro.halves else ""
            raise layout_error(
                "E4",
                f"the dim '{micro.dim}' of {tensor.name} is {atom.size}: micro {micro.count}{apart}{over} does not "
                "divide it",
                _fix_of_batch(atom.size, ranks, micro),
                micro.span,
            )
    return tuple(found)


def _fix_of_batch(batch: int, ranks: int, micro: MicroBatches) -> str:
    """Return the numbers of micro-batches nearest to a wrong one, and the batches that it divides."""
    rows, each = 0 if batch % ranks else batch // ranks, 2 if micro.halves else 1
    counts = (one for one in range(2 // each, rows // each + 1) if rows % (each * one) == 0)
    fitting = sorted(counts, key=lambda one: abs(one - micro.count))
    numbers = " or ".join(f"'micro {one}{' halves' * micro.halves}'" for one in sorted(fitting[:2]))
    return f"{f'write {numbers}, or ' if numbers else ''}give a batch of a multiple of {micro.parts * ranks}"


def _claims(layout: Layout, tensor: HasAtoms, kind: str) -> list[_AxisClaim]:
    """Return the claims of the dims of a tensor, or of their parts."""
    dims: dict[int, list[int]] = {}
    for i, atom in enumerate(tensor.atoms):
        dims.setdefault(atom.dim, []).append(i)
    rules = list(_rules_about(layout, tensor, kind))
    by_position = any(pattern.startswith(POSITION) for rule, _ in rules for pattern in rule.dims)
    found: list[_AxisClaim] = []
    for members in dims.values():
        found += _claims_of(rules, tensor, tuple(members), 0, by_position)
    return found


def _claims_of(
    rules: Sequence[_Rule], tensor: HasAtoms, atoms: tuple[int, ...], level: int, by_position: bool
) -> list[_AxisClaim]:
    """Return the claims of the dims that stand at one level of the names of some atoms."""
    # Level 0 is a dim as a whole, deeper levels are its parts; below the last name an atom has its position only,
    # which few layouts name.
    groups: dict[str, list[int]] = {}
    for i in atoms:
        names = tensor.atoms[i].names
        if level < len(names):
            groups.setdefault(names[level], []).append(i)
        elif level == len(names) and by_position:
            groups.setdefault(f"{POSITION}{i}", []).append(i)
    claims: list[_AxisClaim] = []
    for name, members in groups.items():
        own = _rule_for(rules, tensor, name)
        parts = _claims_of(rules, tensor, tuple(members), level + 1, by_position)
        if parts and (own is None or max(part.rank for part in parts) > own[0]):
            claims += parts
        elif own is not None:
            claims.append(_AxisClaim(name, tuple(members), *own))
    return claims


def _rule_for(
    rules: Sequence[_Rule], tensor: HasAtoms, name: str
) -> tuple[Specificity, DimRule, Pin | Scope | None] | None:
    """Return the most specific of the rules about a dim; raise E2 if two of them differ."""
    ranked: list[tuple[Specificity, _Rule]] = []
    for rule, where in rules:
        ranks = [specificity(where, pattern) for pattern in rule.dims if matches(pattern, name)]
        if ranks:
            ranked.append((max(ranks), (rule, where)))
    if not ranked:
        return None
    best = max(rank for rank, _ in ranked)
    (rule, where), *others = [one for rank, one in ranked if rank == best]
    for other, _ in others:
        if other.place != rule.place:
            raise layout_error(
                "E2",
                f"two rules differ about the dim '{name}' of {tensor.name}",
                "drop one of the lines, or make one more specific: a kind, dims in [...], an @name",
                rule.span,
                other.span,
            )
    return best, rule, where


def _rules_about(layout: Layout, tensor: HasAtoms, kind: str) -> Iterator[_Rule]:
    """Yield all rules whose place includes this tensor in this role."""
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


def _has_groups(claim: _AxisClaim, tensor: HasAtoms) -> bool:
    """Return True for the dim of the groups of rows that are routed or in slots."""
    return all(atom < (tensor.routed or tensor.slotted) for atom in claim.atoms)


def _has_rows(claim: _AxisClaim, tensor: HasAtoms) -> bool:
    """Return True for a dim of rows beside groups: all but the last dim of rows in slots."""
    dim = tensor.atoms[claim.atoms[0]].dim
    return dim == 0 or (tensor.slotted > 0 and dim < len(tensor.shape) - 1)


def _grant(
    claim: _AxisClaim,
    tensor: HasAtoms,
    axes: SubMesh,
    taken: dict[str, _AxisClaim],
    wanted: list[Axes | None],
    is_stored: bool,
) -> None:
    """Give a dim the first alternative of its rule that is free and divides its extent."""
    refused, fix = "", "add one, as in 'tp | none', allow uneven shards with 'pad', or choose a mesh that divides it"
    for term in claim.rule.place.terms:
        if isinstance(term, Hole):
            return
        if isinstance(term, NotSplit):
            for i in claim.atoms:
                wanted[i] = ()
            return
        rival = next((taken[axis] for axis in term.axes if axis in taken), None)
        if rival is not None and _has_groups(rival, tensor) and _has_rows(claim, tensor):
            # Rows of all these ranks stand at their groups, so the axes split no rows there.
            term = replace(term, axes=tuple(axis for axis in term.axes if taken.get(axis) is not rival))
            rival = next((taken[axis] for axis in term.axes if axis in taken), None)
        if rival is not None and rival.rule.place.priority == claim.rule.place.priority:
            raise layout_error(
                "E3",
                f"the dims '{rival.dim}' and '{claim.dim}' of {tensor.name} both claim axis '{'*'.join(term.axes)}'",
                "lower the priority of one, as in 'seq -> tp | none !1'",
                rival.rule.span,
                claim.rule.span,
            )
        # Uneven pieces of a compound dim are strided in it, and no DTensor is stored so.
        uneven = term.pad and (len(claim.atoms) == 1 or not is_stored)
        granted = None if rival is not None else _spread(claim.atoms, term.axes, tensor, axes, uneven)
        if granted is None:
            refused = _why_not(claim.atoms, term, tensor, axes, rival)
            if term.pad and rival is None:
                fix = "split one of its parts: uneven pieces of a compound dim lie strided, and no tensor is stored so"
            continue
        for i in claim.atoms:
            wanted[i] = granted.get(i, ())
        taken.update((axis, claim) for axis in term.axes)
        return
    raise layout_error(
        "E4",
        f"the dim '{claim.dim}' of {tensor.name} can take no alternative of its rule: {refused}",
        fix,
        claim.rule.span,
    )


def _spread(
    members: Sequence[int], wanted: Axes, tensor: HasAtoms, axes: SubMesh, uneven: bool
) -> dict[int, Axes] | None:
    """Return the axes of each atom of a dim, major first; None if one does not divide."""
    granted: dict[int, Axes] = {}
    atoms = list(members)
    left = {i: tensor.atoms[i].size for i in atoms}
    for axis in wanted:
        # An atom that earlier axes cut down to single elements is used up.
        while len(atoms) > 1 and left[atoms[0]] == 1:
            atoms.pop(0)
        atom = atoms[0]
        granted[atom] = (*granted.get(atom, ()), axis)
        by_share = tensor.atoms[atom].by_share
        if not uneven and not splits_evenly(tensor.atoms[atom].size, granted[atom], axes, by_share):
            return None
        left[atom] = longest(left[atom], (axis,), axes, by_share)
    return granted


def _why_not(atoms: Sequence[int], term: SplitTerm, tensor: HasAtoms, axes: SubMesh, rival: _AxisClaim | None) -> str:
    if rival is not None:
        return f"axis '{'*'.join(term.axes)}' is taken by '{rival.dim}'"
    extents = " x ".join(str(tensor.atoms[i].size) for i in atoms)
    count = prod(axes[axis] for axis in term.axes)
    parts = [tensor.atoms[i].names[-1] for i in atoms if tensor.atoms[i].names]
    made_of = f", its parts {' x '.join(parts)}" if len(atoms) > 1 else _in_pieces(tensor, atoms[0])
    return f"{'*'.join(term.axes)} = {count} does not divide {extents}{made_of}"


def _in_pieces(tensor: HasAtoms, position: int) -> str:
    """Return the words for an atom that is the positions of a folded dim; empty for others."""
    beside = (one for one in tensor.atoms if one.dim == tensor.atoms[position].dim and one.names)
    pieces = [one.size for one in beside if one.names[-1].partition(".")[0] == FOLD_PIECES]
    return f", the positions in each of {pieces[0]} pieces of the fold" if pieces else ""


def _grant_one_dim(
    rule: DimRule,
    tensor: HasAtoms,
    axes: SubMesh,
    taken: Set[str],
    spoken: set[int],
    wanted: list[Axes | None],
    held: Set[str],
) -> None:
    """Split the first free dim that the axes divide, for `param { * -> fsdp }`; `held`: axes that split one already."""
    for i, axes_of in enumerate(wanted):
        wanted[i] = () if axes_of is None else axes_of
    for term in rule.place.terms:
        if not isinstance(term, SplitTerm):
            return
        own = tuple(axis for axis in term.axes if axis not in held)
        if not own:
            return
        if any(axis in taken for axis in own):
            continue
        free = [(atoms, False) for atoms in _free_atoms(tensor, spoken, strided=len(own) == 1)]
        if term.pad:  # after those that the axes divide
            free += [(atoms, True) for atoms in _free_atoms(tensor, spoken, strided=False) if len(atoms) == 1]
        for atoms, uneven in free:
            granted = _spread(atoms, own, tensor, axes, uneven)
            if granted is not None:
                for i, given in granted.items():
                    wanted[i] = given
                return
    raise layout_error(
        "E4",
        f"no dim of {tensor.name}, of shape {list(tensor.shape)}, can be split by its rule",
        "add an alternative, as in '* -> fsdp | none'",
        rule.span,
    )


def _free_atoms(tensor: HasAtoms, spoken: set[int], strided: bool) -> Iterator[tuple[int, ...]]:
    """Yield the atoms of each free dim, then, if `strided`, each minor atom of one."""
    # Shards of a minor atom are strided in its dim, which a DTensor can be along one axis only.
    dims: dict[int, list[int]] = {}
    for i, atom in enumerate(tensor.atoms):
        if atom.dim not in spoken and atom.size > 1:
            dims.setdefault(atom.dim, []).append(i)
    yield from map(tuple, dims.values())
    if strided:
        yield from ((i,) for members in dims.values() for i in members[1:])


@dataclass(frozen=True)
class PinnedStates:
    """Axes along which a pin makes a tensor partial or broadcast, `+ partial(tp)`, with the place of the pin."""

    partial: frozenset[str] = frozenset()
    broadcast: frozenset[str] = frozenset()
    span: SourceSpan | None = None

    @property
    def axes(self) -> frozenset[str]:
        return self.partial | self.broadcast


UNPINNED = PinnedStates()


def states_of(layout: Layout, name: str) -> PinnedStates:
    """Return the pinned states of a tensor; raise E2 if two pins differ."""
    found: list[PinnedStates] = []
    for statement in layout:
        if isinstance(statement, Pin) and statement.states and glob_matches(statement.glob, name):
            found.append(_of_pin(statement))
    for other in found[1:]:
        if (other.partial, other.broadcast) != (found[0].partial, found[0].broadcast):
            raise layout_error(
                "E2", f"two pins of {name} differ about its partial sums", "drop one", found[0].span, other.span
            )
    return found[0] if found else UNPINNED


def _of_pin(pin: Pin) -> PinnedStates:
    axes: dict[str, list[str]] = {"partial": [], "broadcast": []}
    for state in pin.states:
        axes[state.state] += state.axes
    every = [*axes["partial"], *axes["broadcast"]]
    for axis in every:
        if every.count(axis) > 1:
            raise layout_error(
                "E3",
                f"axis '{axis}' stands twice in this pin: an axis does one thing to a tensor",
                "name it once",
                pin.span,
            )
    return PinnedStates(frozenset(axes["partial"]), frozenset(axes["broadcast"]), pin.span)


def check_states(states: PinnedStates, name: str, splits: Iterable[tuple[str, Axes]]) -> None:
    """Raise E3 for a pinned axis that splits a dim of the tensor too."""
    for dim, axes in splits:
        for axis in axes:
            if axis in states.axes:
                raise layout_error(
                    "E3",
                    f"axis '{axis}' splits the dim '{dim}' of {name}, and is pinned to make it partial or broadcast",
                    f"let another axis split it, or none: '{dim} -> none' in the pin",
                    states.span,
                )
