"""Example inputs that share memory, or are one object, are inputs of their own in the trace."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.errors import AutoparError, TraceError
from autopar.ir.call_arguments import overlap
from autopar.ir.interpreter import TracedModule
from autopar.ir.pytree import flatten
from autopar.runtime.compiled_call import outline
from autopar.tracing.export.export import export


class Sums(nn.Module):
    """Every tensor that it can be given counts with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.arange(4.0))
        self.weight = nn.Parameter(torch.arange(4.0) + 1)
        self.plain = torch.arange(4.0) + 2

    def forward(self, x: Tensor, nested: dict[str, list[Tensor]], *, other: Tensor) -> Tensor:
        y, z = nested["y"]
        return x + 2 * y + 3 * z + 5 * other + 7 * self.buffer + 11 * self.weight + 13 * self.plain


def arguments(x: Tensor, y: Tensor, z: Tensor, other: Tensor) -> dict[str, Any]:
    return {"x": x, "nested": {"y": [y, z]}, "other": other}


@pytest.mark.parametrize(
    "examples",
    [
        lambda model, row, table: (row, row, row, row),
        lambda model, row, table: (table[0], table[0], table[1], table.flatten()[2:6]),
        lambda model, row, table: (row.view(4), row.detach(), row, row.expand(4)),
        lambda model, row, table: (model.buffer, row, row, model.buffer),
        lambda model, row, table: (model.weight, row, row, model.weight.detach()),
        lambda model, row, table: (model.plain, row, row, model.plain[:]),
    ],
    ids=["one tensor", "views of one table", "views of one tensor", "buffer", "parameter", "attribute"],
)
def test_a_later_call_with_other_tensors_gets_their_result(examples: Callable[..., Any]) -> None:
    model = Sums()
    given = arguments(*examples(model, torch.randn(4), torch.randn(2, 4)))
    traced = TracedModule(model, autopar.trace(model, given).exported)
    grads = given["x"].requires_grad
    later = arguments(torch.randn(4, requires_grad=grads), *(torch.randn(4) for _ in range(3)))
    torch.testing.assert_close(traced(**later), model(**later))


def test_a_causal_model_traced_with_its_inputs_as_labels() -> None:
    config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config.vocab_size = 20
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double().eval()
    ids, labels = torch.randint(0, 20, (2, 2, 5))
    traced = TracedModule(model, export(model, {"input_ids": ids, "labels": ids}))
    expected = model(input_ids=ids, labels=labels).loss
    torch.testing.assert_close(traced(input_ids=ids, labels=labels).loss, expected, rtol=1e-12, atol=1e-12)


class Changes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        self.count.mul_(2)
        return x + y + self.count


def test_a_change_in_shared_memory_is_refused() -> None:
    model, row = Changes(), torch.randn(5)
    fix = "the traced graph cannot follow a change of one in the other\nfix: call it with a clone, "
    for x, y in ((row[:4], row[:4]), (row[1:], row[:-1])):
        with pytest.raises(TraceError, match="changes the input x in place, and y shares") as caught:
            export(model, (x, y))
        assert str(caught.value).endswith(f"{fix}y.clone()")
    traced = TracedModule(model, export(model, (torch.zeros(4), torch.zeros(4))))
    with pytest.raises(AutoparError, match="changes the input x in place, and y shares"):
        traced(row[1:], row[:-1])
    with pytest.raises(AutoparError, match="changes its buffer count in place, and y shares"):
        traced(torch.zeros(4), model.count)


def test_parts_of_one_table_that_have_no_element_in_common_may_change() -> None:
    model, table = Changes(), torch.randn(4, 2)
    traced = TracedModule(model, export(model, (torch.zeros(4), torch.zeros(4))))
    other = table.clone()
    expected = Changes()(other[:, 0], other[:, 1])
    torch.testing.assert_close(traced(table[:, 0], table[:, 1]), expected)
    torch.testing.assert_close(table, other)


def test_overlap_looks_at_elements() -> None:
    table = torch.zeros(4, 6)
    assert overlap(table[:, :3], table[1:, 2:])
    assert not overlap(table[:, :3], table[:, 3:])
    assert not overlap(table[:2], table[2:])
    assert overlap(table, table.view(torch.int32))
    assert not overlap(table, table.clone())
    assert not overlap(table[:0], table)


class Scaled(nn.Module):
    def forward(self, x: Tensor, factors: Any) -> Tensor:
        return x * float(sum(factors))


@pytest.mark.parametrize(
    ("made", "change"),
    [
        (lambda: {1, 2}, lambda given: given.add(5)),
        (lambda: np.array([1, 2]), lambda given: given.__setitem__(0, 7)),
        (lambda: collections.deque([1, 2]), lambda given: given.append(9)),
        (lambda: bytearray(b"ab"), lambda given: given.append(9)),
        (lambda: [1, 2], lambda given: given.append(9)),
    ],
    ids=["set", "array", "deque", "bytes", "list"],
)
def test_a_value_that_changes_after_the_trace_is_another_value(
    made: Callable[[], Any], change: Callable[[Any], None]
) -> None:
    factors = made()
    traced = TracedModule(Scaled(), export(Scaled(), (torch.ones(2), factors)))
    assert traced(torch.ones(2), made()).sum() == 2 * sum(made())
    change(factors)
    with pytest.raises(AutoparError, match="is called otherwise than it was traced"):
        traced(torch.ones(2), factors)


@pytest.mark.parametrize(("one", "other"), [((1, 2), (True, 2)), (0.0, -0.0), ((1, (2,)), (1, (2.0,))), (1, True)])
def test_values_that_are_equal_and_not_the_same_are_told_apart(one: Any, other: Any) -> None:
    assert flatten(one, deep=True).node == flatten(one, deep=True).node
    assert flatten(one, deep=True).node != flatten(other, deep=True).node


def test_values_that_ranks_compare_have_a_text() -> None:
    texts = [outline(flatten(value, deep=True).node) for value in ((1, 2), (2, 1), {1, 2}, {1, 3}, np.ones(2))]
    assert len(set(texts)) == 5
    assert outline(flatten({3, 1}, deep=True).node) == outline(flatten({1, 3}, deep=True).node)


def test_a_deque_of_tensors_is_refused() -> None:
    with pytest.raises(TraceError, match="a deque of tensors, which is not searched: use a list"):
        export(Scaled(), (torch.ones(2), collections.deque([torch.ones(1)])))
