"""Load of routed rows: how many rows each rank multiplied in the latest call, beside the ratio that prices assume.

Products by group keep the row counts that they ran with, on the device. They are read on request alone, so a step has
no further read by the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.graph import NamedGraph
from autopar.lowering.emitted import Emitted
from autopar.lowering.modules.routed_ops import GroupedRows
from autopar.rules.ops.routed import GROUPED_ROWS
from autopar.runtime.agreement import Agreement

__all__ = ["RoutedLoad", "routed_loads"]

# Number of a rank that runs another stage, or has not run the product.
ABSENT = -1


@dataclass(frozen=True)
class RoutedLoad:
    """Rows of each rank in one routing, such as those of the experts of one layer."""

    # The first product of the rows, as `graph` names it.
    op: str
    # Of the ranks that have the product, in order of ranks.
    rows: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Return the rows of the busiest rank over the mean; 1 where no rank has rows."""
        total = sum(self.rows)
        return max(self.rows) * len(self.rows) / total if total else 1.0


def routed_loads(graph: NamedGraph, emitted: Emitted, agreement: Agreement) -> tuple[RoutedLoad, ...]:
    """Return the load of each routing of the latest forward, or of its last micro-batch; one collective."""
    own = {one.op: one for one in emitted.graph_module.modules() if isinstance(one, GroupedRows)}
    # By the graph, which all stages share: ranks send as many numbers.
    products = [node.name for node in graph.nodes if node.op == str(GROUPED_ROWS)]
    if not products:
        return ()
    mine = (own[name].latest_rows() if name in own else None for name in products)
    everyone = agreement.numbers(*(ABSENT if rows is None else rows for rows in mine))
    found = []
    for name, column in zip(products, zip(*everyone, strict=True), strict=True):
        rows = tuple(count for count in column if count != ABSENT)
        if rows:
            found.append(RoutedLoad(name, rows))
    return tuple(found)
