"""Refuse models that are parallel already: their tensors are shards, and a trace would take them for the whole."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError

__all__ = ["AlreadyParallel", "check_plain"]


class AlreadyParallel(nn.Module):
    """Base class of the modules that autopar hands out."""


def check_plain(model: nn.Module) -> None:
    """Raise if a model, or a part of it, is parallel already."""
    for name, module in model.named_modules():
        where = f" (its {name})" if name else ""
        if isinstance(module, AlreadyParallel):
            raise AutoparError(
                f"{type(model).__name__}{where} is a parallel module already\n"
                "fix: parallelize the model itself, once; another layout needs the model again"
            )
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise AutoparError(
                f"{type(model).__name__}{where} is wrapped in {type(module).__name__}, which would send gradients too\n"
                'fix: give the model inside, model.module; layout="ddp" does what the wrapper does'
            )
    for name, parameter in nn.Module.named_parameters(model):
        if isinstance(parameter, DTensor):
            raise AutoparError(
                f"the parameter {name} is a DTensor, as fully_shard and parallelize_module make them\n"
                'fix: give the model without them; layout="fsdp" does what fully_shard does'
            )
