"""Small random models of common ops, and random layouts for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.ir.graph import NamedGraph

__all__ = ["Picture", "Program", "program_of", "random_layout", "random_text"]

HEADS, CLASSES = 6, 24


@dataclass(frozen=True)
class Sizes:
    """The extents of a program's dims."""

    batch: int = 12
    seq: int = 6
    widths: tuple[int, ...] = (12, 24)


ODD = (Sizes(5, 7, (12, 18)), Sizes(3, 5, (6, 18)), Sizes(7, 6, (6, 12)), Sizes(12, 8, (12, 24)))


@dataclass(frozen=True)
class Instruction:
    """One op: what it is, which values it takes, and the width it gives."""

    op: str
    takes: tuple[int, ...]
    width: int


class Program(nn.Module):
    """A straight line of random ops on values `[batch seq width]`; gives a tensor and a scalar."""

    def __init__(self, seed: int, length: int = 5, sizes: Sizes | None = None) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.sizes = sizes or Sizes()
        widths = [draw.choice(self.sizes.widths)]
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
            elif instruction.op in NORMS:
                self.layers[str(i)] = NORMS[instruction.op](taken, dtype=torch.float64)
        self.scale = nn.Parameter(torch.randn(widths[0], dtype=torch.float64))
        self.end = draw.choice(tuple(ENDS))
        self.embedding = nn.Embedding(CLASSES, widths[0], dtype=torch.float64) if draw.random() < 0.4 else None
        self.head = nn.Linear(widths[-1], CLASSES - 1, dtype=torch.float64) if self.end.startswith("class") else None

    def _draw(self, draw: random.Random, widths: list[int]) -> Instruction:
        last = len(widths) - 1
        op = draw.choice(("linear", "linear", "linear_without_bias", *UNARY, *BINARY, *NORMS))
        if op.startswith("linear"):
            return Instruction(op, (last,), draw.choice(self.sizes.widths))
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
        return out, ENDS[self.end](out if self.head is None else self.head(out))

    def example(self) -> Tensor:
        if self.embedding is not None:
            return torch.randint(CLASSES, (self.sizes.batch, self.sizes.seq))
        return torch.randn(self.sizes.batch, self.sizes.seq, self.first, dtype=torch.float64)

    @property
    def dims(self) -> dict[str, str]:
        return {"x": "batch seq" if self.embedding is not None else "batch seq d_model"}

    def __str__(self) -> str:
        listed = "; ".join(f"{one.op}{one.takes} -> {one.width}" for one in self.instructions)
        return f"{self.sizes}: {'embedding; ' if self.embedding is not None else ''}{listed}; {self.end}"


class Picture(nn.Module):
    """A straight line of random ops on pictures; gives a tensor and a scalar."""

    def __init__(self, seed: int, length: int = 4) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.shape = (draw.choice((2, 3)), draw.choice((3, 4)), draw.choice((8, 11, 13)), draw.choice((7, 8, 10)))
        self.dims = {"x": "batch channels height width"}
        channels = self.shape[1]
        self.layers = nn.ModuleList()
        for _ in range(length):
            layer, channels = self._draw(draw, channels)
            self.layers.append(layer)
        self.double()

    def _draw(self, draw: random.Random, channels: int) -> tuple[nn.Module, int]:
        kind = draw.choice(("conv", "conv", "max", "mean", "norm", "group", "act"))
        if kind == "conv":
            made, kernel, groups = draw.choice((4, 6)), draw.choice((1, 3, 5)), 2 if channels % 2 == 0 else 1
            stride, bias, groups = draw.choice((1, 1, 2)), draw.random() < 0.5, draw.choice((1, groups))
            return nn.Conv2d(channels, made, kernel, stride, kernel // 2, groups=groups, bias=bias), made
        if kind == "norm":
            return nn.BatchNorm2d(channels).train(draw.random() < 0.7), channels
        if kind == "group":
            return nn.GroupNorm(1 if channels % 2 else 2, channels), channels
        layers = {"max": nn.MaxPool2d(3, draw.choice((1, 2)), 1), "act": nn.GELU()}
        layers["mean"] = nn.AvgPool2d(3, draw.choice((1, 2)), 1, count_include_pad=draw.random() < 0.5)
        return layers[kind], channels

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return x, x.square().mean((2, 3)).sum()

    def example(self) -> Tensor:
        return torch.randn(self.shape, dtype=torch.float64)

    def __str__(self) -> str:
        return f"{list(self.shape)}: {'; '.join(map(str, self.layers))}"


def program_of(seed: int) -> Program | Picture:
    """Every fourth is of pictures; most have dims that few meshes divide."""
    return Picture(seed) if seed % 4 == 3 else Program(seed, sizes=ODD[seed % len(ODD) - 1])


def heads(x: Tensor, masked: bool = False) -> Tensor:
    """Values apart by heads, something across the sequence, and together again."""
    batch, seq, width = x.shape
    apart = x.view(batch, seq, HEADS, width // HEADS).transpose(1, 2)
    mask = torch.arange(seq)[:, None] % 3 <= torch.arange(seq) if masked else None
    mixed = functional.scaled_dot_product_attention(apart, apart, apart, attn_mask=mask, is_causal=not masked)
    return mixed.transpose(1, 2).reshape(batch, seq, width)


def scores(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.transpose(1, 2) / 8, dim=-1) @ x


def standard(x: Tensor) -> Tensor:
    return (x - x.mean(dim=(0, 1))) / (x.std(dim=(0, 1)) + 1)


UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "tanh": torch.tanh,
    "double": lambda x: x * 2 + 1,
    "softmax": lambda x: torch.softmax(x, dim=-1),
    "softmax_seq": lambda x: torch.softmax(x, dim=1),
    "center": lambda x: x - x.mean(dim=1, keepdim=True),
    "center_width": lambda x: x - x.mean(dim=-1, keepdim=True),
    "sum_batch": lambda x: x + x.sum(dim=0),
    "largest": lambda x: x - x.amax(dim=1, keepdim=True),
    "running": lambda x: x.cumsum(dim=1) / 4,
    "lower": lambda x: (x @ x.transpose(1, 2)).tril() @ x / 64,
    "standard": standard,
    "swap": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "flat": lambda x: x.flatten(0, 1).sigmoid().view(x.shape),
    "halves": lambda x: torch.cat([x.chunk(2, dim=-1)[1], x.chunk(2, dim=-1)[0]], dim=-1),
    "spread": lambda x: x.unsqueeze(2).expand(-1, -1, 3, -1).mean(dim=2) * torch.arange(x.shape[1]).view(-1, 1),
    "heads": heads,
    "masked_heads": lambda x: heads(x, masked=True),
    "scores": scores,
}

BINARY: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "gate": lambda x, y: x * torch.sigmoid(y),
}

NORMS: Mapping[str, Callable[..., nn.Module]] = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm}


def classes(x: Tensor, reduction: str) -> Tensor:
    """A loss over classes, one of which does not count."""
    labels = torch.arange(x.shape[0] * x.shape[1]) % (CLASSES - 1)
    return functional.cross_entropy(x.flatten(0, 1), labels, ignore_index=2, reduction=reduction).sum()


ENDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "square": lambda x: x.square().sum(),
    "error": lambda x: functional.mse_loss(x, torch.ones_like(x)),
    "classes": lambda x: classes(x, "mean"),
    "classes summed": lambda x: classes(x, "sum"),
}


# -- layouts ----------------------------------------------------------------------------------------------------------


def random_layout(draw: random.Random, dims: Iterable[str], axes: Iterable[str]) -> str:
    """A layout for these dims: each split somewhere or not, in some roles otherwise."""
    dims, axes = list(dims), list(axes)
    places = [*axes, *axes, "none", "*".join(axes), "*".join(reversed(axes))]
    lines = [_rule(draw, dim, places, pad=False) for dim in dims if draw.random() < 0.7]
    if draw.random() < 0.5:
        lines.append("* -> none")
    lines += _roles(draw, dims, places, pad=False, chances=(0.25, 0.4))
    return "; ".join(lines) or "* -> none"


def _roles(
    draw: random.Random, dims: list[str], places: list[str], pad: bool, chances: tuple[float, float]
) -> Iterator[str]:
    """What values in some roles do otherwise, and how parameters are stored; each with its chance."""
    for kind in ("act", "use", "input", "output"):
        if draw.random() < chances[0]:
            yield f"{kind} {{ {_rule(draw, draw.choice(dims), places, pad)} }}"
    if draw.random() < chances[1]:
        kinds = draw.choice(("param", "param, grad, opt", "opt"))
        yield f"{kinds} {{ * -> {draw.choice(places[:-2])} | none }}".replace("none | none", "none")


def _rule(draw: random.Random, dim: str, places: list[str], pad: bool) -> str:
    place = draw.choice(places)
    priority = draw.randrange(50)  # of two dims that want one axis, one must come first
    uneven = " pad" if pad and draw.random() < 0.7 else ""
    return f"{dim} -> none" if place == "none" else f"{dim} -> {place}{uneven} | none !{priority}"


def random_text(draw: random.Random, graph: NamedGraph, axes: Mapping[str, int]) -> str:
    """A layout of everything: uneven shards, pins of values and ops, sums held back, things left to choose."""
    dims, names = list(graph.dims), list(axes)
    some = draw.sample(names, draw.randint(1, len(names)))
    places = [*names, *names, "none", "*".join(some), "*".join(reversed(some))]
    lines = [_rule(draw, dim, places, pad=True) for dim in dims if draw.random() < 0.7]
    if draw.random() < 0.6:
        lines.append("* -> none")
    lines += _roles(draw, dims, places, pad=True, chances=(0.15, 0.3))
    for _ in range(draw.choice((0, 0, 1, 2, 3))):
        lines.append(_pin(draw, graph, names))
    if draw.random() < 0.3:
        dim, axis = draw.choice(dims), draw.choice(names)
        place = draw.choice((f"{axis}?", f"?{{{axis}, {'*'.join(some)}}}"))
        lines = [line for line in lines if not line.startswith(f"{dim} ")]
        lines.append(f"{dim} -> {place} | none !{draw.randrange(50, 90)}")
    if draw.random() < 0.1:
        lines.append(f"same @{draw.choice(list(graph.tensors))} @{draw.choice(list(graph.tensors))}")
    return "; ".join(lines) or "* -> none"


def _pin(draw: random.Random, graph: NamedGraph, axes: list[str]) -> str:
    """A pin of one op or of one value."""
    chosen = draw.sample(axes, draw.randint(1, len(axes)))
    if draw.random() < 0.4:
        node = draw.choice([node for node in graph.nodes if node.rule.factors])
        factor = draw.choice(list(node.rule.factors))
        return f"op @{node.name}[{factor} -> {'*'.join(chosen)}]"
    tensor = draw.choice([tensor for tensor in graph.tensors.values() if tensor.dtype.is_floating_point])
    states = ["broadcast"] if tensor.kind != "activation" else ["broadcast", "partial", "partial"]
    kept = chosen if len(chosen) == 1 else chosen[:1]
    others = f"* -> {'*'.join(chosen[1:])} pad | none" if chosen[1:] and len(tensor.shape) == 1 else "* -> none"
    return f"@{tensor.name}[{others}] + {draw.choice(states)}({'*'.join(kept)})"
