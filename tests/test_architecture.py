"""The architecture of the package: the order of its packages, its circles, its sizes, its names."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import autopar

PACKAGE = Path(autopar.__file__).parent
LEVELS = (
    ("errors", "files", "mesh", "names", "submesh"),
    ("rules",),
    ("ir",),
    ("tracing", "sharding"),
    ("cost", "lowering"),
    ("solver", "runtime"),
    ("plans",),
    ("api",),
    ("cli",),
)
"""A unit imports itself and units of the levels before its own; the values of the first level know each other."""
FACADE = ("__init__", "__main__")
MOST_MODULES = 8
MOST_LINES = 450
MOST_LINES_OF_FUNCTION = 60

LATE_IMPORTS = {
    "__init__.py": "public names load when they are used",
    "cost/logarithmic_algorithms.py": "the help of the command line reads clusters and does without numpy",
    "cost/placement.py": "the help of the command line reads clusters and does without numpy",
    "cli/": "torch takes seconds to import; help and errors do not wait for it",
    "mesh.py": "a mesh is checked before torch is loaded",
    "ir/precision.py": "a precision is checked before torch is loaded",
    "solver/search/cutting_planes.py": "ortools takes a second and small models do without",
    "solver/integer/mathopt_solver.py": "ortools takes a second and searches do without MathOpt",
    "solver/order_bound.py": "ortools takes a second and plans without stages do without",
}
"""Files and folders that import in functions or for types alone, with the reason."""

LONG_FILES: tuple[str, ...] = ()
"""Files that are still longer; to be split."""
LONG_FUNCTIONS: tuple[str, ...] = ()
"""Functions that are still longer; to be split."""


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of every file, by its path in the package."""
    found = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in found}


def module_of(path: str) -> str:
    name = "autopar." + path.removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def imported(node: ast.AST, modules: frozenset[str]) -> list[str]:
    """Return the modules that an import statement names; of a package only what it defines itself."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom) or node.module is None:
        return []
    assert node.level == 0, "imports name whole modules"
    full = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if name in modules else node.module for name in full]


@cache
def imports() -> dict[str, frozenset[str]]:
    """Return the modules of the package that each module imports, for types and in functions too."""
    modules = frozenset(map(module_of, trees()))
    found = {}
    for path, tree in trees().items():
        names = {name for node in ast.walk(tree) for name in imported(node, modules)}
        found[module_of(path)] = frozenset(names & modules) - {module_of(path)}
    return found


def unit_of(module: str) -> str:
    """Return the package or root module that a module belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


def test_every_unit_has_a_level() -> None:
    units = {unit_of(module) for module in imports()} - set(FACADE)
    assert units == {unit for level in LEVELS for unit in level}


def test_nothing_is_imported_backwards() -> None:
    level = {unit: number for number, units in enumerate(LEVELS) for unit in units}
    wrong = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in sorted(others)
        if (unit := unit_of(module)) not in FACADE and unit != unit_of(other)
        if unit_of(other) in FACADE or (level[unit] <= level[unit_of(other)] and level[unit] > 0)
    ]
    # The package itself holds the version alone, for whoever prints it.
    assert [one for one in wrong if not one.endswith(" imports autopar")] == []


def test_no_circle_of_files() -> None:
    graph = {module: others - {"autopar"} for module, others in imports().items() if module != "autopar"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_circle_of_packages() -> None:
    graph = defaultdict(set)
    for module, others in imports().items():
        graph[unit_of(module)] |= {unit_of(other) for other in others} - {unit_of(module), "__init__"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def late_imports(tree: ast.Module) -> list[ast.AST]:
    top = set(map(id, tree.body))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in top]


def test_late_imports_have_a_reason() -> None:
    late = [path for path, tree in trees().items() if late_imports(tree)]
    assert [path for path in late if not path.startswith(tuple(LATE_IMPORTS))] == []
    assert [place for place in LATE_IMPORTS if not any(path.startswith(place) for path in late)] == []


def test_no_package_hides_a_public_name() -> None:
    assert {unit_of(module) for module in imports()} & set(autopar.__all__) == set()


def test_few_modules_lie_at_the_root() -> None:
    assert len([path for path in trees() if "/" not in path]) <= MOST_MODULES


def test_files_are_short() -> None:
    lengths = {path: len((PACKAGE / path).read_text(encoding="utf-8").splitlines()) for path in trees()}
    assert {path for path, lines in lengths.items() if lines > MOST_LINES} == set(LONG_FILES)


def test_functions_are_short() -> None:
    def lines(node: ast.FunctionDef) -> int:
        # A public function documents each of its parameters, which makes no code longer.
        said = (ast.get_docstring(node, clean=False) or "") if node.name in autopar.__all__ else ""
        return (node.end_lineno or 0) - node.lineno - len(said.splitlines())

    long = {
        f"{path}:{node.name}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and lines(node) >= MOST_LINES_OF_FUNCTION
    }
    assert long == set(LONG_FUNCTIONS)


def test_a_class_name_stands_for_one_class() -> None:
    homes = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path)
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
