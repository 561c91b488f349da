"""What the system's errors mean to a store."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvcache.stores.errors import StoreError, StoreFullError, StoreReadOnlyError, StoreUnavailableError

__all__ = ["is_read_only", "translated"]

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
