"""The parts that all sections share: the device, timed steps, peaks, models, and results that survive a time limit."""

from __future__ import annotations

import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.lowering.collectives.start_group import choose_gloo_interface
from autopar.plans.cluster_here import cluster_here
from autopar.runtime.agreement import Agreement
from examples.resnet import resnet

__all__ = ["Setting", "bert", "llama", "one_process", "one_rank_of", "resnet_50", "stepper"]

Step = Callable[[], object]


@dataclass
class Setting:
    """Device and sizes of a section, and its results so far: each part is written to the file when it ends."""

    tiny: bool
    folder: Path
    name: str
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def has_gpu(self) -> bool:
        return torch.cuda.is_available()

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.has_gpu else torch.device("cpu")

    @property
    def shipped(self) -> str:
        """The cluster file of a machine like this one."""
        return cluster_here().name if self.has_gpu else "h200"

    def part(self, name: str, work: Callable[[], Mapping[str, Any]]) -> None:
        """Keep the result of a part, or its error, and go on."""
        begun = time.perf_counter()
        try:
            self.found[name] = dict(work())
        except Exception as error:  # noqa: BLE001  # one broken part must not end the others
            lines = traceback.format_exc().strip().splitlines()
            self.found[name] = {"failed": f"{type(error).__name__}: {str(error)[:600]}", "at": lines[-8:]}
        self.found[name]["seconds"] = round(time.perf_counter() - begun, 1)
        self.write()

    def write(self) -> None:
        text = json.dumps(self.found, indent=1, default=str)
        (self.folder / f"{self.name}.json").write_text(text, encoding="utf-8")

    def wait(self) -> None:
        if self.has_gpu:
            torch.cuda.synchronize()

    def peak_gib(self, work: Step) -> float:
        """Peak allocated memory during a call; 0 on a CPU, whose allocator does not count."""
        gc.collect()
        if self.has_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        work()
        self.wait()
        return round(torch.cuda.max_memory_allocated() / 2**30, 3) if self.has_gpu else 0.0

    def medians(self, steps: Mapping[str, Step], rounds: int, warm: int = 3) -> dict[str, Any]:
        """Milliseconds of each step, and until the host has queued it; the steps take turns."""
        rounds = min(rounds, 3) if self.tiny else rounds
        for step in steps.values():
            for _ in range(1 if self.tiny else warm):
                step()
        whole: dict[str, list[float]] = {name: [] for name in steps}
        queued: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                self.wait()
                begun = time.perf_counter()
                step()
                queued[name].append(1e3 * (time.perf_counter() - begun))
                self.wait()
                whole[name].append(1e3 * (time.perf_counter() - begun))
        found: dict[str, Any] = {
            name: {
                "ms": round(statistics.median(whole[name]), 3),
                "host_ms": round(statistics.median(queued[name]), 3),
            }
            for name in steps
        }
        if {"plain", "autopar"} <= steps.keys():
            found["ratio"] = round(found["autopar"]["ms"] / found["plain"]["ms"], 3)
        return found


def one_process() -> None:
    """Start a process group of this process alone."""
    choose_gloo_interface()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


@contextmanager
def one_rank_of(sizes: Mapping[str, int], device: torch.device) -> Iterator[DeviceMesh]:
    """Rank 0 of a mesh whose other ranks do not exist: real kernels and memory, and nothing is sent."""
    opened, cheap = Agreement.open_channel, Agreement.is_cheap
    rewritten: Any = Agreement
    # Both would wait for the other ranks.
    rewritten.open_channel, rewritten.is_cheap = (lambda self: None), property(lambda self: False)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=prod(sizes.values()))
    try:
        yield init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()
        rewritten.open_channel, rewritten.is_cheap = opened, cheap


def llama(setting: Setting, layers: int = 16, batch: int = 4, seq: int = 2048, **sizes: int) -> tuple[nn.Module, Any]:
    """Return a Llama of transformers in bfloat16, by default about 1.2 billion parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: dict[str, Any] = {"vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 8192}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, **sizes}
    if setting.tiny:
        layers, batch, seq = min(layers, 2), min(batch, 16), 32
        config |= {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
        config |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    with setting.device:
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False, **config))
        ids = torch.randint(config["vocab_size"], (batch, seq))
    return nn.Module.to(model, torch.bfloat16), {"input_ids": ids, "labels": ids}


def resnet_50(setting: Setting) -> Any:
    """Return a ResNet-50 with 64 images of 224 by 224."""
    images = {"depth": 50, "width": 64, "image": 224, "classes": 1000, "batch": 64}
    return resnet(device=str(setting.device), loss=True, train=True, **({"batch": 2} if setting.tiny else images))


def bert(setting: Setting) -> Any:
    """Return a BERT-large in bfloat16 with 16 texts of 512 tokens."""
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {"vocab_size": 30522, "hidden_size": 1024, "intermediate_size": 4096}
    sizes |= {"num_hidden_layers": 24}
    if setting.tiny:
        sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    dropout: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    heads = 4 if setting.tiny else 16
    with setting.device:
        model = BertForMaskedLM(BertConfig(num_attention_heads=heads, **sizes, **dropout))
        ids = torch.randint(sizes["vocab_size"], (2, 16) if setting.tiny else (16, 512))
    return nn.Module.to(model, torch.bfloat16), {"input_ids": ids, "labels": ids}


def stepper(module: Any, inputs: Any, optimizer: torch.optim.Optimizer | None = None) -> Step:
    """Return a step: forward, backward and, with an optimizer, the update."""
    parameters = list(module.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        result = module(**inputs)
        loss = result if isinstance(result, Tensor) else result.loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()

    return step
