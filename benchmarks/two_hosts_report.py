"""Tables and plots of ``benchmarks.two_hosts``: docs/two-hosts/, and docs/two-hosts.md between its marks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.break_even import Point, break_even_bandwidth, break_even_length
from kvcache.runner.memory import human_bytes

__all__ = ["load", "points_of", "row_of", "tables", "write"]

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
GIGABIT = 1e9


def load(docs: Path) -> dict[str, Any]:
    file = docs / "two-hosts" / "figures.json"
    if not file.is_file():
        return {"models": {}}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def write(docs: Path, results: Mapping[str, Any]) -> None:
    """Figures, a plot for each model where matplotlib is there, and the tables of the page."""
    folder = docs / "two-hosts"
    folder.mkdir(exist_ok=True)
    (folder / "figures.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for name, record in results["models"].items():
        draw(folder / f"{name}.svg", record)
    page = docs / "two-hosts.md"
    text = page.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{tables(results)}\n{END}{after}", encoding="utf-8")


def points_of(record: Mapping[str, Any]) -> list[Point]:
    return [
        Point(row["tokens"], row["nbytes"], row["computed"], {limit: s for limit, s in row["restored"]})  # noqa: C416
        for row in record["points"]
    ]


def row_of(point: Point) -> dict[str, Any]:
    """What ``points_of`` reads: as JSON has it, a list instead of keys that are no strings."""
    return {
        "tokens": point.tokens,
        "nbytes": point.nbytes,
        "computed": point.computed,
        "restored": [[limit, seconds] for limit, seconds in point.restored.items()],
    }


def tables(results: Mapping[str, Any]) -> str:
    """Markdown of all models."""
    return "\n".join(line for name, record in results["models"].items() for line in _model(name, record))


def _model(name: str, record: Mapping[str, Any]) -> Sequence[str]:
    points = points_of(record)
    limits = [link["gigabits"] for link in record["links"]]
    links = ", ".join(f"{_bandwidth(link['gigabits'])}: {link['measured']:.3g}" for link in record["links"])
    glance = " **A glance (`--quick`), no result.**" if record.get("quick") else ""
    foreign = record["foreign_cores"]
    busy = "" if foreign is None else f"; others kept {foreign:.1f} cores busy before"
    conditions = (
        f"{record['backend']} on both hosts, {record['machine']}, one thread each{busy}; medians of "
        f"{record['rounds']}.{glance} Gb/s of a plain TCP socket, as measured: {links}."
    )
    legend = (
        f"Milliseconds to the first token with {record['new_tokens']} new tokens behind the stored ones; "
        "in brackets how many times sooner than computed anew:"
    )
    return [
        f"\n### {record['title'][0].upper()}{record['title'][1:]}\n",
        f"{conditions}\n",
        f"![Time to the first token, and how much sooner it comes](two-hosts/{name}.svg)\n",
        f"{legend}\n",
        "| stored tokens | over the wire | computed anew |"
        + "".join(f" {_bandwidth(limit)} |" for limit in limits)
        + " break-even bandwidth |",
        "|---" * (len(limits) + 4) + "|",
        *(_row(point, limits) for point in points),
        "",
        "| |" + "".join(f" {_bandwidth(limit)} |" for limit in limits),
        "|---" * (len(limits) + 1) + "|",
        "| restoring pays from |" + "".join(f" {_length(points, limit)} |" for limit in limits),
        "",
    ]


def _row(point: Point, limits: Sequence[float | None]) -> str:
    cells = [
        f"{1000 * point.restored[limit]:,.1f} ({point.computed / point.restored[limit]:.2g}x)"
        for limit in limits
    ]
    even = break_even_bandwidth(point)
    return (
        f"| {point.tokens:,} | {human_bytes(point.nbytes)} | {1000 * point.computed:,.1f} | "
        + " | ".join(cells)
        + f" | {'none' if even is None else f'{even / GIGABIT:.3g} Gb/s'} |"
    )


def _length(points: Sequence[Point], limit: float | None) -> str:
    found = break_even_length(points, limit)
    if found is None:
        return f"not up to {points[-1].tokens:,} tokens"
    return f"{points[0].tokens} tokens or fewer" if not found else f"{found:,.0f} tokens"


def _bandwidth(limit: float | None) -> str:
    return "no limit" if limit is None else f"{limit:g} Gb/s"


def draw(path: Path, record: Mapping[str, Any]) -> None:
    """Left: seconds by length; right: how many times sooner, by bandwidth. Nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "ml-kvcache"
    from matplotlib import pyplot

    points = points_of(record)
    measured = {link["gigabits"]: link["measured"] for link in record["links"]}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    lengths = [point.tokens for point in points]
    left.plot(lengths, [point.computed for point in points], "k--", marker="o", label="computed anew")
    for limit in measured:
        left.plot(lengths, [point.restored[limit] for point in points], marker="o", label=_bandwidth(limit))
    left.set(xlabel="stored tokens", ylabel="seconds to the first token", xscale="log", yscale="log")
    for point in points:
        gains = [point.computed / point.restored[limit] for limit in measured]
        right.plot(list(measured.values()), gains, marker="o", label=f"{point.tokens:,} tokens")
    right.axhline(1, color="black", linestyle="--", linewidth=0.8)
    right.set(xlabel="Gb/s of a plain TCP socket", ylabel="times sooner than computed anew")
    right.set(xscale="log", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle(f"{record['title']}, on a second host")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
