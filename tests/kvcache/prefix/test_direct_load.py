"""Serialized snapshots read straight into a cache: the bits of a fresh prefill, or nothing.

What every query sees of them is checked bit by bit (rigs/conversing.py).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import CacheDType, HostTier
from kvcache.prefix import loading
from kvcache.storage.cell_table import CellTable
from kvcache.stores import FileStore, MemoryStore, SerializedSnapshot, StoreUnavailableError, pack, unpack
from ml import DType, Layout

from .rigs.conversing import ConversationSetup, Rig

NAMES = ("numpy", "torch", "mlx")
DTYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "F8_E4M3/AFFINE4_32", "F16/Q4_0")
TOKENS = [*range(30)]
ENDS = (8, 16, 24, 30)
"""Where the stored parts of TOKENS end."""

Backends = Callable[[str], ml.Backend]
every_backend = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def backends() -> Iterator[Backends]:
    """On the CPU: bytes are read straight to where the host may write."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def get(name: str) -> ml.Backend:
            device = {} if name == "numpy" else {"device": "cpu"}
            return stack.enter_context(ml.open_backend(name, **device))

        yield get


@pytest.fixture(params=["runs", "crumbs"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether bytes are read to where they belong, or in pieces that are copied there."""
    monkeypatch.setattr(loading, "RUN", 1 if request.param == "runs" else 1 << 30)
    return str(request.param)


class Straight:
    """A store that only hands out its bytes on the way: what is had otherwise is an error."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.put, self.stat, self.prefix = store.put, store.stat, store.prefix
        self.delete, self.close = store.delete, store.close
        self.opened = 0

    def reader(self, key: str) -> Any:
        self.opened += 1
        return self.store.reader(key)

    def get_into(self, key: str, buffer: Any) -> bool:
        raise AssertionError("get_into was called")


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    found: Any = MemoryStore() if request.param == "memory" else FileStore(tmp_path / "store", durable=False)
    yield found
    found.close()


def over(
    backend: ml.Backend,
    *tiers: Any,
    dtype: CacheDType = DType.F32,
    cache: str = "causal",
    used: bool = True,
    **config: Any,
) -> Rig:
    """A cache over ``tiers``; one that was ``used`` knows its layers, and what they hold."""
    arranged = ml.CacheConfig(**config) if config else None
    r = Rig(ConversationSetup(cache, 3, 64, 64, dtype, arranged, {"block_size": 8}), backend, tiers=tiers)
    if used:
        r.evaluate(0, [], [9])
        r.cache.remove(0, 0)
    return r


def stored(backend: ml.Backend, store: Any, tokens: Sequence[int] = TOKENS, **options: Any) -> list[str]:
    """Have a conversation of ``tokens`` kept in the store; the keys of its parts."""
    r = over(backend, store, **options)
    r.keep(tokens)
    r.prefix.close()
    return [r.prefix.tree.keys.chain(tokens).at(end) for end in ENDS if end <= len(tokens)]


def free_cells(r: Rig) -> Iterator[np.ndarray]:
    """What lies in cells that nobody holds."""
    table, buffers = r.cache.storage.table, r.cache.storage.buffers
    table.sweep()
    free = np.flatnonzero(table.references == 0)
    assert free.size == table.free
    with r.backend.new_context() as ctx:
        for layer in buffers.values():
            for buffer in (layer.key, layer.value):
                yield buffer.read(ctx, 0, buffer.cells).to_numpy()[free].astype(np.float32)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*itertools.product(NAMES[:1], DTYPES), *itertools.product(NAMES[1:], ("F16", "BF16", DTYPES[-2]))],
)
def test_a_stored_conversation_has_the_bits_of_a_fresh_prefill(
    backends: Backends, name: str, dtype: str, how: str, store: Any
) -> None:
    backend = backends(name)
    stored(backend, store, dtype=dtype)
    straight = Straight(store)
    r = over(backend, straight, dtype=dtype)
    assert r.keep([*TOKENS, 99]) == 30
    assert r.keep([*TOKENS[:20], 50, 51]) == 20, "shared in the cache by now"
    r.prefix.clear()
    assert r.keep([*TOKENS[:20], 50, 51]) == 16, "as far as parts go that both have"
    r.prefix.close()
    assert straight.opened


@every_backend
def test_a_cache_that_was_never_used_learns_its_layers_from_the_first_part(
    backends: Backends, name: str, store: Any
) -> None:
    stored(backends(name), store)
    assert over(backends(name), store, used=False).keep([*TOKENS, 99]) == 30


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("layout", list(Layout))
def test_snapshots_go_straight_into_every_arrangement(
    backend: ml.Backend, layout: Layout, permuted: bool, how: str, store: Any
) -> None:
    others = [*range(60, 90)]
    stored(backend, store, dtype=DType.F16)
    r = over(backend, Straight(store), dtype=DType.F16, layout=layout, permuted_v=permuted)
    assert r.keep([*TOKENS, 99]) == 30
    r.keep(others)
    r.prefix.close()
    assert over(backend, Straight(store), dtype=DType.F16).keep([*others, 99]) == 30


@every_backend
def test_all_caches_of_a_wrapper_receive_their_part(
    backends: Backends, name: str, how: str, store: Any
) -> None:
    stored(backends(name), store, cache="wrapper of chunks")
    r = over(backends(name), Straight(store), cache="wrapper of chunks")
    assert r.keep([*TOKENS, 99]) == r.prefix.stats.store == 30


def test_turns_that_end_inside_a_block_are_found_one_by_one(backend: ml.Backend, store: Any) -> None:
    for length in (3, 5, 11, 12, 13, 30):  # each turn's parts end where it ends
        stored(backend, store, TOKENS[:length])
    r = over(backend, Straight(store))
    assert r.keep([*TOKENS, 99]) == r.prefix.stats.store == 30


def test_a_part_that_begins_before_what_is_held_is_restored_in_the_other_way(
    backend: ml.Backend, store: Any
) -> None:
    stored(backend, store)
    r = over(backend, store)
    r.chat([0, 1, 2, 3, 70])
    assert r.keep([*TOKENS, 99]) == 30


def test_cells_that_lie_scattered_are_filled_in_the_other_way(
    backend: ml.Backend, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(backend, store)
    r = over(backend, store)
    every_second = lambda self, seq, count: np.flatnonzero(self.references == 0)[::2][:count]  # noqa: E731
    monkeypatch.setattr(CellTable, "choose", every_second)
    assert r.keep([*TOKENS, 99]) == 30


@pytest.mark.parametrize("page", range(4))
@every_backend
def test_damage_costs_the_pages_from_there_on_and_leaves_nothing_behind(
    backends: Backends, tmp_path: Path, name: str, page: int, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    left = [0, *ENDS][page]
    with FileStore(tmp_path, durable=False) as store:
        path = tmp_path / "pages" / f"{stored(backends(name), store)[page]}.entry"
        data = bytearray(path.read_bytes())
        data[-516:-512] = np.float32(np.nan).tobytes()
        path.write_bytes(data)
        r = over(backends(name), store)
        chat = r.begin([*TOKENS, 99])
        assert chat.cached == left
        assert all(np.isfinite(array).all() for array in free_cells(r))
        assert store.usage().dropped == 1
        assert not path.exists()
        assert "dropped" in caplog.text
        chat.prefill()
        chat.close()
        r.prefix.close()
        r.check_empty()
        assert over(backends(name), store).keep([*TOKENS, 99, 98]) == 31, "it was written again"


class Failing:
    """A reader that fails when so many bytes are left."""

    def __init__(self, reader: Any, left: int, error: BaseException) -> None:
        self.reader, self.least, self.error = reader, left, error
        self.close = reader.close

    @property
    def left(self) -> int:
        return int(self.reader.left)

    def fill(self, buffers: Sequence[Any]) -> None:
        if self.left - sum(memoryview(buffer).nbytes for buffer in buffers) <= self.least:
            for buffer in buffers:
                memoryview(buffer).cast("B")[:] = b"\xff" * memoryview(buffer).nbytes
            raise self.error
        self.reader.fill(buffers)


class FailingStore(MemoryStore):
    """Its readers fail with ``error``, unless that is None."""

    left = 0
    error: BaseException | None = None

    def reader(self, key: str) -> Any:
        found = super().reader(key)
        return found if self.error is None else Failing(found, self.left, self.error)


@every_backend
@pytest.mark.parametrize("left", [0, 1 << 30], ids=["in the arrays", "in the header"])
@pytest.mark.parametrize("error", [StoreUnavailableError("gone"), OSError("strange")], ids=repr)
def test_a_store_that_fails_on_the_way_costs_nothing_but_another_way(
    backends: Backends, name: str, left: int, error: Exception, how: str
) -> None:
    store = FailingStore()
    stored(backends(name), store)
    store.left, store.error = left, error
    r = over(backends(name), store)
    chat = r.begin([*TOKENS, 99])
    assert chat.cached == 30
    assert all(np.isfinite(array).all() for array in free_cells(r))
    chat.prefill()
    r.prefix.close()
    r.check_empty()


@every_backend
def test_an_interrupted_restore_leaves_the_cache_as_it_was(backends: Backends, name: str, how: str) -> None:
    store = FailingStore()
    stored(backends(name), store)
    store.error = KeyboardInterrupt()
    r = over(backends(name), store, used=False)
    other = r.chat([90, 91])
    free = r.cache.free_cells
    with pytest.raises(KeyboardInterrupt):
        r.prefix.begin([*TOKENS, 99])
    assert r.cache.free_cells == free
    assert not any(array.any() for array in free_cells(r))
    other.say([92])
    store.error = None
    assert r.keep([*TOKENS, 99]) == 30
    r.prefix.close()
    r.check_empty()


@every_backend
def test_what_others_hold_is_not_written_over(backends: Backends, name: str, store: Any) -> None:
    """Neither sequences, nor snapshots, nor arrays of the framework that were handed out."""
    backend = backends(name)
    stored(backend, store)
    r = over(backend, Straight(store))
    other = r.chat([80, 81, 82])
    snapshot = r.cache.snapshot(other.seq, 0, 2)
    kept = kvcache.serialize(backend, snapshot).arrays["0.0"].tobytes()
    native = r.cache.storage.buffers[0].key.tensor.native
    taken = np.array(native, copy=True) if name == "mlx" else None
    assert r.begin([*TOKENS, 99]).cached == 30
    other.say([83])
    assert kvcache.serialize(backend, snapshot).arrays["0.0"].tobytes() == kept
    assert taken is None or np.array(native).tobytes() == taken.tobytes(), "an array of MLX never changes"


@every_backend
def test_a_snapshot_in_host_memory_and_the_beginning_of_one_go_straight_too(
    backends: Backends, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = over(backends(name), HostTier(), dtype=DType.F16)
    r.keep(TOKENS)
    r.prefix.evict()
    assert r.prefix.nbytes["device"] == 0
    monkeypatch.setattr(loading, "deserialize", None)
    assert r.keep(TOKENS) == r.prefix.stats.host == 29
    r.prefix.evict()
    assert r.keep([*TOKENS, 99]) == 30
    assert r.keep([*TOKENS[:20], 99]) == 20


@every_backend
def test_a_snapshot_is_restored_behind_what_is_there_or_in_its_place(backends: Backends, name: str) -> None:
    r, fresh = over(backends(name)), over(backends(name))
    fresh.evaluate(0, [], TOKENS)
    serialized = kvcache.serialize(fresh.backend, fresh.cache.snapshot(0, 8, 30))
    r.evaluate(1, [], [*range(40, 64)])
    r.evaluate(0, [], TOKENS[:8])
    assert loading.restore_serialized(r.cache, 0, [serialized])
    assert not loading.restore_serialized(r.cache, 2, [serialized]), "what comes before it is not there"
    r.evaluate(2, [], TOKENS[:20])
    assert loading.restore_serialized(r.cache, 2, [serialized], target=25)
    r.evaluate(0, TOKENS, [98])
    r.evaluate(2, TOKENS[:25], [99])


def test_short_reads_are_gone_on_with(
    backend: ml.Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    readv = os.readv

    def short(fd: int, buffers: Sequence[Any]) -> int:
        first = next(memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes)
        return readv(fd, [first[: max(1, len(first) // 3)]])

    with FileStore(tmp_path, durable=False) as store:
        stored(backend, store)
        monkeypatch.setattr(os, "readv", short)
        assert over(backend, Straight(store)).keep([*TOKENS, 99]) == 30


def test_a_header_in_another_order_is_read_as_well(backend: ml.Backend) -> None:
    """As another writer of the format may put it: positions behind the rest."""
    r, fresh = over(backend), over(backend)
    fresh.evaluate(0, [], TOKENS)
    found = unpack(b"".join(pack(kvcache.serialize(backend, fresh.cache.snapshot(0)))))
    turned = SerializedSnapshot(found.meta, dict(reversed(found.arrays.items())))
    assert loading.restore_serialized(r.cache, 0, [turned])
    r.evaluate(0, TOKENS, [99])
