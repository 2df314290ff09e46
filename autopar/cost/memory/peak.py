"""What one device holds in a step, by what fills it, and the most at any moment.

The forward and the backward are followed op by op (`autopar/cost/memory/backward.py`), for eager mode: a compiled
module keeps what its partitioner chooses. The optimizer's states are there from the second step on, and so they count
in every one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from autopar.cost.compute.optimizers import Optimizer, optimizer_of
from autopar.cost.costs import MemoryCosts
from autopar.cost.memory.backward import StepMemory
from autopar.cost.step.lowered_step import LoweredStep
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode, NamedTensor
from autopar.sharding.assignment import StepPlan
from autopar.sharding.atoms import atoms_of

__all__ = ["MemoryMoment", "memory", "memory_over_time"]


@dataclass(frozen=True)
class MemoryMoment:
    """What is held while something is done; what parameters, copies, optimizer and inputs take is the same in all."""

    doing: str
    bytes: float
    """The most, of all kinds."""
    gradients_bytes: float
    """Of parameters, those that are there when it is done."""


def memory(wired: LoweredStep) -> MemoryCosts:
    """The bytes of one step, on the rank that holds most."""
    graph, plan = wired.graph, wired.plan
    trains = graph.exported.grad_enabled
    run = StepMemory(wired)
    run.forward()
    inputs = parameters = 0.0
    for (name, _), storage in run.given.items():
        if graph.tensors[name].kind == "input":
            inputs += run.storages.sizes[storage]
        else:
            parameters += run.storages.sizes[storage]
    copies = sum(run.storages.sizes[storage] for storage in run.copied.values())
    buffers = sum(run.storages.sizes[storage] for storage in run.sums.values())
    saved = run.storages.live - inputs - parameters - copies - buffers
    if not trains:
        return MemoryCosts(parameters, copies, 0.0, 0.0, inputs, 0.0, run.storages.peak, run.storages.peak_at)
    run.backward()
    gradients = run.gradient_bytes()
    states, largest = _optimizer_bytes(graph, plan, optimizer_of(plan.optimizer))
    held = parameters + copies + inputs + states
    moments = {
        run.storages.peak_at: run.storages.peak + states,
        "the optimizer": held + gradients + largest,
    }
    at = max(moments, key=lambda moment: moments[moment])
    return MemoryCosts(parameters, copies, gradients, states, inputs, saved, moments[at], at)


def memory_over_time(wired: LoweredStep) -> tuple[MemoryMoment, ...]:
    """What is held while each op runs, in the order of the step."""
    graph, plan = wired.graph, wired.plan
    run = _GradientWatch(wired)
    run.forward()
    first = sum(run.storages.sizes[storage] for storage in run.sums.values())
    states = 0.0
    if graph.exported.grad_enabled:
        run.backward()
        states, _ = _optimizer_bytes(graph, plan, optimizer_of(plan.optimizer))
    found = {**dict.fromkeys(run.storages.moments, first), **run.gradients_after}
    return tuple(
        MemoryMoment(doing, held + states, found[doing]) for doing, held in run.storages.moments.items() if doing
    )


class _GradientWatch(StepMemory):
    """Notes which gradients of parameters are there after each op."""

    def __init__(self, wired: LoweredStep) -> None:
        super().__init__(wired)
        self.gradients_after: dict[str, float] = {}
        self.stored = {tensor.name for tensor in self.graph.parameters}

    def _op_backward(self, node: NamedNode) -> None:
        super()._op_backward(node)
        there = {storage for (name, _), storage in self.gradients.items() if name in self.stored}
        there |= set(self.sums.values())
        self.gradients_after[self.storages.now] = sum(self.storages.sizes[storage] for storage in there)


def _optimizer_bytes(graph: NamedGraph, plan: StepPlan, optimizer: Optimizer) -> tuple[float, float]:
    """Its states; and what it holds in between for the largest parameter, which it steps one by one."""
    states = largest = 0.0
    for tensor in graph.parameters:
        if tensor.requires_grad:
            itemsize = (plan.master_dtype or tensor.dtype).itemsize
            shape = _local_shape(tensor, plan)
            count = prod(shape)
            states += optimizer.states * count * itemsize
            if optimizer.factored:
                states += _factored(shape) * itemsize
            largest = max(largest, optimizer.temporaries * count * itemsize)
    return states, largest


def _local_shape(tensor: NamedTensor, plan: StepPlan) -> tuple[int, ...]:
    atoms, stored = atoms_of(tensor), plan.assignment.stored[tensor.name]
    return atoms.fold(stored.largest_sizes(atoms, plan.axes))


def _factored(shape: tuple[int, ...]) -> int:
    """A number for each row and one for each column of the last two dims; all of what has one dim."""
    if len(shape) < 2:
        return prod(shape)
    return prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]
