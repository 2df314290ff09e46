"""The device mesh: named axes, their sizes, and the level of the cluster that links the devices along each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from autopar.errors import MeshError
from autopar.names import INTEGER, MAX_DIGITS, NAME, RESERVED, did_you_mean
from autopar.submesh import Shares, SubMesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Mesh", "MeshAxis", "Shares", "SubMesh", "parse_axes"]

# Raise the error at a column of the text: message, then fix.
Fail = Callable[[int, str, str], NoReturn]

FORM = "write the axes as in 'dp=2,tp=4' or 'dp=2@node,tp=4@nvlink'; '?' is a size to be searched"


@dataclass(frozen=True)
class MeshAxis:
    """One named axis. Size None is to be searched; link None: the level that the cluster's topology gives."""

    name: str
    size: int | None
    link: str | None = None

    def __str__(self) -> str:
        size = "?" if self.size is None else str(self.size)
        return f"{self.name}={size}" + (f"@{self.link}" if self.link else "")


@dataclass(frozen=True, init=False, repr=False)
class Mesh:
    """Devices on a grid of named axes, major first.

    A rank is a position in the grid, counted row-major. The rank in a `DeviceMesh` is its position in
    `device_mesh.mesh.flatten()`.

    Parameters:
        axes: text, `"dp=2,tp=4"`; `"dp=2@node,tp=?"` names a link and leaves a size open. Or a torch `DeviceMesh` with
            names, or another mesh.
        sizes: the sizes by name, in place of text.

    >>> import autopar
    >>> mesh = autopar.Mesh("dp=2,tp=4")
    >>> mesh == autopar.Mesh(dp=2, tp=4), mesh.size, str(mesh)
    (True, 8, 'dp=2,tp=4')
    >>> mesh.sizes, mesh.strides["dp"]
    ((2, 4), 4)
    """

    declared: tuple[MeshAxis, ...]

    def __init__(self, axes: str | DeviceMesh | Mesh | Iterable[MeshAxis] = (), /, **sizes: int | str | None) -> None:
        if sizes and axes != ():
            raise MeshError(
                "a mesh is given as one text or as sizes, not as both: Mesh('dp=2,tp=4') or Mesh(dp=2, tp=4)"
            )
        object.__setattr__(self, "declared", _by_sizes(sizes) if sizes else _declared(axes))

    @staticmethod
    def from_device_mesh(device_mesh: DeviceMesh) -> Mesh:
        """Return the mesh with the names and sizes of a torch `DeviceMesh`.

        Parameters:
            device_mesh: a mesh with names for its dims.

        Returns:
            The mesh, all sizes known.

        >>> from unittest.mock import Mock
        >>> autopar.Mesh.from_device_mesh(Mock(mesh_dim_names=("dp", "tp"), shape=(2, 4)))
        Mesh('dp=2,tp=4')
        """
        names = device_mesh.mesh_dim_names
        shape = tuple(device_mesh.shape)
        if names is None:
            raise MeshError(
                f"the DeviceMesh of shape {shape} has no names for its dims\n"
                f"fix: name them when you create it: init_device_mesh({device_mesh.device_type!r}, {shape}, "
                f"mesh_dim_names={('dp', 'tp', 'sp', 'ep', 'pp')[: len(shape)]})"
            )
        return Mesh(MeshAxis(name, size) for name, size in zip(names, shape, strict=True))

    @property
    def axes(self) -> Mapping[str, int | None]:
        """Return the sizes by name, major first; None where the size is to be searched."""
        return MappingProxyType({axis.name: axis.size for axis in self.declared})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.declared)

    @property
    def is_open(self) -> bool:
        """Return True while some size is to be searched."""
        return None in self.axes.values()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes of all axes, major first; an error while one is to be searched."""
        return tuple(self.extent(name) for name in self.names)

    @property
    def size(self) -> int:
        """Return the number of devices."""
        return math.prod(self.sizes)

    @property
    def whole(self) -> SubMesh:
        """Return all devices as one sub-mesh; an error while a size is to be searched."""
        return SubMesh(dict(zip(self.names, self.sizes, strict=True)))

    def extent(self, *axes: str) -> int:
        """Return the size of one axis, or of the product of several.

        Parameters:
            axes: names of axes.

        Returns:
            The number of ranks along them.

        >>> mesh.extent("tp"), mesh.extent("dp", "tp")
        (4, 8)
        """
        extent = 1
        for name in axes:
            size = self._axis(name).size
            if size is None:
                raise MeshError(
                    f"the size of axis '{name}' of mesh '{self}' is still to be searched\n"
                    f"fix: give a size, as in '{name}=2'"
                )
            extent *= size
        return extent

    @property
    def links(self) -> dict[str, str]:
        """Return the cluster levels that the user chose, by axis."""
        return {axis: link for axis in self.names if (link := self.link(axis)) is not None}

    def link(self, axis: str) -> str | None:
        """Return the level of the cluster that the user gave for an axis.

        Parameters:
            axis: the name of the axis.

        Returns:
            The level, None where the topology of the cluster decides.

        >>> autopar.Mesh("dp=2@node,tp=4").link("dp"), mesh.link("dp")
        ('node', None)
        """
        return self._axis(axis).link

    @property
    def strides(self) -> Mapping[str, int]:
        """Return the distance in rank of two neighbours along each axis."""
        names = self.names
        return MappingProxyType({name: self.extent(*names[i + 1 :]) for i, name in enumerate(names)})

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a rank along each axis. The inverse of `rank`.

        Parameters:
            rank: from 0 to `size - 1`.

        Returns:
            Name -> position.

        >>> mesh.coordinates(6)
        {'dp': 1, 'tp': 2}
        """
        if not 0 <= rank < self.size:
            raise MeshError(f"mesh '{self}' has the ranks 0 to {self.size - 1}; there is no rank {rank}")
        return {name: rank // stride % self.extent(name) for name, stride in self.strides.items()}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at the given positions along all axes. The inverse of `coordinates`.

        Parameters:
            coordinates: name -> position, for each axis.

        Returns:
            The rank.

        >>> mesh.rank({"dp": 1, "tp": 2})
        6
        """
        strides = self.strides
        assert set(coordinates) == set(strides), f"coordinates {dict(coordinates)} for mesh '{self}'"
        for name, position in coordinates.items():
            assert 0 <= position < self.extent(name), f"coordinate {name}={position} in mesh '{self}'"
        return sum(position * strides[name] for name, position in coordinates.items())

    def index(self, rank: int, *axes: str) -> int:
        """Return the position of a rank along an axis, or along a product of axes, major first.

        Parameters:
            rank: from 0 to `size - 1`.
            axes: names of axes.

        Returns:
            The position, from 0 to `extent(*axes) - 1`.

        >>> mesh.index(6, "tp"), mesh.index(6, "tp", "dp")
        (2, 5)
        """
        coordinates = self.coordinates(rank)
        index = 0
        for name in axes:
            index = index * self.extent(name) + coordinates[self._axis(name).name]
        return index

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ only along some axes.

        Parameters:
            axes: names of axes.

        Returns:
            The groups; each is in the order of the product of its axes, major first.

        >>> mesh.groups("dp")
        ((0, 4), (1, 5), (2, 6), (3, 7))
        """
        if len(set(axes)) < len(axes):
            raise MeshError(f"an axis stands twice in the product {'*'.join(axes)}")
        strides = self.strides
        inside = [range(self.extent(name)) for name in axes]
        others = [name for name in self.names if name not in axes]
        groups = []
        for fixed in product(*(range(self.extent(name)) for name in others)):
            first = sum(position * strides[name] for name, position in zip(others, fixed, strict=True))
            steps = (zip(axes, along, strict=True) for along in product(*inside))
            groups.append(tuple(first + sum(position * strides[name] for name, position in step) for step in steps))
        return tuple(groups)

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the group of `groups(*axes)` that contains a rank.

        Parameters:
            rank: from 0 to `size - 1`.
            axes: names of axes.

        Returns:
            The ranks of the group.

        >>> mesh.group(6, "tp")
        (4, 5, 6, 7)
        """
        assert 0 <= rank < self.size, f"rank {rank} of mesh '{self}'"
        return next(group for group in self.groups(*axes) if rank in group)

    def __str__(self) -> str:
        return ",".join(map(str, self.declared))

    def __repr__(self) -> str:
        return f"Mesh('{self}')"

    def _axis(self, name: str) -> MeshAxis:
        for axis in self.declared:
            if axis.name == name:
                return axis
        raise MeshError(f"mesh '{self}' has no axis '{name}'{did_you_mean(name, self.names)}")


# -- reading ----------------------------------------------------------------------------------------------------------


def parse_axes(text: str, fail: Fail) -> tuple[MeshAxis, ...]:
    """Parse axes, `dp=2@node, tp=?`; `fail` raises the error of the text that they stand in."""
    axes: list[MeshAxis] = []
    column = 0
    for part in text.split(","):
        # Columns count from the start of the whole text, for the caret of a message.
        axis = _parse_axis(text, part, column, fail)
        if axis.name in (other.name for other in axes):
            at = column + len(part) - len(part.lstrip())
            fail(at, f"axis '{axis.name}' stands twice", "give each axis another name")
        axes.append(axis)
        column += len(part) + 1
    return tuple(axes)


# Every part is optional, so that each missing part has its own message and column.
_AXIS = re.compile(rf"\s*(?P<name>{NAME})?(?P<equals>\s*=\s*)?(?P<size>-?{INTEGER}|\?)?(?:\s*@(?P<link>{NAME})?)?\s*")


def _parse_axis(text: str, part: str, column: int, fail: Fail) -> MeshAxis:
    match = _AXIS.match(part)
    assert match is not None, "every piece of the expression is optional"
    start = column + len(part) - len(part.lstrip())
    name, equals, size, link = match["name"], match["equals"], match["size"], match["link"]
    if name is None:
        fail(start, "expected the name of an axis", FORM)
    if name in RESERVED:
        fail(start, f"'{name}' is a word of the layout language and cannot name an axis", "take another name")
    if equals is None:
        fail(column + match.end("name"), f"expected '=' and a size after axis '{name}'", FORM)
    if size is None:
        fail(column + match.end("equals"), f"expected a size or '?' for axis '{name}'", FORM)
    at_size = column + match.start("size")
    if size != "?" and (size.startswith("-") or not int(size[:MAX_DIGITS])):
        fail(at_size, f"axis '{name}' has size {size[:MAX_DIGITS]}; a size is at least 1", FORM)
    if len(size) > MAX_DIGITS:
        fail(at_size, f"the size of axis '{name}' has {len(size)} digits", FORM)
    if link is None and "@" in match.group():
        fail(column + match.group().index("@") + 1, "expected the name of a link level right after '@'", FORM)
    if match.end() < len(part):
        fail(column + match.end(), "expected ',' or the end of the mesh", FORM)
    return MeshAxis(name, None if size == "?" else int(size), link)


def _declared(axes: object) -> tuple[MeshAxis, ...]:
    if isinstance(axes, Mesh):
        return axes.declared
    if isinstance(axes, str):
        return _by_text(axes)
    if isinstance(axes, Iterable):
        declared = tuple(axes)
        if declared and all(isinstance(axis, MeshAxis) for axis in declared):
            return _by_text(",".join(map(str, declared)))  # checked, as what a user types is
        if not declared:
            raise MeshError(f"a mesh needs at least one axis\nfix: {FORM}")
    from torch.distributed.device_mesh import DeviceMesh  # late: torch takes seconds to load

    if isinstance(axes, DeviceMesh):
        return Mesh.from_device_mesh(axes).declared
    raise MeshError(f"a mesh cannot be made of {axes!r}\nfix: {FORM}; or give a torch DeviceMesh with names")


def _by_text(text: str) -> tuple[MeshAxis, ...]:
    def fail(column: int, message: str, fix: str) -> NoReturn:
        raise MeshError(f"{message}\n  {text}\n  {' ' * column}^\nfix: {fix}")

    return parse_axes(text, fail)


def _by_sizes(sizes: Mapping[str, int | str | None]) -> tuple[MeshAxis, ...]:
    for name, size in sizes.items():
        if size not in (None, "?") and (not isinstance(size, int) or isinstance(size, bool)):
            raise MeshError(f"axis '{name}' has size {size!r}; a size is a number, or '?' to be searched")
    return _by_text(",".join(f"{name}={'?' if size is None else size}" for name, size in sizes.items()))
