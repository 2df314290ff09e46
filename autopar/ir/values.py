"""Values of a named graph: dims, atoms, tensors, ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

import torch

from autopar.ir.exported import NodeOrigin
from autopar.ir.precision import Precision
from autopar.rules.notation import Rule


@dataclass(frozen=True)
class Band:
    """Band of an attention mask: row `i` sees columns `i - left` to `i + right`; None for an open end."""

    left: int | None
    right: int | None


# Begin of the note of attention whose mask keeps documents apart.
DOCUMENTS = "documents"


@dataclass(frozen=True)
class AttentionNote:
    """Mask and heads of one call of fused attention, as read from the trace."""

    # `causal`, `no mask`, `window 4096`, `documents`, or `mask kept: ` and the reason.
    mask: str
    # Reason why keys and values stay repeated to the heads of the queries; empty if they are not repeated.
    heads: str = ""
    # Band of a mask that stays an operand, and of documents.
    band: Band | None = None
    # Of documents: share of all scores that the example inputs need; None where they have no data.
    document_share: float | None = field(default=None, compare=False)

    def __str__(self) -> str:
        priced = ""
        if self.mask.startswith(DOCUMENTS):
            share = self.document_share
            priced = "priced as one" if share is None else f"{share:.3g} of all scores in the example inputs"
        return "; ".join(filter(None, (self.mask, priced, self.heads)))


# Name of the dim of the pieces of a fold.
FOLD_PIECES = "fold"


class SequenceFold(NamedTuple):
    """Fold of a dim: it is cut in pieces, and every odd one is reversed."""

    dim: str
    pieces: int

    def __str__(self) -> str:
        return f"{self.dim} in {self.pieces} pieces"


# Metadata of a node of an exported graph whose rows are routed: the number of groups.
ROUTED = "routed"
# The same of a node whose rows stand in slots of their groups, and are stored in full.
SLOTTED = "slotted"

# Origin of an op's rule: the table, a search by trial, or none (the op runs whole on each rank).
Source = Literal["table", "discovered", "replicated"]

Kind = Literal["input", "param", "buffer", "constant", "activation"]


@dataclass(frozen=True)
class Dim:
    """Named dimension: one role in the model. Its extent may differ from place to place (feature maps)."""

    name: str
    sizes: tuple[int, ...]
    # Dims that a view splits this one into, major first.
    parts: tuple[str, ...]
    # `structure`, `generated`, or the place where the user gave the name.
    source: str
    # Number of tensors with this dim.
    tensors: int

    @property
    def size(self) -> int:
        """Return the extent; the largest one if it differs from place to place."""
        return max(self.sizes)


class Atom(NamedTuple):
    """Smallest piece of a physical dim: `(heads head_dim)` has two, and `heads` may be `(kv_heads group)` itself."""

    # A tuple, not a dataclass: atoms are part of many cache keys, and tuples hash faster.
    dim: int
    size: int
    # Names from the outermost named dim inwards: `("heads", "kv_heads")`; empty for a `1`.
    names: tuple[str, ...]
    # Axes with shares split it by them (`NamedGraph.by_share`).
    by_share: bool = False


@dataclass(frozen=True)
class NamedTensor:
    """Tensor of the graph. `dims` has one entry per physical dim: a name, `(heads head_dim)`, or `1`."""

    name: str
    kind: Kind
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    # Name of the fx node that produces it.
    node: str
    atoms: tuple[Atom, ...] = ()
    requires_grad: bool = False
    # A parameter that the model does not train; under `no_grad` trained ones require no gradient, too.
    frozen: bool = False
    # Number of the leading atoms of dim 0 that are the groups of routed rows; 0 for a tensor that is stored in full.
    routed: int = 0
    # Number of the leading atoms that are the groups of rows in slots.
    slotted: int = 0

    @property
    def element_bytes(self) -> float:
        """Return the bytes stored for an element: of routed rows one is stored for all groups."""
        groups = prod(atom.size for atom in self.atoms[: self.routed])
        return self.dtype.itemsize / groups if self.routed and groups else self.dtype.itemsize

    def stored_dtype(self, precision: Precision) -> torch.dtype:
        """Return the dtype in which the tensor is stored: of a parameter, that which the precision gives."""
        return precision.stored(self.dtype, self.frozen) if self.kind == "param" else self.dtype

    def __str__(self) -> str:
        return f"{self.name}[{' '.join(self.dims)}]"


@dataclass(frozen=True)
class NamedNode:
    """Op of the graph: its rule, and the dim of each factor of the rule."""

    name: str
    op: str
    # Names of tensors, in the order of the rule; None for an operand that is absent.
    operands: tuple[str | None, ...]
    outputs: tuple[str | None, ...]
    rule: Rule
    source: Source
    # Reason why the table has no rule for the op; empty if it has one.
    reason: str
    factors: Mapping[str, str]
    sizes: Mapping[str, int]
    # Extents of the atoms of each factor, major first.
    atoms: Mapping[str, tuple[int, ...]]
    origin: NodeOrigin
    node: str
    # For fused attention only.
    attention: AttentionNote | None = None
    # Factors and their atoms that axes with shares split by them.
    by_share: frozenset[tuple[str, int]] = frozenset()
    # Number of groups of its routed rows; 0 for an op without.
    routed: int = 0
    # Factors and their atoms that no axis splits: the pieces of a fold.
    fixed: frozenset[tuple[str, int]] = frozenset()
