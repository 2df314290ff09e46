"""What an installation contains: the data folders, in a wheel as in an editable install."""

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

import pytest

import autopar

ROOT = Path(__file__).parent.parent
INFO = f"autopar-{autopar.__version__}.dist-info"
FOLDERS = ("cost_models", "strategies")
WHERE = "from autopar.files import data_folder; print(*(data_folder(n) for n in ('cost_models', 'strategies')))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


def tracked_data_files() -> set[str]:
    return {str(path.relative_to(ROOT)) for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file()}


def test_wheel_carries_the_data_folders(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"autopar/_data/cost_models/README.md", "autopar/_data/strategies/README.md"} <= names
    assert {f"autopar/_data/{name}" for name in tracked_data_files()} <= names
    assert "autopar/_data/examples/train_text.py" in names, "what `autopar new` writes"


def test_wheel_carries_all_files_of_the_package(wheel: Path) -> None:
    """Also those that are no modules: the schemas of what commands print, the parts of the report."""
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    files = [path for path in (ROOT / "autopar").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {".py", ".json", ".css", ".js", ".html"} <= {path.suffix for path in files}
    assert {str(path.relative_to(ROOT)) for path in files} <= names


def test_wheel_carries_the_package_and_nothing_else(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"autopar/__init__.py", "autopar/py.typed", f"{INFO}/licenses/LICENSE"} <= names
    assert {name.split("/")[0] for name in names} == {"autopar", INFO}


def test_wheel_names_the_command(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        entry_points = archive.read(f"{INFO}/entry_points.txt").decode()
    assert "autopar = autopar.cli:main" in entry_points


def test_installed_wheel_finds_the_data_folders(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with ZipFile(wheel) as archive:
        archive.extractall(site)
    found = subprocess.run(
        [sys.executable, "-c", WHERE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert found.stdout.split() == [str(site / "autopar" / "_data" / name) for name in FOLDERS], found.stderr


def installed_from() -> str:
    """Return the address of the folder that the editable install leads to; empty without one."""
    for found in distributions(name="autopar"):
        address = json.loads(found.read_text("direct_url.json") or "{}")
        if address.get("dir_info", {}).get("editable"):
            return str(address["url"])
    return ""


def test_editable_install_finds_the_data_folders(tmp_path: Path) -> None:
    if installed_from() != ROOT.as_uri():
        pytest.skip(f"this checkout is not installed: the editable install is of {installed_from() or 'no folder'}")
    # From another folder, and without what pytest adds to the path: only the installation can lead to the checkout.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run([sys.executable, "-c", WHERE], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.stdout.split() == [str(ROOT / name) for name in FOLDERS], found.stderr
