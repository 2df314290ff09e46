"""Compiled calls of new sizes, made from calls of other sizes without a graph of their own.

A line is a stretch of one size, or of several that grow by equal steps, as height and width; all others are fixed.
Calls at its ends and one between them were emitted. Their graphs differ in integers alone, each of them linear in the
size. Between the ends the emitted graph is then exact for sums, products with constants, quotients rounded up or down,
and a minimum or maximum: where a quotient is not linear, the line gives no integer, and the size is emitted. Integers
of degree 2, as areas of images, need a fourth call that agrees. The guards of the symbolic capture hold at each size of
a line, so the model's own branches are those of its ends. A line reaches beyond the sizes seen, so that a growing
length needs few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import lcm, prod

import torch
import torch.distributed.tensor
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.ir.graph import NamedGraph
from autopar.ir.pytree import Flattened
from autopar.lowering.size_template import DiffersError, SizeTemplate
from autopar.runtime.agreement import Agreement
from autopar.runtime.check_inputs import check_inputs, check_values, is_sharded
from autopar.runtime.compiled_call import CallSignature, CompiledCall, SizedParts
from autopar.runtime.shards import LocalShard, ShardOwner
from autopar.sharding.assignment import Assignment
from autopar.tracing.export.symbolic import SymbolicExport
from autopar.tracing.sized_exports import SizedExports

__all__ = ["SizeLines", "without_values"]

# Failed attempts after which no more lines are made of a family of calls.
MOST_FAILED = 2
# Lines beyond one for each call that a line has served.
MOST_UNUSED = 4
# Lines, and emitted calls to compare with, that one family keeps.
MOST_LINES, MOST_SAMPLES = 64, 8


@dataclass(frozen=True)
class _Place:
    """Captures that serve a call, of the given inputs and of whole ones, and the values of the first one's symbols."""

    capture: SymbolicExport
    whole: SymbolicExport | None
    sizes: tuple[int, ...]

    def later(self, numbers: frozenset[int], more: int) -> _Place:
        """Return the place at which some sizes are larger."""
        sizes = tuple(size + more * (number in numbers) for number, size in enumerate(self.sizes))
        return replace(self, sizes=sizes)

    def has_captures_of(self, other: _Place) -> bool:
        return self.capture is other.capture and self.whole is other.whole

    def growing(self, other: _Place) -> frozenset[int]:
        """Return the numbers of the sizes that differ from another place's; empty if they differ by several amounts."""
        if not self.has_captures_of(other):
            return frozenset()
        gaps = [one - another for one, another in zip(self.sizes, other.sizes, strict=True)]
        return frozenset(number for number, gap in enumerate(gaps) if gap) if len({0, *gaps}) == 2 else frozenset()


@dataclass(frozen=True)
class _Line:
    """Calls between two values of a size, made from one emitted call."""

    place: _Place
    # Numbers of the sizes that grow. The first of them stands for all.
    numbers: frozenset[int]
    low: int
    high: int
    # The size differs from `low` by multiples of this, so splits into equal parts stay as they are.
    step: int
    call: CompiledCall
    template: SizeTemplate

    def size(self, place: _Place) -> int:
        return place.sizes[min(self.numbers)]

    def fits(self, place: _Place) -> bool:
        """Return whether a place is on this line, or before or after its ends."""
        if not self.place.has_captures_of(place):
            return False
        more = self.size(place) - self.size(self.place)
        return self.place.later(self.numbers, more) == place and not more % self.step

    def parts(self, place: _Place) -> SizedParts | None:
        size = self.size(place)
        if not self.low <= size <= self.high:
            return None
        try:
            made: SizedParts = self.template.at(size)
        except DiffersError:
            return None
        return made

    def extended(self, place: _Place, call: CompiledCall) -> _Line:
        """Return this line up to the size of an emitted call; raise `DiffersError` if that is not on it."""
        size = self.size(place)
        self.template.check(call.sized, size)
        return replace(self, low=min(self.low, size), high=max(self.high, size))


@dataclass
class SizeLines:
    """Lines of calls that differ in sizes alone; equal on all ranks."""

    exports: SizedExports
    whole: SizedExports
    # Number of graphs that were emitted.
    emitted: int = 0
    # Number of calls that were made from others.
    served: int = 0
    _lines: list[_Line] = field(default_factory=list)
    # The latest emitted calls, with the shapes of their inputs.
    _samples: list[tuple[Flattened, CompiledCall]] = field(default_factory=list)
    _failed: int = 0

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
        ahead = self.ahead(given, call)
        # A rank that has forgotten its calls has nothing to compare with.
        is_same = agreement.all_same("; ".join(str(one.key[0]) for one in ahead))
        if ahead and is_same:
            try:
                others = [(one, emitted(one)) for one in ahead]
            except AutoparError:
                # As of a limit on memory, raised on all ranks; nobody has asked for these sizes.
                others = []
            line = self.learn(given, call, others)
            self.keep(line if agreement.all_true(line is not None) else None)
        self.sample(given, call)

    # -- of this rank -------------------------------------------------------------------------------------------------

    def find(self, given: CallSignature) -> tuple[CompiledCall, SizedParts] | None:
        """Return the call that makes this one, and the parts of it that depend on sizes; None if no line has it."""
        place = self._place(given.flat, None) if self._lines else None
        if place is None:
            return None
        for line in reversed(self._lines):
            if line.fits(replace(place, whole=line.place.whole)):
                parts = line.parts(place)
                if parts is not None and line.place.whole is self._whole_capture(given.flat, parts.inputs):
                    return line.call, parts
        return None

    def ahead(self, given: CallSignature, call: CompiledCall) -> list[CallSignature]:
        """Return two calls of larger sizes to emit after an emitted call, so that a line begins at it; else none."""
        place, along = self._place(given.flat, call.held), self._along(given, call)
        # Sizes that vary in many ways at once are seldom on a line again.
        wasted = len(self._lines) > MOST_UNUSED + self.served
        if place is None or along is None or self._failed >= MOST_FAILED or wasted:
            return []
        numbers, step = along
        size = place.sizes[min(numbers)]
        run = step * -(-size // (2 * step))
        while run:
            places = (place.later(numbers, more) for more in (run, 2 * run))
            found = [_with_shapes(given, place.capture.shapes_at(one.sizes)) for one in places]
            if all(self.exports.serving(one.flat) is place.capture for one in found):
                return found
            # The guards end somewhere, as at the most positions of a model.
            run = step * (run // step // 2)
        return []

    def learn(
        self, given: CallSignature, call: CompiledCall, others: Sequence[tuple[CallSignature, CompiledCall]]
    ) -> tuple[_Line | None, _Line] | None:
        """Return a line through emitted calls, after the line that it replaces; None if there is none."""
        along = self._along(given, call)
        found = [(self._place(one.flat, made.held), made) for one, made in ((given, call), *others)]
        points = [(place, made) for place, made in found if place is not None]
        if along is None or len(points) < len(found):
            return None
        numbers, step = along
        if not all(points[0][0].has_captures_of(place) for place, _ in points):
            return None
        for line in reversed(self._lines):
            if line.numbers == numbers and line.fits(points[0][0]):
                with suppress(DiffersError):
                    longer = line
                    for place, made in points:
                        longer = longer.extended(place, made)
                    if longer != line:
                        return line, longer
        if len(points) != 3:
            return None
        new = self._line(points, numbers, step)
        return None if new is None else (None, new)

    def _line(self, points: Sequence[tuple[_Place, CompiledCall]], numbers: frozenset[int], step: int) -> _Line | None:
        (first, call), (middle, _), (last, _) = points
        low, high = first.sizes[min(numbers)], last.sizes[min(numbers)]
        try:
            template = SizeTemplate.of(low, middle.sizes[min(numbers)] - low, *(made.sized for _, made in points))
            line = _Line(first, numbers, low, high, step, call, template)
        except DiffersError:
            return None
        agree = 0
        for flat, other in self._samples:
            place = self._place(flat, other.held)
            if place is not None and line.fits(place):
                with suppress(DiffersError):
                    line = line.extended(place, other)
                    agree += 1
        return line if agree or template.is_linear else None

    def keep(self, found: tuple[_Line | None, _Line] | None) -> None:
        """Keep a line that all ranks have found, or count a failure."""
        if found is None:
            self._failed += 1
            return
        others = [line for line in self._lines if line is not found[0]]
        self._lines = [*others[-MOST_LINES + 1 :], found[1]]

    def sample(self, given: CallSignature, call: CompiledCall) -> None:
        """Keep an emitted call, to compare later ones with it."""
        self._samples = [*self._samples[-MOST_SAMPLES + 1 :], (without_values(given).flat, call)]

    def _along(self, given: CallSignature, call: CompiledCall) -> tuple[frozenset[int], int] | None:
        """Return the numbers of the sizes that vary, and the step between sizes that are split alike."""
        place = self._place(given.flat, call.held)
        if place is None or any(node.by_share for node in call.graph.nodes):
            return None
        for flat, other in reversed(self._samples):
            at = self._place(flat, other.held)
            numbers = frozenset[int]() if at is None else place.growing(at)
            if numbers:
                return numbers, _step(call.graph, other.graph, call.assignment)
        return None

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


def _step(graph: NamedGraph, other: NamedGraph, assignment: Assignment) -> int:
    """Return the least multiple of the numbers of parts into which sizes that differ are split."""
    parts = {1}
    for node, another in zip(graph.nodes, other.nodes, strict=False):
        choice = assignment.ops[node.name].choice
        for (factor, atom), axes in choice.splits:
            sizes = node.atoms[factor], another.atoms.get(factor, ())
            if len(sizes[0]) != len(sizes[1]) or sizes[0][atom] != sizes[1][atom]:
                parts.add(prod(assignment.axes[axis] for axis in axes))
        given = zip(node.operands, assignment.ops[node.name].operands, strict=True)
        made = zip(node.outputs, assignment.ops[node.name].results, strict=True)
        for name, sharding in (*given, *made):
            if name is None or sharding is None or name not in other.tensors:
                continue
            atoms = zip(graph.tensors[name].atoms, other.tensors[name].atoms, sharding.splits, strict=False)
            parts |= {prod(assignment.axes[axis] for axis in axes) for one, two, axes in atoms if one.size != two.size}
    return lcm(*parts)


def without_values(given: CallSignature) -> CallSignature:
    """Return a call with inputs that need no memory; containers among the arguments may hold the given tensors."""
    kept = (_expanded(tensor) for tensor in given.tensors)
    return replace(given, flat=replace(given.flat, tensors=tuple(kept), containers=()))


def _expanded(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    made = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(local.shape)
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        made = DTensor.from_local(made, mesh, placements, shape=tensor.shape, stride=tensor.stride(), run_check=False)
    return made.requires_grad_(tensor.requires_grad)


def _with_shapes(given: CallSignature, shapes: Sequence[tuple[int, ...]]) -> CallSignature:
    """Return a call with zeros of other shapes."""
    made = (_zeros(tensor, shape) for tensor, shape in zip(given.tensors, shapes, strict=True))
    return replace(given, flat=replace(given.flat, tensors=tuple(made)))


def _zeros(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        made: Tensor = torch.distributed.tensor.zeros(
            *shape, dtype=tensor.dtype, device_mesh=mesh, placements=placements
        )
    else:
        made = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)
