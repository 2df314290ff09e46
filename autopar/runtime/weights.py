"""The parameters and buffers of a parallel module: in the model that was given, then this rank's parts of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.lowering.collectives.checksum import checksum, kind_of
from autopar.runtime.module_shell import canonical_names, mirror, owner_of
from autopar.runtime.ranks.agreement import Agreement
from autopar.runtime.shards import LocalShard, hollow, initialise, load_full, match_dtypes, placed, split

__all__ = ["Weights"]

NO_PARAMETERS = (
    "the module has no parameters yet: how they are split is decided when it is first traced\n"
    "fix: give parallelize the inputs, or call the module once before you make the optimizer"
)

_training, _requires_grad, _dtype = map(attrgetter, ("training", "requires_grad", "dtype"))


class Weights:
    """Parameters and buffers of a module on this rank, and the model without values that calls are traced with."""

    def __init__(
        self, shell: nn.Module, model: nn.Module, device: torch.device, compute_dtype: torch.dtype | None
    ) -> None:
        self.shell = shell
        self.owner = type(model).__name__
        self.device = device
        self.compute_dtype = compute_dtype
        self.given: nn.Module | None = model  # until its weights are split; then only its skeleton is kept
        self.skeleton = hollow(model, device, compute_dtype)
        self.dtypes: dict[str, torch.dtype] = {}
        """In which the parameters are stored, in the latest trace."""
        self.stored: dict[str, LocalShard] = {}
        self.has_values = not any(parameter.is_meta for parameter in model.parameters())
        self.unset = {name for name, buffer in model.named_buffers() if buffer.is_meta}
        """Buffers that were built without values and have not been given any."""
        self.loaded = False
        """True after a state dict was loaded."""
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
        """A checksum of each whole tensor."""
        model = self._whole()
        return {
            f"the {kind} {name}": ((), checksum(tensor))
            for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers()))
            for name, tensor in tensors
        }

    def state(self) -> tuple[tuple[bool, ...], tuple[bool, ...], tuple[torch.dtype, ...]]:
        """Return for each module whether it trains, for each parameter likewise, and the type of each tensor."""
        if self.shells:
            parameters: list[Any] = [table[name] for table, name in self.tables]
            buffers: list[Any] = [table[name] for table, name in self.buffer_tables]
            modes = tuple(map(_training, self.shells))
        else:
            model = self._whole()
            parameters, buffers = list(model.parameters()), list(model.buffers())
            modes = tuple(map(_training, model.modules()))
            if self.shell.training != modes[0]:
                modes = (self.shell.training,) * len(modes)
        return modes, tuple(map(_requires_grad, parameters)), (*map(_dtype, parameters), *map(_dtype, buffers))

    def kinds(self) -> set[torch.dtype]:
        """Return the dtypes of all parameters and buffers."""
        return set(self.state()[2])

    def traceable(self, training: Sequence[bool], trained: Sequence[bool], dtypes: Sequence[torch.dtype]) -> nn.Module:
        """The model without its values, in some state."""
        for module, trains in zip(self.skeleton.modules(), training, strict=True):
            module.training = trains
        for parameter, trains in zip(self.skeleton.parameters(), trained, strict=True):
            parameter.requires_grad_(trains)
        self.dtypes = dict(zip(dict(self.skeleton.named_parameters()), dtypes, strict=False))
        if self.compute_dtype is None:
            match_dtypes(self.skeleton, tuple(dtypes))
        return self.skeleton

    def build(self, held: Mapping[str, LocalShard]) -> None:
        """Split the weights of the model that was given, and let go of it."""
        model = self._whole()
        names = {name for name, _ in model.named_parameters()}
        self.stored = {name: place for name, place in held.items() if name in names}
        training = self.shell.training
        with torch.inference_mode(False):
            self.shells = split(model, self.shell, self.stored, self.device)
        if self.shell.training != training:  # train() or eval() was called before there was anything to set
            self.shell.train(training)
        self._find_tables()
        self.given = None

    def copied(self, shell: nn.Module, memo: dict[int, Any]) -> Weights:
        made = copy.copy(self)
        made.shell, made.given = shell, copy.deepcopy(self.given, memo)
        made.unset = set(self.unset)
        if self.shells:
            made.shells = mirror(self.shell, shell, lambda p: _duplicate(p, memo), lambda b: b.detach().clone())
            made._find_tables()
        return made

    def check_there(self) -> None:
        """Raise if the module has no parameters yet."""
        if not self.shells:
            raise AutoparError(NO_PARAMETERS)

    def check_set(self) -> None:
        """Raise if something has no value yet."""
        if self.has_values:
            return
        fix = "fix: call init_weights() or load_full_state_dict(state_dict) of the parallel module first"
        what = "its parameters have no values yet"
        if self.loaded:  # of what a file can hold, all
            fix = "fix: call init_weights() before the state dict is loaded: this buffer is in no state dict"
            what = f"its buffer {min(self.unset)} has no values yet"
        raise AutoparError(f"{self.owner} was built on the meta device and {what}\n{fix}")

    def initialise(self, init: Callable[[nn.Module], None] | None, agreement: Agreement) -> None:
        """Draw values, the same on every rank."""
        self.check_there()
        rows = agreement.numbers(int(torch.randint(2**62, ())))
        with torch.random.fork_rng():
            torch.manual_seed(rows[0][0])
            agreement.together(lambda: initialise(self.skeleton, self.shell, self.stored, self.device, init))
        self.has_values = True
        self.unset.clear()

    def load_full(self, state_dict: Mapping[str, Tensor], agreement: Agreement) -> None:
        self.check_there()
        agreement.together(lambda: load_full(self.shell, self.stored, state_dict))
        self.was_given(state_dict)

    def names(self) -> dict[str, str]:
        """Every name of a parameter or buffer -> the first name of that tensor."""
        self.check_there()
        return canonical_names(self.shell)

    def placed(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict with its tensors split as the module holds them."""
        return placed(self.shell, self.stored, state_dict)

    def was_given(self, names: Iterable[str]) -> None:
        """All parameters have values, and the buffers of these names: those that are not persistent are in no file."""
        self.loaded = True
        self.unset.difference_update(names)
        self.has_values = self.has_values or not self.unset

    def _whole(self) -> nn.Module:
        assert self.given is not None, "kept until its weights are split"
        return self.given

    def _find_tables(self) -> None:
        """Where each tensor is looked up: at every call, so without walking through the modules."""
        owners = [owner_of(self.shell, name) for name, _ in nn.Module.named_parameters(self.shell)]
        self.tables = [(owner._parameters, leaf) for owner, leaf in owners]
        owners = [owner_of(self.shell, name) for name, _ in nn.Module.named_buffers(self.shell)]
        self.buffer_tables = [(owner._buffers, leaf) for owner, leaf in owners]


def _duplicate(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    made = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    memo[id(parameter)] = made
    return made
