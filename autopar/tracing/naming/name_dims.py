"""Name every class of dims: by the user, else by its role in the graph, else `d0`, `d1` ..."""

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


@dataclass(frozen=True)
class DimNames:
    """Names of all classes, and the source of each name."""

    binding: BoundGraph
    names: Mapping[int, str]
    sources: Mapping[int, str]

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
) -> DimNames:
    """Return a name for every class of dims of a bound graph."""
    given = given_names(model, exported, binding, dims)
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
