"""Text for people: numbers with units, shardings, tables, and patterns that cover names of repeated layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product

from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedTensor
from autopar.sharding.sharding import Sharding


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


# -- patterns that cover names -----------------------------------------------------------------------------------------


_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.|/|$)")

# Longer names keep their first numbers: four forms of each would be too many patterns.
MOST_NUMBERS = 3


def skeleton(name: str) -> str:
    """Return the name with `*` for each number: equal at the same place of repeated layers."""
    return _NUMBER.sub("*", name)


def cover(wanted: Sequence[str], harmless: Collection[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return few patterns that match all wanted names and no others but harmless ones."""
    # One search over one text is faster than a match per name: models have thousands of names.
    text = "\n".join(names)
    allowed = {*wanted, *harmless}
    left = dict.fromkeys(wanted)
    found: list[str] = []
    # The plainest pattern first: one star per number reads best, where it matches nothing else.
    simple = dict.fromkeys(skeleton(name) for name in wanted)
    for glob in (*simple, *_finer(wanted)):
        if not left:
            break
        matched = set(_lines(glob).findall(text))
        # A pattern for a single name is no shorter than the name.
        if matched <= allowed and (len(matched & left.keys()) > 1 or glob in left):
            found.append(glob)
            left = {name: None for name in left if name not in matched}
    return (*found, *left)


def _finer(wanted: Iterable[str]) -> Iterator[str]:
    """Return patterns for numbers of one length or with equal first digits, most matches first."""
    counts: dict[str, int] = {}
    for name in wanted:
        for glob in dict.fromkeys(_patterns(name)):
            counts[glob] = counts.get(glob, 0) + 1
    return iter(sorted(counts, key=lambda glob: (-counts[glob], len(glob))))


def _patterns(name: str) -> Iterator[str]:
    parts = _NUMBER.split(name)
    numbers = range(len(parts))[1::2][-MOST_NUMBERS:]
    options = [[parts[i], "*", "?" * len(parts[i]), f"{parts[i][:-1]}?"] for i in numbers]
    for picked in product(*options):
        made = list(parts)
        for i, part in zip(numbers, picked, strict=True):
            made[i] = part
        yield "".join(made)


@lru_cache(maxsize=4096)
def _lines(glob: str) -> re.Pattern[str]:
    """Return the regular expression of the lines that a pattern matches."""
    words = {"*": "[^\n]*", "?": "[^\n]"}
    return re.compile(f"^{''.join(words.get(c, re.escape(c)) for c in glob)}$", re.MULTILINE)


def repeated_names(graph: NamedGraph, name: str) -> tuple[str, ...]:
    """Return the names of a tensor in all layers of its stack, in order; the name alone if nothing repeats."""
    nodes = {node.node: node for node in graph.nodes}
    found = {name: None}
    for repeat in graph.repeats:
        for steps in zip(*repeat.layers, strict=True):
            twins = [(*nodes[step].operands, *nodes[step].outputs) for step in steps if step in nodes]
            for same in zip(*twins, strict=False):
                if name in same:
                    found.update(dict.fromkeys(one for one in same if one is not None))
    kind, shown = graph.tensors[name].kind if name in graph.tensors else None, skeleton(name)
    return tuple(
        tensor.name
        for tensor in graph.tensors.values()
        # The input of the first layer is another tensor than the output of each layer.
        if tensor.name in found and tensor.kind == kind and skeleton(tensor.name) == shown
    )
