"""Where numba cannot be imported, whoever searches is told."""

from __future__ import annotations

import pytest

from autopar.errors import AutoparWarning
from benchmarks.contest import flat_arrays as jit


def test_plain_loops_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    if jit.numba is not None:
        jit.warn_if_slow()  # warnings are errors: it says nothing
    monkeypatch.setattr(jit, "numba", None)
    monkeypatch.setattr(jit, "REASON", "ImportError: Numba needs NumPy 2.3 or less")
    with pytest.warns(AutoparWarning, match=r"numba cannot be imported \(ImportError: .* some hundred times slower"):
        jit.warn_if_slow()
    assert jit.compiled(sum) is sum
