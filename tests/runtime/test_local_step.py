"""Steps of optimizers on shards: the numbers of steps on DTensors, and what everybody else sees of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.runtime.local_step import ALIKE_TOGETHER, AT_A_TIME, SMALL, _pieces
from autopar.runtime.module import ParallelModule
from examples.gpt import gpt
from tests.runtime.launcher import in_turn, launch
from tests.runtime.training import error_of, gap

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
    "SGD, foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD, fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p),
    "AdamW, foreach": lambda p: optim.AdamW(p, foreach=True),
    "AdamW, fused": lambda p: optim.AdamW(p, fused=True, amsgrad=True),
    "AdamW, rate as a tensor": lambda p: optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "AdamW, groups": lambda p: optim.AdamW(groups(list(p)), lr=1e-2),
    "Adagrad": lambda p: optim.Adagrad(p, initial_accumulator_value=0.1),
    "Adagrad, fused": lambda p: optim.Adagrad(p, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.5, centered=True),
    "Adadelta": lambda p: optim.Adadelta(p),
    "NAdam": lambda p: optim.NAdam(p),
    "RAdam": lambda p: optim.RAdam(p),
    "Adamax": lambda p: optim.Adamax(p),
    "ASGD": lambda p: optim.ASGD(p),
    "Rprop": lambda p: optim.Rprop(p),
}
# Torch raises for these on DTensors, in version 2.13.
ON_SHARDS_ALONE = ("SGD, fused", "Adagrad, fused", "Rprop")


def groups(parameters: list[Tensor]) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    return [{"params": matrices}, {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr": 0.1}]


class Model(nn.Module):
    """Parameters of every kind: uneven, without dims, of one element, frozen, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen = nn.Linear(8, 6), nn.Linear(6, 5), nn.Linear(5, 5).requires_grad_(False)
        self.scale, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.b(torch.tanh(self.a(x)) * self.scale + self.one)).square().mean()  # type: ignore[no-any-return]


def model_and_inputs() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Model().double(), torch.randn(8, 8, dtype=torch.float64)


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names the ops on tensors of a kind."""

    def __init__(self, kind: type[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind = kind
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.kind is Tensor or any(issubclass(kind, self.kind) for kind in types):
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def ops_on_dtensors(step: Callable[[], Any]) -> int:
    with _Ops(DTensor) as mode:
        step()
    return len(mode.names)


def trained(model: nn.Module, x: Any, optimizer: Optimizer, count: int = 3) -> list[float]:
    """Take steps with clipped gradients and a schedule; return the norms of the gradients."""
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    norms = []
    for _ in range(count):
        optimizer.zero_grad()
        (model(**x) if isinstance(x, dict) else model(x)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        scheduler.step()
    return norms


def on_dtensors(module: nn.Module, x: Any, make: Callable[[Any], Optimizer]) -> tuple[Optimizer, list[float]]:
    """Train with a subclass, which steps on DTensors."""
    optimizer = make(module.parameters())
    optimizer.__class__ = type("OnDTensors", (type(optimizer),), {})
    return optimizer, trained(module, x, optimizer)


def differences(one: nn.Module, other: nn.Module, first: Optimizer, second: Optimizer) -> list[str]:
    """Name the parameters and states of two runs that are not the same in value, type and sharding."""
    found = []
    for (name, mine), (_, theirs) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        states, others = first.state.get(mine, {}), second.state.get(theirs, {})
        if list(states) != list(others):
            found.append(f"{name} has the states {list(states)}, not {list(others)}")
            continue
        pairs = {"value": (mine, theirs), **{key: (states[key], others[key]) for key in states}}
        found += [f"{key} of {name}" for key, (a, b) in pairs.items() if described(a) != described(b)]
    return found


def described(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    local = value.to_local() if isinstance(value, DTensor) else value
    sharded = (value.placements, value.shape, value.stride()) if isinstance(value, DTensor) else None
    return type(value), sharded, local.shape, local.dtype, local.tolist()


def compare() -> dict[str, Any]:
    model, x = model_and_inputs()
    found: dict[str, Any] = {}
    for layout, mesh in (("ddp", "dp=2"), ("zero1", "dp=2"), ("fsdp", "fsdp=2")):
        parallel, other = (autopar.parallelize(copy.deepcopy(model), mesh, (x,), layout=layout) for _ in range(2))
        for name, make in OPTIMIZERS.items():
            alone = copy.deepcopy(model)
            for each in (parallel, other):
                each.load_state_dict(model.state_dict())
            optimizer = make(parallel.parameters())
            norms = trained(parallel, x, optimizer)
            trained(alone, x, make(alone.parameters()))
            weights = zip(parallel.parameters(), alone.parameters(), strict=True)
            case: dict[str, Any] = {"from one process": max(gap(mine, theirs) for mine, theirs in weights)}
            if name not in ON_SHARDS_ALONE:
                second, expected = on_dtensors(other, x, make)
                case["differences"] = differences(parallel, other, optimizer, second)
                case["norms"] = norms == expected
            case["on DTensors"] = ops_on_dtensors(optimizer.step)
            found[f"{layout}, {name}"] = case
    return found


# -- what others see --------------------------------------------------------------------------------------------------


def made(layout: str = "fsdp", mesh: str = "fsdp=2") -> tuple[ParallelModule, Tensor]:
    model, x = model_and_inputs()
    return autopar.parallelize(model, mesh, (x,), layout=layout), x


def hooks() -> dict[str, bool]:
    """Hooks of the user next to ours: one replaces a gradient, one reads states; both see DTensors."""
    parallel, x = made()
    other, _ = made()
    optimizer = optim.AdamW(parallel.parameters())
    seen: list[bool] = []
    counts: list[int] = []

    def before(optimizer: Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            seen.append(isinstance(parameter, DTensor))
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 2

    def after(optimizer: Optimizer, *_: Any) -> None:
        seen.append(len(optimizer.state) == 6 and all(isinstance(parameter, DTensor) for parameter in optimizer.state))
        seen.extend(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    for _ in range(2):
        optimizer.zero_grad()
        parallel(x).backward()
        counts.append(ops_on_dtensors(optimizer.step))
        optimizer.register_step_post_hook(after)
    doubled = optim.AdamW(other.parameters())
    for _ in range(2):
        doubled.zero_grad()
        (other(x) * 2).backward()
        doubled.step()
    gone = ops_on_dtensors(lambda: [p.grad * 2 for p in parallel.parameters() if p.grad is not None])
    return {
        "DTensors": all(seen) and len(seen) > 20,
        "replaced gradients": differences(parallel, other, optimizer, doubled) == [],
        "only the hook works on DTensors": counts == [gone, gone],
    }


def closures() -> dict[str, Any]:
    """A step that computes the gradients itself, as hosts of training loops call it."""
    parallel, x = made()
    other, _ = made()
    optimizer, plain = optim.AdamW(parallel.parameters()), optim.AdamW(other.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = parallel(x)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    losses = [optimizer.step(closure).item(), optimizer.step(closure=closure).item()]
    expected = []
    for _ in losses:
        plain.zero_grad()
        expected.append(other(x))
        expected[-1].backward()
        plain.step()
    return {
        "losses": losses == [loss.item() for loss in expected],
        "weights": differences(parallel, other, optimizer, plain) == [],
    }


def errors() -> dict[str, Any]:
    """A step that raises leaves the optimizer as it was; a write to what a graph has saved is an error still."""
    parallel, x = made()
    optimizer = optim.AdamW(parallel.parameters())
    parallel(x).backward()
    optimizer.param_groups[0]["betas"] = (0.9, "none")
    raised = error_of(optimizer.step, TypeError)
    found: dict[str, Any] = {
        "raised": raised != "no error",
        "as before": not optimizer.state and all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"]),
    }
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    loss = parallel(x)
    optimizer.step()
    found["saved"] = "modified by an inplace operation" in error_of(loss.backward, RuntimeError)
    weight = parallel.get_parameter("a.weight")
    weight.grad = torch.zeros(6, 8, dtype=torch.float64)
    found["plain gradient"] = error_of(optimizer.step)
    return found


class Own(optim.AdamW):
    """A subclass, which may compute anything."""


def others() -> dict[str, Any]:
    """Optimizers that are not elementwise, and parameters that are not ours, go on as they are."""
    model, x = model_and_inputs()
    parallel = autopar.parallelize(model, "dp=2", (x,), layout="ddp")
    matrices = [parameter for parameter in parallel.parameters() if parameter.ndim == 2]
    parallel(x).backward()
    found: dict[str, Any] = {
        "subclass": ops_on_dtensors(Own(parallel.parameters()).step),
        "Adafactor": ops_on_dtensors(optim.Adafactor(parallel.parameters()).step),
        "Muon": ops_on_dtensors(optim.Muon(matrices).step),
    }

    def closure() -> Any:
        parallel.zero_grad()
        loss = parallel(x)
        loss.backward()
        return loss

    learning = [p for p in parallel.parameters() if p.grad is not None]
    quasi_newton = optim.LBFGS(learning, lr=0.1)
    before = parallel(x).item()
    found["LBFGS"] = ops_on_dtensors(lambda: quasi_newton.step(closure))  # type: ignore[no-untyped-call]
    found["LBFGS learns"] = parallel(x).item() < before
    mesh = matrices[0].device_mesh  # type: ignore[attr-defined]
    foreign: Any = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh))
    foreign.grad = distribute_tensor(torch.randn(4, 4), mesh)
    found["foreign"] = ops_on_dtensors(optim.AdamW([foreign]).step)
    return found


def mixed() -> dict[str, Any]:
    """Plain parameters beside those of a parallel module, in one optimizer."""
    parallel, x = made()
    other, _ = made()
    head, twin = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    twin.load_state_dict(head.state_dict())
    together = optim.AdamW([*parallel.parameters(), *head.parameters()], foreach=True)
    apart = [optim.AdamW(other.parameters(), foreach=True), optim.AdamW(twin.parameters(), foreach=True)]
    for module, last, optimizers in ((parallel, head, [together]), (other, twin, apart)):
        for _ in range(2):
            module(x).backward()
            last(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return {
        "ours": differences(parallel, other, together, apart[0]),
        "plain": differences(head, twin, together, apart[1]),
    }


def load() -> dict[str, Any]:
    """States that are loaded, copied, or changed between two steps."""
    parallel, x = made()
    optimizer = optim.AdamW(parallel.parameters())
    trained(parallel, x, optimizer)
    other, again = copy.deepcopy((parallel, optimizer))
    third = copy.deepcopy(parallel)
    loaded = optim.AdamW(third.parameters())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch would share the states
    for module, each in ((parallel, optimizer), (other, again), (third, loaded)):
        for state in each.state.values():
            state["exp_avg"] = state["exp_avg"] * 2
        trained(module, x, each)
        each.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    return {
        "copied": differences(parallel, other, optimizer, again),
        "loaded": differences(parallel, third, optimizer, loaded),
    }


def scale() -> dict[str, Any]:
    """Torch's scaler of gradients, which fused optimizers read themselves; one step is skipped."""
    found = {}
    for name in ("AdamW", "AdamW, foreach", "AdamW, fused"):
        parallel, x = made()
        other, _ = made()
        optimizer, plain = (OPTIMIZERS[name](module.parameters()) for module in (parallel, other))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for turn in range(3):
            optimizer.zero_grad()
            scaler.scale(parallel(x)).backward()
            if turn == 1:
                parallel.get_parameter("a.bias").grad.fill_(float("inf"))  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
            if turn != 1:
                plain.zero_grad()
                other(x).backward()
                plain.step()
        found[name] = scaler.get_scale(), differences(parallel, other, optimizer, plain)
    return found


def together() -> dict[str, Any]:
    """Small shards are updated by few ops; those that cannot be, one by one."""
    model, x = model_and_inputs()
    parallel = autopar.parallelize(model, "dp=2", (x,), layout="ddp")
    found: dict[str, Any] = {}
    make: Callable[[Any], Optimizer]
    for name, make in (
        ("AdamW", lambda p: optim.AdamW(p)),
        ("one by one", lambda p: optim.AdamW(p, foreach=False)),
        ("rate as a tensor", lambda p: optim.AdamW(p, lr=torch.tensor(1e-3))),
        ("NAdam", lambda p: optim.NAdam(p)),
        ("states of another dtype", lambda p: optim.SGD(p, lr=0.1, momentum=0.9)),
    ):
        optimizer = make(parallel.parameters())
        trained(parallel, x, optimizer)
        if name == "states of another dtype":
            for state in optimizer.state.values():
                state["momentum_buffer"] = state["momentum_buffer"].float()
        with _Ops(Tensor) as mode:
            optimizer.step()
        found[name] = sum("_foreach_" in op for op in mode.names), len(mode.names)
    return found


def seen_by_others() -> dict[str, Any]:
    return in_turn(*((each, ()) for each in (compare, hooks, closures, errors, others, mixed, load, scale, together)))


def test_steps_on_shards() -> None:
    for found in launch(seen_by_others, ranks=2):
        check_steps(found["compare"])
        assert found["hooks"] == dict.fromkeys(found["hooks"], True)
        assert found["closures"] == {"losses": True, "weights": True}
        assert found["errors"].pop("plain gradient").startswith("a parameter of a parallel module has a plain tensor")
        assert found["errors"] == {"raised": True, "as before": True, "saved": True}
        assert {name for name, count in found["others"].items() if not count} == set()
        assert found["mixed"] == {"ours": [], "plain": []}
        assert found["load"] == {"copied": [], "loaded": []}
        check_together(found["together"])
        assert found["scale"] == dict.fromkeys(("AdamW", "AdamW, foreach", "AdamW, fused"), (2.0, []))


def check_together(counts: dict[str, tuple[int, int]]) -> None:
    """Compare the ops that work on several tensors, and all ops, by way of the step."""
    together, every = counts.pop("AdamW")
    assert together > 5
    assert every < 0.6 * counts["one by one"][1]
    assert len(counts) == 4
    assert [name for name, (several, _) in counts.items() if several] == []


def check_steps(cases: dict[str, Any]) -> None:
    assert len(cases) == 3 * len(OPTIMIZERS)
    assert [name for name, case in cases.items() if case["on DTensors"]] == []
    assert {name: case["from one process"] for name, case in cases.items() if not case["from one process"] < 1e-9} == {}
    compared = {name: case for name, case in cases.items() if "differences" in case}
    assert len(compared) == 3 * (len(OPTIMIZERS) - len(ON_SHARDS_ALONE))
    assert {name: case["differences"] for name, case in compared.items() if case["differences"]} == {}
    assert [name for name, case in compared.items() if not case["norms"]] == []


def test_small_shards_are_taken_in_pieces() -> None:
    sizes = [*[SMALL - 1] * (AT_A_TIME // SMALL), SMALL, 3]
    pieces = list(_pieces([torch.zeros(size) for size in sizes]))
    assert [one.numel() for piece in pieces for one in piece] == sizes
    assert [len(piece) for piece in pieces] == [AT_A_TIME // SMALL, 2]
    assert list(_pieces([])) == []


SETTINGS: dict[type[Optimizer], list[dict[str, Any]]] = {
    optim.SGD: [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.3}],
    optim.Adam: [{"amsgrad": True}, {"betas": (0.8, 0.7), "eps": 1e-3}],
    optim.AdamW: [{"amsgrad": True}, {"betas": (0.8, 0.7), "eps": 1e-3}],
    optim.Adagrad: [{"lr_decay": 0.1, "initial_accumulator_value": 0.1}],
    optim.RMSprop: [{"momentum": 0.5, "centered": True}],
    optim.Adadelta: [{"rho": 0.7}],
    optim.Adamax: [{"betas": (0.8, 0.7), "eps": 1e-3}],
    optim.Rprop: [{"etas": (0.4, 1.3)}],
}


@pytest.mark.parametrize("kind", sorted(ALIKE_TOGETHER, key=lambda kind: kind.__name__))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_classes_update_alike_together(kind: type[Optimizer], dtype: torch.dtype) -> None:
    """One by one and together the parameters and states are the same to the last bit."""
    decays: list[dict[str, Any]] = [{}] if kind is optim.Rprop else [{}, {"weight_decay": 0.1}]
    for settings in ({}, *SETTINGS[kind]):
        for decay in decays:
            for maximize in (False, True):
                torch.manual_seed(0)
                of_each: list[list[Any]] = []
                shapes = ((1,), (7,), (64,), (33, 5), (128, 16), (8, 3, 2))
                values = [[torch.randn(shape, dtype=dtype) for shape in shapes] for _ in range(6)]
                for foreach in (False, True):
                    parameters = [value.clone().requires_grad_() for value in values[0]]
                    make: Any = kind
                    optimizer = make(parameters, foreach=foreach, maximize=maximize, **settings, **decay)
                    for gradients in values[1:]:
                        for parameter, gradient in zip(parameters, gradients, strict=True):
                            parameter.grad = gradient.clone()
                        optimizer.step()
                    states = [list(optimizer.state[parameter].items()) for parameter in parameters]
                    of_each.append([described(one) for one in parameters])
                    of_each[-1] += [(name, described(value)) for state in states for name, value in state]
                assert of_each[0] == of_each[1], (settings, decay, maximize)


def shard() -> dict[str, Any]:
    """Shards of several pieces, uneven ones, those of two axes, and none on the ranks of other stages."""
    torch.manual_seed(0)
    model, inputs = gpt(batch=4, seq=8, vocab=42, d_model=16, layers=2)
    found: dict[str, Any] = {}
    for layout, mesh in (
        ("megatron", "dp=1,tp=4"),
        ("fsdp_tp", "fsdp=2,tp=2"),
        ("micro 2; pipeline pp 1f1b; cut pp before @blocks.1; batch -> dp; * -> none", "dp=2,pp=2"),
    ):
        one = autopar.parallelize(model, mesh, inputs, layout=layout)
        other = copy.deepcopy(one)
        for name in ("AdamW", "AdamW, foreach", "AdamW, fused"):
            optimizer = OPTIMIZERS[name](one.parameters())
            norms = trained(one, inputs, optimizer)
            second, expected = on_dtensors(other, inputs, OPTIMIZERS[name])
            found[f"{name}, {mesh}"] = differences(one, other, optimizer, second), norms == expected
    return found


@pytest.mark.slow
def test_steps_on_shards_of_all_kinds() -> None:
    for found in launch(shard, ranks=4):
        assert found == dict.fromkeys(found, ([], True))
        assert len(found) == 9
