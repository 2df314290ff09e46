"""The whole table, put together from its files, and the rules that users add."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from autopar.rules import elementwise, reduce
from autopar.rules.table import Entry, Table, parse_table

__all__ = ["rule_table"]

MODULES: tuple[ModuleType, ...] = (elementwise, reduce)

_registered: dict[str, Entry] = {}


@cache
def _standard_table() -> Table:
    families = {name: family for module in MODULES for name, family in module.FAMILIES.items()}
    return Table([entry for module in MODULES for entry in parse_table(module.TABLE, families)])


def rule_table() -> Table:
    """All rules: the table's, and over them the user's."""
    table = _standard_table()
    for entry in _registered.values():
        table = table.with_entry(entry)
    return table
