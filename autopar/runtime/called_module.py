"""Module that a call names: the whole model, or a part of it, as in `module.encoder(x)`.

A part is traced alone, as a call of the model with the part in place of its forward: so parameters keep their names.
Its calls follow the layout of the whole model, and its parameters stay as the first call has split them. Inputs are
whole tensors or outputs of the module; gradients flow from part to part.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace

from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.ir.call_arguments import CallReader, signature_of
from autopar.ir.graph import NamedGraph
from autopar.ir.pytree import Flattened
from autopar.runtime.call_outputs import whole
from autopar.runtime.call_planner import Planner
from autopar.sharding.options import TrainingOptions

__all__ = ["CalledModule", "check_part", "part_of", "with_whole"]


@dataclass(frozen=True)
class CalledModule:
    """Module of the model, the reader of its calls, and the planner of its calls."""

    path: str
    reader: CallReader
    planner: Planner

    @property
    def owner(self) -> str:
        return self.reader.owner

    @property
    def signature(self) -> inspect.Signature:
        return self.reader.signature

    @staticmethod
    def whole_of(model: nn.Module, planner: Planner) -> CalledModule:
        return CalledModule("", CallReader(signature_of(model), type(model).__name__), planner)


def part_of(called: CalledModule, model: nn.Module, path: str, graph: NamedGraph | None) -> CalledModule:
    """Return a part of a called model, given the graph of a call of the whole."""
    part = model.get_submodule(path)
    owner = f"{path}, a {type(part).__name__} of {called.owner}"
    if graph is None:
        raise AutoparError(
            f"{owner} is called before the whole model, whose first call decides the shardings\n"
            "fix: give parallelize inputs, or call the module first"
        )
    if type(part).forward is nn.Module.forward:
        raise AutoparError(f"{owner} has no forward\nfix: call the modules in it one by one")
    return CalledModule(path, CallReader(signature_of(part), owner), called.planner.of_parts(graph))


def check_part(called: CalledModule, options: TrainingOptions, grad_enabled: bool, replicas: bool) -> None:
    """Raise if a call of a part would have no result, or a wrong gradient."""
    fix = "give parallelize outputs='sharded', its default"
    if options.outputs == "loss":
        what = "outputs='loss' returns no tensor of a part"
    elif options.outputs in ("local", "local_sum") and grad_enabled:
        what = f"outputs={options.outputs!r} scales the gradients of a loss, not those of a value"
    elif replicas and grad_enabled:
        what, fix = "replicas that drift count the rows of calls of the whole model", "call the whole module"
    else:
        return
    raise AutoparError(f"{called.owner} cannot be called by itself here: {what}\nfix: {fix}")


def with_whole(flat: Flattened) -> Flattened:
    """Return inputs of a call with whole tensors in place of DTensors."""
    return replace(flat, tensors=tuple(whole(one) if isinstance(one, DTensor) else one for one in flat.tensors))
