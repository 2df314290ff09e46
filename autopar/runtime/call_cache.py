"""Call cache of a parallel module: one compiled call per call signature, made by all ranks together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.ir.call_arguments import bind, flatten_arguments
from autopar.ir.exported import Exported, autocast_state
from autopar.ir.graph import NamedGraph
from autopar.ir.pytree import Flattened
from autopar.lowering.collectives.checksum import checksum, checksum_of_all, digest
from autopar.lowering.collectives.process_groups import Groups
from autopar.lowering.emit import emit
from autopar.lowering.emitted import Emitted
from autopar.lowering.modules.bucket import GradientSync
from autopar.lowering.passes.bucket_parameters import BucketedParameters
from autopar.lowering.verify import order_of_messages
from autopar.mesh import SubMesh
from autopar.runtime import agreement as fixes
from autopar.runtime.agreement import Agreement, PendingCheck, graph_facts
from autopar.runtime.call_outputs import with_plain
from autopar.runtime.call_planner import Planner
from autopar.runtime.called_module import CalledModule, check_part, part_of, with_whole
from autopar.runtime.check_inputs import PlacementsError, check_devices, check_values, held_shards, is_sharded
from autopar.runtime.compiled_call import CallResults, CallSignature, CompiledCall
from autopar.runtime.first_rank import FirstRank
from autopar.runtime.garbage import collected_later
from autopar.runtime.kept_calls import KeptCalls, SizeOptions
from autopar.runtime.module_shell import ClosedModule
from autopar.runtime.random_keys import RandomKeys, kept_generators
from autopar.runtime.shards import ShardOwner
from autopar.runtime.size_ranges import SizeRanges
from autopar.runtime.sized_signatures import without_values
from autopar.runtime.sync.replica_group import ReplicaSetting
from autopar.runtime.target_counts import check_read, has_count, with_sum, with_tensor
from autopar.runtime.torch_wrappers import check_not_captured
from autopar.runtime.weights import Weights
from autopar.sharding.assignment import Assignment
from autopar.sharding.options import TrainingOptions
from autopar.tracing.part_of_model import called_at, of_used
from autopar.tracing.sized_exports import SizedExports

__all__ = ["FIRST_CALLS", "CallCache", "Disagreement"]

# If a comparison of ranks makes a device wait, the first calls are compared, then one call in so many.
FIRST_CALLS, LATER_CALLS = 10, 100


class Disagreement(Exception):
    """Raised before the first collective if the ranks make different calls; the caller begins the call again."""


class CallCache:
    """Compiled calls of a parallel module by call signature, with the weights and groups that they share."""

    def __init__(
        self,
        shell: ClosedModule,
        model: nn.Module,
        mesh: DeviceMesh,
        planner: Planner,
        options: TrainingOptions,
        replica: ReplicaSetting | None = None,
        sizes: SizeOptions = SizeOptions(),  # noqa: B008  # it is frozen
    ) -> None:
        self.shell = shell
        self.planner = planner
        self.options = options
        self.results = CallResults(options.outputs, options.local_inputs, options.precision.compute_dtype)
        self.groups = Groups(mesh, 1 if replica is None else replica.group.count)
        self._first_rank: FirstRank | None = None
        self.agreement = Agreement(mesh)
        # All ranks of all replicas: they compare what they start with, and nothing later.
        self.everyone = self.agreement if replica is None else Agreement(replica.devices)
        self.replica = replica
        self.batch = None if replica is None else replica.batch()
        axes = SubMesh(dict(zip(self.groups.names, mesh.shape, strict=True)))
        self.rank = ShardOwner(mesh, axes, self.groups.coordinate)
        self.device = torch.device(mesh.device_type)
        if self.device.type != "cpu":
            self.device = torch.device(mesh.device_type, torch.accelerator.current_device_index())
        self.randomness = RandomKeys(self.agreement, self.device, 0 if replica is None else replica.group.index)
        self.weights = Weights(shell, model, self.device, options.precision, self.forget)
        self.synchronisation = GradientSync()
        self.called = {"": CalledModule.whole_of(self.weights.skeleton, planner)}
        # Calls of parts whose DTensors have other placements than the layout gives them: they are gathered.
        self.gathered: set[Any] = set()
        self.kept = KeptCalls(sizes)
        self.latest: CompiledCall | None = None
        # Graph of the latest call of the whole model that was planned.
        self.whole_graph: NamedGraph | None = None
        self.compiler: Callable[[nn.Module], nn.Module] | None = None
        self.pending: PendingCheck | None = None
        # Counts calls, for FIRST_CALLS and LATER_CALLS.
        self.calls = 0
        # Digest of the current call and of whole inputs; equal on all ranks if they make the same call.
        self.sign = 0
        # `sign` if it has not been sent yet: it then travels with the numbers exchanged before the graph.
        self.unsent_sign: int | None = None
        # Rows of a comparison, by process group.
        self.places: dict[str, list[int]] = {}
        # Facts first: `same_values` expects the same names on all ranks.
        self.everyone.same(self.weights.facts(), fixes.SAME_MODEL)
        self.everyone.same({**planner.facts(), "options": str(options), "sizes": str(sizes)}, fixes.SAME_ARGUMENTS)
        if replica is None:
            self.weights.find_owner(self.agreement)
        if self.everyone.size > 1 and not self.weights.from_first:
            self.everyone.same_values(self.weights.sums(), lambda name: fixes.SAME_MODEL)
        self.agreement.open_channel()

    def first_rank(self) -> FirstRank:
        """Return the first rank, which may have whole tensors; all ranks ask for it together."""
        if self._first_rank is None:
            self._first_rank = FirstRank(self.groups)
        return self._first_rank

    def current(self) -> CompiledCall:
        if self.latest is None:
            raise AutoparError("the module is not traced yet\nfix: give parallelize inputs, or call the module first")
        return self.latest

    def forget(self) -> None:
        """Trace calls anew, as an attribute of the model was set; parameters keep their sharding."""
        self.kept = KeptCalls(self.kept.options)
        self.called, self.gathered = {"": self.called[""]}, set()

    # -- find the compiled call of a call -----------------------------------------------------------------------------

    def prepare(self, inputs: tuple[Any, ...] | Mapping[str, Any]) -> None:
        """Trace and plan a call with these example inputs, which may be on the meta device."""
        arguments = bind(self.called[""].signature, self.weights.owner, inputs)
        flat = flatten_arguments(arguments, self.weights.owner)
        given = self.everyone.together(lambda: self._given(self._of_replica(flat), ""))
        self.everyone.together(lambda: check_devices(given, self.device, self.weights.owner, "meta"))
        self.agreement.same(given.facts(), fixes.SAME_CALL)
        self._plan(given)

    def prepare_traced(self, graph: NamedGraph) -> None:
        """Plan the call that a graph was traced with."""
        nodes = graph.exported.graph_module.graph.find_nodes(op="placeholder")
        tensors = {
            p.name: torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype).requires_grad_(p.requires_grad)
            for p, node in zip(graph.exported.placeholders, nodes, strict=True)
            if p.kind == "input"
        }
        # Only shapes and dtypes matter here; zeros have the same checksum on all ranks.
        flat = Flattened(tuple(tensors.values()), tuple(tensors), graph.exported.input_tree, ())
        self._plan(self._given(flat, ""))

    def _given(self, flat: Flattened, part: str) -> CallSignature:
        signature, state = self.called[part].signature, self.weights.state()
        return CallSignature(signature, flat, *state, torch.is_grad_enabled(), autocast_state(), part)

    def _of_replica(self, flat: Flattened) -> Flattened:
        """Return the inputs of this replica: its rows of a global batch."""
        if self.batch is None or self.options.local_inputs:
            return flat
        if any(isinstance(tensor, DTensor) for tensor in flat.tensors):
            return flat

        def trace_whole() -> NamedGraph:
            given = self._given(flat, "")
            with kept_generators(self.device):
                return self._graph(given, None, self.kept.family(given).whole)

        return self.batch.cut(flat, trace_whole)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any], part: str) -> CallSignature:
        """Return the signature of a call of the model, or of a part of it."""
        if part not in self.called:
            whole = self.called[""]
            self.called[part] = part_of(whole, self.weights.skeleton, part, self.whole_graph)
        called = self.called[part]
        named = with_tensor(kwargs, self.options.local_inputs)
        flat = called.reader.read(args, named)
        if not part:
            given = self._given(self._of_replica(flat if self.options.local_inputs else with_plain(flat)), "")
        else:
            check_part(called, self.options, torch.is_grad_enabled(), self.replica is not None)
            given = self._given(with_plain(flat), part)
            if given.key in self.gathered:
                given = self._given(with_whole(flat), part)
        check_devices(given, self.device, called.owner)
        return given

    def find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], part: str = "", later: bool = False, differ: bool = False
    ) -> tuple[CompiledCall, CallSignature]:
        """Return the compiled call and the signature; all ranks make the same call, or all raise.

        Parameters:
            part: path of the module that is called; empty for the whole model.
            later: compare ranks during the forward. The numbers exchanged before the graph then carry `sign`, or the
                caller calls `check` before the first collective.
            differ: this is the second attempt of a call in which the ranks were found to differ.
        """
        # A rank must not raise alone: the others would wait for it in the comparison. Errors are kept until then.
        own: AutoparError | None = None
        try:
            given = self._read(args, kwargs, part)
        except AutoparError as error:
            own, given = error, None
        plan = None
        if given is not None:
            plan = self.kept.find(given)
        check_not_captured()
        self.unsent_sign = None
        self.calls += not differ
        # On a device that waits for a comparison, only some calls are compared.
        chosen = self.agreement.size > 1 and (self.calls <= FIRST_CALLS or self.calls % LATER_CALLS == 0)
        summed = chosen or self.agreement.is_cheap
        compared = summed or self.agreement.is_quick
        self.sign = self._sign(own, plan, given, summed) if compared or plan is None else 0
        # Before the numbers of targets are added up, all ranks must be known to have one.
        counted = given is not None and has_count(given, self.options.local_inputs)
        if later and plan is not None and not counted and self._is_quick_for(plan):
            if plan.emitted.ends.early:
                self.unsent_sign = self.sign
            else:
                self.pending = self.agreement.begin(self.sign)
        elif compared or plan is None or differ:
            is_same = not differ and (self.agreement.size == 1 or self._is_same(plan))
            # 0 is a call with an error and 1 an unknown call: on all ranks alike, yet not to be run.
            if not is_same or self.sign in (0, 1):
                self.agreement.together(lambda: _reraise(own))
                assert given is not None, "else its error was raised"
                self.agreement.same(given.facts(), fixes.SAME_CALL)
                self._check_whole(given)
                # Ranks may differ only in their caches, so all of them plan, also those with a plan.
                with kept_generators(self.device), collected_later():
                    plan, given = self._plan_as_given(given)
        assert given is not None, "else its error was raised"
        assert plan is not None, "found or made"
        self.weights.check_set()
        self.latest = plan
        return plan, with_sum(given, plan, self.agreement) if counted else given

    def _is_quick_for(self, plan: CompiledCall) -> bool:
        """Return whether a call may begin before all ranks are known to make it."""
        if plan.emitted.draws or not self.agreement.is_quick:
            return False
        # If no exchange is cheap, early numbers are sent by a collective, which must not run before the comparison.
        return self.agreement.is_cheap or not plan.emitted.ends.early

    def _is_same(self, plan: CompiledCall | None) -> bool:
        """Compare the calls of all ranks, and exchange the random key in the same message."""
        along = self.randomness.offered() if plan is not None and plan.emitted.draws else ()
        everyone = self.agreement.begin(self.sign, along).result()
        if everyone is not None and along:
            self.randomness.agree(int(everyone[0][0]))
        return everyone is not None

    def _sign(
        self, own: AutoparError | None, plan: CompiledCall | None, given: CallSignature | None, summed: bool
    ) -> int:
        """Return a digest of the call, equal on ranks that make the same call.

        With `summed` it covers the values of whole inputs. It is 0 for a call with an error, 1 for an unknown call.
        """
        if own is not None or plan is None or given is None:
            return 0 if own is not None else 1
        if self.agreement.size == 1 or self.options.local_inputs or not summed:
            return plan.digest
        # 0 and 1 are taken.
        return max(2, plan.digest ^ checksum_of_all(given.tensors))

    def _check_whole(self, given: CallSignature) -> None:
        """Raise unless all ranks have the same whole inputs."""
        shards = self.options.local_inputs or any(isinstance(tensor, DTensor) for tensor in given.tensors)
        if self.agreement.size > 1 and not shards:
            sums = {path: ((), checksum(x)) for path, x in zip(given.flat.paths, given.tensors, strict=True)}
            self.agreement.same_values(sums, lambda path: fixes.LOCAL)

    def check(self) -> None:
        """Raise `Disagreement` unless all ranks make the same call; runs before its first collective."""
        pending, self.pending = self.pending, None
        if pending is not None and pending.result() is None:
            raise Disagreement

    @property
    def is_cheap(self) -> bool:
        return self.agreement.is_cheap

    def exchange(self, numbers: Sequence[int | float], last: bool) -> Callable[[str], Sequence[Sequence[int | float]]]:
        """Begin to exchange numbers before or after the graph of the latest call; see `ends.Exchanges`."""
        plan, unsent, self.unsent_sign = self.current(), self.unsent_sign, None
        # The last exchange has another digest than the first, so a rank in another phase is seen as different.
        pending = self.agreement.begin((plan.digest ^ 1) if last else self.sign, numbers)
        if unsent is not None:
            self.pending = pending

        def received(group: str) -> Sequence[Sequence[int | float]]:
            everyone = pending.result()
            if everyone is None:
                if not last:
                    raise Disagreement
                self.agreement.together(lambda: _reraise(AutoparError(f"{fixes.NO_RESULT}\nfix: {fixes.SAME_CALL}")))
                raise AssertionError("the error was raised")
            if group not in self.places:
                self.places[group] = self.agreement.places(self.groups.ranks(group))
            return [everyone[place] for place in self.places[group]]

        return received

    # -- make a compiled call -----------------------------------------------------------------------------------------

    def _plan_as_given(self, given: CallSignature) -> tuple[CompiledCall, CallSignature]:
        """Plan a call; gather the DTensors of a part that are not sharded as it takes them."""
        try:
            return self._plan(given), given
        except PlacementsError:
            if not given.part:
                raise
        self.gathered.add(given.key)
        found = self._given(with_whole(given.flat), given.part)
        return self._plan(found), found

    def _plan(self, given: CallSignature) -> CompiledCall:
        """Make a compiled call, from those of other sizes if that is possible; keep it."""
        lines = self.kept.family(given).lines
        found = lines.agreed(given, self.agreement, self.rank, self.options.local_inputs)
        if found is not None:
            plan = found[0].at_sizes(found[1], partial(self._graph_again, without_values(given)))
        else:
            plan = self._emitted(given, lines)
            if self.compiler is None and self.replica is None:
                lines.look_ahead(given, plan, self.agreement, lambda other: self._emitted(other, lines))
            if not given.part:
                self.whole_graph = plan.graph
        plan.digest = max(2, digest("\n".join(f"{name}: {fact}" for name, fact in given.facts().items())))
        self.kept.keep(given, plan)
        self.latest = plan
        return plan

    def _graph_again(self, given: CallSignature) -> NamedGraph:
        """Return the named graph of a call that shares an emitted graph; this rank alone makes it."""
        planner = self.called[given.part].planner
        with kept_generators(self.device):
            graph = self._trace(given)
            found = planner.decide(graph)
            return planner.read(graph, found)[0] if isinstance(found, str) else graph

    def _emitted(self, given: CallSignature, lines: SizeRanges) -> CompiledCall:
        """Trace, plan and emit a call; a phase that fails on one rank raises on all."""
        agreement, planner = self.agreement, self.called[given.part].planner
        traced = agreement.together(lambda: self._trace(given))
        agreement.same(graph_facts(traced), fixes.SAME_GRAPH)
        # A search with a time limit may end with different plans, so one rank searches, also for other replicas.
        first = agreement if self.weights.shells else self.everyone
        decided, found = first.decided_by_first(lambda: (traced.fingerprint, planner.decide(traced)))
        if first is not agreement and not isinstance(found, str):
            # A replica with other rows completes the layout for them.
            is_other = decided != traced.fingerprint
            found = first.together(lambda: planner.decide(traced) if is_other else found)
        if isinstance(found, str):
            graph, assignment = agreement.together(lambda: planner.read(traced, found))
        else:
            graph, assignment = traced, found
        stored, rows = self.weights.stored, self.options.local_inputs
        held = agreement.together(lambda: held_shards(graph, assignment, given, self.rank, stored, rows))
        check_values(given, held, agreement, self.rank, rows)
        if has_count(given, rows):
            agreement.together(lambda: check_read(graph.exported))
        local = rows or is_sharded(given)
        emitted = agreement.together(
            lambda: self._emit(planner, graph, assignment, local, with_ends=agreement.size > 1)
        )
        # Ranks with an empty shard may have other ends. Without ends all ranks send the same.
        if not agreement.all_same(emitted.ends.outline):
            emitted = agreement.together(lambda: self._emit(planner, graph, assignment, local, with_ends=False))
        if assignment.pipelining is None:  # stages send in different orders
            agreement.same({"order of collectives": order_of_messages(emitted.graph_module)}, fixes.SAME_ORDER)
        if not self.weights.shells:
            self.weights.build(held, self.first_rank)
        made = given, graph, assignment, emitted, held, self.shell, self.rank, self.results
        plan = CompiledCall(*made, self.synchronisation, self.options.offload_states)
        if self.compiler is not None:
            plan.compile_layers(self.compiler)
        lines.emitted += 1
        return plan

    def _emit(
        self, planner: Planner, graph: NamedGraph, assignment: Assignment, local: bool, with_ends: bool
    ) -> Emitted:
        for mutation in graph.exported.mutations:
            if mutation.kind == "input" and local:
                raise AutoparError(
                    f"the model changes its input {mutation.target} in place: expected a whole tensor, got a shard\n"
                    "fix: give plain tensors, and local_inputs=False"
                )
        precision, outputs = self.options.precision, self.options.outputs
        handled = self.weights.handling(graph, assignment)
        parameters = BucketedParameters(handled, self.synchronisation, self, awaited=True, precision=precision)
        self.groups.level_sums = planner.level_sums
        emitted = emit(graph, assignment, self.groups, outputs, local, parameters, with_ends=with_ends)
        planner.check(graph, assignment, emitted.inserted)
        return emitted

    def _trace(self, given: CallSignature) -> NamedGraph:
        """Trace the call with whole inputs, also if this rank has shards of them."""
        sharded = [isinstance(tensor, DTensor) for tensor in given.tensors]
        rows = self.options.local_inputs and not (given.part and any(sharded))
        if any(sharded) and (rows or not all(sharded)):
            raise AutoparError(
                "wrong kinds of inputs: expected DTensors alone or none, got both, or DTensors with local_inputs=True\n"
                "fix: give all tensors as DTensors, or none; DTensors need no local_inputs=True"
            )
        family = self.kept.family(given)
        graph = self._graph(given, None, family.exports)
        # The first trace names the dims of the shards; the layout then gives the global shapes of a second trace.
        if rows:
            shapes = self.called[given.part].planner.whole_shapes(graph)
            graph = self._graph(given, shapes, family.whole)
        return graph

    def _graph(
        self, given: CallSignature, shapes: Mapping[str, tuple[int, ...]] | None, exports: SizedExports
    ) -> NamedGraph:
        model = self.weights.traceable(given.training, given.trained, given.dtypes)
        inputs = given.example(shapes, self.options.precision.compute_dtype)

        def export(*call: Any) -> Exported:
            # A later call, as one of the decoder with the results of the encoder, may use some of the parameters.
            return of_used(exports.export(*call)) if self.weights.shells else exports.export(*call)

        with called_at(model, given.part):
            return self.called[given.part].planner.trace(model, inputs, export)

    def copied(self, shell: ClosedModule, memo: dict[int, Any]) -> CallCache:
        """Return an empty cache for another module, with copied weights and the same groups."""
        # Compiled calls refer to the tables of their module, so they cannot be shared.
        made = copy.copy(self)
        made.shell, made.weights = shell, self.weights.copied(shell, memo, made.forget)
        made.latest, made.synchronisation = None, GradientSync()
        made.forget()
        return made


def _reraise(error: AutoparError | None) -> None:
    if error is not None:
        raise error
