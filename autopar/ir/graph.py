"""The named graph: what `autopar.trace` returns."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from math import prod
from types import MappingProxyType
from typing import Any

from torch import nn

from autopar.ir.analysis.finite import passable_sums
from autopar.ir.analysis.op_memory import Footprint, footprints
from autopar.ir.analysis.repeated_layers import RepeatedLayers
from autopar.ir.analysis.saved_tensors import InternalSave, SavedTensors, saved_values
from autopar.ir.exported import Exported
from autopar.ir.interpreter import TracedModule
from autopar.ir.values import AttentionNote, Dim, NamedNode, NamedTensor


@dataclass(frozen=True, eq=False)
class NamedGraph:
    """A model's forward graph, with a rule for every op and a name for every dim."""

    model: nn.Module = field(repr=False)
    exported: Exported = field(repr=False)
    tensors: Mapping[str, NamedTensor] = field(repr=False)
    nodes: tuple[NamedNode, ...] = field(repr=False)
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dims: Mapping[str, Dim]
    repeats: tuple[RepeatedLayers, ...]

    def coverage(self) -> dict[str, int]:
        """How many ops have a rule of the table, a discovered one, or none (and run replicated)."""
        counts = {"table": 0, "discovered": 0, "replicated": 0}
        for node in self.nodes:
            counts[node.source] += 1
        return counts

    @property
    def parameters(self) -> tuple[NamedTensor, ...]:
        return tuple(tensor for tensor in self.tensors.values() if tensor.kind == "param")

    def module(self) -> TracedModule:
        """The graph as a module: same signature, parameters and results as the model."""
        return TracedModule(self.model, self.exported)

    @cached_property
    def fingerprint(self) -> str:
        """The same for equal graphs: ops, shapes, dtypes and rules in their order."""
        text = sha256()
        for tensor in self.tensors.values():
            text.update(f"{tensor} {tensor.shape} {tensor.dtype} {tensor.requires_grad}\n".encode())
        for node in self.nodes:
            text.update(f"{node.name} {node.op} {node.operands} {node.rule}\n".encode())
        return text.hexdigest()[:16]

    @cached_property
    def saved(self) -> tuple[NamedTensor, ...]:
        """The values that autograd keeps for the backward, exactly; a view counts as what it is a view of."""
        by_node = {tensor.node: tensor for tensor in self.tensors.values()}
        return tuple(by_node[name] for name in self._saves.values)

    @property
    def saved_inside(self) -> tuple[InternalSave, ...]:
        """What ops keep for the backward beside the values of the graph (attention's logsumexp ...)."""
        return self._saves.internal

    @cached_property
    def _saves(self) -> SavedTensors:
        return saved_values(self.exported)

    @cached_property
    def footprints(self) -> Mapping[str, Footprint]:
        """What each op does to memory, by the name of its fx node; equal calls have one footprint."""
        return footprints(self.exported)

    @cached_property
    def forms(self) -> Mapping[str, int]:
        """By the name of each op a number, the same for ops that are equal but for names."""
        return forms(self.nodes, self.tensors, self.passable_sums)

    @cached_property
    def passable_sums(self) -> Mapping[str, frozenset[frozenset[int]]]:
        """For each op the groups of operands in which it is linear and through which a sum may be held back."""
        return passable_sums(self)

    @cached_property
    def shares(self) -> Mapping[str, float]:
        """By scalar, where several are summed over ranks at once: what it counts of their collective."""
        return shares_of_totals(self.nodes, self.tensors)

    def __str__(self) -> str:
        return render_text(self)

    def to_json(self) -> dict[str, Any]:
        """The graph as plain data (`autopar trace --json`)."""
        return render_json(self)


def render_text(graph: NamedGraph) -> str:
    """The named graph, each repeated layer once."""
    blocks = [
        _header(graph),
        _dims(graph),
        _values(graph, "input"),
        _weights(graph),
        _attention(graph),
        _ops(graph),
        _unknown(graph),
    ]
    return "\n\n".join(block for block in blocks if block)


def _header(graph: NamedGraph) -> str:
    exported = graph.exported
    coverage = graph.coverage()
    rules = ", ".join(f"{count:,} {source}" for source, count in coverage.items() if count)
    mode = "train" if exported.training else "eval"
    lines = [
        f"{type(graph.model).__name__} ({mode} mode): {len(graph.nodes):,} ops, rules: {rules}",
        f"{len(graph.parameters):,} parameters, {_count(_parameter_count(graph))} elements",
    ]
    for repeat in graph.repeats:
        lines.append(f"{repeat.count} times the same {repeat.period} ops: {_span(repeat.module_paths)}")
    return "\n".join(lines)


def _parameter_count(graph: NamedGraph) -> int:
    total = 0
    for tensor in graph.parameters:
        extent = 1
        for size in tensor.shape:
            extent *= size
        total += extent
    return total


def _count(number: int) -> str:
    for unit, scale in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return str(number)


def _span(paths: tuple[str, ...]) -> str:
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


def _values(graph: NamedGraph, kind: str) -> str:
    rows = [(tensor.name, *_described(tensor)) for tensor in graph.tensors.values() if tensor.kind == kind]
    return f"{kind}s\n{_table(rows)}" if rows else ""


def _described(tensor: NamedTensor) -> tuple[str, str]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return " ".join(tensor.dims) or "scalar", f"{dtype} [{', '.join(map(str, tensor.shape))}]"


def _weights(graph: NamedGraph) -> str:
    """Parameters and buffers; those of repeated layers once."""
    hidden = _repeated_weights(graph)
    rows = [
        (tensor.name, *_described(tensor))
        for tensor in graph.tensors.values()
        if tensor.kind in ("param", "buffer", "constant") and tensor.name not in hidden
    ]
    return f"parameters and buffers\n{_table(rows)}" if rows else ""


def _repeated_weights(graph: NamedGraph) -> set[str]:
    """Parameters that only the second and later layers of a repeat use."""
    shown: set[str] = set()
    hidden: set[str] = set()
    later = _later_layers(graph)
    for node in graph.nodes:
        (hidden if node.node in later else shown).update(name for name in node.operands if name)
    return hidden - shown


def _later_layers(graph: NamedGraph) -> set[str]:
    """The ops of the second and later layers of each repeat."""
    return {name for repeat in graph.repeats for layer in repeat.layers[1:] for name in layer}


def _attention(graph: NamedGraph) -> str:
    """What is known of the masks of fused attention: equal calls in one line."""
    places: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.attention is not None:
            places.setdefault(str(node.attention), []).append(node.origin.module_path)
    rows = [(text, f"{len(paths)} times" if len(paths) > 1 else "", _ends(paths)) for text, paths in places.items()]
    return f"attention\n{_table(rows)}" if rows else ""


def _ends(paths: list[str]) -> str:
    """The first and the last place of several."""
    return _span(tuple(dict.fromkeys(paths)))


def _ops(graph: NamedGraph) -> str:
    later = _later_layers(graph)
    own = {node.node for node in graph.nodes}
    layers = [(repeat, [name for name in repeat.layers[0] if name in own]) for repeat in graph.repeats]
    begins = {names[0]: repeat for repeat, names in layers}
    ends = {names[-1] for _, names in layers}
    lines = ["ops"]
    path: str | None = None
    for node in graph.nodes:
        if node.node in later:
            continue
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
    return f"    {short:<30} {dims:<34} {shape + more:<34} {_dims_of_rule(node)}{mark}"


def _dims_of_rule(node: NamedNode) -> str:
    """The rule without the clauses that only a program needs."""
    dims, *clauses = str(node.rule).split("; ")
    return "; ".join([dims, *(clause for clause in clauses if clause.split()[0] in ("mean", "max", "min", "halo"))])


def _unknown(graph: NamedGraph) -> str:
    lines = []
    for node in graph.nodes:
        if node.source != "table":
            lines.append(f"  {node.name}: {node.source}. {node.reason}")
    return "\n".join(["ops without a rule in the table", *dict.fromkeys(lines)]) if lines else ""


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def render_json(graph: NamedGraph) -> dict[str, Any]:
    """The named graph as plain data; the format is documented in docs/tracing.md."""
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
                "attention": None if n.attention is None else _attention_data(n.attention),
            }
            for n in graph.nodes
        ],
        "repeats": [
            {"count": r.count, "period": r.period, "modules": list(r.module_paths), "layers": _layer_names(graph, r)}
            for r in graph.repeats
        ],
    }


def _attention_data(note: AttentionNote) -> dict[str, Any]:
    band = None if note.band is None else [note.band.left, note.band.right]
    return {"mask": note.mask, "heads": note.heads, "band": band}


def _layer_names(graph: NamedGraph, repeat: RepeatedLayers) -> list[list[str]]:
    """The names of the ops of each layer, equal steps at equal places."""
    names = {node.node: node.name for node in graph.nodes}
    return [[names[name] for name in layer if name in names] for layer in repeat.layers]


# -- joint scalars -----------------------------------------------------------------------------------------------------


def shares_of_totals(nodes: Sequence[NamedNode], tensors: Mapping[str, NamedTensor]) -> Mapping[str, float]:
    """By scalar, where several are summed at once: what it counts of their collective."""
    first_use: dict[str, int] = {}
    for place, node in enumerate(nodes):
        for name in node.operands:
            first_use.setdefault(name or "", place)
    groups: list[list[str]] = []
    until = -1
    for place, node in enumerate(nodes):
        for name in _scalars(node, tensors):
            used = first_use.get(name, len(nodes))
            if until < place:
                groups.append([])
                until = used
            groups[-1].append(name)
            until = min(until, used)
    return MappingProxyType({name: 1 / len(group) for group in groups if len(group) > 1 for name in group})


def _scalars(node: NamedNode, tensors: Mapping[str, NamedTensor]) -> list[str]:
    """The results of an op that sums all that it reads: partial as soon as any of it is split."""
    read = any(operand is not None and operand.factors for operand in node.rule.operands)
    names = [name for name in node.outputs if name is not None]
    return [name for name in names if read and prod(tensors[name].shape) == 1]


# -- equal ops ---------------------------------------------------------------------------------------------------------


def forms(
    nodes: Iterable[NamedNode], tensors: Mapping[str, NamedTensor], passable: Mapping[str, Hashable]
) -> Mapping[str, int]:
    """For each op a number: the same for equal ops with equal rules, on tensors that are cut alike.

    Ops that differ in plain arguments (a number, a dim) have one number where their rules and sizes are the same, and
    the sums that may pass through them (`passable`).
    """
    known: dict[Hashable, int] = {}
    cuts = {name: _cut(tensor) for name, tensor in tensors.items()}

    def form(node: NamedNode) -> Hashable:
        operands = tuple(None if name is None else (node.operands.index(name), cuts[name]) for name in node.operands)
        outputs = tuple(None if name is None else cuts[name] for name in node.outputs)
        sizes = tuple(node.sizes.items()), tuple(node.atoms.items())
        band = node.attention and node.attention.band
        return node.op, node.source, node.rule, sizes, operands, outputs, band, passable[node.name]

    return {node.name: known.setdefault(form(node), len(known)) for node in nodes}


def _cut(tensor: NamedTensor) -> Hashable:
    """What of a tensor matters to the ops that take or give it: all but its name and those of its dims."""
    atoms = tuple((atom.dim, atom.size) for atom in tensor.atoms)
    return tensor.kind == "param", tensor.dtype, tensor.requires_grad, tensor.shape, atoms
