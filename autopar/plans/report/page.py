"""Report page: one file that needs no network, with data, style and script inside."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from autopar.files import write_text
from autopar.plans.record import PlanRecord
from autopar.plans.report.contents import ComparedPlan, contents

__all__ = ["Page", "page", "report"]

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Page:
    """HTML page for a notebook or a browser."""

    text: str = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write the page to a file, as in `report.html`."""
        write_text(path, self.text)

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self.text)}" style="width:100%;height:40rem;border:0"></iframe>'


def report(plan: PlanRecord, experts: Mapping[str, PlanRecord] | None = None) -> Page:
    """Return the page of a plan, compared with other plans for the same model and mesh."""
    rivals = [ComparedPlan(name, one.step_seconds, one.memory_bytes, one.fits) for name, one in (experts or {}).items()]
    shown = contents(
        plan.graph,
        plan.decided,
        plan.cluster,
        title=f"{type(plan.graph.model).__name__} on {plan.mesh}",
        memory_bytes=plan.limit_bytes,
        gap=plan.gap,
        claimed=plan.claimed,
        within_layout=plan.within_layout,
        rivals=rivals,
    )
    return Page(page(shown))


def page(shown: dict[str, Any]) -> str:
    """Return the text of the page for the data of `contents`."""
    parts = {name: (_HERE / name).read_text(encoding="utf-8") for name in ("page.html", "style.css", "script.js")}
    # No text in the data may end the script element: `</script>` in a name would.
    data = json.dumps(shown, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Template(parts["page.html"]).substitute(
        title=html.escape(str(shown["title"])), style=parts["style.css"], script=parts["script.js"], data=data
    )
