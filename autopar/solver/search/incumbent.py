"""The incumbent: the best plan so far by `evaluate`, from whichever search found it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

from autopar.cost.compute.rates import peak_of
from autopar.cost.evaluate import Costs, evaluate
from autopar.errors import AutoparWarning, LayoutError
from autopar.sharding.assignment import StepPlan
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.contracts import check_contracts
from autopar.sharding.layout.syntax import Contract
from autopar.sharding.reshard_insertion import inserted_reshards
from autopar.solver.progress import Progress
from autopar.solver.setting import PlanningProblem

__all__ = ["Incumbent"]


class Incumbent:
    """Best plan so far that keeps the memory limit and the layout's contracts, by `evaluate`."""

    def __init__(
        self,
        setting: PlanningProblem,
        limit: float,
        began: float,
        progress: Callable[[Progress], None] | None,
        bound_layout: BoundLayout,
    ) -> None:
        self.setting = setting
        self.limit = limit
        self.began = began
        self.progress = progress
        self.bound_layout = bound_layout
        self.broken: LayoutError | None = None
        """The contract that the last plan broke which would have been the best."""
        self.is_broken = False
        """True where the last plan broke a contract."""
        self.plan: StepPlan | None = None
        self.costs: Costs | None = None
        self.origin = ""
        self.seconds = float("inf")
        self.least_bytes = float("inf")
        self.passed_seconds = float("inf")
        """Seconds of the fastest plan that does not fit."""

    @property
    def floor(self) -> float:
        """Lower bound on every plan: the FLOPs of the model at the highest rate of the devices."""
        if self.costs is None:
            return 0.0
        device, tensors = self.setting.cluster.device, self.setting.graph.tensors.values()
        rates = [peak_of(device, dtype) for dtype in {each.dtype for each in tensors if each.dtype.is_floating_point}]
        return self.costs.flops / self.setting.ranks / max(rates) if rates else 0.0

    def offer(self, origin: str, plan: StepPlan) -> Costs:
        """Price a plan, and keep it if it is the best that fits."""
        self.is_broken = False
        costs = evaluate(self.setting.graph, plan, self.setting.cluster)
        peak = costs.memory.peak_bytes
        if peak > self.limit:
            self.passed_seconds = min(self.passed_seconds, costs.step_seconds)
        is_best = peak <= self.limit and costs.step_seconds < self.seconds
        if (is_best or peak < self.least_bytes) and self.keeps_contracts(plan):
            self.least_bytes = min(self.least_bytes, peak)
            if is_best:
                self.plan, self.costs, self.seconds, self.origin = plan, costs, costs.step_seconds, origin
        return costs

    def keeps_contracts(self, plan: StepPlan) -> bool:
        """Return whether a plan keeps the contracts of the layout; if not, `broken` names the broken one."""
        layout = self.bound_layout.given
        if not any(isinstance(statement, Contract) for statement in layout):
            return True
        sent = inserted_reshards(self.setting.graph, plan.assignment, plan.options.outputs, plan.options.local_inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AutoparWarning)  # whoever takes the plan is warned
            try:
                check_contracts(layout, self.setting.graph, plan.assignment, sent)
            except LayoutError as error:
                self.broken, self.is_broken = error, True
                return False
        return True

    def tell(self, stage: str, bound: float) -> None:
        if self.progress is not None:
            self.progress(Progress(stage, time.monotonic() - self.began, self.seconds, bound))
