"""Numbers of targets beside local inputs: the loss of all ranks is the mean over all of their targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import autopar
from tests.runtime.launcher import launch
from tests.runtime.test_hosts import BATCH, collate, llama, parallel, rows
from tests.runtime.training import error_of


class MeanOfEachCall(torch.nn.Module):
    """Takes the number of targets, and does not read it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        return self.model(input_ids, labels=labels).loss


def unread_count() -> str:
    module = parallel(MeanOfEachCall(), "ddp", True)
    return error_of(lambda: module(**collate(rows()[:4]), num_items_in_batch=torch.tensor(7)))


def counted_loop(mesh: str, layout: str, shards: int, as_tensor: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and gradients of three accumulated steps, on one process and on all; each rank counts its own targets."""
    found: list[list[Tensor]] = []
    index = dist.get_rank() * shards // dist.get_world_size()
    steps = [collate(rows()[at : at + BATCH]) for at in range(0, 3 * BATCH, BATCH)]
    mine = [{name: x.chunk(shards)[index] for name, x in one.items()} for one in steps]
    module = autopar.parallelize(llama().double(), mesh, mine[0], layout=layout, local_inputs=True)
    for model, own in ((llama().double(), steps), (module, mine)):
        counts = [one["labels"][:, 1:].ne(-100).sum() for one in own]
        count = sum(counts) if as_tensor else int(sum(counts))
        losses = [model(**one, num_items_in_batch=count).loss for one in own]
        sum(losses).backward()  # type: ignore[union-attr]
        gradients = (p.grad for p in model.parameters())
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in gradients]
        found.append([*(one.detach() for one in losses), *whole])
    return found[0], found[1]


@pytest.mark.parametrize(
    ("mesh", "layout", "shards", "as_tensor"),
    [
        ("dp=2", "zero1", 2, False),
        pytest.param("dp=2", "fsdp(fsdp=dp)", 2, True, marks=pytest.mark.slow),
        pytest.param("dp=2,tp=2", "megatron", 2, True, marks=pytest.mark.slow),
    ],
)
def test_ranks_add_up_their_targets(mesh: str, layout: str, shards: int, as_tensor: bool) -> None:
    ranks = 4 if "tp" in mesh else 2
    for one, several in launch(counted_loop, mesh, layout, shards, as_tensor, ranks=ranks):
        # transformers computes losses in float32.
        torch.testing.assert_close(several, one, rtol=1e-5, atol=1e-7)


def test_number_of_targets_that_is_not_read() -> None:
    for said in launch(unread_count, ranks=2):
        assert "the model takes num_items_in_batch and does not divide its loss by it" in said
        assert "fix: accepts_loss_kwargs = False" in said
