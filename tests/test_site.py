"""The site of the documentation is built, and no link or anchor of it leads nowhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import ROOT

REASON = "not installed: pip install 'autopar[docs]'"


def test_strict_build(tmp_path: Path) -> None:
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason=REASON)
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    assert [page for page in sorted(pages) if not (site / page).is_file()] == []
    reference = (site / "api.html").read_text()
    assert "Search the best plan for a model on a mesh" in reference, "docstrings are on the page"
    assert 'href="strategies.html"' in (site / "language.html").read_text(), "pages outside docs/ are pages of the site"
