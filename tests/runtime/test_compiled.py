"""`torch.compile` of a parallel module: the values and gradients of the module, in one graph, compiled once."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.utils import run_fw_bw_and_get_code

import autopar
from examples.gpt import gpt
from tests.runtime.launcher import launch
from tests.runtime.training import Inputs, gap, gradient_gap

ENDS = 2
"""Graph breaks: the two ends of a call, which look up the graph and hand out results, are left to Python."""

SUMS = "torch.ops.autopar.sums_begun.default("

STRATEGIES = {
    "ddp": "ddp(dp=a*b)",
    "fsdp": "fsdp(fsdp=a*b)",
    "megatron": "megatron(dp=a, tp=b)",
    "megatron_sp": "megatron_sp(dp=a, tp=b)",
    "fsdp_tp": "fsdp_tp(fsdp=a, tp=b)",
}


def small_gpt() -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    model, inputs = gpt(batch=4, seq=8, vocab=24, d_model=16, heads=4, layers=1)
    return model.double(), inputs


def compile_all(names: tuple[str, ...], mesh: str, backend: str) -> dict[str, Any]:
    """Value and gradients beside one process, twice, and for another shape; graphs that were made, and breaks."""
    model, inputs = small_gpt()
    shorter = {name: value[: len(value) // 2].contiguous() for name, value in inputs.items()}
    calls = [("first", inputs, 1), ("again", inputs, 1)]
    found: dict[str, Any] = {}
    for strategy in names:
        torch._dynamo.reset()
        counters.clear()
        parallel = autopar.parallelize(copy.deepcopy(model), mesh, inputs, layout=STRATEGIES[strategy])
        compiled: Any = torch.compile(parallel, backend=backend)
        for name, given, graphs in [*calls, ("another shape", shorter, 2)] if names == ("fsdp",) else calls:
            model.zero_grad()
            parallel.zero_grad()
            value, expected = compiled(**given), model(**given)
            value.backward()
            expected.backward()
            found[f"{strategy}, {name}"] = max(gap(value, expected), gradient_gap(model, parallel))
            found[f"{strategy}, {name}, graphs"] = counters["stats"]["unique_graphs"] == graphs
        found[f"{strategy}, breaks"] = len(counters["graph_break"]) == ENDS
    return found


class Small(nn.Module):
    """Two layers: inductor compiles every kernel of it by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(autopar.named(self.up(x), "batch d_ff").relu()).pow(2).mean()  # type: ignore[no-any-return]


def by_inductor() -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = Small().double(), torch.randn(4, 8, dtype=torch.float64)
    parallel = autopar.parallelize(
        copy.deepcopy(model), "b=2", (x,), layout="d_ff -> b; * -> none", dims={"x": "batch d"}
    )
    compiled: Any = torch.compile(parallel)
    found: dict[str, Any] = {}
    for call in ("first", "again"):
        model.zero_grad()
        parallel.zero_grad()
        value, expected = compiled(x), model(x)
        value.backward()
        expected.backward()
        found[call] = max(gap(value, expected), gradient_gap(model, parallel))
        found[f"{call}, graphs"] = counters["stats"]["unique_graphs"] == 1
    return found


def check(found: dict[str, Any]) -> None:
    assert [case for case, value in found.items() if value is False] == []
    gaps = {case: value for case, value in found.items() if not isinstance(value, bool)}
    assert len(gaps) >= 2
    assert {case: worst for case, worst in gaps.items() if not worst < 1e-11} == {}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["a=2,b=1", "a=2,b=2"])
def test_compiled_is_what_it_is_without(mesh: str) -> None:
    """On two ranks fsdp alone, with another shape; all strategies on 2 x 2."""
    names = ("fsdp",) if mesh == "a=2,b=1" else tuple(STRATEGIES)
    ranks = 2 if mesh == "a=2,b=1" else 4
    for found in launch(compile_all, names, mesh, "aot_eager", ranks=ranks):
        check(found)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor() -> None:
    for found in launch(by_inductor, ranks=2):
        check(found)


def order_of_sums() -> dict[str, Any]:
    """Return after which share of the products of a lowered backward each sum of gradients begins."""
    torch.manual_seed(0)
    torch._inductor.config.force_disable_caches = True  # another run may have lowered it otherwise
    model, inputs = gpt(batch=4, seq=64, vocab=1024, d_model=128, heads=4, layers=4)
    parallel = autopar.parallelize(model, "dp=2", inputs, layout="ddp")
    compiled: Any = torch.compile(parallel)
    _, codes = run_fw_bw_and_get_code(lambda: compiled(**inputs))
    (code,) = (code for code in codes if SUMS in code)
    parts = [part.count("extern_kernels.") for part in code.split(SUMS)]
    return {
        "begin after": [sum(parts[: i + 1]) / sum(parts) for i in range(len(parts) - 1)],
        "option": torch._inductor.config.reorder_for_peak_memory,
    }


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_begins_sums_when_gradients_are_there() -> None:
    """Not all of them after the whole backward, where nothing hides them; other graphs are lowered as ever."""
    for found in launch(order_of_sums, ranks=2):
        first, *_, last = found["begin after"]
        assert first < 0.85
        assert last > 0.9
        assert found["option"] is True


def in_micro_batches() -> dict[str, float]:
    """Three steps of SGD, in which later buckets use the memory of earlier ones again."""
    model, inputs = small_gpt()
    found = {}
    for layout in ("micro 2; fsdp(fsdp=a)", "micro 2; zero1(dp=a)", "micro 2; ddp(dp=a)"):
        torch._dynamo.reset()
        alone = copy.deepcopy(model)
        parallel = autopar.parallelize(copy.deepcopy(model), "a=2", inputs, layout=layout)
        compiled: Any = torch.compile(parallel, backend="aot_eager")
        for step in range(3):
            alone.zero_grad()
            parallel.zero_grad()
            value, expected = compiled(**inputs), alone(**inputs)
            value.backward()
            expected.backward()
            found[f"{layout}, {step}"] = max(gap(value, expected), gradient_gap(alone, parallel))
            for one in (alone, parallel):
                torch.optim.SGD(one.parameters(), 0.1).step()
    return found


def test_micro_batches_send_outside_of_compiled_graphs() -> None:
    """A gather that began in one graph was read in another before it had arrived."""
    for found in launch(in_micro_batches, ranks=2):
        check(found)


def with_symbols() -> dict[str, float]:
    """Two models of other widths under one layout: the compiler takes the sizes of the second one as symbols."""
    torch._dynamo.reset()
    found = {}
    for width in (16, 32, 48):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width)).double(), torch.randn(4, width)
        x = x.double()
        parallel = autopar.parallelize(copy.deepcopy(model), "a=2", (x,), layout="ddp(dp=a)", outputs="full")
        compiled: Any = torch.compile(parallel, backend="aot_eager")
        value, expected = compiled(x).square().mean(), model(x).square().mean()
        value.backward()
        expected.backward()
        found[str(width)] = max(gap(value, expected), gradient_gap(model, parallel))
    return found


def test_sums_of_gradients_take_sizes_as_symbols() -> None:
    for found in launch(with_symbols, ranks=2):
        check(found)


def buffers() -> dict[str, bool]:
    """Three steps: the gradients of the first are dropped before the second, whose gradients stay in use."""
    torch._dynamo.reset()
    model, inputs = small_gpt()
    parallel = autopar.parallelize(model, "a=2", inputs, layout="ddp(dp=a)")
    compiled: Any = torch.compile(parallel, backend="aot_eager")
    parameter = next(parallel.parameters())

    def step(given: Inputs) -> Any:
        parallel.zero_grad()
        compiled(**given).backward()
        return parameter.grad

    first = step(inputs)._local_tensor.data_ptr()
    second = step(inputs)
    values = second.full_tensor().clone()
    third = step({name: value.roll(1) for name, value in inputs.items()})
    return {
        "used again": first == second._local_tensor.data_ptr(),
        "not while in use": third._local_tensor.data_ptr() != first,
        "values stay": torch.equal(second.full_tensor(), values),
    }


def test_sums_of_gradients_use_their_buffer_again() -> None:
    for found in launch(buffers, ranks=2):
        assert all(found.values()), found


def given_up() -> dict[str, Any]:
    """Give up the frame of `forward` while it is traced, as torch 2.11 did: the call goes on in Python."""
    model, inputs = small_gpt()
    parallel = autopar.parallelize(copy.deepcopy(model), "a=2", inputs, layout="fsdp(fsdp=a)")
    refused: Any = pytest.MonkeyPatch()

    def refuse() -> None:
        if torch.compiler.is_dynamo_compiling():
            raise ValueError("nothing is traced")

    refused.setattr("autopar.runtime.module.check_not_captured", refuse)
    counters.clear()
    compiled: Any = torch.compile(parallel, backend="aot_eager")
    found: dict[str, Any] = {}
    for call in ("first", "again"):
        model.zero_grad()
        parallel.zero_grad()
        value, expected = compiled(**inputs), model(**inputs)
        value.backward()
        expected.backward()
        found[call] = max(gap(value, expected), gradient_gap(model, parallel))
    refused.undo()
    found["nothing below it is traced"] = counters["stats"]["unique_graphs"] == 0
    return found


def test_a_call_that_dynamo_gives_up_runs_in_python() -> None:
    for found in launch(given_up, ranks=2):
        check(found)


class Counting(nn.Module):
    """Parameters, one of which is frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.register_buffer("offset", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.linear(x) + self.offset).square().mean()


def static_inputs(layout: str) -> tuple[dict[int, tuple[int, int]], list[float]]:
    """By call: the inputs of the largest graph that it compiled, and how many of them stay. And all differences."""
    found: list[tuple[int, int]] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        context = torch._guards.TracingContext.try_get()
        assert context is not None
        assert context.fw_metadata is not None
        found.append((len(inputs), len(context.fw_metadata.static_input_indices)))
        return make_boxed_func(graph.forward)

    torch.manual_seed(0)
    model = Counting().double()
    x = torch.randn(4, 8, dtype=torch.float64)
    parallel = autopar.parallelize(copy.deepcopy(model), "a=2", (x,), layout=layout)
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward))
    compiled: Any = torch.compile(parallel, backend=backend)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (model, parallel)]
    gaps, largest = [], {}
    for number in range(6):
        if number == 5:  # the parameter is another one: what is compiled reads it where it is
            for one in (model, parallel):
                one.linear.weight = nn.Parameter(one.linear.weight.detach() * 2)
        trained = number < 3
        before = len(found)
        with torch.set_grad_enabled(trained):
            expected, value = model(x), compiled(x)
        gaps.append(gap(value, expected))
        if len(found) > before:
            largest[number] = max(found[before:])
        if trained:
            expected.backward()
            value.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return largest, gaps


@pytest.mark.slow
def test_parameters_stay_where_they_are_for_cuda_graphs() -> None:
    """All but the batch, trained and not; there is a graph for each, and none for a parameter that has moved."""
    for layout in ("ddp(dp=a)", "fsdp(fsdp=a)"):
        for largest, gaps in launch(static_inputs, layout, ranks=2):
            assert max(gaps) < 1e-11
            assert largest == {0: (5, 4), 3: (5, 4)}
