"""The model of a graph on a mesh: what can be decided, and what it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.layout.holds import Recompute
from autopar.planning.coarse import Ways
from autopar.planning.demands import Demands
from autopar.planning.held import HeldTensors
from autopar.planning.model import Model
from autopar.planning.ops import Ops
from autopar.planning.recomputing import Again
from autopar.planning.setting import Setting
from autopar.planning.tables import Tables
from autopar.planning.values import Values

__all__ = ["build"]


def build(
    setting: Setting,
    demands: Demands,
    tables: Tables | None = None,
    regather: bool = False,
    recompute: Mapping[str, Recompute] | None = None,
    ways: Ways | None = None,
    open_layers: Sequence[str] = (),
    deadline: float = math.inf,
    lasting: bool = False,
) -> Model:
    """`regather`: parameters may be gathered again in the backward, which saves memory and never time.

    `lasting`: what is gathered of them may stay until the optimizer steps, which with one micro-batch saves only what
    the host takes. `recompute`: what is settled of layers; `open_layers`: those of which it is decided here. `ways`:
    the choices to take into account, where these are not all. `deadline`: when it is given up, with `OutOfTime`.
    """
    tables = tables or Tables(setting)
    settled = dict(recompute or {})
    again = Again.of(setting.graph, settled, open_layers if setting.trains else (), setting.trains)
    return _Builder(setting, demands, tables, regather, again, ways, deadline, lasting).run(settled)


class _Builder(Ops, HeldTensors, Values):
    def run(self, settled: Mapping[str, Recompute]) -> Model:
        self._add_ops()
        for tensor in self.graph.tensors.values():
            self._heed_time()
            if tensor.kind == "activation":
                self._value(tensor)
            else:
                self._held(tensor)
        return Model(self.setting, tuple(self.variables), tuple(self.factors), self.place, settled)
