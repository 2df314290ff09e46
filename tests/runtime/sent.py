"""What really reaches the process group in a step, beside what the module says that a step sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.lowering.collectives.process_groups import device_mesh
from autopar.mesh import Mesh

__all__ = ["Counted", "Recorder", "Sent", "Step", "step"]


class Sent(NamedTuple):
    """A collective, by the bytes of the buffer that it works on: what is reduced, gathered or exchanged."""

    direction: str
    kind: str
    axes: tuple[str, ...]
    bytes: int


class Step(NamedTuple):
    """One forward and backward of a module: what it lists of values and of parameters, and what was sent, in order."""

    values: Counter[Sent]
    parameters: Counter[Sent]
    real: tuple[Sent, ...]
    apart: int = 0
    """Of the values, those that are sent before the graph or after it, on one host through its memory."""


class Counted(TorchDispatchMode):
    """How many collectives of each kind are sent, and the dtypes of their buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.dtypes: dict[str, set[str]] = {}
        # Those of the ops, which may be several for a kind.
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "_c10d_functional" and name != "wait_tensor":
            kind = name.removesuffix("_out").rstrip("_")
            self.counts[kind] += 1
            self.names.add(name)
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
            self.dtypes.setdefault(kind, set()).update(kinds)
        return func(*args, **(kwargs or {}))


# Which argument of the op holds what a rank gives, or the whole.
GIVEN: Mapping[str, tuple[str, int]] = {
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", 0),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", 0),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
}


class Recorder(TorchDispatchMode):
    """Notes every collective that is handed to a process group; one that it does not know is an error."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.axes = _axes_by_ranks(mesh)
        self.direction = "forward"
        self.sent: list[Sent] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.partition("::")[0].startswith(("c10d", "_c10d")) and not name.endswith("::wait_tensor"):
            self._note(name, args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: Any) -> None:
        kind, place = GIVEN[name]
        ranks = tuple(dist.get_process_group_ranks(_group_of(args)))
        # The functional gather is given this rank's part alone.
        parts = len(ranks) if name.startswith("_c10d_functional::all_gather_into_tensor") else 1
        self.sent.append(Sent(self.direction, kind, self.axes[ranks], parts * _bytes(args[place])))


def _group_of(args: Any) -> dist.ProcessGroup:
    for value in args:
        if isinstance(value, str) and value not in ("sum", "max", "avg"):
            return _resolve_process_group(value)
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    raise AssertionError(f"no process group among {args}")


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value))


def _axes_by_ranks(mesh: DeviceMesh) -> dict[tuple[int, ...], tuple[str, ...]]:
    """For the ranks that differ from this one along some axes only: these axes."""
    names, own = mesh.mesh_dim_names, mesh.get_coordinate()
    assert names is not None
    assert own is not None
    found = {}
    for count in range(1, len(names) + 1):
        for axes in combinations(range(len(names)), count):
            part = mesh.mesh[tuple(slice(None) if dim in axes else own[dim] for dim in range(len(names)))]
            wide = tuple(names[dim] for dim in axes if mesh.shape[dim] > 1)
            found.setdefault(tuple(sorted(part.flatten().tolist())), wide)
    return found


def step(model: nn.Module, inputs: dict[str, Tensor], layout: str, mesh: str, loss_of: Callable[[Any], Tensor]) -> Step:
    """One step of a model under a layout, after one to warm up."""
    devices = device_mesh(Mesh(mesh))
    parallel = autopar.parallelize(model, devices, inputs, layout=layout)
    loss_of(parallel(**inputs)).backward()
    parallel.zero_grad()
    recorder = Recorder(devices)
    with recorder:
        loss = loss_of(parallel(**inputs))
        recorder.direction = "backward"
        loss.backward()
    kinds = {name: tensor.kind for name, tensor in parallel.graph.tensors.items()}
    listed = {
        kind: Counter(
            Sent(one.direction, one.kind, one.axes, one.bytes)
            for one in parallel.collectives()
            if (kinds[one.tensor] == "param") == (kind == "param")
        )
        for kind in ("param", "value")
    }
    apart = sum(map(len, parallel.emitted.ends.notes))
    return Step(listed["value"], listed["param"], tuple(recorder.sent), apart)
