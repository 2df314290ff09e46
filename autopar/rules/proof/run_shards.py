"""Run one call on real tensors, whole and in shards, and compare the two.

The shards slice the whole tensors, so the recombined result is differentiable: its gradients are compared with those
of the whole call without any rule for a backward op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from autopar.rules.bind_call import factor_sizes
from autopar.rules.call import Call, arguments_by_name, describe_call, flat_results, operands_of, takes_tensors
from autopar.rules.notation import CONTRACTIONS, FactorKind, Rule
from autopar.rules.proof.samples import Draw, Sample, draw
from autopar.rules.shard_call.dispatch import local_call
from autopar.rules.shard_call.local_call import FactorSlice, call_by_name, factor_position, join_dims, split_dims

__all__ = [
    "RUN_ERRORS",
    "Outputs",
    "ShardedRun",
    "additivity",
    "difference",
    "execute",
    "materialise",
    "pieces_of",
    "recombination",
    "recombine",
    "reference",
    "run_shards",
    "weighted_gradients",
]

# What an op raises that cannot run on the tensors it is given.
RUN_ERRORS = (
    RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError, AttributeError, OSError,
)  # fmt: skip

Outputs = tuple[torch.Tensor | None, ...]

# Ops whose values mean nothing: only shapes and dtypes can be compared.
_UNINITIALISED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")


# What torch says of an op, built in or custom, that has no backward.
_NO_DERIVATIVE = ("derivative", "automatic differentiation", "autograd", "does not require grad")


@dataclass(frozen=True)
class ShardedRun:
    """One call with real tensors, its rule, and its outcome."""

    op: torch._ops.OpOverload
    arguments: Mapping[str, Any]
    call: Call
    rule: Rule
    sizes: Mapping[str, int]
    seed: int
    leaves: tuple[torch.Tensor, ...]
    outputs: Outputs
    # What each differentiable output is multiplied with before all are summed and differentiated.
    weights: Outputs
    gradients: tuple[torch.Tensor, ...]


def materialise(op: torch._ops.OpOverload, sample: Sample, seed: int) -> dict[str, Any]:
    """Return the arguments of a sample by name, its tensors drawn."""
    generator = torch.Generator().manual_seed(seed)

    def real(value: Any) -> Any:
        if isinstance(value, Draw):
            # Only real and complex tensors have gradients; `fixed` ones are samples' constants.
            return draw(value, generator) if value.fixed else _leaf(draw(value, generator))
        if isinstance(value, torch.Tensor):
            return _leaf(_shuffled(value.detach(), generator) if seed else value.detach().clone())
        return [real(item) for item in value] if isinstance(value, list | tuple) else value

    return arguments_by_name(op, real(sample.args), {name: real(value) for name, value in sample.kwargs.items()})


def _shuffled(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the same numbers in another order; integers stay, since they may be positions."""
    if not tensor.is_floating_point():
        return tensor.clone()
    return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].reshape(tensor.shape)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_() if tensor.is_floating_point() or tensor.is_complex() else tensor


def execute(op: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> Outputs:
    """Return the outputs of a call."""
    return _comparable(op, call_by_name(op, arguments))


def _comparable(op: torch._ops.OpOverload, result: Any) -> Outputs:
    outputs = tuple(flat_results(result))
    # The memory of `empty` differs from call to call; its shape and dtype are compared.
    if op._schema.name.partition("::")[2] in _UNINITIALISED:
        return tuple(None if output is None else torch.zeros_like(output) for output in outputs)
    return outputs


def reference(
    op: torch._ops.OpOverload, arguments: Mapping[str, Any], rule_of: Callable[[Call], Rule], seed: int
) -> ShardedRun:
    """Return the whole call with its rule. An op without a derivative is compared by its outputs alone."""
    try:
        return _reference(op, arguments, rule_of, seed)
    except RuntimeError as error:
        if not any(phrase in str(error) for phrase in _NO_DERIVATIVE):
            raise
    return _reference(op, {name: _detached(value) for name, value in arguments.items()}, rule_of, seed)


def _reference(
    op: torch._ops.OpOverload, arguments: Mapping[str, Any], rule_of: Callable[[Call], Rule], seed: int
) -> ShardedRun:
    torch.manual_seed(seed)
    outputs = execute(op, arguments)
    call = describe_call(op, (), arguments, outputs)
    rule = rule_of(call)
    leaves = tuple(t for t in operands_of(op, arguments) if isinstance(t, torch.Tensor) and t.requires_grad)
    weights = tuple(map(_weight, outputs))
    gradients = weighted_gradients(leaves, outputs, weights)
    return ShardedRun(op, arguments, call, rule, factor_sizes(rule, call), seed, leaves, outputs, weights, gradients)


def _detached(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_detached(item) for item in value]
    return value.detach() if isinstance(value, torch.Tensor) else value


def _weight(output: torch.Tensor | None) -> torch.Tensor | None:
    if output is None or not output.requires_grad:
        return None
    # One weight tensor per output makes all gradients one number to differentiate, without a loss that hides signs.
    generator = torch.Generator().manual_seed(7)
    return torch.randn(output.shape, generator=generator, dtype=output.dtype)


def weighted_gradients(leaves: Sequence[torch.Tensor], outputs: Outputs, weights: Outputs) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the weighted sum of all outputs; zeros where an operand has no part in it."""
    pairs = [
        (output, weight)
        for output, weight in zip(outputs, weights, strict=True)
        if output is not None and weight is not None and output.requires_grad
    ]
    if not pairs or not leaves:
        return tuple(map(torch.zeros_like, leaves))
    values, grad_outputs = zip(*pairs, strict=True)
    found: Sequence[torch.Tensor | None] = torch.autograd.grad(values, leaves, grad_outputs, allow_unused=True)
    return tuple(
        torch.zeros_like(leaf) if gradient is None else gradient.to_dense() if gradient.is_sparse else gradient
        for leaf, gradient in zip(leaves, found, strict=True)
    )


# -- splitting a factor -----------------------------------------------------------------------------------------------


def pieces_of(factor: str, total: int, shards: int) -> list[FactorSlice]:
    """Return nearly equal pieces of a factor."""
    # Uneven pieces on purpose: a rule that holds for equal ones alone is wrong.
    bounds = [total * i // shards for i in range(shards + 1)]
    return [FactorSlice(factor, i, bounds[i], bounds[i + 1], total) for i in range(shards)]


def run_shards(run: ShardedRun, kind: FactorKind, pieces: Sequence[FactorSlice]) -> list[Outputs]:
    """Return the outputs of each shard."""
    return [
        _comparable(run.op, local_call(run.op, run.arguments, run.rule, run.sizes, piece, kind).run())
        for piece in pieces
    ]


def recombination(
    run: ShardedRun, kind: FactorKind, pieces: Sequence[FactorSlice], others: FactorKind | None = None
) -> str | None:
    """Return the reason why the shards' results do not give the whole answer; None if they do.

    `others` says what becomes of outputs that lack a factor which another output has, where the rule does not.
    """
    try:
        results = run_shards(run, kind, pieces)
        whole = recombine(run, kind, pieces, results, others)
        return difference(run, whole)
    except RUN_ERRORS as error:
        return f"the shards do not run: {first_line(error)}"


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def recombine(
    run: ShardedRun,
    kind: FactorKind,
    pieces: Sequence[FactorSlice],
    results: Sequence[Outputs],
    others: FactorKind | None = None,
) -> Outputs:
    """Return the whole outputs, from those of the shards."""
    if any(len(result) != len(run.outputs) for result in results):
        raise ValueError(f"a shard has {len(results[0])} outputs, the whole call {len(run.outputs)}")
    return tuple(_recombine_one(run, i, kind, pieces, [r[i] for r in results], others) for i in range(len(run.outputs)))


def _recombine_one(
    run: ShardedRun,
    output: int,
    kind: FactorKind,
    pieces: Sequence[FactorSlice],
    parts: Sequence[torch.Tensor | None],
    others: FactorKind | None,
) -> torch.Tensor | None:
    operand, factor = run.rule.outputs[output], pieces[0].factor
    tensors = [part for part in parts if part is not None]
    if operand is None or len(tensors) < len(parts):
        return None
    if factor in operand.factors:
        return _concatenate(run, output, pieces, tensors)
    if kind.value not in CONTRACTIONS:
        lacking = dict(run.rule.contracted).get(factor, others)
        if lacking is None:
            if all(_close(tensors[0], tensor) for tensor in tensors[1:]):
                return tensors[0]
            raise ValueError(f"output {output} lacks the factor, but is not the same in all shards")
        kind = lacking
    stacked = torch.stack(tensors)
    if kind is FactorKind.MEAN:
        # A mean over uneven shards weighs each with its length.
        shares = [piece.length / piece.total for piece in pieces]
        lengths = torch.tensor(shares, dtype=stacked.dtype, device=stacked.device)
        return (stacked * lengths.reshape(-1, *[1] * tensors[0].dim())).sum(0)
    if kind in (FactorKind.MAX, FactorKind.MIN):
        if stacked.is_complex():  # they have no order: only what is the same in all shards comes back
            if not all(torch.equal(tensors[0], tensor) for tensor in tensors[1:]):
                raise ValueError(f"output {output} is complex and has no {kind.value}")
            return tensors[0]
        return stacked.amax(0) if kind is FactorKind.MAX else stacked.amin(0)
    total = stacked.sum(0)
    return total if stacked.dtype is torch.bool else total.to(stacked.dtype)  # booleans do not add up: say max or min


def _concatenate(
    run: ShardedRun, output: int, pieces: Sequence[FactorSlice], parts: Sequence[torch.Tensor]
) -> torch.Tensor:
    operand, factor = run.rule.outputs[output], pieces[0].factor
    assert operand is not None, f"output {output} has no dims"
    opened = []
    for part, piece in zip(parts, pieces, strict=True):
        sizes = {**run.sizes, factor: piece.length}
        expected = [prod(sizes[name] for name in term) for term in operand.terms]
        if list(part.shape) != expected:
            raise ValueError(f"output {output} of a shard is {list(part.shape)}, not {expected}")
        opened.append(split_dims(part, operand.terms, sizes))
    return join_dims(torch.cat(opened, factor_position(operand.terms, factor)), operand.terms)


# -- splitting an operand in a sum ------------------------------------------------------------------------------------


def additivity(run: ShardedRun, group: Sequence[int], shards: int) -> str | None:
    """Return the reason why the op is not linear in these operands; None if it is."""
    generator = torch.Generator().manual_seed(shards)
    operands = operands_of(run.op, run.arguments)
    parts: dict[int, list[torch.Tensor]] = {}
    for i in group:
        noise = [_noise(operands[i], generator) for _ in range(shards - 1)]
        # Noise in place of zeros: an op that is linear only for zeros would pass.
        parts[i] = [operands[i] - sum(noise), *noise]
    try:
        results = []
        for shard in range(shards):
            if run.rule.random:
                torch.manual_seed(run.seed)  # replicas draw the same numbers
            replaced = {i: parts[i][shard] for i in group}
            results.append(execute(run.op, _with_operands(run, replaced)))
        present = [[part for part in parts if part is not None] for parts in zip(*results, strict=True)]
        sums = [torch.stack(parts).sum(0, dtype=parts[0].dtype) if parts else None for parts in present]
        return difference(run, sums)
    except RUN_ERRORS as error:
        return f"the parts do not run: {first_line(error)}"


# Small integers, so that sums stay exact and in range.
def _noise(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if like.is_floating_point() or like.is_complex():
        drawn = torch.randn(like.shape, generator=generator, dtype=like.dtype)
    else:
        drawn = torch.randint(-9, 10, like.shape, generator=generator, dtype=like.dtype)
    return drawn.to(like.device)


def _with_operands(run: ShardedRun, replaced: Mapping[int, torch.Tensor]) -> dict[str, Any]:
    arguments = dict(run.arguments)
    position = 0
    for name, is_list in takes_tensors(run.op).items():
        values = list(arguments[name] or ()) if is_list else [arguments[name]]
        for i in range(len(values)):
            values[i] = replaced.get(position, values[i])
            position += 1
        if arguments[name] is not None:
            arguments[name] = values if is_list else values[0]
    return arguments


# -- comparing --------------------------------------------------------------------------------------------------------


def difference(run: ShardedRun, whole: Iterable[torch.Tensor | None]) -> str | None:
    """Return the difference of recombined outputs or gradients from the whole call's; None if there is none."""
    found_outputs = tuple(whole)
    # Float64 operands may meet a float32 result, whose precision then decides.
    values = (*operands_of(run.op, run.arguments), *run.outputs)
    tolerance = _tolerance([value.dtype for value in values if isinstance(value, torch.Tensor)])
    for i, (expected, found) in enumerate(zip(run.outputs, found_outputs, strict=True)):
        if expected is None or found is None:
            if expected is not found:
                return f"output {i} is None in the shards or in the whole call, not in both"
            continue
        if expected.shape != found.shape or expected.dtype != found.dtype:
            return f"output {i} comes back as {_kind(found)}, not {_kind(expected)}"
        if not _close(expected, found, tolerance):
            return f"output {i} differs"
    found_gradients = weighted_gradients(run.leaves, found_outputs, run.weights)
    for i, (expected, found) in enumerate(zip(run.gradients, found_gradients, strict=True)):
        if not _close(expected, found, tolerance):
            return f"the gradient of float operand {i} differs"
    return None


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# Of dtypes that are less exact than float64; those not named are coarser still.
TOLERANCES = {torch.float32: 1e-4, torch.complex64: 1e-4, torch.float16: 1e-2, torch.complex32: 1e-2}


def _tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """Return the tolerance of the least exact of these dtypes."""
    exact = (torch.float64, torch.complex128)
    inexact = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    return max((1e-9 if dtype in exact else TOLERANCES.get(dtype, 5e-2) for dtype in inexact), default=1e-9)


def _close(expected: torch.Tensor, found: torch.Tensor, tolerance: float | None = None) -> bool:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(expected, found)
    tolerance = _tolerance([expected.dtype]) if tolerance is None else tolerance
    return torch.allclose(expected, found, rtol=tolerance, atol=tolerance, equal_nan=True)
