"""Prove rules by execution: split, run the shards, recombine, compare outputs and gradients.

Every call that a line of the table gives to prove it with is run with several seeds, every factor is split in 2 and 3:

* a factor that may be split must give the whole answer back, in every call and with every seed;
* a factor marked `!` must not, else the rule is too strict;
* operands in which the op is called linear must give the whole answer when they are split in a sum, in every call;
* other operands must not, else the rule keeps partial sums out for nothing.

One counterexample refutes, so the two negative claims are made per bound rule (`a b! -> a b!`), not per call: calls
that share a bound rule differ in arguments and numbers only, and one that is split without harm (an `ignore_index`
that no label has) says nothing about the others. Chance does not decide: a negative claim that nothing refutes is tried
again with many more seeds. Every kind of factor that a line produces must be proved at least once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import combinations, product
from typing import Any

import torch

from autopar.errors import RuleError
from autopar.rules.call import display_name, find_op, operands_of, resolve_op
from autopar.rules.notation import CONTRACTIONS, FactorKind, Rule
from autopar.rules.proof.random_ops import DrawnRuns, draws_of, is_random, recombines
from autopar.rules.proof.run_shards import (
    RUN_ERRORS,
    ShardedRun,
    additivity,
    first_line,
    materialise,
    pieces_of,
    reference,
)
from autopar.rules.proof.samples import Sample, integer_twin
from autopar.rules.registry import registered
from autopar.rules.shard_call.dispatch import LOCALISERS, LOWERINGS
from autopar.rules.table import TableEntry
from autopar.rules.torch_versions import without_op_warnings

__all__ = ["SEEDS", "Case", "Failure", "Proof", "prove_entry", "prove_rule", "prove_table"]

SHARDS = (2, 3)
SEEDS = (0, 1)
MORE_SEEDS = range(2, 12)
# Beyond it not every subset of operands is tried for undeclared linearity, only each operand and all together.
MOST_OPERANDS = 4


@dataclass(frozen=True)
class Case:
    """One thing to prove: this factor (or these operands) of this rule, in this many shards."""

    op: str
    rule: str
    subject: str
    shards: int


@dataclass(frozen=True)
class Failure:
    op: str
    rule: str
    subject: str
    reason: str
    call: str

    def __str__(self) -> str:
        return f"{self.op}: {self.subject}: {self.reason}\n  rule  {self.rule}\n  call  {self.call}"


@dataclass(frozen=True)
class Proof:
    """Proved cases and failures of one line of the table, or of several."""

    cases: frozenset[Case]
    failures: tuple[Failure, ...]
    # Calls that the op itself refused to run.
    refused: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return bool(self.cases) and not self.failures

    def __str__(self) -> str:
        return "\n".join([f"{len(self.cases)} cases proved, {len(self.failures)} failures", *map(str, self.failures)])


def prove_table(entries: Iterable[TableEntry], seeds: Sequence[int] = SEEDS) -> Proof:
    """Prove many lines."""
    proofs = [prove_entry(entry, seeds) for entry in entries]
    return Proof(
        frozenset().union(*(proof.cases for proof in proofs)),
        tuple(failure for proof in proofs for failure in proof.failures),
        tuple(call for proof in proofs for call in proof.refused),
    )


def prove_entry(entry: TableEntry, seeds: Sequence[int] = SEEDS, samples: Iterable[Sample] | None = None) -> Proof:
    """Prove one line with its own samples, or with the given ones."""
    if entry.tries.needs:
        try:
            import_module(entry.tries.needs)
        except ImportError:
            return Proof(frozenset(), (), (f"{entry.op}: {entry.tries.needs} is not installed",))
    walk = _Walk(entry, resolve_op(entry.op))
    with torch.random.fork_rng(devices=[]), without_op_warnings():
        try:
            todo = list(entry.samples(walk.op) if samples is None else samples)
        except RUN_ERRORS as error:
            walk.fail("samples", f"no calls to prove it with: {first_line(error)}")
            todo = []
        for number, (sample, seed) in enumerate(product(todo, seeds)):
            walk.sample(sample, seed, integers=number % len(seeds) == 0)
        walk.finish()
    return Proof(frozenset(walk.proved), tuple(walk.failures.values()), tuple(walk.refused))


def prove_rule(op: Any, samples: Iterable[Sequence[Any]] | None = None) -> Proof:
    """Prove the rule of an op: run it whole and in shards, and compare outputs and gradients.

    Parameters:
        op: an op with a rule of the table, or of `register_rule`, by name or itself.
        samples: positional arguments for some calls, with real tensors, best in float64. Without them the tensors of
            a rule in the notation are made up.

    Returns:
        The proved cases; a rule that is wrong is a `RuleError` that lists the failures.

    >>> import autopar
    >>> proof = autopar.prove_rule("aten::relu")
    >>> proof.holds, str(proof).splitlines()[0]
    (True, '5 cases proved, 0 failures')
    """
    entry = registered(op)
    calls = None if samples is None else [Sample(tuple(sample)) for sample in samples]
    proof = prove_entry(entry, samples=calls)
    if not proof.holds:
        raise RuleError(
            f"the rule of {display_name(find_op(op))} is not proved\n" + "\n".join(map(str, proof.failures))
        )
    return proof


@dataclass(frozen=True)
class _NegativeClaim:
    """Claim that the shards of this case do not give the whole answer."""

    case: Case
    factor: str | None
    group: tuple[int, ...]
    too_strict: str


@dataclass
class _Walk:
    """Proof of one line in progress."""

    entry: TableEntry
    op: torch._ops.OpOverload
    proved: dict[Case, None] = field(default_factory=dict)
    failures: dict[tuple[str, str], Failure] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    # Negative claims that no call has refuted yet, with the calls that might.
    pending: dict[Case, tuple[_NegativeClaim, dict[int, Sample]]] = field(default_factory=dict)
    # The first call whose rule says that it draws random numbers.
    said_random: str = ""
    drew: bool = False
    kinds: set[FactorKind] = field(default_factory=set)
    proved_kinds: set[FactorKind] = field(default_factory=set)

    def fail(self, subject: str, reason: str, rule: str = "", call: str = "") -> None:
        failure = Failure(self.entry.op, rule or self.entry.line, subject, reason, call)
        self.failures.setdefault((failure.rule, subject), failure)

    # -- one call -----------------------------------------------------------------------------------------------------

    def sample(self, sample: Sample, seed: int, *, integers: bool) -> None:
        run = self.run(sample, seed)
        if run is None:
            return
        if reason := _unusable(run):
            self.fail("samples", reason, str(run.rule), str(run.call))
            return
        draws = draws_of(run) if run.rule.random and is_random(run) else None
        self.drew |= draws is not None
        self.said_random = self.said_random or (str(run.call) if run.rule.random else "")
        self.positive(run, draws, SHARDS)
        self.negative(run, draws, sample)
        twin = integer_twin(sample) if integers and draws is None else None
        if twin is not None:
            on_integers = self.run(twin, seed, refusal_counts=False)
            if on_integers is not None and not _unusable(on_integers):
                self.positive(on_integers, None, SHARDS[:1])

    def run(self, sample: Sample, seed: int, *, refusal_counts: bool = True) -> ShardedRun | None:
        try:
            return reference(self.op, materialise(self.op, sample, seed), self.entry.rule, seed)
        except RuleError as error:
            self.fail("binding", str(error))
        except RUN_ERRORS as error:
            if refusal_counts:
                self.refused.append(f"{self.op}: {first_line(error)}")
        return None

    def positive(self, run: ShardedRun, draws: DrawnRuns | None, shard_counts: Iterable[int]) -> None:
        rule = str(run.rule)
        self.kinds.update(run.rule.kinds.values())
        if not run.rule.operands and not run.rule.factors:  # a number made from numbers: every shard makes it
            self.record(run, Case(self.entry.op, rule, "nothing to split", 1), None, None)
        for factor, kind in run.rule.kinds.items():
            if kind is FactorKind.WHOLE:
                continue
            for shards in shard_counts:
                if run.sizes[factor] >= shards:
                    case = Case(self.entry.op, rule, f"factor {factor} {kind.value}", shards)
                    pieces = pieces_of(factor, run.sizes[factor], shards)
                    self.record(run, case, recombines(run, draws, kind, pieces), kind)
        for group, shards in product(run.rule.linear, shard_counts):
            case = Case(self.entry.op, rule, f"linear in {_show(group)}", shards)
            self.record(run, case, additivity(run, group, shards), None)

    def record(self, run: ShardedRun, case: Case, reason: str | None, kind: FactorKind | None) -> None:
        if reason is not None:
            self.fail(case.subject, f"in {case.shards} shards: {reason}", case.rule, str(run.call))
            return
        self.proved[case] = None
        if kind is not None:
            self.proved_kinds.add(kind)

    def negative(self, run: ShardedRun, draws: DrawnRuns | None, sample: Sample) -> None:
        for claim in _claims(self.entry.op, run):
            if claim.case not in self.proved:
                if _refuted(run, draws, claim):
                    self.refute(claim)
                else:
                    self.pending.setdefault(claim.case, (claim, {}))[1][id(sample)] = sample

    def refute(self, claim: _NegativeClaim) -> None:
        self.proved[claim.case] = None
        self.pending.pop(claim.case, None)
        if claim.factor is not None:
            self.proved_kinds.add(FactorKind.WHOLE)

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        for claim, samples in list(self.pending.values()):
            self.try_harder(claim, list(samples.values()))
        if not self.proved and not self.failures:
            reason = self.refused[0] if self.refused else "its samples have nothing to split"
            self.fail("samples", f"nothing is proved: {reason}")
        if self.said_random and not self.drew:
            self.fail("random", "no call of its samples draws anything", call=self.said_random)
        for kind in self.kinds - self.proved_kinds:
            if not self.failures:
                self.fail("samples", f"no call of its samples can split a factor of kind {kind.value}")

    def try_harder(self, claim: _NegativeClaim, samples: list[Sample]) -> None:
        last = ""
        for seed, sample in product(MORE_SEEDS, samples):
            run = self.run(sample, seed)
            if run is None:
                continue
            draws = draws_of(run) if run.rule.random and is_random(run) else None
            if _refuted(run, draws, claim):
                self.refute(claim)
                return
            last = str(run.call)
        self.fail(claim.case.subject, claim.too_strict, claim.case.rule, last)


def _unusable(run: ShardedRun) -> str | None:
    """Return the reason why a call proves nothing; None if it can."""
    floats = [output for output in run.outputs if output is not None and output.is_floating_point()]
    if floats and all(output.numel() and bool(output.isnan().all()) for output in floats):
        return "all outputs are NaN; a 'try' clause gives the operands that the op is made for"
    words = [word for word in run.rule.localise if "=" not in word and word not in LOCALISERS]
    words += [lowering for _, lowering in run.rule.lowerings if lowering not in LOWERINGS]
    return f"the rule names '{words[0]}', which is no localiser or lowering" if words else None


def _show(group: Iterable[int]) -> str:
    return "+".join(map(str, group))


# -- negative claims --------------------------------------------------------------------------------------------------


def _claims(op: str, run: ShardedRun) -> Iterator[_NegativeClaim]:
    rule = str(run.rule)
    for factor, kind in run.rule.kinds.items():
        for shards in SHARDS:
            if kind is FactorKind.WHOLE and run.sizes[factor] >= shards:
                case = Case(op, rule, f"factor {factor} whole", shards)
                yield _NegativeClaim(case, factor, (), f"it is marked whole (!), but can be split in {shards}")
    for group in _suspects(run):
        case = Case(op, rule, f"not linear in {_show(group)}", SHARDS[0])
        yield _NegativeClaim(case, None, group, f"it is linear in {_show(group)}, which the rule does not say")


def _suspects(run: ShardedRun) -> Iterator[tuple[int, ...]]:
    """Yield groups of operands in which the op may be linear though the rule does not say so."""
    operands = operands_of(run.op, run.arguments)
    floats = [i for i, t in enumerate(operands) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not floats or any(output is not None and not output.requires_grad for output in run.outputs):
        return  # only what is differentiable can be a partial sum
    widths: Iterable[int] = range(1, len(floats) + 1) if len(floats) <= MOST_OPERANDS else (1, len(floats))
    declared = [set(group) for group in run.rule.linear]
    for width in widths:
        yield from (group for group in combinations(floats, width) if set(group) not in declared)


def _refuted(run: ShardedRun, draws: DrawnRuns | None, claim: _NegativeClaim) -> bool:
    """Return True if this call shows that the shards do not give the whole answer."""
    if claim.factor is None:
        return additivity(run, claim.group, claim.case.shards) is not None
    pieces = pieces_of(claim.factor, run.sizes[claim.factor], claim.case.shards)
    attempts = _attempts(run.rule, claim.factor)
    return all(recombines(run, draws, kind, pieces, others) is not None for kind, others in attempts)


def _attempts(rule: Rule, factor: str) -> Iterator[tuple[FactorKind, FactorKind | None]]:
    """Yield the kinds that a factor marked whole could have instead."""
    having = [operand is not None and factor in operand.factors for operand in rule.outputs]
    contractions = list(CONTRACTIONS.values())
    if not any(having):
        yield from ((kind, None) for kind in contractions)
        return
    yield FactorKind.PARALLEL, None
    if not all(having):
        yield from ((FactorKind.PARALLEL, kind) for kind in contractions)
