"""Text for people: numbers with units, shardings, tables."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.values import NamedTensor
from autopar.sharding.sharding import Sharding

__all__ = ["bytes_text", "layout_text", "percent_text", "seconds_text", "table"]


def seconds_text(seconds: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:,.4g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def bytes_text(size_bytes: float) -> str:
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= size:
            return f"{size_bytes / size:,.4g} {unit}"
    return f"{size_bytes:.0f} B"


def percent_text(share: float) -> str:
    return f"{100 * share:.3g} %"


def layout_text(tensor: NamedTensor, layout: Sharding) -> str:
    """Return a sharding as text: `d_ff -> tp`, `partial(tp)`, `whole`."""
    places: dict[str, list[str]] = {}
    for i, axes in enumerate(layout.splits):
        if axes:
            places.setdefault("*".join(axes), []).append(_atom_text(tensor, i))
    parts = [f"{', '.join(dims)} -> {axes}" for axes, dims in places.items()]
    marks = (("partial", layout.partial), ("broadcast", layout.broadcast))
    parts += [f"{word}({'*'.join(sorted(axes))})" for word, axes in marks if axes]
    return "; ".join(parts) or "whole"


def _atom_text(tensor: NamedTensor, number: int) -> str:
    """Return the innermost name of an atom, with its dim where the dims of the tensor do not show it."""
    atom = tensor.atoms[number]
    if not atom.names:
        return f"_.{number}"
    name, dim = atom.names[-1], tensor.dims[atom.dim]
    return name if name in dim.replace("(", " ").replace(")", " ").split() else f"{name} of {atom.names[0]}"


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "  ") -> list[str]:
    """Return the rows as lines with aligned columns; those in `right` are right-aligned."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = zip(range(len(row)), row, widths, strict=True)
        lines.append(indent + "  ".join(f"{cell:>{w}}" if i in right else f"{cell:{w}}" for i, cell, w in cells))
    return [line.rstrip() for line in lines]
