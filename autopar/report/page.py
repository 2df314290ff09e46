"""The page: one file that needs no network, with its data, style and script inside."""

from __future__ import annotations

import html
import json
from pathlib import Path
from string import Template
from typing import Any

__all__ = ["page"]

_HERE = Path(__file__).parent


def page(contents: dict[str, Any]) -> str:
    """The whole page, of what `autopar.report.contents` gathers."""
    parts = {name: (_HERE / name).read_text(encoding="utf-8") for name in ("page.html", "style.css", "script.js")}
    # Nothing in the data may end the script that it stands in.
    data = json.dumps(contents, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Template(parts["page.html"]).substitute(
        title=html.escape(str(contents["title"])), style=parts["style.css"], script=parts["script.js"], data=data
    )
