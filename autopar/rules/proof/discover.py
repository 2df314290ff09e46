"""Discover rules of ops that are not in the table, by running them in shards.

The caller says which dims of the operands are one dim (same label), so there is one trial per dim, not per combination:
all operand dims of that label are split together, and the outputs tell what became of it. Trials run on small tensors
of coprime sizes, twice with other sizes and numbers; where the op does not run on small ones, on tensors of the call's
own sizes. What all trials agree on becomes a rule; all other dims stay whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice, permutations, product
from math import prod
from typing import Any

import torch

from autopar.errors import RuleError
from autopar.rules.bind_call import factor_sizes, fresh_names
from autopar.rules.call import Call, TensorSpec, display_name, flat_results, takes_tensors
from autopar.rules.notation import CONTRACTIONS, FactorKind, Operand, Rule, Term
from autopar.rules.proof.random_ops import DrawnRuns, draws_of, is_random, recombines
from autopar.rules.proof.run_shards import RUN_ERRORS, ShardedRun, additivity, materialise, pieces_of, reference
from autopar.rules.proof.samples import Draw, Sample
from autopar.rules.shard_call.dispatch import LOCALISERS, local_call
from autopar.rules.torch_versions import without_op_warnings

__all__ = ["Discoveries", "Labels", "discover", "no_rule_message"]


# For each tensor operand the label of each dim; None for an absent operand.
Labels = Sequence[Sequence[Hashable] | None]

# Two extents for each label, coprime, so that no dim is taken for another, and large enough for three shards.
SMALL = ((5, 7, 4, 9, 11, 13), (7, 4, 9, 5, 13, 11))
MOST_ELEMENTS = 1_000_000
# On tensors of the call's own sizes all even splits up to this are tried: the op may insist on blocks.
MOST_SHARDS = 8
MOST_FOLLOWERS = 8
MOST_ORDERS = 24


@dataclass
class Discoveries:
    """Cache of discovered rules, by op, ranks, dtypes, labels and plain arguments; a call looks up or discovers."""

    rules: dict[Hashable, Rule | None] = field(default_factory=dict)

    def __call__(self, op: torch._ops.OpOverload, call: Call, labels: Labels) -> Rule | None:
        request = _request(op, call, labels)
        if request is None:
            return None
        shapes = tuple(spec and spec.shape for spec in call.operands)
        for key in (request.key, (request.key, shapes)):
            if key in self.rules:
                return self.rules[key]
        found, small = _discover(request)
        # A rule found on small tensors holds for all sizes; one found at the call's own sizes for these alone.
        self.rules[request.key if small else (request.key, shapes)] = found
        return found


def discover(op: torch._ops.OpOverload, call: Call, labels: Labels) -> Rule | None:
    """Return the rule of one call, or None where the op cannot be run or nothing can be split."""
    request = _request(op, call, labels)
    return None if request is None else _discover(request)[0]


# -- the question -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Request:
    """One call, its labels as factor names, and the plain arguments that may be the extent of a factor."""

    op: torch._ops.OpOverload
    call: Call
    operands: tuple[Operand | None, ...]
    extents: Mapping[str, int]
    # Argument -> the factors whose extent it has.
    followers: Mapping[str, tuple[str, ...]]

    @property
    def key(self) -> Hashable:
        dtypes = tuple(spec and spec.dtype for spec in self.call.operands)
        plain = tuple((name, _shapeless(value)) for name, value in self.call.arguments)
        # A dim of size 1 may broadcast, so a rule for it says nothing about longer ones.
        ones = frozenset(name for name, size in self.extents.items() if size == 1)
        return str(self.op), self.operands, dtypes, repr(plain), ones, tuple(self.followers.items())


def _shapeless(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return value.rank, value.dtype
    return tuple(map(_shapeless, value)) if isinstance(value, list | tuple) else value


def _request(op: torch._ops.OpOverload, call: Call, labels: Labels) -> _Request | None:
    """Return the request; None for an op that mutates, or has no dims."""
    if op._schema.is_mutable or not any(spec and spec.rank for spec in call.operands):
        return None
    extents: dict[Hashable, int] = {}
    labelled = [(spec, dims) for spec, dims in zip(call.operands, labels, strict=True) if spec and dims is not None]
    for spec, dims in labelled:
        for label, size in zip(dims, spec.shape, strict=True):
            # One label may stand on a dim of size 1 that broadcasts; the longest is the extent.
            extents[label] = max(size, extents.get(label, 1))
    names = dict(zip(extents, fresh_names(len(extents), set()), strict=True))
    operands: list[Operand | None] = []
    for operand, own in zip(call.operands, labels, strict=True):
        if operand is None or own is None:
            operands.append(None)
            continue
        terms: list[Term] = []
        for label, size in zip(own, operand.shape, strict=True):
            known = size == extents[label] and (names[label],) not in terms
            terms.append((names[label],) if known else ())
        if any(not term and size != 1 for term, size in zip(terms, operand.shape, strict=True)):
            return None  # one label on dims of several extents, or twice on one tensor
        operands.append(Operand(tuple(terms)))
    sizes = {names[label]: size for label, size in extents.items()}
    # An argument that equals an extent may be one (a number of heads, say): trials with and without decide.
    followers = {
        name: tuple(factor for factor, size in sizes.items() if size == value)
        for name, value in call.arguments
        if isinstance(value, int) and not isinstance(value, bool) and value > 1 and value in sizes.values()
    }
    return _Request(op, call, tuple(operands), sizes, followers)


# -- trials -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trial:
    """Runs of the op at one choice of sizes and following arguments, with a rule that leaves everything whole."""

    request: _Request
    small: bool
    localise: tuple[str, ...]
    runs: tuple[ShardedRun, ...]
    draws: tuple[DrawnRuns | None, ...]


def _discover(request: _Request) -> tuple[Rule | None, bool]:
    """Return the best rule found, and whether it was found on small tensors."""
    with torch.random.fork_rng(devices=[]), without_op_warnings():
        for small in (True, False):
            rules = [rule for trial in _trials(request, small) for rule in _rules(trial)]
            fitting = [rule for rule in rules if _fits(rule, request.call)]
            if rules:
                # Of several rules that hold, the one that lets most factors be split; none if it lets none.
                split = [sum(kind is not FactorKind.WHOLE for kind in rule.kinds.values()) for rule in fitting]
                worth = [(count, len(rule.linear)) for count, rule in zip(split, fitting, strict=True)]
                best = max(range(len(fitting)), key=worth.__getitem__, default=None)
                return (None if best is None or not any(worth[best]) else fitting[best]), small
    return None, False


def _fits(rule: Rule, call: Call) -> bool:
    if [operand and len(operand.terms) for operand in rule.outputs] != [spec and spec.rank for spec in call.outputs]:
        return False
    try:
        sizes = factor_sizes(rule, call)
    except RuleError:
        return False
    shapes = [(operand, spec) for operand, spec in zip(rule.outputs, call.outputs, strict=True) if operand and spec]
    return all(spec.shape[i] == prod(sizes[n] for n in t) for o, spec in shapes for i, t in enumerate(o.terms))


def _trials(request: _Request, small: bool) -> Iterator[_Trial]:
    """Yield trials that run; the first, without arguments that follow a size, claims the least."""
    # Real sizes are a last resort: each trial runs the op several times.
    if not small and sum(prod(spec.shape) for spec in (*request.call.operands, *request.call.outputs) if spec) > (
        MOST_ELEMENTS
    ):
        return
    # None first: no argument follows a factor.
    options = [[None, *factors] for factors in request.followers.values()]
    for choice in islice(product(*options), MOST_FOLLOWERS):
        following = {name: factor for name, factor in zip(request.followers, choice, strict=True) if factor}
        for ones in (False, True) if small and 1 in request.extents.values() else (False,):
            scales = [_small_sizes(request, sizes, ones) for sizes in SMALL] if small else [dict(request.extents)]
            trial = _trial(request, small, following, scales)
            if trial is not None:
                yield trial
                break


def _small_sizes(request: _Request, sizes: tuple[int, ...], ones: bool) -> dict[str, int]:
    """Return small extents; `ones` keeps those that are 1, for ops that insist on it."""
    # Odd sizes that differ from each other: equal ones would be taken for one factor.
    more = [*sizes, *range(17, 17 + 2 * len(request.extents), 2)]
    return {
        name: 1 if ones and extent == 1 else size
        for (name, extent), size in zip(request.extents.items(), more, strict=False)
    }


def _trial(
    request: _Request, small: bool, following: Mapping[str, str], scales: Sequence[Mapping[str, int]]
) -> _Trial | None:
    localise = tuple(f"{name}={factor}" for name, factor in following.items())
    # Some ops give NaN on negative numbers, some have no kernel for float64.
    for kind, dtype in (("normal", None), ("positive", None), ("normal", torch.float32)):
        runs: list[ShardedRun] = []
        try:
            for sizes, (seed, drawn) in product(scales, enumerate((kind, "wide" if kind == "normal" else kind))):
                sample = _sample(request, sizes, following, drawn, dtype)
                arguments = materialise(request.op, sample, seed)
                runs.append(reference(request.op, arguments, lambda call: _unknown_rule(request, call, localise), seed))
        except (RuleError, *RUN_ERRORS):
            continue
        floats = [
            [output for output in run.outputs if output is not None and output.is_floating_point()] for run in runs
        ]
        # A run of NaNs alone would agree with every rule.
        if not any(run and all(bool(output.isnan().all()) for output in run) for run in floats):
            draws = tuple(draws_of(run) if is_random(run) else None for run in runs)
            return _Trial(request, small, localise, tuple(runs), draws)
    return None


def _sample(
    request: _Request, sizes: Mapping[str, int], following: Mapping[str, str], kind: str, dtype: torch.dtype | None
) -> Sample:
    operands = iter(zip(request.call.operands, request.operands, strict=True))
    below = min((size for size in sizes.values() if size > 1), default=1)

    def tensor() -> Draw | Any:
        spec, operand = next(operands)
        if spec is None or operand is None:
            return None
        shape = tuple(sizes[term[0]] if term else 1 for term in operand.terms)
        if spec.dtype is torch.bool:
            return Draw(shape, "bool")
        if spec.dtype.is_complex:
            return Draw(shape, "complex")
        if spec.dtype.is_floating_point:
            return Draw(shape, kind, dtype=dtype)
        # Integers may be positions in any dim: they stay below the shortest.
        return Draw(shape, "index", min(below, 3), dtype=spec.dtype)

    kwargs: dict[str, Any] = {}
    tensors = takes_tensors(request.op)
    for name, value in request.call.arguments:
        if tensors.get(name):
            kwargs[name] = None if value is None else [tensor() for _ in value]
        elif name in tensors:
            drawn = tensor()
            kwargs[name] = value if drawn is None else drawn
        elif name in following:
            kwargs[name] = sizes[following[name]]
        else:
            kwargs[name] = list(value) if isinstance(value, tuple) else value
    return Sample((), kwargs)


def _unknown_rule(request: _Request, call: Call, localise: tuple[str, ...]) -> Rule:
    """Return the rule that leaves all whole; arguments that repeat an output's shape have their localiser."""
    taken = set(request.extents)
    outputs: list[Operand | None] = []
    for spec in call.outputs:
        names = fresh_names(spec.rank if spec else 0, taken)
        taken.update(names)
        outputs.append(Operand(tuple((name,) for name in names)) if spec else None)
    return Rule(request.operands, tuple(outputs), whole=frozenset(taken), localise=localise)


# -- what became of each factor ---------------------------------------------------------------------------------------


def _rules(trial: _Trial) -> Iterator[Rule]:
    """Yield the rules that a trial shows, one for each order of the factors in merged output dims."""
    first = trial.runs[0]
    terms = _output_terms(trial, first)
    # A merged dim does not tell its major factor, so each order is tried.
    orders = [permutations(term) for output in terms if output for term in output]
    for chosen in islice(product(*orders), MOST_ORDERS):
        flat = iter(chosen)
        outputs = tuple(None if o is None else Operand(tuple(next(flat) for _ in o)) for o in terms)
        names = frozenset(n for side in (trial.request.operands, outputs) for o in side if o for n in o.factors)
        rule = Rule(trial.request.operands, outputs, whole=names, localise=_localised(trial, names))
        try:
            runs = [replace(run, rule=rule, sizes=factor_sizes(rule, run.call)) for run in trial.runs]
        except RuleError:
            continue
        yield _with_kinds(trial, runs, rule)


def _localised(trial: _Trial, names: Iterable[str]) -> tuple[str, ...]:
    """Return the words of the localise clause: arguments that follow a factor or repeat the output's shape."""
    output = trial.request.call.outputs[0] if trial.request.call.outputs else None
    shapes = [
        name
        for name, value in trial.request.call.arguments
        if name in LOCALISERS and output is not None and isinstance(value, tuple) and value == output.shape
    ]
    return (*trial.localise, *shapes)


def _output_terms(trial: _Trial, run: ShardedRun) -> list[list[Term] | None]:
    """Return the factors of each output dim, in the order in which their split makes it smaller in proportion."""
    taken = set(trial.request.extents)
    shrunk = {factor: _shrunk(run, factor, size) for factor, size in run.sizes.items() if factor in taken and size > 1}
    terms: list[list[Term] | None] = []
    for number, output in enumerate(run.outputs):
        if output is None:
            terms.append(None)
            continue
        dims: list[Term] = []
        for dim, extent in enumerate(output.shape):
            term = tuple(
                factor for factor, dims_of in shrunk.items() if dims_of is not None and (number, dim) in dims_of
            )
            if not term:  # where the shards do not run, the extent tells
                same = [factor for factor in shrunk if shrunk[factor] is None and run.sizes[factor] == extent]
                term = tuple(factor for factor in same[:1] if (factor,) not in dims)
            left, remainder = divmod(extent, prod(run.sizes[factor] for factor in term))
            if remainder or (left > 1 and extent > 1):
                new = fresh_names(1, taken)
                taken.update(new)
                # The rest of a dim is a factor that only the output has.
                term = (*new,) if remainder else (*new, *term)
            dims.append(term)
        terms.append(dims)
    return terms


def _shrunk(run: ShardedRun, factor: str, size: int) -> frozenset[tuple[int, int]] | None:
    """Return the output dims (output, dim) that a shard has in proportion; None where the shard does not run."""
    piece = pieces_of(factor, size, 2)[1]
    try:
        outputs = flat_results(local_call(run.op, run.arguments, run.rule, run.sizes, piece, FactorKind.SUM).run())
    except RUN_ERRORS:
        return None
    pairs = enumerate(zip(run.outputs, outputs, strict=False))
    return frozenset(
        (number, dim)
        for number, (whole, part) in pairs
        if whole is not None and part is not None and whole.dim() == part.dim()
        for dim in range(whole.dim())
        if part.shape[dim] * size == whole.shape[dim] * piece.length
    )


def _with_kinds(trial: _Trial, runs: Sequence[ShardedRun], rule: Rule) -> Rule:
    """Return the rule with the linearity and the kinds of factors that hold in all runs."""
    # Linearity first: the kinds of factors are compared under it.
    rule = replace(rule, random=any(trial.draws))
    runs = [replace(run, rule=rule) for run in runs]
    rule = replace(rule, linear=tuple(_linear_groups(runs)))
    runs = [replace(run, rule=rule) for run in runs]
    found: dict[str, tuple[FactorKind, FactorKind | None]] = {}
    for factor in trial.request.extents:
        attempts = (attempt for attempt in _attempts(rule, factor) if _holds(trial, runs, factor, *attempt))
        if (attempt := next(attempts, None)) is not None:
            found[factor] = attempt
    contracted = []
    for factor, (kind, others) in found.items():
        said = others if kind is FactorKind.PARALLEL else kind
        if said is not None and (said is not FactorKind.SUM or kind is FactorKind.PARALLEL):
            contracted.append((factor, said))
    used = tuple(word for word in rule.localise if word.partition("=")[2] in {"", *found})
    return replace(rule, whole=rule.whole.difference(found), contracted=tuple(contracted), localise=used)


def _attempts(rule: Rule, factor: str) -> Iterator[tuple[FactorKind, FactorKind | None]]:
    having = [operand is not None and factor in operand.factors for operand in rule.outputs]
    contractions = list(CONTRACTIONS.values())
    if any(having):
        yield FactorKind.PARALLEL, None
        if not all(having):
            yield from ((FactorKind.PARALLEL, kind) for kind in contractions)
    elif any(operand and factor in operand.factors for operand in rule.operands):
        yield from ((kind, None) for kind in contractions)


def _holds(trial: _Trial, runs: Sequence[ShardedRun], factor: str, kind: FactorKind, others: FactorKind | None) -> bool:
    for run, draws in zip(runs, trial.draws, strict=True):
        size = run.sizes[factor]
        # The call's own sizes may be large: only even splits are tried.
        counts = [2, 3] if trial.small else [shards for shards in range(2, MOST_SHARDS + 1) if size % shards == 0]
        counts = [shards for shards in counts if shards <= size]
        if not counts:
            return False
        for shards in counts:
            if recombines(run, draws, kind, pieces_of(factor, size, shards), others) is not None:
                return False
    return True


def _linear_groups(runs: Sequence[ShardedRun]) -> Iterator[tuple[int, ...]]:
    """Return the groups of operands in which the op is linear in all runs."""
    specs = runs[0].call.operands
    floats = [i for i, spec in enumerate(specs) if spec is not None and spec.differentiable]
    outputs = [output for output in runs[0].outputs if output is not None]
    if not all(output.is_floating_point() or output.is_complex() for output in outputs):
        return
    # Zeros are linear in everything and prove nothing.
    if not any(bool(output.any()) for output in outputs):
        return
    # Few ops are linear in more than four operands together, and the number of groups doubles with each.
    for width in range(1, min(len(floats), 4) + 1):
        for group in combinations(floats, width):
            if all(additivity(run, group, 2) is None for run in runs):
                yield group


def no_rule_message(op: torch._ops.OpOverload, call: Call, labels: Labels) -> str:
    """Return the message about an op that will run replicated, with a rule to start from."""
    names: dict[Hashable, str] = {}
    operands = []
    for spec, dims in zip(call.operands, labels, strict=True):
        if spec is None or dims is None:
            operands.append("?")
            continue
        for label in dims:
            if label not in names:
                names[label] = fresh_names(1, set(names.values()))[0]
        operands.append(" ".join(names[label] for label in dims) or "()")
    pairs = [(spec, dims) for spec, dims in zip(call.operands, labels, strict=True) if spec and dims]
    extents = {names[label]: size for spec, dims in pairs for label, size in zip(dims, spec.shape, strict=True)}
    outputs = [_suggested_dims(spec, extents) for spec in call.outputs]
    shown = str(call).replace(str(op), display_name(op), 1)
    suggestion = f"{', '.join(operands)} -> {', '.join(outputs)}".strip()
    return (
        f"no rule for {shown}, and none found by running it in shards; it will run replicated on every device.\n"
        f"If it can be split, add a rule, for instance (its dims here are guessed from their extents):\n"
        f'  autopar.register_rule("{display_name(op)}", "{suggestion}")'
    )


def _suggested_dims(spec: TensorSpec | None, extents: Mapping[str, int]) -> str:
    if spec is None:
        return "?"
    dims: list[str] = []
    taken = set(extents)
    for size in spec.shape:
        same = next((name for name, extent in extents.items() if extent == size and name not in dims), None)
        dims.append(same or ("1" if size == 1 else fresh_names(1, taken)[0]))
        taken.add(dims[-1])
    return " ".join(dims)
