"""Kinds of layers: modules of a model that are equal but for the data of their tensors.

Two modules are of one kind if they have the same classes at the same places, tensors of the same shape, dtype, device
and ties, the same hooks and training flags, and equal attributes. Attributes that differ, such as the index of a layer,
are listed: the layers are equal for as long as no forward reads them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.tracing.layers.freeze import Freezer

# A class of modules and one of its attributes.
Attribute = tuple[type, str]

# Fewer equal layers take as long one by one.
LEAST_LAYERS = 4

_TABLES = ("_parameters", "_buffers", "_modules")
# Hooks run around the forward of their module, so those of the layer itself run for each layer.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@dataclass(frozen=True)
class LayerKind:
    """Modules of one kind, by path in the order of the model."""

    layers: tuple[str, ...]
    # Attributes that are not the same in all of them.
    varying: frozenset[Attribute]


def layer_kinds(model: nn.Module, read: frozenset[Attribute], known: Freezer) -> tuple[LayerKind, ...]:
    """Return the kinds of layers that have several layers; attributes in `read` are the same in layers of a kind."""
    modules = dict(model.named_modules())
    outlines = _Outlines(modules)
    private = _private(model, modules)
    found = []
    for paths in outlines.repeated(private):
        by_key: dict[Hashable, list[_Described]] = defaultdict(list)
        for path in paths:
            described = _Described(path, modules[path], known)
            by_key[described.key(read)].append(described)
        for layers in by_key.values():
            if len(layers) >= LEAST_LAYERS:
                found.append(LayerKind(tuple(one.path for one in layers), _varying(layers)))
    return tuple(found)


def _varying(layers: list[_Described]) -> frozenset[Attribute]:
    first, *others = layers
    return frozenset(
        first.owners[place]
        for place, value in first.attributes.items()
        if any(other.attributes[place] != value for other in others)
    )


class _Outlines:
    """Classes and shapes of modules with what is in them: equal for modules that may be of one kind."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules
        self.paths = {id(module): path for path, module in modules.items()}
        numbers: dict[Hashable, int] = {}
        self.of: dict[int, int] = {}
        # Children stand after their parents.
        for module in reversed(list(modules.values())):
            tensors = (*module._parameters.items(), *module._buffers.items())
            outline = (
                type(module),
                tuple((name, None if one is None else tuple(one.shape)) for name, one in tensors),
                tuple((name, self.of.get(id(child))) for name, child in module._modules.items()),
            )
            self.of[id(module)] = numbers.setdefault(outline, len(numbers))

    def repeated(self, private: frozenset[str]) -> Iterator[tuple[str, ...]]:
        """Yield the paths of each group of outermost modules with one outline that have modules inside."""
        counts = Counter(self.of[id(module)] for path, module in self.modules.items() if path in private)
        found: dict[int, list[str]] = defaultdict(list)
        inside = ""
        for path, module in self.modules.items():
            outline = self.of[id(module)]
            if (inside and path.startswith(inside)) or path not in private or not module._modules:
                continue
            if counts[outline] >= LEAST_LAYERS:
                found[outline].append(path)
                inside = f"{path}."
        yield from (tuple(paths) for paths in found.values() if len(paths) >= LEAST_LAYERS)


def _private(model: nn.Module, modules: Mapping[str, nn.Module]) -> frozenset[str]:
    """Return the paths of the modules that share no module and no tensor with anything outside of them."""
    places: dict[int, list[str]] = defaultdict(list)
    for path, one in model.named_modules(remove_duplicate=False):
        places[id(one)].append(path)
    for table in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for path, tensor in table:
            places[id(tensor)].append(path)
    shared: set[str] = set()
    for paths in places.values():
        if len(paths) > 1:
            # All that is around one of the places but not around all of them.
            common = _common([path.split(".") for path in paths])
            for path in paths:
                parts = path.split(".")
                shared.update(".".join(parts[:depth]) for depth in range(common + 1, len(parts) + 1))
    return frozenset(modules) - shared - {""}


def _common(paths: list[list[str]]) -> int:
    """Return the number of modules around all of several places."""
    first, last = min(paths), max(paths)
    length = min(map(len, paths)) - 1
    return next((k for k in range(length) if first[k] != last[k]), length)


class _Described:
    """A module as far as two of one kind must agree."""

    def __init__(self, path: str, layer: nn.Module, known: Freezer) -> None:
        self.path = path
        self.attributes: dict[tuple[str, str], Hashable] = {}
        self.owners: dict[tuple[str, str], Attribute] = {}
        own = self._names(layer)
        parts: list[Hashable] = []
        for place, module in layer.named_modules():
            parts.append((place, type(module), *self._tensors(module, own, known), *self._children(module, own)))
            for name, value in module.__dict__.items():
                if name in _TABLES or (module is layer and name in _HOOKS):
                    continue
                frozen = known.freeze(value, own)
                if name in _INTERNAL:
                    parts.append((name, frozen))
                else:
                    self.attributes[place, name] = frozen
                    self.owners[place, name] = type(module), name
        self.parts = tuple(parts)

    def key(self, read: frozenset[Attribute]) -> Hashable:
        """Return a value that is equal for layers of one kind."""
        values = tuple((place, self.attributes[place]) for place, owner in self.owners.items() if owner in read)
        return self.parts, tuple(self.attributes), values

    @staticmethod
    def _names(layer: nn.Module) -> dict[int, str]:
        """Return the name of each module and tensor of the layer, by identity."""
        found: dict[int, str] = {}
        for named in (layer.named_modules(), layer.named_parameters(), layer.named_buffers()):
            for name, one in named:
                found.setdefault(id(one), name)
        return found

    @staticmethod
    def _tensors(module: nn.Module, own: Mapping[int, str], known: Freezer) -> Iterator[Hashable]:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield name, own[id(tensor)], _tensor(tensor), known.freeze(tensor.__dict__, own)
            else:
                yield name, None

    @staticmethod
    def _children(module: nn.Module, own: Mapping[int, str]) -> Iterator[Hashable]:
        for name, child in module._modules.items():
            yield name, None if child is None else own[id(child)]


def _tensor(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    if type(tensor) not in (nn.Parameter, torch.Tensor) or tensor.layout is not torch.strided:
        # It may hold more than its shape says.
        return (id(tensor),)
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, type(tensor)


def _internal() -> frozenset[str]:
    plain: dict[str, Any] = nn.Module().__dict__
    return frozenset((*plain, "forward", "__class__", "_compiled_call_impl"))


# Attributes of every module, which torch reads: hooks and flags.
_INTERNAL = _internal()
