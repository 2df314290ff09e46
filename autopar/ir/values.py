"""Values of a named graph: dims, atoms, tensors, ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from autopar.ir.exported import Exported, NodeOrigin
from autopar.rules.notation import Rule


@dataclass(frozen=True)
class Band:
    """Row `i` sees the columns `i - left` to `i + right`; None where there is no end."""

    left: int | None
    right: int | None


@dataclass(frozen=True)
class AttentionNote:
    """What a trace knows of one call of fused attention."""

    mask: str
    """`causal`, `no mask`, `window 4096`, or `mask kept: ` and the reason."""
    heads: str = ""
    """Why keys and values stay repeated to the heads of the queries; nothing where they are not."""
    band: Band | None = None
    """Of a mask that stays."""

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.mask, self.heads)))


Source = Literal["table", "discovered", "replicated"]


Kind = Literal["input", "param", "buffer", "constant", "activation"]


@dataclass(frozen=True)
class Dim:
    """A named dimension: one role in the model; its extent may differ from place to place (feature maps)."""

    name: str
    sizes: tuple[int, ...]
    parts: tuple[str, ...]
    """The dims this one is made of, major first, where a view takes it apart."""
    source: str
    """`structure`, `generated`, or the place where the user gave the name."""
    tensors: int
    """How many tensors carry it."""

    @property
    def size(self) -> int:
        """The extent; the largest where it differs from place to place."""
        return max(self.sizes)


class Atom(NamedTuple):
    """A smallest piece of a physical dim: `(heads head_dim)` has two, and `heads` may be `(kv_heads group)` itself.

    A tuple, because much is looked up by it.
    """

    dim: int
    size: int
    names: tuple[str, ...]
    """What it is called, from the outermost named dim inwards: `("heads", "kv_heads")`; nothing where it is a `1`."""


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of the graph. `dims` has one entry per physical dim: a name, `(heads head_dim)`, or `1`."""

    name: str
    kind: Kind
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    node: str
    """The fx node that holds it."""
    atoms: tuple[Atom, ...] = ()
    requires_grad: bool = False

    def __str__(self) -> str:
        return f"{self.name}[{' '.join(self.dims)}]"


@dataclass(frozen=True)
class NamedNode:
    """An op of the graph: its rule, and the dim each factor of the rule is tied to."""

    name: str
    op: str
    operands: tuple[str | None, ...]
    outputs: tuple[str | None, ...]
    rule: Rule
    source: Source
    reason: str
    factors: Mapping[str, str]
    sizes: Mapping[str, int]
    atoms: Mapping[str, tuple[int, ...]]
    """The extents of the atoms of each factor, major first."""
    origin: NodeOrigin
    node: str
    attention: AttentionNote | None = None
    """What is known of the mask and the heads, where the op is fused attention."""


class GraphView(Protocol):
    """A named graph as its own analyses read it."""

    @property
    def exported(self) -> Exported: ...
    @property
    def tensors(self) -> Mapping[str, NamedTensor]: ...
    @property
    def nodes(self) -> tuple[NamedNode, ...]: ...
