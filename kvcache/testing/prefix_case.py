"""What the tests of sessions stand on: rigs of any cache, and stores that are slow or shut."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

import ml
from kvcache.stores import MemoryStore, SnapshotStore
from kvcache.testing.conversing import CACHES, DIVISIBLE, ConversationSetup, Rig
from kvcache.testing.harness import CacheCase

__all__ = [
    "CALLS", "LONG", "WHOLE", "GatedStore", "PlainStore", "PrefixCase", "SlowStore", "Talk", "every_cache",
]  # fmt: skip

Talk = Callable[..., Rig]
WHOLE = tuple(name for name in CACHES if name not in DIVISIBLE)
every_cache = pytest.mark.parametrize("cache", list(CACHES))
LONG = list(range(10, 30))
"""Twenty tokens. Whole content is kept at 8, 16, 19 and 20 of them."""
CALLS = ("put", "stat", "get_into", "prefix", "delete")


class SlowStore(MemoryStore):
    """Takes its time, and notes how many bytes wait meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.look: Callable[[], int] = int
        self.waited: list[int] = []

    def put(self, key: str, parts: Sequence[Any]) -> bool:
        time.sleep(0.002)
        self.waited.append(self.look())
        return super().put(key, parts)


class GatedStore(MemoryStore):
    """Writes nothing before its gate is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def put(self, key: str, parts: Sequence[Any]) -> bool:
        self.gate.wait()
        return super().put(key, parts)


class PlainStore:
    """Another store with what every store has, and nothing besides."""

    def __init__(self, store: SnapshotStore) -> None:
        self.put, self.stat, self.get_into = store.put, store.stat, store.get_into
        self.prefix, self.delete, self.close = store.prefix, store.delete, store.close


class PrefixCase(CacheCase):
    @pytest.fixture
    def talk(self, backend: ml.Backend) -> Talk:
        """``talk(cache="causal", budget, tiers, **changes of the setup or options)``: a rig."""

        def make(cache: str = "causal", budget: int | None = None, tiers: Any = (), **changes: Any) -> Rig:
            names = ("salt", "identity", "backlog", "in_flight")
            options = {name: changes.pop(name) for name in names if name in changes}
            return Rig(replace(ConversationSetup(cache), **changes), backend, budget, tiers, **options)

        return make
