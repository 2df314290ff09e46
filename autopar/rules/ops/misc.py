"""Ops of no other family: frames, grids, recurrent layers, tensors made from sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autopar.rules.bind_call import fresh_names
from autopar.rules.call import Call, TensorSpec, takes_tensors
from autopar.rules.ops._names import Names, text, wrap
from autopar.rules.ops.elementwise import aligned_dims, dims_text
from autopar.rules.ops.index import all_whole
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample, sample_calls
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "TABLE"]


def _spectrogram(call: Call) -> str:
    """Write the rule: signals are parallel; frames overlap, so time is whole."""
    names = Names()
    batch = names.some(call.operand(0).rank - 1)
    window = None if call.operands[1] is None else [names.whole()]
    return text(
        [[*batch, names.whole()], window],
        [[*batch, *(names.whole() for _ in range(call.output.rank - len(batch)))]],
        "linear 0 1",
    )


def _meshgrid(call: Call) -> str:
    """Write the rule: every coordinate is repeated along all other dims; `xy` swaps the first two."""
    names = Names()
    dims = names.some(len(call.operands))
    lines = [
        [] if spec is not None and spec.rank == 0 else [name] for name, spec in zip(dims, call.operands, strict=True)
    ]
    out = list(dims)
    if call.get("indexing") == "xy" and len(out) > 1:
        out[:2] = out[1::-1]
    return text(lines, [out] * len(dims))


def _meshgrid_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for sizes in ((5,), (5, 4), (3, 4, 5)):
        for indexing in ("ij", "xy") if "indexing" in str(op) else ("ij",):
            given = {"indexing": indexing} if "indexing" in str(op) else {}
            yield make_sample(op, [[Draw((size,)) for size in sizes]], given)


def _take(call: Call) -> str:
    """Write the rule of positions in the flattened tensor."""
    names = Names()
    found = names.some(call.operand(1).rank)
    return text([[names.whole() for _ in call.operand(0).shape], found], [found])


def _diagonal_scatter(call: Call) -> str:
    """Write the rule: the two dims of the diagonal are whole, the rest is parallel."""
    rank = call.operand(0).rank
    taken = {wrap(call["dim1"], rank), wrap(call["dim2"], rank)}
    names = Names()
    left = [names.whole() if dim in taken else names.one() for dim in range(rank)]
    return text([left, [*(name for dim, name in enumerate(left) if dim not in taken), names.whole()]], [left])


def _broadcast(call: Call) -> str:
    """Write the rule: all operands get the one shape to which they broadcast."""
    names = Names()
    dims = names.some(call.output.rank)
    read = aligned_dims([spec.shape for spec in call.operands if spec is not None], dims, call.output.shape)
    return f"{', '.join(read)} -> {text([], [dims] * len(read)).removeprefix(' -> ')}"


def _diagonal_matrix(call: Call) -> str:
    """Write the rule of a matrix with this diagonal, or of the diagonal of a matrix."""
    return "a! -> b! c!" if call.operand(0).rank == 1 else "a! b! -> c!"


# -- recurrent cells and layers ----------------------------------------------------------------------------------------


# Of the samples. The kernels read beyond their end when few rows of gates are left; here all shards have enough.
HIDDEN = 6


def _recurrent(call: Call, states: str) -> str:
    """Write the rule: sequences `time batch features`, `states` of `layers batch hidden`, then the parameters."""
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
    """Write the rule of one step: the sequences of a batch are parallel."""
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


# -- tensors made from sizes -------------------------------------------------------------------------------------------


def _filled(call: Call) -> str:
    """Write the rule; an operand that gives dtype and device alone may be any of its shards."""
    names = Names()
    lent = [[names.one() for _ in spec.shape] for spec in call.operands if spec is not None]
    read = " ".join(name for dims in lent for name in dims)
    return text(lent, [names.some(call.output.rank)], f"max {read}" if read else "")


def _filled_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    lent = [Draw((4, 3))] if takes_tensors(op) else []
    for size in ([5, 3], [4], []):
        for dtype in (torch.float64, torch.int64, torch.bool):
            arguments: dict[str, Any] = {"size": size, "dtype": dtype, "fill_value": 1}
            if "permuted" in op._schema.name:
                arguments["physical_layout"] = list(range(len(size)))
            yield make_sample(op, lent, arguments, tries)


RANGES = ((0, 7, 1), (2, 13, 1), (3, 20, 4), (5, -8, -2), (0.5, 3.0, 0.3), (1, 2, 0.1), (0.0, 6.0, 1.0))


def _arange_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    names = {argument.name for argument in op._schema.arguments}
    for start, end, step in RANGES:
        given = {"start": start, "end": end, "step": step}
        if all(given[name] == value for name, value in (("start", 0), ("step", 1)) if name not in names):
            arguments = {name: value for name, value in given.items() if name in names}
            fractions = any(isinstance(value, float) for value in arguments.values())
            for dtype in (torch.float64, *((torch.int64, None) if start == int(start) and step == int(step) else ())):
                if dtype is not None or not fractions:
                    yield make_sample(op, [], {**arguments, "dtype": dtype})


def _triangle(call: Call) -> str:
    names = Names().some(call.operand(0).rank)
    return text([names], [names])


TABLE = """
aten.broadcast_tensors.default                       broadcast; linear *
aten.diag.default                                    diagonal_matrix; linear 0
aten.block_diag.default                              blocks; linear *
aten.stft.{default,center}                           spectrogram
aten.meshgrid.{default,indexing}                     meshgrid; linear *
aten.take.default                                    take; linear 0
aten.diagonal_scatter.default                        diagonal_scatter; linear 0+1
aten.lstm.input                                             recurrent 2
aten.{gru,rnn_tanh,rnn_relu}.input                          recurrent 1
aten.{lstm_cell,gru_cell,rnn_tanh_cell,rnn_relu_cell}.default  cell
aten.{zeros,ones,full}.default                       factory; localise size
aten.{empty.memory_format,empty_permuted.default}    factory; localise size
aten.{new_zeros,new_empty}.default                   factory; localise size; linear 0
aten.{new_ones,new_full}.default                     factory; localise size
aten.arange.{default,start,start_step}               arange
aten.scalar_tensor.default                           ->
aten.linspace.default                                -> n; lower n own_part; try steps=7
aten.eye.default                                     -> n m; lower n own_part; lower m own_part; try n=5
aten.eye.m                                           -> n m; lower n own_part; lower m own_part; try n=5 m=4
aten.{tril,triu}.default                             triangle; linear 0; localise diagonal
aten.{tril_indices,triu_indices}.default             -> c n; lower c own_part; lower n own_part; try row=4 col=5
aten.logspace.default                                -> n; lower n own_part; try start=0 end=1 steps=7
aten.{hann_window,hamming_window,blackman_window,bartlett_window}.default  -> n; lower n own_part; try window_length=7
aten.{hann_window,hamming_window,blackman_window,bartlett_window}.periodic  -> n; lower n own_part; try window_length=7
aten.{fft_fftfreq,fft_rfftfreq}.default              -> n; lower n own_part; try n=7
"""

FAMILIES = {
    "broadcast": OpFamily(
        _broadcast, sample_calls("", ([(5, 7), (5, 7)],), ([(5, 7), (7,), ()],), ([(5, 1), (1, 7)],), ([(5,)],))
    ),
    "diagonal_matrix": OpFamily(
        _diagonal_matrix, sample_calls("diagonal", ((5,), 0), ((5,), 1), ((5, 5), 0), ((4, 5), -1))
    ),
    "blocks": OpFamily(all_whole, sample_calls("", ([(4, 5), (3, 7)],))),
    "spectrogram": OpFamily(
        _spectrogram,
        sample_calls("n_fft hop_length return_complex", ((3, 20), (6,), 6, 2, True), ((20,), (6,), 6, 2, True)),
    ),
    "meshgrid": OpFamily(_meshgrid, _meshgrid_samples),
    "take": OpFamily(_take, sample_calls("", ((5, 4), Draw((3, 4), "index", 7)), ((7,), Draw((5,), "index", 7)))),
    "diagonal_scatter": OpFamily(
        _diagonal_scatter, sample_calls("offset dim1 dim2", ((5, 5), (5,), 0, 0, 1), ((3, 4, 5), (4, 3), 1, 0, -1))
    ),
    "recurrent": OpFamily(_recurrent, _recurrent_samples),
    "cell": OpFamily(_cell, _cell_samples),
    "factory": OpFamily(_filled, _filled_samples),
    "arange": OpFamily(lambda call: "-> n; lower n arange_part", _arange_samples),
    "triangle": OpFamily(_triangle, sample_calls("diagonal", ((5, 7), 0), ((5, 4), -2), ((3, 4, 5), 1), ((1, 5), 2))),
}
