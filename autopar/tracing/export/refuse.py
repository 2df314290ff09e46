"""Errors of the tracer, with the line of the user's model, the reason and a fix."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from types import FrameType

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
from autopar.ir.exported import NodeOrigin

# Key of `node.meta["custom"]`, which torch copies through its passes.
CHECKPOINT = "autopar_checkpoint"

# Folders that are not the user's model: torch, the tracer itself, and Python's library.
_TORCH = os.path.dirname(torch.__file__) + os.sep
_TRACER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# The forward of a layer may run within that of the recorder.
_RECORDED_LAYERS = os.path.join(_TRACER, "layers") + os.sep
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep
_TORCH_LAYERS = os.path.join(os.path.dirname(torch.__file__), "nn", "modules") + os.sep
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*(?:\n    ([^\n]*))?')

# File, number and text.
Line = tuple[str, int, str]

DATA_DEPENDENT_SHAPE = (
    "the size of a tensor, or a number, depends on the data in a tensor",
    "keep sizes fixed: use a mask or torch.where instead of nonzero, boolean indexing, unique or item()",
)


# -- lines of the model -----------------------------------------------------------------------------------------------


def stack_of_model() -> str | None:
    """Return the frames of the model's code on the stack, from its forward down, as text.

    The frames are in the user's files and in layers of torch.nn, among which `user_line` chooses.
    """
    frames: list[str] = []
    # Skip this function and its caller, which belong to the tracer.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not _is_tracer_file(frame.f_code.co_filename):
        code = frame.f_code
        if is_model_file(code.co_filename) or _is_torch_layer(code.co_filename):
            frames.append(_frame_text(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return "".join(reversed(frames)) or None


@lru_cache(maxsize=4096)
def _frame_text(filename: str, number: int, name: str) -> str:
    return f'File "{filename}", line {number}, in {name}\n    {linecache.getline(filename, number).strip()}\n'


@cache
def _is_tracer_file(filename: str) -> bool:
    """Return True for a file of the tracer that does not stand between the parts of a model."""
    return filename.startswith(_TRACER) and not filename.startswith(_RECORDED_LAYERS)


@cache
def _is_torch_layer(filename: str) -> bool:
    """Return True for a file with layers of torch.nn."""
    return filename.startswith(_TORCH_LAYERS) and not filename.endswith(os.sep + "module.py")


@cache
def is_model_file(filename: str) -> bool:
    """Return True for a file that can be the user's model: not of torch, the tracer or Python."""
    if filename.startswith(("<", _TORCH, _TRACER)):
        return False
    return "site-packages" in filename or not filename.startswith(_PYTHON)


@lru_cache(maxsize=4096)
def user_line(stack_trace: str) -> Line | None:
    """Return the deepest line outside torch in a formatted stack, else the deepest in torch.nn."""
    found = _FRAME.findall(stack_trace)
    frames = [frame for frame in found if is_model_file(frame[0])]
    frames = frames or [frame for frame in found if _is_torch_layer(frame[0])]
    if not frames:
        return None
    filename, line, code = frames[-1]
    return filename, int(line), code.strip()


def record_origins(graph: Graph, prefix: str) -> None:
    """Set `meta["origin"]` of every call; `prefix` is removed from every module path."""
    regions: dict[Hashable, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        stack = node.meta.get("nn_module_stack") or {"": ("", "")}
        key, (path, _) = next(reversed(stack.items()))
        _, _, call = key.partition("@")
        line = user_line(node.meta.get("stack_trace") or "")
        region = (node.meta.get("custom") or {}).get(CHECKPOINT)
        node.meta["origin"] = NodeOrigin(
            module_path=path.removeprefix(prefix.rstrip(".")).removeprefix("."),
            module_call=int(call or 0),
            source=f"{os.path.basename(line[0])}:{line[1]}" if line else "",
            source_code=line[2] if line else "",
            checkpoint=None if region is None else regions.setdefault(region, len(regions)),
        )


# -- errors -----------------------------------------------------------------------------------------------------------


class Refusal(Exception):
    """Error inside the tracer; `raise_trace_errors` turns it into a `TraceError` with the user's line."""

    def __init__(self, problem: str, fix: str, node: Node | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix
        self.line = user_line(node.meta.get("stack_trace") or "") if node is not None else None


@contextmanager
def raise_trace_errors(owner: str) -> Iterator[None]:
    """Turn any exception into a `TraceError` with the line in the model `owner` and a fix."""
    try:
        yield
    except AutoparError:
        raise
    except Exception as error:
        chain: list[BaseException] = []
        current: BaseException | None = error
        while current is not None and not any(current is other for other in chain):
            chain.append(current)
            current = current.__cause__ or current.__context__
        problem, fix = _explain(chain)
        line = next((e.line for e in chain if isinstance(e, Refusal) and e.line), None)
        line = line or next(filter(None, map(_deepest_line, chain)), None)
        raise TraceError(_message(owner, line, problem, fix)) from error


def _message(owner: str, line: Line | None, problem: str, fix: str) -> str:
    parts = [f"{owner} cannot be traced: {problem}"]
    if line is not None:
        parts.append(f"  at {line[0]}:{line[1]}: {line[2]}")
    parts.append(f"fix: {fix}")
    return "\n".join(parts)


def _deepest_line(error: BaseException) -> Line | None:
    """Return the user's deepest line in the traceback, else the deepest in a layer of torch.nn."""
    user = layer = None
    trace = error.__traceback__
    while trace is not None:
        filename, number = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        if is_model_file(filename):
            user = filename, number, linecache.getline(filename, number).strip()
        elif _is_torch_layer(filename):
            layer = filename, number, linecache.getline(filename, number).strip()
        trace = trace.tb_next
    return user or layer


def _explain(chain: list[BaseException]) -> tuple[str, str]:
    for error in chain:
        if isinstance(error, Refusal):
            return error.problem, error.fix
    for error in chain:
        if isinstance(error, (GuardOnDataDependentSymNode, DataDependentOutputException)):
            return (
                "the control flow of the forward depends on the data in a tensor",
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
            "a tensor of the forward bypasses the graph: through .data, or stored by an earlier call",
            "use detach() instead of .data, and a buffer for a tensor that stays from call to call",
        )
    text = (str(error).strip() or "no message").splitlines()[0]
    devices = re.search(r"two (?:different )?devices,? (\S+?),? (?:and )?(\w+(?::\d+)?)", text)
    if devices is not None:
        return (
            f"an op gets tensors on two devices, {devices[1]} and {devices[2]}",
            "move the model and its inputs to one device, model.to(device) and inputs.to(device), "
            "and make the tensors of the forward there",
        )
    if isinstance(error, UserError):
        return f"torch.export fails: {text}", "change this part of the forward"
    return (
        f"it raised {type(error).__name__}: {text}",
        "call the model with these inputs outside of autopar; "
        "if that works, this line cannot run on tensors without data",
    )


def check_static(graph: Graph, owner: str) -> None:
    """Raise if a number or a size in a graph is symbolic."""
    for node in graph.nodes:
        val = node.meta.get("val")
        sizes = val.shape if isinstance(val, torch.Tensor) else (val,)
        if any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes):
            line = user_line(node.meta.get("stack_trace") or "")
            raise TraceError(_message(owner, line, *DATA_DEPENDENT_SHAPE))
