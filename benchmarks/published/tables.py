"""Readers of the tables, by file name, and the judgement of their predictions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.published.metrics import Hits, Pair, kendall_tau, mean_of, median_error, precision_recall, regret
from benchmarks.published.priced import Priced
from benchmarks.published.readers.llmfoundry import llmfoundry_runs
from benchmarks.published.readers.megatron import layer_runs, recompute_runs, sc21_runs
from benchmarks.published.readers.playbook import playbook_runs
from benchmarks.published.readers.rows import Row
from benchmarks.published.readers.vtrain import vtrain_runs
from benchmarks.published.runs import Run
from benchmarks.published.splits import splits

__all__ = ["READERS", "Judged", "judge", "reader_of"]

Reader = Callable[[Sequence[Row]], list[Run]]

# Keys are parts of the file's name.
READERS: Mapping[str, Reader] = {
    "e2e_ultrascale_playbook_h100": playbook_runs,
    "e2e_vtrain": vtrain_runs,
    "e2e_llmfoundry": llmfoundry_runs,
    "e2e_megatron_sc21": sc21_runs,
    "e2e_reducing_act_recompute_tab4": layer_runs,
    "e2e_reducing_act_recompute_tab5": recompute_runs,
}


def reader_of(path: Path) -> Reader | None:
    return next((reader for part, reader in READERS.items() if part in path.name), None)


@dataclass(frozen=True)
class Judged:
    """Judgement of some rows of a table."""

    name: str
    rows: int
    timed: int
    groups: int
    tau: float | None
    tau_by_step: float | None
    regret: float | None
    time_error: float | None
    memory_error: float | None
    # Counts the rows that ran, and those that failed for what may have been memory.
    does_not_fit: Hits | None
    # The same with every row that failed, whatever for.
    crashes: Hits | None


def judge(name: str, priced: Sequence[Priced]) -> list[Judged]:
    """Return the whole table, the rows of each tag, and those of each split of the table that has two sides."""
    tags = sorted({tag for one in priced for tag in one.run.tags})
    parts = [(name, list(priced))]
    parts += [(f"{name}, {tag}", [one for one in priced if tag in one.run.tags]) for tag in tags]
    for split in splits(priced):
        parts += [(f"{name}, {side}", rows) for side, rows in split.items()]
    return [_judged(part, rows) for part, rows in parts]


def _judged(name: str, priced: Sequence[Priced]) -> Judged:
    timed = [one for one in priced if one.run.measured.step_seconds is not None]
    groups = _grouped(timed, lambda run: run.group)
    batches = _grouped(timed, lambda run: f"{run.group}, {run.tokens} tokens")
    per_token = [[_pair(one, one.run.tokens) for one in group] for group in groups]
    per_step = [[_pair(one) for one in group] for group in groups]
    known = [one for one in priced if one.run.measured.fits is not None]
    failures = any(one.run.measured.fits is False for one in known)
    return Judged(
        name,
        rows=len(priced),
        timed=len(timed),
        groups=sum(len(group) > 1 for group in groups),
        tau=mean_of(kendall_tau(pairs) for pairs in per_token),
        tau_by_step=mean_of(kendall_tau(pairs) for pairs in per_step),
        regret=mean_of(regret([_pair(one) for one in batch]) for batch in batches if len(batch) > 1),
        time_error=median_error(_pair(one) for one in timed),
        memory_error=median_error(_memory_pairs(timed)),
        does_not_fit=_hits(known, failures, lambda one: one.run.measured.fits is False),
        crashes=_hits(priced, failures, lambda one: one.run.measured.fits is not True),
    )


def _hits(priced: Sequence[Priced], failures: bool, failed: Callable[[Priced], bool]) -> Hits | None:
    return precision_recall((not one.fits, failed(one)) for one in priced) if failures else None


def _pair(one: Priced, tokens: int = 1) -> Pair:
    assert one.run.measured.step_seconds is not None, one.run.label
    return Pair(one.step_seconds / tokens, one.run.measured.step_seconds / tokens)


def _memory_pairs(priced: Iterable[Priced]) -> list[Pair]:
    pairs = ((one.memory_bytes, one.run.measured.memory_bytes) for one in priced)
    return [Pair(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]


def _grouped(priced: Iterable[Priced], key: Callable[[Run], str]) -> list[list[Priced]]:
    found: dict[str, list[Priced]] = defaultdict(list)
    for one in priced:
        found[key(one.run)].append(one)
    return list(found.values())
