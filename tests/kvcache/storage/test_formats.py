"""Storage formats: the same bits on every backend, those of MLX and ml_dtypes; names, pages."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch, CausalCache, PrefixCache
from kvcache.storage.formats import CacheFormat, format_names, names, open_format
from kvcache.storage.formats.rotated import PREFIX
from kvcache.stores import MemoryStore, SerializedSnapshot
from kvcache.testing.rigs.protocol import only_protocol
from ml import DType
from ml.block_formats import AFFINE

BACKENDS = ("numpy", "torch", "mlx", "generic")
"""The last has the required protocol alone."""
CODED = [
    name for name in format_names() if name not in ("F32", "F16", "BF16") and not name.startswith(PREFIX)
]
"""Those that turn heads first sum in each backend's own order."""
FLOATS = (DType.F32, DType.F16, DType.BF16)
EXAMPLE = Path(__file__).parents[3] / "examples/turbo4.py"


@pytest.fixture(params=BACKENDS)
def ctx(request: pytest.FixtureRequest) -> Iterator[ml.Context]:
    with opened(request.param) as backend, backend.new_context() as context:
        yield context


def opened(name: str) -> ml.Backend:
    infos = {info.name: info for info in ml.available_backends()}
    if name != "generic" and not infos[name].available:
        pytest.skip(f"{name} cannot run here: {infos[name].reason}")
    return only_protocol(ml.open_backend("numpy")) if name == "generic" else ml.open_backend(name)


def samples(dtype: DType) -> np.ndarray:
    """Rows of 256 of many magnitudes: zeros, one peak alone, ties, constants, of one sign, very small."""
    random = np.random.default_rng(4)
    x = random.normal(size=(400, 256)) * 10.0 ** random.uniform(-4, 3, size=(400, 1))
    x[0] = 0
    x[1], x[1, 7] = 0, -5
    x[2] = np.where(np.arange(256) % 2, 1.0, -1.0)
    x[3], x[4] = 3, -1e-6
    x[5], x[6] = np.abs(x[5]), -np.abs(x[6])
    x[7] = np.arange(256) * 0.5 - 16
    x[8] = 1000 + np.arange(256) * 1e-3
    x[9], x[10], x[11, ::3], x[13] = 1e-37, 1e-40, -0.0, -0.0
    x[12, 0], x[12, 1:] = 448, np.linspace(-448, 448, 255)
    return np.clip(x, -6e4, 6e4).astype(np.float32).astype(dtype.numpy)


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", CODED)
def test_every_backend_stores_the_same_bits_and_reads_them_alike(
    ctx: ml.Context, name: str, dtype: DType
) -> None:
    """And within the format's bound; numbers and parts are read as they lie, strided."""
    stored, x = open_format(name), samples(dtype)
    with ml.open_backend("numpy") as numpy, numpy.new_context() as plain:
        expected = stored.encode(plain, plain.from_numpy(x))
        values = stored.decode(plain, expected, 256).to_numpy()
        wanted = [part.to_numpy() for part in expected]
    turned = ctx.from_numpy(np.ascontiguousarray(x.T)).permute(ctx, 1, 0)
    for given in (turned, ctx.from_numpy(x)):
        found = stored.encode(ctx, given)
        assert [(part.shape, part.dtype) for part in found] == [
            ((400, width), kind) for width, kind in stored.parts(256, dtype)
        ]
        for part, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(bits(part.to_numpy()), bits(other))
    strided = [part.concat(ctx, part, 0).view(ctx, 0, (200, part.shape[1]), (2 * part.shape[1], 1))
               for part in found]  # fmt: skip
    read = stored.decode(ctx, strided, 256).to_numpy()
    assert read.dtype == np.float32
    np.testing.assert_array_equal(bits(read), bits(values[::2]))
    wide = x.astype(np.float32)
    assert (np.abs(values - wide) <= stored.bound(wide, dtype)).all()
    assert np.abs(values - wide).max() > 0
    assert stored.head_dim(stored.parts(256, dtype)[0][0]) == 256


@pytest.mark.parametrize("name", CODED)
def test_no_rows_are_stored_and_read_as_none(ctx: ml.Context, name: str) -> None:
    stored = open_format(name)
    for outer in ((0, 2), (2, 0)):
        parts = stored.encode(ctx, ctx.zeros((*outer, 256), DType.F16))
        assert [(part.shape, part.dtype) for part in parts] == [
            ((*outer, width), kind) for width, kind in stored.parts(256, DType.F16)
        ]
        read = stored.decode(ctx, parts, 256)
        assert (read.shape, read.to_numpy().dtype) == ((*outer, 256), np.float32)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", AFFINE)
def test_groups_are_those_that_mlx_makes_and_reads(ctx: ml.Context, name: str, dtype: DType) -> None:
    mx = pytest.importorskip("mlx.core")
    (size, group), x = AFFINE[name], samples(dtype)
    native = mx.array(x.astype(np.float32)).astype(
        getattr(mx, {"F32": "float32", "F16": "float16"}.get(dtype.name, "bfloat16"))
    )
    theirs = mx.quantize(native, group_size=group, bits=size)
    ours = [part.to_numpy() for part in open_format(name).encode(ctx, ctx.from_numpy(x))]
    np.testing.assert_array_equal(ours[0].view(np.uint32), np.array(theirs[0]))
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        np.testing.assert_array_equal(mine.astype(np.float32), np.array(other.astype(mx.float32)))
    wide = [part.astype(mx.float32) for part in theirs[1:]]
    expected = np.array(mx.dequantize(theirs[0], *wide, group_size=group, bits=size))
    given = [ctx.from_numpy(part) for part in ours]
    np.testing.assert_array_equal(open_format(name).decode(ctx, given, 256).to_numpy(), expected)


def test_floats_of_8_bits_are_those_of_ml_dtypes(ctx: ml.Context) -> None:
    """All that there are, what lies halfway between them, and its neighbours: in rows whose scale is 1."""
    numbers = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    half = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, half, np.nextafter(half, 0), np.nextafter(half, 500)]).astype(np.float32)
    rows = np.stack([np.full(2 * x.size, 448, np.float32), np.concatenate([x, -x])], 1)
    stored = open_format("F8_E4M3")
    codes, scales = stored.encode(ctx, ctx.from_numpy(rows))
    assert (scales.to_numpy() == 1).all()
    expected = rows.astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(codes.to_numpy(), expected.view(np.uint8))
    read = stored.decode(ctx, (codes, scales), 2).to_numpy()
    np.testing.assert_array_equal(read, expected.astype(np.float32))
    every = np.delete(np.arange(256), (127, 255)).astype(np.uint8).reshape(-1, 2)  # two are NaN
    given = ctx.from_numpy(every), ctx.from_numpy(np.full((127, 1), 0.5, np.float32))
    wanted = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32) / 2
    np.testing.assert_array_equal(stored.decode(ctx, given, 2).to_numpy(), wanted)


# By name.


def test_formats_go_by_their_names_in_any_case_and_in_pairs() -> None:
    assert open_format("q8_0") is open_format("Q8_0")
    for dtype, name in (
        (DType.Q8_0, "Q8_0"), ("q8_0", "Q8_0"), ((DType.Q8_0, "q8_0"), "Q8_0"), ("bf16", "BF16"),
        ((DType.Q8_0, DType.Q4_0), "Q8_0/Q4_0"), ("f16/affine4_64", "F16/AFFINE4_64"),
        ([DType.F16, open_format("F8_E4M3")], "F16/F8_E4M3"),
    ):  # fmt: skip
        found = CacheFormat.of(dtype)  # type: ignore[arg-type]
        assert found.name == name
        assert CacheFormat.of(found.name) == found != CacheFormat.of("F32")
    assert CacheFormat.of("F16").plain is DType.F16
    assert CacheFormat.of("F16/F32").plain is None


def test_a_cache_tells_its_formats(backend: ml.Backend) -> None:
    cache = CausalCache()
    cache.init(backend, (DType.F16, "q4_0"), 1, 8, 8)
    assert "F16/Q4_0 on numpy" in repr(cache)
    assert cache.settings()["dtype"] == "F16/Q4_0"


class Halves:
    """F16, as a format of someone's."""

    name = "HALVES"

    def parts(self, dim: int, activations: DType) -> tuple[tuple[int, DType], ...]:
        return ((dim, DType.F16),)

    def head_dim(self, width: int) -> int:
        return width

    def encode(self, ctx: ml.Context, x: ml.Tensor) -> tuple[ml.Tensor, ...]:
        return (x.cast(ctx, DType.F16),)

    def decode(self, ctx: ml.Context, parts: Any, dim: int) -> ml.Tensor:
        return parts[0]  # type: ignore[no-any-return]

    def bound(self, x: np.ndarray, activations: DType) -> np.ndarray:
        return np.abs(x) * 2.0**-11


class Others(Halves):
    """Of the same name."""


@pytest.mark.parametrize("name", ["halves", "A/B", "A B", "É", ""])
def test_names_that_would_not_be_told_apart_are_refused(name: str) -> None:
    with pytest.raises(ml.DTypeError, match="a name must be uppercase ASCII"):
        CacheFormat.of(type("Mine", (Halves,), {"name": name})())


def test_a_format_of_ones_own_is_stored_and_restored_by_its_name(
    monkeypatch: pytest.MonkeyPatch, backend: ml.Backend
) -> None:
    monkeypatch.setattr(names, "_given", {})
    with pytest.raises(ml.DTypeError, match=r"no storage format 'HALVES'; known: F32, .* passed to init"):
        open_format("HALVES")
    cache = CausalCache()
    cache.init(backend, ("F32", Halves()), 1, 8, 8)
    with backend.new_context() as ctx:
        cache.start_forward(ctx, Batch([0], [0]))
        x = ctx.from_numpy(np.full((1, 1, 3), 1 / 3, np.float32))
        cache.put(ctx, x, x)
        key, value, _ = cache.get(ctx)
        assert key.to_numpy().tolist() == x.to_numpy().tolist()
        assert (value.dtype, value.to_numpy().max()) == (DType.F32, np.float32(np.float16(1 / 3)))
        assert cache.nbytes == 8 * 3 * (4 + 2)
    again = kvcache.deserialize(backend, kvcache.serialize(backend, cache.snapshot(0)))
    assert cache.restore(0, again)


def test_a_format_that_is_given_is_known_by_its_name_and_is_the_only_one_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(names, "_given", {})
    assert CacheFormat.of(Halves()) == CacheFormat.of((Halves(), Halves()))
    assert isinstance(open_format("HALVES"), Halves)
    with pytest.raises(ml.DTypeError, match="is named HALVES"):
        CacheFormat.of(Others())
    with pytest.raises(ml.DTypeError, match="is named Q8_0"):
        CacheFormat.of(type("Mine", (Halves,), {"name": "Q8_0"})())


# The worked example.


@pytest.fixture
def turbo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(names, "_given", {})
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    return importlib.import_module("turbo4").Turbo4()


def test_the_example_is_within_its_bound_and_better_than_q4_0_on_outliers(
    turbo: Any, ctx: ml.Context
) -> None:
    random = np.random.default_rng(3)
    x = random.normal(size=(50, 2, 64)).astype(np.float32)
    x[:, :, 5] *= 30
    x[0] = 0
    errors = []
    for stored in (turbo, open_format("Q4_0")):
        read = stored.decode(ctx, stored.encode(ctx, ctx.from_numpy(x)), 64).to_numpy()
        assert (np.abs(read - x) <= stored.bound(x, DType.F32)).all()
        errors.append(np.sqrt(((read - x)[:, :, :32] ** 2).mean()))
    assert 0 < errors[0] < 0.7 * errors[1]


def test_the_example_serves_a_cache(turbo: Any) -> None:
    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        cache = CausalCache()
        cache.init(backend, (turbo, DType.Q8_0), 1, 8, 8)
        cache.start_forward(ctx, Batch(range(3), [0] * 3))
        x = np.random.default_rng(1).normal(size=(3, 2, 32)).astype(np.float32)
        cache.put(ctx, ctx.from_numpy(x), ctx.from_numpy(x))
        key, _, _ = cache.get(ctx)
        assert (np.abs(key.to_numpy() - x) <= turbo.bound(x, DType.F32)).all()
        assert cache.attend(ctx, ctx.from_numpy(x), 0.2).shape == (3, 2, 32)


def test_ranks_are_told_a_format_of_ones_own_too(turbo: Any) -> None:
    from kvcache_engine.options import EngineOptions

    told = pickle.loads(pickle.dumps(EngineOptions(cache_dtype=(turbo, DType.Q8_0))))
    assert CacheFormat.of(told.cache_dtype).name == "TURBO4/Q8_0"


# Pages.


def test_pages_of_another_format_are_a_miss(backend: ml.Backend) -> None:
    store = MemoryStore()
    for dtype, expected in (("Q8_0", 0), ("Q8_0/Q4_0", 0), ("Q4_0/Q8_0", 0), ("Q8_0", 8), ("Q8_0/Q4_0", 8)):
        cache = CausalCache()
        cache.init(backend, dtype, 2, 64, 64)
        prefix = PrefixCache(cache, tiers=[store], block_size=4, identity={"model": "zeros"})
        with prefix, prefix.begin([*range(9)]) as session, backend.new_context() as ctx:
            assert session.cached == expected
            at = range(session.cached, 9)
            cache.start_forward(ctx, Batch(at, [session.seq] * len(at)))
            zeros = ctx.zeros((len(at), 1, 32), DType.F32)
            cache.put(ctx, zeros, zeros)


def test_a_snapshot_of_another_format_is_refused(backend: ml.Backend) -> None:
    one, other = CausalCache(), CausalCache()
    one.init(backend, "Q8_0/Q4_0", 1, 8, 8)
    other.init(backend, "Q4_0/Q8_0", 1, 8, 8)
    with pytest.raises(
        kvcache.InvalidRangeError, match=r"a snapshot of Q8_0/Q4_0, .* into a cache of Q4_0/Q8_0"
    ):
        other.restore(0, one.snapshot(0))
    with pytest.raises(kvcache.InvalidRangeError, match=r"Q8_0/Q4_0 and .* Q4_0/Q8_0 cannot be merged"):
        one.merge(one.snapshot(0), other.snapshot(0))


def test_a_page_that_was_written_when_formats_had_no_pairs_is_read(backend: ml.Backend) -> None:
    """Meta as it was: one name, codes and scales of K, and those of V."""
    scales = np.full((2, 3, 1), 0.5, np.float16)
    arrays = {
        "positions": np.arange(2), "0.0": (np.arange(192) % 100).astype(np.int8).reshape(2, 3, 32),
        "0.1": scales, "0.2": np.ones((2, 3, 64), np.int8), "0.3": scales.repeat(2, 2),
    }  # fmt: skip
    tensors = [[f"0.{i}", [0, 1, 2]] for i in range(4)]
    meta = {"kind": "attention", "begin": 0, "end": 2, "dtype": "Q8_0", "whole": False,
            "layers": [[0, "F32", tensors]]}  # fmt: skip
    snapshot = kvcache.deserialize(backend, SerializedSnapshot({"snapshot": meta}, arrays))
    cache = CausalCache()
    cache.init(backend, DType.Q8_0, 1, 8, 8)
    assert cache.restore(0, snapshot)
    with backend.new_context() as ctx:
        cache.start_forward(ctx, Batch([1], [0]), read_only=True)
        cache.set_layer(0)
        key, value, _ = cache.get(ctx)
        np.testing.assert_array_equal(key.to_numpy()[:2], arrays["0.0"] / 2)
        assert (value.to_numpy()[:2] == 0.5).all()
    written = kvcache.serialize(backend, cache.snapshot(0)).meta["snapshot"]
    assert (written["dtype"], [len(parts) for _, _, parts in written["layers"]]) == ("Q8_0", [4])


@pytest.mark.parametrize(
    ("dtype", "cache"),
    [("Q8_0", CausalCache), (("F32", "F16"), CausalCache), ("F8_E4M3", kvcache.EncoderCache)],
)
def test_what_a_backend_declares_absent_is_refused_by_init(
    monkeypatch: pytest.MonkeyPatch, backend: ml.Backend, dtype: Any, cache: Any
) -> None:
    monkeypatch.setattr(
        type(backend), "features", ml.Features(ml.STORAGE_DTYPES - {DType.F16}), raising=False
    )
    with pytest.raises(kvcache.NotSupportedError, match="stored in F16, which backend 'numpy' does not have"):
        cache().init(backend, dtype, 1, 8, 8)
    cache().init(backend, "F32", 1, 8, 8)


def test_what_was_encoded_elsewhere_is_stored_as_it_is(backend: ml.Backend) -> None:
    cache, stored = CausalCache(), CacheFormat.of("Q8_0/AFFINE4_32")
    cache.init(backend, "Q8_0/AFFINE4_32", 1, 8, 8)
    with backend.new_context() as ctx:
        x = ctx.from_numpy(np.random.default_rng(2).normal(size=(3, 2, 32)), DType.BF16)
        parts = [*stored.key.encode(ctx, x), *stored.value.encode(ctx, x)]
        cache.start_forward(ctx, Batch(range(3), [0] * 3))
        for wrong in (parts[:4], parts[::-1], [part.slice(ctx, 0, 0, 2) for part in parts], [x, *parts[1:]]):
            with pytest.raises(kvcache.InvalidRangeError):
                cache.put_stored(ctx, wrong, DType.BF16)
            assert cache.nbytes == 0
        cache.put_stored(ctx, parts, DType.BF16)
        key, value, _ = cache.get(ctx)
        for found, one, own in ((key, stored.key, parts[:2]), (value, stored.value, parts[2:])):
            wanted = one.decode(ctx, own, 32).cast(ctx, DType.BF16).to_numpy()
            np.testing.assert_array_equal(found.to_numpy()[:3], wanted)
        cache.start_forward(ctx, Batch([3], [0]), reserve=True)
        with pytest.raises(kvcache.OrderError, match="stores nothing"):
            cache.put_stored(ctx, [part.slice(ctx, 0, 0, 1) for part in parts], DType.BF16)
