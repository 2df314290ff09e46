"""What goes wrong on one rank, or on all: every rank ends soon, with an error that says what it is."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _resolve_process_group

import autopar
from autopar.lowering.collectives.process_groups import Groups, device_mesh
from autopar.mesh import Mesh
from autopar.sharding.layout.language import strategy_names
from examples.gpt import gpt
from tests.runtime.launcher import endings, launch
from tests.runtime.training import error_of

LOST, LIMIT_SECONDS = 1, 45
"""The rank that goes, and the time limit of the process group: on a busy machine ranks are late by some seconds."""

HUNG_UP = "Connection (closed|reset) by peer|Broken pipe"
"""Errors of a lost rank's peers: a socket is reset if it held bytes that nobody read, or was written to meanwhile."""


def small_gpt(**sizes: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return gpt(**{"batch": 4, "seq": 8, "vocab": 24, "d_model": 16, "layers": 1, **sizes})


def step_without_one(how: str) -> None:
    """A step that works; then one in which a rank is lost between the forward and the backward."""
    model, inputs = small_gpt()
    parallel = autopar.parallelize(model, "dp=2,tp=2", inputs, layout="megatron")
    parallel(**inputs).backward()
    loss = parallel(**inputs)
    if dist.get_rank() == LOST:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stuck":
            time.sleep(1000)
        raise ValueError("a mistake of the user's")
    loss.backward()


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "others"),
    [
        ("killed", -signal.SIGKILL, HUNG_UP),
        ("wrong", 1, HUNG_UP),
        ("stuck", None, f"Timed out waiting {LIMIT_SECONDS * 1000}ms"),
    ],
)
def test_a_rank_that_is_lost_in_mid_step_ends_the_others(how: str, code: int | None, others: str) -> None:
    # By torch's own limit for the groups of a mesh it would take half an hour.
    found = endings(step_without_one, how, ranks=4, limit_seconds=LIMIT_SECONDS, seconds=1200, lost=LOST)
    assert found[LOST].code == code
    survivors = [ending for rank, ending in enumerate(found) if rank != LOST]
    assert [ending.code for ending in survivors] == [1, 1, 1], found
    assert all("Error" in ending.log.splitlines()[-1] for ending in survivors if ending.log.strip())
    assert any(re.search(others, ending.log) for ending in survivors), [ending.log[-600:] for ending in survivors]


def with_mesh(mesh: str, **sizes: Any) -> tuple[nn.Module, str, dict[str, torch.Tensor]]:
    model, inputs = small_gpt(**sizes)
    return model, mesh, inputs


def refuse(folder: str) -> dict[str, str]:
    """What each mistake is answered with, on this rank."""
    other = dist.get_rank() == LOST

    def under(layout: Any, mesh: str = "dp=2,tp=2", **sizes: Any) -> str:
        return error_of(lambda: autopar.parallelize(*with_mesh(mesh, **sizes), layout=layout))

    image = nn.Conv2d(2, 4, 4), "dp=2,tp=2", (torch.zeros(4, 2, 8, 8),)
    found = {
        "unknown dim": under("bacth -> dp; * -> none"),
        "unknown axis": under("batch -> ddp; * -> none"),
        "unknown strategy": under("megatrn"),
        "indivisible": under("batch -> dp; heads -> tp; * -> none", heads=3, d_model=12),
        "whole": under(f"op {ATTENTION}[e -> tp]; * -> none"),
        "whole parameter": error_of(
            lambda: autopar.parallelize(*image, layout="use { kernel_height -> tp }; * -> none")
        ),
        "one axis twice": under("(batch, seq) -> dp; * -> none"),
        "mesh": under("ddp", mesh="dp=3"),
        "open mesh": under("ddp", mesh="dp=?,tp=3"),
    }
    for name in ("garbage", "missing", "directory"):
        found[name] = under(Path(folder, f"{name}.lay"))
    # One rank has another file, another layout, another model.
    found["one file"] = under(Path(folder, "garbage.lay" if other else "good.lay"))
    found["one layout"] = under(Path(folder, "other.lay" if other else "good.lay"))
    found["one shape"] = under("ddp", **({"d_model": 32} if other else {}))
    found["afterwards"] = under("ddp")
    return found


def test_mistakes_are_errors_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "garbage.lay").write_bytes(b"\x80\x04\x95garbage")
    (tmp_path / "directory.lay").mkdir()
    (tmp_path / "good.lay").write_text("# good\nbatch -> dp; * -> none")
    (tmp_path / "other.lay").write_text("# other\nbatch -> tp; * -> none")
    for rank, found in enumerate(launch(refuse, str(tmp_path), ranks=4)):
        garbage = (
            f"E0: {tmp_path}/garbage.lay is no text: 'utf-8' codec can't decode byte 0x80 in position 0: invalid start "
            "byte\nfix: give a layout file, in UTF-8"
        )
        first = "" if rank == LOST else "rank 1 stopped, so this rank stops as well: "
        assert found["one file"] == first + garbage
        expected = {**MESSAGES, "garbage": garbage}
        for name, why in (("missing", "No such file or directory"), ("directory", "Is a directory")):
            expected[name] = f"E0: {tmp_path}/{name}.lay cannot be read: {why}\nfix: give a layout file"
        for name, message in expected.items():
            assert re.sub(r"\.py:\d+", ".py:LINE", found[name]) == message, name
        assert found.keys() == expected.keys() | {"one file"}


def test_groups_of_a_mesh_keep_the_limit_of_the_process_group(tmp_path: Path) -> None:
    found = endings(report_limits, str(tmp_path), ranks=4, limit_seconds=97, seconds=1200)
    assert [ending.code for ending in found] == [0] * 4, found
    for rank in range(4):
        assert set((tmp_path / str(rank)).read_text().split()) == {"97.0"}


def report_limits(folder: str) -> None:
    groups = Groups(device_mesh(Mesh("a=2,b=2")))
    names = [groups.of(axes).name for axes in (("a",), ("b",), ("a", "b"))]
    backends = [_resolve_process_group(name)._get_backend(torch.device("cpu")) for name in names]
    limits = [str(backend.options._timeout.total_seconds()) for backend in backends]
    Path(folder, str(dist.get_rank())).write_text(" ".join(limits))


ATTENTION = "@blocks.0.attention/scaled_dot_product_attention"

NAMES = "fix: the names are"
STRATEGIES = ", ".join(strategy_names())

MESSAGES = {
    "unknown dim": (
        "E1: there is no dim 'bacth'; did you mean 'batch'?\n"
        "  <layout>:1 | bacth -> dp; * -> none\n"
        "             | ^\n"
        f"{NAMES} batch, d0, d_ff, d_model, head_dim, heads, position, seq, vocab"
    ),
    "unknown axis": (
        "E1: there is no axis 'ddp'; did you mean 'dp'?\n"
        "  <layout>:1 | batch -> ddp; * -> none\n"
        "             |          ^\n"
        f"{NAMES} dp, tp"
    ),
    "unknown strategy": f"E1: there is no strategy 'megatrn'; did you mean 'megatron'?\n{NAMES} {STRATEGIES}",
    "indivisible": (
        "E4: the dim 'heads' of blocks.0.attention.qkv.weight can take no alternative of its rule: "
        "tp = 2 does not divide 3\n"
        "  <layout>:1 | batch -> dp; heads -> tp; * -> none\n"
        "             |              ^\n"
        "fix: add one, as in 'tp | none', allow uneven shards with 'pad', or choose a mesh that divides it"
    ),
    "whole": (
        "E5: the op blocks.0.attention/scaled_dot_product_attention (aten.scaled_dot_product_attention.default) "
        "cannot be split as it is pinned\n"
        "  rule  a h s e!, a h t! e!, a h t! v, ? -> a h s v; linear 2; lower s causal_rows\n"
        "  e: whole, extent 4, over tp=2\n"
        "  line  gpt.py:LINE: y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)\n"
        "  <layout>:1 | op @blocks.0.attention/scaled_dot_product_attention[e -> tp]; * -> none\n"
        "             | ^\n"
        "fix: pin a factor that the rule lets split, in shards of one size that its operands can be brought into"
    ),
    "whole parameter": (
        "E5: the op /conv2d (aten.conv2d.default) cannot be split as the layout requires: "
        "weight[channels.1 channels kernel_height kernel_width] used with kernel_height -> tp, "
        "bias[channels.1] used whole\n"
        "  rule  b i a c, o i d! e!, o -> b o a c; halo a kernel=4 stride=1 padding=0 dilation=1; "
        "halo c kernel=4 stride=1 padding=0 dilation=1; linear 0+2 1+2\n"
        "  line  conv.py:LINE: return F.conv2d(\n"
        "  the factor d cannot be split by tp = 2: the op needs all of it\n"
        "fix: split another dim of these parameters where they are used, or none: use @name { * -> none }"
    ),
    "one axis twice": (
        "E3: the dims 'batch' and 'seq' of ids both claim axis 'dp'\n"
        "  <layout>:1 | (batch, seq) -> dp; * -> none\n"
        "             | ^\n"
        "fix: lower the priority of one, as in 'seq -> tp | none !1'"
    ),
    "mesh": (
        "the mesh dp=3 has 3 ranks, but 4 processes are running\nfix: torchrun --nproc-per-node 3, or a mesh of 4"
    ),
    "open mesh": (
        "the mesh dp=?,tp=3 needs a multiple of 3 ranks, but 4 processes are running\n"
        "fix: torchrun --nproc-per-node 3, so that each node has whole groups of tp=3; or leave one of these sizes "
        "open, too"
    ),
    "one layout": (
        "the ranks differ in line 1 of the layout: batch -> dp on rank 0, batch -> tp on rank 1\n"
        "fix: call parallelize on every rank with the same arguments; a layout file must be the same for all"
    ),
    "one shape": (
        "the ranks differ in shape of parameter tokens.weight: "
        "float32[24, 16] on rank 0, float32[24, 32] on rank 1\n"
        "fix: build the same model on every rank: the same seed before it is built, or the same weights loaded into it"
    ),
    "afterwards": "no error",
}
