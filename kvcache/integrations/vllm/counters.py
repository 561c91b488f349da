"""What the connector counts, by name, since it was last asked."""

from __future__ import annotations

import threading

__all__ = ["COUNTED", "Counters"]

COUNTED = {
    "lookups": "Prompts of which the stores were asked for a prefix.",
    "lookups_timed_out": "Lookups that took too long and counted as a miss.",
    "tokens_found": "Tokens of prompts that are loaded from the stores.",
    "pages_loaded": "Pages that were read from the stores into blocks.",
    "bytes_loaded": "Bytes of these pages.",
    "load_seconds": "Seconds that threads spent on loading pages.",
    "pages_lost": "Pages that a store had said it has, and that could not be loaded.",
    "pages_stored": "Pages that a store has taken.",
    "bytes_stored": "Bytes of these pages.",
    "pages_refused": "Pages that no store took.",
    "pages_postponed": "Pages that were not copied for lack of room in host memory.",
}
"""By name what is counted; all are sums."""


class Counters:
    """Called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}

    def add(self, name: str, count: float = 1) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + count

    def take(self) -> dict[str, float]:
        """What was counted since the last call."""
        with self._lock:
            found, self._counts = self._counts, {}
        return found
