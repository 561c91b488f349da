"""The shipped suite of stores, on the two that are built in, and on broken ones, which have to fail."""

from __future__ import annotations

from pathlib import Path

from kvcache.stores import FileStore, MemoryStore, SnapshotStore
from kvcache.testing import StoreTests


class TestMemoryStore(StoreTests):
    def make(self, folder: Path, budget: int | None = None) -> SnapshotStore:
        return MemoryStore(budget)


class TestFileStore(StoreTests):
    persistent = True
    durable = False

    def make(self, folder: Path, budget: int | None = None) -> SnapshotStore:
        return FileStore(folder / "store", budget, durable=self.durable)

    def damage(self, store: SnapshotStore, folder: Path, key: str) -> bool:
        path = folder / "store" / "pages" / f"{key}.safetensors"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data)
        return True
