"""Name the dims of inputs and feature maps: `batch`, `seq`, `channels`, `height`, `width`; spread names by ties."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.tracing.naming.roles.structure import LOOKUPS, Proposal, Structure, op_name


def inputs(structure: Structure) -> Iterator[Proposal]:
    """Name the dims of inputs: `batch` leads, unless it is split at once (the ends of edges).

    The second dim of ids is `seq`, and so are the dims between it and `d_model`.
    """
    for placeholder in structure.inputs:
        value = structure.values[placeholder.node]
        dims = structure.dims(placeholder.node)
        names = [structure.name(dim) for dim in dims]
        whole = value.dim() > 0 and structure.is_never_split(placeholder.node, 0)
        # A leading dim that every user keeps whole is unpacked (the two ends of edges), and no batch.
        if value.dim() >= 2 and not structure.space.parts(dims[0]) and "batch" not in names and not whole:
            yield dims[0], "batch"
        if value.dim() == 2 and not value.is_floating_point() and not whole:
            yield dims[1], "seq"
        if value.dim() == 3 and names[2] == "d_model" and "seq" not in names:
            yield dims[names[:2].index("batch") - 1 if "batch" in names else 1], "seq"
        if value.dim() == 1 and not value.is_floating_point() and structure.users.get(placeholder.node):
            lookup = any(op_name(user) in LOOKUPS for user in structure.users[placeholder.node])
            yield dims[0], "seq" if lookup else "batch"


def spread_by_ties(structure: Structure) -> Iterator[Proposal]:
    """Yield for each tied dim (of another extent, or on the same tensor) the name of its partner."""
    # Ties form chains: a name moves by one tie per round.
    for _ in range(len(structure.binding.ties)):
        before = len(structure.names)
        for tie in structure.binding.ties:
            for dim, other in ((tie.first, tie.second), (tie.second, tie.first)):
                name = structure.name(other)
                known = structure.name(dim) is not None or structure.space.parts(dim) or structure.space.size(dim) == 1
                if name is not None and not known:
                    yield dim, name
        if len(structure.names) == before:
            return


# -- feature maps ------------------------------------------------------------------------------------------------------


SPATIAL = {1: ("seq",), 2: ("height", "width"), 3: ("depth", "height", "width")}
KERNEL = {1: ("kernel",), 2: ("kernel_height", "kernel_width"), 3: ("kernel_depth", "kernel_height", "kernel_width")}


def images(structure: Structure) -> Iterator[Proposal]:
    """Yield `batch channels height width` for convolutions; ties spread them to later maps."""
    for bound in structure.binding.nodes:
        if "conv" not in op_name(bound) or bound.operands[0] is None or bound.operands[1] is None:
            continue
        dims, weight = structure.dims(bound.operands[0]), structure.dims(bound.operands[1])
        space_rank = len(weight) - 2
        if len(dims) != space_rank + 2:
            continue
        for name, dim in zip(KERNEL.get(space_rank, ()), weight[2:], strict=False):
            yield dim, name
        for key in (bound.operands[0], bound.outputs[0]):
            spatial = structure.dims(key)[2:] if key else ()
            for name, dim in zip(SPATIAL.get(space_rank, ()), spatial, strict=False):
                yield dim, name
        if not structure.space.parts(dims[0]):
            yield dims[0], "batch"
        if space_rank > 1 and bound.operands[0] in structure.kinds:
            yield dims[1], "channels"


def channels(structure: Structure) -> Iterator[Proposal]:
    """Yield `channels` for feature dims of convolutions over a window, except the stream of a transformer."""
    for bound in structure.binding.nodes:
        if "conv" not in op_name(bound) or bound.operands[0] is None or bound.operands[1] is None:
            continue
        weight = structure.dims(bound.operands[1])
        pointwise = set(bound.call.operand(1).shape[2:]) == {1}
        if len(weight) == 3 and (pointwise or not structure.contracted_dims(bound)):
            # Sequence models use pointwise and depthwise convolutions as layers like any other.
            continue
        for key in (bound.operands[0], bound.outputs[0]):
            if key is not None and len(structure.dims(key)) == len(weight):
                dim = structure.dims(key)[1]
                inside = {structure.name(part) for part in structure.space.within(dim)}
                if not inside - {None, "channels"}:
                    yield dim, "channels"
