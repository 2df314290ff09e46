"""Bodies of recorded layers in a program graph: their ops, and all that enters and leaves them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg

from autopar.ir.fx_graphs import frozen_argument
from autopar.tracing.export.program_graph import LIFTED, PREFIX, ProgramGraph
from autopar.tracing.export.refuse import CHECKPOINT
from autopar.tracing.layers.calls import LayerCall, LayerCalls, LayersDifferError
from autopar.tracing.layers.kinds import LayerKind
from autopar.tracing.layers.ops import layer_marks


@dataclass(frozen=True, eq=False)
class LayerBody:
    """Ops of a recorded call, between its marks."""

    layer: str
    begins: Node
    ends: Node
    nodes: tuple[Node, ...]
    # Placeholders of the layer's own tensors: their names within the layer.
    own: Mapping[Node, str]
    # Constants that the forward of the layer makes of numbers.
    constants: Mapping[Node, Tensor]

    @cached_property
    def arguments(self) -> Mapping[Node, tuple[int, ...]]:
        """Return the positions of each argument; one value may be several arguments."""
        found: dict[Node, tuple[int, ...]] = {}
        for position, node in enumerate(_listed(self.begins)):
            found[node] = (*found.get(node, ()), position)
        return found

    @property
    def results(self) -> Sequence[Node]:
        return _listed(self.ends)

    @property
    def path(self) -> str:
        """Return the path of the layer in the module that is exported."""
        return PREFIX + self.layer


def layer_bodies(
    program: ProgramGraph, calls: LayerCalls, own: Mapping[str, Mapping[str, Node]]
) -> dict[int, LayerBody]:
    """Return the bodies of the recorded calls by number."""
    lifted = {
        one.node: program.constants[one.name]
        for one in program.inputs
        if one.kind is InputKind.CONSTANT_TENSOR and LIFTED.search(one.name)
    }
    begins, ends = layer_marks()
    found: dict[int, LayerBody] = {}
    start: Node | None = None
    nodes: list[Node] = []
    for node in program.graph.nodes:
        if node.target is begins:
            start, nodes = node, []
        elif node.target is ends:
            call = calls.calls[node.args[1]]
            if start is None or start.args[1] != call.number:
                raise LayersDifferError(f"the ops of {call.layer} are not in one piece", calls.kinds)
            names = {placeholder: name for name, placeholder in own[call.layer].items()}
            inside = {one for one in lifted if one.users and set(nodes).issuperset(one.users)}
            constants = {one: value for one, value in lifted.items() if one in inside}
            found[call.number] = LayerBody(call.layer, start, node, tuple(nodes), names, constants)
            start = None
        elif start is not None:
            nodes.append(node)
    return found


def check_equal(first: LayerBody, second: LayerBody, kind: LayerKind) -> None:
    """Raise if two recorded layers have different ops, or if more than their results are used outside."""
    for mine, other in zip_longest(_described(first), _described(second)):
        if mine != other:
            raise LayersDifferError(f"{first.layer} and {second.layer} run different ops", kind.layers)
    for body in (first, second):
        inside = {*body.nodes, body.ends}
        hidden = set(body.nodes).difference(body.results)
        for node in hidden:
            if not inside.issuperset(node.users):
                raise LayersDifferError(f"a value inside of {body.layer} is used outside of it", kind.layers)


def moved_meta(node: Node, body: LayerBody, place: Node, call: LayerCall) -> dict[str, Any]:
    """Return the metadata of an op of a body for the call of an equal layer at `place`."""
    meta = {name: value for name, value in node.meta.items() if name in ("val", "tensor_meta")}
    meta["nn_module_stack"] = _modules(node, body, place, PREFIX + call.layer)
    meta["stack_trace"] = _lines(node, body, place)
    custom, region = _custom(node), _region(node)
    # A region that begins in the layer is another one for each call.
    region = _region(place) if region == _region(body.begins) else (call.number, region)
    meta["custom"] = custom if region is None else {**custom, CHECKPOINT: region}
    return meta


def _described(body: LayerBody) -> Iterator[Hashable]:
    """Yield the ops and the results; equal layers have equal ones."""
    step = {node: number for number, node in enumerate(body.nodes)}
    regions = {_region(body.begins): 0}
    constants = {node: number for number, node in enumerate(body.constants)}

    def source(node: Node) -> Any:
        if node in step:
            return "step", step[node]
        if node in body.arguments:
            return "argument", body.arguments[node]
        if node in constants:
            return "constant", constants[node]
        return ("own", body.own[node]) if node in body.own else ("outside", node.name)

    for node in body.nodes:
        operands = map_arg((node.args, node.kwargs), source)
        val = node.meta.get("val")
        places = _modules(node, body, None, ""), _lines(node, body, None), _custom(node)
        region = regions.setdefault(_region(node), len(regions))
        yield node.op, node.target, frozen_argument(operands), _layout(val), frozen_argument(places), region
    yield tuple(map(source, body.results))
    yield tuple(map(_data, body.constants.values()))


def _listed(mark: Node) -> Sequence[Node]:
    nodes: Any = mark.args[0]
    return list(nodes)


def _layout(val: Any) -> Hashable:
    if isinstance(val, Tensor):
        return tuple(val.shape), val.stride(), val.dtype, val.device
    return tuple(map(_layout, val)) if isinstance(val, (list, tuple)) else val


def _data(constant: Tensor) -> Hashable:
    return _layout(constant), frozen_argument(constant.tolist()) if not constant.is_meta else id(constant)


# -- metadata: that of the op where the layer is called, then that of the op within the layer --------------------------


def _modules(node: Node, body: LayerBody, place: Node | None, path: str) -> dict[str, Any]:
    """Return the modules around an op, from the layer at `path` on for no place."""
    stack, around = (dict(one.meta.get("nn_module_stack") or {}) for one in (node, body.begins))
    if list(stack)[: len(around)] != list(around):
        return stack
    found = {} if place is None else dict(place.meta.get("nn_module_stack") or {})
    for key in list(stack)[len(around) :]:
        module, cls = stack[key]
        if module.startswith(f"{body.path}."):
            moved = path + module.removeprefix(body.path)
            key, module = key.replace(module, moved, 1), moved
        found[key] = module, cls
    return found


def _lines(node: Node, body: LayerBody, place: Node | None) -> str:
    """Return the lines of the model that lead to an op, from the layer on for no place."""
    lines, around = (str(one.meta.get("stack_trace") or "") for one in (node, body.begins))
    if not lines.startswith(around):
        return lines
    before = "" if place is None else str(place.meta.get("stack_trace") or "")
    return before + lines.removeprefix(around)


def _custom(node: Node) -> dict[str, Any]:
    return {name: value for name, value in (node.meta.get("custom") or {}).items() if name != CHECKPOINT}


def _region(node: Node) -> Hashable:
    """Return the checkpoint region of an op."""
    found: Hashable = (node.meta.get("custom") or {}).get(CHECKPOINT)
    return found
