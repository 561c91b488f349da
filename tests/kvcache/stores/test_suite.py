"""The shipped suite on each store of ours, and the same calls by several openers of one place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvcache.stores import MemoryStore, SnapshotStore
from kvcache.testing import StoreTests
from kvcache.testing.stores import UNIT, agrees

from .stores_rig import MIB, Place, native, places, pool, posix, server

__all__ = ["native", "places", "pool", "server"]


class TestMemoryStore(StoreTests):
    def make(self, folder: Path, budget: int | None = None) -> SnapshotStore:
        return MemoryStore(budget)


class PlaceTests(StoreTests):
    persistent = True
    budgeted = False
    kind: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _place(self, places: Callable[[str], Place]) -> None:
        self.place = places(self.kind)

    def make(self, folder: Path, budget: int | None = None) -> SnapshotStore:
        return self.place.open(**self.options, **({"budget": budget} if self.budgeted else {}))  # type: ignore[no-any-return]

    def damage(self, store: SnapshotStore, folder: Path, key: str) -> bool:
        self.place.change(store, key, lambda data: data.__setitem__(500, data[500] ^ 0x10))
        return True

    @pytest.mark.parametrize("seed", range(2))
    def test_calls_of_several_openers_agree_with_a_plain_dictionary(self, tmp_path: Path, seed: int) -> None:
        stores = [self.make(tmp_path, 4 * UNIT) for _ in range(3)]
        agrees(stores, 4 * UNIT if self.budgeted else 1 << 40, seed, 200)


@posix
class TestFileStore(PlaceTests):
    kind = "file"
    budgeted = True


class TestValkeyStore(PlaceTests):
    """An entry that is big has more than a hundred chunks here."""

    kind = "valkey"


class TestMooncakeStore(PlaceTests):
    """Nearly every entry passes in several pieces, and calls wait for one another's buffer."""

    kind = "mooncake"
    options: ClassVar[dict[str, Any]] = {"staging": "64KiB", "lanes": 1}
    big = MIB + 3
