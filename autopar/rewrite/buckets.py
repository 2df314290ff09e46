"""Parameters are converted in buckets: one collective for many of them, in the forward as in the backward.

A bucket has two places in the graph. Where it *starts*, its tensors are laid into one buffer and the collective is
begun; where it *ends*, just before the first of them is used, the collective is waited for and each tensor is taken
out. The backward runs the same places in reverse: where the bucket ends, the gradients are laid into one buffer and
their collective is begun; where it starts, it is waited for. So a gather runs beside the layers before its own, and a
reduction beside the backward of the layers before its own; and since the starts are what the gradients come from,
nothing is unfinished when `backward()` or `torch.autograd.grad` returns.

The end stands at the first use, not at the start of the forward: autograd runs backwards what was made last first, so
ends made together would all come at the end of the backward.

`torch.compile` orders collectives by itself: there both halves are done at the end of the bucket.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from autopar.reshard import StepKind
from autopar.rewrite.functions import Conversion, convert, send
from autopar.rewrite.moves import Move, finish, prepare
from autopar.tracing.graph import NamedTensor

__all__ = ["BUCKET_BYTES", "Bucket", "put_in_buckets"]

BUCKET_BYTES = 25 * 2**20
"""What DistributedDataParallel has as its default: large enough that starting a collective costs little of it."""

_BUCKETED = frozenset((StepKind.ALL_REDUCE, StepKind.ALL_GATHER, StepKind.REDUCE_SCATTER))


# -- on tensors -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """Conversions that take the same steps over the same groups, done as one."""

    conversions: tuple[Conversion, ...]

    @property
    def forward(self) -> tuple[tuple[Move, ...], ...]:
        """For each step, what it is for each tensor."""
        return tuple(zip(*(conversion.forward for conversion in self.conversions), strict=True))

    @property
    def backward(self) -> tuple[tuple[Move, ...], ...]:
        return tuple(zip(*(conversion.backward for conversion in self.conversions), strict=True))

    def start(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors, and after them what of their collective `end` wants."""
        if torch.compiler.is_compiling():
            return tuple(tensors)
        started: tuple[Tensor, ...] = _Start.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return started

    def end(self, started: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ended: tuple[Tensor, ...] = _End.apply(self, *started)  # type: ignore[no-untyped-call]
        return ended


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bucket: Bucket, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        same = tuple(x.view_as(x) for x in tensors)
        if not bucket.forward:
            return same
        pieces = _begin(bucket.forward, tensors)
        ctx.mark_non_differentiable(*pieces)
        return (*same, *pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = gradients[: len(ctx.needs_input_grad) - 1]
        if not torch.is_grad_enabled():
            _wait(given)
        return (None, *given)


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bucket: Bucket, *started: Tensor) -> tuple[Tensor, ...]:
        ctx.bucket, ctx.count = bucket, len(started)
        ctx.set_materialize_grads(False)
        count = len(bucket.conversions)
        if not bucket.forward:
            return tuple(x.view_as(x) for x in started)
        pieces = started[count:] or _begin(bucket.forward, started)
        _wait(pieces)
        pairs = zip(bucket.conversions, pieces, strict=True)
        return tuple(finish(one.forward[-1], piece).reshape(one.result_shape) for one, piece in pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        bucket: Bucket = ctx.bucket
        found: list[Tensor | None] = [None] * ctx.count
        here = [i for i, gradient in enumerate(gradients) if gradient is not None]
        given = [gradient for gradient in gradients if gradient is not None]
        ones = [bucket.conversions[i] for i in here]
        if not here or not bucket.backward:
            converted = given
        elif torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # For gradients of gradients: one by one, each of them differentiable.
            converted = [convert(each, one, backward=True) for each, one in zip(given, ones, strict=True)]
        else:
            steps = tuple(tuple(step[i] for i in here) for step in bucket.backward)
            pieces = _begin(steps, given)
            # Views may be made of what is not there yet; where more is to be done to it, it must have come.
            if torch.compiler.is_compiling() or not all(map(_is_view, steps[-1])):
                pieces = _wait(pieces)
            pairs = zip(ones, pieces, strict=True)
            converted = [finish(one.backward[-1], piece).reshape(one.shape) for one, piece in pairs]
        for i, gradient in zip(here, converted, strict=True):
            found[i] = gradient
        return (None, *found)


def _begin(steps: tuple[tuple[Move, ...], ...], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """All steps but the end of the last, which is begun; of its buffer, the piece of each tensor."""
    parts = [x.reshape(move.before) for x, move in zip(tensors, steps[0], strict=True)]
    for moves in steps[:-1]:
        pieces = _wait(_exchange(moves, parts))
        parts = [finish(move, piece) for move, piece in zip(moves, pieces, strict=True)]
    return _exchange(steps[-1], parts)


def _exchange(moves: tuple[Move, ...], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    first = moves[0]
    parts = [prepare(move, x) for move, x in zip(moves, tensors, strict=True)]
    sizes = [part.numel() for part in parts]
    if first.kind is StepKind.REDUCE_SCATTER:
        sizes = [size // first.ranks for size in sizes]
        flat = torch.cat([part.view(first.ranks, -1) for part in parts], 1).view(-1)
    else:
        flat = torch.cat(parts)
    sent = send(first, flat)
    if first.kind is StepKind.ALL_GATHER:
        return torch.split(sent.view(first.ranks, -1), sizes, 1)
    return torch.split(sent, sizes)


def _is_view(move: Move) -> bool:
    return move.kind is StepKind.ALL_REDUCE or move.longest == move.after[move.atom]


def _wait(pieces: Sequence[Tensor | None]) -> Any:
    """All pieces are of one buffer, and wait for it."""
    if torch.compiler.is_compiling():
        return tuple(torch.ops._c10d_functional.wait_tensor(piece) for piece in pieces)
    for piece in pieces:
        if piece is not None:
            torch.ops._c10d_functional.wait_tensor(piece)
            break
    return pieces


# -- in the graph -----------------------------------------------------------------------------------------------------


class _BucketStart(nn.Module):
    def __init__(self, bucket: Bucket) -> None:
        super().__init__()
        self.bucket = bucket

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.bucket.start(tensors)

    def extra_repr(self) -> str:
        return "\n".join(str(conversion.reshard) for conversion in self.bucket.conversions)


class _BucketEnd(nn.Module):
    def __init__(self, bucket: Bucket) -> None:
        super().__init__()
        self.bucket = bucket

    def forward(self, started: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.bucket.end(started)


@dataclass(frozen=True)
class _Converted:
    """A parameter's conversion in the graph."""

    node: Node
    conversion: Conversion
    block: str
    bytes: int
    kind: tuple[Any, ...]
    """What all conversions of a bucket have in common."""


def put_in_buckets(
    graph: Graph, modules: dict[str, nn.Module], tensors: Mapping[str, NamedTensor], limit_bytes: int = BUCKET_BYTES
) -> None:
    """Replace the single conversions of parameters by buckets, in place; `tensors` are those of the placeholders."""
    found = [one for node in graph.nodes if (one := _converted(node, modules, tensors)) is not None]
    buckets = [bucket for bucket in _buckets(found, limit_bytes) if len(bucket) > 1]
    ends: list[Node] = []
    for number, members in enumerate(sorted(buckets, key=lambda members: _place(graph, members[0].node))):
        bucket = Bucket(tuple(member.conversion for member in members))
        inputs = tuple(member.node.args[0] for member in members)
        # A gather starts one bucket ahead; where nothing is gathered, all start with the forward.
        ahead = ends[-1] if bucket.forward and ends else members[0].node
        first = ahead if bucket.forward else next(node for node in graph.nodes if node.op != "placeholder")
        what = "_".join(dict.fromkeys(moves[0].kind.value for moves in (*bucket.forward, *bucket.backward)))
        modules[f"bucket_{number}_{what}_start"] = _BucketStart(bucket)
        modules[f"bucket_{number}_{what}_end"] = _BucketEnd(bucket)
        with graph.inserting_before(first):
            started = graph.call_module(f"bucket_{number}_{what}_start", inputs)
        with graph.inserting_before(members[0].node):
            ended = graph.call_module(f"bucket_{number}_{what}_end", (started,))
            values = [graph.call_function(operator.getitem, (ended, i)) for i in range(len(members))]
        ends.append(ended)
        for member, value in zip(members, values, strict=True):
            value.meta.update(member.node.meta)
            member.node.replace_all_uses_with(value)
            graph.erase_node(member.node)
            del modules[str(member.node.target)]


def _place(graph: Graph, node: Node) -> int:
    return next(i for i, other in enumerate(graph.nodes) if other is node)


def _converted(node: Node, modules: Mapping[str, nn.Module], tensors: Mapping[str, NamedTensor]) -> _Converted | None:
    conversion = getattr(modules.get(str(node.target)), "conversion", None) if node.op == "call_module" else None
    if not isinstance(conversion, Conversion):
        return None
    source = node.args[0]
    tensor = tensors.get(source.name) if isinstance(source, Node) and source.op == "placeholder" else None
    ways = conversion.forward, conversion.backward
    moves = [move for way in ways for move in way]
    if tensor is None or tensor.kind != "param" or any(move.kind not in _BUCKETED for move in moves):
        return None
    if 0 in conversion.shape or 0 in conversion.result_shape or any(0 in (*m.before, *m.after) for m in moves):
        return None
    steps = tuple(tuple((move.kind, move.group, move.ranks) for move in way) for way in ways)
    kind = steps, tensor.dtype, tensor.requires_grad
    size = max(prod(move.before) for move in moves) * tensor.dtype.itemsize
    block = re.match(r"(.*?\.\d+)\.", tensor.name)
    return _Converted(node, conversion, block[1] if block else "", size, kind)


def _buckets(found: Iterable[_Converted], limit_bytes: int) -> Iterator[list[_Converted]]:
    """Of one kind, in the order of first use, of one block of layers; small blocks that follow each other together.

    Gathers are not joined over blocks: what is gathered early takes memory for longer.
    """
    open_buckets: dict[tuple[Any, ...], list[_Converted]] = {}
    for one in found:
        gathers = any(step[0] is StepKind.ALL_GATHER for step in one.kind[0][0])
        key = (one.kind, one.block) if gathers else one.kind
        members = open_buckets.setdefault(key, [])
        if members and sum(member.bytes for member in members) + one.bytes > limit_bytes:
            yield list(members)
            members.clear()
        members.append(one)
    yield from (members for members in open_buckets.values() if members)
