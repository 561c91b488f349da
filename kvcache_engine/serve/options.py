"""The address and limits of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcache_engine.errors import RequestError

__all__ = ["ServeOptions"]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The ``host`` and ``port`` (0: a free one) to listen on, and limits; times are in seconds.

    Up to ``max_waiting`` requests may wait for a sequence; further ones get 429. A body of more than
    ``max_body`` bytes gets 413. A request whose answer has not been sent completely within
    ``request_timeout`` is cancelled. At shutdown, running and waiting requests have ``shutdown_timeout`` to
    finish. Each answer is written to the stores when it ends; what they did not accept then is offered again
    every ``write_interval``. A client has ``client_timeout`` to send the head of a request, and from one part
    of its body to the next; then its connection is closed, or it gets 408.

    ``api_key``: the key that requests must send as "Authorization: Bearer KEY", except for /health, which
    without it reports only that the server is running (None: no key). ``allowed_hosts``: Host names that
    clients may use in addition to those of ``host`` and this machine; "*": any.

    ``show_cached``: answers, /health and /metrics report how many tokens were cached, from which a client can
    infer what others have asked.

    ``sampling``: temperature, top_k, top_p and min_p for requests that do not set them (by default 1, 0, 1
    and 0).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_waiting: int = 64
    max_body: int = 8 << 20
    request_timeout: float = 600.0
    shutdown_timeout: float = 20.0
    write_interval: float = 60.0
    show_cached: bool = True
    client_timeout: float = 30.0
    api_key: str | None = field(default=None, repr=False)
    allowed_hosts: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises RequestError for a key that is invalid in a header."""
        key = self.api_key
        if key is not None and not (key.strip() == key != "" and key.isascii() and key.isprintable()):
            raise RequestError("serve: the API key must be printable ASCII, without spaces around it")
