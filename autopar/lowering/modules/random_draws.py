"""Random numbers of one rank: equal on replicas, different on every shard.

Each call of the parallel module has a key that all ranks share. The numbers of an op on a shard depend on the key, the
op and the shard alone. Ranks along an axis that does not split the drawn tensor have the same shard and draw the same,
whatever the states of their generators. Recomputation with the same key gives the same numbers.

In exact mode the default generator draws the numbers of the whole tensor, by the op that one process would call, and
each shard takes its part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.rules.shard_call.local_call import call_by_name
from autopar.sharding.sharding import Atoms, Piece

__all__ = [
    "DrawShard",
    "DropoutMask",
    "LocalRegion",
    "OpSample",
    "RandomDraw",
    "RreluSlopes",
    "draw",
    "known",
    "seeded",
]

LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class LocalRegion:
    """Part of a tensor on one rank: start and length along every atom."""

    atoms: Atoms
    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.atoms.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.atoms.fold(self._lengths)

    @property
    def _lengths(self) -> tuple[int, ...]:
        return tuple(length for _, length in self.pieces)

    def take(self, whole: Tensor) -> Tensor:
        return self._narrowed(whole).reshape(self.local_shape)

    def put(self, local: Tensor, whole: Tensor) -> None:
        self._narrowed(whole).copy_(local.reshape(self._lengths))

    def _narrowed(self, whole: Tensor) -> Tensor:
        part = whole.view(self.atoms.sizes)  # dims are only taken apart, which any strides allow
        for atom, (start, length) in enumerate(self.pieces):
            part = part.narrow(atom, start, length)
        return part


@dataclass(frozen=True)
class DrawShard:
    """Piece of a drawn tensor on this rank; `first` counts the pieces of earlier ops."""

    first: int
    index: int
    count: int


def seeded(number: int, shard: DrawShard, device: torch.device) -> torch.Generator:
    """Return a generator for one shard of one op in the call whose key is `number`.

    CPU generators read at most 32 bits of a seed. Within these, all shards of all ops of one call differ: the
    finalizer of MurmurHash3 (A. Appleby, 2011) is a bijection.
    """
    high = _mixed(number >> 32)
    low = _mixed(((number & LOW) ^ high) + shard.first + shard.index)
    return torch.Generator(device).manual_seed(high << 32 | low)


def _mixed(number: int) -> int:
    number &= LOW
    number = (number ^ number >> 16) * 0x85EBCA6B & LOW
    number = (number ^ number >> 13) * 0xC2B2AE35 & LOW
    return number ^ number >> 16


# -- what is drawn ----------------------------------------------------------------------------------------------------


class RandomDraw(Protocol):
    """One drawn tensor. Its text determines it, so the text may stand in compiled code."""

    @property
    def shard(self) -> DrawShard: ...
    @property
    def cut(self) -> LocalRegion: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def local(self, operands: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        """Return the numbers of this shard."""

    def whole(self, operands: Sequence[Tensor]) -> Tensor:
        """Return the numbers of all shards as one process draws them; of the operands only this part is known."""


@dataclass(frozen=True)
class DropoutMask:
    """Elements that dropout keeps; `strides` are those of the whole tensor."""

    shard: DrawShard
    cut: LocalRegion
    strides: tuple[int, ...]
    rate: float
    device: torch.device
    dtype: torch.dtype = torch.bool

    def local(self, operands: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        # Takes a fifth of the time of `bernoulli_` on a CPU.
        return torch.rand(self.cut.local_shape, device=self.device, generator=generator) < 1 - self.rate

    def whole(self, operands: Sequence[Tensor]) -> Tensor:
        if self.rate == 1:
            return torch.zeros(self.cut.shape, dtype=torch.bool, device=self.device)  # `dropout` draws nothing then
        ones = torch.empty_strided(self.cut.shape, self.strides, device=self.device).fill_(1)
        kept: Tensor = torch.ops.aten.native_dropout.default(ones, self.rate, True)[1]
        return kept


@dataclass(frozen=True)
class RreluSlopes:
    """Slopes of rrelu where its operand is negative; other elements are arbitrary."""

    shard: DrawShard
    cut: LocalRegion
    lower: float
    upper: float
    dtype: torch.dtype
    device: torch.device

    def local(self, operands: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        slopes = torch.empty(self.cut.local_shape, dtype=self.dtype, device=self.device)
        return slopes.uniform_(self.lower, self.upper, generator=generator)

    def whole(self, operands: Sequence[Tensor]) -> Tensor:
        (x,) = operands
        op = torch.ops.aten.rrelu_with_noise_functional.default
        slopes: Tensor = op(x, torch.empty_like(x), self.lower, self.upper, True)[1]
        return slopes


@dataclass(frozen=True)
class OpSample:
    """Sample of an op from its arguments alone; `operands` are the tensors, with their whole strides."""

    shard: DrawShard
    cut: LocalRegion
    dtype: torch.dtype
    device: torch.device
    op: torch._ops.OpOverload
    arguments: tuple[tuple[str, Any], ...]
    whole_arguments: tuple[tuple[str, Any], ...]
    operands: tuple[tuple[str, LocalRegion, tuple[int, ...]], ...]

    def local(self, operands: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        given = dict(zip((name for name, _, _ in self.operands), operands, strict=True))
        op = with_generator(self.op)
        arguments = {**dict(self.arguments), **given, "generator": generator}
        return self._run(op, {argument.name: arguments[argument.name] for argument in op._schema.arguments})

    def whole(self, operands: Sequence[Tensor]) -> Tensor:
        arguments = dict(self.whole_arguments)
        for (name, cut, strides), operand in zip(self.operands, operands, strict=True):
            # The count of numbers does not depend on the operands of these ops, so ones stand for the other shards.
            whole = torch.empty_strided(cut.shape, strides, dtype=operand.dtype, device=operand.device).fill_(1)
            cut.put(operand, whole)
            arguments[name] = whole
        return self._run(self.op, arguments)

    def _run(self, op: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> Tensor:
        drawn: Tensor = call_by_name(op, arguments)
        return drawn


@cache
def with_generator(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """Return the overload of a drawing op that takes a generator: itself, or its twin."""
    names = {argument.name for argument in op._schema.arguments} | {"generator"}
    packet: Any = op.overloadpacket
    for overload in (op, *(getattr(packet, name) for name in packet.overloads())):
        if {argument.name for argument in overload._schema.arguments} == names:
            found: torch._ops.OpOverload = overload
            return found
    raise AssertionError(f"{op} has no overload with a generator")


# -- drawing it -------------------------------------------------------------------------------------------------------

_KNOWN: dict[str, RandomDraw] = {}  # a custom op takes text, not objects; what the text says never changes


def known(what: RandomDraw) -> str:
    """Return a name for a draw that `draw` finds it by; equal in every process."""
    name = hashlib.sha256(repr(what).encode()).hexdigest()[:32]
    _KNOWN[name] = what
    return name


def draw(key: Tensor, operands: Sequence[Tensor], name: str) -> Tensor:
    """Return this rank's numbers of a known draw; `key` holds the number of the call, and 1 in exact mode."""
    operands = [operand.detach() for operand in operands]
    if torch.compiler.is_compiling():
        drawn: Tensor = torch.ops.autopar.drawn.default(key, operands, name)
        return drawn
    return _draw(key, operands, name)


def _draw(key: Tensor, operands: Sequence[Tensor], draw: str) -> Tensor:
    what = _KNOWN[draw]
    number, exact = key.tolist()
    with torch.no_grad():
        if exact:
            return what.cut.take(what.whole(operands)).contiguous()
        return what.local(operands, seeded(number, what.shard, what.device)).contiguous()


def _drawn_like(key: Tensor, operands: Sequence[Tensor], draw: str) -> Tensor:
    what = _KNOWN[draw]
    return torch.empty(what.cut.local_shape, dtype=what.dtype, device=what.device)


# A custom op, which the compiler neither moves nor repeats. Defined at import
# because a compiled function cannot define it, and of several threads only one may.
torch.library.custom_op("autopar::drawn", _draw, mutates_args=()).register_fake(_drawn_like)
