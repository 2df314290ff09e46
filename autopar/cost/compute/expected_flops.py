"""Count the FLOPs of a step by hand, as a check of the FLOPs that rules give.

The formula of the field for one pass over a batch: two FLOPs forward for each active parameter and token, two for the
gradient of the token's values, two for that of a trained parameter; and the products of attention. Parameters of
routed experts are active for their share of the tokens. The tokens are the rows that most parameters multiply. The
formula says nothing about convolutions and recurrences, whose parameters meet several positions of a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from autopar.cost.compute.attention_time import BACKWARD_PRODUCTS
from autopar.cost.compute.unmasked_scores import unmasked_share
from autopar.ir.analysis.contractions import ATTENTIONS, RECURRENT, Contraction, contractions
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode


@dataclass(frozen=True)
class ExpectedFlops:
    """FLOPs of one step by the formula, and its terms."""

    total: float
    active_parameters: float
    tokens: int


class _ParameterUse(NamedTuple):
    """One product of a parameter with rows of values."""

    numel: int
    rows: float
    # FLOPs per parameter and row: 2 forward, 2 for the gradient of the rows, 2 for that of the parameter.
    flops: int
    # Matrices that the rows are shared among: experts.
    groups: int


def expected_flops(graph: NamedGraph) -> ExpectedFlops | None:
    """Return the FLOPs of a step by the formula; None where the formula says nothing about a model."""
    uses: list[_ParameterUse] = []
    attention = 0.0
    sources = _parameters_behind(graph)
    for node in graph.nodes:
        if node.op in RECURRENT or ("conv" in node.op and node.rule.linear):
            return None
        if node.op in ATTENTIONS:
            attention += _attention_flops(graph, node)
            continue
        for step in contractions(node):
            use = _use(graph, node, step, sources)
            if use is not None:
                uses.append(use)
            else:
                attention += _value_product_flops(graph, node, step)
    by_rows: dict[float, float] = defaultdict(float)
    for use in uses:
        by_rows[use.rows] += use.numel if use.groups == 1 else 0
    tokens = max(by_rows, key=by_rows.__getitem__, default=0)
    if not tokens:
        return None
    flops = sum(use.flops * use.rows * use.numel / use.groups for use in uses)
    active = sum(use.numel / use.groups * use.rows / tokens for use in uses)
    return ExpectedFlops(flops + attention, active, int(tokens))


def _parameters_behind(graph: NamedGraph) -> dict[str, str]:
    """Return the parameter of each tensor that is one, or that ops of one operand make from one."""
    found = {tensor.name: tensor.name for tensor in graph.parameters}
    for node in graph.nodes:
        given = [name for name in node.operands if name is not None]
        if len(given) == 1 and given[0] in found:
            found.update((name, found[given[0]]) for name in node.outputs if name is not None)
    return found


def _use(graph: NamedGraph, node: NamedNode, step: Contraction, sources: dict[str, str]) -> _ParameterUse | None:
    """Return the product of a parameter; None for a product of values."""
    if any(len(side) != 1 for side in step.operands):
        return None
    sides = [node.operands[side[0]] for side in step.operands]
    held = [i for i, name in enumerate(sides) if name in sources]
    if len(held) != 1:
        return None
    parameter, values = graph.tensors[sources[sides[held[0]] or ""]], graph.tensors[sides[1 - held[0]] or ""]
    # Routed rows have a place in every group, and lie in one.
    rows = prod(values.shape) / prod(node.sizes[factor] for factor in step.summed) / (node.routed or 1)
    flops = 2 + 2 * _gets_gradient(graph, node, values.name) + 2 * _gets_gradient(graph, node, parameter.name)
    groups = node.routed or prod(node.sizes[factor] for factor in step.chosen)
    if values.slotted:
        groups = prod(atom.size for atom in values.atoms[: values.slotted])
    return _ParameterUse(prod(parameter.shape), rows, flops, groups)


def _gets_gradient(graph: NamedGraph, node: NamedNode, name: str) -> bool:
    made = any(graph.tensors[one].requires_grad for one in node.outputs if one is not None)
    return made and graph.tensors[name].requires_grad


def _directions(graph: NamedGraph, node: NamedNode, backward: float) -> float:
    """Return the forward passes that both directions of an op are worth."""
    operands = (name for name in node.operands if name is not None)
    return 1.0 + backward * any(_gets_gradient(graph, node, name) for name in operands)


def _attention_flops(graph: NamedGraph, node: NamedNode) -> float:
    """Return the FLOPs of fused attention: two products for each query and each key that it sees."""
    query, key, value = (graph.tensors[name].shape for name in _first(node, 3))
    pairs = prod(query[:-1]) * key[-2] * unmasked_share(node, node.sizes)
    return 2.0 * pairs * (query[-1] + value[-1]) * _directions(graph, node, BACKWARD_PRODUCTS)


def _first(node: NamedNode, count: int) -> Iterator[str]:
    for name in node.operands[:count]:
        assert name is not None, f"{node.name} lacks a query, a key or a value"
        yield name


def _value_product_flops(graph: NamedGraph, node: NamedNode, step: Contraction) -> float:
    """Return the FLOPs of a product of two values, such as the scores of attention."""
    size = prod(node.sizes[factor] for factor in (step.left | step.right) - step.chosen)
    return 2.0 * size * _directions(graph, node, 2.0)
