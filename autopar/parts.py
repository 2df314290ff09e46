"""The modules of a parallel module: those of the model by name, with the tensors of each, but without their code.

They hold parameters and buffers under the model's names, for optimizers and state dicts. The generated graph runs
instead of them, so a call of one of them, or a hook that waits for it, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from autopar.errors import AutoparError

__all__ = ["Part", "canonical_names", "mirror", "owner_of", "tie"]

NOT_CALLED = (
    "the module {name} is a part of a parallel module, which runs the graph of the whole model: {what}\nfix: {fix}"
)
HOOK_FIX = "register the hook on the model before it is parallelised, or on the parallel module itself"


class Part(nn.Module):
    """A module of the model as a place for its tensors."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        fix = "call the parallel module, or keep the original model for what only a part of it does"
        raise AutoparError(NOT_CALLED.format(name=self._kind, what="it cannot be called by itself", fix=fix))

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AutoparError(NOT_CALLED.format(name=self._kind, what="this hook would never run", fix=HOOK_FIX))

    register_forward_hook = _refuse_hook
    register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = _refuse_hook
    register_full_backward_pre_hook = _refuse_hook
    register_backward_hook = _refuse_hook

    def _get_name(self) -> str:
        return self._kind


def mirror(
    model: nn.Module,
    shell: nn.Module,
    parameter: Callable[[nn.Parameter], nn.Parameter],
    buffer_of: Callable[[Tensor], Tensor],
) -> list[nn.Module]:
    """Give `shell` modules, parameters and buffers under the names of `model`; all modules, in the model's order.

    The two functions make the shell's tensors of the model's. What is shared in the model is shared in the shell.
    """
    shells: dict[int, nn.Module] = {}
    made: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}

    def enter(module: nn.Module, shell: nn.Module) -> None:
        shells[id(module)] = shell
        shell.training = module.training
        for name, own in module._parameters.items():
            if own is not None and id(own) not in made:
                made[id(own)] = parameter(own)
            shell._parameters[name] = None if own is None else made[id(own)]
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in buffers:
                buffers[id(buffer)] = buffer_of(buffer)
            shell._buffers[name] = None if buffer is None else buffers[id(buffer)]
        shell._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        for name, child in module._modules.items():
            if child is not None and id(child) not in shells:
                enter(child, Part(_kind_of(child)))
            shell._modules[name] = None if child is None else shells[id(child)]

    enter(model, shell)
    return [shells[id(module)] for module in model.modules()]


def _kind_of(module: nn.Module) -> str:
    return module._kind if isinstance(module, Part) else type(module).__name__


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a tensor, and its name there; a parallel module may have attributes of these names."""
    *path, leaf = name.split(".")
    owner = module
    for step in path:
        child = owner._modules[step]
        assert child is not None, name
        owner = child
    return owner, leaf


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name of that tensor."""
    first: dict[int, str] = {}
    both = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in both}


def tie(shell: nn.Module, canonical: Mapping[str, str]) -> None:
    """Let all names of a tensor be its first one's again, after each of them was assigned another tensor."""
    for name, first in canonical.items():
        if name != first:
            (owner, leaf), (source, first_leaf) = owner_of(shell, name), owner_of(shell, first)
            if leaf in owner._parameters:
                owner._parameters[leaf] = source._parameters[first_leaf]
            else:
                owner._buffers[leaf] = source._buffers[first_leaf]
