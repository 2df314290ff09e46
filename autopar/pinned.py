"""What a layout, or the model itself, says about single ops and values: `op @name[n -> tp]`, `autopar.constrain`."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.choices import Choice, Site
from autopar.errors import LayoutError
from autopar.layout.axes import replace_axes
from autopar.layout.check import Words
from autopar.layout.choosing import axes_of
from autopar.layout.language import Layout, parse_rules
from autopar.layout.precedence import glob_matches
from autopar.layout.source import layout_error
from autopar.layout.syntax import OpPin, Pin
from autopar.tracing.graph import NamedGraph, NamedNode

__all__ = ["allows", "cannot_be_had", "pin_of", "pinned_sites", "with_constraints", "words_of"]


def pin_of(layout: Layout, node: NamedNode) -> OpPin | None:
    """The pin of an op's choice."""
    found = [pin for pin in layout if isinstance(pin, OpPin) and glob_matches(pin.glob, node.name)]
    for other in found[1:]:
        if dict(other.choice) != dict(found[0].choice):
            raise layout_error(
                "E2", f"two lines pin the op {node.name} to different choices", "drop one", found[0].span, other.span
            )
    return found[0] if found else None


def pinned_sites(pin: OpPin, node: NamedNode) -> dict[str, list[Site]]:
    """For each axis of a pin the sites that it may split: the atoms of its factor."""
    return {
        axis: [(factor, atom) for atom in range(len(node.atoms.get(factor, ())))]
        for factor, axes in pin.choice
        for axis in axes
    }


def allows(pin: OpPin, choice: Choice) -> bool:
    """Whether a choice does what the pin says, all of it and nothing else."""
    found: dict[str, tuple[str, ...]] = {}
    for (factor, _), axes in choice.splits:
        found[factor] = (*found.get(factor, ()), *axes)
    return found.keys() == dict(pin.choice).keys() and all(set(axes) == set(found[f]) for f, axes in pin.choice)


def cannot_be_had(pin: OpPin, node: NamedNode, axes: Mapping[str, int]) -> LayoutError:
    """E5: the op does not allow what the pin says."""
    reasons = []
    for factor, over in pin.choice:
        kind, extents = node.rule.kinds[factor], node.atoms.get(factor, ())
        sizes = " * ".join(f"{axis}={axes[axis]}" for axis in over)
        reasons.append(f"{factor}: {kind.value}, extent {' x '.join(map(str, extents)) or 'none'}, over {sizes}")
    listed = "\n".join(f"  {reason}" for reason in reasons)
    return layout_error(
        "E5",
        f"the op {node.name} ({node.op}) cannot be split as it is pinned\n"
        f"  rule  {node.rule}\n{listed}\n  line  {node.origin.source}: {node.origin.source_code}",
        "pin a factor that the rule lets split, in shards of one size that its operands can be brought into",
        pin.span,
    )


def words_of(graph: NamedGraph) -> Words:
    """What a graph has names for."""
    kinds: dict[str, set[str]] = {}
    for tensor in graph.tensors.values():
        returned = "output" if tensor.name in graph.outputs else "act"
        kind = {"activation": returned, "constant": "buffer"}.get(tensor.kind, tensor.kind)
        kinds.setdefault(kind, set()).add(tensor.name)
    return Words(
        frozenset(name for tensor in graph.tensors.values() for atom in tensor.atoms for name in atom.names),
        {kind: frozenset(names) for kind, names in kinds.items()},
        {node.name: node.rule.factors for node in graph.nodes},
    )


def with_constraints(layout: Layout, graph: NamedGraph, axes: Mapping[str, int]) -> Layout:
    """The layout with what the model says by `autopar.constrain`, each as a pin of that value."""
    sources = {node.name: node for node in graph.exported.graph_module.graph.nodes}
    pins: list[Pin] = []
    for tensor in graph.tensors.values():
        for text in sources[tensor.node].meta.get("constrain", ()):
            rules = parse_rules(text, f"autopar.constrain of {tensor.name}")
            pins.append(Pin(tensor.name, rules, span=rules[0].span))
    said = Layout(tuple(pins))
    if layout.strategy is not None:  # a strategy's axes that the mesh lacks have size 1, and so have the model's
        absent = {axis: () for axis in axes_of(said) if axis not in axes}
        said = Layout(tuple(kept for kept in (replace_axes(pin, absent) for pin in pins) if kept is not None))
    return Layout((*layout.statements, *said.statements), layout.name)
