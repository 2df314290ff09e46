"""Time single ops, to find those that compute longer than they move bytes.

The cost model prices most ops by the bytes that they read and write. A GPU reaches that rate for nearly all ops; a CPU
core needs longer for a tanh than for the bytes of its values. Each op is timed alone, forward and backward. Its rate
is taken over the bytes that the cost model counts for it, so that price and measurement share one definition.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from autopar.cost.compute.attention_time import BACKWARD_PRODUCTS
from autopar.cost.compute.op_time import op_work, plain_name
from autopar.cost.hardware.cluster import Device
from autopar.mesh import SubMesh
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.time_slice import propagate_plan
from autopar.tracing.trace import named_graph

Function = Callable[..., torch.Tensor]
# Returns the seconds of one call.
Timer = Callable[[Callable[[], object]], float]
# Kernels of GPUs give each channel a processor: as many as models of images have.
CHANNELS = 256
# Values per op. On a GPU: more than its caches hold, and long beside a kernel launch.
NUMEL_CPU = 2**20
NUMEL_GPU = 2**26


@dataclass(frozen=True)
class OpTrial:
    """An op to time: its name in the graph (`plain_name`) and a function that calls it."""

    name: str
    function: Function
    # True where the input needs channels, height and width.
    image: bool = False


@dataclass(frozen=True)
class TimedOp:
    """Measured seconds of one op, and the bytes that the cost model counts for it."""

    name: str
    forward_bytes: float
    forward_seconds: float
    backward_bytes: float
    backward_seconds: float


# Ops that models call often; the memory stream prices all other ops.
TRIALS: tuple[OpTrial, ...] = (
    OpTrial("relu", F.relu),
    OpTrial("gelu", F.gelu),
    OpTrial("silu", F.silu),
    OpTrial("sigmoid", torch.sigmoid),
    OpTrial("tanh", torch.tanh),
    OpTrial("exp", torch.exp),
    OpTrial("log", torch.log),
    OpTrial("sin", torch.sin),
    OpTrial("cos", torch.cos),
    OpTrial("rsqrt", torch.rsqrt),
    OpTrial("pow", lambda x: torch.pow(x, 3.0)),
    OpTrial("softplus", F.softplus),
    OpTrial("leaky_relu", F.leaky_relu),
    OpTrial("elu", F.elu),
    OpTrial("softmax", partial(torch.softmax, dim=-1)),
    OpTrial("log_softmax", partial(torch.log_softmax, dim=-1)),
    OpTrial("cross_entropy_loss", lambda x: F.cross_entropy(x, x.new_zeros(len(x), dtype=torch.long))),
    OpTrial("layer_norm", lambda x: F.layer_norm(x, x.shape[-1:])),
    OpTrial("rms_norm", lambda x: F.rms_norm(x, x.shape[-1:])),
    OpTrial("native_dropout", partial(F.dropout, p=0.1, training=True)),
    OpTrial("cumsum", partial(torch.cumsum, dim=-1)),
    OpTrial("clone", lambda x: x.t().contiguous()),
    OpTrial("group_norm", lambda x: F.group_norm(x, 4), image=True),
    OpTrial("native_batch_norm_legit_functional", nn.BatchNorm2d(CHANNELS), image=True),
    OpTrial("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1), image=True),
    OpTrial("avg_pool2d", lambda x: F.avg_pool2d(x, 2), image=True),
    OpTrial("upsample_nearest2d", lambda x: F.interpolate(x, scale_factor=2.0), image=True),
)


class _SingleOp(nn.Module):
    """Model of one op."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        # Moving a module to a device changes it in place, and TRIALS serves all devices.
        self.function = copy.deepcopy(function)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def time_op(trial: OpTrial, numel: int, device: torch.device, seconds: Timer) -> TimedOp:
    """Time one op on about `numel` values, forward and backward."""
    x = (torch.rand(*_sizes(trial, numel), device=device) + 0.5).requires_grad_()
    model = _SingleOp(trial.function).to(device)
    forward_bytes, backward_bytes = _modelled_bytes(trial.name, model, x)
    forward = seconds(partial(model, x))
    return TimedOp(trial.name, forward_bytes, forward, backward_bytes, seconds(_backward(model(x), [x])))


def _sizes(trial: OpTrial, numel: int) -> tuple[int, ...]:
    if trial.image:
        side = min(32, max(2, int((numel / CHANNELS) ** 0.5)))
        return max(1, numel // (CHANNELS * side * side)), CHANNELS, side, side
    columns = min(1024, max(2, numel))
    return max(1, numel // columns), columns


def _modelled_bytes(name: str, model: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Return the bytes that the cost model counts for an op: forward, backward."""
    graph = named_graph(model, (x,))
    plan = propagate_plan(graph, choose_layout("", SubMesh({})), SubMesh({}))
    node = next(node for node in graph.nodes if plain_name(node.op) == name)
    bare = Device("any", 1.0, 1.0, 0.0, {"float32": 1.0})
    work = op_work(graph, node, plan.assignment.ops[node.name], graph.footprints[node.node], SubMesh({}), bare)
    return work.forward.bytes, work.backward.bytes


def _backward(result: torch.Tensor, inputs: list[torch.Tensor]) -> Callable[[], object]:
    """Return a function that runs the backward of a result, any number of times."""
    gradient = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)


def overhead_seconds(device: torch.device, seconds: Timer) -> float:
    """Return the mean seconds of a tiny op in a training step, over all trials, forward and backward.

    The ops run in turn, as in a model: one op repeated finds its code in the caches of a core.
    """
    models = [_SingleOp(trial.function).to(device) for trial in TRIALS]
    inputs = [torch.rand(*_sizes(trial, 1), device=device, requires_grad=True) for trial in TRIALS]
    gradients = [torch.ones_like(model(x)) for model, x in zip(models, inputs, strict=True)]

    def step() -> None:
        results = [model(x) for model, x in zip(models, inputs, strict=True)]
        torch.autograd.grad(results, inputs, gradients)

    return seconds(step) / (2 * len(TRIALS))


@dataclass(frozen=True)
class TimedAttention:
    """Measured seconds of fused attention."""

    causal: bool
    forward_seconds: float
    backward_seconds: float
    # FLOPs of the forward, without masked scores.
    flops: float
    dtype: str = "float32"
    head_dim: int = 64
    heads: int = 1
    # Queries of a head, and its keys.
    rows: int = 1
    # Excluded from the fit.
    left_out: bool = False

    def flops_per_second(self, backward: bool) -> float:
        if backward:
            return BACKWARD_PRODUCTS * self.flops / self.backward_seconds
        return self.flops / self.forward_seconds


@dataclass(frozen=True)
class AttentionTrial:
    """Fused attention to time: `rows` queries and as many keys in each head."""

    causal: bool
    rows: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    left_out: bool = False


def attention_trials(device_type: str) -> tuple[AttentionTrial, ...]:
    """Return the attention sizes to time, large enough to occupy a whole device.

    GPUs get two head dims, from which the time of the softmax is fitted; every fused kernel takes float16.
    """
    masks = (False, True)
    if device_type == "cpu":
        return tuple(AttentionTrial(causal, rows, 4, 64, torch.float32) for causal in masks for rows in (128, 256, 512))
    return tuple(
        AttentionTrial(causal, rows, 32, head_dim, torch.float16)
        for causal in masks
        for head_dim in (64, 128)
        for rows in (1024, 2048, 4096, 16384)
    )


def more_attention_trials(device_type: str) -> tuple[AttentionTrial, ...]:
    """Return a grid of sizes for a table; every other one is left out of the fit."""
    on_cpu = device_type == "cpu"
    heads, dtype = (4, torch.float32) if on_cpu else (32, torch.float16)
    lengths = (64, 128, 256, 512, 1024) if on_cpu else (512, 1024, 2048, 4096, 8192, 16384)
    return tuple(
        AttentionTrial(causal, rows, heads, head_dim, dtype, left_out=(i + j) % 2 == 1)
        for causal in (False, True)
        for j, head_dim in enumerate((32, 64, 128) if on_cpu else (64, 128))
        for i, rows in enumerate(lengths)
    )


def time_attention(trial: AttentionTrial, device: torch.device, seconds: Timer) -> TimedAttention:
    """Time fused attention, forward and backward."""
    rows, width = trial.rows, trial.head_dim
    shape = (1, trial.heads, rows, width)
    q, k, v = (torch.randn(shape, device=device).to(trial.dtype).requires_grad_() for _ in range(3))
    run = partial(F.scaled_dot_product_attention, q, k, v, is_causal=trial.causal)
    forward = seconds(run)
    backward = seconds(_backward(run(), [q, k, v]))
    share = (rows + 1) / (2 * rows) if trial.causal else 1.0
    flops = 4.0 * trial.heads * rows * rows * width * share
    dtype = str(trial.dtype).removeprefix("torch.")
    sizes = (width, trial.heads, rows)
    return TimedAttention(trial.causal, forward, backward, flops, dtype, *sizes, trial.left_out)
