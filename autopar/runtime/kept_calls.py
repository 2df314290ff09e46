"""Compiled calls that a parallel module keeps: the latest used, and all that calls of other sizes share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from autopar.errors import AutoparError
from autopar.ir.pytree import Mapped, Node
from autopar.runtime.compiled_call import CallSignature, CompiledCall
from autopar.runtime.size_ranges import SizeRanges
from autopar.tracing.sized_exports import SizedExports

__all__ = ["KeptCalls", "SizeOptions"]

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class SizeOptions:
    """How a module serves inputs of other sizes: `dynamic` as in `torch.compile`, and the most calls that it keeps."""

    dynamic: bool | None = None
    most_calls: int = 64

    def __post_init__(self) -> None:
        if self.most_calls < 1:
            raise AutoparError(
                f"invalid most_calls={self.most_calls!r}: expected a number of calls to keep, 1 or more\n"
                "fix: leave it out, or give one for each shape, mode and grad mode that is used again"
            )


@dataclass(frozen=True)
class CallFamily:
    """Shared by calls that differ in sizes alone: exports of the given inputs and of whole ones, and emitted graphs."""

    exports: SizedExports
    whole: SizedExports
    lines: SizeRanges

    @classmethod
    def of(cls, dynamic: bool | None) -> CallFamily:
        exports, whole = SizedExports(dynamic), SizedExports(dynamic)
        return cls(exports, whole, SizeRanges(exports, whole))


class KeptCalls:
    """Compiled calls by call signature; beyond the most that are kept, the one that was not used longest goes."""

    def __init__(self, options: SizeOptions) -> None:
        self.options = options
        self._calls = _LatestUsed[CompiledCall](options.most_calls)
        self._families = _LatestUsed[CallFamily](options.most_calls)
        # Arguments, key and call of the latest call that was found.
        self._latest: tuple[Node, Any, CompiledCall] | None = None

    def find(self, given: CallSignature) -> CompiledCall | None:
        latest = self._latest
        # The arguments of a loop are mostly the same object, and the structure made from them takes time.
        if latest is not None and latest[0] is given.flat.node and latest[1] == given.key:
            return latest[2]
        found = self._calls.find(given.key, given.structure)
        self._latest = None if found is None else (given.flat.node, given.key, found)
        return found

    def keep(self, given: CallSignature, call: CompiledCall) -> None:
        self._calls.keep(given.key, given.structure, call)
        self._latest = None

    def family(self, given: CallSignature) -> CallFamily:
        """Return what this call shares with calls that differ from it in sizes alone."""
        found = self._families.find(given.key_without_sizes, given.structure)
        if found is None:
            found = CallFamily.of(self.options.dynamic)
            self._families.keep(given.key_without_sizes, given.structure, found)
        return found

    @property
    def traces(self) -> int:
        """Return the number of whole traces; other calls came from captures with symbolic sizes."""
        return sum(family.exports.traces + family.whole.traces for family in self._families)

    @property
    def emitted(self) -> int:
        """Return the number of emitted graphs; other calls share the code of those at other sizes."""
        return sum(family.lines.emitted for family in self._families)

    def __iter__(self) -> Iterator[CompiledCall]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(list(self._calls))


class _LatestUsed(Generic[_Value]):
    """Values by key and by structure, which has no hash; the oldest ones go."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._found: dict[Any, list[tuple[Mapped, _Value]]] = {}
        # Looked at first: a key has hundreds of entries, whose hash takes longer than a comparison.
        self._latest: tuple[Any, Mapped, _Value] | None = None

    def find(self, key: Any, structure: Mapped) -> _Value | None:
        latest = self._latest
        if latest is not None and latest[0] == key and latest[1] == structure:
            return latest[2]
        entries = self._found.get(key)
        for place, (other, value) in enumerate(entries or ()):
            if other == structure:
                assert entries is not None, "it has this entry"
                # The latest used stands last, both among keys and among the values of a key.
                entries.append(entries.pop(place))
                self._found[key] = self._found.pop(key)
                self._latest = key, structure, value
                return value
        return None

    def keep(self, key: Any, structure: Mapped, value: _Value) -> None:
        entries = [entry for entry in self._found.pop(key, ()) if entry[0] != structure]
        self._found[key] = [*entries, (structure, value)]
        self._latest = key, structure, value
        while sum(map(len, self._found.values())) > self.most:
            oldest = next(iter(self._found))
            del self._found[oldest][0]
            if not self._found[oldest]:
                del self._found[oldest]

    def __iter__(self) -> Iterator[_Value]:
        return (value for entries in list(self._found.values()) for _, value in entries)
