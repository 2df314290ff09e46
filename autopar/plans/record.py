"""The data of a plan: graph, assignment, mesh, cluster, costs, and its text; views of a plan read this."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from autopar.cost.costs import Costs
from autopar.cost.evaluate import evaluate
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.loading import LoadingCosts, loading_costs
from autopar.cost.lowered_step import lower_step
from autopar.cost.network import Network
from autopar.cost.step_errors import shipped_errors
from autopar.cost.time_range import TimeRange, time_range
from autopar.cost.unequal_devices import with_slowest_links
from autopar.files import write_text
from autopar.ir.graph import NamedGraph
from autopar.mesh import Mesh
from autopar.plans.folded import fold_statement
from autopar.plans.format import bytes_text, seconds_text, skeleton, table
from autopar.plans.group_capacity import capacity_statement
from autopar.plans.header import Header, parameters_of
from autopar.plans.loss_pieces import pieces_statement
from autopar.plans.to_layout import WrittenLayout, write_layout
from autopar.sharding.assignment import StepPlan
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.syntax import Statement, print_statement
from autopar.sharding.level_sums import LevelSums
from autopar.sharding.pipelining import statements_of
from autopar.sharding.reshard.reshard import StepKind
from autopar.sharding.reshard_insertion import StepCollective, step_collectives
from autopar.sharding.sharding import Sharding
from autopar.solver import relative_gap

__all__ = ["PlanRecord", "PricedCollective", "collective_lines"]


@dataclass(frozen=True)
class PricedCollective(StepCollective):
    """Collective of a plan with its time in seconds when sent alone; parameters share buckets and take less."""

    seconds: float = 0.0

    @property
    def label(self) -> str:
        """Return kind and axes: `all_reduce(dp*tp)`."""
        return f"{self.kind}({'*'.join(self.axes)})"


@dataclass(frozen=True, eq=False)
class PlanRecord:
    """Data of a plan: graph, assignment, mesh, cluster, costs and text."""

    graph: NamedGraph = field(repr=False)
    decided: StepPlan = field(repr=False)
    mesh: Mesh
    cluster: Cluster = field(repr=False)
    # Memory limit of a device.
    limit_bytes: int
    # Lower bound on the step time: 0 if the search proved nothing useful, None without a search.
    bound_seconds: float | None = None
    # `search`, the name of a strategy, or a layout.
    origin: str = ""
    # TARGET of the command line, so that a file can be planned again.
    target: str = ""
    # True if a layout fixed a part: the bound then covers only plans that follow it.
    within_layout: bool = False
    # True if the bound was read from a file: costs are predicted anew, a bound would take a search.
    claimed: bool = False
    # `search`, or the program that proved the bound.
    bound_by: str = ""
    # Sentences about dims that the layout leaves whole, and about statements of a file that do not hold at these sizes.
    left_whole: tuple[str, ...] = field(default=(), repr=False)

    @cached_property
    def costs(self) -> Costs:
        return evaluate(self.graph, self.decided, self.cluster)

    @cached_property
    def loading(self) -> LoadingCosts:
        """Return the time to scatter weights that the first rank alone has, and to gather them on it."""
        return loading_costs(self.graph, self.decided, self.cluster)

    @property
    def step_seconds(self) -> float:
        """Return the predicted time of a step."""
        return self.costs.step_seconds

    @cached_property
    def time_range(self) -> TimeRange | None:
        """Return the range of the step time, by the errors of predictions of measured runs; None if there are none."""
        return time_range(self.graph, self.decided, self.cluster, self.costs, shipped_errors())

    @property
    def memory_bytes(self) -> float:
        """Return the predicted peak memory of the fullest device."""
        return self.costs.memory.peak_bytes

    @property
    def fits(self) -> bool:
        return self.costs.limited_bytes <= self.limit_bytes and self.costs.fits_host

    @property
    def gap(self) -> float | None:
        """Return the largest possible distance from the best plan, as a share of its time; None without a bound.

        With a layout, the best plan is the best one that follows it.
        """
        return relative_gap(self.step_seconds, self.bound_seconds) if self.bound_seconds else None

    @property
    def proof(self) -> str:
        """Return who proved the bound, as the end of a phrase; nothing for a search."""
        claimed = ", as its file claims" if self.claimed else ""
        return claimed + (f", proved by the {self.bound_by}" if self.bound_by not in ("", "search") else "")

    @cached_property
    def network(self) -> Network:
        """Return the links of the cluster under the mesh."""
        mesh, links = self.decided.mesh, self.decided.options.links
        return Network(with_slowest_links(self.cluster, mesh, links), mesh, links)

    @cached_property
    def collectives(self) -> tuple[PricedCollective, ...]:
        """Return the collectives of one forward and backward, of one micro-batch, in the order of the graph."""
        step = lower_step(self.graph, self.decided)
        summed = [bucket for bucket in step.buckets if bucket.is_sum]
        sums = {member.tensor: bucket.sum_bytes for bucket in summed for member in bucket.members}
        found = []
        inserted, precision = step.reshard_plan.inserted(), self.decided.options.precision
        levels, mesh = self.network.level_sums, self.decided.mesh
        sent = step_collectives(inserted, levels, mesh, sums, self.graph, precision)
        for one in sent:
            seconds = self.network.library_seconds(one.kind, one.axes, float(one.bytes))
            found.append(PricedCollective(**vars(one), seconds=seconds))
        return tuple(found)

    @cached_property
    def by_level(self) -> LevelSums:
        """Return the all-reduces of the plan that run by level."""
        inserted = lower_step(self.graph, self.decided).reshard_plan.inserted()
        summed = (step.axes for one in inserted for _, step in one.collectives() if step.kind is StepKind.ALL_REDUCE)
        return LevelSums(tuple(one for axes in dict.fromkeys(summed) for one in self.network.level_sums(axes)))

    def layout_of(self, name: str) -> Sharding:
        """Return the sharding of a tensor.

        Parameters:
            name: a parameter or input, as it is stored, or a value, as its consumers take it.

        Returns:
            The sharding: axes by atom, partial sums, broadcasts.

        >>> plan.layout_of("input").splits
        (('dp',), ())
        """
        assignment = self.decided.assignment
        return assignment.stored.get(name) or assignment.values[name]

    @property
    def whole_mesh(self) -> Mesh:
        """Return the mesh with the axes of replicas that drift; `mesh` is that of one of them."""
        return self.mesh if self.decided.drift is None else self.decided.drift.mesh

    @cached_property
    def written(self) -> WrittenLayout:
        micro, pipelining = self.decided.micro, self.decided.assignment.pipelining
        drift = self.decided.drift
        in_time: tuple[Statement, ...] = (
            *capacity_statement(self.graph),
            *pieces_statement(self.graph),
            *fold_statement(self.graph),
        )
        in_time = in_time if drift is None else (*in_time, drift.statement)
        in_time = in_time if micro is None else (*in_time, micro)
        if pipelining is not None:
            in_time = (*in_time, *statements_of(pipelining), *pipelining.pinned)
        return write_layout(self.graph, self.decided.assignment, self.whole_mesh, in_time)

    @property
    def layout(self) -> Layout:
        """Return the plan as a layout without holes."""
        return self.written.layout

    @property
    def header(self) -> Header:
        decided = self.decided
        return Header(
            type(self.graph.model).__name__,
            parameters_of(self.graph),
            decided.graph,
            self.cluster.name,
            decided.options,
            self.target,
            self.limit_bytes,
            self.step_seconds,
            self.bound_seconds,
            self.memory_bytes,
            self.origin,
            self.within_layout,
            self.by_level,
            bound_by="" if self.bound_by == "search" else self.bound_by,
        )

    @cached_property
    def text(self) -> str:
        """Return the text of the file that `save` writes."""

        # The count of statements detects a file that was cut off when it is read again.
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
        pipelining = self.decided.assignment.pipelining
        if pipelining is not None:
            sent.append(
                f"#   activations of each micro-batch from stage to stage of {pipelining.axis}, and their gradients"
            )
        if self.decided.drift is not None and self.costs.meetings is not None:
            size = bytes_text(self.costs.meetings.sent_bytes)
            sent.append(f"#   {size} of a rank and step at meetings of replicas, which change what is learned")
        parts.append(["# what a step sends, each by itself", *(sent or ["#   nothing"])])
        return "\n\n".join("\n".join(lines) for lines in parts) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan as a layout without holes, with its costs as comments.

        Parameters:
            path: the file; `Plan.load` reads it.

        >>> plan.save(path)
        >>> print(path.read_text().splitlines()[0])
        # autopar plan
        """
        write_text(path, self.text)


def collective_lines(plan: PlanRecord) -> list[str]:
    """Return the lines of the collectives of a step: count, bytes, time; repeated layers are counted together."""
    counts: dict[tuple[str, str, str, str, str], int] = {}
    prices: dict[tuple[str, str, str, str, str], PricedCollective] = {}
    for one in plan.collectives:
        said = one.direction, one.label, skeleton(one.tensor), skeleton(one.op)
        key = *said, str(one.bytes)
        counts[key] = counts.get(key, 0) + 1
        prices[key] = one
    rows = []
    for (way, what, tensor, op, size), count in counts.items():
        one = prices[way, what, tensor, op, size]
        place = tensor if tensor == op else f"{tensor} for {op}"
        rows.append((f"{count} ×", way, what, bytes_text(one.bytes), seconds_text(one.seconds), place))
    return table(rows, right=(0, 3, 4), indent="")
