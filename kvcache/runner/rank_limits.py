"""How a time limit for all ranks together is divided among what happens before the last of them is gone."""

from __future__ import annotations

from dataclasses import dataclass

from ml.base.group import check_timeout

__all__ = ["Limits"]

RESERVE = 2.0
"""Seconds of a long limit that are kept for ending."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``timeout``: seconds from the moment at which a rank stops taking part to the end of all of them.

    That moment is when its process ends; for one that is there and does not come, when another begins to
    wait for it. A third of the timeout, at most RESERVE, is kept for finding the cause and for ending.
    """

    timeout: float

    def __post_init__(self) -> None:
        check_timeout(self.timeout, "ranks")

    @property
    def reserve(self) -> float:
        return min(self.timeout / 3, RESERVE)

    @property
    def waiting(self) -> float:
        """How long ranks wait for another: the timeout of their group."""
        return self.timeout - self.reserve

    @property
    def settling(self) -> float:
        """How long to look for the cause after a rank failed for want of another."""
        return self.reserve / 4

    @property
    def ending(self) -> float:
        """How long the ranks have to be gone, and rank 0 to put the terminal back."""
        return self.reserve / 4
