"""Names by structure: what role a dim plays is read off the graph, not off the names of parameters.

Each detector looks at the bound graph and yields `(class of dims, name)`. `standard_names` asks them in order; the
first name a class is given stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import torch

from autopar.rules.notation import FactorKind
from autopar.trace.binding import Binding, BoundNode, ValueKey
from autopar.trace.exported import Exported

__all__ = ["standard_names"]

Proposal = tuple[int, str]

SPATIAL = {1: ("seq",), 2: ("height", "width"), 3: ("depth", "height", "width")}
KERNEL = {1: ("kernel",), 2: ("kernel_height", "kernel_width"), 3: ("kernel_depth", "kernel_height", "kernel_width")}


class Structure:
    """The bound graph, with what the detectors ask of it: who makes a value, who uses it, who is named already."""

    def __init__(self, exported: Exported, binding: Binding, names: dict[int, str]) -> None:
        self.binding = binding
        self.space = binding.space
        self.names = names
        self.kinds = {p.node: p.kind for p in exported.placeholders}
        self.inputs = [p for p in exported.placeholders if p.kind == "input"]
        self.values = {node.name: node.meta["val"] for node in exported.graph_module.graph.nodes if "val" in node.meta}
        self.maker: dict[ValueKey, BoundNode] = {}
        self.users: dict[ValueKey, list[BoundNode]] = defaultdict(list)
        self.order: dict[ValueKey, int] = {}
        for i, bound in enumerate(binding.nodes):
            for key in bound.outputs:
                if key is not None:
                    self.maker[key] = bound
                    self.order[key] = i
            for key in dict.fromkeys(key for key in bound.operands if key is not None):
                self.users[key].append(bound)

    def dims(self, key: ValueKey) -> tuple[int, ...]:
        return tuple(map(self.space.find, self.binding.dims[key]))

    def name(self, dim: int) -> str | None:
        return self.names.get(self.space.find(dim))

    def factor_dim(self, bound: BoundNode, factor: str) -> int:
        return self.space.find(bound.factors[factor])

    def is_weight(self, key: ValueKey | None) -> bool:
        return key is not None and key in self.binding.stored

    def contractions(self, bound: BoundNode) -> Iterator[str]:
        """The factors this op sums away between an activation and a weight, as `linear` and convolutions do."""
        for factor, kind in bound.rule.kinds.items():
            if kind is not FactorKind.SUM:
                continue
            holders = [
                key
                for operand, key in zip(bound.rule.operands, bound.operands, strict=False)
                if operand is not None and factor in operand.factors
            ]
            if len(holders) > 1 and any(map(self.is_weight, holders)) and not all(map(self.is_weight, holders)):
                yield factor

    def born(self, bound: BoundNode) -> Iterator[str]:
        """The factors that come into the output from the weight alone: what a linear layer makes new."""
        if not any(True for _ in self.contractions(bound)):
            return
        for factor in bound.rule.outputs[0].factors if bound.rule.outputs[0] else ():
            holders = [
                key
                for operand, key in zip(bound.rule.operands, bound.operands, strict=False)
                if operand is not None and factor in operand.factors
            ]
            if holders and all(map(self.is_weight, holders)):
                yield factor


def op_name(bound: BoundNode) -> str:
    return bound.call.op.split(".")[1]


def standard_names(exported: Exported, binding: Binding, names: dict[int, str]) -> dict[int, str]:
    """Add the standard names that the structure shows to `names` (class -> name); given names stay."""
    structure = Structure(exported, binding, dict(names))
    for detector in DETECTORS:
        for dim, name in detector(structure):
            root = structure.space.find(dim)
            if root not in structure.names:
                structure.names[root] = name
    return structure.names


# -- attention --------------------------------------------------------------------------------------------------------


def attention(structure: Structure) -> Iterator[Proposal]:
    """`batch heads seq head_dim` from the operands of attention, fused or written out."""
    for bound in structure.binding.nodes:
        if "attention" in op_name(bound):
            keys = bound.operands[:3]
            if None not in keys:
                query, key, value = (structure.dims(k) for k in keys if k is not None)
                yield from _attention_dims(structure, query, key, value)
        elif "softmax" in op_name(bound):
            found = _written_out(structure, bound)
            if found is not None:
                yield from _attention_dims(structure, *found)


def _attention_dims(
    structure: Structure, query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]
) -> Iterator[Proposal]:
    if min(len(query), len(key), len(value)) < 3:
        return
    yield query[-1], "head_dim"
    yield value[-1], "head_dim"
    yield query[-2], "seq"
    yield key[-2], "seq"
    for dims in (query, key):
        heads = _heads(structure, dims)
        if heads is None:
            continue
        parts = structure.space.parts(heads)
        grouped = dims is query and _heads(structure, key) not in (None, heads)
        yield heads, "kv_heads" if dims is key and heads != _heads(structure, query) else "heads"
        if len(parts) == 2:
            yield parts[0], "kv_heads"
            yield parts[1], "group"
        elif grouped:
            continue
    if len(query) > 3 and not structure.space.parts(query[0]):
        yield query[0], "batch"


def _heads(structure: Structure, dims: tuple[int, ...]) -> int | None:
    """The heads among the dims of a query or key: third from the right, or the minor part of a merged batch."""
    if len(dims) > 3:
        return dims[-3]
    parts = structure.space.parts(dims[-3])
    return parts[-1] if parts and structure.name(dims[-3]) is None else None


PASS_THROUGH = frozenset(
    ["mul", "div", "add", "sub", "clone", "_to_copy", "masked_fill", "where", "tanh", "dropout", "native_dropout", "expand", "detach", "clamp", "maximum", "reshape", "view", "type_as", "slice", "softmax", "nan_to_num"]
)


def _written_out(
    structure: Structure, softmax: BoundNode
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Query, key and value dims when a softmax stands between two products of activations."""
    if not softmax.call.operands or softmax.outputs[0] is None:
        return None
    second = _product_after(structure, softmax.outputs[0])
    first = _product_before(structure, softmax.operands[0])
    if second is None or first is None:
        return None
    scores = _product_dims(structure, first)
    mixed = _product_dims(structure, second)
    if scores is None or mixed is None:
        return None
    batch, query_seq, key_seq, head_dim = scores
    value_dim = mixed[2]
    return (*batch, query_seq, head_dim), (*batch, key_seq, head_dim), (*batch, key_seq, value_dim)


def _is_product(structure: Structure, bound: BoundNode) -> bool:
    """Whether an op multiplies and sums two activations."""
    if op_name(bound) not in ("matmul", "bmm", "einsum", "baddbmm"):
        return False
    return not any(map(structure.is_weight, bound.operands[-2:]))


def _product_after(structure: Structure, key: ValueKey) -> BoundNode | None:
    for _ in range(8):
        users = structure.users.get(key, [])
        for user in users:
            if _is_product(structure, user):
                return user
        onward = [user for user in users if op_name(user) in PASS_THROUGH and user.outputs[0] is not None]
        if not onward:
            return None
        key = onward[0].outputs[0] or key
    return None


def _product_before(structure: Structure, key: ValueKey | None) -> BoundNode | None:
    for _ in range(12):
        bound = structure.maker.get(key) if key is not None else None
        if bound is None or _is_product(structure, bound):
            return bound
        if op_name(bound) not in PASS_THROUGH:
            return None
        candidates = [k for k in bound.operands if k is not None and not structure.is_weight(k)]
        products = [k for k in candidates if _leads_to_product(structure, k)]
        key = (products or candidates or [None])[0]
    return None


def _leads_to_product(structure: Structure, key: ValueKey) -> bool:
    for _ in range(12):
        bound = structure.maker.get(key)
        if bound is None:
            return False
        if _is_product(structure, bound):
            return True
        if op_name(bound) not in PASS_THROUGH or bound.operands[0] is None:
            return False
        key = bound.operands[0]
    return False


def _product_dims(structure: Structure, bound: BoundNode) -> tuple[tuple[int, ...], int, int, int] | None:
    """Batch dims, rows, columns and contracted dim of a product of two activations."""
    key = bound.outputs[0]
    contracted = [f for f, kind in bound.rule.kinds.items() if kind is FactorKind.SUM]
    if key is None or len(contracted) != 1:
        return None
    dims = structure.dims(key)
    if len(dims) < 2:
        return None
    return dims[:-2], dims[-2], dims[-1], structure.factor_dim(bound, contracted[0])


def head_dims(structure: Structure) -> Iterator[Proposal]:
    """Before and after rotary embeddings a head dim may be two classes: beside `heads`, the same extent is the same."""
    extents = {structure.space.size(dim) for dim, name in structure.names.items() if name == "head_dim"}
    for dims in map(structure.dims, structure.binding.dims):
        if any(structure.name(dim) in ("heads", "kv_heads") for dim in dims):
            for dim in dims:
                if structure.name(dim) is None and structure.space.size(dim) in extents:
                    yield dim, "head_dim"


# -- tables -----------------------------------------------------------------------------------------------------------

KEEPS_VALUES = frozenset(
    ["reshape", "view", "slice", "clone", "_to_copy", "where", "clamp", "expand", "unsqueeze", "squeeze", "masked_fill", "select", "cat", "slice_scatter", "select_scatter", "index_put", "permute", "transpose", "alias", "detach", "copy", "constant_pad_nd", "pad", "clamp_min", "to", "roll", "split", "flip"]
)
LOOKUPS = ("embedding", "index_select", "index", "embedding_bag")


def tables(structure: Structure) -> Iterator[Proposal]:
    """`vocab` are the rows of a table looked up by the user's ids, `position` those looked up by positions."""
    by_ids: list[int] = []
    for bound in structure.binding.nodes:
        if op_name(bound) not in LOOKUPS or not structure.is_weight(bound.operands[0]):
            continue
        table, indices = bound.operands[0], next((k for k in bound.operands[1:] if k is not None), None)
        if table is None or indices is None or not structure.values[table].is_floating_point():
            continue
        rows = structure.dims(table)[0]
        origin = _origin(structure, indices)
        if origin == "ids":
            by_ids.append(rows)
        elif origin == "positions":
            yield rows, "position"
        else:
            yield rows, "types"
    largest = max(map(structure.space.size, by_ids), default=0)
    for rows in by_ids:
        yield rows, "vocab" if structure.space.size(rows) == largest or _is_output(structure, rows) else "types"
    if largest:
        yield from _heads_onto(structure, largest)


def _is_output(structure: Structure, dim: int) -> bool:
    """Whether a dim is also made by a linear layer: a table tied to the head."""
    return any(
        structure.factor_dim(bound, factor) == dim
        for bound in structure.binding.nodes
        for factor in structure.born(bound)
    )


def _heads_onto(structure: Structure, vocab: int) -> Iterator[Proposal]:
    """An untied head makes a dim of the extent of the vocabulary that no later layer sums away."""
    made = set()
    summed = set()
    for bound in structure.binding.nodes:
        made.update(structure.factor_dim(bound, factor) for factor in structure.born(bound))
        summed.update(structure.factor_dim(bound, factor) for factor in structure.contractions(bound))
    for dim in sorted(made - summed):
        if structure.space.size(dim) == vocab and not structure.space.parts(dim):
            yield dim, "vocab"


def _origin(structure: Structure, key: ValueKey) -> str:
    """Where indices come from: the user's "ids", "positions" counted in the model, or "constants"."""
    found = "constants"
    seen = {key}
    pending = [key]
    named = {p.node: p.name for p in structure.inputs}
    while pending:
        here = pending.pop()
        if here in named:
            if "position" not in named[here]:
                return "ids"
            found = "positions"
        bound = structure.maker.get(here)
        if bound is None:
            continue
        if op_name(bound) in ("arange", "cumsum"):
            found = "positions"
        elif op_name(bound) in KEEPS_VALUES or (op_name(bound) in ("add", "sub", "mul") and len(seen) < 20):
            onward = [k for k in bound.operands if k is not None and k not in seen and _is_integer(structure, k)]
            pending.extend(onward)
            seen.update(onward)
        elif op_name(bound) not in ("full", "zeros", "ones", "zeros_like", "new_zeros", "full_like"):
            found = "positions" if found == "constants" else found
    return found


def _is_integer(structure: Structure, key: ValueKey) -> bool:
    dtype = structure.values[key].dtype
    return not dtype.is_floating_point and dtype is not torch.bool


# -- experts ----------------------------------------------------------------------------------------------------------


def experts(structure: Structure) -> Iterator[Proposal]:
    """The leading dim of a stack of equal matrices, of the extent that a router chooses from."""
    routed = {}
    for bound in structure.binding.nodes:
        for factor in structure.born(bound):
            routed[structure.factor_dim(bound, factor)] = structure.space.size(bound.factors[factor])
    for bound in structure.binding.nodes:
        for operand, key in zip(bound.rule.operands, bound.operands, strict=False):
            if operand is None or key is None or not structure.is_weight(key) or len(operand.terms) < 3:
                continue
            if (
                not any(factor in operand.factors for factor in structure.contractions(bound))
                or len(operand.terms[0]) != 1
            ):
                continue
            stack = structure.dims(key)[0]
            leading = operand.terms[0][0]
            if bound.rule.kinds[leading] is FactorKind.SUM or leading in set(structure.born(bound)):
                continue  # a kernel or a plain matrix, not a stack
            routers = [dim for dim, size in routed.items() if size == structure.space.size(stack)]
            if "conv" in op_name(bound) or not routers:
                continue
            yield stack, "expert"
            for dim in routers:
                if not structure.space.parts(dim) and structure.name(dim) is None:
                    yield dim, "expert"


# -- images -----------------------------------------------------------------------------------------------------------


def images(structure: Structure) -> Iterator[Proposal]:
    """`batch channels height width` from the first convolutions; heights and widths of later maps follow by ties."""
    for bound in structure.binding.nodes:
        if "conv" not in op_name(bound) or bound.operands[0] is None or bound.operands[1] is None:
            continue
        dims, weight = structure.dims(bound.operands[0]), structure.dims(bound.operands[1])
        space_rank = len(weight) - 2
        if len(dims) != space_rank + 2:
            continue
        for name, dim in zip(KERNEL.get(space_rank, ()), weight[2:], strict=False):
            yield dim, name
        for key in (bound.operands[0], bound.outputs[0]):
            spatial = structure.dims(key)[2:] if key else ()
            for name, dim in zip(SPATIAL.get(space_rank, ()), spatial, strict=False):
                yield dim, name
        if not structure.space.parts(dims[0]):
            yield dims[0], "batch"
        if space_rank > 1 and bound.operands[0] in structure.kinds:
            yield dims[1], "channels"


def channels(structure: Structure) -> Iterator[Proposal]:
    """Every feature dim of a convolution that is not the stream of a transformer."""
    for bound in structure.binding.nodes:
        if "conv" in op_name(bound) and len(bound.call.operand(1).shape) > 3:
            for key in (bound.operands[0], bound.outputs[0]):
                if key is not None and len(structure.dims(key)) > 3:
                    yield from ((dim, "channels") for dim in structure.space.atoms(structure.dims(key)[1]))


# -- streams and layers -----------------------------------------------------------------------------------------------


def streams(structure: Structure) -> Iterator[Proposal]:
    """`d_model`: the dim that a residual stream `x + f(x)` carries and that `f` sums away; of feature maps, `channels`."""
    for bound in structure.binding.nodes:
        if op_name(bound) != "add" or len(bound.operands) != 2 or bound.outputs[0] is None:
            continue
        left, right = bound.operands
        if left is None or right is None or structure.is_weight(left) or structure.is_weight(right):
            continue
        dims = structure.dims(bound.outputs[0])
        if structure.dims(left) != dims or structure.dims(right) != dims:
            continue
        summed = _summed_between(structure, left, right) & set(dims)
        maps = {structure.name(dim) for dim in dims} & {"height", "width", "depth"}
        for dim in summed:
            yield dim, "channels" if maps else "d_model"


def _summed_between(structure: Structure, left: ValueKey, right: ValueKey) -> set[int]:
    """The dims summed away against weights on the way from one value to the other; empty when there is no way."""
    first, last = sorted((left, right), key=lambda key: structure.order.get(key, -1))
    start = structure.order.get(first, -1)
    seen = {last}
    pending = [last]
    summed: set[int] = set()
    reached = False
    while pending:
        bound = structure.maker.get(pending.pop())
        if bound is None:
            continue
        summed.update(structure.factor_dim(bound, factor) for factor in structure.contractions(bound))
        for key in bound.operands:
            reached |= key == first
            if key is not None and key not in seen and structure.order.get(key, -1) > start:
                seen.add(key)
                pending.append(key)
    return summed if reached else set()


def layers(structure: Structure) -> Iterator[Proposal]:
    """`d_ff`: born in one linear layer and summed away in a later one."""
    made: set[int] = set()
    summed: dict[int, None] = {}
    for bound in structure.binding.nodes:
        if "conv" in op_name(bound) and len(bound.call.operand(1).shape) > 3:
            continue
        for factor in structure.contractions(bound):
            summed[structure.factor_dim(bound, factor)] = None
        for factor in structure.born(bound):
            made.update(structure.space.within(structure.factor_dim(bound, factor)))
    for dim in summed:
        inside = [structure.name(part) for part in structure.space.within(dim)]
        if dim in made and not any(inside):
            yield dim, "d_ff"


def inputs(structure: Structure) -> Iterator[Proposal]:
    """What the user feeds: `batch` leads; the second dim of ids is `seq`."""
    for placeholder in structure.inputs:
        value = structure.values[placeholder.node]
        dims = structure.dims(placeholder.node)
        if value.dim() >= 2 and not structure.space.parts(dims[0]):
            yield dims[0], "batch"
        if value.dim() == 2 and not value.is_floating_point():
            yield dims[1], "seq"
        if value.dim() == 1 and not value.is_floating_point() and structure.users.get(placeholder.node):
            lookup = any(op_name(user) in LOOKUPS for user in structure.users[placeholder.node])
            yield dims[0], "seq" if lookup else "batch"


def tied(structure: Structure) -> Iterator[Proposal]:
    """A dim kept apart from a named one (another extent, or the same tensor) takes its name too."""
    for _ in range(len(structure.binding.ties)):
        before = len(structure.names)
        for tie in structure.binding.ties:
            for dim, other in ((tie.first, tie.second), (tie.second, tie.first)):
                name = structure.name(other)
                known = structure.name(dim) is not None or structure.space.parts(dim) or structure.space.size(dim) == 1
                if name is not None and not known:
                    yield dim, name
        if len(structure.names) == before:
            return


DETECTORS: tuple[Callable[[Structure], Iterator[Proposal]], ...] = (
    tables,
    attention,
    head_dims,
    experts,
    images,
    tied,
    streams,
    channels,
    layers,
    inputs,
    tied,
)
