"""`Plan`: sharding and predicted costs of one model on one mesh, read from and written to text."""

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
from autopar.plans.header import Header, check_model, check_precision, check_whole, read_header
from autopar.plans.loss_pieces import stated_graph
from autopar.plans.record import PlanRecord
from autopar.plans.retarget import Retargeted, retargeted
from autopar.plans.views.alternatives import Alternative, alternatives
from autopar.plans.views.explain import explain_name
from autopar.plans.views.page import Page, report
from autopar.plans.views.summary import difference, summary
from autopar.plans.views.to_json import plan_data
from autopar.sharding.layout.language import Layout, choose_layout, parse_layout
from autopar.sharding.layout.left_whole import left_whole
from autopar.sharding.layout.source import read_text
from autopar.sharding.propagation import propagate
from autopar.sharding.replicas import split_replicas
from autopar.sharding.time_slice import step_plan
from autopar.tracing.trace import trace

__all__ = ["Plan", "under_layout"]


@dataclass(frozen=True, eq=False)
class Plan(PlanRecord):
    """Plan for a model on a mesh of a cluster: its assignment, options, predicted costs and text.

    `autopar.plan` makes one, `save` writes it and `load` reads it back; printed, it is its `summary()`.

    >>> import autopar, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    >>> inputs = (torch.empty(32, 16),)
    >>> plan = autopar.plan(model, "dp=2", inputs, layout="ddp", cluster="h100", cache=False)
    >>> plan.fits, plan.gap, plan.mesh
    (True, 0.0, Mesh('dp=2'))
    """

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
        """Read a plan from a file, for a model and its inputs or for their graph.

        Parameters:
            path: a file of `Plan.save`.
            model: the model that the plan was made for.
            inputs: example arguments; they may have other sizes than those that the plan was made for.
            graph: the graph of model and inputs, in place of both.
            cluster: a name or a TOML file; by default the cluster in the file's head.
            dims: names for dims, as in `autopar.plan`.

        Returns:
            The plan; its costs are predicted anew. The inverse of `save`.

        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "model.plan.lay")
        >>> plan.save(path)
        >>> autopar.Plan.load(path, model, inputs).layout == plan.layout
        True
        """
        text = read_text(path)
        if graph is None:
            if model is None or inputs is None:
                raise AutoparError(
                    "Plan.load needs a model: expected a model with inputs, or a graph, got neither\n"
                    "fix: Plan.load(path, model, inputs), or Plan.load(path, graph=graph)"
                )

            header = read_header(text, str(path))
            precision = None if header is None else header.options.precision
            graph = trace(model, inputs, dims=dims, precision=precision)
        return Plan.read(text, graph, str(path), cluster)

    @staticmethod
    def read(text: str, graph: NamedGraph, name: str = "<plan>", cluster: str | Path | Cluster | None = None) -> Plan:
        """Read a plan from the text of a file, for a graph.

        Parameters:
            text: the `text` of a plan.
            graph: the graph of the model.
            name: stands for the file in messages.
            cluster: as in `load`.

        Returns:
            The plan.

        >>> autopar.Plan.read(plan.text, plan.graph).step_seconds == plan.step_seconds
        True
        """
        header = read_header(text, name)
        if header is None:
            raise AutoparError(
                f"{name} is no plan: expected the first line '# autopar plan'\n"
                "fix: save a plan with Plan.save; give a layout as layout="
            )
        check_model(header, graph, name)
        check_precision(header, graph, name)
        layout = parse_layout(text, name)
        if layout.mesh is None or layout.mesh.is_open:
            raise AutoparError(f"{name} has no mesh with fixed sizes\nfix: write one, as in 'mesh dp=2, tp=4'")
        check_whole(header, len(layout.statements), name)
        layout, drift = split_replicas(layout, layout.mesh)
        mesh = layout.mesh
        assert mesh is not None, "that of a replica"
        axes = mesh.whole
        graph = stated_graph(graph, layout, header.options.outputs)
        same = header.graph == graph.fingerprint
        # The mesh statement of the file names the links: its head leaves them out.
        options = replace(header.options, links=mesh.links)
        found = Retargeted(propagate(graph, layout, axes), ()) if same else retargeted(graph, layout, axes)
        made = replace(step_plan(graph, layout, found.assignment), drift=drift)
        # Costs are never read from the file: a cluster file may have changed since.
        place = cluster if isinstance(cluster, Cluster) else load_cluster(cluster or _shipped(header.cluster, name))
        limit = header.limit_bytes or int(place.device.memory_bytes)
        asked = limit, None, header.origin, header.target, header.within_layout
        plan = Plan(graph, made.with_options(options), mesh, place, *asked, left_whole=found.lost)
        return plan._with_claim(header if same else None)

    def _with_claim(self, header: Header | None) -> Plan:
        """Add the bound of its file, if the file predicts the same step time."""
        bound = None if header is None else header.bound_seconds
        if header is None or bound is None or bound > self.step_seconds * (1 + 1e-6):
            return self
        if not isclose(self.step_seconds, header.step_seconds, rel_tol=1e-6):
            return self
        return replace(self, bound_seconds=bound, claimed=True, bound_by=header.bound_by or "search")

    def summary(self) -> str:
        """Return the plan on one screen: dims, one layer, communication, time, memory.

        >>> print(plan.summary().splitlines()[0])
        Sequential on dp=2: 2 × H100 SXM5 80 GB (h100)
        """
        return summary(self)

    def explain(self, name: str) -> str:
        """Return the reasons for the sharding of a tensor or the choice of an op.

        Parameters:
            name: a tensor or op, as `summary` and `autopar trace` name it.

        Returns:
            Its shardings, the lines of the plan that set them, the rule of the op, and its collectives.

        >>> print(plan.explain("0.weight"))
        0.weight[d_ff d0]  float32 [64, 16], param
          layout  whole
          used    whole
          line    17: * -> none
        used by 0/linear as broadcast(dp)
        """
        return str(explain_name(self, name))

    def alternatives(self, name: str) -> tuple[Alternative, ...]:
        """Return the other shardings of a tensor or choices of an op, each priced by itself.

        Parameters:
            name: a tensor or op, as in `explain`.

        Returns:
            One plan for each forced line, the rest of the plan unchanged; the fastest first.

        >>> first = plan.alternatives("0.weight")[0]
        >>> first.change, first.plan.step_seconds > plan.step_seconds
        ('param@0.weight, grad@0.weight, opt@0.weight { d_ff -> dp, * -> none }', True)
        """
        return alternatives(self, name)

    def diff(self, other: Plan) -> str:
        """Return the differences to another plan of the same model: costs, then tensors.

        Parameters:
            other: a plan of the same model, on any mesh.

        Returns:
            A table of costs, and the shardings that differ.

        >>> whole = autopar.plan(model, "dp=2", inputs, layout="* -> none", cluster="h100", cache=False)
        >>> print(plan.diff(whole).splitlines()[-3].split())
        ['0/linear', 'batch', '->', 'dp', 'whole']
        """
        return difference(self, other)

    def plot(self) -> Page:
        """Return a page with pictures, which a notebook shows.

        Returns:
            The page; its `save(path)` writes the file of `autopar report`.

        >>> plan.plot().text.startswith("<!doctype html>")
        True
        """
        return report(self)

    def __str__(self) -> str:
        return self.summary()

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data, as `autopar plan --json` prints it.

        >>> plan.to_json()["mesh"], plan.to_json()["dims"]
        ({'dp': 2}, {'batch': 'dp'})
        """
        return plan_data(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.summary())}</pre>"


def _shipped(cluster: str, name: str) -> str:
    """Return the name of the cluster in a head, which must be a shipped one: a head names no file to open."""
    names = cluster_names()
    if cluster not in names:
        raise AutoparError(
            f"{name} needs the cluster '{cluster}', which autopar does not ship{did_you_mean(cluster, names)}\n"
            "fix: give the file that describes it: cluster='FILE.toml', --cluster FILE.toml"
        )
    return cluster


def under_layout(plan: Plan, layout: str | Path | Layout) -> Plan:
    """Return a plan with sentences about the dims that its layout leaves whole."""
    sizes = plan.mesh.whole
    found = tuple(left_whole(plan.graph, choose_layout(layout, sizes), sizes))
    return replace(plan, left_whole=found) if found else plan
