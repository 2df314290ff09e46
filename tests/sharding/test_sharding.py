"""States, layouts, and the pieces that ranks hold."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import LayoutError
from autopar.sharding.sharding import Atoms, Sharding, State, chunk, coordinates
from tests.simulation import all_layouts

MESH = {"dp": 2, "tp": 3}


def test_the_state_of_each_axis() -> None:
    layout = Sharding(((), ("dp",)), partial=frozenset({"tp"}), broadcast=frozenset({"ep"}))
    assert [layout.state(axis) for axis in ("dp", "tp", "ep", "pp")] == [
        State.SPLIT,
        State.PARTIAL,
        State.BROADCAST,
        State.REPLICATED,
    ]
    assert [layout.atom(axis) for axis in ("dp", "tp")] == [1, None]
    assert str(layout) == "[1 -> dp] + partial(tp) + broadcast(ep)"


def test_the_gradient_of_a_layout() -> None:
    layout = Sharding((("dp",),), partial=frozenset({"tp"}), broadcast=frozenset({"ep"}))
    assert layout.gradient == Sharding((("dp",),), partial=frozenset({"ep"}), broadcast=frozenset({"tp"}))
    assert layout.gradient.gradient == layout
    assert layout.value == Sharding((("dp",),), partial=frozenset({"tp"}))
    assert layout.without({"dp", "tp", "ep"}) == Sharding.replicated(Atoms.plain((8,)))


@pytest.mark.parametrize(
    "given",
    [
        {"splits": (("tp",), ("tp",))},
        {"splits": (("tp", "tp"),)},
        {"splits": (("tp",),), "partial": frozenset({"tp"})},
        {"splits": ((),), "partial": frozenset({"tp"}), "broadcast": frozenset({"tp"})},
    ],
)
def test_an_axis_does_one_thing(given: dict[str, object]) -> None:
    with pytest.raises(LayoutError, match=r"axis 'tp' stands twice in the layout \["):
        Sharding(**given)  # type: ignore[arg-type]


def test_an_unknown_axis_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"the layout \[0 -> sp\] names axis 'sp', but the mesh has dp, tp") as error:
        Sharding((("sp",),)).check(Atoms.plain((8,)), MESH)
    assert error.value.code == "E1"


def test_atoms_fold_into_physical_dims() -> None:
    atoms = Atoms((3, 4, 8, 5), (1, 0, 3))
    assert atoms.shape == (3, 1, 160)
    assert atoms.fold((3, 2, 8, 5)) == (3, 1, 80)
    assert [list(members) for members in atoms.members] == [[0], [], [1, 2, 3]]
    with pytest.raises(ValueError, match=r"4 atoms \(3, 4, 8, 5\) cannot be dealt to physical dims as \(1, 2\)"):
        Atoms((3, 4, 8, 5), (1, 2))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("extent", range(9))
def test_pieces_are_those_of_torch_chunk(extent: int, count: int) -> None:
    pieces = [chunk(extent, count, index) for index in range(count)]
    expected = [part.tolist() for part in torch.arange(extent).chunk(count)]
    found = [list(range(start, start + length)) for start, length in pieces]
    assert [part for part in found if part] == [part for part in expected if part]


def test_sizes_of_uneven_pieces() -> None:
    layout, atoms = Sharding((("dp", "tp"), ())), Atoms.plain((7, 2))
    pieces = [layout.pieces(atoms, MESH, coordinate)[0] for coordinate in coordinates(MESH)]
    assert pieces == [(0, 2), (2, 2), (4, 0), (4, 1), (5, 1), (6, 1)]
    assert layout.local_sizes(atoms, MESH, {"dp": 0, "tp": 2}) == (0, 2)


@pytest.mark.parametrize("sizes", [(6, 4), (5, 3), (1, 7)])
def test_the_pieces_of_all_ranks_tile_the_tensor(sizes: tuple[int, ...]) -> None:
    atoms = Atoms.plain(sizes)
    for layout in all_layouts(atoms, MESH):
        held = torch.zeros(sizes, dtype=torch.long)
        for coordinate in coordinates(MESH):
            (top, height), (left, width) = layout.pieces(atoms, MESH, coordinate)
            held[top : top + height, left : left + width] += 1
        copies = 1
        for axis, size in MESH.items():
            copies *= 1 if layout.state(axis) is State.SPLIT else size
        assert (held == copies).all()
