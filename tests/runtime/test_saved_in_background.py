"""`autopar.Checkpoints`: saves while training goes on, the newest complete one after a restart, on other meshes."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import autopar
from autopar.runtime.module import ParallelModule
from examples.gpt import gpt
from tests.runtime.launcher import in_turn, launch
from tests.runtime.training import Inputs, adamw, batches, error_of, losses

SAVED, STEPS = 6, 9
EVERY = 2


def model_and_data() -> tuple[nn.Module, list[Inputs]]:
    torch.manual_seed(0)
    model, inputs = gpt(batch=12, seq=8, vocab=40, d_model=16, layers=1)
    return model.double(), batches(inputs, STEPS)


class Training:
    """State of a run, as an object that `torch.distributed.checkpoint` saves and loads."""

    def __init__(self, module: ParallelModule) -> None:
        self.module, self.optimizer = module, adamw(module)
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.module),
            "optimizer": get_optimizer_state_dict(self.module, self.optimizer),
            "random": torch.get_rng_state(),
            "loader": {"rank": dist.get_rank()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.module, state["model"])
        set_optimizer_state_dict(self.module, self.optimizer, state["optimizer"])
        self.loaded = state


def save_in_background(folder: str) -> dict[str, Any]:
    """Train on an axis that fills the world, so that a save in its group would meet the messages of a step."""
    model, data = model_and_data()
    module = autopar.parallelize(model, "tp=?", data[0], layout="megatron")
    training, saves = Training(module), autopar.Checkpoints(folder, keep=2)
    found: dict[str, Any] = {"before": saves.newest(), "loaded": saves.load({"training": training})}
    torch.manual_seed(dist.get_rank())
    found["losses"] = []
    for step, batch in enumerate(data[:SAVED], start=1):
        found["losses"] += losses(module, [batch], training.optimizer)
        if step % EVERY == 0:
            found["random"] = torch.get_rng_state()
            saves.save({"training": training}, step)
    saves.finish()
    found["newest"] = saves.newest()
    saves.save({"training": training}, SAVED)  # once more, without a warning of torch
    saves.finish()
    found["folders"] = sorted(os.listdir(folder))
    alone = autopar.Checkpoints(Path(folder).parent / "own")
    alone.save({f"of rank {dist.get_rank()}": torch.ones(1), "of all": 1}, 0)
    alone.finish()
    found["names"] = sorted(FileSystemReader(alone.newest()).read_metadata().state_dict_metadata)
    return found


def go_on(folder: str) -> dict[str, Any]:
    """Go on with another number of ranks, the mesh, layout and optimizer of which fit it."""
    if dist.get_rank() == 0:  # left by saves that were killed, of this run and of another one
        Path(folder, "step8").mkdir()
        Path(folder, "step8", "__0_0.distcp").write_bytes(b"half")
        Path(folder, "notes").mkdir()
    dist.barrier()
    model, data = model_and_data()
    fresh = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.normal_()
    module = autopar.parallelize(fresh, "dp=?", data[0], layout="zero1")
    training, saves = Training(module), autopar.Checkpoints(folder, keep=1)
    step = saves.load({"training": training})
    found = {"step": step, **{name: training.loaded[name] for name in ("random", "loader")}}
    found["mesh"] = str(dict(module.assignment.axes))
    found["losses"] = losses(module, data[step:], training.optimizer)
    saves.save({"training": training}, STEPS)
    saves.finish()
    dist.barrier()
    found["folders"] = sorted(os.listdir(folder))
    return found


def refuse(folder: str) -> dict[str, Any]:
    """What cannot be used is an error on all ranks, and nothing waits."""
    blocked = Path(folder, "a file")
    blocked.parent.mkdir(exist_ok=True)
    blocked.touch()
    dist.barrier()
    state = {"x": torch.ones(2)}
    found = {"keep": error_of(lambda: autopar.Checkpoints(folder, keep=0), autopar.AutoparError)}
    saves = autopar.Checkpoints(blocked / "inside")
    found["place"] = error_of(lambda: (saves.save(state, 1), saves.finish()), Exception)
    found["afterwards"] = saves.newest()
    return found


def test_a_run_goes_on_with_other_ranks(tmp_path: Path) -> None:
    alone, data = model_and_data()
    expected = losses(alone, data, adamw(alone))
    folder = str(tmp_path / "run")
    saved = launch(save_in_background, folder, ranks=2)
    for found in saved:
        assert found["before"] is None
        assert found["loaded"] is None
        assert found["losses"] == pytest.approx(expected[:SAVED], abs=1e-10, rel=0)
        assert found["newest"] == tmp_path / "run" / "step6"
        assert found["folders"] == ["step4", "step6"]
        assert found["names"] == ["of all", "of rank 0", "of rank 1"]
    assert not torch.equal(saved[0]["random"], saved[1]["random"])
    given = (go_on, (folder,)), (refuse, (str(tmp_path / "other"),))
    for rank, everything in enumerate(launch(in_turn, *given, ranks=3)):
        found = everything["go_on"]
        assert found["step"] == SAVED
        assert found["mesh"] == "{'dp': 3}"
        assert torch.equal(found["random"], saved[0]["random"]), "values without shards are those of the first rank"
        assert found["loader"] == {"rank": 0}
        assert found["losses"] == pytest.approx(expected[SAVED:], abs=1e-10, rel=0)
        assert found["folders"] == ["notes", "step9"]
        refused = everything["refuse"]
        assert refused["keep"] == "invalid keep=0: expected a number of checkpoints from 1 up, or None for all"
        assert "Not a directory" in refused["place"], rank
        assert refused["afterwards"] is None


def test_without_a_process_group() -> None:
    with pytest.raises(autopar.AutoparError, match="fix: make Checkpoints after parallelize"):
        autopar.Checkpoints("checkpoints")
