"""What to tell the user of an op that has no rule."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from autopar.rules.bind_call import fresh_names
from autopar.rules.call import Call, TensorSpec
from autopar.rules.op_names import display_name
from autopar.rules.proof.discover import Labels

__all__ = ["no_rule_message"]


def no_rule_message(op: torch._ops.OpOverload, call: Call, labels: Labels) -> str:
    """What to tell the user of an op that will run replicated, with a line to start from."""
    names: dict[Hashable, str] = {}
    operands = []
    for spec, dims in zip(call.operands, labels, strict=True):
        if spec is None or dims is None:
            operands.append("?")
            continue
        for label in dims:
            if label not in names:
                names[label] = fresh_names(1, set(names.values()))[0]
        operands.append(" ".join(names[label] for label in dims) or "()")
    pairs = [(spec, dims) for spec, dims in zip(call.operands, labels, strict=True) if spec and dims]
    extents = {names[label]: size for spec, dims in pairs for label, size in zip(dims, spec.shape, strict=True)}
    outputs = [_suggested_dims(spec, extents) for spec in call.outputs]
    shown = str(call).replace(str(op), display_name(op), 1)
    suggestion = f"{', '.join(operands)} -> {', '.join(outputs)}".strip()
    return (
        f"no rule for {shown}, and none found by running it in shards; it will run replicated on every device.\n"
        f"If it can be split, add a rule, for instance (its dims here are guessed from their extents):\n"
        f'  autopar.register_rule("{display_name(op)}", "{suggestion}")'
    )


def _suggested_dims(spec: TensorSpec | None, extents: Mapping[str, int]) -> str:
    if spec is None:
        return "?"
    dims: list[str] = []
    taken = set(extents)
    for size in spec.shape:
        same = next((name for name, extent in extents.items() if extent == size and name not in dims), None)
        dims.append(same or ("1" if size == 1 else fresh_names(1, taken)[0]))
        taken.add(dims[-1])
    return " ".join(dims)
