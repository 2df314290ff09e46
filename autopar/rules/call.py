"""Ops by name, and calls of ops by shapes, dtypes and plain arguments: the input of a rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from autopar.errors import RuleError

__all__ = [
    "Call",
    "TensorSpec",
    "arguments_by_name",
    "describe_call",
    "display_name",
    "find_op",
    "flat_results",
    "operands_of",
    "resolve_op",
    "takes_tensors",
]


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
        # Pairs in place of a dict: a call is hashable, and has few arguments.
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


# -- ops by name -------------------------------------------------------------------------------------------------------


def resolve_op(name: str) -> torch._ops.OpOverload:
    """Return the op that has this name in the table, such as `aten.add.Tensor`."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    op = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
    if not isinstance(op, torch._ops.OpOverload):
        raise RuleError(f"the table has a rule for '{name}', which torch does not know")
    return op


def find_op(op: Any) -> torch._ops.OpOverload:
    """Return the op that a user means: `mylib::op`, `mylib::op.overload`, `mylib.op.default`, or the op itself."""
    if isinstance(op, torch._ops.OpOverload):
        return op
    if isinstance(op, torch._ops.OpOverloadPacket):
        return _only_overload(op._qualified_op_name, op)
    if isinstance(op, CustomOpDef):
        return find_op(op._qualname)
    if not isinstance(op, str):
        raise RuleError(f"{op!r} is no op; give its name, as in 'mylib::op', or an op of torch.ops")
    namespace, _, rest = op.replace("::", ".", 1).partition(".")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None) if name else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        known = {full.partition(".")[0] for full in torch._C._dispatch_get_all_op_names()}
        wanted = f"{namespace}::{name}" if name else namespace
        near = get_close_matches(wanted, sorted(known), n=1)
        hint = f"did you mean '{near[0]}'?" if near else "is the module that defines it imported?"
        raise RuleError(f"torch knows no op '{wanted}'; {hint}")
    if not overload:
        return _only_overload(op, packet)
    overloads = _overloads(packet)
    if overload not in overloads:
        raise RuleError(f"'{namespace}::{name}' has no overload '{overload}'; it has {', '.join(overloads)}")
    return overloads[overload]


def display_name(op: torch._ops.OpOverload) -> str:
    """Return `mylib::op`, with the overload where it has a name."""
    return op._schema.name + (f".{op._overloadname}" if op._overloadname != "default" else "")


def _overloads(packet: torch._ops.OpOverloadPacket) -> dict[str, torch._ops.OpOverload]:
    """Return the overloads that take tensors or make them, by name."""
    names: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    found = {name: getattr(packet, name) for name in names}
    # Overloads on plain numbers (`aten::add.int`) are TorchScript's.
    return {name: op for name, op in found.items() if "Tensor" in str(op._schema)}


def _only_overload(name: str, packet: torch._ops.OpOverloadPacket) -> torch._ops.OpOverload:
    overloads = _overloads(packet)
    if "default" in overloads or len(overloads) == 1:
        return overloads.get("default") or next(iter(overloads.values()))
    first = next(iter(overloads), "default")
    raise RuleError(f"'{name}' has several overloads; say which, as in '{name}.{first}': {', '.join(overloads)}")
