"""Arguments of a call: bound to the parameters of `forward`, flattened, and checked for shared memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError, TraceError
from autopar.ir.pytree import Constant, Flattened, Mapped, UnsupportedValueError, flatten, unflatten


def signature_of(model: nn.Module) -> inspect.Signature:
    return inspect.signature(model.forward)


def bind(
    signature: inspect.Signature,
    owner: str,
    inputs: tuple[Any, ...] | Mapping[str, Any],
    error: type[AutoparError] = TraceError,
) -> dict[str, Any]:
    """Return the arguments by parameter name: those of `*args` as `args.0` ..., of `**kwargs` by their own names."""
    if isinstance(inputs, Mapping):
        args, kwargs = (), dict(inputs)
    elif isinstance(inputs, tuple):
        args, kwargs = inputs, {}
    else:
        hint = "write (x,) for a single tensor" if isinstance(inputs, torch.Tensor) else "use a tuple or a dict"
        raise error(
            "inputs must be a tuple of positional or a dict of keyword arguments, "
            f"got a {type(inputs).__name__}: {hint}"
        )
    return bind_call(signature, owner, args, kwargs, error)


def bind_call(
    signature: inspect.Signature,
    owner: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: type[AutoparError] = TraceError,
) -> dict[str, Any]:
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as mismatch:
        # Annotations and defaults would hide the names.
        expected = ", ".join(str(parameter).split(":")[0].split("=")[0] for parameter in signature.parameters.values())
        given = [*([f"{len(args)} positional"] if args else []), *kwargs]
        raise error(
            f"the inputs do not fit {owner}.forward({expected}): {mismatch}. "
            f"Given: {', '.join(given) or 'nothing'}. Add the missing argument or take out the extra one."
        ) from mismatch
    flat: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            flat.update({f"{name}.{i}": item for i, item in enumerate(value)})
        elif kind is inspect.Parameter.VAR_KEYWORD:
            # The order of keywords means nothing to the callee, and must not make two calls differ.
            flat.update(sorted(value.items()))
        else:
            flat[name] = value
    return flat


def plain_call(signature: inspect.Signature, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the (args, kwargs) that call `forward` with these arguments: the inverse of `bind`."""
    args: list[Any] = []
    kwargs = dict(arguments)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter.name for parameter in signature.parameters.values() if parameter.kind in kinds]
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            rest = [name for name in kwargs if name.startswith(f"{parameter.name}.")]
            if rest:
                # Python fills `*args` only after all positional parameters.
                args += [kwargs.pop(name) for name in positional if name in kwargs]
            args.extend(kwargs.pop(name) for name in rest)
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY and parameter.name in kwargs:
            args.append(kwargs.pop(parameter.name))
    return args, kwargs


def inputs_with(
    signature: inspect.Signature, flat: Flattened, tensors: Sequence[Tensor]
) -> tuple[Any, ...] | dict[str, Any]:
    """Return arguments with other tensors, as a tuple of positional or a dict of keyword ones."""
    arguments, _ = unflatten(flat.node, tensors)
    args, kwargs = plain_call(signature, arguments)
    if args and kwargs:
        raise AutoparError(
            f"keyword arguments for a forward with *args: expected positional arguments, got {', '.join(kwargs)}\n"
            "fix: give all arguments by position"
        )
    return tuple(args) if args else kwargs


def flatten_arguments(arguments: dict[str, Any], owner: str, error: type[AutoparError] = TraceError) -> Flattened:
    try:
        return flatten(arguments, deep=True)
    except UnsupportedValueError as unsupported:
        raise error(f"the argument {unsupported.path!r} of {owner} holds {unsupported.problem}") from unsupported


class CallReader:
    """Flatten the arguments of calls of one module.

    Calls with tensors alone that name the same arguments have one structure. It is kept from the latest of them, as
    binding and flattening take as long as a layer of a small model.
    """

    def __init__(self, signature: inspect.Signature, owner: str) -> None:
        self.signature = signature
        self.owner = owner
        # Names of the latest call with tensors alone, its arguments, and which of the values given each of them is.
        self._names: tuple[Any, ...] | None = None
        self._latest: Flattened
        self._order: tuple[int, ...] = ()

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Flattened:
        names, values = (len(args), *kwargs), (*args, *kwargs.values())
        has_tensors_alone = all(isinstance(value, Tensor) for value in values)
        if has_tensors_alone and names == self._names:
            tensors, paths = tuple([values[place] for place in self._order]), self._latest.paths
            return Flattened(tensors, paths, self._latest.node, (dict(zip(paths, tensors, strict=True)),))
        found = flatten_arguments(self._bound(args, kwargs), self.owner, AutoparError)
        if has_tensors_alone:
            places = range(len(values))
            order = self._bound(places[: len(args)], dict(zip(kwargs, places[len(args) :], strict=True)))
            self._names, self._order = names, tuple(order.values())
            self._latest = replace(found, tensors=(), containers=())
        return found

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return bind_call(self.signature, self.owner, tuple(args), dict(kwargs), AutoparError)


def without_defaults(signature: inspect.Signature, node: Mapped) -> Mapped:
    """Return the arguments that differ from the defaults of `forward`, to compare two calls."""
    kept = []
    for name, child in zip(node.keys, node.children, strict=True):
        parameter = signature.parameters.get(name)
        if parameter is None or not (isinstance(child, Constant) and child == Constant(parameter.default)):
            kept.append((name, child))
    keys = tuple(name for name, _ in kept)
    return Mapped(node.kind, keys, tuple(child for _, child in kept), node.number, node.template)


# -- shared memory -----------------------------------------------------------------------------------------------------


def apart(tensor: Tensor) -> Tensor:
    """Make a leaf of the same shape, strides, dtype and device in memory of its own; its values are not set."""
    with torch.no_grad():
        strided = tensor.layout is torch.strided
        made = tensor.new_empty_strided(tensor.shape, tensor.stride()) if strided else tensor.clone()
    return made.requires_grad_(tensor.requires_grad)


def check_overlaps(
    owner: str,
    changed: Iterable[str],
    inputs: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    error: type[AutoparError] = AutoparError,
) -> None:
    """Raise if a tensor that the forward changes in place shares memory with another input.

    `changed` are names of `inputs` or of `state`, the model's parameters and buffers. A traced graph takes every input
    as a tensor of its own, so it cannot follow a change of one in another; without changes, sharing is harmless.
    """
    given = set(map(_storage, inputs.values()))
    for name in changed:
        own = inputs[name] if name in inputs else state[name]
        # Overlaps within the model's own state are those of the trace, which has them as aliases.
        if name not in inputs and _storage(own) not in given:
            continue
        others = {**(state if name in inputs else {}), **inputs}
        for other, tensor in others.items():
            if other != name and overlap(own, tensor):
                what = "the input" if name in inputs else "its buffer"
                raise error(
                    f"{owner} changes {what} {name} in place, and {other} shares memory with it: the traced graph "
                    f"cannot follow a change of one in the other\nfix: call it with a clone, {other}.clone()"
                )


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return True if the two tensors have an element in common."""
    if _storage(one) != _storage(other) or not one.numel() or not other.numel():
        return False
    if one.layout is not torch.strided or one.dtype != other.dtype:
        # Views of other dtypes of one storage are rare: assume the worst.
        return True
    begin, end = max(_first(one), _first(other)), min(_last(one), _last(other))
    if begin > end:
        return False
    # Strided views of one storage, such as columns of a table, interleave: mark the elements of one, look for them in
    # the other.
    marks = torch.zeros(max(_last(one), _last(other)) + 1, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _storage(tensor: Tensor) -> int:
    found: int = id(tensor) if tensor.layout is not torch.strided else tensor.untyped_storage()._cdata
    return found


def _first(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _last(tensor: Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return _first(tensor) + sum((size - 1) * step for size, step in steps)
