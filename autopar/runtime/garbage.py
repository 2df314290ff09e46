"""Python's collection of garbage while a call is made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collected_later"]


@contextmanager
def collected_later() -> Iterator[None]:
    """Collect no garbage meanwhile, if it is collected at all; memory without cycles is freed as ever.

    A graph and its plan are thousands of objects that stay. They set off full collections, each of which visits all
    objects of the process, those of torch and transformers included: a third of the time of a call of another size.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
