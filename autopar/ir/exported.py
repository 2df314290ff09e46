"""Result of an export: one flat functional graph, and the description of a call of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from autopar.errors import AutoparError
from autopar.ir.fx_graphs import is_factory
from autopar.ir.pytree import Mapped, Node

_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps")


@dataclass(frozen=True)
class Autocast:
    device_type: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"autocast({self.device_type!r}, {self.dtype})"


def autocast_state() -> tuple[Autocast, ...]:
    """Return the autocast regions that are active; empty if there are none."""
    return tuple(
        Autocast(kind, torch.get_autocast_dtype(kind)) for kind in _DEVICE_TYPES if torch.is_autocast_enabled(kind)
    )


@contextmanager
def entered(autocast: tuple[Autocast, ...], *, enabled: bool = True) -> Iterator[None]:
    """Enter the autocast regions, or leave them all (`enabled=False`)."""
    with ExitStack() as stack:
        for region in autocast:
            stack.enter_context(torch.autocast(region.device_type, region.dtype, enabled, cache_enabled=False))
        yield


@dataclass(frozen=True)
class Placeholder:
    """One input of the graph and the source of its value."""

    node: str
    kind: Literal["param", "buffer", "constant", "input"]
    name: str
    requires_grad: bool


@dataclass(frozen=True)
class Mutation:
    """Flat output that is copied after the call into a buffer or into an input tensor."""

    output: int
    target: str
    kind: Literal["buffer", "input"]


@dataclass(frozen=True)
class NodeOrigin:
    """Place in the user's model that a node comes from (`node.meta["origin"]`)."""

    module_path: str
    module_call: int
    source: str
    source_code: str
    # Number of the activation-checkpoint region; None outside of all regions.
    checkpoint: int | None


@dataclass(frozen=True)
class OutputTree:
    """Structure of the model's result.

    `node` describes the pair (result, containers among the arguments that the call changed). `reused` maps the number
    of each such container in `node` to its number among the arguments.
    """

    node: Node
    reused: Mapping[int, int]


@dataclass(frozen=True)
class Exported:
    """Traced model.

    `graph_module` has one placeholder per entry of `placeholders`, functional ATen ops with high-level composites kept,
    and one output node: a flat tuple, first the mutations, then the tensors of `output_tree`.
    """

    graph_module: torch.fx.GraphModule
    placeholders: tuple[Placeholder, ...]
    constants: Mapping[str, torch.Tensor]
    # Other names of tied parameters and buffers -> the name that their placeholder has.
    aliases: Mapping[str, str]
    mutations: tuple[Mutation, ...]
    output_tree: OutputTree
    input_tree: Mapped
    training: bool
    grad_enabled: bool
    autocast: tuple[Autocast, ...]
    # Device of the model at export; factories of the graph that name it follow the module to another device.
    device: torch.device | None

    def device_for(self, node: torch.fx.Node, device: torch.device) -> torch.device | None:
        """Return the device that a call names where the model is on `device`; None where it names none."""
        # Factories bake the device of the trace into the graph, or take the default device.
        named: torch.device | None = node.kwargs.get("device")  # type: ignore[assignment]
        follows = is_factory(node) if named is None else named == self.device
        return device if follows else named

    def constants_on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the constants of a model that is on `device`."""
        for name, constant in self.constants.items():
            if constant.is_meta and device.type != "meta":
                raise AutoparError(
                    f"the tensor {name!r} was on the meta device when the model was traced, so its data is not known. "
                    "Register it as a buffer; then it gets its data with the model."
                )
        return {name: one.to(device) if one.device == self.device else one for name, one in self.constants.items()}
