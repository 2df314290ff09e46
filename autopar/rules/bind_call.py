"""Bind a pattern to a call: name the dims of ellipses, drop factors of broadcast dims, solve sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from math import prod

import torch

from autopar.errors import RuleError
from autopar.rules.call import Call, TensorSpec
from autopar.rules.notation import ELLIPSIS, Operand, Rule, Term, localised_by

__all__ = ["bind", "factor_sizes", "fresh_names"]

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def fresh_names(count: int, taken: set[str]) -> list[str]:
    """Return `count` short factor names that are not taken, in alphabetical order."""
    names = (letter + suffix for suffix in ("", *map(str, range(1, 100))) for letter in _LETTERS)
    free = (name for name in names if name not in taken)
    return [next(free) for _ in range(count)]


def bind(pattern: Rule, call: Call) -> Rule:
    """Return the pattern as it reads for this call: without ellipses and absent operands, `1` for broadcast dims."""
    if any(spec is not None and spec.rank > 0 for spec in call.operands[len(pattern.operands) :]):
        raise _misfit(
            pattern, call, f"the op has {len(call.operands)} tensor operands, the rule {len(pattern.operands)}"
        )
    if len(pattern.outputs) != len(call.outputs):
        raise _misfit(pattern, call, f"the op has {len(call.outputs)} outputs, the rule {len(pattern.outputs)}")
    widths = [spec.rank - len(operand.terms) + 1 for operand, spec in _pairs(pattern, call) if operand.has_ellipsis]
    # The last name is that of the rightmost dim: shorter ellipses take the last ones.
    names = fresh_names(max([0, *widths]), set(pattern.factors))
    sides = [
        tuple(_expand(operand, spec, names, pattern, call) for operand, spec in zip_longest(operands, specs))
        for operands, specs in ((pattern.operands, call.operands), (pattern.outputs, call.outputs))
    ]
    return _broadcast(pattern, call, *sides)


def _pairs(rule: Rule, call: Call) -> Iterator[tuple[Operand, TensorSpec]]:
    for operands, specs in ((rule.operands, call.operands), (rule.outputs, call.outputs)):
        for operand, spec in zip(operands, specs, strict=False):
            if operand is not None and spec is not None:
                yield operand, spec


def _expand(
    operand: Operand | None, spec: TensorSpec | None, names: list[str], pattern: Rule, call: Call
) -> Operand | None:
    if spec is None:
        return None
    if operand is None and spec.rank == 0:
        return Operand(())  # nothing is written for a scalar
    if operand is None:
        raise _misfit(pattern, call, f"the rule expects no tensor where the op has {spec}")
    terms = operand.terms
    if operand.has_ellipsis:
        width = spec.rank - len(terms) + 1
        position = terms.index(ELLIPSIS)
        dims = tuple((name,) for name in names[len(names) - max(width, 0) :])
        terms = terms[:position] + dims + terms[position + 1 :]
    if len(terms) != spec.rank:
        raise _misfit(pattern, call, f"'{' '.join(map(_show, terms))}' has {len(terms)} dims, {spec} has {spec.rank}")
    return Operand(terms)


def _broadcast(
    pattern: Rule, call: Call, operands: tuple[Operand | None, ...], outputs: tuple[Operand | None, ...]
) -> Rule:
    bound = replace(pattern, operands=operands, outputs=outputs)
    halos = {name for name, _ in pattern.halos}
    largest: dict[str, int] = {}
    for operand, spec in _pairs(bound, call):
        for term, size in zip(operand.terms, spec.shape, strict=True):
            if len(term) == 1:
                largest[term[0]] = max(size, largest.get(term[0], 0))

    def narrowed(operand: Operand | None, spec: TensorSpec | None, *, output: bool = False) -> Operand | None:
        if operand is None or spec is None:
            return None
        terms: list[Term] = []
        for term, size in zip(operand.terms, spec.shape, strict=True):
            single = len(term) == 1 and term[0] not in halos
            # A size of 1 where another operand has more is a broadcast dim, which has no factor.
            if single and size == 1 and largest[term[0]] > 1:
                if output:
                    reason = f"an output is 1 along factor '{term[0]}', which is {largest[term[0]]} in an operand"
                    raise _misfit(pattern, call, f"{reason}; write 1 where the op reduces it")
                terms.append(())
            elif single and size != largest[term[0]]:
                raise _misfit(
                    pattern, call, f"factor '{term[0]}' is {size} in one place and {largest[term[0]]} in another"
                )
            elif not term and size != 1:
                raise _misfit(pattern, call, f"a dim written '1' has size {size}")
            else:
                terms.append(term)
        return Operand(tuple(terms))

    bound = replace(
        bound,
        operands=tuple(narrowed(operand, spec) for operand, spec in zip_longest(operands, call.operands)),
        outputs=tuple(narrowed(operand, spec, output=True) for operand, spec in zip_longest(outputs, call.outputs)),
    )
    return _without_absent(bound, call)


def _without_absent(rule: Rule, call: Call) -> Rule:
    """Drop the clauses about factors and operands that this call does not have."""
    named = {name for side in (rule.operands, rule.outputs) for operand in side if operand for name in operand.factors}
    linear = rule.linear
    if rule.linear_in_all:
        linear = (tuple(i for i, operand in enumerate(rule.operands) if operand is not None),)
    return replace(
        rule,
        whole=rule.whole & named,
        contracted=tuple((name, kind) for name, kind in rule.contracted if name in named),
        halos=tuple((name, halo) for name, halo in rule.halos if name in named),
        linear=_linear_groups(linear, call),
        linear_in_all=False,
        indices=tuple((i, name) for i, name in rule.indices if name in named),
        localise=localised_by(rule.localise, named),
        lowerings=tuple((name, lowering) for name, lowering in rule.lowerings if name in named),
    )


def _linear_groups(groups: tuple[tuple[int, ...], ...], call: Call) -> tuple[tuple[int, ...], ...]:
    """Return the groups of operands in which this call is linear.

    A number in place of a tensor makes `x + 2` affine, booleans do not add up, a cast from floats to integers rounds.
    """
    kept = []
    for group in groups:
        present = tuple(i for i in group if i < len(call.operands) and call.operands[i] is not None)
        specs = [call.operand(i) for i in present] + [spec for spec in call.outputs if spec is not None]
        adds_up = torch.bool not in [spec.dtype for spec in specs]
        rounds = any(call.operand(i).differentiable for i in present) and not all(
            spec is None or spec.differentiable for spec in call.outputs
        )
        if present and adds_up and not rounds and not call.numbers.intersection(group):
            kept.append(present)
    return tuple(dict.fromkeys(kept))


def factor_sizes(rule: Rule, call: Call) -> dict[str, int]:
    """Return the extent of each factor; of a halo factor its extent in the output."""
    # Extents that arguments give, such as the number of groups in `localise num_groups=g`.
    pairs = [(call.get(word.partition("=")[0]), word.partition("=")[2]) for word in rule.localise if "=" in word]
    sizes = {factor: value for value, factor in pairs if isinstance(value, int)}
    halos = {name for name, _ in rule.halos}
    open_terms: list[tuple[Term, int]] = []
    for operand, spec in _pairs(rule, call):
        for term, size in zip(operand.terms, spec.shape, strict=True):
            if len(term) == 1:
                sizes[term[0]] = size  # outputs come last, so a halo factor ends with its output extent
            elif term:
                open_terms.append((term, size))
    progress = True
    while progress and open_terms:
        progress = False
        for term, size in list(open_terms):
            # One unknown factor of a compound dim follows from the others; two wait for another dim.
            unknown = [name for name in term if name not in sizes]
            known = prod(sizes[name] for name in term if name in sizes)
            if len(unknown) > 1 or (unknown and known == size == 0):
                continue
            if known == 0 < size or (known and size % known) or (not unknown and known != size):
                raise _misfit(rule, call, f"'{_show(term)}' does not multiply to {size}")
            if unknown:
                sizes[unknown[0]] = size // known
            open_terms.remove((term, size))
            progress = True
    if open_terms:
        raise _misfit(rule, call, f"the sizes of '{_show(open_terms[0][0])}' do not follow from the shapes")
    assert not halos - sizes.keys(), f"{rule}: a halo factor has no extent"
    return sizes


def _show(term: Term) -> str:
    return term[0] if len(term) == 1 else f"({' '.join(term)})" if term else "1"


def _misfit(rule: Rule, call: Call, reason: str) -> RuleError:
    return RuleError(f"the rule does not fit the call: {reason}\n  rule  {rule}\n  call  {call}")
