"""What an HFCache held, kept aside: to come back to, to give to another cache of the model, or to store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import ml
from kvcache import RecurrentSnapshot
from kvcache.integrations.transformers.bridge import dtype_of, torch_dtype
from kvcache.integrations.transformers.kinds import Family
from kvcache.snapshots.serialize import deserialize, serialize
from kvcache.snapshots.snapshot import Snapshot, WrapperSnapshot
from kvcache.stores import SerializedSnapshot, SnapshotCorrupt, SnapshotStore, pack, unpack

__all__ = ["HFSnapshot", "like_of", "load", "prepare_states", "read_entry", "save"]


@dataclass(frozen=True, slots=True, eq=False)
class HFSnapshot:
    """The rows of an HFCache at ``length`` tokens. ``rows`` are snapshots of our caches, one per row.

    Attention is not copied while the cache has room for it: see ``kvcache.snapshots.snapshot``.
    """

    length: int
    rows: tuple[Snapshot, ...]
    like: torch.Tensor
    """An empty tensor with the dtype and on the device of the model's keys."""

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)


def prepare_states(family: Family, snapshot: Snapshot) -> None:
    """Tell a recurrent cache that has seen no states yet what shapes are to come."""
    cache = family.recurrent
    if cache is None:
        return
    parts = snapshot.parts if isinstance(snapshot, WrapperSnapshot) else (snapshot,)
    for part in parts:
        for (kind, _), tensor in part.states.items() if isinstance(part, RecurrentSnapshot) else ():
            if kind == "conv":
                cache.conv_shape = cache.conv_shape or tuple(tensor.shape[1:])
            else:
                cache.state_shape = cache.state_shape or tuple(tensor.shape[1:])


def save(store: SnapshotStore, key: str, backend: ml.Backend, snapshot: HFSnapshot) -> bool:
    """Store a snapshot as one entry; False where the key is there already."""
    arrays: dict[str, Any] = {}
    metas: list[Mapping[str, Any]] = []
    for i, row in enumerate(snapshot.rows):
        page = serialize(backend, row)
        arrays.update({f"{i}:{name}": array for name, array in page.arrays.items()})
        metas.append(dict(page.meta))
    meta = {"length": snapshot.length, "activations": dtype_of(snapshot.like.dtype).name, "rows": metas}
    return store.put(key, pack(SerializedSnapshot(meta, arrays)))


def read_entry(store: SnapshotStore, key: str) -> SerializedSnapshot | None:
    """The page of an entry; None where there is none."""
    (stat,) = store.stat([key])
    if stat is None:
        return None
    data = bytearray(stat.nbytes)
    return unpack(data) if store.get_into(key, data) else None


def like_of(page: SerializedSnapshot, device: torch.device) -> torch.Tensor:
    """An empty tensor with the dtype of the model's keys. SnapshotCorrupt for another page."""
    try:
        return torch.empty(0, dtype=torch_dtype(ml.DType[page.meta["activations"]]), device=device)
    except (KeyError, TypeError) as error:
        raise SnapshotCorrupt(f"HFCache.load: not what HFCache.save stored ({error!r})") from error


def load(page: SerializedSnapshot, backend: ml.Backend, device: torch.device) -> HFSnapshot:
    """The snapshot that :func:`save` stored. SnapshotCorrupt for another page."""
    like = like_of(page, device)
    try:
        rows = []
        for i, meta in enumerate(page.meta["rows"]):
            own = {name.split(":", 1)[1]: a for name, a in page.arrays.items() if name.startswith(f"{i}:")}
            rows.append(deserialize(backend, SerializedSnapshot(meta, own)))
        return HFSnapshot(int(page.meta["length"]), tuple(rows), like)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise SnapshotCorrupt(f"HFCache.load: not what HFCache.save stored ({error!r})") from error
