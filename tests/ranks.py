"""All ranks of a mesh as threads of one process: each runs its own generated graph, forward and backward.

Only the transport is simulated: a collective waits until all ranks of its group have come to it, and is an error where
they did not come to the same one. So a rank that sends something else than the others, or nothing, is found at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.completion import complete
from autopar.decisions import Decisions
from autopar.layout.language import parse_layout
from autopar.layout.resolve import atoms_of
from autopar.layout.state import coordinates
from autopar.rewrite.emit import emit
from autopar.rewrite.functions import Groups, _Group
from autopar.tracing.graph import NamedGraph
from tests.gaps import number
from tests.gloo import added, refuse
from tests.simulation import gather

__all__ = ["SimulatedGroups", "difference", "difference_of", "on_ranks", "relative"]

T = TypeVar("T")


class SimulatedGroups(Groups):
    """The groups of one simulated rank; a group's name says which ranks it has."""

    def __init__(self, axes: Mapping[str, int], rank: int) -> None:
        self.places = list(coordinates(axes))
        self.names = tuple(axes)
        self.rank = rank
        self.device_type = "cpu"
        self.coordinate = self.places[rank]
        self._found = {}

    def _group(self, axes: tuple[str, ...]) -> _Group:
        fixed = {axis: at for axis, at in self.coordinate.items() if axis not in axes}
        ranks = [rank for rank, place in enumerate(self.places) if fixed.items() <= place.items()]
        return _Group(",".join(map(str, ranks)), tuple(self.places[rank] for rank in ranks))


def on_ranks(axes: Mapping[str, int], function: Callable[[SimulatedGroups], T]) -> list[T]:
    """What the function returns on each rank of a mesh; the first error of a rank is raised."""
    count = len(list(coordinates(axes)))
    meeting = _Meeting(count)
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            with _Transport(meeting, rank):
                results[rank] = function(SimulatedGroups(axes, rank))
        except BaseException as error:  # noqa: BLE001  # the caller gets it
            meeting.fail(error)
        finally:
            meeting.leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if meeting.error is not None:
        raise meeting.error
    return results


class _Ended(Exception):
    """Another rank has failed."""


@dataclass
class _Meeting:
    """Where the ranks of a group wait for each other."""

    active: int
    waiting: int = 0
    """Ranks that have waited since something happened."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    given: dict[str, dict[int, Any]] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        with self.changed:
            if self.error is None or isinstance(self.error, _Ended):
                self.error = error
            self._wake()

    def leave(self) -> None:
        with self.changed:
            self.active -= 1
            self._check()

    def exchange(self, group: str, rank: int, given: Any) -> list[Any]:
        """What each rank of the group has given, in their order, once all have."""
        ranks = [int(text) for text in group.split(",")]
        with self.changed:
            while self.taken.get(group):  # the ranks of the collective before this one have not all left
                self._wait()
            met = self.given.setdefault(group, {})
            met[rank] = given
            if len(met) == len(ranks):
                self.taken[group] = len(ranks)
                self._wake()
            while not self.taken.get(group):
                self._wait()
            self.taken[group] -= 1
            if not self.taken[group]:
                del self.given[group]
                self._wake()
            return [met[member] for member in ranks]

    def _wait(self) -> None:
        self.waiting += 1
        self._check()
        if self.error is None:
            self.changed.wait()
        if self.error is not None:
            raise _Ended

    def _wake(self) -> None:
        self.waiting = 0
        self.changed.notify_all()

    def _check(self) -> None:
        if self.error is None and self.waiting and self.waiting == self.active and not any(self.taken.values()):
            texts = {rank: what for met in self.given.values() for rank, what in met.items()}
            listed = "; ".join(f"rank {rank}: {what[0]}" for rank, what in sorted(texts.items()))
            self.error = AssertionError(f"the ranks wait for each other: {listed}")
            self._wake()


class _Transport(TorchDispatchMode):
    """Runs the functional collectives of one rank."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        super().__init__()
        self.meeting = meeting
        self.rank = rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if not name.startswith("_c10d_functional::"):
            return func(*args, **(kwargs or {}))
        name = name.removeprefix("_c10d_functional::")
        if name == "wait_tensor":
            return args[0]
        if name.endswith("_coalesced"):
            buffers, *given = args
            return [self._collective(name, buffer, *given) for buffer in buffers]
        return self._collective(name, *args)

    def _collective(self, name: str, buffer: Tensor, *given: Any) -> Tensor:
        *options, group = given
        same = name, tuple(buffer.shape) if name != "all_to_all_single" else tuple(buffer.shape[1:]), buffer.dtype
        met = self.meeting.exchange(group, self.rank, (same, options, buffer.detach().clone()))
        place = [int(text) for text in group.split(",")].index(self.rank)
        assert all(other[0] == same for other in met), f"not the same collective: {[other[0] for other in met]}"
        kind = name.removesuffix("_coalesced")
        refuse(name, buffer.dtype, options[0] if kind.startswith(("all_reduce", "reduce_scatter")) else None)
        buffers = [other[2] for other in met]
        if kind in ("all_reduce", "all_reduce_"):
            reduced = added(buffers) if options[0] == "sum" else torch.stack(buffers).amax(0)
            if kind == "all_reduce_":
                # Booleans as bytes: a copy would make true ones of those that have been added.
                as_is = torch.uint8 if buffer.dtype is torch.bool else buffer.dtype
                buffer.view(as_is).copy_(reduced.view(as_is))
            return reduced if kind == "all_reduce" else buffer
        if kind == "all_gather_into_tensor":
            return torch.cat(buffers)
        if kind == "reduce_scatter_tensor":
            return added(buffers).chunk(len(met))[place].clone()
        assert kind == "all_to_all_single", name
        parts = [other[2].split(other[1][1])[place] for other in met]
        assert [len(part) for part in parts] == list(options[0]), "sizes of an all-to-all differ"
        return torch.cat(parts)


# -- a model on all ranks against itself ------------------------------------------------------------------------------


def difference(graph: NamedGraph, layout: str, axes: Mapping[str, int], inputs: Sequence[Tensor]) -> float:
    """The largest difference in results and gradients, of the size of the largest number in each."""
    decisions = complete(graph, parse_layout(layout), axes)
    return difference_of(graph, decisions, inputs)


def difference_of(graph: NamedGraph, decisions: Decisions, inputs: Sequence[Tensor]) -> float:
    """The same for decisions already made; every parameter that requires a gradient counts."""
    axes = decisions.axes
    values = _values(graph, inputs)
    expected, gradients = _step(graph.exported.graph_module, values, graph)

    def run(groups: SimulatedGroups) -> tuple[list[Tensor], dict[str, Tensor | None]]:
        module = emit(graph, decisions, groups, "full", False).graph_module
        cut = {name: _cut(graph, decisions, name, value, groups) for name, value in values.items()}
        return _step(module, cut, graph)

    ranks = on_ranks(axes, run)
    worst = max(relative(a, b) for outputs, _ in ranks for a, b in zip(expected, outputs, strict=True))
    for name, whole in gradients.items():
        parts = [found[name] for _, found in ranks]
        layout, atoms = decisions.stored[name], atoms_of(graph.tensors[name])
        if whole is None:
            assert all(part is None or not part.any() for part in parts), name
            continue
        zeros = [
            torch.zeros(atoms.fold(layout.local_sizes(atoms, axes, at)), dtype=whole.dtype) for at in coordinates(axes)
        ]
        filled = [zero if part is None else part for zero, part in zip(zeros, parts, strict=True)]
        worst = max(worst, relative(whole, gather(filled, layout, atoms, axes)))
    return worst


def relative(expected: Tensor, found: Tensor) -> float:
    assert expected.shape == found.shape
    if not expected.numel():
        return 0.0
    off = float((found - expected).detach().double().abs().max())
    return number(off / max(float(expected.detach().double().abs().max()), 1e-3))


def _values(graph: NamedGraph, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """What each placeholder stands for."""
    given = iter(inputs)
    tables = {**dict(graph.model.named_parameters()), **dict(graph.model.named_buffers()), **graph.exported.constants}
    return {p.name: next(given) if p.kind == "input" else tables[p.name] for p in graph.exported.placeholders}


def _cut(graph: NamedGraph, decisions: Decisions, name: str, value: Tensor, groups: SimulatedGroups) -> Tensor:
    tensor = graph.tensors[name]
    if tensor.kind != "param":
        return value
    atoms, layout = atoms_of(tensor), decisions.stored[name]
    part = value.detach().reshape(atoms.sizes)
    pieces = layout.pieces(atoms, decisions.axes, groups.coordinate)
    for atom, (start, length) in enumerate(pieces):
        part = part.narrow(atom, start, length)
    return part.reshape(atoms.fold(tuple(length for _, length in pieces))).clone().requires_grad_(value.requires_grad)


def _step(
    module: Callable[..., Any], values: Mapping[str, Tensor], graph: NamedGraph
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """The results of a forward and the gradients of a backward."""
    leaves = {
        name: value.detach().clone().requires_grad_(value.requires_grad)
        if graph.tensors[name].kind == "param"
        else value
        for name, value in values.items()
    }
    found = [result for result in module(*leaves.values()) if isinstance(result, Tensor)]
    total = torch.zeros((), dtype=torch.float64)
    for result in found:
        if result.requires_grad:
            weights = torch.linspace(-1, 1.5, result.numel(), dtype=torch.float64).cos().view(result.shape)
            total = total + (result.double() * weights).sum()
    trained = [name for name, leaf in leaves.items() if graph.tensors[name].kind == "param" and leaf.requires_grad]
    if trained and total.requires_grad:
        total.backward()
    return [result.detach() for result in found], {name: leaves[name].grad for name in trained}
