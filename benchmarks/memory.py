"""The predicted peak of memory and the measured one, for models under strategies with AdamW, in eager mode.

    python -m benchmarks.memory [--models gpt,bert] [--rank 0] [--recompute full] [--regather] [--micro-batches 2]

One rank runs for itself, with real tensors, on a process group whose collectives move nothing but give tensors of the
right shapes. A dispatch mode counts the bytes of the storages that live.
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

import autopar
from autopar.cost.lowered_step import lower_step
from autopar.cost.memory.peak import memory
from autopar.ir.analysis.op_memory import LiveBytes, address_of
from autopar.ir.graph import NamedGraph
from autopar.lowering.collectives.process_groups import Groups
from autopar.lowering.emit import emit
from autopar.lowering.modules.bucket import ParameterHandling
from autopar.lowering.passes.bucket_parameters import BucketedParameters
from autopar.sharding.assignment import Assignment, StepPlan
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.layout.syntax import RecomputeMode
from autopar.sharding.propagation import propagate
from autopar.sharding.sharding import atoms_of
from autopar.sharding.time_slice import step_plan
from autopar.submesh import SubMesh
from examples.gpt import gpt
from examples.resnet import resnet

LAYOUTS: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "gpt": {
        "ddp": {"dp": 4},
        "zero1": {"dp": 4},
        "fsdp": {"fsdp": 4},
        "megatron": {"dp": 2, "tp": 2},
        "megatron_sp": {"dp": 2, "tp": 2},
    },
    "resnet": {
        "ddp": {"dp": 4},
        "zero1": {"dp": 4},
        "fsdp": {"fsdp": 4},
        "batch -> dp; height -> sy; * -> none": {"dp": 2, "sy": 2},
    },
}


@dataclass(frozen=True)
class Measured:
    forward_bytes: int
    saved_bytes: int
    peak_bytes: int


def models() -> Mapping[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]]:
    """Models that a CPU runs in a moment; large enough that what is kept matters."""
    return {
        "gpt": lambda: gpt(layers=4, d_model=256, heads=8, vocab=2048, seq=128, batch=8),
        "resnet": lambda: resnet(depth=18, width=16, image=64, batch=16, loss=True, train=True),
        "llama": llama,
        "bert": bert,
    }


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        use_cache=False,
    )
    ids = torch.randint(2048, (8, 128))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        max_position_embeddings=256,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ids = torch.randint(2048, (8, 128))
    return BertForMaskedLM(config), {"input_ids": ids, "labels": ids}


def measure(graph: NamedGraph, plan: StepPlan, rank: int = 0, in_time: Assignment | None = None) -> Measured:
    """Return the memory of one rank's second step, when the optimizer's states exist.

    `in_time`: the assignment of a plan in micro-batches, along them too.
    """
    with _groups(plan.axes, rank) as groups:
        handling = _parameters(graph, plan)
        own = plan.assignment if in_time is None else in_time
        emitted = emit(graph, own, groups, plan.options.outputs, plan.options.local_inputs, handling, plan.recompute)
        values, parameters = _values(graph, plan, groups.coordinate)
        if emitted.draws:
            values.append(torch.tensor([1, 0]))  # the number that the draws of a call depend on
        counter = _Alone()
        for value in values:
            counter.count(value)
        optimizer = torch.optim.AdamW(parameters)
        _step(emitted.graph_module, values, optimizer, counter)
        return _step(emitted.graph_module, values, optimizer, counter)


def _step(module: nn.Module, values: list[Tensor], optimizer: torch.optim.Optimizer, counter: _Alone) -> Measured:
    with counter:
        before = counter.peak = counter.live
        outputs = module(*values)
        counter.recount()
        forward, after = counter.peak, counter.live
        trained = [value for value in outputs if isinstance(value, Tensor) and value.requires_grad]
        loss = next((value for value in trained if not value.shape), None)
        (trained[0].sum() if loss is None else loss).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return Measured(forward, after - before, counter.peak)


def _parameters(graph: NamedGraph, plan: StepPlan) -> BucketedParameters:
    """Return the options for parameters, in the words of the generated graph."""
    return BucketedParameters(
        {
            tensor.name: ParameterHandling(
                plan.options.precision.stored(tensor.dtype, tensor.frozen),
                tensor.dtype,
                plan.options.precision.reduced(tensor.dtype),
                tensor.name in plan.defer_reduction,
                tensor.name in plan.regather,
                tensor.name in plan.keep_gathered,
            )
            for tensor in graph.parameters
        },
        precision=plan.options.precision,
    )


class _Alone(LiveBytes):  # type: ignore[no-untyped-call]
    """Count of live bytes that follows resized storages and runs exchanges without other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[Any]] = {}
        # What exchanges send, by the storage that they receive in; a library holds it until an exchange has ended.
        self.sent: dict[int, Tensor] = {}

    def count(self, tensor: Tensor) -> None:
        super().count(tensor)
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = weakref.ref(storage)

    def recount(self) -> None:
        """Count resized storages again; `resize_` of a storage is no op, so the mode does not see it."""
        for key, size in list(self.sizes.items()):
            storage = self.storages[key]()
            if storage is not None and storage.nbytes() != size:
                self.sizes[key] = storage.nbytes()
                self.live += storage.nbytes() - size
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.recount()
        if func is torch.ops._c10d_functional.wait_tensor.default:
            self.sent.pop(address_of(args[0]), None)
        elif func.namespace == "_c10d_functional":
            return self._begun(func, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _begun(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Begin an exchange; what it sends is held until it has ended."""
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            received = args[0].new_zeros((sum(args[1]), *args[0].shape[1:]))
        else:
            received = func(*args, **(kwargs or {}))
        for one, sent in zip(tree_leaves(received), tree_leaves(args[0]), strict=True):
            self.count(one)
            self.sent[address_of(one)] = sent
        return received


class _groups:
    """A process group whose collectives move nothing."""

    def __init__(self, axes: Mapping[str, int], rank: int) -> None:
        self.axes, self.rank = axes, rank

    def __enter__(self) -> Groups:
        size = prod(self.axes.values())
        dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=size)
        return Groups(init_device_mesh("cpu", tuple(self.axes.values()), mesh_dim_names=tuple(self.axes)))

    def __exit__(self, *error: Any) -> None:
        dist.destroy_process_group()


def _values(
    graph: NamedGraph, plan: StepPlan, coordinate: Mapping[str, int]
) -> tuple[list[Tensor], list[nn.Parameter]]:
    """Return the inputs of the graph: shards of parameters, whole inputs."""
    values: list[Tensor] = []
    parameters: list[nn.Parameter] = []
    for placeholder in graph.exported.placeholders:
        tensor = graph.tensors[placeholder.name]
        shape = tensor.shape
        if tensor.kind != "input" or plan.options.local_inputs:
            atoms = atoms_of(tensor)
            shape = atoms.fold(plan.assignment.stored[tensor.name].local_sizes(atoms, plan.axes, coordinate))
        stored = plan.options.precision.stored(tensor.dtype, tensor.frozen) if tensor.kind == "param" else tensor.dtype
        value = torch.zeros(shape, dtype=stored)
        if tensor.kind == "param":
            value = nn.Parameter(value, placeholder.requires_grad)
            parameters.append(value)
        values.append(value)
    return values, [parameter for parameter in parameters if parameter.requires_grad]


def cases(names: list[str], micro_batches: int) -> Iterator[tuple[str, str, NamedGraph, StepPlan, Assignment]]:
    in_time = f"micro {micro_batches}; " if micro_batches > 1 else ""
    for name in names:
        model, inputs = models()[name]()
        graph = autopar.trace(model, inputs)
        for layout, axes in LAYOUTS.get(name, LAYOUTS["gpt"]).items():
            mesh = SubMesh(axes)
            chosen = choose_layout(in_time + layout, mesh)
            assignment = propagate(graph, chosen, mesh)
            yield name, layout, graph, step_plan(graph, chosen, assignment), assignment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(models()), help="names, with commas between them")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--recompute", choices=get_args(RecomputeMode), default="none", help="of all repeated layers")
    parser.add_argument("--regather", action="store_true", help="gather all parameters again")
    parser.add_argument("--micro-batches", type=int, default=1, metavar="COUNT", help="of each step")
    options = parser.parse_args()
    print(f"{'model':8} {'layout':20} {'saved MB':>19}  {'peak MB':>19}   error  at")
    worst = 0.0
    for name, layout, graph, plan, assignment in cases(options.models.split(","), options.micro_batches):
        names = frozenset(tensor.name for tensor in graph.parameters if options.regather)
        plan = plan.with_recompute(dict.fromkeys(graph.ops_of_layers, options.recompute)).with_regather(names)
        predicted = memory(lower_step(graph, plan))
        measured = measure(graph, plan, options.rank, assignment)
        error = predicted.peak_bytes / measured.peak_bytes - 1
        worst = max(worst, abs(error))
        # The forward of a loop runs its backwards, so that it saves nothing.
        kept = f"{measured.saved_bytes / 1e6:8.2f}" if plan.micro is None else f"{'-':>8}"
        saved = f"{predicted.saved_bytes / 1e6:8.2f} / {kept}"
        peak = f"{predicted.peak_bytes / 1e6:8.2f} / {measured.peak_bytes / 1e6:8.2f}"
        print(f"{name:8} {layout[:20]:20} {saved:>19}  {peak:>19}  {error:6.1%}  {predicted.peak_at}")
    print(f"predicted / measured; the largest error is {worst:.1%}")


if __name__ == "__main__":
    main()
