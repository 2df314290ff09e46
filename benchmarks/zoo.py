"""Whole models under strategies, on real processes: `python -m benchmarks.zoo [ARCHITECTURE ...]`.

Prints a table of architecture x strategy for each mesh: the largest relative difference of outputs, gradients and
buffers from one process, or the reason why there is none. Meshes are given by their sizes, `--meshes 2 2x2`; which axes
of them a strategy takes for data and which for the model is said by ASSIGNMENTS. What has batch statistics is run in
train mode as well. All of it takes a quarter of an hour on two cores; lines on stderr show how far it is.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import autopar
from autopar.cli.verify_processes import differences, results_of
from autopar.errors import AutoparError, AutoparWarning
from autopar.lowering.collectives.process_groups import device_mesh
from autopar.mesh import Mesh
from autopar.runtime.module import ParallelModule
from autopar.sharding.contracts import check_contracts
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.layout.syntax import Recompute
from autopar.sharding.propagation import propagate
from autopar.sharding.reshard_insertion import inserted_reshards
from benchmarks.architectures import STANDARD
from examples.hf import hf, small_config
from tests.runtime.launcher import launch

# Each strategy with its axis for data and its axis for the model.
STRATEGIES = {
    "ddp": ("dp", None),
    "fsdp": ("fsdp", None),
    "megatron": ("dp", "tp"),
    "megatron_sp": ("dp", "tp"),
    "fsdp_tp": ("fsdp", "tp"),
}

# Use of each axis of a mesh of one, two or three: data (d) or the model (m).
ASSIGNMENTS: dict[str, dict[int, str]] = {
    "ddp": {1: "d", 2: "dd", 3: "ddd"},
    "fsdp": {1: "d", 2: "dd", 3: "ddd"},
    "megatron": {1: "m", 2: "dm", 3: "ddm"},
    "megatron_sp": {1: "m", 2: "dm", 3: "ddm"},
    "fsdp_tp": {1: "m", 2: "dm", 3: "ddm"},
}

MESHES = ("2", "4", "2x2", "2x2x2")

MODEL_DIMS = {"heads", "kv_heads", "d_ff", "vocab"}
# The reason of a strategy that splits dims which a model lacks.
NO_DIMS = "no dims"

AXES = "abc"
BATCH, SEQ, VOCAB = 8, 16, 104
ALLOWED, ALLOWED_FLOAT32 = 1e-9, 1e-5
# Models that cast to float32 inside, whatever their dtype: now and then the order of a sum shows there.
FLOAT32 = {"llama", "mistral", "qwen3", "gemma2", "phi3", "t5"}

# Sizes that examples/hf.py makes odd.
DIVIDED: dict[str, dict[str, Any]] = {"swin": {"num_heads": [4, 4, 8, 8]}}


@dataclass(frozen=True)
class Outcome:
    """Outcome of one model under one strategy: the error, or the reason why there is none."""

    strategy: str
    error: float | None
    # The value that differs most, or the reason.
    where: str
    collectives: int = 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    parser.add_argument("architectures", nargs="*", default=STANDARD)
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--meshes", nargs="+", default=MESHES, help="sizes, as in 2x2; by default " + " ".join(MESHES))
    parser.add_argument("--train", action="store_true", help="in train mode, with every dropout 0")
    parser.add_argument("--dropout", type=float, default=0.0, help="in train mode, dropping what one process drops")
    parser.add_argument(
        "--recompute", choices=get_args(Recompute), default="none", help="compute repeated layers again"
    )
    parser.add_argument("--seconds", type=float, default=1200, help="limit for one architecture on one mesh")
    given = parser.parse_args(arguments)
    console, reasons, wrong = Console(width=140), [], 0
    for mesh in given.meshes:
        table = Table("architecture", *given.strategies, "seconds", title=f"largest relative error on a mesh {mesh}")
        for architecture in given.architectures:
            train = given.train or given.dropout > 0
            for mode in (train,) if train or not has_batch_statistics(architecture) else (False, True):
                name = f"{architecture} (train)" if mode else architecture
                started = time.perf_counter()
                sizes = tuple(int(size) for size in mesh.split("x"))
                outcomes = zoo_outcomes(
                    architecture, given.strategies, sizes, mode, given.seconds, given.dropout, given.recompute
                )
                cells = [_cell(architecture, outcome) for outcome in outcomes]
                table.add_row(name, *cells, f"{time.perf_counter() - started:.0f}")
                bad = [outcome for outcome in outcomes if not is_right(architecture, outcome)]
                found = [f"{name} on {mesh} under {o.strategy}: {o.where}" for o in bad if o.where != NO_DIMS]
                reasons += found
                wrong += any(outcome.where != NO_DIMS for outcome in bad)
                print(mesh, name, *cells, *found, sep="  ", file=sys.stderr, flush=True)
        console.print(table)
    for reason in reasons:
        console.print(reason, markup=False, highlight=False)
    return 1 if wrong else 0


def is_right(architecture: str, outcome: Outcome) -> bool:
    """Return True if outputs and gradients agree with those of one process."""
    allowed = ALLOWED_FLOAT32 if architecture in FLOAT32 else ALLOWED
    return outcome.error is not None and outcome.error <= allowed


def _cell(architecture: str, outcome: Outcome) -> str:
    if outcome.error is None:
        return outcome.where if outcome.where == NO_DIMS else outcome.where.split()[0][:12]
    return f"{outcome.error:.0e}" + ("" if is_right(architecture, outcome) else " WRONG")


def zoo_outcomes(
    architecture: str,
    strategies: Iterable[str],
    sizes: tuple[int, ...],
    train: bool = False,
    seconds: float = 240,
    dropout: float = 0.0,
    recompute: Recompute = "none",
) -> list[Outcome]:
    """Run all strategies in one launch; if some rank fails, run each in its own."""
    strategies = tuple(strategies)
    try:
        found: list[Outcome] = launch(
            rank_outcomes,
            architecture,
            strategies,
            sizes,
            train,
            dropout,
            recompute,
            ranks=prod(sizes),
            seconds=seconds,
        )[0]
    except AssertionError as error:
        if len(strategies) > 1 and "in time" not in str(error).splitlines()[0]:
            alone = (zoo_outcomes(architecture, [one], sizes, train, seconds, dropout, recompute) for one in strategies)
            return [outcomes[0] for outcomes in alone]
        lines = [line for line in str(error).splitlines() if line.strip()]
        return [Outcome(strategy, None, f"failed: {lines[0]} {lines[-1]}") for strategy in strategies]
    return found


def rank_outcomes(
    architecture: str,
    strategies: tuple[str, ...],
    sizes: tuple[int, ...],
    train: bool,
    dropout: float = 0.0,
    recompute: Recompute = "none",
) -> list[Outcome]:
    """Return the outcomes on one rank."""
    warnings.simplefilter("ignore", AutoparWarning)
    parts = max(model_parts(strategy, sizes) for strategy in strategies)
    model, inputs = zoo_model(architecture, train, dropout, parts)
    graph = autopar.trace(model, inputs)
    expected = results_of(model, inputs)
    mesh = Mesh(**dict(zip(AXES, sizes, strict=False)))
    axes = mesh.whole
    devices = device_mesh(mesh)
    outcomes = []
    for strategy in strategies:
        if STRATEGIES[strategy][1] is not None and MODEL_DIMS.isdisjoint(graph.dims):
            outcomes.append(Outcome(strategy, None, NO_DIMS))
            continue
        try:
            layout = choose_layout(strategy_call(strategy, len(sizes)), axes)
            assignment = propagate(graph, layout, axes)
            assignment = replace(assignment, recompute=dict.fromkeys(graph.ops_of_layers, recompute))
            check_contracts(layout, graph, assignment, inserted_reshards(graph, assignment, "full"))
            parallel = ParallelModule.planned(graph, assignment, devices, outputs="full")
        except AutoparError as error:
            outcomes.append(Outcome(strategy, None, str(error)))
            continue
        with parallel.exact_randomness():
            worst, *_ = differences(expected, results_of(parallel, inputs))
        where = f"{worst.name} {worst.reason}".strip()
        outcomes.append(Outcome(strategy, worst.relative, where, len(parallel.collectives())))
    return outcomes


def strategy_call(strategy: str, count: int) -> str:
    """Return the strategy with its axes on a mesh of so many axes."""
    given = []
    for axis, what in zip(STRATEGIES[strategy], "dm", strict=True):
        taken = [mine for mine, use in zip(AXES, ASSIGNMENTS[strategy][count], strict=False) if use == what]
        if taken:
            given.append(f"{axis}={'*'.join(taken)}")
    return f"{strategy}({','.join(given)})"


def model_parts(strategy: str, sizes: tuple[int, ...]) -> int:
    """Into how many parts a strategy cuts the model itself."""
    uses = ASSIGNMENTS[strategy][len(sizes)]
    return prod(size for size, use in zip(sizes, uses, strict=True) if use == "m")


def has_batch_statistics(architecture: str) -> bool:
    """Return True if a model has batch statistics, which change in training."""
    model, _ = zoo_model(architecture, train=False)
    return any(name.endswith("running_mean") for name, _ in model.named_buffers())


def zoo_model(
    architecture: str, train: bool, dropout: float = 0.0, parts: int = 1
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model in float64, with sizes that small meshes divide; `parts` divides the groups of queries."""
    torch.manual_seed(0)
    default = small_config(architecture, SEQ)
    sizes: dict[str, Any] = {"vocab_size": VOCAB} if hasattr(default, "vocab_size") else {}
    if hasattr(default, "text_config"):
        sizes["text_config"] = {"vocab_size": VOCAB}
    if train and not dropout and hasattr(default, "drop_path_rate"):
        sizes["drop_path_rate"] = 0.0
    if getattr(default, "num_key_value_heads", parts) < parts:
        sizes |= {"num_key_value_heads": parts, "num_attention_heads": 2 * parts}
    sizes |= DIVIDED.get(architecture, {})
    model, inputs = hf(architecture, batch=BATCH, seq=SEQ, train=train, dropout=dropout, **sizes)
    if "decoder_input_ids" in inputs:
        inputs["decoder_input_ids"] = inputs["decoder_input_ids"][:, :-1].contiguous()
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    return model.double(), inputs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
