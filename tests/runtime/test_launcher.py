"""A rank that crashes fails the test: the launch is not made again, and says which signal it was and where."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.runtime.launcher import launch


def crash(folder: str) -> None:
    if dist.get_rank() == 1:
        Path(folder, f"{os.getpid()}").touch()
        os.abort()
    dist.barrier()


def test_a_rank_that_crashes_fails_the_launch(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"crash on 2 ranks: rank 1 was killed by SIGABRT") as raised:
        launch(crash, str(tmp_path), ranks=2, seconds=120)
    assert "Fatal Python error: Aborted" in str(raised.value)
    assert len(list(tmp_path.iterdir())) == 1, "once"


def modules_and_servers() -> tuple[bool, int]:
    return "tests.runtime.preload" in sys.modules, os.getppid()


def test_all_ranks_are_forked_from_one_server_that_has_imported_autopar() -> None:
    found = {each for _ in range(2) for each in launch(modules_and_servers, ranks=2, seconds=120)}
    assert len(found) == 1
    assert found.pop()[0], "each rank imports torch and autopar by itself"
