"""Compare measured steps of the plan found with those of expert strategies, on Gloo processes.

    python -m benchmarks.solved                                    # against cost_models/local-cpu.toml
    autopar calibrate --processes 4 --output here.toml && python -m benchmarks.solved --cluster here.toml
    python -m benchmarks.solved --model moe --mesh dp=4 --steps 30 --json

The plan found and every strategy that applies, on the assignment of its axes that is predicted to be fastest, train in
turn, step by step. Printed is what a step takes, the median of the faster half, and what was predicted; and the ratio
of the plan found to the fastest strategy. Where the plan found is a strategy's own, they run beside each other all the
same, which shows the noise.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import autopar
from autopar.plans.strategies import price_strategies
from benchmarks.interleaved import Make, Run, faster_share, measured_seconds, undisturbed
from examples.gpt import gpt
from examples.moe import moe
from examples.resnet import resnet

MODELS: dict[str, Make] = {
    "gpt": partial(gpt, layers=4, d_model=256, heads=4, vocab=1024, seq=64, batch=8),
    "resnet": partial(resnet, depth=18, width=16, image=64, batch=8, loss=True, train=True),
    "moe": partial(moe, layers=2, d_model=128, heads=4, d_ff=256, experts=8, vocab=512, seq=64, batch=8),
}
FOUND = "the plan found"


def compared(name: str, mesh: str, cluster: str, steps: int, time_limit: float) -> dict[str, Any]:
    """Return the seconds of a step under the plan found and the strategies, predicted and measured."""
    make = MODELS[name]
    plan = autopar.plan(*_shaped(make, mesh), cluster=cluster, optimizer="sgd", time_limit=time_limit, cache=False)
    plans = {FOUND: plan, **price_strategies(plan)}
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for number, (called, one) in enumerate(plans.items()):
            path = Path(folder, f"{number}.lay")
            one.save(path)
            runs[called] = Run(mesh, str(path))
        rounds = measured_seconds(make, runs, plan.mesh.size, steps)
    measured = {called: undisturbed(seconds) for called, seconds in rounds.items()}
    best = min((called for called in plans if called != FOUND), key=measured.__getitem__)
    return {
        "predicted": {called: one.step_seconds for called, one in plans.items()},
        "measured": measured,
        "best_strategy": best,
        "ratio": measured[FOUND] / measured[best],
        "faster_share": faster_share(rounds[FOUND], rounds[best]),
    }


def _shaped(make: Make, mesh: str) -> tuple[Any, str, Any]:
    model, inputs = make()
    return model, mesh, inputs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solved", description=__doc__.split("\n\n")[0])
    parser.add_argument("--cluster", default="local-cpu", help="a name, or a TOML file (default: local-cpu)")
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--mesh", default="dp=2,tp=2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    report = {}
    for name in given.model or MODELS:
        found = report[name] = compared(name, given.mesh, given.cluster, given.steps, given.time_limit)
        if not given.json:
            print(
                f"{name} on {given.mesh}: {found['ratio']:.2f} x the best strategy, {found['best_strategy']}; "
                f"faster in {found['faster_share']:.0%} of the rounds",
                flush=True,
            )
            for called, seconds in sorted(found["measured"].items(), key=lambda pair: pair[1]):
                print(f"  {called:32} {1e3 * seconds:8.1f} ms   predicted {1e3 * found['predicted'][called]:8.1f} ms")
    if given.json:
        print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
