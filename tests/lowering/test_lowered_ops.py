"""Ops that communicate inside: on real ranks, values and gradients are those of one process, and little is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.mesh import Mesh
from autopar.sharding.lowered_ops import lowered_ops
from tests.gaps import number
from tests.runtime.launcher import launch


class Op(nn.Module):
    """A function of `x`, to which a parameter is added so that its gradient can be seen, and of other parameters."""

    def __init__(self, function: Callable[..., Any], shape: Sequence[int], parameters: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.function = function
        self.offset = nn.Parameter(torch.randn(*shape))
        self.others = nn.ParameterList([nn.Parameter(torch.randn(*shape)) for shape in parameters])

    def forward(self, x: Tensor, *rest: Tensor) -> Any:
        return self.function(x + self.offset, *self.others, *rest)


@dataclass(frozen=True)
class Case:
    function: Callable[..., Any]
    shape: tuple[int, ...]
    dims: str
    layout: str
    sent: Mapping[tuple[str, str], int]
    """Collectives by direction and kind, gradients of parameters and the gathering of the result apart."""
    parameters: tuple[tuple[int, ...], ...] = ()
    labels: tuple[int, ...] | None = None
    ignored: int = -100
    mesh: str = "a=2,b=2"


def check(case: Case) -> tuple[float, dict[tuple[str, str], int], int]:
    """The largest relative difference from one process, what is sent for the op, and the most elements of one of it."""
    torch.manual_seed(3)
    model = Op(case.function, case.shape, case.parameters).double()
    inputs: list[Tensor] = [torch.randn(*case.shape, dtype=torch.float64)]
    if case.labels is not None:
        label = torch.randint(case.shape[1], case.labels)
        inputs.append(torch.where(torch.rand(case.labels) < 0.3, case.ignored, label))
    parallel = autopar.parallelize(
        model, case.mesh, tuple(inputs), layout=case.layout, dims={"x": case.dims}, outputs="full"
    )
    expected, found = model(*inputs), parallel(*inputs)
    worst = 0.0
    pairs = list(zip(expected, found, strict=True)) if isinstance(expected, tuple) else [(expected, found)]
    weights = [torch.randn_like(one) for one, _ in pairs]
    sum((one * w).sum() for (one, _), w in zip(pairs, weights, strict=True)).backward()
    sum((other * w).sum() for (_, other), w in zip(pairs, weights, strict=True)).backward()
    for name, parameter in model.named_parameters():
        gradient: Any = parallel.get_parameter(name).grad
        pairs.append((parameter.grad, gradient.full_tensor()))
    for one, other in pairs:
        worst = max(worst, number((one - other).detach().abs().max() / one.detach().abs().max().clamp_min(1e-6)))
    node = next(node for node in parallel.graph.nodes if node.op in lowered_ops())
    own = [item for item in parallel.emitted.inserted if item.op == node.name and item.tensor == node.operands[0]]
    steps = [(way, step) for item in own for way, step in item.collectives()]
    counts = Counter((way, step.kind.value) for way, step in steps)
    return worst, dict(counts), max((step.numel for _, step in steps), default=0)


def check_all(cases: Sequence[str]) -> list[tuple[float, dict[tuple[str, str], int], int]]:
    return [check(CASES[name]) for name in cases]


COVERED = pytest.mark.parametrize(
    "covered", [pytest.param(True, id="one of a kind"), pytest.param(False, id="the others", marks=pytest.mark.slow)]
)


def chosen(cases: Mapping[str, Case], some: Sequence[str], covered: bool) -> dict[str, Case]:
    """Return the named cases, or all others."""
    assert cases.keys() >= set(some)
    return {name: case for name, case in cases.items() if (name in some) == covered}


def run(cases: Mapping[str, Case], most: float) -> None:
    """`most`: the largest message, as a share of the tensor."""
    found = launch(check_all, list(cases), ranks=Mesh(next(iter(cases.values())).mesh).size)
    for results in found:
        for (name, case), (worst, counts, numel) in zip(cases.items(), results, strict=True):
            assert worst < 1e-11, (name, worst)
            assert counts == dict(case.sent), name
            assert numel <= most * prod(case.shape), (name, numel)


# -- losses -----------------------------------------------------------------------------------------------------------

LOSS = {("forward", "all_reduce"): 2}


def entropy(**options: Any) -> Callable[..., Any]:
    def loss(x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(20 * x, labels, **options)

    return loss


LOSSES = {
    "rows": Case(entropy(), (6, 8), "n c", "n:a; c:b", LOSS, labels=(6,)),
    "two axes": Case(entropy(), (6, 8), "n c", "c:a*b", LOSS, labels=(6,)),
    "smoothed": Case(entropy(label_smoothing=0.3), (6, 8), "n c", "n:a; c:b", LOSS, labels=(6,)),
    "summed": Case(entropy(reduction="sum"), (6, 8), "n c", "n:a; c:b", LOSS, labels=(6,)),
    "each": Case(entropy(reduction="none"), (6, 8), "n c", "n:a; c:b", LOSS, labels=(6,)),
    "ignored": Case(
        entropy(ignore_index=3, label_smoothing=0.1), (6, 8), "n c", "n:a; c:b", LOSS, labels=(6,), ignored=3
    ),
    "pixels": Case(entropy(label_smoothing=0.1), (4, 8, 6), "n c s", "s:a; c:b", LOSS, labels=(4, 6)),
}


@COVERED
def test_cross_entropy_over_split_classes_sends_numbers_per_target(covered: bool) -> None:
    run(chosen(LOSSES, ("two axes", "smoothed", "pixels"), covered), 2 / 8)


def lose_a_target() -> str:
    model = Op(entropy(), (6, 8), ()).double()
    inputs = (torch.randn(6, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 4, 8]))
    fine = (inputs[0], inputs[1].clamp(max=7))
    parallel = autopar.parallelize(model, "a=1,b=2", fine, layout="c:b; *:none", dims={"x": "n c"})
    parallel(*fine)
    with pytest.raises(RuntimeError) as caught:
        parallel(*inputs)
    return str(caught.value)


def test_a_target_that_is_no_class_is_an_error_on_every_rank() -> None:
    for message in launch(lose_a_target, ranks=2):
        assert "a target is not one of 8 classes" in message


# -- normalisations ---------------------------------------------------------------------------------------------------

TWO = {("forward", "all_reduce"): 2, ("backward", "all_reduce"): 2}
ONE = {("forward", "all_reduce"): 1, ("backward", "all_reduce"): 1}
SOFT = {("forward", "all_reduce"): 2, ("backward", "all_reduce"): 1}
MOMENTS = {("forward", "all_reduce"): 2}


def layer_norm(x: Tensor, *affine: Tensor) -> Tensor:
    return functional.layer_norm(x, affine[0].shape, *affine)


NORMS = {
    "layer": Case(layer_norm, (6, 8), "n d", "n:a; d:b", TWO, ((8,), (8,))),
    "layer, two axes": Case(layer_norm, (3, 8), "n d", "d:a*b", TWO, ((8,),)),
    "layer, two dims": Case(layer_norm, (6, 4, 8), "n e d", "e:a; d:b", TWO, ((4, 8), (4, 8))),
    "rms": Case(lambda x, w: functional.rms_norm(x, (8,), w, 1e-5), (6, 8), "n d", "n:a; d:b", ONE, ((8,),)),
    "rms, bare": Case(lambda x: functional.rms_norm(x, (8,)), (6, 8), "n d", "n:a; d:b", ONE),
    "softmax": Case(lambda x: (20 * x).softmax(-1), (6, 8), "n d", "n:a; d:b", SOFT),
    "softmax, first": Case(lambda x: x.softmax(0), (8, 6), "n d", "n:a*b", SOFT),
    "log softmax": Case(lambda x: (20 * x).log_softmax(1), (6, 8, 4), "n d s", "s:a; d:b", SOFT),
    "variance": Case(lambda x: x.var((0, 2)), (6, 8, 4), "n d s", "n:a; d:b", MOMENTS),
    "deviation": Case(lambda x: x.std(1, correction=0, keepdim=True), (6, 8, 4), "n d s", "n:a; d:b", MOMENTS),
    "moments": Case(lambda x: torch.var_mean(x, -1), (6, 8), "n d", "n:a; d:b", MOMENTS),
}


@COVERED
def test_normalisations_over_split_dims_send_their_statistics(covered: bool) -> None:
    run(chosen(NORMS, ("layer", "rms", "softmax", "log softmax", "variance"), covered), 2 / 8)


# -- windows ----------------------------------------------------------------------------------------------------------

HALO = {("forward", "halo_exchange"): 1, ("backward", "halo_exchange"): 1}
HALOS = {("forward", "halo_exchange"): 2, ("backward", "halo_exchange"): 2}
TILES = "batch channels height width"


def conv(*options: Any, **named: Any) -> Callable[..., Any]:
    return lambda x, w, b=None: functional.conv2d(x, w, b, *options, **named)


def pool(kind: str, *options: Any, **named: Any) -> Callable[..., Any]:
    return lambda x: getattr(functional, f"{kind}_pool2d")(x, *options, **named)


IMAGE = (2, 3, 16, 8)
BOTH = "height:a; width:b"
LINE = "height:a*b"
WINDOWS = {
    "3": Case(conv(padding=1), IMAGE, TILES, BOTH, HALOS, ((4, 3, 3, 3), (4,))),
    "7, stride 2": Case(conv(2, 3), IMAGE, TILES, BOTH, HALOS, ((4, 3, 7, 7),)),
    "7, stride 2, line": Case(conv(2, 3), IMAGE, TILES, LINE, HALO, ((4, 3, 7, 7),)),
    "1, stride 2": Case(conv(2), IMAGE, TILES, BOTH, {}, ((4, 3, 1, 1),)),
    "wide, line": Case(conv(padding=(6, 0)), IMAGE, TILES, LINE, HALO, ((4, 3, 13, 1), (4,))),
    "3, dilated": Case(conv(padding=2, dilation=2), IMAGE, TILES, BOTH, HALOS, ((4, 3, 3, 3),)),
    "same": Case(conv(padding="same", dilation=3), IMAGE, TILES, BOTH, HALOS, ((4, 3, 2, 3), (4,))),
    "same, line": Case(conv(padding="same"), IMAGE, TILES, "width:a*b", HALO, ((4, 3, 3, 4), (4,))),
    "unpadded": Case(conv(), (2, 3, 18, 10), TILES, BOTH, HALOS, ((4, 3, 3, 3), (4,))),
    "groups": Case(conv(padding=1, groups=3), (4, 6, 16, 8), TILES, "batch:a; height:b", HALO, ((6, 2, 3, 3), (6,))),
    "3, stride 2, padded by 2": Case(conv((2, 1), 2), (2, 3, 16, 6), TILES, BOTH, HALOS, ((4, 3, 5, 3), (4,))),
    "max": Case(pool("max", 3, 2, 1), IMAGE, TILES, BOTH, HALOS),
    "max 2": Case(pool("max", 2), IMAGE, TILES, LINE, {}),
    "max, up": Case(pool("max", 3, 2, ceil_mode=True), IMAGE, TILES, BOTH, HALOS),
    "mean": Case(pool("avg", 3, 2, 1), IMAGE, TILES, BOTH, HALOS),
    "mean of what is there": Case(pool("avg", 3, 2, 1, count_include_pad=False), IMAGE, TILES, BOTH, HALOS),
    "mean, up": Case(pool("avg", 3, 2, 1, True, False), (2, 3, 14, 6), TILES, BOTH, HALOS),
}


@COVERED
def test_windows_over_split_dims_send_halos(covered: bool) -> None:
    run(chosen(WINDOWS, ("3", "7, stride 2, line", "groups", "max", "mean of what is there"), covered), 1.0)


def test_a_halo_has_just_the_rows_that_are_missing() -> None:
    results = launch(check_all, ["3", "7, stride 2, line", "wide, line"], ranks=4)[0]
    rows = [numel for _, _, numel in results]
    # Along the first axis one row; along the second one column, with the corners that came with the row.
    assert rows[0] == max(2 * 3 * 1 * 4, 2 * 3 * (8 + 1) * 1)
    # Pieces of 4 rows: an output reads 3 rows above it, 2 below its last.
    assert rows[1] == 2 * 3 * 8 * (3 + 2)
    # 6 rows on both sides: a piece in the middle gives 4 rows to a neighbour, 4 to the other, 2 to the one after it.
    assert rows[2] == 2 * 3 * 8 * (4 + 4 + 2)


CASES = {**LOSSES, **NORMS, **WINDOWS}
