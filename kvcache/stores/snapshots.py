"""Whole pages into a store and out of it."""

from __future__ import annotations

import contextlib

import numpy as np

from kvcache.stores.errors import SnapshotCorrupt, StoreError, StoreValueError
from kvcache.stores.page import ALIGNMENT, SerializedSnapshot, pack, unpack
from kvcache.stores.protocol import SnapshotStore

__all__ = ["get_page", "put_page"]


def put_page(store: SnapshotStore, key: str, page: SerializedSnapshot) -> bool:
    """``store.put`` of the page's bytes; the arrays are not copied before the store does."""
    return store.put(key, pack(page))


def get_page(store: SnapshotStore, key: str) -> SerializedSnapshot | None:
    """The page of ``key``, in memory of its own, its arrays aligned to 64 bytes from the first; None: a miss.

    Raises SnapshotCorrupt where the entry is damaged or no page; it is then dropped.
    """
    (found,) = store.stat([key])
    if found is None:
        return None
    buffer = _aligned(found.nbytes)
    try:
        if not store.get_into(key, buffer):
            return None
    except StoreValueError:
        return None  # another entry of another size has taken its place in between
    try:
        return unpack(buffer)
    except SnapshotCorrupt:
        with contextlib.suppress(StoreError):
            store.delete(key)
        raise


def _aligned(nbytes: int) -> np.ndarray:
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + nbytes]
