"""Real processes over Gloo for tests: every rank runs one function of a test module, within a time limit."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = ["Ending", "endings", "in_turn", "launch"]

# Seconds in which a rank that crashes ends, after others have failed for it.
CRASH_SECONDS = 5.0

ROOT = str(Path(__file__).parents[2])


def launch(function: Callable[..., Any], *arguments: Any, ranks: int, seconds: float = 1200) -> list[Any]:
    """What the function returns on each rank; the first failure, or running out of time, ends all ranks.

    The time is there to end what hangs: much more than anything takes on a machine that is slow and busy. A rank that
    dies of a signal fails the launch like any other; its log says where its threads were.
    """
    with tempfile.TemporaryDirectory() as folder:
        running = _start(function, arguments, Path(folder), ranks, None)
        problem = _wait(running, time.monotonic() + seconds)
        if problem is not None:
            texts = [f"-- rank {rank}\n{_log(Path(folder), rank)}" for rank in range(ranks)]
            raise AssertionError("\n".join([f"{function.__name__} on {ranks} ranks: {problem}", *texts]))
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(ranks)]


class Ending(NamedTuple):
    """How a rank ended: its exit code, or None where it had to be stopped, and what it printed last."""

    code: int | None
    log: str


def endings(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int,
    limit_seconds: float,
    seconds: float,
    lost: int | None = None,
) -> list[Ending]:
    """How each rank ends when the rank `lost` fails, which is not waited for.

    `limit_seconds` is that of the process group.
    """
    with tempfile.TemporaryDirectory() as folder:
        running = _start(function, arguments, Path(folder), ranks, limit_seconds)
        deadline = time.monotonic() + seconds
        for rank, process in enumerate(running):
            if rank != lost:
                process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in running]
        for process in running:
            process.kill()
            process.join()
        return [Ending(code, _log(Path(folder), rank)) for rank, code in enumerate(codes)]


def in_turn(*calls: tuple[Callable[..., Any], tuple[Any, ...]]) -> dict[str, Any]:
    """Several functions in one launch, for tests that share the price of starting the ranks; results by name."""
    return {function.__name__: function(*arguments) for function, arguments in calls}


def _start(
    function: Callable[..., Any], arguments: Any, folder: Path, ranks: int, limit_seconds: float | None
) -> list[BaseProcess]:
    # A process that was forked cannot use CUDA.
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    # One server for the whole session: it imports torch and autopar once, and each rank of each launch is a fork of it.
    context.set_forkserver_preload(["tests.runtime.preload"])
    (folder / "arguments").write_bytes(pickle.dumps(arguments))
    place = (function.__module__, function.__qualname__, str(folder))
    running: list[BaseProcess] = [
        context.Process(target=_rank, args=(*place, rank, ranks, limit_seconds)) for rank in range(ranks)
    ]
    for process in running:
        process.start()
    return running


def _log(folder: Path, rank: int) -> str:
    """The last a rank printed; where a signal ended it, what came before the signal and the threads' places."""
    log = folder / f"log{rank}"
    text = log.read_text() if log.exists() else ""
    fatal = text.find("Fatal Python error")
    return text[-4000:] if fatal < 0 else text[max(fatal - 2000, 0) : fatal + 8000]


def _rank(module: str, name: str, folder: str, rank: int, ranks: int, limit_seconds: float | None) -> None:
    log = os.open(Path(folder, f"log{rank}"), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.enable()  # where every thread was when a rank died of a signal
    if ROOT not in sys.path:
        sys.path.insert(0, ROOT)
    # A rank that fails goes at once: the others may never come to take leave of it.
    code = 1
    try:
        _run(module, name, Path(folder), rank, ranks, limit_seconds)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(module: str, name: str, folder: Path, rank: int, ranks: int, limit_seconds: float | None) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.constants import default_pg_timeout

    from autopar.lowering.collectives.process_groups import join_local_group

    torch.set_num_threads(1)
    function = getattr(importlib.import_module(module), name)
    limit = default_pg_timeout if limit_seconds is None else timedelta(seconds=limit_seconds)
    join_local_group(folder / "meeting", rank, ranks, limit=limit)
    given = function(*pickle.loads((folder / "arguments").read_bytes()))
    (folder / f"result{rank}").write_bytes(pickle.dumps(given))
    # In order: what the function has left goes while the group is there, no rank goes before all have come, and the
    # threads of Gloo have ended before the process does.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def _wait(running: list[BaseProcess], deadline: float) -> str | None:
    """What went wrong; nothing is left running.

    Ranks that a crashed one leaves alone may fail before it has ended, as a crash writes where its threads were.
    """
    try:
        while True:
            codes = [process.exitcode for process in running]
            failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
            if failed:
                deadline = min(deadline, time.monotonic() + CRASH_SECONDS)
                killed = [rank for rank in failed if (codes[rank] or 0) < 0]
                if killed:  # not those that it leaves alone, and that fail for it
                    return f"rank {killed[0]} was killed by {signal.Signals(-(codes[killed[0]] or 0)).name}"
                if None not in codes or time.monotonic() > deadline:
                    return f"rank {failed[0]} failed"
            elif None not in codes:
                return None
            elif time.monotonic() > deadline:
                return f"ranks {[rank for rank, code in enumerate(codes) if code is None]} did not end in time"
            time.sleep(0.01)
    finally:
        for process in running:
            process.kill()
            process.join()
