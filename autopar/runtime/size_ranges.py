"""Compiled calls of new sizes, made from calls of other sizes without a graph of their own.

A range has two ends for each size that varies, or for several that grow by equal steps, as height and width; all others
are fixed. Calls at its corners and one in the middle were emitted. Their graphs differ in integers alone, each of them
linear in each size. Between the ends the emitted graph is then exact for sums, products with constants and of sizes
that vary freely, quotients rounded up or down, and a minimum or maximum: where a quotient is not linear, the range
gives no integer, and the sizes are emitted. Integers of degree 2 in one size, as areas of images, need a fourth call
that agrees. The guards of the symbolic capture hold at each point of a range, so the model's own branches are those of
its corners. A range reaches beyond the sizes seen, so that a growing length needs few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from math import lcm, prod
from operator import add

import torch

from autopar.errors import AutoparError
from autopar.ir.graph import NamedGraph
from autopar.ir.pytree import Flattened
from autopar.lowering.size_template import DiffersError, SizeTemplate
from autopar.runtime.agreement import Agreement
from autopar.runtime.check_inputs import check_inputs, check_values, is_sharded
from autopar.runtime.compiled_call import CallSignature, CompiledCall, SizedParts
from autopar.runtime.shards import LocalShard, ShardOwner
from autopar.runtime.sized_signatures import with_shapes, without_values
from autopar.sharding.assignment import Assignment
from autopar.tracing.export.symbolic import SymbolicExport
from autopar.tracing.sized_exports import SizedExports

__all__ = ["SizeRanges"]

# Sizes of one point of a range, one for each group.
Point = tuple[int, ...]
# Numbers of sizes, in groups that grow together.
Groups = tuple[frozenset[int], ...]

# Failed attempts after which no more ranges are made of a family of calls.
MOST_FAILED = 2
# Ranges beyond one for each call that a range has served.
MOST_UNUSED = 4
# Ranges, and emitted calls to compare with, that one family keeps.
MOST_RANGES, MOST_SAMPLES = 64, 8
# Sizes of one range that vary freely: the corners of three are eight calls.
MOST_FREE = 3


@dataclass(frozen=True)
class _Place:
    """Captures that serve a call, of the given inputs and of whole ones, and the values of the first one's symbols."""

    capture: SymbolicExport
    whole: SymbolicExport | None
    sizes: tuple[int, ...]

    def at(self, groups: Groups, sizes: Sequence[int]) -> _Place:
        """Return the place at which groups of sizes grow until the first of each has this size."""
        found = list(self.sizes)
        for group, size in zip(groups, sizes, strict=True):
            more = size - self.sizes[min(group)]
            for number in group:
                found[number] += more
        return replace(self, sizes=tuple(found))

    def along(self, groups: Groups) -> Point:
        return tuple(self.sizes[min(group)] for group in groups)

    def has_captures_of(self, other: _Place) -> bool:
        return self.capture is other.capture and self.whole is other.whole

    def gaps(self, other: _Place | None) -> Point:
        """Return how much larger each size is than at another place; nothing where its captures are others."""
        if other is None or not self.has_captures_of(other):
            return ()
        return tuple(one - another for one, another in zip(self.sizes, other.sizes, strict=True))


@dataclass(frozen=True)
class _Range:
    """Calls between two values of each of some sizes, made from one emitted call."""

    place: _Place
    # Numbers of the sizes that grow together. The first of each group stands for it.
    groups: Groups
    low: Point
    high: Point
    # Sizes differ from `low` by multiples of these, so splits into equal parts stay as they are.
    steps: Point
    call: CompiledCall
    template: SizeTemplate

    def fits(self, place: _Place) -> bool:
        """Return whether a place is in this range, or outside of its ends."""
        if not self.place.has_captures_of(place):
            return False
        point = place.along(self.groups)
        is_even = all(not (size - low) % step for size, low, step in zip(point, self.low, self.steps, strict=True))
        return is_even and self.place.at(self.groups, point) == place

    def holds(self, point: Point) -> bool:
        return all(low <= size <= high for low, size, high in zip(self.low, point, self.high, strict=True))

    def parts(self, place: _Place) -> SizedParts | None:
        point = place.along(self.groups)
        if not self.holds(point):
            return None
        try:
            made: SizedParts = self.template.at(*point)
        except DiffersError:
            return None
        return made

    def around(self, point: Point) -> _Range:
        """Return the range of this template that ends at a point where that is outside of it."""
        low, high = (tuple(map(pick, ends, point)) for pick, ends in ((min, self.low), (max, self.high)))
        return replace(self, low=low, high=high)

    def corners(self) -> list[Point]:
        return list(product(*zip(self.low, self.high, strict=True)))

    def check(self, place: _Place, call: CompiledCall) -> None:
        """Raise `DiffersError` unless the template gives an emitted call."""
        self.template.check(call.sized, *place.along(self.groups))


@dataclass(frozen=True)
class Target:
    """A range that is to be made: its ends, and the points to emit for it."""

    groups: Groups
    steps: Point
    # The range that it makes longer, if it is none of its own.
    known: _Range | None
    low: Point
    high: Point
    points: tuple[Point, ...]


@dataclass
class SizeRanges:
    """Ranges of calls that differ in sizes alone; equal on all ranks."""

    exports: SizedExports
    whole: SizedExports
    # Number of graphs that were emitted.
    emitted: int = 0
    # Number of calls that were made from others.
    served: int = 0
    _ranges: list[_Range] = field(default_factory=list)
    # The latest emitted calls, with the shapes of their inputs.
    _samples: list[tuple[Flattened, CompiledCall]] = field(default_factory=list)
    _failed: int = 0
    # Whether sizes that vary freely share a range; a model may have integers for which that is wrong.
    _free: bool = True

    # -- of all ranks together ----------------------------------------------------------------------------------------

    def agreed(
        self, given: CallSignature, agreement: Agreement, rank: ShardOwner, local_inputs: bool
    ) -> tuple[CompiledCall, SizedParts] | None:
        """Return the call that makes this one, and the parts of it that depend on sizes, if all ranks have both."""
        found = self.find(given)
        if not agreement.all_true(found is not None):
            return None
        assert found is not None, "all ranks have found it"
        self.served += 1
        held = found[1].inputs
        agreement.together(lambda: check_inputs(given, held, rank, local_inputs))
        if local_inputs or is_sharded(given):
            check_values(given, held, agreement, rank, local_inputs)
        return found

    def look_ahead(
        self,
        given: CallSignature,
        call: CompiledCall,
        agreement: Agreement,
        emitted: Callable[[CallSignature], CompiledCall],
    ) -> None:
        """Emit calls of larger sizes beside an emitted call, so that the sizes up to them need no emission."""
        # A range that cannot reach these sizes may leave room for one that begins there.
        for anew in (False, True):
            ahead = self.ahead(given, call, anew)
            # A rank that has forgotten its calls has nothing to compare with.
            texts = ("no range",) if ahead is None else (str(one.key[0]) for one in ahead[1])
            is_same = agreement.all_same("; ".join(texts))
            if ahead is None or not is_same:
                continue
            try:
                others = [(one, emitted(one)) for one in ahead[1]]
            except AutoparError:
                # As of a limit on memory, raised on all ranks; nobody has asked for these sizes.
                others = []
            made = self.learn(given, call, ahead[0], others)
            if agreement.all_true(made is not None):
                assert made is not None, "all ranks have made it"
                self.keep(made)
                break
            if anew:
                self._fail(ahead[0].groups)
        self.sample(given, call)

    # -- of this rank -------------------------------------------------------------------------------------------------

    def find(self, given: CallSignature) -> tuple[CompiledCall, SizedParts] | None:
        """Return the call that makes this one, and the parts of it that depend on sizes; None if no range has it."""
        place = self._place(given.flat, None) if self._ranges else None
        if place is None:
            return None
        for one in reversed(self._ranges):
            if one.fits(replace(place, whole=one.place.whole)):
                parts = one.parts(place)
                if parts is not None and one.place.whole is self._whole_capture(given.flat, parts.inputs):
                    return one.call, parts
        return None

    def ahead(self, given: CallSignature, call: CompiledCall, anew: bool) -> tuple[Target, list[CallSignature]] | None:
        """Return a range to make after an emitted call, and the calls to emit for it; None if there is none.

        It begins at the call if it is made `anew`; else it reaches from a range that exists beyond the call.
        """
        place, groups = self._place(given.flat, call.held), self._groups(given, call)
        # Sizes that vary in many ways at once are seldom in a range again.
        wasted = len(self._ranges) > MOST_UNUSED + self.served
        if place is None or not groups or self._failed >= MOST_FAILED or wasted:
            return None
        near = (one for one in reversed(self._ranges) if len(one.groups) >= len(groups) and one.fits(place))
        known = None if anew else next(near, None)
        if known is None and not anew:
            return None
        groups = groups if known is None else known.groups
        steps = self._steps(place, call, groups) if known is None else known.steps
        halvings = max(place.along(groups)).bit_length()
        for shrunk in (2**power for power in range(halvings)):
            target = self._target(place, groups, steps, known, shrunk)
            if target is None:
                break
            shapes = (place.capture.shapes_at(place.at(groups, point).sizes) for point in target.points)
            found = [with_shapes(given, one) for one in shapes]
            # Guards may end somewhere, as at the most positions of a model.
            if all(self.exports.serving(one.flat) is place.capture for one in found):
                return target, found
        return None

    def _target(self, place: _Place, groups: Groups, steps: Point, known: _Range | None, shrunk: int) -> Target | None:
        """Return a range around a place, and the points of it to emit; it reaches the less far the more is `shrunk`."""
        point = place.along(groups)
        runs = tuple(step * (-(-size // (2 * step)) // shrunk) for size, step in zip(point, steps, strict=True))
        if known is None:
            if not all(runs):
                return None
            low = point if shrunk > 1 or len(groups) == 1 else self._lowest(place, groups, steps)
            spans = zip(low, point, runs, steps, strict=True)
            halves = [step * -(-(size + 2 * run - least) // (2 * step)) for least, size, run, step in spans]
            middle, high = (tuple(map(add, low, length)) for length in (halves, [2 * half for half in halves]))
            corners = (one for one in product(*zip(low, high, strict=True)) if one != point)
            return Target(groups, steps, None, low, high, (*corners, middle))
        # It grows to twice a size beyond it. Below, gradients of a small tensor may be summed elsewhere.
        beyond = zip(point, runs, known.high, strict=True)
        far = tuple(size + 2 * run * (size > high) for size, run, high in beyond)
        wider = known.around(point).around(far)
        new = tuple(one for one in wider.corners() if one != point and not known.holds(one))
        return Target(groups, steps, known, wider.low, wider.high, new)

    def _lowest(self, place: _Place, groups: Groups, steps: Point) -> Point:
        """Return the least value of each size in this call and in those before that are split as it is."""
        points = [place.along(groups)]
        for at in self._sampled():
            if at is not None and any(place.gaps(at)) and place.at(groups, at.along(groups)) == at:
                gaps = zip(points[0], at.along(groups), steps, strict=True)
                points += [at.along(groups)] * all(not (one - another) % step for one, another, step in gaps)
        return tuple(map(min, *points)) if len(points) > 1 else points[0]

    def learn(
        self,
        given: CallSignature,
        call: CompiledCall,
        target: Target,
        others: Sequence[tuple[CallSignature, CompiledCall]],
    ) -> _Range | None:
        """Return the range of a target through emitted calls; None if there is none."""
        found = [(self._place(one.flat, made.held), made) for one, made in ((given, call), *others)]
        points = [(place, made) for place, made in found if place is not None]
        first = points[0][0] if points else None
        if first is None or len(points) != 1 + len(target.points):
            return None
        if not all(first.has_captures_of(place) for place, _ in points):
            return None
        try:
            if target.known is None:
                return self._new(points, target)
            made = replace(target.known, low=target.low, high=target.high)
            for place, other in points:
                made.check(place, other)
        except DiffersError:
            return None
        return made

    def _new(self, points: Sequence[tuple[_Place, CompiledCall]], target: Target) -> _Range | None:
        """Return a range through calls at its corners, in its middle, and at the call that began it."""
        low, high, axes = target.low, target.high, range(len(target.groups))
        made_at = {place.along(target.groups): (place, made) for place, made in points}
        first, call = made_at[low]
        middle = made_at[tuple((begin + end) // 2 for begin, end in zip(low, high, strict=True))][1]
        ends = {
            tuple(i for i in axes if point[i] != low[i]): made_at[point][1]
            for point in product(*zip(low, high, strict=True))
        }
        # One size alone may have more parts than the others, so each has steps of its own.
        pairs = (_split_sizes(call.graph, ends[i,].graph, call.assignment) for i in axes)
        steps = tuple(lcm(*(parts for _, parts in found)) for found in pairs)
        far = tuple(end - begin for begin, end in zip(low, high, strict=True))
        if any((length // 2) % step for length, step in zip(far, steps, strict=True)):
            return None
        template = SizeTemplate.of(low, far, {at: made.sized for at, made in ends.items()}, middle.sized)
        made = _Range(first, target.groups, low, high, steps, call, template)
        made.check(*points[0])
        agree = 0
        for flat, other in self._samples:
            place = self._place(flat, other.held)
            if place is None or not made.fits(place):
                continue
            # A call that was traced has other objects in its results than one of the capture.
            with suppress(DiffersError):
                made.check(place, other)
                agree += 1
                if len(far) == 1:
                    made = made.around(place.along(made.groups))
        return made if agree or template.is_linear else None

    def keep(self, made: _Range) -> None:
        """Keep a range that all ranks have made, in place of a shorter one of the same call."""
        others = [one for one in self._ranges if one.template is not made.template]
        self._ranges = [*others[-MOST_RANGES + 1 :], made]

    def _fail(self, groups: Groups) -> None:
        """Count a range that cannot be made; one of several sizes is tried once."""
        self._failed += len(groups) == 1
        self._free = self._free and len(groups) == 1

    def sample(self, given: CallSignature, call: CompiledCall) -> None:
        """Keep an emitted call, to compare later ones with it."""
        self._samples = [*self._samples[-MOST_SAMPLES + 1 :], (without_values(given).flat, call)]

    def _groups(self, given: CallSignature, call: CompiledCall) -> Groups:
        """Return the numbers of the sizes that vary, those together that grow alike."""
        place = self._place(given.flat, call.held)
        if place is None or any(node.by_share for node in call.graph.nodes):
            return ()
        # From each earlier call, the latest first.
        gaps = [gap for gap in map(place.gaps, self._sampled()) if any(gap)]
        if gaps and not (self._free and len(_alike(gaps)) <= MOST_FREE):
            gaps = gaps[:1]
        groups = _alike(gaps)
        return groups if len(groups) == 1 or (self._free and len(groups) <= MOST_FREE) else ()

    def _steps(self, place: _Place, call: CompiledCall, groups: Groups) -> Point:
        """Return a step for each group of sizes: sizes at multiples of it are split alike."""
        steps = [1] * len(groups)
        for at, (_, other) in zip(self._sampled(), reversed(self._samples), strict=True):
            if at is None or not any(place.gaps(at)):
                continue
            pairs = list(zip(place.along(groups), at.along(groups), strict=True))
            for sizes, parts in _split_sizes(call.graph, other.graph, call.assignment):
                # Sizes that the model makes, as a product, may follow from any group.
                mine = [sizes == pair or sizes not in pairs for pair in pairs]
                steps = [lcm(step, parts if is_mine else 1) for step, is_mine in zip(steps, mine, strict=True)]
        return tuple(steps)

    def _sampled(self) -> list[_Place | None]:
        return [self._place(flat, other.held) for flat, other in reversed(self._samples)]

    def _place(self, flat: Flattened, held: Mapping[str, LocalShard] | None) -> _Place | None:
        """Return the place of a call; without `held`, that of a call whose inputs are whole."""
        capture = self.exports.serving(flat)
        if capture is None:
            return None
        whole = None if held is None else self._whole_capture(flat, held)
        if held is not None and whole is None and self.whole.captures:
            return None
        return _Place(capture, whole, capture.sizes_of(flat))

    def _whole_capture(self, flat: Flattened, held: Mapping[str, LocalShard]) -> SymbolicExport | None:
        """Return the capture of whole inputs; None where the given ones are whole."""
        if not self.whole.captures:
            return None
        tensors = zip(flat.tensors, flat.paths, strict=True)
        shapes = (torch.empty(held[path].shape, dtype=tensor.dtype, device="meta") for tensor, path in tensors)
        return self.whole.serving(replace(flat, tensors=tuple(shapes)))


def _alike(gaps: Sequence[Point]) -> Groups:
    """Return the numbers of the sizes with a gap, those together whose gaps are all equal."""
    found: dict[Point, list[int]] = {}
    for number, gap in enumerate(zip(*gaps, strict=True)):
        if any(gap):
            found.setdefault(gap, []).append(number)
    return tuple(map(frozenset, found.values()))


def _split_sizes(
    graph: NamedGraph, other: NamedGraph, assignment: Assignment
) -> Iterator[tuple[tuple[int | None, int | None], int]]:
    """Yield the sizes of split parts of tensors that differ between two graphs, and into how many parts."""
    for node, another in zip(graph.nodes, other.nodes, strict=False):
        choice = assignment.ops[node.name].choice
        for (factor, atom), axes in choice.splits:
            one, two = node.atoms[factor], another.atoms.get(factor, ())
            if len(one) != len(two):
                yield (None, None), prod(assignment.axes[axis] for axis in axes)
            elif one[atom] != two[atom]:
                yield (one[atom], two[atom]), prod(assignment.axes[axis] for axis in axes)
        given = zip(node.operands, assignment.ops[node.name].operands, strict=True)
        made = zip(node.outputs, assignment.ops[node.name].results, strict=True)
        for name, sharding in (*given, *made):
            if name is None or sharding is None or name not in other.tensors:
                continue
            atoms = zip(graph.tensors[name].atoms, other.tensors[name].atoms, sharding.splits, strict=False)
            for first, second, axes in atoms:
                if first.size != second.size:
                    yield (first.size, second.size), prod(assignment.axes[axis] for axis in axes)
