"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re

import numpy as np

from kvcache.cache import InvalidRangeError

__all__ = ["bytes_text", "parse_bytes"]

_UNITS = {"": 1, **{f"{prefix}{end}": 1 << 10 * power for power, prefix in enumerate("KMGT", 1)
                    for end in ("", "IB")}, "B": 1}  # fmt: skip


def bytes_text(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def parse_bytes(what: str, size: object) -> int:
    """Bytes from a number, or from '512MiB', '1.5 GiB', '64K': multiples of 1024. Else InvalidRangeError."""
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        if found is not None and found[2].upper() in _UNITS:
            return int(float(found[1]) * _UNITS[found[2].upper()])
    elif isinstance(size, (int, float, np.integer)) and not isinstance(size, bool) and size >= 0 == size % 1:
        return int(size)
    raise InvalidRangeError(
        f"{what}={size!r}; it must be a number of bytes from 0, or a size such as '512MiB'"
    )
