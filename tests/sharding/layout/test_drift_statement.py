"""The line about replicas that drift: what it means, its normal form, and what is said to mistakes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import LayoutError
from autopar.mesh import Mesh
from autopar.sharding.layout.drift import CODERS, FORM, Coder, DriftStatement, OuterOptimizer, print_drift
from autopar.sharding.layout.language import Layout, axes_of, choose_layout, parse_layout, print_layout
from autopar.sharding.replicas import Drift, check_batch, split_replicas


@pytest.mark.parametrize(
    ("text", "statement"),
    [
        ("drift pod -> mean", DriftStatement(("pod",), "mean")),
        ("drift pod -> mean every 16", DriftStatement(("pod",), "mean", every=16)),
        ("drift pod -> mean, every 16", DriftStatement(("pod",), "mean", every=16)),
        ("drift pod -> mean every 0", DriftStatement(("pod",), "mean", every=0)),
        (
            "drift pod -> mean every 500, outer nesterov(0.7, 0.9), parts 4, late 5 as int8",
            DriftStatement(
                ("pod",),
                "mean",
                every=500,
                outer=OuterOptimizer("nesterov", 0.7, 0.9),
                parts=4,
                late=5,
                coder=Coder("int8"),
            ),
        ),
        ("drift pod -> mean, warmup 200", DriftStatement(("pod",), "mean", warmup=200)),
        ("drift a*b -> mean as topk 2.5%", DriftStatement(("a", "b"), "mean", coder=Coder("topk", 2.5))),
        ("drift pod -> ring every 2", DriftStatement(("pod",), "ring", every=2)),
        ("drift pod -> exponential, stale any", DriftStatement(("pod",), "exponential", stale=None)),
        ("drift pod -> server(2), stale 4", DriftStatement(("pod",), "server", 2, stale=4)),
        ("drift pod -> mean every 0, by 12:4", DriftStatement(("pod",), "mean", every=0, by=(12, 4))),
        ("drift pod -> mean by speed, late 0", DriftStatement(("pod",), "mean", by="speed")),
    ],
)
def test_statements(text: str, statement: DriftStatement) -> None:
    assert parse_layout(text).statements == (statement,)
    assert parse_layout(print_layout(Layout((statement,)))).statements == (statement,)


numbers = st.floats(0.01, 0.99).map(lambda value: round(value, 6))
outers = st.builds(OuterOptimizer, st.sampled_from(["sgd", "nesterov"]), numbers, numbers)
coders = st.none() | st.builds(Coder, st.sampled_from([one for one in CODERS if one != "topk"]))
coders |= st.builds(Coder, st.just("topk"), numbers)
STATEMENTS = (
    st.builds(
        DriftStatement,
        st.just(("pod",)),
        st.just("mean"),
        every=st.integers(40, 99),
        outer=outers,
        parts=st.integers(1, 4),
        late=st.integers(0, 9),
        by=st.none() | st.just("speed") | st.tuples(st.integers(1, 99), st.integers(1, 99)),
        warmup=st.integers(0, 9),
        coder=coders,
    )
    | st.builds(
        DriftStatement,
        st.just(("dc", "pod")),
        st.just("server"),
        st.integers(1, 9),
        every=st.integers(1, 9),
        outer=outers,
        stale=st.none() | st.integers(0, 9),
        coder=coders,
    )
    | st.builds(DriftStatement, st.just(("pod",)), st.sampled_from(["ring", "exponential"]), every=st.integers(1, 9))
)


@given(STATEMENTS)
def test_printing_and_reading_undo_each_other(statement: DriftStatement) -> None:
    assert parse_layout(print_layout(Layout((statement,)))).statements == (statement,)


HOLE = "'drift' has no '?': how replicas meet changes what is learned, so no search decides it"


@pytest.mark.parametrize(
    ("text", "code", "message", "fix"),
    [
        ("drift ? -> mean", "E7", HOLE, "write it, as in 'drift pod -> mean every 16'"),
        ("drift pod -> ?", "E7", HOLE, "write it, as in 'drift pod -> mean every 16'"),
        ("drift pod -> mean every ?", "E7", HOLE, "write it, as in 'drift pod -> mean every 16'"),
        ("drift pod -> mean, outer ?", "E7", HOLE, "write it, as in 'drift pod -> mean every 16'"),
        ("drift pod -> mean as ?", "E7", HOLE, "write it, as in 'drift pod -> mean every 16'"),
        (
            "drift pod -> mean; drift dp -> ring",
            "E0",
            "a layout has one 'drift' line, this one has 2",
            "keep one of them",
        ),
        (
            "drift pod -> men",
            "E1",
            "there is no meeting 'men'; did you mean 'mean'?",
            "the names are exponential, mean, ring, server",
        ),
        (
            "drift pod -> mean evry 3",
            "E1",
            "there is no option of a meeting 'evry'; did you mean 'every'?",
            "the names are by, every, late, outer, parts, stale, warmup",
        ),
        (
            "drift pod -> mean as int9",
            "E1",
            "there is no code 'int9'; did you mean 'int8'?",
            "the names are bfloat16, int8, topk",
        ),
        ("drift pod -> mean, outer adam(1)", "E1", "there is no outer optimizer 'adam'", "the names are nesterov, sgd"),
        (
            "drift pod -> mean, stale 3",
            "E0",
            "'stale' has no meaning with 'mean'",
            "leave it out, or meet by exponential or server",
        ),
        (
            "drift pod -> ring, outer sgd(1.0)",
            "E0",
            "'outer' has no meaning with 'ring'",
            "leave it out, or meet by mean or server",
        ),
        (
            "drift pod -> exponential as int8",
            "E0",
            "'as' has no meaning with 'exponential'",
            "leave it out, or meet by mean or server",
        ),
        (
            "drift pod -> mean every 8, parts 4, late 2",
            "E0",
            "'late 2' would end after the next meeting begins, 2 steps later",
            "take a smaller number",
        ),
        (
            "drift pod -> mean every 3, parts 4",
            "E0",
            "4 parts cannot meet one after the other in 3 steps",
            "take fewer parts, or a larger number after 'every'",
        ),
        ("drift pod -> ring every 0", "E0", "'every 0' means gradients, and 'ring' has none", "meet by 'mean'"),
        (
            "drift pod -> mean every 0, outer sgd(0.5)",
            "E0",
            "'outer' has no meaning with 'every 0', where gradients meet before each step",
            "leave one of them out; 'every 1, outer ...' meets after a step",
        ),
        ("drift pod -> mean every 3, every 4", "E0", "'every' stands twice", "keep one of them"),
        (
            "drift pod -> exponential, stale 2",
            "E0",
            "'exponential' waits for its neighbour or for nobody",
            "write 'stale any', or leave it out",
        ),
        (
            "drift pod -> ring, by 12:4",
            "E0",
            "'by' has no meaning with 'ring'",
            "leave it out, or meet by mean or server",
        ),
        (
            "drift pod -> mean, by fast",
            "E0",
            "expected 'speed', or whole numbers as in 'by 12:4', found 'fast'",
            FORM,
        ),
        ("drift pod -> server(0)", "E0", "0 is too small: expected a number of servers, from 1 up", FORM),
        (
            "drift pod -> server",
            "E0",
            "expected '(' and a number of servers after 'server', found the end of the text",
            FORM,
        ),
        ("drift pod", "E0", "expected '->' and a meeting after 'pod', found the end of the text", FORM),
        (
            "drift pod -> mean as topk",
            "E0",
            "expected a share of the values, as in 'topk 5%', found the end of the text",
            FORM,
        ),
        ("drift pod -> mean as topk 0%", "E0", "a share of 0% sends nothing", "write 'topk 5%'"),
        ("drift pod -> mean, outer sgd(0)", "E0", "with a learning rate of 0 nothing is learned", FORM),
        ("drift pod -> mean, outer sgd(1, 1)", "E0", "a momentum is below 1, not 1", FORM),
        ("drift pod -> mean every 3 late 1", "E0", "expected ',' or the end of the line, found 'late'", FORM),
    ],
)
def test_mistakes(text: str, code: str, message: str, fix: str) -> None:
    with pytest.raises(LayoutError) as error:
        parse_layout(text)
    lines = str(error.value).splitlines()
    assert (lines[0], lines[-1]) == (f"{code}: {message}", f"fix: {fix}")
    assert any(line.lstrip().startswith("|") and line.endswith("^") for line in lines), "a caret shows the place"


def test_dims_and_axes_may_be_called_drift() -> None:
    layout = parse_layout("drift -> dp; (drift, batch) -> drift; let far = a*b; drift far -> mean")
    assert [type(one).__name__ for one in layout] == ["DimRule", "DimRule", "Let", "DriftStatement"]
    assert layout.drift == DriftStatement(("a", "b"), "mean")


# -- on a mesh ---------------------------------------------------------------------------------------------------------


def split(text: str, mesh: str) -> tuple[Layout, Drift | None]:
    return split_replicas(choose_layout(text, Mesh(mesh).whole), Mesh(mesh))


@pytest.mark.parametrize(
    ("text", "mesh", "replicas", "inner"),
    [
        ("drift pod -> mean; fsdp", "pod=2,dp=4", 2, "dp=4"),
        ("drift pod -> mean; micro 2; fsdp(fsdp=dp*tp)", "pod=3,dp=2,tp=2", 3, "dp=2,tp=2"),
        ("drift pod -> mean; ddp", "pod=4", 4, "replica=1"),
        ("let far = dc*pod; drift far -> ring; batch -> dp; * -> none", "dc=2,pod=3,dp=2@node", 6, "dp=2@node"),
        ("mesh pod=2, dp=4; drift pod -> mean; batch -> dp; * -> none", "pod=2,dp=4", 2, "dp=4"),
        ("drift pod -> server(2); pipeline pp 1f1b; batch -> none; * -> none", "pod=2,pp=2", 2, "pp=2"),
    ],
)
def test_a_replica_has_the_rest_of_the_mesh(text: str, mesh: str, replicas: int, inner: str) -> None:
    layout, drift = split(text, mesh)
    assert drift is not None
    assert (drift.replicas, str(drift.replica_mesh)) == (replicas, inner)
    assert layout.drift is None
    assert set(axes_of(layout)) <= set(drift.replica_mesh.names)
    assert layout.mesh in (None, drift.replica_mesh)


def test_layouts_without_the_line_stay() -> None:
    layout = parse_layout("batch -> dp")
    assert split_replicas(layout, Mesh("dp=2")) == (layout, None)


E3 = "drifts: replicas differ along it, so no tensor can be split or summed over it"


@pytest.mark.parametrize(
    ("text", "mesh", "message"),
    [
        ("drift pdo -> mean; batch -> dp", "pod=2,dp=2", "E1: there is no axis 'pdo'; did you mean 'pod'?"),
        ("drift pod -> mean; batch -> pod*dp", "pod=2,dp=2", f"E3: axis 'pod' {E3}"),
        ("drift pod -> mean; @a[* -> none] + partial(pod)", "pod=2,dp=2", f"E3: axis 'pod' {E3}"),
        ("drift pod -> mean; op @a[none -> pod]", "pod=2,dp=2", f"E3: axis 'pod' {E3}"),
        ("drift pod -> mean; forbid all_reduce(act) over pod", "pod=2,dp=2", f"E3: axis 'pod' {E3}"),
        ("drift pod -> mean; d_ff -> ?{dp, pod}", "pod=2,dp=2", f"E3: axis 'pod' {E3}"),
        ("drift pod -> mean; pipeline pod 1f1b", "pod=2,dp=2", f"E3: axis 'pod' {E3}"),
        (
            "drift pod -> mean; batch -> dp",
            "dp=2,pod=2",
            "E3: axis 'pod' drifts and must stand first in the mesh, so that a replica has consecutive ranks",
        ),
        (
            "drift pod -> mean, by 1:2:3",
            "pod=2,dp=2",
            "E4: 'by 1:2:3' has 3 shares, and there are 2 replicas",
        ),
        ("drift pod -> mean; batch -> pod by 12:4", "pod=2,dp=2", f"E3: axis 'pod' {E3}"),
        ("drift pod -> server(3)", "pod=2,dp=2", "E4: server(3) needs a replica for each server, and there are 2"),
        (
            "mesh pod=3, dp=2; drift pod -> mean",
            "pod=2,dp=2",
            "E1: the layout is for another mesh than the one it is to run on, pod=2,dp=2",
        ),
    ],
)
def test_mistakes_on_a_mesh(text: str, mesh: str, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        split(text, mesh)
    assert str(error.value).splitlines()[0] == message
    assert "fix: " in str(error.value)


def test_the_batch_must_divide() -> None:
    _, drift = split("drift pod -> mean", "pod=4,dp=2")
    assert drift is not None
    check_batch(drift, 8)
    with pytest.raises(LayoutError, match="E4: batch=6 does not divide over the 4 replicas along pod"):
        check_batch(drift, 6)
    shares, speeds = (split(f"drift pod -> mean, by {by}", "pod=2,dp=2")[1] for by in ("3:1", "speed"))
    assert shares is not None
    assert speeds is not None
    check_batch(shares, 7)
    assert shares.rows(7) == (6, 1)
    with pytest.raises(LayoutError, match="E4: batch=2 in shares 2:0 leaves a replica along pod without a row"):
        check_batch(shares, 2)
    with pytest.raises(LayoutError, match="E5: the speeds of the replicas along pod are unknown"):
        check_batch(speeds, 8)
    found = speeds.with_speeds(16, (3.1, 1.0))
    assert (print_drift(found.statement), found.rows(16)) == ("drift pod -> mean, by 3:1", (12, 4))
    assert speeds.with_speeds(16, (1.0, 1.0)).statement.by is None
