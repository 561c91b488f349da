"""The connector's counters, by name, since the last query."""

from __future__ import annotations

import threading

__all__ = ["COUNTED", "Counters"]

COUNTED = {
    "lookups": "Prompts whose prefix was looked up in the stores.",
    "lookups_timed_out": "Lookups that timed out and counted as a miss.",
    "tokens_found": "Tokens of prompts loaded from the stores.",
    "pages_loaded": "Pages read from the stores into blocks.",
    "bytes_loaded": "Bytes of these pages.",
    "load_seconds": "Seconds that threads spent on loading pages.",
    "pages_lost": "Pages that a store reported and that could not be loaded.",
    "pages_stored": "Pages written to a store.",
    "bytes_stored": "Bytes of these pages.",
    "pages_refused": "Pages that no store accepted.",
    "pages_postponed": "Pages not copied for lack of room in host memory.",
}
"""By name, a description of the counter; all are sums."""


class Counters:
    """Counts events; may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}

    def add(self, name: str, count: float = 1) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + count

    def take(self) -> dict[str, float]:
        """The counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts
