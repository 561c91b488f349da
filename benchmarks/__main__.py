"""``python -m benchmarks``: every part in a process of its own; figures and page in docs/benchmarks/."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.pages import DOCS
from benchmarks.timing import Foreign

MODULES = {
    "put_get_torch": "put_get", "put_get_mlx": "put_get", "tail": "put_get", "attention_mlx": "attention",
}  # fmt: skip
"""Part -> module, where that is not named like it."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds; a glance, no result")
    parser.add_argument("--part", action="append", choices=report.PARTS, help="only this; repeatable")
    parser.add_argument("--out", type=Path, default=DOCS / "benchmarks", help="where results go")
    parser.add_argument("--run", choices=report.PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        _run(options.run, options.quick, options.out)
        return
    for part in options.part or report.PARTS:
        print(f"{part} ...", flush=True)
        found = _spawn(part, options.quick)
        if found is not None:
            report.write(options.out, {part: found})
            rows = [report.Row(*row) for row in found["rows"]]
            print(f"  {found['seconds']:.0f} s, {len(rows)} rows, {report.verdict(rows)}")
    print(f"wrote {options.out}")


def _spawn(part: str, quick: bool) -> dict[str, Any] | None:
    """Run a part in a process of its own, on one thread."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks", "--run", part, "--out", str(target)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([*command, *(["--quick"] if quick else [])], env=environment, check=False)
        if done.returncode:
            print(f"  {part} failed with {done.returncode}; its former figures stay")
            return None
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        return found


def _run(part: str, quick: bool, target: Path) -> None:
    foreign, began = Foreign(), time.perf_counter()
    framework = "mlx" if part.endswith("mlx") else "torch"
    module = importlib.import_module(f"benchmarks.{MODULES.get(part, part)}")
    rows = []
    for row in (module.tail if part == "tail" else module.run)(quick, framework):
        rows.append(row)
        ratio = "" if row.ratio is None else f" {row.ratio:.2f}x"
        named = f"{row.group} | {row.measurement} | {row.contender}"
        print(f"  {named}: {row.median:,.1f} {row.unit}{ratio}", flush=True)
    record = report.record(rows, quick, time.perf_counter() - began, foreign.cores())
    target.write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main()
