"""Where the master is and how this host takes part, from a URL and options."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any, Self
from urllib.parse import urlsplit

from kvcache.stores.digests import XXH3, check_digest
from kvcache.stores.errors import StoreValueError
from kvcache.stores.options import check_options, parse_bytes, read_prefix

__all__ = ["MooncakeOptions"]

_SIZES = "segment", "staging"
_PORT = 50051
_LEAST = {"staging": 1 << 16, "lanes": 1, "replicas": 1, "segment": 0, "port": 1}
_SMALLEST_SEGMENT = 1 << 24
"""What the package allocates at least."""


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """``mooncake://host[:port]``, and options; sizes in bytes or as ``"4GiB"``, times in seconds.

    Raises StoreValueError for what makes no sense, and for an option that does not exist.
    """

    host: str = "localhost"
    """The master's host."""
    port: int = _PORT
    prefix: str = "kvcache"
    """What the names of all entries begin with."""
    replicas: int = 1
    """On how many hosts an entry lies, where there are so many."""
    segment: int = 0
    """Bytes of memory that this host gives to the pool while the store is open: 0, or 16 MiB and more."""
    staging: int = 8 << 20
    """Bytes of each registered buffer that entries pass through."""
    lanes: int = 4
    """How many of them there may be, and so how many calls move data at a time."""
    address: str | None = None
    """How other hosts reach this one; None: the address from which it reaches the master."""
    protocol: str = "tcp"
    """"tcp", "rdma", or what else the installed engine was built with."""
    devices: str = ""
    """RDMA devices, separated by commas; none: all."""
    metadata: str = "P2PHANDSHAKE"
    """The engine's metadata server; by default hosts ask one another."""
    timeout: float = 5.0
    """Seconds that the master or a host may take to answer, or to make progress."""
    digest: str = XXH3
    """"xxh3_128", or "blake3" where others may write to the pool, with a secret."""
    secret: str | None = field(default=None, repr=False)
    """Keys the blake3 digest; the same on all hosts."""

    def __post_init__(self) -> None:
        read_prefix("mooncake", "prefix", self.prefix)
        check_digest("mooncake", self.digest, self.secret)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                raise StoreValueError(
                    f"mooncake: {name}={value!r}; it must be an integer of at least {least}"
                )
        if self.segment and self.segment < _SMALLEST_SEGMENT:
            raise StoreValueError(
                f"mooncake: segment={self.segment}; it must be 0 or at least {_SMALLEST_SEGMENT}"
            )
        seconds: object = self.timeout  # of a program, maybe
        if not isinstance(seconds, int | float) or not 0 < seconds < 3600:
            raise StoreValueError(
                f"mooncake: timeout={self.timeout!r}; it must be above 0 and below 3600 seconds"
            )
        for name in ("host", "protocol", "devices", "metadata"):
            if not isinstance(value := getattr(self, name), str):
                raise StoreValueError(f"mooncake: {name}={value!r}; it must be text")
        if not self.host or self.port > 65535:
            raise StoreValueError(f"mooncake: no master at {self.host!r}, port {self.port}")

    @property
    def master(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"mooncake://{self.master}"

    @classmethod
    def of(cls, url: str | None, options: dict[str, Any]) -> Self:
        check_options("mooncake", options, [field.name for field in fields(cls)])
        if url is not None and (twice := options.keys() & {"host", "port"}):
            raise StoreValueError(f"mooncake: {sorted(twice)} given beside the URL {url!r}")
        where = {} if url is None else _where(url)
        return replace(cls(), **where, **{name: _typed(name, value) for name, value in options.items()})


def _where(url: str) -> dict[str, Any]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise StoreValueError(f"mooncake: {url!r}: {error}") from error
    if parts.scheme != "mooncake" or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise StoreValueError(f"mooncake: {url!r}; write mooncake://host:port, with the master's")
    if parts.username is not None or parts.password is not None:
        raise StoreValueError("mooncake: a URL with a user or a password; the master supports neither")
    return {"host": parts.hostname, "port": _PORT if port is None else port}


def _typed(name: str, value: Any) -> Any:
    """An option as it is kept, from the text of a URL too."""
    if name in _SIZES:
        return parse_bytes(value, f"mooncake: {name}")
    try:
        if isinstance(value, str) and name in ("port", "lanes", "replicas"):
            return int(value)
        return float(value) if name == "timeout" else value
    except (TypeError, ValueError) as error:
        raise StoreValueError(f"mooncake: {name}={value!r}: {error}") from error
