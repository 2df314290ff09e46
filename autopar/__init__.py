"""autopar decides how to run a PyTorch model on many devices.

graph = autopar.trace(model, inputs)     # a functional graph; every op has a rule, every dim a name
print(graph)                             # tensors by their dims, repeated layers once
graph.dims["d_model"].size               # one name along the whole residual stream
graph.coverage()                         # {"table": 431, "discovered": 0, "replicated": 0}
plan = autopar.plan(model, "dp=2,tp=4", inputs, cluster="h100")  # the best plan, how far from the best of all
plan.save("gpt.plan.lay")                # a layout without holes
autopar.evaluate(plan.graph, plan.decided, autopar.load_cluster("a100-80"))  # its time and memory on other devices
parallel = autopar.parallelize(model, "dp=2,tp=4", inputs, layout=plan)
graph.module()                           # the graph as a module: same outputs, same gradients
autopar.named(x, "batch seq d_model")    # name dims inside a model; an identity
autopar.constrain(x, "batch -> dp")      # say where they go; an identity too
autopar.register_rule("mylib::op", "b s d -> b s d")
autopar.prove_rule("mylib::op")          # runs the op whole and in shards, and compares
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autopar.errors import (
    AutoparError,
    AutoparWarning,
    ClusterError,
    DimsError,
    LayoutError,
    MeshError,
    RuleError,
    TargetError,
    TraceError,
    VerifyError,
)

if TYPE_CHECKING:
    from autopar.api import parallelize, plan
    from autopar.cost.evaluate import evaluate
    from autopar.cost.hardware.cluster import load_cluster
    from autopar.cost.timeline import timeline
    from autopar.ir.graph import NamedGraph
    from autopar.ir.values import Dim, NamedNode, NamedTensor
    from autopar.mesh import Mesh
    from autopar.plans.plan import Plan
    from autopar.rules.proof.prove import prove_rule
    from autopar.rules.registry import register_rule
    from autopar.runtime.batch_loader import BatchLoader
    from autopar.runtime.checkpoints import Checkpoints
    from autopar.runtime.length_buckets import pad_to_lengths
    from autopar.runtime.module import ParallelModule
    from autopar.tracing.annotations import constrain, named
    from autopar.tracing.trace import trace

__version__ = "0.2.0"

__all__ = [
    "AutoparError",
    "AutoparWarning",
    "BatchLoader",
    "Checkpoints",
    "ClusterError",
    "Dim",
    "DimsError",
    "LayoutError",
    "Mesh",
    "MeshError",
    "NamedGraph",
    "NamedNode",
    "NamedTensor",
    "ParallelModule",
    "Plan",
    "RuleError",
    "TargetError",
    "TraceError",
    "VerifyError",
    "constrain",
    "evaluate",
    "load_cluster",
    "named",
    "pad_to_lengths",
    "parallelize",
    "plan",
    "prove_rule",
    "register_rule",
    "timeline",
    "trace",
]

_HOMES = {
    "BatchLoader": "autopar.runtime.batch_loader",
    "Checkpoints": "autopar.runtime.checkpoints",
    "Dim": "autopar.ir.graph",
    "Mesh": "autopar.mesh",
    "NamedGraph": "autopar.ir.graph",
    "NamedNode": "autopar.ir.graph",
    "NamedTensor": "autopar.ir.graph",
    "ParallelModule": "autopar.runtime.module",
    "Plan": "autopar.plans.plan",
    "constrain": "autopar.tracing.annotations",
    "evaluate": "autopar.cost.evaluate",
    "load_cluster": "autopar.cost.hardware.cluster",
    "named": "autopar.tracing.annotations",
    "pad_to_lengths": "autopar.runtime.length_buckets",
    "parallelize": "autopar.api",
    "plan": "autopar.api",
    "prove_rule": "autopar.rules.proof.prove",
    "register_rule": "autopar.rules.registry",
    "timeline": "autopar.cost.timeline",
    "trace": "autopar.api",
}


def __getattr__(name: str) -> Any:
    """Load the public names when they are used: importing torch takes seconds, `autopar --help` should not."""
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    # The next access finds the name without this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
