"""Combinations of features on real processes over Gloo, beside one process: losses, gradients, buffers of three steps.

python -m benchmarks.combinations --cases 200          # all of them
python -m benchmarks.combinations --case 4711          # one case again, with all that is known of it
python -m benchmarks.combinations --plans --cases 200  # plans alone, which need no processes
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.runtime.combinations import combination
from tests.runtime.combined_models import MODELS
from tests.runtime.combined_plans import plan_cases
from tests.runtime.combined_steps import CaseOutcome, run_cases
from tests.runtime.launcher import launch

# Cases of one launch.
PER_LAUNCH = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first (default 0)")
    parser.add_argument("--case", type=int, nargs="+", help="run these cases alone")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="leave out the cases of other models")
    parser.add_argument("--plans", action="store_true", help="plan, write and read the plan; run nothing")
    asked = parser.parse_args()
    os.environ.setdefault("AUTOPAR_VERIFY", "1")  # the invariants between stages are checked too
    cases = asked.case or range(asked.first, asked.first + asked.cases)
    cases = [case for case in cases if not asked.models or combination(case).model in asked.models]
    kinds: Counter[str] = Counter()
    reasons: dict[str, list[int]] = defaultdict(list)
    begun = time.monotonic()
    for one in plan_cases(cases) if asked.plans else outcomes(cases):
        kinds[one.kind] += 1
        if one.kind == "refused":
            reasons[re.sub(r"'[^']*'|\S*[@/_\d]\S*|\[[^]]*\]", "…", one.detail)].append(one.case)
        print(one, flush=True)
    for reason, numbers in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"{len(numbers):4} refused: {reason} {numbers[:6]}")
    print(f"{dict(kinds)} in {time.monotonic() - begun:.0f} s")
    return 1 if kinds["wrong"] or kinds["error"] else 0


def outcomes(cases: Sequence[int]) -> Iterator[CaseOutcome]:
    """Run the cases in launches of one number of ranks; the outcome of a case is the worst of its ranks."""
    left: dict[int, list[int]] = defaultdict(list)
    for case in cases:
        left[combination(case).ranks].append(case)
    for ranks, numbers in left.items():
        while numbers:
            chunk = numbers[:PER_LAUNCH]
            with tempfile.TemporaryDirectory() as folder:
                try:
                    launch(run_cases, chunk, folder, ranks=ranks)
                except AssertionError as error:
                    yield CaseOutcome(_begun(Path(folder)), "error", _short(str(error)), 0)
                ended = [_ended(path) for path in Path(folder).glob("ended*")]
            both = [case for case in chunk if ended and all(case in one for one in ended)]
            for case in both:
                yield max((one[case] for one in ended), key=lambda one: one.kind)
            # A case that fails ends its launch, and those after it take another one.
            del numbers[: min(len(both) + 1, len(chunk))]


def _begun(folder: Path) -> int:
    """Return the case that the first of the ranks has begun last."""
    places = [tuple(map(int, path.read_text().split())) for path in folder.glob("begun*")]
    return min(places)[1]


def _ended(path: Path) -> dict[int, CaseOutcome]:
    with path.open("rb") as file:
        found = []
        while file.peek(1):
            found.append(pickle.load(file))
    return {one.case: one for one in found}


def _short(log: str) -> str:
    """Return the last lines of each rank, without those that mark columns."""
    found = []
    for rank in re.split(r"^(?=-- rank)", log, flags=re.MULTILINE):
        lines = [line[:200] for line in rank.splitlines() if line.strip(" ^~")]
        found += [lines[0], *lines[1:][-8:]] if lines else []
    return "\n".join(found)


if __name__ == "__main__":
    sys.exit(main())
