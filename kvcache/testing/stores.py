"""The suite that checks a store against its protocol.

::

    from kvcache.testing import StoreTests

    class TestMine(StoreTests):
        persistent = True          # make() with the same folder finds the existing entries

        def make(self, folder, budget=None):
            return MineStore(folder / "data", budget)

Every store gets a folder of its test; a store elsewhere derives names from it.
"""

from __future__ import annotations

import random
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

import ml
from kvcache.stores import (
    SnapshotCorruptError,
    SnapshotStore,
    StoreClosedError,
    StoreFullError,
    StoreValueError,
)
from kvcache.stores.protocol import AdvisedStore, Reader, ReadingStore

__all__ = ["CALLS", "HOSTILE_KEYS", "UNIT", "StoreTests", "agrees", "content", "fill", "present", "read"]

Open = Callable[..., SnapshotStore]

HOSTILE_KEYS: tuple[Any, ...] = (
    "", ".", "..", "../out", "a/b", "/etc/passwd", "a\\b", "a\0b", "a b", "a.json", "-a", "_a", "A", "a\n",
    "ä", "%2e%2e", "~", "*", "a" * 129, b"a", None, 3,
)  # fmt: skip
"""Keys that every store must refuse."""

UNIT = 1000

CALLS: dict[str, Callable[[SnapshotStore, Any], object]] = {
    "put": lambda store, key: store.put(key, [b"x"]),
    "stat": lambda store, key: store.stat(["b", key]),
    "get_into": lambda store, key: store.get_into(key, bytearray(UNIT)),
    "prefix": lambda store, key: store.prefix(["b", key]),
    "delete": lambda store, key: store.delete(key),
}
"""Each call of the protocol, made with one key."""

EVICTIONS: dict[str, tuple[Callable[[SnapshotStore], object], str]] = {
    "the budget is filled to the last byte": (lambda store: None, "abcd"),
    "the first byte beyond evicts the oldest": (lambda store: store.put("e", [b"x"]), "bcde"),
    "as many go as make room": (lambda store: store.put("e", [bytes(2 * UNIT + 1)]), "de"),
    "an empty entry evicts nothing": (lambda store: store.put("e", []), "abcde"),
    "a key that is there evicts nothing": (lambda store: store.put("b", [bytes(9 * UNIT)]), "abcd"),
    "reading is use": (lambda store: (read(store, "a"), fill(store, "ef")), "adef"),
    "stat is no use": (lambda store: (store.stat(["a"]), fill(store, "e")), "bcde"),
    "of a chain the deepest goes first": (lambda store: (store.prefix([*"abcx"]), fill(store, "ef")), "abef"),
    "behind a hole is no use": (lambda store: (store.prefix(["b", "x", "a"]), fill(store, "e")), "bcde"),
    "deleting gives room": (lambda store: (store.delete("c"), fill(store, "e")), "abde"),
}
"""An action on a store with room for four that has a, b, c and d; the entries left afterwards."""

PARTS: dict[str, list[Any]] = {
    "one": [b"one"],
    "several": [b"one", b"two", b"three"],
    "every kind of buffer": [
        b"x", bytearray(b"y"), memoryview(b"abcd")[1:3], np.arange(6, dtype=np.float32).reshape(2, 3).data,
        np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4).astype(ml_dtypes.bfloat16), np.array(7),
    ],
    "empty ones": [b"", b"x", np.empty((0, 3), np.float32), b"y", b""],
    "no part": [],
    "nothing but an empty part": [b""],
    "thousands": [bytes([i % 251]) * 7 for i in range(3000)],
}  # fmt: skip


def content(name: str, size: int = UNIT) -> bytes:
    """Bytes that are unique to this name."""
    return np.random.default_rng(zlib.crc32(name.encode())).bytes(size)


def read(store: SnapshotStore, key: str) -> bytes | None:
    """The bytes of a key; None for a miss, including an entry evicted between the two calls."""
    (stat,) = store.stat([key])
    if stat is None:
        return None
    buffer = bytearray(stat.nbytes)
    return bytes(buffer) if store.get_into(key, buffer) else None


def present(store: SnapshotStore, keys: Sequence[str]) -> str:
    """The stored keys among these (single letters)."""
    return "".join(key for key, stat in zip(keys, store.stat(list(keys)), strict=True) if stat is not None)


def fill(store: SnapshotStore, keys: Sequence[str], size: int = UNIT) -> int:
    """Put an entry for each key; returns the total size in bytes."""
    for key in keys:
        assert store.put(key, [content(key, size)])
    return len(keys) * size


class StoreTests:
    """Subclass it, implement ``make``, and declare the store's features."""

    persistent: ClassVar[bool] = False
    """Whether a store opened again for the same folder has the entries of the closed one."""
    budgeted: ClassVar[bool] = True
    """Whether ``make`` respects ``budget``, counted in ``Stat.nbytes``."""
    big: ClassVar[int] = (8 << 20) + 3
    """The size in bytes of the largest entry in the tests."""

    def make(self, folder: Path, budget: int | None = None) -> SnapshotStore:
        """A store for this folder: an empty one, or the existing one if the store is persistent."""
        raise NotImplementedError

    def damage(self, store: SnapshotStore, folder: Path, key: str) -> bool:
        """Flip one stored bit of an entry. Returns False if that is not possible."""
        return False

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Iterator[Open]:
        """``open_store(budget=None)``; all stores are closed at the end."""
        opened: list[SnapshotStore] = []

        def make(budget: int | None = None) -> SnapshotStore:
            opened.append(self.make(tmp_path, budget))
            return opened[-1]

        yield make
        for store in opened:
            store.close()

    @pytest.fixture
    def store(self, open_store: Open) -> SnapshotStore:
        return open_store()

    @pytest.fixture
    def small(self, open_store: Open) -> SnapshotStore:
        """A store with room for four entries of ``UNIT`` bytes."""
        if not self.budgeted:
            pytest.skip("this store declares that it has no budget")
        return open_store(4 * UNIT)

    # Writing.

    @pytest.mark.parametrize("parts", PARTS.values(), ids=list(PARTS))
    def test_parts_are_stored_one_after_another(self, store: SnapshotStore, parts: list[Any]) -> None:
        assert isinstance(store, SnapshotStore)
        assert store.put("a", parts) is True
        assert store.put("a", parts) is False
        expected = [part.tobytes() if hasattr(part, "tobytes") else part for part in parts]
        assert read(store, "a") == b"".join(expected)

    def test_an_entry_may_be_big(self, store: SnapshotStore) -> None:
        first, second = content("a", self.big // 3), content("b", self.big - self.big // 3)
        store.put("a", [first, second])
        assert read(store, "a") == first + second

    def test_what_was_put_and_what_was_read_are_copies(self, store: SnapshotStore) -> None:
        mine, buffer = bytearray(b"before"), bytearray(6)
        store.put("a", [mine])
        mine[:] = b"after!"
        assert store.get_into("a", buffer)
        buffer[:] = b"change"
        assert read(store, "a") == b"before"

    def test_a_key_is_written_once(self, store: SnapshotStore) -> None:
        store.put("a", [b"first"])
        assert store.put("a", [b"second, longer"]) is False
        assert read(store, "a") == b"first"

    def test_a_part_that_is_not_contiguous_is_refused_and_nothing_is_stored(
        self, store: SnapshotStore
    ) -> None:
        with pytest.raises(StoreValueError):
            store.put("a", [b"x", np.zeros((4, 4), np.float32)[:, 1]])
        assert store.stat(["a"]) == [None]

    # Queries.

    def test_stat_answers_in_order(self, store: SnapshotStore) -> None:
        for size, key in enumerate("abc"):
            store.put(key, [content(key, size)])
        stats = store.stat(["c", "x", "a", "b", "c"])
        assert [stat and stat.nbytes for stat in stats] == [2, None, 0, 1, 2]
        assert store.stat([]) == []

    def test_every_kind_of_writable_buffer_is_filled(self, store: SnapshotStore) -> None:
        store.put("a", [content("a", 12)])
        plain, brain = bytearray(12), np.zeros((2, 3), ml_dtypes.bfloat16)
        inside = bytearray(20)
        for buffer in (plain, brain, memoryview(inside)[4:16]):
            assert store.get_into("a", buffer) is True
        assert plain == brain.tobytes() == inside[4:16] == content("a", 12)
        assert inside[:4] == inside[16:] == bytes(4)

    def test_a_buffer_of_another_size_or_a_read_only_one_is_refused(self, store: SnapshotStore) -> None:
        fill(store, "a")
        for size in (0, 999, 1001, 2000):
            with pytest.raises(StoreValueError, match="1000"):
                store.get_into("a", bytearray(size))
        with pytest.raises(StoreValueError, match="read-only"):
            store.get_into("a", bytes(UNIT))  # type: ignore[arg-type]
        assert read(store, "a") == content("a")

    def test_prefix_counts_the_leading_keys_up_to_the_first_hole(self, store: SnapshotStore) -> None:
        fill(store, "abd")
        counts = [store.prefix([*keys]) for keys in ("abcd", "ab", "xab", "")]
        assert counts == [2, 2, 0, 0]

    def test_a_deleted_entry_is_gone_the_others_stay_and_its_key_may_be_put_again(
        self, store: SnapshotStore
    ) -> None:
        fill(store, "abc")
        assert store.delete("b") is True
        assert store.delete("b") is False
        assert present(store, "abc") == "ac"
        assert store.get_into("b", bytearray(UNIT)) is False
        assert store.put("b", [b"another"]) is True
        assert [read(store, key) for key in "abc"] == [content("a"), b"another", content("c")]

    # Keys.

    def test_what_is_no_key_is_refused_by_every_call(self, store: SnapshotStore) -> None:
        for key in HOSTILE_KEYS:
            for call in CALLS.values():
                with pytest.raises(StoreValueError, match="key"):
                    call(store, key)

    @pytest.mark.parametrize("key", ["0", "a" * 128, "a-b_c", "con", f"{0:064x}"])
    def test_every_key_that_is_allowed_works(self, store: SnapshotStore, key: str) -> None:
        assert store.put(key, [b"x"]) is True
        assert read(store, key) == b"x"
        assert store.delete(key) is True

    # Closing.

    def test_every_call_after_close_says_so(self, store: SnapshotStore) -> None:
        fill(store, "a")
        store.close()
        store.close()
        for call in CALLS.values():
            with pytest.raises(StoreClosedError) as raised:
                call(store, "a")
            assert isinstance(raised.value, ml.ClosedError)

    # Budget.

    @pytest.mark.parametrize("case", EVICTIONS)
    def test_eviction(self, small: SnapshotStore, case: str) -> None:
        fill(small, "abcd")
        act, left = EVICTIONS[case]
        act(small)
        assert present(small, "abcdef") == left

    def test_what_exceeds_the_budget_is_refused_and_evicts_nothing(self, small: SnapshotStore) -> None:
        fill(small, "abcd")
        with pytest.raises(StoreFullError, match="4000"):
            small.put("e", [bytes(4 * UNIT), b"x"])
        assert [read(small, key) for key in "abcde"] == [*map(content, "abcd"), None]

    def test_a_budget_of_nothing_holds_what_has_no_bytes(self, open_store: Open) -> None:
        if not self.budgeted:
            pytest.skip("this store declares that it has no budget")
        store = open_store(0)
        assert store.put("a", []) is True
        with pytest.raises(StoreFullError):
            store.put("b", [b"x"])
        assert present(store, "ab") == "a"

    @pytest.mark.parametrize("seed", range(3))
    def test_any_sequence_of_calls_agrees_with_a_plain_dictionary(self, open_store: Open, seed: int) -> None:
        agrees([open_store(4 * UNIT)], 4 * UNIT if self.budgeted else 1 << 40, seed)

    # Damage.

    def test_a_damaged_entry_is_reported_dropped_and_put_again(
        self, store: SnapshotStore, tmp_path: Path
    ) -> None:
        fill(store, "abc")
        if not self.damage(store, tmp_path, "b"):
            pytest.skip("this store does not implement damage")
        with pytest.raises(SnapshotCorruptError, match="b"):
            store.get_into("b", bytearray(UNIT))
        assert present(store, "abc") == "ac"
        assert store.get_into("b", bytearray(UNIT)) is False
        assert store.put("b", [content("b")]) is True
        assert [read(store, key) for key in "abc"] == [content(key) for key in "abc"]

    # Opening again.

    def _reopened(self, store: SnapshotStore, open_store: Open, budget: int | None = None) -> SnapshotStore:
        if not self.persistent:
            pytest.skip("this store declares that it is not persistent")
        store.close()
        return open_store(budget)

    def test_what_was_put_is_there_after_opening_again(self, store: SnapshotStore, open_store: Open) -> None:
        fill(store, "abc")
        store.delete("b")
        again = self._reopened(store, open_store)
        assert [read(again, key) for key in "abc"] == [content("a"), None, content("c")]
        assert again.put("a", [b"other"]) is False

    @pytest.mark.parametrize(("budget", "kept", "left"), [(4 * UNIT, "abcd", "adef"), (2 * UNIT, "ad", "ef")])
    def test_bytes_and_recency_are_known_after_opening_again(
        self, small: SnapshotStore, open_store: Open, budget: int, kept: str, left: str
    ) -> None:
        fill(small, "abcd")
        assert read(small, "a") == content("a")
        again = self._reopened(small, open_store, budget)
        assert present(again, "abcd") == kept
        fill(again, "ef")
        assert present(again, "abcdef") == left

    # Readers, if the store has them.

    def _reader(self, store: SnapshotStore, data: bytes) -> tuple[ReadingStore, Reader]:
        if not isinstance(store, ReadingStore):
            pytest.skip("this store has no readers")
        assert store.put("a", [data])
        reader = store.reader("a")
        assert reader is not None
        return store, reader

    @pytest.mark.parametrize("sizes", [(UNIT,), (1, 2, UNIT - 3), (0, 500, 0, 500), (1,) * UNIT])
    @pytest.mark.parametrize("at_once", [1, 2, 5000])
    def test_what_was_put_comes_in_order_into_whatever_is_given(
        self, store: SnapshotStore, sizes: tuple[int, ...], at_once: int
    ) -> None:
        data = content("a", 700 * UNIT)  # several blocks of a digest, the last one partial
        _, reader = self._reader(store, data)
        buffers = [np.zeros(size * 700, np.uint8) for size in sizes]
        for start in range(0, len(buffers), at_once):
            assert reader.left == 700 * sum(sizes[start:])
            reader.fill(buffers[start : start + at_once])
        assert reader.left == 0
        assert b"".join(buffer.tobytes() for buffer in buffers) == data
        reader.close()
        reader.close()

    def test_a_reader_refuses_more_than_is_left_and_what_is_read_only(self, store: SnapshotStore) -> None:
        reading, reader = self._reader(store, content("a"))
        with pytest.raises(StoreValueError, match="1001 bytes; 1000 are left"):
            reader.fill([bytearray(1), bytearray(UNIT)])
        with pytest.raises(StoreValueError, match="read-only"):
            reader.fill([bytes(3)])  # type: ignore[list-item]
        whole = np.zeros(UNIT // 2, ml_dtypes.bfloat16)
        reader.fill([whole])  # the refused calls read nothing
        assert whole.tobytes() == content("a")
        assert reading.reader("b") is None
        with pytest.raises(StoreValueError, match="key"):
            reading.reader("../b")

    def test_a_reader_outlives_its_entry_and_its_store_and_closed_gives_nothing(
        self, store: SnapshotStore
    ) -> None:
        reading, one = self._reader(store, content("a"))
        other, closed, buffer = reading.reader("a"), reading.reader("a"), bytearray(UNIT)
        assert other is not None
        assert closed is not None
        closed.close()
        with pytest.raises(StoreValueError, match="0 are left"):
            closed.fill([bytearray(1)])
        assert store.delete("a")
        one.fill([buffer])
        assert buffer == content("a")
        store.close()
        other.fill([buffer])
        with pytest.raises(StoreClosedError):
            reading.reader("a")

    # Threads.

    def test_of_many_threads_that_put_one_key_one_writes(self, store: SnapshotStore) -> None:
        barrier = threading.Barrier(8)
        keys = [f"k{i}" for i in range(15)]

        def put(i: int) -> list[bool]:
            parts = {key: [content(f"{key} {i}")] for key in keys}
            return [barrier.wait(60) >= 0 and store.put(key, parts[key]) for key in keys]

        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(put, range(8)))
        for column, key in zip(zip(*results, strict=True), keys, strict=True):
            assert sum(column) == 1
            assert read(store, key) == content(f"{key} {column.index(True)}")

    def test_threads_that_put_read_and_delete_see_whole_entries_or_none(self, open_store: Open) -> None:
        store = open_store(6 * UNIT if self.budgeted else None)

        def work(seed: int) -> int:
            rng = random.Random(seed)
            hits = 0
            for _ in range(40):
                key = rng.choice("abcdefghij")
                store.put(key, [content(key)[:400], content(key)[400:]])
                entry = read(store, rng.choice(key + "abcdefghij"))
                assert entry is None or entry in expected
                hits += entry is not None
                if rng.random() < 0.2:
                    store.delete(key)
            return hits

        expected = {content(key) for key in "abcdefghij"}
        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(work, range(6)))

    def test_closing_while_threads_call_ends_each_with_an_answer_or_the_error(
        self, store: SnapshotStore
    ) -> None:
        started = threading.Barrier(5)

        def work(name: str) -> int:
            done = 0
            started.wait()
            while True:
                try:
                    store.put(f"{name}{done}", [content(name)])
                    assert read(store, f"{name}{done}") == content(name)
                except StoreClosedError:
                    return done
                done += 1

        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(work, name) for name in "abcd"]
            started.wait()
            store.stat(["x"])
            store.close()
            assert all(future.result(60) >= 0 for future in futures)

    # Advice, if the store accepts it.

    def test_advice_uses_nothing_and_passes_over_what_is_not_there(self, small: SnapshotStore) -> None:
        if not isinstance(small, AdvisedStore):
            pytest.skip("this store accepts no advice")
        fill(small, "abcd")
        small.advise(["a", "e", "b"])
        fill(small, "f")
        assert present(small, "abcdef") == "bcdf"
        with pytest.raises(StoreValueError):
            small.advise(["../a"])
        small.close()
        with pytest.raises(StoreClosedError):
            small.advise(["a"])


def agrees(stores: Sequence[SnapshotStore], budget: int, seed: int, steps: int = 120) -> None:
    """Check random calls to stores that share one place against a plain dictionary."""
    entries: OrderedDict[str, bytes] = OrderedDict()  # least recently used first
    rng = random.Random(seed)

    def leading(keys: list[str]) -> int:
        count = next((i for i, key in enumerate(keys) if key not in entries), len(keys))
        for key in reversed(keys[:count]):
            entries.move_to_end(key)
        return count

    for step in range(steps):
        store, key = rng.choice(stores), rng.choice("abcdefgh")
        call = rng.choice(["put", "put", "get", "get", "prefix", "delete"])
        if call == "put":
            data = content(f"{key} {step}", rng.choice([0, 1, 900, 1000, 1800, 4000, 4001]))
            new, fits = key not in entries, len(data) <= budget
            if new and not fits:
                with pytest.raises(StoreFullError):
                    store.put(key, [data])
            else:
                assert store.put(key, [data[:10], data[10:]]) is new, (seed, step)
            if new and fits:
                while sum(map(len, entries.values())) + len(data) > budget:
                    entries.popitem(last=False)
                entries[key] = data
        elif call == "get":
            assert read(store, key) == entries.get(key), (seed, step)
            leading([key])
        elif call == "prefix":
            keys = rng.sample("abcdefgh", 3)
            assert store.prefix(keys) == leading(keys), (seed, step)
        else:
            assert store.delete(key) is (entries.pop(key, None) is not None), (seed, step)
        assert present(rng.choice(stores), "abcdefgh") == "".join(sorted(entries)), (seed, step)
