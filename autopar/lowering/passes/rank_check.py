"""Insert the comparison of the ranks before the first collective of a call.

Input::

    y = all_gather(x)
Output::

    rank_check()
    y = all_gather(x)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.fx import Graph, Node

from autopar.lowering.collectives.local_reshard import LocalReshard
from autopar.lowering.modules.bucket_ends import BucketEnd, BucketStart, RegatherRelease, RegatherWatch
from autopar.lowering.passes.bucket_parameters import CallGate

__all__ = ["put_gate"]


class RankCheck(nn.Module):
    """Compare the ranks' calls; compiled graphs compare before they begin, and have none."""

    def __init__(self, gate: CallGate) -> None:
        super().__init__()
        self.gate = gate

    def forward(self) -> None:
        if not torch.compiler.is_compiling():
            self.gate.check()


def put_gate(graph: Graph, modules: dict[str, nn.Module], gate: CallGate | None) -> bool:
    """Insert the comparison before the first collective; return whether the forward may send anything."""
    first = next((node for node in graph.nodes if _may_send(node, modules)), None)
    if first is not None and gate is not None:
        modules["gate"] = RankCheck(gate)
        with graph.inserting_before(first):
            graph.call_module("gate")
    return first is not None


def _may_send(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether the forward of one of our modules may send something; ops of torch do not."""
    if node.op != "call_module":
        return False
    module = modules[str(node.target)]
    if isinstance(module, BucketStart | BucketEnd):
        return bool(module.running.bucket.forward)
    conversion = getattr(module, "conversion", None)
    if isinstance(conversion, LocalReshard):
        return not all(move.local for move in conversion.forward)
    return not isinstance(module, RegatherWatch | RegatherRelease)
