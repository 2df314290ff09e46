"""Train a small GPT, character by character, on many processes under a layout.

    torchrun --nproc-per-node 4 examples/train_gpt.py --layout megatron --mesh dp=2,tp=2

The model and the training loop are those of one process; `autopar.parallelize` is the only line about parallelism.
`--layout` takes the name of a strategy, a `.lay` file or a layout in text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import gpt

import autopar

TEXT = Path(__file__).with_suffix(".txt")


def main() -> None:
    options = parse()
    torch.manual_seed(0)  # every process makes the same model and draws the same batches
    text = TEXT.read_text(encoding="utf-8")
    characters = sorted(set(text))
    codes = torch.tensor([characters.index(character) for character in text])
    # Rows that no character uses, so that the vocabulary can be split.
    vocab = -(-len(characters) // 16) * 16
    model, inputs = gpt(
        layers=options.layers, d_model=options.d_model, heads=4, vocab=vocab, seq=options.seq, batch=options.batch
    )
    parallel = autopar.parallelize(model, options.mesh, inputs, layout=options.layout)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=options.lr)
    for step in range(options.steps):
        ids, targets = draw(codes, options.batch, options.seq)
        optimizer.zero_grad()
        loss = parallel(ids=ids, targets=targets)
        loss.backward()
        optimizer.step()
        last = step == options.steps - 1
        if dist.get_rank() == 0 and (step % options.every == 0 or last):
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    if options.collectives and dist.get_rank() == 0:
        print(*parallel.collectives(), sep="\n")
    dist.destroy_process_group()


def draw(codes: torch.Tensor, batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces of the text, and the same one character on."""
    starts = torch.randint(len(codes) - seq - 1, (batch, 1))
    places = starts + torch.arange(seq + 1)
    pieces = codes[places]
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="ddp", help="a strategy, a .lay file, or a layout")
    parser.add_argument("--mesh", default="dp=1", help="as many ranks as there are processes: dp=2,tp=2")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--every", type=int, default=10, help="print the loss every so many steps")
    parser.add_argument("--collectives", action="store_true", help="list at the end what one step sends")
    return parser.parse_args()


if __name__ == "__main__":
    main()
