"""Sections about single ops: calibration, attention, and the proofs of the rules on this device."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import autopar.rules.proof.run_shards as execution
from autopar.cli import main
from autopar.errors import AutoparError
from autopar.rules.proof import prove as proof
from autopar.rules.registry import topics
from autopar.rules.shard_call.folded import attend_folded, kernel_for
from benchmarks.gpu.setting import Setting

__all__ = ["attn", "calib", "folded", "rules"]

# Topics whose kernels differ most between devices: proved first, in case the time ends.
DEVICES_DIFFER = ["attention", "norm", "matmul", "conv_pool", "random", "reduce"]
# An index out of range, which some cases try, ends the use of a GPU by a process: proved last.
INDEXED = ["loss", "loss_pieces", "index", "scatter", "routed", "slots"]


def calib(setting: Setting) -> None:
    """`autopar calibrate` on one process, and the rate of products of ones, random numbers and zeros."""
    seconds = "0.002" if setting.tiny else "0.08"

    def calibrate(*options: str) -> Mapping[str, Any]:
        target = setting.folder / ("tables.toml" if options else "here.toml")
        words = ["calibrate", "--processes", "1", "--like", setting.shipped, "--output", str(target)]
        code = main([*words, "--seconds", seconds, *options])
        if code:
            raise AutoparError(f"autopar calibrate ended with code {code}")
        return {"code": code, "lines": len(target.read_text(encoding="utf-8").splitlines())}

    def fills() -> Mapping[str, Any]:
        size = 128 if setting.tiny else 8192
        made = {}
        for name, fill in (("ones", torch.ones), ("random", torch.randn), ("zeros", torch.zeros)):
            x, y = (fill(size, size, device=setting.device).to(torch.bfloat16) for _ in range(2))
            made[name] = lambda x=x, y=y: x @ y
        found = setting.medians(made, 8)
        return {name: round(2 * size**3 / one["ms"] / 1e9, 3) for name, one in found.items()}

    setting.part("calibrate", calibrate)
    setting.part("tables", lambda: calibrate("--tables"))
    setting.part("tflops", fills)


def attn(setting: Setting) -> None:
    """Attention of all rows and of the last quarter of them: the causal kernel beside an explicit mask; dropout."""
    heads, width = (2, 16) if setting.tiny else (32, 128)
    for seq in (64,) if setting.tiny else (4096, 16384):
        for ranks in (1, 4):

            def rows(seq: int = seq, ranks: int = ranks) -> Mapping[str, Any]:
                q, k, v = _heads(setting, heads, width, (seq // ranks, seq, seq))
                offset = seq - seq // ranks

                def kernel() -> None:
                    _backward(q, k, v, is_causal=ranks == 1)

                def mask() -> None:
                    allowed = torch.ones(seq // ranks, seq, dtype=torch.bool, device=setting.device).tril(offset)
                    _backward(q, k, v, attn_mask=allowed)

                steps = {"kernel": kernel, "mask": mask}
                peaks = {f"{name}_peak_gib": setting.peak_gib(step) for name, step in steps.items()}
                return {**setting.medians(steps, 5), **peaks}

            setting.part(f"{seq}_rows_in_{ranks}", rows)

    def dropout() -> Mapping[str, Any]:
        seq = 32 if setting.tiny else 4096
        q, k, v = _heads(setting, heads, width, (seq,) * 3)
        steps = {
            "fused": lambda: _backward(q, k, v, dropout_p=0.1, is_causal=True),
            "written_out": lambda: _written_out(q, k, v),
        }
        peaks = {f"{name}_peak_gib": setting.peak_gib(step) for name, step in steps.items()}
        return {**setting.medians(steps, 3), **peaks}

    setting.part("dropout", dropout)


def folded(setting: Setting) -> None:
    """The second rank of four of a folded sequence: by each kernel, and beside scores that are written out."""
    heads, shared, width = (4, 2, 16) if setting.tiny else (32, 8, 128)

    def operands(seq: int) -> list[Tensor]:
        kind: dict[str, Any] = {"device": setting.device, "dtype": torch.bfloat16, "requires_grad": True}
        sizes = ((heads, seq // 4), (shared, seq), (shared, seq))
        return [torch.randn(1, count, rows, width, **kind) for count, rows in sizes]

    def step(given: Sequence[Tensor], *kernels: SDPBackend) -> Sequence[Tensor]:
        seq = given[1].shape[-2]
        with sdpa_kernel([*kernels]):
            query, key, value = given
            found = attend_folded(query, key, value, None, True, 2, 0, seq // 8)
            return (found, *torch.autograd.grad(found, given, found.detach()))

    every = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

    def same() -> Mapping[str, Any]:
        given = operands(64 if setting.tiny else 1024)
        exact = step([x.detach().float().requires_grad_() for x in given], SDPBackend.MATH)
        worst = {}
        for name, kernel in every.items():
            pairs = zip(step(given, kernel, SDPBackend.FLASH_ATTENTION), exact, strict=True)
            worst[name] = max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)
        return {"chosen": kernel_for(given[0], width), **worst}

    setting.part("same", same)
    for seq in (64,) if setting.tiny else (8192, 65536):

        def timed(seq: int = seq) -> Mapping[str, Any]:
            given = operands(seq)
            kernels = {name: (kernel, SDPBackend.FLASH_ATTENTION) for name, kernel in every.items()}
            return setting.medians({name: partial(step, given, *both) for name, both in kernels.items()}, 5)

        setting.part(f"{seq}_tokens", timed)


def _heads(setting: Setting, heads: int, width: int, rows: tuple[int, ...]) -> list[Tensor]:
    kind: dict[str, Any] = {"device": setting.device, "dtype": torch.bfloat16, "requires_grad": True}
    return [torch.randn(1, heads, count, width, **kind) for count in rows]


def _backward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    total = functional.scaled_dot_product_attention(q, k, v, **options).sum()
    torch.autograd.grad(total, (q, k, v))


def _written_out(q: Tensor, k: Tensor, v: Tensor) -> None:
    """As attention with dropout runs on several ranks: scores in float32."""
    scores = (q.float() * q.shape[-1] ** -0.5) @ k.float().transpose(-1, -2)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    kept = torch.rand(scores.shape, device=q.device) < 0.9
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1) * kept / 0.9
    torch.autograd.grad((weights @ v.float()).sum(), (q, k, v))


def rules(setting: Setting) -> None:
    """The proofs of the table with their tensors on the device, as far as the time goes."""
    _prove_on(setting.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    deadline = time.monotonic() + (150 if setting.tiny else 65)
    known = topics()
    assert {*DEVICES_DIFFER, *INDEXED} <= known.keys()
    for topic in (*DEVICES_DIFFER, *(one for one in known if one not in (*DEVICES_DIFFER, *INDEXED)), *INDEXED):
        entries = list(known[topic])[: 1 if setting.tiny else None]

        def prove(entries: Any = entries) -> Mapping[str, Any]:
            done = []
            for entry in entries:
                if time.monotonic() > deadline:
                    break
                done.append(proof.prove_entry(entry, seeds=(0,)))
            failures = [str(failure).replace("\n", " | ")[:240] for one in done for failure in one.failures]
            counts = {"lines": len(done), "of": len(entries), "cases": sum(len(one.cases) for one in done)}
            return {**counts, "failures": len(failures), "first_failures": failures[:6]}

        setting.part(topic, prove)


def _prove_on(device: torch.device) -> None:
    """Move the tensors of the proofs, which are drawn on the CPU."""
    if device.type == "cpu":
        return
    drawn, weight = execution.materialise, execution._weight

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to(device).requires_grad_(value.requires_grad)
        if isinstance(value, list | tuple):
            return type(value)(map(moved, value))
        return device if isinstance(value, torch.device) else value

    def materialise(*arguments: Any) -> dict[str, Any]:
        found = {name: moved(value) for name, value in drawn(*arguments).items()}
        if "device" in found and not any(isinstance(value, Tensor) for value in found.values()):
            found["device"] = device
        return found

    def weighted(output: Tensor | None) -> Tensor | None:
        found = weight(output)
        return None if found is None or output is None else found.to(output.device)

    rewritten: Any = execution
    rewritten.materialise, rewritten._weight = materialise, weighted
    vars(proof)["materialise"] = materialise
