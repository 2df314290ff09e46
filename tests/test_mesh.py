"""Meshes: how they are written, and which ranks stand together."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import MeshError
from autopar.mesh import Mesh, MeshAxis, SubMesh

FIX = "fix: write the axes as in 'dp=2,tp=4' or 'dp=2@node,tp=4@nvlink'; '?' is a size to be searched"

axis_lists = st.lists(
    st.builds(
        MeshAxis,
        st.from_regex(r"[a-c]_[a-z0-9_]{0,4}", fullmatch=True),
        st.none() | st.integers(1, 9),
        st.none() | st.sampled_from(["node", "nvlink"]),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda axis: axis.name,
)
closed = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda sizes: Mesh(MeshAxis(f"a{i}", size) for i, size in enumerate(sizes))
)


def device_mesh(names: tuple[str, ...] | None) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(8).view(2, 4), mesh_dim_names=names, _init_backend=False, _rank=0)


def test_ways_to_write_one() -> None:
    mesh = Mesh("dp=2,tp=4")
    assert mesh == Mesh(dp=2, tp=4) == Mesh(mesh) == Mesh(" dp = 2 , tp = 4 ")
    assert mesh == Mesh([MeshAxis("dp", 2), MeshAxis("tp", 4)])
    assert hash(mesh) == hash(Mesh(dp=2, tp=4))
    assert mesh != Mesh("tp=4,dp=2")
    assert Mesh("dp=?,tp=4") == Mesh(dp=None, tp=4) == Mesh(dp="?", tp=4)


def test_from_a_device_mesh() -> None:
    torch_mesh = device_mesh(("dp", "tp"))
    assert Mesh(torch_mesh) == Mesh.from_device_mesh(torch_mesh) == Mesh(dp=2, tp=4)


def test_what_it_knows() -> None:
    mesh = Mesh("dp=2@node,tp=4@nvlink,sp=3")
    assert list(mesh.axes.items()) == [("dp", 2), ("tp", 4), ("sp", 3)]
    assert mesh.names == ("dp", "tp", "sp")
    assert mesh.sizes == (2, 4, 3)
    assert mesh.size == 24
    assert mesh.extent("tp", "sp") == 12
    assert [mesh.link(name) for name in mesh.names] == ["node", "nvlink", None]
    assert list(mesh.strides.items()) == [("dp", 12), ("tp", 3), ("sp", 1)]
    assert mesh.coordinates(17) == {"dp": 1, "tp": 1, "sp": 2}
    assert mesh.index(17, "sp", "dp") == 2 * 2 + 1
    assert not mesh.is_open
    assert (str(mesh), repr(mesh)) == ("dp=2@node,tp=4@nvlink,sp=3", "Mesh('dp=2@node,tp=4@nvlink,sp=3')")


def test_groups() -> None:
    mesh = Mesh("dp=2,tp=2,sp=2")
    assert mesh.groups("tp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("dp", "sp") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert mesh.groups("sp", "dp") == ((0, 4, 1, 5), (2, 6, 3, 7))
    assert mesh.group(6, "sp", "dp") == (2, 6, 3, 7)


@given(axis_lists)
def test_text_gives_the_mesh_back(axes: list[MeshAxis]) -> None:
    mesh = Mesh(axes)
    assert Mesh(str(mesh)) == mesh
    assert eval(repr(mesh), {"Mesh": Mesh}) == mesh
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert mesh.declared == tuple(axes)


@given(closed, st.data())
def test_ranks_coordinates_and_groups_agree(mesh: Mesh, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(mesh.names), unique=True))
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(mesh.size)] == list(range(mesh.size))
    # torch counts the same way.
    grid = torch.arange(mesh.size).view(mesh.sizes)
    assert all(int(grid[tuple(mesh.coordinates(rank).values())]) == rank for rank in range(mesh.size))
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    assert all(len(group) == math.prod(mesh.extent(axis) for axis in axes) for group in groups)
    assert all(mesh.index(rank, *axes) == i for group in groups for i, rank in enumerate(group))
    others = [name for name in mesh.names if name not in axes]
    assert all(len({mesh.index(rank, *others) for rank in group}) == 1 for group in groups)


def test_an_open_mesh() -> None:
    mesh = Mesh("dp=2,tp=?")
    assert mesh.is_open
    assert list(mesh.axes.items()) == [("dp", 2), ("tp", None)]
    assert mesh.extent("dp") == 2
    with pytest.raises(MeshError) as error:
        _ = mesh.size
    assert str(error.value) == (
        "the size of axis 'tp' of mesh 'dp=2,tp=?' is still to be searched\nfix: give a size, as in 'tp=2'"
    )


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        Mesh(dp=2).declared = ()  # type: ignore[misc]
    with pytest.raises(TypeError):
        Mesh(dp=2).axes["dp"] = 3  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"expected the name of an axis\n  \n  ^\n{FIX}"),
        ("dp=2,", f"expected the name of an axis\n  dp=2,\n       ^\n{FIX}"),
        ("dp=2,=3", f"expected the name of an axis\n  dp=2,=3\n       ^\n{FIX}"),
        ("dp", f"expected '=' and a size after axis 'dp'\n  dp\n    ^\n{FIX}"),
        ("dp 2", f"expected '=' and a size after axis 'dp'\n  dp 2\n    ^\n{FIX}"),
        ("dp=x", f"expected a size or '?' for axis 'dp'\n  dp=x\n     ^\n{FIX}"),
        ("tp=4,dp=0", f"axis 'dp' has size 0; a size is at least 1\n  tp=4,dp=0\n          ^\n{FIX}"),
        ("dp=-2", f"axis 'dp' has size -2; a size is at least 1\n  dp=-2\n     ^\n{FIX}"),
        ("dp=" + "9" * 19, f"the size of axis 'dp' has 19 digits\n  dp={'9' * 19}\n     ^\n{FIX}"),
        ("dp=2@", f"expected the name of a link level right after '@'\n  dp=2@\n       ^\n{FIX}"),
        ("dp=2 tp=4", f"expected ',' or the end of the mesh\n  dp=2 tp=4\n       ^\n{FIX}"),
        ("dp=2.5", f"expected ',' or the end of the mesh\n  dp=2.5\n      ^\n{FIX}"),
        ("dp=2, dp=4", "axis 'dp' stands twice\n  dp=2, dp=4\n        ^\nfix: give each axis another name"),
        (
            "op=2",
            "'op' is a word of the layout language and cannot name an axis\n  op=2\n  ^\nfix: take another name",
        ),
    ],
)
def test_bad_text(text: str, message: str) -> None:
    with pytest.raises(MeshError) as error:
        Mesh(text)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("arguments", "sizes", "message"),
    [
        ((), {}, f"a mesh needs at least one axis\n{FIX}"),
        ((3,), {}, f"a mesh cannot be made of 3\n{FIX}; or give a torch DeviceMesh with names"),
        (([2, 4],), {}, f"a mesh cannot be made of [2, 4]\n{FIX}; or give a torch DeviceMesh with names"),
        ((), {"dp": 2.0}, "axis 'dp' has size 2.0; a size is a number, or '?' to be searched"),
        ((), {"dp": True}, "axis 'dp' has size True; a size is a number, or '?' to be searched"),
        ((), {"dp": 0}, f"axis 'dp' has size 0; a size is at least 1\n  dp=0\n     ^\n{FIX}"),
        (
            ("dp=2",),
            {"tp": 4},
            "a mesh is given as one text or as sizes, not as both: Mesh('dp=2,tp=4') or Mesh(dp=2, tp=4)",
        ),
    ],
)
def test_bad_values(arguments: tuple[Any, ...], sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshError) as error:
        Mesh(*arguments, **sizes)
    assert str(error.value) == message


def test_a_device_mesh_without_names() -> None:
    with pytest.raises(MeshError) as error:
        Mesh(device_mesh(None))
    assert str(error.value) == (
        "the DeviceMesh of shape (2, 4) has no names for its dims\n"
        "fix: name them when you create it: init_device_mesh('cpu', (2, 4), mesh_dim_names=('dp', 'tp'))"
    )


def test_bad_questions() -> None:
    mesh = Mesh("data=2,model=4")
    for question, message in [
        (lambda: mesh.extent("modle"), "mesh 'data=2,model=4' has no axis 'modle'; did you mean 'model'?"),
        (lambda: mesh.coordinates(8), "mesh 'data=2,model=4' has the ranks 0 to 7; there is no rank 8"),
        (lambda: mesh.coordinates(-1), "mesh 'data=2,model=4' has the ranks 0 to 7; there is no rank -1"),
        (lambda: mesh.groups("data", "data"), "an axis stands twice in the product data*data"),
    ]:
        with pytest.raises(MeshError) as error:
            question()
        assert str(error.value) == message


def test_needs_no_torch() -> None:
    code = "import sys, autopar; autopar.Mesh('dp=2').groups('dp'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_sub_mesh_is_a_value() -> None:
    stage = SubMesh({"dp": 2, "tp": 4}, ranks=range(8, 16))
    assert (stage["tp"], stage.size, stage.rank({"dp": 1, "tp": 0})) == (4, 8, 12)
    assert stage == {"dp": 2, "tp": 4}
    assert stage == SubMesh({"dp": 2, "tp": 4}, ranks=list(range(8, 16)))
    assert hash(stage) == hash(SubMesh({"dp": 2, "tp": 4}, ranks=list(range(8, 16))))
    assert stage != SubMesh({"dp": 2, "tp": 4}), "other ranks"
    assert SubMesh({"dp": 2, "tp": 4}) != SubMesh({"tp": 4, "dp": 2}), "another order of axes numbers ranks otherwise"
    for copied in (copy.deepcopy(stage), pickle.loads(pickle.dumps(stage))):
        assert copied == stage
        assert copied.ranks == stage.ranks
    with pytest.raises(TypeError, match="does not change"):
        stage["dp"] = 3
    with pytest.raises(AssertionError, match="3 ranks for the sub-mesh"):
        SubMesh({"dp": 2}, ranks=(0, 1, 2))


def test_the_whole_mesh_and_the_axes_in_use() -> None:
    whole = Mesh("dp=2,pp=1,tp=4").whole
    assert whole == {"dp": 2, "pp": 1, "tp": 4}
    assert whole.used == SubMesh({"dp": 2, "tp": 4})
    assert [whole.rank({"dp": 1, "pp": 0, "tp": tp}) for tp in range(4)] == [4, 5, 6, 7]
    assert SubMesh.of(whole) is whole
