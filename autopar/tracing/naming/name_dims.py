"""Name every class of dims: by the user, else by its role in the graph, else `d0`, `d1` ...

The user names dims by `dims=`, by `autopar.named(x, ...)`, or by jaxtyping annotations on `forward`.
"""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from torch import nn

from autopar.errors import DimsError
from autopar.ir.analysis.repeated_layers import RepeatedLayers
from autopar.ir.exported import Exported
from autopar.tracing.naming.bind_graph import BoundGraph, ValueKey
from autopar.tracing.naming.roles import standard_names


@dataclass(frozen=True)
class DimNames:
    """Names of all classes, and the source of each name."""

    binding: BoundGraph
    names: Mapping[int, str]
    sources: Mapping[int, str]
    # Classes of the pieces of a folded dim.
    fold_pieces: frozenset[int] = frozenset()

    def show(self, dim: int) -> str:
        """Return a physical dim as printed: its name, its parts in parentheses, or `1`."""
        root = self.binding.space.find(dim)
        if root in self.names:
            return self.names[root]
        parts = self.binding.space.parts(root)
        return f"({' '.join(self.show(part) for part in parts)})" if parts else "1"


def name_dims(
    model: nn.Module,
    exported: Exported,
    binding: BoundGraph,
    dims: Mapping[str, str] | None,
    repeats: tuple[RepeatedLayers, ...],
    known: Mapping[str, str] | None = None,
) -> DimNames:
    """Return a name for every class of dims of a bound graph; `known` are those of another graph of the model."""
    given = given_names(model, exported, binding, dims)
    for dim, earlier in _known_names(exported, binding, known or {}).items():
        given.setdefault(binding.space.find(dim), earlier)
    find = binding.space.find
    sources = {find(dim): name.place for dim, name in given.items()}
    names = standard_names(exported, binding, {find(dim): name.name for dim, name in given.items()})
    for dim in names:
        sources.setdefault(dim, "structure")
    for dim, name in _generated_names(binding, names, repeats):
        names[dim] = name
        sources[dim] = "generated"
    # By first appearance, activations first, so that the stream gets the plain name and a weight `d_model.1`.
    keys = sorted(binding.dims, key=lambda key: key in binding.stored)
    classes = dict.fromkeys(part for key in keys for dim in binding.dims[key] for part in binding.space.within(dim))
    ordered = sorted(classes, key=lambda dim: sources.get(dim) in ("structure", "generated"))
    return DimNames(binding, _unique_names(binding, names, ordered), sources)


def _generated_names(
    binding: BoundGraph, names: Mapping[int, str], repeats: tuple[RepeatedLayers, ...]
) -> Iterator[tuple[int, str]]:
    """Yield `d0`, `d1` ... for classes without a name; equal dims of repeated layers share one."""
    roles: dict[tuple[str, int, int], str] = {}
    first_of = _values_of_first_layer(binding, repeats)
    done = set(names)
    counter = 0
    for key, dims in binding.dims.items():
        for position, dim in enumerate(dims):
            for depth, part in enumerate(binding.space.within(dim)):
                if part in done or binding.space.parts(part) or binding.space.size(part) == 1:
                    continue
                done.add(part)
                role = (first_of.get(key, key), position, depth)
                if role not in roles:
                    roles[role] = f"d{counter}"
                    counter += 1
                yield part, roles[role]


def _values_of_first_layer(binding: BoundGraph, repeats: tuple[RepeatedLayers, ...]) -> dict[ValueKey, ValueKey]:
    """Map each value of a repeated layer, weights included, to the same value of the first layer."""
    nodes = {bound.node.name: bound for bound in binding.nodes}
    first: dict[ValueKey, ValueKey] = {}
    for repeat in repeats:
        for layer in repeat.layers[1:]:
            for name, model in zip(layer, repeat.layers[0], strict=True):
                first.setdefault(name, model)
                if name not in nodes:
                    # A getitem: its value is a result of the op before it.
                    continue
                for key, other in zip(nodes[name].operands, nodes[model].operands, strict=True):
                    if key is not None and other is not None and key != other:
                        first.setdefault(key, first.get(other, other))
    return first


def _unique_names(binding: BoundGraph, names: Mapping[int, str], ordered: list[int]) -> dict[int, str]:
    """Return names that differ on each tensor: of two equal ones the later becomes `name.1`."""
    rank = {dim: i for i, dim in enumerate(ordered)}
    neighbours: dict[int, set[int]] = defaultdict(set)
    for dims in set(binding.dims.values()):
        by_name: dict[str, set[int]] = defaultdict(set)
        for dim in dims:
            for part in binding.space.within(dim):
                if part in names:
                    by_name[names[part]].add(part)
        for group in by_name.values():
            if len(group) > 1:
                for dim in group:
                    neighbours[dim] |= group - {dim}
    final: dict[int, str] = {}
    for dim in sorted(names, key=lambda dim: rank.get(dim, len(rank))):
        taken = {final[other] for other in neighbours[dim] if other in final}
        candidates = (names[dim] + (f".{i}" if i else "") for i in range(len(taken) + 1))
        final[dim] = next(name for name in candidates if name not in taken)
    return final


# -- names that the user gives -----------------------------------------------------------------------------------------


# One entry per dim: its names, major first (several for a compound), or None for an unnamed dim.
Spec = tuple[tuple[str, ...] | None, ...]

_TOKEN = re.compile(r"\s*(?:(\.\.\.)|([A-Za-z_][A-Za-z0-9_]*(?:\.[0-9]+)?)|([0-9]+)|(.))")


@dataclass(frozen=True)
class UserName:
    """Name that the user gave, and its place for messages."""

    name: str
    place: str


def parse_spec(text: str, place: str) -> Spec:
    """Parse `batch seq (heads head_dim)`; `_` and numbers leave a dim unnamed, a leading `...` several."""
    entries: list[tuple[str, ...] | None] = []
    group: list[str] | None = None
    for match in _TOKEN.finditer(text.rstrip()):
        dots, name, number, symbol = match.groups()
        if name and group is not None:
            group.append(name)
        elif name or number:
            entries.append((name,) if name and name != "_" else None)
        elif dots and not entries and group is None:
            entries.append(())
        elif symbol == "(" and group is None:
            group = []
        elif symbol == ")" and group:
            entries.append(tuple(group))
            group = None
        else:
            raise DimsError(_pointed(text, match.start(), place, f"'{dots or symbol}' cannot stand here"))
    if group is not None:
        raise DimsError(_pointed(text, len(text), place, "a '(' is not closed"))
    return tuple(entries)


def _pointed(text: str, column: int, place: str, message: str) -> str:
    return f"{place}: {message}; expected dims by name, as in 'batch seq (heads head_dim)'\n  {text}\n  {' ' * column}^"


def given_names(
    model: nn.Module, exported: Exported, binding: BoundGraph, dims: Mapping[str, str] | None
) -> dict[int, UserName]:
    """Map classes to the names by the user: `dims=` before `named` before annotations."""
    # Within one source two names for a class are an error; between sources the first source wins.
    names: dict[int, UserName] = {}
    own: dict[int, UserName] = {}
    for key, text, place in _by_argument(exported, dims or {}):
        _assign(binding, own, key, text, place)
    names.update(own)
    for source in (_by_annotation_op(exported), _by_jaxtyping(model, exported)):
        found: dict[int, UserName] = {}
        for key, text, place in source:
            _assign(binding, found, key, text, place)
        for dim, given in found.items():
            names.setdefault(dim, given)
    return names


def _known_names(exported: Exported, binding: BoundGraph, known: Mapping[str, str]) -> dict[int, UserName]:
    """Map classes to their names in another graph of the model."""
    names: dict[int, UserName] = {}
    for one in exported.placeholders:
        if one.name in known:
            # This graph may tie what the other one has apart: the first name stays.
            with suppress(DimsError):
                _assign(binding, names, one.node, known[one.name], "the whole model")
    return names


def _by_argument(exported: Exported, dims: Mapping[str, str]) -> Iterator[tuple[ValueKey, str, str]]:
    by_name = {p.name: p.node for p in exported.placeholders}
    aliases = {other: by_name[name] for other, name in exported.aliases.items() if name in by_name}
    known = {**aliases, **by_name}
    for pattern, text in dims.items():
        place = f"dims[{pattern!r}]"
        if not isinstance(text, str):
            raise DimsError(f"{place}: expected text such as 'batch seq', got {text!r}")
        # A name may contain pattern characters; a pattern without prefix also matches inside of submodules.
        matches = [pattern] if pattern in known else fnmatch.filter(known, pattern)
        matches = matches or fnmatch.filter(known, f"*.{pattern}")
        if not matches:
            nearest = difflib.get_close_matches(pattern, known, n=1, cutoff=0.4)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise DimsError(f"{place}: no input, parameter or buffer has this name{hint}")
        for name in matches:
            yield known[name], text, place


def _by_annotation_op(exported: Exported) -> Iterator[tuple[ValueKey, str, str]]:
    for node in exported.graph_module.graph.nodes:
        for text in node.meta.get("named", ()):
            origin = node.meta.get("origin")
            where = f" at {origin.source}" if origin is not None and origin.source else ""
            yield node.name, text, f"autopar.named(..., {text!r}){where}"


def _by_jaxtyping(model: nn.Module, exported: Exported) -> Iterator[tuple[ValueKey, str, str]]:
    """Yield annotations such as `x: Float[Tensor, "batch seq d_model"]` of inputs that are plain arguments."""
    try:
        signature = inspect.signature(model.forward, eval_str=True)
    except (NameError, SyntaxError, TypeError, ValueError):
        # Annotations may name types that exist for type checkers alone.
        return
    inputs = {p.name: p for p in exported.placeholders if p.kind == "input"}
    ranks = {node.name: node.meta["val"].dim() for node in exported.graph_module.graph.find_nodes(op="placeholder")}
    for name, parameter in signature.parameters.items():
        text = getattr(parameter.annotation, "dim_str", None)
        if isinstance(text, str) and name in inputs:
            key = inputs[name].node
            plain = _plain_jaxtyping(text, ranks[key])
            if plain is not None:
                yield key, plain, f"the annotation of {name!r}"


def _plain_jaxtyping(text: str, rank: int) -> str | None:
    """Return a jaxtyping shape as a spec: `_` for entries that are no plain name, a `*name` as leading dims."""
    words = text.split()
    variadic = [i for i, word in enumerate(words) if word.startswith("*") or word == "..."]
    if len(variadic) > 1:
        return None
    if variadic:
        i = variadic[0]
        words[i : i + 1] = ["_"] * max(rank - len(words) + 1, 0)
    plain = [word.partition("=")[0].lstrip("#?") for word in words]
    return " ".join(word if re.fullmatch(r"[A-Za-z_]\w*", word) else "_" for word in plain)


def _assign(binding: BoundGraph, names: dict[int, UserName], key: ValueKey, text: str, place: str) -> None:
    """Name the dims of one value by a spec."""
    spec = parse_spec(text, place)
    dims = binding.dims[key]
    if spec and spec[0] == ():
        spec = (None,) * (len(dims) - len(spec) + 1) + spec[1:]
    if len(spec) != len(dims):
        shape = [binding.space.size(dim) for dim in dims]
        raise DimsError(f"{place}: '{text}' names {len(spec)} dims, but the tensor has {len(dims)}: {shape}")
    flat = [name for entry in spec if entry for name in entry]
    for name in flat:
        if flat.count(name) > 1:
            raise DimsError(
                f"{place}: '{text}' gives the name '{name}' to two dims of one tensor\nfix: give each a name of its own"
            )
    for dim, entry in zip(dims, spec, strict=True):
        if entry is not None:
            for part, name in zip(_parts(binding, dim, entry, text, place, names), entry, strict=True):
                _name(binding, names, part, UserName(name, place))


def _parts(
    binding: BoundGraph, dim: int, entry: tuple[str, ...], text: str, place: str, names: Mapping[int, UserName]
) -> tuple[int, ...]:
    """Return the classes that a compound such as `(heads head_dim)` names; split the dim if needed."""
    space = binding.space
    if len(entry) == 1:
        return (space.find(dim),)
    if len(space.parts(dim)) != len(entry):
        sizes = {given.name: space.size(other) for other, given in names.items()}
        unknown = [name for name in entry if name not in sizes]
        known = 1
        for name in entry:
            known *= sizes.get(name, 1)
        extent = space.size(dim)
        if space.parts(dim) or len(unknown) > 1 or extent % known:
            raise DimsError(
                f"{place}: '{text}' splits a dim of {extent} into ({' '.join(entry)}), which the model does not\n"
                "fix: give the dim one name"
            )
        parts = [space.new(sizes.get(name, extent // known)) for name in entry]
        if not space.merge(dim, space.compound(parts)):
            raise DimsError(f"{place}: '{text}' does not fit: ({' '.join(entry)}) does not multiply to {extent}")
    return space.parts(dim)


def _name(binding: BoundGraph, names: dict[int, UserName], dim: int, given: UserName) -> None:
    known = names.get(binding.space.find(dim))
    if known is not None and known.name != given.name:
        raise DimsError(
            f"{given.place} calls a dim '{given.name}' that the model ties to '{known.name}' of {known.place}\n"
            "fix: give both one name"
        )
    names[binding.space.find(dim)] = given
