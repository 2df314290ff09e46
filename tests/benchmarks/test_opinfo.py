"""The rules on the calls of torch's own tests: a slice of what `python -m benchmarks.soundness --opinfo` checks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autopar.rules import registry
from autopar.rules.table import parse_entry
from benchmarks.opinfo import check_ops, opinfo_names

pytest.importorskip("expecttest")
pytestmark = pytest.mark.filterwarnings("ignore")

SLICE = (
    *("cross", "squeeze", "softmax", "flatten", "diag", "tril", "linspace", "unfold_copy", "repeat", "expand", "var"),
    *("nn.functional.embedding", "nn.functional.conv1d", "nn.functional.avg_pool1d", "nn.functional.pixel_shuffle"),
    *("nn.functional.adaptive_avg_pool1d", "nn.functional.interpolate.nearest", "index_add", "cumsum", "matmul"),
)


@pytest.mark.parametrize("name", SLICE)
def test_no_number_is_wrong(name: str) -> None:
    (found,) = check_ops([name], limit=3)
    assert not found.wrong, found.wrong[0]
    assert found.factor_cases or found.linear_cases or found.without_rule


def test_every_name_of_the_slice_is_one_of_torch() -> None:
    assert set(SLICE) <= opinfo_names().keys()


def test_a_wrong_rule_is_found_and_a_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = parse_entry("aten.softmax.int", "... n -> ... n; linear 0", {})
    monkeypatch.setitem(registry._registered, "aten.softmax.int", wrong)
    output = tmp_path / "found.jsonl"
    (found,) = check_ops(["softmax"], limit=2, output=output)
    assert any("linear in (0,)" in text for text in found.wrong)
    assert any("output 0 differs" in text for text in found.wrong)
    monkeypatch.undo()
    assert list(check_ops(["softmax"], limit=2, output=output)) == [found], "what is done is not done again"
    assert torch.get_default_dtype() is torch.float32
