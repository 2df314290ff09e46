"""`autopar doctor`: the versions, the devices and the cluster of this machine, and a plan on two processes."""

from __future__ import annotations

import argparse
import os
import platform
import socket
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from autopar import __version__
from autopar.cli.new import SCRIPT
from autopar.cli.parser import HelpText
from autopar.cli.verify import TOLERANCE
from autopar.errors import AutoparError
from autopar.files import data_folder

__all__ = ["add_parser", "findings"]

EXAMPLES = """examples:
  autopar doctor

Exit codes: 0 two processes agree with one, 1 they do not or did not run.
"""
PACKAGES = ("torch", "ortools", "numpy")


def add_parser(subparsers: Any) -> None:
    """Add this command to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="show what this machine has, and run a plan on two processes",
        description="Show the versions, the devices and the cluster of this machine, and run a plan on two processes.",
        epilog=EXAMPLES,
        formatter_class=HelpText,
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each finding; the check of two processes decides the exit code."""
    good, checked = _check()
    for name, text in (("check", checked), *findings()):
        print(f"{name:9} {text}")
    return 0 if good else 1


def findings() -> Iterator[tuple[str, str]]:
    """Yield what is found without running anything: a word, and a text."""
    import torch

    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    yield "versions", f"autopar {__version__}, Python {platform.python_version()}, {versions}"
    cores = len(os.sched_getaffinity(0))
    yield "devices", ", ".join((*_gpus(), f"{cores} CPU cores", f"{_memory_bytes() / 2**30:.0f} GiB of memory"))
    yield "threads", _threads(torch.get_num_threads(), cores)
    yield "cluster", _cluster()
    yield "network", _network()


def _gpus() -> Iterator[str]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = dict.fromkeys(torch.cuda.get_device_name(i) for i in range(count))
    yield f"{count} GPUs ({', '.join(names)})" if count else "no GPU that torch finds"


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _threads(count: int, cores: int) -> str:
    text = f"a process of torch computes with {count}"
    if count < cores or "OMP_NUM_THREADS" in os.environ:
        return text
    return f"{text}; several processes on {cores} cores need OMP_NUM_THREADS=1, which torchrun and autopar verify set"


def _cluster() -> str:
    from autopar.plans.cluster_here import LOCAL, cluster_here

    try:
        name = cluster_here().name
    except AutoparError as error:
        return str(error).replace("\n", "; ")
    if name == LOCAL:
        return f"{name}, measured on another machine; autopar calibrate --output mine.toml measures this one"
    return f"{name} is taken where none is named; autopar clusters {name} shows it"


def _network() -> str:
    from autopar.lowering.collectives.start_group import choose_gloo_interface

    host = socket.gethostname()
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return f"Gloo uses the interface {os.environ['GLOO_SOCKET_IFNAME']}, by GLOO_SOCKET_IFNAME"
    choose_gloo_interface()
    found = os.environ.get("GLOO_SOCKET_IFNAME")
    if found is None:
        return f"the host name {host} resolves"
    return f"the host name {host} does not resolve: autopar sets the interface {found} for Gloo"


def _check() -> tuple[bool, str]:
    """Run the example script's model on two processes under a plan, and compare with one."""
    from autopar.cli.verify_processes import VerifyTask, verify

    target = f"{data_folder('examples') / SCRIPT}:language_model"
    task = VerifyTask(target, {}, "dp=2", "fsdp", {}, "fp64")
    started = time.monotonic()
    try:
        found = verify(task, 2, seconds=300)
    except AutoparError as error:
        return False, f"two processes over Gloo failed: {error}"
    took = f"{found.collectives} collectives, {time.monotonic() - started:.0f} s"
    worst = found.worst
    if worst.relative <= TOLERANCE:
        return True, f"two processes over Gloo agree with one to {worst.relative:.0e} ({took})"
    return False, f"two processes over Gloo do NOT agree with one: {worst.name} by {worst.relative:.0e} ({took})"
