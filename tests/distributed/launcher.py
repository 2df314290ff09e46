"""Real processes over Gloo for tests: every rank runs one function of a test module, within a time limit."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

__all__ = ["in_turn", "launch"]

ROOT = str(Path(__file__).parents[2])


def launch(function: Callable[..., Any], *arguments: Any, ranks: int, seconds: float = 240) -> list[Any]:
    """What the function returns on each rank; the first failure, or running out of time, ends all ranks."""
    context = multiprocessing.get_context("forkserver")
    # Loaded once, in a process that the ranks are forked from: importing torch takes longer than most tests.
    context.set_forkserver_preload(["torch.distributed.tensor", "torch._dynamo", "torch._functorch.aot_autograd"])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "arguments").write_bytes(pickle.dumps(arguments))
        place = (function.__module__, function.__qualname__, folder)
        port = _free_port()
        running = [context.Process(target=_rank, args=(*place, rank, ranks, port)) for rank in range(ranks)]
        for process in running:
            process.start()
        problem = _wait(running, time.monotonic() + seconds)
        if problem is not None:
            logs = [Path(folder, f"log{rank}") for rank in range(ranks)]
            texts = [f"-- rank {i}\n{log.read_text()[-4000:]}" for i, log in enumerate(logs) if log.exists()]
            raise AssertionError("\n".join([f"{function.__name__} on {ranks} ranks: {problem}", *texts]))
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(ranks)]


def in_turn(*calls: tuple[Callable[..., Any], tuple[Any, ...]]) -> dict[str, Any]:
    """Several functions in one launch, for tests that share the price of starting the ranks; results by name."""
    return {function.__name__: function(*arguments) for function, arguments in calls}


def _rank(module: str, name: str, folder: str, rank: int, ranks: int, port: int) -> None:
    log = os.open(Path(folder, f"log{rank}"), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    # Gloo would look the host's name up, which not every machine can.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if ROOT not in sys.path:
        sys.path.insert(0, ROOT)
    # A rank that fails goes at once: the others may never come to take leave of it.
    code = 1
    try:
        _run(module, name, Path(folder), rank, ranks, port)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(module: str, name: str, folder: Path, rank: int, ranks: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    function = getattr(importlib.import_module(module), name)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    given = function(*pickle.loads((folder / "arguments").read_bytes()))
    (folder / f"result{rank}").write_bytes(pickle.dumps(given))
    dist.barrier()
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _wait(running: list[BaseProcess], deadline: float) -> str | None:
    """What went wrong; nothing is left running."""
    try:
        while True:
            codes = [process.exitcode for process in running]
            failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
            if failed:
                return f"rank {failed[0]} failed"
            if None not in codes:
                return None
            if time.monotonic() > deadline:
                return f"ranks {[rank for rank, code in enumerate(codes) if code is None]} did not end in time"
            time.sleep(0.01)
    finally:
        for process in running:
            process.kill()
            process.join()
