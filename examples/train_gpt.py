"""Train a small GPT, character by character, on many processes under a layout.

    torchrun --nproc-per-node 4 examples/train_gpt.py --layout megatron --mesh dp=2,tp=2
    torchrun --nproc-per-node 4 examples/train_gpt.py --mesh pp=2,dp=2      # stages: a pipeline

The model and the training loop are those of one process; `autopar.parallelize` is the only line about parallelism.
`--layout` takes the name of a strategy, a `.lay` file or a layout in text. The model that is trained is a TARGET too:

    autopar plan examples/train_gpt.py:small_gpt --mesh dp=2,tp=2
"""

from __future__ import annotations

import argparse

import torch
from gpt import gpt
from training import Characters, device_here, finish, parser, report

import autopar


def main() -> None:
    options = parse()
    torch.manual_seed(0)  # every process makes the same model and draws the same batches
    device = device_here()
    text = Characters(device)
    model, inputs = small_gpt(options.layers, options.d_model, options.seq, options.batch, str(device))
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


def small_gpt(
    layers: int = 2, d_model: int = 64, seq: int = 64, batch: int = 16, device: str = "cpu"
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The model and inputs of the sizes that it is trained with."""
    return gpt(layers=layers, d_model=d_model, heads=4, vocab=Characters().vocab, seq=seq, batch=batch, device=device)


def parse() -> argparse.Namespace:
    found = parser(__doc__, layout="ddp", steps=100, batch=16, lr=3e-3)
    found.add_argument("--seq", type=int, default=64)
    found.add_argument("--layers", type=int, default=2)
    found.add_argument("--d-model", type=int, default=64)
    found.set_defaults(layout=None)
    options = found.parse_args()
    # An axis of stages means a pipeline, unless a layout says more.
    options.layout = options.layout or ("pipeline" if "pp=" in options.mesh else "ddp")
    return options


if __name__ == "__main__":
    main()
