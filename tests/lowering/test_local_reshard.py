"""Conversions in real processes: the same values and gradients as on simulated ranks, in eager mode and compiled."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autopar.lowering.collectives.local_reshard import LocalReshard
from autopar.lowering.collectives.process_groups import Groups
from autopar.sharding.reshard.reshard import Reshard, StepKind, reshard
from autopar.sharding.sharding import Atoms, Sharding, to_placements
from tests.gaps import number
from tests.runtime.launcher import in_turn, launch
from tests.simulation import all_layouts, run, scatter

CASES = {
    2: [(Atoms.plain((6, 4)), {"a": 2}), (Atoms.plain((5, 3)), {"a": 2})],
    4: [
        (Atoms.plain((12, 8)), {"a": 2, "b": 2}),
        (Atoms((3, 5, 4), (2, 1)), {"a": 2, "b": 2}),
        (Atoms.plain((1,)), {"a": 2, "b": 2}),
        (Atoms.plain((7, 3)), {"a": 4}),
    ],
    8: [(Atoms.plain((8, 9)), {"a": 2, "b": 2, "c": 2})],
}


def groups_of(axes: Mapping[str, int]) -> Groups:
    return Groups(init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)))


KINDS = {
    StepKind.SLICE,
    StepKind.KEEP_ONE,
    StepKind.PAD,
    StepKind.ALL_REDUCE,
    StepKind.REDUCE_SCATTER,
    StepKind.ALL_GATHER,
    StepKind.ALL_TO_ALL,
}
"""Those that conversions consist of."""


def sampled(atoms: Atoms, axes: Mapping[str, int], count: int) -> list[Reshard]:
    """Some conversions, the same on every rank; all of them if there are not more."""
    layouts = list(all_layouts(atoms, axes))
    pairs = [(source, target) for source in layouts for target in layouts]
    if len(pairs) > count:
        pairs = random.Random(5).sample(pairs, count)
    return [reshard(atoms, source, target, axes) for source, target in pairs]


def convert_there_and_back(cases: list[tuple[Atoms, dict[str, int]]], count: int) -> set[StepKind]:
    """Compares this rank's forward and backward with the simulation; says which kinds of steps were met."""
    torch.manual_seed(0)
    kinds: set[StepKind] = set()
    for atoms, axes in cases:
        groups = groups_of(axes)
        for way in sampled(atoms, axes, count):
            compare_with_simulation(way, groups)
            kinds |= {step.kind for step in (*way.forward, *way.backward)}
    return kinds


def compare_with_simulation(way: Reshard, groups: Groups) -> None:
    rank = groups.mesh.mesh.flatten().tolist().index(dist.get_rank())
    atoms, axes = way.atoms, dict(way.axes)
    conversion = LocalReshard.bind(way, groups)
    value, gradient = torch.randn(2, *atoms.shape, dtype=torch.float64)
    local = scatter(value, way.source, atoms, axes)
    coming = scatter(gradient, way.target.gradient, atoms, axes)
    mine = local[rank].requires_grad_()
    result = conversion(mine)
    torch.testing.assert_close(result, run(way, way.forward, local)[0][rank], msg=str(way))
    (actual,) = torch.autograd.grad(result, mine, coming[rank])
    torch.testing.assert_close(actual, run(way.gradient, way.backward, coming)[0][rank], msg=str(way))


def convert_on_a_turned_mesh() -> None:
    """The order of ranks in a process group need not be that of the mesh."""
    axes = {"a": 2, "b": 2}
    groups = Groups(DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=tuple(axes)))
    torch.manual_seed(0)
    for way in sampled(Atoms.plain((5, 8)), axes, 25):
        compare_with_simulation(way, groups)


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    calls = [
        (convert_there_and_back, (CASES[2], 40)),
        (differentiate_twice, ()),
        (run_compiled, ("aot_eager", {"a": 2})),
    ]
    return launch(in_turn, *calls, ranks=2)


@pytest.fixture(scope="module")
def on_four() -> list[dict[str, Any]]:
    axes = {"a": 2, "b": 2}
    calls = [
        (convert_there_and_back, (CASES[4], 40)),
        (convert_on_a_turned_mesh, ()),
        (store_as_dtensors, (axes,)),
        (convert_integers, (axes,)),
    ]
    return launch(in_turn, *calls, ranks=4)


@pytest.mark.slow
def test_forward_and_backward_in_real_processes(on_two: list[dict[str, Any]], on_four: list[dict[str, Any]]) -> None:
    assert [found["convert_there_and_back"] for found in (*on_two, *on_four)] == [KINDS] * 6


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "count"), [(2, 10_000), (4, 400), (8, 60)])
def test_many_more_of_them(ranks: int, count: int) -> None:
    found = launch(convert_there_and_back, CASES[ranks], count, ranks=ranks)
    assert found == [found[0]] * ranks
    assert found[0] >= KINDS - {StepKind.KEEP_ONE}, "few conversions keep a value on one rank"


def store_as_dtensors(axes: Mapping[str, int]) -> list[bool]:
    """Whether a DTensor made of the local tensors, by the layout's placements, has the global value."""
    groups, rank = groups_of(axes), dist.get_rank()
    cases = [
        (Atoms.plain((7, 4)), split_by("ab", "")),
        (Atoms.plain((8, 4)), split_by("ba", "")),
        (Atoms((3, 4, 2), (2, 1)), split_by("", "a", "b")),
        (Atoms((2, 4, 3), (3,)), split_by("", "a", "")),
    ]
    found = []
    for atoms, layout in cases:
        value = torch.arange(float(torch.Size(atoms.shape).numel())).reshape(atoms.shape)
        local = scatter(value, layout, atoms, axes)[rank]
        stored = DTensor.from_local(
            local, groups.mesh, to_placements(layout, atoms, axes), shape=value.shape, stride=value.stride()
        )
        found.append(torch.equal(stored.full_tensor(), value))
    return found


def test_dtensors_hold_the_local_tensors(on_four: list[dict[str, Any]]) -> None:
    assert [found["store_as_dtensors"] for found in on_four] == [[True] * 4] * 4


def convert_integers(axes: Mapping[str, int]) -> list[bool]:
    groups, rank = groups_of(axes), dist.get_rank()
    atoms = Atoms.plain((5, 4))
    found = []
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool, torch.bfloat16):
        value = torch.arange(20).reshape(5, 4).remainder(7).to(dtype)
        for source, target in [("a-", "--"), ("--", "-a"), ("a-", "-a"), ("ab", "--")]:
            layouts = [Sharding(tuple(tuple(word.strip("-")) for word in text)) for text in (source, target)]
            way = reshard(atoms, *layouts, axes)  # type: ignore[call-arg]
            local = scatter(value.double(), way.source, atoms, axes)[rank].to(dtype)
            expected = scatter(value.double(), way.target, atoms, axes)[rank].to(dtype)
            result = LocalReshard.bind(way, groups)(local)
            found.append(torch.equal(result, expected) and result.dtype == dtype and not result.requires_grad)
    return found


def test_integers_and_booleans_are_converted_without_gradients(on_four: list[dict[str, Any]]) -> None:
    assert [found["convert_integers"] for found in on_four] == [[True] * 20] * 4


EVEN, UNEVEN = Atoms.plain((6, 8)), Atoms.plain((1, 3))


def split_by(*words: str, partial: str = "", broadcast: str = "") -> Sharding:
    return Sharding(tuple(map(tuple, words)), frozenset(partial), frozenset(broadcast))


def program(atoms: Atoms, axes: Mapping[str, int]) -> list[Reshard]:
    """Conversions that follow upon each other, with every kind of step."""
    layouts = [
        split_by("a", "b"),
        split_by("", "b", broadcast="a"),
        split_by("", "ab"),
        split_by("ab", ""),
        split_by("ba", ""),
        split_by("", "", broadcast="ab"),
        split_by("", "", partial="ab"),
        split_by("a", "", partial="b"),
        split_by("", "", broadcast="ab"),
        split_by("", ""),
    ]
    layouts = [layout.without({"a", "b"} - axes.keys()) for layout in layouts]
    return [reshard(atoms, s, t, axes) for s, t in pairwise(layouts)]


def run_compiled(backend: str, axes: Mapping[str, int]) -> list[float]:
    """How far the compiled outputs and gradients are from the eager ones; uneven, some ranks hold nothing at all."""
    torch.manual_seed(0)
    groups = groups_of(axes)
    return [distance for atoms in (EVEN, UNEVEN) for distance in distances(backend, atoms, axes, groups)]


class Program(torch.nn.Module):
    """A module, as in a parallel model: the compiler takes the numbers that a module holds for constants."""

    def __init__(self, conversions: list[LocalReshard]) -> None:
        super().__init__()
        self.conversions = conversions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conversion in self.conversions:
            x = conversion(x * 1.5 if conversion.reshard.source.partial else torch.sin(x))
        return x


def distances(backend: str, atoms: Atoms, axes: Mapping[str, int], groups: Groups) -> list[float]:
    ways = program(atoms, axes)
    function = Program([LocalReshard.bind(way, groups) for way in ways])
    value = torch.randn(atoms.shape, dtype=torch.float64)
    local = scatter(value, ways[0].source, atoms, axes)[dist.get_rank()]
    found = []
    # Compiled first: nothing may depend on what an eager call has left behind.
    for call in (torch.compile(function, fullgraph=True, backend=backend), function):
        leaf = local.clone().requires_grad_()
        result = call(leaf)
        result.square().sum().backward()
        assert leaf.grad is not None
        with torch.no_grad():
            found.append((result.detach(), leaf.grad, call(leaf)))
    return [number((one - other).abs().sum()) for one, other in zip(*found, strict=True)]


def test_a_compiled_function_with_conversions_is_one_graph(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        assert max(found["run_compiled"]) < 1e-12


@pytest.mark.slow
def test_a_compiled_function_over_two_axes() -> None:
    for differences in launch(run_compiled, "aot_eager", {"a": 2, "b": 2}, ranks=4):
        assert max(differences) < 1e-12


@pytest.mark.slow
def test_a_function_compiled_by_inductor_gives_the_same() -> None:
    for differences in launch(run_compiled, "inductor", {"a": 2}, ranks=2):
        assert max(differences) < 1e-12


def differentiate_twice() -> list[float]:
    """The second derivative of a sum of cubes across a gather and a scatter, against one process."""
    torch.manual_seed(0)
    atoms, axes, groups = Atoms.plain((6,)), {"a": 2}, groups_of({"a": 2})
    there = LocalReshard.bind(reshard(atoms, split_by("a"), split_by("", broadcast="a"), axes), groups)
    back = LocalReshard.bind(reshard(atoms, split_by("", broadcast="a"), split_by("a"), axes), groups)
    value = torch.randn(atoms.shape, dtype=torch.float64)
    leaf = scatter(value, split_by("a"), atoms, axes)[dist.get_rank()].requires_grad_()
    (first,) = torch.autograd.grad((back(there(leaf).pow(3)) * 1.0).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    return [number((first - 3 * leaf**2).abs().max()), number((second - 6 * leaf).abs().max())]


def test_second_derivatives(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        assert max(found["differentiate_twice"]) < 1e-12


def stall() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    raise ValueError("rank 1 has had enough")


def test_the_launcher_ends_all_ranks_when_one_fails() -> None:
    with pytest.raises(AssertionError, match="rank 1 has had enough"):
        launch(stall, ranks=2)
