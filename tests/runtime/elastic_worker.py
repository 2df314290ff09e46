"""`examples/train_elastic.py` as a worker that dies where the environment says: kill -9, in the midst of an op.

`KILLS` lists `PLACE:STEP:AGENT:WHAT`. PLACE is `forward`, `backward` or `save`; WHAT is `worker`, or `agent` for this
worker and its agent. In a forward or a backward, a worker dies only after the last save is complete: the save runs
beside the steps, as fast as the disk. `WAITS` lists `STEP:RANKS:KILLS`, where a run on so many ranks waits for further
ones, after so many kills.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.utils._python_dispatch import TorchDispatchMode

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import training  # noqa: E402

KILLS = [kill.split(":") for kill in os.environ["KILLS"].split()]
WAITS = [tuple(map(int, wait.split(":"))) for wait in os.environ["WAITS"].split()]
AGENT, MARKS = os.environ["AGENT"], Path(os.environ["MARKS"])
FOLDER = Path(sys.argv[sys.argv.index("--folder") + 1])
SAVE_EVERY = 5  # the default of the example


def die(place: str, step: int) -> None:
    """Kill this worker at its place, once in a run."""
    for number, (where, at, agent, what) in enumerate(KILLS):
        if (where, int(at), agent) == (place, step, AGENT):
            try:
                (MARKS / f"kill{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            if place != "save":
                wait_for_save(step - step % SAVE_EVERY)
            if what == "agent":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def wait_for_save(step: int) -> None:
    while step > 0 and not (FOLDER / f"step{step}" / ".metadata").exists():
        time.sleep(0.05)


class DieInStep(TorchDispatchMode):
    """Mode that calls `die` at the second product of a forward or a backward."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step, self.seen = step, {"forward": 0, "backward": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            place = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
            self.seen[place] += 1
            if self.seen[place] == 2:
                die(place, self.step)
        return func(*args, **(kwargs or {}))


def watch_steps() -> None:
    drawn = training.Characters.draw

    def draw(self: Any, batch: int, seq: int, generator: torch.Generator) -> Any:
        step = generator.initial_seed()  # the example seeds it with the step
        for at, ranks, kills in WAITS:
            while (at, ranks, kills) == (step, dist.get_world_size(), len(list(MARKS.glob("kill*")))):
                time.sleep(0.1)  # until the agents end this process, because another one has come
        if any(place != "save" and int(at) == step and agent == AGENT for place, at, agent, _ in KILLS):
            DieInStep(step).__enter__()
        return drawn(self, batch, seq, generator)

    training.Characters.draw = draw


def watch_saves() -> None:
    written = FileSystemWriter.write_data

    def write_data(self: Any, *args: Any, **kwargs: Any) -> Any:
        die("save", int(Path(self.path).name.removeprefix("step")))
        return written(self, *args, **kwargs)

    FileSystemWriter.write_data = write_data


watch_steps()
watch_saves()
runpy.run_path(str(EXAMPLES / "train_elastic.py"), run_name="__main__")
