"""Snapshots of an HFCache, to restore it or another cache of the model, or to store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import ml
from kvcache import Snapshot, bytes_inside, deserialize, serialize, thin_snapshots
from kvcache.integrations.transformers.bridge import dtype_of, torch_dtype
from kvcache.stores import SerializedSnapshot, SnapshotCorruptError, SnapshotStore, put_snapshot

__all__ = ["HFSnapshot", "Interior", "like_of", "load", "save"]


@dataclass(frozen=True, slots=True, eq=False)
class Interior:
    """What windows and states held at ``length`` tokens, where the rows can go back to.

    ``rows``: for each row, snapshots by the number of the cache in ``ModelCaches.tops``. They are copies;
    full attention needs none.
    """

    length: int
    rows: tuple[Mapping[int, Snapshot], ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for row in self.rows for part in row.values())


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
    interior: tuple[Interior, ...] = ()
    """Earlier positions that a cache can go back to, ascending."""

    def __repr__(self) -> str:
        return f"<HFSnapshot, rows: {len(self.rows)}, tokens of each: {self.length}, layers: {self.layers}>"

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows) + sum(one.nbytes for one in self.interior)

    def thinned(self, inside: int | None) -> HFSnapshot:
        """With at most ``inside`` bytes of ``interior`` (None: as ``Session.snapshots``)."""
        sizes, ends = [one.nbytes for one in self.interior], [one.length for one in self.interior]
        limit = sum(map(bytes_inside, self.rows)) if inside is None else inside
        stay = thin_snapshots([*ends, self.length], sizes, limit)
        return replace(self, interior=tuple(self.interior[i] for i in stay))


def save(store: SnapshotStore, key: str, backend: ml.Backend, snapshot: HFSnapshot) -> bool:
    """Store a snapshot as one entry; False if the key is already stored."""
    arrays: dict[str, Any] = {}

    def add(label: str, part: Snapshot) -> Mapping[str, Any]:
        serialized = serialize(backend, part)
        arrays.update({f"{label}:{name}": array for name, array in serialized.arrays.items()})
        return dict(serialized.meta)

    interior = [
        {"length": one.length, "rows": [
            {str(n): add(f"{one.length}.{i}.{n}", part) for n, part in row.items()}
            for i, row in enumerate(one.rows)
        ]}
        for one in snapshot.interior
    ]  # fmt: skip
    meta = {
        "length": snapshot.length, "activations": dtype_of(snapshot.like.dtype).name,
        "rows": [add(str(i), row) for i, row in enumerate(snapshot.rows)],
        "layers": snapshot.layers, "removed": snapshot.removed, "interior": interior,
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
    arrays: dict[str, dict[str, Any]] = {}

    def part(label: str, meta: Mapping[str, Any]) -> Snapshot:
        return deserialize(backend, SerializedSnapshot(meta, arrays.get(label, {})))

    try:
        for name, array in serialized.arrays.items():
            label, _, own = name.partition(":")
            arrays.setdefault(label, {})[own] = array
        rows = tuple(part(str(i), meta) for i, meta in enumerate(serialized.meta["rows"]))
        # Earlier files say neither of these.
        removed, inside = int(serialized.meta.get("removed", 0)), serialized.meta.get("interior", ())
        interior = tuple(
            Interior(length, tuple(
                {int(n): part(f"{length}.{i}.{n}", meta) for n, meta in row.items()}
                for i, row in enumerate(one["rows"])
            ))
            for one in inside if (length := int(one["length"]))
        )  # fmt: skip
        return HFSnapshot(int(serialized.meta["length"]), rows, like, layers, removed, interior)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise SnapshotCorruptError(f"HFCache.load: not what HFCache.save stored ({error!r})") from error
