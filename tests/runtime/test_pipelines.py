"""`pipeline pp 1f1b` on real ranks: results, gradients and training of one process, with the parameters of a stage."""

from __future__ import annotations

import os
import re
import tempfile
import time
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.fx import GraphModule
from torch.nn import functional

import autopar
from autopar.cost.lowered_step import lower_step
from autopar.cost.memory.step_memory import StepMemory
from autopar.errors import AutoparError, LayoutError
from autopar.lowering.collectives import stage_messages
from autopar.lowering.modules import pipeline_loop
from autopar.lowering.modules.late_weights import LateProduct
from autopar.lowering.modules.pipeline_loop import PipelineLoop
from autopar.mesh import Mesh
from autopar.plans.find import PlanRequest, plan_under_layout
from autopar.sharding.layout.language import parse_layout
from examples.gpt import gpt
from tests.runtime.launcher import endings, launch
from tests.runtime.training import gradients, worst

REGATHERED = "batch -> dp; * -> none; param, grad, opt { * -> dp | none }; regather @*"


def pair(layout: str, mesh: str, **options: Any) -> tuple[nn.Module, Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = gpt(batch=8, seq=12, vocab=104)
    model = model.double()
    return model, autopar.parallelize(model, mesh, inputs, layout=layout, **options), inputs


def loop_of(parallel: Any) -> PipelineLoop:
    (found,) = (one for one in parallel.emitted.graph_module.modules() if isinstance(one, PipelineLoop))
    return found


class Watch:
    """Counts messages, and the most graphs of autograd and put-off backwards that are alive at once, in one pass."""

    def __init__(self) -> None:
        self.sent = 0
        self.alive = 0
        self.late = 0

    def __enter__(self) -> Watch:
        self.old = stage_messages.send, pipeline_loop._Run._run

        def send(*args: Any, **others: Any) -> Any:
            self.sent += 1
            return self.old[0](*args, **others)

        def run_task(run: Any, *args: Any) -> None:
            self.old[1](run, *args)
            self.alive = max(self.alive, len(run.alive))
            self.late = max(self.late, sum(map(bool, run.late.values())))

        stage_messages.send = pipeline_loop.send = send
        pipeline_loop._Run._run = run_task
        return self

    def __exit__(self, *_: Any) -> None:
        stage_messages.send = pipeline_loop.send = self.old[0]
        pipeline_loop._Run._run = self.old[1]


def step(layout: str, mesh: str) -> tuple[float, float, float, int, int, int, int]:
    """Errors of loss, gradients and their norm over two steps; messages, graphs and put-off backwards, elements."""
    model, parallel, inputs = pair(layout, mesh)
    error = 0.0
    for scale in (1.0, 3.0):
        with Watch() as watch:
            expected, found = model(**inputs) * scale, parallel(**inputs) * scale
        error = max(error, float((expected - found).abs()))
        expected.backward()
        found.backward()
    off = worst(gradients(parallel), gradients(model))
    norms = [float(nn.utils.clip_grad_norm_(each.parameters(), 1.0)) for each in (model, parallel)]
    stored = sum(parameter.to_local().numel() for parameter in parallel.parameters())
    return error, off, abs(norms[0] - norms[1]), watch.sent, watch.alive, watch.late, stored


# Layout, mesh, messages of each stage, and micro-batches (of a part) in flight at each stage.
CASES = [
    ("micro 4; pipeline pp 1f1b; * -> none", "pp=2", (4, 4), (2, 1)),
    ("micro 4; pipeline pp gpipe; * -> none", "pp=2", (4, 4), (4, 4)),
    ("micro 4; pipeline pp 1f1b(+1); * -> none", "pp=2", (4, 4), (3, 2)),
    ("micro 4; pipeline pp interleaved(2); * -> none", "pp=2", (12, 12), (5, 3)),
    ("micro 8; pipeline pp 1f1b; * -> none", "pp=4", (8, 16, 16, 8), (4, 3, 2, 1)),
    ("micro 4; pipeline pp gpipe; * -> none", "pp=4", (4, 8, 8, 4), (4, 4, 4, 4)),
    ("micro 4; pipeline pp 1f1b; fsdp", "pp=2,dp=2", (4, 4), (2, 1)),
    ("micro 4; pipeline pp interleaved(2); zero1", "dp=2,pp=2", (12, 12), (5, 3)),
    ("micro 4; pipeline pp 1f1b; megatron", "pp=2,tp=2", (4, 4), (2, 1)),
    ("micro 4; pipeline pp gpipe; megatron_sp", "pp=2,tp=2", (4, 4), (4, 4)),
    (f"micro 4; pipeline pp 1f1b; {REGATHERED}", "pp=2,dp=2", (4, 4), (2, 1)),
    ("micro 4; pipeline pp 1f1b; batch -> dp; * -> none; recompute full @blocks.*", "pp=2,dp=2", (4, 4), (2, 1)),
    ("micro ?{4}; pipeline pp 1f1b", "pp=2", (4, 4), (2, 1)),  # a plan of the search, read from its text
    ("micro ?{4}; pipeline pp interleaved(2)", "pp=2,dp=2", (12, 12), (5, 3)),
    ("micro 4; pipeline pp zero_bubble; * -> none", "pp=2", (4, 4), (2, 1)),
    ("micro 8; pipeline pp zero_bubble; * -> none", "pp=4", (8, 16, 16, 8), (4, 3, 2, 1)),
    ("micro 4; pipeline pp zero_bubble; fsdp", "pp=2,dp=2", (4, 4), (2, 1)),
    ("micro 4; pipeline pp zero_bubble; megatron_3d", "pp=2,tp=2", (4, 4), (2, 1)),
    (f"micro 4; pipeline pp zero_bubble; {REGATHERED}", "pp=2,dp=2", (4, 4), (2, 1)),
    # Two micro-batches for each stage, which divide the batch of a rank.
    ("pipeline", "pp=2,dp=2", (4, 4), (2, 1)),
    ("megatron_3d", "pp=2,tp=2", (4, 4), (2, 1)),
]
FAST = (3, 14, 19)


@pytest.mark.parametrize(
    ("layout", "mesh", "sent", "alive"),
    [pytest.param(*case, marks=() if place in FAST else pytest.mark.slow) for place, case in enumerate(CASES)],
)
def test_gradients_are_those_of_one_process(
    layout: str, mesh: str, sent: tuple[int, ...], alive: tuple[int, ...]
) -> None:
    sizes = {name: int(size) for name, size in (axis.split("=") for axis in mesh.split(","))}
    ranks = torch.arange(prod(sizes.values())).reshape(*sizes.values()).movedim([*sizes].index("pp"), 0)
    found = launch(step, layout, mesh, ranks=ranks.numel(), seconds=120)
    whole = sum(parameter.numel() for parameter in gpt(batch=8, seq=12, vocab=104)[0].parameters())
    for stage, row in enumerate(ranks.reshape(len(sent), -1).tolist()):
        for rank in row:
            error, off, norm, messages, graphs, late, stored = found[rank]
            assert error < 1e-12
            assert off < 1e-12
            assert norm < 1e-12
            # The table of tokens and logits goes to the first stage, and its gradient to the last one.
            assert messages == sent[stage] + (stage in (0, len(sent) - 1))
            assert graphs == alive[stage]
            # Weights that each micro-batch gathers have their gradients at once.
            assert late == (stage + 1 if "zero_bubble" in layout and "regather" not in layout else 0)
            assert stored < whole


def put_off(layout: str, mesh: str) -> tuple[set[str], set[str], float, float]:
    """Products that put off gradients on this rank as run and as priced, and the bytes that they keep."""
    _, parallel, inputs = pair(layout, mesh)
    most = 0.0
    old = pipeline_loop._Run._backward

    def backward(run: Any, task: Any, *others: Any) -> None:
        nonlocal most
        old(run, task, *others)
        for found in run.late.values():
            kept = {x.untyped_storage() for one in found for x in (one.inputs, one.gradients)}
            # Storages are new objects in each access.
            most = max(most, sum({one.data_ptr(): one.nbytes() for one in kept}.values()))

    pipeline_loop._Run._backward = backward  # type: ignore[method-assign]
    parallel(**inputs).backward()
    pipeline_loop._Run._backward = old  # type: ignore[method-assign]
    loop = loop_of(parallel)
    # Recomputed ones stand in a module of their layer.
    graphs = [one for part in loop.parts.values() for one in part.body.modules() if isinstance(one, GraphModule)]
    ran = {
        str(node.meta["op"])
        for one in graphs
        for node in one.graph.find_nodes(op="call_module")
        if isinstance(one.get_submodule(node.target), LateProduct)
    }
    plan = plan_under_layout(parallel.graph, Mesh(mesh), layout, PlanRequest("h100"))
    step = lower_step(plan.graph, plan.decided).at(loop.stages.stage)
    memory = StepMemory(step)
    memory.forward()
    memory.backward()
    return ran, set(step.late_weights).intersection(step.ops_here), most, memory.late_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "mesh"),
    [
        ("micro 4; pipeline pp zero_bubble; batch -> none; * -> none", "pp=2"),
        ("micro 4; pipeline pp zero_bubble; megatron_3d", "pp=2,tp=2"),
        ("micro 4; pipeline pp zero_bubble; batch -> none; * -> none; recompute full @blocks.*", "pp=2"),
        (f"micro 4; pipeline pp zero_bubble; {REGATHERED}", "pp=2,dp=2"),
    ],
)
def test_what_is_put_off_is_priced(layout: str, mesh: str) -> None:
    for ran, priced, measured, predicted in launch(put_off, layout, mesh, ranks=Mesh(mesh).size, seconds=120):
        assert ran == priced
        assert bool(ran) == ("regather" not in layout)
        assert predicted == pytest.approx(measured, rel=0.02)


def halved() -> dict[str, tuple[float, int]]:
    """By kind of call: the difference of gradients from those under `1f1b`, and late products."""
    found = {}
    plain, recompute = "batch -> none; * -> none", "batch -> none; * -> none; recompute"
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "float64": (plain, {}),
        "bfloat16": (plain, {"precision": "bf16"}),
        "float16": (plain, {"precision": "fp16"}),
        "full": (f"{recompute} full @blocks.*", {}),
        "selective": (f"{recompute} selective @blocks.*", {}),
    }
    for name, (rest, options) in cases.items():
        grads = []
        for schedule in ("1f1b", "zero_bubble"):
            _, parallel, inputs = pair(f"micro 4; pipeline pp {schedule}; {rest}", "pp=2", **options)
            with parallel.no_sync():
                parallel(**inputs).backward()
            for scale in (1.0, 3.0):
                (parallel(**inputs) * scale).backward()
            grads.append(gradients(parallel))
        late = sum(isinstance(one, LateProduct) for one in loop_of(parallel).modules())
        found[name] = worst(grads[1], grads[0]), late
    return found


@pytest.mark.slow
def test_put_off_gradients_are_the_same() -> None:
    """Half precision has the same bits; else a product is added to the sum as it is computed."""
    for rank, found in enumerate(launch(halved, ranks=2, seconds=120)):
        for name, (off, late) in found.items():
            assert late == 4 + rank, "four products of a block, and the logits"
            assert off <= (0 if "16" in name else 1e-14), name


def from_shards(layout: str) -> tuple[str, float, float]:
    """The error for other rows on each rank; then errors of loss and gradients where all stages have the same rows."""
    torch.manual_seed(0)
    model, inputs = gpt(batch=8, seq=12, vocab=104)
    model = model.double()
    rank, options = dist.get_rank(), {"layout": layout, "local_inputs": True}
    other = {name: value.chunk(4)[rank] for name, value in inputs.items()}
    try:
        autopar.parallelize(model, "pp=2,dp=2", other, **options)(**other)
        said = "made"
    except AutoparError as error:
        said = str(error)
    rows = {name: value.chunk(2)[rank % 2] for name, value in inputs.items()}
    parallel = autopar.parallelize(model, "pp=2,dp=2", rows, **options)
    expected, found = model(**inputs), parallel(**rows)
    expected.backward()
    found.backward()
    return said, float((expected - found).detach().abs()), worst(gradients(parallel), gradients(model))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["micro 2; pipeline pp 1f1b; fsdp", "pipeline"])
def test_each_rank_of_the_batch_may_bring_its_rows(layout: str) -> None:
    for said, error, off in launch(from_shards, layout, ranks=4, seconds=120):
        assert "ids differs between rank 0 and rank 2" in said
        assert "fix: ranks along the axes pp work on the same data" in said
        assert error < 1e-12
        assert off < 1e-12


def trained(layout: str, mesh: str) -> tuple[float, list[float]]:
    """Largest difference of parameters after 20 steps of AdamW, by how the optimizer runs; and the losses."""
    worst_of = []
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        model, parallel, inputs = pair(layout, mesh)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, **options) for each in (model, parallel)]
        for _ in range(20):
            for each, optimizer in zip((model, parallel), optimizers, strict=True):
                loss = each(**inputs)
                loss.backward()
                nn.utils.clip_grad_norm_(each.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        pairs = zip(model.parameters(), parallel.parameters(), strict=True)
        worst_of.append(max(float((one - other.full_tensor()).detach().abs().max()) for one, other in pairs))
    return max(worst_of), worst_of


@pytest.mark.slow
def test_training_is_that_of_one_process() -> None:
    for error, each in launch(trained, "micro 4; pipeline pp 1f1b; fsdp", "pp=2,dp=2", ranks=4, seconds=300):
        assert error < 1e-9, each


def resharded(folder: str) -> tuple[float, float, float]:
    """Differences of parameters: saved by a pipeline and loaded without one, and back; and set from a whole state."""
    model, source, inputs = pair("micro 4; pipeline pp 1f1b; fsdp", "pp=2,dp=2")
    checkpoint.save(get_model_state_dict(source), checkpoint_id=f"{folder}/first")
    found = []
    target = autopar.parallelize(
        gpt(batch=8, seq=12, vocab=104)[0].double(), "dp=2,tp=2", inputs, layout="fsdp_tp(fsdp=dp)"
    )
    back = autopar.parallelize(
        gpt(batch=8, seq=12, vocab=104)[0].double(), "pp=4", inputs, layout="micro 4; pipeline pp gpipe; * -> none"
    )
    for number, (made, name) in enumerate(((target, "first"), (back, "second"))):
        state = get_model_state_dict(made)
        checkpoint.load(state, checkpoint_id=f"{folder}/{name}")
        set_model_state_dict(made, state)
        if not number:
            checkpoint.save(get_model_state_dict(made), checkpoint_id=f"{folder}/second")
        pairs = zip(model.parameters(), made.parameters(), strict=True)
        found.append(max(float((one - other.full_tensor()).detach().abs().max()) for one, other in pairs))
    whole = {name: value.detach() + 1 for name, value in model.state_dict().items()}
    set_model_state_dict(source, whole, options=StateDictOptions(full_state_dict=True))
    pairs = zip(model.parameters(), source.parameters(), strict=True)
    found.append(max(float((one + 1 - other.full_tensor()).detach().abs().max()) for one, other in pairs))
    return found[0], found[1], found[2]


def test_checkpoints_pass_between_layouts() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for errors in launch(resharded, folder, ranks=4, seconds=120):
            assert errors == (0.0, 0.0, 0.0)


def loaded_on_meta() -> list[float]:
    """Errors of the loss of models without values, which load whole tensors: of each rank, of rank 0, of the module."""
    found = []
    for way in ("each rank", "rank 0", "module"):
        torch.manual_seed(0)
        model, inputs = gpt(batch=8, seq=12, vocab=104)
        empty, _ = gpt(batch=8, seq=12, vocab=104, device="meta")
        parallel = autopar.parallelize(empty, "pp=2", inputs, layout="micro 4; pipeline pp 1f1b; * -> none")
        whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
        if way == "module":
            parallel.load_full_state_dict(whole)
        else:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=way == "rank 0")
            set_model_state_dict(parallel, whole if way == "each rank" or dist.get_rank() == 0 else {}, options=options)
        found.append(abs(float(parallel(**inputs) - model(**inputs))))
    return found


@pytest.mark.slow
def test_whole_tensors_fill_models_without_values() -> None:
    for errors in launch(loaded_on_meta, ranks=2, seconds=60):
        assert max(errors) < 1e-6


# -- calls other than a step ------------------------------------------------------------------------------------------


class Small(nn.Module):
    """`how` makes the results of two layers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(6, 7), nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(7) if how == "batch norm" else nn.Identity()
        self.register_buffer("seen", torch.zeros(7))
        self.seen: Tensor

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = functional.dropout(self.norm(self.first(x)).tanh(), 0.5, self.how == "dropout" and self.training)
        if self.how == "mean":
            hidden = hidden - hidden.mean(0)
        if self.how == "buffer":
            self.seen.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
        if self.how == "scaled mean":
            hidden = hidden - hidden.mean(0) * self.last.weight.sum(0)
        if self.how == "skips":
            hidden = hidden + self.last(hidden).sum() * self.first.weight.sum(1)
        logits = self.last(hidden)
        if self.how == "logits":
            return logits
        if self.how == "root":
            return logits.square().sum().sqrt()
        loss = functional.cross_entropy(logits, y, ignore_index=-100)
        if self.how == "router":
            loss = loss + logits.softmax(-1).mean(0).square().sum()
        if self.how == "weights":
            loss = loss + self.last.weight.square().sum()
        return (loss, logits) if self.how == "both" else loss


CUT = "micro 4; pipeline pp 1f1b; cut pp before @last; * -> none"


def small(how: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    y = torch.tensor([0, 1, 2, -100, -100, 4, 0, 1])
    return Small(how).double(), (torch.randn(8, 6, dtype=torch.float64), y)


class Towers(nn.Module):
    """Two towers, of which the second stands before the last layer of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 7), nn.Linear(7, 5)
        self.vision = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 7))
        self.middle = nn.Linear(7, 7)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.middle(self.first(x).tanh())
        seen = self.vision(x)
        return functional.cross_entropy(self.last(hidden.tanh() * seen), y, ignore_index=-100)


def pinned() -> list[tuple[float, dict[str, int], str]]:
    return [pinned_by(lines) for lines, _ in PINNED]


def pinned_by(lines: str) -> tuple[float, dict[str, int], str]:
    """Error of gradients, elements of the parameters of this rank, and the text of the stages of a plan."""
    _, inputs = small("loss")
    torch.manual_seed(0)
    model = Towers().double()
    layout = f"micro 4; pipeline pp 1f1b; {lines}; * -> none"
    parallel = autopar.parallelize(model, "pp=2", inputs, layout=layout)
    for each in (model, parallel):
        each(*inputs).backward()
    plan = plan_under_layout(parallel.graph, Mesh("pp=2"), layout, PlanRequest("h100"))
    assert autopar.Plan.read(plan.text, plan.graph).decided == plan.decided
    stages = [line for line in str(plan.layout).splitlines() if line.startswith(("cut", "op"))]
    stored = {name: parameter.to_local().numel() for name, parameter in parallel.named_parameters()}
    return worst(gradients(parallel), gradients(model)), stored, "; ".join(stages)


# Lines of a layout, and the stage of the second tower.
PINNED = [
    ("cut pp before @middle; op @vision at part 0", 0),
    ("cut pp before @last; op @vision at part 1; op @/mul at part 1", 1),
]


def test_ops_stand_where_the_layout_puts_them() -> None:
    for rank, found in enumerate(launch(pinned, ranks=2, seconds=60)):
        for (error, stored, text), (lines, stage_of_vision) in zip(found, PINNED, strict=True):
            assert error < 1e-12
            assert text.endswith(lines.partition("; ")[2])
            assert (stored["vision.2.weight"] > 0) == (rank == stage_of_vision)
            assert (stored["last.weight"] > 0) == (rank == 1)


def features(schedule: str) -> dict[str, float]:
    """Error of gradients by feature, or of results."""
    found: dict[str, float] = {}
    layout = CUT.replace("1f1b", schedule)
    model, inputs = small("logits")
    parallel = autopar.parallelize(model, "pp=2", inputs, layout=layout, outputs="full")
    for each in (model, parallel):
        each(*inputs).square().sum().backward()
    found["logits"] = worst(gradients(parallel), gradients(model))
    with torch.no_grad():
        found["no grad"] = float((parallel(*inputs) - model(*inputs)).abs().max())
    model.eval()
    parallel.eval()
    found["eval"] = float((parallel(*inputs) - model(*inputs)).detach().abs().max())

    model, inputs = small("router")
    parallel = autopar.parallelize(model, "pp=2", inputs, layout=CUT.replace("1f1b", "gpipe"))
    for each in (model, parallel):
        each(*inputs).backward()
    found["router"] = worst(gradients(parallel), gradients(model))
    # The micro-batches run twice: for the mean of all of them, and with it.
    model, inputs = small("mean")
    parallel = autopar.parallelize(model, "pp=2", inputs, layout=CUT.replace("1f1b", "gpipe"))
    for each in (model, parallel):
        each(*inputs).backward()
    found["mean of all micro-batches"] = worst(gradients(parallel), gradients(model))

    # A function of the sum over all micro-batches is a factor of its gradients; a buffer takes a mean of all.
    for how in ("root", "buffer"):
        model, inputs = small(how)
        parallel = autopar.parallelize(model, "pp=2", inputs, layout=layout)
        for _ in range(2):
            for each in (model, parallel):
                each(*inputs).backward()
        found[how] = worst(gradients(parallel), gradients(model))
        found[f"{how}, its value"] = float((model.seen - parallel.seen).abs().max())

    model, inputs = small("both")
    parallel = autopar.parallelize(model, "pp=2", inputs, layout=layout, outputs="full")
    with Watch() as watch:
        (loss, logits), (mine, theirs) = model(*inputs), parallel(*inputs)
    found["micro-batches in flight beside a loss"] = abs(watch.alive - (2 - dist.get_rank()))
    found["result beside a loss"] = float((logits - theirs).detach().abs().max())
    (3 * loss + logits.square().mean()).backward()
    (3 * mine + theirs.square().mean()).backward()
    found["loss and logits"] = worst(gradients(parallel), gradients(model))

    model, inputs = small("loss")
    parallel = autopar.parallelize(model, "pp=2", inputs, layout=layout, outputs="full")
    x = inputs[0].clone().requires_grad_()
    own = inputs[0].clone().requires_grad_()
    model(x, inputs[1]).backward()
    parallel(own, inputs[1]).backward()
    assert x.grad is not None
    assert own.grad is not None
    found["gradient of an input"] = float((x.grad - own.grad).abs().max())
    loss = parallel(*inputs)
    loss.backward(retain_graph=True)
    loss.backward()
    for _ in range(2):
        model(*inputs).backward()
    found["backward twice"] = worst(gradients(parallel), gradients(model))
    model.zero_grad()
    parallel.zero_grad()
    with parallel.no_sync():
        parallel(*inputs).backward()
    parallel(*inputs).backward()
    for _ in range(2):
        model(*inputs).backward()
    found["no_sync"] = worst(gradients(parallel), gradients(model))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_features(schedule: str) -> None:
    for found in launch(features, schedule, ranks=2, seconds=200):
        for name, error in found.items():
            assert error < 1e-12, name


# Model, layout, and what the error says.
REFUSED = [
    ("weights", CUT, "the parameter last.weight is read outside of the micro-batches"),
    ("scaled mean", CUT.replace("1f1b", "gpipe"), "from a parameter that one stage of the pipeline has"),
    ("batch norm", CUT, "micro 4 cannot split the batch"),
    ("router", CUT, "1f1b runs the first backward before the last forward, but the loss needs /mean"),
    ("loss", "micro 1; pipeline pp 1f1b; * -> none", "stages runs micro-batches, and the layout has none"),
    ("loss", "micro 4; pipeline pp 1f1b; cut pp before @lost; * -> none", "did you mean 'last'?"),
    ("loss", "micro 4; pipeline pp 1f1b; batch -> pp; * -> none", "the axis 'pp' has the stages of the pipeline"),
]


def refused() -> list[str]:
    found = []
    for how, layout, _ in REFUSED:
        model, inputs = small(how)
        try:
            autopar.parallelize(model, "pp=2", inputs, layout=layout)
        except AutoparError as error:
            found.append(str(error))
        else:
            found.append("made")
    return found


def test_a_plan_is_refused_where_the_run_would_be() -> None:
    model, inputs = small("router")
    for schedule in ("1f1b", "zero_bubble", "interleaved(2)", "?"):
        layout = f"micro 4; pipeline pp {schedule}; * -> none"
        with pytest.raises(
            LayoutError, match=r"the loss needs /mean.*test_pipelines.py:.*of all(.|\n)*fix: the schedule gpipe"
        ):
            autopar.plan(model, "pp=2", inputs, layout=layout, cluster="h100", cache=False)
    for schedule, mesh in (("gpipe", "pp=2"), ("1f1b", "pp=1")):
        layout = f"micro 4; pipeline pp {schedule}; * -> none"
        assert autopar.plan(model, mesh, inputs, layout=layout, cluster="h100", cache=False).text


def test_refusals() -> None:
    for found in launch(refused, ranks=2, seconds=60):
        for said, (how, layout, text) in zip(found, REFUSED, strict=True):
            assert text in said, (how, layout)
            assert "fix: " in said


def lost(how: str, mesh: str) -> None:
    """One step, in which rank 1 ends or stops before the forward of micro-batch 2."""
    _, parallel, inputs = pair("micro 4; pipeline pp 1f1b; * -> none", mesh)
    if dist.get_rank() == 1:
        forward = pipeline_loop._Run._forward

        def last(run: Any, task: Any) -> None:
            if task.micro_batch == 2:
                if how == "ends":
                    os._exit(3)
                time.sleep(60)
            forward(run, task)

        pipeline_loop._Run._forward = last  # type: ignore[method-assign]
    parallel(**inputs).backward()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(("how", "mesh"), [("ends", "pp=2"), ("stops", "pp=2"), ("stops", "pp=2,dp=1")])
def test_a_lost_stage_is_named(how: str, mesh: str) -> None:
    first, _ = endings(lost, how, mesh, ranks=2, limit_seconds=4, seconds=90, lost=1)
    assert first.code == 1
    assert re.search(r"stage 0 waits for the gradient of micro-batch [12] from stage 1, into part 0", first.log)


@pytest.mark.slow
@pytest.mark.alone
def test_all_other_stages_end_with_what_they_wait_for() -> None:
    """Also those that have no message with the lost stage."""
    others = [0, 2, 3]
    found = endings(lost, "ends", "pp=4", ranks=4, limit_seconds=10, seconds=120, lost=1)
    for stage in others:
        assert found[stage].code == 1, stage
        assert re.search(rf"stage {stage} waits (for the|until stage)", found[stage].log), found[stage].log[-2000:]


def test_statements_are_written_as_read() -> None:
    for text in (
        "pipeline pp 1f1b\n",
        "pipeline pp 1f1b(+2)\n",
        "pipeline pp gpipe\n",
        "pipeline pp zero_bubble\n",
        "pipeline pp interleaved(3)\ncut pp before @a, @b.1\n",
        "pipeline pp 1f1b\nop @vision.* at part 0\nop @vision/linear.1 at part 12\n",
    ):
        assert str(parse_layout(text)) == text
    unknown = "pipeline pp dualpipe", "pipeline pp", "pipeline pp interleaved(1)", "pipeline pp zero_bubble(2)"
    for text in (*unknown, "cut pp after @x", "op @x at part", "op @x at stage 1", "op @x at part -1"):
        with pytest.raises(LayoutError, match="fix: "):
            parse_layout(text)
