"""How long to leave something alone that has failed."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BackOff"]


@dataclass(slots=True)
class BackOff:
    """Nothing is tried before ``until``, then one call; if it fails, the ``wait`` doubles, up to ``longest``.

    A failure of calls that were under way already when the first one failed counts for nothing.
    """

    wait: float
    longest: float
    until: float
    _trying: bool = False

    def tries(self, now: float) -> bool:
        """Whether a call is the one that tries again; others wait until it has answered, or ``longest``."""
        if now < self.until:
            return False
        self.until, self._trying = now + self.longest, True
        return True

    def failed(self, now: float) -> None:
        """A call has failed."""
        if self._trying:
            self.wait, self._trying = min(2 * self.wait, self.longest), False
            self.until = now + self.wait
