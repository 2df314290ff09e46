"""Equal layers are traced once: the graph is that of a full trace, and layers that differ are traced in full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.errors import TraceError
from autopar.ir.exported import Exported
from autopar.tracing.export.export import export
from autopar.tracing.trace import named_graph
from examples.hf import hf

LAYERS = 6


class Block(nn.Module):
    """Layer that counts how often it runs."""

    runs = 0

    def __init__(self, index: int = 0, **attributes: Any) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 6)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, *rest: Any) -> Any:
        Block.runs += 1
        return x + torch.relu(self.up(self.norm(x)))


class Stack(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, *blocks: nn.Module, forward: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(blocks or [Block(index) for index in range(LAYERS)])
        self.head = nn.Linear(6, 3)
        self.through = forward

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        if self.through is not None:
            return self.through(self, x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def count() -> Iterator[None]:
    Block.runs = 0
    yield
    Block.runs = 0


def described(exported: Exported) -> list[Any]:
    """All of an exported graph, as text and values."""
    nodes = [
        (one.op, one.name, str(one.target), str(one.args), str(one.kwargs), str(one.meta.get("val")))
        for one in exported.graph_module.graph.nodes
    ]
    origins = [one.meta.get("origin") for one in exported.graph_module.graph.nodes]
    constants = {name: (value.dtype, value.tolist()) for name, value in exported.constants.items()}
    rest = (exported.placeholders, exported.aliases, exported.mutations, exported.output_tree, constants)
    return [nodes, origins, *rest, exported.graph_module.code]


def state(model: nn.Module) -> list[Any]:
    """The modules, their attributes and their tensors, by identity."""
    found: list[Any] = []
    for name, module in model.named_modules():
        found.append((name, id(module), sorted(module.__dict__), sorted(vars(type(module)))))
        found.append(
            [{key: id(value) for key, value in table.items()} for table in (module._parameters, module._buffers)]
        )
    return found


def runs_of(model: nn.Module, inputs: Any = None) -> int:
    """The number of blocks that a trace runs, if it gives what a full trace gives and leaves the model as it is."""
    inputs = (torch.ones(5, 4),) if inputs is None else inputs
    before = state(model)
    once = export(model, inputs)
    runs = Block.runs
    assert state(model) == before
    assert described(once) == described(export(model, inputs, layers_once=False))
    return runs


def assert_full(model: nn.Module) -> None:
    """Every block runs, in the last trace of it."""
    assert runs_of(model) >= LAYERS


# -- layers that are equal ---------------------------------------------------------------------------------------------


def test_two_of_equal_layers_run() -> None:
    assert runs_of(Stack()) == 2


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        assert runs_of(Stack(), (torch.ones(5, 4),)) == 2


def test_first_layer_whose_input_has_no_gradient() -> None:
    model = Stack()
    model.embed.requires_grad_(False)
    assert runs_of(model) == 3


def collected(net: Any, x: Tensor) -> Any:
    """Return every layer's result, a sum over layers, and what only some layers give."""
    found = [x]
    for index, block in enumerate(net.blocks):
        found.append(block(found[-1]) + found[-3 if index > 2 else 0])
    return {"all": tuple(found), "sum": sum(one.mean() for one in found), "two": torch.cat([found[2], found[-1]])}


def test_values_of_every_layer_may_be_used() -> None:
    assert runs_of(Stack(forward=collected)) == 2


def test_layers_with_two_results() -> None:
    class Two(Block):
        def forward(self, x: Tensor, *rest: Any) -> Any:
            y = super().forward(x)
            return {"hidden": y, "same": x, "norms": (y.norm(), None)}

    def forward(net: Any, x: Tensor) -> Any:
        norms = []
        for block in net.blocks:
            result = block(x)
            x = result["hidden"] * result["same"]
            norms.append(result["norms"][0])
        return x, torch.stack(norms)

    assert runs_of(Stack(*(Two(index) for index in range(LAYERS)), forward=forward)) == 2


def test_dropout_and_constants_of_each_layer() -> None:
    class Drop(Block):
        def forward(self, x: Tensor, *rest: Any) -> Any:
            return nn.functional.dropout(super().forward(x), 0.2, self.training) * torch.tensor([0.5, 1, 2, 3, 4, 5])

    assert runs_of(Stack(*(Drop(index) for index in range(LAYERS))).train()) == 2


@pytest.mark.parametrize("every", [1, 2])
def test_checkpoints_around_layers(every: int) -> None:
    def forward(net: Any, x: Tensor) -> Any:
        for index, block in enumerate(net.blocks):
            x = checkpoint(block, x, use_reentrant=False) if index % every == 0 else block(x)
        return x

    assert runs_of(Stack(forward=forward)) == 2


def test_checkpoints_inside_layers() -> None:
    class Inside(Block):
        def forward(self, x: Tensor, *rest: Any) -> Any:
            return checkpoint(super().forward, x, use_reentrant=False) + checkpoint(self.up, x, use_reentrant=False)

    assert runs_of(Stack(*(Inside(index) for index in range(LAYERS)))) == 2


def test_hooks_run_around_every_layer() -> None:
    model = Stack()
    for index, block in enumerate(model.blocks):
        block.register_forward_hook(lambda module, args, result, index=index: result * index)
    assert runs_of(model) == 2


# -- layers that differ ------------------------------------------------------------------------------------------------


class Reading(Block):
    """Block whose forward reads an attribute of its own."""

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return super().forward(x) * self.scale  # type: ignore[operator]


def test_an_attribute_that_is_read_makes_kinds() -> None:
    layers = [Reading(index, scale=index % 2) for index in range(2 * LAYERS)]
    # One run shows that the attribute is read, then two of each kind.
    assert runs_of(Stack(*layers)) == 1 + 4


def test_an_attribute_that_grows_makes_all_layers_differ() -> None:
    assert_full(Stack(*(Reading(index, scale=float(index)) for index in range(LAYERS))))


def test_an_attribute_of_a_class_in_between() -> None:
    class Default(Reading):
        scale = 3.0

    layers = [Default(index) for index in range(LAYERS)]
    layers[2].scale = 4.0
    # Two of the others, and the one.
    assert runs_of(Stack(*layers)) == 3


def branching(block: Any, x: Tensor) -> Tensor:
    return x * 2 if block.index == 4 else x


def with_index(net: Any, x: Tensor) -> Any:
    for index, block in enumerate(net.blocks):
        x = block(x, index)
    return x


def with_penalty(net: Any, x: Tensor) -> Any:
    return collected(net, x), sum(one.norm() for one in net.parameters())


def with_an_object(net: Any, x: Tensor) -> Any:
    kept: set[str] = set()
    for block in net.blocks:
        x = block(x, kept)
    return x


@pytest.mark.parametrize("forward", [with_index, with_penalty, with_an_object])
def test_what_the_model_does_with_its_layers(forward: Callable[..., Any]) -> None:
    assert_full(Stack(forward=forward))


class Branching(Block):
    def forward(self, x: Tensor, *rest: Any) -> Any:
        return branching(self, super().forward(x))


class Aside(Block):
    """Block that leaves a loss behind, which the model collects."""

    losses: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor, *rest: Any) -> Any:
        y = super().forward(x)
        self.losses.append(y.mean())
        return y


class InPlace(Block):
    def forward(self, x: Tensor, *rest: Any) -> Any:
        return x.add_(super().forward(x))


class View(Block):
    def forward(self, x: Tensor, *rest: Any) -> Any:
        super().forward(x)
        return x.view(-1, 6)


class Batch(Block):
    def forward(self, x: Tensor, *rest: Any) -> Any:
        return self.batch(super().forward(x))  # type: ignore[operator]


@pytest.mark.parametrize("kind", [Branching, InPlace, View])
def test_what_layers_do(kind: type[Block]) -> None:
    assert_full(Stack(*(kind(index) for index in range(LAYERS))))


def test_values_that_leave_a_layer_another_way() -> None:
    def forward(net: Any, x: Tensor) -> Any:
        Aside.losses.clear()
        for block in net.blocks:
            x = block(x)
        return x, sum(Aside.losses)

    assert_full(Stack(*(Aside(index) for index in range(LAYERS)), forward=forward))


def test_buffers_that_layers_change() -> None:
    model = Stack(*(Batch(index, batch=nn.BatchNorm1d(6)) for index in range(LAYERS)))
    assert_full(model.train())
    Block.runs = 0
    assert runs_of(model.eval()) == 2


def test_tensors_that_layers_share() -> None:
    model = Stack()
    model.blocks[3].up.weight = model.blocks[1].up.weight
    # Two of the others, and the two that share.
    assert runs_of(model) == 4


def test_another_layer_among_equal_ones() -> None:
    layers = [Block(index) for index in range(LAYERS + 1)]
    layers[3].up = nn.Linear(6, 6, bias=False)
    # Two of the others, and the one.
    assert runs_of(Stack(*layers)) == 3


def test_layers_with_other_arguments_in_the_middle() -> None:
    def forward(net: Any, x: Tensor) -> Any:
        for index, block in enumerate(net.blocks):
            x = block(x) if index < 6 else block(x, x)
        return x

    # The layers until the first that is called otherwise; then two of each.
    assert runs_of(Stack(*(Block(index) for index in range(12)), forward=forward)) == 2 + 4


# -- errors ------------------------------------------------------------------------------------------------------------


def test_an_error_leaves_the_model_as_it_was() -> None:
    def forward(net: Any, x: Tensor) -> Any:
        x = net.blocks[0](x)
        return x if x.sum() > 0 else -x

    model = Stack(forward=forward)
    before = state(model)
    with pytest.raises(TraceError, match="if x") as once:
        export(model, (torch.ones(5, 4),))
    with pytest.raises(TraceError) as full:
        export(model, (torch.ones(5, 4),), layers_once=False)
    assert str(once.value) == str(full.value)
    assert state(model) == before


# -- architectures -----------------------------------------------------------------------------------------------------

QUICK = ("llama", "gemma2")
DEPTHS: dict[str, dict[str, Any]] = {
    "t5": {"num_layers": 6, "num_decoder_layers": 7},
    "swin": {"depths": [2, 2, 12, 2], "drop_path_rate": 0.0},
    "whisper": {"encoder_layers": 6, "decoder_layers": 7},
    "bart": {"encoder_layers": 6, "decoder_layers": 7},
}
ARCHITECTURES = (
    *QUICK,
    *("gpt2", "bert", "t5", "mixtral", "vit", "qwen3_moe", "deepseek_v3", "mamba", "swin", "bart", "whisper"),
    *("deberta-v2", "falcon", "phi3", "gpt_oss", "jamba", "albert", "electra"),
)


@pytest.mark.parametrize("train", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "architecture", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in ARCHITECTURES]
)
def test_graphs_of_architectures(architecture: str, train: bool) -> None:
    model, inputs = hf(architecture, train=train, dropout=0.1, **DEPTHS.get(architecture, {"num_hidden_layers": 8}))
    once, full = (named_graph(model, inputs, export=partial(export, layers_once=value)) for value in (True, False))
    assert described(once.exported) == described(full.exported)
    assert (once.to_json(), str(once), once.fingerprint) == (full.to_json(), str(full), full.fingerprint)


@pytest.mark.slow
def test_gradient_checkpointing_and_loss_of_transformers() -> None:
    model, inputs = hf("llama", train=True, num_hidden_layers=7)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    runs_of(model, {**inputs, "labels": inputs["input_ids"]})
