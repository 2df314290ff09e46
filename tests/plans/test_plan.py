"""`autopar.plan` and `Plan`: found, saved, read again, lowered for other sizes, compared, explained."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopar
from autopar.cost.hardware.cluster import load_cluster
from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.plans.find import PlanRequest, plan_under_layout
from autopar.plans.open_mesh import meshes_of
from autopar.plans.plan import Plan
from examples.gpt import gpt
from tests.traced import traced

HERE = PlanRequest("local-cpu")


@pytest.fixture(scope="module")
def graph() -> autopar.NamedGraph:
    return traced(gpt, batch=8)


@pytest.fixture(scope="module")
def megatron(graph: autopar.NamedGraph) -> Plan:
    return plan_under_layout(graph, Mesh("dp=2,tp=2"), "megatron_sp", HERE, "megatron_sp")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_searched_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    model, inputs = gpt(layers=2, d_model=512, heads=8, vocab=4096, seq=128, batch=8, device="meta")
    plan = autopar.plan(model, "dp=2,tp=2", inputs, cluster="h100", memory="10GiB", time_limit=60)
    assert plan.fits
    assert plan.gap is not None
    assert plan.gap >= 0
    assert plan.step_seconds == plan.costs.step_seconds
    plan.save(tmp_path / "gpt.plan.lay")
    again = Plan.load(tmp_path / "gpt.plan.lay", model, inputs)
    assert again.decided == plan.decided
    assert (again.step_seconds, again.memory_bytes, again.gap) == (plan.step_seconds, plan.memory_bytes, plan.gap)
    assert again.text == plan.text
    found = autopar.plan(model, "dp=2,tp=2", inputs, cluster="h100", memory="10GiB", time_limit=60)
    assert found.text == plan.text, "from the cache"


def test_a_plan_that_was_kept_is_found_without_a_search(
    graph: autopar.NamedGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autopar.plans import find, unequal

    asked = PlanRequest("local-cpu", time_limit=2)
    first = find.plan_graph(graph, (Mesh("dp=2"),), "batch -> dp; * -> none", asked)
    monkeypatch.setattr(unequal, "solve_plan", None)
    again = find.plan_graph(graph, (Mesh("dp=2"),), "batch -> dp; * -> none", asked)
    assert again.decided == first.decided
    with pytest.raises(TypeError):
        find.plan_graph(graph, (Mesh("dp=2"),), "batch -> dp; * -> none", replace(asked, cache=False))
    with pytest.raises(TypeError):
        find.plan_graph(graph, (Mesh("dp=2"),), "* -> none", asked)


def test_what_another_planner_found_is_not_found_again(
    graph: autopar.NamedGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autopar.plans import cache, find, unequal

    asked = PlanRequest("local-cpu", time_limit=2)
    first = find.plan_graph(graph, (Mesh("dp=2"),), "batch -> dp; * -> none", asked)
    solved = unequal.solve_plan
    warm = []
    monkeypatch.setattr(
        unequal, "solve_plan", lambda *args, **given: warm.append(given["warm"]) or solved(*args, **given)
    )
    monkeypatch.setattr(cache, "planner_version", lambda: "another")
    find.plan_graph(graph, (Mesh("dp=2"),), "batch -> dp; * -> none", asked)
    (begun,) = warm
    assert list(begun) == ["an earlier plan"]
    assert begun["an earlier plan"].assignment.stored == first.decided.assignment.stored


def test_any_line_of_the_code_makes_another_planner(tmp_path: Path) -> None:
    from autopar.plans.cache import planner_version

    versions = []
    for number, (name, text) in enumerate(
        [("a.py", "x = 1"), ("a.py", "x = 2"), ("b.py", "x = 2"), ("b/a.py", "x = 2")]
    ):
        place = tmp_path / str(number) / name
        place.parent.mkdir(parents=True)
        place.write_text(text)
        versions.append(planner_version(tmp_path / str(number)))
    assert len(set(versions)) == 4
    (tmp_path / "0" / "__pycache__").mkdir()
    (tmp_path / "0" / "__pycache__" / "a.pyc").write_bytes(b"")
    assert planner_version.__wrapped__(tmp_path / "0") == versions[0], "only sources count"
    assert planner_version() == planner_version(Path(autopar.__file__).parent)


def test_other_sizes(megatron: Plan) -> None:
    for batch in (4, 5):
        graph = traced(gpt, batch=batch)
        plan = Plan.read(megatron.text, graph)
        assert plan.decided.assignment.stored["blocks.0.up.weight"].splits == (("tp",), ())
        assert plan.decided.assignment.values["blocks.0/add"].splits[0] == ("dp",)


def test_another_model(megatron: Plan) -> None:
    graph = traced(gpt, layers=3, batch=8)
    with pytest.raises(AutoparError) as error:
        Plan.read(megatron.text, graph, "old.plan.lay")
    assert str(error.value).startswith(
        "old.plan.lay is the plan of another model: its GPT has other parameters than this one\n  old.plan.lay:3 | "
    )
    assert "\nfix: load it for the model that it was made for" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("# autopar plan", "# a plan"), "is no plan: expected the first line '# autopar plan'"),
        (("#   cluster ", "#   clutser "), "unknown key 'clutser' in the head of a plan; did you mean 'cluster'?"),
        (("#   step_seconds    0", "#   step_seconds    o"), "invalid value of 'step_seconds'"),
        (("local-cpu", "local-gpu"), "local-cpu"),
        (("mesh dp=2, tp=2", ""), "has no mesh with fixed sizes"),
        (("d_ff", "d_fff"), "E1: there is no dim 'd_fff'; did you mean 'd_ff'?"),
        (("@ids[", "@idds["), "E1: there is no tensor 'idds'; did you mean 'ids'?"),
        (("* -> none\n", "* -> none }\n"), "E0: expected the end of the line"),
    ],
)
def test_broken_files(megatron: Plan, tmp_path: Path, change: tuple[str, str], message: str) -> None:
    assert change[0] in megatron.text
    path = tmp_path / "broken.plan.lay"
    path.write_text(megatron.text.replace(*change, 1))
    with pytest.raises(AutoparError, match=r"(?s).*") as error:
        Plan.load(path, graph=megatron.graph)
    assert message in str(error.value)
    assert "\nfix: " in str(error.value)


HEADS = [
    ("step_seconds", "nan", "a finite number from 0 up"),
    ("step_seconds", "-1", "a finite number from 0 up"),
    ("bound_seconds", "1e999", "a finite number from 0 up"),
    ("memory_bytes", "inf", "a finite number from 0 up"),
    ("limit_bytes", "-1", "a whole number from 1 up"),
    ("limit_bytes", "9" * 30, "a whole number from 1 up"),
    ("micro_batches", "0", "a whole number from 1 up"),
    ("statements", "-1", "a whole number from 0 up"),
    ("precision", "load", "one of own, fp64"),
    ("precision", "bf16, sum=fp32", "one of own, fp64"),
    ("optimizer", "adamv", "one of"),
    ("outputs", "none", "one of sharded"),
    ("origin", "\x1b[2Jhere", "as it is saved"),
]


@pytest.mark.parametrize(("key", "value", "expected"), HEADS)
def test_values_in_a_head_are_what_they_can_be(megatron: Plan, key: str, value: str, expected: str) -> None:
    lines = [line for line in megatron.text.splitlines() if not line.startswith(f"#   {key} ")]
    with pytest.raises(AutoparError, match=f"invalid value of '{key}': expected {expected}") as error:
        Plan.read("\n".join([lines[0], f"#   {key:15} {value}", *lines[1:]]), megatron.graph, "x.plan.lay")
    assert "\n  x.plan.lay:2 | " in str(error.value)
    with pytest.raises(AutoparError, match="key 'model' stands twice"):
        Plan.read("\n".join([lines[0], "#   model           GPT", *lines[1:]]), megatron.graph)


def test_a_bound_is_the_word_of_the_file(megatron: Plan) -> None:
    """It is shown as such, and only with the time that it was found for; time and memory are predicted anew."""

    def read(seconds: float, bound: float) -> Plan:
        kept = [line for line in megatron.text.splitlines() if not line.startswith(("#   step_", "#   memory_"))]
        head = [f"#   step_seconds    {seconds}", f"#   bound_seconds   {bound}", "#   memory_bytes    1.0"]
        return Plan.read("\n".join([kept[0], *head, *kept[1:]]), megatron.graph)

    said = read(megatron.step_seconds, 0.5 * megatron.step_seconds)
    assert (said.gap, said.claimed) == (0.5, True)
    assert "at most 50 % from the best plan, as its file claims" in said.summary()
    assert said.memory_bytes == megatron.memory_bytes
    for seconds, bound in ((0.5 * megatron.step_seconds, 0.5 * megatron.step_seconds), (megatron.step_seconds, 1e9)):
        other = read(seconds, bound)
        assert (other.gap, other.claimed, other.step_seconds) == (None, False, megatron.step_seconds)


def test_a_file_of_the_cache_is_not_believed(
    graph: autopar.NamedGraph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What does not answer the question is searched again; the limit is that of the question."""
    from autopar.plans import find, unequal

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = PlanRequest(replace(load_cluster("local-cpu"), name="mine"), time_limit=2)

    def planned() -> Plan:
        return find.plan_graph(graph, (Mesh("dp=2"),), "batch -> dp; * -> none", asked)

    first = planned()
    (path,) = tmp_path.rglob("*.lay")
    path.write_text(re.sub(r"limit_bytes +\d+", "limit_bytes     7", path.read_text()))
    solved = unequal.solve_plan
    monkeypatch.setattr(unequal, "solve_plan", None)
    found = planned()
    assert (found.decided, found.limit_bytes, found.within_layout) == (first.decided, first.limit_bytes, True)
    path.write_text(path.read_text().replace("dp=2", "dp=4"))
    monkeypatch.setattr(unequal, "solve_plan", solved)
    assert planned().mesh == first.mesh


def test_a_file_that_is_cut_off(megatron: Plan, graph: autopar.NamedGraph) -> None:
    """Wherever it ends, nothing is made up; only the last comments may be missing."""
    lines = megatron.text.splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if line.strip() and not line.startswith("#"))
    head = next(i for i, line in enumerate(lines) if "statements" in line)
    for end in range(head + 1, last + 1):
        with pytest.raises(AutoparError, match=r"is cut off: expected|has no mesh with fixed sizes"):
            Plan.read("".join(lines[:end]), graph)
    assert Plan.read("".join(lines[: last + 1]), graph).decided == megatron.decided
    without = [line for line in lines[:last] if "#   statements" not in line]
    assert Plan.read("".join(without), graph), "lines taken out by hand, and the word for their number"


def test_words(megatron: Plan, graph: autopar.NamedGraph) -> None:
    summary = megatron.summary()
    assert summary.startswith("GPT on dp=2,tp=2: 4 × CPU process")
    assert "blocks.0 ... blocks.1 (×2)" in summary
    text = megatron.explain("blocks.0.up.weight")
    assert "layout  d_ff -> tp" in text
    line = int(text.partition("line ")[2].partition(":")[0])
    assert megatron.text.splitlines()[line - 1] == "(heads, d_ff) -> tp"
    assert "rule    a b k, n k, n -> a b n" in megatron.explain("blocks.0.up/linear")
    with pytest.raises(
        AutoparError,
        match=r"no tensor or op of the model is named 'blocks\.0\.upp\.weight'; did you mean 'blocks\.0\.up\.weight'",
    ):
        megatron.explain("blocks.0.upp.weight")
    other = plan_under_layout(graph, megatron.mesh, "ddp(dp=dp*tp)", HERE)
    diff = megatron.diff(other)
    assert "blocks.*.up.weight" in diff
    row = next(line for line in diff.splitlines() if "blocks.*.up.weight" in line)
    assert row.split() == ["blocks.*.up.weight", "d_ff", "->", "tp", "whole"]
    assert "other: the same shardings" in megatron.diff(megatron)


def test_collectives_are_what_the_costs_count(megatron: Plan) -> None:
    values = [one for one in megatron.costs.communication if one.of == "values"]
    counted = sum(one.count for one in values)
    own = [one for one in megatron.collectives if megatron.graph.tensors[one.tensor].kind != "param"]
    assert len(own) == counted


def test_meshes() -> None:
    assert [str(mesh) for mesh in meshes_of("?", 4)] == ["dp=1,tp=4", "dp=2,tp=2", "dp=4,tp=1"]
    assert [str(mesh) for mesh in meshes_of("dp=?,tp=2", 8)] == ["dp=4,tp=2"]
    assert [str(mesh) for mesh in meshes_of("dp=2,tp=?,sp=?", 8)] == [
        "dp=2,tp=1,sp=4", "dp=2,tp=2,sp=2", "dp=2,tp=4,sp=1",
    ]  # fmt: skip
    for mesh, devices, message in (
        ("?", None, "open sizes"),
        ("dp=3,tp=?", 8, "expected a multiple of 3"),
        ("dp=2", 3, "wrong devices=3: expected 2"),
    ):
        with pytest.raises(AutoparError, match=message):
            meshes_of(mesh, devices)


def test_memory_that_is_not_enough() -> None:
    model, inputs = gpt(batch=8)
    with pytest.raises(AutoparError, match=r"no plan was found that fits in .*\nfix: ") as error:
        autopar.plan(model, "dp=2", inputs, cluster="local-cpu", memory="50kB", time_limit=2)
    assert "the least that was found" in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory": "70"}, "invalid memory='70': expected a unit"),
        ({"memory": -1.0}, "invalid memory=-1.0: expected a size or a share"),
        ({"cluster": "h1000"}, "did you mean 'h100'"),
        ({"optimizer": "adamww"}, "did you mean 'adamw'"),
        ({"outputs": "whole"}, "invalid outputs='whole': expected one of"),
        ({"time_limit": 0.0}, "invalid time_limit=0.0: expected seconds"),
        ({"layout": "megatrom"}, "did you mean 'megatron'"),
        ({"layout": "batch -> tq"}, "E1: there is no axis 'tq'"),
    ],
)
def test_bad_arguments(given: dict[str, object], message: str) -> None:
    model, inputs = torch.nn.Linear(4, 4), (torch.randn(2, 4),)
    with pytest.raises(AutoparError) as error:
        autopar.plan(model, "dp=2", inputs, **given)  # type: ignore[arg-type]
    assert message in str(error.value)


@pytest.mark.slow
def test_layers_that_are_computed_again_are_written() -> None:
    model, inputs = gpt(layers=6, d_model=512, heads=8, vocab=512, seq=1024, batch=8, device="meta")
    plan = autopar.plan(model, "dp=2,tp=2", inputs, cluster="h100", memory="300MiB", time_limit=60, cache=False)
    assert plan.fits
    assert plan.decided.recompute
    assert plan.decided.assignment.recompute == plan.decided.recompute, "what is priced is what runs"
    assert "recompute full @blocks" in plan.text
    assert Plan.read(plan.text, plan.graph).decided == plan.decided
