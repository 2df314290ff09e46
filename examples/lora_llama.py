"""Fine-tune a Llama by low-rank adapters (LoRA): all weights of the model are frozen, two thin matrices a linear learn.

    torchrun --nproc-per-node 2 examples/lora_llama.py --mesh fsdp=2 --layout fsdp
    torchrun --nproc-per-node 2 examples/lora_llama.py --mesh pp=2 --layout "micro 4; pipeline pp 1f1b; * -> none"
    autopar plan examples/lora_llama.py:lora_llama --set size=70b --mesh dp=8 --cluster h100 --precision bf16

The adapters are a module of this file, or those of the library `peft` with `--peft` and `--set peft=true`. Both have
the same parameters in the same places. At the real sizes the model is on the meta device, without memory for weights.
The script trains a small random Llama, saves the adapters alone, and loads them into a model of one process.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import autopar

# Hidden size, width of the MLP, layers, heads and heads of keys of Llama-3.
SIZES = {"small": (48, 80, 2, 4, 2), "8b": (4096, 14336, 32, 32, 8), "70b": (8192, 28672, 80, 64, 8)}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def lora_llama(
    size: str = "small",
    batch: int = 4,
    seq: int | None = None,
    rank: int = 16,
    targets: tuple[str, ...] = LINEARS,
    peft: bool = False,
    device: str | None = None,
    **config: Any,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a frozen Llama with trained adapters, and its inputs with labels; `config` changes sizes of the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    is_small = size == "small"
    width, inner, layers, heads, kv_heads = SIZES[size]
    length = seq or (32 if is_small else 4096)
    sizes: dict[str, Any] = {
        "vocab_size": 112 if is_small else 128256,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": max(length, 8192),
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "use_cache": False,
    }
    with torch.device(device or ("cpu" if is_small else "meta")):
        model = LlamaForCausalLM(LlamaConfig(**{**sizes, **config}))
        found = with_peft(model, rank, targets) if peft else with_adapters(model, rank, targets)
        ids = torch.randint(model.config.vocab_size, (batch, length))
    return found.train(), {"input_ids": ids, "labels": ids}


class LowRank(nn.Module):
    """A frozen linear, and the product of two thin matrices beside it that is zero at first (Hu et al., 2021)."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        kind = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, **kind)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, **kind)
        nn.init.zeros_(self.lora_B.weight)
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base_layer(x) + self.scale * self.lora_B(self.lora_A(x))
        return made


def with_adapters(model: nn.Module, rank: int, targets: tuple[str, ...]) -> nn.Module:
    """Freeze the model, and put an adapter beside each linear of these names."""
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if isinstance(module, nn.Linear) and name in targets:
            setattr(model.get_submodule(parent), name, LowRank(module, rank, alpha=2.0 * rank))
    return model


def with_peft(model: Any, rank: int, targets: tuple[str, ...]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    found: nn.Module = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets)))
    return found


def main() -> None:
    from training import Characters, device_here, finish, parser, report

    options = parse(parser(__doc__, layout="fsdp", steps=40, batch=8, lr=1e-2))
    torch.manual_seed(0)  # the same weights and batches in every process
    text = Characters(device_here())
    model, inputs = lora_llama(batch=options.batch, rank=options.rank, peft=options.peft, vocab_size=text.vocab)
    parallel = autopar.parallelize(model, options.mesh, inputs, layout=options.layout)
    trained = [parameter for parameter in parallel.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr)
    for step in range(options.steps):
        ids, _ = text.draw(options.batch, inputs["input_ids"].shape[1])
        optimizer.zero_grad()
        loss = parallel(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        report(options, step, loss)
    adapters = adapters_of(parallel)
    if dist.get_rank() == 0:
        save(model, adapters, options)
    finish(options, parallel)


def adapters_of(parallel: nn.Module) -> dict[str, Tensor]:
    """Gather the adapters alone: the frozen weights are in the checkpoint of the model already."""
    trained_alone = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    whole: Any = get_model_state_dict(parallel, options=trained_alone)
    return dict(whole)


def save(model: Any, adapters: dict[str, Tensor], options: argparse.Namespace) -> None:
    """Save the adapters, and load them again into a model of one process."""
    with tempfile.TemporaryDirectory() as folder:
        if options.peft:
            # The form of `peft`, which `PeftModel.from_pretrained` reads.
            model.save_pretrained(options.save or folder, state_dict=adapters)
        path = Path(options.save or folder, "adapters.pt")
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(adapters, path)
        lacking, unknown = model.load_state_dict(torch.load(path), strict=False)
    assert not unknown, unknown
    assert not any("lora_" in name for name in lacking), lacking
    print(f"saved {sum(one.numel() for one in adapters.values()):,} of {model_numel(model):,} numbers")


def model_numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def parse(found: argparse.ArgumentParser) -> argparse.Namespace:
    found.add_argument("--rank", type=int, default=4, help="rank of the adapters")
    found.add_argument("--peft", action="store_true", help="take the adapters of the library peft")
    found.add_argument("--save", help="a folder for the adapters")
    return found.parse_args()


if __name__ == "__main__":
    main()
