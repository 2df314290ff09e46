"""All ranks of a mesh as threads of one process: each runs its own generated graph, forward and backward.

Only the transport is simulated: a collective waits until all ranks of its group have come to it, and is an error where
they did not come to the same one. So a rank that sends something else than the others, or nothing, is found at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ir.graph import NamedGraph
from autopar.ir.interpreter import TracedCall
from autopar.lowering.collectives.process_groups import Groups, _Group
from autopar.lowering.emit import emit
from autopar.lowering.modules.bucket import GradientSync, ParameterHandling
from autopar.lowering.passes.bucket_parameters import BucketedParameters
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.layout.parameter_storage import GatherPolicy
from autopar.sharding.propagation import propagate
from autopar.sharding.sharding import atoms_of, coordinates
from tests.eager import Arguments, Left, arguments_of, eager_step, largest_difference, relative, step_of
from tests.gloo import added, refuse
from tests.simulation import gather

__all__ = ["SimulatedGroups", "difference", "difference_of", "on_ranks", "relative"]

T = TypeVar("T")


class SimulatedGroups(Groups):
    """The groups of one simulated rank; a group's name says which ranks it has."""

    def __init__(self, axes: Mapping[str, int], rank: int, meeting: _Meeting) -> None:
        self.meeting = meeting
        self.places = list(coordinates(axes))
        self.names = tuple(axes)
        self.rank = rank
        self.device_type = "cpu"
        self.replicas = 1
        self.coordinate = self.places[rank]
        self.replicas = 1
        self._found = {}

    def _group(self, axes: tuple[str, ...]) -> _Group:
        fixed = {axis: at for axis, at in self.coordinate.items() if axis not in axes}
        ranks = [rank for rank, place in enumerate(self.places) if fixed.items() <= place.items()]
        return _Group(",".join(map(str, ranks)), tuple(self.places[rank] for rank in ranks))

    def stages(self, axis: str) -> Any:
        """No process group: a pipeline is built here and does not run."""
        fixed = {other: at for other, at in self.coordinate.items() if other != axis}
        return (None, None), tuple(rank for rank, place in enumerate(self.places) if fixed.items() <= place.items())


def on_ranks(axes: Mapping[str, int], function: Callable[[SimulatedGroups], T]) -> list[T]:
    """What the function returns on each rank of a mesh; the first error of a rank is raised."""
    count = len(list(coordinates(axes)))
    meeting = _Meeting(count)
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            with _Transport(meeting, rank):
                results[rank] = function(SimulatedGroups(axes, rank, meeting))
        except BaseException as error:  # noqa: BLE001  # also pytest's, which is no `Exception`; the caller gets it
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
        if name.endswith("_out"):
            return kwargs["out"].copy_(self._collective(name.removesuffix("_out"), *args))
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


# -- a model on all ranks against itself in one process ---------------------------------------------------------------


def difference(graph: NamedGraph, layout: str, axes: Mapping[str, int], inputs: Sequence[Tensor]) -> float:
    """The largest difference in all that a step leaves behind, of the size of the largest number in each tensor."""
    return difference_of(graph, propagate(graph, parse_layout(layout), axes), inputs)


def difference_of(
    graph: NamedGraph,
    assignment: Assignment,
    inputs: Sequence[Any] | Mapping[str, Any],
    expected: Left | None = None,
    with_ends: bool = False,
) -> float:
    """The same for decisions already made: results, gradients of parameters and inputs, buffers after the call.

    It is compared with the eager model, and not with its graph. `expected`: what that leaves behind, where it is known.
    """
    arguments = arguments_of(inputs)
    expected = expected or eager_step(graph.model, arguments)
    ranks = on_ranks(assignment.axes, lambda groups: Replica(graph, assignment, groups, with_ends).step(arguments))
    worst = 0.0
    names = [name for name in expected.gradients if name in graph.tensors and graph.tensors[name].kind == "param"]
    whole = {name: _whole(graph, assignment, name, [rank.gradients[name] for rank in ranks]) for name in names}
    for rank in ranks:
        worst = max(worst, largest_difference(expected, replace(rank, gradients={**rank.gradients, **whole})))
    return worst


def _whole(graph: NamedGraph, assignment: Assignment, name: str, parts: Sequence[Tensor | None]) -> Tensor | None:
    """The gradient of a parameter, from those of its shards."""
    if all(part is None for part in parts):
        return None
    layout, atoms, axes = assignment.stored[name], atoms_of(graph.tensors[name]), assignment.axes
    shapes = [atoms.fold(layout.local_sizes(atoms, axes, at)) for at in coordinates(axes)]
    dtype = graph.tensors[name].dtype
    filled = [torch.zeros(shape, dtype=dtype) if x is None else x for x, shape in zip(parts, shapes, strict=True)]
    return gather(filled, layout, atoms, axes)


class Replica(TracedCall):
    """The generated graph of one simulated rank with the shards of that rank, called as the model is."""

    def __init__(self, graph: NamedGraph, assignment: Assignment, groups: SimulatedGroups, with_ends: bool) -> None:
        super().__init__("a replica", graph.model, graph.exported)
        self.training = graph.model.training
        self.synchronisation = GradientSync()
        handling = {
            tensor.name: ParameterHandling(
                tensor.dtype, tensor.dtype, tensor.dtype, one.defer_reduction, one.regather, one.keep_gathered
            )
            for tensor in graph.parameters
            for one in (assignment.gather_policies.get(tensor.name, GatherPolicy(False, False, False)),)
        }
        parameters = BucketedParameters(handling, self.synchronisation, None, awaited=True)
        self.exchanges = Exchanges(groups)
        self.emitted = emit(graph, assignment, groups, "full", False, parameters, with_ends=with_ends)
        if with_ends and len(set(self.exchanges.all(self.emitted.ends.outline))) > 1:
            self.emitted = emit(graph, assignment, groups, "full", False, parameters, with_ends=False)
        assert not self.emitted.draws, "random numbers are other ones on shards"
        self.shards: dict[int, Tensor] = {}
        self.parameters = {
            name: self._shard(graph, assignment, name, value, groups)
            for name, value in graph.model.named_parameters(remove_duplicate=False)
        }
        buffers: dict[int, Tensor] = {}
        self.buffers = {
            name: buffers.setdefault(id(value), value.detach().clone())
            for name, value in graph.model.named_buffers(remove_duplicate=False)
        }
        self.names = [name for name, _ in graph.model.named_parameters()]
        self.buffer_names = [name for name, _ in graph.model.named_buffers()]

    def _shard(
        self, graph: NamedGraph, assignment: Assignment, name: str, value: Tensor, groups: SimulatedGroups
    ) -> Tensor:
        if id(value) not in self.shards:
            part = value.detach()
            if name in assignment.stored:
                atoms, layout = atoms_of(graph.tensors[name]), assignment.stored[name]
                part = part.reshape(atoms.sizes)
                pieces = layout.pieces(atoms, assignment.axes, groups.coordinate)
                for atom, (start, length) in enumerate(pieces):
                    part = part.narrow(atom, start, length)
                part = part.reshape(atoms.fold(tuple(length for _, length in pieces)))
            copied = part.clone(memory_format=torch.contiguous_format)
            self.shards[id(value)] = copied.requires_grad_(value.requires_grad)
        return self.shards[id(value)]

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        yield from self.parameters.items()

    def named_buffers(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        yield from self.buffers.items()

    def graph_on(self, device: torch.device | None) -> Any:
        def run(*values: Tensor) -> tuple[Any, ...]:
            ends = self.emitted.ends
            early = ends.first(values, self.exchanges)
            taken = [early[number] for number in ends.taken]
            return ends.last(self.emitted.graph_module(*values, *taken), early, self.exchanges)

        return run, self.exported.constants

    def step(self, arguments: Arguments) -> Left:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self(self, args, kwargs)  # type: ignore[arg-type]  # it has what is asked of the module

        parameters = {name: self.parameters[name] for name in self.names}
        left = step_of(call, parameters, lambda: {name: self.buffers[name] for name in self.buffer_names}, arguments)
        self.synchronisation.finish()
        return left


class Exchanges:
    """A few numbers to all other simulated ranks, at once."""

    is_cheap = True

    def __init__(self, groups: SimulatedGroups) -> None:
        self.groups = groups

    def all(self, said: Any) -> list[Any]:
        """What each rank says."""
        everyone = ",".join(map(str, range(len(self.groups.places))))
        return [met for _, met in self.groups.meeting.exchange(everyone, self.groups.rank, ("said", said))]

    def exchange(self, numbers: Sequence[int | float], last: bool) -> Callable[[str], list[list[int | float]]]:
        met = self.all((last, list(numbers)))
        assert {(other, len(theirs)) for other, theirs in met} == {(last, len(numbers))}, "not the same exchange"
        return lambda group: [met[int(rank)][1] for rank in group.split(",")]
