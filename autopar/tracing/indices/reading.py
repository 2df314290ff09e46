"""Read a tensor of a graph as a function of its indices, where it depends on nothing but sizes and known constants.

Every op that leads to the tensor is read in turn, from its operands as `Pieces`. Ops on numbers are run on one element,
so that casts, rounding and overflow are those of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autopar.tracing.indices.known_tensor import pieces_of
from autopar.tracing.indices.piecewise import (
    ALWAYS,
    MOST,
    Affine,
    Pieces,
    Predicate,
    Shape,
    Term,
    UnreadError,
    at_least,
    between,
    both,
    bounds,
    constant,
    merged,
    negation,
)
from autopar.tracing.indices.views import READINGS, shape_of, term_of, whole
from autopar.tracing.passes.edit import arguments_of

__all__ = ["IndexReader"]

aten = torch.ops.aten

_NAMES = """
    add sub rsub mul div neg abs sign eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor bitwise_not logical_and
    logical_or logical_xor logical_not __and__ __or__ __xor__ where masked_fill maximum minimum clamp clamp_min
    clamp_max remainder fmod floor_divide pow log exp sqrt floor ceil round trunc relu isinf isfinite nan_to_num
    reciprocal square _to_copy clone detach alias lift_fresh_copy contiguous
"""
_ELEMENTWISE = frozenset(_NAMES.split())
"""Ops of which each element of the result depends on the same element of the operands alone."""
_BINARY = {"aten.min.other": "minimum", "aten.max.other": "maximum"}
_SAME = ("clone", "detach", "alias", "lift_fresh_copy", "contiguous")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_DEVICE = ("device", "pin_memory", "layout", "non_blocking", "memory_format")


class IndexReader:
    """Reads nodes of one graph; `known` are constants with their data, `sources` says what each placeholder is."""

    def __init__(self, known: Mapping[Node, Tensor], sources: Mapping[Node, str]) -> None:
        self.known = known
        self.sources = sources
        self.read: dict[Node, Pieces | UnreadError] = {}

    def pieces(self, node: Node) -> Pieces:
        """The value of a node, read once. A loop, because a chain of ops may be longer than Python's stack."""
        pending = [node]
        while pending:
            current = pending[-1]
            missing = [source for source in current.all_input_nodes if source not in self.read]
            if current not in self.read and missing:
                pending.extend(missing)
                continue
            pending.pop()
            if current not in self.read:
                self.read[current] = self._try(current)
        found = self.read[node]
        if isinstance(found, UnreadError):
            raise found
        return found

    def _try(self, node: Node) -> Pieces | UnreadError:
        for source in node.all_input_nodes:
            found = self.read[source]
            if isinstance(found, UnreadError) and not _is_template(node):
                return found
        try:
            return _fitting(self._pieces(node), node)
        except UnreadError as error:
            return error

    def _pieces(self, node: Node) -> Pieces:
        if node in self.known:
            return pieces_of(self.known[node])
        if node.op != "call_function":
            raise UnreadError(f"depends on {self.sources.get(node, node.name)}")
        if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(node.meta["val"], Tensor):
            raise UnreadError(f"depends on {node.name}")
        name = _BINARY.get(str(node.target), node.target._schema.name.removeprefix("aten::"))
        if name in _ELEMENTWISE:
            return self._elementwise(node, name)
        reading = READINGS.get(name)
        if reading is None:
            raise UnreadError(f"depends on {name}")
        return reading(self.of, node, arguments_of(node))

    def of(self, value: Any) -> Pieces:
        """The pieces of an operand: a node that was read before, or a number."""
        if isinstance(value, Node):
            found = self.read[value]
            assert not isinstance(found, UnreadError), value
            return found
        if isinstance(value, bool | float):
            return constant(value)
        if isinstance(value, int):
            return constant(Affine(value))
        raise UnreadError("depends on an argument that is no number")

    # -- one element at a time

    def _elementwise(self, node: Node, name: str) -> Pieces:
        shape = shape_of(node)
        arguments = arguments_of(node)
        operands = {key: self.of(value) for key, value in arguments.items() if isinstance(value, Node)}
        if prod(map(len, operands.values())) > MOST:
            raise UnreadError("it has too many cases")
        found: list[tuple[Term, Predicate]] = []
        for combination in product(*operands.values()):
            predicate = ALWAYS
            for _, condition in combination:
                predicate = both(predicate, condition, shape)
            if predicate:
                terms = dict(zip(operands, (term for term, _ in combination), strict=True))
                results = _of_terms(node, name, arguments, terms, shape)
                found.extend((term, both(predicate, condition, shape)) for term, condition in results)
        return merged(found, shape)


def _of_terms(node: Node, name: str, arguments: Mapping[str, Any], terms: Mapping[str, Term], shape: Shape) -> Pieces:
    """One op on one term of each operand."""
    if all(not isinstance(term, Affine) or not term.coefficients for term in terms.values()):
        return constant(_run(node, arguments, terms))
    if name == "where":
        return constant(_chosen(terms, arguments, "self" if _holds(terms["condition"]) else "other"))
    if name == "masked_fill":
        return constant(_chosen(terms, arguments, "value" if _holds(terms["mask"]) else "self"))
    if name in _SAME:
        return constant(terms["self"])
    numbers: list[Any] = [terms.get(key, arguments[key]) for key in arguments if key in ("self", "other", "min", "max")]
    if name == "_to_copy" and arguments["dtype"] is torch.bool:
        return _compared("ne", whole(numbers[0]), Affine(0), shape)
    if name == "_to_copy":
        return constant(numbers[0])
    if name in _COMPARISONS:
        return _compared(name, whole(numbers[0]), whole(numbers[1]), shape)
    return _arithmetic(name, [whole(number) for number in numbers if number is not None], arguments, shape)


def _holds(term: Term) -> bool:
    return isinstance(term, bool) and term


def _chosen(terms: Mapping[str, Term], arguments: Mapping[str, Any], name: str) -> Term:
    chosen: Any = terms[name] if name in terms else arguments[name]
    return whole(chosen) if isinstance(chosen, int) and not isinstance(chosen, bool) else chosen


def _compared(name: str, first: Affine, second: Affine, shape: Shape) -> Pieces:
    more, less = first - second, second - first
    if name in ("le", "lt"):
        more, less = less, more
    if name in ("eq", "ne"):
        holds = both(at_least(more, shape), at_least(less, shape), shape)
    else:
        holds = at_least(more - Affine(name in ("lt", "gt")), shape)
    true = name != "ne"
    return merged([(true, holds), (not true, negation(holds, shape))], shape)


def _arithmetic(name: str, numbers: list[Affine], arguments: Mapping[str, Any], shape: Shape) -> Pieces:
    first, second = numbers[0], numbers[-1]
    if name in ("add", "sub", "rsub"):
        alpha = arguments.get("alpha", 1)
        if not isinstance(alpha, int):
            raise UnreadError(f"depends on {name} with alpha={alpha}")
        if name == "rsub":
            return constant(second - first * alpha)
        return constant(first + second * (alpha if name == "add" else -alpha))
    if name == "mul" and not (first.coefficients and second.coefficients):
        return constant(first * second.constant if first.coefficients else second * first.constant)
    if name == "neg":
        return constant(first * -1)
    if name == "abs":
        return _greater(first, first * -1, shape)
    if name in ("maximum", "minimum") and len(numbers) == 2:
        return _greater(first, second, shape) if name == "maximum" else _greater(first, second, shape, least=True)
    if name in ("floor_divide", "remainder", "div") and not second.coefficients and second.constant > 0:
        return _divided(name, first, second.constant, arguments, shape)
    raise UnreadError(f"depends on {name} of positions")


def _greater(first: Affine, second: Affine, shape: Shape, least: bool = False) -> Pieces:
    holds = at_least(second - first if least else first - second, shape)
    return merged([(first, holds), (second, negation(holds, shape))], shape)


def _divided(name: str, affine: Affine, divisor: int, arguments: Mapping[str, Any], shape: Shape) -> Pieces:
    """Whole division, where all values fall into few blocks: chunks of a sequence."""
    low, high = bounds(affine, shape)
    rounding = arguments.get("rounding_mode", None if name == "div" else "floor")
    if rounding != "floor" and not (rounding == "trunc" and low >= 0):
        raise UnreadError(f"depends on {name} of positions")
    if high // divisor - low // divisor >= MOST:
        raise UnreadError("it has too many cases")
    found: list[tuple[Term, Predicate]] = []
    for block in range(low // divisor, high // divisor + 1):
        term = affine - Affine(block * divisor) if name == "remainder" else Affine(block)
        found.append((term, between(affine, block * divisor, (block + 1) * divisor, shape)))
    return merged(found, shape)


def _run(node: Node, arguments: Mapping[str, Any], terms: Mapping[str, Term]) -> Term:
    """An op on one element of each operand."""
    target: Any = node.target
    given = {}
    for schema in target._schema.arguments:
        value = arguments[schema.name]
        if schema.name in terms:
            val = value.meta["val"]
            term = terms[schema.name]
            number = term.constant if isinstance(term, Affine) else term
            value = torch.full([1] * val.dim(), number, dtype=val.dtype, device="cpu")
        if schema.name not in _DEVICE:
            given[schema.name] = value
    keyword_only = {schema.name for schema in target._schema.arguments if schema.kwarg_only}
    placed = [value for name, value in given.items() if name not in keyword_only]
    try:
        result = target(*placed, **{name: value for name, value in given.items() if name in keyword_only})
    except (RuntimeError, NotImplementedError):  # a number that the dtype lacks, or an op without a kernel on the CPU
        raise UnreadError(f"depends on {target._schema.name.removeprefix('aten::')}") from None
    if result.dtype != node.meta["val"].dtype or result.is_complex():
        raise UnreadError(f"depends on {target._schema.name.removeprefix('aten::')}")
    return term_of(result.item())


def _fitting(pieces: Pieces, node: Node) -> Pieces:
    """Positions must be exact in the dtype that they have: neither overflow nor be rounded."""
    dtype, shape = node.meta["val"].dtype, shape_of(node)
    found = []
    for term, predicate in pieces:
        found.append((term, predicate))
        if isinstance(term, Affine) and not term.coefficients:
            found[-1] = (float(term.constant) if dtype.is_floating_point else term, predicate)
        elif isinstance(term, Affine):
            if dtype.is_floating_point:
                high = int(2 / torch.finfo(dtype).eps)
                low = -high
            else:
                low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
            least, most = bounds(term, shape)
            if least < low or most > high:
                raise UnreadError(f"positions do not fit {str(dtype).removeprefix('torch.')}")
    return tuple(found)


def _is_template(node: Node) -> bool:
    """Whether an op asks an operand for its shape alone."""
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    return name.endswith("_like") and name.removeprefix("aten::") in READINGS
