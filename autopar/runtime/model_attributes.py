"""Attributes and methods of a model, as its parallel module and shells offer them: `generate`, `config`, `in_features`.

The code of a method is the model's own and runs with the module as `self`. So `generate` calls the parallel module, and
a property such as `device` reads its parameters. Code that calls a part of the model fails in that part's shell.
"""

from __future__ import annotations

import inspect
from types import FunctionType, MethodType
from typing import Any, TypeVar

from torch import Tensor, nn

from autopar.errors import AutoparError, ModuleAttributeError

__all__ = ["ModelClass", "attribute_of", "class_for", "has_attribute", "set_attribute"]

_ABSENT = object()
# Values that compare as what a graph makes of them; others are taken for new ones.
_COMPARED = (bool, int, float, str, type(None))

_Kind = TypeVar("_Kind", bound=type)


class ModelClass(type):
    """Class of a parallel module: has the attributes of the model's class, for code such as `type(self).method`.

    Not a subclass of the model's class: its overrides of what torch calls (`__init__`, `train`, `_apply`) expect the
    modules of the model.
    """

    model_class: type = object

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(cls.model_class, name)


def has_attribute(model: nn.Module, name: str) -> bool:
    """Return whether a model has an attribute that not every module has, from its code or its constructor."""
    return name in model.__dict__ or (_defined(type(model), name) is not None and not hasattr(nn.Module, name))


def attribute_of(module: nn.Module, model: nn.Module, name: str) -> Any:
    """Return an attribute of `model`; its methods and properties get `module` in place of the model.

    Raises `AttributeError` if the model has none of this name.
    """
    if name in model.__dict__:
        value = model.__dict__[name]
        if isinstance(value, Tensor):
            raise ModuleAttributeError(
                f"the tensor {name!r} of {type(model).__name__} is a constant of the graph that the parallel module "
                "runs: it has no such attribute\n"
                f"fix: make it a buffer, register_buffer({name!r}, ...); or read it from the original model"
            )
        # The model of the method has no weights.
        return MethodType(value.__func__, module) if getattr(value, "__self__", None) is model else value
    found = _defined(type(model), name)
    if found is not None:
        value = found[0]
        # The protocol of descriptors: functions, properties, class methods and whatever else a class may have.
        return type(value).__get__(value, module, type(model)) if hasattr(type(value), "__get__") else value
    forwarding = _defined(type(model), "__getattr__")
    if forwarding is not None:  # as of the models of peft, which have the attributes of the model inside
        return forwarding[0](module, name)
    raise AttributeError(f"{type(model).__name__!r} object has no attribute {name!r}")


def set_attribute(model: nn.Module, name: str, value: Any) -> bool:
    """Set an attribute of a model; return whether its graphs may differ from now on."""
    if isinstance(value, Tensor):
        raise AutoparError(
            f"a parallel module cannot take the tensor {name!r}: the graph would have it as a constant\n"
            f"fix: make it a buffer of the model, register_buffer({name!r}, ...), and parallelize it then"
        )
    former = model.__dict__.get(name, _ABSENT)
    setattr(model, name, value)
    return not (type(former) is type(value) and isinstance(value, _COMPARED) and former == value)


def class_for(kind: _Kind, model: nn.Module) -> _Kind:
    """Return a subclass of a class of parallel modules for one model, with the signature of its forward.

    Hosts read the signature: `Trainer` drops the columns of a data set that no parameter takes.
    """
    own = kind.__dict__["forward"]
    # The same code, so that a call passes through no further function.
    forward = FunctionType(own.__code__, own.__globals__, own.__name__, own.__defaults__, own.__closure__)
    signature = inspect.signature(model.forward)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = signature.replace(parameters=(this, *signature.parameters.values()))  # type: ignore[attr-defined]
    members = {"__module__": kind.__module__, "forward": forward, "model_class": type(model)}
    return type(kind)(kind.__name__, (kind,), members)


def _defined(kind: type, name: str) -> tuple[Any] | None:
    """Return what the classes of a model define under a name that not every module has."""
    for base in kind.__mro__:
        if base not in nn.Module.__mro__ and name in base.__dict__:
            return (base.__dict__[name],)
    return None
