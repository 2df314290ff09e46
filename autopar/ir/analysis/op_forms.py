"""Numbers for ops: those that differ only in names have equal ones."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from autopar.ir.values import NamedNode, NamedTensor

__all__ = ["op_forms"]


def op_forms(
    nodes: Iterable[NamedNode], tensors: Mapping[str, NamedTensor], passable: Mapping[str, Hashable]
) -> Mapping[str, int]:
    """Return a number for each op; equal ops with equal rules on tensors with equal atoms have equal numbers.

    Plain arguments (a number, a dim) count only through the rule, the sizes and the sums that may pass (`passable`).
    """
    known: dict[Hashable, int] = {}
    # Everything about a tensor that matters to its ops: all but its name and those of its dims.
    kinds = {
        name: (one.kind == "param", one.dtype, one.requires_grad, one.frozen, one.shape, one.routed, _marked_atoms(one))
        for name, one in tensors.items()
    }

    def form(node: NamedNode) -> Hashable:
        operands = tuple(None if name is None else (node.operands.index(name), kinds[name]) for name in node.operands)
        outputs = tuple(None if name is None else kinds[name] for name in node.outputs)
        sizes = tuple(node.sizes.items()), tuple(node.atoms.items())
        note = node.attention and (node.attention.band, node.attention.document_share)
        kind = node.op, node.source, node.rule, sizes, operands, outputs, note, passable[node.name]
        return *kind, node.by_share, node.fixed

    return {node.name: known.setdefault(form(node), len(known)) for node in nodes}


def _marked_atoms(tensor: NamedTensor) -> Hashable:
    return tuple((atom.dim, atom.size, atom.by_share) for atom in tensor.atoms)
