"""Refuse models whose graph depends on a number that Python's `random` or `numpy.random` draws.

A trace runs the forward once, so such a number would be a constant of the graph: each call would repeat it. Models
also draw numbers that nothing depends on, as for layers that are dropped with probability zero. So a model that draws
is exported again with its smallest and its largest draws, and the graphs are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from autopar.tracing.export.program_graph import ProgramGraph
from autopar.tracing.export.refuse import Refusal, stack_of_model, user_line

__all__ = ["check_random"]

# Draws of which the smallest or the largest is taken.
TRIES = 64
_NOT_DRAWS = frozenset({"seed", "getstate", "setstate", "get_state", "set_state", "default_rng", "get_bit_generator"})
_Extreme = Callable[[list[Any]], Any]


def check_random(export: Callable[[], ProgramGraph]) -> ProgramGraph:
    """Return an exported graph; raise if it depends on numbers that Python or numpy draws."""
    lines: list[str] = []
    before = _states()
    with _recorded(lines, None):
        program = export()
    if not _same_states(before, _states()):
        known = _text(program)
        if not lines or any(_with_extreme(export, extreme) != known for extreme in (min, max)):
            raise _error_at(next(iter(lines), None))
        _set_states(before)
    return program


def _with_extreme(export: Callable[[], ProgramGraph], extreme: _Extreme) -> list[Any] | None:
    """Return the text of a graph that is exported with other draws; None if the model fails with them."""
    with _recorded([], extreme):
        try:
            return _text(export())
        except Exception:  # noqa: BLE001  # the model with other draws is another one
            return None


def _error_at(stack: str | None) -> Refusal:
    error = Refusal(
        "the forward depends on a number that Python's `random` or `numpy.random` draws, and each call of the graph "
        "would repeat it",
        "draw it outside of the model and give it as an input; or draw tensors with torch",
    )
    error.line = None if stack is None else user_line(stack)
    return error


@contextmanager
def _recorded(lines: list[str], extreme: _Extreme | None) -> Iterator[None]:
    """Note the lines of the model that draw; with `extreme` numbers are the smallest or the largest of many draws."""
    replaced = [(module, name, getattr(module, name)) for module in (random, np.random) for name in _draws(module)]
    try:
        for module, name, function in replaced:
            setattr(module, name, partial(_drawn, function, lines, extreme))
        yield
    finally:
        for module, name, function in replaced:
            setattr(module, name, function)


def _draws(module: Any) -> list[str]:
    found = (name for name in module.__all__ if name not in _NOT_DRAWS)
    return [name for name in found if not isinstance(value := getattr(module, name), type) and callable(value)]


def _drawn(function: Any, lines: list[str], extreme: _Extreme | None, *args: Any, **options: Any) -> Any:
    stack = stack_of_model()
    if stack is not None:
        lines.append(stack)
    drawn = function(*args, **options)
    if stack is None or extreme is None or not isinstance(drawn, int | float):
        return drawn
    return extreme([drawn, *(function(*args, **options) for _ in range(TRIES))])


def _text(program: ProgramGraph) -> list[Any]:
    """Return a graph as text, and its constants."""
    values = {name: one.tolist() for name, one in program.constants.items() if _has_values(one)}
    return [str(program.graph), [str(node.meta.get("val")) for node in program.graph.nodes], values]


def _has_values(tensor: torch.Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor))


def _states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _same_states(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[0] == other[0] and all(np.array_equal(a, b) for a, b in zip(one[1], other[1], strict=True))
