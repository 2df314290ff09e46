"""A traced module is called as the model is, and refuses what it was not traced for."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.errors import AutoparError
from autopar.ir.interpreter import TracedModule
from autopar.tracing.export.export import export


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, flip: bool = False, **options: Any
    ) -> torch.Tensor:
        positions = torch.arange(x.shape[0], device=x.device)
        x = self.drop(self.layer(x)) * self.scale + positions[:, None] + torch.zeros_like(x)
        x = x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device) * x.new_tensor(0.5)
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        return -x if flip else x


def traced(model: Net | None = None, inputs: Any = None) -> TracedModule:
    model = model or Net().eval()
    return TracedModule(model, export(model, inputs or (torch.zeros(3, 4),)))


def message(module: nn.Module, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(AutoparError) as caught:
        module(*args, **kwargs)
    return str(caught.value)


def test_other_shapes_and_dtypes_are_refused() -> None:
    assert message(traced(), torch.zeros(2, 4)) == (
        "Net was traced with x: float32[3, 4], and is called with x: float32[2, 4]. Trace it again with these inputs."
    )
    assert "called with x: float64[3, 4]" in message(traced(), torch.zeros(3, 4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("kwargs", "difference"),
    [
        ({"flip": True}, "traced with items x, called with items x, flip"),
        ({"mask": torch.zeros(3, 4).bool()}, "traced with items x, called with items x, mask"),
        ({"other": [1]}, "traced with items x, called with items x, other"),
    ],
)
def test_other_arguments_are_refused(kwargs: dict[str, Any], difference: str) -> None:
    text = message(traced(), torch.zeros(3, 4), **kwargs)
    assert text == f"Net is called otherwise than it was traced: {difference}. Trace it again with these inputs."


def test_other_values_are_refused() -> None:
    module = traced(inputs={"x": torch.zeros(3, 4), "flip": True, "size": {"a": [1, None]}})
    x = torch.zeros(3, 4)
    assert "flip: traced with True, called with 1." in message(module, x, flip=1, size={"a": [1, None]})
    assert "size.a.1: traced with None, called with 2." in message(module, x, flip=True, size={"a": [1, 2]})
    assert "size.a: traced with items 0, 1, called with items 0." in message(module, x, flip=True, size={"a": [1]})
    assert "size.a: traced with a list, called with 5." in message(module, x, flip=True, size={"a": 5})
    assert "size.a.1: traced with None, called with a tensor." in message(module, x, flip=True, size={"a": [1, x]})


def test_arguments_that_do_not_fit_forward() -> None:
    assert "missing a required argument: 'x'" in message(traced())


def test_defaults_may_be_given_or_left_out() -> None:
    module = traced()
    x = torch.randn(3, 4)
    torch.testing.assert_close(module(x, flip=False, mask=None), module(x))
    module = traced(inputs=(x, None, False))
    torch.testing.assert_close(module(x=x), module(x, None, False))


def test_the_state_of_the_trace_is_checked() -> None:
    x = torch.zeros(3, 4)
    module = traced()
    module.train()
    assert message(module, x) == (
        "Net was traced with training: False, and is called with training: True. Trace it again in this state."
    )
    module.eval()
    with torch.no_grad():
        assert "traced with gradients enabled: True, and is called with gradients enabled: False" in message(module, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert "traced with autocast: off, and is called with autocast: autocast('cpu', torch.bfloat16)" in message(
            module, x
        )
        cast = traced()
    assert "traced with autocast: autocast('cpu', torch.bfloat16), and is called with autocast: off" in message(cast, x)


def test_a_trace_without_gradients() -> None:
    model = Net().eval()
    x = torch.randn(3, 4)
    with torch.no_grad():
        module = traced(model)
        result = module(x)
        torch.testing.assert_close(result, model(x))
    assert not result.requires_grad


def test_a_trace_in_inference_mode() -> None:
    model = Net().eval()
    x = torch.randn(3, 4)
    with torch.inference_mode():
        module = traced(model)
        torch.testing.assert_close(module(x), model(x))


def test_parameters_are_the_models() -> None:
    model = Net()
    module = traced(model)
    assert dict(module.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert all(a is b for a, b in zip(module.parameters(), model.parameters(), strict=True))
    assert all(a is b for a, b in zip(module.buffers(), model.buffers(), strict=True))
    assert module.state_dict().keys() == model.state_dict().keys()
    module.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    assert model.layer.weight.sum() == 16


def test_a_model_on_meta_runs_once_it_has_memory() -> None:
    with torch.device("meta"):
        model = Net().eval()
        x = torch.zeros(3, 4)
    module = traced(model, (x,))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.normal_(tensor.data)
    x = torch.randn(3, 4)
    torch.testing.assert_close(module(x), model(x))
    assert module(x).device.type == "cpu"


def test_a_constant_without_data_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.scale = torch.tensor([2.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.scale

    with torch.device("meta"):
        model = Scaled()
        module = TracedModule(model, export(model, (torch.zeros(3, 4),)))
    model.to_empty(device="cpu")
    assert message(module, torch.zeros(3, 4)) == (
        "the tensor 'scale' was on the meta device when the model was traced, so its data is not known. "
        "Register it as a buffer; then it gets its data with the model."
    )


def test_a_model_may_move_after_the_trace() -> None:
    model = Net().eval()
    module = traced(model)
    x = torch.randn(3, 4)
    torch.testing.assert_close(module(x), model(x))
    model.to("meta")
    assert module(x.to("meta")).device.type == "meta"


def test_a_cache_of_transformers_goes_in_and_out() -> None:
    config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    config.vocab_size = 20
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double().eval()
    ids = torch.randint(0, 20, (2, 5))
    # Releases of transformers differ in the name of the argument.
    given = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        first = TracedModule(model, export(model, {"input_ids": ids}))(input_ids=ids)
        expected = model(input_ids=ids)
        assert type(first.past_key_values) is type(expected.past_key_values)
        step = {"input_ids": ids[:, :1], given: first.past_key_values}
        exported = export(model, step)
        names = [placeholder.name for placeholder in exported.placeholders if placeholder.kind == "input"]
        assert names[:3] == ["input_ids", f"{given}.layers.0.keys", f"{given}.layers.0.values"]
        second = TracedModule(model, exported)(**step)
        expected = model(input_ids=ids[:, :1], **{given: expected.past_key_values})
    assert second.past_key_values is first.past_key_values
    assert second.past_key_values.get_seq_length() == 6
    torch.testing.assert_close(second.logits, expected.logits, rtol=1e-12, atol=1e-12)
    keys = [cache.layers[1].keys for cache in (second.past_key_values, expected.past_key_values)]
    torch.testing.assert_close(keys[0], keys[1], rtol=1e-12, atol=1e-12)


def test_a_traced_module_compiles_to_the_same_numbers() -> None:
    model = Net().eval()
    module = traced(model)
    x = torch.randn(3, 4)
    compiled = torch.compile(module, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
