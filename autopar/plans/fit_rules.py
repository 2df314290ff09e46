"""Few rules that cover most of a plan: one for each split dim, and the storage of parameters.

    least  Σ over kinds of tensors that the rules do not lay out as decided: 1,  + a little for each rule
    over   one place for each dim (axes that it has somewhere; alternatives and priorities where dims claim one axis)
           one block, or none, for what is stored
           and blocks for tensors that have some dim: `act[d_model] { seq -> tp }`, `param[d_ff], ... { d_ff -> dp }`

A kind of tensor is one name in repeated layers. Dims are fitted in turn until none changes; then the blocks that save
most are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.ir.values import Atom, NamedTensor
from autopar.mesh import SubMesh
from autopar.names import RESERVED
from autopar.plans.format import skeleton
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.matching import POSITION, matches
from autopar.sharding.layout.parameter_storage import GatherPolicy, storage_of
from autopar.sharding.layout.resolve import resolve
from autopar.sharding.layout.syntax import (
    Axes,
    Block,
    DimRule,
    Kind,
    NotSplit,
    Scope,
    SplitTerm,
    Statement,
    TensorPattern,
)
from autopar.sharding.sharding import splits_evenly

__all__ = ["NONE", "Splits", "TensorAxes", "axes_by_tensor", "bare_rules", "is_uneven", "rules_for", "word_of"]


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


def axes_by_tensor(graph: NamedGraph, assignment: Assignment) -> dict[str, TensorAxes]:
    """Return the axes of every tensor that a layout can name."""
    return {tensor.name: entry for tensor in graph.tensors.values() for entry in _axes_of(graph, tensor, assignment)}


def _axes_of(graph: NamedGraph, tensor: NamedTensor, assignment: Assignment) -> Iterator[TensorAxes]:
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


def is_uneven(atom: Atom, split: Axes, axes: SubMesh) -> bool:
    """Return True if the axes split an atom with a rest, into pieces of other lengths than the layout gives them."""
    return not splits_evenly(atom.size, split, axes, atom.by_share)


def rules_for(tensor: NamedTensor, splits: Splits, axes: SubMesh) -> tuple[DimRule, ...]:
    """Return rules that leave nothing open: `(heads, d_ff) -> tp, * -> none`."""
    places: dict[SplitTerm, list[str]] = {}
    for i, split in enumerate(splits):
        if split:
            term = SplitTerm(split, pad=is_uneven(tensor.atoms[i], split, axes))
            places.setdefault(term, []).append(word_of(tensor, i))
    return (*(DimRule(tuple(dims), TensorPattern((term,))) for term, dims in places.items()), NONE)


# Number of axes per dim that are tried, the most frequent first.
MOST_OPTIONS = 3
SWEEPS = 3
# In kinds of tensors: a rule is written only if it saves at least one pin.
PRICE_OF_RULE = 0.4

STORED: tuple[Kind, ...] = ("param", "grad", "opt")
MOST_BLOCKS = 5
# In kinds of tensors: a block is harder to read than a pin, so it must save more.
LEAST_GAIN = 1.5

# Storage block: its kinds, the axes that split one dim of each tensor, True if unevenly.
Stored = tuple[tuple[str, ...], Axes, bool]


@dataclass(frozen=True)
class _TensorClass:
    """Tensors with equal atoms and splits, with the number of their kinds of names."""

    entry: TensorAxes
    weight: int
    dims: frozenset[str]


def bare_rules(tensor_axes: Iterable[TensorAxes], axes: SubMesh) -> tuple[Statement, ...]:
    """Return rules for all tensors; pins correct those for which they are wrong."""
    return _RuleFitter(_kinds(tensor_axes), axes).run()


def _kinds(tensor_axes: Iterable[TensorAxes]) -> list[_TensorClass]:
    names: dict[object, set[str]] = {}
    first: dict[object, TensorAxes] = {}
    for entry in tensor_axes:
        names.setdefault(entry.alike, set()).add(skeleton(entry.tensor.name))
        first.setdefault(entry.alike, entry)
    dims = {key: frozenset(name for atom in entry.tensor.atoms for name in atom.names) for key, entry in first.items()}
    return [_TensorClass(entry, len(names[key]), dims[key]) for key, entry in first.items()]


@dataclass
class _RuleFitter:
    kinds: list[_TensorClass]
    axes: SubMesh
    places: dict[str, TensorPattern] = field(default_factory=dict)
    stored: Stored | None = None
    scoped: tuple[Block, ...] = ()
    judged: dict[object, bool] = field(default_factory=dict)

    def run(self) -> tuple[Statement, ...]:
        # A start near the result: each dim begins at its most frequent place.
        options = {dim: places for dim in self._dims() if (places := self._options(dim))}
        for dim, places in options.items():
            if places[0].terms != (NotSplit(),):
                self.places[dim] = places[0]
        for _ in range(SWEEPS):
            before = dict(self.places), self.stored
            self.stored = min((None, *self._blocks()), key=self._with_block)
            for dim, places in options.items():
                best = min((None, *places), key=lambda place: self._with_place(dim, place))
                self._set(dim, best)
            if (self.places, self.stored) == before:
                break
        self._add_blocks(options)
        return (*self._statements(self.places, self.stored), *self.scoped)

    def _add_blocks(self, options: Mapping[str, list[TensorPattern]]) -> None:
        """Add blocks one at a time while each saves enough pins."""
        while len(self.scoped) < MOST_BLOCKS:
            wrong = [kind for kind in self.kinds if not self._fits(kind, self.places, self.stored)]
            best = self._best_block(wrong, dict.fromkeys((*self._scoped(wrong, options), *self._storing(wrong))))
            if best is None:
                return
            self.scoped = (*self.scoped, best)

    def _best_block(self, wrong: Sequence[_TensorClass], blocks: Iterable[Block]) -> Block | None:
        """Return the block that saves most pins, the first of equal ones; None if none saves enough."""
        # A block rights no more kinds than are wrong now.
        most = {block: sum(kind.weight for kind in wrong if self._is_about(block, kind)) for block in blocks}
        best, least = None, -LEAST_GAIN
        for place, block in sorted(enumerate(most), key=lambda one: (-most[one[1]], one[0])):
            if -most[block] > least:
                break
            gain = self._gain(block)
            if gain < least or (gain == least and (best is None or place < best[0])):
                best, least = (place, block), gain
        return None if best is None else best[1]

    @staticmethod
    def _is_about(block: Block, kind: _TensorClass) -> bool:
        """Return whether a block can change where a kind of tensor is split."""
        roles = {role for role, _ in kind.entry.roles}
        if not any(scope.kind in roles and kind.dims.issuperset(scope.dims) for scope in block.scopes):
            return False
        patterns = [pattern for rule in block.rules for pattern in rule.dims]
        return any(one.startswith(POSITION) or any(matches(one, dim) for dim in kind.dims) for one in patterns)

    def _scoped(self, wrong: Iterable[_TensorClass], options: Mapping[str, list[TensorPattern]]) -> Iterator[Block]:
        for kind in wrong:
            if kind.entry.roles[0][0] != "act":
                continue
            for other in sorted(kind.dims - RESERVED):
                for dim in sorted(kind.dims.intersection(options) - {other}):
                    for place in (*options[dim], TensorPattern((NotSplit(),))):
                        yield Block((Scope("act", (other,)),), (DimRule((dim,), place),))

    def _storing(self, wrong: Iterable[_TensorClass]) -> Iterator[Block]:
        """Yield a storage block for each dim of the parameters that the rules get wrong."""
        for kind in wrong:
            if len(kind.entry.roles) == 1 or len({kind.entry.of(role) for role in STORED}) > 1:
                continue
            rules = rules_for(kind.entry.tensor, kind.entry.of("opt"), self.axes)
            for dim in sorted(kind.dims - RESERVED):
                yield Block(tuple(Scope(role, (dim,)) for role in STORED), rules)

    def _gain(self, block: Block) -> float:
        """Return the change of the number of wrong kinds that a block causes; negative is better."""
        about = [kind for kind in self.kinds if self._is_about(block, kind)]
        before = self._price(about, self.places, self.stored)
        kept = self.scoped
        self.scoped = (*kept, block)
        after = self._price(about, self.places, self.stored)
        self.scoped = kept
        return after - before + 0.01 * sum(len(rule.place.terms) for rule in block.rules)

    def _dims(self) -> list[str]:
        every = (name for kind in self.kinds for atom in kind.entry.tensor.atoms for name in atom.names)
        return [dim for dim in dict.fromkeys(every) if dim not in RESERVED]

    def _options(self, dim: str) -> list[TensorPattern]:
        """Return the candidate places of a dim, most frequent axes first; empty if it is never split."""
        counts: dict[Axes, int] = {}
        uneven: set[Axes] = set()
        for kind in self.kinds:
            for split, atom in _splits_of(kind.entry, dim):
                counts[split] = counts.get(split, 0) + kind.weight
                if is_uneven(atom, split, self.axes):
                    uneven.add(split)
        found = sorted((split for split in counts if split), key=lambda split: -counts[split])[:MOST_OPTIONS]
        terms = [SplitTerm(split, pad=split in uneven) for split in found]
        places = [TensorPattern((term,)) for term in terms]
        places += [TensorPattern((term, NotSplit()), priority) for term in terms for priority in (0, 1, 2)]
        places += [TensorPattern((one, other), 1) for one in terms for other in terms if one != other]
        if places and counts.get((), 0) > counts[found[0]]:
            places.insert(0, TensorPattern((NotSplit(),)))
        return places

    def _blocks(self) -> Iterator[Stored]:
        found: dict[tuple[Axes, bool], None] = {}
        for kind in self.kinds:
            stored = dict(kind.entry.roles).get("opt", ())
            for i, split in enumerate(stored):
                # The block repeats the rules for its dims, so it has to add only the axes beyond them.
                for k in range(len(split)):
                    found[split[k:], is_uneven(kind.entry.tensor.atoms[i], split, self.axes)] = None
        for axes, uneven in found:
            for kinds in (("param", "grad", "opt"), ("opt",), ("grad", "opt")):
                yield kinds, axes, uneven

    # -- how well it fits

    def _with_block(self, block: Stored | None) -> float:
        return self._price(self.kinds, self.places, block) + (2 * PRICE_OF_RULE if block else 0)

    def _with_place(self, dim: str, place: TensorPattern | None) -> float:
        places = {other: own for other, own in self.places.items() if other != dim}
        price = 0.0
        if place is not None and place.terms != (NotSplit(),):
            price = PRICE_OF_RULE + 0.01 * (len(place.terms) + place.priority)
            price = min(price, 0.1) if place in places.values() else price  # it shares a line
            places[dim] = place
        return price + self._price([kind for kind in self.kinds if dim in kind.dims], places, self.stored)

    def _set(self, dim: str, place: TensorPattern | None) -> None:
        self.places.pop(dim, None)
        if place is not None and place.terms != (NotSplit(),):
            self.places[dim] = place

    def _price(
        self, kinds: Iterable[_TensorClass], places: Mapping[str, TensorPattern], stored: Stored | None
    ) -> float:
        return sum(kind.weight for kind in kinds if not self._fits(kind, places, stored))

    def _fits(self, kind: _TensorClass, places: Mapping[str, TensorPattern], stored: Stored | None) -> bool:
        own = {dim: place for dim, place in places.items() if dim in kind.dims}
        block = stored if len(kind.entry.roles) > 1 else None
        scoped = tuple(one for one in self.scoped if self._is_about(one, kind))
        key = id(kind), tuple(own.items()), block, scoped
        if key not in self.judged:
            layout = Layout((*self._statements(own, block), *scoped))
            # Rules about dims that a kind lacks cannot change its verdict, so the key leaves them out.
            self.judged[key] = len(kind.entry.right_roles(layout, self.axes)) == len(kind.entry.roles)
        return self.judged[key]

    def _statements(self, places: Mapping[str, TensorPattern], stored: Stored | None) -> tuple[Statement, ...]:
        grouped: dict[TensorPattern, list[str]] = {}
        for dim, place in places.items():
            grouped.setdefault(place, []).append(dim)
        rules = tuple(DimRule(tuple(dims), place) for place, dims in grouped.items())
        if stored is None:
            return (*rules, NONE)
        kinds, axes, uneven = stored
        one = DimRule(("*",), TensorPattern((SplitTerm(axes, pad=uneven), NotSplit())))
        # A rule of the block overrides rules outside, so the splits of dims are repeated inside.
        held = {name for kind in self.kinds if len(kind.entry.roles) > 1 for name in kind.dims}
        own = (replace(rule, dims=tuple(dim for dim in rule.dims if dim in held)) for rule in rules)
        kept = tuple(rule for rule in own if rule.dims and not _mention(rule, axes))
        return (*rules, NONE, Block(tuple(Scope(kind) for kind in kinds), (*kept, one)))  # type: ignore[arg-type]


def _mention(rule: DimRule, axes: Axes) -> bool:
    return any(isinstance(term, SplitTerm) and set(term.axes) & set(axes) for term in rule.place.terms)


def _splits_of(entry: TensorAxes, dim: str) -> Iterator[tuple[Axes, Atom]]:
    """Yield the axes of a dim of a tensor with its first atom, in the roles that bare rules set."""
    members = [i for i, atom in enumerate(entry.tensor.atoms) if dim in atom.names]
    if not members:
        return
    for role, splits in entry.roles:
        if role not in ("grad", "opt"):
            yield tuple(axis for i in members for axis in splits[i]), entry.tensor.atoms[members[0]]
