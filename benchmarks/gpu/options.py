"""Sections about the options of a layout: precision, recomputation, offloading, experts, long sequences."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.cost.hardware.cluster import load_cluster
from autopar.plans.cluster_here import cluster_here
from benchmarks.gpu.setting import Setting, llama, one_process, one_rank_of, stepper
from benchmarks.gpu.shards import beside, measured

__all__ = ["experts", "long", "options"]

WHOLE = "* -> none"
# Arguments of a plan, by name: the first is the reference of the gradients.
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"precision": "fp32"},
    "fp8": {"precision": "fp8"},
    "fp8_rows": {"precision": "fp8-rows"},
    "recompute_full": {"layout": f"{WHOLE}; recompute full @model.layers.*"},
    "recompute_selective": {"layout": f"{WHOLE}; recompute selective @model.layers.*"},
    "offload": {"layout": f"{WHOLE}; recompute offload @model.layers.*"},
    "micro_4": {"layout": f"{WHOLE}; micro 4"},
    "pieces_16": {"layout": f"pieces 16; {WHOLE}"},
    "states_on_host": {"offload_states": True},
}
# Ways to split the attention of a folded sequence over eight ranks.
WAYS = {
    "gather": "fold seq; seq -> cp; * -> none",
    "ring": "fold seq; seq -> cp; op @*/folded_attention[s -> cp, t -> cp]; * -> none",
    "heads": "fold seq; seq -> cp; op @*/folded_attention[h -> cp]; * -> none",
    "plain_order": "fold seq none; seq -> cp; op @*/scaled_dot_product_attention[s -> cp]; * -> none",
}


def options(setting: Setting) -> None:
    """A Llama under each option: predicted and measured step and peak, and gradients beside those of bfloat16."""
    one_process()
    model, inputs = llama(setting, layers=8)
    # The peaks are of the copies, which are on the device.
    model = nn.Module.to(model, "cpu", torch.float32)
    reference: dict[str, Tensor] = {}
    for name, asked in OPTIONS.items():
        setting.part(name, partial(_under, setting, model, inputs, asked, reference))
    for name in ("bf16", "fp8"):
        compiled = partial(_under, setting, model, inputs, OPTIONS[name], reference, compiled=True)
        setting.part(f"{name}_compiled_layers", compiled)


def _under(
    setting: Setting,
    model: nn.Module,
    inputs: Any,
    asked: Mapping[str, Any],
    reference: dict[str, Tensor],
    compiled: bool = False,
) -> Mapping[str, Any]:
    given = {"layout": WHOLE, "precision": "bf16", **asked}
    on_host = {name: value.cpu() for name, value in inputs.items()}
    plan = autopar.plan(model, "dp=1", on_host, cluster=cluster_here(), outputs="loss", cache=False, **given)
    copied = nn.Module.to(copy.deepcopy(model), setting.device)
    module = autopar.parallelize(copied, "dp=1", inputs, layout=plan, outputs="loss")
    del copied
    if compiled:
        # Inductor's compilation takes minutes on a busy CPU and is tested elsewhere.
        module.compile_layers(**({"backend": "aot_eager"} if setting.tiny else {}))
    found = compared(setting, module, inputs, plan)
    gradients = {name: _local(parameter.grad).float().cpu() for name, parameter in module.named_parameters()}
    if not reference:
        reference.update(gradients)
    found["worst_relative_gradient"] = max(
        float((gradients[name] - one).norm() / one.norm()) for name, one in reference.items() if one.norm() > 0
    )
    return found


def _local(gradient: Any) -> Tensor:
    found: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return found


def compared(setting: Setting, module: nn.Module, inputs: Any, plan: autopar.Plan) -> dict[str, Any]:
    """Step with AdamW and peak, beside those of the plan."""
    found = measured(setting, module, inputs)
    return {**found, **beside(found, 1e3 * plan.costs.step_seconds, plan.memory_bytes / 2**30)}


def experts(setting: Setting) -> None:
    """A Qwen3-MoE of transformers: plain beside parallel, prediction, waits of the host."""
    one_process()
    model, inputs = _qwen(setting)
    plan = autopar.plan(model, "dp=1", inputs, layout=WHOLE, cluster=cluster_here(), cache=False)
    ours = autopar.parallelize(model, "dp=1", inputs, layout=plan)
    plain, parallel = stepper(model, inputs), stepper(ours, inputs)

    def eager() -> Mapping[str, Any]:
        plain()
        parallel()
        pairs = [(a.grad, _local(b.grad)) for a, b in zip(model.parameters(), ours.parameters(), strict=True)]
        worst = max(float((a - b).norm() / a.norm()) for a, b in pairs if a is not None and a.norm() > 0)
        peaks = {"plain_peak_gib": setting.peak_gib(plain), "autopar_peak_gib": setting.peak_gib(parallel)}
        return {**setting.medians({"plain": plain, "autopar": parallel}, 8), **peaks, "worst_gradient": worst}

    def waits() -> Mapping[str, Any]:
        if not setting.has_gpu:
            return {"skipped": "no GPU to wait for"}
        torch.cuda.set_sync_debug_mode("error")
        try:
            parallel()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return {"waits": 0}

    setting.part("eager", eager)
    setting.part("predicted", lambda: compared(setting, ours, inputs, plan))
    setting.part("waits", waits)


def _qwen(setting: Setting) -> tuple[nn.Module, Any]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 64, "head_dim": 128}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32768}
    if setting.tiny:
        sizes |= {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "head_dim": 16}
        sizes |= {"num_attention_heads": 4, "vocab_size": 512}
    layers, batch, seq = (2, 4, 32) if setting.tiny else (4, 4, 2048)
    config = Qwen3MoeConfig(num_hidden_layers=layers, num_experts_per_tok=8, use_cache=False, **sizes)
    with setting.device:
        model = Qwen3MoeForCausalLM(config)
        ids = torch.randint(config.vocab_size, (batch, seq))
    return nn.Module.to(model, torch.bfloat16), {"input_ids": ids, "labels": ids}


def long(setting: Setting) -> None:
    """Rank 0 of eight of one long sequence: the ways to split attention, without communication."""
    cluster = load_cluster(setting.shipped)
    for name, layout in WAYS.items():

        def rank(layout: str = layout) -> Mapping[str, Any]:
            with one_rank_of({"cp": 8}, setting.device) as mesh:
                sizes = {} if setting.tiny else {"hidden_size": 4096, "intermediate_size": 14336}
                model, inputs = llama(setting, layers=2, batch=1, seq=65536, **sizes)
                # A plan holds the model that it was made for.
                meta = nn.Module.to(copy.deepcopy(model), "meta"), {name: x.to("meta") for name, x in inputs.items()}
                plan = autopar.plan(meta[0], "cp=8", meta[1], layout=layout, cluster=cluster, cache=False)
                module = autopar.parallelize(model, mesh, inputs, layout=plan)
                del model
                found = measured(setting, module, inputs)
                computed = 1e3 * (plan.costs.compute.seconds + plan.costs.waiting_seconds)
                return {**found, **beside(found, computed, plan.memory_bytes / 2**30)}

        setting.part(name, rank)
