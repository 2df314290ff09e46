"""Classes of dims: merging, compounds, refusals that leave no trace."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopar.tracing.naming.bind_graph import DimSpace


def test_merging_makes_one_class_of_two() -> None:
    space = DimSpace()
    a, b, c = space.new(4), space.new(4), space.new(5)
    assert space.merge(a, b)
    assert space.find(a) == space.find(b)
    assert not space.merge(a, c), "extents differ"


def test_a_merge_that_puts_a_class_on_a_tensor_twice_is_refused() -> None:
    space = DimSpace()
    rows, columns, seq = space.new(6), space.new(6), space.new(6)
    assert space.attach(rows, 0)
    assert space.attach(columns, 0)
    assert space.attach(seq, 1)
    assert space.merge(seq, rows)
    assert not space.merge(seq, columns)
    assert space.find(seq) == space.find(rows) != space.find(columns)
    assert not space.attach(seq, 0), "rows is on tensor 0 already"


def test_a_compound_takes_a_dim_apart_everywhere() -> None:
    space = DimSpace()
    merged, weight = space.new(12), space.new(12)
    heads, head_dim = space.new(3), space.new(4)
    assert space.merge(merged, weight)
    assert space.merge(weight, space.compound([heads, head_dim]))
    assert space.parts(merged) == (space.find(heads), space.find(head_dim))
    assert list(space.atoms(merged)) == [space.find(heads), space.find(head_dim)]


def test_compounds_cut_differently_are_refined() -> None:
    space = DimSpace()
    whole = space.new(24)
    a, b, c, d = space.new(2), space.new(12), space.new(8), space.new(3)
    assert space.merge(whole, space.compound([a, b]))
    assert space.merge(whole, space.compound([c, d]))
    assert [space.size(atom) for atom in space.atoms(whole)] == [2, 4, 3]
    assert [space.size(part) for part in space.parts(b)] == [4, 3]
    assert [space.size(part) for part in space.parts(c)] == [2, 4]
    assert space.parts(b)[1] == space.find(d)
    assert space.parts(c)[0] == space.find(a)


def test_cuts_that_do_not_divide_are_refused_and_leave_no_trace() -> None:
    space = DimSpace()
    whole = space.new(24)
    a, b, c, d = space.new(4), space.new(6), space.new(3), space.new(8)
    assert space.merge(whole, space.compound([a, b]))
    assert not space.merge(whole, space.compound([c, d]))
    assert space.parts(whole) == (a, b)
    assert space.parts(a) == space.parts(b) == space.parts(c) == space.parts(d) == ()


def test_a_compound_whose_part_is_on_the_tensor_already_is_refused() -> None:
    space = DimSpace()
    merged, seq, other = space.new(36), space.new(6), space.new(6)
    assert space.attach(merged, 0)
    assert space.attach(seq, 0)
    assert not space.merge(merged, space.compound([seq, other]))
    assert space.parts(merged) == ()
    assert space.tensors(seq) == space.tensors(merged) == {0}
    assert space.tensors(other) == frozenset()


def test_parts_of_size_one_do_not_count() -> None:
    space = DimSpace()
    one, seq = space.new(1), space.new(6)
    assert space.compound([one, seq]) == seq


@given(st.lists(st.sampled_from([2, 3, 4, 5]), min_size=1, max_size=4), st.data())
def test_two_groupings_of_the_same_atoms_agree_on_them(atoms: list[int], data: st.DataObject) -> None:
    """Any two ways to group one list of atoms have these atoms (or coarser ones) in common."""
    total = 1
    for size in atoms:
        total *= size
    space = DimSpace()
    whole = space.new(total)
    cuts = []
    for _ in range(2):
        marks = data.draw(st.lists(st.booleans(), min_size=len(atoms) - 1, max_size=len(atoms) - 1))
        groups = [atoms[0]]
        for size, new_group in zip(atoms[1:], marks, strict=True):
            if new_group:
                groups.append(size)
            else:
                groups[-1] *= size
        assert space.merge(whole, space.compound([space.new(size) for size in groups]))
        bounds, position = set(), 1
        for size in groups:
            position *= size
            bounds.add(position)
        cuts.append(bounds)
    found, position = set(), 1
    for atom in space.atoms(whole):
        position *= space.size(atom)
        found.add(position)
    assert found == cuts[0] | cuts[1]
