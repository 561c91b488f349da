"""Tables and plots of ``benchmarks.two_hosts``: from where on restoring pays against recomputing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.pages import axes_of, legend, svg, table
from kvcache import bytes_text

GIGABIT = 1e9


@dataclass(frozen=True, slots=True)
class Decided:
    """What a host did that asks the store where that beats computing, with ``tokens`` stored at the end of a
    link of ``gigabits``: how many it restored, and seconds to the first token, beside those of a host that
    always asks (``fetched``) and of one without a store (``computed``).
    """

    gigabits: float
    tokens: int
    restored: int
    seconds: float
    fetched: float
    computed: float


@dataclass(frozen=True, slots=True)
class Point:
    """Seconds to the first token of a prompt of which ``tokens`` are stored and a few are new.

    ``computed``: all of it anew. ``restored``: by the link's bits per second, as given to tc (None: no
    limit). ``nbytes``: what came over the wire.
    """

    tokens: int
    nbytes: int
    computed: float
    restored: Mapping[float | None, float]


def break_even_length(points: Sequence[Point], bits: float | None) -> float | None:
    """The fewest stored tokens from which on restoring is no slower; None: at no length that was measured.

    Between two lengths the gap between the times is taken for a straight line. 0: already at the
    shortest one.
    """
    gaps = [(point.tokens, point.computed - point.restored[bits]) for point in points]
    slower = [i for i, (_, gap) in enumerate(gaps) if gap < 0]
    if not slower:
        return 0.0
    if slower[-1] == len(gaps) - 1:
        return None
    (shorter, before), (longer, after) = gaps[slower[-1] : slower[-1] + 2]
    return shorter + (longer - shorter) * before / (before - after)


def break_even_bandwidth(point: Point) -> float | None:
    """Bits per second at which both take as long; None where restoring is slower on any link.

    The time on a link is that without a limit, and the bytes divided by the bandwidth.
    """
    spare = point.computed - point.restored[None]
    return 8 * point.nbytes / spare if spare > 0 else None


def load(docs: Path) -> dict[str, Any]:
    return pages.load(docs / "two-hosts" / "figures.json") or {"models": {}}


def write(docs: Path, results: Mapping[str, Any]) -> None:
    """The figures, from which the site's tables and plots are made when it is built."""
    pages.save(docs / "two-hosts" / "figures.json", results)


def row_of(point: Point) -> dict[str, Any]:
    """What ``points_of`` reads: as JSON has it, a list instead of keys that are no strings."""
    return asdict(point) | {"restored": [list(item) for item in point.restored.items()]}


def points_of(record: Mapping[str, Any]) -> list[Point]:
    return [Point(**row | {"restored": dict(row["restored"])}) for row in record["points"]]


LINKS = 0.1, 1.0, 10.0
"""Gb/s of the links that the page shows, and below how many lengths: the record has all of them."""
LENGTHS = 4


def tables(results: Mapping[str, Any]) -> str:
    """Markdown of all models; what a host decides is shown for the last one."""
    models = [*results["models"].values()]
    parts = [part for record in models for part in _model(record)]
    return "\n\n".join([*parts, *_decisions(models[-1].get("decisions"))])


def _model(record: Mapping[str, Any]) -> Sequence[str]:
    points = points_of(record)
    limits = [link["gigabits"] for link in record["links"] if link["gigabits"] in LINKS]
    glance = " **A glance (`--quick`), no result.**" if record.get("quick") else ""
    head = (
        "stored tokens",
        "over the wire",
        "recomputed",
        *map(_bandwidth, limits),
        "break-even bandwidth",
    )
    least = "; ".join(f"{_length(points, limit)} at {_bandwidth(limit)}" for limit in limits)
    told = (
        f"Milliseconds to the first token with {record['new_tokens']} new tokens after the stored ones, "
        f"medians of {record['rounds']} ({record['backend']}, {record['machine']}, one thread).{glance}"
    )
    return [
        f"### {record['title'][0].upper()}{record['title'][1:]}",
        told,
        table(head, [_row(point, limits) for point in points[-LENGTHS:]]),
        f"Restoring pays from: {least}.",
    ]


def _decisions(record: Mapping[str, Any] | None) -> Sequence[str]:
    """What the rule chooses on a slow link and on a fast one."""
    if record is None:
        return []
    return [
        "Decisions of a host, by what it has measured:",
        table(
            ("link", "stored tokens", "decision", "took", "always fetching", "recomputed"),
            [_decision(Decided(**row)) for row in record["rows"]],
        ),
    ]


def _decision(row: Decided) -> list[str]:
    times = [f"{1000 * seconds:,.1f}" for seconds in (row.seconds, row.fetched, row.computed)]
    did = f"fetched {row.restored:,}" if row.restored else "recomputed"
    return [_bandwidth(row.gigabits), f"{row.tokens:,}", did, *times]


def _row(point: Point, limits: Sequence[float | None]) -> list[str]:
    even = break_even_bandwidth(point)
    return [
        f"{point.tokens:,}",
        bytes_text(point.nbytes),
        f"{1000 * point.computed:,.1f}",
        *(f"{1000 * point.restored[limit]:,.1f}" for limit in limits),
        "none" if even is None else f"{even / GIGABIT:.3g} Gb/s",
    ]


def _length(points: Sequence[Point], limit: float | None) -> str:
    found = break_even_length(points, limit)
    if found is None:
        return f"not up to {points[-1].tokens:,} tokens"
    return f"{points[0].tokens} tokens or fewer" if not found else f"{found:,.0f} tokens"


def _bandwidth(limit: float | None) -> str:
    return "no limit" if limit is None else f"{limit:g} Gb/s"


def plot(record: Mapping[str, Any]) -> bytes:
    """Left: seconds by length; right: how many times sooner, by bandwidth."""
    points = points_of(record)
    measured = {link["gigabits"]: link["measured"] for link in record["links"]}
    left, right = axes_of((11, 4.2), 2)
    lengths = [point.tokens for point in points]
    left.plot(lengths, [point.computed for point in points], "k--", marker="o", label="recomputed")
    for limit in measured:
        left.plot(lengths, [point.restored[limit] for point in points], marker="o", label=_bandwidth(limit))
    left.set(xlabel="stored tokens", ylabel="seconds to the first token", xscale="log", yscale="log")
    for point in points:
        gains = [point.computed / point.restored[limit] for limit in measured]
        right.plot(list(measured.values()), gains, marker="o", label=f"{point.tokens:,} tokens")
    right.axhline(1, color="black", linestyle="--", linewidth=0.8)
    right.set(xlabel="Gb/s of a plain TCP socket", ylabel="times sooner than recomputed")
    right.set(xscale="log", yscale="log")
    legend(left)
    legend(right)
    left.figure.suptitle(f"{record['title']}, on a second host")
    return svg(left.figure)
