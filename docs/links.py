"""A hook of mkdocs: pages of the repository outside docs/ become pages of the site, and links to them lead there.

The pages are written to be read in the repository. Links that lead to pages of the site are turned to where these are;
links to other files (a layout, an example) keep their words and lose their link.
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


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside, under names of their own."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn the links of one page."""
    sources = {site: ROOT / source for source, site in OUTSIDE.items()}
    place = sources.get(page.file.src_uri, DOCS / page.file.src_uri)
    return LINK.sub(lambda link: turned(link, place.parent), markdown)


def turned(link: re.Match[str], folder: Path) -> str:
    """A link as the site has it; one that leads nowhere is left, so that a strict build finds it."""
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
    return f"[{link['words']}]({relpath(site, '.')}{hash_sign}{anchor})"
