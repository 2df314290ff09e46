"""The time to compile a model of many layers: each kind of repeated layer once, beside the whole graph.

    python -m benchmarks.compile                       # a GPT of 2 and of 32 layers on one rank, by inductor
    python -m benchmarks.compile --model llama --layers 2 16

Each case runs in a process of its own with an empty cache. Compilation is the processor time of the first step, forward
and backward, without that of a step afterwards. Then the median of some steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.lowering.collectives.process_groups import join_local_group
from examples.gpt import gpt
from examples.hf import hf

SIZES: dict[str, Any] = {"batch": 4, "seq": 64}
STEPS = 12


def model_of(name: str, layers: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    if name == "gpt":
        return gpt(layers=layers, d_model=128, heads=4, vocab=1024, **SIZES)
    config: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 512,
        "vocab_size": 1024,
        "num_hidden_layers": layers,
    }
    model, inputs = hf(name, train=True, dropout=0.0, **SIZES, **config)
    return model, {**inputs, "labels": inputs["input_ids"]}


def measure(name: str, layers: int, way: str) -> dict[str, float]:
    """Return the seconds of processor time to compile, and the median time of a step."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        join_local_group(Path(folder, "meeting"), 0, 1)
    model, inputs = model_of(name, layers)
    parallel = autopar.parallelize(model, "dp=1", inputs, layout="ddp")
    called: Any = parallel
    start = _processor_seconds()
    if way == "layers":
        parallel.compile_layers()
    elif way == "whole":
        called = torch.compile(parallel)

    def step() -> None:
        parallel.zero_grad()
        result = called(**inputs)
        (result if isinstance(result, torch.Tensor) else result.loss).backward()

    step()
    first = _processor_seconds() - start
    times = []
    for _ in range(STEPS):
        before = time.process_time()
        step()
        times.append(time.process_time() - before)
    dist.destroy_process_group()
    usual = statistics.median(times)
    return {"compile_seconds": first - usual, "step_seconds": usual}


def _processor_seconds() -> float:
    """Return the processor time of this process and of the compilers that it has started."""
    return sum(os.times()[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt", help="gpt, or an architecture of transformers")
    parser.add_argument("--layers", nargs=2, type=int, default=[2, 32])
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        layers, way = arguments.case.split()
        print(json.dumps(measure(arguments.model, int(layers), way)))
        return
    print(f"{arguments.model:10} layers  compiled   compile s   step ms")
    for way in ("layers", "whole", "eager"):
        found = []
        for layers in arguments.layers:
            row = _case(arguments.model, f"{layers} {way}")
            found.append(row)
            print(
                f"{'':10} {layers:6}  {way:8} {row['compile_seconds']:11.1f} {row['step_seconds'] * 1e3:9.1f}",
                flush=True,
            )
        if way != "eager":
            ratio = found[1]["compile_seconds"] / found[0]["compile_seconds"]
            print(f"{'':10} {way}: compilation of {arguments.layers[1]} layers ÷ {arguments.layers[0]}: {ratio:.2f}")


def _case(model: str, case: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        # One process compiles, so that its processor time is all of it.
        own = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        own.setdefault("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compile", "--model", model, "--case", case]
        done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, check=True)
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


if __name__ == "__main__":
    main()
