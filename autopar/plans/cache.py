"""Cache of plans as text files of the user: reused for the same request, a start for a similar one.

The key holds the version of the planner: plans of other versions only start a search. A file that cannot be read, or
no longer fits the graph, counts as missing.
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
from autopar.plans.retarget import retarget
from autopar.sharding.assignment import StepPlan
from autopar.sharding.layout.language import Layout, parse_layout
from autopar.sharding.layout.source import read_text
from autopar.sharding.options import TrainingOptions
from autopar.sharding.time_slice import step_plan
from autopar.solver.integer.choice import SolverChoice

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
    solver: SolverChoice,
) -> str:
    """Return the key of a request: equal for equal requests to the same version of the planner."""
    # Prices depend on them, and plans do not.
    documents = [node.attention.document_share for node in graph.nodes if node.attention is not None]
    request = (
        graph.fingerprint,
        documents,
        str(mesh),
        repr(cluster),
        str(layout),
        limit_bytes,
        repr(options),
        time_limit,
        solver,
    )
    text = "\n".join(map(str, (planner_version(), *request)))
    return f"{_family(graph, mesh)}-{sha256(text.encode()).hexdigest()[:24]}"


@cache
def planner_version(package: Path = Path(__file__).parents[1]) -> str:
    """Return a hash of autopar's code and torch's version, whatever version number people read."""
    sources = {str(path.relative_to(package)): path.read_bytes() for path in package.rglob("*.py")}
    # torch decides decompositions and saved tensors, so another version gives other graphs.
    found = sha256(torch.__version__.encode())
    for name, source in sorted(sources.items()):
        found.update(f"{name} {len(source)}\n".encode() + source)
    return found.hexdigest()[:16]


def _family(graph: NamedGraph, mesh: Mesh) -> str:
    """Return a hash of the class of the model and the mesh, whatever the code of the model."""
    return sha256(f"{type(graph.model).__name__} {mesh}".encode()).hexdigest()[:12]


def find(name: str, graph: NamedGraph, cluster: Cluster) -> Plan | None:
    """Return the cached plan of a key; None if there is none or its file is not valid."""
    path = folder() / f"{name}.lay"
    if not path.is_file():
        return None
    try:
        return Plan.read(read_text(path), graph, str(path), cluster)
    except AutoparError:
        return None


def keep(name: str, plan: Plan) -> None:
    """Write a plan under a key; a folder that cannot be written is ignored."""
    path = folder() / f"{name}.lay"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A reader never sees half a file: the write goes elsewhere and is renamed, which is atomic.
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(plan.text, encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        return


def last(graph: NamedGraph, mesh: Mesh) -> StepPlan | None:
    """Return the latest plan of this class of model on this mesh, retargeted to a graph."""
    try:
        paths = sorted(folder().glob(f"{_family(graph, mesh)}-*.lay"), key=lambda path: path.stat().st_mtime)
    except OSError:
        return None
    # Only the newest: an older plan is rarely a better start than none.
    for path in reversed(paths[-1:]):
        try:
            axes = mesh.whole
            layout = parse_layout(read_text(path), str(path))
            return step_plan(graph, layout, retarget(graph, layout, axes))
        except AutoparError:
            continue
    return None
