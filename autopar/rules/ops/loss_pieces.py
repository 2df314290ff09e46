"""The last linear layer and its cross-entropy as one op, which computes the logits of some rows at a time.

Input::

    loss = cross_entropy(_to_copy(linear(x, weight), dtype=f32), target)
Output::

    loss = linear_cross_entropy(x, weight, None, target, dtype=f32, pieces=16)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from autopar.rules.call import Call
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample
from autopar.rules.shard_call.loss_pieces import NONE, SUM, Classes, LogitsForm, losses_of_rows
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "LINEAR_CROSS_ENTROPY", "TABLE"]

_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "linear_cross_entropy(Tensor input, Tensor weight, Tensor? bias, Tensor target, *, int reduction, "
    "int ignore_index=-100, float label_smoothing=0.0, float scale=1.0, float softcap=0.0, "
    "ScalarType? dtype=None, int pieces=1) -> Tensor"
)


def _linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    scale: float = 1.0,
    softcap: float = 0.0,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    form = LogitsForm(scale, softcap, dtype)
    return losses_of_rows(input, weight, bias, target, Classes(0, weight.shape[0]), form, **options)


_LIBRARY.impl("linear_cross_entropy", _linear_cross_entropy, "CompositeImplicitAutograd")

LINEAR_CROSS_ENTROPY = torch.ops.autopar.linear_cross_entropy.default


def _rule(call: Call) -> str:
    """Write the rule: rows are parallel; classes are split by a lowered op."""
    bias = "?" if call.operands[2] is None else "v!"
    return f"r k!, v! k!, {bias}, r -> {'r' if call['reduction'] == NONE else '()'}"


def _samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    form = {"scale": 0.5, "softcap": 3.0, "dtype": torch.float64}
    for reduction in (NONE, SUM):
        for bias in (None, Draw((7,))):
            tensors = [Draw((5, 4)), Draw((7, 4)), bias, Draw((5,), "index", 7, also=(-100,))]
            yield make_sample(op, tensors, {"reduction": reduction, "pieces": 2}, tries)
            inside = [*tensors[:3], Draw((5,), "index", 7)]
            others = {"ignore_index": 1, "label_smoothing": 0.1, **form}
            yield make_sample(op, inside, {"reduction": reduction, "pieces": 3, **others}, tries)


TABLE = """
autopar.linear_cross_entropy.default   linear_cross_entropy
"""

FAMILIES = {"linear_cross_entropy": OpFamily(_rule, _samples)}
