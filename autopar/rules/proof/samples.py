"""Sample calls for the proof of a rule: tensors are described here and drawn later from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any

import torch

from autopar.rules.call import takes_tensors
from autopar.rules.notation import ELLIPSIS, Operand, Rule

__all__ = ["Draw", "Sample", "Tries", "draw", "integer_twin", "make_sample", "pattern_samples", "sample_calls"]

# Extents of factors: coprime, so that no dim is taken for another, and at least 3 so that all can be split in 3.
SIZES = (5, 7, 4, 9, 11, 13)
# Values of required arguments, by their type in the schema; 0.7 is neutral in no op.
PLAIN_VALUES = {"number": 0.7, "float": 0.7, "int": 1, "bool": False}


@dataclass(frozen=True)
class Draw:
    """Random tensor of a sample: signed normal numbers by default."""

    shape: tuple[int, ...]
    # normal, wide (normal, 8 times as large), positive, unit (in (-1, 1)), probability (in (0, 1)), above_one, sign (-1
    # or 1), holes (normal, with some NaN), definite (a positive definite matrix), complex, bool, one_true and one_false
    # (all others are the opposite), int, count (an int in [1, 5)), or index (in [0, below)).
    kind: str = "normal"
    below: int = 0
    # Values that about a third of an index's elements take instead, such as an `ignore_index` outside the range.
    also: tuple[int, ...] = ()
    # No gradient is asked for: a buffer.
    fixed: bool = False
    # Where it matters; else the widest: float64, complex128, int64.
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Sample:
    """Arguments for one call of an op; each `Draw` stands for a tensor, real tensors are taken as they are."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tries:
    """Words of `try` clauses: the kind of the operands, and values for arguments."""

    kind: str = "normal"
    arguments: tuple[tuple[str, Any], ...] = ()
    # The module that defines the op, where torch does not; without it the line is not proved.
    needs: str = ""


def draw(request: Draw, generator: torch.Generator) -> torch.Tensor:
    """Return the tensor that a `Draw` stands for."""
    tensor = _draw(request, generator)
    return tensor if request.dtype is None else tensor.to(request.dtype)


def _draw(request: Draw, generator: torch.Generator) -> torch.Tensor:
    shape, kind = request.shape, request.kind
    if kind == "index":
        index = torch.randint(0, request.below, shape, generator=generator)
        for value in request.also:
            index = torch.where(torch.rand(shape, generator=generator) < 1 / 3, value, index)
        return index
    if kind == "int":
        return torch.randint(-4, 9, shape, generator=generator)
    if kind == "bool":
        return torch.rand(shape, generator=generator) < 0.5
    if kind in ("one_true", "one_false"):
        numbers = torch.rand(shape, generator=generator)
        return (numbers == numbers.max()) if kind == "one_true" else (numbers != numbers.max())
    if kind == "count":
        return torch.randint(1, 5, shape, generator=generator)
    if kind == "sign":
        return torch.randint(0, 2, shape, generator=generator).double() * 2 - 1
    if kind == "holes":
        holes = torch.rand(shape, generator=generator) < 0.3
        return torch.randn(shape, generator=generator, dtype=torch.float64).masked_fill(holes, float("nan"))
    if kind == "definite":
        # The identity keeps the product away from singular matrices, where inverses lose precision.
        root = torch.randn(shape, generator=generator, dtype=torch.float64)
        return root @ root.mT + torch.eye(shape[-1], dtype=torch.float64)
    if kind in ("normal", "wide"):
        return torch.randn(shape, generator=generator, dtype=torch.float64) * (8 if kind == "wide" else 1)
    if kind == "complex":
        return torch.randn(shape, generator=generator, dtype=torch.complex128)
    # Away from 0 and 1, where derivatives of logarithms and inverse functions grow without bound.
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1
    if kind in ("positive", "probability"):
        return uniform
    if kind == "unit":
        return uniform * 2 - 1
    assert kind == "above_one", f"'try {kind}' is no kind of operand"
    return uniform + 1


def make_sample(
    op: torch._ops.OpOverload, tensors: Sequence[Any], arguments: Mapping[str, Any], tries: Tries = Tries()
) -> Sample:
    """Return a call with these tensors in order; other arguments by name, by `try`, or by default."""
    given = {**dict(zip(takes_tensors(op), tensors, strict=False)), **dict(tries.arguments), **arguments}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        if argument.name in given:
            value = given[argument.name]
        elif argument.has_default_value():
            value = argument.default_value
        else:
            value = PLAIN_VALUES.get(str(argument.type))
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return Sample(tuple(args), kwargs)


def sample_calls(names: str, *rows: Sequence[Any]) -> Callable[..., Iterable[Sample]]:
    """Return the samples of a family, one for each row: its operands in order, then the values of arguments `names`.

    An operand is a shape, a `Draw`, or a list of them: `sample_calls("dim", ((5, 14), -1), ((10, 7, 4), 0))`.
    """
    arguments = names.split()

    def drawn(operand: Any) -> Any:
        if isinstance(operand, list):
            return [*map(drawn, operand)]
        return Draw(operand) if isinstance(operand, tuple) else operand

    def samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
        for row in rows:
            operands, values = row[: len(row) - len(arguments)], row[len(row) - len(arguments) :]
            yield make_sample(op, [*map(drawn, operands)], dict(zip(arguments, values, strict=True)), tries)

    return samples


def pattern_samples(op: torch._ops.OpOverload, pattern: Rule, tries: Tries) -> Iterable[Sample]:
    """Yield calls that fit a pattern: ellipses of 0 to 2 dims, broadcast dims, optional operands present and absent."""
    ellipses = [position for position, operand in enumerate(pattern.operands) if operand and operand.has_ellipsis]
    optional = any(operand and operand.optional for operand in pattern.operands)
    # Beyond SIZES come odd numbers without a factor of theirs, so that extents stay coprime.
    more = (size for size in count(17, 2) if all(size % prime for prime in (3, 5, 7, 11, 13)))
    sizes = dict(zip(pattern.factors, chain(SIZES, more), strict=False))
    leading: list[dict[int, tuple[int, ...]]] = [{}]
    if ellipses:
        leading = [dict.fromkeys(ellipses, dims) for dims in ((), (8,), (3, 8))]
    if len(ellipses) > 1:
        leading += [{**leading[2], ellipses[0]: (1, 8)}, {**leading[2], ellipses[-1]: (8,)}]
    for dims in leading:
        for with_optional in (True, False) if optional else (True,):
            tensors = [
                _operand_draw(position, operand, pattern, sizes, dims.get(position, ()), tries)
                if operand and (with_optional or not operand.optional)
                else None
                for position, operand in enumerate(pattern.operands)
            ]
            yield make_sample(op, tensors, {}, tries)


def integer_twin(sample: Sample) -> Sample | None:
    """Return the same call on integers, or None where its operands are not plain real numbers."""

    def draws(value: Any) -> Iterable[Draw]:
        if isinstance(value, Draw):
            yield value
        elif isinstance(value, list | tuple):
            for item in value:
                yield from draws(item)

    def twin(value: Any) -> Any:
        if isinstance(value, Draw):
            return replace(value, kind="int") if value.kind == "normal" else value
        return type(value)(map(twin, value)) if isinstance(value, list | tuple) else value

    kinds = {draw.kind for draw in draws([*sample.args, *sample.kwargs.values()])}
    if "normal" not in kinds or not kinds <= {"normal", "int", "bool", "index"}:
        return None
    return Sample(tuple(map(twin, sample.args)), {name: twin(value) for name, value in sample.kwargs.items()})


def _operand_draw(
    position: int, operand: Operand, pattern: Rule, sizes: Mapping[str, int], leading: tuple[int, ...], tries: Tries
) -> Draw:
    shape: list[int] = []
    for term in operand.terms:
        if term == ELLIPSIS:
            shape.extend(leading)
            continue
        extent = 1
        for name in term:
            extent *= sizes[name]
        shape.append(extent)
    indexed = dict(pattern.indices).get(position)
    if indexed is not None:
        return Draw(tuple(shape), "index", sizes[indexed])
    return Draw(tuple(shape), tries.kind)
