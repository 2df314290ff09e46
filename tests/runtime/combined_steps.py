"""Runs numbered combinations on this rank, beside one process."""

from __future__ import annotations

import copy
import faulthandler
import pickle
import random
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import autopar
from autopar.errors import AutoparError, LayoutError
from tests.gaps import number
from tests.runtime.combinations import Combination, combination
from tests.runtime.combined_models import SEQ, Inputs, batch_of, loss_of
from tests.runtime.float8_model import linears_in_float8
from tests.runtime.training import whole

__all__ = ["CaseOutcome", "dtype_of", "model_of", "reason_of", "run_cases"]

STEPS = 3
SCALE = 2.0**8  # of a loss in float16
CASE_SECONDS = 400  # a case that takes longer hangs; torch.compile of some takes 140 s
WHOLE = StateDictOptions(full_state_dict=True)


@dataclass(frozen=True)
class CaseOutcome:
    """How a case ended: `right`, `refused` or `wrong`; the reason, or the largest difference over its tolerance."""

    case: int
    kind: str
    detail: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind} {self.detail} ({self.seconds:.0f} s)\n  {combination(self.case)}"


@dataclass
class _Differences:
    """The largest difference over its tolerance, and where it is."""

    ratio: float = 0.0
    where: str = "nothing differs"
    others: list[str] = field(default_factory=list)

    def add(self, where: str, difference: float, tolerance: float) -> None:
        ratio = number(difference) / tolerance
        if ratio > 1:
            self.others.append(f"{where} {difference:.2g}")
        if ratio > self.ratio:
            self.ratio, self.where = ratio, f"{where} is off by {difference:.2g}, {tolerance:.2g} allowed"


def run_cases(cases: Sequence[int], folder: str | None = None) -> list[CaseOutcome]:
    """Run the cases on this rank; an error other than a refusal ends the rank, and is in its log.

    In the folder each rank writes which case it has begun, and how those before it ended.
    """
    found = []
    for case in cases:
        print(f"begins {combination(case)}", flush=True)
        if folder is not None:
            Path(folder, f"begun{dist.get_rank()}").write_text(f"{cases.index(case)} {case}")
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True, file=sys.stderr)
        begun = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind, detail = _outcome(combination(case))
        faulthandler.cancel_dump_traceback_later()
        found.append(CaseOutcome(case, kind, detail, time.monotonic() - begun))
        if folder is not None:
            with Path(folder, f"ended{dist.get_rank()}").open("ab") as file:
                pickle.dump(found[-1], file)
        torch._dynamo.reset()
    return found


def _outcome(one: Combination) -> tuple[str, str]:
    found = _Differences()
    try:
        _Run(one, found).steps()
    except AutoparError as error:  # the same on all ranks
        return "refused", reason_of(error)
    return ("right", f"{found.where}") if found.ratio <= 1 else ("wrong", "; ".join([found.where, *found.others[:6]]))


def reason_of(error: AutoparError) -> str:
    """Return a refusal as its code and first line."""
    first = " ".join(str(error).split("\n")[:1])
    code = error.code if isinstance(error, LayoutError) else type(error).__name__
    return f"{code}: {first.removeprefix(f'{code}: ')[:300]}"


def dtype_of(one: Combination) -> torch.dtype:
    """The dtype of a case's model: products by group have no kernel in float64."""
    return torch.float32 if one.precision is not None or one.small.routes_rows else torch.float64


def model_of(one: Combination, seed: int) -> nn.Module:
    """The model of a case, with weights of this seed."""
    torch.manual_seed(seed)
    model = one.small.make().to(dtype_of(one)).train()
    if one.has_frozen:
        frozen = random.Random(one.case)
        for parameter in list(model.parameters()):
            parameter.requires_grad_(parameter.requires_grad and frozen.random() < 0.6)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            next(model.parameters()).requires_grad_()
    return model


class _Run:
    """A case beside one process, step by step."""

    def __init__(self, one: Combination, found: _Differences) -> None:
        self.one, self.found = one, found
        self.draw = random.Random(f"steps {one.case}")
        self.dtype = dtype_of(one)
        self.is_half = one.precision is not None and one.precision not in ("fp32", "fp64")
        # Rounding to half precision changes statistics of a small batch so much that steps drift apart.
        self.is_chaotic = self.is_half and one.small.has_batch_statistics
        self.model = model_of(one, 0)
        # The exact one computes in float64 where it can.
        self.exact = self.model if one.small.routes_rows else copy.deepcopy(self.model).double()
        self.batch = (one.batch, SEQ)
        self.parallel = self._parallel(copy.deepcopy(self.model), one.layout)
        self.optimizers = [self._optimizer(self.exact), self._optimizer(self.parallel)]
        self.scale = SCALE if one.precision == "fp16" else 1.0

    def _inputs(self, batch: int, seq: int) -> Inputs:
        return batch_of(self.one.small, self.draw, batch, seq, self.dtype)

    def _parallel(self, model: nn.Module, layout: str | None) -> Any:
        one = self.one
        options: dict[str, Any] = {"outputs": one.outputs, "precision": one.precision}
        inputs = self._inputs(*self.batch)
        if one.memory is not None:
            rows = f"batch -> {one.mesh.partition('=')[0]}; * -> none" if "pp" not in one.mesh else "* -> none"
            stages = "pipeline pp 1f1b; " if "pp" in one.mesh else ""
            usual = autopar.plan(model, one.mesh, inputs, layout=stages + rows, cluster="h100", cache=False)
            options |= {"memory": one.memory * usual.memory_bytes, "cluster": "h100", "time_limit": 3}
        if one.offload_states:
            options["offload_states"] = True
        if one.local_inputs:
            inputs, options["local_inputs"] = self._given(inputs), True
        parallel = autopar.parallelize(model, one.mesh, inputs, layout=layout, **options)
        if one.compiled == "layers":
            parallel.compile_layers(backend="aot_eager")
        return parallel

    def _given(self, inputs: Inputs) -> Inputs:
        if not self.one.local_inputs:
            return inputs
        return {name: x.chunk(dist.get_world_size())[dist.get_rank()] for name, x in inputs.items()}

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.one.optimizer == "adamw":
            return torch.optim.AdamW(trained, lr=3e-3, eps=1e-4)
        return torch.optim.SGD(trained, lr=0.1)

    def steps(self) -> None:
        for step in range(STEPS):
            sizes = self.one.second if step == 1 and self.one.second is not None else self.batch
            self._step(step, [self._inputs(*sizes) for _ in range(self.one.calls)])
            if step == 0 and self.one.reloaded:
                self._reload()
            if step == 1 and self.one.has_eval:
                self._evaluate()
        for name, buffer in self.exact.named_buffers():
            self._compare(f"buffer {name}", self.parallel.get_buffer(name), buffer, 1.0)
        if self.one.generates and not self.is_half:
            self._generate()

    def _step(self, step: int, calls: list[Inputs]) -> None:
        callee = torch.compile(self.parallel, backend="aot_eager") if self.one.compiled == "module" else self.parallel
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self.is_chaotic:
            with torch.no_grad():
                for name, parameter in self.exact.named_parameters():
                    parameter.copy_(whole(self.parallel.get_parameter(name)))
        factors = [self.draw.choice((0.5, 1.0, 3.0)) if self.one.scales else 1.0 for _ in calls]
        noise = self._noise(calls, factors) if self.is_half else {}
        for place, (inputs, factor) in enumerate(zip(calls, factors, strict=True)):
            loss = loss_of(self.exact(**_as(inputs, next(self.exact.parameters()).dtype)), self.one.loss)
            (loss * factor).backward()
            keeps = self.one.no_sync and place < len(calls) - 1
            with self.parallel.no_sync() if keeps else nullcontext():
                own = loss_of(callee(**self._given(inputs)), self.one.loss)
                (own * (factor * self.scale)).backward()
            self._compare(f"loss {step}", own, loss, 1.0, allowed=self._loss_tolerance())
        self._compare_gradients(step, noise)
        for model, optimizer in zip((self.exact, self.parallel), self.optimizers, strict=True):
            if self.one.clips:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                if model is self.exact:
                    expected = norm
                else:
                    self._compare(f"norm {step}", norm, expected, 1.0, allowed=None if not self.is_half else 0.1)
            optimizer.step()

    def _noise(self, calls: list[Inputs], factors: list[float]) -> dict[str, Tensor]:
        """Return the gradients of one process that computes in half precision, in float8 where the case does."""
        said = str(self.one.precision)
        dtype = torch.float16 if self.one.precision == "fp16" else torch.bfloat16
        model = copy.deepcopy(self.exact).to(dtype)
        model.zero_grad()
        with linears_in_float8(model, "fp8-rows" in said) if "fp8" in said else nullcontext():
            for inputs, factor in zip(calls, factors, strict=True):
                (loss_of(model(**_as(inputs, dtype)), self.one.loss) * (factor * self.scale)).backward()
        return {name: p.grad.double() / self.scale for name, p in model.named_parameters() if p.grad is not None}

    def _compare_gradients(self, step: int, noise: dict[str, Tensor]) -> None:
        expected = {name: p.grad for name, p in self.exact.named_parameters() if p.grad is not None}
        parameters = {name: self.parallel.get_parameter(name) for name, _ in self.exact.named_parameters()}
        own = {name: whole(p.grad) / self.scale for name, p in parameters.items() if p.grad is not None}
        if self.scale != 1:
            with torch.no_grad():
                for parameter in self.parallel.parameters():
                    if parameter.grad is not None:
                        parameter.grad.div_(self.scale)
        lacking = expected.keys() ^ own.keys()
        if lacking:
            self.found.add(f"gradients {step} of {sorted(lacking)[:4]} lack on one side, which", 1.0, 1e-9)
        total = float(torch.stack([one.double().norm() for one in expected.values()]).norm())
        for name in expected.keys() & own.keys():
            alone = float((noise[name] - expected[name]).norm()) if name in noise else 0.0
            self._compare(f"gradient {step} of {name}", own[name], expected[name], total, alone)

    def _tolerance(self) -> float:
        one = self.one
        if self.is_chaotic:
            return 0.6
        if self.is_half:
            return 0.3 if "fp8" in str(one.precision) else 0.12
        if one.precision == "fp32" or one.small.routes_rows:
            return 2e-3
        # Statistics of a model in float32 stay in it.
        return 2e-4 if one.small.is_float32 or (one.small.has_batch_statistics and one.precision == "fp64") else 1e-8

    def _loss_tolerance(self) -> float:
        return (0.05 if "fp8" in str(self.one.precision) else 0.02) if self.is_half else self._tolerance()

    def _compare(
        self, where: str, own: Any, expected: Tensor, total: float, alone: float = 0.0, allowed: float | None = None
    ) -> None:
        """Compare by norms; a small part of the norm of all gradients is noise."""
        own, expected = whole(own).detach().double(), expected.detach().double()
        if own.shape != expected.shape:
            self.found.add(f"{where} has the shape {tuple(own.shape)}, which", 1.0, 1e-9)
            return
        least = (0.05 if self.is_half else 1e-3) * total
        size = max(float(expected.norm()), least, 1e-12)
        tolerance = allowed if allowed is not None else max(self._tolerance(), 3 * alone / size)
        self.found.add(where, float((own - expected).norm()) / size, tolerance)

    def _evaluate(self) -> None:
        inputs = self._inputs(*self.batch)
        for model in (self.exact, self.parallel):
            model.eval()
        with torch.no_grad():
            expected = loss_of(self.exact(**_as(inputs, next(self.exact.parameters()).dtype)))
            own = loss_of(self.parallel(**self._given(inputs)))
        self._compare("loss of eval", own, expected, 1.0, allowed=self._loss_tolerance())
        for model in (self.exact, self.parallel):
            model.train()

    def _generate(self) -> None:
        ids = self._inputs(4, 6)["input_ids"]
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
        exact: Any = self.exact.eval()
        expected, own = exact.generate(ids, **options), self.parallel.eval().generate(ids, **options)
        self.found.add("generated tokens", float(not torch.equal(expected, own)), 0.5)

    def _reload(self) -> None:
        """Go on with another module of other weights, which loads the state of the first one."""
        one, old = self.one, self.parallel
        layout = one.layout if one.next_layout is None else one.next_layout
        fresh = self._parallel(model_of(one, 1), layout)
        optimizer = self._optimizer(fresh)
        if one.reloaded == "full":
            state = old.full_state_dict()
            fresh.load_full_state_dict(state if dist.get_rank() == 0 else None)
        elif one.reloaded == "shards":
            fresh.load_state_dict(old.state_dict())
        else:
            set_model_state_dict(fresh, get_model_state_dict(old, options=WHOLE), options=WHOLE)
        if one.optimizer == "adamw":
            states = get_optimizer_state_dict(old, self.optimizers[1], options=WHOLE)
            set_optimizer_state_dict(fresh, optimizer, states, options=WHOLE)
        self.parallel, self.optimizers[1] = fresh, optimizer


def _as(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
