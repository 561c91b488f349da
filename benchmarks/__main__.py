"""``python -m benchmarks``: every part in a process of its own; JSON, Markdown and plots in docs/benchmarks/.

python -m benchmarks [--quick] [--part NAME ...] [--out FOLDER]
"""

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

from rich.console import Console

from kvcache.bench.timing import Foreign

__all__ = ["PARTS", "main"]

PARTS = {
    "put_get_torch": "put + get of one layer on PyTorch",
    "put_get_mlx": "put + get on MLX, one evaluation per step",
    "tail": "The slowest steps of decoding, PyTorch",
    "attention": "Attention over what is stored, PyTorch",
    "attention_mlx": "Attention over what is stored, MLX",
    "start_forward": "start_forward and masks",
    "whole_model": "Whole models",
    "memory": "Memory",
    "imports": "Imports",
}
"""Module -> title."""
OUT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
console = Console(highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds; a glance, no result")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this part; repeatable")
    parser.add_argument("--out", type=Path, default=OUT, help="where results go (default: docs/benchmarks)")
    parser.add_argument("--run", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        _run(options.run, options.quick, options.out)
        return
    from benchmarks import report

    results = report.load(options.out)
    for part in options.part or PARTS:
        console.print(f"{part} ...")
        found = _spawn(part, options.quick)
        if found is not None:
            results["parts"][part] = found
            console.print(
                f"  {found['seconds']:.0f} s, {len(found['rows'])} rows, {report.verdict(found['rows'])}"
            )
    report.write(options.out, results)
    console.print(f"wrote {options.out}")


def _spawn(part: str, quick: bool) -> dict[str, Any] | None:
    """Run a part in a process of its own, on one thread."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks", "--run", part, "--out", str(target)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([*command, *(["--quick"] if quick else [])], env=environment, check=False)
        if done.returncode:
            console.print(f"  {part} failed with {done.returncode}; its former figures stay")
            return None
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        return found


def _run(part: str, quick: bool, target: Path) -> None:
    foreign, began = Foreign(), time.perf_counter()
    rows = []
    for row in importlib.import_module(f"benchmarks.{part}").run(quick):
        rows.append(row.as_dict() | {"met": row.met})
        ratio = "" if row.ratio is None else f" {row.ratio:.2f}x"
        console.print(
            f"  {row.group} | {row.measurement} | {row.contender}: {row.median:,.1f} {row.unit}{ratio}"
        )
    record = {
        "title": PARTS[part],
        "quick": quick,
        "seconds": time.perf_counter() - began,
        "foreign_cores": foreign.cores(),
        "rows": rows,
    }
    target.write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main()
