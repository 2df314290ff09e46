"""Loader of a TARGET: `file.py:function` or `package.module:function`, which returns `(model, inputs)`."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from autopar.errors import DimsError, TargetError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["check_target", "load_target", "parse_dims", "parse_settings"]

T = TypeVar("T")

FORM = "a TARGET is file.py:function or package.module:function, as in examples/gpt.py:gpt"


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Parse `name=value` words to keyword arguments; a value that is no Python literal is text."""
    parsed: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.isidentifier():
            raise TargetError(f"--set {setting}: expected name=value, as in --set layers=4")
        try:
            parsed[name] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            parsed[name] = value
    return parsed


def parse_dims(words: Sequence[str]) -> dict[str, str]:
    """Parse `tensor=names` words to the mapping of `dims=`."""
    dims = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise DimsError(f"--dims {word}: expected TENSOR=NAMES, as in --dims input_ids='batch seq'")
        dims[name] = text
    return dims


def load_target(target: str, settings: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    """Call the function that a TARGET names, and check what it returns."""
    check_target(target)
    place, _, name = target.rpartition(":")
    module = _load_file(target, Path(place)) if place.endswith(".py") else _load_module(target, place)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise TargetError(f"{target}: {place} has no function {name!r}{_nearest(name, functions)}")
    return _checked(target, _guarded(target, "the function failed", lambda: function(**settings)))


def check_target(target: str) -> None:
    """Raise if a TARGET is malformed or its file is missing, before anything is loaded."""
    place, colon, name = target.rpartition(":")
    if target.endswith(".lay"):
        raise TargetError(
            f"{target!r} is the file of a layout or plan, and no model\n"
            f"fix: name the TARGET, file.py:function; what takes a layout, takes this file as --layout {target}"
        )
    if not colon or not place or not name:
        raise TargetError(f"{target!r} names no function; {FORM}")
    path = Path(place)
    if place.endswith(".py") and not path.is_file():
        siblings = [str(other) for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise TargetError(f"{target}: there is no file {path}{_nearest(str(path), siblings)}")


def _load_file(target: str, path: Path) -> ModuleType:
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))  # as `python file.py` does
    return _loaded(path) or _guarded(target, f"{path} cannot be loaded", lambda: _executed(path))


def _loaded(path: Path) -> ModuleType | None:
    """Return the module of a file that is loaded: a second one would register its ops again.

    PyTorch frees an op that is registered again; a model of the first module that calls it reads freed memory.
    """
    file = os.path.realpath(path)
    for module in list(sys.modules.values()):
        origin = getattr(getattr(module, "__spec__", None), "origin", None) or ""
        if os.path.basename(origin) == path.name and os.path.realpath(origin) == file:
            return module
    return None


def _executed(path: Path) -> ModuleType:
    # Not under the name of a module that is loaded already, which a file called random.py would replace.
    name = f"autopar_target_{path.stem}" if path.stem in sys.modules else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half a module is not loaded
        raise
    return module


def _load_module(target: str, name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        known = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        known = None
    if known is None:
        raise TargetError(f"{target}: there is no module {name!r} here; {FORM}")
    return _guarded(target, f"{name} cannot be loaded", lambda: importlib.import_module(name))


def _guarded(target: str, what: str, action: Callable[[], T]) -> T:
    """Run the user's code; report its exceptions with the user's line and without our traceback."""
    try:
        return action()
    except (Exception, SystemExit) as error:  # the user's code may raise anything, or leave
        # Our own frames and those of the import system would hide the user's line.
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        frames = [frame for frame in frames if not frame.filename.startswith("<")]
        where = f"\n  {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
        raise TargetError(f"{target}: {what}: {type(error).__name__}: {error}{where}") from error


def _checked(target: str, result: Any) -> tuple[nn.Module, Any]:
    from torch import nn  # late: a wrong TARGET fails before torch is loaded

    if not isinstance(result, tuple) or len(result) != 2:
        raise TargetError(f"{target} returned {_described(result)}; it should return (model, inputs)")
    model, inputs = result
    if not isinstance(model, nn.Module):
        raise TargetError(f"{target} returned {_described(model)} as the model; it should be an nn.Module")
    if not isinstance(inputs, tuple | Mapping):
        raise TargetError(
            f"{target} returned {_described(inputs)} as the inputs; "
            "they should be a tuple of positional or a dict of keyword arguments"
        )
    return model, inputs


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{type(value).__name__}"


def _nearest(name: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
