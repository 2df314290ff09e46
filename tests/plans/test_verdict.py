"""First line of a comparison: the fastest plan that fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from autopar.plans.views.summary import verdict


def plans(**found: tuple[float, bool]) -> Any:
    return {
        name: SimpleNamespace(step_seconds=seconds, fits=fits, memory_bytes=2**30 / seconds)
        for name, (seconds, fits) in found.items()
    }


def test_the_fastest_that_fits_comes_first() -> None:
    said = verdict(plans(ddp=(0.1, False), fsdp=(0.4, True), megatron=(0.2, True)))
    assert said == "fastest: megatron, 200 ms a step; fsdp × 2.00; ddp does not fit"


def test_where_none_fits_the_least_memory_is_told() -> None:
    assert verdict(plans(ddp=(1.0, False), fsdp=(2.0, False))) == "none fits in the memory; fsdp takes least, 512 MiB"
