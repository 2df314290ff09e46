"""Graph of an exported program, with the meaning of its inputs and of its first outputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, Node
from torch.fx.node import map_arg

# Path of the user's model in the module that is exported.
PREFIX = "model."
# Name of a constant that the forward makes of numbers.
LIFTED = re.compile(r"\b(lifted_tensor_)\d+$")


@dataclass(frozen=True)
class ProgramInput:
    """Placeholder and its meaning; a parameter, buffer or constant has a name."""

    node: Node
    kind: InputKind
    name: str = ""


@dataclass(frozen=True)
class ProgramMutation:
    """Output that changes a buffer or parameter by name, or an input by its position among the user's."""

    kind: OutputKind
    name: str = ""
    position: int = 0


@dataclass(frozen=True)
class ProgramGraph:
    """Graph of an exported program; its first outputs are those of `mutations`."""

    graph: Graph
    # Module with the submodules that the graph names.
    root: nn.Module
    inputs: tuple[ProgramInput, ...]
    mutations: tuple[ProgramMutation, ...]
    constants: Mapping[str, Tensor]


def read_program(program: ExportedProgram) -> ProgramGraph:
    """Return the graph of a decomposed program."""
    graph, signature = program.graph_module.graph, program.graph_signature
    inputs = tuple(
        ProgramInput(node, spec.kind, (spec.target or "").removeprefix(PREFIX))
        for node, spec in zip(graph.find_nodes(op="placeholder"), signature.input_specs, strict=True)
    )
    of_user = [one.node.name for one in inputs if one.kind is InputKind.USER_INPUT]
    mutations = []
    for spec in signature.output_specs:
        if spec.kind is OutputKind.USER_INPUT_MUTATION:
            mutations.append(ProgramMutation(spec.kind, position=of_user.index(str(spec.target))))
        elif spec.kind is not OutputKind.USER_OUTPUT:
            mutations.append(ProgramMutation(spec.kind, str(spec.target).removeprefix(PREFIX)))
    constants = {name.removeprefix(PREFIX): value for name, value in program.constants.items()}
    return ProgramGraph(graph, program.graph_module, inputs, tuple(mutations), constants)


def renumbered(program: ProgramGraph) -> ProgramGraph:
    """Return a copy whose names follow from its ops in their order, whatever was removed or inserted before.

    Nodes are numbered by op; constants that torch.export made of numbers are numbered by first use.
    """
    inputs, constants = _renamed_constants(program)
    graph, copies = Graph(), dict[Node, Node]()
    for one in inputs:
        name = one.node.name if one.kind is InputKind.USER_INPUT else f"{one.kind.name[0].lower()}_{PREFIX}{one.name}"
        copies[one.node] = graph.placeholder(re.sub(r"\W", "_", name))
        copies[one.node].meta = one.node.meta
    for node in program.graph.nodes:
        if node.op != "placeholder":
            args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, _name(node))
            copies[node].meta = node.meta
    inputs = tuple(replace(one, node=copies[one.node]) for one in inputs)
    return replace(program, graph=graph, inputs=inputs, constants=constants)


def _name(node: Node) -> str | None:
    """Return the name of a node before it is numbered, as torch.export has it: that of the op without overload."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    name: str = node.target.overloadpacket.__name__
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def _renamed_constants(program: ProgramGraph) -> tuple[tuple[ProgramInput, ...], Mapping[str, Tensor]]:
    """Return the inputs, constants by first use, and the constants by their new names."""
    place = {node: number for number, node in enumerate(program.graph.nodes)}
    used = [
        (min((place[user] for user in one.node.users), default=len(place)), place[one.node], one)
        for one in program.inputs
        if one.kind is InputKind.CONSTANT_TENSOR
    ]
    found, constants = list[ProgramInput](), dict[str, Tensor]()
    for _, _, one in sorted(used, key=lambda entry: entry[:2]):
        name = LIFTED.sub(rf"\g<1>{len(found)}", one.name)
        constants[name] = program.constants[one.name]
        found.append(replace(one, name=name))
    others = [one for one in program.inputs if one.kind is not InputKind.CONSTANT_TENSOR]
    first = next((k for k, one in enumerate(others) if one.kind is InputKind.USER_INPUT), len(others))
    return (*others[:first], *found, *others[first:]), constants
