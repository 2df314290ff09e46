"""A transformer with mixture-of-experts layers as in GShard: top-2 routing with a capacity, by dense einsums.

Every token goes to its two best experts. An expert takes at most `capacity` tokens of each sequence; what comes
later is dropped (the residual carries it on). `dispatch` and `combine` are dense tensors
[batch, seq, expert, capacity], so every shape is static and `expert -> ep` turns the two einsums into all-to-alls.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Router(nn.Module):
    """For each token its two experts, a place in each one's queue, and the weights of their answers."""

    def __init__(self, d_model: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.experts = experts
        self.capacity = capacity
        self.gate = nn.Linear(d_model, experts, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights [batch, seq, expert, capacity] (zero where nothing is sent), and the balancing loss."""
        gates = self.gate(x).softmax(dim=-1)
        _, choice = gates.topk(2, dim=-1)
        first, second = (functional.one_hot(choice[..., i], self.experts).to(gates.dtype) for i in range(2))
        # The places of the second choices come after those of all first choices of the sequence.
        first_place = first.cumsum(dim=1) - 1
        second_place = second.cumsum(dim=1) - 1 + first.sum(dim=1, keepdim=True)
        weights = self.queue(gates * first, first_place) + self.queue(gates * second, second_place)
        weights = weights / weights.sum(dim=(2, 3), keepdim=True).clamp(min=1e-9)
        balance = (gates.mean(dim=1) * first.mean(dim=1)).sum(dim=-1).mean() * self.experts
        return weights, balance

    def queue(self, weight: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Spread `weight` [batch, seq, expert] over the places of each expert's queue; late comers get zero."""
        places = torch.arange(self.capacity, device=place.device, dtype=place.dtype)
        return weight.unsqueeze(-1) * (place.unsqueeze(-1) == places).to(weight.dtype)


class Experts(nn.Module):
    def __init__(self, d_model: int, d_ff: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.router = Router(d_model, experts, capacity)
        self.up = nn.Parameter(torch.randn(experts, d_model, d_ff) * d_model**-0.5)
        self.down = nn.Parameter(torch.randn(experts, d_ff, d_model) * d_ff**-0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        combine, balance = self.router(x)
        dispatch = (combine > 0).to(x.dtype)
        queued = torch.einsum("bsec,bsm->ebcm", dispatch, x)
        hidden = functional.relu(torch.einsum("ebcm,emh->ebch", queued, self.up))
        answers = torch.einsum("ebch,ehm->ebcm", hidden, self.down)
        return torch.einsum("bsec,ebcm->bsm", combine, answers), balance


class Block(nn.Module):
    def __init__(self, d_model: int, heads: int, d_ff: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(d_model)
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.experts_norm = nn.LayerNorm(d_model)
        self.experts = Experts(d_model, d_ff, experts, capacity)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.attention_norm(x)
        q, k, v = (
            linear(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        answers, balance = self.experts(self.experts_norm(x))
        return x + answers, balance


class MoE(nn.Module):
    def __init__(
        self, layers: int, d_model: int, heads: int, d_ff: int, experts: int, capacity: int, vocab: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, d_model)
        self.blocks = nn.ModuleList(Block(d_model, heads, d_ff, experts, capacity) for _ in range(layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        logits = self.head(self.norm(x))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss + 0.01 * torch.stack(balances).mean()


def moe(
    layers: int = 2,
    d_model: int = 48,
    heads: int = 4,
    d_ff: int = 80,
    experts: int = 8,
    capacity_factor: float = 2.0,
    vocab: int = 101,
    seq: int = 20,
    batch: int = 6,
    device: str = "cpu",
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and its inputs. With a `capacity_factor` of 2 an expert has room for its even share of tokens."""
    with torch.device(device):
        model = MoE(layers, d_model, heads, d_ff, experts, max(1, round(capacity_factor * seq / experts)), vocab)
        ids, targets = torch.randint(vocab, (batch, seq)), torch.randint(vocab, (batch, seq))
    return model, {"ids": ids, "targets": targets}
