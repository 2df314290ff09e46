"""Loaders of which each rank has its rows: the same global batches and losses on any mesh, under any layout."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import autopar
from autopar.runtime.activity import activity_of
from examples.gpt import gpt
from tests.runtime.launcher import launch
from tests.runtime.training import Inputs, adamw, error_of, losses

BATCH, SAMPLES, SEQ = 8, 28, 6
LAYOUTS = {
    "rows over one axis": ("dp=?,tp=2", "megatron"),
    "rows over all ranks": ("dp=4", "zero1"),
    "rows over two axes, inner one first": ("dp=2,tp=2", "batch -> tp*dp; * -> none"),
    "pieces of rows": ("dp=2,sp=2", "batch -> dp; seq -> sp; * -> none"),
    "all rows": ("tp=4", "megatron"),
    "stages": ("pp=2,dp=2", "micro 2; pipeline pp 1f1b; ddp"),
}


def model_and_data() -> tuple[nn.Module, TensorDataset, Inputs]:
    torch.manual_seed(0)
    model, inputs = gpt(batch=BATCH, seq=SEQ, vocab=24, d_model=16, layers=2)
    draw = torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(24, (SAMPLES, SEQ), generator=draw) for _ in range(2))
    shapes = {name: torch.zeros_like(value) for name, value in inputs.items()}
    return model.double(), TensorDataset(ids, targets), shapes


def sampled(data: TensorDataset, index: int, count: int) -> list[Inputs]:
    """The batches of a rank, by torch's own sampler."""
    sampler: Any = DistributedSampler(data, count, index, shuffle=True, seed=3, drop_last=True)
    loader = DataLoader(data, BATCH // count, sampler=sampler, drop_last=True)
    return [{"ids": ids, "targets": targets} for ids, targets in loader]


def streamed(data: TensorDataset, index: int, count: int) -> list[Inputs]:
    """The batches of a rank, of a stream that all ranks read."""
    rows = islice(iter(data), index, None, count)
    found = []
    while len(own := list(islice(rows, BATCH // count))) == BATCH // count:
        ids, targets = (torch.stack(column) for column in zip(*own, strict=True))
        found.append({"ids": ids, "targets": targets})
    return found


def train_on_rows(cases: tuple[str, ...]) -> dict[str, Any]:
    model, data, shapes = model_and_data()
    found: dict[str, Any] = {}
    for name in cases:
        mesh, layout = LAYOUTS[name]
        for way in (sampled, streamed) if name == "rows over one axis" else (sampled,):
            module = autopar.parallelize(copy.deepcopy(model), mesh, shapes, layout=layout)
            part = module.batch_shard()
            own = [module.from_rows(**rows) for rows in way(data, *part)]
            alone = copy.deepcopy(model)
            expected = losses(alone, way(data, 0, 1), adamw(alone))
            got = losses(module, own, adamw(module))
            worst = max(abs(a - b) for a, b in zip(got, expected, strict=True))
            found[f"{name}, {way.__name__}"] = part, len(got), worst
    return found


class Stream(IterableDataset[Any]):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


class ByName(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return dict(zip(("ids", "targets"), super().__getitem__(index), strict=True))


def train_with_loader(cases: tuple[str, ...]) -> dict[str, Any]:
    model, data, shapes = model_and_data()
    in_order = [
        {"ids": ids, "targets": targets}
        for ids, targets in zip(*(tensor.split(BATCH) for tensor in data.tensors), strict=True)
    ][: SAMPLES // BATCH]
    found: dict[str, Any] = {}
    for name in cases:
        mesh, layout = LAYOUTS[name]
        module = autopar.parallelize(copy.deepcopy(model), mesh, shapes, layout=layout)
        start = copy.deepcopy(module.state_dict())
        loaders: dict[str, tuple[autopar.BatchLoader, list[Inputs]]] = {
            "by name": (autopar.BatchLoader(module, ByName(*data.tensors), BATCH), in_order),
            "shuffled": (autopar.BatchLoader(module, data, BATCH, shuffle=True, seed=3), sampled(data, 0, 1)),
            "stream": (autopar.BatchLoader(module, Stream(data), BATCH), in_order),
            "workers": (autopar.BatchLoader(module, Stream(data), BATCH, num_workers=2), in_order),
        }
        for kind, (loader, expected_batches) in loaders.items():
            module.load_state_dict(start)
            alone = copy.deepcopy(model)
            loader.set_epoch(0)
            expected = losses(alone, expected_batches, adamw(alone))
            got = losses(module, list(loader), adamw(module))
            found[f"{name}, {kind}"] = len(got), max(abs(a - b) for a, b in zip(got, expected, strict=True))
    return found


def refuse_loaders() -> list[str]:
    model, data, shapes = model_and_data()
    module = autopar.parallelize(model, "dp=4", shapes, layout="ddp")
    return [
        error_of(lambda: autopar.BatchLoader(module, data, 6)),
        error_of(lambda: autopar.BatchLoader(module, Stream(data), BATCH, shuffle=True)),
        error_of(lambda: next(iter(autopar.BatchLoader(module, TensorDataset(data.tensors[0]), BATCH)))),
    ]


def refuse() -> dict[str, str]:
    model, data, shapes = model_and_data()
    module = autopar.parallelize(model, "dp=2,sp=2", shapes, layout=LAYOUTS["pieces of rows"][1])
    index, _ = module.batch_shard()
    rows = sampled(data, index, 2)[0]
    # Ranks along `tp` take rows of their own, as they do with the rank of the world.
    replicas = autopar.parallelize(model, "dp=2,tp=2", shapes, layout="megatron")
    other = sampled(data, torch.distributed.get_rank() % 2, 2)[0]
    return {
        "name": error_of(lambda: module.from_rows(idx=rows["ids"])),
        "shape": error_of(lambda: module.from_rows(ids=rows["ids"][0])),
        "length": error_of(lambda: module.from_rows(ids=rows["ids"][:, :5])),
        "dim": error_of(lambda: module.batch_shard("samples")),
        "other rows": error_of(lambda: replicas(**replicas.from_rows(**other))),
    }


def check(cases: tuple[str, ...]) -> None:
    for rank, found in enumerate(launch(train_on_rows, cases, ranks=4)):
        assert {case: value for case, value in found.items() if value[1] != SAMPLES // BATCH or value[2] > 1e-10} == {}
        for case, (part, _, _) in found.items():
            assert part == PARTS[case.partition(", sampled")[0].partition(", streamed")[0]][rank], case


PARTS = {
    "rows over one axis": ((0, 2), (0, 2), (1, 2), (1, 2)),
    "rows over all ranks": ((0, 4), (1, 4), (2, 4), (3, 4)),
    "rows over two axes, inner one first": ((0, 4), (2, 4), (1, 4), (3, 4)),
    "pieces of rows": ((0, 2), (0, 2), (1, 2), (1, 2)),
    "all rows": ((0, 1),) * 4,
    "stages": ((0, 2), (1, 2), (0, 2), (1, 2)),
}


@pytest.mark.slow
def test_losses_are_those_of_the_global_batch() -> None:
    check(tuple(LAYOUTS))


@pytest.mark.slow
def test_rows_that_do_not_fit_are_refused() -> None:
    for found in launch(refuse, ranks=4):
        assert found["name"] == "the module has no input idx; did you mean 'ids'?\nfix: its inputs are ids, targets"
        assert found["shape"] == (
            "wrong rows of ids: expected the dims batch seq, got the shape [6]\n"
            "fix: give this rank's rows of the batch, and the other dims whole"
        )
        assert found["length"] == (
            "the dim seq of ids has 5 elements, and the layout splits it into 2 equal parts\n"
            "fix: pad it to a multiple of 2"
        )
        assert found["dim"].startswith("no input of the module has the dim samples: its inputs are ids[batch seq]")
        assert found["other rows"] == (
            "ids differs between rank 0 and rank 1: expected the same values\n"
            "fix: ranks along the axes tp work on the same data: give them the same tensor; index, count = "
            "module.batch_shard() are the replica and the number of replicas of a sampler"
        )


def test_activities_are_predicates() -> None:
    assert activity_of((True, True)) == "trains"
    assert activity_of((False,)) == "evaluates"
    assert activity_of((True, False, False)) == "trains 1 of 3 modules (tee)"


@pytest.mark.slow
def test_a_loader_has_the_batches_of_one_process_on_any_mesh() -> None:
    cases = ("rows over one axis", "rows over all ranks", "pieces of rows", "all rows")
    for found in launch(train_with_loader, cases, ranks=4):
        assert len(found) == 4 * len(cases)
        assert {case: value for case, value in found.items() if value[0] != SAMPLES // BATCH or value[1] > 1e-10} == {}


@pytest.mark.slow
def test_loaders_that_cannot_be_are_errors() -> None:
    for size, stream, values in launch(refuse_loaders, ranks=4):
        assert size.startswith(
            "the global batch of 6 samples has no 4 equal parts, as the layout makes of batch\nfix: "
        )
        assert stream.startswith("a stream cannot be shuffled by number\nfix: ")
        assert values.startswith("a sample has 1 values, and the module 2 inputs: ids, targets\nfix: ")
