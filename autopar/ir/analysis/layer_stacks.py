"""Layers of a model: the units that repeat, their modules where layers of several kinds alternate, and siblings.

A unit that repeats (`autopar/ir/analysis/repeated_layers.py`) is a layer. Where it has several modules of one list, and
these have a class in common, each module is a layer: one of Bamba's units has eight layers of Mamba and one of
attention. Modules of that list and class outside of all units are layers, too: the dense layer before those of experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from autopar.ir.analysis.repeated_layers import RepeatedLayers, common_path
from autopar.ir.values import NamedNode

__all__ = ["Layer", "LayerStack", "layer_stacks"]

Path = tuple[str, ...]

# Classes of modules that say nothing about their kind.
_ANY = frozenset({object, nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict})


@dataclass(frozen=True)
class Layer:
    """Ops of a layer in order, and the path that names it; calls of one module have one path."""

    path: str
    ops: tuple[str, ...]


@dataclass(frozen=True)
class LayerStack:
    """Layers that stand in one list of modules, or the units of one repeat, in order."""

    layers: tuple[Layer, ...]

    @property
    def are_distinct(self) -> bool:
        """True if no two layers have one path."""
        return len({layer.path for layer in self.layers}) == len(self.layers)


def layer_stacks(
    model: nn.Module, nodes: Sequence[NamedNode], repeats: Iterable[RepeatedLayers]
) -> tuple[LayerStack, ...]:
    """Return the layers of a model by stack, in the order in which they begin."""
    by_node = {node.node: node for node in nodes}
    units = [_Units(model, by_node, repeat) for repeat in repeats]
    kinds: dict[Path, frozenset[type]] = {}
    for each in units:
        if each.container is not None and each.kinds:
            kinds[each.container] = kinds.get(each.container, frozenset()) | each.kinds
    # What repeats within such modules is a part of a layer.
    units = [each for each in units if not any(each.is_below(container) for container in kinds)]
    stacks: dict[object, list[Layer]] = {}
    for number, each in enumerate(units):
        # Units without a list are a stack of their own.
        stacks.setdefault(number if each.container is None else each.container, []).extend(each.layers())
    for container, own in kinds.items():
        if container in stacks:
            stacks[container] += _siblings(model, nodes, container, own, stacks[container])
    places = {node.name: place for place, node in enumerate(nodes)}
    ordered = [sorted(layers, key=lambda layer: min(map(places.__getitem__, layer.ops))) for layers in stacks.values()]
    ordered.sort(key=lambda layers: places[layers[0].ops[0]])
    return tuple(LayerStack(tuple(layers)) for layers in ordered)


def _siblings(
    model: nn.Module, nodes: Sequence[NamedNode], container: Path, kinds: frozenset[type], known: Sequence[Layer]
) -> list[Layer]:
    """Return the modules of a list that have none of the known layers, and one of these classes."""
    taken = {op for layer in known for op in layer.ops}
    found: dict[str, list[str]] = {}
    touched: set[str] = set()
    for node in nodes:
        path = _path(node)
        if _is_within(path, container):
            name = ".".join(path[: len(container) + 1])
            found.setdefault(name, []).append(node.name)
            if node.name in taken:
                touched.add(name)
    return [
        Layer(name, tuple(ops))
        for name, ops in found.items()
        if name not in touched and kinds & _kinds(_module(model, name))
    ]


class _Units:
    """Units of one repeat, and how each is cut into layers."""

    def __init__(self, model: nn.Module, by_node: Mapping[str, NamedNode], repeat: RepeatedLayers) -> None:
        self.by_node, self.repeat = by_node, repeat
        self.paths = [[_path(by_node[name]) if name in by_node else None for name in unit] for unit in repeat.layers]
        own = _own(self.paths)
        # Path of the list of modules that all units are from; None without one.
        self.container = _container(own)
        self.names: list[list[Path]] = []
        self.kinds: frozenset[type] = frozenset()
        # Steps at which a layer of each unit begins.
        self.begins: tuple[int, ...] = (0,)
        if self.container is None:
            return
        cuts = [_cuts(unit, len(self.container) + 1) for unit in own]
        begins = {tuple(place for place, _ in unit) for unit in cuts}
        modules = [_module(model, ".".join(path)) for unit in cuts for _, path in unit]
        self.kinds = frozenset[type].intersection(*map(_kinds, modules))
        if len(begins) == 1 and self.kinds:
            self.begins = (0, *begins.pop()[1:])
            self.names = [[path for _, path in unit] for unit in cuts]

    def is_below(self, container: Path) -> bool:
        """Return whether some op is in a module of a list that is not the list of the units."""
        paths = (path for unit in self.paths for path in unit if path is not None)
        return container != self.container and any(_is_within(path, container) for path in paths)

    def layers(self) -> Iterator[Layer]:
        ends = (*self.begins[1:], self.repeat.period)
        for number, (unit, path) in enumerate(zip(self.repeat.layers, self.repeat.module_paths, strict=True)):
            # A unit of one module has the name of all its ops, which may be longer.
            names = [path] if len(ends) == 1 else map(".".join, self.names[number])
            for name, first, last in zip(names, self.begins, ends, strict=True):
                yield Layer(name, tuple(self.by_node[op].name for op in unit[first:last] if op in self.by_node))


def _own(units: Sequence[Sequence[Path | None]]) -> list[list[Path | None]]:
    """Return the path of each step; None where it is in all units and names none of them."""
    everywhere = set(units[0]).intersection(*units[1:])
    return [[None if path in everywhere else path for path in unit] for unit in units]


def _container(units: Sequence[Sequence[Path | None]]) -> Path | None:
    """Return the path of the list of modules from which each unit has some that no other has."""
    known = [path for unit in units for path in unit if path is not None]
    if not known:
        return None
    common = common_path(known)
    depth = len(common)
    members = [{path[: depth + 1] for path in unit if path is not None} for unit in units]
    are_below = all(len(path) > depth for path in known)
    are_apart = sum(map(len, members)) == len(set().union(*members)) and all(members)
    return common if are_below and are_apart else None


def _cuts(unit: Sequence[Path | None], depth: int) -> list[tuple[int, Path]]:
    """Return the steps at which ops of another module begin, each with the path of the module."""
    begins = dict[Path, int]()
    for place, path in enumerate(unit):
        if path is not None:
            # What returns to a module is of the layer before.
            begins.setdefault(path[:depth], place)
    return [(place, path) for path, place in begins.items()]


def _kinds(module: nn.Module | None) -> frozenset[type]:
    """Return the classes of a module that has others inside."""
    if module is None or next(module.children(), None) is None:
        return frozenset()
    return frozenset(type(module).__mro__) - _ANY


def _module(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _path(node: NamedNode) -> Path:
    return tuple(node.origin.module_path.split(".")) if node.origin.module_path else ()


def _is_within(path: Path, container: Path) -> bool:
    return len(path) > len(container) and path[: len(container)] == container
