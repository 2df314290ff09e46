"""Numbered combinations of features: a model, a mesh, a layout, a precision and what a training loop does.

A case is right if losses, all gradients and buffers of three steps are those of one process. A refusal
(`AutoparError`) is counted by its reason. `python -m benchmarks.combinations --case N` runs one of them again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from autopar.mesh import Mesh
from tests.runtime.combined_models import MODELS, SEQ, SmallModel

__all__ = ["Combination", "combination"]

STRATEGIES = (
    "ddp(dp={0})",
    "fsdp(fsdp={0})",
    "zero1(dp={0})",
    "megatron(dp={1}, tp={0})",
    "megatron_sp(dp={1}, tp={0})",
    "fsdp_tp(fsdp={1}, tp={0})",
)
ROWS = ("ddp(dp={0})", "fsdp(fsdp={0})", "zero1(dp={0})")
EXPERTS = (
    "gshard_moe(dp={1}, ep={0})",
    "batch -> {0}; @*experts* {{ expert -> {0} }}; * -> none",
    "batch -> {0}; @*experts* {{ expert -> {0} }}; * -> none; "
    "param, grad, opt {{ expert -> {0} | none, * -> {2} | none }}",
    "batch -> {2}; @*experts* {{ expert -> {0} }}; * -> none",
)
IMAGES = (
    "spatial(dp={1}, sy={0}, sx=none)",
    "batch -> {1}; height -> {0} pad; * -> none",
    "height -> {0} pad; width -> {1}; * -> none",
)
# Axes: the first, the second or none, the second or the first.
TEXTS = (
    "batch -> {0}; * -> none; param, grad, opt {{ * -> {0} | none }}",
    "batch -> {0}*{2}; * -> none; param, grad, opt {{ * -> {0} | none }}",
    "batch -> {0}; * -> none; opt {{ * -> {0} | none }}",
    "batch -> {0}; * -> none; grad, opt {{ * -> {0} | none }}",
    "batch -> {1}; * -> none; param, grad, opt {{ * -> {0} | none }}",
    "batch -> {0} pad; vocab -> {0} pad | none !5; * -> none",
    "batch -> {1}; vocab -> {0} pad | none !1; * -> none; param, grad, opt {{ * -> {0}*{1} | {0} | none }}",
    "batch -> {1}; (heads, kv_heads, d_ff) -> {0} | none; vocab -> {0} pad | none !1; * -> none; "
    "opt {{ * -> {2} | none }}",
    "batch -> {0} | none; d_model -> {2} | none !3; * -> none",
    "batch -> {1}; d_model -> {0}; * -> none",
    "batch -> {0} | none; d_ff -> {2}*{0} | {2} | none !5; * -> none; regather @*",
)
SEQUENCES = (
    "batch -> {1}; seq -> {0}; * -> none",
    "batch -> {1}; seq -> {0}; * -> none; param, grad, opt {{ * -> {0} | none }}",
    "batch -> {1}; seq -> {0}*{2}; * -> none",
    "batch -> {1}; seq -> {0} pad | none; (heads, kv_heads, d_ff) -> {2} | none !1; "
    "vocab -> {2} pad | none !2; * -> none",
    "batch -> {1}; seq -> {0}; heads -> none; * -> none; @*attention* {{ heads -> {0} | none, seq -> none }}",
)
ATTENTION = (
    "op @*/folded_attention[s -> {0}]",
    "op @*/folded_attention[h -> {0}]",
    "op @*/folded_attention[s -> {0}, t -> {0}]",
)
SEARCHES = (
    None,
    "batch -> ?; * -> ?",
    "micro ?; batch -> ?",
    "micro ?{{2, 4}}; batch -> {0}; * -> ?",
    "batch -> {0}; param, grad, opt {{ * -> ? }}; * -> none",
    "batch -> {0}; recompute full @*; * -> ?",
)
SCHEDULES = ("gpipe", "1f1b", "1f1b(+1)", "interleaved(2)", "zero_bubble")
RECOMPUTE = ("selective", "full", "full", "offload", "keep(product every 2)")
# Meshes of other sizes than two and four, by whether they have stages, and the first case that may have one.
ODD_FROM = 90_000
ODD_MESHES = {
    False: ("a=5", "a=3,b=2", "a=2,b=3", "a=2,b=2,c=2"),
    True: ("pp=3,a=2", "pp=2,a=3", "pp=5", "pp=2,a=2,b=2"),
}
# Rows by the number of ranks; of others eight or sixteen.
BATCHES = {3: (12, 24), 5: (10, 20), 6: (12, 24)}
HALF = (
    "bf16",
    "bf16",
    "bf16, reduce=bf16",
    "bf16-pure",
    "fp16",
    "fp8",
    "fp8-rows",
    "fp8, gathers=fp8",
    "bf16, linears=fp8-rows, gathers=fp8",
)


@dataclass(frozen=True)
class Combination:
    """All that was drawn for a case."""

    case: int
    model: str
    mesh: str
    # None leaves everything to the search.
    layout: str | None
    # Without one the model is in float64, or float32 where it has experts.
    precision: str | None
    batch: int
    outputs: str
    # Of a search: this part of the memory that data parallelism takes.
    memory: float | None = None
    # Batch and length of the second step.
    second: tuple[int, int] | None = None
    # The loss that is trained, and True if it is multiplied by another number in each call.
    loss: str = "own"
    scales: bool = False
    # Calls of a step; all but the last one are under `no_sync` or not.
    calls: int = 1
    no_sync: bool = False
    compiled: str = ""
    # How the state goes into a new module after the first step, and the layout of that module.
    reloaded: str = ""
    next_layout: str | None = None
    has_eval: bool = False
    generates: bool = False
    has_frozen: bool = False
    optimizer: str = "sgd"
    offload_states: bool = False
    clips: bool = False
    local_inputs: bool = False

    def __str__(self) -> str:
        drawn = {name: value for name, value in vars(self).items() if value not in (None, False, "", "own")}
        return f"--case {drawn.pop('case')}: " + ", ".join(f"{name}={value!r}" for name, value in drawn.items())

    @property
    def small(self) -> SmallModel:
        return MODELS[self.model]

    @property
    def ranks(self) -> int:
        return Mesh(self.mesh).size


def combination(case: int) -> Combination:
    """Draw the case of this number."""
    draw = random.Random(f"combination {case}")
    name = draw.choice(list(MODELS))
    small = MODELS[name]
    ranks = draw.choice((2, 2, 2, 2, 3, 4, 4, 4))
    has_stages = draw.random() < 0.25
    mesh, axes = _mesh(draw, ranks, has_stages)
    precision = _precision(draw, name, small)
    if (odd := _odd_mesh(case, has_stages)) is not None:
        mesh, axes = odd
        ranks = Mesh(mesh).size
    searches = draw.random() < 0.1
    before: list[str] = []
    pieces, outputs = draw.random() < 0.15 and small.is_causal, draw.choice(("full", "sharded", "loss"))
    if has_stages:
        schedule = draw.choice(SCHEDULES)
        before.append(f"pipeline pp {'?' if searches and draw.random() < 0.3 else schedule}")
    micro = draw.random() < (0.6 if has_stages else 0.35)
    if micro and not (searches and draw.random() < 0.5):
        count = draw.choice((2, 2, 3) if ranks % 3 == 0 else (2, 2, 4))
        # Of few, as the batch has few rows.
        halves = count == 2 and random.Random(f"halves {case}").random() < 0.4
        before.insert(0, f"micro {count}{' halves' * halves}")
    if pieces:
        before.append(f"pieces {draw.choice((2, 3, 4))}")
    layout, has_rows = _layout(draw, small, axes, "a=2" in mesh and outputs != "sharded", searches, before)
    batch = draw.choice(BATCHES.get(ranks, (8, 8, 16)))
    if " pad" in (layout or "") and draw.random() < 0.2:
        batch = draw.choice((5, 7, 9))
    calls = draw.choice((1, 1, 1, 1, 2, 3))
    has_logits = name not in ("gpt", "gshard", "resnet") and outputs != "loss" and not pieces
    reloaded = draw.choice(("", "", "", "full", "shards", "torch"))
    return Combination(
        case,
        name,
        mesh,
        layout,
        precision,
        batch,
        outputs="loss" if pieces else outputs,
        memory=draw.uniform(0.4, 1.0) if searches else None,
        second=_second(draw, small, batch) if draw.random() < 0.25 else None,
        loss=draw.choice(("logits", "both", "both")) if has_logits and draw.random() < 0.25 else "own",
        scales=draw.random() < 0.3,
        calls=calls,
        no_sync=calls > 1 and draw.random() < 0.7,
        compiled=_compiled(draw, layout),
        reloaded=reloaded,
        next_layout=_next(draw, mesh, axes) if reloaded and draw.random() < 0.5 else None,
        has_eval=draw.random() < 0.3,
        generates=small.generates and draw.random() < 0.4 and outputs != "loss" and not pieces,
        has_frozen=draw.random() < 0.15,
        optimizer=draw.choice(("sgd", "adamw", "adamw")) if precision in (None, "fp64") else "sgd",
        offload_states=draw.random() < 0.1,
        clips=draw.random() < 0.2,
        local_inputs=has_rows and len(axes) == 1 and not has_stages and batch % ranks == 0 and draw.random() < 0.15,
    )


def _compiled(draw: random.Random, layout: str | None) -> str:
    if draw.random() > 0.15:
        return ""
    leaves_layers = any(word in (layout or "") for word in ("micro", "pipeline", "regather", "recompute"))
    return "module" if leaves_layers else draw.choice(("layers", "layers", "module"))


def _mesh(draw: random.Random, ranks: int, has_stages: bool) -> tuple[str, list[str]]:
    """Return the mesh, and its axes that split tensors."""
    if has_stages:
        if ranks == 4 and draw.random() < 0.7:
            return "pp=2,a=2", ["a"]
        return f"pp={ranks}", []
    if ranks == 4 and draw.random() < 0.7:
        return "a=2,b=2", draw.sample(["a", "b"], 2)
    return f"a={ranks}", ["a"]


def _odd_mesh(case: int, has_stages: bool) -> tuple[str, list[str]] | None:
    """Return the mesh that some cases have in place of a usual one, and its axes that split tensors."""
    draw = random.Random(f"odd {case}")
    if case < ODD_FROM or draw.random() > 0.15:
        return None
    mesh = draw.choice(ODD_MESHES[has_stages])
    axes = [axis for axis in Mesh(mesh).whole if axis != "pp"]
    return mesh, draw.sample(axes, len(axes))


def _precision(draw: random.Random, name: str, small: SmallModel) -> str | None:
    if small.has_experts:
        # Products by group have no kernel in float64.
        return None if name == "gshard" else "fp32"
    drawn = draw.random()
    return None if drawn < 0.5 else "fp32" if drawn < 0.55 else "fp64" if drawn < 0.6 else draw.choice(HALF)


def _layout(
    draw: random.Random, small: SmallModel, axes: list[str], is_of_two: bool, searches: bool, before: list[str]
) -> tuple[str | None, bool]:
    """Return the layout, and True where it splits nothing but rows."""
    lines, names = list(before), [*axes, *axes]
    first, second = [*axes, "none", "none"][:2]
    places: tuple[Any, ...] = (first, second, names[1] if names else "none")
    if searches:
        text = draw.choice(SEARCHES)
        if text is None and not lines:
            return None, False
        return "; ".join([*lines, (text or "batch -> ?; * -> ?").format(*places)]), False
    if draw.random() < 0.3:
        lines.append(f"regather @{small.layers if small.layers and draw.random() < 0.3 else '*'}")
    if small.layers and draw.random() < 0.35:
        lines.append(f"recompute {draw.choice(RECOMPUTE)} @{small.layers}")
    if small.routes_rows and draw.random() < 0.25:
        lines.append("capacity 3")  # six experts, of which each token takes two: none is ever full
    if not axes:
        return "; ".join([*lines, "* -> none"]), False
    drawn = draw.random()
    if small.is_causal and drawn < 0.25:
        if draw.random() < 0.6:
            lines.insert(0, f"fold seq {draw.choice((2, 4))}")
            if draw.random() < 0.6:
                lines.append(draw.choice(ATTENTION).format(first))
        base = draw.choice([text for text in SEQUENCES if _has_dims(text, small)])
    elif small.has_experts and drawn < 0.6:
        base = draw.choice(EXPERTS) if small.routes_rows else EXPERTS[0]
    elif not small.has_length and drawn < 0.4:
        base = draw.choice(IMAGES)
    elif drawn < 0.6 and is_of_two and draw.random() < 0.1:
        base = "batch -> {0} by 3:1; * -> none"
    elif drawn < 0.55:
        base = draw.choice(STRATEGIES)
    elif drawn < 0.8:
        base = draw.choice([text for text in TEXTS if _has_dims(text, small)])
    else:
        return "; ".join([*lines, _random_rules(draw, small, axes)]), False
    text = base.format(*places).replace("none*", "").replace("*none", "").replace("a*a", "a")
    return "; ".join([*lines, text]), base in ROWS


def _has_dims(text: str, small: SmallModel) -> bool:
    return all(dim in small.dims for dim in ("heads", "kv_heads", "vocab", "d_model", "d_ff") if dim in text)


def _random_rules(draw: random.Random, small: SmallModel, axes: list[str]) -> str:
    places = [*axes, *axes, "none", "*".join(axes)]
    lines = []
    for dim in small.dims:
        place = draw.choice(places)
        if draw.random() < 0.7:
            pad = draw.choice((" pad", ""))
            lines.append(f"{dim} -> none" if place == "none" else f"{dim} -> {place}{pad} | none !{draw.randrange(50)}")
    if draw.random() < 0.6:
        lines.append("* -> none")
    if draw.random() < 0.5:
        kinds = draw.choice(("param", "param, grad, opt", "opt", "grad, opt"))
        lines.append(f"{kinds} {{ * -> {draw.choice(places[:-2])} | none }}")
    for kind in ("act", "use", "input", "output"):
        if draw.random() < 0.15:
            lines.append(
                f"{kind} {{ {draw.choice(small.dims)} -> {draw.choice(places[:2])} | none !{draw.randrange(50)} }}"
            )
    return "; ".join(lines) or "* -> none"


def _second(draw: random.Random, small: SmallModel, batch: int) -> tuple[int, int]:
    lengths = (SEQ, SEQ + 8, 2 * SEQ, SEQ - 5) if small.has_length else (SEQ,)
    return draw.choice((batch, 2 * batch)), draw.choice(lengths)


def _next(draw: random.Random, mesh: str, axes: list[str]) -> str:
    """Return a layout for the module that goes on, on the same mesh."""
    stages = "pipeline pp gpipe; " if "pp" in mesh else ""
    if not axes:
        return stages + "* -> none"
    return stages + draw.choice(("ddp(dp={0})", "fsdp(fsdp={0})", "zero1(dp={0})")).format(axes[0])
