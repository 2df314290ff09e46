"""`Plan`: how one model runs on one mesh, and what that costs; read from and written to text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from html import escape
from math import isclose
from pathlib import Path
from typing import Any

from autopar.cost.hardware.cluster import Cluster, cluster_names, load_cluster
from autopar.errors import AutoparError
from autopar.ir.graph import NamedGraph
from autopar.names import did_you_mean
from autopar.plans.header import Header, check_model, check_whole, read_header
from autopar.plans.record import PlanRecord
from autopar.plans.report.page import Page, report
from autopar.plans.retarget import lowered
from autopar.plans.views.alternatives import Alternative, alternatives
from autopar.plans.views.compare import difference
from autopar.plans.views.explain import explained
from autopar.plans.views.summary import summary
from autopar.plans.views.to_json import plan_data
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.layout.source import read_text
from autopar.sharding.propagation import propagate_plan
from autopar.tracing.trace import trace

__all__ = ["Plan"]


@dataclass(frozen=True, eq=False)
class Plan(PlanRecord):
    """What was decided about a model on a mesh of a cluster, with its costs."""

    @staticmethod
    def load(
        path: str | Path,
        model: Any = None,
        inputs: Any = None,
        *,
        graph: NamedGraph | None = None,
        cluster: str | Path | Cluster | None = None,
        dims: Mapping[str, str] | None = None,
    ) -> Plan:
        """Read a plan for a model and its inputs, or for the graph of them. Inputs may have other sizes than it had."""
        text = read_text(path)
        if graph is None:
            if model is None or inputs is None:
                raise AutoparError(
                    "a plan is read for a model\nfix: Plan.load(path, model, inputs), or Plan.load(path, graph=graph)"
                )

            graph = trace(model, inputs, dims=dims)
        return Plan.read(text, graph, str(path), cluster)

    @staticmethod
    def read(text: str, graph: NamedGraph, name: str = "<plan>", cluster: str | Path | Cluster | None = None) -> Plan:
        """The plan that a text is for a graph."""
        header = read_header(text, name)
        if header is None:
            raise AutoparError(
                f"{name} is no plan: its first line is not '# autopar plan'\n"
                "fix: save one with Plan.save; a layout is given as layout="
            )
        check_model(header, graph, name)
        layout = parse_layout(text, name)
        if layout.mesh is None or layout.mesh.is_open:
            raise AutoparError(f"{name} does not say its mesh\nfix: write it as in 'mesh dp=2, tp=4'")
        check_whole(header, len(layout.statements), name)
        axes = layout.mesh.whole
        same = header.graph == graph.fingerprint
        # The mesh statement of the file names the links: its head leaves them out.
        options = replace(header.options, links=layout.mesh.links)
        made = propagate_plan(graph, layout, axes) if same else lowered(graph, layout, axes)
        place = cluster if isinstance(cluster, Cluster) else load_cluster(cluster or _shipped(header.cluster, name))
        limit = header.limit_bytes or int(place.device.memory_bytes)
        asked = limit, None, header.origin, header.target, header.within_layout
        return Plan(graph, made.with_options(options), layout.mesh, place, *asked)._with_claim(header if same else None)

    def _with_claim(self, header: Header | None) -> Plan:
        """With the bound of its file, if that was said of a step that takes as long as this one."""
        bound = None if header is None else header.bound_seconds
        if header is None or bound is None or not isclose(self.step_seconds, header.step_seconds, rel_tol=1e-6):
            return self
        return replace(self, bound_seconds=bound, claimed=True) if bound <= self.step_seconds * (1 + 1e-6) else self

    def summary(self) -> str:
        """What an engineer wants to know of it first."""
        return summary(self)

    def explain(self, name: str) -> str:
        """Why a tensor or an op is laid out as it is."""
        return str(explained(self, name))

    def alternatives(self, name: str) -> tuple[Alternative, ...]:
        """What else a tensor or an op could do: the plans with one line forced, and the rest as it is."""
        return alternatives(self, name)

    def diff(self, other: Plan) -> str:
        """What another plan of the same model does otherwise, and what that costs."""
        return difference(self, other)

    def plot(self) -> Page:
        """A page with pictures, which a notebook shows; its `save(path)` writes what `autopar report` does."""
        return report(self)

    def __str__(self) -> str:
        return self.summary()

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data (`autopar plan --json`)."""
        return plan_data(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.summary())}</pre>"


def _shipped(cluster: str, name: str) -> str:
    """The cluster of a plan's head, which is the name of one that autopar ships: a head names no file to open."""
    names = cluster_names()
    if cluster not in names:
        raise AutoparError(
            f"{name} was made for the cluster '{cluster}', which autopar does not ship{did_you_mean(cluster, names)}\n"
            "fix: give the file that describes it: cluster='FILE.toml', --cluster FILE.toml"
        )
    return cluster
