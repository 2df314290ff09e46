"""Shards of parameters: their pieces and placements, splitting a model, initialising and loading values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from autopar.errors import AutoparError, LayoutError
from autopar.ir.graph import NamedGraph
from autopar.ir.precision import Precision
from autopar.ir.values import NamedTensor
from autopar.mesh import SubMesh
from autopar.runtime.module_shell import canonical_names, mirror, owner_of
from autopar.runtime.stage_dtensor import stage_mesh
from autopar.runtime.strided_dtensor import support
from autopar.sharding.assignment import Assignment
from autopar.sharding.sharding import Atoms, Piece, Sharding, atoms_of, split_by_share, to_placements, weights_of
from autopar.sharding.shares import marked_for

__all__ = [
    "LocalShard",
    "ShardOwner",
    "check_full",
    "held_by",
    "initialise",
    "load_full",
    "number_of_shards",
    "placed",
    "split",
    "stored_in",
    "strides_of",
    "unset",
]


@dataclass(frozen=True)
class ShardOwner:
    """Rank of a mesh, with its coordinates."""

    mesh: DeviceMesh
    axes: SubMesh
    # Coordinate on each axis.
    at: Mapping[str, int]

    def on(self, assignment: Assignment) -> ShardOwner:
        """Return the rank on the axes of an assignment, which may split by shares."""
        return replace(self, axes=self.axes.with_shares(assignment.axes.shares))


@dataclass(frozen=True)
class LocalShard:
    """Shard of a tensor on this rank: its piece of each atom, and its DTensor placements."""

    name: str
    atoms: Atoms
    layout: Sharding
    shape: tuple[int, ...]
    # Start and length in each atom.
    pieces: tuple[tuple[int, int], ...]
    # None for shards of unequal shares, which no DTensor has.
    placements: tuple[Placement, ...] | None
    mesh: DeviceMesh
    # Stage of a pipeline that stores it, None if all do; and the axis of the stages.
    stage: int | None = None
    stages: str = ""

    @classmethod
    def of(
        cls, tensor: NamedTensor, layout: Sharding, rank: ShardOwner, stages: str = "", stage: int | None = None
    ) -> LocalShard:
        """Return the shard of a tensor on a rank; `stage` is the one along the axis `stages` that stores it."""
        atoms = atoms_of(tensor)
        if split_by_share(layout, atoms, rank.axes) is not None:
            pieces = layout.pieces(atoms, rank.axes, rank.at)
            return cls(tensor.name, atoms, layout, tuple(tensor.shape), pieces, None, rank.mesh)
        placements = to_placements(layout, atoms, rank.axes, tensor.name)
        if stage is not None:
            place = list(rank.axes).index(stages)
            placements = (*placements[:place], Shard(0), *placements[place + 1 :])
            last = layout.pieces(atoms, rank.axes, {axis: size - 1 for axis, size in rank.axes.items()})
            if any(not length for _, length in last):
                # An empty shard means here that another stage has the rows.
                raise LayoutError(
                    "E4",
                    f"E4: the layout leaves ranks without elements of {tensor.name}, which one stage of a pipeline "
                    "stores\nfix: split another dim of it, or store it whole: param { * -> none }",
                )
        # Before any DTensor of these placements exists: torch reads the patched methods when it builds one.
        support(placements)
        made = cls(tensor.name, atoms, layout, tuple(tensor.shape), (), placements, rank.mesh, stage, stages)
        return replace(made, pieces=made.pieces_at(rank.axes, rank.at))

    @property
    def place_text(self) -> str:
        """Return the sharding, and the stage if one has it, for a message."""
        return str(self.layout) if self.stage is None else f"{self.layout} on stage {self.stage}"

    def has_pieces_of(self, other: LocalShard) -> bool:
        """Return whether each rank has the same elements of the tensor as under another trace of it."""
        # The other trace may see another number of atoms, as where no op uses the tensor.
        same = self.layout == other.layout or (self.placements is not None and self.placements == other.placements)
        return same and self.stage == other.stage

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.atoms.fold(tuple(length for _, length in self.pieces))

    def pieces_at(self, axes: SubMesh, at: Mapping[str, int]) -> tuple[Piece, ...]:
        """Return the piece of each atom on the rank at a coordinate."""
        pieces = self.layout.pieces(self.atoms, axes, at)
        if self.stage is not None and at[self.stages] != self.stage:
            first = self.atoms.members[0][0]
            pieces = (*pieces[:first], (0, 0), *pieces[first + 1 :])
        return pieces

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a whole tensor, a view if possible."""
        return self.cut_at(self.pieces, whole)

    def cut_at(self, pieces: tuple[Piece, ...], whole: Tensor) -> Tensor:
        """Return the shard with these pieces, a view if possible."""
        part = self._narrowed(pieces, whole.reshape(self.atoms.sizes))
        return part.reshape(self.atoms.fold(tuple(part.shape)))

    def put_at(self, pieces: tuple[Piece, ...], whole: Tensor, shard: Tensor) -> None:
        """Copy the shard with these pieces into a whole contiguous tensor."""
        part = self._narrowed(pieces, whole.view(self.atoms.sizes))
        part.copy_(shard.reshape(part.shape))

    def _narrowed(self, pieces: tuple[Piece, ...], part: Tensor) -> Tensor:
        # Narrowed by atom and not by dim: the shard of a fused dim may be strided.
        for atom, (start, length) in enumerate(pieces):
            part = part.narrow(atom, start, length)
        return part

    def place(self, value: Tensor) -> DTensor:
        """Return a whole tensor, or a DTensor of any mesh, resharded to this sharding."""
        if isinstance(value, DTensor):
            # Placements do not tell which stage has the rows.
            if self.stage is None and value.device_mesh == self.mesh and value.placements == self.placements:
                return value
            value = value.full_tensor()
        # The clone releases the whole tensor: a view would keep all of it in memory.
        part = self.cut(value.detach()).to(self.mesh.device_type)
        return self.wrap(part.clone(memory_format=torch.contiguous_format))

    def wrap(self, local: Tensor) -> DTensor:
        """Return the DTensor whose shard on this rank is `local`."""
        assert self.placements is not None, f"{self.name} has shards of unequal shares"
        # Shape and stride are given because torch would derive them as if all shards had the size of this one.
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=strides_of(self.shape),
        )


def held_by(graph: NamedGraph, assignment: Assignment, rank: ShardOwner) -> dict[str, LocalShard]:
    """Return the shards of all parameters and input tensors on a rank."""
    pipelining, graph, rank = assignment.pipelining, marked_for(graph, assignment.axes), rank.on(assignment)
    found: dict[str, LocalShard] = {}
    for name, layout in assignment.stored.items():
        tensor = graph.tensors[name]
        if tensor.kind == "param" and pipelining is not None:
            owner = replace(rank, mesh=stage_mesh(rank.mesh, pipelining.axis))
            found[name] = LocalShard.of(tensor, layout, owner, pipelining.axis, pipelining.held[name])
        elif tensor.kind in ("param", "input"):
            found[name] = LocalShard.of(tensor, layout, rank)
    return found


def number_of_shards(graph: NamedGraph, name: str, sharding: Sharding, rank: ShardOwner) -> float:
    """Return the number of shards of a tensor; of unequal ones, of how many like this rank's the whole is made."""
    atoms, count = atoms_of(graph.tensors[name]), 1.0
    for i, split in enumerate(sharding.splits):
        for axis in split:
            weights = weights_of(rank.axes, axis, i in atoms.by_share)
            # A rank without rows has no gradient to average.
            count *= rank.axes[axis] if weights is None else sum(weights) / max(1, weights[rank.at[axis]])
    return count


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


# -- split a model ----------------------------------------------------------------------------------------------------


def split(
    model: nn.Module, shell: nn.Module, held: Mapping[str, LocalShard], device: torch.device, precision: Precision
) -> list[nn.Module]:
    """Fill the shell with the model's buffers and this rank's shards of its parameters.

    Return all modules of the shell, in the order of `model.modules()`.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def parameter_of(parameter: nn.Parameter) -> nn.Parameter:
        name = names[id(parameter)]
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise AutoparError(
                f"the parameter {name} has a hook on its gradient; the parallel module would not run it\n"
                f"fix: register it after parallelize, on module.get_parameter({name!r})"
            )
        place, dtype = held[name], precision.stored(parameter.dtype, not parameter.requires_grad)
        if parameter.is_meta:
            local = unset(place.local_shape, dtype, device)
        else:
            local = torch.empty(place.local_shape, dtype=dtype, device=device)
            local.copy_(place.cut(parameter.detach()))
        made = nn.Parameter(place.wrap(local), parameter.requires_grad)
        # Attributes that the user has set, such as a flag against weight decay.
        made.__dict__.update(parameter.__dict__)
        return made

    def buffer_of(buffer: Tensor) -> Tensor:
        return unset(buffer.shape, buffer.dtype, device) if buffer.is_meta else buffer.detach().clone().to(device)

    return mirror(model, shell, parameter_of, buffer_of)


# -- values for a model that was traced on the meta device ------------------------------------------------------------


def initialise(
    skeleton: nn.Module,
    shell: nn.Module,
    held: Mapping[str, LocalShard],
    device: torch.device,
    init: Callable[[nn.Module], None] | None,
    precision: Precision,
) -> None:
    """Initialise the tensors of each module, one module at a time, and keep this rank's shards.

    Every rank draws the same numbers, so the weights do not depend on the layout. Only one module is whole at a time.
    """
    filled: set[str] = set()
    canonical = canonical_names(skeleton)
    # Children before their parents, as `nn.Module.apply` does.
    for path, module in reversed(list(skeleton.named_modules())):
        stored = dict(module._parameters), dict(module._buffers)
        try:
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        is_parameter = isinstance(tensor, nn.Parameter)
                        # Numbers are drawn in one dtype, whether a parameter is frozen or not.
                        dtype = precision.stored(tensor.dtype, frozen=False) if is_parameter else tensor.dtype
                        empty = unset(tensor.shape, dtype, device)
                        table[name] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            _run_init(module, init)
            for name, value in (*module._parameters.items(), *module._buffers.items()):
                if value is not None and not _is_unset(value):
                    full = f"{path}.{name}" if path else name
                    filled.add(canonical[full])
                    _put(shell, full, held.get(canonical[full]), value.detach())
        finally:
            module._parameters.update(stored[0])
            module._buffers.update(stored[1])
    missing = [name for name in dict.fromkeys(canonical.values()) if name not in filled]
    if missing:
        raise AutoparError(
            f"init_weights() gave no value to {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}\n"
            "fix: init_weights(fn) with a function of one module that sets all its parameters and buffers, or "
            "load_full_state_dict(state_dict)"
        )


def _run_init(module: nn.Module, init: Callable[[nn.Module], None] | None) -> None:
    own: Any = getattr(module, "reset_parameters", None)
    # Functions for `nn.Module.apply` may write to parameters in place without `nn.init`.
    if init is not None:
        with torch.no_grad():
            init(module)
    elif own is not None:
        own()


def unset(shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for a tensor that `_is_unset` detects until it is set."""
    # No initialisation gives NaN only. Integers have no such value, so they count as set.
    empty = torch.empty(tuple(shape), dtype=dtype, device=device)
    return empty.fill_(torch.nan) if empty.is_floating_point() else empty.zero_()


def _is_unset(tensor: Tensor) -> bool:
    return tensor.is_meta or (tensor.is_floating_point() and tensor.numel() > 0 and bool(tensor.isnan().all()))


def load_full(shell: nn.Module, held: Mapping[str, LocalShard], state_dict: Mapping[str, Tensor]) -> None:
    """Copy this rank's shards from a state dict of whole tensors, one tensor at a time."""
    canonical = canonical_names(shell)
    check_full(shell, held, state_dict)
    for name, value in state_dict.items():
        _put(shell, name, held.get(canonical[name]), value)


def check_full(shell: nn.Module, held: Mapping[str, LocalShard], state_dict: Mapping[str, Tensor]) -> None:
    """Raise unless a state dict has the whole tensors of a model, by name and shape."""
    wanted = dict(stored_in(shell))
    canonical = canonical_names(shell)
    given = {canonical[name] for name in state_dict if name in canonical}
    missing = [name for name in wanted if canonical[name] not in given]
    extra = [name for name in state_dict if name not in wanted]
    if missing or extra:
        lines = [f"{what} {', '.join(names[:5])}" for what, names in (("lacks", missing), ("has", extra)) if names]
        raise AutoparError(
            f"wrong entries of the state dict: expected those of the model, got one that {' and '.join(lines)}\n"
            "fix: load the state dict of the whole model, with the names of its parameters and buffers"
        )
    for name, value in state_dict.items():
        place = held.get(canonical[name])
        shape = wanted[name].shape if place is None else place.shape
        if tuple(value.shape) != tuple(shape):
            raise AutoparError(
                f"wrong shape of {name} in the state dict: expected {list(shape)}, got {list(value.shape)}\n"
                "fix: load whole tensors of a model of the same sizes"
            )


def placed(shell: nn.Module, held: Mapping[str, LocalShard], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with its tensors resharded to the module's shardings.

    Tensors of another shape stay, and torch reports them. DTensors are gathered one at a time.
    """
    canonical = canonical_names(shell)
    found: dict[str, Any] = {}
    for name, value in state_dict.items():
        place = held.get(canonical.get(name, ""))
        if place is None:
            found[name] = value.full_tensor() if isinstance(value, DTensor) else value
        else:
            fits = isinstance(value, Tensor) and tuple(value.shape) == place.shape and not value.is_meta
            found[name] = place.place(value) if fits else value
    return found


def stored_in(shell: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the entries of a state dict: parameters and persistent buffers, under all names."""
    # `state_dict()` itself would run the state dict hooks of the user.
    yield from shell.named_parameters(remove_duplicate=False)
    for path, module in shell.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _put(shell: nn.Module, name: str, held: LocalShard | None, value: Tensor) -> None:
    """Copy a whole value, or this rank's shard of it, into the tensor of this name."""
    owner, leaf = owner_of(shell, name)
    target = owner._parameters.get(leaf)
    with torch.no_grad():
        if isinstance(target, DTensor):
            assert held is not None, name
            target.to_local().copy_(held.cut(value))
        else:
            buffer = owner._buffers[leaf] if target is None else target
            assert buffer is not None, name
            buffer.copy_(value)
