"""States and memory traffic of optimizers, by their names in `torch.optim`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import AutoparError
from autopar.names import did_you_mean


@dataclass(frozen=True)
class Optimizer:
    """Tensors of a parameter's shape: states between steps, temporaries during a step."""

    states: int
    temporaries: int = 1
    # True where a state has one number for each row and column of the last two dims, not the whole shape.
    factored: bool = False
    # True where torch has it and each element of a parameter is updated from the same one of gradient and states.
    elementwise: bool = True


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
    "lion": Optimizer(1, elementwise=False),
    "muon": Optimizer(1, 2, elementwise=False),
    "adafactor": Optimizer(0, 2, factored=True, elementwise=False),
}


def optimizer_of(name: str) -> Optimizer:
    """Return the optimizer of a name; `momentum` is SGD with momentum."""
    found = OPTIMIZERS.get(name.lower())
    if found is None:
        hint = did_you_mean(name.lower(), OPTIMIZERS)
        raise AutoparError(f"no optimizer is called '{name}'{hint}\nfix: take one of {', '.join(OPTIMIZERS)}")
    return found


def check_optimizer(name: str, offload_states: bool) -> None:
    """Raise if there is no such optimizer, or if its states cannot come from the host, parameter by parameter."""
    if not optimizer_of(name).elementwise and offload_states:
        able = ", ".join(word for word, one in OPTIMIZERS.items() if one.elementwise and one.states)
        raise AutoparError(
            f"states of the optimizer '{name}' on the host: expected one of torch's that updates element by element\n"
            f"fix: take one of {able}, or offload_states=False"
        )
