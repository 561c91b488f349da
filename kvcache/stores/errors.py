"""The errors that stores raise, and how system errors are translated to them."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvcache.cache import ClosedError, KVCacheError

__all__ = [
    "SnapshotCorruptError",
    "StoreClosedError",
    "StoreError",
    "StoreFullError",
    "StoreReadOnlyError",
    "StoreUnavailableError",
    "StoreValueError",
    "UnknownModelError",
    "is_read_only",
    "translated",
]


class StoreError(KVCacheError):
    """Base of all errors raised by stores. A call that raises leaves no half-written entry."""


class StoreUnavailableError(StoreError, RuntimeError):
    """The store cannot be reached or may not be used: no permission, a vanished folder, a missing package."""

    lasting = False
    """Whether the store must be opened again: to ask it later is of no use."""


class StoreReadOnlyError(StoreUnavailableError):
    """The store can be read but not written: its folder or device is read-only."""


class StoreFullError(StoreError, RuntimeError):
    """An entry does not fit, even after everything else has been evicted, or the device is full."""


class SnapshotCorruptError(StoreError, ValueError):
    """The stored data is not what was put: a digest, a size, a manifest or a header is wrong.

    The store has dropped the entry; compute its content again.
    """


class StoreValueError(StoreError, ValueError):
    """A key, a buffer, a budget or an address that a store does not accept."""


class UnknownModelError(KVCacheError, ValueError):
    """It is unknown which weights computed K and V, so that entries could be mistaken for another model's."""


class StoreClosedError(StoreError, ClosedError):
    """The store was closed."""


_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY: Final = {errno.EACCES, errno.EPERM, errno.EROFS}


def is_read_only(error: OSError) -> bool:
    """Whether the error only means that something may not be changed."""
    return error.errno in _READ_ONLY


@contextlib.contextmanager
def translated(op: str, path: Path, remedy: str = "") -> Iterator[None]:
    """Translates system errors: StoreFullError, StoreReadOnlyError, otherwise StoreUnavailableError, whose
    message ends with ``remedy``.
    """
    try:
        yield
    except OSError as error:
        kind: type[StoreError] = StoreFullError if error.errno in _NO_ROOM else StoreUnavailableError
        if error.errno == errno.EROFS:
            kind = StoreReadOnlyError
        advice = f"; {remedy}" if remedy and kind is StoreUnavailableError else ""
        raise kind(f"{op}: {path}: {error.strerror or error}{advice}") from error
