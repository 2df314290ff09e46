"""Checks of a command's arguments before torch is loaded, which takes seconds."""

from __future__ import annotations

import argparse
from math import inf

from autopar.cli.plan_arguments import is_plan
from autopar.cli.target import check_target, parse_dims, parse_settings
from autopar.cost.compute.optimizers import optimizer_of
from autopar.cost.hardware.cluster import load_cluster
from autopar.errors import AutoparError
from autopar.files import check_writable
from autopar.mesh import Mesh, SubMesh
from autopar.sharding.layout.language import choose_layout, parse_memory

__all__ = ["check_words"]


def check_words(arguments: argparse.Namespace) -> None:
    """Raise for missing files and for malformed targets, meshes, layouts and clusters."""
    said = vars(arguments)
    for name in ("target", "target_of_plan"):
        if said.get(name) is not None:
            check_target(said[name])
    if "plan" in said and not is_plan(said["plan"]):
        if said["plan"].endswith(".lay"):
            raise AutoparError(
                f"{said['plan']} is a layout and no plan: its first line is not '# autopar plan'\n"
                f"fix: name a TARGET, with --mesh dp=2,tp=4 --layout {said['plan']}, or what autopar plan -o wrote"
            )
        check_target(said["plan"])
    parse_settings(said.get("set") or ())
    parse_dims(said.get("dims") or ())
    axes = _axes(said.get("mesh"))
    if said.get("cluster") is not None:
        load_cluster(said["cluster"])
    if said.get("memory") is not None:
        parse_memory(said["memory"])
    if said.get("optimizer") is not None:
        optimizer_of(said["optimizer"])
    limit = said.get("time_limit")
    if limit is not None and not 0 < limit < inf:
        raise AutoparError(f"--time-limit {limit:g}: expected a number of seconds above 0")
    layout = said.get("layout")
    if layout == "":
        raise AutoparError("--layout: the layout is empty\nfix: leave --layout out, then all of it is searched")
    if layout is not None and axes is not None:
        choose_layout(layout, axes)
    for word in said.get("plans") or ():
        if not is_plan(word) and axes is not None:
            choose_layout(word, axes)
    for name in ("output", "times"):
        if said.get(name) is not None:
            check_writable(said[name], f"--{name}")


def _axes(mesh: str | None) -> SubMesh | None:
    """Return the axes of a mesh if all sizes are known."""
    if mesh is None or mesh == "?":
        return None
    found = Mesh(mesh)
    return None if found.is_open else found.whole
