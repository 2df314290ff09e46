"""Shells: the child modules of a parallel module, with the names and tensors of the model's, without their code.

They store parameters and buffers under the model's names, for optimizers and state dicts. The generated graph replaces
their forward, so calling a shell or registering a forward hook on it raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.runtime.model_attributes import attribute_of, has_attribute, set_attribute
from autopar.runtime.torch_wrappers import FSDP_MARK, refuse
from autopar.tracing.trace import AlreadyParallel

__all__ = ["ClosedModule", "ModuleShell", "canonical_names", "entry_of", "mirror", "owner_of", "tie"]

NOT_CALLED = (
    "the module {name} is a part of a parallel module, which runs the graph of the whole model: {what}\nfix: {fix}"
)
HOOK_FIX = "register the hook on the model before it is parallelised, or on the parallel module itself"


class ClosedModule(AlreadyParallel):
    """Module that refuses new modules, buffers and parameters: the generated graph would not use them."""

    def __setattr__(self, name: str, value: Any) -> None:
        # FullyShardedDataParallel sets this mark before it changes any parameter.
        if name == FSDP_MARK:
            refuse("FullyShardedDataParallel")
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> NoReturn:
        self._refuse(f"it cannot take the module {name!r}")

    def register_module(self, name: str, module: nn.Module | None) -> NoReturn:
        self._refuse(f"it cannot take the module {name!r}")

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> NoReturn:
        self._refuse(f"it cannot take the buffer {name!r}")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        # `nn.Module.__setattr__` calls this also to replace a parameter, as loading with `assign=True` does.
        if name not in self._parameters:
            self._refuse(f"it cannot take the parameter {name!r}")
        super().register_parameter(name, param)

    def call_part(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Call a part of the model."""
        raise AssertionError("a parallel module has parts")

    def apply(self, fn: Callable[[nn.Module], None]) -> NoReturn:
        self._refuse(
            "apply would find no nn.Linear or other module of the model in it",
            "apply it to the model before, or give weights their values by init_weights(fn) of the parallel module",
        )

    def _refuse(self, what: str, fix: str = "change the model, and parallelize it then") -> NoReturn:
        raise AutoparError(f"{type(self).__name__} runs the graph of the whole model as it was: {what}\nfix: {fix}")


class ModuleShell(ClosedModule):
    """Shell of one module of the model: stores its tensors and shows its class name."""

    # The module of the skeleton that this shell stands for. Not in the tables of modules: it has no weights.
    _part: nn.Module | None = None
    _changed: Callable[[], None]
    _call: Callable[..., Any]

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def stand_for(self, part: nn.Module, changed: Callable[[], None], call: Callable[..., Any]) -> None:
        """Offer attributes, methods and calls of a module of the skeleton; `changed` runs when one was set."""
        self.__dict__.update(_part=part, _changed=changed, _call=call)

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """Return a function with the signature of the model's module, which runs the graph of this part."""
        assert self._part is not None, "the shells have been built"
        call = self._call

        def run(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        run.__signature__ = inspect.signature(self._part.forward)  # type: ignore[attr-defined]
        return run

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AutoparError(NOT_CALLED.format(name=self._kind, what="this hook would never run", fix=HOOK_FIX))

    # Hooks on gradients of parameters still work: the shell's parameters are leaves of autograd.
    register_forward_hook = _refuse_hook
    register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = _refuse_hook
    register_full_backward_pre_hook = _refuse_hook
    register_backward_hook = _refuse_hook

    def _get_name(self) -> str:
        return self._kind

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self._part is None or name.startswith("__"):
                raise
        return attribute_of(self, self._part, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Return the class of the model's module, by which hosts find norms and embeddings."""
        part = self.__dict__.get("_part")
        return type(self) if part is None else type(part)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = any(name in self.__dict__.get(table, ()) for table in ("_parameters", "_buffers"))
        if isinstance(value, nn.Module):
            self._refuse(f"its {self._kind} cannot take the module {name!r}")
        part = self._part
        is_mark = name.startswith("_") and part is not None and not has_attribute(part, name)  # of somebody else
        if part is None or is_own or is_mark or name in self.__dict__:
            super().__setattr__(name, value)
        elif set_attribute(part, name, value):
            self._changed()


class ModuleShellList(ModuleShell):
    """Shell of a module with numbered children: nn.ModuleList, nn.Sequential, nn.ParameterList."""

    def __getitem__(self, key: Any) -> Any:
        return entry_of(self, key)

    def __len__(self) -> int:
        return len(self._modules) + len(self._parameters)

    def __iter__(self) -> Iterator[Any]:
        return iter((*self._modules.values(), *self._parameters.values()))


class ModuleShellDict(ModuleShellList):
    """Shell of a module with named children: nn.ModuleDict, nn.ParameterDict."""

    def __iter__(self) -> Iterator[str]:
        return iter((*self._modules, *self._parameters))

    def __contains__(self, key: str) -> bool:
        return key in self._modules or key in self._parameters

    def keys(self) -> Iterator[str]:
        return iter(self)

    def values(self) -> Iterator[Any]:
        return super().__iter__()

    def items(self) -> Iterator[tuple[str, Any]]:
        return iter((*self._modules.items(), *self._parameters.items()))


def entry_of(module: nn.Module, key: Any) -> Any:
    """Return the child of a module by its number, a slice of numbers, or its name."""
    children: dict[str, Any] = {**module._modules, **module._parameters}
    return children[key] if isinstance(key, str) else list(children.values())[key]


def _shell_of(child: nn.Module) -> ModuleShell:
    if isinstance(child, ModuleShell):  # of a parallel module that is copied
        return type(child)(child._kind)
    keyed, numbered = (nn.ModuleDict, nn.ParameterDict), (nn.ModuleList, nn.Sequential, nn.ParameterList)
    kind = (
        ModuleShellDict if isinstance(child, keyed) else ModuleShellList if isinstance(child, numbered) else ModuleShell
    )
    return kind(type(child).__name__)


def mirror(
    model: nn.Module,
    shell: nn.Module,
    parameter: Callable[[nn.Parameter], nn.Parameter],
    buffer_of: Callable[[Tensor], Tensor],
) -> list[nn.Module]:
    """Fill `shell` with modules, parameters and buffers under the names of `model`.

    `parameter` and `buffer_of` map the model's tensors to the shell's. Tensors and modules that the model shares are
    shared in the shell. Return all modules of the shell, in the order of `model.modules()`.
    """
    # Keyed by id, as tensors compare by value and modules may define `__eq__`.
    shells: dict[int, nn.Module] = {}
    made: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}

    def enter(module: nn.Module, shell: nn.Module) -> None:
        shells[id(module)] = shell
        shell.training = module.training
        # The tables are written directly: `register_*` of a shell raises.
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
                enter(child, _shell_of(child))
            shell._modules[name] = None if child is None else shells[id(child)]

    enter(model, shell)
    return [shells[id(module)] for module in model.modules()]


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that stores a tensor, and the tensor's name in it."""
    # Not by `get_submodule`, which reads attributes: those of a parallel module may have the same names.
    *path, leaf = name.split(".")
    owner = module
    for step in path:
        child = owner._modules[step]
        assert child is not None, name
        owner = child
    return owner, leaf


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Map each name of a parameter or buffer to the first name of the same tensor."""
    first: dict[int, str] = {}
    both = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in both}


def tie(shell: nn.Module, canonical: Mapping[str, str]) -> None:
    """Tie shared tensors again: assign the tensor of the first name to each other name of it."""
    for name, first in canonical.items():
        if name != first:
            (owner, leaf), (source, first_leaf) = owner_of(shell, name), owner_of(shell, first)
            if leaf in owner._parameters:
                owner._parameters[leaf] = source._parameters[first_leaf]
            else:
                owner._buffers[leaf] = source._buffers[first_leaf]
