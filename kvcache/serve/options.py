"""Where a server listens, and what it takes on."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ServeOptions"]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """``host`` and ``port`` (0: a free one) to listen on, and limits; times in seconds.

    ``max_waiting`` requests may wait for a sequence, further ones get 429. Stores are given what is new every
    ``write_interval``. ``show_cached``: answers and /health say how many tokens were in the cache
    already, from which a client learns what others have asked.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_waiting: int = 64
    write_interval: float = 60.0
    show_cached: bool = True
