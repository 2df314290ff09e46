"""What layouts say, on real processes: contracts, pins of ops and of values, the optimizer's shard."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparWarning, LayoutError
from autopar.runtime.module import ParallelModule
from examples.gpt import gpt
from tests.gaps import number
from tests.runtime.launcher import in_turn, launch

Ran = dict[str, Any]
"""What each function gave on the first rank, by its name."""

MLP = "batch -> dp; d_ff -> tp; * -> none"


class Net(nn.Module):
    """Two linears; what lies between them may be constrained."""

    def __init__(self, constraint: str | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, dtype=torch.float64)
        self.down = nn.Linear(16, 8, dtype=torch.float64)
        self.constraint = constraint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        if self.constraint is not None:
            h = autopar.constrain(h, self.constraint)
        return self.down(h.relu()).square().sum()


DIMS = {"x": "batch d_model", "up.weight": "d_ff d_model", "down.weight": "d_model d_ff"}


def net(layout: str, mesh: str, constraint: str | None = None) -> tuple[nn.Module, ParallelModule, float]:
    """A model, the same on many devices, and their largest difference in loss and gradients."""
    torch.manual_seed(0)
    model = Net(constraint)
    x = torch.randn(4, 8, dtype=torch.float64)
    parallel = autopar.parallelize(model, mesh, (x,), layout=layout, dims=DIMS)
    return model, parallel, difference(model, parallel, x)


def difference(model: nn.Module, parallel: ParallelModule, *args: Any, **kwargs: Any) -> float:
    expected, found = model(*args, **kwargs), parallel(*args, **kwargs)
    expected.backward()
    found.backward()
    worst = number(((found - expected) / expected).abs().detach())
    for name, parameter in model.named_parameters():
        gradient: Any = parallel.get_parameter(name).grad
        assert parameter.grad is not None
        off = (gradient.full_tensor() - parameter.grad).abs().max() / parameter.grad.abs().max().clamp_min(1e-6)
        worst = max(worst, number(off))
    return worst


def answer(layout: str, mesh: str, constraint: str | None = None) -> str:
    """What a layout is answered."""
    try:
        net(layout, mesh, constraint)
    except LayoutError as error:
        return str(error)
    return "it runs"


def forward(module: ParallelModule) -> list[str]:
    return [f"{c.kind} {c.tensor} for {c.op}" for c in module.collectives() if c.direction == "forward"]


def splits(module: ParallelModule, tensor: str) -> tuple[tuple[str, ...], ...]:
    return module.assignment.values[tensor].splits


# -- contracts --------------------------------------------------------------------------------------------------------


def contracts() -> dict[str, str]:
    guarded = {
        "reduced": "forbid all_reduce(act) over tp",
        "reduced as named": "forbid all_reduce(act[d_model]@down/*) over tp",
        "of another name": "forbid all_reduce(act@up*) over tp",
        "of another dim": "forbid all_reduce(act[d_ff]) over tp",
        "of another kind": "forbid all_reduce(param) over tp",
        "over another axis": "forbid all_gather(act) over dp",
        "gradients": "forbid all_reduce(grad) over dp",
        "shared": "same @up.weight @down.weight",
        "shared by all": "same @up.bias @up.bias",
    }
    return {
        name: answer(f"{MLP}\n{line}", "dp=1,tp=2" if "grad" not in line else "dp=2,tp=1")
        for name, line in guarded.items()
    }


def test_a_contract_that_is_broken_is_refused(ran: Ran) -> None:
    found = ran["contracts"]
    assert found["reduced"] == (
        "E6: forbid all_reduce over tp is broken by the all_reduce over tp of down/linear[batch d_model], forward, for "
        "down/linear: 256 bytes\n"
        "  <layout>:2 | forbid all_reduce(act) over tp\n"
        "             | ^\n"
        "fix: split the tensor so that the op takes it as it is, or drop the line"
    )
    assert found["reduced as named"].startswith("E6: forbid all_reduce over tp is broken by the all_reduce")
    assert found["gradients"].startswith(
        "E6: forbid all_reduce over dp is broken by the all_reduce over dp of up.weight[d_ff d_model], backward, "
        "for up/linear: 1,024 bytes and 3 more\n"
    )
    assert found["shared"] == (
        "E7: up.weight and down.weight are to share one layout, but up.weight is [tp, none] and down.weight is "
        "[none, tp]\n"
        "  <layout>:2 | same @up.weight @down.weight\n"
        "             | ^\n"
        "fix: give both the same rules, or drop the line"
    )
    for name in ("of another name", "of another dim", "of another kind", "over another axis", "shared by all"):
        assert found[name] == "it runs", name


def warned() -> tuple[list[str], float]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, _, worst = net(f"{MLP}; warn all_reduce(act) over tp", "dp=1,tp=2")
    return [str(w.message) for w in caught if w.category is AutoparWarning], worst


def test_a_contract_that_warns(ran: Ran) -> None:
    (text,), worst = ran["warned"]
    assert text.startswith("E6: warn all_reduce over tp is broken by the all_reduce over tp of down/linear")
    assert worst < 1e-12


# -- pins -------------------------------------------------------------------------------------------------------------


def pinned() -> dict[str, Any]:
    _, free, _ = net("batch -> dp; * -> none", "dp=1,tp=2")
    _, taken, worst = net("batch -> dp; * -> none; op @up/linear[n -> tp]", "dp=1,tp=2")
    _, none, none_worst = net(f"{MLP}; op @down/linear[a -> dp]", "dp=1,tp=2")
    return {
        "free": forward(free),
        "taken": forward(taken),
        "worst": max(worst, none_worst),
        "none": forward(none),
        "whole": answer(f"{MLP}; op @/relu[b -> dp*tp]", "dp=1,tp=2"),
        "twice": answer("* -> none; op @up/linear[n -> tp]\nop @up/*[a -> tp]", "dp=1,tp=2"),
    }


def test_the_choice_of_an_op_can_be_pinned(ran: Ran) -> None:
    found = ran["pinned"]
    assert found["worst"] < 1e-12
    assert found["free"] == []
    assert found["taken"] == ["all_gather up/linear for up/linear"], "its columns are split, and wanted whole"
    assert found["none"] == ["all_gather /relu for down/linear", "all_gather down.weight for down/linear"]
    assert found["whole"] == "it runs"
    assert found["twice"] == (
        "E2: two lines pin the op up/linear to different choices\n"
        "  <layout>:1 | * -> none; op @up/linear[n -> tp]\n"
        "             |            ^\n"
        "  <layout>:2 | op @up/*[a -> tp]\n"
        "             | ^\n"
        "fix: drop one"
    )


def constrained() -> dict[str, Any]:
    _, free, _ = net("batch -> dp; * -> none", "dp=1,tp=2")
    _, split, worst = net("batch -> dp; * -> none", "dp=1,tp=2", "d_ff -> tp")
    _, moved, moved_worst = net("batch -> dp; * -> none", "dp=2,tp=1", "batch -> none, d_ff -> dp")
    return {
        "free": splits(free, "up/linear"),
        "split": splits(split, "up/linear"),
        "moved": splits(moved, "up/linear"),
        "worst": max(worst, moved_worst),
        "pinned otherwise": answer("* -> none; @up/linear[d_ff -> none]", "dp=1,tp=2", "d_ff -> tp"),
        "unknown": answer("* -> none", "dp=1,tp=2", "d_f -> tp"),
        "a strategy": answer("ddp", "dp=2", "d_ff -> tp, batch -> dp"),
    }


def test_a_model_can_constrain_its_values(ran: Ran) -> None:
    found = ran["constrained"]
    assert found["free"] == (("dp",), ())
    assert found["split"] == (("dp",), ("tp",))
    assert found["moved"] == ((), ("dp",))
    assert found["worst"] < 1e-12
    assert found["pinned otherwise"].startswith("E2: two rules differ about the dim 'd_ff' of up/linear")
    assert "autopar.constrain of up/linear:1 | d_ff -> tp\n" in found["pinned otherwise"]
    assert found["unknown"].startswith("E1: there is no dim 'd_f'; did you mean 'd_ff'?\n")
    assert found["a strategy"] == "it runs", "axes that the mesh lacks have size 1 under a strategy"


def test_constrain_is_an_identity() -> None:
    x = torch.randn(3)
    assert autopar.constrain(x, "batch -> dp") is x


# -- the optimizer's shard --------------------------------------------------------------------------------------------


def states(layout: str) -> tuple[float, int, int, list[str], int]:
    """The difference after three steps of Adam, and the elements of its state here and in one process."""
    torch.manual_seed(0)
    model, inputs = gpt(batch=8, seq=12, vocab=104)
    model = model.double()
    parallel = autopar.parallelize(model, "dp=2", inputs, layout=layout)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-3, foreach=False) for m in (model, parallel)]
    for _ in range(3):
        for module, optimizer in zip((model, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            module(**inputs).backward()
            optimizer.step()
    worst = 0.0
    for name, parameter in model.named_parameters():
        found: Any = parallel.get_parameter(name)
        worst = max(
            worst, number((found.full_tensor() - parameter).detach().abs().max() / parameter.detach().abs().max())
        )
    whole, here = (
        sum(moment(state[key]).numel() for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
        for optimizer in optimizers
    )
    kinds = sorted({f"{c.direction} {c.kind}" for c in parallel.collectives()})
    gathered = sum(c.bytes for c in parallel.collectives() if c.kind == "all_gather")
    return worst, whole, here, kinds, gathered


def moment(value: Any) -> torch.Tensor:
    local: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local


ZERO_2 = "batch -> dp; * -> none; opt, grad { * -> dp | none }"


def zeros() -> dict[str, tuple[float, int, int, list[str], int]]:
    return {layout: states(layout) for layout in ("zero1", ZERO_2, "ddp")}


@pytest.mark.parametrize("layout", ["zero1", ZERO_2])
def test_zero_splits_the_state_of_the_optimizer(ran: Ran, layout: str) -> None:
    worst, whole, here, kinds, _ = ran["zeros"][layout]
    assert worst < 1e-9
    assert here == whole // 2, "every parameter of this model has an even dim"
    assert "forward all_gather" in kinds
    assert "backward reduce_scatter" in kinds


def test_without_it_every_rank_has_all_of_the_state(ran: Ran) -> None:
    worst, whole, here, kinds, gathered = ran["zeros"]["ddp"]
    assert worst < 1e-9
    assert here == whole
    assert gathered == 0
    assert kinds == ["backward all_reduce", "forward all_reduce"]


# -- strategies keep their contracts, and layouts of Mesh-TensorFlow run ----------------------------------------------


def whole_gpt(layout: str, mesh: str) -> float:
    torch.manual_seed(0)
    model, inputs = gpt(batch=8, seq=12, vocab=104)
    model = model.double()
    return difference(model, autopar.parallelize(model, mesh, inputs, layout=layout), **inputs)


STRATEGIES = (
    ("fsdp", "fsdp=2"),
    ("megatron_sp", "tp=2"),
    ("zero1", "dp=2"),
    ("gshard_moe(ep=none)", "dp=2"),
    ("batch:rows;d_ff:cols", "rows=1,cols=2"),
    ("batch:rows;d_ff:cols", "rows=2,cols=1"),
)


def strategies() -> list[float]:
    return [whole_gpt(layout, mesh) for layout, mesh in STRATEGIES]


@pytest.mark.slow
def test_contracts_of_strategies_hold() -> None:
    for errors in launch(strategies, ranks=2):
        assert max(errors) < 1e-12, errors


# -- all of it in one launch ------------------------------------------------------------------------------------------


def everything() -> Ran:
    return in_turn(*((case, ()) for case in (contracts, warned, pinned, constrained, zeros)))


@pytest.fixture(scope="module")
def ran() -> Ran:
    found: Ran = launch(everything, ranks=2)[0]
    return found
