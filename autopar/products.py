"""Which ops multiply: fused attention and recurrences by their names, all other products by what their rules say."""

from __future__ import annotations

from autopar.rules.notation import Operand
from autopar.tracing.graph import NamedNode

__all__ = ["ATTENTION", "RECURRENT", "factors_of", "multiplied"]

ATTENTION = "aten.scaled_dot_product_attention.default"
RECURRENT = ("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")


def factors_of(operand: Operand | None) -> set[str]:
    return set() if operand is None else set(operand.factors)


def multiplied(node: NamedNode) -> tuple[int, int] | None:
    """The two operands that share a factor which the result lacks."""
    output = factors_of(node.rule.outputs[0]) if node.rule.outputs else set()
    holders: dict[str, list[int]] = {}
    for i, operand in enumerate(node.rule.operands[: len(node.operands)]):
        for factor in factors_of(operand) - output:
            if node.operands[i] is not None:
                holders.setdefault(factor, []).append(i)
    pairs = sorted((found[0], found[1]) for found in holders.values() if len(found) == 2)
    return pairs[0] if pairs else None
