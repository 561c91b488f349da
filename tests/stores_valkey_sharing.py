"""Eight processes that write and eight that read one server. Run by test_stores_valkey_crash.py as a program.

It imports once and forks. Each writer has data of its own for each key, so that a mixture is noticed.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvcache.stores import StoreFull, ValkeyStore
from kvcache.stores.valkey import store as store_module
from kvcache.stores.valkey.entries import Entries
from kvcache.stores.valkey.link import Command
from kvcache.stores.valkey.manifest import CHUNK, RemoteManifest
from kvcache.stores.valkey.replies import integer, status, status_or_nothing

WRITERS = READERS = 8
KEYS = [f"s{i}" for i in range(24)]
SIZES = [1000, 300_000, CHUNK + 1, 90_000]


def data_of(key: str, writer: int) -> np.ndarray:
    """Its first byte is the writer's number; every 8 bytes say whose they are."""
    size = SIZES[int(key[1:]) % len(SIZES)]
    words = np.arange(size // 8 + 1, dtype=np.uint64) * 1000 + int(key[1:]) * 10 + writer
    found = words.view(np.uint8)[:size].copy()
    found[0] = writer
    return found


def check(key: str, data: np.ndarray) -> int:
    """Whose entry it is; AssertionError where it is nobody's."""
    writer = int(data[0])
    assert writer < WRITERS, f"{key}: no writer {writer}"
    assert np.array_equal(data, data_of(key, writer)), f"{key} is torn"
    return writer


def read(store: ValkeyStore, key: str) -> int | None:
    """Whose entry there is of a key."""
    (found,) = store.stat([key])
    if found is None:
        return None
    buffer = np.zeros(found.nbytes, np.uint8)
    return check(key, buffer) if store.get_into(key, buffer) else None


def write(url: str, writer: int, report: Path, deletes: bool) -> None:
    rng = random.Random(writer)
    keys = rng.sample(KEYS, len(KEYS)) if not deletes else rng.choices(KEYS, k=2 * len(KEYS))
    with ValkeyStore(url, connections=2, timeout=60) as store:
        for key in keys:
            try:
                if store.put(key, [data_of(key, writer)]):
                    with report.open("a", encoding="ascii") as file:
                        file.write(f"{key} {writer}\n")
            except StoreFull:
                pass
            if deletes and rng.random() < 0.3:
                store.delete(rng.choice(KEYS))
        assert store.usage().dropped == 0


def look(url: str, seed: int) -> None:
    rng = random.Random(100 + seed)
    hits = 0
    with ValkeyStore(url, connections=2, timeout=60) as store:
        for _ in range(60):
            hits += read(store, rng.choice(KEYS)) is not None
            assert 0 <= store.prefix(KEYS) <= len(KEYS)
        assert store.usage().dropped == 0
    print(f"{hits} hits")


def child(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def at_once(url: str, deletes: bool) -> list[tuple[str, int]]:
    """All sixteen together; what was acknowledged to whom."""
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / str(i) for i in range(WRITERS)]
        pids = [child(lambda i=i: write(url, i, reports[i], deletes)) for i in range(WRITERS)]
        pids += [child(lambda i=i: look(url, i)) for i in range(READERS)]
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        assert not any(statuses), statuses
        print(f"{len(pids)} processes")
        lines = [line.split() for path in reports if path.exists() for line in path.read_text().splitlines()]
        return [(key, int(writer)) for key, writer in lines]


def sharing(url: str) -> None:
    """Each key is acknowledged to one writer, and is that writer's in the end; nothing else is there."""
    acknowledged = at_once(url, deletes=False)
    assert Counter(key for key, _ in acknowledged) == Counter(KEYS)
    with ValkeyStore(url) as store:
        assert {key: read(store, key) for key in KEYS} == dict(acknowledged)
        nothing_else(store)


def deleting(url: str) -> None:
    """What is there was acknowledged, and is whole; and it can all be deleted, to the last value."""
    acknowledged = set(at_once(url, deletes=True))
    with ValkeyStore(url) as store:
        there = {(key, writer) for key in KEYS if (writer := read(store, key)) is not None}
        assert there <= acknowledged, there - acknowledged
        nothing_else(store)
        for key in KEYS:
            store.delete(key)
        nothing_else(store)


def evicting(url: str) -> None:
    acknowledged = set(at_once(url, deletes=True))
    with ValkeyStore(url) as store:
        assert {(key, writer) for key in KEYS if (writer := read(store, key)) is not None} <= acknowledged
        assert store.usage().dropped == 0


def nothing_else(store: ValkeyStore) -> None:
    """As many values on the server as the entries that are whole need."""
    found = [stat.nbytes for stat in store.stat(KEYS) if stat is not None]
    with store._wire("test") as wire:
        (count,) = wire.ask(Command(["DBSIZE"], integer))
    assert count == sum(1 + -(-nbytes // CHUNK) for nbytes in found), (count, found)


def _write_over() -> None:
    def publish(self: Entries, wire: Any, manifest: RemoteManifest) -> tuple[bool, int]:
        wire.ask(Command(["SET", self.name(manifest.key), manifest.encoded()], status))
        return True, manifest.count

    Entries.publish = publish  # type: ignore[method-assign]


def _share_a_writer_id() -> None:
    def chunks(self: Entries, manifest: RemoteManifest) -> Iterator[bytes]:
        return (f"kvcache:xxh3:c:{manifest.key}:{i}".encode() for i in range(manifest.count))

    Entries.chunks = chunks  # type: ignore[method-assign]


def _manifest_first() -> None:
    send = store_module.ValkeyStore._send

    def early(self: ValkeyStore, wire: Any, manifest: RemoteManifest, views: Any) -> RemoteManifest:
        manifest = send(self, wire, manifest, views)
        self._entries.discard(wire, manifest)
        words = ["SET", self._entries.name(manifest.key), manifest.encoded(), "NX"]
        wire.ask(Command(words, status_or_nothing))
        return manifest

    store_module.ValkeyStore._send = early  # type: ignore[method-assign]


BUGS = {"write over": _write_over, "share a writer id": _share_a_writer_id, "manifest first": _manifest_first}
"""What the scenario has to notice."""


def main() -> None:
    scenario, url, bug = sys.argv[1:]
    BUGS.get(bug, lambda: None)()
    {"sharing": sharing, "deleting": deleting, "evicting": evicting}[scenario](url)


if __name__ == "__main__":
    main()
