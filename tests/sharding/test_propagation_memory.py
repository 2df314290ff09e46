"""What is remembered between completions changes nothing of them."""

from __future__ import annotations

from itertools import product

import pytest

from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.sharding.layout.language import axes_of, load_strategy, strategy_names
from autopar.sharding.propagation import PropagationCache, propagate
from examples.hf import hf
from tests.traced import traced

AXES = {"dp": 2, "tp": 2}


@pytest.fixture(
    scope="module", params=["llama", *(pytest.param(one, marks=pytest.mark.slow) for one in ("t5", "resnet"))]
)
def graph(request: pytest.FixtureRequest) -> NamedGraph:
    return traced(hf, request.param, batch=4, seq=8, train=True)


def test_a_completion_beside_others_is_the_same_as_alone(graph: NamedGraph) -> None:
    known = PropagationCache()
    found = []
    for name in strategy_names():
        strategy = load_strategy(name)
        own = axes_of(strategy)
        for roles in product((*own, ""), repeat=len(AXES)):  # an axis without a role is idle
            dealt = dict(zip(AXES, roles, strict=True))
            meaning = {one: tuple(axis for axis in AXES if dealt[axis] == one) for one in own}
            if strategy.pipeline is not None and len(meaning[strategy.pipeline.axis]) > 1:
                continue  # stages lie along one axis
            layout = strategy.on_axes(meaning)
            try:
                alone = propagate(graph, layout, AXES)
            except LayoutError as error:
                with pytest.raises(LayoutError, match=str(error).partition(":")[0]):
                    propagate(graph, layout, AXES, known)
                continue
            found.append(propagate(graph, layout, AXES, known))
            assert found[-1] == alone
    assert len({id(one) for one in found}) < len(found)  # some ask the same of every tensor


def test_equal_ops_of_repeated_layers_have_one_form() -> None:
    graph = traced(hf, "llama", batch=4, seq=8, num_hidden_layers=3)
    forms = graph.forms
    names = [node.name for node in graph.nodes if node.name.endswith("mlp.up_proj/linear")]
    assert len(names) == 3
    assert len({forms[name] for name in names}) == 1
    (down, *_) = (node.name for node in graph.nodes if node.name.endswith("mlp.down_proj/linear"))
    assert forms[down] != forms[names[0]]
