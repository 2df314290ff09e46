"""Which ops of a graph are equal but for names: what is found out about one of them holds for the others."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from autopar.ir.values import NamedNode, NamedTensor

__all__ = ["forms"]


def forms(
    nodes: Iterable[NamedNode], tensors: Mapping[str, NamedTensor], passable: Mapping[str, Hashable]
) -> Mapping[str, int]:
    """For each op a number: the same for equal ops with equal rules, on tensors that are cut alike.

    Ops that differ in plain arguments (a number, a dim) have one number where their rules and sizes are the same, and
    the sums that may pass through them (`passable`).
    """
    known: dict[Hashable, int] = {}
    cuts = {name: _cut(tensor) for name, tensor in tensors.items()}

    def form(node: NamedNode) -> Hashable:
        operands = tuple(None if name is None else (node.operands.index(name), cuts[name]) for name in node.operands)
        outputs = tuple(None if name is None else cuts[name] for name in node.outputs)
        sizes = tuple(node.sizes.items()), tuple(node.atoms.items())
        band = node.attention and node.attention.band
        return node.op, node.source, node.rule, sizes, operands, outputs, band, passable[node.name]

    return {node.name: known.setdefault(form(node), len(known)) for node in nodes}


def _cut(tensor: NamedTensor) -> Hashable:
    """What of a tensor matters to the ops that take or give it: all but its name and those of its dims."""
    atoms = tuple((atom.dim, atom.size) for atom in tensor.atoms)
    return tensor.kind == "param", tensor.dtype, tensor.requires_grad, tensor.shape, atoms
