"""Ring attention on real ranks: results and gradients of one process, with as many scores on each rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from tests.runtime import test_long_context_models as models
from tests.runtime.launcher import launch
from tests.runtime.test_folded_sequence import VOCAB, Model, Pairs, check, difference, inputs, step

RING = "op @*/folded_attention[s -> cp, t -> cp]"
# Without a fold the last rank has most to do.
PLAIN = "op @*/scaled_dot_product_attention[s -> cp, t -> cp]"

# By mesh, layouts of grouped causal attention.
LAYOUTS = {
    "cp=2": (f"fold seq; seq -> cp; {RING}; * -> none",),
    "cp=4": (
        f"fold seq 4; seq -> cp; {RING}; recompute full @blocks.*; * -> none",
        f"micro 2; fold seq; seq -> cp; {RING}; * -> none",
    ),
    "dp=2,cp=2": (
        "fold seq; batch -> dp; seq -> cp; op @*/folded_attention[a -> dp, s -> cp, t -> cp]; * -> none",
        # A ring over both axes, and one over one of them with a gather over the other.
        "fold seq; seq -> dp*cp; op @*/folded_attention[s -> dp*cp, t -> dp*cp]; * -> none",
        "fold seq; seq -> dp*cp; op @*/folded_attention[s -> dp*cp, t -> dp]; * -> none",
        "fold seq; seq -> dp*cp; op @*/folded_attention[s -> dp*cp, t -> cp]; * -> none",
        f"micro 2; pipeline dp 1f1b; fold seq; seq -> cp; {RING}; * -> none",
    ),
    "cp=2,tp=2": (
        "fold seq; seq -> cp; (heads, kv_heads) -> tp; op @*/folded_attention[s -> cp, t -> cp, h -> tp]; "
        "recompute selective @blocks.*; * -> none",
    ),
}


def steps(mesh: str) -> list[Mapping[str, float]]:
    return [step(mesh, layout) for layout in LAYOUTS[mesh]]


@pytest.mark.parametrize(
    "mesh", ["cp=2", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in LAYOUTS if mesh != "cp=2")]
)
def test_one_step(mesh: str) -> None:
    found = launch(steps, mesh, ranks={"cp=2": 2}.get(mesh, 4))
    for number, layout in enumerate(LAYOUTS[mesh]):
        ranks = [rank[number] for rank in found]
        if "pipeline" in layout:
            ranks = [{**rank, "pairs": 1.0} for rank in ranks]
        check(ranks)


def in_plain_order() -> list[Mapping[str, float]]:
    return [
        step("cp=4", f"seq -> cp; {PLAIN}; recompute full @blocks.*; * -> none"),
        step("cp=4", f"micro 2; seq -> cp; {PLAIN}; * -> none"),
    ]


@pytest.mark.slow
def test_the_plain_order() -> None:
    for rank, found in enumerate(launch(in_plain_order, ranks=4)):
        for one in found:
            assert max(one[name] for name in one if name != "pairs") < 2e-15, found
        # Of 8 rows on each rank: those of the ranks before in full, and a half of the own; two layers.
        assert found[0]["pairs"] == 2 * (64 * rank + 36)


def uneven() -> Mapping[str, float]:
    # 32 rows on three ranks: 11, 11 and 10.
    layout = "seq -> cp pad; param { * -> none }; input { * -> none }; * -> none; "
    return step("cp=3", layout + "op @*/scaled_dot_product_attention[s -> cp pad, t -> cp pad]", outputs="full")


@pytest.mark.slow
def test_uneven_shards() -> None:
    for found in launch(uneven, ranks=3):
        assert max(found[name] for name in found if name != "pairs") < 2e-15, found


# -- other attention ---------------------------------------------------------------------------------------------------


class Encoder(Model):
    """Causal attention, then one without an order: with no mask, with one of some keys, or with one for each row."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        first, block = self.blocks
        x = first(x)
        q, (k, v) = block.q(x), block.kv(x).chunk(2, -1)
        q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (q, k, v))
        mask = None
        if self.kind == "padding":
            mask = (ids > 8)[:, None, None]
        elif self.kind == "prefixes":
            document = (ids > VOCAB - 8).cumsum(1)
            mask = (document[:, None] <= document[..., None])[:, None]
        elif self.kind == "bias":
            mask = torch.arange(ids.shape[1], dtype=x.dtype).cos()[:, None] * ids[:, None, None] / VOCAB
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        logits = self.head(block.norm(x + mixed.transpose(1, 2).flatten(2)))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


KINDS = ("", "padding", "prefixes", "bias")
FOLDED = PLAIN.replace("s -> cp, t", "s.1 -> cp, t.1")
MASKED = (f"seq -> cp; {PLAIN}; * -> none", f"fold seq 4; seq -> cp; {FOLDED}; * -> none")


def masked() -> Mapping[str, float]:
    found = {}
    for kind in KINDS:
        for layout in MASKED:
            torch.manual_seed(0)
            model = Encoder(kind).double()
            given = inputs()
            parallel: Any = autopar.parallelize(copy.deepcopy(model), "cp=4", given, layout=layout)
            results = parallel(**given)
            results[0].backward()
            expected = model(**given)
            expected[0].backward()
            apart = [difference(one, other) for one, other in zip(expected, results, strict=True)]
            for name, one in model.named_parameters():
                if one.grad is not None:
                    apart.append(difference(one.grad, parallel.get_parameter(name).grad))
            found[f"{kind}: {layout}"] = max(apart)
    return found


@pytest.mark.slow
def test_without_an_order_and_with_masks() -> None:
    for found in launch(masked, ranks=4):
        assert max(found.values()) < 1e-14, found


# -- models of transformers --------------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    """Model with a loss in the dtype of its logits, and norms in that of their inputs; transformers take float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        for parent in model.modules():
            for name, child in parent.named_children():
                if type(child).__name__.endswith("RMSNorm"):
                    norm = nn.RMSNorm(child.weight.shape[0], eps=1e-6)
                    # Gemma adds one to its weights.
                    norm.weight.data = child.weight.data + float("Gemma" in type(child).__name__)
                    setattr(parent, name, norm)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(input_ids=input_ids).logits
        following = functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten()), logits


def ways(cp: int) -> tuple[str, ...]:
    """Return a ring, a gather, and a split of heads."""
    heads = "h -> cp" if cp == 2 else "h -> cp, g -> tp"
    mesh = "cp" if cp == 2 else "cp*tp"
    return tuple(
        f"fold seq; seq -> {mesh}; op @*/folded_attention[{pin}]; * -> none"
        for pin in (f"s -> {mesh}, t -> {mesh}", f"s -> {mesh}", heads)
    )


MODELS: tuple[Callable[[], nn.Module], ...] = (models.llama, models.gpt2, models.gemma2)


def steps_of(number: int, ranks: int) -> list[tuple[float, float]]:
    """Return the largest difference from one process in each way, and the pairs of this rank."""
    torch.manual_seed(0)
    model = WithLoss(MODELS[number]()).double()
    ids = torch.randint(0, VOCAB, (2, 32))
    given = {"input_ids": ids, "labels": ids}
    expected = model(**given)
    expected[0].backward()
    found = []
    layouts = ways(ranks)
    if MODELS[number] is models.gpt2:  # its heads are not grouped
        layouts = tuple(one.replace("h -> cp, g -> tp", "h -> cp*tp") for one in layouts)
    for layout in layouts:
        mesh = "cp=2" if ranks == 2 else "cp=2,tp=2"
        parallel: Any = autopar.parallelize(copy.deepcopy(model), mesh, given, layout=layout)
        with Pairs() as pairs:
            results = parallel(**given)
        results[0].backward()
        apart = [difference(one, other) for one, other in zip(expected, results, strict=True)]
        apart += [difference(one.grad, parallel.get_parameter(name).grad) for name, one in model.named_parameters()]
        found.append((max(apart), pairs.count))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("number", range(len(MODELS)), ids=[make.__name__ for make in MODELS])
def test_models_in_each_way(number: int, ranks: int) -> None:
    found = launch(steps_of, number, ranks, ranks=ranks)
    for way in range(3):
        assert max(rank[way][0] for rank in found) < 1e-10, way
        pairs = [rank[way][1] for rank in found]
        if MODELS[number] is not models.gemma2:  # the first rows of a window see less than all others
            assert max(pairs) <= 1.02 * sum(pairs) / len(pairs), (way, pairs)


# -- compiled, half precision ------------------------------------------------------------------------------------------


def half() -> Mapping[str, float]:
    return step("cp=2", LAYOUTS["cp=2"][0], dtype=torch.bfloat16)


@pytest.mark.slow
def test_half_precision() -> None:
    check(launch(half, ranks=2), 0.1)
