"""What the strategies send is what their papers say: counted, in bytes, from the sizes of the models alone.

`Theory` is what a step should send: values one by one, parameters as bytes in all, since these travel in buckets. It is
compared with what the module lists, and with what reaches the process group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.mesh import Mesh
from examples.hf import hf
from examples.moe import moe
from examples.resnet import resnet
from tests.runtime.launcher import launch
from tests.runtime.sent import Sent, Step, step

RANKS = 4
BATCH, SEQ, VOCAB = 8, 16, 64
FLOAT, INTEGER = 4, 8

Way = tuple[str, str, tuple[str, ...]]
"""Direction, kind and axes."""


@dataclass(frozen=True)
class Theory:
    """What one step sends."""

    values: Counter[Sent] = field(default_factory=Counter)
    parameters: Counter[Way] = field(default_factory=Counter)
    """Bytes."""

    def value(self, direction: str, kind: str, axes: tuple[str, ...], size: int, count: int = 1) -> None:
        if axes and count:
            self.values[Sent(direction, kind, axes, size)] += count

    def parameter(self, direction: str, kind: str, axes: tuple[str, ...], size: int) -> None:
        if axes and size:
            self.parameters[direction, kind, axes] += size


def check(theory: Theory, steps: Iterable[Step]) -> None:
    """Compare a step on all ranks with the theory of it."""
    steps = list(steps)
    for one in steps:
        assert one.values == theory.values
        listed: Counter[Way] = Counter()
        for sent, count in one.parameters.items():
            listed[sent[:3]] += sent.bytes * count
        assert listed == theory.parameters
    # Neighbours do not all have as much to send: a list is about the rank with most.
    real = Counter(max(each, key=lambda sent: sent.bytes) for each in zip(*(one.real for one in steps), strict=True))
    # Single numbers, a loss and a count, may go together, as float64, or not by collectives.
    numbers = sum(count for sent, count in theory.values.items() if _is_number(sent))
    (apart,) = {one.apart for one in steps}
    values = Counter({sent: count for sent, count in theory.values.items() if not _is_number(sent)})
    values = Counter({sent._replace(kind=_as_sent(sent.kind)): count for sent, count in values.items()})
    assert values <= real, values - real
    rest: Counter[Way] = Counter()
    for sent, count in (real - values).items():
        rest[sent[:3]] += sent.bytes * count
    together = sum(rest.pop(way) for way in list(rest) if way[:2] == ("forward", "all_reduce"))
    assert FLOAT * (numbers - apart) <= together <= INTEGER * (numbers - apart)
    assert rest == theory.parameters


def _is_number(sent: Sent) -> bool:
    return sent[:2] == ("forward", "all_reduce") and sent.bytes <= INTEGER


def _as_sent(kind: str) -> str:
    return "all_to_all" if kind == "halo_exchange" else kind


def buckets(one: Step, theory: Theory, direction: str, kind: str) -> int:
    """How many collectives the parameters take."""
    own = sum(count for sent, count in theory.values.items() if sent[:2] == (direction, kind))
    return sum(sent[:2] == (direction, kind) for sent in one.real) - own


def bytes_of(model: nn.Module, wanted: Callable[[str], bool]) -> int:
    return FLOAT * sum(parameter.numel() for name, parameter in model.named_parameters() if wanted(name))


def sizes_of(mesh: str) -> tuple[dict[str, int], Callable[..., tuple[str, ...]]]:
    """The axes of a mesh, and a function that drops those of size 1 from some of them."""
    sizes = {name: size for name, size in Mesh(mesh).axes.items() if size is not None}
    return sizes, lambda *names: tuple(name for name in names if sizes.get(name, 1) > 1)


# -- transformers -----------------------------------------------------------------------------------------------------

SPLIT: Mapping[str, tuple[str, ...]] = {
    "llama": ("_proj.weight", "embed_tokens.weight", "lm_head.weight"),
    "gpt2": ("wte.weight", "c_attn.weight", "c_attn.bias", "c_proj.weight", "c_fc.weight", "c_fc.bias"),
}
"""What Megatron splits: by heads, by d_ff, by the vocabulary. Norms, and biases behind a sum, are whole."""

ADDED_TO_SUMS = "c_proj.bias"
"""Added once to a sum: on all ranks its gradient is that of the whole."""


def language_model(architecture: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    more = {"num_key_value_heads": 4} if architecture == "llama" else {}
    model, inputs = hf(architecture, BATCH, SEQ, train=True, dropout=0.0, vocab_size=VOCAB, **more)
    return model, {**inputs, "labels": inputs["input_ids"]}


def transformer_theory(architecture: str, strategy: str, mesh: str) -> Theory:
    """A strategy of data, tensor and sequence parallelism for a causal language model with its loss."""
    model, _ = language_model(architecture)
    config: Any = model.config
    sizes, some = sizes_of(mesh)
    theory = Theory()
    stored = some("fsdp")
    data, tensor = some("dp") or stored, some("tp")
    ranks, parts = (prod(sizes[axis] for axis in axes) for axes in (data, tensor))
    tokens = BATCH // ranks * SEQ
    stream = tokens * config.hidden_size * FLOAT
    # Forward: the embedding, and two in each layer: attention and feed-forward. Backward: two in each layer, where q, k
    # and v share one, and the head's.
    regions = 2 * config.num_hidden_layers + 1
    if strategy == "megatron_sp":
        for direction in ("forward", "backward"):
            theory.value(direction, "all_gather", tensor, stream, regions)
            theory.value(direction, "reduce_scatter", tensor, stream, regions)
    else:
        theory.value("forward", "all_reduce", tensor, stream, regions)
        theory.value("backward", "all_reduce", tensor, stream, regions)
    # The loss: of each token the largest logit, then the sum of the exponentials and the logit of the target.
    theory.value("forward", "all_reduce", tensor, tokens * FLOAT)
    theory.value("forward", "all_reduce", tensor, 2 * tokens * FLOAT)
    theory.value("forward", "all_reduce", data, FLOAT)
    theory.value("forward", "all_reduce", data, INTEGER)  # how many tokens count

    def is_split(name: str) -> bool:
        return bool(tensor) and name.endswith(SPLIT[architecture])

    def is_position(name: str) -> bool:
        return name.endswith("wpe.weight")

    split = bytes_of(model, is_split) // parts
    positions = bytes_of(model, is_position)
    whole = bytes_of(model, lambda name: not is_split(name) and not is_position(name))
    if stored:
        # A bias that tp splits has no other dim for fsdp.
        vectors = bytes_of(model, lambda name: is_split(name) and name.endswith("bias")) // parts
        theory.parameter("forward", "all_gather", stored, split + whole + positions - vectors)
        theory.parameter("backward", "reduce_scatter", stored, split + whole - vectors)
        theory.parameter("backward", "all_reduce", stored, vectors)
    elif strategy == "megatron_sp":
        added = bytes_of(model, lambda name: name.endswith(ADDED_TO_SUMS))
        theory.parameter("backward", "all_reduce", data, split + added)
        theory.parameter("backward", "all_reduce", data + tensor, whole - added)  # each rank saw a part of the sequence
        theory.parameter("backward", "all_reduce", tensor, positions)
    else:
        theory.parameter("backward", "all_reduce", data, split + whole)
    if positions:
        # The rows are the same for the whole batch: their gradient is summed before it goes into the table.
        rows = SEQ * config.hidden_size * FLOAT
        theory.value("backward", "all_reduce", data, rows // (parts if strategy == "megatron_sp" else 1))
    return theory


def transformer_steps(architecture: str, cases: list[tuple[str, str]]) -> list[Step]:
    pair = language_model(architecture)
    return [step(*pair, strategy, mesh, lambda outputs: outputs.loss) for strategy, mesh in cases]


TRANSFORMERS = [
    ("ddp", "dp=4"),
    ("fsdp", "fsdp=4"),
    ("megatron", "dp=1,tp=4"),
    ("megatron", "dp=2,tp=2"),
    ("megatron_sp", "dp=1,tp=4"),
    ("megatron_sp", "dp=2,tp=2"),
    ("fsdp_tp", "fsdp=2,tp=2"),
]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_transformers(architecture: str) -> None:
    pytest.importorskip("transformers")
    everyone = launch(transformer_steps, architecture, TRANSFORMERS, ranks=RANKS)
    for (strategy, mesh), steps in zip(TRANSFORMERS, zip(*everyone, strict=True), strict=True):
        theory = transformer_theory(architecture, strategy, mesh)
        check(theory, steps)
        for one in steps:
            if strategy == "ddp":
                assert buckets(one, theory, "backward", "all_reduce") <= 2, "in buckets, not one by one"
            if strategy == "fsdp":
                groups = language_model(architecture)[0].config.num_hidden_layers + 2  # what is before and after them
                assert buckets(one, theory, "forward", "all_gather") <= groups
                assert buckets(one, theory, "backward", "reduce_scatter") <= groups


# -- mixture of experts -----------------------------------------------------------------------------------------------

EXPERTS, CAPACITY_FACTOR = 8, 2.0


def mixture() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return moe(batch=BATCH, seq=SEQ, experts=EXPERTS, capacity_factor=CAPACITY_FACTOR)


def mixture_theory(mesh: str) -> Theory:
    model: Any = mixture()[0]
    sizes, some = sizes_of(mesh)
    layers, d_model = len(model.blocks), model.tokens.embedding_dim
    everywhere, data, expert = some("dp", "ep"), some("dp"), some("ep")
    theory = Theory()
    # Each rank has its part of the batch for all experts, and gets the whole batch for its own.
    queues = EXPERTS * round(CAPACITY_FACTOR * SEQ / EXPERTS)
    travelling = BATCH // RANKS * queues * d_model * FLOAT
    for direction in ("forward", "backward"):
        theory.value(direction, "all_to_all", expert, travelling, 2 * layers)
    theory.value("forward", "all_reduce", everywhere, FLOAT, layers + 1)  # how even the load is, and the loss
    theory.value("forward", "all_reduce", everywhere, INTEGER)
    of_experts = bytes_of(model, lambda name: name.endswith(("experts.up", "experts.down")))
    theory.parameter("backward", "all_reduce", data, of_experts // sizes["ep"])
    theory.parameter("backward", "all_reduce", everywhere, bytes_of(model, lambda name: True) - of_experts)
    return theory


def mixture_steps(meshes: list[str]) -> list[Step]:
    return [step(*mixture(), "gshard_moe", mesh, lambda loss: loss) for mesh in meshes]


@pytest.mark.slow
def test_mixture_of_experts() -> None:
    meshes = ["dp=2,ep=2", "dp=1,ep=4"]
    everyone = launch(mixture_steps, meshes, ranks=RANKS)
    for mesh, steps in zip(meshes, zip(*everyone, strict=True), strict=True):
        check(mixture_theory(mesh), steps)


# -- images in tiles --------------------------------------------------------------------------------------------------

IMAGES, SIDE = 4, 256


def residual() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return resnet(depth=10, width=4, image=SIDE, batch=IMAGES, loss=True, train=True)


@dataclass(frozen=True)
class Line:
    """A window that slides along one dim of an image that is cut in tiles."""

    extent: int
    tiles: int
    kernel: int
    stride: int
    padding: int

    def read(self, tile: int) -> set[int]:
        """The positions that a tile of the output is made of."""
        made = (self.extent + 2 * self.padding - self.kernel) // self.stride + 1
        outputs = range(tile * made // self.tiles, (tile + 1) * made // self.tiles)
        positions = {o * self.stride - self.padding + k for o in outputs for k in range(self.kernel)}
        return {position for position in positions if 0 <= position < self.extent}

    def held(self, tile: int) -> set[int]:
        return set(range(tile * self.extent // self.tiles, (tile + 1) * self.extent // self.tiles))

    @property
    def most_sent(self) -> int:
        places = range(self.tiles)
        return max(sum(len(self.read(o) & self.held(own)) for o in places if o != own) for own in places)

    @property
    def longest_read(self) -> int:
        """From the first to the last: what is not read between them is there as well."""
        return max(max(self.read(tile)) - min(self.read(tile)) + 1 for tile in range(self.tiles))


def windows(model: Any) -> Iterable[tuple[int, int, int, int, int]]:
    """Kernel, stride, padding, channels of the input and its side, for all that slides over an image."""
    width, side = model.stem[0][0].out_channels, SIDE
    yield 7, 2, 3, 3, side
    yield 3, 2, 1, width, side // 2
    side //= 4
    for block in model.blocks:
        for layer in (block.body[0][0], block.body[2][0]):
            yield layer.kernel_size[0], layer.stride[0], layer.padding[0], layer.in_channels, side
            side //= layer.stride[0]


def residual_theory(mesh: str) -> Theory:
    model = residual()[0]
    sizes, some = sizes_of(mesh)
    images = IMAGES // sizes["dp"]
    everywhere = some("dp", "sy", "sx")
    theory = Theory()
    for number, (kernel, stride, padding, channels, side) in enumerate(windows(model)):
        rows, columns = (Line(side, sizes[axis], kernel, stride, padding) for axis in ("sy", "sx"))
        # Rows first; then columns, of the tile with the rows that it got: so the corners come along.
        line = images * channels * FLOAT
        for direction in ("forward", "backward") if number else ("forward",):  # pictures need no gradient
            theory.value(direction, "halo_exchange", some("sy"), line * side // sizes["sx"] * rows.most_sent)
            tall = rows.longest_read if sizes["sy"] > 1 else side
            theory.value(direction, "halo_exchange", some("sx"), line * tall * columns.most_sent)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # mean and variance of each channel
            for direction in ("forward", "backward"):
                theory.value(direction, "all_reduce", everywhere, module.num_features * FLOAT, 2)
    features: int = model.head.in_features  # type: ignore[assignment,union-attr]
    theory.value("forward", "all_reduce", some("sy", "sx"), images * features * FLOAT)  # the mean over the picture
    theory.value("forward", "all_reduce", some("dp"), FLOAT)
    theory.value("forward", "all_reduce", some("dp"), INTEGER)
    head = bytes_of(model, lambda name: name.startswith("head."))
    theory.parameter("backward", "all_reduce", everywhere, bytes_of(model, lambda name: True) - head)
    theory.parameter("backward", "all_reduce", some("dp"), head)  # what follows the mean is the same for all tiles
    return theory


TILES = "batch -> dp; height -> sy; width -> sx; * -> none"
"""As the strategy, without its limit: in four columns the last layers have tiles of two pixels."""


def residual_steps(meshes: Mapping[str, str]) -> list[Step]:
    return [step(*residual(), layout, mesh, lambda loss: loss) for mesh, layout in meshes.items()]


@pytest.mark.slow
def test_images_in_tiles() -> None:
    meshes = {"dp=1,sy=2,sx=2": "spatial", "dp=2,sy=2,sx=1": "spatial", "dp=1,sy=1,sx=4": TILES}
    everyone = launch(residual_steps, meshes, ranks=RANKS)
    for mesh, steps in zip(meshes, zip(*everyone, strict=True), strict=True):
        check(residual_theory(mesh), steps)


# -- the test itself --------------------------------------------------------------------------------------------------


def test_what_is_sent_once_too_often_is_seen() -> None:
    theory = Theory()
    theory.value("forward", "all_reduce", ("tp",), 64)
    theory.parameter("backward", "all_reduce", ("dp",), 256)
    value = Sent("forward", "all_reduce", ("tp",), 64)
    gradients = [Sent("backward", "all_reduce", ("dp",), size) for size in (96, 160)]
    right = Step(Counter([value]), Counter(gradients), (value, *gradients))
    check(theory, [right, right])
    wrong = [
        right._replace(values=Counter([value, value])),
        right._replace(parameters=Counter(gradients[:1])),
        right._replace(real=(*right.real, value)),
        right._replace(real=(value, gradients[0])),
        right._replace(real=tuple(gradients)),
    ]
    for one in wrong:
        with pytest.raises(AssertionError):
            check(theory, [one, one])
