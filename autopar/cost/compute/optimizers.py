"""What optimizers hold and touch, by the names of `torch.optim`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import AutoparError
from autopar.names import did_you_mean

__all__ = ["OPTIMIZERS", "Optimizer", "optimizer_of"]


@dataclass(frozen=True)
class Optimizer:
    """Per parameter: tensors of its shape that are kept, and how many it holds for a moment while it steps."""

    states: int
    temporaries: int = 1
    factored: bool = False
    """Of the last two dims, a number for each row and each column is kept, and nothing of the whole shape."""

    @property
    def passes(self) -> int:
        """How often an element is read or written in one fused step: parameter and states both, the gradient once."""
        return 2 * (1 + self.states) + 1


OPTIMIZERS: Mapping[str, Optimizer] = {
    "none": Optimizer(0, 0),
    "sgd": Optimizer(0, 0),
    "momentum": Optimizer(1, 0),
    "adam": Optimizer(2, 2),
    "adamw": Optimizer(2, 2),
    "adamax": Optimizer(2, 2),
    "nadam": Optimizer(2, 2),
    "radam": Optimizer(2, 2),
    "adagrad": Optimizer(1),
    "rmsprop": Optimizer(1),
    "adadelta": Optimizer(2, 2),
    "lion": Optimizer(1),
    "muon": Optimizer(1, 2),
    "adafactor": Optimizer(0, 2, factored=True),
}


def optimizer_of(name: str) -> Optimizer:
    """The optimizer of this name; `momentum` is SGD with momentum."""
    found = OPTIMIZERS.get(name.lower())
    if found is None:
        hint = did_you_mean(name.lower(), OPTIMIZERS)
        raise AutoparError(f"no optimizer is called '{name}'{hint}\nfix: take one of {', '.join(OPTIMIZERS)}")
    return found
