"""Activation-checkpoint regions of the model are applied again in the traced module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.ir.exported import Exported
from autopar.ir.interpreter import TracedModule
from autopar.tracing.export.export import export


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.dropout(torch.tanh(self.up(x)), 0.3, self.training)
        with torch.no_grad():
            norm = h.abs().mean()
        return x + self.down(h) * scale / norm, norm


class Stack(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for block in self.blocks:
            if self.mode == "none":
                x, norm = block(x, 0.5)
            elif self.mode == "nested":
                x, norm = checkpoint(self.inner, block, x, use_reentrant=False)
            else:
                x, norm = checkpoint(block, x, 0.5, use_reentrant=self.mode == "reentrant")
            total = total + norm
        return x * total

    def inner(self, block: Block, x: torch.Tensor) -> Any:
        x, norm = checkpoint(block, x, 0.5, use_reentrant=False)
        return torch.sin(x), norm


def saved_bytes(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """The result, the gradients, and how many bytes of activations the forward keeps."""
    torch.manual_seed(3)
    kept: dict[int, torch.Tensor] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = module(x)
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    module.zero_grad()
    result.sum().backward()  # a reentrant checkpoint knows no torch.autograd.grad
    return result, [parameter.grad for parameter in module.parameters() if parameter.grad is not None], size


def regions(exported: Exported) -> list[int | None]:
    origins = (node.meta["origin"] for node in exported.graph_module.graph.nodes if node.op == "call_function")
    return [origin.checkpoint for origin in origins]


@pytest.mark.parametrize("mode", ["reentrant", "plain", "nested"])
def test_regions_recompute_and_give_equal_gradients(mode: str) -> None:
    torch.manual_seed(0)
    model = Stack(mode).double()
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    exported = export(model, (x,))
    assert {0, 1, 2, None} == set(regions(exported))
    traced = TracedModule(model, exported)
    expected, gradients, _ = saved_bytes(model, x)
    result, traced_gradients, size = saved_bytes(traced, x)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(traced_gradients, gradients, rtol=1e-12, atol=1e-12)

    plain = copy.deepcopy(model)
    plain.mode = "none"
    _, _, plain_size = saved_bytes(TracedModule(plain, export(plain, (x,))), x)
    assert size < plain_size / 2


def test_a_region_keeps_only_what_enters_it() -> None:
    model = Stack("plain").double()
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    graph_module, _ = TracedModule(model, export(model, (x,)))._call.graph_on(torch.device("cpu"))
    names = [node.target for node in graph_module.graph.nodes if node.op == "get_attr"]
    assert names == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    calls = [node for node in graph_module.graph.nodes if node.target is checkpoint]
    assert [len(call.args) - 1 for call in calls] == [5, 5, 5], "x and two weights with biases"
    assert all(call.kwargs == {"use_reentrant": False, "preserve_rng_state": True} for call in calls)


def test_checkpointing_of_transformers() -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, vocab_size=20
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double().train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    ids = torch.randint(0, 20, (2, 6))
    exported = export(model, {"input_ids": ids, "use_cache": False})
    assert set(regions(exported)) == {0, 1, 2, None}
    paths = {
        node.meta["origin"].module_path.split(".")[2]
        for node in exported.graph_module.graph.nodes
        if node.op == "call_function" and node.meta["origin"].checkpoint == 1
    }
    assert paths == {"1"}
    traced = TracedModule(model, exported)
    gradients = []
    for module in (model, traced):
        loss = module(input_ids=ids, use_cache=False).logits.sin().sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)
