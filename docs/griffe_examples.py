"""Extension of griffe: fence the examples of docstrings, so that the site shows them as code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

# A prompt, and all lines up to the next empty one.
EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


class FencedExamples(Extension):
    """Put each example of a docstring into a fence."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Fence the examples of one object."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", obj.docstring.value)
