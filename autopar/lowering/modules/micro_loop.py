"""Run a part of the generated graph once for each micro-batch, forward and backward.

A loop returns sums and concatenations over its micro-batches. Where all sums that need a gradient are scalars, as a
loss, each micro-batch runs its backward right after its forward, so the activations of one micro-batch are alive at a
time. The backward of the loop then scales these gradients by the gradient of the sum. Gradients in another direction,
such as those of logits, run the loop again. A loop gathers parameters and reduces their gradients itself
(`loop_buckets`).

Without a scalar that needs a gradient, all forwards run in the forward and all backwards in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.fx import GraphModule

from autopar.errors import AutoparError
from autopar.lowering.modules.gradient_sums import GradientSums
from autopar.lowering.modules.loop_buckets import BucketPass, LoopBuckets, with_arrivals
from autopar.sharding.schedules import StageTask, TaskKind

__all__ = [
    "DividedFromLoop",
    "LoopResult",
    "MicroBatchKey",
    "MicroBatchLoop",
    "MicroBatchSlice",
    "MicroBatchZeros",
    "any_rank",
    "common_factor",
    "expected_gradients",
    "first_derivative",
    "generator_states",
    "remember_gradients",
    "restored_generators",
]

# Odd, so that the keys of micro-batches and those of the next calls differ.
KEY_STEP = 0x9E3779B1
# Upstream gradient expected of the first call with float16, whose small gradients are lost without one. A loss in
# float16 cannot take more.
FLOAT16_SCALE = 2.0**15

NO_SECOND = "a call with micro-batches has no second derivative: its backwards run within the forward"


@dataclass(frozen=True)
class LoopResult:
    """Result of a loop: the sum of its parts, or its parts one after the other along an atom."""

    kind: Literal["sum", "concat"]
    # For "concat": local sizes of the atoms of a part, the atom that is split, and the local shape of the whole.
    sizes: tuple[int, ...] = ()
    atom: int = 0
    shape: tuple[int, ...] = ()

    def part(self, value: Tensor) -> Tensor:
        """Return the value of one micro-batch in the shape in which parts are joined."""
        return value if self.kind == "sum" else value.reshape(self.sizes)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the result of all parts."""
        if self.kind == "concat":
            return torch.cat(tuple(parts), self.atom).reshape(self.shape)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def gradient(self, gradient: Tensor, number: int) -> Tensor:
        """Return the gradient of one part."""
        if self.kind == "sum":
            return gradient
        length = self.sizes[self.atom]
        rest = math.prod(size for atom, size in enumerate(self.sizes) if atom != self.atom)
        if not rest:
            return gradient.reshape(self.sizes)  # a rank without rows of another dim
        sizes = list(self.sizes)
        sizes[self.atom] = gradient.numel() // rest
        return gradient.reshape(sizes).narrow(self.atom, number * length, length)


class DividedFromLoop(nn.Module):
    """Give a compiler a result of its own before a loop; otherwise nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone() if torch.compiler.is_compiling() else x


class MicroBatchLoop(nn.Module):
    """Call a body with the number of each micro-batch and the same inputs, and join its results."""

    def __init__(self, body: GraphModule, count: int, results: tuple[LoopResult, ...]) -> None:
        super().__init__()
        self.body = body
        self.count = count
        self.results = results
        self.casts_to_float16 = any(torch.float16 in (*node.args, *node.kwargs.values()) for node in body.graph.nodes)
        # Gradients expected of the scalar sums, up to a common factor: those of the last backward.
        self.expected: tuple[float, ...] = ()
        self.buckets = LoopBuckets()
        # Group of all ranks that run the loop, where numbers in float16 may make one of them run it again.
        self.everybody: str | None = None
        # Body of the first micro-batch, which waits for gathers; not a child, as it shares all modules with the body.
        self._first: tuple[GraphModule] = (body,)

    @property
    def notes(self) -> tuple[str, ...]:
        return self.buckets.notes

    def take_buckets(self, buckets: LoopBuckets) -> None:
        """Gather and reduce these buckets, whose inputs are stored parameters."""
        self.buckets = buckets
        reads = {bucket: tuple(1 + place for place in bucket.places) for bucket in buckets.every}
        self._first = (with_arrivals(self.body, reads),)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self._run(torch.compiler.is_compiling(), *inputs)
        return found

    # A compiler takes the bodies one by one.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
    def _run(self, compiled: bool, *inputs: Tensor) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            found: tuple[Tensor, ...] = _Loop.apply(self, compiled, *inputs)  # type: ignore[no-untyped-call]
            return found
        given = BucketPass(self.buckets, inputs)
        with given.casts.kept():
            parts = [self.parts(number, given, given.inputs, compiled) for number in range(self.count)]
        columns = zip(*parts, strict=True)
        return tuple(result.join(parts) for result, parts in zip(self.results, columns, strict=True))

    def parts(
        self, number: int, given: BucketPass, inputs: Sequence[Tensor], compiled: bool = False
    ) -> tuple[Tensor, ...]:
        """Return the parts of one micro-batch."""
        if compiled and not number:
            given.arrive()
        body = self.body if compiled or number else self._first[0]
        found = body(number, *inputs)
        return tuple(result.part(value) for result, value in zip(self.results, found, strict=True))

    def extra_repr(self) -> str:
        return f"{self.count} micro-batches; {', '.join(result.kind for result in self.results)}"


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward of a loop, which raises where its result needs a graph of its own."""
    run = once_differentiable(backward)

    @wraps(backward)
    def checked(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise AutoparError(f"{NO_SECOND}\nfix: no create_graph=True, or a layout without micro-batches")
        return run(ctx, *gradients)

    return checked


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loop: MicroBatchLoop, compiled: bool, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.loop, ctx.compiled, ctx.generators = loop, compiled, generator_states(inputs)
        ctx.given = given = BucketPass(loop.buckets, inputs)
        leaves = given.leaves()
        ctx.is_float16 = loop.casts_to_float16 or any(x.dtype == torch.float16 for x in leaves)
        sums = GradientSums(leaves)
        given.reduce(sums, ctx.is_float16)
        expected: dict[int, Tensor] = {}
        columns: list[list[Tensor]] = [[] for _ in loop.results]
        kept: list[tuple[Tensor, ...]] = []
        needed: list[int] = []
        with given.casts.kept():
            for number in range(loop.count):
                with torch.enable_grad():
                    parts = loop.parts(number, given, leaves, compiled)
                needed = [place for place, part in enumerate(parts) if part.requires_grad]
                if number == 0 and _is_scheduled(loop, parts, needed):
                    scalars = {place: parts[place] for place in needed if loop.results[place].kind == "sum"}
                    expected = expected_gradients(loop.expected, scalars, ctx.is_float16)
                if expected:
                    with given.closing(StageTask(TaskKind.BACKWARD, number)):
                        sums.add([parts[place] for place in expected], list(expected.values()))
                else:
                    kept.append(parts)
                for column, part in zip(columns, parts, strict=True):
                    column.append(part.detach())
        if expected:
            given.finish()
        ctx.needed, ctx.kept, ctx.leaves, ctx.expected = needed, kept, leaves, expected
        # Gradients of kept parts add up in the backward, which has sums of its own.
        ctx.sums = sums if expected else None
        ctx.save_for_backward(*inputs)
        found = tuple(result.join(column) for result, column in zip(loop.results, columns, strict=True))
        ctx.mark_non_differentiable(*(x for place, x in enumerate(found) if place not in needed))
        return found

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        loop: MicroBatchLoop = ctx.loop
        parameters: BucketPass = ctx.given
        given = {place: x for place, x in enumerate(gradients) if x is not None and place in ctx.needed}
        if ctx.kept:
            sums = GradientSums(ctx.leaves)
            parameters.reduce(sums, is_final=True)
            for number, parts in enumerate(ctx.kept):
                wanted = [loop.results[place].gradient(x, number) for place, x in given.items()]
                with parameters.casts.kept(), parameters.closing(StageTask(TaskKind.BACKWARD, number)):
                    sums.add([parts[place] for place in given], wanted, retain=True)
            parameters.finish()
            return (None, None, *parameters.handed(sums.found()))
        factor = common_factor(ctx.expected, given)
        remember_gradients(loop, [given.get(place) for place in ctx.expected], factor is not None, ctx.is_float16)
        overflows = ctx.is_float16 and factor is not None and factor != 1 and not ctx.sums.are_finite()
        runs_again = factor is None or bool(ctx.sums.is_used or overflows)
        if not any_rank(runs_again, loop.everybody, gradients) and factor is not None:
            return (None, None, *parameters.handed(ctx.sums.found(factor), factor))
        again = BucketPass(loop.buckets, ctx.saved_tensors, parameters.is_synchronised)
        leaves = again.leaves()
        sums = GradientSums(leaves)
        again.reduce(sums, is_final=True)
        with again.casts.kept(), restored_generators(ctx.generators):
            for number in range(loop.count):
                with torch.enable_grad():
                    parts = loop.parts(number, again, leaves, ctx.compiled)
                wanted = [loop.results[place].gradient(x, number) for place, x in given.items()]
                with again.closing(StageTask(TaskKind.BACKWARD, number)):
                    sums.add([parts[place] for place in given], wanted)
        again.finish()
        return (None, None, *again.handed(sums.found()))


def any_rank(runs_again: bool, group: str | None, gradients: Sequence[Tensor | None]) -> bool:
    """Return whether a rank of the group must run the loop again: then all must, as its bodies send."""
    if group is None:
        return runs_again
    device = next(x.device for x in gradients if x is not None)
    flag = torch.tensor([float(runs_again)], device=device)
    found = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(flag, "max", group))
    return bool(found)


class ExpectsGradients(Protocol):
    """Module that runs backwards in its forward."""

    expected: tuple[float, ...]


def _is_scheduled(loop: MicroBatchLoop, parts: Sequence[Tensor], needed: Sequence[int]) -> bool:
    """Return whether each micro-batch may run its backward at once: all sums that need a gradient are scalars."""
    sums = [place for place in needed if loop.results[place].kind == "sum"]
    return bool(sums) and all(parts[place].numel() == 1 for place in sums)


def expected_gradients(known: tuple[float, ...], parts: dict[int, Tensor], is_float16: bool) -> dict[int, Tensor]:
    """Return the gradients of the scalar sums that the backward is expected to bring, up to a common factor."""
    if len(known) != len(parts):
        known = (FLOAT16_SCALE if is_float16 else 1.0,) * len(parts)
    return {place: torch.full_like(part, value) for (place, part), value in zip(parts.items(), known, strict=True)}


def common_factor(expected: dict[int, Tensor], given: dict[int, Tensor]) -> Tensor | None:
    """Return the factor between the gradients and those expected; None if there is none."""
    if set(given) != set(expected):
        return None
    factors = [given[place].reshape(()).double() / expected[place].reshape(()).double() for place in expected]
    if len(factors) > 1 and len({factor.item() for factor in factors}) > 1:
        return None
    return factors[0]


def remember_gradients(
    loop: ExpectsGradients, gradients: Sequence[Tensor | None], is_proportional: bool, is_float16: bool
) -> None:
    """Expect these gradients of the next call."""
    known = [gradient for gradient in gradients if gradient is not None]
    # A common factor counts in float16 alone; reading it would make another device than the CPU wait.
    is_free = is_float16 or all(gradient.is_cpu for gradient in known)
    if len(known) < len(gradients) or (not is_free and (is_proportional or len(known) == 1)):
        return
    values = [float(gradient) for gradient in known]
    size = max(map(abs, values))
    if size == 0 or not math.isfinite(size):
        return
    if not is_float16:
        # Gradients of the next call then need no factor, if its loss counts as many targets.
        loop.expected = tuple(values)
        return
    scale = min(1.0, 2.0 ** math.floor(math.log2(FLOAT16_SCALE / size)))
    # One gradient is remembered as a power of two, so that the factor to the next one is exact.
    expected = values if len(values) > 1 else [2.0 ** math.floor(math.log2(size))]
    loop.expected = tuple(value * scale for value in expected)


def generator_states(inputs: Sequence[Tensor]) -> dict[torch.device, Tensor]:
    """Return the states of the generators that a micro-batch may draw from."""
    found = {torch.device("cpu"): torch.get_rng_state()}
    for device in {x.device for x in inputs if x.device.type not in ("cpu", "meta")}:
        found[device] = torch.get_device_module(device.type).get_rng_state(device)
    return found


@contextmanager
def restored_generators(states: Mapping[torch.device, Tensor]) -> Iterator[None]:
    """Set the generators to the given states for a while, so that a second run draws the numbers of the first."""
    now = {device: _set_generator(device, state) for device, state in states.items()}
    try:
        yield
    finally:
        for device, state in now.items():
            _set_generator(device, state)


def _set_generator(device: torch.device, state: Tensor) -> Tensor:
    module: Any = torch if device.type == "cpu" else torch.get_device_module(device.type)
    given = () if device.type == "cpu" else (device,)
    before: Tensor = module.get_rng_state(*given)
    module.set_rng_state(state, *given)
    return before


# -- steps of the body that depend on the number of the micro-batch ----------------------------------------------------


class MicroBatchSlice(nn.Module):
    """Take the rows of one micro-batch of a local tensor whose atoms have these sizes."""

    def __init__(self, sizes: tuple[int, ...], atom: int, count: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes, self.atom, self.count, self.shape = sizes, atom, count, shape

    def forward(self, number: int, x: Tensor) -> Tensor:
        length = self.sizes[self.atom] // self.count
        return x.reshape(self.sizes).narrow(self.atom, number * length, length).reshape(self.shape)

    def extra_repr(self) -> str:
        return f"one of {self.count} parts of dim {self.atom} of {list(self.sizes)}"


class MicroBatchZeros(nn.Module):
    """Keep a value in the first micro-batch; the others get zeros, so that the value is added once."""

    def forward(self, number: int, x: Tensor) -> Tensor:
        return x if number == 0 else x * 0


class MicroBatchKey(nn.Module):
    """Derive the random key of one micro-batch from that of the call."""

    def forward(self, number: int, key: Tensor) -> Tensor:
        return torch.stack([key[0] + number * KEY_STEP, key[1]])
