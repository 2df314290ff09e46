"""Run torch.export on a call of a model; equal layers are exported once."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from autopar.ir.call_arguments import plain_call
from autopar.ir.exported import Autocast, OutputTree, entered
from autopar.ir.pytree import Flattened, UnsupportedValueError, flatten, shallow_state, unflatten
from autopar.tracing.annotations import tracing
from autopar.tracing.export.intercept import intercept_torch, keep_unused_ops, remove_new_attributes
from autopar.tracing.export.program_graph import ProgramGraph, read_program
from autopar.tracing.export.refuse import Refusal
from autopar.tracing.layers.calls import RECORDED, LayersDifferError
from autopar.tracing.layers.freeze import Freezer
from autopar.tracing.layers.instantiate import instantiate
from autopar.tracing.layers.kinds import Attribute, LayerKind, layer_kinds
from autopar.tracing.layers.recording import Recording, recording

# Exports with equal layers that are tried before a full one. Each one learns in which the layers differ.
TRIES = 3
# Layers of a kind that keep their tensors: those recorded, and one more where the first has an input of its own, such
# as one without a gradient.
WHOLE = RECORDED + 1


def run_export(
    call: FlatCall,
    examples: tuple[torch.Tensor, ...],
    device: torch.device | None,
    *,
    symbolic: dict[str, Any] | None = None,
    layers_once: bool = True,
) -> ProgramGraph:
    """Export the model of a call, with symbols for sizes of `symbolic`, or with equal layers traced once."""
    if layers_once and symbolic is None:
        found = _layers_once(call, examples, device)
        if found is not None:
            return found
    return read_program(_program(call, examples, device, symbolic))


def _program(
    call: FlatCall,
    examples: tuple[torch.Tensor, ...],
    device: torch.device | None,
    symbolic: dict[str, Any] | None = None,
) -> torch.export.ExportedProgram:
    with intercept_torch(torch.is_grad_enabled(), device), tracing(), remove_new_attributes(call.model):
        program = torch.export.export(call, examples, dynamic_shapes=symbolic, strict=False)
    with keep_unused_ops():
        decomposed: torch.export.ExportedProgram = program.run_decompositions({})
    return decomposed


def _layers_once(
    call: FlatCall, examples: tuple[torch.Tensor, ...], device: torch.device | None
) -> ProgramGraph | None:
    """Export with equal layers recorded; None if the model has no such layers."""
    search = _LayerSearch(call.model)
    for _ in range(TRIES):
        kinds = search.kinds()
        if not kinds:
            return None
        with warnings.catch_warnings(record=True) as shown:
            found = _try(call, examples, device, kinds, search)
        if found is not None:
            for one in shown:
                warnings.showwarning(one.message, one.category, one.filename, one.lineno)
            return found
    return None


def _try(
    call: FlatCall,
    examples: tuple[torch.Tensor, ...],
    device: torch.device | None,
    kinds: tuple[LayerKind, ...],
    search: _LayerSearch,
) -> ProgramGraph | None:
    """Export once; None, with something learned, if layers of a kind differ."""
    with recording(call.model, kinds, search.whole(kinds)) as record:
        call.recording = record
        try:
            program = _program(call, examples, device)
        except Exception as error:  # noqa: BLE001  # a full export raises it in terms of the model
            search.learn(error if isinstance(error, LayersDifferError) else record.calls.problem)
            return None
        finally:
            call.recording = None
    try:
        return instantiate(read_program(program), record.calls, call.model)
    except LayersDifferError as error:
        search.learn(error)
        return None


class _LayerSearch:
    """Kinds of layers of a model, as far as the exports so far tell."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.freezer = Freezer()
        # Attributes that the forward of a layer reads; layers that are traced in full, or must be recorded.
        self.read: frozenset[Attribute] = frozenset()
        self.full: frozenset[str] = frozenset()
        self.recorded: frozenset[str] = frozenset()

    def kinds(self) -> tuple[LayerKind, ...]:
        found = layer_kinds(self.model, self.read, self.freezer)
        return tuple(kind for kind in found if self.full.isdisjoint(kind.layers))

    def whole(self, kinds: tuple[LayerKind, ...]) -> frozenset[str]:
        """Return the layers that keep their tensors."""
        found = {path for kind in kinds for path in kind.layers[:WHOLE]}
        for kind in kinds:
            for place, path in enumerate(kind.layers):
                if path in self.recorded:
                    found.update(kind.layers[place : place + RECORDED])
        return frozenset(found)

    def learn(self, error: LayersDifferError | None) -> None:
        """Take note of a problem; None stands for one of the model itself."""
        if error is None:
            self.full = frozenset(path for path, _ in self.model.named_modules())
        elif error.recorded:
            self.recorded |= error.recorded
        else:
            self.read |= error.read
            self.full |= error.full


class Returned:
    """Output tree of a call; torch.export restores attributes that a forward sets on a module itself."""

    tree: OutputTree | None = None
    assigned: tuple[str, ...] = ()


class FlatCall(nn.Module):
    """The model as a module whose inputs and outputs are flat tuples of tensors."""

    def __init__(
        self, model: nn.Module, signature: inspect.Signature, flat: Flattened, autocast: tuple[Autocast, ...]
    ) -> None:
        super().__init__()
        self.model = model
        self.signature = signature
        self.node = flat.node
        self.autocast = autocast
        self.returned = Returned()
        self.recording: Recording | None = None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arguments, containers = unflatten(self.node, tensors)
        before = {number: shallow_state(container) for number, container in containers.items()}
        args, kwargs = plain_call(self.signature, arguments)
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        with entered(self.autocast), self.recording.opened() if self.recording is not None else nullcontext():
            result = self.model(*args, **kwargs)
        assigned = _replaced_buffers(self.model, buffers)
        changed = []
        for number, old in before.items():
            new = shallow_state(containers[number])
            if old.keys() != new.keys() or any(old[name] is not new[name] for name in old):
                changed.append(number)
        kept = {id(containers[n]): n for n in changed}
        untouched = {id(container): n for n, container in containers.items() if n not in changed}
        try:
            flat = flatten((result, [containers[n] for n in changed]), deep=False, originals=untouched, kept=kept)
        except UnsupportedValueError as error:
            where = error.path.partition(".")[2]
            raise Refusal(
                f"its result contains {error.problem}" + (f" (at {where})" if where else ""),
                "return tensors, in tuples, lists, dicts or objects of these",
            ) from error
        reused = {number: kept[id(c)] for number, c in enumerate(flat.containers) if id(c) in kept}
        self.returned.tree = OutputTree(flat.node, reused)
        self.returned.assigned = tuple(assigned)
        return (*assigned.values(), *flat.tensors)


def _replaced_buffers(model: nn.Module, before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the buffers that the forward replaced (`self.count = self.count + 1`)."""
    # torch.export would lose the new tensors: they become outputs of the graph.
    found = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        old = before.get(name, buffer)
        if buffer is old:
            continue
        if (buffer.shape, buffer.dtype) != (old.shape, old.dtype):
            raise Refusal(
                f"the buffer {name!r} of shape {list(old.shape)} and dtype {old.dtype} is replaced by one of shape "
                f"{list(buffer.shape)} and dtype {buffer.dtype}",
                "give the buffer its final shape and dtype from the start",
            )
        found[name] = buffer
    return found
