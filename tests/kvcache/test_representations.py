"""What caches, sessions and stores show of themselves, and sizes as people write them."""

from __future__ import annotations

import importlib
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import (
    Batch,
    CausalCache,
    EncoderCache,
    HostTier,
    InvalidRangeError,
    PrefixCache,
    RecurrentCache,
    WrapperCache,
)
from kvcache.storage.sizes import bytes_text
from kvcache.stores import MemoryStore, StoreValueError, open_store
from kvcache.stores.sizes import parse_bytes

CACHES = {
    "causal": CausalCache,
    "sliding": lambda: kvcache.SlidingWindowCache(7),
    "chunked": lambda: kvcache.ChunkedCache(8),
    "encoder": EncoderCache,
    "recurrent": lambda: RecurrentCache((2, 3), (2, 2)),
    "wrapper": lambda: WrapperCache(kvcache.SlidingWindowCache(7), CausalCache()),
}


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest) -> Any:
    """Not yet bound to a backend."""
    return CACHES[request.param]()


def test_completion_hides_nothing(cache: Any) -> None:
    shown = set(dir(cache))
    assert {"init", "start_forward", "set_layer", "put", "get", "attend", "remove", "copy_prefix"} <= shown
    assert {name for kind in type(cache).__mro__ for name in vars(kind)} <= shown


def test_a_cache_says_what_it_is_and_how_full(numpy_backend: ml.Backend) -> None:
    cache = CausalCache()
    assert repr(cache) == "<CausalCache, not bound to a backend: call init>"
    cache.init(numpy_backend, ml.DType.F32, 4, 128, 64)
    with numpy_backend.new_context() as ctx, PrefixCache(cache, tiers=[HostTier()]) as prefix:
        session = prefix.begin([1, 2, 3])
        cache.start_forward(ctx, Batch([0, 1, 2], [0] * 3))
        x = ctx.full((3, 2, 8), 1.0, ml.DType.F32)
        cache.put(ctx, x, x)
        of_cache = "<CausalCache: F32 on numpy, sequences: 4, cells: 3 of 512, 64.0 KiB of K and V>"
        assert repr(cache) == of_cache
        assert repr(session) == "<Session, sequence 0: 3 tokens, 0 of them were cached>"
        assert repr(prefix).startswith("<PrefixCache, open sessions: 1; kept: nothing; ")
        assert repr(prefix).endswith(f"over {of_cache}>")
        session.close()
        assert repr(session) == "<Session, closed: 3 tokens, 0 of them were cached>"
    assert repr(prefix) == "<PrefixCache, closed>"
    cache.close()
    assert repr(cache) == "<CausalCache, closed>"


def test_every_kind_of_cache_has_a_representation(cache: Any, numpy_backend: ml.Backend) -> None:
    assert "call init" in repr(cache)
    cache.init(numpy_backend, ml.DType.F16, 2, 32, 32)
    assert repr(cache).startswith(f"<{type(cache).__name__}")
    assert "F16 on numpy, sequences: 2" in repr(cache)
    cache.close()
    assert "closed" in repr(cache)


def test_a_name_is_no_backend_and_an_array_no_tensor(cache: Any, numpy_backend: ml.Backend) -> None:
    """Each mistake is named, and the cache goes on as if it had not been made."""
    for wrong in ("numpy", None):
        with pytest.raises(InvalidRangeError, match=f"init: backend={wrong!r}; it must be an open backend"):
            cache.init(wrong, ml.DType.F32, 2, 32, 32)
    cache.init(numpy_backend, ml.DType.F32, 2, 32, 32)
    with numpy_backend.new_context() as ctx:
        with pytest.raises(
            kvcache.InvalidBatchError, match=r"batch=\(\[0\], \[0\]\); it must be a kvcache.Batch"
        ):
            cache.start_forward(ctx, ([0], [0]))
        cache.start_forward(ctx, Batch([0], [0], multimodal=[(0, b"x")]))
        array = np.ones((1, 2, 8), np.float32)
        if isinstance(cache, kvcache.WrapperCache):
            cache.set_layer_type(1)
        for key, value in ((array, ctx.from_numpy(array)), (ctx.from_numpy(array), array)):
            with pytest.raises(ml.DTypeError, match=r"put: (key|value) is a numpy.ndarray"):
                cache.put(ctx, key, value)
        cache.put(ctx, ctx.from_numpy(array), ctx.from_numpy(array))
        with pytest.raises(ml.DTypeError, match=r"attend: query is a numpy.ndarray"):
            cache.attend(ctx, array, 1.0)
        assert cache.attend(ctx, ctx.from_numpy(array), 1.0).shape == (1, 2, 8)
    cache.close()


def test_a_prefix_cache_takes_no_closed_cache(numpy_backend: ml.Backend) -> None:
    cache = CausalCache()
    cache.init(numpy_backend, ml.DType.F32, max_sequences=1, capacity=8, max_batch=4)
    cache.close()
    with pytest.raises(kvcache.ClosedError, match="PrefixCache: the cache is closed"):
        PrefixCache(cache)


def test_a_prefix_cache_takes_an_empty_cache(numpy_backend: ml.Backend) -> None:
    cache = CausalCache()
    cache.init(numpy_backend, ml.DType.F32, 2, 32, 32)
    with numpy_backend.new_context() as ctx:
        some = ctx.zeros((2, 1, 4), ml.DType.F32)
        cache.start_forward(ctx, Batch([0, 1], [1, 1]))
        cache.put(ctx, some, some)
        with pytest.raises(
            InvalidRangeError, match=r"sequence 1 holds tokens up to position 1;.*remove\(1, 0\)"
        ):
            PrefixCache(cache)
        assert cache.positions(1).tolist() == [0, 1]
        cache.remove(1, 0)
        PrefixCache(cache).close()


def test_snapshots_and_measurements_say_what_they_are(numpy_backend: ml.Backend) -> None:
    cache = CausalCache()
    cache.init(numpy_backend, ml.DType.F32, 2, 32, 32)
    with numpy_backend.new_context() as ctx:
        some = ctx.zeros((2, 1, 4), ml.DType.F32)
        cache.start_forward(ctx, Batch([0, 1], [0, 0]))
        cache.put(ctx, some, some)
        snapshot = cache.snapshot(0)
    assert repr(snapshot) == "<AttentionSnapshot of [0, 2), 64 bytes, in the cache>"
    snapshot.detach()
    assert repr(snapshot) == "<AttentionSnapshot of [0, 2), 64 bytes, copied out of the cache>"
    even = kvcache.BreakEven(always=True)
    assert repr(even) == "<BreakEven, always: not measured yet, stores measured: 0>"
    even.computed(1000, 0.5)
    even.sized(4096, 2)
    assert repr(even).startswith("<BreakEven, always: 2,000 tokens of prompts/s, 2,048 bytes a token,")


@pytest.mark.parametrize("name", ["transformers", "mlx_lm"])
def test_completion_offers_what_an_integration_has(name: str) -> None:
    pytest.importorskip(name)
    module = importlib.import_module(f"kvcache.integrations.{name}")
    assert dir(module) == sorted(module.__all__)
    assert not [each for each in dir(module) if isinstance(getattr(module, each), types.ModuleType)]


def test_a_store_in_memory_says_what_it_has() -> None:
    store = MemoryStore(1000)
    store.put("a", [b"12345"])
    assert repr(store) == "<MemoryStore: 1 entries, 5 of 1,000 bytes>"
    store.close()
    assert repr(store) == "<MemoryStore, closed>"


def test_the_package_knows_its_version() -> None:
    assert kvcache.__version__ == version("ml-kvcache")
    citation = Path(__file__).resolve().parents[2] / "CITATION.cff"
    assert f"\nversion: {kvcache.__version__}\n" in citation.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("512MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("500MB", 500_000_000),
        ("1.5 gb", 1_500_000_000),
        ("64K", 65536),
        ("2t", 2 << 40),
        ("7", 7),
        ("9 B", 9),
        (5, 5),
    ],
)
def test_sizes_are_read_as_people_write_them(text: int | str, count: int) -> None:
    assert parse_bytes(text, "here") == count
    assert HostTier(text).budget == count
    store = open_store("memory", budget=text)
    assert isinstance(store, MemoryStore)
    assert store.budget == count


@pytest.mark.parametrize(
    "text", ["lots", "", "-1", "1.5.2MiB", "3 MiBs", "1e9", "1ib", "GiB", "1 0", "9" * 30, -1, True]
)
def test_what_is_no_size_is_refused(text: int | str) -> None:
    message = rf"budget={text!r}; it must be a number of bytes from 0, or a size such as"
    with pytest.raises(InvalidRangeError, match=f"HostTier: {message}"):
        HostTier(text)
    with pytest.raises(StoreValueError, match=f"open_store: {message}"):
        open_store("memory", budget=text)
    assert bytes_text(1536) == "1.5 KiB"
