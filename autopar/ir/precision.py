"""Precision of a training step: dtypes of the compute, the weights, the optimizer states and the gradient sums.

As text it is a preset, and the fields that differ from it: `bf16`, or `bf16, reduce=bf16`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from autopar.errors import AutoparError
from autopar.names import did_you_mean

if TYPE_CHECKING:
    import torch

__all__ = ["OWN", "PRESETS", "Precision", "parse_precision"]

# Floats by their short names, with their names in torch.
FLOATS = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# How linears multiply in float8, by the name in a text: with a scale for each tensor, or for each row and column.
LINEARS = {
    "": "",
    "fp8": ", linears multiplied in float8 with a scale for each tensor",
    "fp8-rows": ", linears multiplied in float8 with a scale for each row",
}
# How weights of these linears are gathered.
GATHERS = {"": "", "fp8": ", their weights gathered in float8"}


@dataclass(frozen=True)
class Precision:
    """Dtypes of a step, by short names; all are empty where each tensor keeps the dtype that it has in the model."""

    # Parameters and inputs in the forward and the backward, and so activations and their gradients.
    compute: str = ""
    # Trained parameters as they are stored and as the optimizer updates them, and their gradients. Nothing updates a
    # frozen parameter, so it is stored in the dtype of the compute.
    master: str = ""
    # States of the optimizer.
    states: str = ""
    # Gradients of parameters while they are summed over ranks.
    reduce: str = ""
    # Products of linears: empty in the dtype of the compute, else one of LINEARS.
    linears: str = ""
    # Weights of linears in float8, as they are gathered: empty in the dtype of the compute, else one of GATHERS.
    gathers: str = ""

    def __str__(self) -> str:
        if not self.compute:
            return "own"
        known = {preset: name for name, preset in PRESETS.items()}
        if self in known:
            return known[self]
        base = PRESETS[self.compute]
        changed = ((each.name, getattr(self, each.name)) for each in fields(self))
        return ", ".join([self.compute, *(f"{key}={value}" for key, value in changed if value != getattr(base, key))])

    @property
    def text(self) -> str:
        """Return all dtypes in one line."""
        if not self.compute:
            return "own: the dtypes of the model"
        return (
            f"{self}: compute in {self.compute}, weights in {self.master}, optimizer states in {self.states}, "
            f"gradients summed in {self.reduce}{LINEARS[self.linears]}{GATHERS[self.gathers]}"
        )

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Return the dtype that parameters and inputs are cast to; None if they keep theirs."""
        return _dtype(self.compute) if self.compute else None

    def stored(self, dtype: torch.dtype, frozen: bool) -> torch.dtype:
        """Return the dtype in which a parameter is stored that computes in `dtype`."""
        return _or_own(self.compute if frozen else self.master, dtype)

    def state(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the optimizer's states for a parameter that computes in `dtype`."""
        return _or_own(self.states, dtype)

    def reduced(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients are summed of a parameter that computes in `dtype`."""
        return _or_own(self.reduce, dtype)


def _dtype(name: str) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, FLOATS[name])
    return found


def _or_own(name: str, dtype: torch.dtype) -> torch.dtype:
    # Integers and complex numbers keep their dtype: no preset is about them.
    return _dtype(name) if name and dtype.is_floating_point else dtype


OWN = Precision()
PRESETS = {
    "own": OWN,
    "fp64": Precision("fp64", "fp64", "fp64", "fp64"),
    "fp32": Precision("fp32", "fp32", "fp32", "fp32"),
    "bf16": Precision("bf16", "fp32", "fp32", "fp32"),
    "bf16-pure": Precision("bf16", "bf16", "bf16", "bf16"),
    "fp16": Precision("fp16", "fp32", "fp32", "fp32"),
    "fp8": Precision("bf16", "fp32", "fp32", "fp32", "fp8"),
    "fp8-rows": Precision("bf16", "fp32", "fp32", "fp32", "fp8-rows"),
}


def parse_precision(text: str | Precision | None) -> Precision:
    """Return the precision that a text says; None stands for `own`."""
    if text is None or isinstance(text, Precision):
        return text or OWN
    first, *others = (word.strip() for word in str(text).split(","))
    if first not in PRESETS:
        raise _invalid(text, f"no preset is called '{first}'{did_you_mean(first, PRESETS)}")
    found = PRESETS[first]
    names = [each.name for each in fields(Precision)]
    for other in others:
        key, _, value = (part.strip() for part in other.partition("="))
        if key not in names:
            raise _invalid(text, f"unknown field '{key}'{did_you_mean(key, names)}: expected {', '.join(names)}")
        known = [name for name in {"linears": LINEARS, "gathers": GATHERS}.get(key, FLOATS) if name]
        if value not in known:
            raise _invalid(text, f"unknown {key} '{value}'{did_you_mean(value, known)}: expected {', '.join(known)}")
        if found == OWN:
            raise _invalid(text, "'own' has no fields: it keeps the dtypes of the model")
        found = replace(found, **{key: value})
    if found.linears and found.compute != "bf16":
        raise _invalid(text, f"linears in float8 need compute in bf16, got {found.compute}")
    if found.gathers and not found.linears:
        raise _invalid(text, "weights are gathered in float8 for linears in float8: add linears=fp8")
    return found


def _invalid(text: str, what: str) -> AutoparError:
    return AutoparError(
        f"invalid precision '{text}': {what}\n"
        f"fix: one of {', '.join(PRESETS)}; or a preset with fields, as in 'bf16, reduce=bf16'"
    )
