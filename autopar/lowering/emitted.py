"""`Emitted`: the value that lowering hands to the runtime, and its code with a comment for every inserted step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import GraphModule

from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedTensor
from autopar.lowering.hoisted_sums import HoistedSums
from autopar.lowering.passes.random_ops import DrawnOp
from autopar.sharding.reshard.reshard import Step
from autopar.sharding.reshard_insertion import InsertedReshard
from autopar.sharding.sharding import Sharding


@dataclass(frozen=True)
class Emitted:
    """The generated graph of one rank, the reshards in it, and the shardings of its results."""

    graph_module: GraphModule
    inserted: tuple[InsertedReshard, ...]
    # Name and sharding of each result of the model; None for one that is no tensor.
    results: tuple[tuple[str, Sharding] | None, ...]
    # Ops that draw random numbers on several ranks; with any, the graph has one more input, their key.
    draws: tuple[DrawnOp, ...] = ()
    # Small sums that are made before and after the graph.
    ends: HoistedSums = field(default_factory=HoistedSums)
    # False if the forward sends nothing between its two ends.
    sends: bool = True
    # Bytes that are summed together with the gradient of each parameter.
    sum_bytes: Mapping[str, int] = field(default_factory=dict)


def note_of(one: InsertedReshard, graph: NamedGraph) -> str:
    """Describe a reshard: tensor, both shardings, steps, the op that needs it, and the op's rule."""
    tensor = graph.tensors[one.tensor]
    layouts = f"{_text(tensor, one.source)} -> {_text(tensor, one.target)}"
    ways = ("forward", one.reshard.forward), ("backward", one.reshard.backward if one.differentiable else ())
    sent = "; ".join(f"{word} {_steps(steps)}" for word, steps in ways if steps)
    node = next((node for node in graph.nodes if node.name == one.op), None)
    place = one.op if node is None else f"{one.op}, rule `{str(node.rule).partition(';')[0]}`, {node.origin.source}"
    return f"{tensor}: {layouts}: {sent}; for {place}"


def _steps(steps: tuple[Step, ...]) -> str:
    return ", ".join(f"{step.kind.value}({'*'.join(step.axes)})" for step in steps)


def _text(tensor: NamedTensor, layout: Sharding) -> str:
    """Print a sharding with the names of the tensor's dims."""
    if len(layout.splits) != len(tensor.atoms):
        return str(layout)  # of a message of an op's own, which is no tensor of the graph
    pairs = zip(tensor.atoms, layout.splits, strict=True)
    rules = ", ".join(
        f"{atom.names[0] if atom.names else atom.size} -> {'*'.join(axes)}" for atom, axes in pairs if axes
    )
    marks = [("partial", layout.partial), ("broadcast", layout.broadcast)]
    words = [f"[{rules}]" if rules else "whole", *(f"{word}({'*'.join(sorted(axes))})" for word, axes in marks if axes)]
    return " + ".join(words)


def with_notes(module: GraphModule) -> str:
    """Return the code of a generated graph, then of its regions, with a comment before every step that has notes."""
    lines = []
    for line in module.code.strip("\n").split("\n"):
        called = re.match(r"( +)\w+ = self\.(\w+)\(", line)
        if called is not None:
            notes = getattr(module.get_submodule(called[2]), "notes", ())
            lines += [f"{called[1]}# {note}" for note in notes]
        lines.append(line)
    text = "\n".join(lines) + "\n"
    for name, child in module.named_children():
        body = getattr(child, "body", child)
        if isinstance(body, GraphModule):
            text += f"\n\n# {name}\n{with_notes(body)}"
    return text


def with_ends(text: str, ends: HoistedSums) -> str:
    """Return the code of a generated graph between the sums before and after it."""
    first, last = ("".join(f"# {note}\n" for note in notes) for notes in ends.notes)
    if ends.before is not None:
        taken = ", ".join(f"early_{number}" for number in ends.taken)
        read = f", which takes {taken}" if taken else ""
        text = f"# before the graph{read}; early_0 and on are the sums of this:\n{first}{ends.before.code}{text}"
    if ends.late:
        places = ", ".join(str(place) for one in ends.late for place in one.places)
        text += f"\n# after the graph, of its results {places}, waited for when somebody reads them:\n{last}"
        for one in ends.late:
            if one.divisor is not None:
                text += f"# the sum of result {one.places[0]} is divided by early_{one.divisor}\n"
    return text
