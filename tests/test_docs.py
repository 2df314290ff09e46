"""The README and docs/ tell the truth: their code runs, their commands exist, their links lead somewhere."""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

from autopar.sharding.layout.language import parse_layout

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKDOWN = [*PAGES, *(ROOT / name for name in ("CHANGELOG.md", "cost_models/README.md", "strategies/README.md"))]

CHECKED_LANGUAGES = {"python", "bash", "layout"}
SHOWN_LANGUAGES = {"text", "json", "toml", "yaml"}  # results and file formats: nothing in them runs

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<body>.*?)^(?P=indent)``` *$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\]\((?P<target>[^()\s]+)\)")


@dataclass(frozen=True)
class Block:
    language: str
    body: str
    first_line: int


def blocks(markdown: str) -> list[Block]:
    return [
        Block(match["language"].strip(), match["body"], markdown.count("\n", 0, match.start("body")) + 1)
        for match in FENCE.finditer(markdown)
    ]


def commands(markdown: str) -> list[list[str]]:
    """The command lines of the bash blocks, comments gone, continued lines joined."""
    bodies = [block.body.replace("\\\n", " ") for block in blocks(markdown) if block.language == "bash"]
    words = [shlex.split(line, comments=True) for body in bodies for line in body.splitlines()]
    return [command for command in words if command]


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_blocks_are_found_with_their_lines() -> None:
    page = "Title\n\n```python\nx = 1\n```\n\n* item\n\n  ```bash\n  autopar trace \\\n    TARGET  # why\n  ```\n"
    assert blocks(page) == [
        Block("python", "x = 1\n", 4),
        Block("bash", "  autopar trace \\\n    TARGET  # why\n", 10),
    ]
    assert commands(page) == [["autopar", "trace", "TARGET"]]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_block_says_what_it_is(page: Path) -> None:
    text = page.read_text()
    unknown = [b for b in blocks(text) if b.language not in CHECKED_LANGUAGES | SHOWN_LANGUAGES]
    assert not unknown, f"{page.name}: a block in another language is run by no test: {unknown}"
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(blocks(text)), "a fence is not closed"


def skip_without_hosts(page: str) -> None:
    if page == "docs/hosts.md":
        for library in ("transformers", "accelerate", "peft"):
            pytest.importorskip(library, reason=f"the page needs {library}: pip install autopar[test]")


# On one rank: tests/runtime/test_pages.py runs on two what takes the number of ranks from the process group.
PYTHON_PAGES = [page for page in PAGES if "```python" in page.read_text() and page.name != "hosts.md"]


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=page_name)
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # What the blocks write must not land in the checkout; what they read of it is examples/.
    (tmp_path / "examples").symlink_to(ROOT / "examples", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    # A real module, so that annotations and dataclasses in the blocks find their names.
    module = ModuleType("page_" + page.stem.lower())
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page.read_text()):
        if block.language == "python":
            # Empty lines first: an error then names the line of the page.
            source = "\n" * (block.first_line - 1) + dedent(block.body)
            exec(compile(source, str(page), "exec"), module.__dict__)


def internal_imports(text: str) -> list[str]:
    """Return the lines of a text that import a module inside autopar; `import autopar` alone is public."""
    return re.findall(r"^ *(?:from|import) autopar\..*", text, re.MULTILINE)


def test_pages_and_examples_import_public_names() -> None:
    assert internal_imports("import autopar\nfrom autopar.mesh import Mesh\n") == ["from autopar.mesh import Mesh"]
    texts = [*PAGES, *sorted((ROOT / "examples").rglob("*.py"))]
    assert {page_name(path): found for path in texts if (found := internal_imports(path.read_text()))} == {}


@pytest.mark.parametrize("page", [page for page in PAGES if "```layout" in page.read_text()], ids=page_name)
def test_layout_blocks_are_layouts(page: Path) -> None:
    for block in blocks(page.read_text()):
        if block.language == "layout":
            # Empty lines first, as above.
            assert parse_layout("\n" * (block.first_line - 1) + dedent(block.body), page.name).statements


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {command[1] for command in commands(page.read_text()) if command[0] == "make"}
    assert named <= targets


AUTOPAR_COMMANDS = [
    pytest.param(command[1:], id=f"{page_name(page)}: {shlex.join(command)}")
    for page in PAGES
    for command in commands(page.read_text())
    if Path(command[0]).name == "autopar"
]


@pytest.mark.parametrize("arguments", AUTOPAR_COMMANDS)
def test_command_lines_exist(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from autopar.cli import main

    with pytest.raises(SystemExit) as leaves:
        main([arguments[0], "--help"])
    assert leaves.value.code == 0
    usage = capsys.readouterr().out
    for argument in arguments[1:]:
        if argument.startswith("--"):
            assert argument.split("=")[0] in usage
        elif ".py:" in argument:
            path, _, function = argument.partition(":")
            path = "examples/train_text.py" if path == "train.py" else path  # as `autopar new train.py` writes it
            assert re.search(rf"^def {function.partition('(')[0]}\(", (ROOT / path).read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", MARKDOWN, ids=page_name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    targets = [match["target"] for match in LINK.finditer(page.read_text())]
    files = [target.partition("#")[0] for target in targets if "://" not in target and not target.startswith("mailto:")]
    assert [file for file in files if file and not (page.parent / file).exists()] == []


def test_page_about_json_names_every_command_that_has_it() -> None:
    from autopar.cli.json_output import schemas

    rows = re.findall(r"^\| (`autopar .*?) \|", (ROOT / "docs" / "json.md").read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`autopar (\w+)`", " ".join(rows))) == sorted(schemas())


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    targets = [match["target"].partition("#")[0] for match in LINK.finditer(index.read_text())]
    linked = {index, *((index.parent / target).resolve() for target in targets)}
    assert [page_name(page) for page in PAGES if page.parent != ROOT and page not in linked] == []


def test_contributing_names_files_that_exist() -> None:
    """The walks of docs/contributing.md: each file or folder, and each name in it, is there."""
    page = (ROOT / "docs" / "contributing.md").read_text()
    walks = dict(re.findall(r"^## (Add .*?)\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL))
    files = {title: re.findall(r"^\| `([^`]+)`", walk, re.MULTILINE) for title, walk in walks.items()}
    most = {"an op rule": 1, "a lowered op": 2, "a collective algorithm": 4, "a layout statement": 6}
    most |= {"a strategy": 1, "a CLI command": 3}
    assert {title.removeprefix("Add "): len(named) for title, named in files.items()} == most
    assert [file for named in files.values() for file in named if not (ROOT / file).exists()] == []
    for title, walk in walks.items():
        code = "".join(
            path.read_text()
            for file in files[title]
            for path in (sorted((ROOT / file).rglob("*.py")) if (ROOT / file).is_dir() else [ROOT / file])
        )
        names = re.findall(r"`([A-Z]\w+|[a-z]+_\w+)`", walk)
        assert [name for name in names if not re.search(rf"\b{name}\b", code)] in ([], ["NAME"]), title
