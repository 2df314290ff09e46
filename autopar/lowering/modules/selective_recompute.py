"""A region of the generated graph with some saved results; the backward recomputes the others.

The region is cut into segments: alternately ops with saved results and recomputed ops. Saved tensors of recomputed
segments are freed; so are results of recomputed ops that a kept op saved. When the backward first needs one of them,
the recomputed segments run again on the saved results. Ops with saved results do not run again, and their collectives
are not repeated.

Under `torch.compile` its partitioner decides by kinds of ops: results of matrix products, attention and collectives
are saved. Of a list of ops, it saves those of each kind that the list keeps, counted in order.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autopar.ir.fx_graphs import is_random
from autopar.lowering.modules.shard_ops import RandomOp

__all__ = ["SelectiveRecompute"]


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive ops that are all saved or all recomputed."""

    module: GraphModule
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    kept: bool
    # True if it may draw from the default generator.
    draws: bool
    # True if it has a side effect.
    acts: bool


class SelectiveRecompute(nn.Module):
    """Region with body `body`; `kept` names the nodes whose results are saved, `is_list` if a list of ops says so."""

    def __init__(self, body: GraphModule, kept: frozenset[str], is_list: bool = False) -> None:
        super().__init__()
        self.body = body
        self.kinds = _kept_by_kind(body, kept) if is_list else ()
        self.inputs = tuple(node.name for node in body.graph.find_nodes(op="placeholder"))
        (results,) = body.graph.output_node().args
        assert isinstance(results, tuple), "a region returns a tuple"
        self.results = tuple(node.name for node in results if isinstance(node, Node))
        self.stretches = tuple(_stretches(body, kept))

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        if torch.compiler.is_compiling():
            contexts = functools.partial(_contexts_of_list, self.kinds) if self.kinds else _contexts
            found: tuple[Any, ...] = checkpoint(self.body, *inputs, use_reentrant=False, context_fn=contexts)
            return found
        if not torch.is_grad_enabled():
            return self.body(*inputs)  # type: ignore[no-any-return]
        return _RegionCall(self).forward(inputs)


# -- segments ---------------------------------------------------------------------------------------------------------


def _stretches(body: GraphModule, kept: frozenset[str]) -> Iterator[Segment]:
    nodes = [node for node in body.graph.nodes if node.op not in ("placeholder", "output")]
    groups: list[list[Node]] = []
    for node in nodes:
        if groups and (node.name in kept) == (groups[-1][0].name in kept):
            groups[-1].append(node)
        else:
            groups.append([node])
    for group in groups:
        inside = set(group)
        reads = tuple(
            dict.fromkeys(source for node in group for source in node.all_input_nodes if source not in inside)
        )
        writes = tuple(node for node in group if any(user not in inside for user in node.users))
        yield Segment(
            _module_of(body, group, reads, writes),
            tuple(node.name for node in reads),
            tuple(node.name for node in writes),
            group[0].name in kept,
            any(_draws(node, body) for node in group),
            any(not node.users for node in group),
        )


def _draws(node: Node, body: GraphModule) -> bool:
    if node.op == "call_module":
        return isinstance(body.get_submodule(str(node.target)), RandomOp)
    return is_random(node)


def _module_of(body: GraphModule, nodes: Sequence[Node], reads: Sequence[Node], writes: Sequence[Node]) -> GraphModule:
    graph = Graph()
    values = {source: graph.placeholder(source.name) for source in reads}
    for node in nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(tuple(values[node] for node in writes))
    called = {str(node.target): body.get_submodule(str(node.target)) for node in nodes if node.op == "call_module"}
    return GraphModule(called, graph)


# -- one forward and its backward -------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Saved:
    """Stand in autograd's graph for a recomputed tensor."""

    run: _RegionCall
    tensor: Tensor | None = None

    def get(self) -> Tensor:
        if self.tensor is None:
            self.run.compute_again()
        assert self.tensor is not None, "computed again"
        return self.tensor


@dataclass(eq=False)
class _View(_Saved):
    """View of a recomputed tensor that an op with saved results has saved."""

    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0


@dataclass(eq=False)
class _RegionCall:
    """One call of a region, until its backward is over."""

    region: SelectiveRecompute
    # Values that each segment has saved, in order.
    saved: dict[Segment, list[weakref.ref[_Saved]]] = field(default_factory=dict)
    # Keyed by the base of the view.
    views: dict[str, list[weakref.ref[_View]]] = field(default_factory=dict)
    # Storages of recomputed values. A weak reference detects reuse of the address.
    made: dict[StorageWeakRef, str] = field(default_factory=dict)
    # Inputs of the recomputation.
    held: dict[str, Any] = field(default_factory=dict)
    again: list[Segment] = field(default_factory=list)
    # Generator states before segments that draw.
    states: dict[Segment, Any] = field(default_factory=dict)

    def forward(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        values: dict[str, Any] = dict(zip(self.region.inputs, inputs, strict=True))
        lasting = dict(values)
        lasting_memory = set(map(_memory, _tensors(inputs)))
        last = {name: i for i, stretch in enumerate(self.region.stretches) for name in stretch.reads}
        cheap = {name for stretch in self.region.stretches if not stretch.kept for name in stretch.reads}
        for i, stretch in enumerate(self.region.stretches):
            if stretch.draws and not stretch.kept:
                self.states[stretch] = _generators()
            save = self._keep if stretch.kept else functools.partial(self._drop, stretch)
            with saved_tensors_hooks(save, _unpacked):
                found = stretch.module(*(values[name] for name in stretch.reads))
            value = None  # where nothing is written
            for name, value in zip(stretch.writes, found, strict=True):
                values[name] = value
                memory = [_memory(one) for one in _tensors((value,))]
                if not stretch.kept:
                    self.made.update((each, name) for each in memory if each not in lasting_memory | self.made.keys())
                elif name in cheap:
                    lasting[name] = value
                    lasting_memory.update(each for each in memory if each not in self.made)
            del found, value
            for name in stretch.reads:
                if last[name] == i and name not in self.region.results:
                    del values[name]
        self._settle(lasting)
        return tuple(values[name] for name in self.region.results)

    def _drop(self, stretch: Segment, tensor: Tensor) -> _Saved:
        saved = _Saved(self)
        self.saved.setdefault(stretch, []).append(weakref.ref(saved))
        return saved

    def _keep(self, tensor: Tensor) -> Tensor | _View:
        name = self.made.get(_memory(tensor))
        if name is None:
            return tensor
        view = _View(self, size=tuple(tensor.shape), stride=tuple(tensor.stride()), offset=int(tensor.storage_offset()))
        self.views.setdefault(name, []).append(weakref.ref(view))
        return view

    def _settle(self, lasting: Mapping[str, Any]) -> None:
        """Find the segments that the backward will recompute, and hold their inputs."""
        needed = set(self.views)
        for stretch in reversed(self.region.stretches):
            if stretch.kept:
                continue
            if stretch in self.saved or stretch.acts or not needed.isdisjoint(stretch.writes):
                self.again.insert(0, stretch)
                needed.update(stretch.reads)
        self.held = {name: tree_map(_apart, lasting[name]) for name in needed if name in lasting}
        self.made = {}

    def compute_again(self) -> None:
        values, self.held = self.held, {}
        last = {name: i for i, stretch in enumerate(self.again) for name in stretch.reads}
        for i, stretch in enumerate(self.again):
            found: list[Tensor] = []

            def save(tensor: Tensor, found: list[Tensor] = found) -> None:
                found.append(tensor.detach())

            with torch.enable_grad(), _drawing_as(self.states.get(stretch)), saved_tensors_hooks(save, _never):
                results = stretch.module(*(values[name] for name in stretch.reads))
            places = self.saved.get(stretch, [])
            assert len(found) == len(places), "a region saves the same when it is computed again"
            for place, tensor in zip(places, found, strict=True):
                saved = place()
                if saved is not None:
                    saved.tensor = tensor
            value = None
            for name, value in zip(stretch.writes, results, strict=True):
                values[name] = tree_map(_apart, value)
                for reference in self.views.get(name, ()):
                    view = reference()
                    if view is not None:
                        view.tensor = values[name].detach().as_strided(view.size, view.stride, view.offset)
            del results, value
            for name in stretch.reads:
                if last[name] == i:
                    values.pop(name, None)
        self.saved, self.views, self.states, self.again = {}, {}, {}, []


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [one for one in values if isinstance(one, Tensor)]


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _apart(value: Any) -> Any:
    """Return the values detached from autograd."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _unpacked(saved: Tensor | _Saved) -> Tensor:
    return saved.get() if isinstance(saved, _Saved) else saved


def _never(saved: Any) -> Tensor:
    raise AssertionError("what is computed again has no backward of its own")


# -- random numbers ---------------------------------------------------------------------------------------------------


def _generators() -> tuple[Tensor, Tensor | None]:
    """Return the states of the default generators of the host and of the device."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.get_rng_state(), None
    return torch.get_rng_state(), torch.get_device_module(accelerator).get_rng_state()


@contextmanager
def _drawing_as(states: tuple[Tensor, Tensor | None] | None) -> Iterator[None]:
    """Draw from these generator states, and restore the generators."""
    if states is None:
        yield
        return
    before = _generators()
    _set_generators(states)
    try:
        yield
    finally:
        _set_generators(before)


def _set_generators(states: tuple[Tensor, Tensor | None]) -> None:
    host, device = states
    torch.set_rng_state(host)
    if device is not None:
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(device)


# -- under torch.compile ----------------------------------------------------------------------------------------------

# Of routed rows also their order: what it takes to find it again is an exchange of counts.
_ROUTED = ("multiply_groups", "sort_rows", "row_exchange", "exchange_rows")
_KEPT = ("mm", "addmm", "convolution", "_scaled_dot_product", "wait_tensor", *_ROUTED)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = getattr(op, "_opname", "")
    kept = any(name == word or (word.startswith("_") and name.startswith(word)) for word in _KEPT)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> Any:
    make: Callable[..., Any] = create_selective_checkpoint_contexts
    return make(_policy)


# For each kind of ops: whether the results of its ops are saved, in order.
_Kinds = tuple[tuple[str, tuple[bool, ...]], ...]
_PRODUCTS = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm")
_COLLECTIVE = "wait_tensor"


def _kind(name: str) -> str:
    """Return the kind of an op: a compiler decomposes products and attention into other ops."""
    return "product" if name in _PRODUCTS else "attention" if "scaled_dot_product" in name else name


def _kept_by_kind(body: GraphModule, kept: frozenset[str]) -> _Kinds:
    found: dict[str, list[bool]] = {}
    for node in body.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            name = node.target._opname
        elif node.op == "call_module":
            local = getattr(body.get_submodule(str(node.target)), "local", None)
            name = _COLLECTIVE if local is None else getattr(local.op, "_opname", "")
        else:
            continue
        found.setdefault(_kind(name), []).append(node.name in kept)
    collectives = (any(found.pop(_COLLECTIVE, ())),)
    return ((_COLLECTIVE, collectives), *((kind, tuple(flags)) for kind, flags in found.items()))


def _contexts_of_list(kinds: _Kinds) -> Any:
    flags, counts = dict(kinds), dict[tuple[str, bool], int]()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kind = _kind(getattr(op, "_opname", ""))
        if kind not in flags:
            return CheckpointPolicy.PREFER_RECOMPUTE
        number = counts.get((kind, context.is_recompute), 0)
        counts[kind, context.is_recompute] = number + 1
        kept = flags[kind][number % len(flags[kind])]
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    make: Callable[..., Any] = create_selective_checkpoint_contexts
    return make(policy)
