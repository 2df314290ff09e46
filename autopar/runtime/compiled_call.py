"""Call signatures of a parallel module, and the compiled call that runs the emitted graph of one of them.

The call reads the local tensors of all parameters and returns DTensors of their gradients (`LocalParameters`).
"""

from __future__ import annotations

import inspect
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, LayoutError
from autopar.ir.call_arguments import bind_call, check_overlaps, flatten_arguments, inputs_with, without_defaults
from autopar.ir.exported import Autocast
from autopar.ir.graph import NamedGraph
from autopar.ir.pytree import Constant, Flattened, Items, Mapped, Node, Original, Shared, TensorLeaf, unflatten
from autopar.lowering.collectives.checksum import digest, kind_of
from autopar.lowering.emitted import Emitted
from autopar.lowering.modules.bucket import GradientSync, waited
from autopar.lowering.passes.compile_layers import compile_layers
from autopar.runtime.activity import Activity, activity_of
from autopar.runtime.call_outputs import ShardedOutput, averaged
from autopar.runtime.local_step import step_locally
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

    @classmethod
    def read(cls, signature: inspect.Signature, owner: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flattened:
        """Return the flattened arguments of a call."""
        return flatten_arguments(bind_call(signature, owner, args, kwargs, AutoparError), owner, AutoparError)

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
        self.graph = graph
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
        self.shards_of = LocalParameters(synchronisation.finish, synchronisation.note_write, offload_states)
        self.inputs = tuple(p.name for p in exported.placeholders if p.kind == "input")
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

    def compile_layers(self, compiled: Callable[[nn.Module], nn.Module]) -> int:
        """Compile each kind of repeated layer; return the number of layers that run compiled."""
        names = {node.node: node.name for node in self.graph.nodes}
        layers = ([names[op] for op in layer if op in names] for one in self.graph.repeats for layer in one.layers)
        return compile_layers(self.graph_module, layers, compiled)

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
                value = self.graph.exported.constants[placeholder.name]
            else:
                assert table is not None, placeholder
                value = table[placeholder.name.rpartition(".")[2]]
            if placeholder.name in self.mutated:
                value = value.clone()
            values[place] = value
        if compiled:
            # CUDA graphs copy every input at each call, unless its address is marked as static. No guard: a graph is
            # recorded again if an address changes.
            for place, placeholder in enumerate(self.graph.exported.placeholders):
                if placeholder.kind != "input" and placeholder.name not in self.mutated:
                    torch._dynamo.mark_static_address(values[place], guard=False)
        return values

    def _check_overlaps(self, inputs: Mapping[str, Tensor]) -> None:
        plain = {name: tensor for name, tensor in inputs.items() if not isinstance(tensor, DTensor)}
        buffers = {
            p.name: table[p.name.rpartition(".")[2]]
            for p, table in zip(self.graph.exported.placeholders, self.places, strict=True)
            if p.kind == "buffer" and table is not None
        }
        check_overlaps(type(self.graph.model).__name__, self.changed, plain, buffers)

    def finish(self, given: CallSignature, outputs: tuple[Any, ...]) -> Any:
        """Copy mutated values into their tensors, and return the model's result."""
        exported = self.graph.exported
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
        exported = self.graph.exported
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


# -- local parameters --------------------------------------------------------------------------------------------------


class LocalParameters:
    """Convert all parameters to their shards; their gradients become DTensors of the same placements.

    `DTensor.to_local` does this for one tensor. A model has hundreds of them, which is most of the overhead of a small
    step, so one autograd function converts all of them at once. A gradient that autograd would only store in `.grad` is
    stored there directly: autograd detaches it first, which takes longer for a DTensor than everything else. Gradients
    that a hook or `torch.autograd.grad` reads, or that are added to an existing `.grad`, go through autograd.

    `finish` waits for gradients that are still being reduced; `written` runs after parameters were written to.
    """

    def __init__(self, finish: Callable[[], None], written: Callable[[], None], offload_states: bool = False) -> None:
        self._finish = finish
        self._offload_states = offload_states
        self._written = written
        self._versions: list[int] | None = []
        # Specs of the parameters, and copies for their gradients: ops on a DTensor may change its spec.
        self._own: list[Any] = []
        self._copies: list[Any] = []
        # Those of the previous call. The function saves no tensor, so all calls share one autograd node.
        self._given: list[Tensor] = []
        self._shards: tuple[Tensor, ...] = ()
        self._compiled = False

    def __call__(self, parameters: Sequence[DTensor], compiled: bool) -> tuple[Tensor, ...]:
        # An optimizer step or a load changes versions; then gathered copies are stale.
        versions = _versions(parameters)
        if versions is None or versions != self._versions:
            self._versions = versions
            self._written()
        if not torch.is_grad_enabled() or not any(map(_requires_grad, parameters)):
            return tuple(parameter.to_local() for parameter in parameters)
        given = [*parameters, *map(_local, parameters)]
        if compiled != self._compiled or not _same(given, self._given):
            own = [parameter._spec for parameter in parameters]
            if not _same(own, self._own):
                self._own, self._copies = own, [copy(spec) for spec in own]
            step_locally(parameters, self._offload_states)
            self._given, self._compiled = given, compiled
            self._shards = _Locals.apply(self._finish, compiled, self._copies, *parameters)  # type: ignore[no-untyped-call]
        return self._shards


# C functions: they run on all parameters at every call.
_requires_grad, _local, _version = map(attrgetter, ("requires_grad", "_local_tensor", "_version"))


def _versions(parameters: Sequence[DTensor]) -> list[int] | None:
    """Return autograd's version counters; None for inference tensors, which have none."""
    try:
        return list(map(_version, parameters))
    except RuntimeError:
        return None


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


class _Locals(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, finish: Callable[[], None], compiled: bool, specs: list[Any], *parameters: DTensor
    ) -> tuple[Tensor, ...]:
        # A parameter without a gradient must stay so: optimizers treat zeros otherwise than None.
        ctx.set_materialize_grads(False)
        ctx.finish, ctx.compiled = finish, compiled
        ctx.specs, ctx.parameters, ctx.nodes = specs, parameters, None
        shards = tuple([parameter._local_tensor.detach() for parameter in parameters])
        frozen = [shard for shard, each in zip(shards, parameters, strict=True) if not each.requires_grad]
        if frozen:
            ctx.mark_non_differentiable(*frozen)
        return shards

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.finish()
        if ctx.compiled:
            _waited(gradients)
        if torch.is_grad_enabled():  # create_graph=True: gradients need a history
            pairs = zip(gradients, ctx.specs, strict=True)
            return (None, None, None, *(None if each is None else _differentiable(each, spec) for each, spec in pairs))
        if ctx.nodes is None:
            ctx.nodes = [node for node, _ in ctx.next_functions]
        left: list[Tensor | None] = []
        seen: set[int] = set()
        for node, parameter, spec, gradient in zip(ctx.nodes, ctx.parameters, ctx.specs, gradients, strict=True):
            wrapped = None
            if gradient is not None:
                # A sum of two parameters gives both one gradient, and later gradients are added to each in place.
                if id(gradient) in seen:
                    gradient = gradient.clone()
                seen.add(id(gradient))
                # `__new__` alone, as `DTensor.__init__` does nothing and takes time.
                wrapped = DTensor.__new__(DTensor, gradient.contiguous(), spec, requires_grad=False)
                if _only_put(parameter, node):
                    parameter.grad, wrapped = wrapped, None
            left.append(wrapped)
        return (None, None, None, *left)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _waited(gradients: Sequence[Tensor | None]) -> None:
    """Wait for the gradients that a compiled graph has begun to reduce."""
    waited(gradients)


def _only_put(parameter: DTensor, node: Any) -> bool:
    """Return whether autograd would only store the gradient of a parameter in `.grad`."""
    return (
        parameter.grad is None
        and parameter.requires_grad
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
        and parameter._local_tensor.is_cpu  # on other devices autograd synchronises streams
        and not torch.compiler.is_compiling()
        and _will_be_put(node)
    )


def _will_be_put(node: Any) -> bool:
    """Return whether this backward stores the gradient of a parameter in `.grad`."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # raised within `torch.autograd.grad`, which returns the gradient to its caller
        return False


def _differentiable(gradient: Tensor, spec: Any) -> Tensor:
    meta = spec.tensor_meta
    return DTensor.from_local(
        gradient, spec.mesh, spec.placements, run_check=False, shape=meta.shape, stride=meta.stride
    )
