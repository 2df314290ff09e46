"""Arguments of a call: bound to the parameters of `forward`, and back."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from autopar.ir.call_arguments import bind_call, plain_call


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
