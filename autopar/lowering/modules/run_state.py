"""Mark of dataclass fields that change while a generated module runs: its calls of all sizes share them."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["RUN_STATE"]

RUN_STATE: Mapping[str, bool] = {"run_state": True}
