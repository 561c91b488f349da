"""How long the tokens of a request are kept: priorities of token ranges, which may expire.

After TensorRT-LLM's KvCacheRetentionConfig.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.cache import InvalidRangeError

__all__ = [
    "DEFAULT", "DEFAULT_PRIORITY", "LOWEST", "Grants", "Retention", "TokenRange", "check_retention", "merged",
    "rank_of",
]  # fmt: skip

DEFAULT_PRIORITY = 35
LOWEST = 0
"""The priority of what only closed sessions of agents used."""
Grants = tuple[tuple[int, float], ...]
"""(priority, expiry), highest first, as requested. The first one that has not expired counts."""
DEFAULT: Grants = ((DEFAULT_PRIORITY, math.inf),)


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens ``[begin, end)`` of a conversation are evicted by ``priority`` (0 to 100), the lowest first.

    ``end=None`` means to the end, including the answer. ``duration`` is in seconds from the end of the
    request; after that, the default priority of 35 applies. None means permanently, and is required for a
    priority below the default. Raises InvalidRangeError for values out of range.
    """

    begin: int = 0
    end: int | None = None
    priority: int = DEFAULT_PRIORITY
    duration: float | None = None

    def __post_init__(self) -> None:
        if type(self.begin) is not int or self.begin < 0:
            raise InvalidRangeError(
                f"TokenRange: begin={self.begin!r:.60}; it must be an integer of at least 0"
            )
        if self.end is not None and (type(self.end) is not int or self.end <= self.begin):
            raise InvalidRangeError(
                f"TokenRange: end={self.end!r:.60}; it must be an integer above begin={self.begin}, or None"
            )
        if type(self.priority) is not int or not 0 <= self.priority <= 100:
            raise InvalidRangeError(
                f"TokenRange: priority={self.priority!r:.60}; it must be an integer in [0, 100]"
            )
        if self.duration is not None and not (
            type(self.duration) in (int, float) and 0 < self.duration <= sys.float_info.max
        ):
            raise InvalidRangeError(
                f"TokenRange: duration={self.duration!r:.60}; it must be a number of seconds above 0, or None"
            )
        if self.duration is not None and self.priority < DEFAULT_PRIORITY:
            raise InvalidRangeError(
                f"TokenRange: duration={self.duration} with priority={self.priority}; a priority below the "
                f"default of {DEFAULT_PRIORITY} must have no duration"
            )


@dataclass(frozen=True, slots=True)
class Retention:
    """The ranges of one request: at most 64, without overlap. Other tokens have the default priority.

    >>> from kvcache import Retention, TokenRange
    >>> system = TokenRange(0, 120, priority=90)                     # keep the system prompt longest
    >>> document = TokenRange(120, 4000, priority=60, duration=600)  # and the document for ten minutes
    >>> retention = Retention([system, document])                    # for prefix.begin(..., retention=)
    """

    ranges: Sequence[TokenRange] = ()

    def __post_init__(self) -> None:
        unsorted = list(self.ranges)
        if strange := [each for each in unsorted if type(each) is not TokenRange]:
            raise InvalidRangeError(f"Retention: {strange[0]!r:.60}; a range must be a TokenRange")
        ranges = sorted(unsorted, key=lambda each: each.begin)
        if len(ranges) > 64:
            raise InvalidRangeError(f"Retention: {len(ranges)} ranges; there must be at most 64")
        for one, other in itertools.pairwise(ranges):
            if one.end is None or one.end > other.begin:
                raise InvalidRangeError(f"Retention: {one} and {other} overlap; ranges must be apart")
        object.__setattr__(self, "ranges", tuple(ranges))

    def cuts(self) -> list[int]:
        """The positions where a range begins or ends."""
        return sorted({at for each in self.ranges for at in (each.begin, each.end) if at})

    def grants(self, begin: int, end: int, now: float) -> Grants:
        """The priorities of the tokens ``[begin, end)``; those of each range that contains some of them."""
        granted: Grants = ()
        covered = 0
        for each in self.ranges:
            low, high = max(begin, each.begin), end if each.end is None else min(end, each.end)
            if low < high:
                covered += high - low
                if each.duration is None:
                    granted = merged(granted, ((each.priority, math.inf),))
                else:
                    granted = merged(granted, ((each.priority, now + each.duration), *DEFAULT))
        return granted if covered == end - begin else merged(granted, DEFAULT)


def check_retention(retention: object) -> None:
    if retention is not None and not isinstance(retention, Retention):
        raise InvalidRangeError(f"retention={retention!r:.80}; it must be a Retention, or None")


def merged(one: Grants, other: Grants) -> Grants:
    """Both lists, highest first, without priorities that a higher one outlasts."""
    grants: list[tuple[int, float]] = []
    for priority, until in sorted({*one, *other}, reverse=True):
        if not grants or until > grants[-1][1]:
            grants.append((priority, until))
    return tuple(grants)


def rank_of(grants: Grants, now: float) -> int:
    return next((priority for priority, until in grants if now < until), DEFAULT_PRIORITY)
