"""Sizes in bytes and percentages, as layouts write them."""

from __future__ import annotations

from decimal import Decimal

from autopar.names import MAX_DIGITS
from autopar.sharding.layout.lexer import Token
from autopar.sharding.layout.source import layout_error, unknown_name

__all__ = ["UNITS", "format_percent", "format_size", "parse_percent", "parse_size"]

UNITS = {
    "B": 1,
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}B": 1000**i for i, p in enumerate("kMGT", 1)},
}


def parse_size(number: Token, unit: Token) -> int:
    """`1.5`, `GiB` in bytes."""
    if unit.text not in UNITS:
        raise unknown_name("unit", unit.text, UNITS, unit.span)
    size_bytes = Decimal(number.text) * UNITS[unit.text]
    if size_bytes != int(size_bytes) or size_bytes < 1 or len(str(int(size_bytes))) > MAX_DIGITS:
        message = f"'{number.text}{unit.text}' is no size"
        raise layout_error("E0", message, "give a whole number of bytes, as in '1.5GiB' or '70GB'", number.span)
    return int(size_bytes)


def parse_percent(number: Token) -> float:
    """`25` of `25%`."""
    percent = float(number.text[:MAX_DIGITS])
    if len(number.text) > MAX_DIGITS or percent > 100:
        raise layout_error("E0", f"'{number.text}%' is no share", "give 0% to 100%", number.span)
    return percent


def format_size(size_bytes: int) -> str:
    """The shortest way to write it, in whole units."""
    texts = [f"{size_bytes // unit}{name}" for name, unit in UNITS.items() if size_bytes % unit == 0]
    return min(texts, key=len)


def format_percent(percent: float) -> str:
    """As decimal digits, without an exponent."""
    return f"{Decimal(repr(percent)).normalize():f}%"
