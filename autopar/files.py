"""Files that a user names, and the folders of shipped data."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from autopar.errors import AutoparError

__all__ = ["DataFolder", "check_writable", "data_folder", "write_text"]


DataFolder = Literal["cost_models", "strategies", "examples"]


def write_text(path: str | Path, text: str) -> None:
    """Write a file; raise an error that names it if the system refuses."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _refused(str(path), error) from error


def check_writable(path: str | Path, what: str) -> None:
    """Raise where `write_text` would, before the work is done whose result it writes; `what` names the option."""
    file = Path(path)
    if not str(path):
        raise AutoparError(f"{what}: the name of the file is empty\nfix: name a file")
    if file.is_dir():
        raise AutoparError(f"{what} {path}: this is a folder\nfix: name a file in it")
    if not file.resolve().parent.is_dir():
        raise AutoparError(f"{what} {path}: there is no folder {file.resolve().parent}\nfix: create it")
    # Opening is the only reliable test: permissions depend on the file system. A new file is removed again.
    was_there = file.exists()
    try:
        with file.open("a"):
            pass
        if not was_there:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise _refused(f"{what} {path}", error) from error


def _refused(name: str, error: OSError) -> AutoparError:
    return AutoparError(f"{name}: cannot be written: {error.strerror}\nfix: give another path")


def data_folder(name: DataFolder, package: Path = Path(__file__).parent) -> Path:
    """Return a folder of shipped data, of a wheel or a checkout."""
    in_wheel = package / "_data" / name
    if in_wheel.is_dir():
        return in_wheel
    checkout = package.parent
    in_checkout = checkout / name
    # Without the project file the parent is some site-packages, where a folder of that name is another project's.
    if (checkout / "pyproject.toml").is_file() and in_checkout.is_dir():
        return in_checkout
    raise AutoparError(
        f"autopar's data folder '{name}' is missing: neither {in_wheel} nor {in_checkout} of a checkout exists.\n"
        "Fix: install autopar again, from a wheel or with `pip install -e .` in a complete checkout."
    )
