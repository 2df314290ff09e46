"""Write the golden texts anew: `python -m tests.golden.update`. Read the difference before you commit it."""

from __future__ import annotations

import autopar
from tests.golden.cases import CASES, FOLDER

if __name__ == "__main__":
    for name, target in CASES.items():
        (FOLDER / f"{name}.txt").write_text(f"{autopar.trace(*target())}\n")
        print(f"wrote {name}.txt")
