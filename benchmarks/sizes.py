"""Measure a call with inputs of a new size: with symbolic sizes, and with a trace for each size.

    python -m benchmarks.sizes                          # Llama with 2 layers under megatron on 2 ranks
    python -m benchmarks.sizes --layers 8 --layout ddp --axis dp

Prints CPU milliseconds of the first rank for a forward: at the second size, at later ones in the mean, and at known
sizes. Those are called in turn, many times: of each size the least counts, and of the sizes the mean. A process on
another core, and code that Python has run a few times only, take up to twice as long. The whole model on one process,
which sends nothing, is called as often.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import autopar
from examples.llama3_8b import llama3_8b

RANKS = 2
SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def _rank(rank: int, options: argparse.Namespace, store: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model, inputs = llama3_8b(options.layers, options.batch, 16, device="cpu", loss=True, **SMALL)
    lengths = range(17, 18 + options.lengths)
    plain = _known_milliseconds(model, options, lengths)
    if rank == 0:
        print(f"{'the plain model':15} {'':48} known sizes {plain:5.1f}  ms", flush=True)
    for dynamic in (None, False):
        parallel = autopar.parallelize(model, f"{options.axis}={RANKS}", inputs, layout=options.layout, dynamic=dynamic)
        second, *later = [_milliseconds(parallel, options.batch, length) for length in lengths]
        again = _known_milliseconds(parallel, options, lengths)
        if rank == 0:
            name = "symbolic sizes" if dynamic is None else "a trace each"
            times = f"second size {second:7.0f}   later sizes {mean(later):7.0f}   known sizes {again:5.1f}"
            print(f"{name:15} {times}  ms, {again / plain:.1f} x the plain model", flush=True)
    dist.destroy_process_group()


def _known_milliseconds(model: Any, options: argparse.Namespace, lengths: range) -> float:
    rounds = [[_milliseconds(model, options.batch, length) for length in lengths] for _ in range(options.repeats)]
    least: list[float] = list(map(min, zip(*rounds, strict=True)))
    return mean(least)


def _milliseconds(parallel: Any, batch: int, length: int) -> float:
    torch.manual_seed(length)
    ids = torch.randint(SMALL["vocab_size"], (batch, length))
    began = time.process_time()
    parallel(input_ids=ids, labels=ids)
    return (time.process_time() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--layout", default="megatron")
    parser.add_argument("--axis", default="tp")
    parser.add_argument("--lengths", type=int, default=8, help="number of later sizes; the mean counts")
    parser.add_argument("--repeats", type=int, default=50, help="number of calls of each known size; the least counts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (options, str(Path(folder, "store"))), nprocs=RANKS)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
