"""All-reduces by level on simulated ranks: any length, any number of levels, and a phase at a time."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from autopar.lowering.collectives.level_groups import LevelChain
from autopar.lowering.collectives.local_reshard import LocalReshard
from autopar.sharding.level_sums import LevelSum
from autopar.sharding.reshard.reshard import reshard
from autopar.sharding.sharding import Atoms, Sharding
from tests.ranks import SimulatedGroups, on_ranks

MESHES = [
    ({"pod": 2, "dp": 2}, (("dp",), ("pod",))),
    ({"pod": 2, "dp": 3}, (("pod",), ("dp",))),
    ({"site": 2, "pod": 3, "dp": 2}, (("dp",), ("pod",), ("site",))),
    ({"site": 2, "pod": 3, "dp": 2}, (("pod", "dp"), ("site",))),
]


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randint(-50, 50, shape, generator=generator).to(dtype)


def ranks_of(axes: Mapping[str, int]) -> int:
    return len(on_ranks(axes, lambda groups: groups.rank))


@pytest.mark.parametrize(("axes", "levels"), MESHES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (5, 3), (12, 2)], ids=str)
def test_a_sum_by_level_is_the_sum(
    axes: dict[str, int], levels: tuple[tuple[str, ...], ...], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    atoms = Atoms.plain(shape)
    whole = Sharding.replicated(atoms)
    found = reshard(atoms, Sharding(whole.splits, frozenset(axes)), whole, axes)

    def run(groups: SimulatedGroups) -> Tensor:
        groups.level_sums = lambda over: (LevelSum(levels),)
        bound = LocalReshard.bind(found, groups)
        assert len(bound.forward[0].levels) == 1
        return bound(part(groups.rank, shape, dtype))

    parts = torch.stack([part(rank, shape, dtype) for rank in range(ranks_of(axes))])
    expected = parts.any(0) if dtype is torch.bool else parts.sum(0)
    for result in on_ranks(axes, run):
        assert torch.allclose(result, expected, atol=1e-12)


def test_sizes_decide() -> None:
    axes = {"pod": 2, "dp": 2}
    atoms = Atoms.plain((8,))
    whole = Sharding.replicated(atoms)
    found = reshard(atoms, Sharding(whole.splits, frozenset(axes)), whole, axes)

    def run(groups: SimulatedGroups) -> list[bool]:
        groups.level_sums = lambda over: (LevelSum((("dp",), ("pod",)), 64.0, 127.0),)
        (move,) = LocalReshard.bind(found, groups).forward
        return [move.level_of(size) is not None for size in (63, 64, 127, 128)]

    assert on_ranks(axes, run) == [[False, True, True, False]] * 4


@pytest.mark.parametrize("length", [1, 5, 12])
@pytest.mark.parametrize(("axes", "levels"), MESHES, ids=str)
def test_a_chain_may_be_left_at_any_phase(
    axes: dict[str, int], levels: tuple[tuple[str, ...], ...], length: int
) -> None:
    for steps in range(2 * len(levels)):

        def run(groups: SimulatedGroups, steps: int = steps) -> Tensor:
            groups.level_sums = lambda over: (LevelSum(levels),)
            (level,) = groups.levels(tuple(axes))
            buffer = part(groups.rank, (length,), torch.float64)
            chain = LevelChain(buffer, level)
            for _ in range(steps):
                chain.advance()
            chain.finish()
            return buffer

        expected = sum(part(rank, (length,), torch.float64) for rank in range(ranks_of(axes)))
        for result in on_ranks(axes, run):
            assert torch.allclose(result, torch.as_tensor(expected), atol=1e-12)
