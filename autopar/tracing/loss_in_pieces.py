"""Join the last linear layer of a traced model and its cross-entropy, so that logits of some rows live at a time.

Logits have a number for each token and word of the vocabulary, and several tensors of this size live at once. The op
that takes their place computes them by pieces of the rows, and again in the backward. It needs logits that nothing else
reads. A model that returns them is called with `outputs="loss"`, which drops them.

Input::

    logits = linear(x, weight)
    loss = cross_entropy(reshape(_to_copy(logits, dtype=f32)), target, reduction="sum")
    return loss, logits
Output::

    loss = linear_cross_entropy(reshape(x), weight, None, target, reduction="sum", dtype=f32, pieces=16)
    return loss, None
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isclose

import torch
from torch.fx import Graph, Node

from autopar.errors import AutoparError
from autopar.ir.fx_graphs import remove_dead
from autopar.ir.graph import NamedGraph
from autopar.rules.ops.loss_pieces import LINEAR_CROSS_ENTROPY
from autopar.rules.shard_call.loss_pieces import NONE, SUM, LogitsForm
from autopar.tracing.name_again import name_again
from autopar.tracing.passes.edit import arguments_of, insert
from autopar.tracing.passes.edit import replace as replace_node

__all__ = ["NoPieces", "logits_bytes", "loss_in_pieces"]

aten = torch.ops.aten
# Of a matrix all of them do the same.
TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)
AS_ROWS = "give the loss the logits of all rows at once, as 'cross_entropy(linear(x).flatten(0, 1), labels.flatten())'"


class NoPieces(AutoparError):
    """A loss that cannot be computed in pieces; `fix` says what the user can do."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}\nfix: {fix}")
        self.what, self.fix = what, fix


def loss_in_pieces(graph: NamedGraph, pieces: int, scalars_alone: bool) -> NamedGraph:
    """Return the graph with its losses in pieces; the graph itself if they are already. Raises NoPieces.

    `scalars_alone`: logits that the model returns are dropped.
    """
    if graph.loss_pieces == pieces:
        return graph
    if graph.loss_pieces is not None or graph.fold is not None:
        raise NoPieces("the graph was changed by a plan already", "give the graph of the trace")
    known: dict[tuple[int, bool], NamedGraph | NoPieces] = graph.__dict__.setdefault("_in_pieces", {})
    key = pieces, scalars_alone
    if key not in known:
        try:
            known[key] = _Joining(graph, pieces, scalars_alone).run()
        except NoPieces as error:
            known[key] = error
    found = known[key]
    if isinstance(found, NoPieces):
        raise found
    return found


def logits_bytes(graph: NamedGraph) -> float:
    """Return the bytes of all logits in float32 that a graph computes at once; 0 where they are in pieces."""
    found = 0.0
    for loss in _losses(graph.exported.graph_module.graph):
        logits = arguments_of(loss)["self"].meta["val"]
        found += logits.numel() * max(logits.dtype.itemsize, 4)
    return found


def _losses(graph: Graph) -> Iterator[Node]:
    """Yield the losses of a graph over the numbers of classes."""
    for node in graph.find_nodes(op="call_function", target=aten.cross_entropy_loss.default):
        if not arguments_of(node)["target"].meta["val"].dtype.is_floating_point:
            yield node


@dataclass(frozen=True)
class _Joined:
    """A linear layer, its loss, the ops from the one to the other, and what these do."""

    loss: Node
    linear: Node
    between: tuple[Node, ...]
    form: LogitsForm


@dataclass
class _Joining:
    graph: NamedGraph
    pieces: int
    scalars_alone: bool

    def run(self) -> NamedGraph:
        source = self.graph.exported.graph_module.graph
        made, copies = Graph(), dict[Node, Node]()
        for node in source.nodes:
            copies[node] = made.node_copy(node, copies.__getitem__)
        reasons, joined = [], 0
        for loss in list(_losses(made)):
            found = self._find(loss)
            if isinstance(found, NoPieces):
                reasons.append(found)
            else:
                self._join(found)
                joined += 1
        if not joined:
            none = NoPieces("the model has no cross-entropy of class numbers", "leave 'pieces' out")
            raise reasons[0] if reasons else none
        remove_dead(made)
        return name_again(self.graph, made, loss_pieces=self.pieces)

    # -- what can be joined

    def _find(self, loss: Node) -> _Joined | NoPieces:
        given = arguments_of(loss)
        if given["weight"] is not None or given["reduction"] not in (NONE, SUM):
            return NoPieces("the loss has weights for its classes", "leave them out, or 'pieces'")
        if len(given["self"].meta["val"].shape) != 2:
            return NoPieces("the loss does not take logits as rows of classes", AS_ROWS)
        between: list[Node] = []
        node = given["self"]
        while isinstance(node, Node) and _treats_rows_alike(node):
            between.insert(0, node)
            node = node.args[0]
        if not isinstance(node, Node) or not _is_linear(node):
            what = f"the logits of the loss come from '{getattr(node, 'target', node)}', and not from a linear layer"
            return NoPieces(what, "leave 'pieces' out")
        form = _form_of(between, node.meta["val"].dtype)
        if form is None:
            return NoPieces("the logits are changed by more than a factor, a soft cap and a cast", "leave 'pieces' out")
        if loss.meta["origin"].checkpoint != node.meta["origin"].checkpoint:
            return NoPieces("the linear layer and the loss are not in one checkpoint", "leave 'pieces' out")
        return self._check_readers(_Joined(loss, node, tuple(between), form))

    def _check_readers(self, found: _Joined) -> _Joined | NoPieces:
        """Return the reason why the logits are needed, if others read them."""
        (results,) = found.loss.graph.output_node().args
        assert isinstance(results, tuple), "the graph returns a flat tuple"
        # The first results are written into buffers.
        kept = results[: len(self.graph.exported.mutations)] if self.scalars_alone else results
        inside = {*found.between, found.loss}
        for node in (found.linear, *found.between):
            if node in kept:
                what = "the model returns its logits, which a loss in pieces does not compute"
                return NoPieces(what, 'outputs="loss" (--outputs loss), which drops them; or return the loss alone')
            for user in node.users:
                if user not in inside and user.op != "output":
                    what = f"'{user.name}' reads the logits too"
                    return NoPieces(what, "compute it without logits; or leave 'pieces' out")
        return found

    # -- the new graph

    def _join(self, found: _Joined) -> None:
        given, (rows, weight, bias) = arguments_of(found.loss), _operands(found.linear)
        shape = rows.meta["val"].shape
        if len(shape) != 2:
            rows = insert(found.linear, aten.reshape.default, rows, [shape[:-1].numel(), shape[-1]])
        options = {name: given[name] for name in ("reduction", "ignore_index", "label_smoothing")}
        options |= {"scale": found.form.scale, "softcap": found.form.softcap, "dtype": found.form.dtype}
        made = insert(
            found.loss, LINEAR_CROSS_ENTROPY, rows, weight, bias, given["target"], **options, pieces=self.pieces
        )
        replace_node(found.loss, made)
        dropped = {found.linear, *found.between}
        output = made.graph.output_node()
        (results,) = output.args
        assert isinstance(results, tuple), "the graph returns a flat tuple"
        output.args = (tuple(None if result in dropped else result for result in results),)


def _is_linear(node: Node) -> bool:
    """Return whether a node is a linear layer, or multiplies rows by a matrix."""
    if node.target in (aten.mm.default, aten.matmul.default):
        rows, matrix = node.args[:2]
        both = isinstance(rows, Node) and isinstance(matrix, Node)
        return both and len(rows.meta["val"].shape) > 1 and len(matrix.meta["val"].shape) == 2  # type: ignore[union-attr]
    return node.target is aten.linear.default


def _operands(linear: Node) -> tuple[Node, Node, Node | None]:
    """Return the rows, the weight with a row for each class, and the bias."""
    if linear.target is aten.linear.default:
        given = arguments_of(linear)
        return given["input"], given["weight"], given["bias"]
    rows, matrix = linear.args[:2]
    assert isinstance(rows, Node), linear
    assert isinstance(matrix, Node), linear
    source = matrix.args[0] if matrix.target in TRANSPOSES else None
    return rows, source if isinstance(source, Node) else insert(linear, aten.t.default, matrix), None


def _treats_rows_alike(node: Node) -> bool:
    """Return whether an op between the linear layer and the loss may be one of the fused op."""
    if node.target is aten.reshape.default:
        source = node.args[0]
        return isinstance(source, Node) and bool(source.meta["val"].shape[-1:] == node.meta["val"].shape[-1:])
    if node.target is aten._to_copy.default:
        return set(node.kwargs) <= {"dtype"} and node.meta["val"].dtype.is_floating_point
    return node.target in (aten.clone.default, aten.tanh.default) or _factor(node) is not None


def _factor(node: Node) -> float | None:
    """Return the number that an op multiplies with; None for other ops."""
    if node.target not in (aten.mul.Tensor, aten.div.Tensor) or len(node.args) != 2:
        return None
    number = node.args[1]
    if isinstance(number, bool) or not isinstance(number, int | float) or not number:
        return None
    return float(number) if node.target is aten.mul.Tensor else 1 / number


def _form_of(between: list[Node], product: torch.dtype) -> LogitsForm | None:
    """Return what ops do to the product: a factor, a soft cap, a cast to 32 bits or more; else None."""
    scale, capped, softcap, dtype = 1.0, False, 0.0, None
    for node in between:
        factor = _factor(node)
        if node.target in (aten.reshape.default, aten.clone.default):
            continue
        if dtype is not None or (softcap and node.target is not aten._to_copy.default):
            return None
        if node.target is aten._to_copy.default:
            dtype = node.meta["val"].dtype
            if dtype.itemsize < 4 and product is not dtype:
                return None
        elif node.target is aten.tanh.default:
            if capped:
                return None
            capped = True
        elif factor is not None and capped:
            softcap = factor
        elif factor is not None:
            scale *= factor
    if capped != bool(softcap):
        return None
    # The cap is `softcap * tanh(x * scale)`: of the factor before it the cap is a part.
    scale = scale * softcap if capped else scale
    return LogitsForm(1.0 if isclose(scale, 1.0, rel_tol=1e-12) else scale, softcap, dtype)
