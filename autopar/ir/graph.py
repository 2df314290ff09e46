"""Named graph, the result of `autopar.trace`: its data, cached analyses and renderings."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from math import prod
from typing import Any

from torch import nn
from torch.fx import Node

from autopar.errors import AutoparError
from autopar.ir.analysis.finite import passable_sums
from autopar.ir.analysis.float8_products import weights_in_float8
from autopar.ir.analysis.layer_stacks import Layer, LayerStack, layer_stacks
from autopar.ir.analysis.op_forms import op_forms
from autopar.ir.analysis.op_memory import Footprint, InternalSave, SavedTensors, footprints, saved_values
from autopar.ir.analysis.repeated_layers import RepeatedLayers
from autopar.ir.analysis.scalar_shares import collective_shares
from autopar.ir.exported import Exported
from autopar.ir.interpreter import TracedModule
from autopar.ir.values import Dim, NamedNode, NamedTensor, SequenceFold


@dataclass(frozen=True, eq=False)
class NamedGraph:
    """Forward graph of a model, with a rule for every op and a name for every dim.

        graph = autopar.trace(model, inputs)
        print(graph)                         # repeated layers once
        graph.dims["d_model"].size
        graph.module()(*inputs)              # runs the traced graph

    The analyses are cached: the graph never changes.
    """

    model: nn.Module = field(repr=False)
    exported: Exported = field(repr=False)
    tensors: Mapping[str, NamedTensor] = field(repr=False)
    nodes: tuple[NamedNode, ...] = field(repr=False)
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dims: Mapping[str, Dim]
    repeats: tuple[RepeatedLayers, ...]
    # Dim whose atoms are marked, because axes split it by unequal shares (autopar/sharding/shares.py); empty if none.
    by_share: str = ""
    # Names for dims that the user gave, by tensor: another trace of the model needs them.
    given: Mapping[str, str] = field(default_factory=dict, repr=False)
    # Order of the sequence between inputs and outputs (autopar/tracing/fold_sequence.py); None for the plain one.
    fold: SequenceFold | None = None
    # Pieces in which the last linear layer and the loss run (autopar/tracing/loss_in_pieces.py); None for whole logits.
    loss_pieces: int | None = None
    # Slots of an expert in each sample over the mean of its rows (autopar/tracing/group_capacity.py); None without.
    capacity: float | None = None

    def coverage(self) -> dict[str, int]:
        """Return the number of ops with a rule of the table, with a discovered rule, and without (replicated)."""
        counts = {"table": 0, "discovered": 0, "replicated": 0}
        for node in self.nodes:
            counts[node.source] += 1
        return counts

    @cached_property
    def results(self) -> tuple[str | None, ...]:
        """Return the tensors that the traced graph returns: first new values of buffers and inputs, then its outputs.

        None stands for what is no tensor, and for a tensor of a layer that a short graph leaves out.
        """
        flat: Any = self.exported.graph_module.graph.output_node().args[0]
        assert isinstance(flat, tuple), "the graph returns a flat tuple"
        by_node = {tensor.node: name for name, tensor in self.tensors.items()}
        return tuple(by_node.get(result.name) if isinstance(result, Node) else None for result in flat)

    @cached_property
    def parameters(self) -> tuple[NamedTensor, ...]:
        return tuple(tensor for tensor in self.tensors.values() if tensor.kind == "param")

    @cached_property
    def numel(self) -> int:
        """Return the number of elements of all parameters."""
        return sum(prod(one.shape) for one in self.parameters)

    @cached_property
    def trained_numel(self) -> int:
        """Return the number of elements of the parameters that are not frozen."""
        return sum(prod(one.shape) for one in self.parameters if not one.frozen)

    def module(self) -> TracedModule:
        """Return the graph as a module with the signature, parameters and results of the model."""
        sizes = ((one.numel(), one.untyped_storage().nbytes()) for one in self.model.parameters() if not one.is_meta)
        if any(numel and not size for numel, size in sizes):
            raise AutoparError(
                f"this graph of {type(self.model).__name__} has no weights: it is that of a copy in another dtype\n"
                "fix: trace the model in its own dtypes, without precision="
            )
        return TracedModule(self.model, self.exported)

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of ops, shapes, dtypes and rules in their order; a plan stores it."""
        text = sha256()
        for tensor in self.tensors.values():
            text.update(f"{tensor} {tensor.shape} {tensor.dtype} {tensor.requires_grad}\n".encode())
        for node in self.nodes:
            text.update(f"{node.name} {node.op} {node.operands} {node.rule}\n".encode())
        return text.hexdigest()[:16]

    @cached_property
    def saved(self) -> tuple[NamedTensor, ...]:
        """Return the values that autograd saves for the backward; a view counts as its base."""
        by_node = {tensor.node: tensor for tensor in self.tensors.values()}
        # A short graph has fewer values than the model that was run.
        return tuple(by_node[name] for name in self._saves.values if name in by_node)

    @property
    def saved_inside(self) -> tuple[InternalSave, ...]:
        """Return saved tensors that are no values of the graph, such as the logsumexp of attention."""
        return self._saves.internal

    @cached_property
    def _saves(self) -> SavedTensors:
        return saved_values(self.exported)

    @cached_property
    def footprints(self) -> Mapping[str, Footprint]:
        """Return the memory footprint of each op, by the name of its fx node; equal calls share one."""
        twins = {
            name: other
            for repeat in self.repeats
            for layer in repeat.layers[1:]
            for name, other in zip(layer, repeat.layers[0], strict=True)
        }
        return footprints(self.exported, twins)

    @cached_property
    def float8_weights(self) -> frozenset[str]:
        """Return the parameters that are weights of products that may be in float8 alone, and views of them."""
        return weights_in_float8(self.nodes, self.tensors, self.footprints)

    @cached_property
    def local_footprints(self) -> dict[Hashable, Footprint]:
        """Return the footprints of ops on shards that are known by now; `local_memory` adds them."""
        return {}

    def trains(self, node: NamedNode) -> bool:
        """Return whether a result of an op needs a gradient."""
        return any(name is not None and self.tensors[name].requires_grad for name in node.outputs)

    @cached_property
    def stacks(self) -> tuple[LayerStack, ...]:
        """Return the layers of the model, which may be recomputed, by stack."""
        return layer_stacks(self.model, self.nodes, self.repeats)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Return the layers of all stacks; calls of one module are layers of their own."""
        return tuple(layer for stack in self.stacks for layer in stack.layers)

    @cached_property
    def ops_of_layers(self) -> Mapping[str, tuple[str, ...]]:
        """Return the ops of each layer in order, by the path of its module; of all calls of one module together."""
        found: dict[str, tuple[str, ...]] = {}
        for layer in self.layers:
            found[layer.path] = (*found.get(layer.path, ()), *layer.ops)
        return found

    @cached_property
    def layer_of(self) -> Mapping[str, str]:
        """Return the path of the layer of each op that is in one."""
        return {op: layer.path for layer in self.layers for op in layer.ops}

    @cached_property
    def forms(self) -> Mapping[str, int]:
        """Return a number for each op, by name; ops that differ only in names have equal numbers."""
        return op_forms(self.nodes, self.tensors, self.passable_sums)

    @cached_property
    def passable_sums(self) -> Mapping[str, frozenset[frozenset[int]]]:
        """Return the groups of operands of each op that may be partial sums together."""
        return passable_sums(self.nodes, self.tensors, self.exported)

    @cached_property
    def shares(self) -> Mapping[str, float]:
        """Return the share of each scalar in the collective that adds up several of them at once."""
        return collective_shares(self.nodes, self.tensors)

    def __str__(self) -> str:
        return render_text(self)

    def to_json(self) -> dict[str, Any]:
        """Return the graph as plain data (`autopar trace --json`)."""
        return render_json(self)


# -- text -------------------------------------------------------------------------------------------------------------


def render_text(graph: NamedGraph) -> str:
    """Return the named graph as text, each repeated layer once."""
    hidden = _repeated_weights(graph)
    weights = [
        tensor
        for tensor in graph.tensors.values()
        if tensor.kind in ("param", "buffer", "constant") and tensor.name not in hidden
    ]
    inputs = [tensor for tensor in graph.tensors.values() if tensor.kind == "input"]
    blocks = [
        _header(graph),
        _dims(graph),
        _tensors("inputs", inputs),
        _tensors("parameters and buffers", weights),
        _attention(graph),
        _ops(graph),
    ]
    without = (f"  {node.name}: {node.source}. {node.reason}" for node in graph.nodes if node.source != "table")
    # Repeated layers have the same line many times.
    if lines := list(dict.fromkeys(without)):
        blocks.append("\n".join(["ops without a rule in the table", *lines]))
    return "\n\n".join(block for block in blocks if block)


def _header(graph: NamedGraph) -> str:
    rules = ", ".join(f"{count:,} {source}" for source, count in graph.coverage().items() if count)
    mode = "train" if graph.exported.training else "eval"
    lines = [
        f"{type(graph.model).__name__} ({mode} mode): {len(graph.nodes):,} ops, rules: {rules}",
        f"{len(graph.parameters):,} parameters, {count_text(graph.numel)} elements",
    ]
    if graph.trained_numel < graph.numel:
        lines[-1] += f", {count_text(graph.trained_numel)} of them trained"
    for repeat in graph.repeats:
        lines.append(f"{repeat.count} times the same {repeat.period} ops: {_span(repeat.module_paths)}")
    units = {path for repeat in graph.repeats for path in repeat.module_paths}
    for stack in graph.stacks:
        paths = [layer.path for layer in stack.layers]
        # Layers that are the units of a repeat have been told.
        if not units.issuperset(paths):
            lines.append(f"{len(paths)} layers: {_span(paths)}")
    return "\n".join(lines)


def count_text(number: int) -> str:
    """Return a number of elements on three digits: `8.03 B`."""
    for unit, scale in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return str(number)


def _span(paths: Iterable[str]) -> str:
    """Return the first and the last of several module paths."""
    named = [path for path in paths if path]
    return f"{named[0]} ... {named[-1]}" if len(named) > 1 else "".join(named)


def _dims(graph: NamedGraph) -> str:
    rows = []
    for dim in graph.dims.values():
        sizes = ", ".join(f"{size:,}" for size in dim.sizes)
        made_of = f"= ({' '.join(dim.parts)})" if dim.parts else ""
        given = "" if dim.source in ("structure", "generated") else f"from {dim.source}"
        rows.append((dim.name, sizes, " ".join(filter(None, (made_of, given)))))
    return "dims\n" + _table(rows)


def _tensors(heading: str, tensors: Iterable[NamedTensor]) -> str:
    rows = [(tensor.name, *_described(tensor)) for tensor in tensors]
    return f"{heading}\n{_table(rows)}" if rows else ""


def _described(tensor: NamedTensor) -> tuple[str, str]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return " ".join(tensor.dims) or "scalar", f"{dtype} [{', '.join(map(str, tensor.shape))}]"


def _repeated_weights(graph: NamedGraph) -> set[str]:
    """Return the parameters that only the second and later layers of a repeat use."""
    shown: set[str] = set()
    hidden: set[str] = set()
    later = _later_layers(graph)
    for node in graph.nodes:
        (hidden if node.node in later else shown).update(name for name in node.operands if name)
    return hidden - shown


def _later_layers(graph: NamedGraph) -> set[str]:
    """Return the fx nodes of the second and later layers of each repeat."""
    return {name for repeat in graph.repeats for layer in repeat.layers[1:] for name in layer}


def _attention(graph: NamedGraph) -> str:
    """Return the masks of fused attention, equal calls in one line."""
    places: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.attention is not None:
            places.setdefault(str(node.attention), []).append(node.origin.module_path)
    rows = [
        (text, f"{len(paths)} times" if len(paths) > 1 else "", _span(dict.fromkeys(paths)))
        for text, paths in places.items()
    ]
    return f"attention\n{_table(rows)}" if rows else ""


def _ops(graph: NamedGraph) -> str:
    later = _later_layers(graph)
    # Layers list fx nodes; those without a rule (`getitem`) are no ops of the named graph.
    own = {node.node for node in graph.nodes}
    layers = [(repeat, [name for name in repeat.layers[0] if name in own]) for repeat in graph.repeats]
    begins = {names[0]: repeat for repeat, names in layers}
    ends = {names[-1] for _, names in layers}
    lines = ["ops"]
    path: str | None = None
    for node in graph.nodes:
        if node.node in later:
            continue
        # A frame around the first layer of each repeat stands for all of them.
        if node.node in begins:
            repeat = begins[node.node]
            lines.append(f"  ---- {repeat.count} times: {_span(repeat.module_paths)} ----")
            path = None
        if node.origin.module_path != path:
            path = node.origin.module_path
            lines.append(f"  {path or '(model)'}")
        lines.append(_op(graph, node))
        if node.node in ends:
            lines.append("  ----")
            path = None
    return "\n".join(lines)


def _op(graph: NamedGraph, node: NamedNode) -> str:
    short = node.op.split(".")[1]
    outputs = [graph.tensors[name] for name in node.outputs if name is not None]
    first = outputs[0] if outputs else None
    dims, shape = _described(first) if first else ("", "")
    more = f" and {len(outputs) - 1} more" if len(outputs) > 1 else ""
    mark = "" if node.source == "table" else f"  [{node.source.upper()}]"
    # The other clauses of a rule serve the program only, and would make most lines too long.
    rule, *clauses = str(node.rule).split("; ")
    shown = [clause for clause in clauses if clause.split()[0] in ("mean", "max", "min", "halo")]
    return f"    {short:<30} {dims:<34} {shape + more:<34} {'; '.join([rule, *shown])}{mark}"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


# -- JSON -------------------------------------------------------------------------------------------------------------


def render_json(graph: NamedGraph) -> dict[str, Any]:
    """Return the named graph as plain data; docs/tracing.md documents the format."""
    names = {node.node: node.name for node in graph.nodes}
    return {
        "model": type(graph.model).__name__,
        "training": graph.exported.training,
        "coverage": graph.coverage(),
        "dims": [
            {"name": d.name, "sizes": list(d.sizes), "parts": list(d.parts), "source": d.source, "tensors": d.tensors}
            for d in graph.dims.values()
        ],
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "tensors": [
            {
                "name": t.name,
                "kind": t.kind,
                "dims": list(t.dims),
                "shape": list(t.shape),
                "dtype": str(t.dtype).removeprefix("torch."),
            }
            for t in graph.tensors.values()
        ],
        "ops": [
            {
                "name": n.name,
                "op": n.op,
                "operands": list(n.operands),
                "outputs": list(n.outputs),
                "rule": str(n.rule),
                "source": n.source,
                "factors": {name: {"dim": n.factors.get(name), "size": size} for name, size in n.sizes.items()},
                "module": n.origin.module_path,
                "line": n.origin.source,
                "code": n.origin.source_code,
                "attention": n.attention
                and {
                    "mask": n.attention.mask,
                    "heads": n.attention.heads,
                    "band": n.attention.band and [n.attention.band.left, n.attention.band.right],
                    "document_share": n.attention.document_share,
                },
            }
            for n in graph.nodes
        ],
        "repeats": [
            {
                "count": r.count,
                "period": r.period,
                "modules": list(r.module_paths),
                "layers": [[names[name] for name in layer if name in names] for layer in r.layers],
            }
            for r in graph.repeats
        ],
        "layers": {path: list(ops) for path, ops in graph.ops_of_layers.items()},
    }
