"""Store tiny parameters so that they share the buckets of others.

A search prices each parameter by itself, and a tiny one takes no share of a bucket. But a norm that is sent in another
way than the weights of its layer has a bucket of its own, whose launches cost as much as those of a full one. So before
an assignment is priced, tiny parameters are stored anew. They are sent as some weight of their layer is, or are only
summed, in one bucket with those of other layers; else they are sent in as few ways as can be.

A small layer has one bucket if all of it is gathered again in the backward, or nothing is. Where an assignment gathers
a part of it again, one that gathers all of it takes less memory and fewer collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

from autopar.sharding.buckets import TINY_BYTES, block_of
from autopar.sharding.reshard.reshard import LOCAL, StepKind, goes_in_bucket
from autopar.sharding.sharding import Sharding
from autopar.solver.candidates import StorageOption
from autopar.solver.model.model import Model
from autopar.solver.model.reshard_sums import TensorCut

__all__ = ["JoinedBuckets"]

# What parameters of one bucket have in common: their steps with axes, forward and backward, and how they are handled.
_Kind = tuple[Any, ...]
# A parameter that causes no collective.
NOTHING: _Kind = ()
# Most bytes of a tiny parameter, as a share of its layer.
TINY_SHARE = 1 / 256


class _Parameter(NamedTuple):
    """Parameter that one op takes: numbers of both variables, and the place of the operand."""

    place: int
    user: int
    operand: int
    cut: TensorCut
    dtype: object


@dataclass
class JoinedBuckets:
    """Tiny parameters of a model, and the weights of their layers."""

    model: Model
    tiny: Mapping[str, list[_Parameter]] = field(init=False)
    weights: Mapping[str, list[_Parameter]] = field(init=False)
    # All parameters of layers that fit in one bucket.
    small: dict[str, list[_Parameter]] = field(default_factory=dict)
    known: dict[Any, _Kind] = field(default_factory=dict)

    def __post_init__(self) -> None:
        setting, place = self.model.setting, self.model.place
        tiny: dict[str, list[_Parameter]] = {}
        weights: dict[str, list[_Parameter]] = {}
        for tensor in setting.graph.parameters:
            users = setting.users.get(tensor.name, ())
            if len(users) == 1 and list(users[0].operands).count(tensor.name) == 1:
                operand, cut = users[0].operands.index(tensor.name), TensorCut.of(tensor, setting)
                user = place["op", users[0].name]
                one = _Parameter(place["held", tensor.name], user, operand, cut, tensor.dtype)
                layer = self.model.cost_tables.ways.gathered(tensor)
                most = min(TINY_BYTES, TINY_SHARE * layer.bytes)
                found = tiny if prod(tensor.shape) * tensor.element_bytes <= most else weights
                found.setdefault(block_of(tensor.name), []).append(one)
                if layer.fits:
                    self.small.setdefault(block_of(tensor.name), []).append(one)
        self.tiny, self.weights = tiny, weights

    def joined(self, chosen: Sequence[int]) -> list[int]:
        """Return the assignment with tiny parameters stored so that few buckets send them."""
        states = list(chosen)
        for layer, tiny in self.tiny.items():
            free = {self._kind(one, chosen, chosen[one.place]) for one in self.weights.get(layer, ())}
            left = [one for one in tiny if self._kind(one, chosen, chosen[one.place]) not in (NOTHING, *free)]
            ways = [self._ways(one, chosen) for one in left]
            rest = []
            for number, each in enumerate(ways):
                joins = [*(kind for kind in each if kind in free), *filter(_is_sum, each)]
                if joins:
                    states[left[number].place] = each[joins[0]]
                else:
                    rest.append(number)
            while rest:
                counts = Counter(kind for number in rest for kind in ways[number])
                most = max(counts, key=counts.__getitem__)
                for number in rest:
                    if most in ways[number]:
                        states[left[number].place] = ways[number][most]
                rest = [number for number in rest if most not in ways[number]]
        return states

    def gathered_again(self, chosen: Sequence[int]) -> list[int] | None:
        """Return the assignment that gathers all of a small layer again where it did so with a part; None if it is
        the same.
        """
        states = list(chosen)
        for parameters in self.small.values():
            kinds = {one: self._kind(one, chosen, chosen[one.place]) for one in parameters}
            held = {one: self._held(one, chosen[one.place]) for one, kind in kinds.items() if not _is_sum(kind)}
            if len({option.again for option in held.values()}) > 1:
                for one, option in held.items():
                    options = self.model.variables[one.place].states
                    again = replace(option, again=True)
                    states[one.place] = options.index(again) if again in options else states[one.place]
        return None if states == list(chosen) else states

    def _ways(self, one: _Parameter, chosen: Sequence[int]) -> dict[_Kind, int]:
        """Return the states of a parameter by kind, the chosen one first: those that are handled as it is, and those
        that are only summed.
        """
        options: Sequence[StorageOption] = self.model.variables[one.place].states
        held = options[chosen[one.place]]
        found: dict[_Kind, int] = {}
        for state in (chosen[one.place], *range(len(options))):
            other = options[state]
            if (other.lasting, other.shared) == (held.lasting, held.shared):
                kind = self._kind(one, chosen, state)
                if other.again == held.again or _is_sum(kind):
                    found.setdefault(kind, state)
        return found

    def _held(self, one: _Parameter, state: int) -> StorageOption:
        held: StorageOption = self.model.variables[one.place].states[state]
        return held

    def _kind(self, one: _Parameter, chosen: Sequence[int], state: int) -> _Kind:
        held = self._held(one, state)
        want: Sharding = self.model.variables[one.user].states[chosen[one.user]].operands[one.operand]
        key = one.cut, one.dtype, held, want
        if key not in self.known:
            self.known[key] = self._made(one, held, want)
        return self.known[key]

    def _made(self, one: _Parameter, held: StorageOption, want: Sharding) -> _Kind:
        """Return how a parameter is sent; a kind of its own where it is in no bucket."""
        routes, cut = self.model.cost_tables.ways.routes, one.cut
        there = cut.steps(routes, held.layout.value, want.value)
        back = cut.steps(routes, want.gradient.value, held.layout.gradient.value) if cut.trained else ()
        assert there is not None, "parameters are stored in full"
        assert back is not None, "parameters are stored in full"
        ways = [tuple((StepKind(leg.kind), leg.axes) for leg in way) for way in (there, back)]
        if not any(map(_sent, ways)):
            return NOTHING
        in_bucket = goes_in_bucket(*(tuple(kind for kind, _ in way) for way in ways))
        alone = None if in_bucket else (one.place, held)
        return *ways, one.dtype, held.again, held.lasting, held.defers(want), alone


def _is_sum(kind: _Kind) -> bool:
    """Return whether nothing is gathered, so that the parameters of all layers share buckets."""
    return kind == NOTHING or not _sent(kind[0])


def _sent(way: Iterable[tuple[StepKind, tuple[str, ...]]]) -> bool:
    return any(kind not in LOCAL for kind, _ in way)
