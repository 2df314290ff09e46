"""Random modules of what users write: views that are changed in place, tied weights, buffers, numbers of every kind.

A module is built by running it: each op is drawn for the values that there are by then, so all shapes are known. What
eager torch cannot run, and what rounding alone changes, is drawn again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from tests.eager import Arguments, Left, eager_step, fresh, largest_difference

__all__ = ["RandomModule", "example_of", "module_of"]

Op = Callable[["RandomModule", list[Tensor]], list[Tensor]]
"""Appends nothing itself: gives the new values."""
SIZES = ((12, 6, 8), (6, 4, 12), (12, 3, 6), (6, 2, 4), (12, 4, 6), (6, 6, 9))
ODD_SIZES = (
    (5, 3, 6),
    (2, 7, 4),
    (3, 4, 9),
    (4, 6, 8),
    (1, 4, 6),
    (4, 1, 8),
    (4, 6, 1),
    (0, 3, 4),
    (4, 0, 6),
    (3, 5, 0),
)
MOST_ELEMENTS = 4000


class Scaled(torch.autograd.Function):
    """Its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * (ctx.factor + 1), None


class Gated(torch.autograd.Function):
    """Two tensors in and two out; it saves both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y.sigmoid(), x + y

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        gate = y.sigmoid()
        return first * gate + second, first * x * gate * (1 - gate) + second


class Clipped(torch.autograd.Function):
    """Straight through: rounds forward, passes the gradient of what is small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 4).tanh() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() < 2, gradient, torch.zeros_like(gradient))


class RandomModule(nn.Module):
    """Ops one after the other on a list of values; gives some of them, in some structure."""

    def __init__(self, seed: int, length: int) -> None:
        super().__init__()
        self.seed = seed
        self.draw = random.Random(seed)
        self.ops: list[tuple[str, Op]] = []
        self.form = ""
        self.given: list[int] = []
        self.example = self._example()
        values = self._values(*fresh(self.example))
        for _ in range(length):
            values = self._add(values)
        self._choose_results(values)
        self.draw = random.Random(seed)  # a module is copied, and nothing is drawn any more

    # -- what it is given -------------------------------------------------------------------------------------------

    def _example(self) -> Arguments:
        draw = self.draw
        generator = torch.Generator().manual_seed(self.seed)
        shape = draw.choice(ODD_SIZES if draw.random() < 0.3 else SIZES)
        self.kind = draw.choice(("x", "x", "x, ids", "x, mask", "pair", "dict", "keywords"))
        dtype = torch.float32 if draw.random() < 0.1 else torch.float64
        x = torch.randn(shape, dtype=dtype, generator=generator).requires_grad_(draw.random() < 0.8)
        self.dtype = dtype
        ids = torch.randint(0, 10, shape[:2], generator=generator)
        if draw.random() < 0.3:
            ids = ids.to(draw.choice((torch.int32, torch.uint8, torch.int16)))
        mask = torch.rand(shape[:2], generator=generator) < 0.6
        y = torch.randn(shape, dtype=dtype, generator=generator).requires_grad_(draw.random() < 0.5)
        return {
            "x": lambda: ((x,), {}),
            "x, ids": lambda: ((x, ids), {}),
            "x, mask": lambda: ((x, mask), {}),
            "pair": lambda: (((x, y),), {}),
            "dict": lambda: (({"x": x, "more": (ids, mask), "scale": 2.0},), {}),
            "keywords": lambda: ((), {"x": x, "y": y, "mask": mask, "flag": True}),
        }[self.kind]()  # type: ignore[no-any-return]

    def _values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        flat: list[Any] = []

        def walk(value: Any) -> None:
            if isinstance(value, dict):
                for name in sorted(value):
                    walk(value[name])
            elif isinstance(value, list | tuple):
                for each in value:
                    walk(each)
            elif isinstance(value, Tensor):
                flat.append(value)

        walk((args, kwargs))
        # Nothing works on an argument itself: what is changed in place is the caller's otherwise.
        return [value * 1 if value.is_floating_point() else value.clone() for value in flat]

    # -- how it is built --------------------------------------------------------------------------------------------

    def _add(self, values: list[Tensor]) -> list[Tensor]:
        for _ in range(20):
            name = self.draw.choice(NAMES)
            try:
                op = OPS[name](Building(self, values))
            except _Unfit:
                continue
            made = op(self, list(values))
            assert all(isinstance(value, Tensor) for value in made), name
            if any(value.numel() > MOST_ELEMENTS for value in made):
                continue
            self.ops.append((name, op))
            return [*values, *made]
        return values

    def _choose_results(self, values: list[Tensor]) -> None:
        draw = self.draw
        floats = [i for i, value in enumerate(values) if value.requires_grad]
        count = draw.choice((1, 1, 2, 3))
        self.given = [draw.choice(floats[-3:] or [len(values) - 1])]
        self.given += [draw.randrange(len(values)) for _ in range(count - 1)]
        self.form = draw.choice(("tensor",) if count == 1 else ("tuple", "list", "dict", "nested"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values = self._values(args, kwargs)
        for _, op in self.ops:
            values.extend(op(self, values))
        found = [values[i] for i in self.given]
        if self.form == "tensor":
            return found[0]
        if self.form == "tuple":
            return tuple(found)
        if self.form == "list":
            return [*found, None]
        if self.form == "dict":
            return {f"result{i}": value for i, value in enumerate(found)}
        return {"all": (found, {"first": found[0]}), "count": len(found)}

    def __str__(self) -> str:
        shapes = [f"{tuple(p.shape)}" for p in self.parameters()]
        listed = "; ".join(name for name, _ in self.ops)
        return f"{self.kind} {self.dtype}: {listed}; gives {self.form} {self.given}; parameters {' '.join(shapes)}"


class _Unfit(Exception):
    """There is no value that an op could be drawn for."""


@dataclass
class Building:
    """What an op is drawn with: the values that there are, and new parameters and buffers."""

    module: RandomModule
    values: list[Tensor]
    draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draw = self.module.draw

    def pick(self, fits: Callable[[Tensor], bool]) -> int:
        """The number of a value, rather a late one."""
        found = [i for i, value in enumerate(self.values) if fits(value)]
        if not found:
            raise _Unfit
        return self.draw.choice(found[-3:] if self.draw.random() < 0.8 else found)

    def floats(self, least: int = 1, most: int = 5) -> int:
        return self.pick(lambda x: x.is_floating_point() and least <= x.ndim <= most)

    def dim(self, i: int) -> int:
        return self.draw.randrange(self.values[i].ndim)

    def parameter(self, *shape: int) -> str:
        name = f"p{len(self.module._parameters)}"
        generator = torch.Generator().manual_seed(self.module.seed * 100 + len(self.module._parameters))
        value = (
            torch.randn(shape, dtype=self.module.dtype, generator=generator) / max(1, shape[-1] if shape else 1) ** 0.5
        )
        self.module.register_parameter(name, nn.Parameter(value, requires_grad=self.draw.random() < 0.9))
        return name

    def buffer(self, value: Tensor) -> str:
        name = f"b{len(self.module._buffers)}"
        self.module.register_buffer(name, value, persistent=self.draw.random() < 0.8)
        return name


# -- ops --------------------------------------------------------------------------------------------------------------

OPS: dict[str, Callable[[Building], Op]] = {}
NAMES: list[str] = []


def op(weight: int = 1) -> Callable[[Callable[[Building], Op]], Callable[[Building], Op]]:
    def registered(build: Callable[[Building], Op]) -> Callable[[Building], Op]:
        OPS[build.__name__] = build
        NAMES.extend([build.__name__] * weight)
        return build

    return registered


UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    functional.gelu, torch.tanh, torch.sigmoid, torch.sin, functional.softplus, torch.neg, functional.silu,
    lambda x: x * 2 + 1, lambda x: x.square() / 4, lambda x: torch.where(x > 0.1, x, 0.2 * x),
    lambda x: x.clamp(-1.5, 1.7), lambda x: torch.exp(-x.abs()), lambda x: torch.log1p(x.abs()),
    lambda x: functional.leaky_relu(x, 0.1), lambda x: 1 / (1 + x.square()), lambda x: x - x.detach() / 2,
)  # fmt: skip
BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.add, torch.mul, torch.sub, torch.maximum, torch.minimum,
    lambda x, y: x * y.sigmoid(), lambda x, y: x / (1 + y.square()), lambda x, y: torch.where(x > y, x, y * 2),
    lambda x, y: torch.lerp(x, y, 0.3), lambda x, y: torch.addcmul(x, y, y, value=0.1),
)  # fmt: skip


@op(4)
def unary(b: Building) -> Op:
    i, function = b.floats(0), b.draw.choice(UNARY)
    return lambda m, v: [function(v[i])]


@op(4)
def binary(b: Building) -> Op:
    i, function = b.floats(), b.draw.choice(BINARY)
    shape = b.values[i].shape
    j = b.pick(lambda x: x.is_floating_point() and x.ndim > 0 and _broadcasts(x.shape, shape))
    return lambda m, v: [function(v[i], v[j])]


def _broadcasts(one: torch.Size, other: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(one, other) == other
    except RuntimeError:
        return False


@op(4)
def linear(b: Building) -> Op:
    i, out, bias = b.floats(2), b.draw.choice((4, 6, 8, 3)), b.draw.random() < 0.5
    weight = b.parameter(out, b.values[i].shape[-1])
    added = b.parameter(out) if bias else None
    return lambda m, v: [functional.linear(v[i], getattr(m, weight), None if added is None else getattr(m, added))]


@op(2)
def tied(b: Building) -> Op:
    """A weight that is used before, as it is or transposed, or under a second name."""
    i = b.floats(2)
    width = b.values[i].shape[-1]
    found = [name for name, p in b.module._parameters.items() if p is not None and p.ndim == 2 and width in p.shape]
    if not found:
        raise _Unfit
    name = b.draw.choice(found)
    if b.draw.random() < 0.4:
        second = f"p{len(b.module._parameters)}"
        b.module.register_parameter(second, b.module._parameters[name])
        name = second
    if getattr(b.module, name).shape[-1] == width:
        return lambda m, v: [functional.linear(v[i], getattr(m, name))]
    return lambda m, v: [v[i] @ getattr(m, name)]


@op(2)
def scaled_by_parameter(b: Building) -> Op:
    i = b.floats()
    shape = b.values[i].shape[b.draw.randrange(b.values[i].ndim) :]
    name = b.parameter(*(size if b.draw.random() < 0.8 else 1 for size in shape))
    return lambda m, v: [v[i] * getattr(m, name) + getattr(m, name).mean()]


@op(2)
def norm(b: Building) -> Op:
    kind = b.draw.choice(("layer", "rms", "group", "softmax"))
    i = b.floats(2)
    x = b.values[i]
    if x.shape[-1] < 2:
        raise _Unfit
    if kind == "softmax":
        dim = b.dim(i)
        return lambda m, v: [v[i].softmax(dim)]
    if kind == "group":
        if x.shape[1] < 2 or x.ndim < 3 or 0 in x.shape:
            raise _Unfit
        scale, groups = b.parameter(x.shape[1]), 2 if x.shape[1] % 2 == 0 else 1
        return lambda m, v: [functional.group_norm(v[i], groups, getattr(m, scale))]
    weight = b.parameter(x.shape[-1])
    if kind == "layer":
        return lambda m, v: [functional.layer_norm(v[i], v[i].shape[-1:], getattr(m, weight), eps=0.1)]
    return lambda m, v: [functional.rms_norm(v[i], v[i].shape[-1:], getattr(m, weight), eps=0.1)]


@op(2)
def batch_norm(b: Building) -> Op:
    """With running statistics, in training or not."""
    i = b.pick(lambda x: x.is_floating_point() and 2 <= x.ndim <= 4 and x.shape[0] > 1 and 0 not in x.shape)
    x = b.values[i]
    mean = b.buffer(torch.zeros(x.shape[1], dtype=x.dtype))
    var = b.buffer(torch.ones(x.shape[1], dtype=x.dtype))
    weight, bias, training = b.parameter(x.shape[1]), b.parameter(x.shape[1]), b.draw.random() < 0.7
    return lambda m, v: [
        functional.batch_norm(
            v[i], getattr(m, mean), getattr(m, var), getattr(m, weight), getattr(m, bias), training, 0.2, 0.1
        )
    ]


@op(2)
def product(b: Building) -> Op:
    i = b.floats(3, 3)
    kind = b.draw.choice(("scores", "einsum", "outer", "bmm"))
    if kind == "einsum":
        name = b.parameter(b.values[i].shape[1], b.values[i].shape[2])
        return lambda m, v: [torch.einsum("bsd,sd->bs", v[i], getattr(m, name))]
    if kind == "outer":
        return lambda m, v: [v[i].sum(1)[:, :, None] * v[i].mean(2)[:, None, :]]
    if kind == "bmm":
        return lambda m, v: [torch.bmm(v[i].transpose(1, 2), v[i]) / 4]
    return lambda m, v: [torch.softmax(v[i] @ v[i].transpose(1, 2) / 4, -1) @ v[i]]


@op(2)
def attention(b: Building) -> Op:
    i = b.pick(lambda x: x.is_floating_point() and x.ndim == 3 and x.shape[2] % 2 == 0 and 0 not in x.shape)
    causal = b.draw.random() < 0.5

    def run(m: RandomModule, v: list[Tensor]) -> list[Tensor]:
        x = v[i]
        apart = x.unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(apart, apart, apart, is_causal=causal)
        return [mixed.transpose(1, 2).reshape(x.shape)]

    return run


@op(3)
def reduction(b: Building) -> Op:
    i = b.floats()
    dim, keep = b.dim(i), b.draw.random() < 0.5
    if b.values[i].shape[dim] == 0:
        raise _Unfit
    kind = b.draw.choice(("sum", "mean", "amax", "logsumexp", "var", "norm", "prod", "all"))
    if kind == "var":
        return lambda m, v: [v[i].var(dim, unbiased=False, keepdim=keep)]
    if kind == "all":
        return lambda m, v: [v[i].mean() if v[i].numel() else v[i].sum()]
    if kind == "prod":
        return lambda m, v: [v[i].tanh().prod(dim, keepdim=keep)]
    if kind == "norm":
        return lambda m, v: [(v[i].square().sum(dim, keepdim=keep) + 1).sqrt()]
    return lambda m, v: [getattr(v[i], kind)(dim, keepdim=keep)]


@op(2)
def along(b: Building) -> Op:
    """Ops along a dim that keep it."""
    i = b.floats()
    dim = b.dim(i)
    kind = b.draw.choice(("cumsum", "flip", "roll", "sort", "logcumsumexp", "diff", "tril"))
    if kind == "sort":
        return lambda m, v: list(v[i].sort(dim))
    if kind == "roll":
        return lambda m, v: [v[i].roll(1, dim)]
    if kind == "flip":
        return lambda m, v: [v[i].flip(dim)]
    if kind == "diff":
        return lambda m, v: [v[i].diff(dim=dim)]
    if kind == "tril":
        if b.values[i].ndim < 2:
            raise _Unfit
        return lambda m, v: [v[i].tril()]
    return lambda m, v: [getattr(v[i], kind)(dim) / 2]


@op(5)
def shape(b: Building) -> Op:
    """Views, most of them: they share the memory of what they are made of."""
    i = b.floats()
    x = b.values[i]
    dim, other = b.dim(i), b.dim(i)
    size = x.shape[dim]
    choices: list[Callable[[Tensor], Tensor]] = [
        lambda t: t.transpose(dim, other), lambda t: t.unsqueeze(dim), lambda t: t.flatten(0, 1) if t.ndim > 1 else t,
        lambda t: t.movedim(dim, other), lambda t: t[..., ::2], lambda t: t.narrow(dim, size // 2, size - size // 2),
        lambda t: t.reshape(-1, t.shape[-1]), lambda t: t.squeeze(dim), lambda t: t.transpose(0, -1).contiguous(),
    ]  # fmt: skip
    if size % 2 == 0 and size:
        choices += [lambda t: t.unflatten(dim, (2, size // 2)), lambda t: t.unflatten(dim, (size // 2, 2))]
    if size:
        choices.append(lambda t: t.select(dim, size - 1))
    if x.ndim > 1 and 0 not in x.shape:
        choices.append(lambda t: t.diagonal(0, 0, 1))
    if size > 1:
        choices.append(lambda t: t.unfold(dim, 2, 1))
    if size == 1:
        choices.append(lambda t: t.expand(*t.shape[:dim], 3, *t.shape[dim + 1 :]))
    function = b.draw.choice(choices)
    return lambda m, v: [function(v[i])]


@op(2)
def parts(b: Building) -> Op:
    i = b.floats()
    dim = b.dim(i)
    size = b.values[i].shape[dim]
    kind = b.draw.choice(("chunk", "split", "unbind", "cat", "stack", "pad", "repeat", "interleave"))
    if kind in ("chunk", "split", "unbind") and not 1 < size < 5:
        raise _Unfit
    if kind == "chunk":
        return lambda m, v: list(v[i].chunk(2, dim))
    if kind == "split":
        return lambda m, v: list(v[i].split([1, size - 1], dim))
    if kind == "unbind":
        return lambda m, v: list(v[i].unbind(dim))
    if kind == "pad":
        return lambda m, v: [functional.pad(v[i], (1, 0), value=0.5)]
    if kind == "repeat":
        return lambda m, v: [v[i].repeat(2, *(1,) * (v[i].ndim - 1))]
    if kind == "interleave":
        return lambda m, v: [v[i].repeat_interleave(2, dim)]
    same = b.values[i].shape
    j = b.pick(lambda x: x.is_floating_point() and x.shape == same)
    joined = torch.cat if kind == "cat" else torch.stack
    return lambda m, v: [joined([v[i], v[j]], dim)]


CHANGES: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x.mul_(0.5), lambda x: x.add_(1), lambda x: x.zero_(), lambda x: x.tanh_(), lambda x: x.clamp_(-1, 1),
    lambda x: x.copy_(x.detach().flip(0)), lambda x: x.masked_fill_(x.detach() > 0.3, 0.1), lambda x: x.neg_(),
    lambda x: x.fill_(0.25), lambda x: functional.relu(x, inplace=True), lambda x: x.sub_(x.detach().mean()),
)  # fmt: skip


@op(4)
def changed_view(b: Building) -> Op:
    """A value of which a view is changed in place; both are used afterwards."""
    i = b.floats()
    x = b.values[i]
    dim, size = b.dim(i), x.shape[0]
    views: list[Callable[[Tensor], Tensor]] = [
        lambda t: t, lambda t: t[..., ::2], lambda t: t.transpose(0, -1), lambda t: t.view(-1), lambda t: t.detach(),
        lambda t: t.narrow(dim, 0, (t.shape[dim] + 1) // 2), lambda t: t.transpose(0, -1)[:1], lambda t: t.unsqueeze(0),
    ]  # fmt: skip
    if size:
        views += [lambda t: t[0], lambda t: t[size - 1 :]]
    view, change, first = b.draw.choice(views), b.draw.choice(CHANGES), b.draw.random() < 0.5

    def run(m: RandomModule, v: list[Tensor]) -> list[Tensor]:
        base = v[i].clone(memory_format=torch.contiguous_format)
        seen = view(base)
        if first:
            change(seen)
            return [base * 2, base]
        change(base)
        return [base, seen * 3]

    return run


@op(2)
def changed_value(b: Building) -> Op:
    """A value that others may see is changed in place."""
    i, change = b.floats(), b.draw.choice(CHANGES)

    def run(m: RandomModule, v: list[Tensor]) -> list[Tensor]:
        change(v[i])
        return [v[i] + 1]

    return run


@op(2)
def assigned(b: Building) -> Op:
    i = b.pick(lambda x: x.is_floating_point() and x.ndim > 1 and x.shape[0] > 1)
    kind = b.draw.randrange(3)

    def run(m: RandomModule, v: list[Tensor]) -> list[Tensor]:
        x = v[i].clone()
        if kind == 0:
            x[0] = x[1] * 2
        elif kind == 1:
            x[..., 0] = 0.5
        else:
            x[1:] += x[:-1].detach().clone()  # torch does not define an overlap, nor always refuse it
        return [x]

    return run


@op(3)
def running(b: Building) -> Op:
    """A buffer that the forward changes, read before or after."""
    i = b.floats()
    dim = b.dim(i)
    shape = tuple(size for place, size in enumerate(b.values[i].shape) if place != dim)
    if b.values[i].shape[dim] == 0:
        raise _Unfit
    name = b.buffer(torch.zeros(shape, dtype=b.values[i].dtype))
    kind = b.draw.choice(("in place", "set", "count", "copy"))
    count = b.buffer(torch.tensor(b.draw.randrange(4))) if kind == "count" else ""
    before = b.draw.random() < 0.5

    def run(m: RandomModule, v: list[Tensor]) -> list[Tensor]:
        old = getattr(m, name).unsqueeze(dim) * 1 if before else None
        with torch.no_grad():
            mean = v[i].mean(dim)
            if kind == "in place":
                getattr(m, name).mul_(0.9).add_(mean, alpha=0.1)
            elif kind == "copy":
                getattr(m, name).copy_(getattr(m, name) * 0.5 + mean)
            else:
                setattr(m, name, getattr(m, name) * 0.8 + 0.2 * mean)
            if count:
                getattr(m, count).add_(1)
        read = getattr(m, name).unsqueeze(dim).clone() if old is None else old
        return [v[i] + read * (getattr(m, count) if count else 1)]

    return run


@op()
def constant_buffer(b: Building) -> Op:
    i = b.floats()
    x = b.values[i]
    name = b.buffer(torch.arange(x.shape[-1], dtype=x.dtype) / 4)
    if b.draw.random() < 0.3:
        return lambda m, v: [v[i] + torch.arange(v[i].shape[-1]) / 8 + torch.tensor([0.5], dtype=v[i].dtype)]
    return lambda m, v: [v[i] * getattr(m, name)]


@op(2)
def without_gradient(b: Building) -> Op:
    i, function = b.floats(), b.draw.choice(UNARY)
    kind = b.draw.randrange(3)

    def run(m: RandomModule, v: list[Tensor]) -> list[Tensor]:
        if kind == 0:
            with torch.no_grad():
                scale = function(v[i])
            return [v[i] * scale]
        if kind == 1:
            return [v[i] * function(v[i]).detach()]
        with torch.no_grad():
            x = v[i] * 2
            with torch.enable_grad():
                y = function(v[i]) + x
        return [y]

    return run


@op(2)
def checkpointed(b: Building) -> Op:
    i = b.floats(2)
    width, function = b.values[i].shape[-1], b.draw.choice(UNARY)
    first, second = b.parameter(6, width), b.parameter(width, 6)

    def inner(m: RandomModule, x: Tensor) -> Tensor:
        return functional.linear(function(functional.linear(x, getattr(m, first))), getattr(m, second))

    return lambda m, v: [checkpoint(inner, m, v[i], use_reentrant=False)]


@op(3)
def custom(b: Building) -> Op:
    i = b.floats()
    kind = b.draw.randrange(3)
    if kind == 0:
        return lambda m, v: [Scaled.apply(v[i], 1.5)]  # type: ignore[no-untyped-call]
    if kind == 1:
        return lambda m, v: [Clipped.apply(v[i])]  # type: ignore[no-untyped-call]
    same = b.values[i].shape
    j = b.pick(lambda x: x.is_floating_point() and x.shape == same)
    return lambda m, v: list(Gated.apply(v[i], v[j]))  # type: ignore[no-untyped-call]


@op(3)
def whole_numbers(b: Building) -> Op:
    """Integers and booleans made of floats."""
    i = b.floats()
    dim = b.dim(i)
    if b.values[i].shape[dim] == 0:
        raise _Unfit
    functions: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: x > 0.3, lambda x: x.argmax(dim), lambda x: (x * 4).to(torch.int32), lambda x: (x > 0).sum(dim),
        lambda x: (x > 0).any(dim), lambda x: (x > -1).all(dim), lambda x: (x * 3).long(), lambda x: x.isfinite(),
        lambda x: (x * 5).to(torch.int8), lambda x: (x * 2).to(torch.int16), lambda x: torch.count_nonzero(x > 0, dim),
        lambda x: (x > 0).cumsum(dim), lambda x: (x.abs() * 9).to(torch.uint8),
    )  # fmt: skip
    function = b.draw.choice(functions)
    return lambda m, v: [function(v[i])]


def _is_whole(x: Tensor) -> bool:
    return not x.is_floating_point()


@op(3)
def of_whole_numbers(b: Building) -> Op:
    """Integers and booleans of integers and booleans."""
    i = b.pick(lambda x: _is_whole(x) and x.ndim > 0)
    dim = b.dim(i)
    if b.values[i].shape[dim] == 0:
        raise _Unfit
    if b.values[i].dtype is torch.bool:
        functions: tuple[Callable[[Tensor], Tensor], ...] = (
            lambda x: ~x, lambda x: x & x.roll(1, dim), lambda x: x.any(dim), lambda x: x.sum(dim), lambda x: x.long(),
            lambda x: x.to(torch.int32), lambda x: x.sum(dim, dtype=torch.int32), lambda x: x.all(),
        )  # fmt: skip
    else:
        functions = (
            lambda x: x + 1, lambda x: x * x, lambda x: x % 3, lambda x: x // 2, lambda x: x.sum(dim), lambda x: x == 2,
            lambda x: x.amax(dim), lambda x: x.cumsum(dim), lambda x: x.flip(dim), lambda x: x.to(torch.int32),
            lambda x: x.sum(dim, dtype=x.dtype), lambda x: x.clamp(0, 3), lambda x: x & 3, lambda x: x.transpose(0, -1),
            lambda x: x.unsqueeze(dim), lambda x: x.sum(), lambda x: torch.cat([x, x], dim),
        )  # fmt: skip
    function = b.draw.choice(functions)
    return lambda m, v: [function(v[i])]


@op(3)
def with_whole_numbers(b: Building) -> Op:
    """Floats with integers or booleans that fit."""
    i = b.floats()
    shape = b.values[i].shape
    j = b.pick(lambda x: _is_whole(x) and _broadcasts(x.shape, shape))
    if b.values[j].dtype is torch.bool:
        kind = b.draw.randrange(3)
        if kind == 0:
            return lambda m, v: [v[i].masked_fill(v[j], 0.5)]
        if kind == 1:
            return lambda m, v: [torch.where(v[j], v[i], v[i] * 0.1)]
        return lambda m, v: [v[i] * v[j]]
    return lambda m, v: [v[i] + v[j].remainder(5) * 0.25]


@op(2)
def looked_up(b: Building) -> Op:
    """Rows of a table by number, or places of a tensor."""
    j = b.pick(lambda x: _is_whole(x) and x.dtype is not torch.bool and 0 < x.ndim < 4)
    kind = b.draw.choice(("embedding", "one_hot", "index_select", "gather"))
    if kind == "embedding":
        name = b.parameter(10, 6)
        return lambda m, v: [functional.embedding(v[j].long().remainder(10), getattr(m, name))]
    if kind == "one_hot":
        return lambda m, v: [functional.one_hot(v[j].long().remainder(4), 4).double()]
    i = b.floats()
    dim = b.dim(i)
    size = b.values[i].shape[dim]
    if size == 0:
        raise _Unfit
    if kind == "index_select":
        return lambda m, v: [v[i].index_select(dim, v[j].long().flatten()[:5].remainder(size))]
    return lambda m, v: [
        v[i].gather(dim, torch.zeros_like(v[i], dtype=torch.int64) + v[j].long().sum().remainder(size))
    ]


@op()
def scattered(b: Building) -> Op:
    i = b.floats(2)
    size = b.values[i].shape[0]
    j = b.pick(lambda x: _is_whole(x) and x.dtype is not torch.bool and x.ndim > 0 and x.numel() >= size > 0)
    kind = b.draw.randrange(2)

    def run(m: RandomModule, v: list[Tensor]) -> list[Tensor]:
        index = v[j].long().flatten()[:size].remainder(4)
        out = torch.zeros(4, *v[i].shape[1:], dtype=v[i].dtype)
        return [out.index_add(0, index, v[i]) if kind else out.index_add_(0, index, v[i])]

    return run


@op(2)
def convolution(b: Building) -> Op:
    i = b.pick(lambda x: x.is_floating_point() and x.ndim == 3 and x.shape[2] > 2 and 0 not in x.shape)
    weight = b.parameter(b.draw.choice((4, 3)), b.values[i].shape[1], 3)
    padding, stride = b.draw.choice((0, 1)), b.draw.choice((1, 1, 2))
    return lambda m, v: [functional.conv1d(v[i], getattr(m, weight), None, stride, padding)]


@op()
def loss(b: Building) -> Op:
    i = b.floats(2)
    x = b.values[i]
    if 0 in x.shape:
        raise _Unfit
    kind = b.draw.choice(("mse", "entropy", "smooth"))
    if kind == "entropy":
        reduction = b.draw.choice(("mean", "sum"))

        def run(m: RandomModule, v: list[Tensor]) -> list[Tensor]:
            flat = v[i].reshape(-1, v[i].shape[-1])
            labels = torch.arange(flat.shape[0]) % flat.shape[1]
            return [functional.cross_entropy(flat, labels, reduction=reduction)]

        return run
    function = functional.mse_loss if kind == "mse" else functional.smooth_l1_loss
    return lambda m, v: [function(v[i], torch.full_like(v[i], 0.5))]


# -- a module that is fit ---------------------------------------------------------------------------------------------


def module_of(seed: int) -> tuple[RandomModule, Left]:
    """The module of a seed, and what a step of it leaves behind."""
    for turn in range(60):
        made = _tried(seed * 1000 + turn)
        if made is not None:
            return made
    raise AssertionError(f"seed {seed} gives no module that eager torch can run")


def example_of(module: RandomModule) -> Any:
    """Its inputs, as `autopar.trace` takes them."""
    args, kwargs = module.example
    return kwargs or args


def _tried(seed: int) -> tuple[RandomModule, Left] | None:
    draw = random.Random(seed)
    try:
        module = RandomModule(seed, draw.randint(3, 9))
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        for name, buffer in before.items():  # building it has run it
            module.get_buffer(name).copy_(torch.zeros_like(buffer) if buffer.is_floating_point() else buffer % 7)
        left = eager_step(module, module.example)
        other = eager_step(module, _moved(module.example))
    except (RuntimeError, IndexError, ValueError):
        return None
    if all(gradient is None for gradient in left.gradients.values()):
        return None
    try:
        return (module, left) if largest_difference(other, left) < 1e-4 else None
    except AssertionError:
        return None


def _moved(arguments: Arguments) -> Arguments:
    """Arguments that differ by rounding."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        by = 1e-12 if value.dtype is torch.float64 else 1e-7
        return (value.detach() * (1 + by) + by).requires_grad_(value.requires_grad)

    found: Arguments = tree_map(moved, arguments)
    return found
