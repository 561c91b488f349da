"""Results as JSON, a page of tables, and plots."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import plots
from kvcache.bench.timing import machine

__all__ = ["load", "verdict", "write"]

PACKAGES = ("torch", "transformers", "mlx", "mlx-lm", "numpy")
INTRODUCTION = """# Benchmarks

Written by `make bench` (`python -m benchmarks`); the figures are in [results.json](results.json), what was
tried on the way in the [log](log.md). Every part runs in a process of its own on one thread. Contenders take
turns round by round; a round in which the process lost its core is dropped and counted. Times are medians
[10th, 90th percentile]; a ratio is the median of the rounds' own ratios to the floor, which is the faster one
where there are two. The machine is shared: ratios count, absolute times do not.

**put + get** stores K and V of one layer and hands back native views of what a query reads, 8 KV heads of
128. The first layer of a step is not timed (there the mask is made, see *start_forward*), the others are, and
the time is per layer; on MLX a step is all layers and one evaluation. Floors are written by hand: slice
assignment, or `as_strided` and `copy_`, into preallocated buffers, and two views. No GPU: nothing here has
been run on one.
"""


def load(folder: Path) -> dict[str, Any]:
    """The results of before, so that a part may be run alone."""
    file = folder / "results.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"parts": {}}
    return found


def write(folder: Path, results: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    results["machine"] = machine()
    results["packages"] = {name: found for name in PACKAGES if (found := _version(name))}
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    drawn = plots.draw(folder, results["parts"])
    (folder / "index.md").write_text("\n".join(_page(results, drawn)), encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _page(results: Mapping[str, Any], drawn: Mapping[str, list[str]]) -> Iterable[str]:
    packages = ", ".join(f"{name} {found}" for name, found in results["packages"].items())
    yield INTRODUCTION
    yield f"{results['machine']}; {packages}.\n"
    yield from _targets(results["parts"])
    for name, part in results["parts"].items():
        load = part["foreign_cores"]
        others = "" if load is None else f"; others kept {load:.1f} cores busy"
        yield f"\n## {part['title']}\n"
        command = f"`python -m benchmarks --part {name}`"
        yield f"{command}: {part['seconds']:.0f} s{', quick' * part['quick']}{others}.\n"
        for picture in drawn.get(name, ()):
            yield f"![{part['title']}]({picture})\n"
        yield from _table(part["rows"])


def _targets(parts: Mapping[str, Any]) -> Iterable[str]:
    yield "## Targets\n"
    yield "| measurement | where | ratio | at most | |"
    yield "|---|---|---|---|---|"
    for part in parts.values():
        for row in part["rows"]:
            if row["target"] is not None:
                mark = "reached" if row["met"] else "**not reached**"
                yield (
                    f"| {row['measurement']} ({row['contender']}) | {row['group']} | {row['ratio']:.3g} | "
                    f"{row['target']:g} | {mark} |"
                )


def _table(rows: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    yield "| where | measurement | contender | median [10th, 90th] | x floor | rounds (dropped) | |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:,.2f}"
        spread = f" [{_number(row['low'])}, {_number(row['high'])}]" if row["high"] else ""
        yield (
            f"| {row['group']} | {row['measurement']} | {row['contender']} | "
            f"{_number(row['median'])}{spread} {row['unit']} | {ratio} | "
            f"{row['rounds']} ({row['dropped']}) | {row['note']} |"
        )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def verdict(rows: Iterable[Mapping[str, Any]]) -> str:
    judged = [row["met"] for row in rows if row["met"] is not None]
    return f"{sum(judged)} of {len(judged)} targets reached"
