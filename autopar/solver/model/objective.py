"""What a step takes, from a few sums over everything that is decided.

`evaluate` adds up what ops and conversions take, and hides what is sent of parameters behind the computing, as far as
it goes. So its seconds are a function of the sums below, and a convex one: a linear part and a few hinges max(0, ·). A
hinge is the maximum over λ in [0, 1] of λ times what it is about; with all λ fixed the whole is linear in the sums, and
no more than the seconds of `evaluate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from autopar.cost.evaluate import OverlapCost
from autopar.solver.arrays import Floats
from autopar.solver.setting import PlanningProblem

__all__ = ["FORBIDDEN_SECONDS", "HOST", "MEMORY", "MOMENTS", "Hinges", "Sum", "every_peak_gib", "peak_gib"]


class Sum(IntEnum):
    """What is summed, of one micro-batch; `EACH`: in every one; `ONCE`: in one of a step."""

    DEVICE = 0
    """Computing, copies, and what is sent of values: whatever the device waits for."""
    HOST = 1
    """What the host takes to launch it all."""
    FORWARD_ROOM = 2
    """Computing, beside which parameters can be sent."""
    BACKWARD_ROOM = 3
    FORWARD_EACH = 4
    FORWARD_ONCE = 5
    BACKWARD_EACH = 6
    BACKWARD_ONCE = 7
    OPTIMIZER = 8
    KEPT_GIB = 9
    """Memory at the end of the forward, in GiB: what is stored, and what the backward needs."""
    STEP_GIB = 10
    """Memory when the optimizer steps."""
    FORBIDDEN = 11
    """How often a promise of the layout is broken."""
    BEGINNING_GIB = 12
    """Memory that the backward takes beside that where it begins: gradients at one op, and what it holds."""
    PRODUCT_GIB = 13
    """The same at the largest product with a parameter behind all layers, less what is gone by then."""


HOST = 0
"""The hinge of the host: it has a price where launching takes longer than what is launched."""
MEMORY = (Sum.KEPT_GIB, Sum.STEP_GIB, Sum.BEGINNING_GIB, Sum.PRODUCT_GIB)
"""The sums that are of memory."""
MOMENTS = np.zeros((3, len(Sum)))
"""What is limited: memory where the backward begins, when the optimizer steps, and at a large product's backward."""
MOMENTS[0, [Sum.KEPT_GIB, Sum.BEGINNING_GIB]] = 1.0
MOMENTS[1, Sum.STEP_GIB] = 1.0
MOMENTS[2, [Sum.KEPT_GIB, Sum.PRODUCT_GIB]] = 1.0
FORBIDDEN_SECONDS = 1e4
"""More than any step takes: what a layout forbids is chosen only where nothing else can be had."""


def peak_gib(sums: Floats) -> float:
    """The most memory at any moment."""
    return float(every_peak_gib(sums))


def every_peak_gib(sums: Floats) -> Floats:
    """Of each row of sums."""
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
        count = setting.options.micro_batches
        device, overlap = setting.cluster.device, OverlapCost.of(setting.cluster)
        occupied = overlap.occupied
        base = np.zeros(len(Sum))
        base[Sum.DEVICE], base[Sum.FORBIDDEN] = count, FORBIDDEN_SECONDS
        hinges: list[tuple[dict[Sum, float], float]] = [({Sum.HOST: count, Sum.DEVICE: -count}, 0.0)]
        ways = (
            (Sum.FORWARD_ROOM, Sum.FORWARD_EACH, Sum.FORWARD_ONCE),
            (Sum.BACKWARD_ROOM, Sum.BACKWARD_EACH, Sum.BACKWARD_ONCE),
        )
        for room, each, once in ways:
            base[each] += occupied * count
            base[once] += occupied
            beside = {each: 1.0, room: -overlap.overlap_fraction}
            if count > 1:
                hinges.append(({key: (count - 1) * (1 - occupied) * value for key, value in beside.items()}, 0.0))
            hinges.append(({key: (1 - occupied) * value for key, value in {**beside, once: 1.0}.items()}, 0.0))
        constant = 0.0
        if setting.trains and any(tensor.requires_grad for tensor in setting.graph.parameters):
            constant = device.op_seconds + device.launch_seconds
            hinges.append(({Sum.OPTIMIZER: 1.0}, -device.launch_seconds))
        slopes = np.zeros((len(hinges), len(Sum)))
        for row, (terms, _) in enumerate(hinges):
            for key, value in terms.items():
                slopes[row, key] = value
        return Hinges(base, constant, slopes, np.array([offset for _, offset in hinges]))

    def seconds(self, sums: Floats) -> float:
        return float(self.every_seconds(sums))

    def every_seconds(self, sums: Floats) -> Floats:
        """Of each row of sums."""
        beside = np.maximum(0.0, sums @ self.slopes.T + self.offsets).sum(axis=-1)
        return np.asarray(sums @ self.base + self.constant + beside)

    def weights(self, prices: Floats) -> tuple[Floats, float]:
        """The linear function of the sums at some λ: its slopes, and its constant."""
        return self.base + prices @ self.slopes, self.constant + float(prices @ self.offsets)
