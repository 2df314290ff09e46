"""Ops by name, as torch and its users write them."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from autopar.errors import RuleError

__all__ = ["display_name", "find_op", "resolve_op"]


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
