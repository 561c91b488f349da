"""Quantized storage: within the format's bound; refusals. What traces store in it comes back bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.testing.harness import KINDS, CacheCase
from kvcache.testing.models.attention import Setup
from kvcache.testing.rigs.attention import mask_of, reference_attention
from ml import DType, Layout

__all__ = ["QuantizedTests", "bound"]

HEADS, KEY_DIM, VALUE_DIM = 2, 64, 32
CODECS = (DType.Q8_0, DType.Q4_0)
ROUNDING = {DType.F32: 0.0, DType.F16: 2.0**-11, DType.BF16: 2.0**-8}
ARRANGEMENTS = {
    "head major": ml.CacheConfig(),
    "token major": ml.CacheConfig(layout=Layout.TOKEN_MAJOR),
    "permuted v": ml.CacheConfig(permuted_v=True, cache_padding=4),
}
both_formats = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
Make = Callable[..., kvcache.CausalCache]


def bound(x: np.ndarray, codec: DType) -> np.ndarray:
    """How far each value read back may lie from ``x`` (..., dim), by the format.

    Half a step of the block's scale, or a whole one for the value on the far side of Q4_0's lopsided
    range (-8 to 7); and the scale's rounding to F16, which moves a value by up to 2**-11 of the peak.
    """
    blocks = x.reshape(*x.shape[:-1], -1, 32).astype(np.float64)
    peak = np.abs(blocks).max(axis=-1, keepdims=True)
    step = peak / 127 * 0.5 if codec is DType.Q8_0 else peak / 8
    limit = step * (1 + 1e-5) + peak * 2.0**-11 + 127 * 2.0**-25
    return np.broadcast_to(limit, blocks.shape).reshape(x.shape)


class QuantizedTests(CacheCase):
    @pytest.fixture
    def quantized(self, backend: ml.Backend, declared: ml.Features) -> Make:
        """``quantized(codec, config)``: a cache of two sequences of 16."""
        if not declared.has("matmul"):
            pytest.skip("declared absent: compute")

        def make(codec: DType, config: ml.CacheConfig | None = None) -> kvcache.CausalCache:
            return Setup(dtype=codec, config=config or ml.CacheConfig()).make(backend)

        return make

    @both_formats
    @pytest.mark.parametrize("activations", list(ROUNDING), ids=lambda dtype: dtype.name)
    @pytest.mark.parametrize("config", list(ARRANGEMENTS.values()), ids=list(ARRANGEMENTS))
    def test_what_is_read_back_lies_within_the_bound_of_the_format(
        self, ctx: ml.Context, quantized: Make, codec: DType, activations: DType, config: ml.CacheConfig,
        declared: ml.Features,
    ) -> None:  # fmt: skip
        """Rows of very different magnitudes, of every float, and attention over what is read back."""
        if activations not in declared.dtypes:
            pytest.skip(f"declared absent: {activations}")
        cache = quantized(codec, config)
        rng = np.random.default_rng(5)
        magnitude = 4.0 ** rng.integers(-2, 3, (6, 1, 1))
        host = [
            (rng.normal(size=(6, HEADS, dim)) * magnitude).astype(activations.numpy)
            for dim in (KEY_DIM, VALUE_DIM)
        ]
        for first, stop in ((0, 4), (4, 5), (5, 6)):
            cache.start_forward(ctx, Batch(range(first, stop), [0] * (stop - first)))
            cache.put(ctx, *(ctx.from_numpy(part[first:stop], activations) for part in host))
            key, value, mask = cache.get(ctx)
            assert key.dtype is value.dtype is activations
            seen = mask_of(mask, stop - first, key.shape[0], config)[-1]
            found = [key.to_numpy().astype(np.float32), value.to_numpy().astype(np.float32)]
            if config.permuted_v:
                found[1] = found[1].transpose(2, 0, 1)
            for stored, part in zip(found, host, strict=True):
                wanted = part[:stop].astype(np.float32)
                slack = bound(wanted, codec) + ROUNDING[activations] * 1.1 * np.abs(wanted).max()
                assert (np.abs(stored[seen] - wanted) <= slack).all()
            query = rng.normal(size=(stop - first, 4, KEY_DIM)).astype(np.float32) / 32
            if activations is DType.F32:
                out = cache.attend(ctx, ctx.from_numpy(query), 0.2).to_numpy()[-1]
                wanted = reference_attention(query[-1], found[0][seen], found[1][seen], 0.2)
                np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=2e-5)

    @both_formats
    def test_zeros_come_back_as_zeros_and_the_peak_of_a_block_nearly_exact(
        self, ctx: ml.Context, quantized: Make, codec: DType
    ) -> None:
        cache = quantized(codec)
        key = np.zeros((3, HEADS, KEY_DIM), np.float32)
        key[1, 0, 5], key[2, 1, 40] = -3.0, 0.125
        cache.start_forward(ctx, Batch([0, 1, 2], [0, 0, 0]))
        cache.put(ctx, ctx.from_numpy(key), ctx.from_numpy(key[:, :, :VALUE_DIM]))
        found = cache.get(ctx)[0].to_numpy()[:3]
        assert (found[0] == 0).all()
        np.testing.assert_allclose(found, key, rtol=2.0**-10, atol=0)

    def test_bytes_per_token_are_those_of_the_format(self, backend: ml.Backend, ctx: ml.Context) -> None:
        sizes = {}
        for dtype in (DType.F16, *CODECS):
            cache = Setup(dtype=dtype).make(backend)
            cache.start_forward(ctx, Batch([0], [0]), reserve=True)
            zeros = ctx.zeros((1, HEADS, 128), DType.F32)
            cache.put(ctx, zeros, zeros)
            sizes[dtype] = cache.nbytes / cache.cells
        values = 2 * HEADS * 128
        assert sizes[DType.F16] == 2 * values
        assert sizes[DType.Q8_0] == values * 34 / 32 <= 0.54 * sizes[DType.F16]
        assert sizes[DType.Q4_0] == values * 18 / 32 <= 0.29 * sizes[DType.F16]

    @both_formats
    @pytest.mark.parametrize("reserve", [False, True], ids=["put", "reserve"])
    def test_a_head_that_does_not_divide_into_blocks_is_refused_before_anything_is_allocated(
        self, backend: ml.Backend, ctx: ml.Context, codec: DType, reserve: bool
    ) -> None:
        for kind in KINDS.values():
            cache = kind.unbound()
            cache.init(backend, codec, 2, 16, 8)
            cache.start_forward(ctx, Batch([0], [0]), reserve=reserve)
            for dims in ((48, 32), (32, 40), (16, 16)):
                key, value = (ctx.zeros((1, HEADS, dim), DType.F32) for dim in dims)
                before = backend.memory().allocated
                with pytest.raises(kvcache.InvalidRangeError, match="32") as caught:
                    cache.put(ctx, key, value)
                assert str(dims[0] if dims[0] % 32 else dims[1]) in str(caught.value)
                assert cache.nbytes == 0
                assert backend.memory().allocated <= before

    @both_formats
    def test_a_backend_that_only_stores_refuses_to_quantise(
        self, backend: ml.Backend, ctx: ml.Context, declared: ml.Features, codec: DType
    ) -> None:
        if declared.has("matmul"):
            pytest.skip("this backend computes")
        cache = Setup(dtype=codec).make(backend)
        cache.start_forward(ctx, Batch([0], [0]))
        zeros = ctx.zeros((1, HEADS, 32), DType.F32)
        with pytest.raises(ml.NotSupportedError):
            cache.put(ctx, zeros, zeros)
        assert cache.nbytes == 0
