"""Normalisations: dims of the statistics stay whole, the others are parallel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autopar.rules.bind_call import fresh_names
from autopar.rules.call import Call
from autopar.rules.ops._names import text
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample, sample_calls
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "TABLE"]


def _affine(call: Call, weight: int, bias: int) -> str:
    """Return the clause: `x * weight + bias` is linear in both together, in the weight alone without a bias."""
    if call.operands[weight] is None:
        return ""
    return f"linear {weight}" if call.operands[bias] is None else f"linear {weight}+{bias}"


# -- over the last dims -----------------------------------------------------------------------------------------------


def _layer_norm(call: Call) -> str:
    """Write the rule: statistics over the last dims, which weight and bias have."""
    rank, width = call.operand(0).rank, len(call["normalized_shape"])
    names = fresh_names(rank, set())
    dims = [*names[: rank - width], *(f"{name}!" for name in names[rank - width :])]
    operands = [dims, *(None if spec is None else dims[rank - width :] for spec in call.operands[1:])]
    outputs = [dims]
    for spec in call.outputs[1:]:
        assert spec is not None, call
        outputs.append([*dims[: rank - width], *["1"] * (spec.rank - rank + width)])
    biased = len(call.operands) > 2
    clause = "" if len(outputs) > 1 else _affine(call, 1, 2) if biased else f"linear {1}" if operands[1] else ""
    return text(operands, outputs, clause)


def _layer_norm_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    biased = any(argument.name == "bias" for argument in op._schema.arguments)
    for shape, width in (((5, 7), 1), ((3, 4, 5), 1), ((3, 4, 5), 2), ((5,), 1)):
        inner = shape[len(shape) - width :]
        arguments = {"normalized_shape": list(inner), "eps": 1e-5}
        for present in ((True, True), (True, False), (False, True), (False, False))[: None if width == 1 else 1]:
            if biased or not present[1]:
                added = [Draw(inner) if here else None for here in present]
                yield make_sample(op, [Draw(shape), *added[: 1 + biased]], arguments, tries)


# -- over groups of channels ------------------------------------------------------------------------------------------


def _group_norm(call: Call) -> str:
    """Write the rule: groups of neighbouring channels are parallel, a group's channels whole."""
    rank = call.operand(0).rank
    names = fresh_names(rank, {"b", "g", "c"})
    channels = "(g c!)"
    dims = ["b", channels, *(f"{name}!" for name in names[: rank - 2])]
    operands = [dims, *(None if spec is None else [channels] for spec in call.operands[1:])]
    return text(operands, [dims], _affine(call, 1, 2), "localise num_groups=g")


# -- over the batch ---------------------------------------------------------------------------------------------------


def _batch_norm(call: Call, mode: str) -> str:
    """Write the rule: in training, statistics over all dims but the channels; else they are given."""
    training = mode == "training" or (mode == "by_argument" and bool(call["training"]))
    rank = call.operand(0).rank
    names = fresh_names(rank - 1, {"c", "none"})
    others = [f"{name}!" for name in names] if training else names
    dims = [others[0], "c", *others[1:]]
    operands = [dims, *(None if spec is None else ["c"] for spec in call.operands[1:])]
    outputs: list[Sequence[str] | None] = [dims]
    # Outputs that a mode does not use have size 0 and need factors of their own.
    empty = iter(fresh_names(len(call.outputs), {"c", *names}))
    for spec in call.outputs[1:]:
        assert spec is not None, call
        outputs.append(["c"] if spec.shape == call.operand(0).shape[1:2] else [next(empty)])  # of size 0
    return text(operands, outputs, _batch_norm_linear(call, training))


def _batch_norm_linear(call: Call, training: bool) -> str:
    if any(spec is not None and 0 not in spec.shape for spec in call.outputs[1:]):
        return ""  # the statistics among the outputs do not add up
    affine = _affine(call, 1, 2).removeprefix("linear ")
    centred = "" if training or len(call.operands) < 5 else "0+3" if call.operands[2] is None else "0+2+3"
    groups = " ".join(group for group in (affine, centred) if group)
    return f"linear {groups}" if groups else ""


def _running(shape: Sequence[int]) -> list[Draw]:
    return [Draw((shape[1],), fixed=True), Draw((shape[1],), "positive", fixed=True)]


def _batch_norm_samples(op: torch._ops.OpOverload, tries: Tries, mode: str) -> Iterable[Sample]:
    names = [argument.name for argument in op._schema.arguments]
    tracked = "running_mean" in names
    optional = op._schema.name in ("aten::batch_norm", "aten::native_batch_norm", "aten::cudnn_batch_norm")
    modes = {"by_argument": (False, True), "training": (True,), "given": (False,)}[mode]
    for training in modes:
        arguments = {"training": training, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False}
        for shape, present in (
            ((5, 7), (True, True)),
            ((3, 4, 5), (True, True)),
            ((3, 4, 5), (True, False)),
            ((3, 4, 5), (False, True)),
            ((3, 4, 3, 5), (False, False)),
        ):
            affine = [Draw(shape[1:2]) if here else None for here in present]
            running: list[Draw | None] = [*_running(shape)] if tracked else []
            if optional and training:
                running = [None, None]  # they would be written to, and no functional graph does that
            yield make_sample(op, [Draw(shape), *affine, *running], arguments, tries)


def _instance_norm(call: Call) -> str:
    """Write the rule: statistics of each image over space; running ones also over the batch."""
    tracked, given = call.operands[3] is not None, not call["use_input_stats"]
    names = fresh_names(call.operand(0).rank - 1, {"c"})
    # Running statistics are updated by means over the batch, which a shard does not have.
    batch = f"{names[0]}!" if tracked and not given else names[0]
    dims = [batch, "c", *(name if given else f"{name}!" for name in names[1:])]
    operands = [dims, *(None if spec is None else ["c"] for spec in call.operands[1:])]
    return text(operands, [dims], _affine(call, 1, 2))


def _instance_norm_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    arguments = {"momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False}
    for shape, present in (((3, 4, 5), (True, True)), ((3, 4, 3, 5), (True, False)), ((3, 4, 5), (False, False))):
        affine = [Draw(shape[1:2]) if here else None for here in present]
        yield make_sample(op, [Draw(shape), *affine, None, None], {**arguments, "use_input_stats": True}, tries)
        yield make_sample(op, [Draw(shape), *affine, *_running(shape)], {**arguments, "use_input_stats": False}, tries)


# -- of weights -------------------------------------------------------------------------------------------------------


def _weight_norm(call: Call) -> str:
    """Write the rule of `g * v / |v|`, with the norm over all dims but one, or over all (`dim=-1`)."""
    rank, dim = call.operand(0).rank, call["dim"]
    names = fresh_names(rank, set())
    kept = names[dim] if dim >= 0 else None
    dims = [name if name == kept else f"{name}!" for name in names]
    norm = [name if name == kept else "1" for name in names]
    sides = [["1"] * spec.rank if kept is None else norm for spec in call.operands[1:] if spec]
    if call.op.startswith("aten.norm_except_dim"):
        return text([dims], [["1"] * call.output.rank if kept is None else norm])
    return text([dims, *sides], [dims], "linear 1")


def _renorm(call: Call) -> str:
    """Write the rule: each slice along `dim` is scaled by its own norm."""
    names = fresh_names(call.operand(0).rank, set())
    kept = names[call["dim"] % len(names)]
    dims = [name if name == kept else f"{name}!" for name in names]
    return text([dims], [dims])


FAMILIES = {
    "layer_norm": OpFamily(_layer_norm, _layer_norm_samples),
    "group_norm": OpFamily(
        _group_norm,
        sample_calls(
            "num_groups eps",
            ((3, 12, 5), (12,), (12,), 4, 1e-5),
            ((3, 12), (12,), None, 4, 1e-5),
            ((3, 12, 4, 5), None, None, 4, 1e-5),
        ),
    ),
    "batch_norm": OpFamily(_batch_norm, _batch_norm_samples),
    "instance_norm": OpFamily(_instance_norm, _instance_norm_samples),
    "weight_norm": OpFamily(
        _weight_norm,
        sample_calls(
            "dim pow",
            ((5, 7), (5, 1), 0, 2),
            ((3, 4, 5), (3, 1, 1), 0, 2),
            ((3, 4, 5), (1, 1, 5), 2, 2),
            ((5, 7), (), -1, 2),
        ),
    ),
    "renorm": OpFamily(_renorm, sample_calls("p dim maxnorm", ((5, 7), 2, 0, 1.0), ((5, 7), 2, -1, 1.0))),
}

TABLE = """
aten.{layer_norm,native_layer_norm}.default                 layer_norm
aten.{rms_norm,_fused_rms_norm}.default                     layer_norm
aten.group_norm.default                                     group_norm
aten.{batch_norm,native_batch_norm}.default                 batch_norm by_argument
aten._native_batch_norm_legit_functional.default            batch_norm by_argument
aten._native_batch_norm_legit.no_stats                      batch_norm training
aten._native_batch_norm_legit_no_training.default           batch_norm given
aten._batch_norm_with_update_functional.default             batch_norm training
aten._batch_norm_no_update.default                          batch_norm given
aten.instance_norm.default                                  instance_norm
aten.{_weight_norm,norm_except_dim}.default                 weight_norm
aten.renorm.default                                         renorm
"""
