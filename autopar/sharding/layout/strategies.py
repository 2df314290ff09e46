"""The strategies that autopar ships: layouts for any model, by name."""

from __future__ import annotations

from pathlib import Path

from autopar.resources import data_folder
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.source import unknown_name

__all__ = ["load_strategy", "strategy_names", "strategy_path"]


def strategy_names() -> tuple[str, ...]:
    """The names of all strategies, in alphabetical order."""
    return tuple(sorted(path.stem for path in data_folder("strategies").glob("*.lay")))


def strategy_path(name: str) -> Path:
    """The file of a strategy."""
    known = strategy_names()
    if name not in known:
        raise unknown_name("strategy", name, known)
    return data_folder("strategies") / f"{name}.lay"


def load_strategy(name: str) -> Layout:
    """A strategy as a layout, on its own axes; `on_axes` puts it on those of a mesh."""
    return Layout.load(strategy_path(name))
