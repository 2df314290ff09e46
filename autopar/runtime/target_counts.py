"""Number of targets that a host passes beside local inputs, and by which the model divides its loss.

`Trainer` counts the targets of all accumulated steps, so that their loss is a mean over all of them. Beside local
inputs the count is that of this rank, as the targets are, and ranks add theirs up. `Trainer` itself adds up, too. Then
it multiplies the loss by the number of ranks, since DistributedDataParallel divides gradients by it. Both factors
cancel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.ir.exported import Exported
from autopar.runtime.agreement import Agreement
from autopar.runtime.compiled_call import CallSignature, CompiledCall
from autopar.runtime.shards import LocalShard

__all__ = ["COUNT", "check_read", "has_count", "with_sum", "with_tensor"]

# Input of the models of transformers, as `Trainer` calls it.
COUNT = "num_items_in_batch"
UNREAD = (
    "the model takes {count} and does not divide its loss by it: Trainer multiplies the loss by the number of ranks "
    "then, so all gradients would be too large\n"
    "fix: accepts_loss_kwargs = False in the class of the model, or divide the sum over targets by {count} where it "
    "is given"
)


def has_count(given: CallSignature, local_inputs: bool) -> bool:
    """Return whether a call brings this rank's number of targets."""
    return local_inputs and not given.part and COUNT in given.flat.paths


def with_tensor(named: Mapping[str, Any], local_inputs: bool) -> dict[str, Any]:
    """Return the keyword arguments of a call, with a number of targets as a tensor, which can be added up."""
    found = named.get(COUNT)
    return {**named, COUNT: torch.tensor(found)} if local_inputs and isinstance(found, int | float) else dict(named)


def check_read(exported: Exported) -> None:
    """Raise if a graph computes a loss and does not read the number of targets."""
    nodes = exported.graph_module.graph.find_nodes(op="placeholder")
    read = {p.name: bool(node.users) for p, node in zip(exported.placeholders, nodes, strict=True)}
    if read.get("labels") and not read[COUNT]:
        raise AutoparError(UNREAD.format(count=COUNT))


def with_sum(given: CallSignature, call: CompiledCall, agreement: Agreement) -> CallSignature:
    """Return a call with the number of targets of all ranks; all of them are here together."""
    if agreement.group is None:
        return given
    tensors, at = list(given.tensors), given.flat.paths.index(COUNT)
    total = tensors[at].detach().to(agreement.device, copy=True)
    dist.all_reduce(total, group=agreement.group)
    # Ranks that share rows count the same targets.
    shards = max(_shards(call.held[name]) for name in call.inputs)
    tensors[at] = (total * shards / agreement.size).to(total.dtype)
    return replace(given, flat=replace(given.flat, tensors=tuple(tensors)))


def _shards(place: LocalShard) -> int:
    return prod(place.mesh[axis].size() for axes in place.layout.splits for axis in axes)
