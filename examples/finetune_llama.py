"""Fine-tune a Hugging Face Llama under a plan: weights from a checkpoint, a part of them trained, on many processes.

    torchrun --nproc-per-node 4 examples/finetune_llama.py --mesh dp=2,tp=2 --layout megatron
    torchrun --nproc-per-node 4 examples/finetune_llama.py --mesh dp=2,tp=2 --layout "batch -> dp; d_ff -> ?; * -> none"

The model is built on the meta device and takes its weights afterwards, so that no process holds all of it at once.
Nothing is downloaded: where `--weights` names no file, the script saves a small random Llama and begins from that.
With `--trained lm_head` only the head learns; by default all of the last layer and the head do.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from hf import hf
from training import Characters, device_here, finish, parser, report

import autopar


def main() -> None:
    options = parse()
    torch.manual_seed(0)  # every process draws the same batches
    text = Characters(device_here())
    settings = {"train": True, "dropout": 0.0, "vocab_size": text.vocab}
    model, inputs = hf("llama", options.batch, options.seq, device="meta", **settings)
    inputs["labels"] = inputs["input_ids"]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in options.trained))
    parallel = autopar.parallelize(model, options.mesh, inputs, layout=options.layout)
    parallel.init_weights(model._init_weights)  # of rotary positions, which no state dict has
    with tempfile.TemporaryDirectory() as folder:
        weights = options.weights or pretrained(Path(folder, "llama.pt"), settings)
        parallel.load_full_state_dict(torch.load(weights, mmap=True))
    optimizer = torch.optim.AdamW([one for one in parallel.parameters() if one.requires_grad], lr=options.lr)
    for step in range(options.steps):
        ids, _ = text.draw(options.batch, options.seq)
        optimizer.zero_grad()
        loss = parallel(input_ids=ids, labels=ids).loss  # the model shifts the labels itself
        loss.backward()
        optimizer.step()
        report(options, step, loss)
    if options.save:
        save(parallel, options.save)
    finish(options, parallel)


def pretrained(path: Path, settings: dict[str, object]) -> Path:
    """Stands for a downloaded checkpoint: whole tensors in a file, the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        torch.save(hf("llama", **settings)[0].state_dict(), path)
    return path


def save(parallel: torch.nn.Module, path: Path) -> None:
    """Whole tensors under the model's names, as `load_state_dict` of the plain model takes them."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    whole = get_model_state_dict(parallel, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(whole, path)


def parse() -> argparse.Namespace:
    found = parser(__doc__, layout="megatron", steps=40, batch=8, lr=1e-2)
    found.add_argument("--seq", type=int, default=32)
    found.add_argument("--weights", type=Path, help="a state dict of whole tensors")
    found.add_argument("--save", type=Path, help="where the whole state dict goes at the end")
    found.add_argument("--trained", nargs="+", default=["layers.1.", "lm_head"], help="parts of the names that learn")
    return found.parse_args()


if __name__ == "__main__":
    main()
