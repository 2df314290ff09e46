"""Recurrent layers as one op: the batch is parallel, time and features stay whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autopar.rules.bind_call import fresh_names
from autopar.rules.call import Call, TensorSpec
from autopar.rules.ops.elementwise import dims_text
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "TABLE"]

HIDDEN = 6
"""Of the samples. The kernels read beyond their end when few rows of gates are left; here all shards have enough."""


def _recurrent(call: Call, states: str) -> str:
    """Sequences `time batch features` (or batch first), `states` of `layers batch hidden`, then the parameters."""
    names = iter(fresh_names(300, {"b"}))

    def dims(spec: TensorSpec | None, batch: int | None) -> str:
        if spec is None:
            return "?"
        return dims_text(["b" if d == batch else f"{next(names)}!" for d in range(spec.rank)])

    sequence = 0 if call.get("batch_first") else 1
    held = int(states)
    left = [sequence, *[1] * held, *[None] * (len(call.operands) - 1 - held)]
    right = [sequence, *[1] * held]
    sides = [
        ", ".join(dims(spec, batch) for spec, batch in zip(specs, batches, strict=True))
        for specs, batches in ((call.operands, left), (call.outputs, right))
    ]
    random = call["train"] and call["dropout"] > 0 and call["num_layers"] > 1
    return f"{sides[0]} -> {sides[1]}{'; random' if random else ''}"


def _recurrent_samples(op: torch._ops.OpOverload, tries: Tries, states: str) -> Iterable[Sample]:
    gates = {"lstm": 4, "gru": 3}.get(op._schema.name.partition("::")[2], 1)
    calls = ((False, True, 0.0), (True, False, 0.0), (False, False, 0.5))
    for batch_first, biases, dropout in calls[: 2 if gates == 4 else 3]:  # lstm does not check its count of layers
        layers = 2 if dropout else 1
        sequence, state = (5, 3, 4) if batch_first else (3, 5, 4), (layers, 5, HIDDEN)
        held = [Draw(state)] * int(states)
        arguments = {"has_biases": biases, "num_layers": layers, "dropout": dropout, "batch_first": batch_first}
        arguments |= {"train": True, "bidirectional": False}
        operands = [Draw(sequence), held if len(held) > 1 else held[0], _parameters(gates, layers, biases)]
        yield make_sample(op, operands, arguments, tries)


def _parameters(gates: int, layers: int, biases: bool) -> list[Draw]:
    rows = gates * HIDDEN
    added = [Draw((rows,))] * (2 * biases)
    return [
        draw for layer in range(layers) for draw in (Draw((rows, HIDDEN if layer else 4)), Draw((rows, HIDDEN)), *added)
    ]


def _cell(call: Call) -> str:
    """One step: the sequences of a batch are parallel."""
    names = iter(fresh_names(50, {"b"}))

    def dims(spec: TensorSpec | None, batched: bool) -> str:
        if spec is None:
            return "?"
        return dims_text(["b" if d == 0 and batched else f"{next(names)}!" for d in range(spec.rank)])

    inputs = 1 + len(call.outputs)
    batched = call.operand(0).rank == 2
    left = ", ".join(dims(spec, batched and i < inputs) for i, spec in enumerate(call.operands))
    return f"{left} -> {', '.join(dims(spec, batched) for spec in call.outputs)}"


def _cell_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    name = op._schema.name.partition("::")[2]
    rows = {"lstm_cell": 4, "gru_cell": 3}.get(name, 1) * HIDDEN
    state: Draw | Sequence[Draw] = [Draw((5, HIDDEN))] * 2 if name == "lstm_cell" else Draw((5, HIDDEN))
    for biases in ([Draw((rows,))] * 2, [None] * 2):
        yield make_sample(op, [Draw((5, 4)), state, Draw((rows, 4)), Draw((rows, HIDDEN)), *biases], {}, tries)


FAMILIES = {"recurrent": OpFamily(_recurrent, _recurrent_samples), "cell": OpFamily(_cell, _cell_samples)}

TABLE = """
aten.lstm.input                                             recurrent 2
aten.{gru,rnn_tanh,rnn_relu}.input                          recurrent 1
aten.{lstm_cell,gru_cell,rnn_tanh_cell,rnn_relu_cell}.default  cell
"""
