"""Calls of a part of a parallel module, and methods of a model that call its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from tests.gaps import number
from tests.runtime.launcher import in_turn, launch
from tests.runtime.training import error_of

TOLERANCE = 1e-10


class AutoEncoder(nn.Module):
    """A variational autoencoder without its noise, in the usual form: methods that call linears."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(12, 16)
        self.mean, self.spread = nn.Linear(16, 4), nn.Linear(16, 4)
        self.up, self.out = nn.Linear(4, 16), nn.Linear(16, 12)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = functional.relu(self.hidden(x))
        return self.mean(hidden), self.spread(hidden)

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.out(functional.relu(self.up(z))))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(x)
        return self.decode(mean + (0.5 * spread).exp()), mean, spread


class Translator(nn.Module):
    """An encoder and a decoder of one embedding, whose weight is also the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 24, dropout=0.0, batch_first=True), 2)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.embedding(source))
        return self.head(self.decoder(self.embedding(target), memory))  # type: ignore[no-any-return]

    def translate(self, source: Tensor, length: int) -> Tensor:
        """Greedy tokens: the encoder runs once, the decoder once for each token."""
        memory = self.encoder(self.embedding(source))
        tokens = source[:, :1]
        for _ in range(length):
            hidden = self.decoder(self.embedding(tokens), memory)
            tokens = torch.cat((tokens, self.head(hidden[:, -1:]).argmax(-1)), 1)
        return tokens


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in found.items()}


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return max(number((one[name] - other[name]).abs().max()) for name in one)


def autoencoder(layout: str, axis: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = AutoEncoder().double(), torch.randn(6, 12, dtype=torch.float64)
    p: Any = autopar.parallelize(model, f"{axis}=2", (x,), layout=layout)

    def parts(one: Any) -> Tensor:
        mean, spread = one.encode(x)
        return functional.mse_loss(one.decode(mean), x) + spread.square().mean()

    def both(one: Any) -> Tensor:  # the whole model and a part of it in one backward
        image, mean, _ = one(x)
        return functional.mse_loss(image, x) + one.decode(mean.detach()).square().mean()

    gaps = [gap(gradients(p, each(p)), gradients(model, each(model))) for each in (parts, both)]
    z = torch.randn(5, 4, dtype=torch.float64)
    with torch.no_grad():
        sample = p.decode(z)
        gaps.append(number((sample.cpu() - model.decode(z)).abs().max()))
    before = len(p._plans.kept)
    parts(p)
    return {"worst": max(gaps), "again": len(p._plans.kept) - before, "latest": "spread" in str(p.graph)}


def translator(layout: str, axis: str) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Translator().double()
    source, target = torch.randint(20, (4, 7)), torch.randint(20, (4, 5))
    p: Any = autopar.parallelize(model, f"{axis}=2", (source, target), layout=layout)

    def loss(one: Any) -> Tensor:
        memory = one.encoder(one.embedding(source))
        hidden = one.decoder(one.embedding(target), memory)
        return functional.cross_entropy(one.head(hidden).flatten(0, 1), target.flatten())

    worst = gap(gradients(p, loss(p)), gradients(model, loss(model)))
    with torch.no_grad():
        same = torch.equal(p.eval().translate(source, 4), model.eval().translate(source, 4))
        layer = p.encoder.layers[1](p.embedding(source))
        expected = model.encoder.layers[1](model.embedding(source))
    return {"worst": max(worst, number((layer.full_tensor() - expected).abs().max())), "same": same}


def planned(way: str, outputs: str) -> dict[str, Any]:
    """Parts under a plan that was searched before, or by `parallelize` itself."""
    torch.manual_seed(0)
    model, x = AutoEncoder().double(), torch.randn(6, 12, dtype=torch.float64)
    layout: Any = None
    if way == "plan":
        layout = autopar.plan(model, "tp=2", (x,), layout="@hidden.weight { _.0 -> tp }", cache=False, time_limit=5)
    p: Any = autopar.parallelize(model, "tp=2", (x,), layout=layout, outputs=outputs, time_limit=5)

    def loss(one: Any) -> Tensor:
        return functional.mse_loss(one.decode(one.encode(x)[0]), x)

    return {"worst": gap(gradients(p, loss(p)), gradients(model, loss(model)))}


QUICK: Any = [[(autoencoder, ("fsdp", "fsdp")), (autoencoder, ("megatron", "tp"))]]
SLOW: Any = [
    [(planned, ("plan", "sharded")), (planned, ("search", "full"))],
    [(autoencoder, ("ddp", "dp")), (autoencoder, ("zero1", "dp"))],
    *([(translator, case)] for case in (("ddp", "dp"), ("zero1", "dp"), ("fsdp", "fsdp"), ("megatron", "tp"))),
]


@pytest.mark.parametrize("calls", [*QUICK, *(pytest.param(calls, marks=pytest.mark.slow) for calls in SLOW)])
def test_methods_that_call_parts(calls: Any) -> None:
    for found in launch(_all, calls, ranks=2):
        for case, one in found.items():
            assert one["worst"] < TOLERANCE, (case, one)
            assert one.get("again", 0) == 0, (case, one)
            assert one.get("latest", True), (case, one)
            assert one.get("same", True), (case, one)


def _all(calls: list[tuple[Callable[..., Any], tuple[str, str]]]) -> dict[str, Any]:
    return {f"{each.__name__} {case}": each(*case) for each, case in calls}


class WithLoss(AutoEncoder):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return functional.mse_loss(super().forward(x)[0], x)


def refused() -> dict[str, str]:
    torch.manual_seed(0)
    x = torch.randn(4, 12)
    found = {}
    for name, options in {
        "loss": {"layout": "ddp", "outputs": "loss"},
        "local": {"layout": "ddp", "outputs": "local"},
        "stages": {"layout": "pipeline dp 1f1b; micro 2; cut dp before @up"},
    }.items():
        p: Any = autopar.parallelize(WithLoss(), "dp=2", (x,), **options)
        found[name] = error_of(lambda p=p: p.hidden(x))
    p = autopar.parallelize(AutoEncoder(), "dp=2", (x,), layout="ddp")
    found["inputs"] = error_of(lambda: p.hidden(x, x))
    found["rank"] = error_of(lambda: (p.hidden if torch.distributed.get_rank() else p)(x))
    return found


def test_parts_that_cannot_be_called_say_why() -> None:
    for found in launch(refused, ranks=2):
        assert "hidden, a Linear of WithLoss cannot be called by itself here" in found["loss"]
        assert "outputs='sharded'" in found["local"]
        assert "with stages cannot be called" in found["stages"]
        assert "do not fit hidden, a Linear of AutoEncoder" in found["inputs"]
        assert "module that is called" in found["rank"]


def encoder_decoder(layout: str, axis: str) -> dict[str, Any]:
    """T5 of transformers: `generate` runs the encoder by itself."""
    from examples.hf import hf

    torch.manual_seed(0)
    model, inputs = hf("t5", 2, 6)
    p: Any = autopar.parallelize(model, f"{axis}=2", inputs, layout=layout)
    ids = inputs["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "decoder_start_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    tokens = [one.generate(ids, **options) for one in (p, model)]
    hidden = [one.encoder(ids).last_hidden_state for one in (p, model)]
    return {"same": torch.equal(*tokens), "gap": number((hidden[0].full_tensor() - hidden[1]).abs().max())}


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "axis"), [("fsdp", "fsdp"), ("megatron", "tp")])
def test_generate_with_an_encoder(layout: str, axis: str) -> None:
    pytest.importorskip("transformers")
    for found in launch(in_turn, (encoder_decoder, (layout, axis)), ranks=2):
        assert found["encoder_decoder"]["same"]
        assert found["encoder_decoder"]["gap"] < 1e-5
