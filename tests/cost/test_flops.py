"""The FLOPs of every rule of the table that multiplies, on its own samples: torch's count, or one by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from math import prod
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.cost.compute.op_time import OpWork, op_work
from autopar.cost.hardware.cluster import Device
from autopar.errors import RuleError
from autopar.ir.analysis.contractions import ATTENTION
from autopar.rules.call import Call, operands_of, resolve_op, takes_tensors
from autopar.rules.proof.run_shards import RUN_ERRORS, ShardedRun, execute, materialise, reference
from autopar.rules.registry import rule_table
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.propagation import propagate

ROOFLINE = Device("roofline", 1e9, 1e12, 0.0, MappingProxyType({"bfloat16": 1e12, "float64": 1e12}))

BFLOAT16 = ("aten._grouped_mm.default", "autopar.expert_rows.default")
"""Fake tensors of a CPU multiply by experts in this dtype alone."""


def by_vectors(call: Call) -> float:
    """A product with a vector, or of vectors: every element of the larger operand once; of a number, none."""
    sizes = [prod(spec.shape) for spec in call.operands[:2] if spec is not None and spec.rank]
    return 2 * max(sizes) if len(sizes) == 2 else 0


def by_experts(call: Call) -> float:
    """Each row meets the matrix of its own expert, and no other; without ends each matrix has its own rows."""
    first, second = call.operand(0).shape, call.operand(1).shape
    groups = first[0] if call.operands[2] is None else 1
    return 2 * groups * prod(first[-2:]) * second[-1]


BY_HAND: Mapping[str, Callable[[Call], float]] = {
    # What torch's counter has no formula for.
    **dict.fromkeys(("dot", "vdot", "mv", "matmul", "linalg_matmul", "linear", "inner", "linalg_vecdot"), by_vectors),
    "addmv": lambda call: 2 * prod(call.operand(1).shape),
    "addbmm": lambda call: 2 * prod(call.operand(1).shape) * call.output.shape[-1],
    "bilinear": lambda call: 2 * prod(call.output.shape) * call.operand(2).shape[2] * (call.operand(2).shape[1] + 1),
    "cdist": lambda call: 2 * prod(call.output.shape) * call.operand(0).shape[-1],
    "_grouped_mm": by_experts,
    "expert_rows": by_experts,
}

# A pass inserts it after the trace, which takes no model that calls it; its own tests count its FLOPs.
INSERTED = ("autopar.linear_cross_entropy.default",)

# Products by expert are traced between a dispatch of their rows and a combination.
TRACED_AS = {"autopar.expert_rows.default": "autopar.grouped.default"}


def counts(run: ShardedRun) -> bool:
    """Left out: outer products, where torch counts an addition that is none, and sums along a broadcast dim."""
    shared = set.intersection(*(set(operand.factors) for operand in run.rule.operands[:2] if operand))
    summed = shared - {factor for operand in run.rule.outputs if operand for factor in operand.factors}
    return bool(summed) or not any(word in run.call.op for word in ("tensordot", "vecdot"))


class OneCall(nn.Module):
    """One call of an op: its tensors are the inputs."""

    def __init__(self, run: ShardedRun) -> None:
        super().__init__()
        self.run = run
        tensors = [x for x in operands_of(run.op, run.arguments) if isinstance(x, Tensor)]
        single = run.call.op in BFLOAT16
        self.tensors = [x.bfloat16() if single and x.is_floating_point() else x for x in tensors]

    def forward(self, *tensors: Tensor) -> Any:
        return execute(self.run.op, self._with(iter(tensors)))

    def _with(self, tensors: Iterator[Tensor]) -> dict[str, Any]:
        def put(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [put(item) for item in value]
            return next(tensors) if isinstance(value, Tensor) else value

        kinds = takes_tensors(self.run.op)
        return {name: put(value) if name in kinds else value for name, value in self.run.arguments.items()}


def runs(name: str) -> Iterator[ShardedRun]:
    """The samples of a line, one of each bound rule."""
    entry, seen = rule_table()[name], set[str]()
    if entry.tries.needs:
        pytest.importorskip(entry.tries.needs)
    op = resolve_op(name)
    for sample in entry.samples(op):
        try:
            run = reference(op, materialise(op, sample, 0), entry.rule, 0)
        except (RuleError, *RUN_ERRORS):
            continue
        if str(run.rule) not in seen and not run.rule.random:
            seen.add(str(run.rule))
            yield run


def expected(run: ShardedRun) -> float:
    if run.call.op == ATTENTION:
        shapes = [spec.shape for spec in run.call.operands if spec is not None]
        query, value, keys = shapes[0], shapes[2], shapes[1][-2]
        masked = any(name == "is_causal" and value for name, value in run.call.arguments)
        seen = sum(min(i + 1, keys) for i in range(query[-2])) / query[-2] if masked else keys
        return 2 * prod(run.call.output.shape[:-1]) * seen * (query[-1] + value[-1])
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        execute(run.op, run.arguments)
    found = float(counter.get_total_flops())
    name = run.op._schema.name.partition("::")[2]
    return found or (BY_HAND[name](run.call) if name in BY_HAND else 0.0)


def found(run: ShardedRun) -> OpWork:
    model = OneCall(run)
    graph = autopar.trace(model, tuple(model.tensors))
    (node,) = [node for node in graph.nodes if node.op in (run.call.op, TRACED_AS.get(run.call.op))]
    op_assignment = propagate(graph, parse_layout("* -> none"), {"a": 2}).ops[node.name]
    return op_work(graph, node, op_assignment, graph.footprints[node.node], {"a": 2}, ROOFLINE)


def multiplies(name: str) -> bool:
    """Ops that torch counts, those that are counted by hand, and those that might be taken for either."""
    return name.startswith(("aten.", "autopar.expert", "autopar.grouped")) and any(
        word in name
        for word in (
            *("conv", "mm.", "bmm", "mv", "matmul", "dot", ".linear", "aten.bilinear", "inner", "einsum", "cdist"),
            *("expert_rows", "autopar.grouped", "attention", "lstm", "gru", "rnn", "vecdot"),
            *("index_put", "scatter_add", "cosine_sim", "kl_div"),
        )
    )


@pytest.mark.parametrize("name", sorted(filter(multiplies, rule_table())))
def test_flops_are_those_that_are_counted(name: str) -> None:
    for run in islice(runs(name), 4 if name != ATTENTION else None):
        if not counts(run):
            continue
        work = found(run)
        assert work.forward.flops == pytest.approx(expected(run), rel=1e-9), str(run.call)


def test_no_other_op_is_counted() -> None:
    """What torch counts products of is tried above."""
    for name in rule_table():
        if multiplies(name) or rule_table()[name].tries.needs or "matrix_power" in name or name in INSERTED:
            continue  # linear algebra is priced by what it reads and writes
        for run in islice(runs(name), 1):
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                execute(run.op, run.arguments)
            assert counter.get_total_flops() == 0, str(run.call)
