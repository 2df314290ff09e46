"""`compiled` marks a loop over arrays: numba compiles it where it is installed, else it runs as plain Python.

The two give the same results; only the speed differs. Modules that use it are imported late, because importing numba
takes a while. Compiled code is kept beside the source, or in the user's cache folder where that cannot be written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["COMPILED", "compiled"]

F = TypeVar("F", bound=Callable[..., Any])

numba: Any
try:
    import numba
except ImportError:  # the extra `fast` is not installed
    numba = None

COMPILED: bool = numba is not None and not numba.config.DISABLE_JIT


def compiled(function: F) -> F:
    """The function, compiled at its first call."""
    if numba is None:
        return function
    try:
        return cast(F, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # there is no folder where compiled code could be kept
        return cast(F, numba.njit(nogil=True)(function))
