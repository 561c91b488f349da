"""Run all benchmarks and write docs/benchmarks.md and docs/benchmarks.json."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import put_get, start_forward
from benchmarks.timing import machine

DOCS = Path(__file__).resolve().parent.parent / "docs"
console = Console()


def main() -> None:
    results: dict[str, Any] = {"machine": machine(), "torch": torch.__version__}
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`. Microseconds: median [10th, 90th percentile] of interleaved rounds on one",
        "thread; the ratio is the median of the rounds' own ratios to the first row. The machine is shared:",
        "ratios count, absolute times do not.",
        "",
        f"{results['machine']}; PyTorch {results['torch']}; no GPU: nothing here has been run on one.",
    ]
    lines += _put_get(results)
    lines += _start_forward(results)
    (DOCS / "benchmarks.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (DOCS / "benchmarks.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print("wrote docs/benchmarks.md and docs/benchmarks.json")


def _put_get(results: dict[str, Any]) -> list[str]:
    lines = ["", "## put + get of one token in one layer, 8 KV heads of 128", ""]
    lines += ["| dtype, history | contender | microseconds | x floor |", "|---|---|---|---|"]
    for dtype in put_get.DTYPES:
        for history in (128, 1024, 8192, 32768):
            console.print(f"put + get, {dtype}, {history} ...")
            found = put_get.measure(history, dtype)
            results[f"put_get/{dtype}/{history}"] = {k: dataclasses.asdict(v) for k, v in found.items()}
            for name, sample in found.items():
                lines.append(f"| {dtype} {history} | {name} | {sample} | {sample.ratio:.2f} |")
    return lines


def _start_forward(results: dict[str, Any]) -> list[str]:
    lines = ["", "## start_forward, and the mask of the first get (NumPy)", ""]
    lines += ["The Go figures are Ollama's, of the same work, from another run on such a machine.", ""]
    lines += ["| history | sequences | tokens | start_forward | + mask | + mask, elided | Go, both |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for (history, sequences, tokens), go in start_forward.GO.items():
        console.print(f"start_forward, {history}, {sequences} sequences, {tokens} tokens ...")
        begun, masked = start_forward.measure(history, sequences, tokens, elide=False)
        _, elided = start_forward.measure(history, sequences, tokens, elide=True)
        results[f"start_forward/{history}/{sequences}/{tokens}"] = [begun, masked, elided, go]
        figures = " | ".join(f"{value:,.1f}" for value in (begun, masked, elided))
        lines.append(f"| {history:,} | {sequences} | {tokens} | {figures} | {go:,} |")
    return lines


main()
