"""Snapshots of an HFCache, to restore it or another cache of the model, or to store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import ml
from kvcache import Snapshot, deserialize, serialize
from kvcache.integrations.transformers.bridge import dtype_of, torch_dtype
from kvcache.stores import SerializedSnapshot, SnapshotCorruptError, SnapshotStore, put_snapshot

__all__ = ["HFSnapshot", "like_of", "load", "save"]


@dataclass(frozen=True, slots=True, eq=False)
class HFSnapshot:
    """The rows of an HFCache at ``length`` tokens. ``rows`` are snapshots of our caches, one per row.

    K and V are not copied while the cache has room for them: see ``kvcache.snapshots.snapshot``.
    """

    length: int
    rows: tuple[Snapshot, ...]
    like: torch.Tensor
    """An empty tensor with the dtype and on the device of the model's keys."""
    layers: int
    """The number of the model's layers."""
    removed: int = 0
    """Tokens that ``HFCache.remove`` took from the middle."""

    def __repr__(self) -> str:
        return f"<HFSnapshot, rows: {len(self.rows)}, tokens of each: {self.length}, layers: {self.layers}>"

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)


def save(store: SnapshotStore, key: str, backend: ml.Backend, snapshot: HFSnapshot) -> bool:
    """Store a snapshot as one entry; False if the key is already stored."""
    arrays: dict[str, Any] = {}
    metas: list[Mapping[str, Any]] = []
    for i, row in enumerate(snapshot.rows):
        serialized = serialize(backend, row)
        arrays.update({f"{i}:{name}": array for name, array in serialized.arrays.items()})
        metas.append(dict(serialized.meta))
    meta = {
        "length": snapshot.length, "activations": dtype_of(snapshot.like.dtype).name, "rows": metas,
        "layers": snapshot.layers, "removed": snapshot.removed,
    }  # fmt: skip
    return put_snapshot(store, key, SerializedSnapshot(meta, arrays))


def like_of(serialized: SerializedSnapshot, device: torch.device) -> torch.Tensor:
    """An empty tensor with the dtype of the model's keys. Raises SnapshotCorruptError for other snapshots."""
    try:
        return torch.empty(0, dtype=torch_dtype(ml.DType[serialized.meta["activations"]]), device=device)
    except (KeyError, TypeError) as error:
        raise SnapshotCorruptError(f"HFCache.load: not what HFCache.save stored ({error!r})") from error


def load(
    serialized: SerializedSnapshot, backend: ml.Backend, device: torch.device, layers: int
) -> HFSnapshot:
    """The snapshot that ``save`` stored. Raises SnapshotCorruptError for other snapshots."""
    like = like_of(serialized, device)
    try:
        rows = []
        for i, meta in enumerate(serialized.meta["rows"]):
            named = serialized.arrays.items()
            own = {name.split(":", 1)[1]: a for name, a in named if name.startswith(f"{i}:")}
            rows.append(deserialize(backend, SerializedSnapshot(meta, own)))
        removed = int(serialized.meta.get("removed", 0))  # earlier files do not say
        return HFSnapshot(int(serialized.meta["length"]), tuple(rows), like, layers, removed)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise SnapshotCorruptError(f"HFCache.load: not what HFCache.save stored ({error!r})") from error
