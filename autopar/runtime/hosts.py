"""Answers to training hosts: Transformers' `Trainer`, Accelerate and PEFT find a parallel module ready to train.

Hosts wrap a model in DistributedDataParallel, and give each rank rows of its own, unless the model says that it owns
its placement and its gradients. Sharded models of transformers say so by attributes. A parallel module has these.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import AutoparError, ModuleAttributeError
from autopar.runtime.model_attributes import attribute_of

__all__ = ["HostAnswers", "RankSizes", "save_pretrained"]

MIXED = (
    "Accelerate casts around the forward of a model (mixed_precision={mode!r}), and a parallel module does not take "
    "that\nfix: parallelize(..., precision={precision!r}), and leave mixed_precision, or bf16 and fp16 of "
    "TrainingArguments, out"
)


@dataclass(frozen=True)
class RankSizes:
    """Numbers of ranks by what they share, under the names of `DistributedConfig` of transformers."""

    tp_size: int
    dp_size: int = 1
    dp_replicate_size: int = 1
    fsdp_size: int = 1
    ep_size: int = 1
    pp_size: int = 1


@dataclass(frozen=True)
class HostAnswers:
    """Answers of one parallel module."""

    local_inputs: bool
    device_type: str

    def announce(self, skeleton: nn.Module) -> None:
        """Put the numbers of ranks into the config of a transformers' model, where `Trainer` reads them."""
        config = getattr(skeleton, "config", None)
        # A config of transformers leaves this entry out of what it saves.
        if hasattr(config, "to_json_string") and not self.local_inputs:
            object.__setattr__(config, "distributed_config", RankSizes(dist.get_world_size()))

    def find(self, name: str) -> tuple[Any] | None:
        """Return the answer to an attribute, None if it is none of these."""
        match name:
            case "is_distributed_loading_by_transformers":
                # Hosts neither wrap nor move the module, and all ranks come to save it.
                return (True,)
            case "_tp_size":
                return (self._same_batch(),)
            case "tp_size":
                # By this one `Trainer` makes a ParallelismConfig, which Accelerate refuses on CPUs.
                return (None if self.device_type == "cpu" else self._same_batch(),)
            case "_is_accelerate_prepared":
                return (self._is_prepared(),)
        return None

    def _same_batch(self) -> int | None:
        """Return the number of ranks that get one and the same batch, as those of tensor parallelism do."""
        return None if self.local_inputs else dist.get_world_size()

    def _is_prepared(self) -> bool:
        """Return that Accelerate has nothing to do for the module; raise where it was to cast."""
        state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
        mode = "no" if state is None else str(state._shared_state.get("_mixed_precision", "no"))
        if mode != "no":
            raise AutoparError(MIXED.format(mode=mode, precision=mode if mode == "fp16" else "bf16"))
        return True


def save_pretrained(
    module: nn.Module,
    skeleton: nn.Module,
    whole: Callable[[], Mapping[str, Tensor]],
    is_first: bool,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    """Run the model's `save_pretrained` on the first rank, with the whole tensors."""
    own = attribute_of(module, skeleton, "save_pretrained")
    taken = inspect.signature(own).parameters
    if "state_dict" not in taken and all(one.kind != inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        raise ModuleAttributeError(
            f"{type(skeleton).__name__}.save_pretrained takes no state_dict: it would save the shards of one rank\n"
            "fix: save full_state_dict() of the parallel module"
        )
    if options.get("state_dict") is None:
        options["state_dict"] = whole()
    if is_first:
        with _alone(skeleton):
            try:
                own(*arguments, **options)
            except OSError as error:  # the other ranks wait to hear of it
                raise AutoparError(f"{type(skeleton).__name__}.save_pretrained failed: {error}") from error


@contextmanager
def _alone(skeleton: nn.Module) -> Iterator[None]:
    """Take the numbers of ranks out of the config, as the first rank saves whole tensors by itself."""
    config = getattr(skeleton, "config", None)
    sizes = getattr(config, "distributed_config", None)
    if isinstance(sizes, RankSizes):
        del config.distributed_config  # type: ignore[union-attr]
    try:
        yield
    finally:
        if isinstance(sizes, RankSizes):
            object.__setattr__(config, "distributed_config", sizes)
