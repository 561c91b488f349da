"""Sizes in bytes, as people read them."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """1536 -> '1.5 KiB'.

    >>> from kvcache import bytes_text
    >>> bytes_text(5 * 2**20)
    '5.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
