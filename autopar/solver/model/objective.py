"""The step time as a function of sums over all decisions.

`evaluate` adds up the seconds of ops and reshards and overlaps parameter traffic with computing. So the step time is a
convex function of the sums below: a linear part and a few hinges max(0, ·). A hinge is the maximum over λ in [0, 1] of
λ times its argument. With all λ fixed the function is linear in the sums and bounds the seconds of `evaluate` from
below.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from autopar.cost.overlap import OverlapCost
from autopar.solver import Floats
from autopar.solver.setting import PlanningProblem

__all__ = ["FORBIDDEN_SECONDS", "MEMORY", "MOMENTS", "Hinges", "Sum", "every_peak_gib", "peak_gib"]


class Sum(IntEnum):
    """Sums over the decisions, of one micro-batch; `EACH`: of every one; `ONCE`: of one micro-batch of a step."""

    # Computing, copies and value traffic: everything that the device waits for.
    DEVICE = 0
    # Host seconds to launch all ops.
    HOST = 1
    # Computing that parameter traffic can overlap.
    FORWARD_ROOM = 2
    BACKWARD_ROOM = 3
    FORWARD_EACH = 4
    FORWARD_ONCE = 5
    BACKWARD_EACH = 6
    BACKWARD_ONCE = 7
    OPTIMIZER = 8
    # Memory at the end of the forward, in GiB: stored tensors and saved tensors.
    KEPT_GIB = 9
    # Memory when the optimizer steps.
    STEP_GIB = 10
    # Number of broken contracts.
    FORBIDDEN = 11
    # Memory of the backward above that at its beginning: gradients and workspace of one op.
    BEGINNING_GIB = 12
    # The same at the largest product with a parameter behind all layers, less saved tensors freed by then.
    PRODUCT_GIB = 13
    # Copies of offloaded layers to the host, as many back, and the computing of these layers beside them.
    COPIES = 14
    COPIES_FORWARD_ROOM = 15
    COPIES_BACKWARD_ROOM = 16
    # Once a step: casts and copies that nothing hides, and the host seconds to launch them and parameter traffic.
    DEVICE_ONCE = 17
    HOST_ONCE = 18
    # Memory above that at the end of the forward when the last layer has been recomputed: what its ops save then, less
    # what later ops saved.
    RERUN_GIB = 19


# Sums of memory.
MEMORY = (Sum.KEPT_GIB, Sum.STEP_GIB, Sum.BEGINNING_GIB, Sum.PRODUCT_GIB, Sum.RERUN_GIB)
# Limited moments: beginning of the backward, optimizer step, backward of a large product, backward of the last layer.
MOMENTS = np.zeros((4, len(Sum)))
MOMENTS[0, [Sum.KEPT_GIB, Sum.BEGINNING_GIB]] = 1.0
MOMENTS[1, Sum.STEP_GIB] = 1.0
MOMENTS[2, [Sum.KEPT_GIB, Sum.PRODUCT_GIB]] = 1.0
MOMENTS[3, [Sum.KEPT_GIB, Sum.RERUN_GIB]] = 1.0
# More than any step: a forbidden state is chosen only if nothing else is feasible.
FORBIDDEN_SECONDS = 1e4


def peak_gib(sums: Floats) -> float:
    """Return the most memory at any moment."""
    return float(every_peak_gib(sums))


def every_peak_gib(sums: Floats) -> Floats:
    """Return the peak memory of each row of sums."""
    return np.asarray((sums @ MOMENTS.T).max(axis=-1))


@dataclass(frozen=True, eq=False)
class Hinges:
    """base · sums + constant + Σ max(0, slopes[k] · sums + offsets[k])"""

    base: Floats
    constant: float
    slopes: Floats
    offsets: Floats

    @staticmethod
    def of(setting: PlanningProblem) -> Hinges:
        # The stages of a pipeline share the work.
        (passes, ends, tail), count = setting.shares, setting.options.micro_batches
        has_stages = setting.call is not None and setting.call.pipelining is not None
        device, overlap = setting.cluster.device, OverlapCost.of(setting.cluster)
        occupied = overlap.occupied
        base = np.zeros(len(Sum))
        base[Sum.DEVICE], base[Sum.FORBIDDEN] = passes, FORBIDDEN_SECONDS
        base[Sum.DEVICE_ONCE] = setting.stored_share
        waits = {Sum.HOST: 1.0, Sum.DEVICE: -1.0}
        hinges: list[tuple[dict[Sum, float], float]] = []
        if has_stages:
            hinges.append(({key: passes * value for key, value in waits.items()}, 0.0))
        else:  # what is launched once a step is launched beside one of the micro-batches
            hinges.append(({**waits, Sum.HOST_ONCE: 1.0, Sum.DEVICE_ONCE: -1.0}, 0.0))
            if count > 1:
                hinges.append(({key: (count - 1) * value for key, value in waits.items()}, 0.0))
        ways = (
            (Sum.FORWARD_ROOM, Sum.FORWARD_EACH, Sum.FORWARD_ONCE),
            (Sum.BACKWARD_ROOM, Sum.BACKWARD_EACH, Sum.BACKWARD_ONCE),
        )
        for room, each, once in ways:
            base[each] += occupied * passes
            beside = {each: 1.0, room: -overlap.overlap_fraction}
            apart = passes if has_stages else count - 1
            if apart:
                hinges.append(({key: apart * (1 - occupied) * value for key, value in beside.items()}, 0.0))
            if has_stages:
                # What stages send while they wait costs nothing.
                hinges.append(({once: ends, room: -ends * tail * overlap.overlap_fraction}, 0.0))
            else:
                base[once] += occupied
                hinges.append(({key: (1 - occupied) * value for key, value in {**beside, once: 1.0}.items()}, 0.0))
        if setting.trains and "offload" in setting.modes:
            for room in (Sum.COPIES_FORWARD_ROOM, Sum.COPIES_BACKWARD_ROOM):
                hinges.append(({Sum.COPIES: passes, room: -passes}, 0.0))
        constant = 0.0
        if setting.trains and any(tensor.requires_grad for tensor in setting.graph.parameters):
            constant = device.op_seconds + device.launch_seconds
            hinges.append(({Sum.OPTIMIZER: setting.stored_share}, device.start_seconds - device.launch_seconds))
        slopes = np.zeros((len(hinges), len(Sum)))
        for row, (terms, _) in enumerate(hinges):
            for key, value in terms.items():
                slopes[row, key] = value
        return Hinges(base, constant, slopes, np.array([offset for _, offset in hinges]))

    def seconds(self, sums: Floats) -> float:
        return float(self.every_seconds(sums))

    def every_seconds(self, sums: Floats) -> Floats:
        """Return the seconds of each row of sums."""
        beside = np.maximum(0.0, sums @ self.slopes.T + self.offsets).sum(axis=-1)
        return np.asarray(sums @ self.base + self.constant + beside)

    def weights(self, prices: Floats) -> tuple[Floats, float]:
        """Return the linear function of the sums at fixed λ: slopes and constant."""
        return self.base + prices @ self.slopes, self.constant + float(prices @ self.offsets)
