"""A release: wheel and sdist in bare environments, the versions of Python, the heading of the changelog."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

import pytest

import autopar

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The torch that `make release-check` installs for other versions of Python; without it those tests skip.
TORCH = os.environ.get("RELEASE_TORCH")
VERSIONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))


def run(*command: str, cwd: Path, seconds: float = 600) -> str:
    """What a command prints; without the checkout and the settings of pytest in its environment."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = {"cwd": cwd, "env": environment, "timeout": seconds, "capture_output": True, "text": True}
    done = subprocess.run(command, **options, check=False)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    return folder


def bare(folder: Path, wheel: Path, python: str = sys.executable) -> Path:
    """A new environment with the wheel alone; return the folder of its commands."""
    run(python, "-m", "venv", str(folder / "venv"), cwd=folder)
    commands = folder / "venv" / "bin"
    install = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel))
    run(str(commands / "python"), *install, cwd=folder)
    return commands


def other_python(version: str) -> str:
    """A Python of this version, of the path or of pyenv; the test skips if there is none."""
    on_path = shutil.which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = [on_path] if on_path else []
    for python in [*found, *map(str, sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True))]:
        # A shim of pyenv runs only where its version is chosen.
        if not subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
            return python
    pytest.skip(f"there is no Python {version} here")


def check_first_minutes(commands: Path, folder: Path) -> None:
    """Write a script, plan it, verify the plan on two processes."""
    command = str(commands / "autopar")
    assert autopar.__version__ in run(command, "--version", cwd=folder)
    run(command, "new", "train.py", cwd=folder)
    target = ("train.py:language_model", "--mesh", "dp=2,tp=1", "--layout")
    assert "fits" in run(command, "plan", *target, "fsdp(fsdp=dp)", "-o", "gpt.plan.lay", cwd=folder)
    assert "They agree" in run(command, "verify", *target, "gpt.plan.lay", cwd=folder)


def test_the_changelog_has_the_version() -> None:
    first = re.search(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first[1] == autopar.__version__


def test_the_classifiers_agree_with_what_is_required() -> None:
    assert PROJECT["requires-python"] == f">={VERSIONS[0]}"
    assert [f"3.{minor}" for minor in range(11, 11 + len(VERSIONS))] == VERSIONS
    assert "version" in PROJECT["dynamic"], "it stands in autopar/__init__.py alone"


@pytest.mark.slow
def test_the_sdist_has_what_the_tests_need(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    shutil.unpack_archive(sdist, built / "source", filter="data")
    (source,) = (built / "source").iterdir()
    assert source.name == f"autopar-{autopar.__version__}"
    for name in (
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "Makefile",
        "tests/test_release.py",
        "docs/index.md",
        "examples/gpt.py",
    ):
        assert (source / name).is_file(), name


@pytest.mark.slow
def test_a_bare_environment_plans_and_verifies(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    commands = bare(tmp_path, wheel)
    # The packages that autopar requires, and not the checkout: no .pth files of a folder that one adds are read.
    (site,) = (tmp_path / "venv" / "lib").glob("python3.*/site-packages")
    (site / "required.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(str(commands / "python"), "-c", "import autopar; print(autopar.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(site)
    check_first_minutes(commands, tmp_path)


OTHERS = [one for one in VERSIONS if one != f"3.{sys.version_info.minor}"]


@pytest.mark.slow
@pytest.mark.parametrize("version", OTHERS)
def test_other_versions_of_python_compile_and_help(built: Path, tmp_path: Path, version: str) -> None:
    """Without torch: every file compiles, and the commands that need no torch run."""
    (wheel,) = built.glob("*.whl")
    commands = bare(tmp_path, wheel, other_python(version))
    (site,) = (tmp_path / "venv" / "lib").glob("python3.*/site-packages")
    run(str(commands / "python"), "-W", "error", "-m", "compileall", "-q", "-f", str(site / "autopar"), cwd=tmp_path)
    assert autopar.__version__ in run(str(commands / "autopar"), "--version", cwd=tmp_path)
    assert "h100" in run(str(commands / "autopar"), "clusters", cwd=tmp_path)
    run(str(commands / "autopar"), "new", "train.py", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("version", OTHERS)
def test_other_versions_of_python_plan_and_verify(built: Path, version: str) -> None:
    if TORCH is None:
        pytest.skip("make release-check says which torch to install")
    python = other_python(version)
    (wheel,) = built.glob("*.whl")
    # Not in a folder that pytest keeps: torch may bring gigabytes of CUDA.
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        commands = bare(folder, wheel, python)
        install = ("-m", "pip", "install", "--quiet", TORCH, str(wheel))
        run(str(commands / "python"), *install, cwd=folder, seconds=3600)
        check_first_minutes(commands, folder)
