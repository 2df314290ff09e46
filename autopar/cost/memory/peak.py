"""Memory of one device in a step, by category and at the peak, and the memory limit of a layout.

The simulator follows forward and backward op by op (`autopar/cost/memory/step_memory.py`), in eager mode: a compiled
module saves the tensors that its partitioner chooses. Optimizer states are allocated in the first step and counted in
all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import itemgetter

from autopar.cost.compute.optimizers import Optimizer, optimizer_of
from autopar.cost.lowered_step import LoweredStep, lower_step
from autopar.cost.memory.step_memory import StepMemory
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.sharding.assignment import StepPlan
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.source import layout_error
from autopar.sharding.layout.syntax import Limit
from autopar.sharding.schedules import BackwardHalf, TaskKind, most_kept
from autopar.sharding.sharding import atoms_of

_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}


@dataclass(frozen=True)
class MemoryCosts:
    """Bytes of the device that has most, by category."""

    # Parameters and buffers as they are stored, in the dtype that the optimizer updates.
    parameters_bytes: float
    # Copies of parameters that live for all forwards and backwards: gathered, or in the dtype of the compute.
    copies_bytes: float
    # Gradients at the end of the backward.
    gradients_bytes: float
    optimizer_bytes: float
    inputs_bytes: float
    # Tensors alive between forward and backward of one micro-batch, with gathered parameters and results.
    saved_bytes: float
    # Most bytes at any moment of a step, and the name of that moment: `the backward of head/linear`.
    peak_bytes: float
    peak_at: str
    # Anchors, momenta and buffers of replicas that drift.
    meetings_bytes: float = 0.0
    # On the host of the device: saved tensors of offloaded layers, and states of the optimizer that are offloaded.
    host_bytes: float = 0.0
    # Of the saved tensors, the results of all micro-batches of a call, which last until its end.
    results_bytes: float = 0.0

    def with_rows(self, share: float) -> MemoryCosts:
        """Return the memory of a replica with this share of the rows: values are in proportion, parameters are not."""
        still = self.parameters_bytes + self.copies_bytes + self.gradients_bytes + self.optimizer_bytes
        rest = share * max(0.0, self.peak_bytes - still)
        return replace(
            self,
            inputs_bytes=share * self.inputs_bytes,
            saved_bytes=share * self.saved_bytes,
            results_bytes=share * self.results_bytes,
            peak_bytes=min(self.peak_bytes, still + rest),
        )

    def with_meetings(self, kept_bytes: float, temporary_bytes: float) -> MemoryCosts:
        """Return the memory with that of meetings, which happen beside the optimizer's states and the gradients."""
        still = self.parameters_bytes + self.copies_bytes + self.gradients_bytes + self.optimizer_bytes
        moments = [(self.peak_bytes + kept_bytes, self.peak_at)]
        moments.append((still + self.inputs_bytes + kept_bytes + temporary_bytes, "a meeting of replicas"))
        peak, at = max(moments, key=itemgetter(0))
        return replace(self, peak_bytes=peak, peak_at=at, meetings_bytes=kept_bytes)


@dataclass(frozen=True)
class MemoryMoment:
    """Memory while one op runs; parameters, copies, optimizer states and inputs are constant over a step."""

    doing: str
    # Most bytes of all categories while the op runs.
    bytes: float
    # Gradients of parameters at the end of the op.
    gradients_bytes: float


@dataclass(frozen=True)
class _Simulated:
    """Bytes of one micro-batch, without others in flight."""

    parameters: float
    copies: float
    gradients: float
    optimizer: _OptimizerBytes
    inputs: float
    saved: float
    results: float
    # Of the put-off gradients of weights.
    late: float
    # Saved by offloaded layers: on the host, and still on the device when the forward has ended.
    on_host: float
    on_device: float
    # Most bytes, and when: in the forward, in the backward, and in the optimizer.
    moments: tuple[tuple[float, str], ...]
    optimizing: tuple[float, str]


def memory(step: LoweredStep) -> MemoryCosts:
    """Return the memory of one step, on the rank with most; of a stage, with the other micro-batches in flight."""
    return _in_flight_too(step, _simulated(step))


def memory_of_stages(step: LoweredStep, firsts: Sequence[int]) -> tuple[MemoryCosts, ...]:
    """Return the memory of each stage of a pipeline; those with one first are equal, and simulated once.

    Moments of the others have the names of ops in the first of them.
    """
    known = {stage: _simulated(step.at(stage)) for stage in set(firsts)}
    return tuple(_in_flight_too(step.at(stage), known[first]) for stage, first in enumerate(firsts))


def _simulated(step: LoweredStep) -> _Simulated:
    graph, plan = step.graph, step.plan
    run = StepMemory(step)
    run.forward()
    inputs = parameters = 0.0
    for (name, _), storage in run.inputs.items():
        if graph.tensors[name].kind == "input":
            inputs += run.storages.sizes[storage]
        else:
            parameters += run.storages.sizes[storage]
    copies = sum(run.storages.sizes[storage] for storage in run.copied.values())
    buffers = sum(run.storages.sizes[storage] for storage in run.sums.values())
    saved = run.storages.live - inputs - parameters - copies - buffers
    forward = run.storages.peak, run.storages.peak_at
    if not graph.exported.grad_enabled:
        nothing = _OptimizerBytes(0.0, 0.0, 0.0)
        return _Simulated(parameters, copies, 0.0, nothing, inputs, 0.0, 0.0, 0.0, 0.0, 0.0, (forward,), forward)
    optimizer = _optimizer_bytes(step, optimizer_of(plan.options.optimizer))
    states = optimizer.device
    on_device = run.host.waiting_bytes
    run.storages.peak = 0.0
    run.backward()
    backward, gradients = (run.storages.peak, run.storages.peak_at), run.gradient_bytes()
    # Copies of parameters last until the end of the backward.
    optimizing = parameters + inputs + states + gradients + optimizer.temporaries, "the optimizer"
    return _Simulated(
        parameters,
        copies,
        gradients,
        optimizer,
        inputs,
        saved,
        run.results_bytes,
        run.late_bytes,
        run.host.bytes,
        on_device,
        tuple((peak + states, at) for peak, at in (forward, backward)),
        optimizing,
    )


def _in_flight_too(step: LoweredStep, one: _Simulated) -> MemoryCosts:
    """Return the memory of a step or a stage with all micro-batches in flight, given that of one."""
    # While the forward or the backward of one runs, others wait for their backwards, and for put-off gradients. What
    # was offloaded has left the device.
    waiting = _waiting_bytes(step, one.saved - one.results - one.on_device, one.late)
    moments = [*((peak + waiting, at) for peak, at in one.moments), one.optimizing]
    peak, at = max(moments, key=itemgetter(0))
    return MemoryCosts(
        one.parameters,
        one.copies,
        one.gradients,
        one.optimizer.device,
        one.inputs,
        one.saved + waiting,
        peak,
        at,
        host_bytes=one.on_host * _in_flight(step) + one.optimizer.host,
        results_bytes=one.results,
    )


def _in_flight(step: LoweredStep) -> float:
    """Return the most micro-batches whose saved tensors a rank has at once."""
    pipelining = step.plan.assignment.pipelining
    if pipelining is None or step.stage is None:
        return 1.0
    return most_kept(step.tasks[step.stage], pipelining.chunks, 1.0, 0.0)


def _waiting_bytes(step: LoweredStep, saved_bytes: float, late_bytes: float) -> float:
    """Return the most bytes that a stage keeps for other micro-batches while one runs.

    A forward adds the tensors that it saves. A backward frees them, but for the operands of put-off gradients.
    """
    pipelining = step.plan.assignment.pipelining
    if pipelining is None or step.stage is None:
        return 0.0
    change = {None: -saved_bytes, BackwardHalf.INPUTS: late_bytes - saved_bytes, BackwardHalf.WEIGHTS: -late_bytes}
    kept = most = 0.0
    for task in step.tasks[step.stage]:
        if task.kind is TaskKind.FORWARD:
            kept += saved_bytes
            continue
        if task.half is not BackwardHalf.WEIGHTS:
            most = max(most, kept)
        kept += change[task.half]
    # A chunk counts as its share of the stage.
    return max(0.0, most / pipelining.chunks - saved_bytes)


def memory_over_time(step: LoweredStep, stage: MemoryCosts | None = None) -> tuple[MemoryMoment, ...]:
    """Return the memory while each op runs, in the order of the step.

    `stage` has the memory of a stage of a pipeline, in whose backward other micro-batches wait for theirs.
    """
    graph, plan = step.graph, step.plan
    run = _GradientWatch(step)
    run.forward()
    if stage is not None:
        known = stage.parameters_bytes + stage.copies_bytes + stage.inputs_bytes
        own = run.storages.live - known - sum(run.storages.sizes[one] for one in run.sums.values())
        waiting = max(0.0, stage.saved_bytes - own)
        run.storages.moments = {doing: alive + waiting for doing, alive in run.storages.moments.items()}
        run.storages.new(waiting)
    first = sum(run.storages.sizes[storage] for storage in run.sums.values())
    states = 0.0
    if graph.exported.grad_enabled:
        run.backward()
        states = _optimizer_bytes(step, optimizer_of(plan.options.optimizer)).device
    found = {**dict.fromkeys(run.storages.moments, first), **run.gradients_after}
    return tuple(
        MemoryMoment(doing, alive + states, found[doing]) for doing, alive in run.storages.moments.items() if doing
    )


class _GradientWatch(StepMemory):
    """Step simulator that records the gradients of parameters after each op."""

    def __init__(self, step: LoweredStep) -> None:
        super().__init__(step)
        self.gradients_after: dict[str, float] = {}
        self.parameters = {tensor.name for tensor in self.graph.parameters}

    def _op_backward(self, node: NamedNode) -> None:
        super()._op_backward(node)
        found = {storage for (name, _), storage in self.gradients.items() if name in self.parameters}
        found |= set(self.sums.values())
        self.gradients_after[self.storages.now] = sum(self.storages.sizes[storage] for storage in found)


@dataclass(frozen=True)
class _OptimizerBytes:
    """States on the device and on its host, and most bytes on the device during a step besides."""

    device: float
    host: float
    temporaries: float


# Chunks of states that are on the device at once: of the parameters that are updated, and of the next ones.
CHUNKS = 2


def _optimizer_bytes(step: LoweredStep, optimizer: Optimizer) -> _OptimizerBytes:
    plan = step.plan
    # The optimizer updates parameters one by one: only the largest temporaries count.
    states = largest = most = 0.0
    for tensor in step.graph.parameters:
        if tensor.requires_grad and (step.stage is None or tensor.name in step.tensors_here):
            itemsize = plan.options.precision.state(tensor.dtype).itemsize
            atoms, stored = atoms_of(tensor), plan.assignment.stored[tensor.name]
            shape = atoms.fold(stored.largest_sizes(atoms, plan.axes))
            count = prod(shape)
            states += optimizer.states * count * itemsize
            most = max(most, optimizer.states * count * itemsize)
            if optimizer.factored:
                # One number for each row and each column of the last two dims; a vector is stored whole.
                factors = prod(shape[:-1]) + prod(shape[:-2]) * shape[-1] if len(shape) > 1 else count
                states += factors * itemsize
            kind = tensor.stored_dtype(plan.options.precision)
            largest = max(largest, optimizer.temporaries * count * kind.itemsize)
    if plan.options.offload_states:
        return _OptimizerBytes(0.0, states, largest + min(states, CHUNKS * most))
    return _OptimizerBytes(states, 0.0, largest)


def memory_limit(layout: Layout, device_bytes: float | None) -> tuple[Limit, float] | None:
    """Return the lowest memory limit of a layout, in bytes.

    `device_bytes`, the memory of a device, resolves limits in percent.
    """
    found: list[tuple[Limit, float]] = []
    for statement in layout:
        if not isinstance(statement, Limit) or statement.quantity != "memory":
            continue
        if statement.size_bytes is not None:
            found.append((statement, float(statement.size_bytes)))
            continue
        assert statement.percent is not None, "a limit is a size or a percentage"
        if device_bytes is None:
            raise layout_error(
                "E6",
                f"unknown memory of a device in 'limit memory {statement.percent:g}%': expected a size in bytes",
                "write a size, as in 'limit memory 70GiB'",
                statement.span,
            )
        found.append((statement, statement.percent / 100 * device_bytes))
    return min(found, key=lambda pair: pair[1], default=None)


def check_memory(layout: Layout, graph: NamedGraph, plan: StepPlan, device_bytes: float | None = None) -> None:
    """Raise E6 where a step of the plan exceeds the memory limit of the layout."""
    limit = memory_limit(layout, device_bytes)
    if limit is None:
        return
    statement, most_bytes = limit
    step, pipelining = lower_step(graph, plan), plan.assignment.pipelining
    every = [step] if pipelining is None else [step.at(stage) for stage in range(pipelining.stages)]
    found, fullest = max(((memory(one), one) for one in every), key=lambda pair: pair[0].peak_bytes)
    if found.peak_bytes > most_bytes:
        parts = {
            "parameters": found.parameters_bytes + found.copies_bytes,
            "gradients": found.gradients_bytes,
            f"the states of {plan.options.optimizer}": found.optimizer_bytes,
            "tensors saved for the backward": found.saved_bytes,
        }
        listed = ", ".join(f"{name} {size_text(part)}" for name, part in parts.items())
        raise layout_error(
            "E6",
            f"out of memory: expected at most {size_text(most_bytes)} on a device, "
            f"got {size_text(found.peak_bytes)} in {found.peak_at}{_stage_text(fullest)} ({listed})",
            "split more, 'recompute full @...' or 'recompute offload @...' of layers, 'regather @*', "
            "fewer examples at a time ('micro 8'), or a higher limit",
            statement.span,
        )


def _stage_text(step: LoweredStep) -> str:
    """Return the stage, and the micro-batches whose tensors it keeps at once; empty without stages."""
    pipelining = step.plan.assignment.pipelining
    if pipelining is None or step.stage is None:
        return ""
    most = most_kept(step.tasks[step.stage], pipelining.chunks, 1.0, 0.0)
    return f" of stage {step.stage}, which has {most:g} micro-batches in flight"


def size_text(count: float) -> str:
    """Return bytes with a binary unit: `1.50 GiB`."""
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if count >= _UNITS[unit]), "B")
    return f"{count / _UNITS[unit]:.2f} {unit}"
