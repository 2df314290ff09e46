"""Where numba cannot be imported, whoever searches is told."""

from __future__ import annotations

import pytest

from autopar.errors import AutoparWarning
from autopar.search import compiled


def test_plain_loops_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled.numba is not None:
        compiled.warn_if_slow()  # warnings are errors: it says nothing
    monkeypatch.setattr(compiled, "numba", None)
    monkeypatch.setattr(compiled, "REASON", "ImportError: Numba needs NumPy 2.3 or less")
    with pytest.warns(AutoparWarning, match=r"numba cannot be imported \(ImportError: .* some hundred times slower"):
        compiled.warn_if_slow()
    assert compiled.compiled(sum) is sum
