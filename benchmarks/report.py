"""The page of ``python -m benchmarks``: rows, what was aimed at, tables and plots."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pages import DOCS, axes_of, filled, legend, load, packages, save, svg, table
from benchmarks.timing import machine
from kvcache.testing.bench import Trial

PARTS = (
    "put_get_torch", "put_get_mlx", "tail", "attention", "attention_mlx", "start_forward", "whole_model",
    "memory", "imports",
)  # fmt: skip
RECORD = "results.json"
_AIMS = {
    "put + get, 1 token, window": 1.2,
    "put + get, 1 token": 1.1,
    "put + get, 512": 1.2,
    "attention, 1 query": 1.05,
    "attention, 8 sequences": 1.3,
}
"""What rows of ours named so may be at most, in times of the floor."""
Series = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Row:
    """One contender in one measurement; times in microseconds unless ``unit`` says otherwise."""

    group: str
    """The framework and dtype."""
    measurement: str
    contender: str
    median: float
    low: float = 0.0
    high: float = 0.0
    ratio: float | None = None
    unit: str = "us"
    rounds: int = 1
    dropped: int = 0
    target: float | None = None
    """The ratio that is at most wanted."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        return None if self.target is None or self.ratio is None else self.ratio <= self.target


def rows_of(group: str, measurement: str, trial: Trial, ours: str = "ours", per: int = 1) -> Iterator[Row]:
    """One row per contender; a call did the work ``per`` times."""
    wanted = next((ratio for start, ratio in _AIMS.items() if measurement.startswith(start)), None)
    for name, sample in trial.samples().items():
        times = (sample.median / per, sample.low / per, sample.high / per)
        target = wanted if name.startswith(ours) else None
        kept = len(trial.times[name])
        yield Row(group, measurement, name, *times, sample.ratio, "us", kept, trial.dropped, target)


def summary(group: str, measurement: str, name: str, values: Sequence[float], **more: Any) -> Row:
    """A row of the median and the spread of values."""
    low, high = np.quantile(values, [0.1, 0.9]).tolist() if len(values) > 1 else (0.0, 0.0)
    return Row(group, measurement, name, statistics.median(values), low, high, rounds=len(values), **more)


def record(rows: Sequence[Row], quick: bool, seconds: float, foreign: float | None) -> dict[str, Any]:
    """What is kept of a part."""
    found = [list(astuple(row)) for row in rows]
    return {"quick": quick, "seconds": seconds, "foreign_cores": foreign, "rows": found}


def write(folder: Path, parts: Mapping[str, Any]) -> None:
    """Put these parts in the place of those that were recorded before, and write the page."""
    former = load(folder / RECORD).get("parts", {})
    results = {"machine": machine(), "packages": packages(), "parts": {**former, **parts}}
    save(folder / RECORD, results)
    page = (DOCS / "benchmarks" / "index.md").read_text(encoding="utf-8")
    (folder / "index.md").write_text(filled(page, tables(load(folder / RECORD))), encoding="utf-8")


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The tables of the page by their marks: one for each part, and those of all."""
    versions = ", ".join(f"{name} {found}" for name, found in results["packages"].items())
    head = ("where", "measurement", "ours", "x floor", "others")
    parts = {name: table(head, _measurements(_rows(part))) for name, part in results["parts"].items()}
    return parts | {
        "machine": f"{results['machine']}; {versions}.",
        "front": _front(results),
        "targets": _targets(results),
    }


def _rows(part: Mapping[str, Any]) -> list[Row]:
    return [Row(*row) for row in part["rows"]]


def _front(results: Mapping[str, Any]) -> str:
    """The figures of README's row, which are read where no site is built."""
    rows = _rows(results["parts"].get("put_get_torch", {"rows": []}))
    found = [
        (row.contender, f"{row.median:,.1f}", str(row.rounds))
        for row in rows
        if (row.group, row.measurement) == ("torch float32", "put + get, 1 token, 32768")
    ]
    return table(("", "us", "rounds"), found)


def _targets(results: Mapping[str, Any]) -> str:
    """How many are reached, and those that are not, lengths of history together."""
    rows = [row for part in results["parts"].values() for row in _rows(part)]
    missed: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row.met is False:
            named = re.sub(r", \d+$", "", row.measurement)
            missed[f"{named} ({row.contender})", row.group, f"{row.target:g}"].append(row.ratio or 0.0)
    lines = [
        (named, group, " to ".join(f"{ratio:.3g}" for ratio in sorted({min(found), max(found)})), target)
        for (named, group, target), found in missed.items()
    ]
    return f"{verdict(rows)}; not reached:\n\n{table(('measurement', 'where', 'ratio', 'at most'), lines)}"


def _measurements(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Rows of ours beside peers that store plain numbers: of a series of lengths, the shortest and longest.

    A measurement without peers has its note there. The record has all of them.
    """
    peers: dict[tuple[str, str], list[str]] = defaultdict(list)
    lengths: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in rows:
        named, _, length = row.measurement.rpartition(", ")
        if length.isdecimal():
            lengths[row.group, named].append(int(length))
        if not row.contender.startswith(("ours", "floor")) and "Quantized" not in row.contender:
            name = row.contender.removeprefix("transformers ").removeprefix("mlx-lm ")
            peers[row.group, row.measurement].append(f"{name}: {_number(row.median)}")
    for row in rows:
        named, _, length = row.measurement.rpartition(", ")
        series = lengths[row.group, named]
        between = length.isdecimal() and min(series) < int(length) < max(series)
        if row.contender.startswith("ours") and not between:
            ratio = "" if row.ratio is None else f"{row.ratio:,.2f}"
            beside = "; ".join(peers[row.group, row.measurement]) or row.note
            yield row.group, row.measurement, f"{_number(row.median)} {row.unit}", ratio, beside


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def verdict(rows: Iterable[Row]) -> str:
    judged = [row.met for row in rows if row.met is not None]
    return f"{sum(judged)} of {len(judged)} targets reached"


# Plots.


def plots(results: Mapping[str, Any]) -> dict[str, bytes]:
    """The SVGs of the page by their files."""
    found: dict[str, bytes] = {}

    def add(title: str, series: Series, y: str, log: bool = True) -> None:
        file = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") + ".svg"
        found[file] = _lines(title, series, y, log)

    for part in ("put_get_torch", "put_get_mlx", "start_forward", "whole_model"):
        rows = _rows(results["parts"].get(part, {"rows": ()}))
        if part == "start_forward" and rows:
            add("start_forward and mask", _beside_go(rows), "us")
        elif part == "whole_model":
            for model in dict.fromkeys(row.measurement.rsplit(", ", 1)[0] for row in rows):
                series = _by_length(rows, "torch float32", re.escape(model) + r", (\d+)$")
                add(model, series, "tokens per second", log=False)
        elif part != "start_forward":
            for group in dict.fromkeys(row.group for row in rows):
                series = _by_length(rows, group, r"put \+ get, 1 token, (\d+)$")
                add(f"put + get of one token, {group}", series, "us per layer")
    return found


def _by_length(rows: Sequence[Row], group: str, pattern: str) -> Series:
    series: Series = defaultdict(list)
    for row in rows:
        found = re.match(pattern, row.measurement)
        if found and row.group == group:
            series[row.contender].append((float(found[1]), row.median))
    return series


def _beside_go(rows: Sequence[Row]) -> Series:
    series: Series = defaultdict(list)
    for row in rows:
        found = re.match(r"start_forward, (\d+ x \d+) tokens, (\d+)$", row.measurement)
        if found and row.group == "numpy":
            series[f"{found[1]} tokens"].append((float(found[2]), row.median))
            series[f"{found[1]} tokens, Go"].append((float(found[2]), float(row.note.split()[1])))
    return series


def _lines(title: str, series: Series, y: str, log: bool) -> bytes:
    axes = axes_of((7.5, 4.2))
    colors: dict[str, Any] = {}
    for label, points in series.items():
        base = label.removesuffix(", Go")
        style = "--" if "floor" in label or label != base else "-"
        drawn = axes.plot(
            *zip(*sorted(points), strict=True), style, marker="o", label=label, color=colors.get(base)
        )
        colors[base] = drawn[0].get_color()
    axes.set(xlabel="history, tokens", ylabel=y, title=title, xscale="log")
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    legend(axes)
    return svg(axes.figure)
