"""Change a model for an export in which equal layers are recorded, and change it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import nn

from autopar.tracing.layers.calls import LayerCalls, LayersDifferError
from autopar.tracing.layers.kinds import LayerKind

_MISSING = object()


@dataclass(frozen=True)
class Recording:
    """Model whose layers are recorded."""

    calls: LayerCalls
    hidden: tuple[_Table, ...]

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Record the calls of the forward that runs meanwhile."""
        self.calls.calls.clear()
        self.calls.is_open = True
        try:
            with _replaced(self.hidden, lambda table: _Absent(self.calls, table)):
                yield
        finally:
            self.calls.is_open = False


@dataclass(frozen=True)
class _Table:
    """Parameters or buffers of one module."""

    module: nn.Module
    name: str
    tensors: dict[str, Any]


@contextmanager
def recording(model: nn.Module, kinds: Sequence[LayerKind], whole: frozenset[str]) -> Iterator[Recording]:
    """Record the calls of layers; layers outside of `whole` have no tensors meanwhile, which makes the export short."""
    calls = LayerCalls({path: kind for kind in kinds for path in kind.layers}, whole)
    layers = {path: model.get_submodule(path) for path in calls.kinds}
    hidden = tuple(
        _Table(module, name, module.__dict__[name])
        for path, layer in layers.items()
        if path not in whole
        for module in layer.modules()
        for name in ("_parameters", "_buffers")
        if module.__dict__[name]
    )
    with ExitStack() as stack:
        for path, layer in layers.items():
            stack.enter_context(_called_through(calls, path, layer))
        for owner, name in {one for kind in kinds for one in kind.varying}:
            stack.enter_context(_watched(calls, owner, name))
        stack.enter_context(_replaced(hidden, lambda table: {}))
        yield Recording(calls, hidden)


@contextmanager
def _called_through(calls: LayerCalls, path: str, layer: nn.Module) -> Iterator[None]:
    own = layer.__dict__
    forward, before = layer.forward, own.get("forward", _MISSING)

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not calls.is_open or calls.is_recording:
            return forward(*args, **kwargs)
        return calls.call(path, forward, args, kwargs)

    own["forward"] = call
    try:
        yield
    finally:
        own.pop("forward", None)
        if before is not _MISSING:
            own["forward"] = before


@contextmanager
def _watched(calls: LayerCalls, owner: type, name: str) -> Iterator[None]:
    """Note reads of an attribute of a class's modules in the forward of a recorded layer."""
    default = owner.__dict__.get(name, _MISSING)
    if hasattr(type(default), "__set__"):
        # A property of the class stands before the attribute, which is read under no such name.
        yield
        return

    def get(module: Any) -> Any:
        if calls.is_recording:
            calls.read.add((owner, name))
        if name in module.__dict__:
            return module.__dict__[name]
        # Of a class around it, else of the tables of the module, where torch looks next.
        return getattr(super(owner, module), name) if default is _MISSING else default

    def put(module: Any, value: Any) -> None:
        module.__dict__[name] = value

    def remove(module: Any) -> None:
        del module.__dict__[name]

    setattr(owner, name, property(get, put, remove))
    try:
        yield
    finally:
        if default is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, default)


@contextmanager
def _replaced(tables: Sequence[_Table], make: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    before = [table.module.__dict__[table.name] for table in tables]
    try:
        for table in tables:
            table.module.__dict__[table.name] = make(table.tensors)
        yield
    finally:
        for table, value in zip(tables, before, strict=True):
            table.module.__dict__[table.name] = value


class _Absent(dict[str, Any]):
    """Table without the tensors that belong into it; a model that looks for them cannot be recorded."""

    def __init__(self, calls: LayerCalls, tensors: dict[str, Any]) -> None:
        super().__init__()
        self.calls = calls
        self.names = frozenset(tensors)

    def __contains__(self, name: object) -> bool:
        return bool(self._refuse()) if name in self.names else False

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        reason = "the model uses tensors of a layer outside of its forward"
        raise self.calls.differ(LayersDifferError(reason, self.calls.kinds))

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = _refuse
    get = pop = popitem = setdefault = update = keys = values = items = copy = clear = _refuse
