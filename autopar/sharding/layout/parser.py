"""Parse the words of a layout into statements, with one method for each line of the grammar in docs/language.md."""

from __future__ import annotations

from typing import Literal, NoReturn, cast, get_args

from autopar.errors import LayoutError
from autopar.mesh import Mesh, parse_axes
from autopar.names import did_you_mean
from autopar.sharding.layout.capacity_statement import begins_capacity, read_capacity
from autopar.sharding.layout.drift import read_drift
from autopar.sharding.layout.fold_statement import read_fold
from autopar.sharding.layout.pieces_statement import begins_pieces, read_pieces
from autopar.sharding.layout.recompute_ops import begins_list, read_list
from autopar.sharding.layout.source import SourceSpan, layout_error, unknown_name
from autopar.sharding.layout.stage_statements import STAGE_WORDS, begins_stages, read_stages
from autopar.sharding.layout.syntax import (
    COLLECTIVES,
    KINDS,
    Axes,
    Block,
    Collective,
    DimRule,
    GatherStatement,
    Guard,
    Hole,
    Kind,
    Let,
    Limit,
    MeshStatement,
    NotSplit,
    OpPin,
    PartPin,
    Pin,
    PinState,
    Recompute,
    RecomputeMode,
    Same,
    Scope,
    SplitTerm,
    Statement,
    StrategyStatement,
    TensorPattern,
    Term,
)
from autopar.sharding.layout.tokens import UNITS, Token, TokenReader, parse_percent, parse_size, read_shares

# How a statement is written, by its first word: the `fix:` line of errors within it.
FORMS = {
    "strategy": "write it as in 'strategy fsdp \"what it does\"'",
    "let": "write it as in 'let data = dp*fsdp'",
    "op": "write it as in 'op @blocks.0.mlp/linear[d_ff -> tp]'",
    "part": "write it as in 'op @vision.* at part 0'",
    "keep": "write it as in 'keep @blocks.*.weight'",
    "regather": "write it as in 'regather @blocks.*.weight'",
    "recompute": "write it as in 'recompute full @blocks.*', or with 'none', 'selective', 'offload' or a list",
    "same": "write it as in 'same @embed.weight @head.weight'",
    "forbid": "write it as in 'forbid all_gather(act) over tp'",
    "warn": "write it as in 'warn all_gather(act) over tp'",
    "limit": "write it as in 'limit memory 70GiB' or 'limit halo 25%'",
    "block": "write a block as in 'param, grad { d_ff -> tp }' or 'act[seq]@blocks.* { seq -> tp }'",
    "pin": "write a pin as in '@blocks.0.weight[d_ff -> tp, * -> none] + partial(dp)'",
    "rule": "write a rule as in 'batch -> dp' or '(heads, kv_heads) -> tp | none'",
}

STATEMENT = ("strategy", "mesh", "let", "op", "keep", "regather", "recompute", "same", "forbid", "warn", "limit")


class LayoutParser(TokenReader):
    """Recursive descent parser of one text; each method reads one construct from the current word on."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text, name, FORMS["rule"])

    # -- the file --

    def file(self) -> tuple[Statement, ...]:
        statements: list[Statement] = []
        while not self.is_a("end"):
            if self.at_end():
                self.advance()
                continue
            statements.append(self.statement())
            if not self.at_end():
                raise self.expected("the end of the line or ';'", self._fix_of_what_follows())
        return tuple(statements)

    def rules(self) -> tuple[DimRule, ...]:
        """Read rules alone, separated by ',', ';' or new lines."""
        rules = self._rules("end")
        if not rules:
            raise self.expected("a rule")
        return rules

    def call(self) -> tuple[str, dict[str, Axes]]:
        """Read the call of a strategy, `fsdp(fsdp=dp*tp)`."""
        self.form = "write it as in 'fsdp' or 'fsdp(fsdp=dp*tp)'"
        name = self.expect_name("a strategy")
        arguments: dict[str, Axes] = {}
        if self.accept("(") and not self.accept(")"):
            for place, axis, axes in self.listed(self._argument, ")", "an argument"):
                if axis in arguments:
                    raise layout_error("E0", f"axis '{axis}' is given twice", "give it once", place)
                arguments[axis] = axes
        if not self.is_a("end"):
            raise self.expected("the end of the strategy's name")
        return name, arguments

    def _argument(self) -> tuple[SourceSpan, str, Axes]:
        place = self.token.span
        axis = self.expect_name("an axis of the strategy")
        self.expect("=", f"and axes of the mesh after '{axis}'")
        return place, axis, () if self.accept("none") else self.axes()

    def _fix_of_what_follows(self) -> str:
        if self.at(","):
            return "separate statements by ';' or a new line; ',' separates inside {}, [] and ()"
        if self.at("}", "]", ")"):
            return f"there is nothing that '{self.token.text}' closes; remove it"
        if self.form == FORMS["rule"]:
            return "write 'dp*tp' for a product of axes, 'dp | tp' for alternatives, ';' between statements"
        return self.form

    # -- statements --

    def statement(self) -> Statement:
        token = self.token
        if token.kind == "glob":
            # `@name[...]` is a pin, `@name { ... }` a block without a kind.
            following = self.tokens[self.position + 1]
            return self.pin() if following.kind == "symbol" and following.text == "[" else self.block()
        if self.at("}", "]", ")"):
            raise self.expected("a statement", self._fix_of_what_follows())
        following = self.tokens[self.position + 1]
        if begins_stages(token, following):
            return read_stages(self, self.advance())
        # Two names in a row begin no rule.
        if token.kind == "name" and token.text == "fold" and following.kind in ("name", "dim"):
            return read_fold(self, self.advance())
        if begins_capacity(token, following):
            return read_capacity(self, self.advance())
        if begins_pieces(token, following):
            return read_pieces(self, self.advance())
        if token.kind == "name" and token.text == "drift" and (following.kind == "name" or following.text == "?"):
            return read_drift(self, self.advance(), self.axes)
        if token.kind != "word":
            return self.rule(bare=True)
        if token.text in KINDS:
            return self.block()
        if token.text not in STATEMENT:
            fix = f"a statement begins with a dim, a kind, '@', or one of {', '.join(STATEMENT)}"
            raise layout_error("E0", f"'{token.text}' begins no statement", fix, token.span)
        self.form = FORMS.get(token.text, "")
        self.advance()
        match token.text:
            case "strategy":
                return self.strategy(token.span)
            case "mesh":
                return self.mesh(token)
            case "let":
                return self.let(token.span)
            case "op":
                return self.op(token.span)
            case "same":
                return Same(self.expect_glob(), self.expect_glob(), token.span)
            case "limit":
                return self.limit(token.span)
            case "forbid" | "warn":
                return self.guard(token)
        return self.hold(token)

    def strategy(self, span: SourceSpan) -> StrategyStatement:
        name = self.expect_name("the strategy")
        description = self.advance().text if self.is_a("string") else None
        return StrategyStatement(name, description, span)

    def mesh(self, keyword: Token) -> MeshStatement:
        end = keyword.end
        while not self.at_end():
            end = self.advance().end
        start = keyword.end  # the mesh has a notation of its own, so its text is read as a whole

        def fail(column: int, message: str, fix: str) -> NoReturn:
            place = SourceSpan(keyword.span.name, keyword.span.line, start + column, keyword.span.text)
            raise layout_error("E0", message, fix, place)

        return MeshStatement(Mesh(parse_axes(keyword.span.text[start:end], fail)), keyword.span)

    def let(self, span: SourceSpan) -> Let:
        name = self.expect_name("axes")
        self.expect("=", f"and axes after 'let {name}'")
        return Let(name, self.axes(), span)

    def block(self) -> Block:
        self.form = FORMS["block"]
        span = self.token.span
        scopes = [self.scope()]
        while self.accept(","):
            scopes.append(self.scope())
        brace = self.token
        # `act -> tp` looks like a rule for a dim that bears the name of a kind.
        if self.at("->", ":") and scopes == [Scope(scopes[0].kind)]:
            raise self.reserved(span, str(scopes[0].kind), "a dim")
        self.expect("{", "after a scope")
        rules = self._rules("}")
        if self.is_a("end"):
            raise layout_error("E0", "this '{' is not closed", "close the block with '}'", brace.span)
        if not rules:
            raise self.expected("a rule")
        self.expect("}", "after the rules")
        self.form = FORMS["block"]
        return Block(tuple(scopes), rules, span)

    def scope(self) -> Scope:
        token = self.token
        if token.kind == "name":
            raise unknown_name("kind", token.text, KINDS, token.span)
        kind: Kind | None = None
        dims: tuple[str, ...] = ()
        if not self.is_a("glob"):
            if not self.at(*KINDS):
                raise self.expected("a kind (" + ", ".join(KINDS) + ") or '@' and a name")
            kind = cast(Kind, self.advance().text)
            if self.accept("["):
                dims = self.listed(lambda: self.expect_dim("a dim of the scope"), "]", "a dim")
        glob = self.expect_glob() if self.is_a("glob") else None
        return Scope(kind, dims, glob)

    def pin(self) -> Pin:
        span = self.token.span
        self.form = FORMS["pin"]
        glob = self.expect_glob()
        self.advance()
        rules = self.listed(self.rule, "]", "a rule")
        self.form = FORMS["pin"]
        states: list[PinState] = []
        while self.accept("+"):
            if not self.at("partial", "broadcast"):
                raise self.expected("'partial' or 'broadcast' after '+'")
            state = cast(Literal["partial", "broadcast"], self.advance().text)
            self.expect("(", f"and axes after '{state}'")
            axes = self.axes()
            self.expect(")", "after the axes")
            states.append(PinState(state, axes))
        return Pin(glob, rules, tuple(states), span)

    def op(self, span: SourceSpan) -> OpPin | PartPin:
        glob = self.expect_glob()
        if self.is_a("name") and self.token.text == "at":
            self.form = FORMS["part"]
            self.advance()
            if self.token.text != "part":
                raise self.expected("'part' and its number after 'at'")
            self.advance()
            return PartPin(glob, self.expect_integer("the number of a part, from 0"), span)
        self.expect("[", "and factors after the name of the op")
        found = self.listed(self._factor, "]", "axes")
        choice = tuple((factor, axes) for factor, axes, _ in found)
        return OpPin(glob, choice, span, tuple(factor for factor, _, uneven in found if uneven))

    def _factor(self) -> tuple[str, Axes, bool]:
        factor = self.advance().text if self.at("none", "broadcast") else self.expect_dim("a factor")
        self.expect("->", f"after factor '{factor}'")
        return factor, self.axes(), self.accept("pad")

    def hold(self, keyword: Token) -> GatherStatement:
        level: Recompute | None = None
        if keyword.text == "recompute":
            if begins_list(self):
                level = read_list(self)
            elif self.at(*get_args(RecomputeMode)):
                level = cast(RecomputeMode, self.advance().text)
            else:
                raise self.expected("'none', 'selective', 'full', 'offload' or a list after 'recompute'")
        action = cast(Literal["keep", "regather", "recompute"], keyword.text)
        return GatherStatement(action, self.expect_glob(), level, keyword.span)

    def guard(self, keyword: Token) -> Guard:
        token = self.token
        if token.kind not in ("name", "word"):
            raise self.expected("a collective (" + ", ".join(COLLECTIVES) + ")")
        if token.text not in COLLECTIVES:
            raise unknown_name("collective", token.text, COLLECTIVES, token.span)
        collective = cast(Collective, self.advance().text)
        self.expect("(", f"and a scope after '{collective}'")
        scope = self.scope()
        self.expect(")", "after the scope")
        self.expect("over", "and axes after the collective")
        action = cast(Literal["forbid", "warn"], keyword.text)
        return Guard(action, collective, scope, self.axes(), keyword.span)

    def limit(self, span: SourceSpan) -> Limit:
        if not self.at("memory", "halo"):
            raise self.expected("'memory' or 'halo' after 'limit'")
        quantity = cast(Literal["memory", "halo"], self.advance().text)
        number = self.token
        if number.kind != "number":
            raise self.expected("a size or a percentage" if quantity == "memory" else "a percentage")
        self.advance()
        if self.accept("%"):
            return Limit(quantity, percent=parse_percent(number), span=span)
        if quantity == "halo":
            raise self.expected("'%': a halo is limited to a share of the shard's extent")
        if not self.is_a("name"):
            raise self.expected(f"a unit ({', '.join(UNITS)}) or '%' after the number")
        return Limit(quantity, size_bytes=parse_size(number, self.advance()), span=span)

    # -- rules --

    def _rules(self, close: Literal["end", "}"]) -> tuple[DimRule, ...]:
        rules: list[DimRule] = []
        self._line_ends()
        while not (self.is_a("end") or self.at("}")):
            rules.append(self.rule())
            separated = self._line_ends()
            separated = self.accept(",", ";") or separated
            self._line_ends()
            if not (separated or self.is_a("end") or self.at("}")):
                raise self.expected("',', ';', a new line" + (" or '}'" if close == "}" else ""))
        if close == "end" and self.at("}"):
            raise self.expected("a rule", self._fix_of_what_follows())
        return tuple(rules)

    def _line_ends(self) -> bool:
        start = self.position
        while self.is_a("line end"):
            self.advance()
        return self.position > start

    def rule(self, *, bare: bool = False) -> DimRule:
        first = self.token
        self.form = FORMS["rule"]
        dims = self.listed(self.dim, ")", "a dim") if self.accept("(") else (self.dim(),)
        if not self.accept("->", ":"):
            raise self._no_arrow(first, bare and first.kind == "name")
        return DimRule(dims, self.place(), first.span)

    def _no_arrow(self, first: Token, maybe_word: bool) -> LayoutError:
        """Return the error for dims without an arrow, perhaps after a misspelt keyword."""
        meant = did_you_mean(first.text, [*STATEMENT, *STAGE_WORDS, "drift", *KINDS]) if maybe_word else ""
        if maybe_word and (self.at("{", "[") or self.is_a("glob") or (meant and self.at(","))):
            return unknown_name("kind", first.text, KINDS, first.span)
        if self.at(","):
            return self.expected("'->' or ':' after dims", "write several dims in parentheses: '(heads, d_ff) -> tp'")
        if maybe_word and self.at_end():
            return self.expected("'->' or ':' after dims", "write a strategy behind the statements: 'micro 8; fsdp'")
        message = f"expected '->' or ':' after dims, found {self.token}{meant}"
        return layout_error("E0", message, self.form, self.token.span)

    def dim(self) -> str:
        if self.accept("*"):
            return "*"
        name = self.token
        dim = self.expect_dim()
        # `d_*` is one pattern only if the star follows directly.
        if name.kind == "name" and self.at("*") and self.token.span.column == name.end:
            self.advance()
            return dim + "*"
        return dim

    def place(self) -> TensorPattern:
        terms = [self.term()]
        while self.accept("|"):
            terms.append(self.term())
        priority = self.expect_integer("a priority, as in '!1'") if self.accept("!") else 0
        return TensorPattern(tuple(terms), priority)

    def term(self) -> Term:
        if self.accept("none"):
            return NotSplit()
        if self.accept("?"):
            return Hole(self.listed(self.axes, "}", "axes") if self.accept("{") else ())
        if not self.is_a("name"):
            raise self.expected("axes, 'none' or '?'")
        axes = self.axes()
        extends = self.accept("?")
        pad, place = self.accept("pad"), self.token.span
        by = read_shares(self)
        if by is not None and (extends or pad):
            message = f"'{'pad' if pad else '?'}' and 'by' both say how long shards are: shares are exact"
            raise layout_error("E0", message, "keep one of them", place)
        return SplitTerm(axes, extends, pad, by)

    def axes(self) -> Axes:
        axes: list[str] = []
        while not axes or self.accept("*"):
            place = self.token.span
            axis = self.expect_name("an axis")
            if axis in axes:
                raise layout_error("E0", f"axis '{axis}' stands twice in a product", "name it once", place)
            axes.append(axis)
        return tuple(axes)
