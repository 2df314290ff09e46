"""Numbered random cases: a module, a mesh, and how it is laid out; run on simulated ranks beside the eager model.

A case is right if all that a caller can tell agrees: results, the gradients of parameters and inputs, buffers and
arguments after the call. A refusal (`AutoparError`) is counted by its reason; any other error is a failure.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.api import parallelize
from autopar.errors import AutoparError, LayoutError
from autopar.ir.graph import NamedGraph
from autopar.mesh import Mesh
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout.language import choose_layout, parse_layout
from autopar.sharding.propagation import propagate
from autopar.tracing.trace import trace
from tests.eager import Arguments, Left, arguments_of, eager_step, largest_difference, step_of
from tests.ranks import difference_of
from tests.runtime.random_decisions import random_decisions
from tests.runtime.random_modules import example_of, module_of
from tests.runtime.random_programs import program_of, random_text

__all__ = ["PER_MODULE", "Outcome", "drawn", "failed", "run", "run_on_processes"]

MESHES: tuple[Mapping[str, int], ...] = ({"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 3})
PER_MODULE = 8
"""How many cases a module is used for: tracing takes most of the time."""
TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3}
STRATEGIES = (
    "ddp(dp={0})", "fsdp(fsdp={0})", "zero1(dp={0})", "megatron(dp={1}, tp={0})", "megatron_sp(dp={1}, tp={0})",
    "fsdp_tp(fsdp={0}, tp={1})",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How a case ended: `right`, `refused`, `wrong` or `error`; the reason, or the largest difference."""

    case: int
    kind: str
    detail: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: --seed {self.case}: {self.detail}\n  {self.what}"


def failed(found: Sequence[Outcome]) -> str:
    """Those that are neither right nor refused, for a person."""
    return "\n".join(str(one) for one in found if one.kind not in ("right", "refused"))


@dataclass(frozen=True)
class _Traced:
    module: Any
    graph: NamedGraph | AutoparError
    inputs: Any
    expected: Left
    tolerance: float

    @property
    def arguments(self) -> Arguments:
        return arguments_of(self.inputs)


@dataclass(frozen=True)
class Drawn:
    """A case before it is run."""

    what: str
    axes: Mapping[str, int]
    text: str | None
    """Its layout; None where the decisions are drawn at random."""
    decide: Callable[[NamedGraph], Assignment]


@lru_cache(maxsize=2)
def _traced(number: int) -> _Traced:
    """The module of this number: every fourth is a plain program, the others are of all that users write."""
    if number % 4 == 3:
        program: Any = program_of(number // 4)
        x = program.example()
        inputs: Any = (x.requires_grad_() if x.is_floating_point() else x,)
        module, dims, expected = program, program.dims, eager_step(program, arguments_of(inputs))
    else:
        module, expected = module_of(number)
        inputs, dims = example_of(module), None
    tolerance = TOLERANCE[getattr(module, "dtype", torch.float64)]
    try:
        graph: NamedGraph | AutoparError = trace(module, inputs, dims=dims)
    except AutoparError as error:
        graph = error
    return _Traced(module, graph, inputs, expected, tolerance)


def drawn(case: int, graph: NamedGraph) -> Drawn:
    """The mesh and the layout of a case."""
    draw = random.Random(f"case {case}")
    axes = draw.choice(MESHES)
    names = draw.sample(list(axes), len(axes))
    kind = draw.choice(("text", "text", "text", "decisions", "decisions", "strategy"))
    if kind == "decisions":
        return Drawn(f"at random on {dict(axes)}", axes, None, lambda graph: random_decisions(draw, graph, axes))
    if kind == "strategy":
        text = draw.choice(STRATEGIES).format(names[0], names[1] if len(names) > 1 else "none")
        return Drawn(
            f"{text} on {dict(axes)}", axes, text, lambda graph: propagate(graph, choose_layout(text, axes), axes)
        )
    text = random_text(draw, graph, axes)
    if draw.random() < 0.15:
        text += "; regather @*"
    batches = sorted({atom.names[0] for name in graph.inputs for atom in graph.tensors[name].atoms if atom.names})
    if batches and draw.random() < 0.3:
        text = f"micro 2 of {draw.choice(batches)}; {text}"
    return Drawn(f"{text} on {dict(axes)}", axes, text, lambda graph: propagate(graph, parse_layout(text), axes))


def run(case: int) -> Outcome:
    """Run one case; it needs no other."""
    number = case // PER_MODULE
    torch.manual_seed(number)
    what = f"module {number}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = _traced(number)
            what = f"module {number}: {traced.module}"
            if isinstance(traced.graph, AutoparError):
                return Outcome(case, "refused", _reason(traced.graph), what)
            one = drawn(case, traced.graph)
            what += f"\n  {one.what}"
            assignment = one.decide(traced.graph)
            with_ends = random.Random(case).random() < 0.5
            off = difference_of(traced.graph, assignment, traced.inputs, traced.expected, with_ends)
    except AutoparError as error:
        return Outcome(case, "refused", _reason(error), what)
    except AssertionError as error:
        return Outcome(case, "wrong", str(error).strip()[:600] or "an assertion", what)
    except Exception as error:  # noqa: BLE001  # whatever the library raises but refusals: a case is to find it
        return Outcome(case, "error", f"{type(error).__name__}: {str(error).strip()[:600]}", what)
    return Outcome(case, "right" if off < traced.tolerance else "wrong", f"off by {off:.1e}", what)


def run_on_processes(mesh: str, cases: Sequence[int]) -> list[Outcome]:
    """Those of the cases that a layout decides on this mesh, on the real processes of this group."""
    axes = {axis: size for axis, size in Mesh(mesh).axes.items() if size is not None}
    found = []
    for case in cases:
        if random.Random(f"case {case}").choice(MESHES) != axes:  # as `drawn` begins, without a trace
            continue
        traced = _traced(case // PER_MODULE)
        if isinstance(traced.graph, AutoparError):
            continue
        one = drawn(case, traced.graph)
        assert dict(one.axes) == axes, "a case draws its mesh first"
        if one.text is not None:
            print(f"--seed {case}", flush=True)  # into the log, which is shown if the launch fails
            found.append(_on_processes(case, traced, one, mesh))
    return found


def _on_processes(case: int, traced: _Traced, one: Drawn, mesh: str) -> Outcome:
    what = f"module {case // PER_MODULE}: {traced.module}\n  {one.what} on real processes"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dims = getattr(traced.module, "dims", None)
            parallel = parallelize(traced.module, mesh, traced.inputs, layout=one.text, dims=dims, outputs="full")
            parameters = {name: parallel.get_parameter(name) for name in dict(traced.module.named_parameters())}
            buffers = list(dict(traced.module.named_buffers()))
            left = step_of(
                parallel, parameters, lambda: {name: parallel.get_buffer(name) for name in buffers}, traced.arguments
            )
            whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in left.gradients.items()}
            off = largest_difference(traced.expected, replace(left, gradients=whole))
    except AutoparError as error:  # the same on all ranks
        return Outcome(case, "refused", _reason(error), what)
    except AssertionError as error:
        return Outcome(case, "wrong", str(error).strip()[:600] or "an assertion", what)
    return Outcome(case, "right" if off < traced.tolerance else "wrong", f"off by {off:.1e}", what)


def _reason(error: AutoparError) -> str:
    """A refusal without names and numbers."""
    first = str(error).partition("\n")[0]
    code = error.code if isinstance(error, LayoutError) else type(error).__name__
    words = re.sub(r"'[^']*'|\S*[@/_\d]\S*|\[[^]]*\]", "…", first.removeprefix(f"{code}: "))
    return f"{code}: {words[:90]}"
