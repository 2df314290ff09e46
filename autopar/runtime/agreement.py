"""Facts of a traced graph, and the agreement of ranks on them: compare before any other collective.

All ranks raise or none. Every rank sends its own facts before it depends on those of others. A mistake on one rank is
then an error on all ranks, not a collective that never ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Node

from autopar.errors import AutoparError
from autopar.ir.graph import NamedGraph
from autopar.lowering.collectives.checksum import checksum, digest, kind_of
from autopar.lowering.collectives.process_groups import group_over, limit_seconds_of
from autopar.lowering.hoisted_sums import ROOM
from autopar.rules.torch_versions import all_gather_single
from autopar.runtime.activity import Activity
from autopar.runtime.compiled_call import outline
from autopar.runtime.shared_memory import SharedMemory
from autopar.tracing.export.autograd_functions import plain_arguments

# What to do if ranks differ, by what differs.
SAME_MODEL = "build the same model on every rank: the same seed before it is built, or the same weights loaded into it"
SAME_ARGUMENTS = "call parallelize on every rank with the same arguments; a layout file must be the same for all"
SAME_GRAPH = (
    "build the same model on every rank and call it in the same way: numbers such as a dropout's p or a scale, tables "
    "that are no parameters, and constants of forward are parts of the graph"
)
SAME_CALL = (
    "call the module on every rank in the same way, with tensors of the same shapes; all ranks train or evaluate "
    "together, also where one of them alone prints the result"
)
SAME_ORDER = (
    "this is a fault of autopar, and nothing was sent: ranks that send in other orders read wrong numbers; report it "
    "with the layout, and leave out `recompute` or `micro` until it is mended"
)
NO_RESULT = "a call on this rank has no result: another rank began a call and did not finish it"
LOCAL = (
    "a plain tensor is the whole input: give every rank the same batch, all of it; if each rank loads a part of the "
    "batch of its own (a DistributedSampler, another seed), say parallelize(..., local_inputs=True), or give its rows "
    "as module(**module.from_rows(x=rows)). Loaders of Accelerate and Trainer deal out rows, unless told otherwise: "
    "docs/hosts.md"
)

Result = TypeVar("Result")


# An error of the first rank, sent in place of its result.
@dataclass(frozen=True)
class _Failure:
    error: AutoparError


class PendingCheck:
    """Comparison of one number of all ranks, not waited for yet."""

    def __init__(self, sent: Sequence[int | float], rows: Callable[[], list[list[int]]]) -> None:
        self._sent = sent
        self._rows = rows
        self._found: list[list[int]] | None = None

    def result(self) -> list[list[int | float]] | None:
        """Return each rank's further numbers; None unless all make the same call."""
        if self._found is None:
            self._found = self._rows()
        own, *along = self._sent
        if any(row[0] != own for row in self._found):
            return None
        # Ranks in the same call send floats at the same places, so own types decode all rows. Rows are padded.
        kinds = [isinstance(number, float) for number in along]
        return [
            [
                _FLOAT.unpack(_WHOLE.pack(bits))[0] if is_float else bits
                for bits, is_float in zip(row[1:], kinds, strict=False)
            ]
            for row in self._found
        ]


def _bits(number: int | float) -> int:
    found: int = _WHOLE.unpack(_FLOAT.pack(number))[0] if isinstance(number, float) else int(number)
    return found


# Floats are sent as the 64 bits of an integer, so that one message has both.
_FLOAT, _WHOLE = Struct("<d"), Struct("<q")


class Agreement:
    """Ranks of a mesh that compare facts and exchange small values."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.size = mesh.size()
        # None for one rank: such a process needs no process group.
        self.group = None
        self.channel: SharedMemory | None = None
        if self.size > 1:
            self.group = group_over(mesh)
            self.ranks = dist.get_process_group_ranks(self.group)
            self.device = torch.device("cpu" if mesh.device_type == "cpu" else f"{mesh.device_type}")

    def open_channel(self) -> None:
        """Open shared memory for small exchanges, if all ranks are on one host."""
        if self.group is None:
            return
        me = self.ranks.index(dist.get_rank())
        # The first rank reuses its own file: closing any file descriptor of it would release its lock (POSIX).
        files: list[Any] = []

        def create() -> str | None:
            created = SharedMemory.create(self.size)
            if created is None:
                return None
            files.append(created[1])
            return created[0]

        place = self.decided_by_first(create)
        channel = SharedMemory.open(place, me, self.size, limit_seconds_of(self.group), *files)
        # All or none: a rank without it would wait in a collective for the others.
        found = self._gather(channel is not None)
        self.channel = channel if all(found.values()) else None

    @property
    def is_cheap(self) -> bool:
        """Return whether a few numbers of the device can be exchanged without a wait."""
        return self.size > 1 and self.device.type == "cpu"

    @property
    def is_quick(self) -> bool:
        """Return whether a few numbers of the host can be exchanged without a wait."""
        return self.is_cheap or self.channel is not None

    def together(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work` on this rank; an error on any rank is an error on all."""
        result: Result | None = None
        own: AutoparError | None = None
        try:
            result = work()
        except AutoparError as error:
            own = error
        texts = self._gather(None if own is None else str(own))
        if own is not None:
            raise own
        for rank, text in texts.items():
            if text is not None:
                raise AutoparError(f"rank {rank} stopped, so this rank stops as well: {text}")
        return result  # type: ignore[return-value]

    def decided_by_first(self, decide: Callable[[], Result]) -> Result:
        """Return the result of `decide` on the first rank, on all ranks."""
        if self.group is None:
            return decide()
        sent: list[Any] = [None]
        own: AutoparError | None = None
        if dist.get_rank() == self.ranks[0]:
            try:
                sent = [decide()]
            except AutoparError as error:
                own, sent = error, [_Failure(error)]
        dist.broadcast_object_list(sent, src=self.ranks[0], group=self.group, device=self.device)
        if own is not None:
            raise own
        if isinstance(sent[0], _Failure):
            raise sent[0].error
        return sent[0]  # type: ignore[no-any-return]

    def same(self, facts: Mapping[str, str], fix: str) -> None:
        """Raise on all ranks, naming the first fact that differs, unless all ranks have the same facts."""
        # A digest first: the facts of a large graph are long.
        text = "\n".join(f"{name}: {fact}" for name, fact in facts.items())
        if len(set(self._gather(digest(text)).values())) == 1:
            return
        everyone = self._gather(dict(facts))
        first = self.ranks[0]
        for rank, theirs in everyone.items():
            for name in dict.fromkeys((*everyone[first], *theirs)):
                a, b = everyone[first].get(name, "nothing"), theirs.get(name, "nothing")
                if a != b:
                    told = f"{a} on rank {first}, {b} on rank {rank}"
                    if isinstance(a, Activity):
                        told = f"rank {first} {a}, rank {rank} {b}"
                    raise AutoparError(f"the ranks differ in {name}: {told}\nfix: {fix}")
        raise AssertionError("the facts differ in their order only")

    def same_values(self, sums: Mapping[str, tuple[tuple[int, ...], int]], fix: Callable[[str], str]) -> None:
        """Raise on all ranks unless ranks with the same piece of a tensor have the same checksum of it."""
        everyone = self._gather(dict(sums))
        for name in sums:
            seen: dict[tuple[int, ...], tuple[int, int]] = {}
            for rank, theirs in everyone.items():
                piece, value = theirs[name]
                other, first = seen.setdefault(piece, (rank, value))
                if value != first:
                    raise AutoparError(
                        f"{name} differs between rank {other} and rank {rank}: expected the same values\n"
                        f"fix: {fix(name)}"
                    )

    def begin(self, own: int, along: Sequence[int | float] = ()) -> PendingCheck:
        """Begin to compare one number below 2**63, and send further numbers with it.

        All messages have the same size, so that ranks in different calls meet in one collective.
        """
        assert self.group is not None, "more than one rank"
        sent = own, *map(_bits, along)
        if self.channel is not None:
            return PendingCheck((own, *along), self.channel.send(sent).rows)
        mine = torch.tensor((*sent, *(0,) * (ROOM - len(along))), dtype=torch.int64, device=self.device)
        everyone = mine.new_empty(self.size * len(mine))
        # Not `torch.distributed.all_gather_into_tensor`, whose checks take longer than the call itself in a small step.
        work = self.group._allgather_base(everyone, mine)

        def rows() -> list[list[int]]:
            work.wait()
            found: list[list[int]] = everyone.view(self.size, -1).tolist()
            return found

        return PendingCheck((own, *along), rows)

    def places(self, ranks: Iterable[int]) -> list[int]:
        """Return the rows of these ranks in a comparison."""
        return [self.ranks.index(rank) for rank in ranks]

    def numbers(self, *own: int) -> list[list[int]]:
        """Return the numbers of all ranks, each below 2**63, by one collective."""
        if self.group is None:
            return [list(own)]
        mine = torch.tensor(own, dtype=torch.int64, device=self.device)
        everyone = mine.new_empty(self.size * len(own))
        all_gather_single(everyone, mine, group=self.group)
        return everyone.view(self.size, len(own)).tolist()

    def all_true(self, own: bool) -> bool:
        """Return whether all ranks say yes."""
        return all(row[0] for row in self.numbers(int(own)))

    def all_same(self, own: str) -> bool:
        """Return whether all ranks have the same text."""
        return len({row[0] for row in self.numbers(digest(own))}) == 1

    def _gather(self, own: Result) -> dict[int, Result]:
        if self.group is None:
            return {0: own}
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, own, group=self.group)
        return dict(zip(self.ranks, everyone, strict=True))


# -- facts of a traced graph -------------------------------------------------------------------------------------------


def graph_facts(graph: NamedGraph) -> dict[str, str]:
    """Return a line for each op, rule and tensor of the graph, with constants by their checksums."""
    exported = graph.exported
    facts = {}
    nodes = {node.name: node for node in exported.graph_module.graph.nodes}
    # Constants first: the first difference is reported, and a constant says more than the op that reads it.
    for tensor in graph.tensors.values():
        if tensor.kind == "constant":
            facts[f"constant {tensor.name}, read by {_reader(nodes[tensor.node])}"] = _value(
                exported.constants[tensor.name]
            )
    for node in nodes.values():
        if node.op == "get_attr":
            facts[f"op {_place(node)}"] = _attribute(exported.graph_module, str(node.target))
        elif node.op != "placeholder":
            facts[f"op {_place(node)}"] = f"{_target(node.target)}({_arguments(node)})"
    for named in graph.nodes:
        facts[f"rule of {named.name}"] = f"{named.rule} of {', '.join(map(str, named.operands))}"
    for tensor in graph.tensors.values():
        gradient = " with gradient" if tensor.requires_grad else ""
        facts[f"{tensor.kind} {tensor.name}"] = f"{tensor} {tensor.dtype} {list(tensor.shape)}{gradient}"
    facts["results of the model"] = outline(exported.output_tree.node)
    facts["changes in place"] = str(exported.mutations)
    return facts


def _reader(node: Node) -> str:
    """Return the first op of the user's code that reads a value, directly or through copies."""
    # Breadth first; the list grows while it is read.
    seen = [node]
    for reached in seen:
        origin = reached.meta.get("origin")
        if reached is not node and origin is not None and origin.source:
            return _place(reached)
        seen += [user for user in reached.users if user not in seen]
    return "nothing"


def _place(node: Node) -> str:
    origin = node.meta.get("origin")
    return f"{node.name} at {origin.source}" if origin is not None and origin.source else node.name


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target) + plain_arguments(target)
    return getattr(target, "__qualname__", str(target))


def _arguments(node: Node) -> str:
    named = (f"{name}={_text(value)}" for name, value in node.kwargs.items())
    return ", ".join([*map(_text, node.args), *named])


def _text(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, torch.device):  # each rank has a device of its own
        return value.type
    if isinstance(value, Tensor):
        return _value(value)
    if isinstance(value, Mapping):
        return f"{{{_joined(f'{name}={_text(item)}' for name, item in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"[{_joined(map(_text, value))}]"
    return repr(value)


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(texts)


def _value(tensor: Tensor) -> str:
    """Return the checksum of a tensor, and its values if there are at most four."""
    if tensor.is_meta:
        return kind_of(tensor)
    shown = f" {tensor.tolist()}" if tensor.numel() <= 4 else ""
    return f"{kind_of(tensor)}{shown} with checksum {checksum(tensor)}"


def _attribute(module: nn.Module, path: str) -> str:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    if isinstance(found, Tensor):
        return _value(found)
    # Subgraphs of higher-order ops are listed op by op; other modules count by their type.
    if not isinstance(found, torch.fx.GraphModule):
        return type(found).__qualname__
    lines = [f"{_target(node.target)}({_arguments(node)})" for node in found.graph.nodes if node.op != "get_attr"]
    lines += [_attribute(found, str(node.target)) for node in found.graph.find_nodes(op="get_attr")]
    return "; ".join(lines)
