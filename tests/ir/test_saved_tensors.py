"""What is said to be saved for the backward is what autograd saves when the traced module runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, ResNetConfig, ResNetModel

from autopar.ir.analysis.op_memory import InternalSave, saved_values
from autopar.ir.exported import Exported
from autopar.ir.interpreter import TracedModule
from autopar.tracing.export.export import export
from tests.ir.test_checkpoint_regions import Stack


class Net(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def saved(function: Callable[..., Any], x: torch.Tensor | None = None) -> tuple[tuple[str, ...], Any]:
    found = saved_values(export(Net(function), (torch.randn(3, 4) if x is None else x,)))
    return found.values, found.internal


def test_each_op_saves_what_its_derivative_needs() -> None:
    # a linear keeps its input and, if that needs a gradient, its weight; tanh its result; exp its result; mul both
    values, internal = saved(lambda net, x: net.second(torch.tanh(net.first(x))))
    assert (values, internal) == (("p_second_weight", "x", "tanh"), ())
    values, internal = saved(lambda net, x: net.first(x).exp() * net.first(x).sin())
    assert values == ("x", "exp", "linear_1", "sin")
    values, internal = saved(lambda net, x: net.first(x) + 1)
    assert (values, internal) == (("x",), ())


def test_an_input_that_needs_a_gradient_saves_the_weight() -> None:
    values, _ = saved(lambda net, x: net.first(x), torch.randn(3, 4, requires_grad=True))
    assert values == ("p_first_weight", "x")


def test_views_count_as_their_base() -> None:
    values, _ = saved(lambda net, x: net.second(net.first(x).relu().view(3, 2, 4).transpose(1, 2).reshape(3, 8)))
    assert "relu" in values
    assert not {"view", "transpose"} & set(values)


def test_memory_inside_an_op_is_reported() -> None:
    values, internal = saved(lambda net, x: F.layer_norm(net.first(x), (8,)))
    assert values == ("x", "linear")
    assert internal == (
        InternalSave("layer_norm", (3, 1), torch.float32, 12),
        InternalSave("layer_norm", (3, 1), torch.float32, 12),
    )


def test_nothing_is_saved_without_gradients() -> None:
    assert saved(lambda net, x: net.first(x.detach()).detach())[0] == ()
    with torch.no_grad():
        exported = export(Net(lambda net, x: net.first(x)), (torch.randn(3, 4),))
    assert saved_values(exported).values == ()


def bytes_kept(exported: Exported, module: nn.Module, inputs: dict[str, Any]) -> Counter[int]:
    """Sizes of the distinct pieces of memory that autograd keeps when `module` really runs."""
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = module(**inputs)
    assert result is not None
    return Counter(size for tensor in kept.values() if (size := tensor.untyped_storage().nbytes()))


def bytes_said(exported: Exported) -> Counter[int]:
    found = saved_values(exported)
    vals = {node.name: node.meta.get("val") for node in exported.graph_module.graph.nodes}
    said = Counter(internal.bytes for internal in found.internal)
    for name in found.values:
        said[vals[name].untyped_storage().nbytes()] += 1
    return said


def llama() -> tuple[nn.Module, dict[str, Any]]:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    config.vocab_size = 50
    return LlamaForCausalLM(config), {"input_ids": torch.randint(0, 50, (2, 6)), "use_cache": False}


def bert() -> tuple[nn.Module, dict[str, Any]]:
    config = BertConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=50)
    return BertModel(config), {"input_ids": torch.randint(0, 50, (2, 6))}


def resnet() -> tuple[nn.Module, dict[str, Any]]:
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 2])
    return ResNetModel(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


@pytest.mark.parametrize("build", [llama, bert, resnet])
def test_what_is_said_is_what_is_kept(build: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> None:
    torch.manual_seed(0)
    model, inputs = build()
    model.eval()
    exported = export(model, inputs)
    assert bytes_said(exported) == bytes_kept(exported, TracedModule(model, exported), inputs)


def test_a_checkpointed_region_saves_only_what_enters_it() -> None:
    torch.manual_seed(0)
    model = Stack("plain")
    x = torch.randn(4, 8, requires_grad=True)
    found = saved_values(export(model, (x,)))
    assert "x" in found.values
    assert not [name for name in found.values if name.startswith(("tanh", "native_dropout"))]
    plain = Stack("none")
    assert [name for name in saved_values(export(plain, (x,))).values if name.startswith("tanh")] == [
        "tanh",
        "tanh_1",
        "tanh_2",
    ]


def test_attention_of_a_model_on_meta_is_counted_as_fused() -> None:
    model, inputs = llama()
    model.to("meta")
    exported = export(model, {**inputs, "input_ids": inputs["input_ids"].to("meta")})
    scores = 2 * 4 * 6 * 6
    assert all(torch.Size(internal.shape).numel() != scores for internal in saved_values(exported).internal)
