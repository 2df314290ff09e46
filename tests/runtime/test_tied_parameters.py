"""Parameters that several stages of a pipeline read: stored on one stage, with the gradients of all."""

from __future__ import annotations

from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.lowering.collectives import stage_messages
from autopar.lowering.modules import pipeline_loop
from autopar.lowering.modules.pipeline_loop import PipelineLoop
from examples.gpt import gpt
from tests.runtime.launcher import launch
from tests.runtime.training import gradients, worst

REGATHERED = "batch -> dp; * -> none; param, grad, opt { * -> dp | none }; regather @*"
LAYERS, WIDTH, VOCAB = 4, 48, 104


def joining(model: Any) -> nn.Module:
    """Blocks 0 and 3 have one matrix, to which an op before all micro-batches adds another one, of blocks 1 and 3."""

    class Joined(nn.Module):
        def __init__(self, first: nn.Linear, added: nn.Parameter) -> None:
            super().__init__()
            self.weight, self.bias, self.added = first.weight, first.bias, added

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.weight + self.added, self.bias)

    first, added = model.blocks[0].up, nn.Parameter(0.1 * model.blocks[1].up.weight.detach().clone())
    model.blocks[0].up = Joined(first, added)
    model.blocks[3].up = Joined(first, added)
    return model


def tied(how: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A GPT with one table for tokens and logits, and more of the kind."""
    torch.manual_seed(0)
    model, inputs = gpt(layers=LAYERS, d_model=WIDTH, vocab=VOCAB, batch=8, seq=12)
    if how == "frozen":
        model.tokens.weight.requires_grad_(False)
    elif how == "two names":
        model.blocks[2].down = model.blocks[0].down
        model.blocks[3].attention.out.weight = model.blocks[1].attention.out.weight
    elif how == "joined":
        model = joining(model)
    return model.double(), inputs


class Sends:
    """Counts messages between stages in one pass."""

    def __enter__(self) -> Sends:
        self.count = 0
        send = stage_messages.send

        def counted(*args: Any, **others: Any) -> Any:
            self.count += 1
            return send(*args, **others)

        self.patches = [mock.patch.object(one, "send", counted) for one in (stage_messages, pipeline_loop)]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for patch in self.patches:
            patch.stop()


def trained(how: str, layout: str, mesh: str, **options: Any) -> dict[str, Any]:
    """Errors of gradients, their norms and parameters over three steps of AdamW, and what this rank has."""
    model, inputs = tied(how)
    parallel: Any = autopar.parallelize(model, mesh, inputs, layout=layout, **options)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, parallel)]
    off, norm, error = 0.0, 0.0, 0.0
    for number in range(3):
        with Sends() as sends:
            for each in (model, parallel):
                (each(**inputs) * (1 + number)).backward()
        off = max(off, worst(gradients(parallel), gradients(model)))
        norms = [float(nn.utils.clip_grad_norm_(each.parameters(), 0.5)) for each in (model, parallel)]
        norm = max(norm, abs(norms[0] - norms[1]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), parallel.parameters(), strict=True)
    error = max(float((one - other.full_tensor()).detach().abs().max()) for one, other in pairs)
    with torch.no_grad():
        error = max(error, float((model(**inputs) - parallel(**inputs)).abs()))
    stored = {name: one.to_local().numel() for name, one in parallel.named_parameters()}
    states = sum(x.to_local().numel() for one in optimizers[1].state.values() for x in one.values() if x.ndim)
    (loop,) = (one for one in parallel.emitted.graph_module.modules() if isinstance(one, PipelineLoop))
    return {
        "gradients": off,
        "norm": norm,
        "parameters": error,
        "stored": stored,
        "states": states,
        "sends": sends.count,
        "tied": [(one.source, one.targets) for one in loop.tied],
    }


# Model, layout, mesh, values that a stage sends to others: its stage and theirs.
CASES = [
    ("table", "micro 4; pipeline pp 1f1b; * -> none", "pp=2", [(1, (0,))]),
    ("two names", "micro 4; pipeline pp 1f1b; * -> none", "pp=4", [(3, (0,)), (2, (0,)), (2, (0,)), (3, (1,))]),
    ("table", "micro 4; pipeline pp 1f1b; fsdp", "pp=2,dp=2", [(1, (0,))]),
    ("table", "micro 4; pipeline pp gpipe; zero1", "dp=2,pp=2", [(1, (0,))]),
    ("frozen", "micro 4; pipeline pp 1f1b; fsdp", "pp=2,dp=2", [(1, (0,))]),
    ("frozen", "micro 4; pipeline pp 1f1b; batch -> none; * -> none", "pp=4", [(3, (0,))]),
    ("joined", "micro 4; pipeline pp 1f1b; fsdp", "pp=2,dp=2", [(1, (0,))] * 3),
    ("joined", "micro 4; pipeline pp zero_bubble; batch -> none; * -> none", "pp=4", [(3, (0,))] * 3),
    ("two names", "micro 4; pipeline pp zero_bubble; fsdp", "pp=2,dp=2", [(1, (0,))] * 4),
    ("table", "micro 4; pipeline pp interleaved(2); megatron", "pp=2,tp=2", [(1, (0,))]),
    ("two names", f"micro 4; pipeline pp 1f1b; {REGATHERED}", "pp=2,dp=2", [(1, (0,))] * 4),
]


def stages_of(mesh: str) -> list[list[int]]:
    """The ranks of each stage."""
    sizes = {name: int(size) for name, size in (axis.split("=") for axis in mesh.split(","))}
    ranks = torch.arange(prod(sizes.values())).reshape(*sizes.values()).movedim([*sizes].index("pp"), 0)
    found: list[list[int]] = ranks.reshape(sizes["pp"], -1).tolist()
    return found


@pytest.mark.parametrize(
    ("how", "layout", "mesh", "values"),
    [pytest.param(*case, marks=() if not place else pytest.mark.slow) for place, case in enumerate(CASES)],
)
def test_training_is_that_of_one_process(how: str, layout: str, mesh: str, values: list[Any]) -> None:
    stages = stages_of(mesh)
    found = launch(trained, how, layout, mesh, ranks=len(stages) * len(stages[0]), seconds=200)
    model, _ = tied(how)
    learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for stage, row in enumerate(stages):
        own = [one for one in values if stage in (one[0], *one[1])]
        sent = sum(len(targets) for source, targets in own if source == stage)
        returned = 0 if how == "frozen" else sum(stage in targets for _, targets in own)
        for rank in row:
            one = found[rank]
            assert max(one["gradients"], one["norm"], one["parameters"]) < 1e-12
            assert one["tied"] == own
            # Of four micro-batches, with their gradients, over one cut or over two; interleaved twice.
            passed = 4 * (2 if 0 < stage < len(stages) - 1 else 1) * (3 if "interleaved" in layout else 1)
            assert one["sends"] == passed + sent + returned
            # AdamW has two states of what is stored.
            assert one["states"] == 2 * sum(size for name, size in one["stored"].items() if name in learned)
    for name, parameter in model.named_parameters():
        holders = [row for row in stages if any(found[rank]["stored"][name] for rank in row)]
        assert len(holders) == 1, f"{name} is stored on the ranks {holders}"
        split = any(word in layout for word in ("fsdp", "zero1", "regather"))
        stored = sum(found[rank]["stored"][name] for rank in holders[0])
        assert stored == parameter.numel() * (1 if split else len(holders[0])) or "megatron" in layout


def halves() -> dict[str, float]:
    """Differences to one process in bfloat16, and of other calls than a step."""
    found: dict[str, float] = {}
    model, inputs = tied("two names")
    parallel: Any = autopar.parallelize(
        model, "pp=2", inputs, layout="micro 4; pipeline pp 1f1b; * -> none", precision="bf16"
    )
    for each in (model, parallel):
        each(**inputs).backward()
    ours, theirs = (torch.cat([x.flatten() for x in gradients(each).values()]) for each in (parallel, model))
    found["bfloat16"] = float((ours - theirs).norm() / theirs.norm())

    model, inputs = tied("two names")
    parallel = autopar.parallelize(model, "pp=2", inputs, layout="micro 4; pipeline pp 1f1b; * -> none")
    with parallel.no_sync():
        parallel(**inputs).backward()
    (3 * parallel(**inputs)).backward()
    (4 * model(**inputs)).backward()
    found["no_sync"] = worst(gradients(parallel), gradients(model))
    loss = parallel(**inputs)
    loss.backward(retain_graph=True)
    loss.backward()
    (2 * model(**inputs)).backward()
    found["backward twice"] = worst(gradients(parallel), gradients(model))
    parallel = autopar.parallelize(
        model, "pp=2", {"ids": inputs["ids"]}, layout="micro 4; pipeline pp 1f1b; * -> none", outputs="full"
    )
    model.zero_grad()
    for each in (model, parallel):
        each(inputs["ids"]).square().sum().backward()
    found["logits"] = worst(gradients(parallel), gradients(model))
    return found


@pytest.mark.slow
def test_other_calls() -> None:
    for found in launch(halves, ranks=2, seconds=200):
        assert found.pop("bfloat16") < 0.02
        for name, error in found.items():
            assert error < 1e-12, name
