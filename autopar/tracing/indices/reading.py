"""Read a tensor of a graph as a function of its indices, where it depends on sizes and known constants alone.

Every op before the tensor is read in order, from its operands as `Pieces`. Ops on numbers run on one element, so that
casts, rounding and overflow are those of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

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
    merge,
    negation,
)
from autopar.tracing.indices.views import READERS, shape_of, term_of, whole
from autopar.tracing.passes.edit import arguments_of

# Ops whose result depends, element by element, on the same element of the operands alone.
_ELEMENTWISE_NAMES = """
    add sub rsub mul div neg abs sign eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor bitwise_not logical_and
    logical_or logical_xor logical_not __and__ __or__ __xor__ where masked_fill maximum minimum clamp clamp_min
    clamp_max remainder fmod floor_divide pow log exp sqrt floor ceil round trunc relu isinf isfinite nan_to_num
    reciprocal square _to_copy clone detach alias lift_fresh_copy contiguous
"""
_ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
# Overloads that compute another op than their name.
_BINARY = {"aten.min.other": "minimum", "aten.max.other": "maximum"}
_IDENTITY = ("clone", "detach", "alias", "lift_fresh_copy", "contiguous")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
# Arguments without an effect on the values.
_DEVICE = ("device", "pin_memory", "layout", "non_blocking", "memory_format")


class IndexReader:
    """Reader of the nodes of one graph.

    `known` has the data of constants, `sources` the user's name for each placeholder.
    """

    def __init__(self, known: Mapping[Node, Tensor], sources: Mapping[Node, str]) -> None:
        self.known = known
        self.sources = sources
        self.read: dict[Node, Pieces | UnreadError] = {}

    def pieces(self, node: Node) -> Pieces:
        """Return the pieces of a node; each node is read once."""
        # A loop and no recursion: a chain of ops can be deeper than Python's stack.
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
            if isinstance(found, UnreadError) and not _reads_shape_only(node):
                return found
        try:
            return _exact(self._pieces(node), node)
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
        reader = READERS.get(name)
        if reader is None:
            raise UnreadError(f"depends on {name}")
        return reader(self.of, node, arguments_of(node))

    def of(self, value: Any) -> Pieces:
        """Return the pieces of an operand: a number, or a node that is read already."""
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
                results = _op_on_terms(node, name, arguments, terms, shape)
                found.extend((term, both(predicate, condition, shape)) for term, condition in results)
        return merge(found, shape)


def _op_on_terms(
    node: Node, name: str, arguments: Mapping[str, Any], terms: Mapping[str, Term], shape: Shape
) -> Pieces:
    """Return the pieces of an op on one term of each operand."""
    if all(not isinstance(term, Affine) or not term.coefficients for term in terms.values()):
        return constant(_run(node, arguments, terms))
    if name == "where":
        return constant(_operand(terms, arguments, "self" if terms["condition"] is True else "other"))
    if name == "masked_fill":
        return constant(_operand(terms, arguments, "value" if terms["mask"] is True else "self"))
    if name in _IDENTITY:
        return constant(terms["self"])
    numbers: list[Any] = [terms.get(key, arguments[key]) for key in arguments if key in ("self", "other", "min", "max")]
    if name == "_to_copy" and arguments["dtype"] is torch.bool:
        return _comparison("ne", whole(numbers[0]), Affine(0), shape)
    if name == "_to_copy":
        return constant(numbers[0])
    if name in _COMPARISONS:
        return _comparison(name, whole(numbers[0]), whole(numbers[1]), shape)
    return _arithmetic(name, [whole(number) for number in numbers if number is not None], arguments, shape)


def _operand(terms: Mapping[str, Term], arguments: Mapping[str, Any], name: str) -> Term:
    value: Any = terms[name] if name in terms else arguments[name]
    return whole(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _comparison(name: str, first: Affine, second: Affine, shape: Shape) -> Pieces:
    more, less = first - second, second - first
    if name in ("le", "lt"):
        more, less = less, more
    if name in ("eq", "ne"):
        holds = both(at_least(more, shape), at_least(less, shape), shape)
    else:
        holds = at_least(more - Affine(name in ("lt", "gt")), shape)
    true = name != "ne"
    return merge([(true, holds), (not true, negation(holds, shape))], shape)


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
        return _extremum(first, first * -1, shape)
    if name in ("maximum", "minimum") and len(numbers) == 2:
        return _extremum(first, second, shape, least=name == "minimum")
    if name in ("floor_divide", "remainder", "div") and not second.coefficients and second.constant > 0:
        return _quotient(name, first, second.constant, arguments, shape)
    raise UnreadError(f"depends on {name} of positions")


def _extremum(first: Affine, second: Affine, shape: Shape, least: bool = False) -> Pieces:
    holds = at_least(second - first if least else first - second, shape)
    return merge([(first, holds), (second, negation(holds, shape))], shape)


def _quotient(name: str, affine: Affine, divisor: int, arguments: Mapping[str, Any], shape: Shape) -> Pieces:
    """Return an integer division or remainder as one piece per quotient, as for chunks of a sequence."""
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
    return merge(found, shape)


def _run(node: Node, arguments: Mapping[str, Any], terms: Mapping[str, Term]) -> Term:
    """Run an op on one element of each operand."""
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
    except (RuntimeError, NotImplementedError):
        # The dtype lacks the number, or the op has no kernel on the CPU.
        raise UnreadError(f"depends on {target._schema.name.removeprefix('aten::')}") from None
    if result.dtype != node.meta["val"].dtype or result.is_complex():
        raise UnreadError(f"depends on {target._schema.name.removeprefix('aten::')}")
    return term_of(result.item())


def _exact(pieces: Pieces, node: Node) -> Pieces:
    """Return the pieces in the dtype of a node; raise if positions overflow or are rounded."""
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


def _reads_shape_only(node: Node) -> bool:
    """Return True for an op that uses the shape of an operand, not its data."""
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    return name.endswith("_like") and name.removeprefix("aten::") in READERS


# -- constants --------------------------------------------------------------------------------------------------------


def pieces_of(tensor: Tensor) -> Pieces:
    """Return a constant as one number, positions along a dim, or a band of a matrix.

    Each form is compared with all of the data before it is returned.
    """
    if tensor.is_meta or not tensor.numel() or tensor.is_complex():
        raise UnreadError("depends on a constant without data")
    tensor = tensor.detach().cpu()
    first = tensor.reshape(-1)[0]
    if bool((tensor == first).all()):
        return constant(_term(first))
    found = _positions(tensor) or _band(tensor)
    if found is None:
        raise UnreadError("depends on a constant that is no band of two numbers")
    return found


def _term(element: Tensor) -> Term:
    number = element.item()
    return Affine(number) if isinstance(number, int) and not isinstance(number, bool) else number


def _positions(tensor: Tensor) -> Pieces | None:
    """Return `first + step * index` along one dim; None for other data."""
    long_dims = [dim for dim, extent in enumerate(tensor.shape) if extent != 1]
    if len(long_dims) != 1 or tensor.dtype is torch.bool or tensor.is_floating_point():
        return None
    numbers = tensor.reshape(-1)
    start, step = int(numbers[0]), int(numbers[1]) - int(numbers[0])
    if not torch.equal(numbers.long(), start + step * torch.arange(len(numbers), device="cpu")):
        return None
    return constant(Affine.of(start, {long_dims[0] - tensor.dim(): step}))


def _band(tensor: Tensor) -> Pieces | None:
    """Return two numbers, one where `low <= column - row <= high`, equal in all matrices; None for other data."""
    if tensor.dim() < 2:
        return None
    matrix = tensor[(0,) * (tensor.dim() - 2)]
    corner = matrix[0, 0]
    rows, columns = (torch.arange(extent, device="cpu") for extent in matrix.shape)
    offsets = columns[None, :] - rows[:, None]
    shape = tuple(tensor.shape)
    for inside in (matrix == corner, matrix != corner):
        low, high = int(offsets[inside].min()), int(offsets[inside].max())
        is_band = torch.equal(inside, (offsets >= low) & (offsets <= high))
        here, other = matrix[inside][0], matrix[~inside][0]
        if is_band and bool((tensor == torch.where(inside, here, other)).all()):
            along = Affine.of(0, {-1: int(shape[-1] > 1), -2: -int(shape[-2] > 1)})
            band = both(at_least(along - Affine(low), shape), at_least(Affine(high) - along, shape), shape)
            return merge([(_term(here), band), (_term(other), negation(band, shape))], shape)
    return None
