"""Erase runtime checks, and ops whose results only checks use.

torch.export records assertions on metadata and on data. Shapes are fixed in a trace, so the metadata checks always
hold. A check on data has no result that a rule could bind. It would keep the ops alive that compute its condition.

Input::

    _assert_tensor_metadata(x, dtype=f32)
    y = relu(x)
Output::

    y = relu(x)
"""

from __future__ import annotations

from torch.fx import Graph

from autopar.ir.fx_graphs import aten, remove_dead

_CHECKS = (
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.default,
    aten._assert_async.msg,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)


def drop_checks(graph: Graph) -> None:
    """Erase checks, then the ops without users."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _CHECKS:
            graph.erase_node(node)
    remove_dead(graph)
