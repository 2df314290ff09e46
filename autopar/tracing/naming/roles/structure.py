"""Queries of the role detectors on a bound graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from autopar.ir.exported import Exported
from autopar.rules.notation import FactorKind
from autopar.tracing.naming.bind_graph import BoundGraph, BoundNode, ValueKey

LOOKUPS = ("embedding", "index_select", "index", "embedding_bag", "bags")

# A class of dims, and its name by structure.
Proposal = tuple[int, str]


class Structure:
    """Bound graph with producer, users and order of each value, and the names so far."""

    def __init__(self, exported: Exported, binding: BoundGraph, names: dict[int, str]) -> None:
        self.binding = binding
        self.space = binding.space
        self.names = names
        self.kinds = {p.node: p.kind for p in exported.placeholders}
        self.inputs = [p for p in exported.placeholders if p.kind == "input"]
        self.values = {node.name: node.meta["val"] for node in exported.graph_module.graph.nodes if "val" in node.meta}
        self.maker: dict[ValueKey, BoundNode] = {}
        self.users: dict[ValueKey, list[BoundNode]] = defaultdict(list)
        self.order: dict[ValueKey, int] = {}
        self._picked: set[ValueKey] = set()
        self._beside: dict[int, set[int]] | None = None
        for i, bound in enumerate(binding.nodes):
            for key in bound.outputs:
                if key is not None:
                    self.maker[key] = bound
                    self.order[key] = i
            if op_name(bound) in LOOKUPS and self.is_weight(bound.operands[0]) and bound.call.operand(0).rank > 2:
                self._picked.update(key for key in bound.outputs if key is not None)
            for key in dict.fromkeys(key for key in bound.operands if key is not None):
                self.users[key].append(bound)

    def dims(self, key: ValueKey) -> tuple[int, ...]:
        return tuple(map(self.space.find, self.binding.dims[key]))

    def name(self, dim: int) -> str | None:
        return self.names.get(self.space.find(dim))

    def factor_dim(self, bound: BoundNode, factor: str) -> int:
        return self.space.find(bound.factors[factor])

    def is_weight(self, key: ValueKey | None) -> bool:
        return key is not None and key in self.binding.stored

    def atoms_beside(self, dims: set[int]) -> set[int]:
        """Return the atoms that a weight has together with one of these dims, in one compound or apart."""
        if self._beside is None:
            self._beside = defaultdict(set)
            for key in (key for key, kind in self.kinds.items() if kind != "input"):
                atoms = {atom for dim in self.dims(key) for atom in self.space.atoms(dim) if self.space.size(atom) > 1}
                for atom in atoms:
                    self._beside[atom] |= atoms
        wanted = {atom for dim in dims for atom in self.space.atoms(dim)}
        return set().union(*(self._beside.get(atom, ()) for atom in wanted)) - wanted

    def is_inner(self, dim: int) -> bool:
        """Return True for a dim of layers alone: no input has it, and no table that is looked up."""
        if self.space.parts(dim):
            return False
        keys = {self.binding.numbers[number] for number in self.space.tensors(dim)}
        looked_up = (user for key in keys for user in self.users.get(key, ()) if user.rule.indices)
        return not any(self.kinds.get(key) == "input" for key in keys) and not any(looked_up)

    def contracted_factors(self, bound: BoundNode) -> Iterator[str]:
        """Yield the factors that an op sums between an activation and a weight: linear, convolution."""
        for factor, kind in bound.rule.kinds.items():
            if kind is not FactorKind.SUM:
                continue
            matrices = [self._is_matrix(key) for key in _holders(bound, factor)]
            if len(matrices) > 1 and any(matrices) and not all(matrices):
                yield factor

    def new_factors(self, bound: BoundNode) -> Iterator[str]:
        """Yield the factors of the output that only the weight has: the output features of a linear layer."""
        if not any(True for _ in self.contracted_factors(bound)):
            return
        for factor in bound.rule.outputs[0].factors if bound.rule.outputs[0] else ():
            holders = _holders(bound, factor)
            if holders and all(map(self._is_matrix, holders)):
                yield factor

    def contracted_dims(self, bound: BoundNode) -> list[int]:
        """Return the dims that an op sums away between an activation and a weight."""
        return [self.factor_dim(bound, factor) for factor in self.contracted_factors(bound)]

    def new_dims(self, bound: BoundNode) -> list[int]:
        """Return the dims that an op makes from its weight: the output features of a linear layer."""
        return [self.factor_dim(bound, factor) for factor in self.new_factors(bound)]

    def is_never_split(self, key: ValueKey, place: int) -> bool:
        """Return True if no op that uses a value can split the dim at `place`."""
        taken = [
            set(operand.terms[place]) <= bound.rule.whole
            for bound in self.users.get(key, ())
            for operand, own in zip(bound.rule.operands, bound.operands, strict=False)
            if own == key and operand is not None
        ]
        return bool(taken) and all(taken)

    def _is_matrix(self, key: ValueKey | None) -> bool:
        """Return True for a weight, or the matrix of a stack that is selected for each token."""
        return self.is_weight(key) or key in self._picked


def _holders(bound: BoundNode, factor: str) -> list[ValueKey | None]:
    """Return the operands that have a factor."""
    pairs = zip(bound.rule.operands, bound.operands, strict=False)
    return [key for operand, key in pairs if operand is not None and factor in operand.factors]


def op_name(bound: BoundNode) -> str:
    return bound.call.op.split(".")[1]
