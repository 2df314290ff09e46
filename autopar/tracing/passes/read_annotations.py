"""Move `named` and `constrain` from ops of the graph to the annotated values.

Both are identities at run time. As ops they would need rules and hide the producer of a value from later passes.
`node.meta["named"]` and `node.meta["constrain"]` list the texts, for the naming of dims and for the layout.

Input::

    h = linear(x, w)
    n = named(h, "batch d_ff")
    y = relu(n)
Output::

    h = linear(x, w)        # named: "batch d_ff"
    y = relu(h)
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph

from autopar.tracing.annotations import constrain_op, named_op


def read_annotations(graph: Graph) -> None:
    """Replace each annotation op by its operand, and record its text there."""
    # The ops are defined at their first use, so they are read here and not at import.
    for key, op in (("named", named_op()), ("constrain", constrain_op())):
        for node in graph.find_nodes(op="call_function", target=op):
            source: Any = node.args[0]
            source.meta.setdefault(key, []).append(node.args[1])
            node.replace_all_uses_with(source)
            graph.erase_node(node)
