"""Files that a user names: written, or told why they cannot be."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import AutoparError

__all__ = ["check_writable", "write_text"]


def write_text(path: str | Path, text: str) -> None:
    """Write a file; what the system says against it is an error with the name of the file."""
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
