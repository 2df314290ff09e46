"""Retired words of docs/glossary.md do not come back in names of the package and in pages."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Retired:
    """Words that no name contains; `instead` is the word of the glossary, `allowed` has names with their reasons."""

    words: tuple[str, ...]
    instead: str
    allowed: Mapping[str, str] = field(default_factory=dict)


MOE = "experts of a mixture of experts"
SHELL = "completion of words in a shell"
OPTION = "the option --no-experts and the key `experts` of plans as JSON are public"
VIEW = "request of a view, a question of the user"

WORDS = (
    Retired(("asked", "asking"), "PlanRequest, BoundLayout", {"_asked": VIEW}),
    Retired(("wish", "wishes", "wished"), "tensor axes"),
    Retired(("wanted", "demands", "demanded"), "SplitRequest, BoundLayout"),
    Retired(("decisions",), "assignment"),
    Retired(("weighed",), "weighted"),
    Retired(("mixing", "mixture", "mixtures"), "splice"),
    Retired(("lasting",), "keep_gathered"),
    Retired(("race",), "incumbent"),
    Retired(("dearest", "dear"), "multiplier"),
    Retired(("promise", "promises", "promised"), "contract", {"_promises": VIEW}),
    Retired(("told", "untold"), "reported"),
    Retired(
        ("conversion", "conversions", "converted"),
        "reshard",
        {"check_conversion": "of the dtype or device of a module"},
    ),
    Retired(("leg", "legs"), "step"),
    Retired(("refusal",), "infeasible", {"Refusal": "an op that cannot be traced, not a plan"}),
    Retired(
        ("expert", "experts"),
        "strategy",
        dict.fromkeys(("experts", "expert_rows", "_expert_rows", "_expert_rows_samples", "grouped_experts"), MOE)
        | dict.fromkeys(("_experts", "_expert_data"), OPTION),
    ),
    Retired(
        ("completion", "complete", "completed"),
        "propagation",
        {"PrintCompletion": SHELL, "complete": "completes a placement of torch"},
    ),
)

CLASSES = {
    "Asked": "PlanRequest",
    "Asking": "BoundLayout",
    "Decisions": "Assignment",
    "Demands": "BoundLayout",
    "Given": "CallSignature",
    "Held": "StoredTensor, StorageOption, LocalShard or LiveState",
    "HeldTensors": "StorageOption",
    "Holding": "GatherPolicy",
    "Inserted": "InsertedReshard",
    "Kept": "saved",
    "LayoutText": "Layout",
    "Leg": "Step",
    "Message": "OpMessage",
    "Move": "LocalStep",
    "OpConversions": "OpReshards",
    "OpDecision": "OpAssignment",
    "Option": "OpSharding",
    "Planned": "CompiledCall",
    "Plans": "CallCache",
    "Race": "Incumbent",
    "SearchLayout": "BoundLayout",
    "TensorLayout": "Sharding",
    "Wanted": "SplitRequest",
    "Wiring": "ReshardPlan",
}


def parts_of(name: str) -> set[str]:
    """Return the words of a name: `plan_ofParts` has plan, of, parts."""
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def names_in(source: str) -> Iterator[tuple[str, int]]:
    """Yield each class and function of a file, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno


def retired_names(names: Iterator[tuple[str, int]]) -> list[str]:
    """Return a line for each name that has a retired word, with the word to use."""
    found = []
    for name, line in names:
        if name in CLASSES:
            found.append(f"{line}: {name}: use {CLASSES[name]}")
        for retired in WORDS:
            if parts_of(name) & set(retired.words) and name not in retired.allowed:
                found.append(f"{line}: {name}: use {retired.instead}")
    return found


def test_a_planted_word_is_found() -> None:
    planted = "class Held: ...\n\ndef asked_for(): ...\n\nclass A:\n    def _legs(self): ...\n"
    assert retired_names(names_in(planted)) == [
        "1: Held: use StoredTensor, StorageOption, LocalShard or LiveState",
        "3: asked_for: use PlanRequest, BoundLayout",
        "6: _legs: use step",
    ]
    assert retired_names(iter([("complete_rule", 1), ("baskets", 2)])) == ["1: complete_rule: use propagation"]


def test_no_name_has_a_retired_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "autopar").rglob("*.py"))
        for line in retired_names(iter([*names_in(path.read_text()), (path.stem, 0)]))
    ]
    assert found == []


def test_no_exception_is_left_over() -> None:
    names = {
        name for path in (ROOT / "autopar").rglob("*.py") for name, _ in [*names_in(path.read_text()), (path.stem, 0)]
    }
    assert [name for retired in WORDS for name in retired.allowed if name not in names] == []


def test_classes_of_the_glossary_exist() -> None:
    defined = "\n".join(path.read_text() for path in (ROOT / "autopar").rglob("*.py"))
    named = re.findall(r"`([A-Z]\w+)`", (ROOT / "docs" / "glossary.md").read_text())
    assert len(named) > 40
    assert [name for name in named if not re.search(rf"^(class {name}\b|{name} = )", defined, re.MULTILINE)] == []


# Phrases that no page has; code and output of commands are left out.
PHRASES = {
    r"comput\w+ again": "recompute",
    r"strateg\w+ of experts|experts' strateg\w+": "published strategy",
    r"promises?\b|promised\b": "contract",
    r"\bmixtures\b": "splice",
    r"\bdecisions\b": "assignment",
    r"\bdearest\b|\bdearer\b": "multiplier",
    r"\bconversions?\b": "reshard",
    r"\btold\b|\bwishes\b|\bcomes to\b|\bgives way\b|\blet go of\b": "a plain verb",
    r"\bwhat (is|are|was) (the|a|an|it|they|not)\b": "the noun",
}
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
QUOTED = {"docs/glossary.md": "its last table lists earlier words"}


def retired_phrases(page: str) -> list[str]:
    prose = re.sub(r"^ *```.*?^ *```|`[^`\n]*`", "", page, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"\s+", " ", prose)
    found = ((phrase, re.search(phrase, prose, re.IGNORECASE)) for phrase in PHRASES)
    return [f"{match[0]}: use {PHRASES[phrase]}" for phrase, match in found if match]


def test_a_planted_phrase_is_found() -> None:
    page = "# Title\n\nThe layer is computed\nagain. ```text`\n\n```text\nstrategies of experts\n```\n"
    assert retired_phrases(page) == ["computed again: use recompute"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_a_retired_phrase(page: Path) -> None:
    if str(page.relative_to(ROOT)) not in QUOTED:
        assert retired_phrases(page.read_text()) == []


BEGINNING = re.compile(r"(What|Whether|Of|By|That)\b")


def docstrings(source: str) -> Iterator[tuple[str, int]]:
    """Yield each string that is a statement: docstrings, and notes below attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value, node.lineno


def test_no_docstring_begins_with_a_clause() -> None:
    assert [line for text, line in docstrings('"""What is sent."""\n') if BEGINNING.match(text)] == [1]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text[:40]}"
        for path in sorted((ROOT / "autopar").rglob("*.py"))
        for text, line in docstrings(path.read_text())
        if BEGINNING.match(text)
    ]
    assert found == []


def test_three_to_six_percent_of_the_package_are_comments() -> None:
    lines = comments = 0
    for path in (ROOT / "autopar").rglob("*.py"):
        with path.open("rb") as file:
            tokens = list(tokenize.tokenize(file.readline))
        lines += len(path.read_text().splitlines())
        comments += len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})
    assert 0.03 <= comments / lines <= 0.06
