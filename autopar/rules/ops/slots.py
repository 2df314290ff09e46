"""Rows by group in a fixed number of slots: dispatch with a capacity, and the way back.

Each sample has `slots` slots of each group. Its first rows of a group take them, and further ones are dropped. Samples
do not depend on each other, so the result is the same on every mesh.

Input::

    y = combine(grouped(dispatch(x, key), up), key)
Output::

    y = put_slots(grouped(take_slots(x, key, groups, slots), up), key)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample
from autopar.rules.shard_call.slots import put_slots, take_slots
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "PUT_SLOTS", "TABLE", "TAKE_SLOTS"]

_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("take_slots(Tensor rows, Tensor key, int groups, int slots) -> Tensor")
_LIBRARY.define("put_slots(Tensor rows, Tensor key) -> Tensor")
_LIBRARY.impl("take_slots", take_slots, "CompositeImplicitAutograd")
_LIBRARY.impl("put_slots", put_slots, "CompositeImplicitAutograd")

TAKE_SLOTS = torch.ops.autopar.take_slots.default
PUT_SLOTS = torch.ops.autopar.put_slots.default


def _take_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for slots in (1, 3):  # rows are dropped, slots are empty
        yield make_sample(op, [Draw((6, 7, 5)), Draw((6, 7), "index", 4)], {"groups": 4, "slots": slots}, tries)


def _put_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for slots in (1, 3):
        yield make_sample(op, [Draw((4, 6, slots, 5)), Draw((6, 7), "index", 4)], {}, tries)


TABLE = """
autopar.take_slots.default   take_slots
autopar.put_slots.default    put_slots
"""

FAMILIES = {
    "take_slots": OpFamily(
        lambda call: "b s! k, b s! -> g b c! k; linear 0; localise groups=g; lower g own_groups", _take_samples
    ),
    "put_slots": OpFamily(lambda call: "g b c! k, b s! -> b s! k; linear 0; lower g own_groups", _put_samples),
}
