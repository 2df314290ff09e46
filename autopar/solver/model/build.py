"""The model of a graph on a mesh: what can be decided, and what it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.options import Recompute
from autopar.solver.model.cost_tables import CostTables
from autopar.solver.model.model import Model
from autopar.solver.model.op_variables import OpVariables
from autopar.solver.model.recompute_variables import RecomputeModes
from autopar.solver.model.storage_variables import StorageVariables
from autopar.solver.model.value_variables import ValueVariables
from autopar.solver.search.joined_axes import AxisRoles
from autopar.solver.setting import PlanningProblem

__all__ = ["build"]


def build(
    setting: PlanningProblem,
    bound_layout: BoundLayout,
    tables: CostTables | None = None,
    regather: bool = False,
    recompute: Mapping[str, Recompute] | None = None,
    ways: AxisRoles | None = None,
    open_layers: Sequence[str] = (),
    deadline: float = math.inf,
    lasting: bool = False,
) -> Model:
    """`regather`: parameters may be gathered again in the backward, which saves memory and never time.

    `lasting`: what is gathered of them may stay until the optimizer steps, which with one micro-batch saves only what
    the host takes. `recompute`: what is settled of layers; `open_layers`: those of which it is decided here. `ways`:
    the choices to take into account, where these are not all. `deadline`: when it is given up, with `OutOfTime`.
    """
    tables = tables or CostTables(setting)
    settled = dict(recompute or {})
    again = RecomputeModes.of(setting.graph, settled, open_layers if setting.trains else (), setting.trains)
    return _GraphModelBuilder(setting, bound_layout, tables, regather, again, ways, deadline, lasting).run(settled)


class _GraphModelBuilder(OpVariables, StorageVariables, ValueVariables):
    def run(self, settled: Mapping[str, Recompute]) -> Model:
        self._add_ops()
        for tensor in self.graph.tensors.values():
            self._heed_time()
            if tensor.kind == "activation":
                self._value(tensor)
            else:
                self._held(tensor)
        return Model(self.setting, tuple(self.variables), tuple(self.factors), self.place, settled)
