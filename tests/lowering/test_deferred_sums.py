"""Sums that pins hold back, gradients that they put off, and what a layout leaves to choose; on simulated ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.sharding.layout.language import choose_layout, parse_layout
from autopar.sharding.propagation import propagate
from autopar.sharding.reshard_insertion import inserted_reshards
from autopar.tracing.trace import trace
from tests.ranks import difference

TP = {"tp": 2}


class Branches(nn.Module):
    """Two products of one input, added; a scale; a norm of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.left, self.right = nn.Linear(12, 8), nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.randn(8))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        return self.norm((self.left(h) + self.right(h)) * self.scale)


DIMS = {"x": "batch d_model", "up.weight": "d_ff d_model"}
MLP = "d_ff -> tp; * -> none"


@pytest.fixture(scope="module")
def branches() -> tuple[NamedGraph, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.float64)
    return trace(Branches().double(), (x,), dims=DIMS), x


def sent(graph: NamedGraph, layout: str, axes: Mapping[str, int], params: bool = False) -> Counter[str]:
    """Collectives by direction, kind and tensor."""
    found = inserted_reshards(graph, propagate(graph, parse_layout(layout), axes))
    return Counter(
        f"{way} {step.kind.value} {one.tensor}"
        for one in found
        for way, step in one.collectives()
        if params or graph.tensors[one.tensor].kind != "param"
    )


def sent_bytes(graph: NamedGraph, layout: str, axes: Mapping[str, int]) -> int:
    found = inserted_reshards(graph, propagate(graph, parse_layout(layout), axes))
    return sum(step.sent_numel * one.itemsize for one in found for _, step in one.collectives())


# -- pins -------------------------------------------------------------------------------------------------------------


def test_sums_that_are_added_are_made_once_also_where_they_are_pinned(branches: tuple[NamedGraph, Tensor]) -> None:
    graph, x = branches
    once = "@left/linear[* -> none] + partial(tp); @right/linear[* -> none] + partial(tp)"
    free = sent(graph, MLP, TP)
    assert [what for what in free if what.startswith("forward")] == ["forward all_reduce /add"]
    apart = sent(graph, f"{MLP}; op @/add[none -> tp]", TP)
    assert apart["forward all_reduce left/linear"] == apart["forward all_reduce right/linear"] == 1
    pinned = sent(graph, f"{MLP}; {once}", TP)
    assert [what for what in pinned if what.startswith("forward")] == ["forward all_reduce /add"]
    assert difference(graph, f"{MLP}; {once}", TP, [x]) < 1e-12


def test_a_sum_passes_through_what_is_linear_in_it(branches: tuple[NamedGraph, Tensor]) -> None:
    graph, x = branches
    through = "; ".join(f"@{name}[* -> none] + partial(tp)" for name in ("left/linear", "right/linear", "/add", "/mul"))
    assignment = propagate(graph, parse_layout(f"{MLP}; {through}"), TP)
    assert str(assignment.ops["/add"].choice) == "0+1 partial(tp)"
    assert str(assignment.ops["/mul"].choice) == "0 partial(tp)"
    operands = assignment.ops["/mul"].operands
    assert operands[1] is not None
    assert operands[1].broadcast == {"tp"}, "each rank's product has a part of the scale's gradient"
    found = sent(graph, f"{MLP}; {through}", TP, params=True)
    assert [what for what in found if what.startswith("forward")] == ["forward all_reduce /mul"]
    assert found["backward all_reduce scale"] == 1
    assert difference(graph, f"{MLP}; {through}", TP, [x]) < 1e-12


def test_a_whole_value_can_be_pinned_to_be_a_sum(branches: tuple[NamedGraph, Tensor]) -> None:
    graph, x = branches
    text = "* -> none; @up/linear[* -> none] + partial(tp); @norm/layer_norm[* -> none] + partial(tp)"
    assignment = propagate(graph, parse_layout(text), TP)
    assert assignment.values["up/linear"].partial == {"tp"}
    assert difference(graph, text, TP, [x]) < 1e-12, "a result that is pinned is handed out whole all the same"


def test_gradients_can_be_put_off(branches: tuple[NamedGraph, Tensor]) -> None:
    graph, x = branches
    text = "* -> none; @scale[* -> none] + broadcast(tp)"
    assert sent(graph, "* -> none", TP, params=True) == {}
    taken = {"backward all_reduce scale": 1, "backward all_reduce /add": 1}
    assert sent(graph, text, TP, params=True) == taken, "an op that puts one gradient off puts all of them off"
    assert str(propagate(graph, parse_layout(text), TP).ops["/mul"].choice) == "broadcast(tp)"
    assert difference(graph, text, TP, [x]) < 1e-12
    early = f"{MLP}; @/relu[d_ff -> none] + broadcast(tp)"
    assert propagate(graph, parse_layout(early), TP).values["/relu"].broadcast == {"tp"}
    assert difference(graph, early, TP, [x]) < 1e-12


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        (
            "@/relu[d_ff -> tp] + partial(tp)",
            "E3: axis 'tp' splits the dim 'd_ff' of /relu, and is pinned to make it partial or broadcast\n",
        ),
        ("@/relu[* -> none] + partial(tp) + broadcast(tp)", "E3: axis 'tp' stands twice in this pin: "),
        (
            "@/relu[* -> none] + partial(tp); @/re*[* -> none] + broadcast(tp)",
            "E2: two pins of /relu differ about its partial sums\n",
        ),
        (
            "@scale[* -> none] + partial(tp)",
            "E5: scale cannot be pinned to be partial: it is a param, no result of an op\n",
        ),
    ],
)
def test_pins_that_cannot_be(branches: tuple[NamedGraph, Tensor], pin: str, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        propagate(branches[0], parse_layout(f"* -> none; {pin}", "my.lay"), TP)
    assert str(error.value).startswith(message)
    assert "my.lay:1" in str(error.value)


# -- what is left to choose -------------------------------------------------------------------------------------------

BOTH = {"dp": 2, "tp": 4}
CANDIDATES = ("tp", "dp*tp", "dp")


@pytest.mark.parametrize("batch", ["batch -> dp !1", "batch -> none", "batch -> dp*tp !1"])
def test_a_hole_takes_the_candidate_with_the_fewest_bytes(branches: tuple[NamedGraph, Tensor], batch: str) -> None:
    graph, x = branches
    rest = f"{batch} | none; * -> none".replace("none | none", "none").replace("!1 | none", "| none !1")
    layout = f"d_ff -> ?{{{', '.join(CANDIDATES)}}} | none; {rest}"
    tried = {}
    for candidate in CANDIDATES:
        tried[candidate] = sent_bytes(graph, f"d_ff -> {candidate} | none; {rest}", BOTH)
    assert sent_bytes(graph, layout, BOTH) == min(tried.values())
    assert len(set(tried.values())) > 1, "else this shows nothing"
    assert difference(graph, layout, BOTH, [x]) < 1e-12


def test_a_split_that_may_extend(branches: tuple[NamedGraph, Tensor]) -> None:
    graph, _ = branches
    axes = {"dp": 2, "tp": 2}
    plain, more = (sent_bytes(graph, f"d_ff -> {place}; * -> none", axes) for place in ("tp", "tp*dp"))
    assert sent_bytes(graph, "d_ff -> tp?; * -> none", axes) == min(plain, more)


def test_candidates_that_cannot_be_had_are_passed_over(branches: tuple[NamedGraph, Tensor]) -> None:
    graph, _ = branches
    axes = {"dp": 8, "tp": 2}
    assignment = propagate(graph, parse_layout("d_ff -> ?{dp, tp}; * -> none"), axes)
    assert assignment.stored["up.weight"].splits[0] == ("tp",), "8 does not divide 12"
    with pytest.raises(LayoutError, match=r"E4: the dim 'd_ff' of up\.weight"):
        propagate(graph, parse_layout("d_ff -> ?{dp, dp*tp}; * -> none"), axes)


def test_the_candidates_of_a_strategy_are_axes_too(branches: tuple[NamedGraph, Tensor]) -> None:
    text = "strategy mine\nd_ff -> ?{dp*tp, ep}; heads -> tp?; * -> none"
    chosen = choose_layout(text, TP)
    assert propagate(branches[0], chosen, TP).stored["up.weight"].splits[0] == ("tp",), "the mesh lacks dp and ep"


def test_many_holes_are_decided_in_turn(branches: tuple[NamedGraph, Tensor]) -> None:
    graph, x = branches
    names = [tensor.name for tensor in graph.tensors.values() if len(tensor.shape) == 2]
    pins = "; ".join(f"@{name}[{graph.tensors[name].dims[-1]} -> ?{{dp, tp}}]" for name in names)
    axes = {"dp": 2, "tp": 2}
    assert 2 ** len(names) > 32
    worst = max(sent_bytes(graph, f"* -> none; {pins}".replace("?{dp, tp}", axis), axes) for axis in axes)
    layout = f"* -> none; {pins}"
    assert sent_bytes(graph, layout, axes) <= worst
    assert difference(graph, layout, axes, [x]) < 1e-12


# -- one layout for several -------------------------------------------------------------------------------------------


def test_same_takes_over_what_is_said_about_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    graph = trace(model, (x,), dims={"input": "batch d", "0.weight": "e d", "2.weight": "f e"})
    said = "param, use { e -> tp, d -> none, f -> none }"
    free = propagate(graph, parse_layout("@0.weight[e -> tp, d -> none]"), TP)
    assert free.stored["2.weight"].splits == ((), ())
    both = propagate(graph, parse_layout("@0.weight[e -> tp, d -> none]; same @2.weight @0.weight"), TP)
    assert both.stored["2.weight"].splits == both.stored["0.weight"].splits == (("tp",), ())
    assert both.values["2.weight"].splits == (("tp",), ())
    assert difference(graph, "@0.weight[e -> tp, d -> none]; same @2.weight @0.weight", TP, [x]) < 1e-12
    values = propagate(graph, parse_layout("@0/linear[e -> tp]; same @0/linear @2/linear"), TP).values
    assert values["0/linear"].splits[1] == values["2/linear"].splits[1] == ("tp",)
    assert propagate(graph, parse_layout(said), TP).stored["2.weight"].splits == ((), ("tp",))


# -- what ops send themselves -----------------------------------------------------------------------------------------


def test_what_an_op_sends_itself_counts() -> None:
    """A softmax along rows that are split, whose result is wanted split by columns: the rows are exchanged first."""
    graph = trace(nn.Softmax(dim=0).double(), (torch.randn(8, 8, dtype=torch.float64),), dims={"input": "n d"})
    assignment = propagate(graph, parse_layout("input { n -> tp, d -> none }; output { d -> tp, n -> none }"), TP)
    (node,) = graph.nodes
    (((factor, _), _),) = assignment.ops[node.name].choice.splits
    assert graph.dims[node.factors[factor]].name == "d"


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("seq", "ranks"), [(6, 2), (5, 2), (5, 4)])
@pytest.mark.parametrize("shape", ["one for all", "of each row", "of each head"])
def test_masked_attention_with_queries_split_over_the_sequence(seq: int, ranks: int, shape: str) -> None:
    torch.manual_seed(0)
    lead = {"one for all": (), "of each row": (3, 1), "of each head": (3, 2)}[shape]
    mask = torch.rand(*lead, seq, seq) < 0.6
    mask |= torch.eye(seq, dtype=torch.bool)
    x = torch.randn(3, seq, 8, dtype=torch.float64)
    graph = trace(Masked().double(), (x, mask), dims={"x": "batch seq d_model"})
    layout = "seq -> tp pad; * -> none"
    assert difference(graph, layout, {"tp": ranks}, [x, mask]) < 1e-12
    node = next(node for node in graph.nodes if "attention" in node.op)
    op_assignment = propagate(graph, parse_layout(layout), {"tp": ranks}).ops[node.name]
    assert op_assignment.choice.axes == ("tp",)
    taken = op_assignment.operands[3]
    assert taken is not None
    assert taken.splits[-2:] == (("tp",), ()), "each rank has the rows of the mask that its queries need"
