"""The graphs of a parallel module: one for every way in which it has been called, decided by all ranks together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.agreement import Agreement, Pending, checksum, digest, kind_of
from autopar.completion import Decisions
from autopar.conversions import Inserted, Outputs
from autopar.errors import AutoparError
from autopar.layout.holds import Holding
from autopar.parts import canonical_names, mirror, owner_of
from autopar.planned import Given, Planned, Results
from autopar.randomness import Randomness, kept_generators
from autopar.rewrite.bucket import Handling, Synchronisation
from autopar.rewrite.buckets import Parameters
from autopar.rewrite.emit import Emitted, emit
from autopar.rewrite.functions import Groups
from autopar.sharding import Held, Rank, held_by, hollow, initialise, load_full, match_dtypes, placed, split
from autopar.tracing.arguments import bind, flatten_arguments, signature_of
from autopar.tracing.graph import NamedGraph
from autopar.tracing.state import autocast_state
from autopar.tracing.tree import Flattened

__all__ = ["Disagreement", "Fixed", "Planner", "Plans", "Settings"]

SAME_MODEL = "build the same model on every rank: the same seed before it is built, or the same weights loaded into it"
SAME_ARGUMENTS = "call parallelize on every rank with the same arguments; a layout file must be the same for all"
SAME_CALL = "call the module on every rank in the same way, with tensors of the same shapes"
NO_RESULT = "a call on this rank has no result: another rank has begun a call and not ended it"
LOCAL = (
    "a plain tensor is the whole input, the same on every rank; if each rank loads a part of the batch of its own, "
    "say local_inputs=True"
)
NO_PARAMETERS = (
    "the module has no parameters yet: how they are split is decided when it is first traced\n"
    "fix: give parallelize the inputs, or call the module once before you make the optimizer"
)


_training, _requires_grad, _dtype = map(attrgetter, ("training", "requires_grad", "dtype"))


class Planner(Protocol):
    """How a call becomes a graph with decisions."""

    def trace(self, model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any]) -> NamedGraph: ...

    def decide(self, graph: NamedGraph) -> Decisions | str:
        """Asked on the first rank alone; a text is read on all."""
        ...

    def read(self, graph: NamedGraph, text: str) -> Decisions: ...

    def check(self, graph: NamedGraph, decisions: Decisions, inserted: tuple[Inserted, ...]) -> None:
        """Raise where the generated graph does what the user does not allow."""
        ...

    def whole_shapes(self, graph: NamedGraph) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the whole inputs, for a graph that was traced with the shards of one rank."""
        ...

    def facts(self) -> Mapping[str, str]:
        """What it decides by, as text."""
        ...


@dataclass(frozen=True)
class Settings:
    """What the user chose about inputs, outputs and precision."""

    outputs: Outputs = "sharded"
    local_inputs: bool = False
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Fixed:
    """A graph with its decisions, for calls like the one that it was traced with."""

    graph: NamedGraph
    decisions: Decisions

    def trace(self, model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any]) -> NamedGraph:
        return self.graph

    def decide(self, graph: NamedGraph) -> Decisions | str:
        return self.decisions

    def read(self, graph: NamedGraph, text: str) -> Decisions:
        raise AssertionError("it was decided before")

    def check(self, graph: NamedGraph, decisions: Decisions, inserted: tuple[Inserted, ...]) -> None:
        """Whoever decided has checked it."""

    def whole_shapes(self, graph: NamedGraph) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(graph.tensors[name].shape) for name in graph.inputs}

    def facts(self) -> Mapping[str, str]:
        return {}


class Disagreement(Exception):
    """The ranks make different calls: what this one has begun comes to nothing."""


class Plans:
    """The graphs of a parallel module: one for every way in which it has been called."""

    def __init__(
        self, shell: nn.Module, model: nn.Module, mesh: DeviceMesh, planner: Planner, settings: Settings
    ) -> None:
        self.shell = shell
        self.owner = type(model).__name__
        self.planner = planner
        self.settings = settings
        self.results = Results(settings.outputs == "sharded", settings.local_inputs, settings.compute_dtype)
        self.groups = Groups(mesh)
        self.agreement = Agreement(mesh)
        axes = dict(zip(self.groups.names, mesh.shape, strict=True))
        self.rank = Rank(mesh, axes, self.groups.coordinate)
        self.device = torch.device(mesh.device_type)
        if self.device.type != "cpu":
            self.device = torch.device(mesh.device_type, torch.accelerator.current_device_index())
        self.randomness = Randomness(self.agreement, self.device)
        self.given: nn.Module | None = model  # until its weights are split; then only its skeleton is kept
        self.skeleton = hollow(model, self.device, settings.compute_dtype)
        self.dtypes: dict[str, torch.dtype] = {}  # in which the parameters are stored, in the latest trace
        self.synchronisation = Synchronisation()
        self.signature = signature_of(self.skeleton)
        self.has_values = not any(parameter.is_meta for parameter in model.parameters())
        self.unset = {name for name, buffer in model.named_buffers() if buffer.is_meta}
        """Buffers that were built without values and have not been given any."""
        self.loaded = False
        """Whether some state dict was."""
        self.shells: list[nn.Module] = []
        self.stored: dict[str, Held] = {}
        self.tables: list[tuple[dict[str, nn.Parameter | None], str]] = []
        self.buffer_tables: list[tuple[dict[str, Tensor | None], str]] = []
        self.found: dict[Any, list[Planned]] = {}
        self.latest: Planned | None = None
        self.pending: Pending | None = None
        self.unsaid: int | None = None
        """Which call this is, if that is still to be said, with what is sent before the graph."""
        self.places: dict[str, list[int]] = {}
        self.agreement.same(self._facts(model), SAME_MODEL)
        self.agreement.same({**planner.facts(), "settings": str(settings)}, SAME_ARGUMENTS)
        sums = {
            f"the {kind} {name}": ((), checksum(tensor))
            for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers()))
            for name, tensor in tensors
        }
        if self.agreement.size > 1:
            self.agreement.same_values(sums, lambda name: SAME_MODEL)
        self.agreement.open_channel()

    def _facts(self, model: nn.Module) -> dict[str, str]:
        facts = {"model": self.owner}
        facts.update({f"shape of parameter {name}": kind_of(p) for name, p in model.named_parameters()})
        facts.update({f"shape of buffer {name}": kind_of(buffer) for name, buffer in model.named_buffers()})
        return facts

    def current(self) -> Planned:
        if self.latest is None:
            raise AutoparError("the module has not been traced yet: give parallelize the inputs, or call it first")
        return self.latest

    # -- which graph a call is for ------------------------------------------------------------------------------------

    def prepare(self, inputs: tuple[Any, ...] | Mapping[str, Any]) -> None:
        """Trace and decide before the first call."""
        arguments = bind(self.signature, self.owner, inputs)
        given = self._given(flatten_arguments(arguments, self.owner))
        self.agreement.same(given.facts(), SAME_CALL)
        self._plan(given)

    def prepare_traced(self, graph: NamedGraph) -> None:
        """The same, for a graph that was traced before."""
        nodes = graph.exported.graph_module.graph.find_nodes(op="placeholder")
        pairs = zip(graph.exported.placeholders, nodes, strict=True)
        tensors = {
            p.name: torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype).requires_grad_(p.requires_grad)
            for p, node in pairs
            if p.kind == "input"
        }
        flat = Flattened(tuple(tensors.values()), tuple(tensors), graph.exported.input_tree, ())
        self._plan(self._given(flat))

    def _given(self, flat: Flattened) -> Given:
        modes = tuple(map(_training, self.shells))
        parameters: list[Any] = [table[name] for table, name in self.tables]
        buffers: list[Any] = [table[name] for table, name in self.buffer_tables]
        if not self.shells:
            model = self.given
            assert model is not None, "kept until there are shells"
            modes = tuple(module.training for module in model.modules())
            if self.shell.training != modes[0]:
                modes = (self.shell.training,) * len(modes)
            parameters, buffers = list(model.parameters()), list(model.buffers())
        trained = tuple(map(_requires_grad, parameters))
        dtypes = (*map(_dtype, parameters), *map(_dtype, buffers))
        return Given(self.signature, flat, modes, trained, dtypes, torch.is_grad_enabled(), autocast_state())

    def find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], later: bool = False, differ: bool = False
    ) -> tuple[Planned, Given]:
        """The graph for a call; all ranks call in the same way, or all get an error.

        `later`: what is sent before the graph says which call this is, or `check` is called before anything is sent,
        so that the comparison may go on beside the forward.
        `differ`: it has been called, and the ranks are known to differ.
        """
        own: AutoparError | None = None
        try:
            given = self._given(Given.read(self.signature, self.owner, args, kwargs))
        except AutoparError as error:
            own = error
            given = None
        plan = None
        if given is not None:
            plan = next((p for p in self.found.get(given.key, ()) if p.structure == given.structure), None)
        self.unsaid = None
        if later and plan is not None and self.agreement.is_cheap and not plan.emitted.draws:
            if plan.emitted.ends.early:
                self.unsaid = plan.digest
            else:
                self.pending = self.agreement.begin(plan.digest)
        elif self.agreement.is_cheap or plan is None or differ:
            sign = 0 if own is not None else plan.digest if plan is not None else 1
            is_same = not differ and (self.agreement.size == 1 or self.agreement.begin(sign).result() is not None)
            if not is_same or sign in (0, 1):
                self.agreement.together(lambda: _reraise(own))
                assert given is not None, "else its error was raised"
                self.agreement.same(given.facts(), SAME_CALL)
                with kept_generators(self.device):
                    plan = self._plan(given)
        assert given is not None, "else its error was raised"
        assert plan is not None, "found or made"
        if not self.has_values:
            fix = "fix: call init_weights() or load_full_state_dict(state_dict) of the parallel module first"
            what = "its parameters have no values yet"
            if self.loaded:  # of what a file can hold, all
                fix = "fix: call init_weights() before the state dict is loaded: this buffer is in no state dict"
                what = f"its buffer {min(self.unset)} has no values yet"
            raise AutoparError(f"{self.owner} was built on the meta device and {what}\n{fix}")
        self.latest = plan
        return plan, given

    def check(self) -> None:
        """Before the first collective of a call: whether all ranks make the same one."""
        pending, self.pending = self.pending, None
        if pending is not None and pending.result() is None:
            raise Disagreement

    @property
    def is_cheap(self) -> bool:
        return self.agreement.is_cheap

    def exchange(self, numbers: Sequence[int | float], last: bool) -> Callable[[str], Sequence[Sequence[int | float]]]:
        """Begin to exchange some numbers before or after the graph of the latest call; see `ends.Exchanges`."""
        plan, unsaid, self.unsaid = self.current(), self.unsaid, None
        pending = self.agreement.begin((plan.digest ^ 1) if last else plan.digest, numbers)
        if unsaid is not None:
            self.pending = pending

        def received(group: str) -> Sequence[Sequence[int | float]]:
            everyone = pending.result()
            if everyone is None:
                if not last:
                    raise Disagreement
                self.agreement.together(lambda: _reraise(AutoparError(f"{NO_RESULT}\nfix: {SAME_CALL}")))
                raise AssertionError("the error was raised")
            if group not in self.places:
                self.places[group] = self.agreement.places(self.groups.ranks(group))
            return [everyone[place] for place in self.places[group]]

        return received

    # -- making one ---------------------------------------------------------------------------------------------------

    def _plan(self, given: Given) -> Planned:
        agreement = self.agreement
        graph = agreement.together(lambda: self._trace(given))
        agreement.same({"traced graph": str(digest(_outline(graph)))}, SAME_CALL)
        said = agreement.decided_by_first(lambda: self.planner.decide(graph))
        decisions = agreement.together(lambda: self.planner.read(graph, said)) if isinstance(said, str) else said
        held = agreement.together(lambda: self._held(graph, decisions, given))
        self._check_values(given, held)
        local = self.settings.local_inputs or any(isinstance(tensor, DTensor) for tensor in given.tensors)
        emitted = agreement.together(lambda: self._emit(graph, decisions, local, with_ends=agreement.size > 1))
        if len({row[0] for row in agreement.numbers(digest(emitted.ends.outline))}) > 1:  # some ranks have nothing
            emitted = agreement.together(lambda: self._emit(graph, decisions, local, with_ends=False))
        if not self.shells:
            self._build(held)
        finish = self.synchronisation.finish
        plan = Planned(given, graph, decisions, emitted, held, self.shell, self.rank, self.results, finish)
        plan.digest = max(2, digest("\n".join(f"{name}: {fact}" for name, fact in given.facts().items())))
        self.found.setdefault(given.key, []).append(plan)
        self.latest = plan
        return plan

    def _emit(self, graph: NamedGraph, decisions: Decisions, local: bool, with_ends: bool) -> Emitted:
        for mutation in graph.exported.mutations:
            if mutation.kind == "input" and local:
                raise AutoparError(
                    f"the model changes its input {mutation.target} in place, which works for whole inputs only\n"
                    "fix: give plain tensors, and local_inputs=False"
                )
        parameters, outputs = self._parameters(graph, decisions), self.settings.outputs
        emitted = emit(graph, decisions, self.groups, outputs, local, parameters, with_ends=with_ends)
        self.planner.check(graph, decisions, emitted.inserted)
        return emitted

    def _parameters(self, graph: NamedGraph, decisions: Decisions) -> Parameters:
        """How the parameters of a graph are handled in it."""
        found = {}
        for tensor in graph.tensors.values():
            if tensor.kind != "param":
                continue
            stored = self.dtypes[tensor.name]
            reduced = (self.settings.reduce_dtype if stored.is_floating_point else None) or stored
            holding = decisions.holdings.get(tensor.name, Holding(False, False, False))
            found[tensor.name] = Handling(
                stored, tensor.dtype, reduced, holding.deferred, holding.again, holding.lasting
            )
        return Parameters(found, self.synchronisation, self, awaited=True)

    def _trace(self, given: Given) -> NamedGraph:
        """Trace the call with the whole inputs, whatever part of them this rank was given."""
        for module, training in zip(self.skeleton.modules(), given.training, strict=True):
            module.training = training
        for parameter, trained in zip(self.skeleton.parameters(), given.trained, strict=True):
            parameter.requires_grad_(trained)
        self.dtypes = dict(zip(dict(self.skeleton.named_parameters()), given.dtypes, strict=False))
        if self.settings.compute_dtype is None:
            match_dtypes(self.skeleton, given.dtypes)
        sharded = [isinstance(tensor, DTensor) for tensor in given.tensors]
        if any(sharded) and (self.settings.local_inputs or not all(sharded)):
            raise AutoparError(
                "some inputs are DTensors and some are not, or local_inputs=True says that they are plain shards\n"
                "fix: give all tensors as DTensors, or none"
            )
        dtype = self.settings.compute_dtype
        graph = self.planner.trace(self.skeleton, given.example(None, dtype))
        if self.settings.local_inputs:
            shapes = self.planner.whole_shapes(graph)
            graph = self.planner.trace(self.skeleton, given.example(shapes, dtype))
        return graph

    def _held(self, graph: NamedGraph, decisions: Decisions, given: Given) -> dict[str, Held]:
        held = held_by(graph, decisions, self.rank)
        for name, place in self.stored.items():
            if held[name].layout != place.layout:
                raise AutoparError(
                    f"in this call the layout stores the parameter {name} as {held[name].layout}, and it is stored as "
                    f"{place.layout} since the first\nfix: name its dims with dims=, so that all calls agree on them"
                )
        for path, tensor in zip(given.flat.paths, given.tensors, strict=True):
            place = held[path]
            if isinstance(tensor, DTensor):
                if tensor.device_mesh != self.rank.mesh or tensor.placements != place.placements:
                    raise AutoparError(
                        f"the DTensor {path} has the placements {tensor.placements} on {tensor.device_mesh}; "
                        f"the layout wants {place.placements} on {self.rank.mesh}\n"
                        "fix: redistribute it, or give the whole tensor"
                    )
            elif self.settings.local_inputs and tuple(tensor.shape) != place.local_shape:
                raise AutoparError(
                    f"local_inputs=True: the layout makes this rank's shard of {path} {list(place.local_shape)}, "
                    f"but it was given {kind_of(tensor)}\n"
                    "fix: give every rank a shard of the same shape, as the layout splits the input"
                )
        return held

    def _check_values(self, given: Given, held: Mapping[str, Held]) -> None:
        """Compare what ranks were given, where it should be the same."""
        if self.agreement.size == 1:
            return
        sums: dict[str, tuple[tuple[int, ...], int]] = {}
        for path, tensor in zip(given.flat.paths, given.tensors, strict=True):
            whole = not self.settings.local_inputs and not isinstance(tensor, DTensor)
            axes = () if whole else tuple(axis for split in held[path].layout.splits for axis in split)
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            sums[path] = tuple(self.rank.at[axis] for axis in axes), checksum(local)
        self.agreement.same_values(sums, lambda path: self._fix_of(held[path]))

    def _fix_of(self, held: Held) -> str:
        if not self.settings.local_inputs:
            return LOCAL
        split = [axis for axes in held.layout.splits for axis in axes]
        kept = [axis for axis in self.rank.axes if axis not in split]
        return f"ranks along the axes {', '.join(kept)} work on the same data: give them the same tensor"

    def _build(self, held: Mapping[str, Held]) -> None:
        """Split the weights of the model that was given, and let go of it."""
        model = self.given
        assert model is not None, "built once"
        names = {name for name, _ in model.named_parameters()}
        self.stored = {name: place for name, place in held.items() if name in names}
        training = self.shell.training
        with torch.inference_mode(False):
            self.shells = split(model, self.shell, self.stored, self.device)
        if self.shell.training != training:  # train() or eval() was called before there was anything to set
            self.shell.train(training)
        self._find_tables()
        self.given = None

    def _find_tables(self) -> None:
        owners = [owner_of(self.shell, name) for name, _ in nn.Module.named_parameters(self.shell)]
        self.tables = [(owner._parameters, leaf) for owner, leaf in owners]
        owners = [owner_of(self.shell, name) for name, _ in nn.Module.named_buffers(self.shell)]
        self.buffer_tables = [(owner._buffers, leaf) for owner, leaf in owners]

    def copied(self, shell: nn.Module, memo: dict[int, Any]) -> Plans:
        """The plans of another module, with a copy of the weights; its calls are traced anew."""
        made = copy.copy(self)
        made.shell, made.given = shell, copy.deepcopy(self.given, memo)
        made.found, made.latest, made.synchronisation = {}, None, Synchronisation()
        made.unset = set(self.unset)
        if self.shells:
            made.shells = mirror(self.shell, shell, lambda p: _duplicate(p, memo), lambda b: b.detach().clone())
            made._find_tables()
        return made

    # -- values for a model from the meta device ----------------------------------------------------------------------

    def init_weights(self, init: Callable[[nn.Module], None] | None) -> None:
        if not self.shells:
            raise AutoparError(NO_PARAMETERS)
        rows = self.agreement.numbers(int(torch.randint(2**62, ())))
        with torch.random.fork_rng():
            torch.manual_seed(rows[0][0])
            self.agreement.together(lambda: initialise(self.skeleton, self.shell, self.stored, self.device, init))
        self.has_values = True
        self.unset.clear()

    def names(self) -> dict[str, str]:
        """Every name of a parameter or buffer -> the first name of that tensor."""
        if not self.shells:
            raise AutoparError(NO_PARAMETERS)
        return canonical_names(self.shell)

    def placed(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict with its tensors split as the module holds them."""
        return placed(self.shell, self.stored, state_dict)

    def load_full(self, state_dict: Mapping[str, Tensor]) -> None:
        if not self.shells:
            raise AutoparError(NO_PARAMETERS)
        self.agreement.together(lambda: load_full(self.shell, self.stored, state_dict))
        self.was_given(state_dict)

    def was_given(self, names: Iterable[str]) -> None:
        """All parameters have values, and the buffers of these names: those that are not persistent are in no file."""
        self.loaded = True
        self.unset.difference_update(names)
        self.has_values = self.has_values or not self.unset


def _duplicate(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    made = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    memo[id(parameter)] = made
    return made


def _reraise(error: AutoparError | None) -> None:
    if error is not None:
        raise error


def _outline(graph: NamedGraph) -> str:
    lines = [f"{tensor} {tensor.dtype} {tensor.shape} {tensor.requires_grad}" for tensor in graph.tensors.values()]
    lines += [f"{node.name} {node.op} {node.operands} {node.rule}" for node in graph.nodes]
    return "\n".join(lines)
