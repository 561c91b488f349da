"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

import numpy as np

from kvcache.cache import InvalidRangeError

__all__ = ["parse_bytes"]

_SIZE = re.compile(r"\s*(\d{1,18})(?:\.(\d{1,18}))?\s*(?:([kmgt])(i?))?(b?)\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(size: object, what: str) -> int:
    """Bytes from a number, or from '1.5GB' (powers of 1000), '1.5 GiB' or '1.5G' (powers of 1024).

    Case does not matter. Raises InvalidRangeError for anything else; the message begins with ``what``.
    """
    if isinstance(size, str):
        if (match := _SIZE.fullmatch(size)) is not None:
            whole, fraction, prefix, binary, byte = match.groups(default="")
            base = 1000 if byte and not binary else 1024
            unit: int = base ** (" kmgt".index(prefix.lower()) if prefix else 0)
            parts: int = 10 ** len(fraction)
            return int(whole + fraction) * unit // parts
    elif isinstance(size, (int, float, np.integer)) and not isinstance(size, bool) and size >= 0 == size % 1:
        return int(size)
    raise InvalidRangeError(
        f"{what}={size!r}; it must be a number of bytes from 0, or a size such as '500MB' or '512MiB'"
    )
