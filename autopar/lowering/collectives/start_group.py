"""Start of the process group: the store where ranks meet, and the network interface."""

from __future__ import annotations

import os
import secrets
import socket
import time
from fcntl import ioctl
from hashlib import sha256
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from autopar.errors import MeshError
from autopar.mesh import Mesh

__all__ = ["MPI_RANKS", "choose_gloo_interface", "interface_to", "running_ranks", "unused_part"]

# Seconds between two looks at what the other ranks have written into the store.
POLL_SECONDS = 0.02


def running_ranks(mesh: Mesh, device: str) -> int:
    """Return the number of running processes; start the process group if it is not."""
    if not dist.is_initialized():
        _start(mesh, device)
    return dist.get_world_size()


# What launchers of MPI tell their processes: Open MPI, MPICH and Intel MPI, Slurm's PMI, MVAPICH.
MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK")


def _start(mesh: Mesh, device: str) -> None:
    started = next((name for name in MPI_RANKS if name in os.environ), None)
    if "RANK" not in os.environ and started is not None:
        if not dist.is_mpi_available():
            ranks = "4" if mesh.is_open else mesh.size
            raise MeshError(
                f"the processes were started by MPI ({started}), and this build of torch has no MPI process group\n"
                f"fix: torchrun --nproc-per-node {ranks} YOUR_SCRIPT, for {'NCCL' if device == 'cuda' else 'Gloo'};"
                " or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; or build torch with USE_MPI=1"
            )
        dist.init_process_group("mpi")
        return
    if "RANK" not in os.environ:
        ranks = "4" if mesh.is_open else mesh.size
        raise MeshError(
            f"no processes are running for the mesh {mesh}\nfix: torchrun --nproc-per-node {ranks} YOUR_SCRIPT"
        )
    choose_gloo_interface()
    backend = "nccl" if device == "cuda" else "gloo"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend)
        return
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    limit = default_pg_timeout
    kept = dist.TCPStore(os.environ["MASTER_ADDR"], port, ranks, False, limit)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=unused_part(kept, rank, ranks), rank=rank, world_size=ranks)


def unused_part(store: Any, rank: int, ranks: int) -> Any:
    """Return a part of a store of torch that has no keys yet, the same on all ranks.

    torchrun keeps one store for all restarts of a job. There a rank finds the addresses that ranks of an earlier start
    have written, and waits for processes that have ended (pytorch/pytorch#135712). The number of the restart does not
    tell starts apart: each node counts its own.

    Each rank writes a random number. The first rank lists the numbers that it finds. Some of them may be of an earlier
    start, so it repeats that until all ranks have found their own number in the list.
    """
    own = secrets.token_hex(8)
    store.set(f"autopar/number/{rank}", own)
    until = time.monotonic() + default_pg_timeout.total_seconds()
    while time.monotonic() < until:
        if rank == 0:
            # Blocks until each rank has written a number, in this start or before.
            listed = ",".join(store.get(f"autopar/number/{other}").decode() for other in range(ranks))
            store.set("autopar/numbers", listed)
        else:
            listed = store.get("autopar/numbers").decode()
        numbers = listed.split(",")
        if len(numbers) == ranks and numbers[rank] == own:
            # The number of the first rank is new in each start, so no key of this name is older.
            name = f"autopar/{sha256(listed.encode()).hexdigest()[:16]}"
            store.set(f"{name}/seen/{rank}", "")
            if rank == 0 and store.check([f"{name}/seen/{other}" for other in range(ranks)]):
                store.set(f"{name}/agreed", "")
            if store.check([f"{name}/agreed"]):
                return dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        time.sleep(POLL_SECONDS)
    raise MeshError(
        f"{ranks} processes were started, and not all have come here within "
        f"{default_pg_timeout.total_seconds():.0f} seconds\nfix: call parallelize on every rank"
    )


def choose_gloo_interface() -> None:
    """Set the interface of Gloo before a group is made: it looks up the host name, and aborts if that fails.

    The loopback interface does not reach other hosts. Processes of several launchers take the interface that reaches
    the address where they meet, which is the loopback interface if all launchers are on one host.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or _address_of(socket.gethostname()) is not None:
        return
    here, everywhere = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    found = "lo" if here is None or here == everywhere else interface_to(os.environ.get("MASTER_ADDR", "localhost"))
    if found is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = found


def _address_of(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


# ioctl that reads the IPv4 address of an interface, from linux/sockios.h.
_SIOCGIFADDR = 0x8915


def interface_to(host: str) -> str | None:
    """Return the network interface of this machine that reaches a host; None if none does."""
    address = _address_of(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: a datagram socket only looks up its route.
            probe.connect((address, 9))
        except (OSError, TypeError):
            return None
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            try:
                found = ioctl(probe.fileno(), _SIOCGIFADDR, name.encode().ljust(40, b"\0"))
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(found[20:24]) == own:
                return name
    return None
