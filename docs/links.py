"""Hook of mkdocs: add pages of the repository outside docs/ to the site, and adapt links between pages.

The pages are written for readers of the repository. Links to pages of the site are adapted; links to other files (a
layout, an example) become plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
OUTSIDE = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changes.md",
    "strategies/README.md": "strategies.md",
    "cost_models/README.md": "clusters.md",
}
LINK = re.compile(r"\[(?P<words>[^][]+)\]\((?P<target>[^()\s]+)\)")


STRATEGIES = re.compile(r"<!-- list of strategies.*?-->")
STRATEGY_LINE = re.compile(r'^strategy (?P<name>\w+) "(?P<description>.*)"$', re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of `OUTSIDE` to the site."""
    for source, page in OUTSIDE.items():
        content = STRATEGIES.sub(strategy_table(), (ROOT / source).read_text())
        files.append(File.generated(config, page, content=content))
    return files


def strategy_table() -> str:
    """Return a table of the shipped strategies, from the `strategy` lines of their files."""
    lines = [STRATEGY_LINE.search(path.read_text()) for path in sorted((ROOT / "strategies").glob("*.lay"))]
    rows = [f"| `{line['name']}` | {line['description']} |" for line in lines if line is not None]
    return "\n".join(["| strategy | what it does |", "|---|---|", *rows])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adapt the links of one page."""
    sources = {site: ROOT / source for source, site in OUTSIDE.items()}
    place = sources.get(page.file.src_uri, DOCS / page.file.src_uri)
    folder = Path(page.file.src_uri).parent.as_posix()
    return LINK.sub(lambda link: turned(link, place.parent, folder), markdown)


def turned(link: re.Match[str], folder: Path, site_folder: str) -> str:
    """Return a link as the site needs it; a broken link stays, so that a strict build reports it."""
    file, hash_sign, anchor = link["target"].partition("#")
    path = (folder / file).resolve()
    if "://" in file or not file or not path.exists():
        return link[0]
    if path.is_relative_to(DOCS):
        site = path.relative_to(DOCS).as_posix()
    elif path.is_relative_to(ROOT) and path.relative_to(ROOT).as_posix() in OUTSIDE:
        site = OUTSIDE[path.relative_to(ROOT).as_posix()]
    else:
        return link["words"]
    return f"[{link['words']}]({relpath(site, site_folder)}{hash_sign}{anchor})"
