"""Plots of the simulation and of the fleet's demands, as SVG."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.scale_model import DESIGNS, SHAPES, Load, demands
from benchmarks.scale_report import STORE

__all__ = ["draw"]

Results = Mapping[str, Any]


def draw(folder: Path, results: Results) -> list[Path]:
    """Files; none where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "ml-kvcache"  # the same figures give the same file
    return [_policies(folder, results), _hosts(folder, results), _demands(folder, results)]


def _save(figure: Any, file: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(file, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return file


def _policies(folder: Path, results: Results) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2))
    for policy, seeds in results["simulation"]["policies"].items():
        rows = list(zip(*([row for row in seed if row["share"] < 1] for seed in seeds), strict=True))
        shares = [100 * of[0]["share"] for of in rows]
        rates = [[100 * row["rate"] for row in of] for of in rows]
        style = "--" if "shallowest" in policy else "-"
        (line,) = axes.plot(shares, [statistics.mean(of) for of in rates], style, marker="o", label=policy)
        axes.fill_between(
            shares, [min(of) for of in rates], [max(of) for of in rates], alpha=0.15, color=line.get_color()
        )
    bound = [seed[-1]["rate"] for seeds in results["simulation"]["policies"].values() for seed in seeds]
    axes.set_xscale("log")
    axes.set_xticks(shares, [f"{share:g}" for share in shares])
    axes.set_xticks([], minor=True)
    axes.axhline(100 * statistics.mean(bound), linestyle="--", color="gray", label="no limit")
    axes.set(xlabel="room, % of all that is ever new", ylabel="tokens of prompts found, %", ylim=(0, 100))
    axes.set_title("What is found again, by policy and budget")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return _save(figure, folder / "scale-policies.svg")


def _hosts(folder: Path, results: Results) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 3.6))
    rows = results["simulation"]["fleet"]
    names = [f"{row['routing']}\nstore: {row['store']}" for row in rows]
    local = [100 * (row["hits"] - row["remote"]) / row["tokens"] for row in rows]
    remote = [100 * row["remote"] / row["tokens"] for row in rows]
    axes.barh(names, local, label="on the host")
    axes.barh(names, remote, left=local, label="in the shared store")
    axes.invert_yaxis()
    axes.set(xlabel="tokens of prompts found, %", xlim=(0, 100), title="Four hosts and a shared store")
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=7)
    return _save(figure, folder / "scale-hosts.svg")


def _demands(folder: Path, results: Results) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2))
    store = next(name for name in STORE if name in results["constants"]["stores"])
    width = 0.8 / len(DESIGNS)
    for i, design in enumerate(DESIGNS):
        found = demands(Load(), SHAPES[0], design, results["constants"], store)
        places = [at + (i - (len(DESIGNS) - 1) / 2) * width for at in range(len(found))]
        axes.barh(places, [100 * demand.share for demand in found], width, label=design.name)
    axes.set_yticks(range(len(found)), [demand.resource for demand in found], fontsize=7)
    axes.axvline(100, linestyle="--", color="gray")
    axes.invert_yaxis()
    axes.set(
        xlabel="% of what is there", xscale="log", title=f"{SHAPES[0].name}: what is asked of each resource"
    )
    axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.4, -0.15))
    return _save(figure, folder / "scale-demands.svg")
