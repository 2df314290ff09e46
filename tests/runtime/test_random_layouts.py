"""Random modules under random layouts and random decisions, beside the eager model: all that a caller can tell.

Most run on simulated ranks, a few on real processes. `python -m benchmarks.random --cases 10000` runs as many; its
`--seed N` runs one of them again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

from autopar.ir.graph import NamedGraph
from autopar.lowering import emit
from autopar.lowering.collectives import local_reshard
from autopar.mesh import Mesh
from autopar.rules.notation import Rule
from autopar.sharding import choices
from tests.runtime import random_cases
from tests.runtime.launcher import launch
from tests.runtime.random_cases import PER_MODULE, failed, run, run_on_processes


@pytest.mark.parametrize(
    "first_seed", [100_000, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(101_000, 110_000, 1000))]
)
def test_random_modules_on_simulated_ranks(first_seed: int) -> None:
    """Fifty cases each: five hundred in all. A seed that fails: `python -m benchmarks.random --seed N`."""
    found = [run(seed) for seed in range(first_seed, first_seed + 50)]
    assert not failed(found), failed(found)
    assert Counter(one.kind for one in found)["right"] >= 25, "most are not refused"


# -- it finds what is wrong -------------------------------------------------------------------------------------------


def _all_keep(move: Any, x: torch.Tensor) -> torch.Tensor:
    """Every rank keeps the value where one should."""
    return x if move.kind.value == "keep_one" else _keep_local(move, x)


_keep_local = local_reshard.keep_local


def _even_share(self: Any, result: Any, node: Any, choice: Any) -> Any:
    """A mean over uneven shards is taken for the mean of their means."""
    means = [axes for (factor, _), axes in choice.splits if node.rule.kinds[factor].value == "mean"]
    ranks = prod(self.axes[axis] for axes in means for axis in axes)
    return result if ranks == 1 else self.out.call_function(torch.ops.aten.div.Scalar, (result, ranks))


def _linear_in_the_first(graph: Any, node: Any) -> tuple[frozenset[int], ...]:
    """Every op is taken to be linear in its first operand."""
    tensor = graph.tensors[node.operands[0]] if node.operands and node.operands[0] else None
    return () if tensor is None or tensor.dtype is torch.bool else (frozenset({0}),)


class _Anything:
    def __contains__(self, group: object) -> bool:
        return True


def _pass_sums_through_anything(patch: pytest.MonkeyPatch) -> None:
    everything: Any = defaultdict(_Anything)
    patch.setattr("tests.runtime.random_decisions.passings_of", _linear_in_the_first)
    patch.setattr(NamedGraph, "passable_sums", property(lambda graph: everything))


def _nothing_broadcast(*arguments: Any) -> Any:
    """The gradients of shards are taken for the whole gradient."""
    found = _layout(*arguments)
    return None if found is None else replace(found, broadcast=frozenset())


_layout = choices.OpShardings._sharding

MUTATIONS: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    "kept by all": lambda patch: patch.setattr(local_reshard, "keep_local", _all_keep),
    "even means": lambda patch: patch.setattr(emit._Emitter, "_scaled", _even_share),
    "biases added by all": lambda patch: patch.setattr(Rule, "added_operands", lambda self, factor: frozenset()),
    "linear in anything": _pass_sums_through_anything,
    "gradients not summed": lambda patch: patch.setattr(choices.OpShardings, "_sharding", _nothing_broadcast),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    random_cases._traced.cache_clear()
    try:
        plain = (seed for module in range(3, 60, 4) for seed in range(PER_MODULE * module, PER_MODULE * (module + 1)))
        assert any(run(seed).kind == "wrong" for seed in plain)
    finally:
        random_cases._traced.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["a=3", "a=2,b=2"])
def test_random_modules_on_real_processes(mesh: str) -> None:
    for found in launch(run_on_processes, mesh, list(range(200_000, 200_080)), ranks=Mesh(mesh).size):
        assert not failed(found), failed(found)
        assert Counter(one.kind for one in found)["right"] >= 5
