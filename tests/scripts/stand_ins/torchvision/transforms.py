"""Transforms that pass drawn images on: they have their size and range already."""

from __future__ import annotations

from typing import Any

__all__: list[str] = []


class Compose:
    """All transforms, none of which changes an image."""

    def __init__(self, transforms: Any = (), *_: Any, **__: Any) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        return image


class Resize(Compose): ...


def size_of(transform: Any, default: tuple[int, int]) -> tuple[int, int]:
    """Return the size to which images are changed."""
    for one in transform.transforms if isinstance(transform, Compose) and not isinstance(transform, Resize) else ():
        if isinstance(one, Resize):
            size = one.transforms
            return (size, size) if isinstance(size, int) else tuple(size)
    return default


def __getattr__(name: str) -> Any:
    return type(name, (Compose,), {"__init__": lambda self, *_, **__: Compose.__init__(self)})
