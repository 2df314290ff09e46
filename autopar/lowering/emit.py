"""Generate the graph of one rank from the traced graph and an assignment.

Reshards follow `reshard_insertion`; each is a module named after its collectives. Ops whose arguments depend on the
shard get local values. Ops that torch cannot run on a shard become modules that can.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from autopar.ir.graph import NamedGraph
from autopar.ir.invariants import verifying
from autopar.ir.values import NamedNode
from autopar.lowering.collectives.local_reshard import LocalReshard, bind_message
from autopar.lowering.collectives.process_groups import Groups, GroupsOfMicroBatch
from autopar.lowering.emitted import Emitted, note_of
from autopar.lowering.float8_calls import float8_call
from autopar.lowering.hoisted_sums import HoistedSums
from autopar.lowering.modules.shard_ops import LocalOpModule, LoweredOpModule, ReshardModule
from autopar.lowering.passes.aliases import FRESH, is_idle_copy, makes_new_memory
from autopar.lowering.passes.bucket_parameters import BucketedParameters, in_a_bucket, put_in_buckets
from autopar.lowering.passes.empty_shards import EmptyShardOp, has_node, nodes_of, reached
from autopar.lowering.passes.hoist_small_sums import move_to_ends
from autopar.lowering.passes.join_small_sums import join_totals
from autopar.lowering.passes.loop_buckets import put_in_loops
from autopar.lowering.passes.micro_batches import (
    begin_mark,
    counts_positions,
    end_mark,
    loop_micro_batches,
    needs_all_rows,
)
from autopar.lowering.passes.pipeline_parts import OP, VALUE, StageCut
from autopar.lowering.passes.random_ops import RandomOps
from autopar.lowering.passes.rank_check import put_gate
from autopar.lowering.passes.recompute_regions import KEPT, REGION, mark_movable, with_regions
from autopar.lowering.passes.repeated_rows import dispatch_repeated_rows
from autopar.lowering.passes.routed_rows import RoutedRows
from autopar.lowering.passes.side_by_side import halves_of
from autopar.lowering.verify import verify_emitted
from autopar.lowering.verify_shapes import SHARD
from autopar.rules.call import arguments_by_name, takes_tensors
from autopar.rules.notation import FactorKind
from autopar.rules.shard_call.device_kernels import take_device_kernels
from autopar.rules.shard_call.dispatch import localiser
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall, amounts
from autopar.sharding.assignment import Assignment, OpAssignment
from autopar.sharding.choices import Choice
from autopar.sharding.layout.syntax import Recompute
from autopar.sharding.lowered_ops import LoweredOpContext, lowered_context
from autopar.sharding.options import Outputs
from autopar.sharding.recompute import recompute_regions, recomputed_ops
from autopar.sharding.reshard_insertion import InsertedReshard, OpReshards, insert_reshards
from autopar.sharding.sharding import MICRO, Sharding, atoms_of, piece
from autopar.sharding.shares import marked_for
from autopar.sharding.verify import verify_reshards

__all__ = ["emit"]


def emit(
    graph: NamedGraph,
    assignment: Assignment,
    groups: Groups,
    outputs: Outputs,
    local_inputs: bool,
    parameters: BucketedParameters | None = None,
    recompute: Mapping[str, Recompute] | None = None,
    with_ends: bool = False,
) -> Emitted:
    """Generate the graph of this rank; every rank calls it in the same order.

    `recompute` replaces the recomputation of the assignment. With `with_ends`, small sums move before or after the
    graph where they can.
    """
    again = assignment.recompute if recompute is None else recompute
    handled = parameters or BucketedParameters()
    return _Emitter(graph, assignment, groups, outputs, local_inputs, handled, again).run(with_ends)


class _Emitter:
    def __init__(
        self,
        graph: NamedGraph,
        assignment: Assignment,
        groups: Groups,
        outputs: Outputs,
        local_inputs: bool,
        parameters: BucketedParameters,
        recompute: Mapping[str, Recompute],
    ) -> None:
        self.graph = graph = marked_for(graph, assignment.axes)
        self.outputs = outputs
        self.parameters = parameters
        self.assignment = assignment
        self.axes = assignment.axes
        self.micro_batches = self.axes.get(MICRO, 1)
        in_time = MICRO in self.axes and not isinstance(groups, GroupsOfMicroBatch)
        self.groups = GroupsOfMicroBatch(groups) if in_time else groups
        self.reshard_plan = insert_reshards(graph, assignment, outputs, local_inputs)
        if verifying():
            verify_reshards(graph, assignment, self.reshard_plan, outputs)
        self.trained = {name for name, tensor in graph.tensors.items() if tensor.requires_grad}
        self.out = Graph()
        self.modules: dict[str, nn.Module] = {}
        self.routed = RoutedRows(graph, self.axes, self.groups, parameters.precision, self.out, self._module)
        self.held: dict[tuple[str, Sharding], Node] = {}
        self.by_node = {tensor.node: tensor for tensor in graph.tensors.values()}
        self.device = torch.device(groups.device_type)
        self.drawings = RandomOps(graph, self.axes, self.groups.coordinate, self.device, groups.replicas)
        self.key: Node | None = None
        self.sum_bytes: dict[str, int] = {}
        # Parameters that the graph of one micro-batch reads in buckets.
        self.in_bodies: set[str] = set()
        self.regions = recompute_regions(graph, recompute) if graph.exported.grad_enabled else ()
        self.again = recomputed_ops(graph, self.regions)
        self.region_of = {op: number for number, region in enumerate(self.regions) for op in region.ops}

    def run(self, with_ends: bool) -> Emitted:
        source = self.graph.exported.graph_module.graph
        ops = {node.node: node for node in self.graph.nodes}
        for node in source.nodes:
            if node.op == "placeholder" and node.name in self.by_node:  # a short graph lacks those of other layers
                self._place(node)
            elif node.name in ops:
                last = next(iter(reversed(self.out.nodes)), None)  # reversed() gives no iterator before 2.13
                self._call(node, ops[node.name])
                for made in reversed(self.out.nodes):
                    if made is last:
                        break
                    self._mark(made, node, ops[node.name].name)
        for one in self.reshard_plan.outputs:
            self._convert(one)
        results = source.output_node().args[0]
        assert isinstance(results, tuple), "the graph returns a flat tuple"
        # A result without a place is no tensor, or one that nobody asked for.
        plain = (None if isinstance(result, Node) else result for result in results)
        found = (None if place is None else self._value(*place) for place in self.reshard_plan.results)
        self.out.output(tuple(result if value is None else value for result, value in zip(plain, found, strict=True)))
        mark_movable(self.graph, self.regions, self.held)
        if MICRO in self.axes:
            again = frozenset(name for name, tensor in self.by_node.items() if self.parameters.of(tensor).again)
            stages = StageCut.of(self.assignment, self.groups, self.graph, self.by_node)
            loops = again, self._body, stages, halves_of(self.graph, self.assignment)
            self.out = loop_micro_batches(self.out, self.modules, self.micro_batches, *loops)
        given = [node for node, tensor in self.by_node.items() if tensor.kind == "input" and not tensor.requires_grad]
        ends = move_to_ends(self.out, self.modules, given, self.graph.tensors) if with_ends else HoistedSums()
        join_totals(self.out, self.modules)
        self.sum_bytes |= put_in_buckets(self.out, self.modules, self.by_node, self.parameters, self.in_bodies)
        put_in_loops(self.out, self.modules, self.outputs, self.graph, self.groups)
        sends = put_gate(self.out, self.modules, self.parameters.gate)
        self._take_kernels(self.out, self.modules)
        module = with_regions(self.out, self.modules, self.regions)
        returned = self.reshard_plan.results[len(self.graph.exported.mutations) :]
        emitted = Emitted(
            module, self.reshard_plan.inserted(), returned, tuple(self.drawings.ops), ends, sends, self.sum_bytes
        )
        if verifying():
            verify_emitted(self.graph, self.assignment, self.groups, self.reshard_plan, emitted)
        return emitted

    def _body(self, graph: Graph, modules: dict[str, nn.Module]) -> GraphModule:
        """Return the module of the graph of one micro-batch."""
        # The loop adds up gradients right after each backward, and multiplies the sums: none is pending or kept here.
        handling = {name: replace(one, deferred=False) for name, one in self.parameters.handling.items()}
        parameters = replace(self.parameters, handling=handling, awaited=False)
        self.sum_bytes |= put_in_buckets(graph, modules, self.by_node, parameters)
        self.in_bodies |= in_a_bucket(graph, modules)
        self._take_kernels(graph, modules)
        return with_regions(graph, modules, self.regions)

    def _take_kernels(self, graph: Graph, modules: dict[str, nn.Module]) -> None:
        take_device_kernels(graph, self.groups.device_type, lambda value: value.meta.get(VALUE) in self.trained)
        dispatch_repeated_rows(graph, modules)

    def _mark(self, made: Node, source: Node, op: str) -> None:
        """Record the source node of generated nodes, and which of them are recomputed."""
        made.meta["origin"] = source.meta.get("origin")
        made.meta[OP] = op
        module = self.modules.get(str(made.target)) if made.op == "call_module" else None
        # Also for ops without elements on this rank: all ranks must find the same readers of gathered tensors.
        if module is not None and not isinstance(module, ReshardModule):
            assert isinstance(source.target, torch._ops.OpOverload), source
            made.meta[FRESH] = makes_new_memory(source.target)
        if op in self.region_of:
            made.meta[REGION] = self.region_of[op]
            made.meta[KEPT] = op not in self.again

    def _place(self, node: Node) -> None:
        tensor = self.by_node[node.name]
        whole = self.reshard_plan.inputs.get(tensor.name)
        given = self.assignment.stored[tensor.name] if whole is None else whole.source
        self.held[tensor.name, given] = made = self.out.placeholder(node.name)
        made.meta.update({"local_shape": self._local_shape(tensor.name, given), VALUE: tensor.name})
        if whole is not None:
            self._convert(whole)

    def _call(self, source: Node, node: NamedNode) -> None:
        op_assignment, wired = self.assignment.ops[node.name], self.reshard_plan.ops[node.name]
        assert isinstance(source.target, torch._ops.OpOverload), source
        for one in wired.before:
            self._convert(one)
        operands = iter(None if place is None else self._value(*place) for place in wired.operands)
        arguments = arguments_by_name(source.target, source.args, source.kwargs)
        for name, is_list in takes_tensors(source.target).items():
            given = (arguments[name] or ()) if is_list else (arguments[name],)
            local = [one if isinstance(item, Node) else item for item, one in zip(given, operands, strict=False)]
            if arguments[name] is not None:
                arguments[name] = local if is_list else local[0]
        if "device" in arguments:
            arguments["device"] = self.graph.exported.device_for(source, self.device)
        if is_idle_copy(source) and op_assignment.operands == op_assignment.produced:
            result = arguments["self"]
        else:
            made = self._local(source, node, op_assignment, wired, arguments)
            result = self._scaled(made, node, op_assignment.choice)
        self._keep(source, node, op_assignment, result)
        for one in wired.after:
            self._convert(one)

    def _local(
        self, source: Node, node: NamedNode, op_assignment: OpAssignment, wired: OpReshards, arguments: dict[str, Any]
    ) -> Node:
        """Emit an op on the shards of this rank."""
        routed = self.routed.op(node, op_assignment, arguments)
        if routed is not None:
            return routed
        split = None if wired.split is None else self._split(node, op_assignment)
        if split is not None and MICRO in split.axes:
            raise needs_all_rows(self.micro_batches, node)
        everything = tuple(self._pieces(node, op_assignment.choice))
        pieces = tuple(piece for piece in everything if split is None or piece.factor not in split.factors)
        sizes = dict(node.sizes)
        local_sizes = {**sizes, **{piece.factor: piece.length for piece in pieces}}
        local = LocalCall(source.target, arguments, node.rule, sizes, local_sizes)  # type: ignore[arg-type]
        if pieces:
            whole, local = local, self._localised(local, pieces)
            self._check_positions(node, op_assignment.choice, whole, local, split)
        drawing = self._drawing(source, node, op_assignment.choice, local)
        if drawing is not None:
            return drawing
        if split is not None:
            return self._communicating(split, local, {piece.factor: piece for piece in everything})
        empty = [piece.factor for piece in pieces if not piece.length and piece.total]
        if empty and any(node.operands) and not node.rule.random and not node.routed:
            if not any(map(node.rule.added_operands, empty)) or not any(self._gives_some(node, op_assignment)):
                return self._empty(source, node, op_assignment, arguments)
            local = self._filled(local)
        lowered = [piece for piece in pieces if node.rule.lowering(piece.factor)]
        if lowered:
            names = tuple(name for name, value in local.arguments.items() if has_node(value))
            plain = {name: None if name in names else value for name, value in local.arguments.items()}
            module = LocalOpModule(replace(local, arguments=plain), tuple(lowered), names)
            return self._module(f"{node.name}_split", module, tuple(local.arguments[name] for name in names))
        float8 = float8_call(node, self.graph.tensors, local, self.parameters.precision)
        return self._record(local) if float8 is None else self.out.call_function(*float8)

    def _check_positions(
        self, node: NamedNode, choice: Choice, whole: LocalCall, local: LocalCall, split: LoweredOpContext | None
    ) -> None:
        """Raise for an op whose arguments depend on the micro-batch: all of them run the same graph."""
        in_time = {factor for (factor, _), axes in choice.splits if MICRO in axes}
        if not in_time:
            return
        last = {**self.groups.coordinate, MICRO: self.micro_batches - 1}
        factors = () if split is None else split.factors
        pieces = tuple(piece for piece in self._pieces(node, choice, last) if piece.factor not in factors)
        if self._localised(whole, pieces).arguments != local.arguments or any(map(node.rule.lowering, in_time)):
            raise counts_positions(self.micro_batches, node)

    def _drawing(self, source: Node, node: NamedNode, choice: Choice, local: LocalCall) -> Node | None:
        """Emit an op that draws random numbers."""
        made = self.drawings.make(node, source, choice, local.arguments, self.graph.trains(node))
        if made is None:
            return None
        if self.key is None:
            *_, last = (None, *self.out.find_nodes(op="placeholder"))
            first = next(iter(self.out.nodes), self.out._root)
            with self.out.inserting_before(first) if last is None else self.out.inserting_after(last):
                self.key = self.out.placeholder("key")  # not here: this may be a region that is recomputed
        tensors = (value for value in local.arguments.values() if has_node(value))
        return self._module(f"{node.name}_drawn", made, (self.key, *tensors))

    def _communicating(self, split: LoweredOpContext, local: LocalCall, pieces: Mapping[str, FactorSlice]) -> Node:
        """Emit an op with collectives inside."""
        names = tuple(name for name, value in local.arguments.items() if has_node(value))
        plain = {name: None if name in names else value for name, value in local.arguments.items()}
        sends = tuple(bind_message(message, self.groups) for message in split.messages())
        module = LoweredOpModule(split, replace(local, arguments=plain), pieces, names, sends)
        module.notes = tuple(
            note_of(one, self.graph) for one in self.reshard_plan.ops[split.node.name].inside if one.ways
        )
        stem = f"{split.node.name}_split_{'_'.join(split.axes)}"
        return self._module(stem, module, tuple(local.arguments[name] for name in names))

    def _split(self, node: NamedNode, op_assignment: OpAssignment) -> LoweredOpContext | None:
        """Return the context of a lowered op on this rank; the reshard plan has it for the largest shard."""
        at = self.groups.coordinate
        return lowered_context(self.graph, node, op_assignment.choice.splits, op_assignment.operands, self.axes, at)

    def _results(
        self, node: NamedNode, op_assignment: OpAssignment
    ) -> Iterator[tuple[tuple[int, ...], torch.dtype] | None]:
        """Return the shapes and dtypes of an op's results on this rank."""
        for name, layout in zip(node.outputs, op_assignment.produced, strict=True):
            if name is None or layout is None:
                yield None
            else:
                yield self._local_shape(name, layout), self.graph.tensors[name].dtype

    def _gives_some(self, node: NamedNode, op_assignment: OpAssignment) -> Iterator[bool]:
        return (result is not None and 0 not in result[0] for result in self._results(node, op_assignment))

    def _empty(self, source: Node, node: NamedNode, op_assignment: OpAssignment, arguments: Mapping[str, Any]) -> Node:
        """Emit an op of which this rank has no elements."""
        single = len(node.outputs) == 1 and isinstance(source.meta["val"], Tensor)
        assert isinstance(source.target, torch._ops.OpOverload), source
        given = arguments_by_name(source.target, source.args, source.kwargs)
        found, saves = reached(source.target, given, lambda node: self.by_node[node.name].requires_grad)
        pairs = zip(self._results(node, op_assignment), found, strict=True)
        results = tuple(None if result is None else (*result, reaches) for result, reaches in pairs)
        made = EmptyShardOp(str(source.target), results, single, saves)
        return self._module(f"{node.name}_empty", made, nodes_of(arguments))

    def _filled(self, local: LocalCall) -> LocalCall:
        """Return arguments with a slice of zeros where this rank has none of a summed factor."""
        assert isinstance(local.op, torch._ops.OpOverload), local.op
        filled = {}
        for name, operand in zip(takes_tensors(local.op), local.rule.operands, strict=False):
            added = [] if operand is None else amounts(operand, local.local_sizes)
            if added and isinstance(local.arguments[name], Node):
                filled[name] = self.out.call_function(
                    torch.ops.aten.constant_pad_nd.default, (local.arguments[name], added)
                )
        return local.with_arguments(**filled)

    def _localised(self, local: LocalCall, pieces: tuple[FactorSlice, ...]) -> LocalCall:
        """Return arguments that depend on the shard; localisers see shapes in place of tensors."""
        nodes = local.arguments
        shapes = {name: self._shapes(value) for name, value in nodes.items()}
        seen = replace(local, arguments=shapes)
        for part in pieces:
            for word in local.rule.localise:
                seen = localiser(word)(seen, part)
        back = {id(shape): nodes[name] for name, shape in shapes.items() if has_node(nodes[name])}
        return replace(seen, arguments={name: back.get(id(value), value) for name, value in seen.arguments.items()})

    def _shapes(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._shapes(item) for item in value]
        return torch.empty(value.meta["local_shape"], device="meta") if isinstance(value, Node) else value

    def _record(self, local: LocalCall) -> Node:
        """Write an op with arguments by their schema names into the graph."""
        assert isinstance(local.op, torch._ops.OpOverload), local.op
        schema = local.op._schema.arguments
        args = tuple(local.arguments[argument.name] for argument in schema if not argument.kwarg_only)
        kwargs = {}
        for argument in schema:
            value = local.arguments.get(argument.name)
            given = not argument.has_default_value() or has_node(value) or value != argument.default_value
            if argument.kwarg_only and given:
                kwargs[argument.name] = value
        return self.out.call_function(local.op, args, kwargs)

    def _pieces(
        self, node: NamedNode, choice: Choice, coordinate: Mapping[str, int] | None = None
    ) -> Iterator[FactorSlice]:
        """Return the slice of each split factor on this rank; of a split inner atom only the length counts."""
        at = self.groups.coordinate if coordinate is None else coordinate
        for factor in dict.fromkeys(factor for (factor, _), _ in choice.splits):
            parts = []
            for atom, size in enumerate(node.atoms[factor]):
                by_share = (factor, atom) in node.by_share
                parts.append(piece(size, choice.of((factor, atom)), self.axes, at, by_share))
            inner = prod(length for _, length in parts[1:])
            begin = parts[0][0] * inner
            yield FactorSlice(factor, int(begin > 0), begin, begin + parts[0][1] * inner, node.sizes[factor])

    def _scaled(self, result: Node, node: NamedNode, choice: Choice) -> Node:
        """Scale the mean over a shard by the shard's share of the count, so that shards add up to the whole mean."""
        means = [one for one in self._pieces(node, choice) if node.rule.kinds[one.factor] is FactorKind.MEAN]
        length, total = prod(one.length for one in means), prod(one.total for one in means)
        if length == total:
            return result
        share = (torch.ops.aten.div.Scalar, total // length) if length and total % length == 0 else None
        op, number = share or (torch.ops.aten.mul.Scalar, length / max(total, 1))
        return self.out.call_function(op, (result, number))

    def _keep(self, source: Node, node: NamedNode, op_assignment: OpAssignment, result: Node) -> None:
        single = len(node.outputs) == 1 and isinstance(source.meta["val"], Tensor)
        for i, name in enumerate(node.outputs):
            if name is None:
                continue
            produced = op_assignment.produced[i]
            assert produced is not None, node.name
            value = result if single else self.out.call_function(operator.getitem, (result, i))
            value.meta.update({"local_shape": self._local_shape(name, produced), SHARD: (name, produced), VALUE: name})
            self.held[name, produced] = value

    # -- reshards -----------------------------------------------------------------------------------------------------

    def _value(self, name: str, layout: Sharding) -> Node:
        """Return the node of a value in a sharding that it already has."""
        value = self.held[name, layout]
        value.meta.update({"local_shape": self._local_shape(name, layout), SHARD: (name, layout)})
        return value

    def _convert(self, one: InsertedReshard) -> None:
        name, found = one.tensor, one.reshard
        value = self.held[name, one.source]
        end = end_mark(one, atoms_of(self.graph.tensors[name]), self.axes, self.groups.coordinate)
        if end is not None:
            value = self._module(f"{name}_micro_end", end, (value,))
            value.meta["local_shape"] = self._local_shape(name, found.source)
        if one.ways and self.graph.tensors[name].routed:
            value = self.routed.reshard(one, value, note_of(one, self.graph))
        elif one.ways:
            kinds = "_".join(dict.fromkeys(f"{step.kind.value}_{'_'.join(step.axes)}" for step in one.ways))
            module = ReshardModule(LocalReshard.bind(found, self.groups), note_of(one, self.graph))
            value = self._module(f"{name}_{kinds}", module, (value,))
        begin = begin_mark(one, atoms_of(self.graph.tensors[name]), self.axes, self.groups.coordinate)
        if begin is not None:
            value = self._module(f"{name}_micro_begin", begin, (value,))
        value.meta.update({"local_shape": self._local_shape(name, one.target), VALUE: name})
        self.held[name, one.target] = value

    def _local_shape(self, name: str, layout: Sharding) -> tuple[int, ...]:
        atoms = atoms_of(self.graph.tensors[name])
        return atoms.fold(layout.local_sizes(atoms, self.axes, self.groups.coordinate))

    def _module(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> Node:
        stem = re.sub(r"\W+", "_", name).strip("_")
        stem = f"_{stem}" if stem[:1].isdigit() else stem
        unique, count = stem, 1
        while unique in self.modules:
            unique, count = f"{stem}_{count}", count + 1
        self.modules[unique] = module
        return self.out.call_module(unique, args)
