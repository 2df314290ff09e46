"""Rules are proved by execution: split, run the shards, recombine, compare outputs and gradients.

For every factor of a rule, and 2 and 3 shards: a factor that may be split must give the whole answer back, a factor
marked `!` must not (else the rule is too strict). An operand in which the op is called linear must give the whole
answer when it is split in a sum, any other must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import RuleError
from autopar.rules.binding import factor_sizes
from autopar.rules.call import Call, arguments_by_name, describe_call, flat_results, operands_of, takes_tensors
from autopar.rules.local import Piece, factor_position, join_dims, split_dims
from autopar.rules.lowerings import local_call
from autopar.rules.notation import FactorKind, Rule
from autopar.rules.samples import Draw, Sample, draw

__all__ = ["Case", "Failure", "prove_sample", "resolve_op"]

SHARDS = (2, 3)
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Case:
    """One thing that was proved: this factor (or these operands) of this rule, in this many shards."""

    op: str
    rule: str
    subject: str
    shards: int


@dataclass(frozen=True)
class Failure:
    case: Case
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.case.op}: {self.case.subject}, {self.case.shards} shards: {self.reason}\n  rule  {self.case.rule}"
        )


@dataclass(frozen=True)
class _Run:
    """One call with real tensors, its rule, and its outcome."""

    op: torch._ops.OpOverload
    arguments: Mapping[str, Any]
    rule: Rule
    sizes: Mapping[str, int]
    leaves: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor | None, ...]


def resolve_op(name: str) -> torch._ops.OpOverload:
    """The op behind a name such as `aten.add.Tensor`."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    try:
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError as error:
        raise RuleError(f"the table has a rule for '{name}', which torch does not know") from error
    assert isinstance(op, torch._ops.OpOverload), name
    return op


def prove_sample(
    op: torch._ops.OpOverload, rule_of: Callable[[Call], Rule], sample: Sample, seed: int
) -> Iterator[Case | Failure]:
    """All cases of one call. Yields what holds as `Case`, what does not as `Failure`."""
    run = _reference(op, rule_of, sample, seed)
    for factor, kind in run.rule.kinds.items():
        for shards in SHARDS:
            if run.sizes[factor] < shards:
                continue
            case = Case(str(op), str(run.rule), f"factor {factor} {kind.value}", shards)
            reason = _check_factor(run, factor, kind, shards)
            yield case if reason is None else Failure(case, reason)
    yield from _check_linearity(run)


def _reference(op: torch._ops.OpOverload, rule_of: Callable[[Call], Rule], sample: Sample, seed: int) -> _Run:
    generator = torch.Generator().manual_seed(seed)

    def real(value: Any) -> Any:
        if isinstance(value, Draw):
            tensor = draw(value, generator)
            return tensor.requires_grad_() if tensor.is_floating_point() else tensor
        return [real(item) for item in value] if isinstance(value, list | tuple) else value

    arguments = arguments_by_name(op, real(sample.args), {name: real(value) for name, value in sample.kwargs.items()})
    args, kwargs = _positional(op, arguments)
    result = op(*args, **kwargs)
    call = describe_call(op, args, kwargs, result)
    rule = rule_of(call)
    leaves = tuple(t for t in operands_of(op, arguments) if isinstance(t, torch.Tensor) and t.requires_grad)
    return _Run(op, arguments, rule, factor_sizes(rule, call), leaves, tuple(flat_results(result)))


def _positional(op: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    keyword_only = {argument.name for argument in op._schema.arguments if argument.kwarg_only}
    args = [value for name, value in arguments.items() if name not in keyword_only]
    return args, {name: value for name, value in arguments.items() if name in keyword_only}


def split(factor: str, total: int, shards: int) -> list[Piece]:
    """Nearly equal pieces; uneven where the shards do not divide the factor."""
    bounds = [total * i // shards for i in range(shards + 1)]
    return [Piece(factor, i, bounds[i], bounds[i + 1], total) for i in range(shards)]


# -- splitting a factor -----------------------------------------------------------------------------------------------


def _check_factor(run: _Run, factor: str, kind: FactorKind, shards: int) -> str | None:
    """Why the factor does not behave as its kind says; None when it does."""
    if kind is not FactorKind.WHOLE:
        return _recombines(run, factor, kind, shards)
    if any(operand and factor in operand.factors for operand in run.rule.outputs):
        attempts: Iterable[FactorKind] = (FactorKind.PARALLEL,)
    else:
        attempts = (FactorKind.SUM, FactorKind.MEAN, FactorKind.MAX, FactorKind.MIN)
    for attempt in attempts:
        if _recombines(run, factor, attempt, shards) is None:
            return f"marked whole (!), but it can be split: {attempt.value}"
    return None


def _recombines(run: _Run, factor: str, kind: FactorKind, shards: int) -> str | None:
    pieces = split(factor, run.sizes[factor], shards)
    try:
        results = [
            flat_results(local_call(run.op, run.arguments, run.rule, run.sizes, piece, kind).run()) for piece in pieces
        ]
        whole = [_recombine(run, i, [r[i] for r in results], factor, kind, pieces) for i in range(len(run.outputs))]
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        return f"the shards do not run: {str(error).splitlines()[0]}"
    return _difference(run, whole)


def _recombine(
    run: _Run, output: int, parts: list[torch.Tensor | None], factor: str, kind: FactorKind, pieces: list[Piece]
) -> torch.Tensor | None:
    operand = run.rule.outputs[output]
    tensors = [part for part in parts if part is not None]
    if operand is None or len(tensors) < len(parts):
        return None
    if factor in operand.factors:
        position = factor_position(operand.terms, factor)
        opened = [
            split_dims(part, operand.terms, {**run.sizes, factor: piece.length})
            for part, piece in zip(tensors, pieces, strict=True)
        ]
        return join_dims(torch.cat(opened, position), operand.terms)
    stacked = torch.stack(tensors)
    if kind is FactorKind.MEAN:
        weights = torch.tensor([piece.length / piece.total for piece in pieces], dtype=stacked.dtype)
        return torch.tensordot(weights, stacked, 1)
    if kind in (FactorKind.MAX, FactorKind.MIN):
        return stacked.amax(0) if kind is FactorKind.MAX else stacked.amin(0)
    if kind is FactorKind.SUM:
        return stacked.sum(0).to(stacked.dtype)
    return tensors[0]  # an output that has no part in the factor: every shard must give the same


# -- splitting an operand in a sum ------------------------------------------------------------------------------------


def _check_linearity(run: _Run) -> Iterator[Case | Failure]:
    operands = operands_of(run.op, run.arguments)
    floats = [i for i, t in enumerate(operands) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    groups = [group for group in run.rule.linear if set(group) <= set(floats)]
    suspects = [(i,) for i in floats] + ([tuple(floats)] if len(floats) > 1 else [])
    for shards in SHARDS:
        for group in groups:
            case = Case(str(run.op), str(run.rule), f"linear in {'+'.join(map(str, group))}", shards)
            reason = _adds_up(run, group, shards)
            yield case if reason is None else Failure(case, reason)
        for group in suspects:
            if group not in groups:
                case = Case(str(run.op), str(run.rule), f"not linear in {'+'.join(map(str, group))}", shards)
                failed = _adds_up(run, group, shards) is not None
                yield case if failed else Failure(case, "it is linear, which the rule does not say")


def _adds_up(run: _Run, group: tuple[int, ...], shards: int) -> str | None:
    """Whether the op on parts of the operands, summed, is the op on the sums."""
    generator = torch.Generator().manual_seed(shards)
    operands = operands_of(run.op, run.arguments)
    parts: dict[int, list[torch.Tensor]] = {}
    for i in group:
        noise = [
            torch.randn(operands[i].shape, generator=generator, dtype=operands[i].dtype) for _ in range(shards - 1)
        ]
        parts[i] = [operands[i] - sum(noise), *noise]
    try:
        results = [flat_results(_call_with(run, {i: parts[i][shard] for i in group})) for shard in range(shards)]
        whole = [
            None if output is None else torch.stack([r[i] for r in results]).sum(0)
            for i, output in enumerate(run.outputs)
        ]
    except (RuntimeError, IndexError, ValueError) as error:
        return f"the parts do not run: {str(error).splitlines()[0]}"
    return _difference(run, whole)


def _call_with(run: _Run, replaced: Mapping[int, torch.Tensor]) -> Any:
    arguments = dict(run.arguments)
    position = 0
    for name, is_list in takes_tensors(run.op).items():
        values = list(arguments[name] or ()) if is_list else [arguments[name]]
        for i in range(len(values)):
            values[i] = replaced.get(position, values[i])
            position += 1
        if arguments[name] is not None:
            arguments[name] = values if is_list else values[0]
    args, kwargs = _positional(run.op, arguments)
    return run.op(*args, **kwargs)


# -- comparing --------------------------------------------------------------------------------------------------------


def _difference(run: _Run, whole: list[torch.Tensor | None]) -> str | None:
    """How the recombined outputs, or their gradients, differ from the reference; None when they do not."""
    for i, (expected, found) in enumerate(zip(run.outputs, whole, strict=True)):
        if expected is None or found is None:
            continue
        if expected.shape != found.shape or expected.dtype != found.dtype:
            return (
                f"output {i} comes back as {found.dtype}{list(found.shape)}, not {expected.dtype}{list(expected.shape)}"
            )
        if not torch.allclose(expected, found, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            return f"output {i} differs"
    expected_gradients, found_gradients = _gradients(run, run.outputs), _gradients(run, whole)
    for i, (expected, found) in enumerate(zip(expected_gradients, found_gradients, strict=True)):
        if not torch.allclose(expected, found, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            return f"the gradient of float operand {i} differs"
    return None


def _gradients(run: _Run, outputs: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    total = None
    for output in outputs:
        if output is not None and output.requires_grad:
            weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
            term = (output * weights).sum()
            total = term if total is None else total + term
    if total is None or not run.leaves:
        return []
    found = torch.autograd.grad(total, run.leaves, allow_unused=True, retain_graph=True)
    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(run.leaves, found, strict=True)
    ]
