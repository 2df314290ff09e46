"""Partial sums of a plan are added up where they are made."""

from __future__ import annotations

import autopar
from examples.gpt import gpt


def test_no_value_is_kept_in_parts_that_all_users_add_up() -> None:
    """Whoever recomputes a user of a saved product then need not add it up again."""
    model, inputs = gpt(layers=2, d_model=4096, heads=32, seq=2048, batch=8, device="meta")
    layout = "use@blocks.*.up.weight { d_ff -> tp, * -> none }"
    plan = autopar.plan(model, "tp=8", inputs, cluster="h100", cache=False, layout=layout)
    assignment = plan.decided.assignment
    produced = [one for op in assignment.ops.values() for one in op.produced if one is not None and one.partial]
    assert produced, "some ops make partial sums"
    users: dict[str, list[bool]] = {}
    for node in plan.graph.nodes:
        for name, taken in zip(node.operands, assignment.ops[node.name].operands, strict=True):
            if name is not None and taken is not None:
                users.setdefault(name, []).append(assignment.values[name].sums_to(taken))
    assert not [name for name, sums in users.items() if all(sums)]
