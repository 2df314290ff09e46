"""Edit an exported graph: arguments by name, new nodes with fake values, values of index arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.utils._pytree import tree_map_only

# Annotations of the user in `node.meta`. They name one value, so a pass moves them only to its replacement.
ANNOTATIONS = ("named", "constrain")
# Most ops between constants and an index whose value is computed; a plain counter takes a few.
MOST_STEPS = 32
# Most elements of such an index, by default.
MOST_ELEMENTS = 2**20
NOTHING: Mapping[Node, Tensor] = MappingProxyType({})


def arguments_of(node: Node) -> dict[str, Any]:
    """Return all arguments of a call by name, defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload), node
    named = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    named.update(zip(named, node.args, strict=False))
    named.update(node.kwargs)
    return named


# Ops whose result lies where their first operand does. They run on the meta device: the dispatch of fake tensors takes
# ten times as long, which counts where a graph is made for each size of the inputs.
_WITHOUT_DEVICE = (
    *(torch.ops.aten.reshape.default, torch.ops.aten.permute.default, torch.ops.aten.expand.default),
    *(torch.ops.aten.ne.Scalar, torch.ops.aten.sum.default, torch.ops.aten.div.Tensor),
)


def insert(origin: Node, op: Any, *args: Any, before: Node | None = None, value: Any = None, **kwargs: Any) -> Node:
    """Insert a call before `origin` (or `before`), with the module path of `origin` and a value of its own.

    `value` is that of the call where it is known: some ops take long without data.
    """
    with origin.graph.inserting_before(before or origin):
        made = origin.graph.call_function(op, args, kwargs)
    made.meta.update({key: entry for key, entry in origin.meta.items() if key not in ANNOTATIONS})
    if value is not None:
        made.meta["val"] = value
        return made
    values, named = torch.fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
    val = origin.meta["val"]
    results = val if isinstance(val, list | tuple) else (val,)
    # Factories have no fake operand, so the mode must come from the node that they replace.
    mode = next(value.fake_mode for value in results if isinstance(value, FakeTensor))
    if op in _WITHOUT_DEVICE and not named:
        found = op(*torch.fx.node.map_aggregate(values, _without_data))
        made.meta["val"] = FakeTensor(mode, found, values[0].device)
        return made
    with mode, torch.no_grad():
        made.meta["val"] = op(*values, **named)
    return made


def _without_data(value: Any) -> Any:
    """Return a fake tensor as a plain one on the meta device."""
    if not isinstance(value, FakeTensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def replace(node: Node, by: Node) -> None:
    """Replace one node by another, which takes over the user's annotations."""
    by.meta.update({key: node.meta[key] for key in ANNOTATIONS if key in node.meta})
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def set_attention_arguments(node: Node, changed: Mapping[str, Any]) -> None:
    """Change arguments of a fused attention call in place; defaults are left out."""
    assert isinstance(node.target, torch._ops.OpOverload), node
    arguments = {**arguments_of(node), **changed}
    default = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    node.args = tuple(arguments.pop(name) for name in ("query", "key", "value"))
    node.kwargs = {name: value for name, value in arguments.items() if value != default[name]}


# -- values of index arithmetic ---------------------------------------------------------------------------------------


def value_of(
    node: Node,
    given: Mapping[Node, Tensor] = NOTHING,
    most: int = MOST_ELEMENTS,
    resize: Callable[[int], int] | None = None,
) -> Tensor | None:
    """Return the value of a tensor that depends on numbers in the graph and `given` values alone; else None.

    `resize` changes whole numbers among the arguments: given values of fewer elements have values of fewer, too.
    """
    known: dict[Node, Tensor | None] = dict(given)
    return _value(node, known, len(known) + MOST_STEPS, most, resize)


def _value(
    node: Node, known: dict[Node, Tensor | None], steps: int, most: int, resize: Callable[[int], int] | None
) -> Tensor | None:
    if node in known:
        return known[node]
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or len(known) >= steps:
        return None
    if not isinstance(node.meta["val"], Tensor) or node.meta["val"].numel() > most:
        return None
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    # Set before the recursion, so that failed nodes count as steps and are not tried again.
    known[node] = None
    values = {source: _value(source, known, steps, most, resize) for source in node.all_input_nodes}
    if any(value is None for value in values.values()):
        return None
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    if resize is not None:
        args, kwargs = tree_map_only(
            int, lambda number: number if isinstance(number, bool) else resize(number), (args, kwargs)
        )
    if any(argument.name == "device" for argument in node.target._schema.arguments):
        # The traced device may be meta, or a GPU that this machine lacks.
        kwargs = {**kwargs, "device": torch.device("cpu")}
    known[node] = _run_on_cpu(node, args, kwargs)
    return known[node]


def _run_on_cpu(node: Node, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    op: Any = node.target
    try:
        found = op(*args, **kwargs)
    except NotImplementedError:
        # Some ops lack a CPU kernel for integers, such as `histc`: counts up to 2**53 are exact in float64.
        try:
            found = op(*tree_map_only(Tensor, Tensor.double, args), **tree_map_only(Tensor, Tensor.double, kwargs))
        except (NotImplementedError, RuntimeError):
            return None
        found = found.to(node.meta["val"].dtype) if isinstance(found, Tensor) else None
    return found if isinstance(found, Tensor) else None
