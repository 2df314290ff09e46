"""Ops by name, as torch and its users write them."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, NoReturn

import torch
from torch._library.custom_ops import CustomOpDef

from autopar.errors import RuleError

__all__ = ["display_name", "find_op", "resolve_op"]


def resolve_op(name: str) -> torch._ops.OpOverload:
    """The op behind a name of the table, such as `aten.add.Tensor`."""
    op = _overload(*name.split(".")) if name.count(".") == 2 else None
    if op is None:
        raise RuleError(f"the table has a rule for '{name}', which torch does not know")
    return op


def find_op(op: Any) -> torch._ops.OpOverload:
    """The op that a user means: `mylib::op`, `mylib::op.overload`, `mylib.op.default`, or the op itself."""
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
    found = _overload(namespace, name, overload) if overload else None
    packet = getattr(getattr(torch.ops, namespace), name, None) if name and not overload else None
    if isinstance(packet, torch._ops.OpOverloadPacket):
        found = _only_overload(op, packet)
    return found or _unknown(op)


def display_name(op: torch._ops.OpOverload) -> str:
    """`mylib::op`, with the overload where it has a name."""
    return op._schema.name + (f".{op._overloadname}" if op._overloadname != "default" else "")


def _overload(namespace: str, name: str, overload: str) -> torch._ops.OpOverload | None:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    found = getattr(packet, overload, None) if packet is not None and overload in packet.overloads() else None
    return found if isinstance(found, torch._ops.OpOverload) else None


def _only_overload(name: str, packet: torch._ops.OpOverloadPacket) -> torch._ops.OpOverload:
    overloads: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    chosen = "default" if "default" in overloads else overloads[0]
    if chosen != "default" and len(overloads) > 1:
        raise RuleError(f"'{name}' has several overloads; say which: {name}.{overloads[0]} ({', '.join(overloads)})")
    found = getattr(packet, chosen)
    assert isinstance(found, torch._ops.OpOverload), f"{name}.{chosen} is {found!r}"
    return found


def _unknown(name: str) -> NoReturn:
    known = {full.partition(".")[0] for full in torch._C._dispatch_get_all_op_names()}
    near = get_close_matches(name.replace(".", "::", 1) if "::" not in name else name, sorted(known), n=1)
    hint = f"; did you mean '{near[0]}'?" if near else "; is the module that defines it imported?"
    raise RuleError(f"torch knows no op '{name}'{hint}")
