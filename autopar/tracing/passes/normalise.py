"""Run the graph passes of a trace, in an order in which each sees the forms that it matches.

Two passes stand outside of this table. `no_grad_regions` runs on the graph that torch.export captures first, since
decomposing drops its switches. `drop_checks` runs before `check_static`, so that a number that only a check uses is no
error. Dead nodes go last, once for all passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor
from torch.fx import Graph, Node

from autopar.ir.fx_graphs import remove_dead
from autopar.tracing.passes.bags_to_rows import bags_to_rows
from autopar.tracing.passes.canonical_ops import canonical_ops
from autopar.tracing.passes.mean_loss_to_sum import mean_loss_to_sum
from autopar.tracing.passes.paired_index import paired_index
from autopar.tracing.passes.read_annotations import read_annotations
from autopar.tracing.passes.read_documents import read_documents
from autopar.tracing.passes.read_masks import read_masks
from autopar.tracing.passes.repeated_heads import repeated_heads
from autopar.tracing.passes.route_rows import route_rows
from autopar.tracing.passes.undo_sort import undo_sort
from autopar.tracing.passes.whole_loss import whole_loss


@dataclass(frozen=True)
class ExportFacts:
    """Facts about an exported graph that its nodes do not show."""

    # The one device of the model; None for several.
    device: torch.device | None
    # Constants, with data that cannot change.
    constants: Mapping[Node, Tensor] = field(default_factory=lambda: MappingProxyType({}))
    # The user's name of each other placeholder, for messages.
    sources: Mapping[Node, str] = field(default_factory=lambda: MappingProxyType({}))
    # Example inputs that have data.
    examples: Mapping[Node, Tensor] = field(default_factory=lambda: MappingProxyType({}))


PASSES: dict[str, Callable[[Graph, ExportFacts], None]] = {
    # First: all later passes match `reshape`, `zeros` and `_to_copy`, not their variants.
    "canonical_ops": lambda graph, facts: canonical_ops(graph, facts.device),
    # After canonical_ops: an annotated `copy` or `alias` is replaced first, so the text lands on a node that stays.
    # Before all others: an annotation op between two matched ops would hide the pattern.
    "read_annotations": lambda graph, _: read_annotations(graph),
    # Before mean_loss_to_sum, which counts the targets that are not ignored.
    "whole_loss": lambda graph, _: whole_loss(graph),
    # Anywhere after it: no other pass matches losses.
    "mean_loss_to_sum": lambda graph, _: mean_loss_to_sum(graph),
    # Before undo_sort, which follows rows through ops whose rules keep them apart: `embedding` does, `embedding_bag`
    # does not.
    "bags_to_rows": lambda graph, _: bags_to_rows(graph),
    "undo_sort": lambda graph, _: undo_sort(graph),
    # After undo_sort, whose products it joins.
    "route_rows": lambda graph, _: route_rows(graph),
    # Before repeated_heads, which extends the `AttentionNote` that read_masks puts on each call of attention.
    "read_masks": lambda graph, facts: read_masks(graph, facts.constants, facts.sources),
    "repeated_heads": lambda graph, _: repeated_heads(graph),
    # After read_masks: the reader of masks knows lookups with positions, and no `gather`.
    "paired_index": lambda graph, _: paired_index(graph),
    # After read_masks and repeated_heads, whose notes and heads it keeps, and after paired_index: numbers of documents
    # are looked up by row and by key.
    "read_documents": lambda graph, facts: read_documents(graph, facts.constants, facts.sources, facts.examples),
}


def normalise(graph: Graph, facts: ExportFacts) -> None:
    """Run all passes on a decomposed graph, in place."""
    for apply in PASSES.values():
        apply(graph, facts)
    remove_dead(graph)
