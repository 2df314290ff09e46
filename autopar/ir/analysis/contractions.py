"""Products of an op, for its FLOPs: contractions of pairs of operands, read from the op's rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.ir.values import NamedNode
from autopar.rules.notation import Operand, Rule
from autopar.rules.ops.documents import DOCUMENT_ATTENTION
from autopar.rules.ops.folded import FOLDED_ATTENTION
from autopar.rules.ops.loss_pieces import LINEAR_CROSS_ENTROPY
from autopar.rules.ops.matmul import GROUPED

ATTENTION = "aten.scaled_dot_product_attention.default"
# Fused attention, also over a folded sequence and of documents.
ATTENTIONS = (ATTENTION, str(FOLDED_ATTENTION), str(DOCUMENT_ATTENTION))
# Recurrences: op -> position of the first operand that is a parameter.
RECURRENT = {
    "aten.lstm.input": 3,
    "aten.gru.input": 2,
    "aten.rnn_tanh.input": 2,
    "aten.rnn_relu.input": 2,
    "aten.lstm_cell.default": 3,
    "aten.gru_cell.default": 2,
    "aten.rnn_tanh_cell.default": 2,
    "aten.rnn_relu_cell.default": 2,
}
EINSUM = "aten.einsum.default"
CHAIN = "aten.linalg_multi_dot.default"
# Longest chain of matrices whose orders are all tried; their number grows exponentially.
MOST_ORDERED = 6


@dataclass(frozen=True)
class Contraction:
    """Product of two tensors, by their factors; factors that the result lacks are summed over."""

    left: frozenset[str]
    right: frozenset[str]
    result: frozenset[str]
    # Operands in each side: several, if the side is the result of an earlier product.
    operands: tuple[tuple[int, ...], tuple[int, ...]]
    # Factors that select the matrix of a row, such as experts: each row is multiplied with one of them only.
    chosen: frozenset[str] = frozenset()

    @property
    def batch(self) -> frozenset[str]:
        return self.left & self.right & self.result

    @property
    def rows(self) -> frozenset[str]:
        return (self.left & self.result) - self.batch

    @property
    def columns(self) -> frozenset[str]:
        return (self.right & self.result) - self.batch

    @property
    def summed(self) -> frozenset[str]:
        return (self.left | self.right) - self.result


def factors_of(operand: Operand | None) -> set[str]:
    return set() if operand is None else set(operand.factors)


def multiplied(node: NamedNode) -> tuple[int, int] | None:
    """Return the first two operands that share a factor which the result lacks; None if there are none."""
    # A depthwise convolution shares no factor, but sums over its window all the same.
    if "conv" in node.op and node.rule.linear:
        return 0, 1
    pairs = sorted((found[0], found[1]) for found in _holders(node).values() if len(found) > 1)
    return pairs[0] if pairs else None


def _holders(node: NamedNode) -> dict[str, list[int]]:
    """Return the operands with each factor that the result lacks."""
    output = factors_of(node.rule.outputs[0]) if node.rule.outputs else set()
    holders: dict[str, list[int]] = {}
    for i, operand in enumerate(node.rule.operands[: len(node.operands)]):
        for factor in factors_of(operand) - output:
            if node.operands[i] is not None:
                holders.setdefault(factor, []).append(i)
    return holders


def is_linear_in_both(rule: Rule, one: int, other: int) -> bool:
    """Return True if an op is linear in each of two operands alone: products are, distances are not."""
    groups = [set(group) for group in rule.linear]
    return all(any(a in group and b not in group for group in groups) for a, b in ((one, other), (other, one)))


def contractions(node: NamedNode) -> tuple[Contraction, ...]:
    """Return the products of an op in their order; none for an op that multiplies nothing."""
    pair = multiplied(node)
    if pair is None:
        return ()
    if node.op == str(LINEAR_CROSS_ENTROPY):
        return (_of_logits(node),)
    chosen = frozenset(factor for _, factor in node.rule.indices)
    holders = _holders(node)
    if node.op in GROUPED:
        chosen |= {factor for factor, found in holders.items() if len(found) == 1}
    taken = list(pair)
    if is_linear_in_both(node.rule, *pair):
        shared = {i for found in holders.values() if len(found) > 1 for i in found}
        taken += sorted(i for i in shared - set(pair) if is_linear_in_both(node.rule, pair[0], i))
    dropped = set(chosen)
    # An einsum sums factors of one operand before the products.
    if node.op == EINSUM:
        dropped |= {factor for factor, found in holders.items() if len(found) == 1}
    sides = {i: frozenset(factors_of(node.rule.operands[i]) - dropped) for i in taken}
    output = frozenset(factors_of(node.rule.outputs[0]))
    if node.op == CHAIN and len(taken) <= MOST_ORDERED:
        return _chain([((i,), sides[i]) for i in sorted(taken)], output, node.sizes)[1]
    chosen &= factors_of(node.rule.operands[pair[0]]) | factors_of(node.rule.operands[pair[1]])
    return _in_turn(taken, sides, output, chosen)


def _of_logits(node: NamedNode) -> Contraction:
    """Return the product of a loss in pieces: its result lacks the rows and classes of the logits."""
    rows, weight, *_ = (frozenset(factors_of(operand)) for operand in node.rule.operands)
    return Contraction(rows, weight, rows ^ weight, ((0,), (1,)))


def _in_turn(
    taken: Sequence[int], sides: Mapping[int, frozenset[str]], output: frozenset[str], chosen: frozenset[str]
) -> tuple[Contraction, ...]:
    """Return the products of operands from left to right, each with the result so far."""
    made: tuple[int, ...] = (taken[0],)
    current = sides[taken[0]]
    found: list[Contraction] = []
    for place, i in enumerate(taken[1:], 2):
        later = output.union(*(sides[other] for other in taken[place:]))
        step = Contraction(current, sides[i], (current | sides[i]) & later, (made, (i,)), chosen)
        # Elementwise products are no contraction.
        found += [step] if step.summed else []
        made, current = (*made, i), step.result
    return tuple(found)


_Part = tuple[tuple[int, ...], frozenset[str]]


def _chain(
    parts: Sequence[_Part], output: frozenset[str], sizes: Mapping[str, int]
) -> tuple[int, tuple[Contraction, ...]]:
    """Return the fewest multiplications for a chain of matrices, and its products in that order."""
    if len(parts) == 1:
        return 0, ()
    found: list[tuple[int, tuple[Contraction, ...]]] = []
    for i in range(len(parts) - 1):
        (made, left), (more, right) = parts[i : i + 2]
        later = output.union(*(factors for _, factors in (*parts[:i], *parts[i + 2 :])))
        step = Contraction(left, right, (left | right) & later, (made, more))
        rest = _chain([*parts[:i], ((*made, *more), step.result), *parts[i + 2 :]], output, sizes)
        found.append((prod(sizes[factor] for factor in left | right) + rest[0], (step, *rest[1])))
    return min(found, key=lambda one: one[0])
