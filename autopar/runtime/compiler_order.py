"""Keep the order of a graph's ops while torch.compile lowers it.

Inductor orders ops anew where its estimate of the peak memory falls. Sums of gradients need new buffers, so it may
begin all of them after the whole backward, where nothing hides them. In the order of the graph each sum begins as soon
as its gradients are there, and the memory is that of the plan.

Inductor lowers the backward when it first runs, so hooks of its autograd node switch the option off and on again, until
one backward has run.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["keep_order_in_backward"]

_OPTION = "reorder_for_peak_memory"
# Most nodes of autograd between a result and the compiled graph: a view of it, or two.
_DEPTH = 4


def keep_order_in_backward(outputs: Sequence[Any]) -> None:
    """Let Inductor keep the order of the backward of a compiled graph with these results."""
    found = {_compiled_node(one.grad_fn) for one in outputs if isinstance(one, Tensor) and one.grad_fn is not None}
    for node in found - {None}:
        if type(node) not in _LOWERED:
            keeper = _OrderKeeper(type(node))
            node.register_prehook(keeper.keep)
            node.register_hook(keeper.restore)


def _compiled_node(node: Any) -> Any:
    """Return the autograd node of a compiled graph from which another node reads; None where there is none."""
    for _ in range(_DEPTH):
        if node is None or "CompiledFunction" in node.name():
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None


# Classes of autograd nodes whose backward has run: torch makes one for each graph that it compiles.
_LOWERED: weakref.WeakSet[type] = weakref.WeakSet()


class _OrderKeeper:
    """Keeps the order of ops during a backward."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        # The option as the user has it.
        self._users: Any = None

    def keep(self, gradients: Any) -> None:
        self._users = _in_backward(getattr, _config(), _OPTION, None)
        if self._users:
            _in_backward(setattr, _config(), _OPTION, False)

    def restore(self, of_inputs: Any, of_outputs: Any) -> None:
        _LOWERED.add(self._kind)
        if self._users:
            _in_backward(setattr, _config(), _OPTION, self._users)


def _config() -> Any:
    """Return the options of Inductor, which only a compiler imports; None where it is another one."""
    return sys.modules.get("torch._inductor.config")


def _in_backward(run: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function where compiled graphs of this backward see its options.

    That is a copy of the context in which the backward began; older versions of torch have none.
    """
    context = torch._C._get_obj_in_tls("context") if torch._C._is_key_in_tls("context") else None
    return run(*arguments) if context is None else context.run(run, *arguments)
