"""Pins of single ops and values: `op @name[n -> tp]` in a layout, `autopar.constrain` in a model."""

from __future__ import annotations

from collections.abc import Collection
from weakref import WeakKeyDictionary

from autopar.errors import LayoutError
from autopar.ir.analysis.contractions import ATTENTIONS
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode, NamedTensor
from autopar.mesh import SubMesh
from autopar.rules.ops.documents import DOCUMENT_ATTENTION
from autopar.sharding.choices import BROADCAST, Choice, Passing, Site
from autopar.sharding.layout.check import LayoutWords
from autopar.sharding.layout.language import Layout, axes_of, parse_rules
from autopar.sharding.layout.matching import glob_matches
from autopar.sharding.layout.source import layout_error
from autopar.sharding.layout.syntax import OpPin, Pin
from autopar.sharding.lowered_ops.ring_attention import MASK, rows_beside
from autopar.sharding.recompute import words_of_layers
from autopar.sharding.sharding import MICRO


def pin_of(layout: Layout, node: NamedNode) -> OpPin | None:
    """Return the pin of an op; raise E2 where two differ."""
    found = [pin for pin in layout if isinstance(pin, OpPin) and glob_matches(pin.glob, node.name)]
    for other in found[1:]:
        if dict(other.choice) != dict(found[0].choice):
            raise layout_error(
                "E2", f"two lines pin the op {node.name} to different choices", "drop one", found[0].span, other.span
            )
    return found[0] if found else None


def pinned_sites(pin: OpPin, node: NamedNode) -> dict[str, list[Site]]:
    """Return the sites that each axis of a pin may split."""
    found: dict[str, list[Site]] = {}
    for factor, axes in pin.choice:
        # An axis of rows and keys has both words.
        for axis in axes if _splits(factor) else ():
            found.setdefault(axis, []).extend(_sites(factor, node))
    return found


def uneven_sites(pin: OpPin, node: NamedNode) -> set[tuple[Site, tuple[str, ...]]]:
    """Return the sites, with their axes, that a pin lets be cut in uneven pieces."""
    return {(site, axes) for factor, axes in pin.choice if factor in pin.uneven for site in _sites(factor, node)}


def pinned_passings(pin: OpPin, node: NamedNode) -> dict[str, tuple[Passing, ...]]:
    """Return the passings, one or none, of each axis that a pin says splits nothing."""
    found: dict[str, tuple[Passing, ...]] = {}
    for word, axes in pin.choice:
        if not _splits(word):
            found.update(dict.fromkeys(axes, _passings(word, node)))
    return found


def _passings(word: str, node: NamedNode) -> tuple[Passing, ...]:
    if word == "broadcast":
        return (BROADCAST,)
    number = word.partition(".")[2]
    groups = node.rule.linear[int(number) : int(number) + 1] if word != "none" else ()
    return tuple(map(frozenset, groups))


def _splits(word: str) -> bool:
    """Return whether a word on the left of a pin is a factor."""
    return word not in ("none", "broadcast") and not word.startswith("partial.")


def _sites(word: str, node: NamedNode) -> list[Site]:
    factor, _, number = word.partition(".")
    atoms = range(len(node.atoms.get(factor, ())))
    return [(factor, atom) for atom in atoms if not number or atom == int(number)]


def allows(pin: OpPin, choice: Choice, node: NamedNode) -> bool:
    """Return whether a choice equals the pin, up to the order of axes over atoms; a pin does not name micro-batches."""
    in_space = ((site, tuple(axis for axis in axes if axis != MICRO)) for site, axes in choice.splits)
    splits = {site: axes for site, axes in in_space if axes}
    for factor, axes in pin.choice:
        if not _splits(factor):
            continue
        found = [splits.pop(site, ()) for site in _sites(factor, node)]
        if len(found) == 1 and found != [axes]:
            return False
        # A factor of several atoms is pinned as a whole, and the choice deals its axes to them.
        if sorted(axis for one in found for axis in one) != sorted(axes):
            return False
    return not splits and all(
        (way is None and word == "none") or (way,) == _passings(word, node)
        for word, axes in pin.choice
        if not _splits(word)
        for way in (dict(choice.passes).get(axis) for axis in axes)
    )


def infeasible_pin(pin: OpPin, node: NamedNode, axes: SubMesh, graph: NamedGraph) -> LayoutError:
    """Return the error E5 for a pin that the op does not allow, with a reason for each word."""
    reasons = []
    for word, over in pin.choice:
        if not _splits(word) and any(
            way and way not in graph.passable_sums[node.name] for way in _passings(word, node)
        ):
            reasons.append(
                f"{word}: over {', '.join(over)}; what the sum is multiplied with may be infinite, or what "
                "divides it zero: its terms would give NaN (docs/language.md)"
            )
            continue
        factor = word.partition(".")[0]
        if factor not in node.rule.kinds:
            reasons.append(f"{word}: over {', '.join(over)}, beside what it splits")
            continue
        kind, extents = node.rule.kinds[factor], node.atoms.get(factor, ())
        sizes = " * ".join(f"{axis}={axes[axis]}" for axis in over)
        reasons.append(f"{factor}: {kind.value}, extent {' x '.join(map(str, extents)) or 'none'}, over {sizes}")
    listed = "\n".join(f"  {reason}" for reason in reasons)
    fix = "pin a factor that the rule lets split, in shards of one size that its operands can be brought into"
    if node.op in ATTENTIONS and any(word.partition(".")[0] == "t" for word, _ in pin.choice):
        fix = _fix_of_ring(pin, node, graph) or fix
    return layout_error(
        "E5",
        f"the op {node.name} ({node.op}) cannot be split as it is pinned\n"
        f"  rule  {node.rule}\n{listed}\n  line  {node.origin.source}: {node.origin.source_code}",
        fix,
        pin.span,
    )


def _fix_of_ring(pin: OpPin, node: NamedNode, graph: NamedGraph) -> str:
    """Return what to change where keys of attention cannot pass from rank to rank; empty if that is not the reason."""
    of_factor: dict[str, set[str]] = {"s": set(), "t": set()}
    for word, axes in pin.choice:
        of_factor.setdefault(word.partition(".")[0], set()).update(axes)
    if node.op == str(DOCUMENT_ATTENTION):
        return "documents are looked up in the keys of all ranks: leave out 't'"
    if node.rule.random:
        return "keys pass from rank to rank without dropout: disable it, or leave out 't'"
    if not of_factor["t"] <= of_factor["s"]:
        missing = "*".join(sorted(of_factor["t"]))
        return f"an axis that splits the keys splits the rows too: write 's -> {missing}' as well"
    mask = node.operands[MASK] if len(node.operands) > MASK else None
    if mask is not None and graph.tensors[mask].requires_grad:
        return f"the mask {mask} has a gradient, which only whole keys give: leave out 't'"
    if not any(rows_beside(node, site) for site in _sites("t", node)):
        return "the rows have other parts than the keys: leave out 't'"
    return ""


def kinds_of(tensor: NamedTensor, returned: Collection[str]) -> tuple[str, ...]:
    """Return the kinds of scopes that may cover a tensor, given the graph's outputs."""
    if tensor.kind == "activation":
        return ("output",) if tensor.name in returned else ("act",)
    return {"param": ("param", "use"), "input": ("input",)}.get(tensor.kind, ("buffer",))


# Of each graph, as every layout is checked against them.
_WORDS: WeakKeyDictionary[NamedGraph, LayoutWords] = WeakKeyDictionary()


def words_of(graph: NamedGraph) -> LayoutWords:
    """Return the names of a graph that a layout may use."""
    if graph not in _WORDS:
        _WORDS[graph] = _words_of(graph)
    return _WORDS[graph]


def _words_of(graph: NamedGraph) -> LayoutWords:
    kinds: dict[str, set[str]] = {}
    returned = frozenset(graph.outputs)
    for tensor in graph.tensors.values():
        kinds.setdefault(kinds_of(tensor, returned)[0], set()).add(tensor.name)
    return LayoutWords(
        frozenset(name for tensor in graph.tensors.values() for atom in tensor.atoms for name in atom.names),
        {kind: frozenset(names) for kind, names in kinds.items()},
        {node.name: node.rule.factors for node in graph.nodes},
        tuple(graph.ops_of_layers),
        words_of_layers(graph),
    )


def with_constraints(layout: Layout, graph: NamedGraph, axes: SubMesh) -> Layout:
    """Return the layout with a pin for each value that `autopar.constrain` names."""
    sources = {node.name: node for node in graph.exported.graph_module.graph.nodes}
    pins: list[Pin] = []
    for tensor in graph.tensors.values():
        for text in sources[tensor.node].meta.get("constrain", ()):
            rules = parse_rules(text, f"autopar.constrain of {tensor.name}")
            pins.append(Pin(tensor.name, rules, span=rules[0].span))
    constraints = Layout(tuple(pins))
    if layout.strategy is not None:
        # Axes of a strategy that the mesh lacks have size 1; the model may name them too.
        constraints = constraints.on_axes({axis: () for axis in axes_of(constraints) if axis not in axes})
    return Layout((*layout.statements, *constraints.statements), layout.name)
