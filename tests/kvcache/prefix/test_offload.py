"""What leaves the device: its cells are free at once, and a thread carries it over; what fails is counted."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest

import ml
from kvcache.prefix import worker as worker_module
from kvcache.prefix.tiers import HostTier
from kvcache.prefix.worker import OffloadWorker
from kvcache.stores import MemoryStore
from kvcache.testing.rigs.protocol import InjectedError, Plan, only_protocol

from .rigs.conversing import LONG, ConversationSetup, Rig, some_caches
from .rigs.stores import THREAD, SlowStore, Way


@some_caches
def test_cells_are_free_while_their_content_is_under_way(backend: ml.Backend, way: Way, cache: str) -> None:
    setup = ConversationSetup(cache, max_sequences=1, capacity=24)
    r = Rig(setup, only_protocol(backend, way), budget=0, tiers=[HostTier()])
    way.gate.clear()
    r.keep(LONG)
    r.check_empty()
    r.keep([*range(100, 120)])
    kept = r.prefix.nbytes
    assert kept["leaving"] > 0
    r.check_books()
    way.gate.set()
    r.prefix.flush()
    assert r.prefix.nbytes == {**kept, "leaving": 0}, "host memory has counted it from the first"
    assert r.keep([*LONG, 1]) == 20
    assert r.prefix.stats.host == 20
    assert r.keep([*range(100, 120), 1]) == 20
    r.prefix.flush()
    r.check_books()


@some_caches
def test_what_is_under_way_is_there_already(backend: ml.Backend, way: Way, cache: str) -> None:
    setup = ConversationSetup(cache, max_sequences=2, capacity=24)
    r = Rig(setup, only_protocol(backend, way), budget=0, tiers=[HostTier(), MemoryStore()])
    way.gate.clear()
    r.keep(LONG)
    assert r.prefix.nbytes["leaving"] > 0
    assert r.peek([*LONG, 1]) == 20
    assert (r.prefix.stats.device, r.prefix.stats.host) == (20, 0)
    way.gate.set()
    r.prefix.flush()
    assert r.peek([*LONG, 2]) == 20
    assert (r.prefix.stats.device, r.prefix.stats.host) == (20, 20)
    r.check_books()


def test_an_edge_that_is_under_way_is_parted_when_it_is_there(backend: ml.Backend, way: Way) -> None:
    r = Rig(ConversationSetup(), only_protocol(backend, way), budget=0, tiers=[HostTier()])
    way.seconds = 0.001
    r.keep(LONG)
    assert r.keep([*LONG[:7], 90, 91]) == 7
    r.prefix.flush()
    assert [r.keep([*LONG[:9], 92]), r.keep([*LONG[:7], 90, 93])] == [9, 8]
    r.check_books()


def test_the_caller_copies_nothing_to_host_memory_unless_told_to(backend: ml.Backend, way: Way) -> None:
    for in_flight, expected in ((1 << 20, {THREAD}), (0, {threading.current_thread().name})):
        limited = only_protocol(backend, way)
        r = Rig(ConversationSetup(), limited, budget=0, tiers=[HostTier()], in_flight=in_flight)
        chat = r.chat(LONG)
        way.taken.clear()
        chat.close()
        r.prefix.flush()
        assert set(way.taken) == expected
        assert ("leaving" in r.prefix.nbytes) is (in_flight > 0)
        r.prefix.close()


class Counted(dict[int, tuple[int, int]]):
    """Of a backend's allocations, the bytes of all that are made."""

    made = 0

    def __setitem__(self, key: int, found: tuple[int, int]) -> None:
        self.made += found[1]
        super().__setitem__(key, found)


@pytest.mark.parametrize("name", ["numpy", "torch", "mlx"])
def test_what_leaves_host_memory_for_host_memory_is_copied_once(open_any: Any, name: str) -> None:
    with open_any(name) as backend:
        if not isinstance(backend, ml.SupportsHostMemory):
            pytest.skip("the strict backend, which does not say where its memory is")
        r = Rig(ConversationSetup(), backend, tiers=[HostTier()])
        r.keep(LONG)
        backend.allocations = counted = Counted(backend.allocations)
        assert r.prefix.evict() == 1
        assert counted.made == 0, "the backend copies nothing within its own memory first"
        assert r.keep([*LONG, 1]) == 20
        assert r.prefix.stats.host == 20
        assert counted.made > 0
        r.prefix.close()


def test_what_host_memory_cannot_take_is_counted_and_computed_again(
    backend: ml.Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    r = Rig(ConversationSetup(), backend, tiers=[HostTier()])
    r.keep(LONG)
    with monkeypatch.context() as patch:
        patch.setattr(worker_module, "serialize", Mock(side_effect=MemoryError("no room")))
        assert r.prefix.evict() == 1
    assert r.prefix.failed["host"] == 1
    assert "did not leave the device" in caplog.text
    r.check_books()
    assert r.keep([*LONG, 1]) == 0
    assert r.prefix.evict() == 1
    assert r.keep([*LONG, 1, 2]) == 21
    r.check_books()


@some_caches
def test_a_device_with_streams_has_made_its_copies_before_another_thread_reads_them(
    backend: ml.Backend, way: Way, cache: str
) -> None:
    far = only_protocol(backend, way)
    devices = (ml.DeviceInfo("far:0", "far"),)
    far.__class__ = type("Far", (type(far),), {"devices": devices})
    r = Rig(ConversationSetup(cache), far, budget=0, tiers=[HostTier()])
    chat = r.chat(LONG)
    way.sizes.clear()
    way.gate.clear()
    chat.close()
    read = {size for sizes in way.sizes.values() for size in sizes}
    assert read == {1}, "the caller waits, by reading one element of each copy"
    way.gate.set()
    r.prefix.flush()
    assert r.keep([*LONG, 1]) == 20


@pytest.mark.parametrize("in_flight", [1, 1000, 2500])
def test_what_is_under_way_is_bounded(backend: ml.Backend, way: Way, in_flight: int) -> None:
    one = 4 * ConversationSetup().token_bytes
    r = Rig(
        ConversationSetup(max_sequences=1, capacity=200),
        only_protocol(backend, way),
        tiers=[HostTier()],
        in_flight=in_flight,
    )
    way.seconds = 0.0005
    way.look = lambda: r.prefix.nbytes["leaving"]
    for start in range(0, 80, 4):
        r.keep([start, start + 1, start + 2, start + 3])
    assert r.prefix.evict() == 20
    assert 0 < max(way.waiting) <= max(one, in_flight)
    assert r.prefix.nbytes["host"] == 20 * (one + 4 * 8)


@some_caches
def test_what_the_device_does_not_give_is_counted_and_computed_again(
    backend: ml.Backend, way: Way, cache: str, caplog: pytest.LogCaptureFixture
) -> None:
    r = Rig(ConversationSetup(cache), only_protocol(backend, way), tiers=[HostTier(), MemoryStore()])
    r.keep(LONG)
    assert r.prefix.failed == {"host": 0, "store": 0}
    way.broken = 1
    count = r.prefix.evict()
    assert r.prefix.failed == {"host": 1, "store": 0}
    assert "did not leave the device" in caplog.text
    assert way.broken == 0
    r.check_books()
    assert r.keep([*LONG, 1]) <= (20 if count > 1 else 0)
    r.check_books()
    r.prefix.evict()
    assert r.keep([*LONG, 1, 2]) == 21
    assert r.prefix.failed == {"host": 1, "store": 0}


def test_what_fails_on_the_callers_own_thread_is_raised_and_stays(backend: ml.Backend) -> None:
    plan = Plan()
    r = Rig(ConversationSetup(), only_protocol(backend, plan), tiers=[HostTier()])
    r.keep(LONG)
    nbytes = r.prefix.nbytes
    plan.arm(0)
    with pytest.raises(InjectedError):
        r.prefix.evict()
    plan.arm(None)
    assert r.prefix.nbytes == nbytes
    assert r.prefix.evict() == 1
    assert r.keep([*LONG, 1]) == 20
    r.check_books()


@some_caches
def test_close_waits_for_what_is_under_way(backend: ml.Backend, way: Way, cache: str) -> None:
    store = MemoryStore()
    limited = only_protocol(backend, way)
    r = Rig(ConversationSetup(cache), limited, budget=0, tiers=[HostTier(0), store])
    way.seconds = 0.001
    r.keep(LONG)
    r.prefix.close()
    r.check_empty()
    assert r.prefix.failed == {"host": 0, "store": 0}
    assert r.prefix.tree.worker is not None
    assert r.prefix.tree.worker._thread is None
    other = Rig(ConversationSetup(cache), backend, tiers=[store])
    assert other.keep([*LONG, 1]) == 20
    other.prefix.close()


def test_what_is_being_written_goes_to_host_memory_without_another_copy(
    backend: ml.Backend, way: Way
) -> None:
    store = SlowStore()
    store.gate.clear()
    setup = ConversationSetup(options={"write_through": True})
    r = Rig(setup, only_protocol(backend, way), tiers=[HostTier(), store])
    r.keep(LONG)
    assert r.prefix.nbytes["writing"]
    way.taken.clear()
    r.prefix.evict()
    assert (r.prefix.nbytes["device"], r.prefix.nbytes["host"]) == (0, r.prefix.nbytes["writing"])
    store.gate.set()
    r.prefix.flush()
    assert way.taken == []
    assert r.keep([*LONG, 1]) == 20


def test_what_is_forgotten_while_it_is_under_way_stays_forgotten(backend: ml.Backend, way: Way) -> None:
    r = Rig(ConversationSetup(), only_protocol(backend, way), budget=0, tiers=[HostTier()])
    way.seconds = 0.001
    r.keep(LONG)
    r.prefix.clear()
    assert r.prefix.nbytes == {"device": 0, "leaving": 0, "host": 0}
    assert r.keep(LONG) == 0
    r.check_books()


def test_what_host_memory_has_no_room_for_any_more_is_forgotten_while_it_is_under_way(
    backend: ml.Backend, way: Way
) -> None:
    r = Rig(
        ConversationSetup(),
        only_protocol(backend, way),
        budget=0,
        tiers=[HostTier(30 * (ConversationSetup().token_bytes + 8))],
    )
    way.gate.clear()
    r.keep(LONG)
    r.keep([*range(100, 120)])
    assert [node.data.leaving is not None for node in r.prefix.tree.radix_tree] == [True], "one has room"
    way.gate.set()
    r.prefix.flush()
    assert (r.peek([*LONG, 1]), r.peek([*range(100, 120), 1])) == (0, 20)
    r.check_books()


def test_a_snapshot_is_had_at_any_time_of_its_way(backend: ml.Backend, way: Way) -> None:
    cache = ConversationSetup().make(backend)
    worker = OffloadWorker(only_protocol(backend, way), 1 << 20)
    way.gate.clear()
    transfer = worker.send(cache.snapshot(0), None)
    assert transfer.content() is transfer.snapshot
    way.gate.set()
    worker.drain()
    assert worker.waiting == transfer.nbytes == 0
    assert transfer.content() is transfer.serialized
    assert [*worker.finished()] == [transfer]
