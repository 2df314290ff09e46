"""Train a Hugging Face language model, character by character, on many processes under a layout.

    torchrun --nproc-per-node 4 examples/train_hf.py --layout fsdp_tp --mesh fsdp=2,tp=2
    torchrun --nproc-per-node 4 examples/train_hf.py --architecture gpt2 --layout megatron_sp --mesh dp=2,tp=2

The model is transformers' own, small and random, built from its config (`hf.py`): nothing is downloaded, and not a line
of it is changed.
"""

from __future__ import annotations

import argparse

import torch
from hf import hf
from training import Characters, device_here, finish, parser, report

import autopar


def main() -> None:
    options = parse()
    torch.manual_seed(0)  # every process makes the same model and draws the same batches
    device = device_here()
    text = Characters(device)
    settings = {"train": True, "dropout": 0.0, "vocab_size": text.vocab}
    model, inputs = hf(options.architecture, options.batch, options.seq, device=str(device), **settings)
    inputs["labels"] = inputs["input_ids"]
    parallel = autopar.parallelize(model, options.mesh, inputs, layout=options.layout)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=options.lr)
    for step in range(options.steps):
        ids, _ = text.draw(options.batch, options.seq)
        optimizer.zero_grad()
        loss = parallel(input_ids=ids, labels=ids).loss  # the model shifts the labels itself
        loss.backward()
        optimizer.step()
        report(options, step, loss)
    finish(options, parallel)


def parse() -> argparse.Namespace:
    found = parser(__doc__, layout="ddp", steps=60, batch=8, lr=3e-3)
    found.add_argument("--architecture", default="llama", help="a model_type of transformers for language models")
    found.add_argument("--seq", type=int, default=32)
    return found.parse_args()


if __name__ == "__main__":
    main()
