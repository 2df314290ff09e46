"""`bags`: sums, means or maxima of the rows that ids look up, in bags that begin where `begins` says.

It is `aten.embedding_bag` without the results that only its backward wants, so that the table can be split by its rows
and the result by bags: what falls in another shard counts with weight zero.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from autopar.rules.call import Call
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "MAX", "MEAN", "SUM", "TABLE", "own_bags", "own_rows"]

SUM, MEAN, MAX = 0, 1, 2


def bags(table: Tensor, ids: Tensor, begins: Tensor, weights: Tensor | None, mode: int, last: bool) -> Tensor:
    """Rows `[v, d]`, ids `[n]`, `begins[b]`, perhaps a weight for each id; `last`: the last of `begins` is an end."""
    found: Tensor = torch.embedding_bag(
        table, ids, begins, mode=mode, per_sample_weights=weights, include_last_offset=last
    )[0]
    return found


def own_rows(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Some rows of the table: ids of others have weight zero."""
    ids = local.arguments["ids"] - piece.start
    inside = (ids >= 0) & (ids < piece.length)
    return _weighted(local, inside).with_arguments(ids=torch.where(inside, ids, 0))


def own_bags(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Some of the bags: ids of others have weight zero, whichever of these bags they fall in."""
    ids, begins = local.arguments["ids"], local.arguments["begins"]
    place = torch.arange(ids.shape[0], device=begins.device, dtype=begins.dtype)
    inside = place >= begins[piece.start]
    if piece.stop < begins.shape[0]:
        inside = inside & (place < begins[piece.stop])
    own = begins[piece.start : piece.stop].clone()
    own[:1] = 0
    return _weighted(local, inside).with_arguments(begins=own, last=False)


def _weighted(local: LocalCall, inside: Tensor) -> LocalCall:
    weights, table = local.arguments["weights"], local.arguments["table"]
    kept = inside.to(table.dtype)
    return local.with_arguments(weights=kept if weights is None else weights * kept)


def _bags(call: Call) -> str:
    """Only sums are weighted."""
    weighted = call.operands[3] is not None
    weights = ", n!" if weighted else ", ?"
    if call["mode"] == SUM:
        rest = f"; linear 0{' 3' if weighted else ''}; index 1 v; lower v own_rows; lower o own_bags"
        return f"v d, n!, b!{weights} -> o d{rest}"
    return f"v! d, n!, b!{weights} -> o! d; index 1 v{'; linear 0' if call['mode'] == MEAN else ''}"


def _samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    begins = torch.tensor([0, 0, 4, 6, 6])
    for mode in (SUM, MEAN, MAX):
        for last in (False, True):
            ends = torch.cat([begins, torch.tensor([9])]) if last else begins
            tensors = [Draw((7, 5)), Draw((9,), "index", 7), ends, None]
            yield make_sample(op, tensors, {"mode": mode, "last": last}, tries)
    yield make_sample(
        op, [Draw((7, 5)), Draw((9,), "index", 7), begins, Draw((9,))], {"mode": SUM, "last": False}, tries
    )


FAMILIES = {"bags": OpFamily(_bags, _samples)}

TABLE = """
autopar.bags.default                                        bags; try @autopar.rules.ops.embedding_bag
"""


def _define() -> None:
    """Autograd and shapes come from the op inside."""
    schema = "(Tensor table, Tensor ids, Tensor begins, Tensor? weights, int mode, bool last) -> Tensor"
    torch.library.define("autopar::bags", schema)
    torch.library.impl("autopar::bags", "CompositeImplicitAutograd", bags)


_define()
