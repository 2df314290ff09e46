"""Registry of all rules: the table's files together, and the rules that users add."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any

import torch

from autopar.errors import RuleError
from autopar.rules.call import display_name, find_op, takes_tensors
from autopar.rules.notation import Rule, parse_rule
from autopar.rules.ops import (
    attention,
    conv_pool,
    documents,
    elementwise,
    folded,
    index,
    loss,
    loss_pieces,
    matmul,
    misc,
    norm,
    random,
    reduce,
    routed,
    scatter,
    slicing,
    slots,
    view,
)
from autopar.rules.proof.samples import Tries
from autopar.rules.shard_call.dispatch import LOCALISERS, LOWERINGS
from autopar.rules.table import OpFamily, RuleTable, TableEntry, parse_table

__all__ = ["register_rule", "registered", "rule_table", "topics"]

MODULES: tuple[ModuleType, ...] = (
    elementwise,
    reduce,
    matmul,
    routed,
    slots,
    view,
    slicing,
    index,
    scatter,
    attention,
    folded,
    documents,
    norm,
    conv_pool,
    loss,
    loss_pieces,
    random,
    misc,
)

# Rules of users, by op; a later registration replaces an earlier one.
_registered: dict[str, TableEntry] = {}


@cache
def topics() -> Mapping[str, tuple[TableEntry, ...]]:
    """Return the lines of the table, by the file they stand in."""
    families: dict[str, OpFamily] = {}
    for module in MODULES:
        clash = families.keys() & module.FAMILIES.keys()
        assert not clash, f"{module.__name__} has a family of rules that another file has: {clash}"
        families |= module.FAMILIES
    return {module.__name__.rpartition(".")[2]: tuple(parse_table(module.TABLE, families)) for module in MODULES}


@cache
def _standard_table() -> RuleTable:
    return RuleTable([entry for entries in topics().values() for entry in entries])


def rule_table() -> RuleTable:
    """Return all rules: the table's, and over them the user's."""
    # Made anew at each call: the standard table is cached, a user may register at any time.
    return _standard_table().with_entries(_registered.values())


def registered(op: Any) -> TableEntry:
    """Return the rule of an op, given by name or itself."""
    found = find_op(op)
    entry = rule_table().get(str(found))
    if entry is None:
        raise RuleError(
            f'{display_name(found)} has no rule; add one: autopar.register_rule("{display_name(found)}", "...")'
        )
    return entry


def register_rule(op: Any, rule: str) -> None:
    """Register the rule of an op; it takes precedence over the table's.

    Parameters:
        op: a name (`mylib::op`, `mylib::op.overload`), an op of `torch.ops`, or a `torch.library.custom_op`.
        rule: the dims of operands and outputs, then clauses, as docs/rules.md writes them.

    `autopar.prove_rule` proves it by execution; a rule that does not fit the op's schema is a `RuleError`.

    >>> import autopar, torch
    >>> @torch.library.custom_op("docs::double", mutates_args=())
    ... def double(x: torch.Tensor) -> torch.Tensor:
    ...     return 2 * x
    >>> autopar.register_rule("docs::double", "b s d -> b s d")
    """
    found = find_op(op)
    parsed = parse_rule(rule)
    _check_against_schema(found, parsed, rule)
    line = f"{display_name(found)}  {rule}"
    _registered[str(found)] = TableEntry(str(found), line, parsed, None, (), Rule((), ()), Tries())


def _check_against_schema(op: torch._ops.OpOverload, parsed: Rule, rule: str) -> None:
    def fail(reason: str) -> None:
        raise RuleError(f"the rule does not fit {display_name(op)}: {reason}\n  rule  {rule}\n  op    {op._schema}")

    tensors = takes_tensors(op)
    if not any(tensors.values()) and len(parsed.operands) != len(tensors):
        fail(f"the op takes {_count(len(tensors), 'tensor')}, the rule names {len(parsed.operands)}")
    returns = [str(value.type) for value in op._schema.returns]
    if not any(kind.startswith("List") for kind in returns) and len(parsed.outputs) != len(returns):
        fail(f"the op returns {_count(len(returns), 'tensor')}, the rule names {len(parsed.outputs)}")
    arguments = [argument.name for argument in op._schema.arguments]
    for word in parsed.localise:
        argument, equals, _ = word.partition("=")
        if argument not in arguments:
            fail(f"it localises '{argument}', which is no argument of the op")
        if not equals and word not in LOCALISERS:
            example = next(iter(parsed.factors), "a")
            fail(f"'{word}' cannot be localised alone; say whose extent it is, as in '{word}={example}'")
    for _, lowering in parsed.lowerings:
        if lowering not in LOWERINGS:
            fail(f"there is no lowering '{lowering}'; there are {', '.join(sorted(LOWERINGS))}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
