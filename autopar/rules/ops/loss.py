"""Losses. A mean over all elements is a mean of the shards' means; one divided by a count is not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autopar.rules.bind_call import fresh_names
from autopar.rules.call import Call, takes_tensors
from autopar.rules.ops.elementwise import aligned_dims, broadcast_shape, dims_text
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "TABLE"]

# The values of the argument `reduction`.
NONE, MEAN, SUM = range(3)


def _reduced(dims: Sequence[str], reduction: int) -> tuple[str, str]:
    """Return the dims that a reduction leaves, and the clause of those that it takes."""
    if reduction == NONE:
        return dims_text(dims), ""
    return "()", f"; {'mean' if reduction == MEAN else 'sum'} {' '.join(dims)}" if dims else ""


def _linear(*groups: str) -> str:
    kept = " ".join(group for group in groups if group)
    return f"; linear {kept}" if kept else ""


# -- element by element -----------------------------------------------------------------------------------------------


def _elementwise(call: Call, *words: str) -> str:
    """Write the rule: operands broadcast, then all dims are reduced."""
    shape = broadcast_shape(call)
    names = fresh_names(len(shape), set())
    texts = iter(aligned_dims([spec.shape for spec in call.operands if spec], names, shape))
    operands = ", ".join("?" if spec is None else next(texts) for spec in call.operands)
    output, clause = _reduced(names, call["reduction"])
    return f"{operands} -> {output}{clause}"


def _drawn(shape: tuple[int, ...], kind: str) -> Draw:
    """Return a sample's kind; `normal*` is one without a gradient."""
    return Draw(shape, kind.rstrip("*"), fixed=kind.endswith("*"))


def _elementwise_samples(op: torch._ops.OpOverload, tries: Tries, *kinds: str) -> Iterable[Sample]:
    names = list(takes_tensors(op))
    flags = [argument.name for argument in op._schema.arguments if str(argument.type) == "bool"]
    wanted = kinds or ("normal",) * len(names)
    for reduction in (NONE, MEAN, SUM):
        for flag in (False, True)[: 1 + bool(flags)]:
            arguments = {"reduction": reduction, **dict.fromkeys(flags, flag)}
            yield make_sample(op, [_drawn((5, 7), kind) for kind in wanted], arguments, tries)
        required = [_drawn((3, 4, 5), kind) for kind in wanted[:2]]
        narrow = [_drawn((5,), kind) for kind in wanted[2:]]
        optional = "Optional" in str(op._schema.arguments[min(2, len(op._schema.arguments) - 1)].type)
        yield make_sample(op, [*required, *narrow], {"reduction": reduction}, tries)
        if optional:
            yield make_sample(op, required, {"reduction": reduction}, tries)


# -- over classes -----------------------------------------------------------------------------------------------------


def _class_dims(call: Call) -> tuple[list[str], list[str]]:
    """Return the dims of the scores, classes second (or alone), and those without the classes."""
    rank = call.operand(0).rank
    names = fresh_names(rank - 1, {"c"})
    return [*names[:1], "c!", *names[1:]], names


def _by_class(call: Call) -> str:
    """Write the rule of a log likelihood by class number. The mean divides by the weights of counted ones."""
    scores, others = _class_dims(call)
    reduction = call["reduction"]
    # A shard would divide by the weights of its own labels, not of all.
    if reduction == MEAN:
        scores, others = ([name.rstrip("!") + "!" for name in dims] for dims in (scores, others))
    operands = f"{dims_text(scores)}, {dims_text(others)}, {'?' if call.operands[2] is None else 'c!'}"
    output, clause = ("()", "") if reduction == MEAN else _reduced(others, reduction)
    return f"{operands} -> {', '.join([output, *['()'] * (len(call.outputs) - 1)])}{clause}"


def _nll_loss(call: Call) -> str:
    """Write the rule: linear in the log likelihoods, and in class weights that the result is not divided by."""
    reduction, counts = call["reduction"], len(call.outputs) > 1
    # The second output is the sum of the weights: it does not follow the scores, so the op is not linear in them.
    scores = "0" if not counts or (reduction == NONE and call.operand(0).rank > 1) else ""
    weights = "2" if reduction != MEAN else ""
    return _by_class(call) + _linear(scores, weights)


def _cross_entropy(call: Call) -> str:
    """Write the rule; targets are class numbers, or probabilities, whose mean counts all alike."""
    reduction = call["reduction"]
    if not call.operand(1).differentiable:
        return _by_class(call) + _linear("2" if reduction != MEAN else "")
    scores, others = _class_dims(call)
    operands = f"{dims_text(scores)}, {dims_text(scores)}, {'?' if call.operands[2] is None else 'c!'}"
    output, clause = _reduced(others, reduction)
    return f"{operands} -> {output}{clause}{_linear('1' if not call['label_smoothing'] else '', '2')}"


def _class_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    """Yield calls with ignored labels inside and outside the range of classes."""
    shapes: Sequence[tuple[int, ...]] = ((5, 7), (3, 7, 4), (7,))
    if "2d" in op._schema.name:
        shapes = ((3, 7, 4, 5),)
    elif "nd" not in op._schema.name and "cross" not in op._schema.name:
        shapes = ((5, 7), (7,))
    smooth = any(argument.name == "label_smoothing" for argument in op._schema.arguments)
    outer: dict[str, object] = {"ignore_index": -100}
    for shape in shapes:
        classes = shape[1] if len(shape) > 1 else shape[0]
        labels = (*shape[:1], *shape[2:]) if len(shape) > 1 else ()
        for reduction in (NONE, MEAN, SUM):
            for weight in (None, Draw((classes,), "positive", fixed=True)):
                outside = Draw(labels, "index", classes, also=(-100,) if labels else ())
                yield make_sample(op, [Draw(shape), outside, weight], {**outer, "reduction": reduction}, tries)
                inside = {"reduction": reduction, "ignore_index": 1, "label_smoothing": 0.1 if smooth else 0.0}
                yield make_sample(op, [Draw(shape), Draw(labels, "index", classes), weight], inside, tries)


def _cross_entropy_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    yield from _class_samples(op, tries)
    for shape, smoothing, reduction in (
        ((5, 7), 0.0, MEAN),
        ((5, 7), 0.0, NONE),
        ((3, 7, 4), 0.1, SUM),
        ((3, 7, 4), 0.1, MEAN),
        ((7,), 0.0, MEAN),
    ):
        weight = Draw((7,), "positive")
        arguments = {"reduction": reduction, "label_smoothing": smoothing}
        yield make_sample(op, [Draw(shape), Draw(shape, "probability"), weight], arguments, tries)
        yield make_sample(op, [Draw(shape), Draw(shape, "probability"), None], arguments, tries)


# -- row by row -------------------------------------------------------------------------------------------------------


def _by_row(call: Call, *kinds: str) -> str:
    """Write the rule of a loss per row of the last dim, which is whole; some operands have one number per row."""
    full = broadcast_shape_of_rows(call)
    names = fresh_names(len(full), {"c"})
    rows = names[: len(full) - 1]
    operands = []
    for spec in call.operands:
        if spec is None:
            operands.append("?")
        elif spec.rank == len(full):
            operands.append(aligned_dims([spec.shape], [*rows, "c!"], full)[0])
        else:
            weights = spec.shape == full[-1:] and spec is call.operands[-1] and len(kinds) > 2 and kinds[2] == "weight"
            operands.append("c!" if weights else aligned_dims([spec.shape], rows, full[:-1])[0])
    output, clause = _reduced(rows, call["reduction"])
    return f"{', '.join(operands)} -> {output}{clause}"


def broadcast_shape_of_rows(call: Call) -> tuple[int, ...]:
    """Return the shape of the operands with the most dims, broadcast."""
    rank = max(spec.rank for spec in call.operands if spec)
    shapes = [spec.shape for spec in call.operands if spec and spec.rank == rank]
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True))


def _row_samples(op: torch._ops.OpOverload, tries: Tries, *kinds: str) -> Iterable[Sample]:
    """Yield calls; of `kinds`, `row` has the last dim, `class` and `sign` have one number per row."""
    made = {
        "row": lambda rows: Draw((*rows, 7)),
        "classes": lambda rows: Draw((*rows, 7), "index", 7, also=(-1,)),
        "class": lambda rows: Draw(rows, "index", 7),
        "sign": lambda rows: Draw(rows, "sign"),
        "weight": lambda rows: Draw((7,), "positive", fixed=True),
    }
    for reduction in (NONE, MEAN, SUM):
        for rows in ((5,), ()):
            yield make_sample(op, [made[kind](rows) for kind in kinds], {"reduction": reduction, "margin": 0.5}, tries)
    if "weight" in kinds:
        yield make_sample(op, [made[kind]((5,)) for kind in kinds[:-1]], {"margin": 0.5}, tries)


# -- sequences --------------------------------------------------------------------------------------------------------


def _ctc(call: Call) -> str:
    """Write the rule: sequences are parallel where each has its own targets and lengths are tensors."""
    scores, targets = call.operand(0), call.operand(1)
    if scores.rank == 3 and targets.rank == 2 and len(call.operands) == 4:
        output, clause = _reduced(["b"], call["reduction"])
        return f"t! b c!, b s!, b, b -> {output}{clause}"
    # Targets joined in one row, or lengths as plain numbers, cannot be split by sequence.
    names = iter(fresh_names(10, set()))
    sides = [
        ", ".join(dims_text([f"{next(names)}!" for _ in spec.shape]) for spec in specs if spec)
        for specs in (call.operands, call.outputs)
    ]
    return f"{sides[0]} -> {sides[1]}"


def _ctc_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    inputs, lengths = [9, 8, 9, 7, 9], [3, 2, 3, 1, 3]
    as_tensors = len(takes_tensors(op)) == 4
    sizes = [torch.tensor(inputs), torch.tensor(lengths)] if as_tensors else []
    named = {} if as_tensors else {"input_lengths": inputs, "target_lengths": lengths}
    for reduction in (NONE, MEAN, SUM):
        scores, targets = Draw((9, 5, 6)), Draw((5, 3), "count")
        yield make_sample(op, [scores, targets, *sizes], {**named, "reduction": reduction}, tries)
    joined = Draw((sum(lengths),), "count")
    yield make_sample(op, [Draw((9, 5, 6)), joined, *sizes], named, tries)


FAMILIES = {
    "elementwise_loss": OpFamily(_elementwise, _elementwise_samples),
    "nll_loss": OpFamily(_nll_loss, _class_samples),
    "cross_entropy": OpFamily(_cross_entropy, _cross_entropy_samples),
    "row_loss": OpFamily(_by_row, _row_samples),
    "ctc": OpFamily(_ctc, _ctc_samples),
}

TABLE = """
aten.{mse_loss,l1_loss,smooth_l1_loss,huber_loss}.default   elementwise_loss
aten.binary_cross_entropy.default                           elementwise_loss probability probability positive*; linear 2
aten.binary_cross_entropy_with_logits.default  elementwise_loss normal probability positive* positive*; linear 2
aten.kl_div.default                                         elementwise_loss normal probability
aten.poisson_nll_loss.default                               elementwise_loss positive positive
aten.{soft_margin_loss,hinge_embedding_loss}.default        elementwise_loss normal sign*
aten.margin_ranking_loss.default                            elementwise_loss normal normal sign*

aten.{nll_loss,nll_loss_nd,nll_loss2d,nll_loss_forward,nll_loss2d_forward}.default  nll_loss
aten.cross_entropy_loss.default                             cross_entropy
aten.multi_margin_loss.default                              row_loss row class weight; linear 2
aten.multilabel_margin_loss.default                         row_loss row classes
aten.cosine_embedding_loss.default                          row_loss row row sign
aten.triplet_margin_loss.default                            row_loss row row row
aten.ctc_loss.{Tensor,IntList}                              ctc
"""
