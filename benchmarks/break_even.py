"""Restoring against recomputing: what was measured, and from where on it pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Point", "break_even_bandwidth", "break_even_length"]


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
