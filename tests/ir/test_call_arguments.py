"""Arguments of a call: bound to the parameters of `forward`, and back."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import pytest
import torch

from autopar.errors import AutoparError
from autopar.ir.call_arguments import CallReader, bind_call, flatten_arguments, plain_call


def forward(first: Any, /, second: Any = 2, *rest: Any, last: Any = None, **more: Any) -> tuple[Any, ...]:
    return first, second, rest, last, more


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1,), {}),
        ((1, 5), {}),
        ((1, 5, 6, 7), {}),
        ((1, 5, 6), {"last": 8, "other": 9}),
        ((1,), {"second": 3, "other": 4}),
    ],
)
def test_a_bound_call_can_be_called_again(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    signature = inspect.signature(forward)
    again, named = plain_call(signature, bind_call(signature, "Model", args, kwargs))
    assert forward(*again, **named) == forward(*args, **kwargs)


def test_a_reader_keeps_the_structure_of_calls_with_tensors_alone() -> None:
    """Each call reads as it would without the calls before it."""
    signature = inspect.signature(forward)
    reader = CallReader(signature, "Model")
    one, two, three = torch.zeros(2), torch.ones(3), torch.full((4,), 2.0)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((one, two), {"last": three}),
        ((two, one), {"last": three}),
        ((one,), {"zeta": two, "last": three}),
        ((two,), {"zeta": three, "last": one}),
        ((two,), {"last": one, "zeta": three}),
        ((one, two, three, one), {}),
        ((three, two, one, one), {}),
        ((one,), {"second": 3}),
        ((one,), {"second": two}),
        ((one,), {"second": [two]}),
        ((one,), {"second": two}),
    ]
    for args, kwargs in calls:
        expected = flatten_arguments(bind_call(signature, "Model", args, kwargs), "Model")
        found = reader.read(args, kwargs)
        assert list(map(id, found.tensors)) == list(map(id, expected.tensors))
        assert (found.paths, found.node) == (expected.paths, expected.node)
        assert [list(map(id, one.values())) for one in found.containers if isinstance(one, dict)] == [
            list(map(id, one.values())) for one in expected.containers if isinstance(one, dict)
        ]
        assert len(found.containers) == len(expected.containers)
    with pytest.raises(AutoparError, match="do not fit Model"):
        reader.read((), {"last": one})


def test_a_reader_keeps_no_tensors() -> None:
    reader = CallReader(inspect.signature(forward), "Model")
    given = torch.zeros(2)
    died = weakref.ref(given)
    reader.read((given,), {})
    del given
    assert died() is None
