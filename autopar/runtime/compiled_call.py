"""Call signatures of a parallel module, and the compiled call that runs the emitted graph of one of them.

The call reads the local tensors of all parameters and returns DTensors of their gradients (`LocalParameters`).
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import LayoutError
from autopar.ir.call_arguments import check_overlaps, inputs_with, without_defaults
from autopar.ir.exported import Autocast
from autopar.ir.graph import NamedGraph
from autopar.ir.pytree import Constant, Flattened, Items, Mapped, Node, Original, Shared, TensorLeaf, unflatten
from autopar.lowering.collectives.checksum import digest, kind_of
from autopar.lowering.emitted import Emitted
from autopar.lowering.modules.bucket import GradientSync
from autopar.lowering.passes.compile_layers import compile_layers
from autopar.runtime.activity import Activity, activity_of
from autopar.runtime.call_outputs import ShardedOutput, averaged
from autopar.runtime.local_parameters import LocalParameters
from autopar.runtime.local_step import same_objects
from autopar.runtime.module_shell import owner_of
from autopar.runtime.shards import LocalShard, ShardOwner, number_of_shards
from autopar.sharding.assignment import Assignment
from autopar.sharding.options import Outputs
from autopar.sharding.shares import marked_for


@dataclass(frozen=True)
class CallSignature:
    """Arguments of a call of a module, and the state of the module."""

    signature: inspect.Signature
    flat: Flattened
    # Train mode of each module, then `requires_grad` of each parameter.
    training: tuple[bool, ...]
    trained: tuple[bool, ...]
    # One for each parameter, then for each buffer.
    dtypes: tuple[torch.dtype, ...]
    grad_enabled: bool
    autocast: tuple[Autocast, ...]
    # Path of the module that is called; empty for the whole model.
    part: str = ""

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Return a key of the tensors and of the state of the module, without other arguments."""

        def sharded(tensor: Tensor) -> Any:
            return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None

        # Other arguments may have no hash; `structure` compares them.
        kinds = tuple((tensor.shape, tensor.dtype, tensor.requires_grad, sharded(tensor)) for tensor in self.tensors)
        return kinds, self.training, self.trained, self.dtypes, self.grad_enabled, self.autocast, self.part

    @property
    def key_without_sizes(self) -> tuple[Any, ...]:
        """Return a key that is equal for calls which differ in the sizes of their tensors alone."""
        return tuple((len(shape), *kind) for shape, *kind in self.key[0]), *self.key[1:]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.flat.tensors

    @cached_property
    def structure(self) -> Mapped:
        """Return the arguments that differ from the defaults of `forward`, with placeholders for tensors."""
        assert isinstance(self.flat.node, Mapped), "arguments are a dict"
        return without_defaults(self.signature, self.flat.node)

    def facts(self) -> dict[str, str]:
        """Return the values that all ranks must share, as text."""
        found = {"module that is called": self.part or "the whole model"}
        found["structure of the inputs"] = outline(self.structure)
        for path, tensor in zip(self.flat.paths, self.tensors, strict=True):
            placements = f" {tensor.placements}" if isinstance(tensor, DTensor) else ""
            found[f"shape of {path}"] = kind_of(tensor) + placements + (" with gradient" * tensor.requires_grad)
        found["train or eval mode"] = activity_of(self.training)
        found["parameters that require a gradient"] = "".join("ny"[mode] for mode in self.trained)
        found["dtypes of parameters and buffers"] = " ".join(map(str, self.dtypes))
        found["grad mode"] = Activity("records gradients" if self.grad_enabled else "records no gradients")
        found["autocast"] = ", ".join(map(str, self.autocast)) or "off"
        return found

    def example(
        self, shapes: Mapping[str, tuple[int, ...]] | None, dtype: torch.dtype | None
    ) -> tuple[Any, ...] | dict[str, Any]:
        """Return example inputs of these global shapes; floating point tensors are of this dtype."""
        tensors = []
        for path, tensor in zip(self.flat.paths, self.tensors, strict=True):
            shape = tensor.shape if shapes is None else shapes[path]
            kind = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
            if shape == tensor.shape and kind == tensor.dtype and not isinstance(tensor, DTensor):
                tensors.append(tensor)
            else:
                made = torch.zeros(shape, dtype=kind, device=tensor.device)
                tensors.append(made.requires_grad_(tensor.requires_grad))
        return inputs_with(self.signature, self.flat, tensors)


def outline(node: Node) -> str:
    """Return the structure of a value as text that is equal in all processes."""
    if isinstance(node, TensorLeaf):
        return "tensor"
    if isinstance(node, Constant):
        return _constant_outline(node.value)
    if isinstance(node, Items):
        return f"{node.kind.__name__}({', '.join(map(outline, node.children))})"
    if isinstance(node, Shared | Original):
        return repr(node)
    inside = ", ".join(f"{name}={outline(child)}" for name, child in zip(node.keys, node.children, strict=True))
    return f"{node.kind.__name__}({inside})"


_PLAIN = bool | int | float | complex | str | bytes | bytearray | Enum | torch.dtype | torch.device


def _constant_outline(value: Any) -> str:
    """Return a value that is no tensor as text; of other objects the type."""
    # The default `repr` contains an address, which differs between processes.
    kind = type(value).__qualname__
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, set | frozenset):  # the order of strings in a set differs between processes
        return f"{kind}({', '.join(sorted(map(_constant_outline, value)))})"
    if isinstance(value, tuple | deque):
        return f"{kind}({', '.join(map(_constant_outline, value))})"
    if hasattr(value, "__array__"):
        return f"{kind}({value.dtype}, {value.shape}, {digest(str(value.tolist()))})"
    return f"a {kind}"


@dataclass(frozen=True)
class CallResults:
    """Options of a call: the form of its results, and the dtype that inputs are cast to."""

    outputs: Outputs
    local_inputs: bool
    compute_dtype: torch.dtype | None


@dataclass(frozen=True)
class SizedParts:
    """Parts of a compiled call that may depend on the sizes of its inputs."""

    emitted: Emitted
    handed: tuple[LocalShard | None, ...]
    shares: tuple[int | float, ...]
    inputs: Mapping[str, LocalShard]
    # Of the export: they are compared alone.
    tables: tuple[Any, ...]


class CompiledCall:
    """Emitted graph of one call signature, with all that is looked up once instead of at each call."""

    def __init__(
        self,
        given: CallSignature,
        graph: NamedGraph,
        assignment: Assignment,
        emitted: Emitted,
        held: Mapping[str, LocalShard],
        module: nn.Module,
        rank: ShardOwner,
        results: CallResults,
        synchronisation: GradientSync,
        offload_states: bool,
    ) -> None:
        graph, rank = marked_for(graph, assignment.axes), rank.on(assignment)
        exported = graph.exported
        self.structure = given.structure
        self._graph: NamedGraph | None = graph
        self._make_graph: Callable[[], NamedGraph] | None = None
        self.model, self.exported = graph.model, exported
        self.constants = exported.constants_on(torch.device(rank.mesh.device_type))
        self.assignment = assignment
        self.emitted = emitted
        self.graph_module = emitted.graph_module
        self.held = held
        self.results = results
        self.changed = tuple(mutation.target for mutation in exported.mutations)
        # The backward may read the old value of these after the new one is written, so the graph gets a copy.
        self.mutated = set(self.changed) if exported.grad_enabled else set()
        self.places = [_place(module, placeholder.kind, placeholder.name) for placeholder in exported.placeholders]
        tables = zip(exported.placeholders, self.places, strict=True)
        self.parameters = [(table, p.name.rpartition(".")[2]) for p, table in tables if p.kind == "param" and table]
        # Parameters are most of the placeholders, so `LocalParameters` takes all of them in one call.
        numbered = tuple(enumerate(exported.placeholders))
        self.parameter_places = tuple(place for place, p in numbered if p.kind == "param")
        self.others = tuple((place, p) for place, p in numbered if p.kind != "param")
        self.kept_places = tuple(place for place, p in numbered if p.kind != "input" and p.name not in self.mutated)
        # Tensors at these places that a compiler knows.
        self.static: list[Tensor] = []
        self.shards_of = LocalParameters(synchronisation.finish, synchronisation.note_write, offload_states)
        self.inputs = tuple(p.name for p in exported.placeholders if p.kind == "input")
        self.input_dims = {name: graph.tensors[name].dims for name in self.inputs}
        # Set by the cache, from the facts of the signature.
        self.digest = 0
        places = emitted.results if results.outputs == "sharded" else ()
        tensors = [None if place is None else (graph.tensors[place[0]], place[1]) for place in places]
        self.handed = tuple(
            None if found is None or not found[0].shape else LocalShard.of(*found, rank=rank) for found in tensors
        )
        unequal = next((one.name for one in self.handed if one is not None and one.placements is None), None)
        if unequal is not None:
            raise LayoutError(
                "E4",
                f"E4: {unequal} has shards of unequal shares, and outputs='sharded' returns DTensors, which have none\n"
                "fix: outputs='full', or outputs='local'; or keep the result whole: output { * -> none }",
            )
        # Number of shards of each result; of unequal ones, of how many like this rank's the whole is made.
        self.shares = tuple(1 if place is None else number_of_shards(graph, *place, rank) for place in emitted.results)

    @property
    def graph(self) -> NamedGraph:
        """Return the named graph of this call; a call that was emitted at other sizes makes it when it is asked for."""
        if self._graph is None:
            assert self._make_graph is not None, "a call has a graph, or makes it"
            self._graph = marked_for(self._make_graph(), self.assignment.axes)
        return self._graph

    @property
    def sized(self) -> SizedParts:
        """Return the parts of this call that depend on the sizes of its inputs."""
        tables = self.exported.constants, self.exported.mutations, self.exported.output_tree, self.input_dims
        return SizedParts(
            self.emitted, self.handed, self.shares, {name: self.held[name] for name in self.inputs}, tables
        )

    def at_sizes(self, parts: SizedParts, make_graph: Callable[[], NamedGraph]) -> CompiledCall:
        """Return the call of other sizes, with these parts; all else is shared."""
        made = copy(self)
        made._graph, made._make_graph = None, make_graph
        made.emitted, made.graph_module = parts.emitted, parts.emitted.graph_module
        made.handed, made.shares, made.held = parts.handed, parts.shares, {**self.held, **parts.inputs}
        return made

    def compile_layers(self, compiled: Callable[[nn.Module], nn.Module]) -> int:
        """Compile each kind of layer; return the number of layers that run compiled."""
        return compile_layers(self.graph_module, (layer.ops for layer in self.graph.layers), compiled)

    def values(self, given: CallSignature, compiled: bool = False) -> list[Tensor]:
        """Return the arguments of the graph: this rank's shards of all its placeholders."""
        inputs = dict(zip(self.inputs, given.tensors, strict=True))
        if self.changed:
            self._check_overlaps(inputs)
        shards = self.shards_of([table[name] for table, name in self.parameters], compiled)
        values: list[Any] = [None] * len(self.places)
        for place, shard in zip(self.parameter_places, shards, strict=True):
            values[place] = shard
        for place, placeholder in self.others:
            table = self.places[place]
            if placeholder.kind == "input":
                tensor = inputs[placeholder.name]
                value = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if self.results.compute_dtype is not None and value.is_floating_point():
                    value = value.to(self.results.compute_dtype)
            elif placeholder.kind == "constant":
                value = self.constants[placeholder.name]
            else:
                assert table is not None, placeholder
                value = table[placeholder.name.rpartition(".")[2]]
            if placeholder.name in self.mutated:
                value = value.clone()
            values[place] = value
        if compiled:
            self._mark_static([values[place] for place in self.kept_places])
        return values

    def _mark_static(self, tensors: list[Tensor]) -> None:
        """Mark tensors whose addresses are the same at each call: CUDA graphs copy all others.

        No guard: a graph is recorded again if an address changes.
        """
        if not same_objects(tensors, self.static):
            for tensor in tensors:
                torch._dynamo.mark_static_address(tensor, guard=False)
            self.static = tensors

    def _check_overlaps(self, inputs: Mapping[str, Tensor]) -> None:
        plain = {name: tensor for name, tensor in inputs.items() if not isinstance(tensor, DTensor)}
        buffers = {
            p.name: table[p.name.rpartition(".")[2]]
            for p, table in zip(self.exported.placeholders, self.places, strict=True)
            if p.kind == "buffer" and table is not None
        }
        check_overlaps(type(self.model).__name__, self.changed, plain, buffers)

    def finish(self, given: CallSignature, outputs: tuple[Any, ...]) -> Any:
        """Copy mutated values into their tensors, and return the model's result."""
        exported = self.exported
        if exported.mutations:
            self._write_back(given, outputs)
        flat = given.flat
        reused = {number: flat.containers[mine] for number, mine in exported.output_tree.reused.items()}
        rest = outputs[len(exported.mutations) :]
        if self.results.outputs == "sharded":
            pairs = zip(rest, self.handed, strict=True)
            rest = tuple(value if held is None else ShardedOutput.of(held.wrap(value)) for value, held in pairs)
        elif self.results.outputs == "local":
            rest = tuple(map(averaged, rest, self.shares))
        (result, _), _ = unflatten(exported.output_tree.node, rest, flat.containers, reused)
        return result

    def _write_back(self, given: CallSignature, outputs: tuple[Any, ...]) -> None:
        exported = self.exported
        inputs = dict(zip(self.inputs, given.tensors, strict=True))
        targets = {p.name: place for p, place in zip(exported.placeholders, self.places, strict=True)}
        for mutation in exported.mutations:
            if mutation.kind == "input":
                target: Tensor | None = inputs[mutation.target]
            else:
                table = targets[mutation.target]
                assert table is not None, mutation
                target = table[mutation.target.rpartition(".")[2]]
            assert target is not None, mutation
            # A mutated input gets a history for autograd, as in the eager model; buffers get none.
            with torch.set_grad_enabled(torch.is_grad_enabled() and mutation.kind == "input"):
                target.copy_(outputs[mutation.output])


def _place(module: nn.Module, kind: str, name: str) -> dict[str, Any] | None:
    """Return the table of the module that stores a parameter or buffer; None for other kinds."""
    # The table and not the tensor: a load with `assign=True` replaces tensors between calls.
    if kind not in ("param", "buffer"):
        return None
    owner, _ = owner_of(module, name)
    return owner._parameters if kind == "param" else owner._buffers
