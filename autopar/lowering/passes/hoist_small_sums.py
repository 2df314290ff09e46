"""Move small sums over ranks to the two ends of a call: before its graph, or after it.

The number of targets in a batch depends on the inputs alone. It is sent before the graph, with the numbers by which
ranks compare their calls. A loss is a result of the graph; the caller waits for the other ranks' parts when it reads
the value, which a backward does not. So a forward waits for nothing if it has no other collective, and `torch.compile`
meets no collective.

Input::

    count = all_reduce(sum(targets >= 0))
    loss = all_reduce(div(nll, count))
Output::

    def graph(x, targets, early_0):
        return div(nll, early_0)    # summed after the graph
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from autopar.lowering.collectives.local_reshard import LocalReshard, convert, restored, send
from autopar.lowering.modules.late_tensor import LateTensor
from autopar.lowering.passes.join_small_sums import joined, small_sum
from autopar.lowering.passes.recompute_regions import REGION

__all__ = ["ROOM", "HoistedSums", "NumberExchange", "move_to_ends", "wrapped"]

# Most ops of the graph before the graph: shifting, flattening, comparing and counting targets takes ten.
MOST_NODES = 64
# Numbers that fit in a comparison of the ranks: so many sums of a call are sent with it.
ROOM = 7
_ATEN = torch.ops.aten
_BY_NUMBERS = (_ATEN.neg.default, _ATEN.div.Scalar, _ATEN.mul.Scalar)
Rows = Sequence[Sequence[int | float]]


class NumberExchange(Protocol):
    """Exchange of a few numbers between the ranks of a mesh."""

    @property
    def is_cheap(self) -> bool:
        """True where no device waits for it; else collectives are cheaper."""
        ...

    def exchange(self, numbers: Sequence[int | float], last: bool) -> Callable[[str], Rows]:
        """Begin to send some numbers, after the graph or before it.

        Return a function that waits for the numbers of a group's members, a row for each.
        """
        ...


@dataclass(frozen=True)
class HoistedSums:
    """Sums before and after a graph; the sums before are its last inputs."""

    # Graph from some of the inputs to this rank's parts of the sums that are sent before.
    before: GraphModule | None = None
    # Places of these inputs among all inputs of the graph.
    places: tuple[int, ...] = ()
    early: tuple[LocalReshard, ...] = ()
    # Which results of the graph are this rank's parts of sums; one tensor may be several results.
    late: tuple[tuple[tuple[int, ...], LocalReshard], ...] = ()
    # Sums that are sent before, and after.
    notes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    @property
    def outline(self) -> str:
        """Return the values that all ranks must share for their exchanges to match."""
        early = [(one.result_shape, one.reshard.forward) for one in self.early]
        return f"{early} {[(places, one.result_shape, one.reshard.forward) for places, one in self.late]}"

    def first(self, values: Sequence[Any], exchanges: NumberExchange) -> list[Tensor]:
        """Return the sums before the graph, which may be pending."""
        if self.before is None:
            return []
        with torch.no_grad():
            # `forward` and not a call, which would look for hooks: once a step, with cold caches, that takes time.
            parts = self.before.forward(*[values[place] for place in self.places])
            return _begin(self.early, parts, exchanges, last=False)

    def last(self, outputs: tuple[Any, ...], exchanges: NumberExchange) -> tuple[Any, ...]:
        """Return the results with the sums after the graph, which may be pending."""
        if not self.late:
            return outputs
        found = list(outputs)
        conversions = tuple(one for _, one in self.late)
        parts = [outputs[places[0]] for places, _ in self.late]
        sums = _Sums.apply(conversions, exchanges, *parts)  # type: ignore[no-untyped-call]
        for (places, _), value in zip(self.late, sums, strict=True):
            for place in places:
                found[place] = value
        if not any(part.requires_grad for part in parts):  # no backward will come before somebody looks
            LateTensor.arrive_all(sums)
        return tuple(found)


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, conversions: tuple[LocalReshard, ...], exchanges: NumberExchange, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        found = _begin(conversions, parts, exchanges, last=True)
        ctx.conversions = conversions
        whole = [not (part.is_floating_point() or part.is_complex()) for part in parts]
        ctx.mark_non_differentiable(*(x for x, is_whole in zip(found, whole, strict=True) if is_whole))
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return (None, None, *gradients)
        # For gradients of gradients: each is summed like the sums themselves.
        pairs = zip(gradients, ctx.conversions, strict=True)
        return (None, None, *(None if x is None else convert(x, one, backward=True) for x, one in pairs))


def _begin(
    conversions: Sequence[LocalReshard], parts: Sequence[Tensor], exchanges: NumberExchange, last: bool
) -> list[Tensor]:
    """Return the pending sums of parts."""
    if not exchanges.is_cheap:
        return _collectives(conversions, parts)
    numbers: list[int | float] = []
    pieces = []
    for x in parts:
        begin = len(numbers)
        numbers += (torch.view_as_real(x.detach()) if x.is_complex() else x.detach()).reshape(-1).tolist()
        pieces.append(slice(begin, len(numbers)))
    sent = exchanges.exchange(numbers, last)
    return [
        LateTensor.of(x, partial(_received, sent, one.forward[0].group, piece, x.dtype, one.result_shape))
        for x, one, piece in zip(parts, conversions, pieces, strict=True)
    ]


def wrapped(number: complex) -> complex:
    """Return a sum of integers wrapped around like sums of tensors."""
    return (number + 2**63) % 2**64 - 2**63 if isinstance(number, int) else number


def _collectives(conversions: Sequence[LocalReshard], parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums by collectives, one for each group."""
    found: list[Tensor] = list(parts)
    groups: dict[str, list[int]] = {}
    for place, one in enumerate(conversions):
        groups.setdefault(one.forward[0].group, []).append(place)
    for places in groups.values():
        total, begin = send(conversions[places[0]].forward[0], joined([parts[place] for place in places])), 0
        for place in places:
            end = begin + parts[place].numel()
            found[place] = LateTensor.of(parts[place], partial(_piece, total, slice(begin, end), parts[place].dtype))
            begin = end
    return found


def _piece(total: Tensor, piece: slice, dtype: torch.dtype) -> Tensor:
    return restored(torch.ops._c10d_functional.wait_tensor(total)[piece], dtype)


def _received(
    sent: Callable[[str], Rows], group: str, piece: slice, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor | complex:
    columns = list(zip(*sent(group), strict=True))[piece]
    if dtype.is_complex:
        columns = [tuple(map(complex, *pair)) for pair in zip(columns[::2], columns[1::2], strict=True)]
    sums = [wrapped(sum(column)) for column in columns]
    if not shape and dtype is torch.int64:
        return sums[0]
    if not dtype.is_floating_point and not dtype.is_complex:  # a sum may not fit: it runs over
        return torch.tensor(sums, dtype=torch.int64).to(dtype).reshape(shape)
    return torch.tensor(sums, dtype=dtype).reshape(shape) if shape else sums[0]


# -- which sums those are ---------------------------------------------------------------------------------------------


@dataclass
class _FoundSums:
    # Nodes that depend only on inputs without a gradient.
    given: set[Node]
    # Nodes that depend only on those and on sums of them.
    known: set[Node]
    early: list[Node]
    # Map each result to the sums of which it is a linear function, which is applied to the parts instead.
    late: dict[Node, list[Node]]


def move_to_ends(graph: Graph, modules: dict[str, nn.Module], inputs: Iterable[str]) -> HoistedSums:
    """Take the sums out of a graph that can be made before and after it, in place.

    `inputs`: the placeholders that are inputs without a gradient.
    """
    found = _find(graph, modules, frozenset(inputs))
    (output,) = graph.find_nodes(op="output")
    late = [
        (tuple(place for place, value in enumerate(output.args[0]) if value is node), _reshard_of(sums[0], modules))
        for node, sums in found.late.items()
    ]
    sums = [one for each in found.late.values() for one in each]
    notes = tuple(
        tuple(note for node in nodes for note in modules[str(node.target)].notes)  # type: ignore[union-attr]
        for nodes in (found.early, sums)
    )
    early = tuple(_reshard_of(node, modules) for node in found.early)
    before, used = _graph_before(graph, modules, found.early) if early else (None, ())
    *_, last = graph.find_nodes(op="placeholder")
    for number, node in enumerate(found.early):
        with graph.inserting_after(last):
            last = graph.placeholder(f"early_{number}")
        _replace(node, last, modules)
    for node in sums:
        _replace(node, node.args[0], modules)
    return HoistedSums(before, used, early, tuple(late), notes)  # type: ignore[arg-type]


def _replace(node: Node, other: Any, modules: dict[str, nn.Module]) -> None:
    """Replace a node by a value, and drop the nodes that only it used."""
    node.replace_all_uses_with(other)
    dead = [node]
    while dead:
        one = dead.pop()
        if one.op == "placeholder" or one.users:
            continue
        dead.extend(one.all_input_nodes)
        if one.op == "call_module":
            del modules[str(one.target)]
        one.graph.erase_node(one)


def _find(graph: Graph, modules: Mapping[str, nn.Module], inputs: frozenset[str]) -> _FoundSums:
    found = _FoundSums(set(), set(), [], {})
    room = ROOM
    for node in graph.nodes:
        operands = node.all_input_nodes
        if node.op == "placeholder":
            if node.name in inputs:
                found.given.add(node)
        elif node.meta.get(REGION) is not None or not operands:
            continue
        elif small_sum(node, modules) is not None:
            numbers = 2 * prod(_reshard_of(node, modules).shape)  # complex numbers take two places
            if operands[0] in found.given and numbers <= room and len(_made_for([node])) <= MOST_NODES:
                room -= numbers
                found.early.append(node)
                found.known.add(node)
        elif _is_plain(node, modules):
            if found.given.issuperset(operands):
                found.given.add(node)
            elif all(one in found.given or one in found.known for one in operands):
                found.known.add(node)
    (output,) = graph.find_nodes(op="output")
    room = ROOM
    for result in dict.fromkeys(value for value in output.args[0] if isinstance(value, Node)):
        sums = _linear(result, found, modules)
        if sums and not any(one in found.early for one in sums):
            numbers = 2 * prod(_reshard_of(sums[0], modules).shape)
            if numbers <= room:
                room -= numbers
                found.late[result] = sums
    return found


def _linear(node: Node, found: _FoundSums, modules: Mapping[str, nn.Module]) -> list[Node]:
    """Return the sums over one group of which a node is a linear function, with no other use; none if it is not."""
    if len(node.users) != 1 or node.meta.get(REGION) is not None:
        return []
    if small_sum(node, modules) is not None:
        return [node]
    if node.op != "call_function" or node.kwargs:
        return []
    parts = [_linear(one, found, modules) if isinstance(one, Node) else [] for one in node.args]
    if node.target in (_ATEN.add.Tensor, _ATEN.sub.Tensor) and all(parts):
        sums = [one for part in parts for one in part]
    elif node.target is _ATEN.mul.Tensor and any(_is_constant(one, found) for one in node.args):
        sums = parts[0] or parts[1]
    elif node.target in _BY_NUMBERS or (node.target is _ATEN.div.Tensor and _is_constant(node.args[1], found)):
        sums = parts[0]
    else:
        return []
    conversions = [_reshard_of(one, modules) for one in sums]
    shapes = {one.result_shape for one in conversions} | {node.meta.get("local_shape")}
    return sums if len(shapes) == 1 and len({one.forward[0].group for one in conversions}) == 1 else []


def _is_constant(value: Any, found: _FoundSums) -> bool:
    return not isinstance(value, Node) or value in found.given or value in found.known


def _is_plain(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a node is deterministic, changes nothing, and sends nothing."""
    if node.op == "call_module":
        conversion = getattr(modules[str(node.target)], "conversion", None)
        return isinstance(conversion, LocalReshard) and all(move.local for move in conversion.forward)
    if node.target is operator.getitem:
        return True
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and not node.target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def _reshard_of(node: Node, modules: Mapping[str, nn.Module]) -> LocalReshard:
    found = modules[str(node.target)].conversion
    assert isinstance(found, LocalReshard), node
    return found


def _made_for(nodes: Sequence[Node]) -> set[Node]:
    """Return the nodes and all nodes that they depend on, without placeholders."""
    found: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found and node.op != "placeholder":
            found.add(node)
            left.extend(node.all_input_nodes)
    return found


def _graph_before(
    graph: Graph, modules: Mapping[str, nn.Module], sums: Sequence[Node]
) -> tuple[GraphModule, tuple[int, ...]]:
    """Return the graph of this rank's parts of the sums, and the inputs that it reads."""
    parts = [node.all_input_nodes[0] for node in sums]
    wanted = _made_for(parts)
    read = {one for node in (*wanted, *sums) for one in node.all_input_nodes}
    before, copies = Graph(), dict[Node, Node]()
    inputs = graph.find_nodes(op="placeholder")
    for node in graph.nodes:
        if node in wanted or (node in read and node.op == "placeholder"):
            copies[node] = before.node_copy(node, copies.__getitem__)
    before.output(tuple(copies[part] for part in parts))
    used = {str(node.target): modules[str(node.target)] for node in wanted if node.op == "call_module"}
    return GraphModule(used, before), tuple(place for place, node in enumerate(inputs) if node in copies)
