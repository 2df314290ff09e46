"""The time of a step with frozen weights and trained adapters, beside torch's own ways, and what each sends.

    python -m benchmarks.lora                    # a Llama with adapters of rank 16 on 2 Gloo ranks of one thread each
    python -m benchmarks.lora --full             # the same model with all weights trained: what freezing saves
    python -m benchmarks.lora --peft --ranks 4   # the adapters of the library peft

Steps are timed as in `benchmarks.step`: ours and the peer take turns, a step takes as long as its slowest rank, and the
ratio is that of the medians. A rank sends the bytes that torch hands to its process group. In full, `ddp` sends the
gradients of all weights, and `fsdp` gathers all weights and reduces the gradients of all.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from autopar.lowering.collectives.process_groups import join_local_group
from benchmarks.step import HEAD, OPTIMIZERS, SIZES, Comparison, compare_models, conclude, line
from examples.lora_llama import lora_llama

FSDP = "batch -> fsdp; * -> none; param, grad, opt { * -> fsdp | none }"
COMPARISONS = (
    Comparison("ddp", "ddp", "dp", "ddp", 1.05, "DistributedDataParallel"),
    Comparison("fsdp", "fsdp", "fsdp", "fsdp", 0.90, "fully_shard, gathered once"),
    Comparison("fsdp again", f"{FSDP}; regather @*", "fsdp", "fsdp_again", 0.90, "fully_shard, gathered again"),
)


def model_of(size: str, arguments: argparse.Namespace) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build a Llama of the width and depth of that size, with adapters; with `full`, everything is trained."""
    sizes = SIZES[size]
    width, heads = sizes["d_model"], sizes["heads"]
    config = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "vocab_size": sizes["vocab"],
    }
    model, inputs = lora_llama("small", sizes["batch"], sizes["seq"], arguments.rank, peft=arguments.peft, **config)
    if arguments.full:
        model.requires_grad_(True)
    # Adapters are zero at first, and products with zeros may be faster.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return model, inputs


def run_rank(rank: int, ranks: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    join_local_group(Path(folder, "meeting"), rank, ranks)
    rows = []
    for size in arguments.size:
        for comparison in COMPARISONS:
            if arguments.only and comparison.name not in arguments.only:
                continue
            torch.manual_seed(0)
            model, inputs = model_of(size, arguments)
            named = replace(comparison, name=f"{comparison.name} {'full' if arguments.full else 'LoRA'}")
            row = compare_models(named, model, inputs, size, arguments, rank, ranks)
            if rank == 0:
                print(line(row), flush=True)
                rows.append(asdict(row))
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[c.name for c in COMPARISONS], help="may be repeated")
    parser.add_argument(
        "--size", action="append", choices=list(SIZES), help="may be repeated; by default small and 25M"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--peft", action="store_true", help="the adapters of the library peft")
    parser.add_argument("--full", action="store_true", help="all weights are trained, adapters too")
    parser.add_argument("--steps", type=int, help="timed steps of each")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="none")
    parser.add_argument("--compiled", action="store_true", help="both under torch.compile")
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args()
    arguments.size = arguments.size or ["small", "25M"]
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        given: Any = (arguments.ranks, arguments, folder)
        spawn(run_rank, args=given, nprocs=arguments.ranks)  # type: ignore[no-untyped-call]
        rows = json.loads(Path(folder, "rows").read_text())
    conclude(rows, arguments.json)


if __name__ == "__main__":
    main()
