"""Random numbers on several real processes: replicas equal, shards different, and an exact mode like one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.runtime.module import ParallelModule
from examples.gpt import gpt
from tests.gaps import number
from tests.runtime.launcher import in_turn, launch
from tests.runtime.training import error_of

MESH = "a=2,b=2"
ROWS = "rows -> a; * -> none"
BOTH = "rows -> a; columns -> b; * -> none"


@dataclass(frozen=True)
class Case:
    """A function that draws for a tensor of some kind, and the axes that split what it draws."""

    function: Callable[[Tensor], Tensor]
    kind: str
    layout: str
    axes: str = "ab"
    exact: bool = True


class Ops(nn.Module):
    """Functions of one input, to which a parameter is added for each so that its gradient can be seen."""

    def __init__(self, cases: dict[str, Case], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.functions = [case.function for case in cases.values()]
        self.offsets = nn.ParameterList([nn.Parameter(torch.randn(shape, dtype=torch.float64)) for _ in cases])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(x + offset) for function, offset in zip(self.functions, self.offsets, strict=True))


def attend(x: Tensor, **options: Any) -> Tensor:
    heads = x.shape[1] // 2 if options.get("enable_gqa") else x.shape[1]
    return functional.scaled_dot_product_attention(x, x[:, :heads], x[:, :heads] * 2, dropout_p=0.4, **options)


def masked(x: Tensor, kind: str) -> Tensor:
    size = x.shape[-2]
    seen = torch.ones(size, size, dtype=torch.bool).tril(-1)  # the first row sees nothing
    return attend(x, attn_mask=seen if kind == "bool" else x.mean((0, 1, 3)) * seen)


SHAPES = {
    "table": ((8, 6), "rows columns"),
    "odd": ((5, 6), "rows columns"),
    "one row": ((1, 40), "rows columns"),
    "deep": ((4, 4, 6), "rows columns inner"),
    "images": ((8, 8, 2, 3), "rows columns height width"),
    "heads": ((4, 4, 6, 2), "batch heads seq width"),
}
ROWS = "rows -> a; * -> none"
BOTH = "rows -> a; columns -> b; * -> none"
UNEVEN = "rows -> a pad; columns -> b; * -> none"
ON_HEADS = "batch -> a; heads -> b; * -> none"
CASES = {
    "dropout": Case(lambda x: functional.dropout(x, 0.4), "table", BOTH),
    "dropout of rows": Case(lambda x: functional.dropout(x, 0.4), "table", ROWS, "a"),
    "dropout of nothing": Case(lambda x: functional.dropout(x, 0.4), "table", "* -> none", ""),
    "dropout of all": Case(lambda x: functional.dropout(x, 1.0), "table", BOTH),
    "dropout twice": Case(lambda x: functional.dropout(functional.dropout(x, 0.3), 0.3), "table", BOTH),
    "dropout transposed": Case(lambda x: functional.dropout(x.t(), 0.4), "table", BOTH),
    "dropout of uneven shards": Case(lambda x: functional.dropout(x, 0.4), "odd", UNEVEN),
    "dropout of an empty shard": Case(lambda x: functional.dropout(x, 0.4), "one row", UNEVEN),
    "rand of uneven shards": Case(lambda x: torch.rand_like(x) * x, "odd", UNEVEN),
    "rand of an empty shard": Case(lambda x: torch.rand_like(x) * x, "one row", UNEVEN),
    "dropout of an inner dim": Case(
        lambda x: functional.dropout(x.transpose(1, 2).reshape(4, 24), 0.4), "deep", "columns -> a*b; * -> none"
    ),
    "alpha dropout": Case(lambda x: functional.alpha_dropout(x, 0.3, True), "table", BOTH),
    "dropout of channels": Case(lambda x: functional.dropout2d(x, 0.4), "images", BOTH),
    "alpha dropout of channels": Case(lambda x: functional.feature_alpha_dropout(x, 0.4, True), "images", BOTH),
    "bernoulli": Case(lambda x: x.sigmoid().bernoulli(), "table", BOTH),
    "bernoulli in place": Case(lambda x: torch.empty_like(x).bernoulli_(0.3) * x, "table", BOTH),
    "rand_like": Case(lambda x: torch.rand_like(x) * x, "table", BOTH),
    "randn_like": Case(lambda x: torch.randn_like(x.t()) * x.t(), "table", BOTH),
    "randint_like": Case(lambda x: torch.randint_like(x, 3, 50) * x, "table", BOTH),
    "rand": Case(lambda x: torch.rand(x.shape, dtype=x.dtype) * x, "table", BOTH),
    "rand of one column": Case(lambda x: torch.rand(x.shape[0], 1, dtype=x.dtype) + x * 0, "table", BOTH, "a"),
    "randn": Case(lambda x: torch.randn(x.shape, dtype=x.dtype) * x, "table", BOTH),
    "randint": Case(lambda x: torch.randint(3, 50, x.shape) * x, "table", BOTH),
    "randperm": Case(lambda x: x * torch.randperm(x.shape[0])[:, None], "table", "* -> none", ""),
    "uniform": Case(lambda x: torch.empty_like(x).uniform_(1, 3) * x, "table", BOTH),
    "normal": Case(lambda x: torch.normal(x, 2.0), "table", BOTH),
    "normal in place": Case(lambda x: torch.empty_like(x).normal_(1, 2) * x, "table", BOTH),
    "normal of both": Case(lambda x: torch.normal(x, x.exp()), "table", BOTH),
    "exponential": Case(lambda x: torch.empty_like(x).exponential_(2.0) * x, "table", BOTH),
    "cauchy": Case(lambda x: torch.empty_like(x).cauchy_() * x, "table", BOTH),
    "log_normal": Case(lambda x: torch.empty_like(x).log_normal_() * x, "table", BOTH),
    "geometric": Case(lambda x: torch.empty_like(x).geometric_(0.4) * x, "table", BOTH),
    "gumbel": Case(lambda x: functional.gumbel_softmax(x), "table", ROWS, "a"),
    "multinomial": Case(lambda x: torch.multinomial(x.exp(), 3).to(x.dtype), "table", ROWS, "a"),
    "multinomial again": Case(lambda x: torch.multinomial(x.exp(), 9, True).to(x.dtype), "table", ROWS, "a"),
    "attention": Case(attend, "heads", ON_HEADS),
    "attention of rows": Case(attend, "heads", "batch -> a; seq -> b; * -> none"),
    "causal attention": Case(lambda x: attend(x, is_causal=True), "heads", ON_HEADS),
    "causal attention of rows": Case(lambda x: attend(x, is_causal=True), "heads", "batch -> a; seq -> b; * -> none"),
    "grouped attention": Case(lambda x: attend(x, enable_gqa=True, scale=0.3), "heads", ON_HEADS, "a"),
    "masked attention": Case(lambda x: masked(x, "bool"), "heads", ON_HEADS),
    "biased attention": Case(lambda x: masked(x, "float"), "heads", ON_HEADS),
    "rrelu": Case(lambda x: functional.rrelu(x - 3, training=True), "table", BOTH, exact=False),
    "rrelu in place": Case(lambda x: functional.rrelu(x - 3, training=True, inplace=True), "table", BOTH, exact=False),
    "rrelu in place of nothing": Case(
        lambda x: functional.rrelu(x - 3, training=True, inplace=True), "table", "* -> none", ""
    ),
    "rrelu of nothing": Case(lambda x: functional.rrelu(x - 3, training=True), "table", "* -> none", ""),
    "poisson": Case(lambda x: torch.poisson(x.exp()), "table", BOTH, exact=False),
    "binomial": Case(
        lambda x: torch.binomial((x.detach().exp() + 9).floor(), x.detach() * 0 + 0.4), "table", BOTH, exact=False
    ),
    "gamma": Case(lambda x: torch._standard_gamma(x.exp()), "table", BOTH, exact=False),
    "gamma of nothing": Case(lambda x: torch._standard_gamma(x.exp()), "table", "* -> none", ""),
    "dirichlet": Case(lambda x: torch._sample_dirichlet(x.detach().exp()), "table", ROWS, "a", exact=False),
    "dirichlet of nothing": Case(lambda x: torch._sample_dirichlet(x.detach().exp()), "table", "* -> none", ""),
}


def groups(exact: bool | None = None) -> dict[tuple[str, str, bool], dict[str, Case]]:
    """Cases that one model can have together."""
    found: dict[tuple[str, str, bool], dict[str, Case]] = {}
    for name, case in CASES.items():
        if exact in (None, case.exact):
            found.setdefault((case.kind, case.layout, case.exact), {})[name] = case
    return found


def made(kind: str, layout: str, cases: dict[str, Case], outputs: Any) -> tuple[Ops, ParallelModule, Tensor]:
    torch.manual_seed(3)
    shape, dims = SHAPES[kind]
    model = Ops(cases, shape).train()
    x = torch.randn(shape, dtype=torch.float64)
    given = copy.deepcopy(model)
    return model, autopar.parallelize(given, MESH, (x,), layout=layout, dims={"x": dims}, outputs=outputs), x


def step(call: nn.Module, x: Tensor, seed: int) -> tuple[list[Tensor], list[Tensor | None], float]:
    """The results, the gradients of the parameters, and what the generator draws next."""
    torch.manual_seed(seed)
    results = call(x)
    following = float(torch.rand(()))
    weighted = [
        result * torch.linspace(-1, 2, result.numel(), dtype=result.dtype).reshape(result.shape)
        for result in results
        if result.requires_grad
    ]
    if weighted:
        torch.stack([result.sum() for result in weighted]).sum().backward()
    gradients: list[Any] = [parameter.grad for parameter in call.parameters()]
    for parameter in call.parameters():
        parameter.grad = None
    whole = [gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient for gradient in gradients]
    return [result.detach().contiguous() for result in results], whole, following


def gap(found: Tensor | None, expected: Tensor | None) -> float:
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    return number((found - expected).abs().max() / expected.abs().max().clamp_min(1e-9))


def draw_exactly() -> dict[str, Any]:
    """How far each case is from one process: in its result, in the gradient, and in the state that it leaves."""
    found: dict[str, Any] = {}
    for (kind, layout, exact), cases in groups().items():
        model, parallel, x = made(kind, layout, cases, "full")
        with parallel.exact_randomness():
            if not exact:
                found |= dict.fromkeys(cases, error_of(lambda p=parallel, x=x: p(x)))  # type: ignore[misc]
                continue
            results, gradients, following = step(parallel, x, 11)
        expected = step(model, x, 11)
        for i, name in enumerate(cases):
            gaps = gap(results[i], expected[0][i]), gap(gradients[i], expected[1][i])
            found[name] = [*gaps, abs(following - expected[2])]
    return found


def draw_freely() -> dict[str, Any]:
    """Each case twice from one seed and once from another; the ranks other than the first have seeds of their own."""
    found: dict[str, Any] = {}
    seeds = [seed + dist.get_rank() * other for seed, other in ((11, 1), (11, 3), (12, 0))]
    for (kind, layout, _), cases in groups().items():
        _, parallel, x = made(kind, layout, cases, "local")
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.zero_()
        runs = [step(parallel, torch.ones_like(x), seed)[:2] for seed in seeds]
        for i, name in enumerate(cases):
            found[name] = [(results[i], gradients[i]) for results, gradients in runs]
    return found


@pytest.fixture(scope="module")
def on_four() -> list[dict[str, Any]]:
    return launch(in_turn, (draw_exactly, ()), (draw_freely, ()), ranks=4)


@pytest.mark.slow
def test_exact_mode_draws_what_one_process_draws(on_four: list[dict[str, Any]]) -> None:
    for found in (one["draw_exactly"] for one in on_four):
        for name, case in CASES.items():
            if case.exact:
                assert max(found[name]) < 1e-12, (name, found[name])
            else:
                assert "because its values decide the count of random numbers" in found[name], name


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_replicas_are_equal_and_shards_differ(on_four: list[dict[str, Any]], name: str) -> None:
    results = [one["draw_freely"][name] for one in on_four]
    axes = CASES[name].axes
    for rank, runs in enumerate(results):
        (first, gradient), (again, gradient_again), (other, _) = runs
        assert torch.equal(first, again), "the first rank's seed says what is drawn"
        assert gap(gradient_again, gradient) == 0
        varies = name != "dropout of all" and first.numel() > 0
        if varies:
            assert not torch.equal(first, other), "another seed draws others"
        for further, (theirs, *_) in enumerate(results[:rank]):
            differ = [axis for axis, bit in (("a", 2), ("b", 1)) if (rank ^ further) & bit]
            if not set(differ) & set(axes):
                assert first.shape != theirs[0].shape or torch.equal(first, theirs[0]), "replicas draw the same"
            elif varies:
                assert not torch.equal(first, theirs[0]), "shards draw others"


# -- what is drawn is right -------------------------------------------------------------------------------------------


class Dropped(nn.Module):
    """Layers of a linear map and dropout; those from `first_recomputed` on are computed again in the backward."""

    def __init__(self, width: int, layers: int, rate: float, first_recomputed: int | None = None) -> None:
        super().__init__()
        self.first_recomputed = layers if first_recomputed is None else first_recomputed
        self.layers = nn.ModuleList([nn.Linear(width, width, dtype=torch.float64) for _ in range(layers)])
        self.dropout = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i >= self.first_recomputed:
                x = checkpoint(lambda x, layer=layer: self.dropout(layer(x)), x, use_reentrant=False)
            else:
                x = self.dropout(layer(x))
        return x


def drop_ones() -> dict[str, Any]:
    """Dropout of ones, and the gradient of the ones: what is kept is scaled, and the gradient is that scale."""
    ones = torch.ones(64, 64, dtype=torch.float64, requires_grad=True)
    model = nn.Dropout(0.3).train()
    parallel = autopar.parallelize(model, "a=2", (ones,), layout=ROWS, dims={"input": "rows columns"}, outputs="full")
    calls = [parallel(ones) for _ in range(2)]
    calls[0].sum().backward()
    assert ones.grad is not None
    return {"calls": [call.detach() for call in calls], "gradient": ones.grad}


def gradients_of(parallel: nn.Module, call: Callable[[], Tensor], seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    call().square().sum().backward()
    found = [parameter.grad.full_tensor() for parameter in parallel.parameters()]  # type: ignore[union-attr,operator]
    parallel.zero_grad()
    return found


def recompute() -> dict[str, Any]:
    """Under activation checkpointing the module is called again in the backward, and must drop the same."""
    torch.manual_seed(0)
    model = Dropped(6, 2, 0.4).train()
    x = torch.randn(8, 6, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    parallel = autopar.parallelize(model, "a=2", (x,), layout=ROWS, dims={"x": "rows columns"}, outputs="full")

    def twice(**options: Any) -> Tensor:
        return checkpoint(parallel, checkpoint(parallel, leaf, **options), **options)  # type: ignore[no-any-return]

    expected = gradients_of(parallel, lambda: parallel(parallel(leaf)), 5)
    found: dict[str, Any] = {}
    for name, options in (("plain", {"use_reentrant": False}), ("reentrant", {"use_reentrant": True})):
        again = gradients_of(parallel, lambda options=options: twice(**options), 5)  # type: ignore[misc]
        found[name] = max(map(gap, again, expected))
    found["other seed"] = max(map(gap, gradients_of(parallel, lambda: parallel(parallel(leaf)), 6), expected))
    loss = twice(use_reentrant=False, preserve_rng_state=False).square().sum()
    found["not preserved"] = error_of(loss.backward)
    with parallel.exact_randomness():
        exact = gradients_of(parallel, lambda: parallel(parallel(leaf)), 5)
        again = gradients_of(parallel, lambda: twice(use_reentrant=False), 5)
    found["exact"] = max(map(gap, again, exact))
    return found


def recompute_inside() -> dict[str, Any]:
    """Regions that the model checkpoints itself drop the same when they are run again."""
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    x = torch.randn(8, 6, dtype=torch.float64)
    for first in (0, 1):
        regions = Dropped(6, 3, 0.4, first).train()
        plain = copy.deepcopy(regions)
        plain.first_recomputed = 3
        parallel, other = (
            autopar.parallelize(
                copy.deepcopy(model), "a=2", (x,), layout=ROWS, dims={"x": "rows columns"}, outputs="full"
            )
            for model in (plain, regions)
        )
        names = [type(module).__name__ for module in other.emitted.graph_module.children()]
        assert "GraphModule" in names, f"nothing is checkpointed: {names}"
        expected = gradients_of(parallel, partial(parallel, x), 5)
        again = gradients_of(other, partial(other, x), 5)
        found[f"from {first}"] = max(map(gap, again, expected))
        plain.zero_grad()
        torch.manual_seed(5)
        plain(x).square().sum().backward()
        with other.exact_randomness():
            again = gradients_of(other, partial(other, x), 5)
        found[f"from {first}, exact"] = max(gap(a, b.grad) for a, b in zip(again, plain.parameters(), strict=True))
    return found


def seed_and_state() -> dict[str, Any]:
    """What becomes of the default generator, and what happens where the ranks' generators differ."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Dropped(6, 1, 0.4).train()
    x = torch.randn(8, 6, dtype=torch.float64)
    parallel = autopar.parallelize(model, "a=2", (x,), layout=ROWS, dims={"x": "rows columns"}, outputs="full")
    found: dict[str, Any] = {}
    torch.manual_seed(5 + rank)

    def differ() -> None:
        with parallel.exact_randomness():
            pass

    found["states differ"] = error_of(differ)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    parallel.eval()
    first = parallel(x)
    found["eval draws nothing"] = torch.equal(state, torch.get_rng_state())
    found["eval drops nothing"] = gap(first, model.eval()(x))
    parallel.train()
    longer = torch.cat([x, x])
    torch.manual_seed(5)
    parallel(longer)  # is traced here
    state = torch.get_rng_state()
    torch.manual_seed(5)
    parallel(longer)
    found["tracing draws nothing"] = torch.equal(state, torch.get_rng_state())
    lstm = nn.LSTM(6, 6, 2, dropout=0.3, dtype=torch.float64).train()
    inputs = (torch.randn(5, 8, 6, dtype=torch.float64),)
    found["lstm"] = error_of(lambda: autopar.parallelize(lstm, "a=2", inputs, layout="* -> none"))
    return found


def compile_it() -> dict[str, Any]:
    """The compiled module draws what the module draws."""
    torch.manual_seed(0)
    model, inputs = gpt(batch=4, seq=6, vocab=24, d_model=16, layers=1, dropout=0.2)
    parallel = autopar.parallelize(model.double().train(), "dp=2", inputs, layout="ddp")
    compiled = torch.compile(parallel, backend="aot_eager")
    found: dict[str, Any] = {"losses": [], "gradients": 0.0}
    for seed in (3, 4):
        runs = []
        for call in (parallel, compiled):
            torch.manual_seed(seed)
            loss = call(**inputs)
            loss.backward()
            runs.append((float(loss), [parameter.grad.full_tensor() for parameter in parallel.parameters()]))
            parallel.zero_grad()
        found["losses"].append([run[0] for run in runs])
        found["gradients"] = max(found["gradients"], *map(gap, runs[0][1], runs[1][1]))
    with parallel.exact_randomness():
        torch.manual_seed(3)
        expected = model(**inputs)
        torch.manual_seed(3)
        found["exact"] = gap(compiled(**inputs), expected)
    return found


def on_one_rank() -> list[bool]:
    torch.manual_seed(0)
    model = Dropped(6, 2, 0.4).train()
    x = torch.randn(8, 6, dtype=torch.float64)
    parallel = autopar.parallelize(copy.deepcopy(model), "a=1", (x,), layout="* -> none", outputs="full")
    runs, states = [], []
    for call in (model, parallel):
        torch.manual_seed(5)
        runs.append(call(x))
        states.append(torch.get_rng_state())
    return [torch.equal(*runs), torch.equal(*states), not parallel.emitted.draws]


def test_one_rank_draws_what_the_model_draws() -> None:
    assert launch(on_one_rank, ranks=1) == [[True, True, True]]


@pytest.mark.slow
def test_what_is_kept_is_scaled(on_two: list[dict[str, Any]]) -> None:
    for found in (one["drop_ones"] for one in on_two):
        first, second = found["calls"]
        for call in (first, second):
            assert set(call.unique().tolist()) == {0.0, 1 / 0.7}
            # 4096 draws: six standard deviations of the share that is kept
            assert abs(float((call != 0).double().mean()) - 0.7) < 6 * (0.7 * 0.3 / call.numel()) ** 0.5
            for half in call.chunk(2):
                assert abs(float((half != 0).double().mean()) - 0.7) < 6 * (0.7 * 0.3 / half.numel()) ** 0.5
            agree = (call.chunk(2)[0] == call.chunk(2)[1]).double().mean()
            assert abs(float(agree) - 0.58) < 6 * (0.58 * 0.42 / 2048) ** 0.5, "shards draw independently"
        assert not torch.equal(first, second)
        assert torch.equal(found["gradient"], first)


def test_recomputation_drops_the_same(on_two: list[dict[str, Any]]) -> None:
    for found in (one["recompute"] for one in on_two):
        assert found["plain"] < 1e-12
        assert found["reentrant"] < 1e-12
        assert found["exact"] < 1e-12
        assert found["other seed"] > 0.01
        assert "preserve_rng_state=True" in found["not preserved"]


def test_recomputed_regions_drop_the_same(on_two: list[dict[str, Any]]) -> None:
    for found in (one["recompute_inside"] for one in on_two):
        assert len(found) == 4
        assert max(found.values()) < 1e-12, found


def test_the_default_generator(on_two: list[dict[str, Any]]) -> None:
    for found in (one["seed_and_state"] for one in on_two):
        assert "the ranks differ in state of the random generator" in found["states differ"]
        assert "torch.manual_seed" in found["states differ"]
        assert found["eval draws nothing"]
        assert found["eval drops nothing"] < 1e-12
        assert found["tracing draws nothing"]
        assert "(aten.lstm.input) draws random numbers, at " in found["lstm"]
        assert "nn.Dropout between them" in found["lstm"]


@pytest.mark.slow
def test_compiled() -> None:
    for found in launch(compile_it, ranks=2):
        for eager, compiled in found["losses"]:
            assert compiled == pytest.approx(eager, rel=1e-12)
        assert found["losses"][0][0] != pytest.approx(found["losses"][1][0], rel=1e-3)
        assert found["gradients"] < 1e-12
        assert found["exact"] < 1e-12


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    return launch(
        in_turn,
        (drop_ones, ()),
        (recompute, ()),
        (recompute_inside, ()),
        (seed_and_state, ()),
        ranks=2,
    )


def count_broadcasts() -> dict[str, Any]:
    """How many broadcasts calls make that draw, and what they draw; the ranks have seeds of their own."""
    torch.manual_seed(0)
    x = torch.randn(8, 6, dtype=torch.float64)
    other = torch.randn(4, 6, dtype=torch.float64)
    model = Dropped(6, 1, 0.4).train()
    parallel = autopar.parallelize(model, "a=2", (x,), layout=ROWS, dims={"x": "rows columns"}, outputs="full")
    counts: list[int] = []
    broadcast = dist.broadcast

    def counted(*arguments: Any, **options: Any) -> Any:
        counts.append(1)
        return broadcast(*arguments, **options)

    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "broadcast", counted)
        for name, given in (("first", x), ("again", x), ("another shape", other), ("and again", other)):
            torch.manual_seed(7 + dist.get_rank())
            counts.clear()
            results = parallel(given), parallel(given)
            following = float(torch.rand(()))
            found[name] = (len(counts), [result.detach() for result in results], following)
    return found


def test_keys_go_along_with_the_comparison_of_calls() -> None:
    """So no call waits for a message of its own, seeds mean what they meant, and generators move as far."""
    everyone = launch(count_broadcasts, ranks=2)
    for rank, found in enumerate(everyone):
        assert [found[name][0] for name in ("first", "again", "and again")] == [0, 0, 0]
        for one, two in (("first", "again"), ("another shape", "and again")):
            assert all(map(torch.equal, found[one][1], found[two][1])), "one seed, one key, sent along or not"
            assert not torch.equal(*found[one][1])
        for name, (_, results, following) in found.items():
            assert all(map(torch.equal, results, everyone[0][name][1]))
            torch.manual_seed(7 + rank)
            torch.randint(2**62, ()), torch.randint(2**62, ())
            assert following == float(torch.rand(())), "each call has drawn one number on each rank"
