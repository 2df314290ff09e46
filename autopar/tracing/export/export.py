"""A model and example inputs -> `Exported`: torch.export, then what torch.export would have lost."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from autopar.errors import TraceError
from autopar.ir.call_arguments import apart, bind, check_overlaps, flatten_arguments, plain_call, signature_of
from autopar.ir.exported import Autocast, Exported, Mutation, OutputTree, Placeholder, autocast_state, entered
from autopar.ir.pytree import Flattened, Mapped, UnsupportedValueError, flatten, shallow_state, unflatten
from autopar.tracing.annotations import tracing
from autopar.tracing.export.intercept import (
    check_autocast,
    check_hooks,
    new_attributes_removed,
    random_ops_kept,
    watched,
)
from autopar.tracing.export.refuse import Refusal, Refusing, check_static
from autopar.tracing.export.source_lines import record_origins
from autopar.tracing.export.torch_warnings import quiet
from autopar.tracing.passes.normalise import drop_checks, normalise

__all__ = ["export"]

PREFIX = "model."


def export(model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any]) -> Exported:
    """Trace `model` called with `inputs`: a tuple of positional or a dict of keyword arguments."""
    owner = type(model).__name__
    signature = signature_of(model)
    arguments = bind(signature, owner, inputs)
    flat = flatten_arguments(arguments, owner)
    autocast = autocast_state()
    call = _FlatCall(model, signature, flat, autocast)
    device = _home_device(model, flat.tensors)
    check_hooks(model)
    with quiet(owner), Refusing(owner):
        if autocast:
            check_autocast(device)
        # torch.export takes inputs that share memory, or are one tensor, for one input.
        examples = tuple(map(apart, flat.tensors))
        with watched(torch.is_grad_enabled(), device), tracing(), new_attributes_removed(model):
            program = torch.export.export(call, examples, strict=False)
        with random_ops_kept():
            program = program.run_decompositions({})
    graph_module = program.graph_module
    record_origins(graph_module.graph, PREFIX)
    drop_checks(graph_module.graph)
    check_static(graph_module.graph, owner)
    normalise(graph_module.graph, device, *_placeholder_sources(program, flat))
    placeholders, aliases = _placeholders(program, model, flat)
    graph_module.recompile()
    assert isinstance(flat.node, Mapped), "arguments are a dict"
    assert call.returned.tree is not None, "the model was called"
    mutations = _mutations(program, flat.paths, call.returned.assigned)
    given = dict(zip(flat.paths, flat.tensors, strict=True))
    state = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    check_overlaps(owner, (mutation.target for mutation in mutations), given, state, TraceError)
    return Exported(
        graph_module=graph_module,
        placeholders=placeholders,
        constants={p.name: program.constants[PREFIX + p.name] for p in placeholders if p.kind == "constant"},
        aliases=aliases,
        mutations=mutations,
        output_tree=call.returned.tree,
        input_tree=flat.node,
        training=model.training,
        grad_enabled=torch.is_grad_enabled(),
        autocast=autocast,
        device=device,
    )


class _Returned:
    """Where the call leaves its output tree: torch.export takes back what a forward sets on a module."""

    tree: OutputTree | None = None
    assigned: tuple[str, ...] = ()


class _FlatCall(nn.Module):
    """The model as a function of flat tensors, which is all that torch.export has to know."""

    def __init__(
        self, model: nn.Module, signature: inspect.Signature, flat: Flattened, autocast: tuple[Autocast, ...]
    ) -> None:
        super().__init__()
        self.model = model
        self.signature = signature
        self.node = flat.node
        self.autocast = autocast
        self.returned = _Returned()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arguments, containers = unflatten(self.node, tensors)
        before = {number: shallow_state(container) for number, container in containers.items()}
        args, kwargs = plain_call(self.signature, arguments)
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        with entered(self.autocast):
            result = self.model(*args, **kwargs)
        assigned = _assigned(self.model, buffers)
        changed = [n for n, state in before.items() if _differs(state, shallow_state(containers[n]))]
        kept = {id(containers[n]): n for n in changed}
        untouched = {id(container): n for n, container in containers.items() if n not in changed}
        try:
            flat = flatten((result, [containers[n] for n in changed]), deep=False, originals=untouched, kept=kept)
        except UnsupportedValueError as error:
            where = error.path.partition(".")[2]
            raise Refusal(
                f"what it returns holds {error.problem}" + (f" (at {where})" if where else ""),
                "return tensors, in tuples, lists, dicts or objects that hold them",
            ) from error
        reused = {number: kept[id(c)] for number, c in enumerate(flat.containers) if id(c) in kept}
        self.returned.tree = OutputTree(flat.node, reused)
        self.returned.assigned = tuple(assigned)
        return (*assigned.values(), *flat.tensors)


def _assigned(model: nn.Module, before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Buffers that the forward replaced (`self.count = self.count + 1`): torch.export would forget the new ones."""
    found = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        old = before.get(name, buffer)
        if buffer is old:
            continue
        if (buffer.shape, buffer.dtype) != (old.shape, old.dtype):
            raise Refusal(
                f"the buffer {name!r} of shape {list(old.shape)} is replaced by one of shape {list(buffer.shape)}",
                "give the buffer its final shape and dtype from the start",
            )
        found[name] = buffer
    return found


def _differs(before: dict[Any, Any], after: dict[Any, Any]) -> bool:
    return before.keys() != after.keys() or any(before[name] is not after[name] for name in before)


_KINDS: Mapping[InputKind, Literal["param", "buffer", "constant"]] = {
    InputKind.PARAMETER: "param",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}


def _placeholders(
    program: torch.export.ExportedProgram, model: nn.Module, flat: Flattened
) -> tuple[tuple[Placeholder, ...], dict[str, str]]:
    """Placeholders in the order of the graph; tied weights have one, and `aliases` says under which name."""
    graph = program.graph_module.graph
    aliases = tied_names(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    inputs = iter(zip(flat.paths, flat.tensors, strict=True))
    made: list[Placeholder] = []
    canonical: dict[str, Node] = {}
    replaced: list[tuple[Node, str]] = []
    for node, spec in zip(graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            name, tensor = next(inputs)
            _rename(node, name)
            made.append(Placeholder(node.name, "input", name, tensor.requires_grad))
        elif spec.kind in _KINDS and spec.target is not None:
            name = spec.target.removeprefix(PREFIX)
            if name in aliases:
                replaced.append((node, aliases[name]))
                continue
            kind = _KINDS[spec.kind]
            if kind == "constant" and not node.users:
                graph.erase_node(node)
                continue
            _rename(node, f"{kind[0]}_{name}")
            canonical[name] = node
            made.append(Placeholder(node.name, kind, name, name in trained))
        else:
            raise TraceError(f"{type(model).__name__} cannot be traced: it uses an object that is no tensor: {spec}")
    for node, name in replaced:
        node.replace_all_uses_with(canonical[name])
        graph.erase_node(node)
    return tuple(made), aliases


def _placeholder_sources(
    program: torch.export.ExportedProgram, flat: Flattened
) -> tuple[dict[Node, torch.Tensor], dict[Node, str]]:
    """Constants with their data, and what every placeholder is to the user."""
    paths = iter(flat.paths)
    known, sources = {}, {}
    nodes = program.graph_module.graph.find_nodes(op="placeholder")
    for node, spec in zip(nodes, program.graph_signature.input_specs, strict=True):
        name = (spec.target or "").removeprefix(PREFIX)
        if spec.kind is InputKind.USER_INPUT:
            sources[node] = next(paths)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constant = program.constants[spec.target or ""]
            known[node] = constant
        else:
            sources[node] = f"buffer {name}" if spec.kind is InputKind.BUFFER else name
    return known, sources


def _rename(node: Node, name: str) -> None:
    node._rename(re.sub(r"\W", "_", name))
    node.target = node.name


def tied_names(model: nn.Module) -> dict[str, str]:
    """Other name -> the name `named_parameters` / `named_buffers` gives, for tensors registered more than once."""
    first: dict[int, str] = {}
    aliases = {}
    both = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in both:
        canonical = first.setdefault(id(tensor), name)
        if canonical != name:
            aliases[name] = canonical
    return aliases


def _mutations(
    program: torch.export.ExportedProgram, paths: tuple[str, ...], assigned: tuple[str, ...]
) -> tuple[Mutation, ...]:
    specs = program.graph_signature.input_specs
    user_inputs = (spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT)
    names = dict(zip(user_inputs, paths, strict=True))
    mutations = []
    for index, spec in enumerate(program.graph_signature.output_specs):
        if spec.kind is OutputKind.USER_OUTPUT:
            continue
        assert spec.target is not None, "a mutation has a target"
        if spec.kind is OutputKind.BUFFER_MUTATION:
            mutations.append(Mutation(index, spec.target.removeprefix(PREFIX), "buffer"))
        elif spec.kind is OutputKind.USER_INPUT_MUTATION:
            mutations.append(Mutation(index, names[spec.target], "input"))
        else:
            raise TraceError(
                f"the forward changes the parameter {spec.target.removeprefix(PREFIX)!r} in place; "
                "register it as a buffer, or move the change out of the forward"
            )
    first = len(mutations)  # not in the loop: `extend` makes the list longer while it runs
    mutations.extend(Mutation(first + k, name, "buffer") for k, name in enumerate(assigned))
    return tuple(mutations)


def _home_device(model: nn.Module, tensors: tuple[torch.Tensor, ...]) -> torch.device | None:
    """The one device of all parameters (else of all inputs); None when there are several."""
    parameters = (*model.parameters(), *model.buffers())
    devices = {tensor.device for tensor in parameters} or {tensor.device for tensor in tensors}
    return devices.pop() if len(devices) == 1 else None
