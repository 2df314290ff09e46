"""Where in the user's model a node comes from."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
from functools import cache, lru_cache
from types import FrameType

import torch
from torch.fx import Graph

from autopar.ir.exported import NodeOrigin

__all__ = ["CHECKPOINT", "Line", "is_users", "record_origins", "user_line"]

CHECKPOINT = "autopar_checkpoint"  # the key in node.meta["custom"], which torch carries along

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*(?:\n    ([^\n]*))?')
_NOT_THE_USERS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
)

_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep

Line = tuple[str, int, str]
_LAYERS = os.path.join(os.path.dirname(torch.__file__), "nn", "modules") + os.sep


def stack_of_model() -> str | None:
    """The frames of the model's code on the stack, from its forward down, as text.

    The user's files and the layers of torch.nn: all that `user_line` can choose from.
    """
    frames: list[str] = []
    frame: FrameType | None = sys._getframe(2)  # neither this one nor the caller, both of the tracer
    while frame is not None and not frame.f_code.co_filename.startswith(_NOT_THE_USERS[1]):
        code = frame.f_code
        if is_users(code.co_filename) or is_layer(code.co_filename):
            frames.append(_frame_text(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return "".join(reversed(frames)) or None


@lru_cache(maxsize=4096)
def _frame_text(filename: str, number: int, name: str) -> str:
    return f'File "{filename}", line {number}, in {name}\n    {linecache.getline(filename, number).strip()}\n'


@cache
def is_layer(filename: str) -> bool:
    """Whether a file holds layers of torch.nn."""
    return filename.startswith(_LAYERS) and not filename.endswith(os.sep + "module.py")


@cache
def is_users(filename: str) -> bool:
    """Whether a file may be the user's model: neither torch, nor the tracer, nor Python's own."""
    if filename.startswith("<") or filename.startswith(_NOT_THE_USERS):
        return False
    return "site-packages" in filename or not filename.startswith(_PYTHON)


@lru_cache(maxsize=4096)
def user_line(stack_trace: str) -> Line | None:
    """File, line and text of the deepest frame outside torch in a formatted stack, else of the deepest in torch.nn."""
    found = _FRAME.findall(stack_trace)
    frames = [frame for frame in found if is_users(frame[0])] or [frame for frame in found if is_layer(frame[0])]
    if not frames:
        return None
    filename, line, code = frames[-1]
    return filename, int(line), code.strip()


def record_origins(graph: Graph, prefix: str) -> None:
    """Set `meta["origin"]` of every call; `prefix` leads every module path."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        stack = node.meta.get("nn_module_stack") or {"": ("", "")}
        key, (path, _) = next(reversed(stack.items()))
        _, _, call = key.partition("@")
        line = user_line(node.meta.get("stack_trace") or "")
        node.meta["origin"] = NodeOrigin(
            module_path=path.removeprefix(prefix.rstrip(".")).removeprefix("."),
            module_call=int(call or 0),
            source=f"{os.path.basename(line[0])}:{line[1]}" if line else "",
            source_code=line[2] if line else "",
            checkpoint=(node.meta.get("custom") or {}).get(CHECKPOINT),
        )
