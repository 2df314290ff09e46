"""Run one shard of a call: the slice of each tensor that it takes, its changed arguments, zeros for empty shards.

Nothing here communicates: what a shard needs from the others is named by the rule (a partial sum, a halo), and
whoever runs the shards supplies it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from autopar.rules.notation import Operand, Rule, Term


@dataclass(frozen=True)
class FactorSlice:
    """Slice of a factor on one shard: positions `start` to `stop` of `total`."""

    factor: str
    index: int
    start: int
    stop: int
    total: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class LocalCall:
    """Call of one shard: the op, its arguments, and functions that finish the result."""

    op: Callable[..., Any]
    arguments: Mapping[str, Any]
    rule: Rule
    # Extent of each factor in the whole call.
    sizes: Mapping[str, int]
    # Extent of each factor in this shard.
    local_sizes: Mapping[str, int]
    finish: tuple[Callable[[Any], Any], ...] = ()

    def with_arguments(self, /, **changes: Any) -> LocalCall:
        return replace(self, arguments={**self.arguments, **changes})

    def output_shape(self, output: int = 0) -> list[int]:
        operand = self.rule.outputs[output]
        assert operand is not None, "the output has no dims"
        return [prod(self.local_sizes[name] for name in term) for term in operand.terms]

    def run(self) -> Any:
        result = call_by_name(self.op, self.arguments)
        for step in self.finish:
            result = step(result)
        return result


def call_by_name(op: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call an op with arguments under their schema names."""
    if not isinstance(op, torch._ops.OpOverload):
        return op(**arguments)
    keyword_only = _keyword_only(op)
    args = [value for name, value in arguments.items() if name not in keyword_only]
    return op(*args, **{name: value for name, value in arguments.items() if name in keyword_only})


def _keyword_only(op: torch._ops.OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._schema.arguments if argument.kwarg_only)


# What torch.compiler.assume_constant_result does, without loading the compiler: it cannot read schemas, and would break
# the graph here.
_keyword_only._dynamo_marked_constant = True  # type: ignore[attr-defined]


def split_dims(tensor: torch.Tensor, terms: tuple[Term, ...], sizes: Mapping[str, int]) -> torch.Tensor:
    """Return the tensor with one physical dim per factor; a dim without a factor stays a dim of size 1."""
    return tensor.reshape([sizes[name] if name else 1 for term in terms for name in term or ("",)])


def join_dims(tensor: torch.Tensor, terms: tuple[Term, ...]) -> torch.Tensor:
    """Return the inverse of `split_dims`: the factors of one term become one dim again."""
    shape: list[int] = []
    position = 0
    for term in terms:
        width = max(len(term), 1)
        shape.append(prod(tensor.shape[position : position + width]))
        position += width
    return tensor.reshape(shape)


def factor_position(terms: tuple[Term, ...], factor: str) -> int:
    """Return the position of a factor after `split_dims`."""
    names = [name for term in terms for name in (term or ("1",))]
    return names.index(factor)


def narrow(tensor: torch.Tensor, terms: tuple[Term, ...], sizes: Mapping[str, int], piece: FactorSlice) -> torch.Tensor:
    """Return the slice of a tensor along a factor; the tensor itself where it lacks the factor."""
    dim = next((i for i, term in enumerate(terms) if piece.factor in term), None)
    if dim is None:
        return tensor
    term = terms[dim]
    if len(term) == 1:
        return tensor.narrow(dim, piece.start, piece.length)
    before, after = tensor.shape[:dim], tensor.shape[dim + 1 :]
    opened = tensor.reshape([*before, *(sizes[name] for name in term), *after])
    part = opened.narrow(dim + term.index(piece.factor), piece.start, piece.length)
    extent = prod(part.shape[dim : dim + len(term)])
    return part.reshape([*before, extent, *after])


# -- zeros of empty shards ---------------------------------------------------------------------------------------------


def nothing(shape: Sequence[int], dtype: torch.dtype, tensors: Sequence[Tensor], saves: bool = True) -> Tensor:
    """Return zeros of some shape as a function of the tensors, which get zeros for gradients.

    `saves`: the op in its place saves tensors for its backward. Where layers are recomputed, the first saved tensor
    that a backward asks for starts it, on all ranks at the same op.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        made: Tensor = _Nothing.apply(tuple(shape), dtype, saves, *tensors)  # type: ignore[no-untyped-call]
        return made
    return zeros_of(shape, dtype, tensors)


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], dtype: torch.dtype, saves: bool, *tensors: Tensor) -> Tensor:
        if saves:
            ctx.save_for_backward(*tensors)
        ctx.given = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return zeros_of(shape, dtype, tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Of the gradient and of what the op saved, as the gradients of any op are: so are gradients of gradients.
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        found = zip(ctx.given, ctx.needs_input_grad[3:], strict=True)
        given = (gradient, *saved)
        made = [nothing(shape, dtype, given, bool(saved)) if wanted else None for (shape, dtype), wanted in found]
        return None, None, None, *made


def amounts(operand: Operand, local_sizes: Mapping[str, int]) -> list[int]:
    """Return the padding that gives each empty factor of an operand's shard one position, for `constant_pad_nd`."""
    found: list[int] = []
    for term in reversed(operand.terms):
        length = prod(local_sizes[factor] for factor in term)
        found += [0, prod(max(local_sizes[factor], 1) for factor in term) - length]
    return found if any(found) else []


def zeros_of(shape: Sequence[int], dtype: torch.dtype, tensors: Sequence[Tensor]) -> Tensor:
    """Return zeros that depend on some tensors, also for the compiler."""
    if not torch.compiler.is_compiling():
        return tensors[0].new_zeros(tuple(shape), dtype=dtype)
    first, *others = (kept(x, tuple(shape), False).to(dtype) for x in tensors)
    for other in others:
        first = first + other
    return first


def kept(x: Tensor, shape: Sequence[int], keep: bool) -> Tensor:
    """Return a copy of a tensor, or zeros of some shape.

    The compiler would see that zeros depend on nothing: a rank that holds only zeros would then drop the collectives
    before them or move those after them from the backward to the forward, while the other ranks do not, and all of them
    would hang.
    """
    found: Tensor = torch.ops.autopar.kept.default(x, list(shape), keep)
    return found


_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("kept(Tensor x, SymInt[] shape, bool keep) -> Tensor")
_LIBRARY.impl("kept", lambda x, shape, keep: x.clone() if keep else x.new_zeros(shape), "CompositeExplicitAutograd")
torch.library.register_fake(
    "autopar::kept", lambda x, shape, keep: torch.empty_like(x) if keep else x.new_empty(shape), lib=_LIBRARY
)
