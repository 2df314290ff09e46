"""`Plan`: how one model runs on one mesh, and what that costs; read from and written to text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from autopar.cost.collectives.network import Network
from autopar.cost.costs import Costs
from autopar.cost.evaluate import evaluate
from autopar.cost.hardware.cluster import Cluster, cluster_names, load_cluster
from autopar.errors import AutoparError
from autopar.files import write_text
from autopar.ir.graph import NamedGraph
from autopar.mesh import Mesh
from autopar.names import did_you_mean
from autopar.plans.header import Header, check_model, check_whole, dtype_of, dtype_text, parameters_of, read_header
from autopar.plans.retarget import lowered
from autopar.plans.text.to_layout import Written, written
from autopar.sharding.assignment import Plan as Decided
from autopar.sharding.layout.language import Layout, parse_layout
from autopar.sharding.layout.printer import print_statement
from autopar.sharding.layout.source import read_text
from autopar.sharding.options import Outputs
from autopar.sharding.propagation import completed
from autopar.sharding.reshard_insertion import Collective, conversions
from autopar.sharding.sharding import Layout as State
from autopar.solver.progress import relative_gap

if TYPE_CHECKING:
    from autopar.plans.report.page import Page
    from autopar.plans.views.alternatives import Alternative

__all__ = ["Plan", "PricedCollective"]


@dataclass(frozen=True)
class PricedCollective(Collective):
    """A collective of a plan, with what it takes by itself; parameters travel several at once, and take less."""

    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Plan:
    """What was decided about a model on a mesh of a cluster, with its costs."""

    graph: NamedGraph = field(repr=False)
    decided: Decided = field(repr=False)
    mesh: Mesh
    cluster: Cluster = field(repr=False)
    limit_bytes: int
    """What it may hold on each device."""
    bound_seconds: float | None = None
    """No plan that does what was asked takes less; 0 where a search proved nothing of use, None where none was made."""
    origin: str = ""
    """Where it comes from: `search`, or a strategy, or a layout."""
    target: str = ""
    """The TARGET of the command line, if it comes from there."""
    within_layout: bool = False
    """Whether a layout said some of it: the bound is then that of the plans which do what it says."""
    claimed: bool = False
    """Whether the bound is the word of a file: time and memory are predicted anew, a bound takes a search."""

    @cached_property
    def costs(self) -> Costs:
        return evaluate(self.graph, self.decided, self.cluster)

    @property
    def step_seconds(self) -> float:
        """The predicted time of a step."""
        return self.costs.step_seconds

    @property
    def memory_bytes(self) -> float:
        """The predicted peak of memory on the device that holds most."""
        return self.costs.memory.peak_bytes

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.limit_bytes

    @property
    def gap(self) -> float | None:
        """How far from the best of all plans it can be, as a part of its time; None where nothing was proved.

        Where a layout was given, of all plans that do what it says.
        """
        return relative_gap(self.step_seconds, self.bound_seconds) if self.bound_seconds else None

    @cached_property
    def collectives(self) -> tuple[PricedCollective, ...]:
        """Every collective of one forward and backward, in the order of the graph."""
        decided = self.decided
        network = Network(self.cluster, decided.axes, decided.links)
        found = []
        for one in conversions(self.graph, decided.decisions, decided.outputs, decided.local_inputs):
            for direction, step in one.collectives():
                size = step.numel * one.itemsize
                seconds = network.seconds(step.kind.value, step.axes, float(size))
                found.append(PricedCollective(step.kind.value, step.axes, direction, one.tensor, one.op, size, seconds))
        return tuple(found)

    def layout_of(self, name: str) -> State:
        """Where a tensor is: a parameter or input as it is stored, a value as its consumers find it."""
        decisions = self.decided.decisions
        return decisions.stored.get(name) or decisions.values[name]

    # -- text

    @cached_property
    def written(self) -> Written:
        return written(self.graph, self.decided.decisions, self.mesh)

    @property
    def layout(self) -> Layout:
        """The plan in the layout language, without holes."""
        return self.written.layout

    @property
    def header(self) -> Header:
        decided = self.decided
        return Header(
            type(self.graph.model).__name__,
            parameters_of(self.graph),
            decided.graph,
            self.cluster.name,
            decided.outputs,
            decided.local_inputs,
            decided.optimizer,
            decided.micro_batches,
            decided.compiled,
            dtype_text(decided.master_dtype),
            dtype_text(decided.gradient_dtype),
            self.target,
            self.limit_bytes,
            self.step_seconds,
            self.bound_seconds,
            self.memory_bytes,
            self.origin,
            self.within_layout,
        )

    @cached_property
    def text(self) -> str:
        """What `save` writes."""
        from autopar.plans.views.summary import collective_lines

        said = self.written
        count = sum(map(len, (said.mesh, said.rules, said.tensors, said.ops, said.holds)))
        head = replace(self.header, statements=count)
        parts = [head.lines(), *(list(map(print_statement, one)) for one in (said.mesh, said.rules))]
        for title, statements in (
            ("tensors that the rules do not say", said.tensors),
            ("ops that take another choice than the cheapest one", said.ops),
            ("what is gathered or computed again", said.holds),
        ):
            if statements:
                parts.append([f"# {title}", *map(print_statement, statements)])
        sent = [f"#   {line}" for line in collective_lines(self)]
        parts.append(["# what a step sends, each by itself", *(sent or ["#   nothing"])])
        return "\n\n".join("\n".join(lines) for lines in parts) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan as a layout without holes, with its costs as comments."""
        write_text(path, self.text)

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
            from autopar.tracing.trace import trace

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
        axes = dict(zip(layout.mesh.names, layout.mesh.sizes, strict=True))
        same = header.graph == graph.fingerprint
        decided = replace(
            completed(graph, layout, axes) if same else lowered(graph, layout, axes),
            outputs=_outputs(header.outputs),
            local_inputs=header.local_inputs,
            optimizer=header.optimizer,
            micro_batches=header.micro_batches,
            compiled=header.compiled,
            master_dtype=dtype_of(header.master_dtype),
            gradient_dtype=dtype_of(header.gradient_dtype),
            links={axis: link for axis in layout.mesh.names if (link := layout.mesh.link(axis)) is not None},
        )
        place = cluster if isinstance(cluster, Cluster) else load_cluster(cluster or _shipped(header.cluster, name))
        limit = header.limit_bytes or int(place.device.memory_bytes)
        asked = limit, None, header.origin, header.target, header.within_layout
        return Plan(graph, decided, layout.mesh, place, *asked)._with_claim(header if same else None)

    def _with_claim(self, header: Header | None) -> Plan:
        """With the bound of its file, if that was said of a step that takes as long as this one."""
        bound = None if header is None else header.bound_seconds
        if header is None or bound is None or not isclose(self.step_seconds, header.step_seconds, rel_tol=1e-6):
            return self
        return replace(self, bound_seconds=bound, claimed=True) if bound <= self.step_seconds * (1 + 1e-6) else self

    # -- in words

    def summary(self) -> str:
        """What an engineer wants to know of it first."""
        from autopar.plans.views.summary import summary

        return summary(self)

    def explain(self, name: str) -> str:
        """Why a tensor or an op is laid out as it is."""
        from autopar.plans.views.explain import explained

        return str(explained(self, name))

    def alternatives(self, name: str) -> tuple[Alternative, ...]:
        """What else a tensor or an op could do: the plans with one line forced, and the rest as it is."""
        from autopar.plans.views.alternatives import alternatives

        return alternatives(self, name)

    def diff(self, other: Plan) -> str:
        """What another plan of the same model does otherwise, and what that costs."""
        from autopar.plans.views.compare import difference

        return difference(self, other)

    def plot(self) -> Page:
        """A page with pictures, which a notebook shows; its `save(path)` writes what `autopar report` does."""
        from autopar.plans.report.page import report

        return report(self)

    def __str__(self) -> str:
        return self.summary()

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data (`autopar plan --json`)."""
        from autopar.plans.views.to_json import plan_data

        return plan_data(self)

    def _repr_html_(self) -> str:
        from html import escape

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


def _outputs(text: str) -> Outputs:
    for one in get_args(Outputs):
        if text == one:
            found: Outputs = one
            return found
    raise AutoparError(
        f"'outputs {text}' in a plan's head is none of {', '.join(get_args(Outputs))}\nfix: save it again"
    )
