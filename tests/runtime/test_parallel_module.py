"""What a training loop sees of a parallel module, on real processes. The checks of one size share a launch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import autopar
from autopar.runtime.module import ParallelModule
from examples.gpt import gpt
from tests.runtime.launcher import in_turn, launch
from tests.runtime.training import error_of, gap, whole

Inputs = dict[str, Tensor]


def small_gpt(seed: int = 0, **sizes: Any) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(seed)
    model, inputs = gpt(**{"batch": 4, "seq": 6, "vocab": 24, "d_model": 16, "layers": 1, **sizes})
    return model.double(), inputs


def gradient_gap(model: nn.Module, parallel: nn.Module) -> float:
    worst = 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        worst = max(worst, gap(parallel.get_parameter(name).grad, parameter.grad))
    return worst


# -- calls ------------------------------------------------------------------------------------------------------------


def call_in_many_ways() -> dict[str, float]:
    """Traced at the first call; then another shape, eval mode, no_grad, inference_mode, and the first shape again."""
    model, inputs = small_gpt()
    parallel = autopar.parallelize(model, "dp=2", layout="ddp")
    longer = {name: value.repeat(2, 1) for name, value in inputs.items()}
    found = {"first": gap(parallel(**inputs), model(**inputs)), "longer": gap(parallel(**longer), model(**longer))}
    weights = [id(parameter) for parameter in parallel.parameters()]
    parallel.eval()
    found["eval"] = gap(parallel(**inputs), model(**inputs))
    with torch.no_grad():
        result = parallel(**inputs)
        assert not result.requires_grad
        found["no_grad"] = gap(result, model(**inputs))
    with torch.inference_mode():
        found["inference"] = gap(parallel(**inputs), model(**inputs))
    parallel.train()
    parallel(inputs["ids"], inputs["targets"]).backward()
    model(**inputs).backward()
    found["gradients"] = gradient_gap(model, parallel)
    assert weights == [id(parameter) for parameter in parallel.parameters()], "the parameters stay"
    return found


def hand_out() -> dict[str, Any]:
    """The logits as DTensor, whole, and as this rank's shard."""
    model, inputs = small_gpt(loss=False)
    expected = model(**inputs)
    found: dict[str, Any] = {}
    for outputs in ("sharded", "full", "local"):
        result = autopar.parallelize(model, "dp=2", inputs, layout="ddp", outputs=outputs)(**inputs)
        found[outputs] = (type(result).__name__, tuple(result.shape))
        if outputs != "local":
            assert gap(result, expected) < 1e-12
            model.zero_grad()
            expected = model(**inputs)
    return found


def take_shards() -> dict[str, Any]:
    """This rank's part of the batch as a plain tensor, and as a DTensor."""
    model, inputs = small_gpt()
    expected = model(**inputs)
    expected.backward()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    half = {name: value.chunk(2)[mesh.get_local_rank()] for name, value in inputs.items()}
    parallel = autopar.parallelize(model, mesh, layout="ddp", local_inputs=True)
    loss = parallel(**half)
    loss.backward()
    found: dict[str, Any] = {"local": gap(loss, expected), "gradients": gradient_gap(model, parallel)}
    found["whole given"] = error_of(lambda: parallel(**{**half, "ids": inputs["ids"]}))
    parallel = autopar.parallelize(model, mesh, layout="ddp")
    loss = parallel(**{name: DTensor.from_local(value, mesh, [Shard(0)]) for name, value in half.items()})
    found["DTensor"] = gap(loss, expected)
    placed = {name: DTensor.from_local(value, mesh, [Replicate()]) for name, value in inputs.items()}
    found["replicated given"] = error_of(lambda: parallel(**placed))
    found["with plain"] = gap(parallel(**{**inputs, "ids": placed["ids"]}), expected)
    shards = {"ids": DTensor.from_local(half["ids"], mesh, [Shard(0)])}
    found["mixed"] = error_of(lambda: parallel(**{**half, **shards}))
    return found


class Ties(nn.Module):
    """A module, a weight and a buffer, each in two places; names that the parallel module has itself."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = nn.Linear(8, 8)
        self.emitted = self.graph
        self.register_buffer("calls", torch.zeros(()))
        self.inner = nn.Module()
        self.inner.register_buffer("scale", torch.ones(8))
        self.register_buffer("hidden", self.inner.scale, persistent=False)
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.emitted(torch.relu(self.graph(x))) * self.hidden


def keep_what_is_shared() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Ties()
    x = torch.randn(4, 8)
    parallel = autopar.parallelize(model, "dp=2", (x,), layout="fsdp(fsdp=dp)")
    result = parallel(x)
    found: dict[str, Any] = {"value": gap(result, model(x))}
    found["keys"] = list(parallel.state_dict()) == list(model.state_dict())
    found["parameters"] = [n for n, _ in parallel.named_parameters()] == [n for n, _ in model.named_parameters()]
    found["module"] = parallel._modules["graph"] is parallel._modules["emitted"]
    found["buffer"] = parallel.get_buffer("inner.scale") is parallel.get_buffer("hidden")
    found["calls"] = float(parallel.get_buffer("calls"))
    return found


def refuse() -> dict[str, str]:
    model, inputs = small_gpt()
    lazy = autopar.parallelize(model, "dp=2", layout="ddp")
    return {
        "outputs": error_of(lambda: autopar.parallelize(model, "dp=2", inputs, layout="ddp", outputs="whole")),  # type: ignore[arg-type]
        "parameters": error_of(lambda: torch.optim.SGD(lazy.parameters())),
        "graph": error_of(lambda: lazy.collectives()),
        "precision": error_of(lambda: autopar.parallelize(model, "dp=2", inputs, layout="ddp", precision="int32")),
        "mesh": error_of(lambda: autopar.parallelize(model, "dp=3", inputs, layout="ddp")),
    }


# -- agreement --------------------------------------------------------------------------------------------------------


def disagree() -> dict[str, str]:
    """One rank has something else; what this rank is told."""
    rank = torch.distributed.get_rank()
    model, inputs = small_gpt()
    found: dict[str, str] = {}
    wider, _ = small_gpt(d_model=16 + 4 * rank)
    found["model shape"] = error_of(lambda: autopar.parallelize(wider, "dp=2", inputs, layout="ddp"))
    seeded, _ = small_gpt(seed=rank)
    found["model value"] = error_of(lambda: autopar.parallelize(seeded, "dp=2", inputs, layout="ddp"))
    layout = "ddp" if rank else "batch -> dp"
    found["layout"] = error_of(lambda: autopar.parallelize(model, "dp=2", inputs, layout=layout))
    parallel = autopar.parallelize(model, "dp=2", inputs, layout="ddp")
    other = {name: (value + rank) % 24 for name, value in inputs.items()}
    longer = {name: value.repeat(1 + rank, 1) for name, value in inputs.items()}
    found["values"] = error_of(lambda: autopar.parallelize(model, "dp=2", other, layout="ddp"))
    parallel(**inputs)
    found["shape"] = error_of(lambda: parallel(**longer))
    found["missing"] = error_of(lambda: parallel(**(inputs if rank else {})))
    found["structure"] = error_of(lambda: parallel(**(inputs if rank else {"ids": inputs["ids"]})))
    parallel.train(rank == 0)
    found["mode"] = error_of(lambda: parallel(**inputs))
    parallel.train()
    with torch.set_grad_enabled(rank == 0):
        found["grad"] = error_of(lambda: parallel(**inputs))
    found["afterwards"] = str(gap(parallel(**inputs), model(**inputs)) < 1e-12)
    return found


# -- meta models ------------------------------------------------------------------------------------------------------


def initialise_normal(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()


class Scaled(nn.Module):
    """It holds a buffer that stands in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def fill_but_a_buffer() -> str:
    with torch.device("meta"):
        empty = Scaled()
    x = torch.ones(4, 4)
    parallel = autopar.parallelize(empty, "x=2", (x,), layout="* -> none")
    parallel.load_full_state_dict(Scaled().state_dict())
    return error_of(lambda: parallel(x))


def fill_from_meta() -> dict[str, Any]:
    """A model without memory, filled under two layouts and from a state dict."""
    model, inputs = small_gpt()
    with torch.device("meta"):
        empty = copy.deepcopy(model).to("meta")
    found: dict[str, Any] = {}
    made: list[ParallelModule] = []
    for layout in ("ddp(dp=x)", "fsdp(fsdp=x)"):
        parallel = autopar.parallelize(empty, "x=2", inputs, layout=layout)
        found["unfilled"] = error_of(lambda p=parallel: p(**inputs))  # type: ignore[misc]
        found["half filled"] = error_of(lambda p=parallel: p.init_weights(lambda module: None))  # type: ignore[misc]
        torch.manual_seed(7)
        parallel.init_weights(initialise_normal)
        made.append(parallel)
    pairs = zip(made[0].parameters(), made[1].parameters(), strict=True)
    found["layouts"] = max(gap(one, other) for one, other in pairs)
    found["spread"] = float(whole(made[0].get_parameter("blocks.0.up.weight")).std())
    made[1].load_full_state_dict(model.state_dict())
    found["loaded"] = gap(made[1](**inputs), model(**inputs))
    state = model.state_dict()
    del state["norm.bias"]
    found["lacking"] = error_of(lambda: made[1].load_full_state_dict(state))
    found["but a buffer"] = fill_but_a_buffer()
    return found


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    functions = (call_in_many_ways, hand_out, take_shards, keep_what_is_shared, refuse, disagree, fill_from_meta)
    return launch(in_turn, *((function, ()) for function in functions), ranks=2)


def test_every_way_of_calling_gives_what_the_model_gives(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        assert max(found["call_in_many_ways"].values()) < 1e-12


def test_outputs_sharded_full_and_local(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        whole_shape = (4, 6, 24)
        assert found["hand_out"] == {
            "sharded": ("ShardedOutput", whole_shape),
            "full": ("Tensor", whole_shape),
            "local": ("Tensor", (2, 6, 24)),
        }


def test_inputs_that_are_shards_already(on_two: list[dict[str, Any]]) -> None:
    for found in (one["take_shards"] for one in on_two):
        assert max(found["local"], found["gradients"], found["DTensor"], found["with plain"]) < 1e-12
        assert "Expected input batch_size" in found["whole given"]
        assert "redistribute" in found["replicated given"]
        assert "give all tensors as DTensors, or none" in found["mixed"]


def test_what_is_shared_in_the_model_is_shared(on_two: list[dict[str, Any]]) -> None:
    for found in (one["keep_what_is_shared"] for one in on_two):
        assert found.pop("value") < 1e-6
        assert found == {"keys": True, "parameters": True, "module": True, "buffer": True, "calls": 1.0}


def test_what_is_missing_or_unknown_is_said(on_two: list[dict[str, Any]]) -> None:
    for found in (one["refuse"] for one in on_two):
        assert "'sharded', 'full', 'local'" in found["outputs"]
        assert "pass inputs to parallelize, or call the module once" in found["parameters"]
        assert "is not traced yet" in found["graph"]
        assert "invalid precision 'int32': no preset is called 'int32'" in found["precision"]
        assert "has 3 ranks, but 2 processes are running" in found["mesh"]


def test_a_rank_that_differs_is_an_error_on_all(on_two: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(one["disagree"] for one in on_two):
        assert (
            "the ranks differ in shape of parameter tokens.weight: float64[24, 16] on rank 0, float64[24, 20] on rank 1"
            in (found["model shape"])
        )
        assert "the parameter tokens.weight differs between rank 0 and rank 1" in found["model value"]
        assert "the ranks differ in line 1 of the layout" in found["layout"]
        assert "ids differs between rank" in found["values"]
        assert "local_inputs=True" in found["values"]
        assert "shape of ids: int64[4, 6] on rank 0, int64[8, 6] on rank 1" in found["shape"]
        assert ("rank 0 stopped" in found["missing"]) == (rank == 1)
        assert "structure of the inputs" in found["structure"]
        assert "the ranks differ in train or eval mode: rank 0 trains, rank 1 evaluates" in found["mode"]
        assert "fix: call the module on every rank in the same way" in found["mode"]
        assert "the ranks differ in grad mode: rank 0 records gradients, rank 1 records no gradients" in found["grad"]
        assert found["afterwards"] == "True"


def test_a_model_from_the_meta_device_is_filled_shard_by_shard(on_two: list[dict[str, Any]]) -> None:
    for found in (one["fill_from_meta"] for one in on_two):
        assert "init_weights() or load_full_state_dict" in found["unfilled"]
        assert "gave no value to tokens.weight" in found["half filled"]
        assert found["layouts"] == 0
        assert 0.015 < found["spread"] < 0.025
        assert found["loaded"] < 1e-12
        assert "lacks norm.bias" in found["lacking"]
        assert "its buffer scale has no values yet\nfix: call init_weights() before" in found["but a buffer"]
