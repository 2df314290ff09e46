"""Measure time and memory of a trace beside the bare export that it builds on.

    python -m benchmarks.trace                 # Llama-3-8B, 32 layers, batch 16, sequence 8192, on the meta device
    python -m benchmarks.trace --layers 80 --rounds 5
    python -m benchmarks.trace --layers 126 --full    # every layer traced, as if no two were equal

Both run in one process, interleaved. The ratio of the medians is what counts, machines differ. Seconds are the
processor's.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import autopar
from autopar.tracing.export.export import export
from autopar.tracing.trace import named_graph
from examples.llama3_8b import llama3_8b


def bare(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Run the part that any tool that starts from torch.export needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.export.export(model, (), inputs, strict=False).run_decompositions({})


def seconds(action: Callable[[], object]) -> float:
    gc.collect()
    start = time.process_time()
    action()
    return time.process_time() - start


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="trace every layer")
    arguments = parser.parse_args()
    model, inputs = llama3_8b(layers=arguments.layers)
    exporter = partial(export, layers_once=not arguments.full)
    before, memory = peak_gib(), 0.0
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(arguments.rounds):
        ours.append(seconds(lambda: named_graph(model, inputs, None, exporter)))
        memory = memory or peak_gib()
        theirs.append(seconds(lambda: bare(model, inputs)))
    graph = autopar.trace(model, inputs)
    ratio = statistics.median(ours) / statistics.median(theirs)
    print(f"Llama-3-8B with {arguments.layers} layers, {len(graph.nodes):,} ops, rules {graph.coverage()}")
    print(f"dims: {', '.join(name for name, dim in graph.dims.items() if dim.source == 'structure')}")
    print(f"bare export and decomposition  {statistics.median(theirs):6.2f} s  (median of {arguments.rounds})")
    print(f"trace + bind + name            {statistics.median(ours):6.2f} s")
    print(f"ratio                          {ratio:6.2f}")
    print(f"peak memory of the first trace {memory:6.2f} GiB, of which {before:.2f} before it")


if __name__ == "__main__":
    main()
