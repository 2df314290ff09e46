"""Measure the time to evaluate one plan of Llama-3-8B: the first time, and again.

python -m benchmarks.evaluate [--layers 32] [--layout megatron] [--mesh dp=8,tp=8] [--cluster h100]
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

import autopar
from autopar.cost.evaluate import evaluate
from autopar.cost.hardware.cluster import load_cluster
from autopar.mesh import Mesh
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.time_slice import propagate_plan
from examples.llama3_8b import llama3_8b


def timed(name: str, call: object, times: int = 1) -> float:
    """Return the processor time, which excludes other programs."""
    assert callable(call)
    found = []
    for _ in range(times):
        begin = time.process_time()
        call()
        found.append(time.process_time() - begin)
    print(f"{name:32} {median(found):7.3f} s")
    return median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--layout", default="megatron")
    parser.add_argument("--mesh", default="dp=8,tp=8")
    parser.add_argument("--cluster", default="h100")
    options = parser.parse_args()
    mesh, cluster = Mesh(options.mesh), load_cluster(options.cluster)
    axes = mesh.whole
    torch.set_default_dtype(torch.bfloat16)
    model, inputs = llama3_8b(layers=options.layers, loss=True)
    torch.set_default_dtype(torch.float32)
    graph = autopar.trace(model, inputs)
    print(f"{len(graph.nodes)} ops on {options.mesh}")
    plan = propagate_plan(graph, choose_layout(options.layout, axes), axes)
    timed("what ops keep, once per graph", lambda: graph.footprints)
    timed("the first plan", lambda: evaluate(graph, plan, cluster))
    timed("a plan", lambda: evaluate(graph, plan, cluster), times=5)
    costs = evaluate(graph, plan, cluster)
    print(
        f"step {costs.step_seconds * 1e3:.1f} ms, MFU {costs.mfu:.1%}, peak {costs.memory.peak_bytes / 2**30:.1f} GiB"
    )


if __name__ == "__main__":
    main()
