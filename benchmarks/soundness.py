"""Prove the whole rule table and print what was proved: `python -m benchmarks.soundness [TOPIC ...]`.

`--opinfo` checks it on the calls of torch's own tests instead (benchmarks/opinfo.py).

A case is one claim of one bound rule that held in every call and with every seed it was tried with: that a factor,
split in so many shards, gives the whole answer back (or, marked whole, does not), or that the op is (or is not) linear
in some operands.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from autopar.rules.proof.prove import Proof, prove_table
from autopar.rules.registry import topics
from benchmarks.opinfo import check_ops, opinfo_names


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soundness", description=__doc__)
    parser.add_argument("topics", nargs="*", help="files of the table, as in 'reduce'; by default all")
    parser.add_argument("--opinfo", action="store_true", help="check the calls of torch's own tests (needs expecttest)")
    parser.add_argument("--ops", nargs="*", help="ops of torch's database, as in 'add'; by default all")
    parser.add_argument("--limit", type=int, help="samples of each op and dtype")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--output", type=Path, help="results by op, as JSON lines; a run goes on where another stopped")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.opinfo:
        return _opinfo(given.ops, given.limit, given.processes, given.output)
    return _prove(given.topics)


def _opinfo(ops: list[str] | None, limit: int | None, processes: int, output: Path | None) -> int:
    console, known = Console(), opinfo_names()
    names = [name for name in known if ops is None or name in ops or name.partition(".")[0] in ops]
    calls = factors = linear = 0
    refused: Counter[str] = Counter()
    without: Counter[str] = Counter()
    wrong: list[str] = []
    for one in check_ops(names, limit, processes, output):
        calls, factors, linear = calls + one.calls, factors + one.factor_cases, linear + one.linear_cases
        for reason, count in one.refused.items():
            refused[reason.partition(":")[0]] += count
        without.update(one.without_rule)
        wrong += [f"{one.op}: {text}" for text in one.wrong]
    console.print(
        f"{len(names)} ops of torch's database, {calls} calls: {factors} factor cases, {linear} linearity cases, "
        f"{len(wrong)} wrong"
    )
    table = Table("not checked, because", "count")
    for reason, count in refused.most_common():
        table.add_row(reason, str(count))
    console.print(table)
    console.print(f"{len(without)} ops without a rule: {', '.join(sorted(without))}", markup=False, highlight=False)
    for text in wrong:
        console.print(text, markup=False, highlight=False)
    return 1 if wrong else 0


def _prove(chosen: list[str]) -> int:
    console = Console()
    unknown = set(chosen) - set(topics())
    if unknown:
        console.print(f"no topic {', '.join(sorted(unknown))}; there are {', '.join(topics())}")
        return 2
    table = Table("topic", *(("lines", "factor cases", "linearity cases", "failures", "seconds")), title="Rules proved")
    proofs: list[Proof] = []
    lines = 0
    started = time.perf_counter()
    for topic, entries in topics().items():
        if chosen and topic not in chosen:
            continue
        before = time.perf_counter()
        proof = prove_table(entries)
        proofs.append(proof)
        lines += len(entries)
        table.add_row(topic, str(len(entries)), *_counts([proof]), f"{time.perf_counter() - before:.1f}")
    table.add_section()
    table.add_row("all", str(lines), *_counts(proofs), f"{time.perf_counter() - started:.1f}")
    console.print(table)
    failures = [failure for proof in proofs for failure in proof.failures]
    for proof in proofs:
        for line in proof.refused:
            if line.endswith("is not installed"):
                console.print(f"not proved: {line}", markup=False, highlight=False)
    for failure in failures:
        console.print(str(failure), markup=False, highlight=False)
    return 1 if failures else 0


def _counts(proofs: list[Proof]) -> tuple[str, str, str]:
    subjects = [case.subject for proof in proofs for case in proof.cases]
    factors = sum(subject.startswith("factor") for subject in subjects)
    failures = sum(len(proof.failures) for proof in proofs)
    return str(factors), str(len(subjects) - factors), str(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
