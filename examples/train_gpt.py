"""Train a small GPT, character by character, on many processes under a layout.

    torchrun --nproc-per-node 4 examples/train_gpt.py --layout megatron --mesh dp=2,tp=2

The model and the training loop are those of one process; `autopar.parallelize` is the only line about parallelism.
`--layout` takes the name of a strategy, a `.lay` file or a layout in text.
"""

from __future__ import annotations

import argparse

import torch
from gpt import gpt
from training import Characters, finish, parser, report

import autopar


def main() -> None:
    options = parse()
    torch.manual_seed(0)  # every process makes the same model and draws the same batches
    text = Characters()
    sizes = {"layers": options.layers, "d_model": options.d_model, "seq": options.seq, "batch": options.batch}
    model, inputs = gpt(heads=4, vocab=text.vocab, **sizes)
    parallel = autopar.parallelize(model, options.mesh, inputs, layout=options.layout)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=options.lr)
    for step in range(options.steps):
        ids, targets = text.draw(options.batch, options.seq)
        optimizer.zero_grad()
        loss = parallel(ids=ids, targets=targets)
        loss.backward()
        optimizer.step()
        report(options, step, loss)
    finish(options, parallel)


def parse() -> argparse.Namespace:
    found = parser(__doc__, layout="ddp", steps=100, batch=16, lr=3e-3)
    found.add_argument("--seq", type=int, default=64)
    found.add_argument("--layers", type=int, default=2)
    found.add_argument("--d-model", type=int, default=64)
    return found.parse_args()


if __name__ == "__main__":
    main()
