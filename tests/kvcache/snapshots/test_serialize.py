"""Pages: what a snapshot holds, in host memory and back, bit for bit, on any backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.snapshots.serialize import deserialize, serialize
from kvcache.stores import SerializedSnapshot, pack, unpack
from ml import DType, Layout

from ...rigs.late_device import LateBackend

TOKENS, HEADS, DIM, WIDE = 7, 2, 64, 32
"""DIM of keys and WIDE of values: whole blocks of the quantized formats."""
NAMES = ("numpy", "torch", "mlx")
FLOATS = (DType.F32, DType.F16, DType.BF16)
BLOCKS = ("Q8_0", "Q4_0", "F8_E4M3/AFFINE4_32", "F16/Q4_0")

MAKE: dict[str, Callable[[], Any]] = {
    "causal": kvcache.CausalCache,
    "chunked": lambda: kvcache.ChunkedCache(3),
    "sliding": lambda: kvcache.SlidingWindowCache(2, 4),
    "recurrent": lambda: kvcache.RecurrentCache((2, 3), (2, 2, 2)),
    "encoder": kvcache.EncoderCache,
    "wrapper": lambda: kvcache.WrapperCache(
        kvcache.SlidingWindowCache(2), kvcache.WrapperCache(kvcache.EncoderCache(), kvcache.CausalCache())
    ),
}
CASES = [(kind, dtype) for kind in MAKE for dtype in (*FLOATS, *BLOCKS)]
cases = pytest.mark.parametrize(("kind", "dtype"), CASES, ids=[f"{k} {d}" for k, d in CASES])


def make(kind: str, backend: ml.Backend, dtype: DType, config: ml.CacheConfig | None = None) -> Any:
    cache = MAKE[kind]()
    if config is not None:
        cache.set_config(config)
    cache.init(backend, dtype, 2, 16, 16)
    return cache


def fill(cache: Any, backend: ml.Backend, kind: str, seq: int = 0, seed: int = 1) -> None:
    """TOKENS of random numbers in every layer, some of them of other sizes than the rest."""
    rnd = np.random.default_rng(seed)

    def rows(ctx: ml.Context, count: int, dim: int) -> ml.Tensor:
        return ctx.from_numpy(rnd.normal(size=(count, HEADS, dim)).astype(np.float32))

    with backend.new_context() as ctx:
        cache.start_forward(ctx, Batch(list(range(TOKENS)), [seq] * TOKENS, multimodal=[(2, "an item")]))
        if kind == "wrapper":
            cache.set_layer_type(0)
            put(cache, ctx, rows, 0, TOKENS)
            inner = cache.caches[1]
            for which, layer, count in ((0, 1, 3), (1, 2, TOKENS)):
                inner.set_layer_type(which)
                put(inner, ctx, rows, layer, count)
            return
        for layer in (0, 1):
            put(cache, ctx, rows, layer, 3 if kind == "encoder" else TOKENS)
        if kind == "recurrent":
            for layer in (2, 3):
                for name in ("conv", "recurrent"):
                    state = getattr(cache, f"{name}_state")(ctx, layer)
                    new = ctx.from_numpy(rnd.normal(size=state.shape).astype(np.float32), state.dtype)
                    getattr(cache, f"set_{name}_state")(ctx, layer, new)


def put(cache: Any, ctx: ml.Context, rows: Any, layer: int, count: int) -> None:
    cache.set_layer(layer)
    cache.put(ctx, rows(ctx, count, DIM), rows(ctx, count, WIDE))


def bits(page: SerializedSnapshot) -> dict[str, tuple[Any, ...]]:
    return {name: (a.dtype.name, a.shape, a.tobytes()) for name, a in page.arrays.items()}


def same(one: SerializedSnapshot, other: SerializedSnapshot) -> None:
    assert dict(one.meta) == dict(other.meta)
    assert bits(one) == bits(other)


def end_of(kind: str) -> int | None:
    return None if kind == "encoder" else TOKENS


@cases
def test_a_page_goes_round_all_backends_bit_for_bit(
    backends: Callable[[str], ml.Backend], kind: str, dtype: DType
) -> None:
    source = backends("numpy")
    cache = make(kind, source, dtype)
    fill(cache, source, kind)
    first = serialize(source, cache.snapshot(0, 0, end_of(kind)))
    assert first.nbytes > 0
    page = first
    for name in ("torch", "mlx", "numpy", "mlx", "torch"):
        backend = backends(name)
        other = make(kind, backend, dtype)
        page = unpack(b"".join(pack(page)))
        assert other.restore(1, deserialize(backend, page))
        page = serialize(backend, other.snapshot(1, 0, end_of(kind)))
        same(page, first)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [*FLOATS, *BLOCKS], ids=str)
def test_a_page_holds_what_a_query_would_read(
    backends: Callable[[str], ml.Backend], name: str, dtype: DType
) -> None:
    """The numbers that ``get`` gives before and after, on this backend and on NumPy."""
    backend, numpy = backends(name), backends("numpy")
    cache = make("causal", backend, dtype)
    fill(cache, backend, "causal")
    page = serialize(backend, cache.snapshot(0))
    expected = read(cache, backend, 0)
    for where in (backend, numpy):
        other = make("causal", where, dtype)
        assert other.restore(1, deserialize(where, page))
        for found, wanted in zip(read(other, where, 1), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def read(cache: Any, backend: ml.Backend, seq: int) -> list[np.ndarray]:
    """K and V of both layers, by position."""
    found = []
    with backend.new_context() as ctx:
        cache.start_forward(ctx, Batch([TOKENS], [seq]))
        for layer in (0, 1):
            cache.set_layer(layer)
            cache.put(ctx, *(ctx.zeros((1, HEADS, dim), DType.F32) for dim in (DIM, WIDE)))
            key, value, _ = cache.get(ctx)
            found += [tensor.to_numpy().astype(np.float32)[:TOKENS] for tensor in (key, value)]
    return found


@pytest.mark.parametrize("dtype", [DType.F16, "Q8_0/AFFINE4_32"], ids=str)
def test_a_page_fits_every_arrangement(backends: Callable[[str], ml.Backend], dtype: DType) -> None:
    configs = [
        ml.CacheConfig(layout=layout, permuted_v=permuted, cache_padding=padding)
        for layout in Layout
        for permuted in (False, True)
        for padding in (1, 5)
    ]
    backend = backends("numpy")
    for source in configs:
        cache = make("causal", backend, dtype, source)
        fill(cache, backend, "causal")
        plain = contents(serialize(backend, cache.snapshot(0, 2, 6)))
        whole = serialize(backend, cache.snapshot(0))
        for target in configs:
            other = make("causal", backend, dtype, target)
            assert other.restore(1, deserialize(backend, whole))
            found = contents(serialize(backend, other.snapshot(1, 2, 6)))
            assert plain.keys() == found.keys()
            for name, array in plain.items():
                np.testing.assert_array_equal(array, found[name])


def contents(page: SerializedSnapshot) -> dict[str, np.ndarray]:
    """The arrays by name, with their axes in the order (cells, heads, dims)."""
    found = {"positions": page.arrays["positions"]}
    for _, _, tensors in page.meta["snapshot"]["layers"]:
        for name, axes in tensors:
            found[name] = page.arrays[name].transpose([axes.index(axis) for axis in range(len(axes))])
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", MAKE)
def test_taking_a_page_changes_nothing(backends: Callable[[str], ml.Backend], kind: str, name: str) -> None:
    backend = backends(name)
    cache = make(kind, backend, DType.F32)
    fill(cache, backend, kind)
    snapshot = cache.snapshot(0, 0, end_of(kind))
    lies = snapshot.in_cache
    lazy = serialize(backend, snapshot)
    assert snapshot.in_cache == lies == (kind != "encoder")
    snapshot.detach()
    same(serialize(backend, snapshot), lazy)
    fill(cache, backend, kind, seq=1, seed=2)
    cache.remove(0, 0)
    fill(cache, backend, kind, seq=0, seed=3)
    restored = make(kind, backend, DType.F32)
    assert restored.restore(0, deserialize(backend, lazy))
    same(serialize(backend, restored.snapshot(0, 0, end_of(kind))), lazy)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", MAKE)
def test_a_page_stays_what_it_is_when_the_cache_goes_on(
    backends: Callable[[str], ml.Backend], kind: str, name: str
) -> None:
    """Where arrays are used in place, nothing writes into them."""
    backend = backends(name)
    cache = make(kind, backend, DType.F32)
    fill(cache, backend, kind)
    page = serialize(backend, cache.snapshot(0, 0, end_of(kind)))
    before = bits(page)
    for array in page.arrays.values():
        array.flags.writeable = False
    other = make(kind, backend, DType.F32)
    for seq in (0, 1):
        assert other.restore(seq, deserialize(backend, page))
    other.remove(0, 0)
    fill(other, backend, kind, seed=5)
    assert bits(page) == before


@pytest.mark.parametrize("kind", MAKE)
def test_an_empty_snapshot_has_a_page(backends: Callable[[str], ml.Backend], kind: str) -> None:
    backend = backends("numpy")
    cache = make(kind, backend, DType.F32)
    page = serialize(backend, cache.snapshot(0, 0, 0))
    assert page.nbytes == 0
    fill(cache, backend, kind)
    assert cache.restore(0, deserialize(backend, unpack(b"".join(pack(page)))))
    if kind != "encoder":
        assert cache.offset(0) == 0


def test_a_snapshot_of_a_stranger_has_no_page(backends: Callable[[str], ml.Backend]) -> None:
    class Strange:
        begin = end = 0

    with pytest.raises(ml.NotSupportedError, match="Strange"):
        serialize(backends("numpy"), Strange())  # type: ignore[arg-type]


def test_a_device_that_pages_by_itself_does_so_for_a_page() -> None:
    with LateBackend() as backend:
        cache = make("causal", backend, DType.F32)
        fill(cache, backend, "causal")
        page = serialize(backend, cache.snapshot(0))
        assert len(backend.transfers) == 1
        assert all(transfer.done() for transfer in backend.transfers)
        with ml.open_backend("numpy") as other:
            assert deserialize(other, page).end == TOKENS
