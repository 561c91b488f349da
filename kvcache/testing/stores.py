"""The suite that holds a store to its protocol, for ours and for anyone's.

::

    from kvcache.testing import StoreTests

    class TestMine(StoreTests):
        persistent = True          # make() with the same folder finds what was there

        def make(self, folder, budget=None):
            return MineStore(folder / "data", budget)

Every store is given a folder of its own test; one that lies elsewhere makes names from it.
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
    SnapshotCorrupt,
    SnapshotStore,
    StoreClosedError,
    StoreFull,
    StoreValueError,
)

__all__ = ["HOSTILE_KEYS", "StoreTests", "content", "read"]

Open = Callable[..., SnapshotStore]

HOSTILE_KEYS: tuple[Any, ...] = (
    "", ".", "..", "../out", "a/b", "/etc/passwd", "a\\b", "a\0b", "a b", "a.json", "-a", "_a", "A", "a\n",
    "ä", "%2e%2e", "~", "*", "a" * 129, b"a", None, 3,
)  # fmt: skip
"""What no store takes as a key."""

UNIT = 1000


def content(name: str, size: int = UNIT) -> bytes:
    """Bytes that only this name has."""
    return np.random.default_rng(zlib.crc32(name.encode())).bytes(size)


def read(store: SnapshotStore, key: str) -> bytes | None:
    """What the store has of a key; None: a miss, also when it vanished between the two calls."""
    (found,) = store.stat([key])
    if found is None:
        return None
    buffer = bytearray(found.nbytes)
    return bytes(buffer) if store.get_into(key, buffer) else None


def present(store: SnapshotStore, keys: Sequence[str]) -> str:
    """Those of the keys (single letters) that are there."""
    return "".join(key for key, found in zip(keys, store.stat(list(keys)), strict=True) if found is not None)


def fill(store: SnapshotStore, keys: Sequence[str], size: int = UNIT) -> None:
    for key in keys:
        assert store.put(key, [content(key, size)])


class StoreTests:
    """Subclass it, write :meth:`make`, and declare what the store offers."""

    persistent: ClassVar[bool] = False
    """Whether a store made again for the same folder has what the closed one had."""
    budgeted: ClassVar[bool] = True
    """Whether ``make`` heeds ``budget``, counted in ``Stat.nbytes``."""
    big: ClassVar[int] = (8 << 20) + 3
    """Bytes of the largest entry put."""

    def make(self, folder: Path, budget: int | None = None) -> SnapshotStore:
        """A store for this folder: an empty one, or what is there where the store is persistent."""
        raise NotImplementedError

    def damage(self, store: SnapshotStore, folder: Path, key: str) -> bool:
        """Flip one stored bit of an entry. False: this store has no way to do that."""
        return False

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Iterator[Open]:
        """``open_store(budget=None)``; all of them are closed at the end."""
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
        """A store with room for four entries of :data:`UNIT` bytes."""
        if not self.budgeted:
            pytest.skip("this store declares that it has no budget")
        return open_store(4 * UNIT)

    # What is put.

    def test_it_is_a_snapshot_store(self, store: SnapshotStore) -> None:
        assert isinstance(store, SnapshotStore)

    def test_what_was_put_comes_back(self, store: SnapshotStore) -> None:
        assert store.put("a", [content("a")]) is True
        assert read(store, "a") == content("a")

    def test_parts_are_stored_one_after_another(self, store: SnapshotStore) -> None:
        store.put("a", [b"one", b"two", b"three"])
        assert read(store, "a") == b"onetwothree"

    def test_every_kind_of_buffer_is_stored(self, store: SnapshotStore) -> None:
        wide = np.arange(6, dtype=np.float32).reshape(2, 3)
        brain = np.arange(4).astype(ml_dtypes.bfloat16)
        scalar = np.array(7, np.int64)
        parts: list[Any] = [b"x", bytearray(b"y"), memoryview(b"abcd")[1:3], wide.data, wide, brain, scalar]
        store.put("a", parts)
        expected = b"xybc" + 2 * wide.tobytes() + brain.tobytes() + scalar.tobytes()
        assert read(store, "a") == expected

    def test_parts_may_be_empty(self, store: SnapshotStore) -> None:
        store.put("a", [b"", b"x", np.empty((0, 3), np.float32), b"y", b""])
        assert read(store, "a") == b"xy"

    @pytest.mark.parametrize("parts", [[], [b""], [b"", b""]], ids=["no part", "one", "two"])
    def test_an_entry_may_be_empty(self, store: SnapshotStore, parts: list[bytes]) -> None:
        assert store.put("a", parts) is True
        assert store.put("a", parts) is False
        assert read(store, "a") == b""

    def test_an_entry_may_have_thousands_of_parts(self, store: SnapshotStore) -> None:
        data = content("a", 20_000)
        store.put("a", [data[i : i + 7] for i in range(0, len(data), 7)])
        assert read(store, "a") == data

    def test_an_entry_may_be_big(self, store: SnapshotStore) -> None:
        first, second = content("a", self.big // 3), content("b", self.big - self.big // 3)
        store.put("a", [first, second])
        assert read(store, "a") == first + second

    def test_what_was_put_is_a_copy(self, store: SnapshotStore) -> None:
        mine = bytearray(b"before")
        store.put("a", [mine])
        mine[:] = b"after!"
        assert read(store, "a") == b"before"

    def test_what_was_read_is_a_copy(self, store: SnapshotStore) -> None:
        store.put("a", [b"stored"])
        buffer = bytearray(6)
        store.get_into("a", buffer)
        buffer[:] = b"change"
        assert read(store, "a") == b"stored"

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

    def test_entries_do_not_mix(self, store: SnapshotStore) -> None:
        fill(store, "abcdef")
        assert [read(store, key) for key in "abcdef"] == [content(key) for key in "abcdef"]

    # What is asked.

    def test_stat_answers_in_order(self, store: SnapshotStore) -> None:
        for size, key in enumerate("abc"):
            store.put(key, [content(key, size)])
        found = store.stat(["c", "x", "a", "b", "c"])
        assert [stat and stat.nbytes for stat in found] == [2, None, 0, 1, 2]

    def test_stat_of_nothing_is_nothing(self, store: SnapshotStore) -> None:
        assert store.stat([]) == []

    def test_a_miss_is_false_and_no_error(self, store: SnapshotStore) -> None:
        assert store.get_into("a", bytearray(10)) is False

    def test_every_kind_of_writable_buffer_is_filled(self, store: SnapshotStore) -> None:
        store.put("a", [content("a", 12)])
        plain, brain = bytearray(12), np.zeros((2, 3), ml_dtypes.bfloat16)
        inside = bytearray(20)
        for buffer in (plain, brain, memoryview(inside)[4:16]):
            assert store.get_into("a", buffer) is True
        assert plain == brain.tobytes() == inside[4:16] == content("a", 12)
        assert inside[:4] == inside[16:] == bytes(4)

    @pytest.mark.parametrize("size", [0, 999, 1001, 2000])
    def test_a_buffer_of_another_size_is_refused(self, store: SnapshotStore, size: int) -> None:
        fill(store, "a")
        with pytest.raises(StoreValueError, match="1000"):
            store.get_into("a", bytearray(size))
        assert read(store, "a") == content("a")

    def test_a_read_only_buffer_is_refused(self, store: SnapshotStore) -> None:
        fill(store, "a")
        with pytest.raises(StoreValueError, match="read-only"):
            store.get_into("a", bytes(UNIT))  # type: ignore[arg-type]

    def test_prefix_counts_the_leading_keys(self, store: SnapshotStore) -> None:
        fill(store, "abcd")
        assert store.prefix(["a", "b", "c", "d", "x", "y"]) == 4
        assert store.prefix(["a", "b"]) == 2

    def test_prefix_stops_at_the_first_hole(self, store: SnapshotStore) -> None:
        fill(store, "abd")
        assert store.prefix(["a", "b", "c", "d"]) == 2
        assert store.prefix(["x", "a", "b"]) == 0

    def test_prefix_of_nothing_is_zero(self, store: SnapshotStore) -> None:
        assert store.prefix([]) == 0

    def test_a_deleted_entry_is_gone_and_the_others_stay(self, store: SnapshotStore) -> None:
        fill(store, "abc")
        assert store.delete("b") is True
        assert store.delete("b") is False
        assert present(store, "abc") == "ac"
        assert store.get_into("b", bytearray(UNIT)) is False
        assert store.prefix(["a", "b", "c"]) == 1

    def test_a_deleted_key_may_be_put_again(self, store: SnapshotStore) -> None:
        fill(store, "a")
        store.delete("a")
        assert store.put("a", [b"another"]) is True
        assert read(store, "a") == b"another"

    # Keys.

    @pytest.mark.parametrize("key", HOSTILE_KEYS, ids=ascii)
    def test_what_is_no_key_is_refused_by_every_call(self, store: SnapshotStore, key: Any) -> None:
        fill(store, "a")
        calls: list[Callable[[], object]] = [
            lambda: store.put(key, [b"x"]),
            lambda: store.stat(["a", key]),
            lambda: store.get_into(key, bytearray(1)),
            lambda: store.prefix(["a", key]),
            lambda: store.delete(key),
        ]
        for call in calls:
            with pytest.raises(StoreValueError, match="key"):
                call()

    @pytest.mark.parametrize("key", ["0", "a" * 128, "a-b_c", "con", f"{0:064x}"])
    def test_every_key_that_is_allowed_works(self, store: SnapshotStore, key: str) -> None:
        assert store.put(key, [b"x"]) is True
        assert read(store, key) == b"x"
        assert store.delete(key) is True

    # Closing.

    def test_closing_twice_is_fine(self, store: SnapshotStore) -> None:
        store.close()
        store.close()

    def test_every_call_after_close_says_so(self, store: SnapshotStore) -> None:
        fill(store, "a")
        store.close()
        calls: list[Callable[[], object]] = [
            lambda: store.put("b", [b"x"]),
            lambda: store.stat(["a"]),
            lambda: store.get_into("a", bytearray(UNIT)),
            lambda: store.prefix(["a"]),
            lambda: store.delete("a"),
        ]
        for call in calls:
            with pytest.raises(StoreClosedError) as raised:
                call()
            assert isinstance(raised.value, ml.ClosedError)

    # Budget.

    def test_the_budget_can_be_filled_to_the_last_byte(self, small: SnapshotStore) -> None:
        fill(small, "abcd")
        assert present(small, "abcd") == "abcd"

    def test_the_first_byte_beyond_the_budget_evicts_the_oldest(self, small: SnapshotStore) -> None:
        fill(small, "abcd")
        small.put("e", [b"x"])
        assert present(small, "abcde") == "bcde"

    def test_as_many_are_evicted_as_make_room_and_no_more(self, small: SnapshotStore) -> None:
        fill(small, "abcd")
        small.put("e", [bytes(2 * UNIT + 1)])
        assert present(small, "abcde") == "de"

    def test_an_empty_entry_evicts_nothing(self, small: SnapshotStore) -> None:
        fill(small, "abcd")
        small.put("e", [])
        assert present(small, "abcde") == "abcde"

    def test_what_exceeds_the_budget_is_refused_and_evicts_nothing(self, small: SnapshotStore) -> None:
        fill(small, "abcd")
        with pytest.raises(StoreFull, match="4000"):
            small.put("e", [bytes(4 * UNIT), b"x"])
        assert present(small, "abcde") == "abcd"
        assert [read(small, key) for key in "abcd"] == [content(key) for key in "abcd"]

    def test_a_key_that_is_there_is_false_and_evicts_nothing(self, small: SnapshotStore) -> None:
        fill(small, "abcd")
        assert small.put("b", [bytes(9 * UNIT)]) is False
        assert present(small, "abcd") == "abcd"

    def test_reading_an_entry_makes_it_the_last_to_go(self, small: SnapshotStore) -> None:
        fill(small, "abcd")
        assert read(small, "a") == content("a")
        fill(small, "ef")
        assert present(small, "abcdef") == "adef"

    def test_stat_does_not_count_as_use(self, small: SnapshotStore) -> None:
        fill(small, "abcd")
        small.stat(["a"])
        fill(small, "e")
        assert present(small, "abcde") == "bcde"

    def test_of_a_chain_that_was_hit_the_deepest_goes_first(self, small: SnapshotStore) -> None:
        fill(small, "abcd")
        assert small.prefix(["a", "b", "c", "x"]) == 3
        for key, left in (("e", "abce"), ("f", "abef"), ("g", "aefg")):
            fill(small, key)
            assert present(small, "abcdefg") == left

    def test_what_prefix_does_not_reach_is_not_used(self, small: SnapshotStore) -> None:
        fill(small, "abcd")
        assert small.prefix(["b", "x", "a"]) == 1
        fill(small, "e")
        assert present(small, "abcde") == "bcde"

    def test_deleting_gives_room(self, small: SnapshotStore) -> None:
        fill(small, "abcd")
        small.delete("c")
        fill(small, "e")
        assert present(small, "abcde") == "abde"

    def test_a_budget_of_nothing_holds_what_has_no_bytes(self, open_store: Open) -> None:
        if not self.budgeted:
            pytest.skip("this store declares that it has no budget")
        store = open_store(0)
        assert store.put("a", []) is True
        with pytest.raises(StoreFull):
            store.put("b", [b"x"])
        assert present(store, "ab") == "a"

    @pytest.mark.parametrize("seed", range(4))
    def test_any_sequence_of_calls_agrees_with_a_plain_dictionary(
        self, small: SnapshotStore, seed: int
    ) -> None:
        model = Model(4 * UNIT)
        rng = random.Random(seed)
        for step in range(150):
            call, key = rng.choice(["put", "put", "get", "get", "prefix", "delete"]), rng.choice("abcdefgh")
            args: Any = key
            if call == "put":
                args = (key, content(f"{key} {step}", rng.choice([0, 1, 900, 1000, 1800, 4000, 4001])))
            elif call == "prefix":
                args = rng.sample("abcdefgh", 3)
            assert getattr(Called(small), call)(args) == getattr(model, call)(args), (seed, step, call, args)
            assert present(small, "abcdefgh") == "".join(sorted(model.entries)), (seed, step, call, args)

    # Damage.

    def test_a_damaged_entry_is_reported_dropped_and_put_again(
        self, store: SnapshotStore, tmp_path: Path
    ) -> None:
        fill(store, "abc")
        if not self.damage(store, tmp_path, "b"):
            pytest.skip("this store has no way to damage what it holds")
        with pytest.raises(SnapshotCorrupt, match="b"):
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

    def test_bytes_and_recency_are_known_after_opening_again(
        self, small: SnapshotStore, open_store: Open
    ) -> None:
        fill(small, "abcd")
        assert read(small, "a") == content("a")
        again = self._reopened(small, open_store, 4 * UNIT)
        fill(again, "ef")
        assert present(again, "abcdef") == "adef"

    def test_a_smaller_budget_evicts_when_the_store_is_opened(
        self, small: SnapshotStore, open_store: Open
    ) -> None:
        fill(small, "abcd")
        again = self._reopened(small, open_store, 2 * UNIT)
        fill(again, "e")
        assert present(again, "abcde") == "de"

    # Threads.

    def test_of_many_threads_that_put_one_key_one_writes(self, store: SnapshotStore) -> None:
        barrier = threading.Barrier(8)
        keys = [f"k{i}" for i in range(40)]

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
            for _ in range(60):
                key = rng.choice("abcdefghij")
                store.put(key, [content(key)[:400], content(key)[400:]])
                found = read(store, rng.choice(key + "abcdefghij"))
                assert found is None or found in expected
                hits += found is not None
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


class Model:
    """What a store with a budget does, as a plain dictionary in the order of use."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.entries: OrderedDict[str, bytes] = OrderedDict()

    def put(self, args: tuple[str, bytes]) -> bool | str:
        key, data = args
        if key in self.entries:
            return False
        if len(data) > self.budget:
            return "full"
        while sum(map(len, self.entries.values())) + len(data) > self.budget:
            self.entries.popitem(last=False)
        self.entries[key] = data
        return True

    def get(self, key: str) -> bytes | None:
        if key in self.entries:
            self.entries.move_to_end(key)
        return self.entries.get(key)

    def prefix(self, keys: list[str]) -> int:
        count = next((i for i, key in enumerate(keys) if key not in self.entries), len(keys))
        for key in reversed(keys[:count]):
            self.entries.move_to_end(key)
        return count

    def delete(self, key: str) -> bool:
        return self.entries.pop(key, None) is not None


class Called:
    """A store behind the model's calls."""

    def __init__(self, store: SnapshotStore) -> None:
        self.store = store

    def put(self, args: tuple[str, bytes]) -> bool | str:
        key, data = args
        try:
            return self.store.put(key, [data[:10], data[10:]])
        except StoreFull:
            return "full"

    def get(self, key: str) -> bytes | None:
        return read(self.store, key)

    def prefix(self, keys: list[str]) -> int:
        return self.store.prefix(keys)

    def delete(self, key: str) -> bool:
        return self.store.delete(key)
