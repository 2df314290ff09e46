"""Compare the predicted order of strategies with the measured one, on Gloo processes.

    python -m benchmarks.order                       # against cost_models/local-cpu.toml
    python -m benchmarks.order --calibrate           # against this machine, measured first
    python -m benchmarks.order --ranks 2 --steps 20 --json
    python -m benchmarks.order --calibrate --pipelines    # data, tensor and pipeline parallelism, and pairs of them

A GPT is trained under each strategy in turn, step by step, so that a machine that drifts drifts for all. A step takes
as long as its slowest rank, and the median of the faster half counts, as in `autopar calibrate`. Beside it stands what
`evaluate` says of the same plan, and in how many rounds a strategy was faster than the one below it: where that is
fewer than three in four, their order is noise. The load is that of the machine before the first step, without the
steps themselves: other programs change the order, as they slow down strategies unequally. The last line judges all
pairs of a size and a strategy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import autopar
from autopar.cli import main as autopar_command
from autopar.cost.evaluate import evaluate
from autopar.cost.hardware.cluster import load_cluster
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.options import TrainingOptions
from autopar.sharding.time_slice import propagate_plan
from benchmarks.interleaved import Run, faster_share, measured_seconds, undisturbed
from benchmarks.published.metrics import Pair, kendall_tau, median_error
from examples.gpt import gpt

STRATEGIES = ("ddp", "fsdp", "megatron", "megatron_sp")
# Sizes of the GPT: `wide` has more bytes of weights, `long` more of activations.
SIZES: dict[str, dict[str, Any]] = {
    "small": {"layers": 4, "d_model": 256, "heads": 4, "vocab": 1024, "seq": 64, "batch": 8},
    "wide": {"layers": 2, "d_model": 1024, "heads": 8, "vocab": 1024, "seq": 32, "batch": 4},
    "long": {"layers": 4, "d_model": 128, "heads": 4, "vocab": 512, "seq": 256, "batch": 16},
}


def axis_of(strategy: str) -> str:
    """Return the mesh axis that a strategy names."""
    return {"ddp": "dp", "fsdp": "fsdp"}.get(strategy, "tp")


def strategies(ranks: int) -> dict[str, Run]:
    """Return the published strategies on one axis."""
    return {strategy: Run(f"{axis_of(strategy)}={ranks}", strategy) for strategy in STRATEGIES}


def pipelines(ranks: int, batch: int) -> dict[str, Run]:
    """Return data, tensor and pipeline parallelism, and a pipeline with each of the others."""
    stages = f"micro {min(4, batch // 2)}; pipeline pp 1f1b"
    half = ranks // 2
    return {
        "dp": Run(f"dp={ranks}", "ddp"),
        "tp": Run(f"tp={ranks}", "megatron"),
        "pp": Run(f"pp={ranks}", f"{stages}; * -> none"),
        "dp * pp": Run(f"pp=2,dp={half}", f"{stages}; ddp"),
        "tp * pp": Run(f"pp=2,tp={half}", f"{stages}; megatron"),
    }


def predicted_seconds(size: str, runs: Mapping[str, Run], cluster: str) -> dict[str, float]:
    """Return the predicted seconds of a step, by the names of the runs."""
    graph = autopar.trace(*gpt(**SIZES[size], device="meta"))
    found = {}
    for name, run in runs.items():
        axes = autopar.Mesh(run.mesh).whole
        plan = propagate_plan(graph, choose_layout(run.layout, axes), axes)
        plan = plan.with_options(TrainingOptions(optimizer="sgd"))
        found[name] = evaluate(graph, plan, load_cluster(cluster)).step_seconds
    return found


@contextmanager
def cluster_of(name: str, calibrates: bool, ranks: int) -> Iterator[str]:
    """Yield the cluster to price on: this machine, measured now, or a known one."""
    if not calibrates:
        yield name
        return
    with tempfile.TemporaryDirectory() as folder:
        found = str(Path(folder, "here.toml"))
        if autopar_command(["calibrate", "--processes", f"{ranks}", "--output", found]):
            sys.exit("the machine could not be measured")
        yield found


# Share of the rounds below which the faster of two is noise.
SURE = 0.75


def _line(name: str, measured: float, predicted: float, share: float | None) -> str:
    line = f"  {name:12} measured {measured * 1e3:8.1f} ms   predicted {predicted * 1e3:8.1f} ms"
    if share is None:
        return line
    return f"{line}   faster than the next in {share:.0%} of the rounds{'' if share >= SURE else ': noise'}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.order", description=__doc__.split("\n\n")[0])
    parser.add_argument("--cluster", default="local-cpu", help="a name, or a TOML file (default: local-cpu)")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine first, in place of --cluster")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--size", choices=SIZES, action="append", help="default: all")
    parser.add_argument("--pipelines", action="store_true", help="pipelines beside data and tensor parallelism")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    if not given.json:
        print(f"{given.ranks} ranks on {cores} cores, load {load:.1f}{': too busy to order' if load > cores else ''}")
    with cluster_of(given.cluster, given.calibrate, given.ranks) as cluster:
        report = {size: _order(size, cluster, given) for size in given.size or SIZES}
    total = judge(report.values())
    if given.json:
        print(json.dumps({"cores": cores, "load": load, **report, "all": total}, indent=2))
    else:
        print(f"{total['pairs']} pairs: median |error| {total['error']:.1%}, tau {total['tau']:.2f} of all of them")
    return 0


def judge(sizes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median error and the order of all pairs of a size and a strategy."""
    pairs = [Pair(one["predicted"][name], seconds) for one in sizes for name, seconds in one["measured"].items()]
    return {"pairs": len(pairs), "error": median_error(pairs), "tau": kendall_tau(pairs)}


def _order(size: str, cluster: str, given: argparse.Namespace) -> dict[str, Any]:
    """Measure and print one size."""
    runs = pipelines(given.ranks, SIZES[size]["batch"]) if given.pipelines else strategies(given.ranks)
    predicted = predicted_seconds(size, runs, cluster)
    rounds = measured_seconds(partial(gpt, **SIZES[size]), runs, given.ranks, given.steps)
    measured = {strategy: undisturbed(seconds) for strategy, seconds in rounds.items()}
    order = sorted(runs, key=lambda name: measured[name])
    shares = {one: faster_share(rounds[one], rounds[below]) for one, below in pairwise(order)}
    tau = kendall_tau([Pair(predicted[name], measured[name]) for name in runs])
    found = {"predicted": predicted, "measured": measured, "faster_than_next": shares, "tau": tau}
    if not given.json:
        print(f"{size}, {given.ranks} ranks: tau {tau:.2f}", flush=True)
        for name in order:
            print(_line(name, measured[name], predicted[name], shares.get(name)), flush=True)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
