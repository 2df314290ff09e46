"""Fold the sequence of a traced model, so that a split of causal attention gives each shard as much work.

In causal attention later rows see more keys: of four contiguous shards the last one has 1.75 times the mean. The fold
cuts the sequence in pieces and reverses every odd one; a shard then has a part of each piece. All values between inputs
and outputs are held in this order. Most ops do not depend on the order of a sequence, and run as they are. Ops that do
(`cumsum`, a shift of labels) run on the plain order: `fold` and `unfold` stand where the order changes. Inputs and
outputs have the plain order, so neither a data loader nor a reader of results sees the fold.

Input::

    y = scaled_dot_product_attention(q, k, v, is_causal=True)
    loss = cross_entropy(linear(y), pad(labels))
Output::

    y = folded_attention(q, k, v, pieces=2)
    loss = cross_entropy(linear(y), fold(pad(labels)))
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass, field, replace
from itertools import chain, count, zip_longest
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.errors import AutoparError
from autopar.ir.analysis.contractions import ATTENTION
from autopar.ir.exported import NodeOrigin
from autopar.ir.fx_graphs import remove_dead
from autopar.ir.graph import NamedGraph
from autopar.ir.values import FOLD_PIECES, Atom, NamedNode, NamedTensor, SequenceFold
from autopar.rules.notation import FactorKind, Operand
from autopar.rules.ops.documents import DOCUMENT_ATTENTION
from autopar.rules.ops.folded import FOLD, FOLDED_ATTENTION, UNFOLD
from autopar.tracing.foldable_attention import folded_attention_of
from autopar.tracing.name_again import name_again
from autopar.tracing.passes.edit import arguments_of
from autopar.tracing.passes.read_masks import ATTENTION_NOTE

__all__ = ["CannotFold", "fold_sequence", "unfolded_activations"]

RESHAPE = torch.ops.aten.reshape.default

# Place of an op between an input and the results of a model.
OUTSIDE = NodeOrigin("", 0, "", "", None)

# Ops whose whole factor may have any order: what they compute of it is a sum or a maximum.
_ORDER_FREE = ("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "amax", "amin")


class CannotFold(AutoparError):
    """A sequence that cannot be folded; `fix` says what the user can do."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}\nfix: {fix}")
        self.what, self.fix = what, fix


def fold_sequence(graph: NamedGraph, wanted: SequenceFold, scalars_alone: bool) -> NamedGraph:
    """Return the graph with a dim folded; the graph itself if it is folded so already. Raises CannotFold.

    `scalars_alone`: other results, which would be brought back to the plain order, are dropped.
    """
    if graph.fold is not None:
        if graph.fold != wanted:
            raise CannotFold(f"the graph is folded already: {graph.fold}", "fold the graph of the trace")
        return graph
    known: dict[tuple[SequenceFold, bool], NamedGraph | CannotFold] = graph.__dict__.setdefault("_folded", {})
    key = wanted, scalars_alone
    if key not in known:
        try:
            known[key] = _Folding(graph, wanted, scalars_alone).run()
        except CannotFold as error:
            known[key] = error
    found = known[key]
    if isinstance(found, CannotFold):
        raise found
    return found


def unfolded_activations(graph: NamedGraph) -> tuple[str, ...]:
    """Return the values with a gradient that a folded graph brings back to the plain order for one of its ops."""
    returned = set(graph.outputs)
    readers: dict[str | None, list[NamedNode]] = defaultdict(list)
    for node in graph.nodes:
        for name in node.operands:
            readers[name].append(node)

    def is_read(name: str | None) -> bool:
        # A view that is returned is no op on the values.
        return any(node.op != str(RESHAPE) or not returned.issuperset(node.outputs) for node in readers[name])

    unfolds = (node for node in graph.nodes if node.op == str(UNFOLD) and is_read(node.outputs[0]))
    return tuple(name for node in unfolds if (name := node.operands[0]) and graph.tensors[name].requires_grad)


def _opened(tensor: NamedTensor, places: Container[int]) -> NamedTensor:
    """Return the form of a tensor in which each atom of some dims is a dim of its own."""
    atoms: list[Atom] = []
    groups = [[atom for atom in tensor.atoms if atom.dim == dim] for dim in range(len(tensor.shape))]
    count = 0
    for dim, group in enumerate(groups):
        for number, atom in enumerate(group):
            count += number > 0 and dim in places
            atoms.append(atom._replace(dim=count))
        count += 1
    shape = tuple(prod(atom.size for atom in atoms if atom.dim == dim) for dim in range(count))
    return replace(tensor, atoms=tuple(atoms), shape=shape)


# -- the pass ----------------------------------------------------------------------------------------------------------


@dataclass
class _Value:
    """The nodes of a value in the plain and in the folded order; one of them at first."""

    plain: Node | None = None
    folded: Node | None = None


@dataclass
class _Folding:
    graph: NamedGraph
    wanted: SequenceFold
    scalars_alone: bool
    made: Graph = field(default_factory=Graph)
    values: dict[Node, _Value] = field(default_factory=dict)
    # Nodes of the plain graph that run in the plain order, on values that were folded.
    late: set[Node] = field(default_factory=set)
    # By node of the new graph: the tensor of the plain one, and whether it has the folded order.
    made_from: dict[str, tuple[NamedTensor, bool]] = field(default_factory=dict)

    def run(self) -> NamedGraph:
        graph, (dim, pieces) = self.graph, (self.wanted.dim, self.wanted.pieces)
        self.tensors = {tensor.node: tensor for tensor in graph.tensors.values()}
        self.ops = {node.node: node for node in graph.nodes}
        self.attention = {
            node.node: found[1]
            for node in graph.nodes
            if (found := folded_attention_of(graph, node)) is not None and found[0] == dim
        }
        if not self.attention:
            what = f"no causal attention has rows of '{dim}'"
            raise CannotFold(what, "fold the dim of the queries and keys of causal attention; or leave 'fold' out")
        first = self.ops[next(iter(self.attention))]
        self.extent = graph.tensors[first.operands[0] or ""].shape[-2]
        if pieces < 2 or pieces % 2:
            raise CannotFold(f"'{dim}' in {pieces} pieces: expected an even number from 2 up", "write 'fold seq 2'")
        if self.extent % pieces or self.extent < 2 * pieces:
            what = f"{dim} = {self.extent} cannot be folded in {pieces} pieces of equal length from 2 up"
            raise CannotFold(what, f"pad it to a multiple of {pieces}; or write 'fold {dim} none'")
        outer = {name for tensor in graph.tensors.values() for atom in tensor.atoms for name in atom.names[:-1]}
        if any(map(self._is_named, outer)):
            what = f"the model divides '{dim}' into parts, so its order matters to views"
            raise CannotFold(what, f"write 'fold {dim} none', or leave 'fold' out")
        self.source = graph.exported.graph_module.graph
        self.is_plain = self._runs_plain()
        for node in self.source.nodes:
            self._copy(node)
        remove_dead(self.made)
        return name_again(graph, self.made, self.made_from, self.pieces_name, fold=self.wanted)

    # -- the order in which each op runs

    def _runs_plain(self) -> dict[Node, bool]:
        """Return whether each op with the dim needs the plain order."""
        plain: dict[Node, bool] = {}
        # Tables of positions are longer than the sequence, and cut before they are folded.
        stored = {name for name, tensor in self.graph.tensors.items() if tensor.kind not in ("activation", "input")}
        for node in self.source.nodes:
            if node.name in self.ops:
                named = self.ops[node.name]
                operands = [name for name in named.operands if name is not None]
                from_stored = bool(operands) and stored.issuperset(operands) and not named.rule.random
                stored.update(name for name in named.outputs if from_stored and name is not None)
                plain[node] = from_stored or not self._commutes(named)
        # A chain of ops without a gradient that ends in one that needs the plain order has it from its inputs on: so
        # labels are shifted, then folded.
        for node in reversed(self.source.nodes):
            if node not in plain or plain[node] or not self._without_gradient(self.ops[node.name]):
                continue
            plain[node] = any(plain.get(user, False) and self._has_dim(node) for user in node.users)
        return plain

    def _without_gradient(self, node: NamedNode) -> bool:
        names = (*node.operands, *node.outputs)
        return not any(name is not None and self.graph.tensors[name].requires_grad for name in names)

    def _has_dim(self, node: Node) -> bool:
        tensor = self.tensors.get(node.name)
        return tensor is not None and bool(self._places(tensor))

    def _places(self, tensor: NamedTensor) -> tuple[int, ...]:
        """Return the physical dims of a tensor with the folded dim in them."""
        return tuple(atom.dim for atom in tensor.atoms if self._is_folded(atom.names[-1:], atom.size))

    def _is_folded(self, names: tuple[str, ...], size: int) -> bool:
        return bool(names) and self._is_named(names[0]) and size == self.extent

    def _is_named(self, name: str) -> bool:
        # A second dim of one tensor has a suffix: the keys of scores are `seq.1`.
        return name.partition(".")[0] == self.wanted.dim

    def _commutes(self, node: NamedNode) -> bool:
        """Return whether an op does the same in the folded order."""
        factors = self._factors(node)
        if factors is None:
            return False
        if not factors or node.node in self.attention:
            return True
        rule = node.rule
        if rule.random:
            what = f"{node.name} draws random numbers along '{self.wanted.dim}', by its plain order"
            raise CannotFold(what, f"disable dropout, or write 'fold {self.wanted.dim} none'")
        if node.source != "table" or "diagonal" in rule.localise:
            return False
        order_free = node.op.split(".")[1] in _ORDER_FREE or (node.op == ATTENTION and not self._is_causal(node))
        looked_up = {factor for _, factor in rule.indices}
        for factor in factors:
            kind = rule.kinds[factor]
            is_whole = kind is FactorKind.WHOLE
            if factor in looked_up or rule.lowering(factor) is not None or kind is FactorKind.HALO:
                return False
            if is_whole and not order_free:
                return False
        return True

    def _is_causal(self, node: NamedNode) -> bool:
        target = next(one for one in self.source.nodes if one.name == node.node)
        return bool(arguments_of(target)["is_causal"])

    def _factors(self, node: NamedNode) -> set[str] | None:
        """Return the factors of an op that are the dim, or have it inside; None if an operand has it elsewhere."""
        found: set[str] = set()
        # A call may pass tensors that the rule does not name.
        ends = (
            *zip_longest(node.rule.operands, node.operands),
            *zip(node.rule.outputs, node.outputs, strict=True),
        )
        for operand, name in ends:
            tensor = None if name is None else self.graph.tensors[name]
            if tensor is None or not self._places(tensor):
                continue
            own = None if operand is None else self._own_factors(operand, tensor, node)
            if own is None:
                return None
            found |= own
        return found

    def _own_factors(self, operand: Operand, tensor: NamedTensor, node: NamedNode) -> set[str] | None:
        found = set()
        for place in self._places(tensor):
            term = operand.terms[place]
            sizes = [(factor, size) for factor in term for size in node.atoms.get(factor, ())]
            own = [atom for atom in tensor.atoms if atom.dim == place]
            long = [(factor, size) for factor, size in sizes if size != 1]
            if [size for _, size in long] != [atom.size for atom in own if atom.size != 1]:
                return None  # the op divides the dim
            pairs = zip(long, (atom for atom in own if atom.size != 1), strict=True)
            found |= {factor for (factor, _), atom in pairs if self._is_folded(atom.names[-1:], atom.size)}
        return found

    # -- the new graph

    def _copy(self, node: Node) -> None:
        if node.op == "output":
            (results,) = node.args
            assert isinstance(results, tuple), "the graph returns a flat tuple"
            kept = self._kept(results)
            self.made.output(tuple(self._in_order(one, False, node) if isinstance(one, Node) else one for one in kept))
            return
        plain = self.is_plain.get(node, False) or self._follows(node) if node.op == "call_function" else True
        wants = (lambda one: self._in_order(one, not plain, node)) if node.name in self.ops else self._as_is
        if node.name in self.attention and not plain:
            made = self._attention(node, wants)
        else:
            made = self.made.node_copy(node, wants)
        if plain and any(map(self._was_folded, node.all_input_nodes)):
            self.late.add(node)
        if node.op == "placeholder":
            self.values[node] = _Value(plain=made)
        elif node.name in self.ops and not plain:
            self.values[node] = _Value(folded=made)
        elif node.name in self.ops:
            self.values[node] = _Value(plain=made)
        else:  # an item of a result
            source = self.values[node.all_input_nodes[0]]
            self.values[node] = _Value(plain=made) if source.plain is not None else _Value(folded=made)
        if node.name in self.tensors:
            self.made_from[made.name] = self.tensors[node.name], self.values[node].folded is not None

    def _kept(self, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the results with None for each that is dropped."""
        # The first results are written into buffers. A model without scalars is an error of the plan.
        mutated = len(self.graph.exported.mutations)
        is_scalar = [isinstance(one, Node) and not one.meta["val"].shape for one in results]
        if not self.scalars_alone or not any(is_scalar[mutated:]):
            return results
        return tuple(one if i < mutated or is_scalar[i] else None for i, one in enumerate(results))

    def _was_folded(self, node: Node) -> bool:
        is_trained = self._has_dim(node) and self.tensors[node.name].requires_grad
        return is_trained and (node in self.late or self.values[node].folded is not None)

    def _follows(self, node: Node) -> bool:
        """Return whether an op runs in the plain order because all its operands were brought back to it."""
        if node.name in self.attention:
            return False
        read = [one for one in node.all_input_nodes if self._has_dim(one)]
        return bool(read) and all(one in self.late and self.values[one].folded is None for one in read)

    def _as_is(self, node: Node) -> Node:
        value = self.values[node]
        found = value.plain if value.plain is not None else value.folded
        assert found is not None, node
        return found

    def _in_order(self, node: Node, folded: bool, user: Node) -> Node:
        """Return a value in one of the two orders, changed right after it was made."""
        value = self.values[node]
        have = value.folded if folded else value.plain
        if have is not None:
            return have
        other = self._as_is(node)
        tensor = self.tensors.get(node.name)
        made = other if tensor is None else self._reordered(other, tensor, folded, user)
        if folded:
            value.folded = made
        else:
            value.plain = made
        return made

    def _reordered(self, have: Node, tensor: NamedTensor, folded: bool, user: Node) -> Node:
        after = have
        # All placeholders stand first.
        while after.op == "placeholder" and after.next.op == "placeholder":
            after = after.next
        origin = have.meta.get("origin") or user.meta.get("origin") or OUTSIDE
        # A placeholder stands outside of the region of its first reader.
        origin = origin if "origin" in have.meta else replace(origin, checkpoint=None)

        def call(target: Any, given: Node, argument: Any, val: Any, form: NamedTensor, order: bool) -> Node:
            nonlocal after
            with self.made.inserting_after(after):
                after = self.made.call_function(target, (given, *argument))
            after.meta.update({"origin": origin, "val": val})
            self.made_from[after.name] = form, order
            return after

        # A dim that is merged with others, such as (batch seq), is opened for it.
        opened, shape = _opened(tensor, self._places(tensor)), have.meta["val"].shape
        apart = len(opened.shape) > len(shape)
        if apart:
            view = have.meta["val"].reshape(opened.shape)
            have = call(RESHAPE, have, (list(opened.shape),), view, opened, not folded)
        for place in self._places(opened):
            target = FOLD if folded else UNFOLD
            have = call(target, have, (place, self.wanted.pieces), have.meta["val"], opened, folded)
        if apart:
            view = have.meta["val"].reshape(shape)
            have = call(RESHAPE, have, (list(shape),), view, tensor, folded)
        return have

    def _attention(self, node: Node, wants: Any) -> Node:
        given = arguments_of(node)
        operands = [wants(given[name]) for name in ("query", "key", "value")]
        options = {name: given[name] for name in ("scale", "enable_gqa")} | {"pieces": self.wanted.pieces}
        if node.target is DOCUMENT_ATTENTION:
            # The table has the plain order.
            operands += [self._in_order(given["table"], False, node), given["kinds"]]
            options |= {name: given[name] for name in ("causal", "window")}
            made = self.made.call_function(DOCUMENT_ATTENTION, tuple(operands), options)
        else:
            options["window"] = self.attention[node.name]
            made = self.made.call_function(FOLDED_ATTENTION, tuple(operands), options)
        made.meta.update(node.meta)
        note = node.meta[ATTENTION_NOTE]
        made.meta[ATTENTION_NOTE] = replace(note, mask=f"{note.mask}, folded in {self.wanted.pieces}")
        return made

    # -- its names

    @property
    def pieces_name(self) -> str:
        """The name of the dim of the pieces."""
        return next(
            name
            for name in chain([FOLD_PIECES], (f"{FOLD_PIECES}_{i}" for i in count()))
            if name not in self.graph.dims
        )
