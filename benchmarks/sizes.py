"""Measure a call with inputs of a new size: with symbolic sizes, and with a trace for each size.

    python -m benchmarks.sizes                          # Llama with 2 layers under megatron on 2 ranks
    python -m benchmarks.sizes --layers 8 --layout ddp --axis dp

Prints CPU milliseconds of the first rank for a forward: at the second size, at later ones in the mean, and again.
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
    for dynamic in (None, False):
        parallel = autopar.parallelize(model, f"{options.axis}={RANKS}", inputs, layout=options.layout, dynamic=dynamic)
        lengths = range(17, 18 + options.lengths)
        second, *later = [_milliseconds(parallel, options.batch, length) for length in lengths]
        again = min(_milliseconds(parallel, options.batch, length) for length in lengths)
        if rank == 0:
            name = "symbolic sizes" if dynamic is None else "a trace each"
            times = f"second size {second:7.0f}   later sizes {mean(later):7.0f}   known sizes {again:5.1f}"
            print(f"{name:15} {times}  ms", flush=True)
    dist.destroy_process_group()


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
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (options, str(Path(folder, "store"))), nprocs=RANKS)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
