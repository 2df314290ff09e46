"""Models and batches that differ from rank to rank are errors, which name what differs and where."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import autopar
from autopar.lowering.collectives.checksum import checksum_of_all
from autopar.runtime.agreement import LOCAL, SAME_GRAPH, Agreement
from tests.runtime.launcher import in_turn, launch
from tests.runtime.training import error_of


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class Tuned(nn.Module):
    """A model with numbers that are neither parameters nor buffers."""

    def __init__(self, scale: float = 2.0, first: float = 0.0, p: float = 0.1, last: float = 5.0, factor: float = 1.0):
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(p)
        self.scale, self.last, self.factor = scale, last, factor
        self.table = torch.arange(8.0) + first
        self.returned: Any = None

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.dropout(self.linear(x) * self.scale) + self.table
        y = y + torch.tensor([1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, self.last])
        return {"y": Scaled.apply(y, self.factor).sum(), "kind": self.returned}  # type: ignore[no-untyped-call]


def differ_in_numbers() -> dict[str, str]:
    found = {}
    other = dist.get_rank() == 1
    for name, value in {"": 0, "scale": 3.0, "first": 1.0, "p": 0.2, "last": 6.0, "factor": 2.0, "returned": 1}.items():
        torch.manual_seed(0)
        model = Tuned(**({name: value} if name not in ("", "returned") and other else {}))
        model.returned = "other" if name == "returned" and other else None
        found[name] = error_of(lambda: autopar.parallelize(model, "dp=2", (torch.randn(4, 8),), layout="ddp"))  # noqa: B023
    return found


class Counted(nn.Module):
    """A loss over the targets that count, whose number is sent before the graph runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.out(self.embedding(ids)).flatten(0, 1), targets.flatten())


def differ_in_batches(device_waits: bool) -> dict[str, Any]:
    """Where a comparison costs nothing, in any call; else in the first calls and then in some of them."""
    torch.manual_seed(0)
    rank, found = dist.get_rank(), {}
    counted, plain = Counted(), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    ids, floats = torch.randint(16, (4, 6)), torch.randn(4, 8)
    original = Agreement.is_cheap
    Agreement.is_cheap = property(lambda self: False) if device_waits else original  # type: ignore[assignment]
    try:
        for name, model, good, bad in (
            ("counted", counted, (ids, ids), (ids, ids.roll(rank, 0))),
            ("plain", plain, (floats,), (floats.roll(rank, 0),)),
            ("dropout", nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), (floats,), (floats + rank,)),
        ):
            parallel = autopar.parallelize(model, "dp=2", good, layout="ddp")
            calls = [good, good, good, bad, good]
            found[name] = [error_of(lambda call=call: parallel(*call)) for call in calls]  # type: ignore[misc]  # noqa: B023
        for _ in range(9):
            parallel(*good)
        found["the fifteenth"] = error_of(lambda: parallel(*bad))
        compared = [error_of(lambda: parallel(*bad)) != "no error" for _ in range(100)]
        found["later"] = sum(compared)
    finally:
        Agreement.is_cheap = original  # type: ignore[method-assign]
    return found


def give_parts() -> list[str]:
    """Parts of a batch differ, and are meant to."""
    torch.manual_seed(0)
    mine = torch.randn(4, 8)[2 * dist.get_rank() :][:2]
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    local = autopar.parallelize(model, mesh, layout="ddp", local_inputs=True)
    sharded = autopar.parallelize(model, mesh, layout="ddp")
    given = DTensor.from_local(mine, mesh, [Shard(0)])
    return [error_of(lambda: local(mine)) for _ in range(3)] + [error_of(lambda: sharded(given)) for _ in range(3)]


def everything() -> dict[str, Any]:
    free, waiting = in_turn((differ_in_batches, (False,))), in_turn((differ_in_batches, (True,)))
    rest = in_turn((differ_in_numbers, ()), (give_parts, ()))
    return {"free": free["differ_in_batches"], "waiting": waiting["differ_in_batches"], **rest}


def test_what_differs_is_an_error() -> None:
    for found in launch(everything, ranks=2):
        check_numbers(found["differ_in_numbers"])
        assert found["give_parts"] == ["no error"] * 6
        for way in ("free", "waiting"):
            for model, differs in (("counted", "targets"), ("plain", "input"), ("dropout", "input")):
                *good, bad, afterwards = found[way][model]
                assert {*good, afterwards} == {"no error"}, way
                assert bad == f"{differs} differs between rank 0 and rank 1: expected the same values\nfix: {LOCAL}"
        assert found["free"]["the fifteenth"] != "no error"
        assert found["free"]["later"] == 100
        assert found["waiting"]["the fifteenth"] == "no error"
        assert found["waiting"]["later"] == 1


def check_numbers(found: dict[str, str]) -> None:
    assert found.pop("") == "no error"
    sums = "float32[8] with checksum N on rank 0, float32[8] with checksum N on rank 1"
    kinds = [f"tuple(dict(y=tensor, kind={kind}), list()) on rank {rank}" for rank, kind in ((0, None), (1, "'other'"))]
    dropouts = [f"aten.native_dropout.default(mul, 0.{rank + 1}, True) on rank {rank}" for rank in (0, 1)]
    expected = {
        "scale": "op mul at FILE: aten.mul.Tensor(linear, 2.0) on rank 0, aten.mul.Tensor(linear, 3.0) on rank 1",
        "first": f"constant table, read by add at FILE: {sums}",
        "p": f"op native_dropout at FILE: {', '.join(dropouts)}",
        "last": f"constant lifted_tensor_1, read by add_1 at FILE: {sums}",
        "factor": "op Scaled_0: autopar_functions.Scaled_0.default of Scaled with (None, 1.0)(add_1) on rank 0, "
        "nothing on rank 1",
        "returned": f"results of the model: {', '.join(kinds)}",
    }
    assert found.keys() == expected.keys()
    for name, text in expected.items():
        plain = re.sub(r"checksum \d+", "checksum N", re.sub(r"\w+\.py:\d+", "FILE", found[name]))
        assert plain == f"the ranks differ in {text}\nfix: {SAME_GRAPH}", name


@pytest.mark.parametrize("rows", [8, 100_001])
def test_a_checksum_tells_rows_in_another_order_apart(rows: int) -> None:
    x = torch.randn(rows, 7)
    others = (x.flip(0), x[1:], x[:-1], torch.cat([x[1:], x[:1]]), x + torch.eye(rows, 7) * 1e-3)
    assert len({checksum_of_all([other]) for other in (x, *others)}) == 6
    assert checksum_of_all([x]) == checksum_of_all([x.clone().requires_grad_()]) != checksum_of_all([x, x])
    assert checksum_of_all([x]) == checksum_of_all([x.t().contiguous().t()])


def test_a_checksum_passes_over_what_was_computed() -> None:
    x = torch.randn(4, requires_grad=True)
    assert checksum_of_all([x * 2, x]) == checksum_of_all([x])
    assert torch.func.vmap(lambda row: row + checksum_of_all([row]))(torch.zeros(2, 3)).sum() == 0
