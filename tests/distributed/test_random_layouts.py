"""Random small models under random layouts on real ranks: the values and gradients of one process.

`python -m tests.distributed.test_random_layouts 500` runs as many cases, and more kinds of meshes.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from typing import Any

import pytest
import torch

import autopar
from autopar.api import trace
from autopar.completion import complete
from autopar.errors import LayoutError
from autopar.layout.language import parse_layout
from autopar.mesh import Mesh
from tests.distributed.launcher import launch
from tests.distributed.random_programs import Program, random_layout

MESHES = ("a=2", "a=3", "a=2,b=2")
CASES = 20
"""Of each mesh, in the default run."""
LAYOUTS = 4
"""How many layouts a program is tried under: tracing takes most of the time."""

Case = tuple[int, str, float]


def run(mesh: str, first_seed: int, cases: int) -> tuple[list[Case], dict[str, int]]:
    """Seed, layout and largest difference of each case; and how many layouts were refused, by code."""
    axes = {axis: size for axis, size in Mesh(mesh).axes.items() if size is not None}
    found: list[Case] = []
    refused: Counter[str] = Counter()
    seed = first_seed
    while len(found) < cases:
        torch.manual_seed(seed)
        program = Program(seed)
        x = program.example()
        graph = trace(program, (x,), dims=program.dims)
        draw = random.Random(seed)
        for _ in range(LAYOUTS):
            text = random_layout(draw, graph.dims, axes)
            try:
                complete(graph, parse_layout(text), axes)
                found.append((seed, text, difference(program, x, text, mesh)))
            except LayoutError as error:
                refused[error.code] += 1
        seed += 1
    return found, dict(refused)


def difference(program: Program, x: torch.Tensor, layout: str, mesh: str) -> float:
    """The largest difference of results and gradients, of the size of the largest number in each."""
    program.zero_grad()
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
    return worst


def relative(expected: torch.Tensor, found: torch.Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max().clamp_min(1e-3))


def check(mesh: str, first_seed: int, cases: int) -> dict[str, int]:
    """Run the cases on real ranks; raise for the first that differs."""
    (found, refused), *others = launch(run, mesh, first_seed, cases, ranks=Mesh(mesh).size, seconds=cases * 30 + 60)
    assert all(other[1] == refused for other in others)
    for seed, layout, worst in found:
        assert worst < 1e-9, f"seed {seed} on {mesh}: off by {worst:.1e}\n  {Program(seed)}\n  {layout}"
    assert len(found) >= cases
    return refused


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_random_models_under_random_layouts(mesh: str) -> None:
    refused = check(mesh, first_seed=0, cases=CASES)
    assert set(refused) <= {"E3", "E4", "E5", "E7"}, (
        "an axis claimed twice, an op that cannot, a state less split than its parameter"
    )


if __name__ == "__main__":
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    meshes = (*MESHES, "a=4", "a=1,b=3", "a=2,b=2,c=2")
    for index, mesh in enumerate(meshes):
        share = -(-wanted // len(meshes))
        print(f"{mesh}: {share} cases, refused {check(mesh, 10_000 * (index + 1), share)}", flush=True)
