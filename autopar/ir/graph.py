"""The named graph: what `autopar.trace` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from autopar.ir.analysis.equal_ops import forms
from autopar.ir.analysis.finite import passable_sums
from autopar.ir.analysis.joint_scalars import shares_of_totals
from autopar.ir.analysis.op_memory import Footprint, footprints
from autopar.ir.analysis.repeated_layers import Repeat
from autopar.ir.analysis.saved_tensors import InternalSave, Saved, saved_values
from autopar.ir.exported import Exported, NodeOrigin
from autopar.ir.interpreter import TracedModule
from autopar.ir.render import render_json, render_text
from autopar.rules.notation import Rule
from autopar.tracing.naming.bind_graph import Source
from autopar.tracing.passes.read_masks import AttentionNote

__all__ = ["Atom", "Dim", "Kind", "NamedGraph", "NamedNode", "NamedTensor"]

Kind = Literal["input", "param", "buffer", "constant", "activation"]


@dataclass(frozen=True)
class Dim:
    """A named dimension: one role in the model; its extent may differ from place to place (feature maps)."""

    name: str
    sizes: tuple[int, ...]
    parts: tuple[str, ...]
    """The dims this one is made of, major first, where a view takes it apart."""
    source: str
    """`structure`, `generated`, or the place where the user gave the name."""
    tensors: int
    """How many tensors carry it."""

    @property
    def size(self) -> int:
        """The extent; the largest where it differs from place to place."""
        return max(self.sizes)


class Atom(NamedTuple):
    """A smallest piece of a physical dim: `(heads head_dim)` has two, and `heads` may be `(kv_heads group)` itself.

    A tuple, because much is looked up by it.
    """

    dim: int
    size: int
    names: tuple[str, ...]
    """What it is called, from the outermost named dim inwards: `("heads", "kv_heads")`; nothing where it is a `1`."""


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of the graph. `dims` has one entry per physical dim: a name, `(heads head_dim)`, or `1`."""

    name: str
    kind: Kind
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    node: str
    """The fx node that holds it."""
    atoms: tuple[Atom, ...] = ()
    requires_grad: bool = False

    def __str__(self) -> str:
        return f"{self.name}[{' '.join(self.dims)}]"


@dataclass(frozen=True)
class NamedNode:
    """An op of the graph: its rule, and the dim each factor of the rule is tied to."""

    name: str
    op: str
    operands: tuple[str | None, ...]
    outputs: tuple[str | None, ...]
    rule: Rule
    source: Source
    reason: str
    factors: Mapping[str, str]
    sizes: Mapping[str, int]
    atoms: Mapping[str, tuple[int, ...]]
    """The extents of the atoms of each factor, major first."""
    origin: NodeOrigin
    node: str
    attention: AttentionNote | None = None
    """What is known of the mask and the heads, where the op is fused attention."""


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
    repeats: tuple[Repeat, ...]

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
    def _saves(self) -> Saved:
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
