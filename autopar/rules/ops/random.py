"""Ops that draw random numbers: independently drawn elements are parallel."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar.rules.bind_call import fresh_names
from autopar.rules.call import Call
from autopar.rules.ops.elementwise import broadcast_samples, dims_text, pointwise
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample, sample_calls
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "TABLE"]


def _draws_masks(call: Call) -> bool:
    # Otherwise torch returns the input as it is and draws nothing.
    return call["train"] is not False and call["p"] > 0


def _dropout(call: Call, kept: str) -> str:
    """Write the rule. Outside training nothing changes; in training `kept` tells scaled values from shifted ones."""
    random = _draws_masks(call)
    linear = "" if random and kept == "moved" else "; linear 0"
    return f"{pointwise(call)}{linear}{'; random' if random else ''}"


def _channel_dropout(call: Call) -> str:
    """Write the rule: one draw for each image and channel serves all its pixels."""
    if not _draws_masks(call):
        return _dropout(call, "scaled")
    names = fresh_names(call.operand(0).rank, set())
    dims = dims_text([*names[:2], *(f"{name}!" for name in names[2:])])
    return f"{dims} -> {dims}; linear 0; random"


def _dropout_samples(op: torch._ops.OpOverload, tries: Tries, *kept: str) -> Iterable[Sample]:
    shape = (3, 5, 4) if "feature" in op._schema.name else (5, 7)
    for probability, train in ((0.4, True), (0.4, False), (0.0, True)):
        yield make_sample(op, [Draw(shape)], {"p": probability, "train": train}, tries)


def _drawn(call: Call) -> str:
    """Write the rule: no operand is read and the size follows the shard."""
    names = fresh_names(call.output.rank, set())
    return f" -> {dims_text(names)}; localise size; random"


def _drawn_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    arguments = {"high": 50, "low": 3, "mean": 0.5, "std": 2.0}
    known = {argument.name for argument in op._schema.arguments}
    kept = {name: value for name, value in arguments.items() if name in known}
    yield make_sample(op, [], {**kept, "size": [5, 7], "dtype": torch.float64}, tries)


def _rrelu(call: Call) -> str:
    """Write the rule: random slopes in training, a leaky relu otherwise."""
    return pointwise(call) + ("; random" if call["training"] else "")


FAMILIES = {
    "dropout": OpFamily(_dropout, _dropout_samples),
    "channel_dropout": OpFamily(_channel_dropout, _dropout_samples),
    "drawn": OpFamily(_drawn, _drawn_samples),
    "drawn_like": OpFamily(pointwise, lambda op, tries, *kinds: list(broadcast_samples(op, tries, *kinds))[:1]),
    "rrelu": OpFamily(
        _rrelu,
        sample_calls(
            "lower upper training",
            *(((5, 7), Draw((5, 7), fixed=True), 0.1, 0.4, training) for training in (True, False)),
        ),
    ),
}

TABLE = """
aten.{dropout,native_dropout}.default                       dropout scaled
aten.alpha_dropout.default                                  dropout moved
aten.feature_dropout.default                                channel_dropout
aten.{rrelu,rrelu_with_noise_functional}.default            rrelu

# sizes alone
aten.{rand,randn}.default                                   drawn
aten.randint.{default,low}                                  drawn
aten.normal.float_float                                     drawn
aten.randperm.default                                       -> n!; random; try n=7

# another tensor's dims, or its values as parameters
aten.{rand_like,randn_like}.default                         drawn_like; random
aten.randint_like.default                                   drawn_like; random; try high=50
aten.randint_like.low_dtype                                 drawn_like; random; try low=3 high=50
aten.{uniform,normal_functional,exponential,cauchy,log_normal}.default  drawn_like; random
aten.geometric.default                                      drawn_like; random; try p=0.3
aten.random.{default,from,to}                               drawn_like; random; try from=3 to=50
aten.bernoulli.default                                      drawn_like probability; random
aten.bernoulli.p                                            drawn_like; random; try p=0.4
aten.bernoulli.Tensor                                       drawn_like normal probability; random
aten.normal.{Tensor_float,float_Tensor,Tensor_Tensor}       drawn_like positive; random
aten.{poisson,_standard_gamma}.default                      drawn_like positive; random
aten.binomial.default                                       drawn_like above_one probability; random
aten._sample_dirichlet.default                              b n! -> b n!; random; try positive
aten.multinomial.default                                    ... n! -> ... s!; random; try positive num_samples=3
"""
