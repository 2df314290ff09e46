"""What the tracer refuses, and how it tells the user: the line of their model, the reason, what to do."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from types import TracebackType

import torch
from torch._dynamo.exc import UserError
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autopar.errors import AutoparError, TraceError
from autopar.tracing.export.source_lines import Line, is_layer, is_users, user_line

__all__ = ["Refusal", "Refusing", "check_static"]


class Refusal(Exception):
    """Raised inside the tracer; becomes a `TraceError` that names the user's line."""

    def __init__(self, problem: str, fix: str, node: Node | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix
        self.line = user_line(node.meta.get("stack_trace") or "") if node is not None else None


class Refusing:
    """While a model called `owner` is traced: any exception leaves as a `TraceError` that says where and what to do."""

    def __init__(self, owner: str) -> None:
        self.owner = owner

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, AutoparError):
            return
        chain = list(_chain(error))
        problem, fix = _explain(chain)
        line = next((e.line for e in chain if isinstance(e, Refusal) and e.line), None)
        line = line or next(filter(None, map(_deepest_line, chain)), None)
        raise TraceError(_message(self.owner, line, problem, fix)) from error


def _message(owner: str, line: Line | None, problem: str, fix: str) -> str:
    parts = [f"{owner} cannot be traced: {problem}"]
    if line is not None:
        parts.append(f"  at {line[0]}:{line[1]}: {line[2]}")
    parts.append(f"  what to do: {fix}")
    return "\n".join(parts)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _deepest_line(error: BaseException) -> Line | None:
    """The user's deepest line in the traceback, else the deepest in a module of torch.nn."""
    users = layers = None
    trace = error.__traceback__
    while trace is not None:
        filename, number = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        if is_users(filename):
            users = filename, number, linecache.getline(filename, number).strip()
        elif is_layer(filename):
            layers = filename, number, linecache.getline(filename, number).strip()
        trace = trace.tb_next
    return users or layers


def _explain(chain: list[BaseException]) -> tuple[str, str]:
    for error in chain:
        if isinstance(error, Refusal):
            return error.problem, error.fix
    for error in chain:
        if isinstance(error, (GuardOnDataDependentSymNode, DataDependentOutputException)):
            return (
                "what the forward does depends on the data in a tensor",
                "compute both sides and choose with torch.where, or take the decision out of the forward",
            )
        if isinstance(error, DynamicOutputShapeException):
            return DATA_DEPENDENT_SHAPE
        if isinstance(error, UnsupportedOperatorException):
            return (
                f"the op {error.func} has no implementation on tensors without data",
                "register one with torch.library.register_fake",
            )
    error = chain[0]
    if "fake tensor in the exported program constant" in str(error):
        return (
            "a tensor of the forward takes a way around the graph: through .data, or kept from an earlier call",
            "use detach() instead of .data, and a buffer for what stays from call to call",
        )
    text = (str(error).strip() or "no message").splitlines()[0]
    if isinstance(error, UserError):
        return f"torch.export refuses it: {text}", "change this part of the forward"
    return (
        f"it raised {type(error).__name__}: {text}",
        "call the model with these inputs outside of autopar; "
        "if that works, this line cannot run on tensors without data",
    )


DATA_DEPENDENT_SHAPE = (
    "the size of a tensor, or a number, depends on the data in a tensor",
    "keep sizes fixed: use a mask or torch.where instead of nonzero, boolean indexing, unique or item()",
)


def check_static(graph: Graph, owner: str) -> None:
    """Refuse a graph in which a number or a size is not known."""
    for node in graph.nodes:
        val = node.meta.get("val")
        sizes = val.shape if isinstance(val, torch.Tensor) else (val,)
        if any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes):
            line = user_line(node.meta.get("stack_trace") or "")
            raise TraceError(_message(owner, line, *DATA_DEPENDENT_SHAPE))
