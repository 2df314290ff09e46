"""Storages that are made, shared and let go of: how many bytes live, and how many ever did."""

from __future__ import annotations

__all__ = ["Storages"]


class Storages:
    """Counts references, as autograd and Python do; a storage is gone with the last of them."""

    def __init__(self) -> None:
        self.sizes: list[float] = []
        self.references: list[int] = []
        self.live = 0.0
        self.peak = 0.0
        self.peak_at = ""
        self.now = ""
        """What is being done, for `peak_at`."""
        self.moments: dict[str, float] = {}
        """The most that is held while each thing is done, in their order."""

    def new(self, size: float) -> int:
        """A storage with one reference."""
        self.sizes.append(size)
        self.references.append(1)
        self.live += size
        self.touch()
        return len(self.sizes) - 1

    def touch(self, more: float = 0.0) -> None:
        """At this moment so much more is held."""
        held = self.live + more
        self.moments[self.now] = max(held, self.moments.get(self.now, 0.0))
        if held > self.peak:
            self.peak, self.peak_at = held, self.now

    def take(self, storage: int) -> int:
        """One more reference."""
        assert self.references[storage] > 0, f"storage {storage} is gone ({self.now})"
        self.references[storage] += 1
        return storage

    def drop(self, storage: int) -> None:
        """One reference less."""
        assert self.references[storage] > 0, f"storage {storage} is gone ({self.now})"
        self.references[storage] -= 1
        if not self.references[storage]:
            self.live -= self.sizes[storage]

    def alone(self, storage: int) -> bool:
        return self.references[storage] == 1
