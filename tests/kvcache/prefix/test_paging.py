"""Pages that a device copies by itself: nobody waits who need not, nobody meets a copy that is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch, serialize
from kvcache.cache import SequenceLostError
from kvcache.prefix.loading import restore_serialized
from kvcache.prefix.tiers import HostTier
from kvcache.stores import MemoryStore
from kvcache.testing.rigs.protocol import only_protocol
from ml.testing.transfers import PageTransferTests

from ...rigs.late_device import LateBackend, LateTransfer
from .rigs.conversing import LONG, ConversationSetup, Rig, every_cache, some_caches
from .test_conversations import run_machine

OTHER = [*range(100, 120)]
STRAIGHT = ("causal", "chunked", "wrapper of chunks")
"""What goes straight into cells."""


class TestLateDevice(PageTransferTests):
    """The device of these tests is NumPy's, but for its pages."""

    @pytest.fixture
    def open_backend(self) -> Iterator[Callable[[], Any]]:
        opened: list[LateBackend] = []

        def open_one() -> LateBackend:
            opened.append(LateBackend(len(opened)))
            return opened[-1]

        yield open_one
        for backend in opened:
            backend.close()
            assert not backend.broken


@pytest.fixture
def device() -> Iterator[LateBackend]:
    with LateBackend() as backend:
        yield backend
    assert not backend.broken


def rig_of(device: LateBackend, cache: str = "causal", tiers: Any = None, **changes: Any) -> Rig:
    """A cache from which all has to leave at once."""
    setup = replace(ConversationSetup(cache), **changes)
    return Rig(setup, device, budget=0, tiers=[HostTier()] if tiers is None else tiers)


@every_cache
def test_conversations_on_a_device_that_pages_by_itself_see_what_was_said(
    device: LateBackend, cache: str
) -> None:
    run_machine(device, 2, cache=cache)


@pytest.mark.parametrize("cache", STRAIGHT)
def test_pages_come_straight_into_the_cells(device: LateBackend, cache: str) -> None:
    r = rig_of(device, cache)
    r.keep(LONG)
    r.prefix.flush()
    chat = r.begin([*LONG, 1])
    assert (chat.cached, r.prefix.stats.host) == (20, 20)
    buffers = [
        half.tensor.native
        for _, _, part in r.parts_of()
        for held in part._buffers.values()
        for half in (held.key, held.value)
    ]
    assert len(device.targets) == len(buffers)
    for target, buffer in zip(device.targets, buffers, strict=True):
        assert np.shares_memory(target, buffer), "no tensor lies between"
    chat.prefill()
    chat.close()


def test_others_go_on_while_pages_arrive_and_only_who_reads_them_waits(device: LateBackend) -> None:
    r = rig_of(device)
    r.keep(LONG)
    r.prefix.flush()
    other = r.chat(OTHER)
    device.gate.clear()
    waited: list[LateTransfer] = []

    def joined(transfer: LateTransfer) -> None:
        waited.append(transfer)
        device.gate.set()

    device.joined = joined
    chat = r.begin([*LONG, 1])
    assert chat.cached == 20
    for token in range(3):
        other.say([200 + token])
    assert not waited, "nothing of other sequences waits"
    chat.prefill()
    assert len(waited) == 1
    other.say([300])
    for one in (chat, other):
        one.close()


class Arriving:
    """A cache of two sequences, the first of which has tokens on their way that wait until asked."""

    def __init__(self, device: LateBackend) -> None:
        self.device = device
        self.cache = kvcache.CausalCache(shift=lambda ctx, layer, key, offsets: key.scale(ctx, 2.0))
        self.cache.init(device, ml.DType.F32, 2, 24, 48)
        self.rows = np.arange(1.0, 81, dtype=np.float32).reshape(20, 2, 2)
        self.put(0, range(20), self.rows)
        self.detached = self.cache.snapshot(0)
        self.page = serialize(device, self.detached)
        self.cache.copy_prefix(0, 1, 20)  # so that the first sequence does not come to lie at its home
        self.detached.detach()
        self.cache.remove(0, 0)
        device.gate.clear()
        device.joined = lambda transfer: device.gate.set()
        assert restore_serialized(self.cache, 0, [self.page])

    def put(self, seq: int, positions: Sequence[int], rows: np.ndarray) -> None:
        with self.device.new_context() as ctx:
            self.cache.start_forward(ctx, Batch([*positions], [seq] * len(positions)))
            self.cache.put(ctx, ctx.from_numpy(rows), ctx.from_numpy(rows))

    def check(self, seq: int, expected: np.ndarray) -> None:
        assert self.device.gate.is_set(), "nobody has waited"
        key = serialize(self.device, self.cache.snapshot(seq)).arrays["0.0"]
        np.testing.assert_array_equal(key.transpose(1, 0, 2), expected)


def _left(r: Arriving) -> None:
    r.cache.remove(0, 0)
    r.put(0, range(20), -r.rows)
    r.check(0, -r.rows)


def _arriving_twice(r: Arriving) -> None:
    r.cache.remove(0, 0)
    assert restore_serialized(r.cache, 0, [r.page])
    r.check(0, r.rows)


def _restored(r: Arriving) -> None:
    r.cache.remove(0, 0)
    assert r.cache.restore(0, r.detached)
    r.check(0, r.rows)


def _moved(r: Arriving) -> None:
    r.cache.remove(1, 0)
    r.cache.defrag()
    r.check(0, r.rows)


def _shifted(r: Arriving) -> None:
    r.cache.remove(0, 0, 5)
    r.check(0, 2 * r.rows[5:])


def _copied(r: Arriving) -> None:
    r.cache.copy_prefix(0, 1, 20)
    r.cache.remove(0, 0)
    r.put(1, [20], r.rows[:1])
    r.check(1, np.concatenate((r.rows, r.rows[:1])))


def _read(r: Arriving) -> None:
    with r.device.new_context() as ctx:
        r.cache.start_forward(ctx, Batch([19], [0]), read_only=True)
        key, _, mask = r.cache.get(ctx)
        assert isinstance(mask, ml.Tensor)
        np.testing.assert_array_equal(key.to_numpy()[mask.to_numpy()[0] == 0], r.rows)


def _closed(r: Arriving) -> None:
    snapshot = r.cache.snapshot(0)
    r.cache.close()
    r.cache.init(r.device, ml.DType.F32, 2, 24, 48)
    assert r.cache.restore(0, snapshot)
    r.check(0, r.rows)


@pytest.mark.parametrize(
    "use", [_left, _arriving_twice, _restored, _moved, _shifted, _copied, _read, _closed]
)
def test_cells_are_not_used_before_what_arrives_there_is_there(
    device: LateBackend, use: Callable[[Arriving], None]
) -> None:
    use(Arriving(device))
    assert device.gate.is_set()


@pytest.mark.parametrize("cache", STRAIGHT)
def test_a_copy_that_fails_late_loses_its_sequence_and_no_other(device: LateBackend, cache: str) -> None:
    r = rig_of(device, cache)
    r.keep(LONG)
    r.prefix.flush()
    other = r.chat(OTHER)
    device.failing = 1
    chat = r.begin([*LONG, 1])
    with pytest.raises(ml.DeviceError, match="told to fail"):
        chat.prefill()
    with pytest.raises(SequenceLostError):
        r.start_only(chat.seq, 20, 1)
    chat.close(keep=False)
    other.say([7])
    other.close()
    r.prefix.clear()
    assert r.keep([*LONG, 1]) == 0


@some_caches
def test_what_does_not_get_out_is_counted_and_computed_again(device: LateBackend, cache: str) -> None:
    r = Rig(ConversationSetup(cache), device, tiers=[HostTier()])
    r.keep(LONG)
    device.failing = 1
    r.prefix.evict()
    assert r.prefix.failed["host"] == 1
    r.keep([*LONG, 1])
    r.check_books()


def test_without_page_locked_memory_pages_go_by_the_thread(
    device: LateBackend, caplog: pytest.LogCaptureFixture
) -> None:
    device.locked = 0
    r = rig_of(device)
    r.keep(LONG)
    r.prefix.flush()
    assert "page-locked" in caplog.text
    assert r.keep([*LONG, 1]) == 20


def test_a_page_that_a_store_lent_is_read_before_it_is_given_back(device: LateBackend) -> None:
    store = MemoryStore()
    r = rig_of(device, tiers=[store])
    r.keep(LONG)
    r.prefix.close()
    r = rig_of(device, tiers=[store])
    r.keep([1, 2, 3])  # the cache knows its layers now
    r.prefix.flush()
    device.targets.clear()
    device.gate.clear()
    opener = threading.Timer(0.05, device.gate.set)
    opener.start()
    chat = r.begin([*LONG, 1])
    opener.join()
    assert (chat.cached, bool(device.targets)) == (20, True)
    assert all(transfer.done() for transfer in device.transfers)


def test_a_backend_of_the_required_protocol_alone_pages_as_ever(device: LateBackend) -> None:
    plain = only_protocol(device)
    assert not isinstance(plain, ml.SupportsTransfers)
    r = Rig(ConversationSetup(), plain, budget=0, tiers=[HostTier()])
    r.keep(LONG)
    assert r.keep([*LONG, 1]) == 20
    assert isinstance(r.cache, kvcache.CausalCache)
