"""`compiled` marks a loop over arrays: numba compiles it where it can be imported, else it runs as plain Python.

The two give the same results; only the speed differs. Modules that use it are imported late, because importing numba
takes a while. Compiled code is kept beside the source, or in the user's cache folder where that cannot be written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

from autopar.errors import AutoparWarning

__all__ = ["COMPILED", "compiled", "warn_if_slow"]

F = TypeVar("F", bound=Callable[..., Any])

numba: Any
REASON = ""
"""Why numba cannot be imported."""
try:
    import numba
except (
    ImportError,
    OSError,
    SystemError,
    AttributeError,
) as error:  # a numpy that it does not know raises any of these
    numba, REASON = None, f"{type(error).__name__}: {error}"

COMPILED: bool = numba is not None and not numba.config.DISABLE_JIT


def compiled(function: F) -> F:
    """The function, compiled at its first call."""
    if numba is None:
        return function
    try:
        return cast(F, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # there is no folder where compiled code could be kept
        return cast(F, numba.njit(nogil=True)(function))


def warn_if_slow() -> None:
    """Warn where the loops are about to run as plain Python: in the time of a search they then find much less."""
    if numba is None:
        reason = REASON.partition("\n")[0]
        warnings.warn(
            f"numba cannot be imported ({reason}): the search runs some hundred times slower, and finds worse "
            "answers in its time\nfix: pip install numba",
            AutoparWarning,
            stacklevel=2,
        )
