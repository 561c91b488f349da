"""Whole snapshots into a store and out of it."""

from __future__ import annotations

import contextlib

import numpy as np

from kvcache.stores.errors import SnapshotCorruptError, StoreError, StoreValueError
from kvcache.stores.protocol import SnapshotStore
from kvcache.stores.serialized_snapshot import ALIGNMENT, SerializedSnapshot, pack, unpack

__all__ = ["get_snapshot", "put_snapshot"]


def put_snapshot(store: SnapshotStore, key: str, snapshot: SerializedSnapshot) -> bool:
    """``store.put`` of the snapshot's bytes; the arrays are not copied before the store does."""
    return store.put(key, pack(snapshot))


def get_snapshot(store: SnapshotStore, key: str) -> SerializedSnapshot | None:
    """The snapshot of ``key``, in memory of its own; None: a miss.

    The first array is aligned to 64 bytes. Raises SnapshotCorruptError where the entry is damaged or is no
    serialized snapshot; the entry is then dropped.
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
    except SnapshotCorruptError:
        with contextlib.suppress(StoreError):
            store.delete(key)
        raise


def _aligned(nbytes: int) -> np.ndarray:
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + nbytes]
