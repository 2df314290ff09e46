"""`micro N` on real ranks: results and gradients of the whole batch, with the memory of one micro-batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.errors import LayoutError
from autopar.lowering.modules.micro_loop import MicroBatchLoop
from examples.gpt import gpt
from tests.runtime.launcher import launch
from tests.runtime.sent import Counted
from tests.runtime.training import gradients, worst

REGATHERED = "micro 4; batch -> dp; * -> none; param { * -> dp }; regather @*"


def pair(
    layout: str, mesh: str, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[nn.Module, Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = gpt(batch=8, seq=12, vocab=104)
    model = model.to(dtype)
    return model, autopar.parallelize(model, mesh, inputs, layout=layout, **options), inputs


def loops(parallel: Any) -> list[MicroBatchLoop]:
    return [one for one in parallel.emitted.graph_module.modules() if isinstance(one, MicroBatchLoop)]


def step(layout: str, mesh: str) -> tuple[float, float, list[int]]:
    """Errors of loss and gradients over two steps, the second one scaled; the counts of the loops."""
    model, parallel, inputs = pair(layout, mesh)
    error = 0.0
    for scale in (1.0, 3.0):
        expected, found = model(**inputs) * scale, parallel(**inputs) * scale
        error = max(error, float((expected - found).abs()))
        expected.backward()
        found.backward()
    return error, worst(gradients(parallel), gradients(model)), [one.count for one in loops(parallel)]


@pytest.mark.parametrize(
    ("layout", "mesh", "ranks"),
    [
        ("micro 4; batch -> dp; * -> none", "dp=2", 2),
        ("micro 8; megatron_sp", "dp=1,tp=2", 2),
        (REGATHERED, "dp=2", 2),
        pytest.param("micro 8; * -> none", "dp=2", 2, marks=pytest.mark.slow),
        pytest.param("micro 2; fsdp(fsdp=dp)", "dp=2", 2, marks=pytest.mark.slow),
        pytest.param("micro 4; zero1", "dp=2", 2, marks=pytest.mark.slow),
        pytest.param("micro 4; batch -> dp; * -> none; recompute full @blocks.*", "dp=2", 2, marks=pytest.mark.slow),
        pytest.param("micro 2; fsdp_tp(fsdp=dp)", "dp=2,tp=2", 4, marks=pytest.mark.slow),
        pytest.param("micro 4; megatron", "dp=2,tp=2", 4, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_the_whole_batch(layout: str, mesh: str, ranks: int) -> None:
    for error, off, counts in launch(step, layout, mesh, ranks=ranks):
        assert error < 1e-12
        assert off < 1e-12
        assert counts == [int(layout[6])]


class Labelled(nn.Module):
    """Logits and their loss; both read the batch, and may read it in different splits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(torch.tanh(self.table(ids)))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def rows(layout: str, mesh: str, local: bool) -> tuple[float, float, float]:
    """Errors of the loss, of the logits and of the gradients."""
    torch.manual_seed(0)
    model = Labelled().double()
    given = {name: torch.randint(12, (8, 3)) for name in ("ids", "labels")}
    dims = dict.fromkeys(given, "batch seq") | {"table.weight": "vocab d", "head.weight": "vocab d"}
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mine = {name: x.chunk(ranks)[rank] for name, x in given.items()} if local else given
    parallel = autopar.parallelize(model, mesh, mine, layout=layout, dims=dims, local_inputs=local, outputs="full")
    loss, logits = parallel(**mine)
    expected, expected_logits = model(**given)
    loss.backward()
    expected.backward()
    errors = (loss - expected, logits - expected_logits)
    return (*(float(one.detach().abs().max()) for one in errors), worst(gradients(parallel), gradients(model)))


@pytest.mark.parametrize(
    ("layout", "mesh", "local"),
    [
        ("micro 2; batch -> a; vocab -> a | none !50", "a=2", False),
        pytest.param("micro 2; batch -> a; vocab -> a | none !50", "a=2", True, marks=pytest.mark.slow),
        pytest.param("micro 4; vocab -> a; batch -> a | none !50", "a=2", False, marks=pytest.mark.slow),
        pytest.param("micro 2; batch -> a*b; vocab -> b | none !50", "a=2,b=2", False, marks=pytest.mark.slow),
        pytest.param("micro 2; batch -> a*b; vocab -> b | none !50", "a=2,b=2", True, marks=pytest.mark.slow),
        pytest.param("micro 2; batch -> b*a; vocab -> b | none !50", "a=2,b=2", False, marks=pytest.mark.slow),
        pytest.param("micro 2; input { * -> none }; batch -> a; * -> none", "a=2", False, marks=pytest.mark.slow),
        pytest.param("micro 2; batch -> a; act { batch -> b }; * -> none", "a=2,b=2", False, marks=pytest.mark.slow),
    ],
)
def test_all_values_have_the_same_rows_in_a_micro_batch(layout: str, mesh: str, local: bool) -> None:
    """The table and the head may be split by the vocabulary: then they read the rows of all ranks, the loss its own."""
    for errors in launch(rows, layout, mesh, local, ranks=2 if mesh == "a=2" else 4):
        assert max(errors) < 1e-12, errors


# -- other models -----------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """`how` makes the results of the hidden values and the targets."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(6, 7), nn.Linear(7, 5)
        self.places = nn.Embedding(8, 7)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        if self.how == "centred":
            x = x - x.mean(0, keepdim=True)
        hidden = self.first(x).tanh()
        if self.how == "positions":
            hidden = hidden + self.places(torch.arange(x.shape[0]))
        if self.how == "centred hidden":
            hidden = hidden - hidden.mean(0, keepdim=True)
        logits = self.last(hidden)
        if self.how.startswith("logits"):
            return logits
        if self.how == "count first":
            each = functional.cross_entropy(logits, y, reduction="none", ignore_index=-100)
            return (each / (y >= 0).sum()).sum()
        loss = functional.cross_entropy(logits, y, ignore_index=-100)
        if self.how == "square root":
            return logits.square().sum().sqrt()
        if self.how == "product of sums":
            return loss + 0.1 * hidden.square().mean().square()
        if self.how == "buffer":
            self.seen = self.seen + loss.detach()
        return (loss, logits) if self.how.startswith("both") else loss


# The loss of the results, and the number of loops.
MODELS: dict[str, tuple[Callable[[Any], Tensor], int]] = {
    "loss": (lambda found: found, 1),
    "count first": (lambda found: found, 2),
    "centred": (lambda found: found, 2),
    "centred hidden": (lambda found: found, 2),
    "positions": (lambda found: found, 1),
    "square root": (lambda found: found, 1),
    "product of sums": (lambda found: found, 1),
    "buffer": (lambda found: found, 1),
    "logits": (lambda found: found.square().sum(), 1),
    "both, the loss": (lambda found: found[0], 1),
    "both, the logits": (lambda found: found[1].square().mean(), 1),
    "both of both": (lambda found: 2 * found[0] + found[1].square().mean(), 1),
}


def each_model(layout: str, mesh: str) -> dict[str, tuple[float, float, int]]:
    found = {}
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([-100, -100, 4, 1, 0, -100, 2, 2])  # targets that do not count differ in the micro-batches
    for how, (loss, _) in MODELS.items():
        torch.manual_seed(0)
        model = Model(how).double()
        parallel = autopar.parallelize(model, mesh, (x, y), layout=layout, outputs="full")
        error = 0.0
        for _ in range(2):  # the second call knows the gradients of the first
            expected, given = loss(model(x, y)), loss(parallel(x, y))
            expected.backward()
            given.backward()
            error = max(error, float((expected - given).abs()), float((model.seen - parallel.seen).abs()))
        found[how] = error, worst(gradients(parallel), gradients(model)), len(loops(parallel))
    return found


def test_models() -> None:
    for found in launch(each_model, "micro 2; ddp", "dp=2", ranks=2):
        for how, (error, off, count) in found.items():
            assert error < 1e-12, how
            assert off < 1e-11, how
            assert count == MODELS[how][1], how


def mean_of_means() -> float:
    """The loss of a model that takes the mean of each micro-batch's mean: what `micro` must not give."""
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([-100, -100, 4, 1, 0, -100, 2, 2])
    torch.manual_seed(0)
    model = Model("loss").double()
    means = [model(*part) for part in zip(x.chunk(2), y.chunk(2), strict=True)]
    return float((model(x, y) - sum(means) / 2).detach().abs())


def test_the_models_tell_a_mean_of_means_apart() -> None:
    assert mean_of_means() > 1e-3


# -- what it saves ----------------------------------------------------------------------------------------------------


def saved_at_once(layout: str) -> int:
    """The most bytes that autograd keeps for the backward at one time, but for parameters."""
    _, parallel, inputs = pair(layout, "dp=2")
    parallel(**inputs).backward()
    alive, most, own = 0, 0, {parameter.to_local().data_ptr() for parameter in parallel.parameters()}
    known: dict[int, Any] = {}

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    def pack(tensor: Tensor) -> Kept:
        nonlocal alive, most
        kept = Kept(tensor)
        size = 0 if tensor.data_ptr() in own or tensor.data_ptr() in known else tensor.numel() * tensor.element_size()
        alive += size
        most = max(most, alive)

        def free() -> None:
            nonlocal alive
            alive -= size

        weakref.finalize(kept, free)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        parallel(**inputs).backward()
    return most


def memory() -> tuple[int, int]:
    return saved_at_once("ddp"), saved_at_once("micro 4; ddp")


def test_activations_of_one_micro_batch_are_alive() -> None:
    for whole, micro in launch(memory, ranks=2):
        assert micro < 0.4 * whole


def collectives(layout: str) -> dict[str, int]:
    _, parallel, inputs = pair(layout, "dp=2")
    parallel(**inputs).backward()
    with Counted() as sent:
        parallel(**inputs).backward()
    return dict(sent.counts)


def sent() -> list[dict[str, int]]:
    return [collectives(one) for one in ("fsdp", "micro 2; fsdp", "micro 4; fsdp", REGATHERED)]


def test_parameters_are_gathered_and_gradients_reduced_once() -> None:
    for plain, two, four, regathered in launch(sent, ranks=2):
        assert two == four
        gathers, reductions = plain["all_gather_into_tensor"], plain["reduce_scatter_tensor"]
        # The table of positions is read before the micro-batches, so it has a bucket of its own.
        assert (four["all_gather_into_tensor"], four["reduce_scatter_tensor"]) == (gathers + 1, reductions + 1)
        assert regathered["all_gather_into_tensor"] == 2 * 4 * gathers
        assert regathered["reduce_scatter_tensor"] == 4 * reductions


# -- with other features ----------------------------------------------------------------------------------------------


def features() -> dict[str, float]:
    found = {}
    model, parallel, inputs = pair("micro 4; fsdp", "dp=2")
    with torch.no_grad():
        found["no_grad"] = float((model(**inputs) - parallel(**inputs)).abs())
    found["eval"] = float((model.eval()(**inputs) - parallel.eval()(**inputs)).abs())
    model, parallel, inputs = pair("micro 2; fsdp", "dp=2")
    with parallel.no_sync():
        parallel(**inputs).backward()
    parallel(**inputs).backward()
    for _ in range(2):
        model(**inputs).backward()
    found["no_sync"] = worst(gradients(parallel), gradients(model))
    model, parallel, inputs = pair("micro 4; batch -> dp; * -> none; regather @*", "dp=2")
    with parallel.no_sync():
        (parallel(**inputs) * 2).backward()
    (parallel(**inputs) * 3).backward()
    (model(**inputs) * 5).backward()
    found["no_sync of whole weights"] = worst(gradients(parallel), gradients(model))
    model, parallel, inputs = pair("micro 2; fsdp", "dp=2")
    loss, expected = parallel(**inputs), model(**inputs)
    for one in (loss, expected):
        one.backward(retain_graph=True)
        one.backward()
    found["twice"] = worst(gradients(parallel), gradients(model))
    model, parallel, inputs = pair("micro 2; fsdp", "dp=2")
    doubled = {name: torch.cat([x, x]) for name, x in inputs.items()}
    model(**doubled).backward()
    parallel(**doubled).backward()
    found["a larger batch"] = worst(gradients(parallel), gradients(model))
    rank = torch.distributed.get_rank()
    model, inputs = gpt(batch=8, seq=12, vocab=104)
    mine = {name: x.chunk(2)[rank] for name, x in inputs.items()}
    parallel = autopar.parallelize(model.double(), "dp=2", mine, layout="micro 2; ddp", local_inputs=True)
    model(**inputs).backward()
    parallel(**mine).backward()
    found["local inputs"] = worst(gradients(parallel), gradients(model))
    return found


@pytest.mark.slow
def test_features() -> None:
    for found in launch(features, ranks=2, seconds=200):
        for name, error in found.items():
            assert error < 1e-12, name


def compiled() -> float:
    # In float32, as the compiler of torch 2.11 has no float64 attention on a CPU.
    model, parallel, inputs = pair("micro 2; ddp", "dp=2", torch.float32)
    torch.compile(parallel)(**inputs).backward()
    model(**inputs).backward()
    return worst(gradients(parallel), gradients(model))


@pytest.mark.slow
def test_compiled() -> None:
    assert max(launch(compiled, ranks=2, seconds=200)) < 2e-5


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x * self.weight, 0.5)


def dropped() -> tuple[Tensor, Tensor, Tensor]:
    """Results of one call under a seed, of the same call again, and the gradient of the weights."""
    x = torch.ones(64, 5)
    parallel = autopar.parallelize(Dropped(), "dp=2", (x,), layout="micro 4; ddp", outputs="full")
    torch.manual_seed(3)
    first = parallel(x)
    torch.manual_seed(3)
    second = parallel(x)
    second.sum().backward()
    return first.detach(), second.detach(), gradients(parallel)["weight"]


def test_micro_batches_drop_other_values() -> None:
    results = launch(dropped, ranks=2)
    for first, second, gradient in results:
        assert torch.equal(first, second)
        assert torch.equal(first, results[0][0])
        kept = (first > 0).reshape(8, 8, 5)
        assert all(not torch.equal(one, other) for n, one in enumerate(kept) for other in kept[:n])
        assert torch.allclose(gradient, second.sum(0))


def half() -> tuple[list[float], list[float]]:
    """Errors of float16 gradients of steps under two scales, with micro-batches and in one piece."""
    torch.manual_seed(0)
    model, inputs = gpt(batch=8, seq=12, vocab=104)
    model(**inputs).backward()
    expected = gradients(model)
    found: list[list[float]] = []
    for layout in ("micro 4; ddp", "ddp"):
        parallel = autopar.parallelize(model, "dp=2", inputs, layout=layout, precision="fp16")
        errors = []
        for scale in (256, 256, 4096):
            parallel.zero_grad()
            (parallel(**inputs) * scale).backward()
            errors.append(worst({name: one / scale for name, one in gradients(parallel).items()}, expected))
        found.append(errors)
    return found[0], found[1]


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


def large() -> Tensor:
    """Gradients of 16 in float16: times the scale that small gradients need, they are infinite."""
    x = torch.ones(16, 3)
    parallel = autopar.parallelize(Weighted(), "dp=2", (x,), layout="micro 4; ddp", precision="fp16")
    parallel(x).backward()
    return gradients(parallel)["weight"]


def test_float16_is_no_worse_than_in_one_piece() -> None:
    for micro, whole in launch(half, ranks=2):
        assert all(one < max(0.02, 1.5 * other) for one, other in zip(micro, whole, strict=True))


def test_large_gradients_in_float16_stay_finite() -> None:
    for gradient in launch(large, ranks=2):
        assert torch.equal(gradient, torch.full((3,), 16.0))


# -- refusals ---------------------------------------------------------------------------------------------------------


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, input: Tensor) -> Tensor:
        return self.norm(input).square().mean()


def refusal(layout: str, model: nn.Module, x: Tensor) -> str:
    try:
        autopar.parallelize(model, "dp=2", (x,), layout=layout, dims={"input": "batch features"})
    except LayoutError as error:
        return str(error)
    return ""


def refusals() -> list[str]:
    x = torch.randn(8, 6)
    return [
        refusal("micro 2; ddp", Normalised(), x),
        refusal("micro 3; ddp", nn.Linear(6, 2), x),
        refusal("micro 0; ddp", nn.Linear(6, 2), x),
        refusal("micro 2; micro 4; batch -> dp", nn.Linear(6, 2), x),
        refusal("micro 2 of rows; batch -> dp; * -> none", nn.Linear(6, 2), x),
    ]


def test_refusals() -> None:
    for statistics, uneven, none, two, unknown in launch(refusals, ranks=2):
        assert statistics.startswith("E5: micro 2 cannot split the batch: ")
        assert "norm" in statistics
        assert "GroupNorm" in statistics
        assert "micro 3 over dp = 2 does not divide it" in uneven
        assert "give a batch of a multiple of 6" in uneven
        assert "there is at least one micro-batch" in none
        assert "has one 'micro' line" in two
        assert unknown.startswith("E1: there is no dim 'rows'")


def test_a_searched_plan_is_exact() -> None:
    for error, off, counts in launch(step, "micro ?{4}; batch -> dp; * -> none", "dp=2", ranks=2):
        assert error < 1e-12
        assert off < 1e-12
        assert counts == [4]


def scalars_alone() -> list[tuple[bool, float, float]]:
    return [scalars_under(layout) for layout in ("batch -> dp; * -> none", "micro 2; batch -> dp; * -> none")]


def scalars_under(layout: str) -> tuple[bool, float, float]:
    torch.manual_seed(0)
    model = Model("both").double()
    inputs = {"x": torch.randn(8, 6, dtype=torch.float64), "y": torch.randint(5, (8,))}
    parallel = autopar.parallelize(model, "dp=2", inputs, layout=layout, outputs="loss")
    expected, (found, logits) = model(**inputs)[0], parallel(**inputs)
    expected.backward()
    found.backward()
    return logits is None, float((expected - found).abs()), worst(gradients(parallel), gradients(model))


def test_results_that_nobody_asks_for_are_none() -> None:
    for found in launch(scalars_alone, ranks=2):
        for is_none, error, off in found:
            assert is_none
            assert error < 1e-12
            assert off < 1e-12


def test_logits_of_all_micro_batches_take_no_memory() -> None:
    inputs = {"x": torch.empty(4096, 6, device="meta"), "y": torch.empty(4096, dtype=torch.long, device="meta")}
    model = Model("both").to("meta")
    kept, dropped = (
        autopar.plan(model, "dp=2", inputs, layout="micro 64; ddp", cluster="h100", outputs=one, cache=False)
        for one in ("sharded", "loss")
    )
    logits = 2048 * 5 * 4
    assert kept.memory_bytes - dropped.memory_bytes == pytest.approx(logits, rel=0.05)
    with pytest.raises(autopar.AutoparError, match="the model returns no scalar"):
        autopar.plan(Model("logits").to("meta"), "dp=2", inputs, cluster="h100", outputs="loss", cache=False)


class Scaled(nn.Module):
    """A weight that is viewed before the loop, as Mamba's skip connection is; and one that is computed there."""

    def __init__(self) -> None:
        super().__init__()
        self.skip, self.rate = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(x * self.skip[None, :] + self.rate.exp()).square().mean()
        return found


def compiled_views() -> float:
    torch.manual_seed(0)
    model, x = Scaled().double(), torch.randn(8, 6, dtype=torch.float64)
    parallel = autopar.parallelize(model, "dp=2", (x,), layout="micro 2; ddp", dims={"x": "batch features"})
    model(x).backward()
    torch.compile(parallel, backend="aot_eager")(x).backward()
    return worst(gradients(parallel), gradients(model))


def test_gradients_of_views_before_a_compiled_loop_are_summed() -> None:
    assert max(launch(compiled_views, ranks=2)) < 1e-12
