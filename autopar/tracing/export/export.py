"""Export a model: torch.export, with the mutations, aliases and outputs that torch.export would lose."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Node

from autopar.errors import AutoparWarning, TraceError
from autopar.ir.call_arguments import apart, bind, check_overlaps, flatten_arguments, signature_of
from autopar.ir.exported import Autocast, Exported, Mutation, OutputTree, Placeholder, autocast_state
from autopar.ir.pytree import Flattened, Mapped
from autopar.tracing.export.cast_buffers import with_buffers_of_one_dtype
from autopar.tracing.export.intercept import check_autocast, check_hooks
from autopar.tracing.export.program_graph import PREFIX, ProgramInput, ProgramMutation, renumbered
from autopar.tracing.export.python_random import check_random
from autopar.tracing.export.refuse import check_static, raise_trace_errors, record_origins
from autopar.tracing.export.run_export import FlatCall, run_export
from autopar.tracing.passes.drop_checks import drop_checks
from autopar.tracing.passes.normalise import ExportFacts, normalise

_KINDS: Mapping[InputKind, Literal["param", "buffer", "constant"]] = {
    InputKind.PARAMETER: "param",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}
# These log each exception, which the user gets as a TraceError.
_LOGGERS = (
    "torch.export._trace",
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
)
# Recurrent layers list their parameters a second time; torch.export swaps that list and restores it.
_RECURRENT_WEIGHTS = re.compile(r"\S+\._flat_weights\[\d+\](, )?")
_ASSIGNED = re.compile(r"The tensor attributes? (.*) (?:was|were) assigned during export")


@dataclass(frozen=True)
class Capture:
    """Decomposed graph of one call of a model, before the passes of a trace, and what torch.export says about it."""

    model: nn.Module
    flat: Flattened
    graph: Graph
    # Modules that `get_attr` nodes of the graph name.
    root: nn.Module
    # Meaning of the placeholders, and of the first outputs.
    inputs: tuple[ProgramInput, ...]
    mutated: tuple[ProgramMutation, ...]
    constants: Mapping[str, torch.Tensor]
    output_tree: OutputTree
    # Buffers that the forward replaced.
    assigned: tuple[str, ...]
    device: torch.device | None
    grad_enabled: bool
    autocast: tuple[Autocast, ...]


def export(model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any], *, layers_once: bool = True) -> Exported:
    """Export a model called with `inputs`: a tuple of positional or a dict of keyword arguments.

    With `layers_once` equal layers are traced once and instantiated; the result is the same.
    """
    return finish(capture(model, inputs, layers_once=layers_once))


def capture(
    model: nn.Module,
    inputs: tuple[Any, ...] | Mapping[str, Any],
    varying: Sequence[Collection[int]] | None = None,
    *,
    layers_once: bool = True,
) -> Capture:
    """Capture and decompose a call of a model; the dims `varying` of each input tensor get symbolic sizes."""
    owner = type(model).__name__
    signature = signature_of(model)
    arguments = bind(signature, owner, inputs)
    flat = flatten_arguments(arguments, owner)
    autocast = autocast_state()
    call = FlatCall(model, signature, flat, autocast)
    # The one device of all parameters, else of all inputs; None for several devices.
    tensors = (*model.parameters(), *model.buffers()) or flat.tensors
    devices = {tensor.device for tensor in tensors}
    device = devices.pop() if len(devices) == 1 else None
    check_hooks(model)
    symbolic = None if varying is None else {"tensors": tuple(dict.fromkeys(dims, Dim.AUTO) for dims in varying)}
    with _rephrase_torch_warnings(owner), raise_trace_errors(owner):
        if autocast:
            check_autocast(device)
        # torch.export joins inputs that share memory, or are one tensor, to one input.
        examples = tuple(apart(tensor) if varying is None else _contiguous(tensor) for tensor in flat.tensors)
        run = partial(run_export, call, examples, device, symbolic=symbolic, layers_once=layers_once)
        program = with_buffers_of_one_dtype(model, partial(check_random, run), call.returned)
    drop_checks(program.graph)
    program = renumbered(program)
    record_origins(program.graph, PREFIX)
    assert call.returned.tree is not None, "the model was called"
    return Capture(
        model=model,
        flat=flat,
        graph=program.graph,
        root=program.root,
        inputs=program.inputs,
        mutated=program.mutations,
        constants=program.constants,
        output_tree=call.returned.tree,
        assigned=call.returned.assigned,
        device=device,
        grad_enabled=torch.is_grad_enabled(),
        autocast=autocast,
    )


def finish(capture: Capture) -> Exported:
    """Run the passes of a trace on a captured graph, in place."""
    # They compute indices and constants, also for a user whose default device is the meta device.
    with torch.device("cpu"):
        return _finish(capture)


def _finish(capture: Capture) -> Exported:
    model, flat = capture.model, capture.flat
    owner = type(model).__name__
    check_static(capture.graph, owner)
    normalise(capture.graph, ExportFacts(capture.device, *_placeholder_sources(capture)))
    placeholders, aliases = _placeholders(capture)
    assert isinstance(flat.node, Mapped), "arguments are a dict"
    mutations = _mutations(capture)
    given = dict(zip(flat.paths, flat.tensors, strict=True))
    state = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    check_overlaps(owner, (mutation.target for mutation in mutations), given, state, TraceError)
    return Exported(
        graph_module=GraphModule(capture.root, capture.graph),
        placeholders=placeholders,
        constants={p.name: capture.constants[p.name] for p in placeholders if p.kind == "constant"},
        aliases=aliases,
        mutations=mutations,
        output_tree=capture.output_tree,
        input_tree=flat.node,
        training=model.training,
        grad_enabled=capture.grad_enabled,
        autocast=capture.autocast,
        device=capture.device,
    )


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Make a contiguous leaf of the same shape, dtype and device; its values are not set."""
    # A stride that does not follow from the sizes would get a symbol of its own.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).requires_grad_(tensor.requires_grad)


def _placeholders(capture: Capture) -> tuple[tuple[Placeholder, ...], dict[str, str]]:
    """Return the placeholders in graph order, and the canonical name of each other name of a tied weight."""
    model, flat, graph = capture.model, capture.flat, capture.graph
    aliases = tied_names(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    inputs = iter(zip(flat.paths, flat.tensors, strict=True))
    made: list[Placeholder] = []
    canonical: dict[str, Node] = {}
    replaced: list[tuple[Node, str]] = []
    for node, one in zip(graph.find_nodes(op="placeholder"), capture.inputs, strict=True):
        name = one.name
        if one.kind is InputKind.USER_INPUT:
            name, tensor = next(inputs)
            _rename(node, name)
            made.append(Placeholder(node.name, "input", name, tensor.requires_grad))
        elif one.kind in _KINDS:
            if name in aliases:
                replaced.append((node, aliases[name]))
                continue
            kind = _KINDS[one.kind]
            if kind == "constant" and not node.users:
                graph.erase_node(node)
                continue
            _rename(node, f"{kind[0]}_{name}")
            canonical[name] = node
            made.append(Placeholder(node.name, kind, name, name in trained))
        else:
            raise TraceError(
                f"{type(model).__name__} cannot be traced: it uses an object that is no tensor: {name}\n"
                "fix: give the forward tensors, numbers and text alone"
            )
    for node, name in replaced:
        node.replace_all_uses_with(canonical[name])
        graph.erase_node(node)
    return tuple(made), aliases


def _placeholder_sources(
    capture: Capture,
) -> tuple[dict[Node, torch.Tensor], dict[Node, str], dict[Node, torch.Tensor]]:
    """Return the constants with their data, the user's name for each other placeholder, and inputs with data."""
    inputs = iter(zip(capture.flat.paths, capture.flat.tensors, strict=True))
    known, sources, examples = {}, {}, {}
    nodes = capture.graph.find_nodes(op="placeholder")
    for node, one in zip(nodes, capture.inputs, strict=True):
        if one.kind is InputKind.USER_INPUT:
            sources[node], tensor = next(inputs)
            has_data = not tensor.is_meta and not isinstance(tensor, FakeTensor)
            if has_data and not tensor.is_floating_point() and tensor.shape == node.meta["val"].shape:
                examples[node] = tensor.cpu()
        elif one.kind is InputKind.CONSTANT_TENSOR:
            known[node] = capture.constants[one.name]
        else:
            sources[node] = f"buffer {one.name}" if one.kind is InputKind.BUFFER else one.name
    return known, sources, examples


def _rename(node: Node, name: str) -> None:
    # A graph writes `LayerNorm` as `layer_norm`: the generated graphs must find the placeholder under the same name.
    node._rename(Graph().placeholder(re.sub(r"\W", "_", name)).name)
    node.target = node.name


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the canonical name of each other name of a tensor that is registered several times."""
    first: dict[int, str] = {}
    aliases = {}
    both = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in both:
        canonical = first.setdefault(id(tensor), name)
        if canonical != name:
            aliases[name] = canonical
    return aliases


def _mutations(capture: Capture) -> tuple[Mutation, ...]:
    mutations = []
    for index, one in enumerate(capture.mutated):
        if one.kind is OutputKind.BUFFER_MUTATION:
            mutations.append(Mutation(index, one.name, "buffer"))
        elif one.kind is OutputKind.USER_INPUT_MUTATION:
            mutations.append(Mutation(index, capture.flat.paths[one.position], "input"))
        else:
            raise TraceError(
                f"the forward changes the parameter {one.name!r} in place\n"
                "fix: register it as a buffer, or move the change out of the forward"
            )
    # Read before the loop, since `extend` grows the list while it runs.
    first = len(mutations)
    mutations.extend(Mutation(first + k, name, "buffer") for k, name in enumerate(capture.assigned))
    return tuple(mutations)


@contextmanager
def _rephrase_torch_warnings(owner: str) -> Iterator[None]:
    """Silence torch's messages during an export, and warn in the user's terms of assigned attributes."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    disabled = [logger.disabled for logger in loggers]
    assigned: list[str] = []
    with warnings.catch_warnings():
        # torch's pytree code warns about its own deprecated class.
        warnings.filterwarnings("ignore", category=FutureWarning, message=r".*(treespec|LeafSpec|TreeSpec).*")
        warnings.filterwarnings("always", category=UserWarning, message="The tensor attribute")
        show = warnings.showwarning

        def collect(message: Any, *rest: Any) -> None:
            found = _ASSIGNED.match(str(message))
            if found:
                names = _RECURRENT_WEIGHTS.sub("", found[1]).rstrip(", ")
                assigned.extend([names.replace("self.model.", "self.")] if names else [])
            else:
                show(message, *rest)

        warnings.showwarning = collect  # type: ignore[assignment]  # the arguments are passed on unchanged
        try:
            for logger in loggers:
                logger.disabled = True
            yield
        finally:
            for logger, before in zip(loggers, disabled, strict=True):
                logger.disabled = before
    for names in assigned:
        warnings.warn(
            AutoparWarning(
                f"the forward of {owner} sets {names} to a tensor; the traced graph does not. "
                "Register a buffer if the next call needs the value."
            ),
            stacklevel=3,
        )
