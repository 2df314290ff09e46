"""Plans that were found before, as text in the user's cache: found again for the same question, begun from for another.

A planner of another version asks another question: what an older one found is only begun from.

A file that cannot be read, or is no plan for the graph any more, is as good as none.
"""

from __future__ import annotations

import os
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch

from autopar.cost.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.ir.graph import NamedGraph
from autopar.mesh import Mesh
from autopar.plans.plan import Plan
from autopar.plans.retarget import lowered
from autopar.sharding.assignment import StepPlan
from autopar.sharding.layout.language import Layout, parse_layout
from autopar.sharding.layout.source import read_text
from autopar.sharding.options import TrainingOptions

__all__ = ["find", "folder", "keep", "key", "last", "planner_version"]


def folder() -> Path:
    """`$XDG_CACHE_HOME/autopar/plans`, by default below `~/.cache`."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home, "autopar", "plans")


def key(
    graph: NamedGraph,
    mesh: Mesh,
    cluster: Cluster,
    layout: Layout | None,
    limit_bytes: int,
    options: TrainingOptions,
    time_limit: float,
) -> str:
    """The same for the same question to the same planner."""
    asked = (graph.fingerprint, str(mesh), repr(cluster), str(layout), limit_bytes, repr(options), time_limit)
    text = "\n".join(map(str, (planner_version(), *asked)))
    return f"{_family(graph, mesh)}-{sha256(text.encode()).hexdigest()[:24]}"


@cache
def planner_version(package: Path = Path(__file__).parents[1]) -> str:
    """Another one as soon as a line of autopar's code is, whatever the version says that people read."""
    sources = {str(path.relative_to(package)): path.read_bytes() for path in package.rglob("*.py")}
    found = sha256(torch.__version__.encode())
    for name, source in sorted(sources.items()):
        found.update(f"{name} {len(source)}\n".encode() + source)
    return found.hexdigest()[:16]


def _family(graph: NamedGraph, mesh: Mesh) -> str:
    """The same for one class of model on one mesh, however its code changes."""
    return sha256(f"{type(graph.model).__name__} {mesh}".encode()).hexdigest()[:12]


def find(name: str, graph: NamedGraph, cluster: Cluster) -> Plan | None:
    """The plan that was kept under a key."""
    path = folder() / f"{name}.lay"
    if not path.is_file():
        return None
    try:
        return Plan.read(read_text(path), graph, str(path), cluster)
    except AutoparError:
        return None


def keep(name: str, plan: Plan) -> None:
    """Write a plan under a key; where there is no place for it, it is not kept."""
    path = folder() / f"{name}.lay"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(plan.text, encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        return


def last(graph: NamedGraph, mesh: Mesh) -> StepPlan | None:
    """The latest plan of this class of model on this mesh, lowered for a graph: to begin from."""
    try:
        paths = sorted(folder().glob(f"{_family(graph, mesh)}-*.lay"), key=lambda path: path.stat().st_mtime)
    except OSError:
        return None
    for path in reversed(paths[-1:]):
        try:
            axes = mesh.whole
            return lowered(graph, parse_layout(read_text(path), str(path)), axes)
        except AutoparError:
            continue
    return None
