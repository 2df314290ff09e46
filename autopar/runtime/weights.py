"""Parameters and buffers of a parallel module: the original model's until they are split, then this rank's shards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.ir.graph import NamedGraph
from autopar.ir.precision import Precision
from autopar.lowering.collectives.checksum import checksum, kind_of
from autopar.lowering.modules.bucket import ParameterHandling
from autopar.runtime.agreement import Agreement
from autopar.runtime.first_rank import FirstRank
from autopar.runtime.module_shell import ClosedModule, ModuleShell, canonical_names, mirror, owner_of
from autopar.runtime.shards import LocalShard, check_full, initialise, load_full, placed, split, stored_in
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout.parameter_storage import GatherPolicy
from autopar.sharding.reshard_insertion import gathered_in_float8
from autopar.tracing.skeleton import hollow, match_dtypes

__all__ = ["Weights"]

NO_PARAMETERS = (
    "the module has no parameters yet: the first trace decides their shardings\n"
    "fix: pass inputs to parallelize, or call the module once before you create the optimizer"
)

# C functions: `Weights.state` runs at every call, on hundreds of tensors.
_training, _requires_grad, _dtype = map(attrgetter, ("training", "requires_grad", "dtype"))


class Weights:
    """Parameters and buffers of a module on this rank, and a skeleton: the model without values, for tracing."""

    def __init__(
        self,
        shell: ClosedModule,
        model: nn.Module,
        device: torch.device,
        precision: Precision,
        changed: Callable[[], None],
    ) -> None:
        """Take the weights of a model; `changed` runs when an attribute of one of its modules was set."""
        self.shell = shell
        self.changed = changed
        self.owner = type(model).__name__
        self.device = device
        self.precision = precision
        # Released when its weights are split, as it stores all of them.
        self.given: nn.Module | None = model
        self.skeleton = hollow(model, device, precision.compute_dtype)
        # Dtype of each stored parameter, at the latest trace.
        self.dtypes: dict[str, torch.dtype] = {}
        self.stored: dict[str, LocalShard] = {}
        # Parameters that are stored in the dtype of the compute, as they were frozen when the weights were split.
        self.frozen: frozenset[str] = frozenset()
        self.has_values = not any(parameter.is_meta for parameter in model.parameters())
        # True if the first rank has the values of all parameters, and no other rank has any.
        self.from_first = False
        # Buffers from the meta device that no state dict and no initialisation has set.
        self.unset = {name for name, buffer in model.named_buffers() if buffer.is_meta}
        # True after a state dict was loaded.
        self.loaded = False
        self.shells: list[nn.Module] = []
        self.tables: list[tuple[dict[str, nn.Parameter | None], str]] = []
        self.buffer_tables: list[tuple[dict[str, Tensor | None], str]] = []

    def facts(self) -> dict[str, str]:
        """Return the properties, apart from values, that all ranks must share before the weights are split."""
        model = self._whole()
        facts = {"model": self.owner}
        facts.update({f"shape of parameter {name}": kind_of(p) for name, p in model.named_parameters()})
        facts.update({f"shape of buffer {name}": kind_of(buffer) for name, buffer in model.named_buffers()})
        return facts

    def sums(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """Return a checksum of each whole tensor, in the form of `Agreement.same_values`."""
        model = self._whole()
        return {
            f"the {kind} {name}": ((), checksum(tensor))
            for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers()))
            for name, tensor in tensors
        }

    def state(self) -> tuple[tuple[bool, ...], tuple[bool, ...], tuple[torch.dtype, ...]]:
        """Return train modes of modules, `requires_grad` of parameters, dtypes of parameters and buffers."""
        if self.shells:
            parameters: list[Any] = [table[name] for table, name in self.tables]
            buffers: list[Any] = [table[name] for table, name in self.buffer_tables]
            modes = tuple(map(_training, self.shells))
            kinds = list(map(_dtype, parameters))
        else:
            model = self._whole()
            parameters, buffers = list(model.parameters()), list(model.buffers())
            modes = tuple(map(_training, model.modules()))
            # The shells will store parameters in the dtype that the optimizer updates.
            kinds = [self.precision.stored(parameter.dtype, not parameter.requires_grad) for parameter in parameters]
            # train() or eval() of a parallel module without shells reaches the parallel module alone.
            if self.shell.training != modes[0]:
                modes = (self.shell.training,) * len(modes)
        return modes, tuple(map(_requires_grad, parameters)), (*kinds, *map(_dtype, buffers))

    def kinds(self) -> set[torch.dtype]:
        """Return the dtypes of all parameters and buffers."""
        return set(self.state()[2])

    def handling(self, graph: NamedGraph, assignment: Assignment) -> dict[str, ParameterHandling]:
        """Return how the parameters of a graph are stored, used and reduced."""
        found = {}
        narrow = gathered_in_float8(graph, self.precision)
        for tensor in graph.parameters:
            stored = self.dtypes[tensor.name]
            policy = assignment.gather_policies.get(tensor.name, GatherPolicy(False, False, False))
            found[tensor.name] = ParameterHandling(
                stored,
                tensor.dtype,
                self.precision.reduced(stored),
                policy.defer_reduction,
                policy.regather,
                policy.keep_gathered,
                tensor.name in narrow,
            )
        return found

    def traceable(self, training: Sequence[bool], trained: Sequence[bool], dtypes: Sequence[torch.dtype]) -> nn.Module:
        """Return the skeleton, set to these train modes, `requires_grad` and dtypes."""
        for module, trains in zip(self.skeleton.modules(), training, strict=True):
            module.training = trains
        for parameter, trains in zip(self.skeleton.parameters(), trained, strict=True):
            parameter.requires_grad_(trains)
        self.dtypes = dict(zip(dict(self.skeleton.named_parameters()), dtypes, strict=False))
        self._check_thawed()
        if self.precision.compute_dtype is None:
            match_dtypes(self.skeleton, tuple(dtypes))
        return self.skeleton

    def _check_thawed(self) -> None:
        """Raise if a parameter is trained that was frozen when the weights were split, and so has no master weight."""
        for name, parameter in self.skeleton.named_parameters():
            if parameter.requires_grad and name in self.frozen:
                stored, master = self.dtypes[name], self.precision.stored(parameter.dtype, frozen=False)
                if stored != master and self.precision.compute_dtype == stored:
                    raise AutoparError(
                        f"{name} was frozen when its module was made parallel, and is to be trained now: expected a "
                        f"weight in {master}, got one in {stored}, the dtype of the compute\n"
                        f"fix: {name}.requires_grad_() of the model before parallelize; a parameter may be frozen later"
                    )

    def find_owner(self, agreement: Agreement) -> None:
        """Find out whether the first rank alone has the values: the others built the model on the meta device."""
        meta = [parameter.is_meta for parameter in self._whole().parameters()]
        first, *others = agreement.numbers(int(any(meta)), int(bool(meta) and all(meta)))
        self.from_first = not first[0] and bool(others) and all(row[1] for row in others)

    def build(self, shards: Mapping[str, LocalShard], first: Callable[[], FirstRank]) -> None:
        """Split the weights of the original model into the shells, and release the model.

        Values that the first rank alone has are scattered.
        """
        model = self._whole()
        names = {name for name, _ in model.named_parameters()}
        self.frozen = frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
        self.stored = {name: shard for name, shard in shards.items() if name in names}
        training = self.shell.training
        # Tensors made in inference mode could never be trained, and the first call may be one of evaluation.
        with torch.inference_mode(False):
            self.shells = split(model, self.shell, self.stored, self.device, self.precision)
        if self.shell.training != training:  # train() or eval() was called before the shells existed
            self.shell.train(training)
        self._find_tables()
        if self.from_first:
            self._scatter(first(), dict(model.named_parameters()))
        self.given = None

    def _scatter(self, first: FirstRank, whole: Mapping[str, Tensor]) -> None:
        """Fill the shards, and all buffers, with the values of the first rank."""
        shell = dict(nn.Module.named_parameters(self.shell))
        for name, place in self.stored.items():
            first.scatter(place, whole[name] if first.is_here else None, _local(shell[name]))
        for _, buffer in nn.Module.named_buffers(self.shell):
            first.broadcast(buffer)
        self.has_values = True
        self.unset.clear()

    def copied(self, shell: ClosedModule, memo: dict[int, Any], changed: Callable[[], None]) -> Weights:
        made = copy.copy(self)
        made.changed = changed
        made.skeleton = hollow(self.skeleton, None)
        made.shell, made.given = shell, copy.deepcopy(self.given, memo)
        made.unset = set(self.unset)

        def duplicate(parameter: nn.Parameter) -> nn.Parameter:
            # In the memo, so that an optimizer that is copied with the module gets these parameters.
            memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            return memo[id(parameter)]  # type: ignore[no-any-return]

        if self.shells:
            made.shells = mirror(self.shell, shell, duplicate, lambda buffer: buffer.detach().clone())
            made._find_tables()
        return made

    def check_there(self) -> None:
        """Raise if the module has no parameters yet."""
        if not self.shells:
            raise AutoparError(NO_PARAMETERS)

    def check_set(self) -> None:
        """Raise if a parameter or buffer from the meta device has no value yet."""
        if self.has_values:
            return
        fix = "fix: call init_weights() or load_full_state_dict(state_dict) of the parallel module first"
        what = "its parameters have no values yet"
        # A load without missing keys has set all that a file can store: the rest are non-persistent buffers.
        if self.loaded:
            fix = "fix: call init_weights() before you load the state dict: no state dict contains this buffer"
            what = f"its buffer {min(self.unset)} has no values yet"
        raise AutoparError(f"{self.owner} was built on the meta device and {what}\n{fix}")

    def initialise(self, init: Callable[[nn.Module], None] | None, agreement: Agreement) -> None:
        """Initialise all tensors with random numbers that are equal on all ranks."""
        self.check_there()
        # Ranks may have different generator states: all continue from a number of the first rank.
        rows = agreement.numbers(int(torch.randint(2**62, ())))
        with torch.random.fork_rng():
            torch.manual_seed(rows[0][0])
            agreement.together(
                lambda: initialise(self.skeleton, self.shell, self.stored, self.device, init, self.precision)
            )
        self.has_values = True
        self.unset.clear()

    def load_full(
        self, state_dict: Mapping[str, Tensor] | None, agreement: Agreement, first: Callable[[], FirstRank]
    ) -> None:
        """Load whole tensors; those that the first rank alone has are scattered."""
        self.check_there()
        having = [row[0] for row in agreement.numbers(int(state_dict is not None))]
        if state_dict is not None and all(having):
            agreement.together(lambda: load_full(self.shell, self.stored, state_dict))
            self.was_given(state_dict)
            return
        if not having[0] or any(having[1:]):
            lacking = ", ".join(str(rank) for rank, has in enumerate(having) if not has)
            raise AutoparError(
                f"wrong state dicts: expected one on every rank, or on the first rank alone, got none on {lacking}\n"
                "fix: load_full_state_dict(state_dict if torch.distributed.get_rank() == 0 else None)"
            )
        agreement.together(lambda: None if state_dict is None else check_full(self.shell, self.stored, state_dict))
        given = {self.names()[name]: value for name, value in (state_dict or {}).items()}
        for name, tensor in self._stored_once():
            if isinstance(tensor, DTensor):
                first().scatter(self.stored[name], given.get(name), _local(tensor))
            else:
                if first().is_here:
                    tensor.copy_(given[name])
                first().broadcast(tensor)
        self.was_given(name for name, _ in stored_in(self.shell))

    def full(self, first: FirstRank) -> dict[str, Tensor]:
        """Return the whole tensors on the first rank, in the memory of the host; nothing on the others."""
        whole: dict[str, Tensor | None] = {}
        for name, tensor in self._stored_once():
            is_split = isinstance(tensor, DTensor)
            whole[name] = first.gather(self.stored[name], _local(tensor)) if is_split else tensor.detach().cpu().clone()
        names = self.names()
        found = ((name, whole[names[name]]) for name, _ in stored_in(self.shell)) if first.is_here else ()
        return {name: tensor for name, tensor in found if tensor is not None}

    def _stored_once(self) -> list[tuple[str, Tensor]]:
        """Return the tensors of a state dict, each under its first name."""
        names = self.names()
        return [(name, tensor) for name, tensor in stored_in(self.shell) if names[name] == name]

    def names(self) -> dict[str, str]:
        """Map each name of a parameter or buffer to the first name of the same tensor."""
        self.check_there()
        return canonical_names(self.shell)

    def placed(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict with its tensors resharded to the module's shardings."""
        return placed(self.shell, self.stored, state_dict)

    def was_given(self, names: Iterable[str]) -> None:
        """Record that all parameters have values, and the buffers of these names."""
        self.loaded = True
        self.unset.difference_update(names)
        self.has_values = self.has_values or not self.unset

    def _whole(self) -> nn.Module:
        assert self.given is not None, "the weights of the model are already split"
        return self.given

    def _find_tables(self) -> None:
        """Store the table and name of each tensor, and the module of the skeleton behind each shell."""
        for shell, (path, part) in zip(self.shells, self.skeleton.named_modules(), strict=True):
            if isinstance(shell, ModuleShell):
                shell.stand_for(part, self.changed, partial(self.shell.call_part, path))
        # Tensors are looked up at every call, so not by a walk through the modules.
        owners = [owner_of(self.shell, name) for name, _ in nn.Module.named_parameters(self.shell)]
        self.tables = [(owner._parameters, leaf) for owner, leaf in owners]
        owners = [owner_of(self.shell, name) for name, _ in nn.Module.named_buffers(self.shell)]
        self.buffer_tables = [(owner._buffers, leaf) for owner, leaf in owners]


def _local(parameter: Tensor) -> Tensor:
    """Return the memory of this rank's shard."""
    assert isinstance(parameter.detach(), DTensor), "parameters of a parallel module are DTensors"
    local: Tensor = parameter.detach().to_local()  # type: ignore[attr-defined]
    return local
