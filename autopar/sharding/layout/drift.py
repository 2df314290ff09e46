"""`drift pod -> mean every 16`: replicas along an axis of the mesh train by themselves and meet after some steps.

A replica is a whole plan on the rest of the mesh. At a meeting replicas put together what each has trained since the
last one: the mean of all, with neighbours on a ring or at exponential distances, or through servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal, TypeVar, get_args

from autopar.errors import LayoutError
from autopar.names import MAX_DIGITS
from autopar.sharding.layout.source import SourceSpan, layout_error, unknown_name
from autopar.sharding.layout.tokens import Token, TokenReader, format_percent, parse_percent, read_shares

MeetingKind = Literal["mean", "ring", "exponential", "server"]
MEETINGS: tuple[MeetingKind, ...] = get_args(MeetingKind)
OuterKind = Literal["sgd", "nesterov"]
OUTERS: tuple[OuterKind, ...] = get_args(OuterKind)
CoderKind = Literal["bfloat16", "int8", "topk"]
CODERS: tuple[CoderKind, ...] = get_args(CoderKind)

_Name = TypeVar("_Name", bound=str)
# Options of a meeting, in the order of the normal form.
OPTIONS = ("every", "by", "outer", "parts", "late", "stale", "warmup")

FORM = "write it as in 'drift pod -> mean every 500, outer nesterov(0.7, 0.9)', or with ring, exponential or server(2)"
# A coder needs the difference from a value that all replicas have, which neighbours do not have.
_ALLOWED: dict[str, tuple[MeetingKind, ...]] = {
    "every": MEETINGS,
    # Neighbours count alike, however many rows they have.
    "by": ("mean", "server"),
    "outer": ("mean", "server"),
    "parts": ("mean",),
    "late": ("mean",),
    "stale": ("exponential", "server"),
    "warmup": ("mean",),
    "as": ("mean", "server"),
}


@dataclass(frozen=True)
class OuterOptimizer:
    """`nesterov(0.7, 0.9)`: optimizer of what replicas have in common; `sgd(1.0)` takes their mean."""

    kind: OuterKind = "sgd"
    learning_rate: float = 1.0
    momentum: float = 0.0

    @property
    def is_mean(self) -> bool:
        return self.learning_rate == 1.0 and self.momentum == 0.0

    def __str__(self) -> str:
        momentum = f", {_number(self.momentum)}" if self.momentum else ""
        return f"{self.kind}({_number(self.learning_rate)}{momentum})"


@dataclass(frozen=True)
class Coder:
    """`int8`: code in which replicas send; `topk 5%` sends the largest values alone."""

    kind: CoderKind
    percent: float = 100.0

    def __str__(self) -> str:
        return f"topk {format_percent(self.percent)}" if self.kind == "topk" else self.kind


@dataclass(frozen=True)
class DriftStatement:
    """`drift pod -> mean every 16`: the replicas along an axis, and how they meet."""

    # A product of axes, major to minor.
    axes: tuple[str, ...]
    meeting: MeetingKind
    # Of `server(2)`: how many replicas hold a slice of the parameters.
    servers: int = 0
    # Steps between meetings; 0: gradients meet before each step.
    every: int = 1
    # Shares of the batch, in these proportions or by the speeds of the devices; None: equal ones.
    by: tuple[int, ...] | Literal["speed"] | None = None
    outer: OuterOptimizer = OuterOptimizer()
    # Slices of the parameters that meet one after the other.
    parts: int = 1
    # Steps between the start of a meeting and the use of its result.
    late: int = 0
    # Steps that a replica may be ahead of the slowest one; None: any number.
    stale: int | None = 0
    # First steps, after each of which all replicas meet.
    warmup: int = 0
    coder: Coder | None = None
    span: SourceSpan | None = field(default=None, compare=False, repr=False)

    @property
    def has_anchor(self) -> bool:
        """Return whether meetings are about the difference from a value that all replicas have."""
        return self.meeting == "server" or (
            self.every > 0 and self.meeting == "mean" and not (self.outer.is_mean and self.coder is None)
        )


def print_drift(drift: DriftStatement) -> str:
    """Return the text of a statement in normal form: options that have their default are left out."""
    meeting = f"server({drift.servers})" if drift.meeting == "server" else drift.meeting
    every = f" every {drift.every}" if drift.every != 1 else ""
    options = [] if drift.by is None else [f"by {drift.by if drift.by == 'speed' else ':'.join(map(str, drift.by))}"]
    if drift.outer != OuterOptimizer():
        options.append(f"outer {drift.outer}")
    options += [f"{word} {value}" for word in ("parts", "late") if (value := getattr(drift, word)) != _DEFAULT[word]]
    if drift.stale != 0:
        options.append(f"stale {'any' if drift.stale is None else drift.stale}")
    if drift.warmup:
        options.append(f"warmup {drift.warmup}")
    coder = "" if drift.coder is None else f" as {drift.coder}"
    return f"drift {'*'.join(drift.axes)} -> {', '.join([f'{meeting}{every}', *options])}{coder}"


_DEFAULT = {"parts": 1, "late": 0}


def _number(value: float) -> str:
    return f"{Decimal(repr(value)):f}"  # in digits, without an exponent


# -- reading -----------------------------------------------------------------------------------------------------------


def read_drift(words: TokenReader, keyword: Token, read_axes: Callable[[], tuple[str, ...]]) -> DriftStatement:
    """Read a statement after its keyword."""
    words.form = FORM
    _refuse_hole(words)
    axes = read_axes()
    words.expect("->", f"and a meeting after '{'*'.join(axes)}'")
    meeting, servers = _meeting(words)
    options: dict[str, object] = {}
    places: dict[str, Token] = {}
    # The first option may follow without a comma: `mean every 16`.
    while not words.at_end() and not _at_name(words, "as"):
        if not words.accept(",") and places:
            raise words.expected("',' or the end of the line")
        _refuse_hole(words)
        place = words.token
        if place.text not in OPTIONS:
            if not words.is_a("name", "word"):
                raise words.expected(f"an option ({', '.join(OPTIONS)})")
            raise unknown_name("option of a meeting", place.text, OPTIONS, place.span)
        if place.text in places:
            both = places[place.text].span, place.span
            raise layout_error("E0", f"'{place.text}' stands twice", "keep one of them", *both)
        places[place.text] = place
        if place.text == "by":
            options["by"] = read_shares(words)
            continue
        words.advance()
        options[place.text] = _option(words, place.text)
    coder = None
    if _at_name(words, "as"):
        places["as"] = words.advance()
        coder = _coder(words)
    drift = DriftStatement(axes, meeting, servers, coder=coder, span=keyword.span, **options)  # type: ignore[arg-type]
    mistake = _mistake(drift, places)
    if mistake is not None:
        raise mistake
    return drift


def _refuse_hole(words: TokenReader) -> None:
    if words.at("?"):
        message = "'drift' has no '?': how replicas meet changes what is learned, so no search decides it"
        raise layout_error("E7", message, "write it, as in 'drift pod -> mean every 16'", words.token.span)


def _at_name(words: TokenReader, text: str) -> bool:
    return words.is_a("name") and words.token.text == text


def _one_of(words: TokenReader, known: Sequence[_Name], what: str) -> _Name:
    """Read one of some names; `what` has an article."""
    _refuse_hole(words)
    place = words.token
    if not words.is_a("name", "word"):
        raise words.expected(f"{what} ({', '.join(known)})")
    words.advance()
    found = next((one for one in known if one == place.text), None)
    if found is None:
        raise unknown_name(what.partition(" ")[2], place.text, known, place.span)
    return found


def _meeting(words: TokenReader) -> tuple[MeetingKind, int]:
    meeting = _one_of(words, MEETINGS, "a meeting")
    if meeting != "server":
        return meeting, 0
    words.expect("(", "and a number of servers after 'server'")
    servers = _integer(words, "a number of servers", least=1)
    words.expect(")", "after the number of servers")
    return meeting, servers


def _option(words: TokenReader, name: str) -> object:
    if name == "outer":
        return _outer(words)
    if name == "stale" and _at_name(words, "any"):
        words.advance()
        return None
    return _integer(words, f"a number after '{name}'", least=1 if name == "parts" else 0)


def _integer(words: TokenReader, what: str, least: int) -> int:
    _refuse_hole(words)
    place = words.token
    found = words.expect_integer(what)
    if found < least:
        raise layout_error("E0", f"{found} is too small: expected {what}, from {least} up", words.form, place.span)
    return found


def _outer(words: TokenReader) -> OuterOptimizer:
    place, kind = words.token, _one_of(words, OUTERS, "an outer optimizer")
    words.expect("(", f"and a learning rate after '{kind}'")
    learning_rate, momentum = _decimal(words, "a learning rate"), 0.0
    if words.accept(","):
        at = words.token
        momentum = _decimal(words, "a momentum")
        if momentum >= 1:
            raise layout_error("E0", f"a momentum is below 1, not {at.text}", words.form, at.span)
    words.expect(")", "after its numbers")
    if learning_rate == 0:
        raise layout_error("E0", "with a learning rate of 0 nothing is learned", words.form, place.span)
    return OuterOptimizer(kind, learning_rate, momentum)


def _decimal(words: TokenReader, what: str) -> float:
    _refuse_hole(words)
    if not words.is_a("number") or len(words.token.text) > MAX_DIGITS:
        raise words.expected(what)
    return float(words.advance().text)


def _coder(words: TokenReader) -> Coder:
    kind = _one_of(words, CODERS, "a code")
    if kind != "topk":
        return Coder(kind)
    if not words.is_a("number"):
        raise words.expected("a share of the values, as in 'topk 5%'")
    number = words.advance()
    words.expect("%", "after the share, as in 'topk 5%'")
    percent = parse_percent(number)
    if percent == 0:
        raise layout_error("E0", "a share of 0% sends nothing", "write 'topk 5%'", number.span)
    return Coder(kind, percent)


def _mistake(drift: DriftStatement, places: dict[str, Token]) -> LayoutError | None:
    """Return the error for options that do not go together."""

    def error(message: str, fix: str, *words: str) -> LayoutError:
        return layout_error("E0", message, fix, *(places[word].span for word in words))

    for word in places:
        if drift.meeting not in _ALLOWED[word]:
            allowed = " or ".join(_ALLOWED[word])
            return error(f"'{word}' has no meaning with '{drift.meeting}'", f"leave it out, or meet by {allowed}", word)
    if drift.every == 0:
        if drift.meeting != "mean":
            return error(f"'every 0' means gradients, and '{drift.meeting}' has none", "meet by 'mean'", "every")
        for word in ("outer", "parts", "late", "warmup"):
            if word in places:
                message = f"'{word}' has no meaning with 'every 0', where gradients meet before each step"
                return error(message, f"leave one of them out; 'every 1, {word} ...' meets after a step", "every", word)
    elif drift.parts > drift.every:
        message = f"{drift.parts} parts cannot meet one after the other in {drift.every} steps"
        return error(message, "take fewer parts, or a larger number after 'every'", "parts")
    elif drift.late * drift.parts >= drift.every and drift.late:
        apart = f"{drift.every / drift.parts:g} steps"
        message = f"'late {drift.late}' would end after the next meeting begins, {apart} later"
        return error(message, "take a smaller number", "late")
    if drift.meeting == "exponential" and drift.stale not in (0, None):
        message = "'exponential' waits for its neighbour or for nobody"
        return error(message, "write 'stale any', or leave it out", "stale")
    return None
