"""The code of pages on two ranks. Pages run on one rank in tests/test_docs.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.runtime.launcher import launch
from tests.test_docs import PAGES as DOCUMENTS
from tests.test_docs import ROOT, blocks, page_name, skip_without_hosts

# Every page: code that runs a model takes the number of ranks from the process group, and the rest needs none.
PAGES = [page_name(page) for page in DOCUMENTS if "```python" in page.read_text()]
QUICK = "docs/running.md"
# What torchrun sets, and Accelerate reads.
ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true"}


def run_page(page: str, folder: str) -> int:
    """Run the Python blocks of a page in a folder that all ranks share; return how often it ends the process group."""
    os.chdir(folder)
    module = ModuleType("page")
    sys.modules["page"] = module
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    # The launcher ends the group itself, after this.
    with patch.dict(os.environ, ADDRESS | numbers), patch.object(dist, "destroy_process_group") as ended:
        for block in blocks((ROOT / page).read_text()):
            if block.language == "python":
                source = "\n" * (block.first_line - 1) + dedent(block.body)
                exec(compile(source, page, "exec"), module.__dict__)
    return ended.call_count


@pytest.mark.parametrize(
    "page", [page if page == QUICK else pytest.param(page, marks=pytest.mark.slow) for page in PAGES]
)
def test_code_of_a_page_runs_on_two_ranks(page: str, tmp_path: Path) -> None:
    skip_without_hosts(page)
    (tmp_path / "examples").symlink_to(ROOT / "examples", target_is_directory=True)
    ends = (ROOT / page).read_text().count("dist.destroy_process_group()")
    assert launch(run_page, page, str(tmp_path), ranks=2) == [ends, ends]
