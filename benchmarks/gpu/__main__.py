"""One GPU in under eight minutes: `python -m benchmarks.gpu --out FOLDER`; on a CPU in tiny sizes: `--tiny`.

Each section runs in a process of its own, with a time limit, and writes FOLDER/SECTION.json whenever a part of it ends.
FOLDER/all.json holds all of them; a table of them is printed last. Nothing changes the settings of the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# Section: its module and seconds, and those in tiny sizes on a busy CPU.
SECTIONS: dict[str, tuple[str, int, int]] = {
    "env": ("steps", 40, 180),
    "steps": ("steps", 160, 300),
    "sync": ("shards", 40, 300),
    "graphs": ("steps", 150, 300),
    "optim": ("steps", 40, 240),
    "calib": ("kernels", 90, 300),
    "predict": ("shards", 75, 300),
    "shards": ("shards", 60, 300),
    "kinds": ("kinds", 60, 300),
    "options": ("options", 100, 300),
    "experts": ("options", 40, 180),
    "long": ("options", 60, 240),
    "attn": ("kernels", 25, 180),
    "folded": ("kernels", 30, 120),
    "rules": ("kernels", 90, 240),
    "ranks": ("ranks", 250, 300),
}
TOTAL_SECONDS = 465


def main() -> int:
    options = _parse()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.section:
        _run_here(options)
        return 0
    limit = options.seconds if not options.tiny else sum(tiny for _, _, tiny in SECTIONS.values())
    chosen = options.only or list(SECTIONS)
    # More time than the sections usually need is shared among them.
    factor = max(1.0, limit / sum(_usual(options, name) for name in chosen))
    begun, found = time.monotonic(), {}
    for name in chosen:
        found[name] = _run(options, name, factor, limit - (time.monotonic() - begun))
        print(f"{name}: {found[name]['status']}, {found[name]['seconds']:.0f} s", file=sys.stderr, flush=True)
    (options.out / "all.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    _print(found)
    return 0 if all(section["status"] == "ok" for section in found.values()) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="where the JSON goes")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="time for all sections (default: 465)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, which a CPU can do")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    if not options.tiny and not torch.cuda.is_available():
        parser.error("torch finds no GPU here; --tiny runs all sections in tiny sizes on the CPU")
    return options


def _run_here(options: argparse.Namespace) -> None:
    """In the process of a section."""
    import torch

    from benchmarks.gpu.setting import Setting

    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    module = import_module(f"benchmarks.gpu.{SECTIONS[options.section][0]}")
    section: Callable[[Setting], None] = getattr(module, options.section)
    section(Setting(options.tiny, options.out, options.section))
    sys.stdout.flush()
    os._exit(0)  # a CUDA context or a process group must not spoil the exit code


def _usual(options: argparse.Namespace, name: str) -> int:
    """Return the seconds that a section usually needs."""
    _, seconds, tiny = SECTIONS[name]
    return tiny if options.tiny else seconds


def _run(options: argparse.Namespace, name: str, factor: float, seconds_left: float) -> dict[str, Any]:
    """Run a section in a process; what it had written counts also when its time is over."""
    if seconds_left < 10:
        return {"status": "skipped: no time left", "seconds": 0.0, "parts": {}}
    file, log = options.out / f"{name}.json", options.out / f"{name}.log"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "--section", name, "--out", str(options.out)]
    begun = time.monotonic()
    with log.open("wb") as written:
        process = subprocess.Popen(command + ["--tiny"] * options.tiny, stdout=written, stderr=written)
        try:
            code: int | None = process.wait(min(seconds_left, factor * _usual(options, name)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
    parts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    failed = [part for part, value in parts.items() if "failed" in value or value.get("failures")]
    status = "time over" if code is None else f"code {code}" if code else "ok"
    if failed:
        status = f"failed: {', '.join(failed)}"
    found: dict[str, Any] = {"status": status, "seconds": time.monotonic() - begun, "parts": parts}
    if code:
        found["log"] = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    return found


def _print(found: Mapping[str, Any]) -> None:
    table = Table("section", "part", "result")
    for name, section in found.items():
        table.add_row(name, "", f"{section['status']}, {section['seconds']:.0f} s")
        for part, value in section["parts"].items():
            table.add_row("", part, json.dumps(value)[:300])
    Console(width=160).print(table)


if __name__ == "__main__":
    sys.exit(main())
