"""`ModelBuilder`: variables, factors and lookups shared by the parts of the model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import prod
from typing import Any

import numpy as np

from autopar.cost.compute.optimizers import optimizer_of
from autopar.cost.host_copies import host_copy_seconds
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode, NamedTensor
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.offload import LEAST_BYTES
from autopar.sharding.options import Outputs
from autopar.sharding.sharding import Sharding, atoms_of
from autopar.solver import Floats
from autopar.solver.infeasible import OutOfTime
from autopar.solver.model.cost_tables import CostTable, CostTables, Parts, Wants
from autopar.solver.model.model import Costs, Factor, FactorByMode, Variable
from autopar.solver.model.objective import Sum
from autopar.solver.model.recompute_variables import RecomputeModes, last_of
from autopar.solver.model.reshard_sums import TensorCut
from autopar.solver.search.joined_axes import AxisRoles
from autopar.solver.setting import PlanningProblem

__all__ = ["ModelBuilder", "parts_of", "returned_as", "returned_tensors"]


@dataclass
class ModelBuilder:
    """Variables and factors so far; equal ones are one object.

    `regather`: parameters may be gathered again in the backward. `again`: recomputation of ops, fixed or open. `ways`:
    restricted choices of ops. `has_shared_states`: a parameter of several ops may be resharded once for all. Building
    raises `OutOfTime` after `deadline`.
    """

    setting: PlanningProblem
    bound_layout: BoundLayout
    tables: CostTables
    regather: bool
    again: RecomputeModes
    ways: AxisRoles | None = None
    deadline: float = math.inf
    has_shared_states: bool = True
    known: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.graph = self.setting.graph
        self.variables: list[Variable] = []
        self.factors: list[Factor] = []
        self.place: dict[tuple[str, str], int] = {}
        self.nodes = {node.name: node for node in graph.nodes}
        self.makers = {name: (node, i) for node in graph.nodes for i, name in enumerate(node.outputs) if name}
        self.handed = returned_tensors(graph, self.setting.options.outputs)
        self.shares: dict[str, float] = {}
        self.cuts: dict[str, Any] = {}
        self.signatures: dict[str, Any] = {}
        self.kept = self.setting.kept
        self.entering = tuple(frozenset(self.kept.roots[name] for name in names) for names in self.again.entering)
        self.crossing = {self.kept.roots[name]: found for name, found in self.again.crossing.items()}
        self.optimizer = optimizer_of(self.setting.options.optimizer)
        self.beginning = self._largest_beginning() if self.setting.trains else None
        self.product = self._largest_product() if self.setting.trains else None
        names = [node.name for node in graph.nodes]
        self.gone = frozenset(names[names.index(self.product.name) + 1 :] if self.product is not None else ())
        # Saved tensors of ops behind the last layer are freed when it is recomputed.
        self.last_layer, self.behind = last_of(graph, self.again.open)
        for path in self.again.open:
            self._add("recompute", path, self.again.modes, (self._nothing(len(self.again.modes)),))

    def _heed_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime

    def _add(self, kind: str, name: str, states: tuple[Any, ...], parts: tuple[Parts, ...]) -> int:
        self.place[kind, name] = len(self.variables)
        self.variables.append(Variable(kind, name, states, parts))
        return len(self.variables) - 1

    def _add_op_parts(self, node: NamedNode, parts: Parts) -> None:
        place = self.place["op", node.name]
        own = self.variables[place]
        self.variables[place] = replace(own, parts=(*own.parts, parts))

    def _nothing(self, count: int) -> Parts:
        key = "nothing", count
        if key not in self.known:
            self.known[key] = {Sum.DEVICE: np.zeros(count)}
        parts: Parts = self.known[key]
        return parts

    # -- by the recompute mode of a layer

    def _add_by_mode(
        self, kind: str, name: str, states: tuple[Any, ...], node: NamedNode, made: Callable[[int], Parts]
    ) -> int:
        """Add a variable whose sums depend on the recompute mode of its op's layer; `made` takes the mode."""
        count = len(self.again.flags(node.name))
        each = [made(mode) for mode in range(count)]
        if all(parts is each[0] for parts in each):
            return self._add(kind, name, states, (each[0],))
        place = self._add(kind, name, states, (self._nothing(len(states)),))
        key = "by mode", tuple(map(id, each))
        if key not in self.known:
            every = {part: np.stack([one.get(part, np.zeros(len(states))) for one in each]) for part in Sum}
            parts = {part: rows for part, rows in every.items() if rows.any()}
            self.known[key] = CostTable(
                parts or {Sum.DEVICE: every[Sum.DEVICE]}, np.arange(count), np.arange(len(states))
            )
        self.factors.append(Factor((self._mode(node), place), self.known[key]))
        return place

    def _add_pairs(self, first: int, second: int, node: NamedNode, made: Callable[[int], CostTable]) -> None:
        """Add the cost of two variables together; it may depend on the recompute mode of an op's layer."""
        each = tuple(made(mode) for mode in range(len(self.again.flags(node.name))))
        table: Costs = each[0]
        if all(one is each[0] for one in each):
            self.factors.append(Factor((first, second), table))
            return
        key = "pairs by mode", tuple(map(id, each))
        if key not in self.known:
            self.known[key] = FactorByMode(each)
        self.factors.append(Factor((self._mode(node), first, second), self.known[key]))

    def _mode(self, node: NamedNode) -> int:
        return self.place["recompute", self.again.layers[node.name]]

    # -- equal parts

    def _cut(self, tensor: NamedTensor) -> Any:
        found = self.cuts.get(tensor.name)
        if found is None:
            atoms = tensor.routed, tuple((atom.dim, atom.size) for atom in tensor.atoms)
            share = self.setting.prices.share(tensor.name)
            found = (
                tensor.kind == "param",
                tensor.dtype,
                (tensor.requires_grad, tensor.frozen),
                tensor.shape,
                atoms,
                share,
                self.setting.prices.is_halved(tensor.name),
                self.setting.prices.casts_apart(tensor.name),
            )
            found = self.cuts[tensor.name] = self._same(found)
        return found

    def _gib(self, name: str, layout: Sharding) -> float:
        tensor = self.graph.tensors[name]
        return self.tables.ways.gib(TensorCut.of(tensor, self.setting), layout)

    def _is_shared(self, name: str) -> bool:
        """Return whether a result has a variable of its own."""
        many = len(self.setting.users.get(name, ())) > 1
        return many or name in self.handed or self.bound_layout.constrains(self.graph.tensors[name])

    def _wants(self, node: NamedNode, name: str) -> tuple[Wants, ...]:
        """Return, for each option of an op, the shardings in which it takes a tensor."""
        options = self.variables[self.place["op", node.name]].states
        positions = [i for i, operand in enumerate(node.operands) if operand == name]
        key = "wants", id(options), tuple(positions)
        if key not in self.known:
            self.known[key] = tuple(tuple(dict.fromkeys(option.operands[i] for i in positions)) for option in options)
        found: tuple[Wants, ...] = self.known[key]
        return found

    def _same(self, value: Any) -> Any:
        """Return the first object equal to a value: later lookups compare identities."""
        return self.known.setdefault(("same", value), value)

    def _largest_beginning(self) -> NamedNode | None:
        """Return the op with the largest gradients where the backward begins; saved tensors of later ops are freed by
        then.
        """
        largest, found, after = 0.0, None, 0.0
        seen: set[str] = set()
        for node in reversed(self.graph.nodes):
            footprint = self.graph.footprints[node.node]
            names = {name for i, name in enumerate(node.operands) if i not in footprint.passes}
            trained = {name for name in (*names, *node.outputs) if name and self.graph.tensors[name].requires_grad}
            if any(name in trained for name in node.outputs):
                size = footprint.backward_bytes + sum(map(self._whole_bytes, trained))
                if size - after > largest:
                    largest, found = size - after, node
                after += footprint.internal_bytes
            kept = {name for name in node.operands if name and (node.name, name) in self.kept.operands} - seen
            kept |= {name for name in node.outputs if name and name in self.kept.own} - seen
            seen |= kept
            after += sum(self._whole_bytes(name) for name in kept if self.graph.tensors[name].kind == "activation")
        return found

    def _largest_product(self) -> NamedNode | None:
        """Return the op behind all layers with the largest parameter; its gradient may be whole for a moment."""
        inside = {name for repeat in self.graph.repeats for layer in repeat.layers for name in layer}
        behind = takewhile(lambda node: node.node not in inside, reversed(self.graph.nodes))
        largest = max(behind, key=self._trained_bytes, default=None)
        if largest is None or largest is self.beginning or not self._trained_bytes(largest):
            return None
        return largest

    def _trained_bytes(self, node: NamedNode) -> float:
        tensors = (self.graph.tensors[name] for name in node.operands if name is not None)
        return sum(self._whole_bytes(each.name) for each in tensors if each.kind == "param" and each.requires_grad)

    def _whole_bytes(self, name: str) -> float:
        tensor = self.graph.tensors[name]
        return prod(tensor.shape) * tensor.element_bytes

    def _lives(self, name: str, maker: NamedNode, mode: int) -> bool:
        """Return whether a result lives until the backward: it is saved and not recomputed, or something recomputed
        reads it.
        """
        if self._enters(name, maker, mode):
            return True
        if not self.kept.is_kept(name):
            return False
        return not self.again.flags(maker.name)[mode] or self.again.is_kept_outside(maker.name, self.kept.keepers[name])

    def _counts(self, name: str, maker: NamedNode, mode: int) -> bool:
        """Return whether a result that lives until the backward counts by the mode of its maker's layer."""
        return self._lives(name, maker, mode) and self._keeper_beyond(name) is None

    def _counts_at_user(self, name: str, mode: int) -> bool:
        """Return whether a result counts beside the only op that takes it: what is saved depends on both shardings.

        So no table has less than nothing to save, and a variable that is cut loses less of the bound.
        """
        maker, users = self.makers[name][0], self.setting.users.get(name, ())
        if self._is_shared(name) or len(users) != 1 or not self._counts(name, maker, mode):
            return False
        user = users[0]
        return (
            self.again.layers.get(user.name) == self.again.layers.get(maker.name)
            and self._leaves(name, maker, mode) == self.again.moves(user.name, mode)
            and self._is_behind(name) == (user.name in self.behind)
        )

    def _enters(self, name: str, maker: NamedNode, mode: int) -> bool:
        return not self.again.flags(maker.name)[mode] and name in self.entering[mode]

    def _is_behind(self, name: str) -> bool:
        """Return whether only ops behind the last layer save a result: it is gone when the layer is recomputed."""
        keepers = self.kept.keepers.get(name, ())
        return bool(keepers) and self.behind.issuperset(keepers) and name not in self.handed

    def _reruns(self, node: NamedNode, mode: int) -> bool:
        """Return whether a recompute of the last layer runs an op, in a mode of its layer."""
        is_last = self.last_layer is not None and self.again.layers.get(node.name) == self.last_layer
        return is_last and self.again.runs(node.name)[mode]

    def _comes_back(self, name: str, maker: NamedNode, mode: int) -> bool:
        """Return whether a recompute of the last layer makes a result again that would else have been saved."""
        return self._reruns(maker, mode) and self._counts(name, maker, 0) and not self._counts(name, maker, mode)

    # -- values that leave the device

    def _leaves(self, name: str, maker: NamedNode, mode: int) -> bool:
        """Return whether the layer of its maker saves a value on the host."""
        moves = self.again.moves(maker.name, mode) and self.graph.tensors[name].kind == "activation"
        return moves and any(self.again.shares_region(maker.name, op) for op in self.kept.keepers.get(name, ()))

    def _keeper_beyond(self, name: str) -> NamedNode | None:
        """Return an op of the only layer that saves a value of another layer, where that layer may move it."""
        keepers = self.kept.keepers.get(name, ()) if self.kept.is_kept(name) else ()
        if not keepers or not self.graph.tensors[name].requires_grad or name in self.handed:
            return None
        first, maker = keepers[0], self.makers[name][0].name
        is_one = all(op == first or self.again.shares_region(first, op) for op in keepers)
        may_move = True in self.again.moved.get(first, ())
        return self.nodes[first] if is_one and may_move and not self.again.shares_region(first, maker) else None

    def _add_kept(self, sums: Floats, gib: float, moved: bool, is_behind: bool = False) -> None:
        """Add a saved tensor: the memory that it takes, or its copies to the host and back.

        `is_behind`: it is gone when the last layer is recomputed.
        """
        if moved and gib * 2**30 >= LEAST_BYTES:
            sums[Sum.COPIES] += host_copy_seconds(gib * 2**30, self.setting.cluster)
            sums[Sum.HOST] += 2 * self.setting.prices.launch
        else:
            sums[Sum.KEPT_GIB] += self.setting.saved_share * gib
            sums[Sum.RERUN_GIB] -= self.setting.saved_share * gib if is_behind else 0.0

    def _add_rerun(self, sums: Floats, gib: float) -> None:
        """Add a tensor that the last layer saves when it is recomputed, for one micro-batch."""
        sums[Sum.RERUN_GIB] += self.tables.rerun_share * gib

    # -- sums of several kinds of variables

    def _added(self, sums: Floats, name: str, layout: Sharding, times: int) -> None:
        task = self.setting.prices.gradient_sum(name, layout)
        sums[Sum.DEVICE] += times * task.seconds
        sums[Sum.BACKWARD_ROOM] += times * task.seconds
        sums[Sum.HOST] += times * task.host_seconds

    def _add_reshard(
        self, sums: Floats, tensor: NamedTensor, source: Sharding, target: Sharding, backward: bool = True
    ) -> None:
        cut = TensorCut.of(tensor, self.setting)._replace(halved=False)
        share = self.setting.prices.share(tensor.name)
        ways = [self.tables.ways.way(cut, source.value, target.value, share)]
        if backward and tensor.requires_grad:
            ways.append(self.tables.ways.way(cut, target.gradient.value, source.gradient.value))
        for device, _, host in ways:
            sums[Sum.DEVICE] += device
            sums[Sum.HOST] += host

    def _handed_out(self, sums: Floats, tensor: NamedTensor, layout: Sharding) -> None:
        """Add the cost of returning a tensor from the sharding that it is kept in."""
        for wanted in returned_as(self.setting.options.outputs, tensor, layout, self.handed.get(tensor.name, ())):
            self._add_reshard(sums, tensor, layout, wanted)


def returned_as(
    outputs: Outputs, tensor: NamedTensor, layout: Sharding, wholes: Sequence[bool]
) -> tuple[Sharding, ...]:
    """Return the shardings in which a step returns a tensor kept in `layout`; `wholes` is of `returned_tensors`."""
    everything = outputs == "full" or not tensor.shape
    whole, split = Sharding.replicated(atoms_of(tensor)), Sharding(layout.splits)
    return tuple(dict.fromkeys(whole if is_whole or everything else split for is_whole in wholes))


def parts_of(sums: Floats) -> Parts:
    return {part: sums[part] for part in Sum if sums[part].any()} or {Sum.DEVICE: sums[Sum.DEVICE]}


def returned_tensors(graph: NamedGraph, outputs: Outputs = "sharded") -> dict[str, tuple[bool, ...]]:
    """Return every tensor that a step returns, and whether it is written back whole."""
    mutated = len(graph.exported.mutations)
    found: dict[str, tuple[bool, ...]] = {}
    for i, name in enumerate(graph.results):
        if name is not None:
            if outputs == "loss" and i >= mutated and graph.tensors[name].shape:
                continue
            found[name] = (*found.get(name, ()), i < mutated)
    return found
