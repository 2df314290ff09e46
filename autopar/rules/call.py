"""Call of an op by shapes, dtypes and plain arguments: the input of a rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import RuleError

__all__ = ["Call", "TensorSpec", "arguments_by_name", "describe_call", "flat_results", "operands_of", "takes_tensors"]


@dataclass(frozen=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def differentiable(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Call:
    """One call of one op. `operands` and `outputs` are all tensors in order, lists flattened; an absent one is None."""

    op: str
    arguments: tuple[tuple[str, Any], ...]
    operands: tuple[TensorSpec | None, ...]
    outputs: tuple[TensorSpec | None, ...]
    # Operands for which a plain number stands, as in `x + 2`.
    numbers: frozenset[int] = frozenset()

    def __getitem__(self, name: str) -> Any:
        for key, value in self.arguments:
            if key == name:
                return value
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        return next((value for key, value in self.arguments if key == name), default)

    @property
    def output(self) -> TensorSpec:
        first = self.outputs[0]
        assert first is not None, f"{self.op} has no first output"
        return first

    def operand(self, position: int) -> TensorSpec:
        spec = self.operands[position]
        assert spec is not None, f"operand {position} of {self.op} is absent"
        return spec

    def __str__(self) -> str:
        left = ", ".join("-" if spec is None else str(spec) for spec in self.operands)
        right = ", ".join("-" if spec is None else str(spec) for spec in self.outputs)
        return f"{self.op}({left}) -> {right}"


def arguments_by_name(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call under their schema names, in schema order, defaults filled in."""
    named: dict[str, Any] = {}
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args):
            named[argument.name] = args[position]
        elif argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            named[argument.name] = argument.default_value
        else:
            raise RuleError(f"{op}: argument '{argument.name}' is missing in this call")
    return named


def takes_tensors(op: torch._ops.OpOverload) -> dict[str, bool]:
    """Return the arguments of an op that hold tensors; True for lists of tensors."""
    return dict(_tensor_arguments(op))


def _tensor_arguments(op: torch._ops.OpOverload) -> tuple[tuple[str, bool], ...]:
    kinds = ((argument.name, str(argument.type)) for argument in op._schema.arguments)
    return tuple((name, kind.startswith("List")) for name, kind in kinds if "Tensor" in kind)


# What torch.compiler.assume_constant_result does, without loading the compiler: it cannot read schemas, and would break
# the graph here.
_tensor_arguments._dynamo_marked_constant = True  # type: ignore[attr-defined]


def operands_of(op: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> list[Any]:
    """Return the tensor operands in order, lists flattened; None where an optional one is absent."""
    operands: list[Any] = []
    for name, is_list in takes_tensors(op).items():
        if is_list:
            operands.extend(arguments[name] or ())
        else:
            operands.append(arguments[name])
    return operands


def describe_call(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Call:
    """Describe a call whose arguments and result are tensors of any kind (real, meta, fake)."""
    arguments = arguments_by_name(op, args, kwargs)
    values = operands_of(op, arguments)
    operands = tuple(_spec(value) if hasattr(value, "shape") else None for value in values)
    numbers = frozenset(i for i, value in enumerate(values) if isinstance(value, int | float | complex))
    results = flat_results(result)
    outputs = tuple(None if tensor is None else _spec(tensor) for tensor in results)
    return Call(str(op), tuple((name, _plain(value)) for name, value in arguments.items()), operands, outputs, numbers)


def flat_results(result: Any) -> list[Any]:
    """Return the tensors an op returned, in order."""
    if isinstance(result, list | tuple):
        return [tensor for item in result for tensor in flat_results(item)]
    return [result if hasattr(result, "shape") else None]


def _spec(tensor: Any) -> TensorSpec:
    return TensorSpec(tuple(int(size) for size in tensor.shape), tensor.dtype)


def _plain(value: Any) -> Any:
    if hasattr(value, "shape"):
        return _spec(value)
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    return value
