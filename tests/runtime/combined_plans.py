"""Plans of numbered combinations, without processes: a plan is made and read again, or the case is refused."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Iterator, Sequence

import autopar
from autopar.errors import AutoparError
from tests.runtime.combinations import Combination, combination
from tests.runtime.combined_models import SEQ, batch_of
from tests.runtime.combined_steps import CaseOutcome, dtype_of, model_of, reason_of

__all__ = ["plan_cases"]

TIME_LIMIT = 3.0


def plan_cases(cases: Sequence[int]) -> Iterator[CaseOutcome]:
    """Yield how each case is planned: `right`, `refused`, or `wrong` where its file does not say the plan.

    An error other than a refusal ends them; the case after the last outcome raised it.
    """
    for case in cases:
        begun = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind, detail = _outcome(combination(case))
        yield CaseOutcome(case, kind, detail, time.monotonic() - begun)


def _outcome(one: Combination) -> tuple[str, str]:
    inputs = batch_of(one.small, random.Random(f"steps {one.case}"), one.batch, SEQ, dtype_of(one))
    try:
        plan = autopar.plan(
            model_of(one, 0),
            one.mesh,
            inputs,
            layout=one.layout,
            cluster="h100",
            precision=one.precision,
            outputs=one.outputs,
            offload_states=one.offload_states,
            time_limit=TIME_LIMIT,
            cache=False,
        )
    except AutoparError as error:
        return "refused", reason_of(error)
    try:
        again = autopar.Plan.read(plan.text, plan.graph)
    except AutoparError as error:
        return "wrong", f"its file cannot be read: {reason_of(error)}"
    if (again.decided, again.costs) != (plan.decided, plan.costs):
        return "wrong", "the plan is another one when its file is read"
    return "right", f"{plan.step_seconds:.3g} s a step"
