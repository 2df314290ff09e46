"""Every class of dims gets one name: the user's, else the one its structure shows, else a generated one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from autopar.ir.analysis.repeated_layers import RepeatedLayers
from autopar.ir.exported import Exported
from autopar.tracing.naming.bind_graph import BoundGraph, ValueKey
from autopar.tracing.naming.roles import standard_names
from autopar.tracing.naming.user_names import given_names

__all__ = ["DimNames", "name_dims"]


@dataclass(frozen=True)
class DimNames:
    """The names of all classes, and where each comes from."""

    binding: BoundGraph
    names: Mapping[int, str]
    sources: Mapping[int, str]

    def show(self, dim: int) -> str:
        """One physical dim as it is printed: its name, its parts in parentheses, or `1`."""
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
) -> DimNames:
    """Name every class of dims of a bound graph."""
    given = given_names(model, exported, binding, dims)
    find = binding.space.find
    sources = {find(dim): name.place for dim, name in given.items()}
    names = standard_names(exported, binding, {find(dim): name.name for dim, name in given.items()})
    for dim in names:
        sources.setdefault(dim, "structure")
    for dim, name in _generated(binding, names, repeats):
        names[dim] = name
        sources[dim] = "generated"
    ordered = sorted(_in_order(binding), key=lambda dim: sources.get(dim) in ("structure", "generated"))
    return DimNames(binding, _distinguished(binding, names, ordered), sources)


def _in_order(binding: BoundGraph) -> list[int]:
    """All classes by first appearance: activations first, so that the stream keeps the plain name."""
    activations = [key for key in binding.dims if key not in binding.stored]
    keys = [*activations, *(key for key in binding.dims if key in binding.stored)]
    return list(dict.fromkeys(part for key in keys for dim in binding.dims[key] for part in binding.space.within(dim)))


def _generated(
    binding: BoundGraph, names: Mapping[int, str], repeats: tuple[RepeatedLayers, ...]
) -> Iterator[tuple[int, str]]:
    """`d0`, `d1` ... for the rest; corresponding dims of repeated layers share a name."""
    roles: dict[tuple[str, int, int], str] = {}
    first_of = _first_of_repeat(binding, repeats)
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


def _first_of_repeat(binding: BoundGraph, repeats: tuple[RepeatedLayers, ...]) -> dict[ValueKey, ValueKey]:
    """Each value of a repeated layer -> the value at the same place of the first such layer, weights included."""
    nodes = {bound.node.name: bound for bound in binding.nodes}
    first: dict[ValueKey, ValueKey] = {}
    for repeat in repeats:
        for layer in repeat.layers[1:]:
            for name, model in zip(layer, repeat.layers[0], strict=True):
                first.setdefault(name, model)
                if name not in nodes:
                    continue  # a getitem: its value is an output of the op before it
                for key, other in zip(nodes[name].operands, nodes[model].operands, strict=True):
                    if key is not None and other is not None and key != other:
                        first.setdefault(key, first.get(other, other))
    return first


def _distinguished(binding: BoundGraph, names: Mapping[int, str], ordered: list[int]) -> dict[int, str]:
    """Where two classes of one name meet on a tensor, the later one is `name.1`, then `name.2` ..."""
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
