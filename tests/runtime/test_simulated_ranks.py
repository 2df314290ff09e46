"""The simulated ranks of the tests do with each dtype and collective what Gloo does: its results, its refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import on_ranks
from tests.runtime.launcher import launch

DTYPES = (
    "int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "complex64", "complex128",
    "int64", "int32", "int8", "uint8", "bool", "bfloat16", "float16", "float32", "float64",
)  # fmt: skip
"""Those that are refused come first: a barrier soon after one gives its error again."""
Found = dict[tuple[str, str], tuple[str, list[Any]]]


def collectives(rank: int, group: str) -> Found:
    """Dtype and values of what each collective gives for each dtype, or the error; sums run over where they can."""
    found: Found = {}
    for text in DTYPES:
        dtype = getattr(torch, text)
        x = torch.tensor([1, 100 + rank, rank, 3]).to(dtype)
        for name, given in (
            ("all_reduce", ("sum",)), ("all_reduce_", ("sum",)), ("all_reduce", ("max",)),
            ("all_gather_into_tensor", (2,)), ("all_gather_into_tensor_coalesced", (2,)),
            ("reduce_scatter_tensor", ("sum", 2)), ("reduce_scatter_tensor_coalesced", ("sum", 2)),
            ("all_to_all_single", ([2, 2], [2, 2])),
        ):  # fmt: skip
            found[text, f"{name} {given[0]}"] = _one(name, x.clone(), (*given, group))
    return found


def _one(name: str, x: Tensor, given: tuple[Any, ...]) -> tuple[str, list[Any]]:
    ops = torch.ops._c10d_functional
    several = name.endswith("_coalesced")
    try:
        sent = getattr(ops, name)([x, x] if several else x, *given)
        result = ops.wait_tensor(sent[1] if several else sent)
    except RuntimeError as error:
        return str(error).splitlines()[0], []
    # As bytes: what is no number is none here as well, and a boolean may be more than one.
    return str(result.dtype), result.contiguous().view(torch.uint8).tolist()


def on_gloo() -> Found:
    import torch.distributed as dist

    assert dist.group.WORLD is not None
    return collectives(dist.get_rank(), dist.group.WORLD.group_name)


@pytest.mark.slow
def test_simulated_ranks_do_what_gloo_does() -> None:
    real = launch(on_gloo, ranks=2)
    simulated = on_ranks({"a": 2}, lambda groups: collectives(groups.rank, "0,1"))
    assert simulated == real
    refused = {dtype for (dtype, _), (what, _) in real[0].items() if "Invalid scalar type" in what}
    assert {"int16", "uint16", "float8_e4m3fn"} <= refused, "and Gloo does refuse some"
