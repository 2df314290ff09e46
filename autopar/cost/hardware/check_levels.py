"""Check the rules of a cluster file that involve several of its values."""

from __future__ import annotations

from math import inf, prod

from autopar.cost.algorithm_registry import ALGORITHMS
from autopar.cost.collective_algorithms import KINDS, LINK_LIKE, Library, TopologyLevel
from autopar.cost.hardware.part_links import check_wires
from autopar.cost.hardware.toml_reader import Document
from autopar.cost.measured.tables import CollectiveTable
from autopar.names import did_you_mean

__all__ = ["check_levels", "check_rates"]


def check_rates(document: Document, level: TopologyLevel, place: tuple[str | int, ...]) -> None:
    if level.rate_bytes_per_second > level.port_bytes_per_second:
        message = "'achieved' is impossible: it is more than the port gives"
        document.fail((*place, "achieved"), message, "give what is achieved of one port in one direction")


def check_levels(document: Document, levels: tuple[TopologyLevel, ...], library: Library) -> None:
    """Check the rules that involve several values of a file."""
    if not levels:
        document.fail(("level",), "the cluster has no links", "describe them, the innermost first, as [[level]]")
    _check_library(document, library)
    links = sorted({link for algorithm in library.algorithm for link in algorithm.hop_seconds})
    links += [link for link, like in LINK_LIKE.items() if like in links and link not in links]
    hops = {"any"} | {name for algorithm in library.algorithm for name in algorithm.names}
    seen: list[str] = []
    for i, level in enumerate(levels):
        place = ("level", i)
        if level.name in seen:
            document.fail((*place, "name"), f"two levels are called '{level.name}'", "give each level another name")
        seen.append(level.name)
        if level.units is None and i < len(levels) - 1:
            document.fail(place, f"level '{level.name}' lacks 'units'", "only the outermost level joins any number")
        check_rates(document, level, place)
        if level.link not in links:
            message = f"library '{library.name}' knows no links of kind '{level.link}'{did_you_mean(level.link, links)}"
            document.fail((*place, "link"), message, f"its kinds of links are {', '.join(links)}")
        for name in level.hop_seconds:
            if name not in hops:
                message = f"library '{library.name}' has no '{name}'{did_you_mean(name, hops)}"
                document.fail((*place, "hop"), message, f"name one of {', '.join(sorted(hops))}")
        check_wires(document, level, place)
    if library.tables.collectives is not None:
        _check_collectives(library.tables.collectives, levels)


def _check_library(document: Document, library: Library) -> None:
    for i, algorithm in enumerate(library.algorithm):
        place = ("library", "algorithm", i)
        if algorithm.name not in ALGORITHMS:
            message = f"there is no algorithm '{algorithm.name}'{did_you_mean(algorithm.name, ALGORITHMS)}"
            document.fail((*place, "name"), message, f"the algorithms are {', '.join(ALGORITHMS)}")
        if algorithm.most is not None and algorithm.most < algorithm.least:
            message = f"'most' is impossible: it is less than {algorithm.least}, the least"
            document.fail((*place, "most"), message, "give the smallest and the largest group that it is for")
        if (algorithm.smallest_bytes or 0.0) > (algorithm.largest_bytes or inf):
            message = "'largest' is impossible: it is less than 'smallest'"
            document.fail((*place, "largest"), message, "give the smallest and the largest buffer that it is for")
        for kind in algorithm.collectives:
            if kind not in KINDS:
                message = f"there is no collective '{kind}'{did_you_mean(kind, KINDS)}"
                document.fail((*place, "collectives"), message, f"the collectives are {', '.join(KINDS)}")


def _check_collectives(table: CollectiveTable, levels: tuple[TopologyLevel, ...]) -> None:
    """Check that the measured groups fit on the levels of the cluster."""
    names = ", ".join(level.name for level in levels)
    for i, row in enumerate(table.rows):
        if len(row.joined) > len(levels):
            fix = f"give the units of {names}, the outermost first, or fewer"
            table.fail(i, f"'{row.units}' has {len(row.joined)} levels, and the cluster has {len(levels)}", fix)
        for count, level in zip(row.joined, levels, strict=False):
            if level.units is not None and count > level.units:
                message = f"'{row.units}' is impossible: '{level.name}' joins {level.units} units"
                table.fail(i, message, f"give at most {level.units}")
        if prod(row.joined) == 1:
            table.fail(i, f"'{row.units}' is impossible: a group has 2 ranks at least", "leave the row out")
