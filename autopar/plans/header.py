"""Head of a plan's file: origin and predicted costs, as comments that are read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from hashlib import sha256
from math import isfinite
from typing import Any, get_args

from autopar.cost.compute.optimizers import OPTIMIZERS
from autopar.errors import AutoparError
from autopar.ir.graph import NamedGraph
from autopar.ir.precision import PRESETS, parse_precision
from autopar.names import MAX_DIGITS, did_you_mean, printable
from autopar.sharding.level_sums import NO_LEVEL_SUMS, LevelSums
from autopar.sharding.options import Outputs, TrainingOptions

__all__ = ["FIRST", "Header", "check_model", "check_precision", "check_whole", "parameters_of", "read_header"]

FIRST = "# autopar plan"


@dataclass(frozen=True)
class Header:
    """Head of a plan's file: the model it is for, its options, its predicted costs."""

    # Name of the class of the model.
    model: str
    # Hash of parameter names and shapes: equal for all inputs of one model.
    parameters: str
    # Fingerprint of the graph: differs by input sizes.
    graph: str
    cluster: str
    options: TrainingOptions = field(default_factory=TrainingOptions)
    target: str = ""
    limit_bytes: int = 0
    step_seconds: float = 0.0
    bound_seconds: float | None = None
    memory_bytes: float = 0.0
    origin: str = ""
    within_layout: bool = False
    # All-reduces that run by level: the links of the cluster decided.
    by_level: LevelSums = NO_LEVEL_SUMS
    # Number of statements of the file, to detect one that was cut off.
    statements: int = 0
    # Who proved the bound, if not the search.
    bound_by: str = ""

    def lines(self) -> list[str]:
        """Return the lines of the head; values that equal their default are left out."""
        found = [FIRST]
        for key, each in _KEYS.items():
            value = getattr(self.options if key in _OPTIONS else self, key)
            if value != each.default:
                found.append(f"#   {key:15} {value}")
        return found


# The options stand in the head one by one, in the order of their class. Links are words of the mesh statement.
_OPTIONS = {each.name: each for each in fields(TrainingOptions) if each.name != "links"}
_KEYS = {
    key: each for of in fields(Header) for key, each in (_OPTIONS if of.name == "options" else {of.name: of}).items()
}


_READ: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "float | None": float,
    "LevelSums": LevelSums.parse,
    "Precision": parse_precision,
    "bool": {"True": True, "False": False}.__getitem__,
}


def _amount(value: float) -> bool:
    return isfinite(value) and value >= 0


# Check of each value, and the expectation that an error names. A head may come from anyone, so nothing is trusted.
_IS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "outputs": (get_args(Outputs).__contains__, f"one of {', '.join(get_args(Outputs))}"),
    "optimizer": (OPTIMIZERS.__contains__, f"one of {', '.join(OPTIMIZERS)}"),
    "micro_batches": (lambda value: value >= 1, "a whole number from 1 up"),
    "precision": (
        lambda value: value is not None,
        f"one of {', '.join(PRESETS)}, perhaps with fields, as in 'bf16, reduce=bf16'",
    ),
    "limit_bytes": (lambda value: value >= 1, "a whole number from 1 up"),
    "step_seconds": (_amount, "a finite number from 0 up"),
    "bound_seconds": (_amount, "a finite number from 0 up"),
    "memory_bytes": (_amount, "a finite number from 0 up"),
    "by_level": (lambda value: bool(value.found), "axes and bytes, as in 'tp, dp from 65536'"),
    "statements": (lambda value: value >= 0, "a whole number from 0 up"),
}


def _value(key: str, kind: str, text: str) -> Any:
    """Return the parsed value of a key; ValueError or KeyError if it is invalid."""
    # Values are printed in messages: control characters of a file must not reach the terminal.
    if not text.isprintable() or (kind == "int" and len(text) > MAX_DIGITS):
        raise ValueError
    value = _READ.get(kind, str)(text)
    if key in _IS and not _IS[key][0](value):
        raise ValueError
    return value


def read_header(text: str, name: str) -> Header | None:
    """Return the head of a plan's text; None if the text has none and is a plain layout."""
    lines = text.splitlines()
    if not lines or not lines[0].startswith(FIRST):
        return None
    found: dict[str, Any] = {}
    for number, line in enumerate(lines[1:], start=2):
        # The head ends at the first line that is no entry; further comments belong to the layout.
        if not line.startswith("#   "):
            break
        key, _, value = line[4:].strip().partition(" ")
        if key not in _KEYS:
            raise _broken(name, number, line, f"unknown key '{key}' in the head of a plan{did_you_mean(key, _KEYS)}")
        if key in found:
            raise _broken(name, number, line, f"the key '{key}' stands twice in the head of a plan")
        try:
            found[key] = _value(key, str(_KEYS[key].type), value.strip())
        except (ValueError, KeyError, AutoparError):
            is_what = _IS[key][1] if key in _IS else "as it is saved"
            raise _broken(
                name, number, line, f"invalid value of '{key}': expected {is_what}, got '{value.strip()}'"
            ) from None
    missing = [key for key in ("model", "parameters", "graph", "cluster") if key not in found]
    if missing:
        raise _broken(name, 1, lines[0], f"the head of the plan lacks its {', '.join(missing)}")
    options = {key: found.pop(key) for key in _OPTIONS if key in found}
    return Header(**found, options=TrainingOptions(**options))


def _broken(name: str, number: int, line: str, message: str) -> AutoparError:
    shown = printable(line[:160])
    fix = "save the plan again; or drop the head, to use the file as a layout for any model"
    return AutoparError(f"{message}\n  {name}:{number} | {shown}\nfix: {fix}")


def check_whole(header: Header, statements: int, name: str) -> None:
    """Raise if the end of a plan's file is missing."""
    if statements < header.statements:
        raise AutoparError(
            f"{name} is cut off: expected {header.statements} statements, as in its head, got {statements}\n"
            f"  {name} | #   statements      {header.statements}\n"
            "fix: save the plan again; if you removed lines by hand, remove this one, too"
        )


def check_precision(header: Header, graph: NamedGraph, name: str) -> None:
    """Raise if a graph computes in another dtype than the steps of a plan."""
    precision = header.options.precision
    wanted = precision.compute_dtype
    other = next((one for one in graph.parameters if one.dtype.is_floating_point and one.dtype != wanted), None)
    if wanted is not None and other is not None:
        raise AutoparError(
            f"{name} is a plan in {precision.text}: its graph has {other.name} in {other.dtype}, not {wanted}\n"
            f"fix: autopar.trace(model, inputs, precision='{precision}'), or give Plan.load the model and its inputs"
        )


def parameters_of(graph: NamedGraph) -> str:
    """Return a hash of the names and shapes of the parameters: equal for all input sizes of a model."""
    text = sha256()
    for tensor in graph.parameters:
        # Names and shapes, no values: a plan stays valid while the model trains.
        text.update(f"{tensor.name} {tensor.shape}\n".encode())
    return text.hexdigest()[:16]


def check_model(header: Header, graph: NamedGraph, name: str) -> None:
    """Raise if a plan was made for another model than that of a graph."""
    own = parameters_of(graph)
    if header.parameters == own:
        return
    model = type(graph.model).__name__
    what = f"expected {header.model}, got {model}"
    if header.model == model:
        what = f"its {header.model} has other parameters than this one"
    raise AutoparError(
        f"{name} is the plan of another model: {what}\n  {name}:3 | #   parameters      {header.parameters}\n"
        f"fix: load it for the model that it was made for (the hash of this one is {own}), or plan again"
    )
