"""Small random models of common ops, and random layouts for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Program", "random_layout"]

BATCH, SEQ, WIDTHS, HEADS = 12, 6, (12, 24), 6


@dataclass(frozen=True)
class Instruction:
    """One op: what it is, which values it takes, and the width it gives."""

    op: str
    takes: tuple[int, ...]
    width: int


class Program(nn.Module):
    """A straight line of random ops on values `[batch seq width]`; gives a tensor and a scalar."""

    def __init__(self, seed: int, length: int = 5) -> None:
        super().__init__()
        draw = random.Random(seed)
        widths = [draw.choice(WIDTHS)]
        self.first = widths[0]
        self.instructions: list[Instruction] = []
        self.layers = nn.ModuleDict()
        for i in range(length):
            instruction = self._draw(draw, widths)
            self.instructions.append(instruction)
            widths.append(instruction.width)
            taken = widths[instruction.takes[0]]
            if instruction.op in ("linear", "linear_without_bias"):
                bias = instruction.op == "linear"
                self.layers[str(i)] = nn.Linear(taken, instruction.width, bias=bias, dtype=torch.float64)
            elif instruction.op == "layer_norm":
                self.layers[str(i)] = nn.LayerNorm(taken, dtype=torch.float64)
        self.scale = nn.Parameter(torch.randn(widths[0], dtype=torch.float64))
        self.end = draw.choice(("mean", "sum", "square"))
        self.embedding = nn.Embedding(24, widths[0], dtype=torch.float64) if draw.random() < 0.4 else None

    def _draw(self, draw: random.Random, widths: list[int]) -> Instruction:
        last = len(widths) - 1
        op = draw.choice(("linear", "linear", "linear_without_bias", *UNARY, *BINARY, "layer_norm"))
        if op.startswith("linear"):
            return Instruction(op, (last,), draw.choice(WIDTHS))
        if op in BINARY:
            others = [i for i, width in enumerate(widths) if width == widths[last]]
            return Instruction(op, (last, draw.choice(others)), widths[last])
        return Instruction(op, (last,), widths[last])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values = [self.scale * (x if self.embedding is None else self.embedding(x))]
        for i, instruction in enumerate(self.instructions):
            taken = [values[j] for j in instruction.takes]
            if str(i) in self.layers:
                values.append(self.layers[str(i)](taken[0]))
            elif instruction.op in UNARY:
                values.append(UNARY[instruction.op](taken[0]))
            else:
                values.append(BINARY[instruction.op](*taken))
        out = values[-1]
        ends = {"mean": out.mean, "sum": out.sum, "square": lambda: out.square().sum()}
        return out, ends[self.end]()

    def example(self) -> Tensor:
        if self.embedding is not None:
            return torch.randint(24, (BATCH, SEQ))
        return torch.randn(BATCH, SEQ, self.first, dtype=torch.float64)

    @property
    def dims(self) -> dict[str, str]:
        return {"x": "batch seq" if self.embedding is not None else "batch seq d_model"}

    def __str__(self) -> str:
        listed = "; ".join(f"{one.op}{one.takes} -> {one.width}" for one in self.instructions)
        return f"{'embedding; ' if self.embedding is not None else ''}{listed}; {self.end}"


def heads(x: Tensor) -> Tensor:
    """Values apart by heads, something across the sequence, and together again."""
    batch, seq, width = x.shape
    apart = x.view(batch, seq, HEADS, width // HEADS).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(apart, apart, apart, is_causal=True)
    return mixed.transpose(1, 2).reshape(batch, seq, width)


def scores(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.transpose(1, 2) / 8, dim=-1) @ x


UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "tanh": torch.tanh,
    "double": lambda x: x * 2 + 1,
    "softmax": lambda x: torch.softmax(x, dim=-1),
    "softmax_seq": lambda x: torch.softmax(x, dim=1),
    "center": lambda x: x - x.mean(dim=1, keepdim=True),
    "center_width": lambda x: x - x.mean(dim=-1, keepdim=True),
    "sum_batch": lambda x: x + x.sum(dim=0),
    "swap": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "flat": lambda x: x.flatten(0, 1).sigmoid().view(x.shape),
    "halves": lambda x: torch.cat([x.chunk(2, dim=-1)[1], x.chunk(2, dim=-1)[0]], dim=-1),
    "heads": heads,
    "scores": scores,
}

BINARY: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "gate": lambda x, y: x * torch.sigmoid(y),
}


def random_layout(draw: random.Random, dims: Iterable[str], axes: Iterable[str]) -> str:
    """A layout for these dims: each split somewhere or not, in some roles otherwise."""
    dims, axes = list(dims), list(axes)
    places = [*axes, *axes, "none", "*".join(axes), "*".join(reversed(axes))]

    def rule(dim: str) -> str:
        place = draw.choice(places)
        priority = draw.randrange(5)
        return f"{dim} -> none" if place == "none" else f"{dim} -> {place} | none !{priority}"

    lines = [rule(dim) for dim in dims if draw.random() < 0.7]
    if draw.random() < 0.5:
        lines.append("* -> none")
    for kind in ("act", "use", "input", "output"):
        if draw.random() < 0.25:
            lines.append(f"{kind} {{ {rule(draw.choice(dims))} }}")
    if draw.random() < 0.4:
        kinds = draw.choice(("param", "param, grad, opt", "opt"))
        lines.append(f"{kinds} {{ * -> {draw.choice(places[:-2])} | none }}".replace("none | none", "none"))
    return "; ".join(lines) or "* -> none"
