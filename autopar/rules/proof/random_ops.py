"""Compare random calls by the distribution of their results.

Over many draws, each element of the recombined outputs and gradients must have the mean and the second moment that it
has in the whole call, and take no value that it does not take there (dropout: 0 or `x / (1 - p)`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autopar.rules.notation import FactorKind
from autopar.rules.proof.run_shards import (
    RUN_ERRORS,
    Outputs,
    ShardedRun,
    difference,
    execute,
    first_line,
    recombination,
    recombine,
    run_shards,
    weighted_gradients,
)
from autopar.rules.shard_call.local_call import FactorSlice

__all__ = ["DrawnRuns", "draws_of", "is_random", "recombines"]

DRAWS = 128
# Of thousands of elements, none is this far off by chance.
SIGMAS = 6.0


@dataclass(frozen=True)
class DrawnRuns:
    """Many draws of one call: each output and each gradient, stacked."""

    outputs: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor, ...]


def is_random(run: ShardedRun) -> bool:
    """Return True if this call draws random numbers; dropout with p=0 does not."""
    return any(difference(run, execute(run.op, run.arguments)) is not None for _ in range(8))


def draws_of(run: ShardedRun) -> DrawnRuns:
    """Return many draws of the whole call."""
    return _draw_many(run, lambda: execute(run.op, run.arguments))


def _draw_many(run: ShardedRun, produce: Callable[[], Outputs]) -> DrawnRuns:
    outputs: list[list[torch.Tensor]] = []
    gradients: list[tuple[torch.Tensor, ...]] = []
    for _ in range(DRAWS):
        drawn = produce()
        gradients.append(weighted_gradients(run.leaves, drawn, run.weights))
        outputs.append([output.detach() for output in drawn if output is not None])
    return DrawnRuns(
        tuple(map(torch.stack, zip(*outputs, strict=True))), tuple(map(torch.stack, zip(*gradients, strict=True)))
    )


def _random_recombination(
    run: ShardedRun,
    expected: DrawnRuns,
    kind: FactorKind,
    pieces: Sequence[FactorSlice],
    others: FactorKind | None = None,
) -> str | None:
    """Return the reason why the shards' draws differ in distribution from the whole call's; None if equal."""
    # Another seed than that of the whole call: equal numbers would hide a wrong distribution.
    torch.manual_seed(run.seed + 1)
    try:
        if _repeats(run, kind, pieces):
            return "two shards draw the same numbers"
        found = _draw_many(run, lambda: recombine(run, kind, pieces, run_shards(run, kind, pieces), others))
    except RUN_ERRORS as error:
        return f"the shards do not run: {first_line(error)}"
    return (
        _compare(expected.outputs, found.outputs, "output")
        or _compare(expected.gradients, found.gradients, "the gradient of float operand")
        or _same_sums(run, expected, found, pieces[0].factor)
    )


def recombines(
    run: ShardedRun,
    draws: DrawnRuns | None,
    kind: FactorKind,
    pieces: Sequence[FactorSlice],
    others: FactorKind | None = None,
) -> str | None:
    """Return the reason why shards do not give the whole answer, or its distribution; None if they do."""
    if draws is None:
        return recombination(run, kind, pieces, others)
    return _random_recombination(run, draws, kind, pieces, others)


def _repeats(run: ShardedRun, kind: FactorKind, pieces: Sequence[FactorSlice]) -> bool:
    """Return True if the first two shards drew the same numbers in every run."""
    split = [i for i, operand in enumerate(run.rule.outputs) if operand and pieces[0].factor in operand.factors]
    for _ in range(8):
        first, second = run_shards(run, kind, pieces)[:2]
        if not all(_same_draw(first[i], second[i]) for i in split):
            return False
    return bool(split)


def _same_draw(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return True
    common = min(first.numel(), second.numel())  # numbers are drawn in the order of the flat elements
    first, second = first.flatten()[:common], second.flatten()[:common]
    # Scales may differ between shards; the dropped positions are the draw.
    if bool((first == 0).any()):
        return torch.equal(first == 0, second == 0)
    return torch.equal(first, second)


def _compare(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor], what: str) -> str | None:
    if len(expected) != len(found):
        return f"there are {len(found)} {what}s, not {len(expected)}"
    for i, (whole, parts) in enumerate(zip(expected, found, strict=True)):
        if whole.shape != parts.shape or whole.dtype != parts.dtype:
            return f"{what} {i} comes back as {parts.dtype}{list(parts.shape[1:])}, not as the whole call's"
        # Dropped elements take two values; their set is a sharper test than the moments.
        if (support := _support(whole)) is not None and support != _support(parts):
            return f"{what} {i} takes other values"
        scale = whole.double().abs().mean().clamp(min=1e-12)
        # Of Cauchy numbers the mean does not exist; their arctangents are bounded.
        bounded = [torch.arctan(draws.double() / scale) for draws in (whole, parts)]
        if not _same_mean(*bounded) or not _same_mean(*(draws.square() for draws in bounded)):
            return f"{what} {i} is drawn from another distribution"
    return None


def _same_sums(run: ShardedRun, expected: DrawnRuns, found: DrawnRuns, factor: str) -> str | None:
    """Return True if sums over jointly drawn elements (a dropped channel) take equally few values."""
    operands = [operand for operand, output in zip(run.rule.outputs, run.outputs, strict=True) if output is not None]
    for i, (operand, whole, parts) in enumerate(zip(operands, expected.outputs, found.outputs, strict=True)):
        dims = [d + 1 for d, term in enumerate(operand.terms if operand else ()) if factor in term]
        support = _support(whole.sum(dims)) if dims else None
        if support is not None and support != _support(parts.sum(dims)):
            return f"elements of output {i} that are drawn together in the whole call are not in the shards"
    return None


def _support(draws: torch.Tensor) -> frozenset[float] | None:
    """Return the elements' values relative to the largest, where they are at most two (mostly 0 and 1)."""
    relative = draws.double() / draws.double().abs().amax(0).clamp(min=1e-12)
    values = frozenset(torch.unique(relative.round(decimals=6)).abs().tolist())
    return values if len(values) <= 2 else None


def _same_mean(first: torch.Tensor, second: torch.Tensor) -> bool:
    deviation = ((first.var(0) + second.var(0)) / DRAWS).sqrt()
    return bool(((first.mean(0) - second.mean(0)).abs() <= SIGMAS * deviation + 1e-9).all())
