"""The layout language: what texts mean, and that printing and reading undo each other."""

from __future__ import annotations

import pickle
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import LayoutError
from autopar.mesh import Mesh, MeshAxis
from autopar.names import RESERVED
from autopar.sharding.layout.language import Layout, parse_layout, parse_rules, parse_strategy_call, print_layout
from autopar.sharding.layout.recompute_ops import OpItem, RecomputeList
from autopar.sharding.layout.source import SourceSpan
from autopar.sharding.layout.syntax import (
    COLLECTIVES,
    KINDS,
    Block,
    DimRule,
    GatherStatement,
    Guard,
    Hole,
    Let,
    Limit,
    MeshStatement,
    NotSplit,
    OpPin,
    Pin,
    PinState,
    Same,
    Scope,
    SplitTerm,
    Statement,
    StrategyStatement,
    TensorPattern,
)


def rule(dims: str, *axes: str) -> DimRule:
    return DimRule(
        tuple(dims.split()), TensorPattern(tuple(SplitTerm((axis,)) if axis else NotSplit() for axis in axes))
    )


@pytest.mark.parametrize(
    ("text", "statement"),
    [
        ("batch -> dp", rule("batch", "dp")),
        ("batch: dp", rule("batch", "dp")),
        ("(heads, kv_*, seq.1) -> tp | none", rule("heads kv_* seq.1", "tp", "")),
        ("* -> none", rule("*", "")),
        ("a -> dp * tp? pad !2", DimRule(("a",), TensorPattern((SplitTerm(("dp", "tp"), extends=True, pad=True),), 2))),
        ("a -> ?", DimRule(("a",), TensorPattern((Hole(),)))),
        ("a -> ?{tp, dp*tp} | none", DimRule(("a",), TensorPattern((Hole((("tp",), ("dp", "tp"))), NotSplit())))),
        ("strategy fsdp", StrategyStatement("fsdp")),
        (r'strategy fsdp "a \"b\" \\ # c; d"', StrategyStatement("fsdp", r'a "b" \ # c; d')),
        ("mesh dp=2@node, tp=? # two levels", MeshStatement(Mesh("dp=2@node,tp=?"))),
        ("let data = dp*fsdp", Let("data", ("dp", "fsdp"))),
        ("opt { * -> dp }", Block((Scope("opt"),), (rule("*", "dp"),))),
        (
            "param[d_ff, vocab], @head.*,act@blocks.*{\n\n a -> dp # one\n b -> tp,\n c -> none; d -> dp\n}",
            Block(
                (Scope("param", ("d_ff", "vocab")), Scope(None, (), "head.*"), Scope("act", (), "blocks.*")),
                (rule("a", "dp"), rule("b", "tp"), rule("c", ""), rule("d", "dp")),
            ),
        ),
        ("@a.0[x -> dp]", Pin("a.0", (rule("x", "dp"),))),
        (
            "@a/linear.1 [x -> dp, * -> none] + partial(tp) + broadcast(sp*ep)",
            Pin(
                "a/linear.1",
                (rule("x", "dp"), rule("*", "")),
                (PinState("partial", ("tp",)), PinState("broadcast", ("sp", "ep"))),
            ),
        ),
        ("op @a/linear[n -> tp, m -> dp*sp]", OpPin("a/linear", (("n", ("tp",)), ("m", ("dp", "sp"))))),
        ("keep @a.*", GatherStatement("keep", "a.*")),
        ("regather @a.*", GatherStatement("regather", "a.*")),
        ("recompute none @a.*", GatherStatement("recompute", "a.*", "none")),
        ("recompute selective @a.*", GatherStatement("recompute", "a.*", "selective")),
        ("recompute full @a.*", GatherStatement("recompute", "a.*", "full")),
        ("recompute offload @a.*", GatherStatement("recompute", "a.*", "offload")),
        (
            "recompute keep(linear every 2, @*.up/gelu) @a.*",
            GatherStatement(
                "recompute", "a.*", RecomputeList("keep", (OpItem("linear", every=2), OpItem("*.up/gelu", True)))
            ),
        ),
        ("recompute only(gelu) @a", GatherStatement("recompute", "a", RecomputeList("only", (OpItem("gelu"),)))),
        ("same @a @b.*", Same("a", "b.*")),
        ("forbid all_reduce(act[d_model]) over tp", Guard("forbid", "all_reduce", Scope("act", ("d_model",)), ("tp",))),
        ("warn all_to_all(@a.*) over dp*ep", Guard("warn", "all_to_all", Scope(glob="a.*"), ("dp", "ep"))),
        ("limit memory 70GiB", Limit("memory", size_bytes=70 * 2**30)),
        ("limit memory 1.5 GB", Limit("memory", size_bytes=1_500_000_000)),
        ("limit memory 512B", Limit("memory", size_bytes=512)),
        ("limit memory 92.5%", Limit("memory", percent=92.5)),
        ("limit halo 25%", Limit("halo", percent=25.0)),
    ],
)
def test_statements(text: str, statement: Statement) -> None:
    assert parse_layout(text).statements == (statement,)


def test_statements_end_with_lines_and_semicolons() -> None:
    layout = parse_layout("# nothing\r\n;; batch -> dp ; seq -> tp # ; x\rheads->tp;\n")
    assert layout.statements == (rule("batch", "dp"), rule("seq", "tp"), rule("heads", "tp"))


def test_the_one_liner_of_mesh_tensorflow() -> None:
    assert parse_layout("batch:rows;d_ff:cols").statements == (rule("batch", "rows"), rule("d_ff", "cols"))


def test_an_empty_layout() -> None:
    assert parse_layout("  # nothing yet\n") == Layout(())
    assert str(Layout(())) == ""


def test_strategy_and_mesh_of_a_layout() -> None:
    layout = parse_layout('batch -> dp\nmesh dp=2\nstrategy x "y"')
    assert layout.mesh == Mesh(dp=2)
    assert layout.strategy == StrategyStatement("x", "y")
    assert Layout(()).mesh is None
    assert Layout(()).strategy is None


def test_statements_and_rules_know_their_place() -> None:
    layout = parse_layout("batch -> dp\nparam {\n  d_ff -> tp\n}; * -> none", "my.lay")
    first, block, last = layout.statements
    assert isinstance(block, Block)
    assert first.span == SourceSpan("my.lay", 1, 0, "batch -> dp")
    assert block.span == SourceSpan("my.lay", 2, 0, "param {")
    assert block.rules[0].span == SourceSpan("my.lay", 3, 2, "  d_ff -> tp")
    assert last.span == SourceSpan("my.lay", 4, 3, "}; * -> none")


def test_a_word_is_found_on_its_line() -> None:
    span = SourceSpan("my.lay", 1, 0, "tpx -> tp.1 | tp; tp -> dp")
    assert span.at("tp").column == 14
    assert span.at("sp") == span
    assert SourceSpan("my.lay", 1, 18, span.text).at("tp").column == 18


def test_places_do_not_make_layouts_differ() -> None:
    assert parse_layout("batch -> dp", "a") == parse_layout("\n\n   batch: dp", "b")


def test_normal_form() -> None:
    text = """
    strategy  mine "what" ; mesh dp=2@node,tp=?
    let  both=dp*tp
    batch:both;(heads,d_ff):tp|none!1
    param,grad@blocks.*{*:dp|none;vocab:tp pad}
    act[d_model] { a_rather_long_name_of_a_dim -> dp*tp*sp*ep | dp*tp | none, another_long_name_of_a_dim -> dp*tp
    seq -> sp? }
    @a[x:dp]+partial(tp); op@a/linear[n->tp]; limit memory 1536MiB; limit halo 12.50%
    """
    assert print_layout(parse_layout(text)) == (
        'strategy mine "what"\n'
        "mesh dp=2@node, tp=?\n"
        "let both = dp*tp\n"
        "batch -> dp*tp\n"
        "(heads, d_ff) -> tp | none !1\n"
        "param, grad@blocks.* { * -> dp | none, vocab -> tp pad }\n"
        "act[d_model] {\n"
        "  a_rather_long_name_of_a_dim -> dp*tp*sp*ep | dp*tp | none\n"
        "  another_long_name_of_a_dim -> dp*tp\n"
        "  seq -> sp?\n"
        "}\n"
        "@a[x -> dp] + partial(tp)\n"
        "op @a/linear[n -> tp]\n"
        "limit memory 1536MiB\n"
        "limit halo 12.5%\n"
    )


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(70 * 10**9, "70GB"), (70 * 2**30, "70GiB"), (1, "1B"), (1000, "1kB"), (1025, "1025B"), (3 * 2**40, "3TiB")],
)
def test_sizes_print_short(size_bytes: int, text: str) -> None:
    assert str(Layout((Limit("memory", size_bytes=size_bytes),))) == f"limit memory {text}\n"


def test_let_is_expanded_wherever_it_stands() -> None:
    text = (
        "batch -> all\nlet all = outer*tp\nlet outer = dp*fsdp\n"
        "forbid all_gather(act) over outer\n@x[* -> ?{outer}] + partial(outer)"
    )
    assert print_layout(parse_layout(text)) == (
        "batch -> dp*fsdp*tp\n"
        "let all = dp*fsdp*tp\n"
        "let outer = dp*fsdp\n"
        "forbid all_gather(act) over dp*fsdp\n"
        "@x[* -> ?{dp*fsdp}] + partial(dp*fsdp)\n"
    )


def test_a_long_chain_of_lets_is_read() -> None:
    chain = "".join(f"let a{i} = a{i + 1}\n" for i in range(3000))
    assert parse_layout(chain + "batch -> a0").statements[-1] == rule("batch", "a3000")


def test_other_axes() -> None:
    layout = parse_layout(
        "let l = ep; batch -> fsdp*ep | ep | none; seq -> ep? | fsdp?; x -> ?{ep, fsdp*ep}; y -> ?{ep}; z -> ?\n"
        "param { d -> ep pad }; @a[n -> fsdp] + partial(ep); op @a[n -> fsdp, m -> ep]; op @b[n -> ep]\n"
        "forbid all_gather(act) over ep; warn all_gather(act) over fsdp*ep; keep @a"
    )
    assert str(layout.on_axes({"fsdp": ("dp", "tp"), "ep": ()})) == (
        "batch -> dp*tp | none\n"
        "seq -> ? | dp*tp?\n"
        "x -> ?{dp*tp}\n"
        "y -> none\n"
        "z -> ?\n"
        "param { d -> none }\n"
        "@a[n -> dp*tp]\n"
        "op @a[n -> dp*tp]\n"
        "warn all_gather(act) over dp*tp\n"
        "keep @a\n"
    )


def test_rules_alone() -> None:
    assert parse_rules("batch -> dp, seq: tp;\n d -> none") == (rule("batch", "dp"), rule("seq", "tp"), rule("d", ""))


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("fsdp", ("fsdp", {})),
        ("fsdp()", ("fsdp", {})),
        ("fsdp(fsdp=dp*tp)", ("fsdp", {"fsdp": ("dp", "tp")})),
        (" fsdp_tp ( fsdp = dp , tp = none ) ", ("fsdp_tp", {"fsdp": ("dp",), "tp": ()})),
    ],
)
def test_strategy_calls(text: str, call: object) -> None:
    assert parse_strategy_call(text) == call


def test_load(tmp_path: Path) -> None:
    path = tmp_path / "my.lay"
    path.write_text("batch -> dp  # β\n", encoding="utf-8")
    layout = Layout.load(path)
    assert layout == parse_layout("batch -> dp")
    assert layout.name == str(path)
    assert layout.statements[0].span == SourceSpan(str(path), 1, 0, "batch -> dp  # β")


def test_an_error_survives_pickling() -> None:
    with pytest.raises(LayoutError) as error:
        parse_layout("batch dp")
    again = pickle.loads(pickle.dumps(error.value))
    assert (again.code, str(again)) == ("E0", str(error.value))


# -- any layout --------------------------------------------------------------------------------------------------------

names = st.from_regex(r"[A-Za-zé_][A-Za-z0-9_é]{0,6}", fullmatch=True).filter(lambda name: name not in RESERVED)
axis_names = names.map(lambda name: f"x_{name}")  # apart from the names that `let` gives
products = st.lists(axis_names, min_size=1, max_size=3, unique=True).map(tuple)
dims = st.one_of(names, st.builds("{}.{}".format, names, st.integers(0, 20)))
patterns = st.one_of(dims, names.map("{}*".format), st.just("*"))
globs = st.text(string.ascii_letters + string.digits + "._/*?:=@+(!|-'\"%é", min_size=1, max_size=12)
terms = st.one_of(
    st.just(NotSplit()),
    st.builds(Hole, st.lists(products, max_size=2, unique=True).map(tuple)),
    st.builds(SplitTerm, products, st.booleans(), st.booleans()),
)
places = st.builds(
    TensorPattern, st.lists(terms, min_size=1, max_size=3).map(lambda t: tuple(dict.fromkeys(t))), st.integers(0, 12)
)
dim_rules = st.builds(DimRule, st.lists(patterns, min_size=1, max_size=3).map(tuple), places)
several_rules = st.lists(dim_rules, min_size=1, max_size=4).map(tuple)
scopes = st.one_of(
    st.builds(Scope, st.sampled_from(KINDS), st.lists(dims, max_size=2).map(tuple), st.none() | globs),
    st.builds(Scope, st.none(), st.just(()), globs),
)
sizes = st.none() | st.integers(1, 10**6)
meshes = st.lists(
    st.builds(MeshAxis, axis_names, sizes, st.none() | names), min_size=1, max_size=3, unique_by=lambda axis: axis.name
).map(Mesh)
descriptions = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\r\n"), max_size=12)
lets = st.builds(Let, names.map(lambda name: f"let_{name}"), products)
op_items = st.builds(OpItem, names, st.just(False), st.integers(1, 9)) | st.builds(OpItem, globs, st.just(True))
recompute_lists = st.builds(
    RecomputeList, st.sampled_from(["keep", "only"]), st.lists(op_items, min_size=1, max_size=3).map(tuple)
)
others = st.one_of(
    dim_rules,
    st.builds(Block, st.lists(scopes, min_size=1, max_size=3).map(tuple), several_rules),
    st.builds(
        Pin,
        globs,
        several_rules,
        st.lists(st.builds(PinState, st.sampled_from(["partial", "broadcast"]), products), max_size=2).map(tuple),
    ),
    st.builds(OpPin, globs, st.lists(st.tuples(dims, products), min_size=1, max_size=3).map(tuple)),
    st.builds(GatherStatement, st.sampled_from(["keep", "regather"]), globs),
    st.builds(
        GatherStatement,
        st.just("recompute"),
        globs,
        st.sampled_from(["none", "selective", "full", "offload"]) | recompute_lists,
    ),
    st.builds(Same, globs, globs),
    st.builds(Guard, st.sampled_from(["forbid", "warn"]), st.sampled_from(COLLECTIVES), scopes, products),
    st.builds(Limit, st.just("memory"), st.integers(1, 10**15)),
    st.builds(Limit, st.sampled_from(["memory", "halo"]), st.none(), st.integers(0, 1000).map(lambda i: i / 10)),
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    statements: list[Statement] = [
        *draw(st.lists(st.builds(StrategyStatement, names, st.none() | descriptions), max_size=1)),
        *draw(st.lists(st.builds(MeshStatement, meshes), max_size=1)),
        *draw(st.lists(lets, max_size=2, unique_by=lambda let: let.name)),
        *draw(st.lists(others, max_size=5)),
    ]
    return Layout(tuple(draw(st.permutations(statements))))


@given(layouts())
def test_printing_and_reading_undo_each_other(layout: Layout) -> None:
    text = print_layout(layout)
    assert parse_layout(text) == layout
    assert print_layout(parse_layout(text)) == text


pieces = st.sampled_from(
    [
        *'ab*?|!,;:(){}[]@=+%"\\#.- \n1',
        "->",
        " param ",
        " op ",
        " none",
        " mesh ",
        "@a",
        "let a=",
        "{b -> a}",
        "é",
        "\0",
    ]
)


@given(st.lists(pieces, max_size=12).map("".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    layout = error = None
    try:
        layout = parse_layout(text)
    except LayoutError as refusal:
        error = refusal
    if layout is not None:
        assert parse_layout(print_layout(layout)) == layout
    else:
        assert error is not None
        assert error.code in ("E0", "E1")
        assert "\nfix: " in str(error)
