"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re

import numpy as np

from kvcache.cache import InvalidRangeError

__all__ = ["bytes_text", "parse_bytes"]

_SIZE = re.compile(r"\s*(\d{1,18})(?:\.(\d{1,18}))?\s*(?:([kmgt])(i?))?(b?)\s*", re.IGNORECASE | re.ASCII)


def bytes_text(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def parse_bytes(what: str, size: object) -> int:
    """Bytes from a number, or from '1.5GB' (powers of 1000), '1.5 GiB' or '1.5G' (powers of 1024).

    Upper and lower case are the same. Raises InvalidRangeError for anything else, whose message begins with
    ``what``.
    """
    if isinstance(size, str):
        if (found := _SIZE.fullmatch(size)) is not None:
            whole, fraction, prefix, binary, byte = found.groups(default="")
            base = 1000 if byte and not binary else 1024
            unit: int = base ** (" kmgt".index(prefix.lower()) if prefix else 0)
            parts: int = 10 ** len(fraction)
            return int(whole + fraction) * unit // parts
    elif isinstance(size, (int, float, np.integer)) and not isinstance(size, bool) and size >= 0 == size % 1:
        return int(size)
    raise InvalidRangeError(
        f"{what}={size!r}; it must be a number of bytes from 0, or a size such as '500MB' or '512MiB'"
    )
