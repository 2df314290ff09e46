"""Where in the user's model a node comes from."""

from __future__ import annotations

import os
import re
from functools import lru_cache

import torch
from torch.fx import Graph

from autopar.trace.exported import NodeOrigin

__all__ = ["CHECKPOINT", "Line", "is_users", "record_origins", "user_line"]

CHECKPOINT = "autopar_checkpoint"  # the key in node.meta["custom"], which torch carries along

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*(?:\n    ([^\n]*))?')
_NOT_THE_USERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep)

Line = tuple[str, int, str]


def is_users(filename: str) -> bool:
    """Whether a file may be the user's model: neither torch nor the tracer."""
    return not filename.startswith(_NOT_THE_USERS) and not filename.startswith("<")


@lru_cache(maxsize=4096)
def user_line(stack_trace: str) -> Line | None:
    """File, line and text of the deepest frame outside torch in a formatted stack."""
    frames = [frame for frame in _FRAME.findall(stack_trace) if is_users(frame[0])]
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
