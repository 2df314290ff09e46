"""Random small models under random layouts and random decisions: the values and gradients of one process.

Most run on simulated ranks, a few on real processes. `python -m tests.distributed.test_random_layouts 500` runs as many
simulated cases, and on meshes of up to eight ranks.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count, islice
from math import prod
from typing import Any

import pytest
import torch

import autopar
from autopar import choices
from autopar.api import trace
from autopar.completion import complete
from autopar.errors import LayoutError
from autopar.layout.language import parse_layout
from autopar.mesh import Mesh
from autopar.rewrite import emit, functions
from autopar.rules.notation import Rule
from tests.distributed.launcher import launch
from tests.distributed.random_decisions import random_decisions
from tests.distributed.random_programs import Picture, Program, program_of, random_text
from tests.ranks import difference_of, relative

MESHES: tuple[Mapping[str, int], ...] = (
    {"a": 2}, {"a": 3}, {"a": 4}, {"a": 8}, {"a": 1, "b": 3}, {"a": 2, "b": 2}, {"a": 3, "b": 2}, {"a": 2, "b": 4},
    {"a": 2, "b": 2, "c": 2},
)  # fmt: skip
PER_PROGRAM = 6
"""How many cases a program is used for: tracing takes most of the time."""
TOLERANCE = 1e-9

Case = tuple[str, float]
"""What it is, and the largest difference of results and gradients."""


def cases(seed: int, refused: Counter[str], largest: int = 8) -> Iterator[Case]:
    """Cases of one program; half of them decided by a layout, half at random."""
    torch.manual_seed(seed)
    program, draw = program_of(seed), random.Random(seed)
    x = program.example()
    graph = trace(program, (x,), dims=program.dims)
    meshes = [mesh for mesh in MESHES if prod(mesh.values()) <= largest]
    for number in range(PER_PROGRAM):
        axes = draw.choice(meshes)
        text = random_text(draw, graph, axes) if number % 2 == 0 else None
        what = f"seed {seed}, case {number}, on {dict(axes)}\n  {program}\n  {text or 'at random'}"
        try:
            decisions = (
                random_decisions(draw, graph, axes) if text is None else complete(graph, parse_layout(text), axes)
            )
        except LayoutError as error:
            refused[error.code] += 1
            continue
        try:
            yield what, difference_of(graph, decisions, [x])
        except Exception as error:
            error.add_note(what)
            raise


def simulated(first_seed: int, number: int, refused: Counter[str], largest: int = 8) -> Iterator[Case]:
    """So many cases, of one program after the other."""
    return islice((case for seed in count(first_seed) for case in cases(seed, refused, largest)), number)


def check(first_seed: int, number: int, refused: Counter[str]) -> int:
    """Raise for the first case that is wrong; how many were right."""
    right = 0
    for what, worst in simulated(first_seed, number, refused, largest=6):
        assert worst < TOLERANCE, f"off by {worst:.1e}: {what}"
        right += 1
    return right


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(0, 10_000, 1000))
def test_random_models_on_simulated_ranks(first_seed: int) -> None:
    """Fifty cases each: five hundred in all."""
    refused: Counter[str] = Counter()
    assert check(first_seed, 50, refused) == 50
    known = {"E0", "E2", "E3", "E4", "E5", "E7"}
    assert set(refused) <= known, "split buffers, lines that disagree, axes claimed twice, ops that cannot"


# -- it finds what is wrong -------------------------------------------------------------------------------------------


def _all_keep(move: Any, x: torch.Tensor) -> torch.Tensor:
    """Every rank keeps the value where one should."""
    return x if move.kind.value == "keep_one" else _keep_local(move, x)


_keep_local = functions.keep_local


def _even_share(self: Any, result: Any, node: Any, choice: Any) -> Any:
    """A mean over uneven shards is taken for the mean of their means."""
    means = [axes for (factor, _), axes in choice.splits if node.rule.kinds[factor].value == "mean"]
    ranks = prod(self.axes[axis] for axes in means for axis in axes)
    return result if ranks == 1 else self.out.call_function(torch.ops.aten.div.Scalar, (result, ranks))


def _linear_in_the_first(graph: Any, node: Any) -> tuple[frozenset[int], ...]:
    """Every op is taken to be linear in its first operand."""
    tensor = graph.tensors[node.operands[0]] if node.operands and node.operands[0] else None
    return () if tensor is None or tensor.dtype is torch.bool else (frozenset({0}),)


def _nothing_broadcast(*arguments: Any) -> Any:
    """The gradients of shards are taken for the whole gradient."""
    found = _layout(*arguments)
    return None if found is None else replace(found, broadcast=frozenset())


_layout = choices._layout

MUTATIONS: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    "kept by all": lambda patch: patch.setattr(functions, "keep_local", _all_keep),
    "even means": lambda patch: patch.setattr(emit._Emitter, "_scaled", _even_share),
    "biases added by all": lambda patch: patch.setattr(Rule, "added_operands", lambda self, factor: frozenset()),
    "linear in anything": lambda patch: patch.setattr(
        "tests.distributed.random_decisions.passings_of", _linear_in_the_first
    ),
    "gradients not summed": lambda patch: patch.setattr(choices, "_layout", _nothing_broadcast),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    with pytest.raises(AssertionError, match=r"^off by|^Tensor-likes are not close"):
        check(0, 30, Counter())


# -- real processes ---------------------------------------------------------------------------------------------------


def run(mesh: str, first_seed: int, number: int) -> list[tuple[int, str, float]]:
    """Seed, layout and largest difference of each case that a layout decides."""
    axes = {axis: size for axis, size in Mesh(mesh).axes.items() if size is not None}
    found: list[tuple[int, str, float]] = []
    seed = first_seed
    while len(found) < number:
        torch.manual_seed(seed)
        program, draw = program_of(seed), random.Random(seed)
        x = program.example()
        graph = trace(program, (x,), dims=program.dims)
        for _ in range(4):
            text = random_text(draw, graph, axes)
            try:
                complete(graph, parse_layout(text), axes)
                found.append((seed, text, difference(program, x, text, mesh)))
            except LayoutError:
                continue  # the same on all ranks; or a layout that DTensors cannot hold
        seed += 1
    return found


def difference(program: Program | Picture, x: torch.Tensor, layout: str, mesh: str) -> float:
    """The largest difference of results and gradients, of the size of the largest number in each."""
    program.zero_grad()
    buffers = {name: buffer.clone() for name, buffer in program.named_buffers()}
    parallel = autopar.parallelize(program, mesh, (x,), layout=layout, dims=program.dims, outputs="full")
    expected, found = program(x), parallel(x)
    weights = torch.linspace(-1, 1, expected[0].numel(), dtype=torch.float64).view_as(expected[0])
    for out, loss in (expected, found):
        ((out * weights).sum() + loss).backward()
    worst = max(relative(a, b) for a, b in zip(expected, found, strict=True))
    for name, parameter in program.named_parameters():
        gradient: Any = parallel.get_parameter(name).grad
        if parameter.grad is not None:
            worst = max(worst, relative(parameter.grad, gradient.full_tensor()))
    for name, buffer in program.named_buffers():
        worst = max(worst, relative(buffer, parallel.get_buffer(name)))
        buffer.copy_(buffers[name])
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["a=3", "a=2,b=2"])
def test_random_models_on_real_processes(mesh: str) -> None:
    for results in launch(run, mesh, 40, 10, ranks=Mesh(mesh).size):
        assert len(results) >= 10
        for seed, layout, worst in results:
            assert worst < TOLERANCE, f"seed {seed} on {mesh}: off by {worst:.1e}\n  {program_of(seed)}\n  {layout}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    counts: Counter[str] = Counter()
    worst, begun = 0.0, time.monotonic()
    for index, (what, off) in enumerate(simulated(int(sys.argv[2]) if len(sys.argv) > 2 else 10_000, wanted, counts)):
        assert off < TOLERANCE, f"off by {off:.1e}: {what}"
        worst = max(worst, off)
        if (index + 1) % 50 == 0:
            print(f"{index + 1} cases, {time.monotonic() - begun:.0f} s, worst {worst:.1e}", flush=True)
    print(f"{wanted} cases right, the worst off by {worst:.1e}; refused {dict(counts)}")
