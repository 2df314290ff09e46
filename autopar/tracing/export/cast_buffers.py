"""Buffers in the dtype of the compute, for models that fail on buffers in float32.

Parameters are cast for a step in half precision, and buffers are not: rotary frequencies and statistics need float32. A
model that adds a table of positions to its embeddings then goes on in float32, and its next product or normalisation
fails on weights in half precision. Such a model is exported again with its buffers cast, as `model.bfloat16()` would.
The graph has the stored buffers, and a cast before each op that reads one. A buffer that the forward changes stays.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx import Node

from autopar.errors import AutoparWarning
from autopar.tracing.export.program_graph import ProgramGraph
from autopar.tracing.export.refuse import Refusal
from autopar.tracing.export.run_export import Returned
from autopar.tracing.passes.edit import insert

__all__ = ["with_buffers_of_one_dtype"]

HALVES = (torch.bfloat16, torch.float16)
# What torch and the tracer say of operands whose dtypes differ.
DIFFER = re.compile(r"dtype|scalar type")
# Ops whose kernels take an image and weights of one dtype, where the meta device takes any.
NORMS = re.compile(r"aten\.(native_)?(layer|group)_norm\.")
PRODUCTS = re.compile(r"aten\.(addmm|mm|bmm|baddbmm|matmul|linear|conv\w*|scaled_dot_product_attention)\.")


def with_buffers_of_one_dtype(model: nn.Module, export: Callable[[], ProgramGraph], returned: Returned) -> ProgramGraph:
    """Return an exported graph of a model; its buffers are cast where the model fails without.

    Raise for an op of a half model that no kernel computes.
    """
    dtype, names = _half_dtype(model), _wide_buffers(model)
    if dtype is None:
        return export()
    found: ProgramGraph | Exception
    try:
        found = export()
    except (RuntimeError, Refusal) as error:
        if not DIFFER.search(str(error)):
            raise
        found = error
    mixed = None if isinstance(found, Exception) else next(filter(_is_mixed, found.graph.nodes), None)
    if not isinstance(found, Exception) and mixed is None:
        return found
    other = _with_casts(model, names, dtype, export, returned) if names else None
    if other is not None:
        warnings.warn(
            f"{type(model).__name__} fails on buffers in float32 beside weights in {dtype}: its buffers are cast "
            f"({', '.join(sorted(names)[:3])}{', …' if len(names) > 3 else ''})",
            AutoparWarning,
            stacklevel=2,
        )
        return other
    if isinstance(found, Exception):
        raise found
    assert mixed is not None
    raise Refusal(
        f"{mixed.target} has operands in float32 and in {dtype}, which no kernel takes",
        'cast one of them in the model, as in x.to(self.weight.dtype); or compute in precision="fp32"',
        mixed,
    )


def _with_casts(
    model: nn.Module, names: set[str], dtype: torch.dtype, export: Callable[[], ProgramGraph], returned: Returned
) -> ProgramGraph | None:
    """Return the graph with its buffers cast; None if the model fails, or changes one of them."""
    try:
        with _cast(model, names, dtype):
            found = export()
    except Exception:  # noqa: BLE001  # the model fails for another reason
        return None
    changed = {*(one.name for one in found.mutations), *returned.assigned}
    if not names.isdisjoint(changed) or any(map(_is_mixed, found.graph.nodes)):
        return None
    _insert_casts(found, names, dtype)
    return found


def _half_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of all floating parameters if it is a half one."""
    dtypes = {one.dtype for one in model.parameters() if one.is_floating_point()}
    return next(iter(dtypes)) if len(dtypes) == 1 and dtypes <= set(HALVES) else None


def _wide_buffers(model: nn.Module) -> set[str]:
    """Return the buffers in float32, but for running statistics, by all of their names."""
    statistics = {
        id(one)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for one in (module.running_mean, module.running_var)
    }
    every = model.named_buffers(remove_duplicate=False)
    return {name for name, one in every if one.dtype == torch.float32 and id(one) not in statistics}


def _is_mixed(node: Node) -> bool:
    """Return whether an op has an operand in half precision beside one in float32, and no kernel for both."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = str(node.target)
    values = [one.meta["val"] for one in node.all_input_nodes if isinstance(one.meta.get("val"), Tensor)]
    dtypes = [value.dtype for value in values if value.is_floating_point()]
    if len(set(dtypes)) < 2 or set(dtypes).isdisjoint(HALVES):
        return False
    # Normalisations take a half image with weights in float32.
    return bool(PRODUCTS.match(name)) or (bool(NORMS.match(name)) and dtypes[0] not in HALVES)


@contextmanager
def _cast(model: nn.Module, names: set[str], dtype: torch.dtype) -> Iterator[None]:
    """Replace buffers by cast ones; those of several names stay one."""
    made: dict[int, Tensor] = {}
    before: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and f"{path}.{name}".removeprefix(".") in names:
                before.append((module._buffers, name, buffer))
    for _, _, buffer in before:
        made.setdefault(id(buffer), buffer.to(dtype))
    try:
        for table, name, buffer in before:
            table[name] = made[id(buffer)]
        yield
    finally:
        for table, name, buffer in before:
            table[name] = buffer


def _insert_casts(program: ProgramGraph, names: set[str], dtype: torch.dtype) -> None:
    """Let the graph read the stored buffers, and cast them before each op."""
    for one in program.inputs:
        if one.kind is InputKind.BUFFER and one.name in names and one.node.meta["val"].dtype == dtype:
            narrow = one.node.meta["val"]
            one.node.meta["val"] = narrow.to(torch.float32)
            for user in list(one.node.users):
                if user.op != "output":
                    cast = insert(user, torch.ops.aten._to_copy.default, one.node, dtype=dtype, value=narrow)
                    user.replace_input_with(one.node, cast)
