"""Train a small transformer with mixture-of-experts layers: each rank of `ep` has some of the experts.

    torchrun --nproc-per-node 4 examples/train_moe.py --mesh dp=2,ep=2 --collectives

The tokens travel to their experts and back: `--collectives` shows two all-to-alls for each layer and direction. The
model, in `moe.py`, knows nothing of this; the layout `gshard_moe` says where its experts are.
"""

from __future__ import annotations

import argparse

import torch
from moe import moe
from training import Characters, device_here, finish, parser, report

import autopar


def main() -> None:
    options = parse()
    torch.manual_seed(0)  # every process makes the same model and draws the same batches
    device = device_here()
    text = Characters(device)
    sizes = {"layers": options.layers, "d_model": options.d_model, "seq": options.seq, "batch": options.batch}
    sizes |= {"d_ff": 2 * options.d_model, "experts": options.experts, "vocab": text.vocab}
    model, inputs = moe(device=str(device), **sizes)
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
    found = parser(__doc__, layout="gshard_moe", steps=60, batch=8, lr=3e-3)
    found.add_argument("--seq", type=int, default=32)
    found.add_argument("--layers", type=int, default=2)
    found.add_argument("--d-model", type=int, default=48)
    found.add_argument("--experts", type=int, default=8)
    return found.parse_args()


if __name__ == "__main__":
    main()
