"""Which server, and how: from a URL and options. Passwords are kept out of every text."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from kvcache.stores.digests import XXH3, check_digest
from kvcache.stores.errors import StoreUnavailableError, StoreValueError
from kvcache.stores.options import check_options, read_prefix, read_truth, without_secrets

__all__ = ["SCHEMES", "ValkeyOptions"]

SCHEMES = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
"""Schemes of URLs, and whether they mean TLS."""

_SECONDS = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd]?)")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST = 10 * 365 * 86400
"""Seconds of the longest time to live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyOptions:
    """One server, and how it is used; times in seconds. ``of`` makes one from text."""

    host: str = "localhost"
    port: int = 6379
    db: int = 0
    tls: bool = False
    prefix: str = "kvcache"
    ttl: float = 7 * 86400.0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    digest: str = XXH3
    secret: str | None = field(default=None, repr=False)
    connections: int = 8
    connect_timeout: float = 2.0
    timeout: float = 5.0
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_verify: bool = True

    @classmethod
    def of(cls, url: str | None, options: Mapping[str, Any]) -> ValkeyOptions:
        """From a URL without a query, and options, which may be text.

        Raises StoreValueError for what makes no sense, and for an option that does not exist,
        StoreUnavailableError where a ``password_file`` cannot be read.
        """
        fields: dict[str, Any] = {} if url is None else _parsed(url)
        check_options("ValkeyStore", options, _READ)
        for name, value in options.items():
            target = name.removesuffix("_file")
            if value is not None and target in fields:
                raise StoreValueError(f"ValkeyStore: the {target} is given twice")
            if value is not None:
                fields[target] = _READ[name]("ValkeyStore", name, value)
        return cls(**fields)

    @property
    def url(self) -> str:
        """Where it is, without who asks."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'valkeys' if self.tls else 'valkey'}://{host}:{self.port}/{self.db}"

    def __post_init__(self) -> None:
        check_digest("ValkeyStore", self.digest, self.secret)
        if self.username is not None and self.password is None:
            raise StoreValueError("ValkeyStore: a username without a password")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise StoreValueError("ValkeyStore: tls_cert and tls_key must be given together")
        tls = [item for item in fields(self) if item.name.startswith("tls_")]
        if not self.tls and any(getattr(self, item.name) != item.default for item in tls):
            names = ", ".join(item.name for item in tls)
            raise StoreValueError(f"ValkeyStore: {names} need TLS; write valkeys:// or rediss://")


def _parsed(url: str) -> dict[str, Any]:
    shown = without_secrets(url)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise StoreValueError(f"ValkeyStore: {shown!r} is not a URL with a port from 1 to 65535") from None
    if (
        parts.scheme not in SCHEMES
        or parts.query
        or parts.fragment
        or not url.startswith(f"{parts.scheme}://")
    ):
        raise StoreValueError(
            f"ValkeyStore: {shown!r}; write valkey://[user:password@]host[:port][/db]; other options "
            "are arguments"
        )
    fields: dict[str, Any] = {"tls": SCHEMES[parts.scheme]}
    if parts.hostname:
        fields["host"] = unquote(parts.hostname)
    if port is not None:
        fields["port"] = _between("port", port, 1, 65535)
    if parts.path not in ("", "/"):
        fields["db"] = _between("db", parts.path[1:], 0, 1 << 20)
    if parts.username:
        fields["username"] = unquote(parts.username)
    if parts.password:
        fields["password"] = unquote(parts.password)
    return fields


def _between(name: str, value: Any, low: int, high: int) -> int:
    text = str(value)
    digits = text.isascii() and text.isdigit() and len(text) < 12
    if not digits or not low <= int(text) <= high:
        raise StoreValueError(f"ValkeyStore: {name}={value!r}; it must be an integer from {low} to {high}")
    return int(text)


def _connections(owner: str, name: str, value: Any) -> int:
    return _between(name, value, 1, 1024)


def _seconds(owner: str, name: str, value: Any) -> float:
    """Of 90, 0.5, "90", "90s", "30m", "12h", "7d"."""
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and (match := _SECONDS.fullmatch(value.strip())):
        seconds = float(match[1]) * _UNITS[match[2]]
    if not 0.001 <= seconds <= _LONGEST:
        raise StoreValueError(f"{owner}: {name}={value!r}; write seconds, or 90s, 30m, 12h, 7d")
    return seconds


def _text(owner: str, name: str, value: Any) -> str:
    """Never shown where it is wrong: it may be a secret, or the path of one."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise StoreValueError(f"{owner}: the {name} must be non-empty text")
    return str(os.fspath(value))


def _from_file(owner: str, name: str, value: Any) -> str:
    path = _text(owner, name, value)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise StoreUnavailableError(f"{owner}: {name} {path}: {error}") from error
    return _text(owner, f"password in {path}", text.rstrip("\r\n"))


_READ: dict[str, Callable[[str, str, Any], Any]] = {
    "prefix": read_prefix,
    "ttl": _seconds,
    "username": _text,
    "password": _text,
    "password_file": _from_file,
    "digest": _text,
    "secret": _text,
    "connections": _connections,
    "connect_timeout": _seconds,
    "timeout": _seconds,
    "tls_ca": _text,
    "tls_cert": _text,
    "tls_key": _text,
    "tls_verify": read_truth,
}
"""How each option is read."""
