"""What a store may raise."""

from __future__ import annotations

from kvcache.cache import ClosedError, KVCacheError

__all__ = [
    "SnapshotCorruptError",
    "StoreClosedError",
    "StoreError",
    "StoreFullError",
    "StoreReadOnlyError",
    "StoreUnavailableError",
    "StoreValueError",
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


class StoreClosedError(StoreError, ClosedError):
    """The store was closed."""
