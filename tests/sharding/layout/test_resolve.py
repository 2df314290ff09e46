"""What a layout wants of one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from autopar.errors import LayoutError
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.layout.parameter_storage import stored_splits
from autopar.sharding.layout.resolve import SplitRequest, resolve

AXES = {"dp": 2, "tp": 4, "one": 1}


@dataclass(frozen=True)
class Atom:
    dim: int
    size: int
    names: tuple[str, ...]
    by_share: bool = False


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    atoms: tuple[Atom, ...]
    routed: int = 0
    slotted: int = 0


def plain(name: str, **dims: int) -> Tensor:
    """A tensor in which no dim is compound."""
    atoms = tuple(Atom(i, size, (dim.replace("_dot_", "."),)) for i, (dim, size) in enumerate(dims.items()))
    return Tensor(name, tuple(dims.values()), atoms)


X = plain("mlp/linear", batch=8, seq=12, d_ff=16)
W = plain("up.weight", d_ff=16, d_model=12)
HEADS = ("heads", "kv_heads"), ("heads", "group")
Q = Tensor(
    "q", (8, 64), (Atom(0, 8, ("batch",)), Atom(1, 4, HEADS[0]), Atom(1, 2, HEADS[1]), Atom(1, 8, ("head_dim",)))
)
QKV = Tensor("qkv", (96,), (Atom(0, 3, ("d0",)), Atom(0, 4, ("heads",)), Atom(0, 8, ("head_dim",))))


def wanted(text: str, tensor: Tensor = X, kind: str = "act") -> str:
    """What the layout wants, in short: `-` for a hole, `.` for a dim that is not split."""
    return shown(resolve(parse_layout(text, "my.lay"), tensor, kind, AXES))


def shown(found: SplitRequest) -> str:
    return " ".join("-" if axes is None else "*".join(axes) or "." for axes in found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch -> dp", "dp - -"),
        ("batch -> dp; * -> none", "dp . ."),
        ("* -> none; batch -> dp", "dp . ."),
        ("batch -> dp*tp; seq -> ?; d_ff -> none", "dp*tp - ."),
        ("batch -> tp*dp", "tp*dp - -"),
        ("(seq, batch) -> none; d_ff -> tp?", ". . tp"),
        # a kind beats a bare rule, dims beat a kind, a name beats dims, a pin beats a name
        ("batch -> dp; act { batch -> tp }", "tp - -"),
        ("act { batch -> tp }; act[seq] { batch -> dp }", "dp - -"),
        ("act[seq] { batch -> dp }; act@mlp* { batch -> tp }", "tp - -"),
        ("@mlp* { batch -> tp }; @mlp/linear[batch -> dp]", "dp - -"),
        ("act { * -> none }; batch -> dp", ". . ."),
        # then an exact name beats a prefix, a prefix beats *
        ("s* -> tp; seq -> none; * -> none", ". . ."),
        ("s* -> tp; * -> none", ". tp ."),
        # other kinds, other names, other dims
        ("param { batch -> dp }; seq -> tp", "- tp -"),
        ("act[vocab] { batch -> dp }; @head* { batch -> dp }; @head.weight[batch -> dp]; seq -> tp", "- tp -"),
        # priorities and alternatives
        ("seq -> tp | none !1; d_ff -> tp", "- . tp"),
        ("seq -> tp | dp !1; d_ff -> tp", "- dp tp"),
        ("seq -> tp; d_ff -> tp | dp !1", "- tp dp"),
        ("seq -> tp*dp | tp; batch -> none", ". tp -"),
        ("batch -> dp; seq -> ? !1", "dp - -"),
        ("seq -> dp*tp pad; * -> none", ". dp*tp ."),
        ("batch -> one; seq -> tp", "one tp -"),
    ],
)
def test_an_activation(text: str, expected: str) -> None:
    assert wanted(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch -> dp; heads -> tp; * -> none", "dp tp . ."),
        ("heads -> tp*dp", "- tp dp -"),
        ("heads -> dp*tp | dp; * -> none", ". dp . ."),  # 4 kv heads are cut by dp, and 2 are left for tp = 4
        ("kv_heads -> tp; * -> none", ". tp . ."),
        ("group -> dp; * -> none", ". . dp ."),
        ("group -> dp; kv_heads -> tp", "- tp dp -"),
        ("heads -> none; kv_heads -> tp", "- . . -"),
        ("head_dim -> dp; heads -> tp", "- tp . dp"),
        ("act { heads -> dp }; kv_heads -> tp", "- dp . -"),
        ("heads -> dp; act { kv_heads -> tp }", "- tp - -"),
    ],
)
def test_compound_dims(text: str, expected: str) -> None:
    assert wanted(text, Q) == expected


def test_a_fused_projection_is_split_by_its_heads() -> None:
    assert wanted("(heads, kv_heads) -> tp; * -> none", QKV, "param") == ". tp ."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("param { * -> tp }", "tp ."),
        ("* -> none; param { * -> dp*tp | none }", "dp*tp ."),
        ("param { d_ff -> none, * -> dp*tp | none }", ". ."),
        ("param { d_ff -> none, * -> dp*tp | tp }", ". tp"),
        ("d_ff -> tp; param { d_ff -> tp, * -> dp }", "tp dp"),
        ("param { d_model -> none, * -> dp }", "dp ."),
        ("param { * -> none }", ". ."),
        ("param { * -> ? }; d_ff -> tp", ". ."),
    ],
)
def test_in_storage_a_star_is_one_dim(text: str, expected: str) -> None:
    assert wanted(text, W, "param") == expected


def test_elsewhere_a_star_is_every_dim() -> None:
    with pytest.raises(LayoutError) as error:
        wanted("use { * -> tp }", W, "use")
    assert error.value.code == "E3"


def test_dims_of_size_one_without_a_name_are_not_split() -> None:
    tensor = Tensor("x", (1, 8), (Atom(0, 1, ()), Atom(1, 8, ("d_ff",))))
    assert wanted("d_ff -> tp", tensor) == ". tp"
    assert wanted("* -> none", plain("x", batch=1, seq=4)) == ". ."
    assert wanted("seq -> tp", plain("x", batch=1, seq=4)) == ". tp"


def test_a_generated_suffix_is_a_name_of_its_own() -> None:
    scores = plain("scores", seq=8, seq_dot_1=8)
    assert wanted("seq -> tp", scores) == "tp -"
    assert wanted("seq* -> tp | none", plain("scores", seq_dot_1=8)) == "tp"


def test_a_mesh_tensorflow_layout_leaves_the_rest_open() -> None:
    assert wanted("batch:dp;d_ff:tp") == "dp - tp"
    assert wanted("batch:dp;d_ff:tp", W, "param") == "tp -"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("* -> none", ". ."),
        ("param { * -> tp }", "tp ."),
        ("* -> none; opt { * -> tp | none }", "tp ."),
        ("* -> none; opt, grad { * -> tp | none }", "tp ."),
        ("* -> none; opt { * -> tp }; grad { * -> none }", "tp ."),
        ("param, grad, opt { * -> tp | none }", "tp ."),
        ("d_ff -> tp; * -> none; opt { d_ff -> tp*dp }", "tp*dp ."),
        ("d_ff -> tp; * -> none; opt { d_ff -> tp, * -> dp }", "tp dp"),
        ("* -> none; opt@other* { * -> tp }", ". ."),
    ],
)
def test_what_a_parameter_is_registered_as(text: str, expected: str) -> None:
    assert shown(stored_splits(parse_layout(text), W, AXES)) == expected


# -- errors, word by word ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            "batch -> dp\n  batch -> tp",
            "act",
            "E2: two rules differ about the dim 'batch' of mlp/linear\n"
            "  my.lay:1 | batch -> dp\n"
            "           | ^\n"
            "  my.lay:2 |   batch -> tp\n"
            "           |   ^\n"
            "fix: drop one of the lines, or make one more specific: a kind, dims in [...], an @name",
        ),
        (
            "seq -> tp\nd_ff -> tp",
            "act",
            "E3: the dims 'seq' and 'd_ff' of mlp/linear both claim axis 'tp'\n"
            "  my.lay:1 | seq -> tp\n"
            "           | ^\n"
            "  my.lay:2 | d_ff -> tp\n"
            "           | ^\n"
            "fix: lower the priority of one, as in 'seq -> tp | none !1'",
        ),
        (
            "batch -> none\nact { seq -> dp*tp }",
            "act",
            "E4: the dim 'seq' of mlp/linear can take no alternative of its rule: dp*tp = 8 does not divide 12\n"
            "  my.lay:2 | act { seq -> dp*tp }\n"
            "           |       ^\n"
            "fix: add one, as in 'tp | none', allow uneven shards with 'pad', or choose a mesh that divides it",
        ),
        (
            "d_ff -> tp\nseq -> tp !1",
            "act",
            "E4: the dim 'seq' of mlp/linear can take no alternative of its rule: axis 'tp' is taken by 'd_ff'\n"
            "  my.lay:2 | seq -> tp !1\n"
            "           | ^\n"
            "fix: add one, as in 'tp | none', allow uneven shards with 'pad', or choose a mesh that divides it",
        ),
        (
            "param { * -> dp*tp }",
            "param",
            "E4: no dim of mlp/linear, of shape [8, 12, 16], can be split by its rule\n"
            "  my.lay:1 | param { * -> dp*tp }\n"
            "           |         ^\n"
            "fix: add an alternative, as in '* -> fsdp | none'",
        ),
    ],
)
def test_messages(text: str, kind: str, message: str) -> None:
    tensor = plain("mlp/linear", batch=8, seq=12, d_ff=16)
    if kind == "param":
        tensor = Tensor("mlp/linear", (8, 12, 16), plain("", batch=4, seq=12, d_ff=4).atoms)
    with pytest.raises(LayoutError) as error:
        wanted(text, tensor, kind)
    assert str(error.value) == message
    assert error.value.code == message[:2]


def test_rules_that_agree_are_no_error() -> None:
    assert wanted("batch -> dp; batch -> dp") == "dp - -"


@pytest.mark.parametrize(
    ("text", "opt"),
    [
        ("d_ff -> tp; opt { * -> dp }", (("tp",), ("dp",))),
        ("d_ff -> tp; opt { * -> tp }", (("tp",), ())),
        ("d_ff -> tp; opt { * -> tp | none }", (("tp",), ())),
        ("d_ff -> tp; opt { * -> dp*tp | none }", (("tp",), ("dp",))),
        ("d_ff -> tp; grad, opt { * -> dp | none }", (("tp",), ("dp",))),
        ("d_ff -> tp; opt { d_model -> tp; * -> dp | none }", None),
    ],
)
def test_states_keep_the_splits_of_their_parameter(text: str, opt: tuple[tuple[str, ...], ...] | None) -> None:
    """A bare `*` splits another dim; a rule about a dim of its own means what it says."""
    layout = parse_layout(text)
    if opt is None:
        with pytest.raises(LayoutError, match="E7"):
            stored_splits(layout, W, AXES)
    else:
        assert stored_splits(layout, W, AXES) == opt


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "param { d_ff -> tp }\nopt { * -> none }",
            "E7: the optimizer state of up.weight cannot have the splits of 'opt', [* -> none], when the parameter is "
            "stored with those of 'param', [d_ff -> tp]\n"
            "  my.lay:2 | opt { * -> none }\n"
            "           | ^\n"
            "fix: let 'opt' split what 'param' splits, or more",
        ),
        (
            "* -> none\nopt { d_ff -> tp }\ngrad { d_model -> dp }",
            "E7: the gradient of up.weight cannot have the splits of 'grad', [d_model -> dp]: it is stored as the "
            "parameter is, [* -> none], or as its optimizer state, [d_ff -> tp]\n"
            "  my.lay:3 | grad { d_model -> dp }\n"
            "           | ^\n"
            "fix: give 'grad' the splits of 'param' or of 'opt'",
        ),
    ],
)
def test_messages_about_storage(text: str, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        stored_splits(parse_layout(text, "my.lay"), W, AXES)
    assert str(error.value) == message
