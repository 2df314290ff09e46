"""Each pass of the lowering on a small model: the graph of rank 0 before it and after it, as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.nn import functional

import autopar
from autopar.ir.graph import NamedGraph
from autopar.lowering import emit as emitting
from autopar.lowering.modules.bucket import GradientSync, ParameterHandling
from autopar.lowering.modules.micro_loop import MicroBatchLoop
from autopar.lowering.modules.pipeline_loop import PipelineLoop
from autopar.lowering.passes.bucket_parameters import BucketedParameters
from autopar.lowering.passes.pipeline_parts import StageCut
from autopar.mesh import SubMesh
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.propagation import propagate
from tests.ranks import SimulatedGroups, on_ranks

GOLDEN = Path(__file__).parent / "golden"
AXES = SubMesh({"dp": 2})


class Classifier(nn.Module):
    """A loss over the counted targets, and a second loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.layer(x)
        return functional.cross_entropy(logits, targets).square() + logits.square().mean()


class Blocks(nn.Module):
    """Two equal layers, with dropout where it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def classifier() -> NamedGraph:
    dims = {"x": "batch features", "targets": "batch"}
    return autopar.trace(Classifier(), (torch.ones(4, 4), torch.zeros(4, dtype=torch.long)), dims=dims)


def blocks(training: bool = False) -> NamedGraph:
    return autopar.trace(Blocks().train(training), (torch.ones(4, 4),), dims={"x": "batch features"})


class Gate:
    def check(self) -> None:
        """Compare the ranks."""


def handled(graph: NamedGraph, gate: Any = None) -> BucketedParameters:
    handling = {
        one.name: ParameterHandling(one.dtype, one.dtype, one.dtype, False, False, False) for one in graph.parameters
    }
    return BucketedParameters(handling, GradientSync(), gate)


# The pass as `emit` calls it, the model, its layout, and the arguments of emit.
PASSES: dict[str, tuple[str, Callable[[], NamedGraph], str, dict[str, Any]]] = {
    "hoist_small_sums": ("move_to_ends", classifier, "batch -> dp; * -> none", {"with_ends": True}),
    "join_small_sums": ("join_totals", classifier, "batch -> dp; * -> none", {}),
    "bucket_parameters": ("put_in_buckets", blocks, "batch -> dp; * -> none; param { * -> dp | none }", {}),
    "rank_check": ("put_gate", blocks, "batch -> dp; * -> none; param { * -> dp | none }", {"gate": Gate()}),
    "micro_batches": ("loop_micro_batches", classifier, "micro 2; batch -> dp; * -> none", {}),
    "side_by_side": ("loop_micro_batches", classifier, "micro 1 halves; features -> dp; * -> none", {}),
    "loop_buckets": ("put_in_loops", blocks, "micro 2; batch -> dp; * -> none; param { * -> dp | none }", {}),
    "pipeline_parts": (
        "loop_micro_batches",
        classifier,
        "micro 2; pipeline dp 1f1b; cut dp before @*/cross_entropy_loss; * -> none",
        {},
    ),
    "recompute_regions": (
        "with_regions",
        blocks,
        "batch -> dp; * -> none",
        {"recompute": {"blocks.0": "full"}},
    ),
}


def text_of(graph: Any) -> str:
    return "\n".join(line.strip() for line in str(graph).strip().splitlines() if line.strip())


def before_and_after(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    function, model, layout, arguments = PASSES[name]
    graph, options = model(), dict(arguments)
    assignment = propagate(graph, parse_layout(layout), AXES)
    parameters = handled(graph, options.pop("gate", None))
    seen: dict[int, tuple[str, str]] = {}
    original = getattr(emitting, function)

    def emit_on(groups: SimulatedGroups) -> None:
        def recorded(out: Any, *others: Any) -> Any:
            before = text_of(out)
            result = original(out, *others)
            made = result if isinstance(result, Graph) else getattr(result, "graph", out)
            if isinstance(result, Graph):
                bodies = [each.body for each in others[0].values() if isinstance(each, MicroBatchLoop)]
                for each in others[0].values():
                    bodies += [part.body for part in each.parts.values()] if isinstance(each, PipelineLoop) else []
                regions = [text_of(body.graph) for body in bodies]
            else:
                children = result.children() if made is not out else ()
                regions = [text_of(each.graph) for each in children if hasattr(each, "graph")]
            # The function is replaced for all ranks, of which the stages differ.
            stages = [each.stages.stage for each in others if isinstance(each, StageCut)]
            if groups.rank == 0 and stages in ([], [0]):
                seen[0] = before, "\n\n".join([text_of(made), *regions])
            return result

        if groups.rank == 0:
            monkeypatch.setattr(emitting, function, recorded)
        emitting.emit(graph, assignment, groups, "sharded", False, parameters, **options)

    on_ranks(AXES, emit_on)
    return "# before\n{}\n\n# after\n{}\n".format(*seen[0])


@pytest.mark.parametrize("name", PASSES)
def test_pass_golden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = before_and_after(name, monkeypatch)
    before, after = found.split("# after\n")
    assert before.removeprefix("# before\n").strip() != after.strip(), "the pass changes nothing here"
    path = GOLDEN / f"{name}.txt"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(found, encoding="utf-8")
        pytest.fail(f"{path.name} was missing and is written now: read it and run again")
    assert found == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "model", "layout", "axes"),
    [
        ("random_ops", lambda: blocks(training=True), "batch -> dp; * -> none", {"dp": 2}),
        ("empty_shards", lambda: blocks(), "batch -> dp pad; * -> none", {"dp": 3}),
    ],
)
def test_op_golden(name: str, model: Callable[[], NamedGraph], layout: str, axes: dict[str, int]) -> None:
    """Ops that `emit` replaces while it writes them: the traced graph, and that of the last rank."""
    graph = model()
    assignment = propagate(graph, parse_layout(layout), SubMesh(axes))
    emitted = on_ranks(axes, lambda groups: emitting.emit(graph, assignment, groups, "sharded", False))[-1]
    found = (
        f"# traced\n{text_of(graph.exported.graph_module.graph)}\n\n# emitted\n{text_of(emitted.graph_module.graph)}\n"
    )
    path = GOLDEN / f"{name}.txt"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(found, encoding="utf-8")
        pytest.fail(f"{path.name} was missing and is written now: read it and run again")
    assert found == path.read_text(encoding="utf-8")


def test_every_pass_has_one() -> None:
    passes = {path.stem for path in Path(emitting.__file__).parent.joinpath("passes").glob("*.py")}
    # What `routed_rows` and `repeated_rows` make is long; tests/lowering/test_routed_rows.py runs it, count by count.
    # `compile_layers` runs after emission, where asked; tests/runtime/test_compiled_layers.py runs its graphs.
    elsewhere = {"__init__", "aliases", "routed_rows", "repeated_rows", "compile_layers"}
    assert passes - elsewhere == {*PASSES, "random_ops", "empty_shards"}
