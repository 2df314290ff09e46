"""Every dtype through every collective, on real processes; and complex numbers through ops that communicate."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.lowering.collectives.local_reshard import LocalReshard, restored
from autopar.lowering.collectives.process_groups import Groups
from autopar.lowering.passes.join_small_sums import joined
from autopar.sharding.reshard.reshard import StepKind, reshard
from autopar.sharding.sharding import Atoms, Sharding
from tests.runtime.launcher import launch

AXES = {"a": 2}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
COMPLEX = (torch.complex128, torch.complex64)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
DTYPES = (*FLOATS, *COMPLEX, *WHOLE, torch.bool)


def layouts() -> list[Sharding]:
    return [
        Sharding(((), ())),
        Sharding((("a",), ())),
        Sharding(((), ("a",))),
        Sharding(((), ()), partial=frozenset("a")),
    ]


def held(whole: Tensor, layout: Sharding, rank: int) -> Tensor:
    """What a rank holds; of a sum the first holds it all, but for a one that both have where there are numbers."""
    if layout.partial:
        return whole if rank == 0 else torch.zeros_like(whole)
    dim = next((dim for dim, axes in enumerate(layout.splits) if axes), None)
    return whole if dim is None else whole.chunk(2, dim)[rank]


def bits(x: Tensor) -> Tensor:
    """Something that can be compared, whatever the dtype."""
    return x.contiguous().view(torch.uint8)


def convert_all() -> set[str]:
    groups = Groups(init_device_mesh("cpu", (2,), mesh_dim_names=("a",)))
    rank, atoms = dist.get_rank(), Atoms.plain((4, 6))
    met: set[str] = set()
    for dtype in DTYPES:
        numbers = torch.arange(24).reshape(4, 6) % 5
        whole = (
            torch.complex(numbers.double(), numbers.double() + 1).to(dtype) if dtype in COMPLEX else numbers.to(dtype)
        )
        for source in layouts():
            for target in layouts():
                way = reshard(atoms, source, target, AXES)
                found = LocalReshard.bind(way, groups)(held(whole, source, rank))
                if not target.partial:
                    assert torch.equal(bits(found), bits(held(whole, target, rank))), (dtype, str(way))
                met |= {f"{dtype} {step.kind.value}" for step in way.forward}
        total = LocalReshard.bind(reshard(atoms, layouts()[3], layouts()[0], AXES), groups)(whole)
        expected = whole if dtype is torch.bool else (2 * numbers).to(dtype) if dtype not in COMPLEX else whole + whole
        assert torch.equal(bits(total), bits(expected)), dtype
    return met


def test_every_dtype_goes_through_every_collective() -> None:
    kinds = (StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER, StepKind.ALL_GATHER, StepKind.ALL_TO_ALL)
    for met in launch(convert_all, ranks=2):
        assert met >= {f"{dtype} {kind.value}" for dtype in DTYPES for kind in kinds}


class Waves(nn.Module):
    """A complex convolution over a split dim, and small sums of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 3, padding=1, dtype=torch.complex128)

    def forward(self, x: Tensor, marks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.conv(x)
        return y.abs().square().sum(), y.sum(), marks.sum(dtype=torch.int16)


def train_waves(layout: str) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model = Waves()
    inputs = (torch.randn(2, 3, 8, dtype=torch.complex128), torch.arange(16, dtype=torch.int16).reshape(2, 8))
    dims = {"x": "batch channels time", "marks": "batch time"}
    parallel = autopar.parallelize(deepcopy(model), "a=2", inputs, layout=layout, dims=dims)
    expected, found = model(*inputs), parallel(*inputs)
    (expected[0] + expected[1].real * expected[1].imag).backward()
    (found[0] + found[1].real * found[1].imag).backward()
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(torch.as_tensor(b), a)
    for (name, a), b in zip(model.named_parameters(), parallel.parameters(), strict=True):
        whole = b.grad.full_tensor() if hasattr(b.grad, "full_tensor") else b.grad
        torch.testing.assert_close(whole, a.grad, msg=name)
    return [], []


@pytest.mark.parametrize("layout", ["time -> a; * -> none", "batch -> a; * -> none"])
def test_complex_numbers_are_sent_by_ops_that_communicate(layout: str) -> None:
    launch(train_waves, layout, ranks=2)


def test_sums_of_several_dtypes_are_sent_in_one_that_holds_them() -> None:
    wide = joined([torch.tensor(1 + 2j), torch.tensor(3), torch.tensor(4.0)])
    assert wide.dtype is torch.complex128
    assert restored(wide[1], torch.int64).item() == 3
    assert joined([torch.tensor(1, dtype=torch.int16)]).dtype is torch.int32
