"""The report as a page: what it is made of, and that a browser shows all of it without a word of complaint."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.cost.evaluate import evaluate
from autopar.cost.hardware.cluster import load_cluster
from autopar.mesh import Mesh
from autopar.plans.find import PlanRequest, plan_under_layout
from autopar.plans.views.notes import notes
from autopar.plans.views.page import ComparedPlan, contents, page, report
from autopar.plans.views.summary import cost_rows
from autopar.sharding.layout.language import load_strategy
from autopar.sharding.time_slice import propagate_plan
from examples.gpt import gpt

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
AXES = {"dp": 2, "tp": 4}
LOOK = """
<script>
const overflow = document.documentElement.scrollWidth - innerWidth;
const count = (what) => document.querySelectorAll(what).length;
document.querySelector('#filter button:last-child').click();
document.title = JSON.stringify({
  overflow, facts: count(".fact"), dims: count("#dims tbody tr"), sent: count("#communication tbody tr"),
  ops: count(".op"), devices: count(".device"), rivals: count(".rival"), shown: timeline.shown.length,
  stages: count("#stages tbody tr"), beside: count("#beside tbody tr"), differing: count("#differing h3"),
  last: [...document.querySelectorAll("#differing h3")].map((one) => one.textContent).pop() || "",
  notes: count("#notes li"),
  kinds: count(".held"), faded: count("#communication tbody tr.faded"),
});
</script>
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    model, inputs = gpt(batch=8, heads=4)
    graph = autopar.trace(model, inputs)
    plan = propagate_plan(graph, load_strategy("megatron"), AXES)
    rival = ComparedPlan("</script><b>ddp", 1.0, 2.0, fits=False)
    cluster = load_cluster("h100")
    made = contents(graph, plan, cluster, title="GPT <&> co", memory_bytes=2**30, gap=0.01, rivals=(rival,))
    made["expected"] = evaluate(graph, plan, cluster)
    return made


def test_contents_are_those_of_the_plan(found: dict[str, Any]) -> None:
    costs = found["expected"]
    parts = found["costs"]["parts"]
    spent = sum(seconds for name, seconds in parts.items() if name != "recompute")
    assert spent == pytest.approx(costs.step_seconds)
    assert max(held for _, held, _ in found["memory"]["moments"]) == pytest.approx(costs.memory.peak_bytes)
    kinds, gradients = found["memory"]["kinds"], [held for *_, held in found["memory"]["moments"]]
    always = kinds["parameters"] + kinds["copies of parameters"] + kinds["optimizer"] + kinds["inputs"]
    assert all(held >= always + part for _, held, part in found["memory"]["moments"])
    assert gradients[-1] == pytest.approx(kinds["gradients"]), "all of them, once the backward is over"
    assert max(gradients) > gradients[0], "those of a rank stand beside their sums for a while"
    sections = found["sections"]
    assert [section["count"] for section in sections] == [1, 2, 1]
    sends = [(section["count"], one) for section in sections for op in section["ops"] for one in op["sends"]]
    told = {(one["kind"], tuple(one["axes"]), one["direction"], one["beside"]) for _, one in sends}
    assert told == {(one.kind, one.axes, one.direction, one.of == "parameters") for one in costs.communication}
    values = sum(count * one["seconds"] for count, one in sends if not one["beside"])
    assert values == pytest.approx(costs.seconds_of("values"))
    heads = next(dim for dim in found["dims"] if dim["name"] == "heads")
    assert set(heads["over"]) == {"tp"}


def test_what_travels_together_is_told_at_each_op(found: dict[str, Any]) -> None:
    """One bucket holds gradients of both layers: the layer that is shown has its own parameters in it, by name."""
    layer = next(section for section in found["sections"] if section["count"] == 2)
    for op in layer["ops"]:
        taken = {found["tensors"][number]["name"] for number in op["operands"]}
        weights = {name for name in taken if name.endswith((".weight", ".bias"))}
        told = [one for one in op["sends"] if one["beside"]]
        assert {name for one in told for name in one["tensor"].split(", ")} == weights, op["name"]
        assert all(one["together"] > len(weights) for one in told)


def test_pieces_are_those_of_the_tensor(found: dict[str, Any]) -> None:
    split = next(tensor for tensor in found["tensors"] if tensor["name"] == "blocks.0.up.weight")
    assert split["local"] == [split["shape"][0] // 4, split["shape"][1]]
    assert split["states"] == {"dp": "broadcast", "tp": "split"}
    assert [dim["axes"] for dim in split["dims"]] == [["tp"], []]


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attributes if name in ("src", "href")]


def test_the_page_is_one_file_and_what_is_in_it_cannot_end_its_script(found: dict[str, Any]) -> None:
    text = _page(found)
    links = _Links()
    links.feed(text)
    assert links.found == ["data:,"]
    assert "url(" not in text
    assert "@import" not in text
    assert "<title>GPT &lt;&amp;&gt; co</title>" in text
    assert "<b>ddp" not in text
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["rivals"][0]["name"] == "</script><b>ddp"


def _page(found: dict[str, Any]) -> str:
    return page({name: value for name, value in found.items() if name != "expected"})


def _seen(text: str, tmp_path: Path, width: int, scheme: str) -> dict[str, Any]:
    """Return what a browser shows of a page; fail if it complains."""
    place = tmp_path / "report.html"
    place.write_text(text.replace("</body>", LOOK + "</body>"), encoding="utf-8")
    assert BROWSER is not None
    preferred = {"dark": 0, "light": 1}[scheme]
    # A window cannot be as narrow as a telephone, so the page is laid out in a frame of that width.
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe src="report.html" style="width:{width}px;height:900px;border:0"></iframe>'
        "<script>onload = () => { document.body.append(frames[0].document.title); }</script>",
        encoding="utf-8",
    )
    ran = subprocess.run(
        [
            BROWSER,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--allow-file-access-from-files",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1400,1000",
            f"--blink-settings=preferredColorScheme={preferred}",
            "--enable-logging=stderr",
            "--virtual-time-budget=5000",
            "--dump-dom",
            frame.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert [line for line in ran.stderr.splitlines() if "CONSOLE" in line] == []
    told = re.search(r"\{&quot;.*\}|\{\".*\}", ran.stdout)
    assert told is not None, ran.stdout
    seen: dict[str, Any] = json.loads(told[0].replace("&quot;", '"'))
    return seen


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it(found: dict[str, Any], tmp_path: Path, width: int, scheme: str) -> None:
    seen = _seen(_page(found), tmp_path, width, scheme)
    assert seen["overflow"] <= 0
    assert seen["facts"] == 5
    assert seen["devices"] == 8
    assert seen["kinds"] == 5, "parameters, optimizer, inputs, gradients, what is saved"
    assert seen["rivals"] == 2
    assert seen["ops"] == sum(len(section["ops"]) for section in found["sections"])
    assert seen["dims"] == len(found["dims"])
    assert seen["sent"] == len(found["costs"]["communication"]) > seen["faded"] > 0
    assert seen["shown"] > 10
    assert seen["stages"] == seen["beside"] == seen["differing"] == 0


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_browser_shows_stages_and_plans_side_by_side(tmp_path: Path, width: int, scheme: str) -> None:
    graph, asked = autopar.trace(*gpt(batch=8, layers=4)), PlanRequest("h100")
    first, last = (f"micro 4; pipeline pp {one}; batch -> dp; * -> none" for one in ("1f1b", "gpipe"))
    plan, *others = (
        plan_under_layout(graph, Mesh("pp=2,dp=2"), layout, asked) for layout in (first, "fsdp(fsdp=pp*dp)", last)
    )
    seen = _seen(report(plan, beside=dict(zip("ab", others, strict=True))).text, tmp_path, width, scheme)
    assert seen["overflow"] <= 0
    assert seen["stages"] == 2
    assert seen["beside"] == len(cost_rows({"this plan": plan, "a": others[0], "b": others[1]})) - 1
    assert seen["differing"] == 2
    assert "the same" in seen["last"], "gpipe has other stages alone"
    assert seen["notes"] == len(notes(plan))
