from pathlib import Path

import kvcache_store_sqlite

from kvcache.stores import SnapshotStore
from kvcache.testing import StoreTests


class TestSqliteStore(StoreTests):
    persistent = True

    def make(self, folder: Path, budget: int | None = None) -> SnapshotStore:
        return kvcache_store_sqlite.SqliteStore(str(folder / "kv.db"), budget)

    def damage(self, store: SnapshotStore, folder: Path, key: str) -> bool:
        store._db.execute("update entries set data = zeroblob(nbytes) where key = ?", [key])
        return True
