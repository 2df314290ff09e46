"""Check the rule table on the calls that torch's own tests make: `python -m benchmarks.soundness --opinfo`.

Every sample of `op_db` (float64, complex128, int64, bool) is run, and each ATen call in it is captured: as the tracer
sees it, with composite ops whole, and below autograd, with composite ops taken apart. Each distinct call is then run
whole and in shards: every factor that its rule lets be split, in 2 and in 3, and every group of operands in which the
rule calls it linear. A case that does not give outputs and gradients back is a wrong number.
"""

from __future__ import annotations

import json
import multiprocessing
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from autopar.errors import RuleError
from autopar.rules.call import arguments_by_name, operands_of
from autopar.rules.notation import FactorKind
from autopar.rules.proof.run_shards import (
    RUN_ERRORS,
    ShardedRun,
    additivity,
    first_line,
    materialise,
    pieces_of,
    recombination,
    reference,
)
from autopar.rules.proof.samples import Sample
from autopar.rules.registry import rule_table

__all__ = ["DTYPES", "Checked", "check_op", "check_ops", "opinfo_names"]

DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool)
SHARDS = (2, 3)
# Calls on larger tensors are left out: they say nothing that smaller ones do not.
MOST_ELEMENTS = 200_000


@dataclass
class Checked:
    """Outcome of one op of the database."""

    op: str
    calls: int = 0
    factor_cases: int = 0
    linear_cases: int = 0
    wrong: list[str] = field(default_factory=list)
    # Calls, or cases of a call, that are not checked, by reason.
    refused: dict[str, int] = field(default_factory=dict)
    without_rule: dict[str, int] = field(default_factory=dict)

    def refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1


# -- capturing --------------------------------------------------------------------------------------------------------


class _Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the ops that are called, with copies of their arguments."""

    def __init__(self, calls: list[tuple[torch._ops.OpOverload, Sample]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls.append((func, Sample(tree_map(_copied, args), tree_map(_copied, kwargs))))
        return func(*args, **kwargs)


def _copied(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    return value.detach().clone()


def captured(opinfo: Any, dtype: torch.dtype, limit: int | None) -> Iterator[tuple[Any, Sample] | None]:
    """Yield the ATen calls of an op's samples; None for a sample that does not run."""
    samples = opinfo.sample_inputs("cpu", dtype, requires_grad=False)
    for number, sample in enumerate(samples):
        if limit is not None and number >= limit:
            return
        for composite in (True, False):
            calls: list[tuple[torch._ops.OpOverload, Sample]] = []
            try:
                with torch.inference_mode(composite), torch.no_grad(), _Capture(calls):
                    opinfo.op(sample.input, *sample.args, **sample.kwargs)
            except RUN_ERRORS:  # what was called before counts
                yield None
            yield from calls


# -- checking ---------------------------------------------------------------------------------------------------------


def check_op(opinfo: Any, limit: int | None = None) -> Checked:
    """Check the calls of one op of the database, in all dtypes that it knows."""
    name = opinfo.name + (f".{opinfo.variant_test_name}" if opinfo.variant_test_name else "")
    checked, seen = Checked(name), set[str]()
    for dtype in DTYPES:
        if dtype not in opinfo.supported_dtypes("cpu"):
            continue
        torch.manual_seed(0)
        try:
            for call in captured(opinfo, dtype, limit):
                if call is None:
                    checked.refuse("the sample does not run")
                else:
                    _check_call(*call, checked, seen)
        except RUN_ERRORS as error:
            checked.refuse(f"no samples: {type(error).__name__}")
    return checked


def _check_call(op: Any, sample: Sample, checked: Checked, seen: set[str]) -> None:
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in ("aten", "prims"):
        return
    key = f"{op} {_signature(sample.args)} {_signature(tuple(sorted(sample.kwargs.items())))}"
    if key in seen:
        return
    seen.add(key)
    checked.calls += 1
    if op._schema.is_mutable:
        checked.refuse("works in place: a traced graph has none")
        return
    tensors = [
        x for x in operands_of(op, arguments_by_name(op, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)
    ]
    if any(x.layout is not torch.strided for x in tensors):
        checked.refuse("sparse")
        return
    if sum(x.numel() for x in tensors) > MOST_ELEMENTS:
        checked.refuse("large")
        return
    entry = rule_table().get(str(op))
    if entry is None:
        checked.without_rule[str(op)] = checked.without_rule.get(str(op), 0) + 1
        checked.refuse("no rule in the table")
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = reference(op, materialise(op, sample, 0), entry.rule, 0)
    except RuleError as error:
        checked.refuse(f"the rule does not fit: {op}: {first_line(error)}")
        return
    except RUN_ERRORS as error:
        checked.refuse(f"does not run alone: {op}: {type(error).__name__}")
        return
    if run.rule.random:
        checked.refuse("draws random numbers: proved by their distribution")
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _check_run(run, checked)


def _signature(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}{list(value.stride())}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_signature, value))}]"
    return repr(value)


def _check_run(run: ShardedRun, checked: Checked) -> None:
    truths = any(output is not None and output.dtype is torch.bool for output in run.outputs)
    for factor, kind in run.rule.kinds.items():
        if kind is FactorKind.WHOLE:
            continue
        if kind in (FactorKind.MAX, FactorKind.MIN):
            checked.refuse("a maximum or minimum, which no layout splits")
            continue
        if truths and kind in (FactorKind.SUM, FactorKind.MEAN):
            checked.refuse("truths do not add up")
            continue
        for shards in SHARDS:
            if run.sizes[factor] < shards:
                checked.refuse("a factor shorter than the number of shards")
                continue
            checked.factor_cases += 1
            reason = recombination(run, kind, pieces_of(factor, run.sizes[factor], shards))
            if reason is not None:
                checked.wrong.append(_described(run, f"factor {factor} {kind.value} in {shards}", reason))
    operands = operands_of(run.op, run.arguments)
    for group in run.rule.linear:
        if any(x is not None and x.dtype is torch.complex32 for x in run.outputs):
            checked.refuse("torch has no sums of complex32")
            continue
        if not all(bool(operands[i].isfinite().all()) for i in group):
            checked.refuse("infinity is no sum of parts")
            continue
        for shards in SHARDS:
            checked.linear_cases += 1
            reason = additivity(run, group, shards)
            if reason is not None:
                checked.wrong.append(_described(run, f"linear in {group} in {shards}", reason))


def _described(run: ShardedRun, subject: str, reason: str) -> str:
    plain = {name: value for name, value in run.call.arguments if not hasattr(value, "shape")}
    return f"{subject}: {reason} | {run.rule} | {run.call} | {plain}"


# -- all of them ------------------------------------------------------------------------------------------------------


def opinfo_names() -> dict[str, Any]:
    """Return the ops of torch's database, by name."""
    from torch.testing._internal.common_methods_invocations import op_db  # seconds to import

    found: dict[str, Any] = {}
    for one in op_db:
        found.setdefault(one.name + (f".{one.variant_test_name}" if one.variant_test_name else ""), one)
    return found


def _worker(given: tuple[str, int | None]) -> Checked:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return check_op(_database()[given[0]], given[1])


_DATABASE: dict[str, Any] = {}


def _database() -> dict[str, Any]:
    if not _DATABASE:
        _DATABASE.update(opinfo_names())
    return _DATABASE


def check_ops(
    names: Sequence[str], limit: int | None = None, processes: int = 1, output: Path | None = None
) -> Iterator[Checked]:
    """Check these ops; what `output` holds of an earlier run is not done again, and what is new is added to it."""
    done = {one.op: one for one in _read(output)}
    yield from (done[name] for name in names if name in done)
    todo = [(name, limit) for name in names if name not in done]
    if processes == 1:
        found: Iterable[Checked] = map(_worker, todo)
        yield from _written(found, output)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from _written(pool.imap_unordered(_worker, todo), output)


def _read(output: Path | None) -> list[Checked]:
    if output is None or not output.exists():
        return []
    return [Checked(**json.loads(line)) for line in output.read_text().splitlines()]


def _written(found: Iterable[Checked], output: Path | None) -> Iterator[Checked]:
    for one in found:
        if output is not None:
            with output.open("a") as file:
                file.write(json.dumps(asdict(one)) + "\n")
        yield one
