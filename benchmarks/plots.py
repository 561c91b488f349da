"""Plots of results as SVG."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["draw"]

Series = dict[str, list[tuple[float, float]]]


def draw(folder: Path, parts: Mapping[str, Any]) -> dict[str, list[str]]:
    """File names by part. None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return {}
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "ml-kvcache"  # the same figures give the same file
    drawn: dict[str, list[str]] = defaultdict(list)
    for name in ("put_get_torch", "put_get_mlx"):
        for group in dict.fromkeys(row["group"] for row in parts.get(name, {}).get("rows", ())):
            series = _by_length(parts[name]["rows"], group, r"put \+ get, 1 token, (\d+)$")
            title = f"put + get of one token, {group}"
            drawn[name].append(
                _lines(folder, f"put-get {group}", title, series, "history, tokens", "us per layer")
            )
    if "start_forward" in parts:
        drawn["start_forward"].append(_start_forward(folder, parts["start_forward"]["rows"]))
    if "whole_model" in parts:
        rows = parts["whole_model"]["rows"]
        for model in dict.fromkeys(row["measurement"].rsplit(", ", 1)[0] for row in rows):
            series = _by_length(rows, "torch float32", re.escape(model) + r", (\d+)$")
            axes = ("history, tokens", "tokens per second")
            drawn["whole_model"].append(_lines(folder, model, model, series, *axes, log=False))
    return drawn


def _by_length(rows: list[dict[str, Any]], group: str, pattern: str) -> Series:
    series: Series = defaultdict(list)
    for row in rows:
        found = re.match(pattern, row["measurement"])
        if found and row["group"] == group:
            series[row["contender"]].append((float(found[1]), row["median"]))
    return series


def _start_forward(folder: Path, rows: list[dict[str, Any]]) -> str:
    series: Series = defaultdict(list)
    for row in rows:
        found = re.match(r"start_forward, (\d+ x \d+) tokens, (\d+)$", row["measurement"])
        if found and row["group"] == "numpy":
            series[f"{found[1]} tokens"].append((float(found[2]), row["median"]))
            series[f"{found[1]} tokens, Go"].append((float(found[2]), float(row["note"].split()[1])))
    return _lines(
        folder, "start_forward", "start_forward and mask", series, "history, tokens", "us", pairs=True
    )


def _lines(
    folder: Path, name: str, title: str, series: Series, x: str, y: str, log: bool = True, pairs: bool = False
) -> str:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2))
    colors: dict[str, Any] = {}
    for label, points in series.items():
        base = label.removesuffix(", Go") if pairs else label
        style = "--" if "floor" in label or label.endswith(", Go") else "-"
        (line,) = axes.plot(
            *zip(*sorted(points), strict=True), style, marker="o", label=label, color=colors.get(base)
        )
        colors[base] = line.get_color()
    axes.set(xlabel=x, ylabel=y, title=title, xscale="log")
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    file = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".svg"
    figure.savefig(folder / file, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return file
