"""Keep torch's own remarks about an export to ourselves, and say in our words what concerns the user."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autopar.errors import AutoparWarning

__all__ = ["quiet"]

# They log an error or a warning for each exception, which reaches the user as a TraceError anyway.
_LOGGERS = (
    "torch.export._trace",
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
)
# Recurrent layers keep their parameters in a list too, which follows when torch.export swaps them.
_OWN_LIST = re.compile(r"\S+\._flat_weights\[\d+\](, )?")
_ASSIGNED = re.compile(r"The tensor attributes? (.*) (?:was|were) assigned during export")


@contextmanager
def quiet(owner: str) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    disabled = [logger.disabled for logger in loggers]
    assigned: list[str] = []
    with warnings.catch_warnings():
        # torch's pytree code warns about its own deprecated class
        warnings.filterwarnings("ignore", category=FutureWarning, message=r".*(treespec|LeafSpec|TreeSpec).*")
        warnings.filterwarnings("always", category=UserWarning, message="The tensor attribute")
        show = warnings.showwarning

        def collect(message: Any, *rest: Any) -> None:
            found = _ASSIGNED.match(str(message))
            if found:
                names = _OWN_LIST.sub("", found[1]).rstrip(", ")
                assigned.extend([names.replace("self.model.", "self.")] if names else [])
            else:
                show(message, *rest)

        warnings.showwarning = collect  # type: ignore[assignment]  # the rest is passed on as it comes
        try:
            for logger in loggers:
                logger.disabled = True
            yield
        finally:
            for logger, was in zip(loggers, disabled, strict=True):
                logger.disabled = was
    for names in assigned:
        warnings.warn(
            AutoparWarning(
                f"the forward of {owner} sets {names} to a tensor; the traced graph does not. "
                "Register a buffer if the next call needs the value."
            ),
            stacklevel=3,
        )
