"""The notation of rules: one small parser, one frozen value, one printer.

    rule     = [ operands ] "->" [ operands ] { ";" clause }
    operands = operand { "," operand }
    operand  = terms [ "?" ]                  "?" after the terms: the operand may be absent
             | "?"                            this operand is absent, or the output is None
    terms    = { term } | "()"                no terms, or "()": a scalar tensor
    term     = factor | "(" factor { factor } ")" | "1" | "..."
    factor   = NAME [ "!" ]                   "!": whole, cannot be split

    clause   = contraction NAME { NAME }      sum (unless said otherwise), mean, max or min of contracted factors
             | "halo" NAME [ geometry ]       shards need their neighbours' edges along this factor
             | "linear" group { group }       operands in which the op is linear; "0+2": in both together; "*": in all
             | "index" OPERAND NAME           this operand holds positions along the factor
             | "localise" local { local }     arguments that change when a factor is split
             | "lower" NAME LOWERING          a function of ours runs instead of the op when this factor is split
             | "random"                       draws random numbers
    geometry = "kernel=" INT { ("stride=" | "padding=" | "dilation=") INT }
    local    = ARGUMENT [ "=" NAME ]          with a factor: the argument is the factor's extent

Nothing left of the arrow is an op without operands, nothing right of it one scalar output. A compound term `(h d)` is
one physical dim made of several factors, major first. A factor on the left and not on the right is contracted; one only
on the right is born there (`arange`, `expand`). An output that lacks a factor which another output has is the same in
all shards, unless a contraction clause names the factor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import groupby
from typing import NoReturn, TypeVar

from autopar.errors import RuleError

__all__ = ["ELLIPSIS", "FactorKind", "Halo", "Operand", "Rule", "Term", "localised_by", "parse_clauses", "parse_rule"]

T = TypeVar("T")

# The factors of one physical dim, major first; `()` is a dim of size 1 that has no factor.
Term = tuple[str, ...]

# Stands for any number of leading dims, aligned to the right between operands.
ELLIPSIS: Term = ("...",)


class FactorKind(Enum):
    PARALLEL = "parallel"
    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    WHOLE = "whole"
    HALO = "halo"


MAX_OPERANDS = 100
CLAUSES = "clauses are sum, mean, max, min, halo, linear, index, localise, lower, random"

CONTRACTIONS = {kind.value: kind for kind in (FactorKind.SUM, FactorKind.MEAN, FactorKind.MAX, FactorKind.MIN)}


@dataclass(frozen=True)
class Halo:
    """A window sliding along a factor: output `i` reads input `i * stride - padding + k * dilation`, `k < kernel`."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def pointwise(self) -> bool:
        return self == Halo(kernel=1)

    def __str__(self) -> str:
        return f"kernel={self.kernel} stride={self.stride} padding={self.padding} dilation={self.dilation}"


@dataclass(frozen=True)
class Operand:
    terms: tuple[Term, ...]
    optional: bool = False

    @property
    def factors(self) -> tuple[str, ...]:
        return tuple(name for term in self.terms for name in term if term != ELLIPSIS)

    @property
    def has_ellipsis(self) -> bool:
        return ELLIPSIS in self.terms


@dataclass(frozen=True)
class Rule:
    """How one op treats its factors. With an ellipsis it is a pattern; bound to a call it has none."""

    operands: tuple[Operand | None, ...]
    outputs: tuple[Operand | None, ...]
    whole: frozenset[str] = frozenset()
    contracted: tuple[tuple[str, FactorKind], ...] = ()
    halos: tuple[tuple[str, Halo | None], ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    linear_in_all: bool = False
    indices: tuple[tuple[int, str], ...] = ()
    localise: tuple[str, ...] = ()
    lowerings: tuple[tuple[str, str], ...] = ()
    random: bool = False

    @property
    def factors(self) -> tuple[str, ...]:
        """All factors, in the order of their first appearance."""
        return tuple(self.kinds)

    @cached_property
    def kinds(self) -> dict[str, FactorKind]:
        return _kinds_of(self)

    def outcome(self, output: int, factor: str) -> FactorKind | None:
        """Return how shards' results of one output combine when the factor is split; None: equal in all shards."""
        operand = self.outputs[output]
        kind = self.kinds[factor]
        if operand is None or factor in operand.factors or kind not in (FactorKind.PARALLEL, FactorKind.HALO):
            return kind
        return dict(self.contracted).get(factor)

    def lowering(self, factor: str) -> str | None:
        return dict(self.lowerings).get(factor)

    def halo(self, factor: str) -> Halo | None:
        return dict(self.halos).get(factor)

    def added_operands(self, factor: str) -> frozenset[int]:
        """Operands that are added to a sum over `factor` (a bias): split, only one shard may keep them."""
        holders = {i for i, operand in enumerate(self.operands) if operand is not None and factor in operand.factors}
        together = {i for group in self.linear for i in group if len(group) > 1 and holders.intersection(group)}
        return frozenset(together - holders)

    def with_clauses(self, clauses: Rule) -> Rule:
        """This rule's dims with the clauses of another one added; those of factors that it lacks are left out."""
        known = set(self.factors)
        return replace(
            self,
            whole=self.whole | (clauses.whole & known),
            contracted=_merged(self.contracted, clauses.contracted, known),
            halos=_merged(self.halos, clauses.halos, known),
            linear=self.linear or clauses.linear,
            linear_in_all=self.linear_in_all or clauses.linear_in_all,
            indices=self.indices + tuple((i, name) for i, name in clauses.indices if name in known),
            localise=self.localise
            + tuple(word for word in localised_by(clauses.localise, known) if word not in self.localise),
            lowerings=_merged(self.lowerings, clauses.lowerings, known),
            random=self.random or clauses.random,
        )

    def __str__(self) -> str:
        left = ", ".join(map(self._operand, self.operands))
        right = "" if self.outputs == (Operand(()),) else ", ".join(map(self._operand, self.outputs))
        return "; ".join([f"{left} -> {right}".strip(), *self._clauses()])

    def _operand(self, operand: Operand | None) -> str:
        if operand is None:
            return "?"
        text = " ".join(map(self._term, operand.terms)) or "()"
        return text + "?" if operand.optional else text

    def _term(self, term: Term) -> str:
        marked = [name + "!" if name in self.whole else name for name in term]
        if len(term) == 1:
            return marked[0]
        return f"({' '.join(marked)})" if term else "1"

    def _clauses(self) -> Iterator[str]:
        for kind, named in groupby(self.contracted, key=lambda pair: pair[1]):
            yield f"{kind.value} {' '.join(name for name, _ in named)}"
        for name, halo in self.halos:
            yield f"halo {name}" + (f" {halo}" if halo else "")
        if self.linear:
            yield "linear " + " ".join("+".join(map(str, group)) for group in self.linear)
        if self.linear_in_all:
            yield "linear *"
        for position, name in self.indices:
            yield f"index {position} {name}"
        if self.localise:
            yield "localise " + " ".join(self.localise)
        for name, lowering in self.lowerings:
            yield f"lower {name} {lowering}"
        if self.random:
            yield "random"


def localised_by(words: tuple[str, ...], known: set[str]) -> tuple[str, ...]:
    """Return the words of a localise clause, without those about factors that are not known."""
    return tuple(word for word in words if "=" not in word or word.partition("=")[2] in known)


def _merged(
    own: tuple[tuple[str, T], ...], added: tuple[tuple[str, T], ...], known: set[str]
) -> tuple[tuple[str, T], ...]:
    taken = {name for name, _ in own}
    return own + tuple((name, value) for name, value in added if name in known and name not in taken)


def _kinds_of(rule: Rule) -> dict[str, FactorKind]:
    left = dict.fromkeys(name for operand in rule.operands if operand for name in operand.factors)
    right = dict.fromkeys(name for operand in rule.outputs if operand for name in operand.factors)
    contracted, halos = dict(rule.contracted), dict(rule.halos)
    kinds: dict[str, FactorKind] = {}
    for name in [*left, *(name for name in right if name not in left)]:
        if name in rule.whole:
            kinds[name] = FactorKind.WHOLE
        elif name in left and name not in right:
            kinds[name] = contracted.get(name, FactorKind.SUM)
        else:
            kinds[name] = FactorKind.HALO if name in halos else FactorKind.PARALLEL
    return kinds


# -- parsing ----------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r"\s*(?:(\.\.\.)|([A-Za-z_][A-Za-z0-9_]*)|(.))")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def _fail(text: str, column: int, message: str) -> NoReturn:
    raise RuleError(f"{message}\n  {text}\n  {' ' * column}^")


def parse_rule(text: str) -> Rule:
    """Parse one rule; `str(parse_rule(text))` gives it back in its normal form."""
    # Split before parsing, so that an error shows the whole text with a mark below its clause.
    body, *clauses = text.split(";")
    if body.count("->") != 1:
        _fail(text, 0, "a rule has one '->' between its operands and its outputs, as in 'b s d, f d -> b s f'")
    left, right = body.split("->")
    whole: set[str] = set()
    operands = _parse_side(text, left, 0, whole)
    outputs = _parse_side(text, right, len(left) + 2, whole) or (Operand(()),)
    rule = Rule(operands, outputs, whole=frozenset(whole))
    return _parse_clauses(text, len(body) + 1, clauses, rule)


def parse_clauses(text: str) -> Rule:
    """Parse clauses alone (`linear 0; localise size`), for rules whose dims depend on the call."""
    return _parse_clauses(text, 0, text.split(";"), None) if text.strip() else Rule((), ())


def _parse_clauses(text: str, column: int, clauses: list[str], rule: Rule | None) -> Rule:
    parsed = rule or Rule((), ())
    for clause in clauses:
        parsed = _parse_clause(text, column, clause, parsed, checked=rule is not None)
        column += len(clause) + 1
    return parsed


def _parse_side(text: str, side: str, column: int, whole: set[str]) -> tuple[Operand | None, ...]:
    if not side.strip():
        return ()
    operands: list[Operand | None] = []
    for part in side.split(","):
        word = "".join(part.split())
        if word == "?":
            operands.append(None)
        elif word in ("()", "()?"):
            operands.append(Operand((), optional=word.endswith("?")))
        else:
            operands.append(_parse_operand(text, part, column, whole))
        column += len(part) + 1
    return tuple(operands)


def _parse_operand(text: str, part: str, column: int, whole: set[str]) -> Operand:
    terms: list[Term] = []
    group: list[str] | None = None
    optional = False
    last: str | None = None
    opened = column
    seen: set[str] = set()
    for match in _TOKEN.finditer(part):
        dots, name, symbol = match.groups()
        here = column + (match.end() - len(match.group().lstrip()))
        if symbol is not None and symbol.isspace():
            continue
        if optional:
            _fail(text, here, "'?' stands after the last term of an operand")
        if name:
            if name in seen:
                _fail(text, here, f"factor '{name}' stands twice in one operand; name its two dims apart")
            seen.add(name)
            if group is None:
                terms.append((name,))
            else:
                group.append(name)
            last = name
            continue
        if symbol == "!" and last is not None:
            whole.add(last)
        elif symbol == "(" and group is None:
            group, opened = [], here
        elif symbol == ")" and group:
            terms.append(tuple(group))
            group = None
        elif symbol == "?" and group is None:
            optional = True
        elif dots and group is None and ELLIPSIS not in terms:
            terms.append(ELLIPSIS)
        elif symbol == "1" and group is None:
            terms.append(())
        else:
            _fail(text, here, f"'{dots or symbol}' cannot stand here")
        last = None
    if group is not None:
        _fail(text, opened, "this '(' is not closed")
    return Operand(tuple(terms), optional)


def _parse_clause(text: str, column: int, clause: str, rule: Rule, *, checked: bool) -> Rule:
    words = clause.split()
    column += len(clause) - len(clause.lstrip())
    if not words:
        _fail(text, column, "empty clause after ';'")
    head, rest = words[0], words[1:]
    if head == "random" and not rest:
        return replace(rule, random=True)
    if not rest:
        _fail(text, column, f"clause '{head}' is unknown or lacks its words; {CLAUSES}")
    if head in CONTRACTIONS:
        _check_factors(text, column, rest, rule, checked)
        _check_once(text, column, [name for name, _ in rule.contracted] + rest)
        return replace(rule, contracted=rule.contracted + tuple((name, CONTRACTIONS[head]) for name in rest))
    if head == "halo":
        _check_factors(text, column, rest[:1], rule, checked)
        _check_once(text, column, [name for name, _ in rule.halos] + rest[:1])
        return replace(rule, halos=(*rule.halos, (rest[0], _parse_halo(text, column, rest[1:]))))
    if head == "linear":
        return _parse_linear(text, column, rest, rule, len(rule.operands) if checked else MAX_OPERANDS)
    if head == "index" and len(rest) == 2 and rest[0].isdecimal():
        _check_factors(text, column, rest[1:], rule, checked)
        if checked and int(rest[0]) >= len(rule.operands):
            _fail(
                text,
                column,
                f"the clause names operand {rest[0]}, but the rule has {len(rule.operands)} (the first is 0)",
            )
        return replace(rule, indices=(*rule.indices, (int(rest[0]), rest[1])))
    if head == "localise":
        _check_localised(text, column, rest, rule, checked)
        return replace(rule, localise=rule.localise + tuple(rest))
    if head == "lower" and len(rest) == 2:
        _check_factors(text, column, rest[:1], rule, checked)
        _check_once(text, column, [name for name, _ in rule.lowerings] + rest[:1])
        return replace(rule, lowerings=(*rule.lowerings, (rest[0], rest[1])))
    _fail(text, column, f"clause '{' '.join(words)}' is not understood; {CLAUSES}")


def _check_factors(text: str, column: int, names: list[str], rule: Rule, checked: bool) -> None:
    for name in names:
        if checked and name not in rule.factors:
            _fail(text, column, f"the clause names '{name}', which is no factor of this rule")


def _check_once(text: str, column: int, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            _fail(text, column, f"factor '{name}' stands twice in clauses of this kind")


def _check_localised(text: str, column: int, words: list[str], rule: Rule, checked: bool) -> None:
    for word in words:
        argument, equals, factor = word.partition("=")
        if not _NAME.match(argument) or (equals and not _NAME.match(factor)):
            _fail(text, column, f"'{word}' in a localise clause; expected an argument, as in 'size' or 'length=s'")
        if equals:
            _check_factors(text, column, [factor], rule, checked)


def _parse_halo(text: str, column: int, words: list[str]) -> Halo | None:
    if not words:
        return None
    values: dict[str, int] = {}
    for word in words:
        key, _, number = word.partition("=")
        if key not in ("kernel", "stride", "padding", "dilation") or not re.fullmatch("-?[0-9]+", number, re.ASCII):
            _fail(text, column, f"'{word}' in a halo clause; expected kernel=3 stride=1 padding=1 dilation=1")
        values[key] = int(number)
    if "kernel" not in values:
        _fail(text, column, "a halo clause with geometry needs kernel=")
    return Halo(**values)


def _parse_linear(text: str, column: int, words: list[str], rule: Rule, operands: int) -> Rule:
    if words == ["*"]:
        return replace(rule, linear_in_all=True)
    groups: list[tuple[int, ...]] = []
    for word in words:
        numbers = word.split("+")
        if not all(number.isdecimal() and int(number) < operands for number in numbers):
            _fail(
                text,
                column,
                f"'{word}' in a linear clause; expected operand numbers below {operands}, as in '0' or '0+2'",
            )
        groups.append(tuple(int(number) for number in numbers))
    return replace(rule, linear=rule.linear + tuple(groups))
