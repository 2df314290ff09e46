"""Replace each `torch.autograd.Function` by a custom op with the same backward.

torch.export records the ops of such a function and loses its backward. The custom op keeps the function whole. It saves
only its inputs: its backward runs the forward again for everything else that the function saves. The rule of the op is
discovered by running it, as for all ops without a rule.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autopar.tracing.export.refuse import Refusal

NAMESPACE = "autopar_functions"
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.memory_format)

# Ops by function and plain arguments, and calls by the name of their op. torch keeps custom ops for the whole process,
# so these tables do too.
_ops: dict[tuple[Any, ...], Any] = {}
_calls: dict[str, _Call] = {}


def apply_as_op(function: Any, arguments: Sequence[Any]) -> Any:
    """Return the results of a function, computed by the custom op that replaces it."""
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    plain = tuple(None if isinstance(value, Tensor) else _plain(function, value) for value in arguments)
    places = tuple(place for place, value in enumerate(arguments) if isinstance(value, Tensor))
    several, results = _count_results(function, arguments)
    key = function, plain, tuple(map(type, plain)), places, several, results
    if key not in _ops:
        _ops[key] = _define_op(_Call(function, plain, places, several), results)
    made = _ops[key](*tensors)
    return (made,) if several and results == 1 else made


def plain_arguments(op: torch._ops.OpOverload) -> str:
    """Return the arguments of an op's function that are no tensors, as text; empty for all other ops."""
    call = _calls.get(op.namespace + "::" + op._opname)
    return "" if call is None else f" of {call.function.__qualname__} with {call.plain}"


def _plain(function: Any, value: Any) -> Hashable:
    if type(value) is tuple:
        return tuple(_plain(function, item) for item in value)
    return (
        value if isinstance(value, PLAIN) else _refuse(function, f"it has an argument of type {type(value).__name__}")
    )


def _refuse(function: Any, reason: str) -> Any:
    raise Refusal(
        f"the backward of the torch.autograd.Function {function.__name__} would be lost: {reason}",
        "register it as an operator: torch.library.custom_op, with register_fake and register_autograd",
    )


class _Context:
    """Stand-in for the `ctx` of a function, shared by its forward and backward."""

    def __init__(self, function: Any, needs: Sequence[bool]) -> None:
        self._function = function
        self.needs_input_grad = tuple(needs)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: the op always gets all gradients."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        if any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
            _refuse(self._function, "it marks a result as not differentiable")

    def mark_dirty(self, *tensors: Tensor) -> None:
        _refuse(self._function, "it changes its input in place")


def _forward(function: Any, arguments: Sequence[Any]) -> tuple[_Context, Any]:
    tensors = [value if isinstance(value, Tensor) else None for value in arguments]
    context = _Context(function, [x is not None and (x.is_floating_point() or x.is_complex()) for x in tensors])
    # A function without setup_context of its own takes the context as first argument of its forward.
    if function.setup_context is torch.autograd.Function.setup_context:
        return context, function.forward(context, *arguments)
    results = function.forward(*arguments)
    function.setup_context(context, tuple(arguments), results)
    return context, results


class _RefuseRandomOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse random ops: the backward runs the forward again, and would draw other numbers."""

    def __init__(self, function: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.function = function

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in op.tags:
            _refuse(self.function, "it draws random numbers")
        return op(*args, **(kwargs or {}))


def _count_results(function: Any, arguments: Sequence[Any]) -> tuple[bool, int]:
    """Return True for a function that returns a sequence, and the number of results."""
    # The schema of the op needs the number before the call: run the function on fake tensors, outside of the trace.
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(FakeTensorMode())
        stack.enter_context(torch.no_grad())
        alone = list(arguments)
        for place, value in enumerate(arguments):
            if isinstance(value, Tensor):
                shape, strides = (tuple(map(int, sizes)) for sizes in (value.shape, value.stride()))
                alone[place] = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
        with _RefuseRandomOps(function):
            _, results = _forward(function, alone)
    several = isinstance(results, (tuple, list))
    found = tuple(results) if several else (results,)
    if not found or not all(isinstance(result, Tensor) for result in found):
        _refuse(function, "it returns a value that is no tensor")
    return several, len(found)


class _Call:
    """A function with its arguments that are no tensors."""

    def __init__(self, function: Any, plain: tuple[Any, ...], places: tuple[int, ...], several: bool) -> None:
        self.function = function
        self.plain = plain
        self.places = places
        self.several = several

    def arguments(self, tensors: Sequence[Tensor]) -> list[Any]:
        found = list(self.plain)
        for place, tensor in zip(self.places, tensors, strict=True):
            found[place] = tensor
        return found

    def forward(self, *tensors: Tensor) -> Any:
        _, results = _forward(self.function, self.arguments(tensors))
        # A custom op must return neither its inputs nor views of them.
        copies = [result.clone() for result in (results if self.several else (results,))]
        return copies if self.several else copies[0]

    def backward(self, gradients: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return a gradient for each tensor; zeros where the function returns None."""
        context, _ = _forward(self.function, self.arguments(tensors))
        found = self.function.backward(context, *gradients)
        given = found if isinstance(found, tuple) else (found,)
        by_tensor = [given[place] for place in self.places]
        return [
            torch.zeros_like(tensor) if gradient is None else gradient.clone()
            for gradient, tensor in zip(by_tensor, tensors, strict=True)
        ]


def _define_op(call: _Call, results: int) -> Any:
    """Define the custom op of a call, with shapes and gradients computed by the function."""

    def run(*tensors: Tensor) -> Any:
        found = call.forward(*tensors)
        return tuple(found) if call.several and len(found) > 1 else (found[0] if call.several else found)

    stem = re.sub(r"\W", "_", call.function.__name__)
    number = len([key for key in _ops if key[0].__name__ == call.function.__name__])
    name = f"{NAMESPACE}::{stem}_{number}"
    _calls[name] = call
    tensors = ", ".join(f"Tensor x{place}" for place in range(len(call.places)))
    returns = f"({', '.join(['Tensor'] * results)})"
    op = torch.library.custom_op(name, run, mutates_args=(), schema=f"({tensors}) -> {returns}")
    op.register_fake(run)
    back = torch.library.custom_op(
        f"{name}_backward",
        call.backward,
        mutates_args=(),
        schema="(Tensor[] gradients, Tensor[] tensors) -> Tensor[]",
    )
    back.register_fake(lambda gradients, tensors: [torch.empty_like(tensor) for tensor in tensors])

    def setup(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    def backward(context: Any, *gradients: Tensor) -> Any:
        return tuple(back(list(gradients), list(context.saved_tensors)))

    op.register_autograd(backward, setup_context=setup)
    return op
