"""Sizes as people write them."""

from __future__ import annotations

import re

from kvcache.stores.errors import StoreValueError

__all__ = ["parse_bytes"]

_SIZE = re.compile(r"(\d{1,18})(?:\.(\d{1,6}))?\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(size: int | str | None) -> int | None:
    """Bytes of 4096, "4096", "1.5GB" (powers of 1000) or "10GiB" (powers of 1024); None stays None.

    Raises StoreValueError for anything else.
    """
    if size is None or isinstance(size, int):
        return size
    match = _SIZE.fullmatch(str(size).strip())
    if match is None:
        raise StoreValueError(f"the size {size!r}; write 4096, 500MB or 10GiB")
    whole, fraction, power, binary = match.groups()
    unit = (1024 if binary else 1000) ** _POWERS[power.lower()] if power else 1
    digits = int(whole + (fraction or ""))
    return int(digits * unit // 10 ** len(fraction or ""))
