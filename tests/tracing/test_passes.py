"""Each graph pass on a small model: the graph before and after it, as golden text in tests/tracing/golden."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node

import autopar
from autopar.ir.fx_graphs import remove_dead
from autopar.tracing.export import export as exporter
from autopar.tracing.export import intercept
from autopar.tracing.passes.normalise import PASSES

FOLDER = Path(__file__).parent / "golden"
# Functions of passes that run outside of `normalise`, by the module that calls them.
OUTSIDE = {"no_grad_regions": intercept, "drop_checks": exporter}


class Net(nn.Module):
    """A function as a model with a square matrix and a table of 10 rows."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.ones(4, 4))
        self.table = nn.Parameter(torch.ones(10, 4))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def no_grad(net: Net, x: Tensor) -> Tensor:
    h = x @ net.w
    with torch.no_grad():
        scale = h.abs().mean()
    return h / scale


def checks(net: Net, x: Tensor) -> Tensor:
    return (x @ net.w).double().relu()


def variants(net: Net, x: Tensor) -> Tensor:
    cache = torch.cat([x.new_zeros(0), x])
    pairs = torch.view_as_complex(cache.view(4, 1, 2).double()).expand(4, 3).clone()
    pairs[:, -1] = 1j
    return pairs.abs().type_as(net.w) + x.new_full((4, 3), 0.5) + torch.ones(3, device=x.device)


def annotated(net: Net, x: Tensor) -> Tensor:
    h = autopar.named(x @ net.w, "batch d_ff")
    return autopar.constrain(h, "batch -> dp").relu()


def losses(net: Net, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(x @ net.w, target), F.cross_entropy((x @ net.w).bfloat16(), target)


def shifted(net: Net, x: Tensor, target: Tensor) -> Tensor:
    logits = x.expand(2, 3, 4) @ net.w
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), target.expand(2, 3)[:, 1:].flatten())


def bags(net: Net, ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    rows = F.embedding_bag(ids, net.table, mode="mean")
    return rows, F.embedding_bag(ids.flatten(), net.table, offsets, mode="sum")


def sorted_rows(net: Net, x: Tensor, chosen: Tensor) -> Tensor:
    _, order = chosen.sort()
    moved = (x[order] @ net.w).relu()
    return moved[order.argsort()]


def expert_block(net: Net, x: Tensor, chosen: Tensor) -> Tensor:
    w = net.w.repeat(2, 2).bfloat16()  # the dtype of the kernel, and lines of 16 bytes
    stack = torch.stack([w, w + 1])
    hidden = torch.ops.autopar.expert_rows(x.repeat(1, 2).bfloat16(), stack, chosen, KERNEL) + stack[:, 0][chosen]
    return torch.ops.autopar.expert_rows(hidden.relu(), stack, chosen, KERNEL)


def masked(net: Net, x: Tensor) -> tuple[Tensor, ...]:
    place = torch.arange(4)
    seen = place <= place[:, None]
    window = seen & (place > place[:, None] - 2)
    return tuple(F.scaled_dot_product_attention(x, x, x, attn_mask=mask) for mask in (seen, window))


def documents(net: Net, x: Tensor, numbers: Tensor) -> Tensor:
    place = torch.arange(4)
    mask = (numbers[:, None] == numbers) & (place <= place[:, None])
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def grouped(net: Net, x: Tensor) -> Tensor:
    q, k = x.view(1, 6, 4, 2).transpose(1, 2), x[..., :4].view(1, 6, 2, 2).transpose(1, 2)
    wide = k[:, :, None].expand(1, 2, 2, 6, 2).reshape(1, 4, 6, 2)
    return F.scaled_dot_product_attention(q, wide, wide)


def paired(net: Net, x: Tensor, i: Tensor) -> Tensor:
    return (x @ net.w)[torch.arange(3), i]


X = torch.ones(3, 4)
KERNEL = "aten._grouped_mm.default"
INDEX = torch.tensor([1, 0, 1])
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "no_grad_regions": (no_grad, (X,)),
    "drop_checks": (checks, (X,)),
    "canonical_ops": (variants, (torch.ones(8),)),
    "read_annotations": (annotated, (X,)),
    "whole_loss": (shifted, (X, INDEX)),
    "mean_loss_to_sum": (losses, (X, INDEX)),
    "bags_to_rows": (bags, (torch.ones(3, 2, dtype=torch.int64), torch.tensor([0, 1, 5]))),
    "undo_sort": (sorted_rows, (X, INDEX)),
    "route_rows": (expert_block, (X, INDEX)),
    "read_masks": (masked, (torch.ones(1, 2, 4, 4),)),
    "repeated_heads": (grouped, (torch.ones(1, 6, 8),)),
    "paired_index": (paired, (X, INDEX)),
    "read_documents": (documents, (torch.ones(1, 2, 4, 4), torch.tensor([0, 0, 1, 1]))),
}


def text(graph: Graph) -> str:
    """Return the graph as one assignment a line, with shapes and what passes note on a value."""

    def value(node: Node) -> str:
        val = node.meta.get("val")
        return f"{val.dtype}{list(val.shape)}".removeprefix("torch.") if isinstance(val, Tensor) else type(val).__name__

    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {node.args[0]}")
        elif node.users or node.op == "call_function":
            arguments = [*map(str, node.args), *(f"{key}={argument}" for key, argument in node.kwargs.items())]
            op = node.target if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "__name__", "")
            call = "placeholder" if node.op == "placeholder" else f"{op}({', '.join(arguments)})"
            notes = {key: node.meta[key] for key in ("named", "constrain", "attention") if key in node.meta}
            notes = {key: note if isinstance(note, list) else str(note) for key, note in notes.items()}
            lines.append(f"{node.name}: {value(node)} = {call}{f'    # {notes}' if notes else ''}")
    return "\n".join(lines)


@pytest.mark.parametrize("name", [*OUTSIDE, *PASSES])
def test_pass_golden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    owner = OUTSIDE.get(name)
    run: Callable[..., None] = PASSES[name] if owner is None else getattr(owner, name)

    def show(graph: Graph, *rest: Any) -> None:
        before = text(graph)
        run(graph, *rest)
        remove_dead(graph)
        shown.append(f"before:\n{before}\n\nafter:\n{text(graph)}\n")

    if owner is None:
        monkeypatch.setitem(PASSES, name, show)
    else:
        monkeypatch.setattr(owner, name, show)
    function, inputs = CASES[name]
    exporter.export(Net(function), inputs)
    (found,) = shown
    before, after = found.split("\n\nafter:\n")
    assert before.removeprefix("before:\n") != after.rstrip(), "the model shows the pass"
    golden = FOLDER / f"{name}.txt"
    if not golden.exists():
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(found)
        raise AssertionError(f"{golden} is new: read it, and keep it")
    assert found == golden.read_text(), f"if this is meant, remove {golden}, run again, and read the difference"
