"""Captures with symbolic sizes: one serves all sizes under which the code of a model makes the same choices.

torch.export runs the forward with a symbol for each varying size. It records a guard wherever Python or torch compares
sizes. The graph holds for all sizes that fulfil the guards: a branch on a length, a minimum with a window, a mask that
is cut to the length, a padding to multiples. Sizes 0 and 1 are never symbolic, since torch treats them in another way.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from sympy import Basic, Integer, Symbol
from torch import SymBool, SymFloat, SymInt, Tensor, nn
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, ShapeEnv
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError, AutoparWarning, TraceError
from autopar.ir import pytree as tree
from autopar.ir.exported import Exported
from autopar.ir.fx_graphs import aten
from autopar.ir.pytree import Flattened
from autopar.ir.values import ROUTED
from autopar.tracing.export.export import Capture, capture, finish
from autopar.tracing.export.refuse import is_model_file, raise_trace_errors
from autopar.tracing.passes.read_masks import ATTENTION_NOTE

_SYMBOLIC = (SymInt, SymFloat, SymBool)


class NotSymbolicError(AutoparError):
    """A model cannot be captured with symbolic sizes; a trace for each size serves it."""


@dataclass(frozen=True)
class SymbolicExport:
    """Capture of a model with symbolic sizes: `at` gives the export at sizes that fulfil the guards."""

    capture: Capture
    guards: CodeType
    # For each symbol an input and a dim of it that has this size.
    sources: Mapping[Symbol, tuple[int, int]]
    mode: FakeTensorMode
    # Shape of each input, with symbols.
    shapes: tuple[torch.Size, ...]

    def serves(self, flat: Flattened) -> bool:
        """Return whether the sizes of these inputs fulfil the guards."""
        # Strides do not count: the passes of a trace make a graph hold for any.
        shapes = (torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in flat.tensors)
        given = {f"t{number}": tensor for number, tensor in enumerate(shapes)}
        return bool(eval(self.guards, SYMPY_INTERP, {"L": given}))

    def sizes_of(self, flat: Flattened) -> tuple[int, ...]:
        """Return the value of each symbol in a call with these inputs."""
        return tuple(flat.tensors[number].shape[dim] for number, dim in self.sources.values())

    def shapes_at(self, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the inputs where the symbols have these values."""
        values = _Sizes(dict(zip(self.sources, map(Integer, sizes), strict=True)), self.mode)
        return tuple(tuple(map(values.number, shape)) for shape in self.shapes)

    def at(self, model: nn.Module, flat: Flattened) -> Exported:
        """Return the export of a call with these inputs, whose sizes fulfil the guards."""
        bound = {symbol: Integer(flat.tensors[number].shape[dim]) for symbol, (number, dim) in self.sources.items()}
        sizes = _Sizes(bound, self.mode)
        graph = _at_sizes(self.capture.graph, sizes)
        return finish(replace(self.capture, model=model, flat=flat, graph=graph))


def export_symbolic(
    model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any], varying: Sequence[Collection[int]]
) -> SymbolicExport:
    """Capture a model with symbolic sizes for the dims `varying` of each input, or raise `NotSymbolicError`."""
    owner = type(model).__name__
    try:
        with _sizes_as_text_are_fixed(), warnings.catch_warnings():
            # The trace before has given the same warnings.
            warnings.simplefilter("ignore", AutoparWarning)
            found = capture(model, inputs, varying)
        with raise_trace_errors(owner):
            return _with_guards(found)
    except TraceError as error:
        raise NotSymbolicError(str(error)) from error


def _with_guards(found: Capture) -> SymbolicExport:
    """Return a capture with the guards of its sizes."""
    graph = found.graph
    if graph.find_nodes(op="get_attr"):
        raise NotSymbolicError("the graph has graphs inside")
    if _is_symbolic_inside(found.output_tree.node):
        raise NotSymbolicError("the model returns a size")
    placeholders = zip(graph.find_nodes(op="placeholder"), found.inputs, strict=True)
    given = [node.meta["val"] for node, spec in placeholders if spec.kind is InputKind.USER_INPUT]
    all_sizes = (size for value in given for size in value.shape)
    sizes = [size for size in all_sizes if isinstance(size, SymInt) and size.node.expr.free_symbols]
    if not sizes:
        raise NotSymbolicError("the model fixes all sizes")
    environment: ShapeEnv = sizes[0].node.shape_env
    if environment.deferred_runtime_asserts:
        raise NotSymbolicError("a size depends on data")
    sources = {
        size.node.expr: (number, dim)
        for number, value in reversed(list(enumerate(given)))
        for dim, size in enumerate(value.shape)
        if isinstance(size, SymInt) and isinstance(size.node.expr, Symbol)
    }
    if not _symbols_of(graph) <= sources.keys():
        raise NotSymbolicError("a size follows from no dim of an input")
    named = [LocalSource(f"t{number}") for number in range(len(given))]
    guards = environment.produce_guards(given, named, ignore_static=False)
    code = compile(" and ".join(f"({one})" for one in guards) or "True", "<guards of sizes>", "eval")
    return SymbolicExport(found, code, sources, given[0].fake_mode, tuple(value.shape for value in given))


# -- values at given sizes ---------------------------------------------------------------------------------------------


class _Sizes:
    """Values of symbolic numbers and tensors, given the values of the symbols."""

    def __init__(self, bound: Mapping[Symbol, Integer], mode: FakeTensorMode) -> None:
        self.bound = bound
        self.mode = mode
        self._known: dict[Basic, Any] = {}
        self._tensors: dict[Any, Tensor] = {}

    def number(self, value: Any) -> Any:
        """Return a number of a graph; a symbolic one as its value."""
        if not isinstance(value, _SYMBOLIC):
            return value
        expression = value.node.expr
        if expression not in self._known:
            found = expression.xreplace(self.bound)
            kind = float if isinstance(value, SymFloat) else bool if isinstance(value, SymBool) else int
            assert not found.free_symbols, f"{expression} has more symbols than the inputs"
            self._known[expression] = kind(found)
        return self._known[expression]

    def tensor(self, value: Any) -> Any:
        """Return the value of a node, with plain sizes."""
        if not isinstance(value, Tensor):
            return self.number(value)
        if not value._has_symbolic_sizes_strides:
            return value
        shape, stride = tuple(map(self.number, value.shape)), tuple(map(self.number, value.stride()))
        key = shape, stride, value.dtype, value.device, value.requires_grad
        if key not in self._tensors:
            # `torch.empty_strided` under the mode gives the same and takes ten times as long.
            made = torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
            self._tensors[key] = FakeTensor(self.mode, made, value.device).requires_grad_(value.requires_grad)
        return self._tensors[key]


def _at_sizes(graph: Graph, sizes: _Sizes) -> Graph:
    """Return a copy of a graph with plain numbers in place of symbolic ones, which no node computes."""
    made = Graph()
    copies: dict[Node, Any] = {}

    def argument(value: Any) -> Any:
        if isinstance(value, Node):
            return copies[value] if value in copies else sizes.number(value.meta["val"])
        return sizes.number(value)

    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, _SYMBOLIC):
            continue
        args, kwargs = map_aggregate(node.args, argument), map_aggregate(node.kwargs, argument)
        if node.target is aten.slice.Tensor:
            args = _plain_slice(*args)
            if _is_whole(*args):
                # Torch leaves `x[:]` out of a graph if the size is a plain number.
                copies[node] = args[0]
                continue
        copied = made.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        copied.meta = dict(node.meta)
        if value is not None:
            is_one = isinstance(value, Tensor)
            copied.meta["val"] = sizes.tensor(value) if is_one else pytree.tree_map(sizes.tensor, value)
        copies[node] = copied
    return made


def _plain_slice(operand: Node, dim: int = 0, start: int | None = None, end: int | None = None, *step: int) -> Any:
    """Return the arguments of a slice as torch has them if sizes are plain numbers: with both ends."""
    return operand, dim, start or 0, sys.maxsize if end is None else end, *step


def _is_whole(operand: Node, dim: int, start: int, end: int, step: int = 1) -> bool:
    """Return whether a slice takes a whole dim."""
    return start == 0 and end in (operand.meta["val"].shape[dim], sys.maxsize) and step == 1


# -- checks ------------------------------------------------------------------------------------------------------------


def same_export(one: Exported, other: Exported) -> bool:
    """Return whether two exports of calls of the same sizes have the same ops, arguments, shapes and results."""
    graphs = [list(export.graph_module.graph.nodes) for export in (one, other)]
    if len(graphs[0]) != len(graphs[1]) or one.mutations != other.mutations:
        return False
    if [p.name for p in one.placeholders] != [p.name for p in other.placeholders]:
        return False
    if one.constants.keys() != other.constants.keys() or one.output_tree != other.output_tree:
        return False
    if not all(torch.equal(tensor, other.constants[name]) for name, tensor in one.constants.items()):
        return False
    places = [{node: place for place, node in enumerate(nodes)} for nodes in graphs]
    return all(_facts(first, places[0]) == _facts(second, places[1]) for first, second in zip(*graphs, strict=True))


def _facts(node: Node, places: Mapping[Node, int]) -> Any:
    """Return all of a node but its name: op, arguments with places of nodes, and the kinds of its values."""

    def argument(value: Any) -> Any:
        return ("node", places[value]) if isinstance(value, Node) else (type(value), value)

    def kind(value: Any) -> Any:
        return (tuple(value.shape), value.dtype, value.device) if isinstance(value, Tensor) else value

    target = None if node.op == "placeholder" else node.target
    marks = {key: value for key, value in node.meta.items() if key in ("origin", ROUTED, ATTENTION_NOTE)}
    values = pytree.tree_map(kind, node.meta.get("val"))
    return node.op, target, map_aggregate((node.args, node.kwargs), argument), values, marks


def _symbols_of(graph: Graph) -> set[Symbol]:
    """Return the symbols of all values of a graph."""
    found: set[Symbol] = set()
    for value in pytree.tree_leaves([node.meta.get("val") for node in graph.nodes]):
        numbers = (*value.shape, *value.stride(), value.storage_offset()) if isinstance(value, Tensor) else (value,)
        for number in numbers:
            if isinstance(number, _SYMBOLIC):
                found |= number.node.expr.free_symbols
    return found


def _is_symbolic_inside(node: tree.Node) -> bool:
    """Return whether the structure of a result contains a symbolic number."""
    if isinstance(node, tree.Constant):
        return any(isinstance(leaf, _SYMBOLIC) for leaf in pytree.tree_leaves(node.value))
    return any(map(_is_symbolic_inside, getattr(node, "children", ())))


@contextmanager
def _sizes_as_text_are_fixed() -> Iterator[None]:
    """Fix a size that the model's code turns into text, as for a key of a table: a symbol would give another text."""
    originals = {name: SymInt.__dict__.get(name) for name in ("__str__", "__repr__")}

    def fixed(original: Callable[[SymInt], str]) -> Callable[[SymInt], str]:
        def text(size: SymInt) -> str:
            return str(int(size)) if is_model_file(sys._getframe(1).f_code.co_filename) else original(size)

        return text

    try:
        for name, original in originals.items():
            setattr(SymInt, name, fixed(original or getattr(SymInt, name)))
        yield
    finally:
        for name, original in originals.items():
            if original is None:
                delattr(SymInt, name)
            else:
                setattr(SymInt, name, original)
