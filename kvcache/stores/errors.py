"""What a store may raise, and what the system's errors mean to it."""

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


class StoreReadOnlyError(StoreUnavailableError):
    """What the store holds is served, and it takes nothing: its folder or device may only be read."""


class StoreFullError(StoreError, RuntimeError):
    """An entry does not fit, even after everything else has been evicted, or the device is full."""


class SnapshotCorruptError(StoreError, ValueError):
    """What is stored is not what was put: a digest, a size, a manifest or a header does not hold.

    The store has dropped the entry: compute it again.
    """


class StoreValueError(StoreError, ValueError):
    """A key, a buffer, a budget or an address that a store does not take."""


class UnknownModelError(KVCacheError, ValueError):
    """Nothing tells which weights computed K and V, so that entries could be taken for another model's."""


class StoreClosedError(StoreError, ClosedError):
    """The store was closed."""


_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY: Final = {errno.EACCES, errno.EPERM, errno.EROFS}


def is_read_only(error: OSError) -> bool:
    """Whether the system only refuses to change something."""
    return error.errno in _READ_ONLY


@contextlib.contextmanager
def translated(op: str, path: Path) -> Iterator[None]:
    """The system's errors as a store's: StoreFullError, StoreReadOnlyError, else StoreUnavailableError."""
    try:
        yield
    except OSError as error:
        kind: type[StoreError] = StoreFullError if error.errno in _NO_ROOM else StoreUnavailableError
        if error.errno == errno.EROFS:
            kind = StoreReadOnlyError
        raise kind(f"{op}: {path}: {error.strerror or error}") from error
