"""How a time limit for all ranks together is divided among what happens before the last of them is gone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcache.runner.errors import RunnerError

__all__ = ["Limits"]

RESERVE = 2.0
"""Seconds of a long limit that are kept for ending."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``timeout``: seconds from the moment in which a rank takes part no longer to the end of all.

    That moment is when its process is stopped or ends; of one that runs and does not come, when another
    begins to wait for it. A third of the timeout, at most RESERVE, is kept for noticing and ending::

        waiting                                          reserve
        |----------------------------------------------|----------|
        others wait, or the process is left stopped      poll, settling, hearing, ending, and the exit
    """

    timeout: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.timeout) and self.timeout > 0):
            raise RunnerError(f"ranks: timeout={self.timeout}; it is a number of seconds > 0")

    @property
    def reserve(self) -> float:
        return min(self.timeout / 3, RESERVE)

    @property
    def waiting(self) -> float:
        """How long ranks wait for another: the timeout of their group. And how long one may be stopped."""
        return self.timeout - self.reserve

    @property
    def poll(self) -> float:
        """How often the ranks are looked at."""
        return min(self.reserve / 16, 0.02)

    def settling(self, late: bool) -> float:
        """How long to look for the cause after one failed for want of another.

        ``late``: it has waited itself. Otherwise the other one may be about to end and to say why; or it has
        waited, and has ended the connection.
        """
        return self.reserve / (8 if late else 2)

    @property
    def hearing(self) -> float:
        """How long to wait for what the ranks that have ended said, in all."""
        return self.reserve / 16

    @property
    def ending(self) -> float:
        """How long the ranks have to be gone, and rank 0 to put the terminal back."""
        return self.reserve / 4
