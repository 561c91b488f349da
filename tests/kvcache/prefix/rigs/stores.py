"""Stores that fail, are slow or shut, and a way to host memory that is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvcache.stores import MemoryStore, SnapshotStore, StoreUnavailableError
from kvcache.testing.rigs.protocol import InjectedError, Plan

from .conversing import LONG, Talk

THREAD = "kvcache-offload"
CALLS = ("put", "stat", "get_into", "prefix", "delete")


def stored(talk: Talk, *prompts: Any, cache: str = "causal", store: Any = None, **whose: Any) -> Any:
    """A store (``store``, or one in memory) that has the prompts (LONG), of which nothing else is left."""
    store = store or MemoryStore()
    r = talk(cache, tiers=[store])
    for prompt in prompts or [LONG]:
        r.keep(prompt, **whose)
    r.prefix.close()
    return store


def _failing(name: str) -> Callable[..., Any]:
    def call(self: FlakyStore, *arguments: Any) -> Any:
        self.calls += 1
        if name in self.failing or (self.every and self.calls % self.every == 0):
            raise self.error(f"{name}: told to fail")
        return getattr(MemoryStore, name)(self, *arguments)

    return call


class FlakyStore(MemoryStore):
    """A store in memory that fails when told to: in the calls of ``failing``, or in every ``every``-th."""

    def __init__(self, budget: int | None = None) -> None:
        super().__init__(budget)
        self.failing: frozenset[str] = frozenset()
        self.every = self.calls = 0
        self.error: type[Exception] = StoreUnavailableError

    put, stat, get_into, prefix, delete = map(_failing, CALLS)


class SlowStore(MemoryStore):
    """Takes its time, and notes how many bytes wait meanwhile; writes nothing while its gate is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.look: Callable[[], int] = int
        self.waited: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def put(self, key: str, parts: Sequence[Any]) -> bool:
        assert self.gate.wait(60)
        time.sleep(0.002)
        self.waited.append(self.look())
        return super().put(key, parts)


class PlainStore:
    """Another store with what every store has, and nothing besides."""

    def __init__(self, store: SnapshotStore) -> None:
        self.put, self.stat, self.get_into = store.put, store.stat, store.get_into
        self.prefix, self.delete, self.close = store.prefix, store.delete, store.close


class GatedStore(PlainStore):
    """A store whose reading waits at a gate, and which notes who reads what; ``broken`` says what fails."""

    def __init__(self, store: SnapshotStore) -> None:
        super().__init__(store)
        self.store = store
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.broken: Callable[[str], bool] = lambda key: False
        self.error: Exception = StoreUnavailableError("told to fail")
        self.look: Callable[[], object] = int
        self.read: list[str] = []
        self.threads: list[str] = []
        """Of all calls that read or look up, but those of who writes."""
        self.stat, self.prefix, self.get_into = self._stat, self._prefix, self._get_into

    def _note(self) -> None:
        name = threading.current_thread().name
        self.threads += [name] if name != "kvcache-store-write" else []

    def _stat(self, keys: Sequence[str]) -> Any:
        self._note()
        return self.store.stat(keys)

    def _prefix(self, keys: Sequence[str]) -> int:
        self._note()
        return self.store.prefix(keys)

    def _get_into(self, key: str, buffer: Any) -> bool:
        self._note()
        self.entered.set()
        assert self.gate.wait(60)
        if self.broken(key):
            raise self.error
        self.read.append(key)
        self.look()
        return self.store.get_into(key, buffer)


class Clock:
    """A time that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class LinkedStore(PlainStore):
    """A store at the end of a link: looking up takes ``latency`` seconds of the clock, each byte its time."""

    def __init__(self, store: SnapshotStore, clock: Clock, latency: float, bytes_per_second: float) -> None:
        super().__init__(store)
        self.store, self.clock = store, clock
        self.latency, self.bytes_per_second = latency, bytes_per_second
        self.looked = 0
        self.read: list[str] = []
        """The keys of all entries that were read."""
        self.stat, self.prefix, self.get_into = self._stat, self._prefix, self._get_into

    def _stat(self, keys: Sequence[str]) -> Any:
        self.looked += 1
        self.clock.now += self.latency
        return self.store.stat(keys)

    def _prefix(self, keys: Sequence[str]) -> int:
        self.looked += 1
        self.clock.now += self.latency
        return self.store.prefix(keys)

    def _get_into(self, key: str, buffer: Any) -> bool:
        self.read.append(key)
        self.clock.now += len(memoryview(buffer).cast("B")) / self.bytes_per_second
        return self.store.get_into(key, buffer)


class Way(Plan):
    """The way to host memory: it may be shut, slow or broken, and notes who takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.seconds = 0.0
        self.broken = 0
        """How many more copies fail."""
        self.taken: list[str] = []
        self.sizes: dict[str, list[int]] = {}
        """Of what each thread took."""
        self.look: Callable[[], int] = int
        self.waiting: list[int] = []

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        if name != "to_numpy":
            return super().run(name, call)
        self.taken.append(threading.current_thread().name)
        if self.taken[-1] == THREAD:
            assert self.gate.wait(timeout=60)
            time.sleep(self.seconds)
            self.waiting.append(self.look())
            if self.broken:
                self.broken -= 1
                raise InjectedError("to_numpy: the way is broken")
        found = call()
        self.sizes.setdefault(self.taken[-1], []).append(found.size)
        return found
