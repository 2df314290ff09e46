"""The time of a training step beside torch's own ways of doing the same, side by side in one run.

    python -m benchmarks.step                        # all comparisons, on 1, 2 and 4 Gloo ranks of one thread each
    python -m benchmarks.step --only ddp --ranks 2 --size small --steps 100
    python -m benchmarks.step --compiled --json step.json
    python -m benchmarks.step --hf                   # models of transformers on one rank, beside the plain model
    python -m benchmarks.step --moe                  # experts on ranks of their own, beside experts that are gathered
    python -m benchmarks.step --moe --ranks 1        # blocks of experts on one rank, beside the plain block

A step is: gradients dropped, forward, backward and the step of AdamW (`--optimizer none` leaves it out). Ours and the
peer take turns step by step, so that a machine that drifts drifts for both; a step takes as long as its slowest rank.
The ratio is that of the medians; the noise beside it is the ratio of the peer's median over one half of its steps to
that over the other half. What is sent is counted where torch hands collectives to the process group, for ours and for
the peer alike.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.lowering.collectives.process_groups import join_local_group
from benchmarks.peers import PEERS, Peer
from examples.gpt import gpt
from examples.hf import hf

SIZES: dict[str, dict[str, Any]] = {
    # So small that a CPU spends more time on dispatching ops than on their arithmetic.
    "host": {"layers": 4, "d_model": 64, "heads": 4, "vocab": 256, "seq": 16, "batch": 2},
    "small": {"layers": 4, "d_model": 128, "heads": 4, "vocab": 1024, "seq": 64, "batch": 8},
    "25M": {"layers": 6, "d_model": 512, "heads": 8, "vocab": 12000, "seq": 64, "batch": 8},
}
# With 100 small steps ratios of two runs differed by 4 %, with 400 by 2 %; 24 large ones gave 11 % more than 60.
STEPS = {"host": 400, "small": 400, "25M": 60, "block": 24}
WARM_UP = 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer] | None] = {
    "none": None,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-5),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-5, fused=True),
}


@dataclass(frozen=True)
class Comparison:
    name: str
    layout: str
    axis: str
    peer: str
    target: float
    peer_name: str


COMPARISONS = (
    Comparison("one rank", "ddp", "dp", "plain", 1.03, "the plain model"),
    Comparison("ddp", "ddp", "dp", "ddp", 1.03, "DistributedDataParallel"),
    Comparison("fsdp", "fsdp", "fsdp", "fsdp", 0.85, "fully_shard, gathered once"),
    Comparison("fsdp again", "fsdp", "fsdp", "fsdp_again", 0.85, "fully_shard, gathered again"),
    Comparison("megatron", "megatron", "tp", "megatron", 0.95, "parallelize_module"),
)
COMPILED_TARGET = 1.02
HF_COMPILED_TARGET = 1.03
HF = ("llama", "gpt2", "mistral", "qwen3")
HF_COMPARISON = Comparison("one rank", "ddp", "dp", "plain", 1.05, "the plain model")
# Torch has no expert parallelism that runs on a CPU, so the peer gathers the experts.
MOE_COMPARISON = Comparison(
    "experts", "batch -> ep; @*experts* { expert -> ep }", "ep", "fsdp", 0.90, "fully_shard, gathered once"
)
# Experts and experts of a token, at the width of the size.
MOE = {"mixtral-8": (8, 2), "mixtral-32": (32, 4)}
BLOCK_COMPARISON = replace(HF_COMPARISON, name="one rank", target=1.0, peer_name="the plain block")
# Widths of the stream and of an expert, experts, experts of a token, tokens.
BLOCKS = {
    "8 experts": (256, 512, 8, 2, 1024),
    "32 experts": (512, 256, 32, 4, 1024),
    "64 experts": (1024, 512, 64, 8, 256),
}


def hf_causal(architecture: str, size: str) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """Build a causal language model of transformers in the size of the GPT, with labels among its inputs."""
    sizes = SIZES[size]
    width, heads = sizes["d_model"], sizes["heads"]
    if architecture == "gpt2":
        config = {"n_embd": width, "n_layer": sizes["layers"], "n_head": heads, "n_inner": 4 * width}
    else:
        config = {
            "hidden_size": width,
            "num_hidden_layers": sizes["layers"],
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "head_dim": width // heads,
            "intermediate_size": 4 * width,
        }
        if architecture == "mistral":
            config["sliding_window"] = 4096  # the default of the architecture
    model, inputs = hf(
        architecture, sizes["batch"], sizes["seq"], train=True, dropout=0.0, vocab_size=sizes["vocab"], **config
    )
    ids = inputs["input_ids"]
    return model, {"input_ids": ids, "labels": ids.clone()}


def moe(name: str, size: str) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """Build a Mixtral of two layers with the given experts, each twice as wide as the stream."""
    sizes, (experts, each) = SIZES[size], MOE[name]
    width = sizes["d_model"]
    config = mixtral_config(width, 2 * width, experts, each) | {"num_hidden_layers": 2, "vocab_size": sizes["vocab"]}
    model, inputs = hf("mixtral", 2 * sizes["batch"], sizes["seq"], train=True, dropout=0.0, **config)
    ids = inputs["input_ids"]
    return model, {"input_ids": ids, "labels": ids.clone()}


def mixtral_config(width: int, hidden: int, experts: int, each: int) -> dict[str, Any]:
    config = {"hidden_size": width, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4}
    return config | {"intermediate_size": hidden, "num_local_experts": experts, "num_experts_per_tok": each}


class ExpertBlock(nn.Module):
    """The experts of a Mixtral with their router, and a loss."""

    def __init__(self, width: int, hidden: int, experts: int, each: int) -> None:
        super().__init__()
        config = mixtral_config(width, hidden, experts, each)
        model, _ = hf("mixtral", train=True, num_hidden_layers=1, vocab_size=8, **config)
        layers: Any = model.get_submodule("model.layers")
        self.block = layers[0].mlp

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.block(x)
        return made.square().mean()


def expert_block(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    *sizes, tokens = BLOCKS[name]
    return ExpertBlock(*sizes), {"x": torch.randn(1, tokens, sizes[0])}


@dataclass(frozen=True)
class Row:
    name: str
    peer: str
    size: str
    ranks: int
    compiled: bool
    optimizer: str
    steps: int
    ours_ms: float
    peer_ms: float
    ratio: float
    noise: float
    target: float
    ours_sent_mib: float
    peer_sent_mib: float
    ours_collectives: int
    peer_collectives: int
    loss_difference: float


class Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives that are handed to the process group, and the bytes that a rank sends by them."""

    def __init__(self, ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ranks = ranks
        self.count = 0
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd") and "wait" not in name:
            self._count(name, [_bytes(value) for value in args])
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, sizes: Sequence[int]) -> None:
        share = (self.ranks - 1) / self.ranks
        factor = 2.0 if "reduce" in name and "scatter" not in name else 1.0
        whole = max(sizes)
        if name.startswith("all_gather_into_tensor"):  # the functional one is given its shard only
            whole *= self.ranks
        self.count += 1
        self.bytes += whole * factor * share


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def stepper(peer: Peer, optimizer: str, compiled: bool) -> Callable[[], Tensor]:
    model: Any = torch.compile(peer.model) if compiled else peer.model
    make = OPTIMIZERS[optimizer]
    optimise = None if make is None else make(peer.model.parameters())
    parameters = list(peer.model.parameters())

    def step() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        with peer.around():
            output = model(**peer.inputs)
            loss: Tensor = output if isinstance(output, Tensor) else output.loss
            loss.backward()  # type: ignore[no-untyped-call]
        if optimise is not None:
            optimise.step()
        return loss.detach()

    return step


def compare(
    comparison: Comparison,
    size: str,
    arguments: argparse.Namespace,
    rank: int,
    ranks: int,
    architecture: str | None = None,
) -> Row:
    torch.manual_seed(0)
    model: nn.Module
    if architecture in BLOCKS:
        model, inputs = expert_block(architecture)
    elif architecture in MOE:
        model, inputs = moe(architecture, size)
    else:
        model, inputs = hf_causal(architecture, size) if architecture else gpt(**SIZES[size])
    target = comparison.target
    if arguments.compiled:
        target = HF_COMPILED_TARGET if architecture else COMPILED_TARGET
    name = f"{comparison.name} {architecture}" if architecture else comparison.name
    return compare_models(replace(comparison, name=name, target=target), model, inputs, size, arguments, rank, ranks)


def compare_models(
    comparison: Comparison,
    model: nn.Module,
    inputs: dict[str, Tensor],
    size: str,
    arguments: argparse.Namespace,
    rank: int,
    ranks: int,
) -> Row:
    """Time our steps of a model and those of the peer, in turns."""
    steps = arguments.steps or STEPS[size]
    torch.compiler.reset()  # what was compiled for another comparison makes sizes symbols in this one
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.AutoparWarning)
        ours = autopar.parallelize(model, f"{comparison.axis}={ranks}", inputs, layout=comparison.layout)
    peer = PEERS[comparison.peer](model, inputs, rank, ranks)
    pair = [stepper(each, arguments.optimizer, arguments.compiled) for each in (Peer(ours, inputs), peer)]
    losses, sent = [], []
    for step in pair:
        for _ in range(WARM_UP):
            step()
        counter = Sent(ranks)
        with counter if not arguments.compiled else nullcontext():
            loss = step()
        losses.append(_mean(loss))
        sent.append(counter)
    times: list[list[float]] = [[], []]
    gc.collect()
    for turn in range(steps):
        for which in ((0, 1), (1, 0))[turn % 2]:
            times[which].append(_timed(pair[which]))
    slowest = [_slowest(each) for each in times]
    medians = [_typical(each) for each in slowest]
    pairs_of_turns = [[s for turn, s in enumerate(slowest[1]) if turn // 2 % 2 == half] for half in (0, 1)]
    noise = _typical(pairs_of_turns[0]) / _typical(pairs_of_turns[1])
    return Row(
        comparison.name,
        comparison.peer_name,
        size,
        ranks,
        arguments.compiled,
        arguments.optimizer,
        steps,
        medians[0] * 1e3,
        medians[1] * 1e3,
        medians[0] / medians[1],
        noise,
        comparison.target,
        sent[0].bytes / 2**20,
        sent[1].bytes / 2**20,
        sent[0].count,
        sent[1].count,
        abs(losses[0] - losses[1]) / losses[1],
    )


def _typical(seconds: Sequence[float]) -> float:
    """Return the mean of the medians of even and odd turns: a step that follows its own kind finds warm caches."""
    return statistics.mean(statistics.median(seconds[start::2]) for start in (0, 1))


def _timed(step: Callable[[], Tensor]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _slowest(seconds: list[float]) -> list[float]:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    slowest: list[float] = found.tolist()
    return slowest


def _mean(loss: Tensor) -> float:
    """Return the loss of the whole batch: ours has it, a data-parallel peer has its rank's."""
    local = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    total = local.to(torch.float64).clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def wanted(arguments: argparse.Namespace, ranks: int) -> list[tuple[Comparison, str | None]]:
    """Return the comparisons to make, each with an architecture of transformers or none for the GPT."""
    if arguments.hf:
        return [(HF_COMPARISON, architecture) for architecture in arguments.architecture or HF]
    if arguments.moe:
        return [(BLOCK_COMPARISON, name) for name in BLOCKS] if ranks == 1 else [(MOE_COMPARISON, name) for name in MOE]
    named = [each for each in COMPARISONS if not arguments.only or each.name in arguments.only]
    return [(each, None) for each in named if (each.peer == "plain") == (ranks == 1)]


def run_rank(rank: int, ranks: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    join_local_group(Path(folder, "meeting"), rank, ranks)
    for size in ["block"] if arguments.moe and ranks == 1 else arguments.size:
        for comparison, architecture in wanted(arguments, ranks):
            row = compare(comparison, size, arguments, rank, ranks, architecture)
            if rank == 0:
                print(line(row), flush=True)
                with Path(folder, "rows").open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    dist.barrier()
    dist.destroy_process_group()


HEAD = f"{'ours ÷ peer':42} {'size':6} ranks   ours ms   peer ms  ratio  noise  target   MiB sent     collectives"


def line(row: Row) -> str:
    name = f"{row.name}{' compiled' if row.compiled else ''} ÷ {row.peer}"
    mark = "" if row.ratio <= row.target else "  over"
    sent = "" if row.compiled else f"{row.ours_sent_mib:6.1f} {row.peer_sent_mib:6.1f}"
    counts = "" if row.compiled else f"{row.ours_collectives:5} {row.peer_collectives:5}"
    return (
        f"{name:42} {row.size:6} {row.ranks:5} {row.ours_ms:9.1f} {row.peer_ms:9.1f} {row.ratio:6.3f} {row.noise:6.3f}"
        f" {row.target:6.2f}  {sent:13} {counts}{mark}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[c.name for c in COMPARISONS], help="may be repeated")
    parser.add_argument("--size", action="append", choices=list(SIZES), help="may be repeated")
    parser.add_argument("--ranks", action="append", type=int, help="may be repeated; by default 1, 2 and 4")
    parser.add_argument("--steps", type=int, help="timed steps of each; by default " + str(STEPS))
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    parser.add_argument("--compiled", action="store_true", help="both under torch.compile")
    parser.add_argument("--hf", action="store_true", help="models of transformers on one rank: " + ", ".join(HF))
    parser.add_argument("--moe", action="store_true", help="mixtures of experts: " + ", ".join((*MOE, *BLOCKS)))
    parser.add_argument("--architecture", action="append", help="with --hf: another architecture; may be repeated")
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args()
    sizes = ["small"] if arguments.moe else [size for size in SIZES if arguments.hf or size != "host"]
    arguments.size = arguments.size or sizes
    print(HEAD, flush=True)
    rows: list[Any] = []
    for ranks in [1] if arguments.hf else arguments.ranks or ([4] if arguments.moe else [1, 2, 4]):
        with tempfile.TemporaryDirectory() as folder:
            given = (ranks, arguments, folder)
            spawn(run_rank, args=given, nprocs=ranks)  # type: ignore[no-untyped-call]
            found = Path(folder, "rows")
            if found.exists():
                rows.extend(json.loads(line) for line in found.read_text().splitlines())
    conclude(rows, arguments.json)


def conclude(rows: Sequence[Mapping[str, Any]], file: str | None) -> None:
    """Write the rows to a file, if one is given, and print the largest difference of the losses."""
    if file:
        Path(file).write_text(json.dumps(rows, indent=1) + "\n")
    worst = max((row["loss_difference"] for row in rows), default=0.0)
    print(f"largest relative difference between our loss and the peer's: {worst:.1e}")


if __name__ == "__main__":
    main()
