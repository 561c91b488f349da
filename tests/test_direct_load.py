"""Pages put straight into a cache: the bits of a fresh prefill, or nothing; never anything damaged."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch, HostTier, PrefixCache
from kvcache.offload import direct_load as arriving
from kvcache.stores import FileStore, MemoryStore, SerializedSnapshot, StoreUnavailable, pack, unpack
from ml import DType, Layout

HEADS, DIM, WIDE, CHUNK = 2, 64, 32, 8
"""DIM of keys and WIDE of values: whole blocks of the quantized formats."""
NAMES = ("numpy", "torch", "mlx")
DTYPES = (DType.F32, DType.F16, DType.BF16, DType.Q8_0, DType.Q4_0)
TABLE = np.random.default_rng(3).normal(size=(100, HEADS, DIM)).astype(np.float32)

Backends = Callable[[str], ml.Backend]


@pytest.fixture(params=["runs", "crumbs"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether bytes are read to where they belong, or in pieces that are copied there."""
    monkeypatch.setattr(arriving, "RUN", 1 if request.param == "runs" else 1 << 30)
    return str(request.param)


class Straight:
    """A store that only hands out its bytes on the way: a page that is had otherwise is an error."""

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


def make(backend: ml.Backend, dtype: DType = DType.F32, kind: str = "causal", **options: Any) -> Any:
    """A cache that has been used: only that one knows which layers it has, and what they hold."""
    cache = unused(backend, dtype, kind, **options)
    evaluate(cache, 0, 0, [0])
    cache.remove(0, 0)
    return cache


def unused(backend: ml.Backend, dtype: DType = DType.F32, kind: str = "causal", **options: Any) -> Any:
    cache: Any = kvcache.CausalCache()
    if kind == "wrapper":
        cache = kvcache.WrapperCache(kvcache.CausalCache(), kvcache.ChunkedCache(5))
    if options:
        cache.set_config(ml.CacheConfig(**options))
    cache.init(backend, dtype, 3, 64, 64)
    return cache


def over(cache: Any, *tiers: Any) -> PrefixCache:
    return PrefixCache(cache, tiers=tiers, identity={"model": "a"}, block_size=CHUNK)


def evaluate(cache: Any, seq: int, begin: int, tokens: Sequence[int]) -> None:
    """K and V of three layers (one of the first cache, two of the second) that depend on the token alone."""
    if not tokens:
        return
    with cache.backend.new_context() as ctx:
        cache.start_forward(ctx, Batch(range(begin, begin + len(tokens)), [seq] * len(tokens)))
        for layer in range(3):
            if isinstance(cache, kvcache.WrapperCache):
                cache.set_layer_type(min(layer, 1))
            cache.set_layer(layer)
            rows = TABLE[[*tokens]] * (layer + 1)
            cache.put(ctx, ctx.from_numpy(rows), ctx.from_numpy(rows[..., :WIDE]))
        ctx.compute()


def talk(prefix: PrefixCache, tokens: Sequence[int]) -> int:
    """A conversation of these tokens; how many of them were there already."""
    with prefix.begin([*tokens, 99]) as session:
        cached = session.cached
        evaluate(prefix.cache, session.seq, cached, tokens[cached:])
        return cached


def held(cache: Any, seq: int, count: int) -> dict[str, np.ndarray]:
    """What a sequence holds of its first tokens, by (cache, layer, part), as (tokens, heads, ...)."""
    page = kvcache.serialize(cache.backend, cache.snapshot(seq, 0, count))
    found = {}
    parts = page.meta["snapshot"].get("parts", [page.meta["snapshot"]])
    for part in parts:
        for _, _, tensors in part["layers"]:
            for name, axes in tensors:
                found[name] = page.arrays[name].transpose([axes.index(i) for i in range(len(axes))])
    return found


def check(prefix: PrefixCache, tokens: Sequence[int], expected: int) -> None:
    """A new conversation finds so many of the tokens, and sees the bits that a fresh prefill has."""
    cache = prefix.cache
    fresh = make(cache.backend, cache_dtype(cache), "wrapper" if hasattr(cache, "caches") else "causal")
    evaluate(fresh, 0, 0, tokens)
    with prefix.begin([*tokens, 99]) as session:
        assert session.cached == expected
        evaluate(cache, session.seq, expected, tokens[expected:])
        found, wanted = held(cache, session.seq, len(tokens)), held(fresh, 0, len(tokens))
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            assert found[name].tobytes() == array.tobytes(), name


def cache_dtype(cache: Any) -> DType:
    dtype: DType = getattr(cache, "caches", (cache,))[0]._dtype
    return dtype


def free_cells(cache: Any) -> Iterator[np.ndarray]:
    """What lies in cells that nobody holds."""
    cache._table.sweep()
    free = np.flatnonzero(cache._table.references == 0)
    assert free.size == cache._table.free
    with cache.backend.new_context() as ctx:
        for buffers in cache._buffers.values():
            for buffer in (buffers.key, buffers.value):
                yield buffer.read(ctx, 0, buffer.cells).to_numpy()[free]


def all_is_free(cache: Any) -> None:
    """Nobody holds a cell any more."""
    cache._table.sweep()
    assert cache._table.free == cache._table.cells
    assert not cache._table.references.any()


TOKENS = [*range(30)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", NAMES)
def test_a_stored_conversation_has_the_bits_of_a_fresh_prefill(
    backends: Backends, name: str, dtype: DType, how: str, store: Any
) -> None:
    backend = backends(name)
    with over(make(backend, dtype), store) as prefix:
        talk(prefix, TOKENS)
    straight = Straight(store)
    with over(make(backend, dtype), straight) as prefix:
        check(prefix, TOKENS, 30)
        check(prefix, [*TOKENS[:20], 50, 51], 20)  # shared in the cache by now
        prefix.clear()
        check(prefix, [*TOKENS[:20], 50, 51], 16)  # as far as pages go that both have
    assert straight.opened


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_that_was_never_used_learns_its_layers_from_the_first_page(
    backends: Backends, name: str, store: Any
) -> None:
    with over(make(backends(name)), store) as prefix:
        talk(prefix, TOKENS)
    with over(unused(backends(name)), store) as prefix:
        check(prefix, TOKENS, 30)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("layout", list(Layout))
def test_pages_go_straight_into_every_arrangement(
    backends: Backends, layout: Layout, permuted: bool, how: str, store: Any
) -> None:
    backend = backends("numpy")
    options = {"layout": layout, "permuted_v": permuted}
    with over(make(backend, DType.F16), store) as prefix:
        talk(prefix, TOKENS)
    with over(make(backend, DType.F16, **options), Straight(store)) as prefix:
        check(prefix, TOKENS, 30)
        talk(prefix, [*range(60, 90)])
    with over(make(backend, DType.F16), Straight(store)) as prefix:
        check(prefix, [*range(60, 90)], 30)


@pytest.mark.parametrize("name", NAMES)
def test_all_caches_of_a_wrapper_receive_their_part(
    backends: Backends, name: str, how: str, store: Any
) -> None:
    backend = backends(name)
    with over(make(backend, kind="wrapper"), store) as prefix:
        talk(prefix, TOKENS)
    with over(make(backend, kind="wrapper"), Straight(store)) as prefix:
        check(prefix, TOKENS, 30)
        assert prefix.stats.store == 30


def test_turns_that_end_inside_a_chunk_are_found_one_by_one(backends: Backends, store: Any) -> None:
    for length in (3, 5, 11, 12, 13, 30):  # each turn's pages end where it ends
        with over(make(backends("numpy")), store) as prefix:
            talk(prefix, TOKENS[:length])
    with over(make(backends("numpy")), Straight(store)) as prefix:
        check(prefix, TOKENS, 30)
        assert prefix.stats.store == 30


def test_a_page_that_begins_before_what_is_held_is_restored_in_the_other_way(
    backends: Backends, store: Any
) -> None:
    with over(make(backends("numpy")), store) as prefix:
        talk(prefix, TOKENS)
    with over(make(backends("numpy")), store) as prefix, prefix.begin([0, 1, 2, 3, 70]) as other:
        evaluate(prefix.cache, other.seq, other.cached, [*range(4), 70][other.cached :])
        check(prefix, TOKENS, 30)


def test_cells_that_lie_scattered_are_filled_in_the_other_way(backends: Backends, store: Any) -> None:
    with over(make(backends("numpy")), store) as prefix:
        talk(prefix, TOKENS)
    cache = kvcache.CausalCache(lambda ctx, layer, key, offsets: key)
    cache.init(backends("numpy"), DType.F32, 3, 24, 64)
    evaluate(cache, 0, 0, [0])
    cache.remove(0, 0)
    with over(cache, store) as prefix, prefix.begin([*range(40, 90), 99]) as other:
        evaluate(cache, other.seq, 0, [*range(40, 90)])  # in 50 of 72 cells, of which every second is freed
        for position in range(24, 0, -1):
            cache.remove(other.seq, 2 * position, 2 * position + 1)
        assert not isinstance(cache._table.choose(1, 30), int)
        check(prefix, TOKENS, 30)
        other.rewind(0)


@pytest.mark.parametrize("page", range(4))
@pytest.mark.parametrize("name", NAMES)
def test_damage_costs_the_pages_from_there_on_and_leaves_nothing_behind(
    backends: Backends, tmp_path: Path, name: str, page: int, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make(backends(name))
    with FileStore(tmp_path, durable=False) as store:
        with over(make(backends(name)), store) as prefix:
            talk(prefix, TOKENS)
            chain = prefix.tree.keys.chain(TOKENS)
        ends = [8, 16, 24, 30]
        path = tmp_path / "pages" / f"{chain.at(ends[page])}.safetensors"
        data = bytearray(path.read_bytes())
        data[-4:] = np.float32(np.nan).tobytes()
        path.write_bytes(data)
        with over(cache, store) as prefix:
            with prefix.begin([*TOKENS, 99]) as session:
                assert session.cached == [0, *ends][page]
                for array in free_cells(cache):
                    assert np.isfinite(array.astype(np.float32)).all()
            assert store.usage().dropped == 1
            assert not path.exists()
            assert "dropped" in caplog.text
            check(prefix, TOKENS, [0, *ends][page])
        all_is_free(cache)
        with over(make(backends(name)), store) as prefix:
            check(prefix, TOKENS, 30)  # it was written again


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("left", [0, 1 << 30], ids=["in the arrays", "in the header"])
@pytest.mark.parametrize("error", [StoreUnavailable("gone"), OSError("strange")], ids=repr)
def test_a_store_that_fails_on_the_way_costs_nothing_but_another_way(
    backends: Backends, name: str, left: int, error: Exception, how: str
) -> None:
    class Store(MemoryStore):
        def reader(self, key: str) -> Any:
            return Failing(super().reader(key), left, error)

    store, cache = Store(), make(backends(name))
    with over(make(backends(name)), store) as prefix:
        talk(prefix, TOKENS)
    with over(cache, store) as prefix:
        with prefix.begin([*TOKENS, 99]) as session:
            assert session.cached == 30
            for array in free_cells(cache):
                assert np.isfinite(array.astype(np.float32)).all()
        check(prefix, TOKENS, 30)
    all_is_free(cache)


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupted_restore_leaves_the_cache_as_it_was(backends: Backends, name: str, how: str) -> None:
    class Store(MemoryStore):
        broken = False

        def reader(self, key: str) -> Any:
            found = super().reader(key)
            return Failing(found, 0, KeyboardInterrupt()) if self.broken else found

    store, cache = Store(), make(backends(name))
    with over(make(backends(name)), store) as prefix:
        talk(prefix, TOKENS)
    with over(cache, store) as prefix, prefix.begin([90, 91]) as other:
        evaluate(cache, other.seq, 0, [90, 91])
        before, free = held(cache, other.seq, 2), cache.free_cells
        store.broken = True
        with pytest.raises(KeyboardInterrupt):
            prefix.begin([*TOKENS, 99])
        assert cache.free_cells == free
        for array in free_cells(cache):
            assert not array.astype(np.float32).any()
        for found, wanted in zip(held(cache, other.seq, 2).values(), before.values(), strict=True):
            assert found.tobytes() == wanted.tobytes()
        store.broken = False
        check(prefix, TOKENS, 30)
    all_is_free(cache)


@pytest.mark.parametrize("name", NAMES)
def test_what_others_hold_is_not_written_over(backends: Backends, name: str, store: Any) -> None:
    """Neither sequences, nor snapshots, nor arrays of the framework that were handed out."""
    backend = backends(name)
    with over(make(backend), store) as prefix:
        talk(prefix, TOKENS)
    cache = make(backend)
    evaluate(cache, 2, 0, [80, 81, 82])
    with over(cache, Straight(store)) as prefix:
        snapshot = cache.snapshot(2, 0, 2)
        kept = kvcache.serialize(backend, snapshot)
        native = cache._buffers[0].key.tensor.native
        taken = np.array(native, copy=True) if name != "torch" else native.clone().numpy()
        before = held(cache, 2, 3)
        with prefix.begin([*TOKENS, 99]) as session:
            assert session.cached == 30
            for found, wanted in zip(held(cache, 2, 3).values(), before.values(), strict=True):
                assert found.tobytes() == wanted.tobytes()
            assert (
                kvcache.serialize(backend, snapshot).arrays["0.0"].tobytes() == kept.arrays["0.0"].tobytes()
            )
            if name == "mlx":  # an array of MLX never changes
                assert np.array(native).tobytes() == taken.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_pages_in_host_memory_go_straight_too(backends: Backends, name: str) -> None:
    cache = make(backends(name), DType.F16)
    with over(cache, HostTier()) as prefix:
        talk(prefix, TOKENS)
        prefix.evict()
        assert prefix.nbytes["device"] == 0
        check(prefix, TOKENS, 30)
        assert prefix.stats.host == 30


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_restored_behind_what_is_there_or_in_its_place(backends: Backends, name: str) -> None:
    cache, fresh = make(backends(name)), make(backends(name))
    evaluate(fresh, 0, 0, TOKENS)
    page = kvcache.serialize(cache.backend, fresh.snapshot(0, 8, 30))
    evaluate(cache, 1, 0, [*range(40, 64)])
    evaluate(cache, 0, 0, TOKENS[:8])
    assert arriving.restore_page(cache, 0, page)
    assert not arriving.restore_page(cache, 2, page)  # what comes before it is not there
    evaluate(cache, 2, 0, TOKENS[:20])
    assert arriving.restore_page(cache, 2, page, target=25)
    for seq, count in ((0, 30), (2, 25)):
        for found, wanted in zip(
            held(cache, seq, count).values(), held(fresh, 0, count).values(), strict=True
        ):
            assert found.tobytes() == wanted.tobytes()


def test_short_reads_are_gone_on_with(
    backends: Backends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    readv = os.readv

    def short(fd: int, buffers: Sequence[Any]) -> int:
        first = next(memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes)
        return readv(fd, [first[: max(1, len(first) // 3)]])

    with FileStore(tmp_path, durable=False) as store:
        with over(make(backends("numpy")), store) as prefix:
            talk(prefix, TOKENS)
        monkeypatch.setattr(os, "readv", short)
        with over(make(backends("numpy")), Straight(store)) as prefix:
            check(prefix, TOKENS, 30)


def test_a_header_in_another_order_is_read_as_well(backends: Backends) -> None:
    """As another writer of the format may put it: positions behind the rest."""
    cache, fresh = make(backends("numpy")), make(backends("numpy"))
    evaluate(fresh, 0, 0, TOKENS)
    page = unpack(b"".join(pack(kvcache.serialize(cache.backend, fresh.snapshot(0)))))
    turned = SerializedSnapshot(page.meta, dict(reversed(page.arrays.items())))
    assert arriving.restore_page(cache, 0, turned)
    for found, wanted in zip(held(cache, 0, 30).values(), held(fresh, 0, 30).values(), strict=True):
        assert found.tobytes() == wanted.tobytes()
