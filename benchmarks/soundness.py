"""Prove the whole rule table and print what was proved: `python -m benchmarks.soundness [TOPIC ...]`.

A case is one claim of one bound rule that held in every call and with every seed it was tried with: that a factor,
split in so many shards, gives the whole answer back (or, marked whole, does not), or that the op is (or is not) linear
in some operands.
"""

from __future__ import annotations

import sys
import time

import torch
from rich.console import Console
from rich.table import Table

from autopar.rules.proof import Proof, prove_table
from autopar.rules.registry import topics


def main(chosen: list[str]) -> int:
    torch.set_num_threads(1)
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
