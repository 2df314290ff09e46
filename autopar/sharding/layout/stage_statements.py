"""Read the statements about time: micro-batches, the stages of a pipeline, and its cuts.

Their first words are no words of the language: dims and axes may have these names.
"""

from __future__ import annotations

from autopar.sharding.layout.source import layout_error, unknown_name
from autopar.sharding.layout.syntax import CutStatement, MicroBatches, OpenMicroBatches, PipelineStatement
from autopar.sharding.layout.tokens import Token, TokenReader
from autopar.sharding.schedules import SCHEDULES

__all__ = ["STAGE_WORDS", "begins_stages", "read_stages"]

STAGE_WORDS = ("micro", "pipeline", "cut")
MICRO = "write it as in 'micro 8', 'micro 8 of images' where the batch has another name, or 'micro 8 halves'"
PIPELINE = "write it as in 'pipeline pp 1f1b', or with 1f1b(+1), gpipe, interleaved(2) or zero_bubble"
CUT = "write it as in 'cut pp before @blocks.2, @blocks.4'"


def begins_stages(token: Token, following: Token) -> bool:
    """Return whether two words begin such a statement: no rule begins with two names."""
    if token.kind != "name" or token.text not in STAGE_WORDS:
        return False
    is_micro = token.text == "micro" and (following.kind == "number" or following.text in ("?", "=", "("))
    return following.kind == "name" or is_micro


def read_stages(
    words: TokenReader, keyword: Token
) -> MicroBatches | OpenMicroBatches | PipelineStatement | CutStatement:
    """Read a statement after its keyword."""
    if keyword.text == "micro":
        return _micro(words, keyword)
    return _pipeline(words, keyword) if keyword.text == "pipeline" else _cut(words, keyword)


def _micro(words: TokenReader, keyword: Token) -> MicroBatches | OpenMicroBatches:
    words.form = MICRO
    if words.accept("?"):
        among = words.listed(lambda: _micro_count(words), "}", "numbers of micro-batches") if words.accept("{") else ()
        return OpenMicroBatches(among, _batch_dim(words), _accepts(words, "halves"), keyword.span)
    return MicroBatches(_micro_count(words), _batch_dim(words), _accepts(words, "halves"), keyword.span)


def _micro_count(words: TokenReader) -> int:
    place = words.token.span
    count = words.expect_integer("a number of micro-batches")
    if count < 1:
        raise layout_error("E0", "there is at least one micro-batch", "write 'micro 1' or leave it out", place)
    return count


def _batch_dim(words: TokenReader) -> str:
    return words.expect_dim("the dim of the batch") if _accepts(words, "of") else "batch"


def _accepts(words: TokenReader, name: str) -> bool:
    """Return whether the next word is a name, and pass over it if so."""
    found = words.is_a("name") and words.token.text == name
    if found:
        words.advance()
    return found


def _pipeline(words: TokenReader, keyword: Token) -> PipelineStatement:
    words.form = PIPELINE
    axis = words.expect_name("an axis of the mesh")
    place = words.token.span
    if words.accept("?"):
        return PipelineStatement(axis, "1f1b", is_open=True, span=keyword.span)
    if words.at_end():
        raise words.expected("a schedule", f"the schedules are {', '.join(SCHEDULES)}")
    name = words.token.text
    if words.is_a("number"):  # `1f1b` is a number and a name
        words.advance()
        name += words.token.text
    words.advance()
    schedule = next((one for one in SCHEDULES if one == name), None)
    if schedule is None:
        raise unknown_name("schedule", name, SCHEDULES, place)
    chunks, more = (2 if schedule == "interleaved" else 1), 0
    if schedule in ("1f1b", "interleaved") and words.accept("("):
        if schedule == "1f1b":
            words.expect("+", "and a number of micro-batches, as in '1f1b(+1)'")
            more = words.expect_integer("a number of micro-batches")
        else:
            chunks = words.expect_integer("a number of parts on each stage")
            if chunks < 2:
                raise layout_error("E0", f"interleaved({chunks}) interleaves nothing", "write '1f1b'", place)
        words.expect(")", "after the number")
    return PipelineStatement(axis, schedule, chunks, more, span=keyword.span)


def _cut(words: TokenReader, keyword: Token) -> CutStatement:
    words.form = CUT
    axis = words.expect_name("an axis of the mesh")
    if words.accept("?"):
        return CutStatement(axis, (), keyword.span)
    if not (words.is_a("name") and words.token.text == "before"):
        raise words.expected("'before' and the modules that begin parts")
    words.advance()
    names = [words.expect_glob()]
    while words.accept(","):
        names.append(words.expect_glob())
    return CutStatement(axis, tuple(names), keyword.span)
