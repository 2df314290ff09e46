"""What training loops do with a module beyond one step: accumulate, freeze, differentiate, change shapes and modes."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autopar
from autopar.runtime.module import ParallelModule
from examples.gpt import gpt
from examples.hf import hf
from examples.resnet import resnet
from tests.runtime.launcher import in_turn, launch
from tests.runtime.training import Inputs, adamw, batches, error_of, gap, gradient_gap, losses, whole

LAYOUTS = (("ddp", "dp=2"), ("fsdp", "fsdp=2"), ("megatron", "tp=2"), ("zero1", "dp=2"))


def small_gpt(**sizes: Any) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    model, inputs = gpt(**{"batch": 4, "seq": 6, "vocab": 24, "d_model": 16, "layers": 1, **sizes})
    return model.double(), inputs


def parallel_of(model: nn.Module, inputs: Inputs, layout: str, mesh: str, **options: Any) -> ParallelModule:
    return autopar.parallelize(copy.deepcopy(model), mesh, inputs, layout=layout, **options)


# -- gradients --------------------------------------------------------------------------------------------------------


def accumulate() -> dict[str, float]:
    """Several backwards before a step are one of the big batch; and of each way to clear gradients."""
    model, inputs = small_gpt()
    data = batches(inputs, 3)
    found = {}
    for layout, mesh in LAYOUTS:
        parallel = parallel_of(model, inputs, layout, mesh)
        for set_to_none in (True, False):
            for each in (model, parallel):
                each(**inputs).backward()  # what is to be cleared
                each.zero_grad(set_to_none=set_to_none)
            big = {name: torch.cat([each[name] for each in data]) for name in inputs}
            model(**big).backward()
            for each in data:
                (parallel(**each) / len(data)).backward()
            found[f"{layout}, set to none {set_to_none}"] = gradient_gap(model, parallel)
            model.zero_grad(set_to_none)
            parallel.zero_grad(set_to_none)
    return found


def differentiate() -> dict[str, Any]:
    """`autograd.grad`, a graph that is kept, gradients of gradients, and those with respect to inputs."""
    found: dict[str, Any] = {}
    model, inputs = small_gpt()
    for layout, mesh in LAYOUTS[:3]:
        parallel = parallel_of(model, inputs, layout, mesh)
        names = ["blocks.0.up.weight", "blocks.0.attention.qkv.weight", "norm.bias"]
        expected = torch.autograd.grad(model(**inputs), [model.get_parameter(name) for name in names])
        given = torch.autograd.grad(parallel(**inputs), [parallel.get_parameter(name) for name in names])
        found[f"{layout}: autograd.grad"] = max(map(gap, given, expected))
        found[f"{layout}: no .grad"] = all(parameter.grad is None for parameter in parallel.parameters())
        for each in (model, parallel):
            loss = each(**inputs)
            loss.backward(retain_graph=True)
            loss.backward()
        found[f"{layout}: backward twice"] = gradient_gap(model, parallel)
        model.zero_grad()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    for layout, mesh in (("ddp", "dp=2"), ("fsdp", "fsdp=2"), ("batch -> none; d_ff -> tp; * -> none", "tp=2")):
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        parallel = autopar.parallelize(
            copy.deepcopy(model), mesh, (mine,), layout=layout, dims={"0.weight": "d_ff d_model"}, outputs="full"
        )
        model(theirs).square().sum().backward()
        parallel(mine).square().sum().backward()
        found[f"{layout}: input"] = gap(mine.grad, theirs.grad)
        found[f"{layout}: penalty"] = max(penalty(parallel, x, model))
    return found


def penalty(parallel: nn.Module, x: Tensor, model: nn.Module) -> list[float]:
    """The gradient of the norm of a gradient, as in a gradient penalty."""
    found = []
    model.zero_grad()
    parallel.zero_grad()
    for each in (model, parallel):
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(each(given).square().sum(), given, create_graph=True)
        slope.square().sum().backward()
    found.append(gradient_gap(model, parallel))
    model.zero_grad()
    return found


class Adapter(nn.Module):
    """A linear that does not learn, with a low-rank one beside it that does."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.up(self.down(x))
        return found


def freeze() -> dict[str, Any]:
    """Only adapters learn; then a part is frozen and thawed between steps."""
    model, inputs = small_gpt(layers=2)
    model.requires_grad_(False)
    for block in model.blocks:  # type: ignore[union-attr]
        block.up, block.down = Adapter(block.up, 2).double(), Adapter(block.down, 2).double()  # type: ignore[union-attr]
    data = batches(inputs, 4)
    found: dict[str, Any] = {}
    for layout, mesh in LAYOUTS:
        alone, parallel = copy.deepcopy(model), parallel_of(model, inputs, layout, mesh)
        moments = {}
        curves = []
        for each in (alone, parallel):
            learning = [parameter for parameter in each.parameters() if parameter.requires_grad]
            optimizer = torch.optim.AdamW(learning, lr=1e-2)
            curve = losses(each, data[:2], optimizer)
            each.get_parameter("norm.weight").requires_grad_(True)
            optimizer.add_param_group({"params": [each.get_parameter("norm.weight")]})
            curve += losses(each, data[2:], optimizer)
            curves.append(curve)
            moments[each] = len(optimizer.state)
        found[f"{layout}: curve"] = max(abs(a / b - 1) for a, b in zip(*curves, strict=True))
        found[f"{layout}: gradients"] = gradient_gap(alone, parallel)
        found[f"{layout}: state"] = moments[alone] == moments[parallel] == 9
    return found


# -- calls ------------------------------------------------------------------------------------------------------------


def change_shapes() -> dict[str, float]:
    """Other batch sizes and lengths from step to step, on the same optimizer."""
    model, inputs = small_gpt(seq=8)
    data = [
        {name: value[:batch, :seq].contiguous() for name, value in each.items()}
        for each, (batch, seq) in zip(batches(inputs, 4), [(4, 8), (2, 8), (4, 6), (4, 8)], strict=True)
    ]
    found = {}
    for layout, mesh in (("fsdp", "fsdp=2"), ("megatron_sp", "tp=2")):
        alone, parallel = copy.deepcopy(model), parallel_of(model, inputs, layout, mesh)
        curves = [losses(each, data, adamw(each)) for each in (alone, parallel)]
        found[layout] = max(abs(a / b - 1) for a, b in zip(*curves, strict=True))
    return found


def use_batch_norm() -> dict[str, Any]:
    """Statistics of the whole batch: while training, in evaluation between, and under no_grad and inference_mode."""
    torch.manual_seed(0)
    model, inputs = resnet(depth=10, width=4, image=32, batch=4, loss=True, train=True)
    model = model.double()
    data = [{"images": each["images"].double(), "labels": each["labels"]} for each in batches(inputs, 3)]
    found: dict[str, Any] = {}
    for layout, mesh in (("fsdp", "fsdp=2"),):
        alone, parallel = copy.deepcopy(model), parallel_of(model, data[0], layout, mesh)
        curves: list[list[float]] = []
        for each in (alone, parallel):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.01)
            curve = losses(each.train(), data[:2], optimizer)
            each.eval()
            with torch.no_grad():
                curve.append(each(**data[2]).item())
            with torch.inference_mode():
                curve.append(each(**data[2]).item())
            curve += losses(each.train(), data[2:], optimizer)
            curves.append(curve)
        found[layout] = max(abs(a / b - 1) for a, b in zip(*curves, strict=True))
        found[f"{layout}: buffers"] = max(gap(parallel.get_buffer(n), b) for n, b in alone.named_buffers())
    return found


def call_hugging_face() -> dict[str, Any]:
    """Keyword arguments in any order, `labels=`, a dataclass of results and a tuple of them."""
    torch.manual_seed(0)
    model, inputs = hf("llama", batch=4, seq=8)
    model = model.double()
    inputs = {**inputs, "labels": inputs["input_ids"].clone()}
    found: dict[str, Any] = {}
    for layout, mesh in (("fsdp", "fsdp=2"), ("megatron", "tp=2")):
        parallel = parallel_of(model, inputs, layout, mesh)
        expected, output = model(**inputs), parallel(labels=inputs["labels"], input_ids=inputs["input_ids"])
        found[f"{layout}: type"] = type(output) is type(expected)
        found[f"{layout}: loss"] = gap(output.loss, expected.loss)
        found[f"{layout}: logits"] = gap(output["logits"], expected.logits)
        output.loss.backward()
        expected.loss.backward()
        found[f"{layout}: gradients"] = gradient_gap(model, parallel)
        loss, logits = parallel(**inputs, return_dict=False)[:2]
        found[f"{layout}: tuple"] = max(gap(loss, expected.loss), gap(logits, expected.logits))
        model.zero_grad()
    return found


def hand_out() -> dict[str, Any]:
    """Losses made outside of the module, of outputs that are whole, split as DTensors, and plain shards."""
    model, inputs = small_gpt(loss=False)
    data = batches(inputs, 1)[0]
    targets = torch.randint(24, data["ids"].shape, generator=torch.Generator().manual_seed(2))
    found: dict[str, Any] = {}

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    for layout, mesh in (("fsdp", "fsdp=2"), ("megatron", "tp=2")):
        for outputs in ("full", "sharded", "local"):
            model.zero_grad()
            loss_of(model(**data), targets).backward()
            parallel = parallel_of(model, data, layout, mesh, outputs=outputs)
            logits = parallel(**data)
            if outputs == "local":  # each rank's loss is of its share: of the batch, or of the vocabulary
                if layout == "megatron":
                    continue
                loss_of(logits, targets.chunk(2)[dist.get_rank()]).backward()
            else:
                loss_of(whole(logits), targets).backward()
            found[f"{layout}, {outputs}"] = gradient_gap(model, parallel)
    return found


def load_data() -> dict[str, float]:
    """A DataLoader on every rank: all see the whole batch, or a DistributedSampler gives each its own part."""
    model, _ = small_gpt()
    draw = torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(24, (16, 6), generator=draw) for _ in range(2))
    dataset = TensorDataset(ids, targets)
    found = {}
    for name, local in (("whole", False), ("own", True)):
        alone = copy.deepcopy(model)
        parallel = autopar.parallelize(copy.deepcopy(model), "dp=2", layout="ddp", local_inputs=local)
        sampler = DistributedSampler(dataset, shuffle=False) if local else None
        loader = DataLoader(dataset, batch_size=2 if local else 4, sampler=sampler, shuffle=False)
        theirs = [{"ids": a, "targets": b} for a, b in DataLoader(dataset, batch_size=4)]
        mine = [{"ids": a, "targets": b} for a, b in loader]
        parallel(**mine[0])  # makes the parameters
        curves = losses(alone, theirs, adamw(alone)), losses(parallel, mine, adamw(parallel))
        found[name] = max(abs(a / b - 1) for a, b in zip(*curves, strict=True))
    return found


def take_shards_in_turn() -> dict[str, float]:
    """DTensor inputs, step after step, of gradients that reach the shard."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    parallel = autopar.parallelize(copy.deepcopy(model), mesh, layout="ddp")
    found = {}
    for step in range(2):
        theirs = (x + step).requires_grad_()
        local = (x + step).chunk(2)[dist.get_rank()].clone().requires_grad_()
        mine = DTensor.from_local(local, mesh, [Shard(0)])
        expected, given = model(theirs), parallel(mine)
        expected.square().sum().backward()
        given.to_local().square().sum().backward()
        found[f"output {step}"] = gap(given, expected)
        assert theirs.grad is not None
        found[f"input {step}"] = gap(local.grad, theirs.grad.chunk(2)[dist.get_rank()])
        found[f"weights {step}"] = gradient_gap(model, parallel)
    return found


# -- the module itself ------------------------------------------------------------------------------------------------


def be_a_module() -> dict[str, Any]:
    model, inputs = small_gpt()
    parallel = parallel_of(model, inputs, "fsdp", "fsdp=2,one=1")
    expected = model(**inputs)
    found: dict[str, Any] = {"axis of size 1": gap(parallel(**inputs), expected)}
    seen: list[str] = []
    handles = [
        parallel.register_forward_pre_hook(lambda module, args: seen.append("before")),
        parallel.register_forward_hook(lambda module, args, output: seen.append("after")),
    ]
    parallel(**inputs).backward()
    for handle in handles:
        handle.remove()
    found["hooks"] = seen
    found["modules"] = [n for n, _ in parallel.named_modules()] == [n for n, _ in model.named_modules()]
    found["printed"] = "(qkv): Linear" in str(parallel)
    found["hook on a part"] = error_of(lambda: parallel.get_submodule("blocks.0").register_forward_hook(print))
    found["call of a part"] = error_of(lambda: parallel.get_submodule("blocks")(torch.ones(1)))
    found["counts"] = sum(p.numel() for p in parallel.parameters()) == sum(p.numel() for p in model.parameters())
    found["pickle"] = error_of(lambda: pickle.dumps(parallel))
    found["save"] = error_of(lambda: torch.save(parallel, io.BytesIO()))
    return found


def copy_and_average() -> dict[str, Any]:
    """A deep copy keeps its own weights, and learns; averaged weights of a run, as `swa_utils` makes them."""
    model, inputs = small_gpt()
    data = batches(inputs, 3)
    found: dict[str, Any] = {}
    for layout, mesh in LAYOUTS[2:]:
        alone, parallel = copy.deepcopy(model), parallel_of(model, inputs, layout, mesh)
        twin = copy.deepcopy(parallel)
        averages = []
        for each in (alone, parallel):
            optimizer = adamw(each)
            average = AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.5))
            for batch in data:
                losses(each, [batch], optimizer)
                average.update_parameters(each)
            averages.append(average)
        found[f"{layout}: average"] = gap(averages[1](**inputs), averages[0](**inputs))
        found[f"{layout}: run"] = gap(parallel(**inputs), alone(**inputs))
        found[f"{layout}: copy"] = gap(twin(**inputs), model(**inputs))
        model.zero_grad()
        for each in (model, twin):
            each(**inputs).backward()
        found[f"{layout}: copy learns"] = gradient_gap(model, twin)
        parallel.load_state_dict(twin.state_dict())
        found[f"{layout}: loaded"] = gap(parallel(**inputs), model(**inputs))
        with torch.no_grad():
            for each in (alone, twin):
                each.load_state_dict(model.state_dict())
                for parameter in each.parameters():
                    parameter.mul_(1.5)
        found[f"{layout}: changed"] = gap(twin(**inputs), alone(**inputs))
        for each in (alone, twin):
            optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True)
            each.zero_grad()
            each(**inputs).backward()
            with torch.no_grad():
                each(**inputs)
            each(**inputs)
            optimizer.step()
        found[f"{layout}: called before the step"] = gap(twin(**inputs), alone(**inputs))
    return found


def hook_on_parameters() -> dict[str, Any]:
    """A step of the optimizer for each gradient, as soon as it is there; notes on parameters stay on them."""
    model, inputs = small_gpt()
    model.get_parameter("norm.weight").decay = False  # type: ignore[attr-defined]
    found: dict[str, Any] = {}
    for layout, mesh in LAYOUTS[:2]:
        alone, parallel = copy.deepcopy(model), autopar.parallelize(model, mesh, inputs, layout=layout)
        found[f"{layout}: note"] = getattr(parallel.get_parameter("norm.weight"), "decay", None) is False
        curves = []
        for each in (alone, parallel):
            optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-2) for parameter in each.parameters()}

            def step(parameter: Tensor, optimizers: Any = optimizers) -> None:
                optimizers[parameter].step()
                parameter.grad = None

            for parameter in each.parameters():
                parameter.register_post_accumulate_grad_hook(step)
            curve = []
            for data in batches(inputs, 3):
                loss = each(**data)
                loss.backward()
                curve.append(loss.item())
            curves.append(curve)
        found[f"{layout}: curve"] = max(abs(a / b - 1) for a, b in zip(*curves, strict=True))
    model.get_parameter("norm.bias").register_hook(lambda gradient: gradient)
    found["hook before"] = error_of(lambda: autopar.parallelize(model, "dp=2", inputs, layout="ddp"))
    return found


class Lowest(nn.Module):
    """A model whose graph depends on the dtype of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.linear.weight.dtype)
        lowest = torch.finfo(x.dtype).min
        return torch.softmax((self.linear(x) * self.scale).masked_fill(x < 0, lowest), -1).std(0).sum()


def change_dtype_of_constants() -> dict[str, Any]:
    torch.manual_seed(0)
    model, inputs = Lowest().double(), {"x": torch.randn(4, 8, dtype=torch.float64)}
    parallel = parallel_of(model, inputs, "fsdp", "fsdp=2")
    found: dict[str, Any] = {}
    for dtype in (torch.float64, torch.float32, torch.float16):
        model.to(dtype)
        parallel.to(dtype)
        expected, given = model(**inputs), parallel(**inputs)
        found[str(dtype)] = given.dtype == expected.dtype == dtype, gap(given, expected)
        found[f"{dtype}, buffer"] = parallel.get_buffer("scale").dtype == dtype
    return found


def change_dtype() -> dict[str, Any]:
    model, inputs = small_gpt()
    parallel = parallel_of(model, inputs, "fsdp", "fsdp=2")
    parallel(**inputs)
    found: dict[str, Any] = {}
    for name, change in (
        ("float", lambda module: module.float()),
        ("to", lambda module: module.to(torch.float64)),
        ("bfloat16", lambda module: module.bfloat16()),
        ("half", lambda module: module.half()),
        ("same place", lambda module: module.to("cpu").float()),
    ):
        change(model)
        same = change(parallel) is parallel
        for each in (model, parallel):
            each.zero_grad()
            each(**inputs).backward()
        kinds = {parameter.dtype for parameter in parallel.parameters()}
        found[name] = (same, kinds == {p.dtype for p in model.parameters()}, gap(parallel(**inputs), model(**inputs)))
        found[f"{name}: gradients"] = gradient_gap(model, parallel)
    parallel.requires_grad_(False)
    found["frozen"] = not parallel(**inputs).requires_grad
    parallel.requires_grad_(True)
    found["thawed"] = parallel(**inputs).requires_grad
    return found


# The ranks run all loops in one launch of a minute.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    functions = (
        accumulate,
        differentiate,
        freeze,
        change_shapes,
        use_batch_norm,
        call_hugging_face,
        hand_out,
        load_data,
        take_shards_in_turn,
        be_a_module,
        copy_and_average,
        change_dtype,
        change_dtype_of_constants,
        hook_on_parameters,
    )
    return launch(in_turn, *((function, ()) for function in functions), ranks=2)


EXACT = 1e-11


def far(found: dict[str, Any], limit: float = EXACT) -> dict[str, Any]:
    """The cases that are not as they should be: gaps that are too large, and what is not so."""
    return {
        case: value for case, value in found.items() if value is False or (type(value) is float and not value < limit)
    }


@pytest.mark.parametrize(
    "what",
    [
        accumulate,
        differentiate,
        freeze,
        change_shapes,
        use_batch_norm,
        hand_out,
        load_data,
        take_shards_in_turn,
        copy_and_average,
    ],
)
def test_a_loop_does_what_it_does_on_one_process(on_two: list[dict[str, Any]], what: Any) -> None:
    for found in on_two:
        assert found[what.__name__]
        assert far(found[what.__name__]) == {}


def test_a_hugging_face_model_is_called_as_on_one_process(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        assert far(found["call_hugging_face"], limit=1e-5) == {}, "its loss is computed in float32"


def test_the_dtype_of_the_module_is_that_of_its_graph(on_two: list[dict[str, Any]]) -> None:
    limits = {"float": 1e-5, "to": EXACT, "bfloat16": 0.05, "half": 0.005, "same place": 1e-5}
    for found in on_two:
        case = found["change_dtype"]
        for name, limit in limits.items():
            same, kinds, difference = case[name]
            assert same
            assert kinds
            assert difference < limit
            assert case[f"{name}: gradients"] < limit
        assert case["frozen"]
        assert case["thawed"]
        constants = found["change_dtype_of_constants"]
        for dtype, limit in (("float64", EXACT), ("float32", 1e-5), ("float16", 0.005)):
            kept, difference = constants[f"torch.{dtype}"]
            assert kept
            assert difference < limit
            assert constants[f"torch.{dtype}, buffer"]


def test_hooks_on_parameters(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        case = found["hook_on_parameters"]
        assert far(case) == {}
        assert "the parameter norm.bias has a hook" in case["hook before"]
        assert "module.get_parameter('norm.bias')" in case["hook before"]


def test_the_module_is_one_as_far_as_a_loop_can_tell(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        case = found["be_a_module"]
        assert far(case) == {}
        assert case["hooks"] == ["before", "after"]
        assert "the module Block is a part of a parallel module" in case["hook on a part"]
        assert "this hook would never run" in case["hook on a part"]
        assert "has no forward" in case["call of a part"]
        for way in ("pickle", "save"):
            assert "torch.save(module.state_dict()" in case[way]
