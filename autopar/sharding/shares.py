"""Unequal shares of the samples: `batch -> pod by 12:4` for devices of unequal speed.

A layout splits one dim by shares. Along an axis with shares, each tensor that has the dim is split in these
proportions; all other dims, and so all parameters, are split evenly. Numbers are speeds: whole samples go, one after
the other, to the place that would end first. Sums over shards are exact whatever their lengths, and means are weighted
by them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import gcd, prod
from types import MappingProxyType

from autopar.ir.graph import NamedGraph
from autopar.ir.values import Atom, NamedNode, NamedTensor
from autopar.mesh import Shares, SubMesh
from autopar.sharding.choices import Site, sites_of
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.source import layout_error
from autopar.sharding.layout.syntax import (
    Axes,
    Block,
    DimRule,
    Pin,
    SplitTerm,
    Statement,
    TensorPattern,
    Term,
    rules_of,
)

__all__ = [
    "InfeasibleShares",
    "asks_for_speed",
    "by_numbers",
    "check_whole_inputs",
    "greedy",
    "marked",
    "marked_for",
    "shares_along",
    "with_numbers",
    "with_shares",
]

# Speeds by the place along each axis; axes along which all are equal are left out.
Speeds = Mapping[str, tuple[float, ...]]

STORED = ("param", "use", "grad", "opt", "buffer")
WHOLE_NUMBERS = "give cluster= with its parts, or write numbers, as in 'batch -> pod by 12:4'"


# -- the statement -----------------------------------------------------------------------------------------------------


def share_terms(layout: Layout) -> Iterator[tuple[DimRule, SplitTerm]]:
    """Yield the terms of a layout with shares, each with its rule."""
    for statement in layout:
        stored = isinstance(statement, Block) and any(scope.kind in STORED for scope in statement.scopes)
        for rule in rules_of(statement):
            for term in rule.place.terms:
                if isinstance(term, SplitTerm) and term.by is not None:
                    if stored:
                        what = "parameters and buffers are split evenly: shares are for inputs and activations"
                        raise layout_error("E5", what, "leave 'by' out here", rule.span)
                    yield rule, term


def asks_for_speed(layout: Layout) -> bool:
    """Return whether the cluster decides shares of a layout."""
    return any(term.by == "speed" for _, term in share_terms(layout))


def check_whole_inputs(layout: Layout) -> None:
    """Raise if ranks that have unequal shares are to give their own rows: the shards of an input have one shape."""
    for rule, _ in share_terms(layout):
        what = "with local_inputs=True the shards of an input have one shape, and these shares make unequal ones"
        raise layout_error("E5", what, "give whole inputs: each rank takes its rows of them", rule.span)


def with_shares(graph: NamedGraph, layout: Layout, axes: SubMesh, count: int = 1) -> tuple[NamedGraph, SubMesh]:
    """Return the graph with the atoms that a layout splits by shares marked, and the axes with these shares.

    `count` is the number of micro-batches, each of which is split by shares. Axes that have shares keep them.
    """
    axes = SubMesh.of(axes)
    found: dict[str, tuple[tuple[int, ...], DimRule]] = {}
    dim = ""
    for rule, term in share_terms(layout):
        if len(rule.dims) > 1 or "*" in rule.dims[0] or (dim and rule.dims[0] != dim):
            message = f"shares are for one dim, not for {', '.join(rule.dims)}" + (f" beside {dim}" if dim else "")
            raise layout_error(
                "E0", message, "name the dim of the samples alone, as in 'batch -> pod by 12:4'", rule.span
            )
        dim = rule.dims[0]
        if dim not in graph.dims or any(axis not in axes for axis in term.axes):
            continue  # a strategy may name dims that the model lacks; the check of names tells the rest
        try:
            own = _weights(graph, dim, term, axes, count)
        except InfeasibleShares as error:
            raise layout_error(error.code, error.message, error.fix, rule.span) from None
        for axis, weights in own.items():
            if axis in found and found[axis][0] != weights:
                message = f"two rules give '{dim}' other shares along '{axis}'"
                raise layout_error("E2", message, "give the same", found[axis][1].span, rule.span)
            found[axis] = weights, rule
    if found:
        axes = axes.with_shares(Shares(dim, tuple((axis, found[axis][0]) for axis in axes if axis in found)))
    return marked_for(graph, axes), axes


def by_numbers(graph: NamedGraph, layout: Layout, axes: SubMesh, speeds: Speeds, count: int = 1) -> Layout:
    """Return the layout with numbers for `by speed`, given the speeds along the axes."""

    def numbered(rule: DimRule) -> DimRule:
        terms = []
        for term in rule.place.terms:
            if isinstance(term, SplitTerm) and term.by == "speed":
                try:
                    weights = shares_along(graph, rule.dims[0], term.axes, axes, speeds, count)
                except InfeasibleShares as error:
                    raise layout_error(error.code, error.message, error.fix, rule.span) from None
                term = replace(term, by=_numbers(term.axes, axes, weights))
            terms.append(term)
        return replace(rule, place=TensorPattern(tuple(terms), rule.place.priority))

    statements = []
    for statement in layout:
        if isinstance(statement, DimRule):
            statement = numbered(statement)
        elif isinstance(statement, Block | Pin):
            statement = replace(statement, rules=tuple(map(numbered, statement.rules)))
        statements.append(statement)
    return Layout(tuple(statements), layout.name)


class InfeasibleShares(Exception):
    """Shares that a dim or a product of axes cannot have: code, message and fix of the error at the rule."""

    def __init__(self, code: str, message: str, fix: str) -> None:
        super().__init__(code, message, fix)
        self.code, self.message, self.fix = code, message, fix


def with_numbers(statements: Iterable[Statement], axes: SubMesh) -> tuple[Statement, ...]:
    """Return the statements of a plan with the shares of the axes in each rule about the dim that they split."""
    axes = SubMesh.of(axes)
    shares = axes.shares
    if shares is None:
        return tuple(statements)

    def term(given: Term) -> Term:
        if not isinstance(given, SplitTerm) or shares.along(given.axes) is None:
            return given
        return replace(given, by=_numbers(given.axes, axes, dict(shares.weights)))

    def rules(given: DimRule) -> Iterator[DimRule]:
        others = tuple(dim for dim in given.dims if dim != shares.dim)
        if others:
            yield replace(given, dims=others)
        if len(others) < len(given.dims):
            place = TensorPattern(tuple(map(term, given.place.terms)), given.place.priority)
            yield replace(given, dims=(shares.dim,), place=place)

    found: list[Statement] = []
    for statement in statements:
        if isinstance(statement, DimRule):
            found += rules(statement)
        elif isinstance(statement, Block | Pin):
            found.append(replace(statement, rules=tuple(one for rule in statement.rules for one in rules(rule))))
        else:
            found.append(statement)
    return tuple(found)


def _numbers(over: Axes, axes: SubMesh, weights: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the numbers of a term: those of its first axis alone, or of all places of the product."""
    if not weights:
        return None
    if set(weights) == {over[0]}:
        return weights[over[0]]
    found = [1]
    for axis in over:
        found = [one * other for one in found for other in weights.get(axis, (1,) * axes[axis])]
    return tuple(found)


def _weights(graph: NamedGraph, dim: str, term: SplitTerm, axes: SubMesh, count: int) -> dict[str, tuple[int, ...]]:
    """Return the weights along each axis of a term."""
    if term.by == "speed":
        raise InfeasibleShares("E5", f"the speeds along {'*'.join(term.axes)} are unknown", WHOLE_NUMBERS)
    assert term.by is not None, "a term with shares"
    return shares_along(graph, dim, term.axes, axes, _speeds(term.axes, axes, term.by), count)


def _speeds(over: Axes, axes: SubMesh, numbers: tuple[int, ...]) -> dict[str, tuple[float, ...]]:
    """Return the numbers of a term by axis: for one axis, the first of that size, or for all places of the product."""
    sizes = [axes[axis] for axis in over]
    for axis, size in zip(over, sizes, strict=True):
        if len(numbers) == size:
            return {axis: tuple(map(float, numbers))}
    if len(numbers) != prod(sizes):
        each = " or ".join(dict.fromkeys(map(str, (*sizes, prod(sizes)))))
        what = f"'by {':'.join(map(str, numbers))}' has {len(numbers)} shares, and '{'*'.join(over)}' {each} places"
        raise InfeasibleShares("E4", what, "give a number for each place, or 'by speed'")
    found: dict[str, tuple[float, ...]] = {}
    inner = len(numbers)
    for axis, size in zip(over, sizes, strict=True):
        inner //= size
        sums = [sum(one for i, one in enumerate(numbers) if i // inner % size == place) for place in range(size)]
        found[axis] = tuple(map(float, sums))
    whole = sum(numbers)
    for i, one in enumerate(numbers):
        expected, inner = Fraction(whole), len(numbers)
        for axis, size in zip(over, sizes, strict=True):
            inner //= size
            expected *= Fraction(int(found[axis][i // inner % size]), whole)
        if expected != one:
            what = f"the shares {':'.join(map(str, numbers))} are no product of shares along {', '.join(over)}"
            raise InfeasibleShares("E4", what, "give one number for each place of one axis")
    return found


# -- whole samples -----------------------------------------------------------------------------------------------------


def shares_along(
    graph: NamedGraph, dim: str, over: Axes, axes: SubMesh, speeds: Speeds, count: int = 1
) -> dict[str, tuple[int, ...]]:
    """Return the weights by which axes of a product split a dim, given the speeds along them.

    Each place has whole samples of each micro-batch, and as many for each rank of the minor axes.
    """
    extent = _samples(graph, dim)
    if extent % count:
        raise InfeasibleShares("E4", f"micro {count} does not divide '{dim}', {extent}", "give other micro-batches")
    lengths, found = extent // count, dict[str, tuple[int, ...]]()
    for i, axis in enumerate(over):
        minor = prod(axes[other] for other in over[i + 1 :])
        if axis not in speeds or len(set(speeds[axis])) == 1:
            if lengths % axes[axis]:
                raise InfeasibleShares(
                    "E4", f"'{axis}' = {axes[axis]} does not divide {lengths} of '{dim}'", "give another batch"
                )
            lengths //= axes[axis]
            continue
        if lengths % minor or lengths < minor:
            inner = "*".join(over[i + 1 :])
            raise InfeasibleShares(
                "E4", f"'{inner}' = {minor} does not divide {lengths} of '{dim}'", "give another batch"
            )
        counts = greedy(lengths // minor, speeds[axis])
        common = gcd(*counts)
        weights = tuple(one // common for one in counts)
        if len(set(weights)) > 1:
            found[axis] = weights
        # The minor axes split pieces of several lengths.
        lengths = common * minor
    return found


def greedy(samples: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Return whole numbers of samples: each next one goes to the place that would end first; none to speed 0."""
    counts = [int(samples * speed / sum(speeds)) for speed in speeds]
    running = [i for i, speed in enumerate(speeds) if speed]
    # The places that would end last give back what rounding gave too many.
    while sum(counts) > samples:
        counts[max(running, key=lambda i: counts[i] / speeds[i])] -= 1
    waiting = [((counts[i] + 1) / speeds[i], i) for i in running]
    heapq.heapify(waiting)
    for _ in range(samples - sum(counts)):
        _, i = heapq.heappop(waiting)
        counts[i] += 1
        heapq.heappush(waiting, ((counts[i] + 1) / speeds[i], i))
    return tuple(counts)


def _samples(graph: NamedGraph, dim: str) -> int:
    """Return the extent of the dim in the inputs; a common divisor where it differs."""
    stored = [
        name for name, one in graph.tensors.items() if one.kind in ("param", "buffer") and _place(one, dim) is not None
    ]
    if stored:
        what = f"'{dim}' is a dim of {stored[0]}, which is split evenly: shares are for inputs and activations"
        raise InfeasibleShares("E5", what, "leave 'by' out, or name the dim of the samples")
    places = [(graph.tensors[name], _place(graph.tensors[name], dim)) for name in graph.inputs]
    sizes = [tensor.atoms[place].size for tensor, place in places if place is not None]
    if not sizes:
        known = sorted({name for tensor, _ in places for atom in tensor.atoms for name in atom.names})
        raise InfeasibleShares(
            "E1", f"no input has the dim '{dim}'", f"shares are for a dim of the inputs: {', '.join(known)}"
        )
    return gcd(*sizes)


# -- the graph ---------------------------------------------------------------------------------------------------------


def marked(graph: NamedGraph, dim: str) -> NamedGraph:
    """Return the graph with the first atom of a dim marked in all tensors and ops; equal requests share it."""
    if graph.by_share == dim:
        return graph
    known: dict[str, NamedGraph] = graph.__dict__.setdefault("_marked", {})
    if dim not in known:
        tensors = {name: _marked_tensor(tensor, dim) for name, tensor in graph.tensors.items()}
        nodes = tuple(replace(node, by_share=_marked_sites(node, tensors)) for node in graph.nodes)
        found = replace(graph, tensors=MappingProxyType(tensors), nodes=nodes, by_share=dim)
        # Analyses that run ops: they do not depend on marks.
        for name in ("footprints", "passable_sums", "_saves"):
            found.__dict__[name] = getattr(graph, name)
        known[dim] = found
    return known[dim]


def marked_for(graph: NamedGraph, axes: SubMesh) -> NamedGraph:
    """Return the graph with marks where the axes have shares."""
    shares = SubMesh.of(axes).shares
    return graph if shares is None else marked(graph, shares.dim)


def _place(tensor: NamedTensor, dim: str) -> int | None:
    return next((i for i, atom in enumerate(tensor.atoms) if dim in atom.names), None)


def _marked_tensor(tensor: NamedTensor, dim: str) -> NamedTensor:
    first = None if tensor.kind in ("param", "buffer", "constant") else _place(tensor, dim)
    atoms: tuple[Atom, ...] = tuple(atom._replace(by_share=i == first) for i, atom in enumerate(tensor.atoms))
    return replace(tensor, atoms=atoms)


def _marked_sites(node: NamedNode, tensors: Mapping[str, NamedTensor]) -> frozenset[Site]:
    """Return the sites of an op that marked atoms of its operands and results have."""
    found: set[Site] = set()
    ends = (
        *zip(node.rule.operands, node.operands, strict=False),
        *zip(node.rule.outputs, node.outputs, strict=True),
    )
    for operand, name in ends:
        tensor = None if name is None else tensors[name]
        if tensor is not None and any(atom.by_share for atom in tensor.atoms):
            sites = sites_of(node, operand, tensor) or ()
            found.update(
                site for site, atom in zip(sites, tensor.atoms, strict=False) if site is not None and atom.by_share
            )
    return frozenset(found)
