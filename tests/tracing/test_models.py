"""Models of many kinds, written by hand: every op has a rule of the table, the graph does what the model does, and
the standard names are found."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from tests.equivalence import assert_equivalent


class Model(nn.Module):
    """Layers by name and a forward that uses them."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.3)


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def transformer() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.Transformer(24, 4, 1, 1, 40, batch_first=True), (torch.randn(3, 7, 24), torch.randn(3, 5, 24))


def encoder_of_rows() -> tuple[nn.Module, tuple[Tensor, ...]]:
    layer = nn.TransformerEncoderLayer(24, 4, 40, activation="gelu", norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (torch.randn(7, 3, 24),)


def attention_without_a_stream() -> tuple[nn.Module, tuple[Tensor, ...]]:
    attention = nn.MultiheadAttention(24, 4, batch_first=True)
    return Model(lambda m, x: m.attention(x, x, x)[0], attention=attention), (torch.randn(3, 7, 24),)


def attention_by_einsum() -> tuple[nn.Module, tuple[Tensor, ...]]:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,dhe->bthe", x, w) for w in (m.q, m.k, m.v))
        scores = torch.einsum("bshe,bthe->bhst", q, k).softmax(-1)
        return x + torch.einsum("bhst,bthe,hed->bsd", scores, v, m.o)

    layers = {name: weight(24, 4, 6) for name in "qkv"}
    return Model(forward, **layers, o=weight(4, 6, 24)), (torch.randn(3, 7, 24),)


def attention_of_merged_heads() -> tuple[nn.Module, tuple[Tensor, ...]]:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, 4).reshape(12, 7, 6) for part in m.qkv(x).chunk(3, -1))
        scores = torch.baddbmm(x.new_zeros(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=0.4).softmax(-1)
        return x + m.o((scores @ v).view(3, 4, 7, 6).transpose(1, 2).reshape(3, 7, 24))

    return Model(forward, qkv=nn.Linear(24, 72), o=nn.Linear(24, 24)), (torch.randn(3, 7, 24),)


def one_head_of_keys() -> tuple[nn.Module, tuple[Tensor, ...]]:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = split_heads(m.q(x), 4), split_heads(m.k(x), 1), split_heads(m.v(x), 1)
        return x + m.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    layers = {"q": nn.Linear(24, 24), "k": nn.Linear(24, 6), "v": nn.Linear(24, 6), "o": nn.Linear(24, 24)}
    return Model(forward, **layers), (torch.randn(3, 7, 24),)


def grouped_queries() -> tuple[nn.Module, tuple[Tensor, ...]]:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.q(x).view(3, 7, 2, 2, 6), m.k(x).view(3, 7, 2, 6), m.v(x).view(3, 7, 2, 6)
        scores = torch.einsum("btkgd,bskd->bkgts", q, k).softmax(-1)
        return x + m.o(torch.einsum("bkgts,bskd->btkgd", scores, v).reshape(3, 7, 24))

    layers = {"q": nn.Linear(24, 24), "k": nn.Linear(24, 12), "v": nn.Linear(24, 12), "o": nn.Linear(24, 24)}
    return Model(forward, **layers), (torch.randn(3, 7, 24),)


def rotation_by_complex_numbers() -> tuple[nn.Module, tuple[Tensor, ...]]:
    def forward(m: Any, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(7), 0.1 ** torch.arange(3)).to(x.dtype)
        turn = torch.polar(torch.ones_like(angles), angles)

        def rotated(y: Tensor) -> Tensor:
            return torch.view_as_real(torch.view_as_complex(y.reshape(3, 4, 7, 3, 2)) * turn).flatten(3)

        q, k, v = (split_heads(layer(x), 4) for layer in (m.q, m.k, m.v))
        mixed = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return x + m.o(mixed.transpose(1, 2).flatten(2))

    return Model(forward, **{name: nn.Linear(24, 24, bias=False) for name in "qkvo"}), (torch.randn(3, 7, 24),)


def experts_picked_by_token() -> tuple[nn.Module, tuple[Tensor, ...]]:
    def forward(m: Any, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        share, chosen = m.router(tokens).softmax(-1).topk(2, -1)
        hidden = torch.einsum("nd,nkdf->nkf", tokens, m.up[chosen]).relu()
        return x + torch.einsum("nkf,nkfd,nk->nd", hidden, m.down[chosen], share).view_as(x)

    return Model(forward, router=nn.Linear(24, 5), up=weight(5, 24, 40), down=weight(5, 40, 24)), (
        torch.randn(3, 7, 24),
    )


def experts_in_a_list() -> tuple[nn.Module, tuple[Tensor, ...]]:
    def forward(m: Any, x: Tensor) -> Tensor:
        share, chosen = m.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(m.experts):
            out = out + expert(x) * ((chosen == number) * share).sum(-1, keepdim=True)
        return x + out

    experts = nn.ModuleList(nn.Sequential(nn.Linear(24, 40), nn.SiLU(), nn.Linear(40, 24)) for _ in range(4))
    return Model(forward, router=nn.Linear(24, 4), experts=experts), (torch.randn(3, 7, 24),)


def state_space() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """What is added to the scan looks like a residual stream, but the scan multiplies it too."""

    def forward(m: Any, x: Tensor) -> Tensor:
        inner, gate = m.up(m.norm(x)).chunk(2, -1)
        inner = functional.silu(m.conv(inner.transpose(1, 2))[..., :4].transpose(1, 2))
        step, write, read = m.selection(inner).split([3, 5, 5], -1)
        step = functional.softplus(m.step(step))
        decay = torch.exp(step[..., None] * -m.decay.exp())
        added = (step * inner)[..., None] * write[:, :, None]
        state, out = torch.zeros_like(added[:, 0]), []
        for t in range(4):
            state = decay[:, t] * state + added[:, t]
            out.append((state * read[:, t, None]).sum(-1))
        return x + m.down((torch.stack(out, 1) + inner * m.skip) * functional.silu(gate))

    return Model(
        forward,
        norm=nn.LayerNorm(24),
        up=nn.Linear(24, 80),
        conv=nn.Conv1d(40, 40, 3, padding=2, groups=40),
        selection=nn.Linear(40, 13),
        step=nn.Linear(3, 40),
        down=nn.Linear(40, 24),
        decay=weight(40, 5),
        skip=weight(40),
    ), (torch.randn(3, 4, 24),)


def mixer() -> tuple[nn.Module, tuple[Tensor, ...]]:
    def forward(m: Any, image: Tensor) -> Tensor:
        x = m.patches(image).flatten(2).mT
        x = x + m.tokens(m.first(x).mT).mT
        return m.head((x + m.features(m.second(x))).mean(1))

    return Model(
        forward,
        patches=nn.Conv2d(3, 24, 4, 4),
        first=nn.LayerNorm(24),
        tokens=nn.Sequential(nn.Linear(12, 14), nn.GELU(), nn.Linear(14, 12)),
        second=nn.LayerNorm(24),
        features=nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24)),
        head=nn.Linear(24, 10),
    ), (torch.randn(2, 3, 12, 16),)


def u_net() -> tuple[nn.Module, tuple[Tensor, ...]]:
    def forward(m: Any, image: Tensor) -> Tensor:
        wide = m.norm(m.down(image)).relu()
        narrow = m.deep(functional.max_pool2d(wide, 2)).relu()
        joined = torch.cat([m.up(narrow), wide], 1)
        return m.out(joined) + functional.interpolate(narrow, scale_factor=2).mean(1, keepdim=True)

    return Model(
        forward,
        down=nn.Conv2d(3, 8, 3, padding=1),
        norm=nn.GroupNorm(2, 8),
        deep=nn.Conv2d(8, 12, 3, padding=1),
        up=nn.ConvTranspose2d(12, 8, 2, stride=2),
        out=nn.Conv2d(16, 4, 3, padding=1),
    ), (torch.randn(2, 3, 8, 12),)


def recommendation() -> tuple[nn.Module, tuple[Tensor, ...]]:
    def forward(m: Any, numbers: Tensor, ids: Tensor) -> Tensor:
        parts = torch.stack([m.bottom(numbers), *(table(part) for table, part in zip(m.tables, ids, strict=True))], 1)
        rows, columns = torch.tril_indices(3, 3, -1)
        return m.top(torch.cat([parts[:, 0], (parts @ parts.mT)[:, rows, columns]], 1))

    tables = nn.ModuleList(nn.EmbeddingBag(size, 8, mode="sum") for size in (30, 40))
    bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
    inputs = torch.randn(5, 6), torch.randint(0, 30, (2, 5, 3))
    return Model(forward, bottom=bottom, tables=tables, top=nn.Linear(11, 1)), inputs


def bags_of_one_length() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Given as rows, or flat with where each begins; weighted; means, and the largest of equal ones."""

    def forward(m: Any, ids: Tensor, weights: Tensor) -> Tensor:
        begins = torch.arange(0, ids.numel(), ids.shape[1])
        most = m.most(torch.cat([ids, ids], 1))
        return m.head(m.sums(ids, per_sample_weights=weights) + m.means(ids.flatten(), begins)) + most

    bags = {
        name: nn.EmbeddingBag(30, 8, mode=mode) for name, mode in (("sums", "sum"), ("means", "mean"), ("most", "max"))
    }
    inputs = torch.randint(0, 30, (5, 3)), torch.randn(5, 3)
    return Model(forward, **bags, head=nn.Linear(8, 8)), inputs


def bags_of_any_length() -> tuple[nn.Module, tuple[Tensor, ...]]:
    def forward(m: Any, ids: Tensor, begins: Tensor, weights: Tensor) -> Tensor:
        return m.sums(ids, begins, weights) + m.means(ids, begins) + m.most(ids, begins)

    modes = {"sums": "sum", "means": "mean", "most": "max"}
    bags = {name: nn.EmbeddingBag(30, 8, mode=mode) for name, mode in modes.items()}
    return Model(forward, **bags), (torch.randint(0, 30, (9,)), torch.tensor([0, 2, 2, 7]), torch.randn(9))


def adapters() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Low-rank additions to layers, as in fine-tuning."""

    def adapted(m: Any, name: str, x: Tensor) -> Tensor:
        return (
            getattr(m, name)(x)
            + functional.dropout(x, 0.1, m.training) @ getattr(m, f"{name}_a").T @ getattr(m, f"{name}_b").T
        )

    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, 4) for part in adapted(m, "qkv", x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = x + adapted(m, "out", mixed.transpose(1, 2).flatten(2))
        return x + adapted(m, "down", adapted(m, "up", x).relu())

    layers = {"qkv": (24, 72), "out": (24, 24), "up": (24, 40), "down": (40, 24)}
    low = {f"{name}_a": weight(3, size[0]) for name, size in layers.items()}
    low |= {f"{name}_b": weight(size[1], 3) for name, size in layers.items()}
    return Model(forward, **{name: nn.Linear(*size) for name, size in layers.items()}, **low), (torch.randn(3, 7, 24),)


def edges_of_a_graph() -> tuple[nn.Module, tuple[Tensor, ...]]:
    def forward(m: Any, nodes: Tensor, edges: Tensor) -> Tensor:
        hidden = m.first(nodes).relu()
        return m.second(torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]]))

    inputs = torch.randn(9, 6), torch.randint(0, 9, (2, 14))
    return Model(forward, first=nn.Linear(6, 12), second=nn.Linear(12, 3)), inputs


def causal_encoder() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """`nn.TransformerEncoder` asks whether the mask is a causal one."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.encoder(x, mask=torch.triu(torch.full((7, 7), float("-inf"), dtype=x.dtype), 1))

    layer = nn.TransformerEncoderLayer(24, 4, 40, batch_first=True)
    return Model(forward, encoder=nn.TransformerEncoder(layer, 1)), (torch.randn(3, 7, 24),)


def messages() -> tuple[nn.Module, tuple[Tensor, ...]]:
    def forward(m: Any, nodes: Tensor, edges: Tensor) -> Tensor:
        sums = torch.zeros(9, 12, dtype=nodes.dtype).index_add(0, edges[1], m.first(nodes)[edges[0]])
        count = torch.zeros(9, dtype=nodes.dtype).scatter_add(0, edges[1], torch.ones(20, dtype=nodes.dtype))
        return m.second((sums / count.clamp(min=1)[:, None]).relu())

    layers = {"first": nn.Linear(6, 12), "second": nn.Linear(12, 3)}
    return Model(forward, **layers), (torch.randn(9, 6), torch.randint(0, 9, (2, 20)))


def variational() -> tuple[nn.Module, tuple[Tensor, ...]]:
    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = m.encoder(x).chunk(2, -1)
        rebuilt = m.decoder(torch.distributions.Normal(mean, spread.exp(), validate_args=False).rsample())
        return functional.mse_loss(rebuilt, x) + (mean**2 + spread.exp() - spread).mean(), rebuilt

    return Model(forward, encoder=nn.Linear(12, 8), decoder=nn.Linear(4, 12)), (torch.randn(5, 12),)


def losses() -> tuple[nn.Module, tuple[Tensor, ...]]:
    def forward(m: Any, x: Tensor, target: Tensor) -> Tensor:
        logits = m.head(x)
        numbers = functional.one_hot(target.clamp(min=0), 5).to(x.dtype)
        return (
            functional.cross_entropy(logits, target, ignore_index=-1, label_smoothing=0.1)
            + functional.nll_loss(logits.log_softmax(-1), target, ignore_index=-1)
            + functional.binary_cross_entropy_with_logits(logits, numbers)
            + functional.smooth_l1_loss(logits, numbers)
            + functional.kl_div(logits.log_softmax(-1), numbers, reduction="batchmean")
        )

    return Model(forward, head=nn.Linear(12, 5)), (torch.randn(6, 12), torch.tensor([0, 4, -1, 2, -1, 3]))


def recurrent() -> tuple[nn.Module, tuple[Tensor, ...]]:
    def forward(m: Any, ids: Tensor) -> Tensor:
        return m.head(m.backward_and_forward(m.table(ids))[0])

    rnn = nn.LSTM(12, 10, 2, batch_first=True, bidirectional=True)
    return Model(forward, table=nn.Embedding(50, 12), backward_and_forward=rnn, head=nn.Linear(20, 50)), (
        torch.randint(0, 50, (3, 7)),
    )


STREAM = "batch seq d_model"
HEADS = "(heads head_dim) d_model"

MODELS: dict[Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], dict[str, str]] = {
    transformer: {
        "src": STREAM,
        "encoder.layers.0.linear1.weight": "d_ff d_model",
        "decoder.layers.0.multihead_attn.out_proj.weight": "d_model (heads head_dim)",
    },
    encoder_of_rows: {"src": "seq batch d_model", "layers.1.self_attn.out_proj.weight": "d_model (heads head_dim)"},
    attention_without_a_stream: {"inputs.0": STREAM, "attention.out_proj.weight": "d_model (heads head_dim)"},
    attention_by_einsum: {"inputs.0": STREAM, "q": "d_model heads head_dim", "o": "heads head_dim d_model"},
    attention_of_merged_heads: {"inputs.0": STREAM, "o.weight": "d_model (heads head_dim)"},
    one_head_of_keys: {"q.weight": HEADS, "k.weight": "head_dim d_model", "inputs.0": STREAM},
    grouped_queries: {"q.weight": "(kv_heads group head_dim) d_model", "k.weight": "(kv_heads head_dim) d_model"},
    rotation_by_complex_numbers: {"q.weight": HEADS, "v.weight": HEADS, "inputs.0": STREAM},
    experts_picked_by_token: {
        "router.weight": "expert d_model",
        "up": "expert d_model d_ff",
        "down": "expert d_ff d_model",
        "inputs.0": STREAM,
    },
    experts_in_a_list: {"router.weight": "expert d_model", "experts.3.0.weight": "d_ff d_model"},
    state_space: {"down.weight": "d_model d_ff", "conv.weight": "d_ff 1 kernel", "skip": "d_ff", "inputs.0": STREAM},
    mixer: {
        "inputs.0": "batch channels height width",
        "tokens.0.weight": "d_ff (height width)",
        "features.0.weight": "d_ff d_model",
    },
    u_net: {"inputs.0": "batch channels height width", "down.weight": "channels.1 channels kernel_height kernel_width"},
    recommendation: {"tables.0.weight": "types d1", "tables.1.weight": "vocab d1"},
    bags_of_one_length: {"sums.weight": "vocab d0", "inputs.0": "batch seq", "inputs.1": "batch seq"},
    bags_of_any_length: {"sums.weight": "vocab d0"},
    adapters: {
        "qkv_a": "low_rank d_model",
        "qkv_b": "(d0 (heads head_dim)) low_rank",
        "out_a": "low_rank (heads head_dim)",
        "up_a": "low_rank d_model",
        "up_b": "d_ff low_rank",
        "down_a": "low_rank d_ff",
        "down_b": "d_model low_rank",
        "up.weight": "d_ff d_model",
    },
    edges_of_a_graph: {"inputs.0": "batch d0"},
    causal_encoder: {"inputs.0": STREAM, "encoder.layers.0.linear1.weight": "d_ff d_model"},
    messages: {"first.weight": "d_ff d0", "second.weight": "d1 d_ff"},
    variational: {},
    losses: {},
    recurrent: {"inputs.0": "batch seq", "table.weight": "vocab d0"},
}


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_every_op_has_a_rule_and_the_graph_does_what_the_model_does(
    build: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], mode: str
) -> None:
    torch.manual_seed(0)
    model, inputs = build()
    model.train(mode == "train")
    graph = autopar.trace(model, inputs)
    assert [(node.name, node.reason) for node in graph.nodes if node.source != "table"] == []
    for name, dims in MODELS[build].items():
        assert " ".join(graph.tensors[name].dims) == dims, name
    assert_equivalent(model, inputs)


def test_a_recurrent_layer_gives_no_warning() -> None:
    """That a layer keeps its parameters in a list of its own is no news."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        graph = autopar.trace(*recurrent())
    assert [str(one.message) for one in told] == []
    assert graph.nodes
