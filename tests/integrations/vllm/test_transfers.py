"""A worker's loads and saves: what is copied when, how much memory waits, and what is told of failures."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcache.integrations.open_stores import StoresInUse
from kvcache.integrations.vllm import transfers as module
from kvcache.integrations.vllm.counters import Counters
from kvcache.integrations.vllm.steps import PageLoad, PageSave, Report, Step
from kvcache.integrations.vllm.transfers import Transfers
from kvcache.integrations.vllm.work import Workers
from kvcache.prefix.tiers import StoreTier
from kvcache.stores import (
    MemoryStore,
    SerializedSnapshot,
    StoreUnavailableError,
    get_snapshot,
    pack,
    put_snapshot,
)

from .vllm_rig import BLOCK, PAGE, Blocks, token_pages

NBYTES = token_pages().nbytes


class Held(MemoryStore):
    """Puts and reads wait until they may."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def put(self, key: str, parts: Any) -> bool:
        self.go_on.wait()
        return super().put(key, parts)

    def view(self, key: str) -> memoryview | None:
        self.go_on.wait()
        return super().view(key)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def blocks() -> Blocks:
    found = Blocks(20)
    found.held[:] = np.arange(20 * BLOCK).reshape(20, BLOCK)
    return found


def open_transfers(store: MemoryStore, blocks: Blocks, backlog: int = 1 << 20, threads: int = 2) -> Transfers:
    tier = StoreTier([store], backlog)
    return Transfers(0, blocks, tier, Workers("load", threads), Counters())


@pytest.fixture
def transfers(store: MemoryStore, blocks: Blocks) -> Iterator[Transfers]:
    one = open_transfers(store, blocks)
    yield one
    one.close()


def saves(*pages: Sequence[int]) -> Step:
    return Step(saves=[PageSave((f"k{i}",), i * PAGE, tuple(own)) for i, own in enumerate(pages)])


def loads(request: str, *pages: Sequence[int | None]) -> Step:
    return Step(loads={request: [PageLoad((f"k{i}",), i * PAGE, tuple(own)) for i, own in enumerate(pages)]})


def arrived(transfers: Transfers, *ended: str) -> set[str]:
    found: set[str] = set()
    while not found:
        found = transfers.arrived(set(ended))
    return found


def store_pages(transfers: Transfers, *pages: Sequence[int]) -> None:
    """Save pages, and wait until they are written."""
    transfers.save(saves(*pages))
    transfers._tier.writes.flush()


def told(transfers: Transfers) -> Report:
    report = transfers.report()
    assert report is not None
    return report


def stored(store: MemoryStore, number: int) -> list[float]:
    return [float(value) for value in get_snapshot(store, f"k{number}").arrays["0.0"].reshape(-1)]


def test_blocks_may_be_written_over_when_a_save_returns(blocks: Blocks) -> None:
    store = Held()
    transfers = open_transfers(store, blocks)
    before = [float(value) for value in blocks.held[[3, 1]].reshape(-1)]
    transfers.save(saves([3, 1]))
    blocks.held[:] = -1
    store.go_on.set()
    transfers.close()
    assert stored(store, 0) == before
    assert told(transfers).stored == {"k0"}
    assert transfers.report() is None


def test_no_more_waits_than_there_is_room_for_but_one_always_does(blocks: Blocks) -> None:
    for backlog, taken in ((1, 1), (NBYTES, 1), (2 * NBYTES, 2), (3 * NBYTES - 1, 2)):
        store = Held()
        transfers = open_transfers(store, blocks, backlog)
        before = blocks.gathered
        transfers.save(saves([1, 2], [3, 4], [5, 6]))
        assert blocks.gathered - before == taken
        assert told(transfers).postponed == {f"k{i}" for i in range(taken, 3)}
        store.go_on.set()
        transfers.close()
        assert [stat is not None for stat in store.stat(["k0", "k1", "k2"])] == [i < taken for i in range(3)]


def test_copies_that_take_a_while_are_written_when_they_are_there(store: MemoryStore, blocks: Blocks) -> None:
    """A device that copies by itself: until then nothing is packed, and the copies count as memory."""
    done = [False]
    gather = blocks.gather

    def later(given: Sequence[int]) -> Any:
        found = gather(given)
        return SimpleNamespace(arrays=found.arrays, ready=lambda: done[0])

    blocks.gather = later  # type: ignore[method-assign]
    transfers = open_transfers(store, blocks, 2 * NBYTES)
    transfers.save(saves([1, 2], [3, 4], [5, 6]))
    assert told(transfers).postponed == {"k2"}
    assert not store.usage().entries
    done[0] = True
    transfers.close()
    assert store.usage().entries == 2


def test_a_load_writes_behind_what_the_device_was_given_before(transfers: Transfers, blocks: Blocks) -> None:
    """vLLM sets some blocks to zero when it gives them to a request."""
    store_pages(transfers, [3, 1])
    blocks.late.append(lambda: blocks.held[11:13].fill(0))
    transfers.load(loads("r", [11, 12]))
    assert arrived(transfers) == {"r"}
    blocks.follow()
    assert np.array_equal(blocks.held[[11, 12]], blocks.held[[3, 1]])


def test_loads_go_where_they_are_wanted(transfers: Transfers, blocks: Blocks) -> None:
    before = blocks.held.copy()
    store_pages(transfers, [1, 2], [3, 4])
    transfers.load(loads("r", [None, 12], [13, 14]))
    assert arrived(transfers) == {"r"}
    assert transfers.arrived(set()) == set()
    assert not transfers.invalid_blocks()
    np.testing.assert_array_equal(blocks.held[[12, 13, 14]], before[[2, 3, 4]])
    np.testing.assert_array_equal(np.delete(blocks.held, [12, 13, 14], 0), np.delete(before, [12, 13, 14], 0))


def test_a_page_that_is_not_there_is_told_with_its_blocks(transfers: Transfers) -> None:
    store_pages(transfers, [1, 2])
    transfers.load(loads("r", [11, 12], [13, 14], [15, 16]))
    assert arrived(transfers) == {"r"}
    found = transfers.invalid_blocks()
    assert {13, 14} <= found
    assert found <= {13, 14, 15, 16}
    assert not transfers.invalid_blocks()
    assert told(transfers).broken == {"r"}
    assert transfers._counters.take()["pages_lost"] >= 1


def wrong() -> list[SerializedSnapshot]:
    good = token_pages().pack(0, [np.ones((PAGE, 1, 1), np.float32)] * 2)
    meta = dict(good.meta["snapshot"])
    more = token_pages().pack(0, [np.ones((PAGE, 1, 1), np.float32)] * 4)
    return [
        token_pages().pack(PAGE, list(good.arrays.values())[1:]),
        SerializedSnapshot({"snapshot": {**meta, "dtype": "F16"}}, good.arrays),
        SerializedSnapshot({"snapshot": {**meta, "whole": True}}, good.arrays),
        SerializedSnapshot({"snapshot": {**meta, "layers": []}}, {"positions": good.arrays["positions"]}),
        SerializedSnapshot(good.meta, {**good.arrays, "0.0": np.ones((PAGE, 2, 1), np.float32)}),
        SerializedSnapshot(good.meta, {**good.arrays, "0.1": np.ones((PAGE - 1, 1, 1), np.float32)}),
        SerializedSnapshot(good.meta, more.arrays),
        SerializedSnapshot({"other": 1}, good.arrays),
        SerializedSnapshot({}, {}),
    ]


def test_a_page_of_something_else_is_dropped_and_no_block_is_touched(
    transfers: Transfers, store: MemoryStore, blocks: Blocks, caplog: pytest.LogCaptureFixture
) -> None:
    before = blocks.held.copy()
    pages = [b"".join(bytes(part) for part in pack(page)) for page in wrong()]
    for data in (*pages, b"", b"12345678", pages[1][:-1], pages[1][:50], b"\xff" * 100):
        caplog.clear()
        store.put("k0", [data])
        transfers.load(loads("r", [11, 12]))
        assert arrived(transfers) == {"r"}
        assert transfers.invalid_blocks() == {11, 12}
        assert store.stat(["k0"]) == [None]
        np.testing.assert_array_equal(blocks.held, before)
        assert "computed again" in caplog.text


def test_of_a_request_that_has_ended_the_rest_is_left_and_nothing_is_told(blocks: Blocks) -> None:
    store = Held()
    transfers = open_transfers(store, blocks, threads=1)
    store.go_on.set()
    for number in range(3):
        page = token_pages().pack(number * PAGE, [np.ones((PAGE, 1, 1), np.float32)] * 2)
        put_snapshot(store, f"k{number}", page)
    store.go_on.clear()
    transfers.load(loads("r", [11, 12], [13, 14], [15, 16]))
    assert transfers.arrived({"r"}) == set()
    store.go_on.set()
    assert arrived(transfers) == {"r"}
    assert not transfers.invalid_blocks()
    assert transfers.report() is None
    assert np.isnan(blocks.held).sum() == 0
    assert (blocks.held[[15, 16]] != 1).all()
    transfers.close()


def test_a_store_out_of_reach_is_told_once_and_left_alone(
    transfers: Transfers,
    store: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = []

    def gone(keys: Sequence[str]) -> Any:
        asked.append(keys)
        raise StoreUnavailableError("gone")

    monkeypatch.setattr(store, "stat", gone)
    monkeypatch.setattr(store, "view", gone)
    for number in range(5):
        transfers.load(loads(f"r{number}", [11, 12], [13, 14]))
        assert arrived(transfers) == {f"r{number}"}
        assert {11, 12} <= transfers.invalid_blocks()
    assert len(asked) <= 2  # two threads may find out at once
    assert len([line for line in caplog.messages if "cannot be reached" in line]) == 1


def test_a_device_that_fails_is_a_load_that_fails(
    transfers: Transfers, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_pages(transfers, [1, 2])
    monkeypatch.setattr(blocks, "scatter", lambda *given: 1 / 0)
    transfers.load(loads("r", [11, 12]))
    assert arrived(transfers) == {"r"}
    assert transfers.invalid_blocks() == {11, 12}


def test_closing_waits_for_a_store_that_hangs_no_longer_than_it_says(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    one = open_transfers(store := Held(), blocks, backlog=NBYTES)
    one._has_room = lambda until: True  # type: ignore[method-assign]
    one.save(saves([1, 2], [3, 4]))
    one.load(loads("r", [5, 6]))
    assert not one.close()
    assert f"close: {2 * NBYTES} bytes were not written" in caplog.text
    begun = time.monotonic()
    assert not one.close()  # at shutdown, and again when the process ends
    assert time.monotonic() - begun < 0.4
    store.go_on.set()


@pytest.mark.parametrize("backlog", [NBYTES, 100 * NBYTES], ids=["copied", "handed over"])
def test_closing_waits_for_a_store_that_is_slow_as_long_as_it_moves_on(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch, backlog: int
) -> None:
    class Slow(MemoryStore):
        def put(self, key: str, parts: Any) -> bool:
            time.sleep(0.1)
            return super().put(key, parts)

    monkeypatch.setattr(module, "PATIENCE", 0.5)
    one = open_transfers(store := Slow(), blocks, backlog)
    one._has_room = lambda until: True  # type: ignore[method-assign]
    one.save(saves(*[[1, 2]] * 8))
    assert one.close()
    assert store.usage().entries == 8


def test_what_no_store_takes_is_told(blocks: Blocks) -> None:
    transfers = open_transfers(MemoryStore(budget=10), blocks)
    store_pages(transfers, [1, 2])
    transfers.settle()
    assert told(transfers).failed == {"k0"}
    transfers.close()


def test_stores_are_opened_once_in_a_process_and_closed_by_the_last() -> None:
    one, two = (StoresInUse(["memory:?budget=1MiB"], 100) for _ in range(2))
    assert one.tier.stores[0] is two.tier.stores[0]
    one.close()
    one.close()
    assert two.tier.prefix(["a"]) == 0
    assert two.tier.stores[0].put("aa", [b"x"])
    held = two.tier.stores[0]
    two.close()
    with pytest.raises(Exception, match="closed"):
        held.stat(["aa"])
    with contextlib.closing(StoresInUse(["memory:?budget=1MiB"], 100)) as again:
        assert again.tier.stores[0] is not held


def test_a_store_that_does_not_open_leaves_none_open() -> None:
    with pytest.raises(StoreUnavailableError):
        StoresInUse(["memory:?budget=2MiB", "nosuchstore:x"], 100)
    with contextlib.closing(StoresInUse(["memory:?budget=2MiB"], 100)) as stores:
        assert stores.tier.prefix(["a"]) == 0


def test_a_step_with_nothing_to_compute_waits_for_loads(
    transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache.integrations.vllm.transfers.IDLE", 60.0)
    store_pages(transfers, [1, 2])
    for number in range(20):
        transfers.load(loads(f"r{number}", [11, 12]))
        assert transfers.arrived(set(), idle=True) == {f"r{number}"}
    assert transfers.arrived(set(), idle=True) == set()  # nothing is under way
