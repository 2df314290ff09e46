"""Taking values apart and putting them together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.pytree import UnsupportedValueError, difference, flatten, unflatten

leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.builds(lambda: torch.zeros(1))
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


@given(values, st.booleans())
def test_unflatten_is_the_inverse(value: Any, deep: bool) -> None:
    flat = flatten(value, deep=deep)
    again, _ = unflatten(flat.node, flat.tensors)
    assert same(again, value)
    assert flatten(again, deep=deep).node == flat.node
    assert difference(flat.node, flatten(again, deep=deep).node) is None


@given(values, values)
def test_a_difference_is_found_exactly_if_there_is_one(a: Any, b: Any) -> None:
    first, second = flatten(a, deep=True).node, flatten(b, deep=True).node
    assert (difference(first, second) is None) == (first == second)


class Box:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def test_objects_shared_and_in_cycles() -> None:
    inner = Box(value=torch.ones(2), tag="a")
    box = Box(left=inner, right=inner, items=[inner])
    box.me = box
    flat = flatten(box, deep=False)
    assert len(flat.tensors) == 1
    assert flat.paths == ("left.value",)
    again, _ = unflatten(flat.node, (torch.zeros(2),))
    assert again is not box
    assert again.me is again
    assert again.left is again.right is again.items[0]
    assert again.left.value.sum() == 0
    assert again.left.tag == "a"
    assert inner.value.sum() == 2, "the original is not touched"


def test_objects_without_tensors_are_kept_as_they_are_unless_deep() -> None:
    box = Box(number=3)
    again, _ = unflatten(flatten([box], deep=False).node, ())
    assert again[0] is box
    again, _ = unflatten(flatten([box], deep=True).node, ())
    assert again[0] is not box
    assert again[0].number == 3


def test_templates_keep_no_tensors_alive() -> None:
    class Tagged(dict):  # type: ignore[type-arg]
        pass

    for value in (Box(x=torch.ones(1)), Tagged(x=torch.ones(1))):
        template = flatten(value, deep=False).node.template
        assert "x" not in vars(template) or template.x is None
        assert not isinstance(template, dict) or template["x"] is None


def test_what_cannot_be_taken_apart_is_named() -> None:
    with pytest.raises(UnsupportedValueError, match=r"a\.1: a generator, which can be read only once: use a tuple"):
        flatten({"a": [1, (i for i in ())]}, deep=True)
    with pytest.raises(UnsupportedValueError, match="a set of tensors, which has no order"):
        flatten({torch.zeros(1)}, deep=True)


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ({"x": [1, 2]}, {"x": [1, 3]}, "x.1: traced with 2, called with 3"),
        ({"x": 1}, {"x": True}, "x: traced with 1, called with True"),
        ({"x": (torch.zeros(1),)}, {"x": [torch.zeros(1)]}, "x: traced with a tuple, called with a list"),
        ({"x": 1}, {"y": 1}, "traced with items x, called with items y"),
        ({"x": [torch.zeros(1)]}, {"x": []}, "x: traced with items 0, called with nothing in it"),
        ({"x": Box(a=1)}, {"x": Box(a=2)}, "x.a: traced with 1, called with 2"),
        ({"x": torch.zeros(1)}, {"x": None}, "x: traced with a tensor, called with None"),
    ],
)
def test_differences_are_told(a: Any, b: Any, text: str) -> None:
    assert difference(flatten(a, deep=True).node, flatten(b, deep=True).node) == text
