"""Contractions: linear, matmul, einsum, grouped products, linear algebra."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

import torch
from torch import Tensor

from autopar.rules.bind_call import fresh_names
from autopar.rules.call import Call
from autopar.rules.ops.elementwise import aligned_dims, dims_text
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample, sample_calls
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "GROUPED", "TABLE", "expert_rows", "grouped_experts", "grouped_rows"]


def _draws(*shapes: Sequence[int]) -> list[Draw]:
    return [Draw(tuple(shape)) for shape in shapes]


# -- two matrices, or vectors -----------------------------------------------------------------------------------------


def _matmul(call: Call) -> str:
    first, second = (min(spec.rank, 3) for spec in call.operands if spec)
    left = {1: "k", 2: "m k", 3: "... m k"}[first]
    right = {1: "k", 2: "k n", 3: "... k n"}[second]
    output = [*["..."] * (3 in (first, second)), *["m"] * (first > 1), *["n"] * (second > 1)]
    return f"{left}, {right} -> {dims_text(output)}; linear 0 1"


def _matmul_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for first, second in (
        ((5,), (5,)),
        ((5,), (5, 7)),
        ((4, 5), (5,)),
        ((4, 5), (5, 7)),
        ((5,), (3, 5, 7)),
        ((3, 4, 5), (5,)),
        ((3, 4, 5), (5, 7)),
        ((4, 5), (3, 5, 7)),
        ((3, 4, 5), (1, 5, 7)),
        ((2, 3, 4, 5), (3, 5, 7)),
        ((1, 3, 4, 5), (2, 1, 5, 7)),
    ):
        yield make_sample(op, _draws(first, second), {}, tries)


def _linear(call: Call) -> str:
    """Write the rule of a linear layer, whose weight may be one row."""
    row = call.operand(1).rank == 1
    bias = call.operands[2]
    added = "?" if bias is None else "()" if row else "n"
    return f"... k, {'k' if row else 'n k'}, {added} -> {'...' if row else '... n'}; linear 0+2 1+2"


def _added(call: Call, left: str, right: str, output: str) -> str:
    """Write `beta * self + alpha * product`; `letters` are the product's factors, to which `self` broadcasts."""
    (added,) = aligned_dims([call.operand(0).shape], output, call.output.shape)
    groups = "1 2 0+1 0+2" if call.get("beta") == 0 else "0+1 0+2"
    return f"{added}, {' '.join(left)}, {' '.join(right)} -> {' '.join(output)}; linear {groups}"


def _added_samples(op: torch._ops.OpOverload, tries: Tries, left: str, right: str, output: str) -> Iterable[Sample]:
    extent = dict(zip("bmkn", (3, 4, 5, 7), strict=True))
    first, second, out = (tuple(extent[name] for name in dims) for dims in (left, right, output))
    for added in (out, out[1:], (), (*out[:-1], 1)):
        yield make_sample(op, _draws(added, first, second), {}, tries)
    yield make_sample(op, _draws(out, first, second), {"beta": 0.5, "alpha": 2.0}, tries)
    # With beta 0 torch does not read the added tensor.
    yield make_sample(op, _draws(out, first, second), {"beta": 0, "alpha": 2.0}, tries)


def _inner(call: Call) -> str:
    first, second = call.operand(0).rank, call.operand(1).rank
    if not first or not second:
        names = fresh_names(first + second, set())
        return f"{dims_text(names[:first])}, {dims_text(names[first:])} -> {dims_text(names)}; linear 0 1"
    names = fresh_names(first + second - 2, {"k"})
    rows, columns = names[: first - 1], names[first - 1 :]
    return f"{' '.join([*rows, 'k'])}, {' '.join([*columns, 'k'])} -> {dims_text(rows + columns)}; linear 0 1"


# -- contractions of any dims -----------------------------------------------------------------------------------------


def _tensordot(call: Call) -> str:
    contracted = [dim % call.operand(0).rank for dim in call["dims_self"]]
    partners = [dim % call.operand(1).rank for dim in call["dims_other"]]
    names = fresh_names(call.operand(0).rank + call.operand(1).rank, set())
    first, second = names[: call.operand(0).rank], names[call.operand(0).rank :]
    output = [name for d, name in enumerate(first) if d not in contracted]
    output += [name for d, name in enumerate(second) if d not in partners]
    for d, partner in zip(contracted, partners, strict=True):
        second[partner] = first[d]
    return f"{dims_text(first)}, {dims_text(second)} -> {dims_text(output)}; linear 0 1"


def _letters(subscripts: str) -> list[str]:
    """Return `b...d` as `b`, `...`, `d`."""
    return ["..." if letter == "." else letter for letter in subscripts.replace("...", ".")]


def _implicit_output(operands: Sequence[Sequence[str]]) -> list[str]:
    """Return the output of an equation without an arrow: the ellipsis, then letters that occur once, in order."""
    counts = Counter(letter for operand in operands for letter in operand)
    once = sorted(letter for letter, count in counts.items() if count == 1 and letter != "...")
    return ["..."] * ("..." in counts) + once


def _einsum(call: Call) -> str:
    """Write the rule in einsum's own notation; a letter twice in one operand is a diagonal, which stays whole."""
    left, arrow, right = call["equation"].replace(" ", "").partition("->")
    operands = [_letters(subscripts) for subscripts in left.split(",")]
    output = _letters(right) if arrow else _implicit_output(operands)
    diagonal = {letter for operand in operands for letter in operand if operand.count(letter) > 1}
    texts = [dims_text(list(_einsum_dims(operand, diagonal))) for operand in [*operands, output]]
    linear = " ".join(str(i) for i in range(len(operands)))
    return f"{', '.join(texts[:-1])} -> {texts[-1]}; linear {linear}"


def _einsum_dims(letters: Sequence[str], diagonal: set[str]) -> Iterator[str]:
    seen: Counter[str] = Counter()
    for letter in letters:
        seen[letter] += 1
        name = letter if seen[letter] == 1 else f"{letter}{seen[letter]}"
        yield f"{name}!" if letter in diagonal else name


def _einsum_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for equation, *shapes in (
        ("ij,jk->ik", (4, 5), (5, 7)),
        (" i j , j k -> k i ", (4, 5), (5, 7)),
        ("ij,jk", (4, 5), (5, 7)),
        ("bA,ab", (4, 5), (7, 4)),
        ("...ij,jk->...ik", (3, 4, 5), (5, 7)),
        ("b...d,...d", (3, 4, 5), (4, 5)),
        ("...d,d->...", (3, 4, 5), (5,)),
        ("...d,...d->d", (3, 4, 5), (4, 5)),
        ("ij->ji", (4, 5)),
        ("ij->", (4, 5)),
        ("ij,k->k", (4, 5), (7,)),
        ("i,j->ij", (4,), (5,)),
        ("ij,ij,ij->i", (4, 5), (1, 5), (4, 1)),
        ("bn,anm,bm->ba", (3, 4), (5, 4, 7), (3, 7)),
        ("gsec,gsm->egcm", (3, 4, 5, 7), (3, 4, 9)),
        ("ii", (5, 5)),
        ("ii->i", (5, 5)),
        ("bii,i->bi", (3, 5, 5), (5,)),
    ):
        yield make_sample(op, [_draws(*shapes)], {"equation": equation}, tries)


def _kron(call: Call) -> str:
    rank = call.output.rank
    names = fresh_names(2 * rank, set())
    first, second = names[:rank], names[rank:]
    output = []
    for d in range(rank):
        term = [
            side[d] for side, spec in ((first, call.operand(0)), (second, call.operand(1))) if d >= rank - spec.rank
        ]
        output.append(f"({' '.join(term)})")
    texts = [dims_text(side[rank - call.operand(i).rank :]) for i, side in enumerate((first, second))]
    return f"{', '.join(texts)} -> {dims_text(output)}; linear 0 1"


def _chain(call: Call) -> str:
    """Write the rule of a chain of matrices; the first and the last may be vectors."""
    names = fresh_names(len(call.operands) + 1, set())
    dims = [names[i : i + 2] for i in range(len(call.operands))]
    if call.operand(0).rank == 1:
        dims[0] = names[1:2]
    if call.operand(-1).rank == 1:
        dims[-1] = names[-2:-1]
    output = [names[0]] * (len(dims[0]) == 2) + [names[-1]] * (len(dims[-1]) == 2)
    linear = " ".join(str(i) for i in range(len(call.operands)))
    return f"{', '.join(map(dims_text, dims))} -> {dims_text(output)}; linear {linear}"


# -- rows in groups, each with a matrix of its own --------------------------------------------------------------------


def _grouped(call: Call) -> str:
    """Write the rule: rows are sorted by expert and `offs` has the end of each expert's rows."""
    first, second = call.operand(0).rank, call.operand(1).rank
    if (first, second) == (2, 3):
        added = ", ?" if len(call.operands) == 4 else ""
        dims = f"s k, g k n, ends!{added} -> s n"
        return f"{dims}; linear 0 1; lower s grouped_rows; lower g grouped_experts"
    if (first, second) == (3, 3):
        return "g m k, g k n, ?, ? -> g m n; linear 0 1"
    rest = ", ?" * (len(call.operands) - 3)
    if (first, second) == (2, 2):  # the gradient of the matrices: the rows of each expert are summed
        return f"m s, s n, ends!{rest} -> g! m n; linear 0 1; lower s grouped_rows"
    return f"g! m k, k s, ends!{rest} -> m s; linear 0 1; lower s grouped_rows"


def _grouped_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    """Yield experts without rows, rows without experts, and extents that aligned kernels accept in shards too."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if op._schema.name == "aten::_grouped_mm" else torch.float64
    rows, weights = (torch.randn(shape, generator=generator, dtype=dtype) for shape in ((11, 24), (4, 24, 48)))
    for ends in ((2, 5, 5, 11), (0, 3, 7, 11)):
        yield make_sample(op, [rows, weights, torch.tensor(ends, dtype=torch.int32)], {}, tries)
    if op._schema.name == "aten::_grouped_mm":
        yield make_sample(op, [rows.expand(4, 11, 24).contiguous(), weights, None, None], {}, tries)
        ends_of_columns = torch.tensor((4, 8, 8, 24), dtype=torch.int32)
        columns = torch.randn(24, 24, generator=generator)
        for first, second in ((columns, columns), (weights, torch.randn(48, 24, generator=generator))):
            yield make_sample(op, [first, second, ends_of_columns, None], {}, tries)
    else:
        yield make_sample(op, [rows, weights, torch.tensor((2, 5, 7, 9))], {}, tries)


def _expert_rows(call: Call) -> str:
    """Write the rule: rows in any order, each with its expert."""
    return "s k, g k n, s -> s n; linear 0 1; index 2 g; lower g masked_lookup"


def _expert_rows_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    generator = torch.Generator().manual_seed(0)
    rows, matrices = (torch.randn(shape, generator=generator) for shape in ((11, 24), (4, 24, 48)))
    for drawn in (Draw((11,), "index", 4), Draw((11,), "index", 2)):  # an expert may have no rows
        yield make_sample(op, [rows, matrices, drawn], {"product": "aten._grouped_mm.default"}, tries)


# -- distances and linear algebra -------------------------------------------------------------------------------------


def _cdist(call: Call) -> str:
    """Write the rule of all pairs' distances; those of powers 0, 1 and infinity are a sum or a maximum."""
    power = call["p"]
    dims = "... m d, ... n d -> ... m n"
    if power in (0, 1):
        return dims
    return f"{dims}; max d" if power == inf else dims.replace("d", "d!")


def _batched(call: Call, *linear: str) -> str:
    """Write the rule: dims of the batch are parallel, those of the matrices whole."""
    batch = call.operand(0).rank - 2
    names = fresh_names(batch, set())
    inside = iter(fresh_names(20, set(names)))
    sides = [
        ", ".join(
            "?" if spec is None else dims_text(names + [f"{next(inside)}!" for _ in spec.shape[batch:]])
            for spec in specs
        )
        for specs in (call.operands, call.outputs)
    ]
    clause = f"; linear {' '.join(linear)}" if linear else ""
    return f"{sides[0]} -> {sides[1]}{clause}"


def _batched_samples(op: torch._ops.OpOverload, tries: Tries, *linear: str) -> Iterable[Sample]:
    """Yield positive definite matrices, which every op accepts."""
    for batch in ((), (3,)):
        operands = [Draw((*batch, 4, 4), "definite"), Draw((*batch, 4, 7))]
        yield make_sample(op, operands, {"upper": True, "n": 3} if linear else {"n": 3}, tries)


# -- rows of experts --------------------------------------------------------------------------------------------------

# Products of sorted rows, called with rows, a matrix for each expert, and where the rows of each expert end.
GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


# Models sort their rows by expert, multiply group by group, and put the rows back. Sorted, a row may stand anywhere, so
# nothing of that can be split by batch. As one op with rows that stay where they are, it can; each shard sorts its own.
def expert_rows(rows: Tensor, matrices: Tensor, experts: Tensor, product: str) -> Tensor:
    """Multiply rows `[n, k]` by matrices `[e, k, m]`; each row has an expert, and GROUPED names the kernel."""
    namespace, name, overload = product.split(".")
    multiply = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    ordered, order = experts.sort(stable=True)
    each = torch.arange(matrices.shape[0], device=experts.device, dtype=experts.dtype)
    ends = torch.searchsorted(ordered, each, right=True).to(torch.int32)
    found = multiply(rows.index_select(0, order), matrices, ends)
    return torch.zeros_like(found).index_copy(0, order, found)


# Autograd and shapes come from the ops inside.
torch.library.define("autopar::expert_rows", "(Tensor rows, Tensor matrices, Tensor experts, str product) -> Tensor")
torch.library.impl("autopar::expert_rows", "CompositeImplicitAutograd", expert_rows)


def grouped_rows(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Run some of the rows: groups keep their ends, counted from the first of these rows."""
    return local.with_arguments(offs=(local.arguments["offs"] - piece.start).clamp(0, piece.length))


def grouped_experts(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Run some of the experts: rows of the others become zero rows, whose product is zero.

    So every size is known beforehand, and neither rows nor weights are copied into another order.
    """
    rows, ends = next(iter(local.arguments)), local.arguments["offs"]
    total = local.arguments[rows]
    position = torch.arange(total.shape[0], device=ends.device)
    own = position < ends[piece.stop - 1]
    if piece.start:
        own = own & (position >= ends[piece.start - 1])
    kept = ends[piece.start : piece.stop].clone()
    kept[-1] = total.shape[0]
    return replace(local, arguments={**local.arguments, rows: torch.where(own[:, None], total, 0), "offs": kept})


TABLE = """
# products
aten.linear.default                                         linear
aten.{matmul,linalg_matmul}.default                         matmul
aten.mm.default                                             m k, k n -> m n; linear 0 1
aten.bmm.default                                            b m k, b k n -> b m n; linear 0 1
aten.mv.default                                             m k, k -> m; linear 0 1
aten.{dot,vdot}.default                                     k, k ->; linear 0 1
aten.{outer,ger}.default                                    m, n -> m n; linear 0 1
aten.inner.default                                          inner
aten.bilinear.default                                       ... i, ... j, o i j, o? -> ... o; linear 0+3 1+3 2+3
aten.addmm.default                                          added mk kn mn
aten.addmv.default                                          added mk k m
aten.addr.default                                           added m n mn
aten.baddbmm.default                                        added bmk bkn bmn
aten.addbmm.default                                         added bmk bkn mn
aten.einsum.default                                         einsum
aten.tensordot.default                                      tensordot
aten.kron.default                                           kron
aten.linalg_multi_dot.default                               chain
aten._grouped_mm.default                                    grouped
autopar.expert_rows.default                                 expert_rows; try @autopar.rules.ops.matmul
transformers.grouped_mm_fallback.default                    grouped; try @transformers.integrations.moe
aten.cdist.default                                          cdist
aten.pdist.default                                          n! d! -> pairs!

# linear algebra, matrix by matrix
aten.{linalg_inv,inverse,linalg_det,det,linalg_slogdet,slogdet,logdet}.default  batched
aten.{linalg_matrix_exp,matrix_exp,linalg_cholesky,linalg_cholesky_ex}.default  batched
aten.{linalg_eigh,linalg_eigvalsh,linalg_svd,linalg_svdvals,linalg_qr}.default  batched
aten.{linalg_matrix_power,matrix_power}.default             batched
aten.linalg_pinv.{atol_rtol_float,default}                  batched
aten.{linalg_solve,linalg_solve_triangular}.default         batched 1
"""

FAMILIES = {
    "matmul": OpFamily(_matmul, _matmul_samples),
    "linear": OpFamily(
        _linear,
        sample_calls(
            "",
            ((5,), (7, 5), (7,)),
            ((5,), (7, 5), None),
            ((3, 5), (7, 5), (7,)),
            ((3, 5), (7, 5), None),
            ((3, 4, 5), (7, 5), (7,)),
            ((3, 4, 5), (7, 5), None),
            ((3, 5), (5,), None),
            ((3, 5), (1, 5), (1,)),
        ),
    ),
    "added": OpFamily(_added, _added_samples),
    "inner": OpFamily(_inner, sample_calls("", ((5,), (5,)), ((4, 5), (5,)), ((4, 5), (3, 7, 5)), ((), (4, 5)))),
    "tensordot": OpFamily(
        _tensordot,
        sample_calls(
            "dims_self dims_other",
            ((3, 4, 5), (5, 4, 7), [1, 2], [1, 0]),
            ((3, 5), (7, 5), [-1], [-1]),
            ((3, 4), (5,), [], []),
        ),
    ),
    "einsum": OpFamily(_einsum, _einsum_samples),
    "kron": OpFamily(_kron, sample_calls("", ((4, 5), (3, 7)), ((4,), (3, 7)), ((5,), (4,)), ((), (4,)))),
    "chain": OpFamily(
        _chain, sample_calls("", ([(3, 4), (4, 5), (5, 7)],), ([(4,), (4, 5), (5, 7)],), ([(4,), (4, 5), (5,)],))
    ),
    "grouped": OpFamily(_grouped, _grouped_samples),
    "expert_rows": OpFamily(_expert_rows, _expert_rows_samples),
    "cdist": OpFamily(
        _cdist,
        sample_calls(
            "p",
            *(
                (*shapes, power)
                for power in (2.0, 1.0, 3.0, inf)
                for shapes in (((4, 5), (7, 5)), ((3, 4, 5), (1, 7, 5)))
            ),
        ),
    ),
    "batched": OpFamily(_batched, _batched_samples),
}
