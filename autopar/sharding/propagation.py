"""Propagate a layout through a graph without a solver: each op in turn takes the choice that sends least.

A layout splits tensors. It names neither the choice of each op nor the place where a sum is reduced. Propagation visits
the ops in the order of the graph and ranks the choices of each op by three criteria:

1. the number of axes that split a factor, so that split tensors are worked on in parallel;
2. the bytes sent, forward and backward, by reshards of operands and results and by the op itself;
3. the order of the factors in the rule.

Sums are reduced where they arise and broadcasts begin where they are used, unless a pin says otherwise; then they move
to smaller tensors (`move_sums`). For `?{tp, dp*tp}` and `tp?` it picks that with which the whole graph sends least.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf, prod

from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.ir.invariants import verifying
from autopar.ir.values import NamedNode, NamedTensor
from autopar.mesh import SubMesh
from autopar.sharding.assignment import Assignment, OpAssignment
from autopar.sharding.bound_layout import BoundLayout, close_request, matches
from autopar.sharding.choices import Passing, Site, can_split, choices, passings_of, shardings_of, sites_of
from autopar.sharding.layout.fill_open import fill_from, fill_holes, options_of
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.parameter_storage import GatherPolicy
from autopar.sharding.layout.resolve import UNPINNED, SplitRequest
from autopar.sharding.layout.syntax import Axes, OpPin, Pin
from autopar.sharding.lift_broadcasts import lift_broadcasts
from autopar.sharding.lowered_ops import lowered_context
from autopar.sharding.move_sums import move_sums
from autopar.sharding.op_pins import allows, infeasible_pin, pinned_passings, pinned_sites, uneven_sites
from autopar.sharding.pipelining import (
    check_pipeline,
    needs_micro_batches,
    with_default_micro,
    with_stages,
    without_stages,
)
from autopar.sharding.reshard.reshard import NoSteps, reshard
from autopar.sharding.sharding import MICRO, Atoms, Sharding, atoms_of, with_time
from autopar.sharding.shares import with_shares
from autopar.sharding.verify import verify_assignment

# Reshard of a tensor, or the messages inside of an op, which has no shardings.
_Sent = tuple[str, Sharding | None, Sharding | None]


class PropagationCache:
    """Cache of propagations of one graph on one mesh under several layouts.

    Ops that are equal up to names, with equal shardings and requests, share a choice. Layouts with equal requests for
    every tensor share an assignment. Layouts with other stages or micro-batches have a cache of their own.
    """

    def __init__(self) -> None:
        self.in_time: dict[Hashable, PropagationCache] = {}
        self.ops: dict[Hashable, OpAssignment] = {}
        self.assignments: dict[Hashable, Assignment] = {}
        self.sent_numel: dict[tuple[Atoms, bool, Sharding, Sharding], float] = {}


def propagate(graph: NamedGraph, layout: Layout, axes: SubMesh, cache: PropagationCache | None = None) -> Assignment:
    """Return the assignment of a graph under a layout."""
    layout = _with_micro_batches(graph, layout, axes)
    check_pipeline(layout, axes)
    micro = layout.micro_batches
    count, halves = (1, False) if micro is None else (micro.parts, micro.halves)
    graph, ranks = with_shares(graph, layout, axes, count)
    axes = with_time(without_stages(layout, ranks), count)
    bound = BoundLayout(graph, layout, axes)
    in_time = tuple(axes.items()), halves, axes.shares, layout.pipeline, layout.cut, layout.part_pins
    shared = cache is not None
    cache = (cache or PropagationCache()).in_time.setdefault(in_time, PropagationCache())
    options = options_of(bound.whole, axes)
    # With holes the picks depend on the whole graph, so such a layout is not looked up; nor is one by itself.
    key = None if options or not shared else bound.equivalence_key()
    if key is not None and key in cache.assignments:
        return cache.assignments[key]
    found = _HoleFiller(bound, options, cache).run() if options else _Propagation(bound, cache).run()
    found = replace(move_sums(bound, found, bound.pinned_ops()), halves=halves)
    found = with_stages(graph, layout, ranks, found)
    if verifying():
        verify_assignment(graph, found)
    if key is not None:
        cache.assignments[key] = found
    return found


def _with_micro_batches(graph: NamedGraph, layout: Layout, axes: SubMesh) -> Layout:
    """Return the layout with a number of micro-batches where it has stages and names none."""
    if not needs_micro_batches(layout, axes):
        return layout
    graph, axes = with_shares(graph, layout, axes)
    return with_default_micro(graph, layout, axes)


def propagate_partly(
    graph: NamedGraph, layout: Layout, axes: SubMesh, decided: Assignment, cache: PropagationCache | None = None
) -> tuple[Assignment, frozenset[str]]:
    """Return the assignment of a layout without holes, and the ops that it leaves undecided.

    These keep their assignments in `decided`.
    """
    bound = BoundLayout(graph, layout, axes)
    propagation = _Propagation(bound, cache or PropagationCache())
    found = propagation.run(decided)
    undecided = frozenset(propagation.undecided)
    return move_sums(bound, found, bound.pinned_ops() | undecided), undecided


def reassign_ops(
    graph: NamedGraph, layout: Layout, known: Assignment, ops: Collection[str], uses_stay: bool = True
) -> Assignment:
    """Return an assignment with some ops and pinned stored tensors decided anew.

    The layout gives the shardings of the results of these ops. All else stays as known; with `uses_stay`, also the
    shardings in which the ops use parameters.
    """
    propagation = _Propagation(BoundLayout(graph, layout, known.axes, constrained=False), PropagationCache())
    propagation.stored, propagation.values = dict(known.stored), dict(known.values)
    propagation.ops, propagation.gather_policies = dict(known.ops), dict(known.gather_policies)
    pinned = {statement.glob for statement in layout if isinstance(statement, Pin)}
    nodes = [node for node in graph.nodes if node.name in ops]
    for name in dict.fromkeys(name for node in nodes for name in (*node.operands, *node.outputs) if name is not None):
        tensor = graph.tensors[name]
        propagation.bound.states(tensor)  # raises for a pin that cannot hold
        if name in pinned and tensor.kind != "activation":
            propagation._store(tensor)
        elif tensor.kind == "param" and uses_stay:
            propagation.used[name] = known.values[name].splits
    for node in nodes:
        propagation._decide(node)
    found = replace(
        known,
        stored=propagation.stored,
        values=propagation.values,
        ops=propagation.ops,
        gather_policies=propagation.gather_policies,
    )
    return lift_broadcasts(graph, found, {node.name for node in graph.nodes if node.name not in ops})


def reassign_storage(graph: NamedGraph, layout: Layout, known: Assignment, name: str) -> Assignment:
    """Return an assignment with one parameter stored by the layout; its use stays."""
    held = BoundLayout(graph, layout, known.axes, constrained=False).storage(graph.tensors[name])
    assert held.gather_policy is not None, f"{name} is a parameter"
    stored, gather_policies = {**known.stored, name: held.stored}, {**known.gather_policies, name: held.gather_policy}
    return replace(known, stored=stored, gather_policies=gather_policies)


# Combinations of picks that are all tried, each by a propagation; beyond, places are improved one at a time.
MOST_TRIED = 32


class _HoleFiller:
    """Search for the picks of a layout with which the whole graph sends least."""

    def __init__(self, bound: BoundLayout, options: list[tuple[Axes, ...]], cache: PropagationCache) -> None:
        self.bound = bound
        self.options = options
        self.cache = cache
        self.tried: dict[tuple[Axes, ...], tuple[float, Assignment | LayoutError]] = {}

    def run(self) -> Assignment:
        if prod(map(len, self.options)) <= MOST_TRIED:
            best = min(product(*self.options), key=self._sent_bytes)
        else:
            best = self._in_turn()
        _, found = self.tried[best]
        if isinstance(found, LayoutError):
            raise found
        return found

    def _in_turn(self) -> tuple[Axes, ...]:
        """Return picks that no change of a single place improves."""
        best = tuple(options[0] for options in self.options)
        changed = True
        while changed:
            before = best
            for place, options in enumerate(self.options):
                best = min(
                    (best, *((*best[:place], option, *best[place + 1 :]) for option in options)), key=self._sent_bytes
                )
            changed = best != before  # `min` takes the first of equals, which is `best`, so the loop ends
        return best

    def _sent_bytes(self, picks: tuple[Axes, ...]) -> float:
        """Return the bytes that the graph sends with these picks, infinite if infeasible."""
        if picks not in self.tried:
            try:
                layout = fill_holes(self.bound.whole, self.bound.axes, picks)
                bound = BoundLayout(self.bound.graph, layout, self.bound.axes, constrained=False)
                propagation = _Propagation(bound, self.cache)
                assignment = propagation.run()
                self.tried[picks] = propagation.sent_bytes(), assignment
            except LayoutError as error:
                self.tried[picks] = inf, error
        return self.tried[picks][0]


class _Propagation:
    def __init__(self, bound: BoundLayout, cache: PropagationCache) -> None:
        self.bound = bound
        self.graph = bound.graph
        self.axes = bound.axes
        self.cache = cache
        self.stored: dict[str, Sharding] = {}
        self.values: dict[str, Sharding] = {}
        self.used: dict[str, SplitRequest] = {}
        self.ops: dict[str, OpAssignment] = {}
        self.gather_policies: dict[str, GatherPolicy] = {}
        self.undecided: set[str] = set()

    def run(self, decided: Assignment | None = None) -> Assignment:
        for tensor in self.graph.tensors.values():
            self.bound.states(tensor)  # raises for a pin that cannot hold
            if tensor.kind != "activation":
                self._store(tensor)
        for node in self.graph.nodes:
            try:
                self._decide(node)
            except LayoutError:
                if decided is None:
                    raise
                # The requests alone are infeasible for this op: it keeps the choice that is known to work.
                self.undecided.add(node.name)
                self._take(node, decided.ops[node.name])
        recompute = {layer: level for layer, level in self.bound.recompute.items() if level != "none"}
        return Assignment(SubMesh.of(self.axes), self.stored, self.ops, self.values, self.gather_policies, recompute)

    def _store(self, tensor: NamedTensor) -> None:
        held = self.bound.storage(tensor)
        self.stored[tensor.name], self.values[tensor.name] = held.stored, held.value
        if held.gather_policy is not None and held.use is not None:
            self.gather_policies[tensor.name], self.used[tensor.name] = held.gather_policy, held.use

    def _decide(self, node: NamedNode) -> None:
        """Assign a choice to an op: the cached one of an op in equal circumstances, or the best."""
        targets = [None if name is None else self._target(self.graph.tensors[name]) for name in node.outputs]
        pin = self.bound.pin(node)
        key = self._circumstances(node, targets, pin)
        if key not in self.cache.ops:
            self.cache.ops[key] = self._best(node, targets, pin)
        self._take(node, self.cache.ops[key])

    def _circumstances(self, node: NamedNode, targets: Sequence[SplitRequest | None], pin: OpPin | None) -> Hashable:
        """Return everything that the choice of an op depends on."""
        operands: list[Hashable] = []
        for name in node.operands:
            if name is not None and name in self.stored:
                states = self.bound.states(self.graph.tensors[name])
                operands.append((self.values[name], self.stored[name], self.used.get(name), states.broadcast))
            else:
                operands.append(None if name is None else self.values[name])
        results: list[Hashable] = []
        for name, target in zip(node.outputs, targets, strict=True):
            states = UNPINNED if name is None else self.bound.states(self.graph.tensors[name])
            results.append((target, states.partial, states.broadcast))
        pinned = None if pin is None else (pin.choice, pin.uneven)
        # `forms` numbers the ops, equal for those that differ in names only.
        return self.graph.forms[node.name], tuple(operands), tuple(results), pinned

    def _best(self, node: NamedNode, targets: list[SplitRequest | None], pin: OpPin | None) -> OpAssignment:
        """Return the choice that splits by most axes, then sends least, then comes first."""
        best: tuple[tuple[int, float], OpAssignment] | None = None
        sites, uneven = self._candidates(node, targets)
        passing = self._passing(node)
        if pin is not None:
            in_time = {axis: found for axis, found in sites.items() if axis == MICRO}
            sites, uneven = {**in_time, **pinned_sites(pin, node)}, uneven | uneven_sites(pin, node)
            passing = {**passing, **pinned_passings(pin, node)}
        # By the first criterion: no choice of fewer axes is priced once one is found.
        for choice in sorted(choices(node, sites, self.axes, uneven, passing), key=lambda one: -len(one.axes)):
            if best is not None and (len(choice.axes) < -best[0][0] or not best[0][1]):
                break
            if pin is not None and not allows(pin, choice, node):
                continue
            found = shardings_of(self.graph, node, choice)
            if found is None:
                continue
            operands, produced = found
            # A pin of the op comes before rules about the use of its parameters.
            if not self._uses_agree(node, operands, broadcasts_only=pin is not None):
                continue
            results = tuple(
                None
                if name is None or made is None or target is None
                else close_request(target, self.bound.states(self.graph.tensors[name]), made)
                for name, made, target in zip(node.outputs, produced, targets, strict=True)
            )
            op_assignment = OpAssignment(choice, operands, produced, results)
            sent = self._sent_below(inf if best is None else best[0][1], node, op_assignment)
            if sent is not None:
                best = (-len(choice.axes), sent), op_assignment
        if best is None and pin is not None:
            raise infeasible_pin(pin, node, self.axes, self.graph)
        if best is None:
            raise LayoutError("E5", self._no_choice(node))
        return best[1]

    def _take(self, node: NamedNode, op_assignment: OpAssignment) -> None:
        self.ops[node.name] = op_assignment
        for name, result in zip(node.outputs, op_assignment.results, strict=True):
            if name is not None and result is not None:
                self.values[name] = result

    def _target(self, tensor: NamedTensor) -> SplitRequest:
        wanted = self.bound.request(tensor)
        # Open atoms follow the tensors of a `same` that are decided already; later ones then follow this tensor.
        for group in self.bound.groups if None in wanted else ():
            if tensor.name in group:
                decided = (self.graph.tensors[name] for name in group if name in self.values)
                for other in decided:
                    wanted = fill_from(tensor, wanted, other, self.values[other.name].splits)
        return wanted

    def _candidates(
        self, node: NamedNode, targets: list[SplitRequest | None]
    ) -> tuple[dict[str, list[Site]], set[tuple[Site, Axes]]]:
        """Return the sites of each axis in operands and results, and all with their axes.

        The latter may be cut in uneven pieces, as that tensor is.
        """
        found: dict[str, list[Site]] = {axis: [] for axis in self.axes}
        whole: set[tuple[Site, Axes]] = set()
        ends = [
            *zip(node.rule.operands, node.operands, [None] * len(node.operands), strict=False),
            *zip(node.rule.outputs, node.outputs, targets, strict=True),
        ]
        for operand, name, target in ends:
            if operand is None or name is None:
                continue
            tensor = self.graph.tensors[name]
            # A result has no sharding yet, so its request stands for it.
            splits = target if target is not None else self.values[name].splits
            for site, axes in zip(sites_of(node, operand, tensor) or (), splits, strict=False):
                if site is not None and axes:
                    whole.add((site, axes))
                    for axis in axes:
                        found[axis].append(site)
        return {axis: sites for axis, sites in found.items() if sites}, whole

    def _passing(self, node: NamedNode) -> dict[str, tuple[Passing, ...]]:
        """Return the passings of axes along which a tensor is partial or broadcast."""
        tensors = (self.graph.tensors[name] for name in node.outputs if name is not None)
        axes = {axis for tensor in tensors for axis in self.bound.states(tensor).axes}
        for name in node.operands:
            if name is not None:
                axes |= self.values[name].partial | self.values[name].broadcast
        ways = passings_of(self.graph, node) if axes else ()
        return {axis: ways for axis in self.axes if axis in axes}

    def _uses_agree(self, node: NamedNode, operands: tuple[Sharding | None, ...], broadcasts_only: bool) -> bool:
        """Return whether an op takes stored tensors as the layout wants them used."""
        for name, wanted in zip(node.operands, operands, strict=True):
            if name is None or wanted is None or name not in self.stored:
                continue
            if not self.bound.states(self.graph.tensors[name]).broadcast <= wanted.broadcast:
                return False
            if name not in self.used or broadcasts_only:
                continue
            if not matches(self.used[name], wanted.splits):
                return False
        return True

    def sent_bytes(self) -> float:
        """Return the bytes that all ops send; ops of equal needs share a reshard."""
        # By tensor and shardings, so that a reshard that several ops share counts once.
        found = dict(one for node in self.graph.nodes for one in self._sent(node, self.ops[node.name]))
        return sum(found.values())

    def _sent_below(self, least: float, node: NamedNode, op_assignment: OpAssignment) -> float | None:
        """Return the bytes sent for one op; None if they are not below the least so far."""
        found: dict[_Sent, float] = {}
        for one, size in self._sent(node, op_assignment):
            found[one] = size
            if sum(found.values()) >= least:
                return None
        return sum(found.values())

    def _sent(self, node: NamedNode, op_assignment: OpAssignment) -> Iterator[tuple[_Sent, float]]:
        """Yield the bytes sent for one op, with the reshards of its operands and results."""
        for name, wanted in zip(node.operands, op_assignment.operands, strict=True):
            if name is not None and wanted is not None:
                source = self.stored.get(name, self.values[name])
                yield (name, source, wanted), self._bytes(self.graph.tensors[name], source, wanted)
        split = lowered_context(self.graph, node, op_assignment.choice.splits, op_assignment.operands, self.axes)
        if split is not None:
            found = ((one.reshard.sent_numel(one.differentiable), one.itemsize) for one in split.messages())
            yield (node.name, None, None), sum(numel * itemsize for numel, itemsize in found)
        for name, produced, result in zip(node.outputs, op_assignment.produced, op_assignment.results, strict=True):
            if name is not None and produced is not None and result is not None:
                yield (name, produced, result), self._bytes(self.graph.tensors[name], produced, result)

    def _bytes(self, tensor: NamedTensor, source: Sharding, target: Sharding) -> float:
        atoms = atoms_of(tensor)
        # Elements instead of bytes, so that tensors of all dtypes share the result.
        key = atoms, tensor.requires_grad, source, target
        priced = self.cache.sent_numel
        if key not in priced:
            try:
                priced[key] = reshard(atoms, source, target, self.axes).sent_numel(tensor.requires_grad)
            except NoSteps:
                priced[key] = inf
        return priced[key] * tensor.element_bytes

    def _no_choice(self, node: NamedNode) -> str:
        """Return the message for an op that cannot use its parameters as requested."""
        used: list[str] = []
        reasons: dict[str, None] = {}
        for operand, name in zip(node.rule.operands, node.operands, strict=False):
            if operand is None or name is None or name not in self.used:
                continue
            tensor = self.graph.tensors[name]
            places = [
                f"{atom.names[0] if atom.names else f'dim {atom.dim}'} -> {'*'.join(axes)}"
                for atom, axes in zip(tensor.atoms, self.values[name].splits, strict=True)
                if axes
            ]
            used.append(f"{tensor} used {'with ' + ', '.join(places) if places else 'whole'}")
            sites = sites_of(node, operand, tensor) or (None,) * len(tensor.atoms)
            for site, atom, axes in zip(sites, tensor.atoms, self.values[name].splits, strict=True):
                if axes:
                    reasons[self._in_the_way(node, site, atom.size, axes)] = None
        return (
            f"E5: the op {node.name} ({node.op}) cannot be split as the layout requires: {', '.join(used)}\n"
            f"  rule  {node.rule}\n"
            f"  line  {node.origin.source}: {node.origin.source_code}\n"
            f"{''.join(f'  {reason}' + chr(10) for reason in reasons)}"
            "fix: split another dim of these parameters where they are used, or none: use @name { * -> none }"
        )

    def _in_the_way(self, node: NamedNode, site: Site | None, extent: int, axes: tuple[str, ...]) -> str:
        count = prod(self.axes[axis] for axis in axes)
        over = f"{'*'.join(axes)} = {count}"
        if site is None:
            return f"the op does not cut this dim as its tensors do, so {over} cannot split it"
        if extent % count and node.source == "discovered":
            return (
                f"the factor {site[0]} has {extent}, which {over} does not divide: its rule was found for even shards"
            )
        if can_split(node, site, axes, self.axes, uneven=True):
            return f"the factor {site[0]} can be split by {over}, but not with what its other operands or results need"
        return f"the factor {site[0]} cannot be split by {over}: the op needs all of it"
