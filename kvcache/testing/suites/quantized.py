"""Storage formats: error bounds and refusals. Traces check their content bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.storage.formats import CacheFormat, open_format
from kvcache.testing.harness import KINDS, CacheCase
from kvcache.testing.models.attention import Setup
from kvcache.testing.models.declared import skip_undeclared
from kvcache.testing.rigs.attention import mask_of, reference_attention
from kvcache.testing.rigs.protocol import only_protocol
from ml import DType, Layout
from ml.block_formats import AFFINE

HEADS, KEY_DIM, VALUE_DIM = 2, 128, 256
STEPS = {
    "Q8_0": 1 / 225, "Q4_0": 1 / 7.9, "F8_E4M3": 1 / 15.9,
    **{name: 2.01 / (2**bits - 1) for name, (bits, _) in AFFINE.items()},
}  # fmt: skip
"""By format, the largest error of a value, relative to the peak of its block."""
PAIRS = ("Q8_0/Q4_0", "F8_E4M3/F16", "F16/AFFINE4_64", "BF16/F16")
BLOCKED = [name for name in STEPS if name != "F8_E4M3"]
ROUNDING = {DType.F32: 0.0, DType.F16: 2.0**-11, DType.BF16: 2.0**-8}
BYTES = {
    "F16": 2.0, "Q8_0": 34 / 32, "Q4_0": 18 / 32, "F8_E4M3": 132 / 128,
    **{name: bits / 8 + 8 / group for name, (bits, group) in AFFINE.items()},
}  # fmt: skip
"""Bytes per value for heads of 128, put as F32."""
ARRANGEMENTS = {
    "head major": ml.CacheConfig(),
    "token major": ml.CacheConfig(layout=Layout.TOKEN_MAJOR),
    "permuted v": ml.CacheConfig(permuted_v=True, cache_padding=4),
}
every_format = pytest.mark.parametrize("name", STEPS)
Make = Callable[..., kvcache.CausalCache]


class QuantizedTests(CacheCase):
    @pytest.fixture
    def quantized(self, backend: ml.Backend, declared: ml.Features) -> Make:
        """``quantized(name, config)``: a cache of two sequences of 16."""
        if not declared.has("matmul"):
            pytest.skip("declared absent: compute")

        def make(name: str, config: ml.CacheConfig | None = None) -> kvcache.CausalCache:
            return Setup(dtype=name, config=config or ml.CacheConfig()).make(backend)

        return make

    @pytest.mark.parametrize("name", [*STEPS, *PAIRS])
    @pytest.mark.parametrize("activations", list(ROUNDING), ids=lambda dtype: dtype.name)
    @pytest.mark.parametrize("config", list(ARRANGEMENTS.values()), ids=list(ARRANGEMENTS))
    def test_what_is_read_back_lies_within_the_bound_of_the_format(
        self, ctx: ml.Context, quantized: Make, name: str, activations: DType, config: ml.CacheConfig,
        declared: ml.Features,
    ) -> None:  # fmt: skip
        """Rows of very different magnitudes, in every float dtype, and attention over the values read
        back.
        """
        if activations not in declared.dtypes:
            pytest.skip(f"declared absent: {activations}")
        cache = quantized(name, config)
        stored = CacheFormat.of(name)
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
            read_back = [key.to_numpy().astype(np.float32), value.to_numpy().astype(np.float32)]
            if config.permuted_v:
                read_back[1] = read_back[1].transpose(2, 0, 1)
            for read, part, one in zip(read_back, host, (stored.key, stored.value), strict=True):
                wanted = part[:stop].astype(np.float32)
                slack = one.bound(wanted, activations) + ROUNDING[activations] * 1.1 * np.abs(wanted).max()
                assert (np.abs(read[seen] - wanted) <= slack).all()
            query = rng.normal(size=(stop - first, 4, KEY_DIM)).astype(np.float32) / 32
            if activations is DType.F32:
                out = cache.attend(ctx, ctx.from_numpy(query), 0.2).to_numpy()[-1]
                wanted = reference_attention(query[-1], read_back[0][seen], read_back[1][seen], 0.2)
                np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=2e-5)

    @every_format
    def test_a_backends_own_way_gives_the_bits_of_the_generic_body(
        self, backend: ml.Backend, ctx: ml.Context, declared: ml.Features, name: str
    ) -> None:
        """On a device, MLX's kernels may round the codes of groups differently: by at most one step."""
        if not declared.has("matmul") or not isinstance(backend, ml.SupportsKVStorage):
            pytest.skip("it has no own conversion")
        skip_undeclared(backend, name)
        stored, rng = open_format(name), np.random.default_rng(8)
        x = rng.normal(size=(30, HEADS, KEY_DIM)).astype(np.float32) * 4.0 ** rng.integers(-3, 4, (30, 1, 1))
        x[0], x[1], x[2] = 0, np.abs(x[1]), -np.abs(x[2])
        codes = []
        with only_protocol(backend).new_context() as plain:
            for place in (ctx, plain):
                parts = stored.encode(place, place.from_numpy(x.astype(np.float32)))
                codes.append([*parts, stored.decode(place, parts, KEY_DIM)])
        own, generic = ([part.to_numpy() for part in parts] for parts in codes)
        if name in AFFINE and backend.devices[0].kind != "cpu":
            assert (np.abs(own[-1] - generic[-1]) <= 2 * stored.bound(x, DType.F32)).all()
            return
        for mine, other in zip(own, generic, strict=True):
            assert mine.dtype == other.dtype
            np.testing.assert_array_equal(mine, other)

    @every_format
    def test_no_bound_is_wider_than_the_format_needs(self, name: str) -> None:
        """Measured in blocks whose peak is 1, independently of the format's declared bound."""
        x = np.random.default_rng(6).uniform(-1, 1, (64, KEY_DIM)).astype(np.float32)
        x[:, ::32] = 1
        bound = CacheFormat.of(name).key.bound(x, DType.F32)
        assert bound.shape == x.shape
        assert bound.max() <= STEPS[name]

    @every_format
    def test_zeros_come_back_as_zeros_and_the_peak_of_a_block_nearly_exact(
        self, ctx: ml.Context, quantized: Make, name: str
    ) -> None:
        cache = quantized(name)
        key = np.zeros((3, HEADS, KEY_DIM), np.float32)
        key[1, 0, 5], key[2, 1, 40] = -3.0, 0.125
        cache.start_forward(ctx, Batch([0, 1, 2], [0, 0, 0]))
        cache.put(ctx, ctx.from_numpy(key), ctx.from_numpy(key))
        read_back = cache.get(ctx)[0].to_numpy()[:3]
        assert (read_back[0] == 0).all()
        np.testing.assert_allclose(read_back, key, rtol=2.0**-10, atol=1e-6)

    def test_bytes_per_token_are_those_of_the_formats(self, backend: ml.Backend, ctx: ml.Context) -> None:
        for name in (*BYTES, "F16/Q4_0", "Q8_0/AFFINE4_64"):
            cache = Setup(dtype=name).make(backend)
            cache.start_forward(ctx, Batch([0], [0]), reserve=True)
            zeros = ctx.zeros((1, HEADS, 128), DType.F32)
            cache.put(ctx, zeros, zeros)
            key, value = name.split("/") if "/" in name else (name, name)
            assert cache.nbytes / cache.cells == HEADS * 128 * (BYTES[key] + BYTES[value])

    @pytest.mark.parametrize("name", [*BLOCKED, "F16/Q4_0", "Q4_0/F16"])
    @pytest.mark.parametrize("reserve", [False, True], ids=["put", "reserve"])
    def test_a_head_that_does_not_divide_into_blocks_is_refused_before_anything_is_allocated(
        self, backend: ml.Backend, ctx: ml.Context, name: str, reserve: bool
    ) -> None:
        skip_undeclared(backend, name)
        stored = CacheFormat.of(name)
        for kind in KINDS.values():
            cache = kind.unbound()
            cache.init(backend, name, 2, 16, 8)
            cache.start_forward(ctx, Batch([0], [0]), reserve=reserve)
            for dims in ((48, 256), (256, 40), (16, 16)):
                refused = [
                    dim for dim, one in zip(dims, (stored.key, stored.value), strict=True)
                    if dim < 256 and one.name != "F16"
                ]  # fmt: skip
                if not refused:
                    continue
                key, value = (ctx.zeros((1, HEADS, dim), DType.F32) for dim in dims)
                before = backend.memory().allocated
                with pytest.raises(kvcache.InvalidRangeError, match="blocks are") as caught:
                    cache.put(ctx, key, value)
                assert f"head_dim {refused[0]} " in str(caught.value)  # the error keeps no allocated buffers
                assert cache.nbytes == 0
                assert backend.memory().allocated <= before

    @every_format
    def test_a_backend_that_only_stores_refuses_to_quantise(
        self, backend: ml.Backend, ctx: ml.Context, declared: ml.Features, name: str
    ) -> None:
        if declared.has("matmul"):
            pytest.skip("this backend computes")
        cache = Setup(dtype=name).make(backend)
        cache.start_forward(ctx, Batch([0], [0]))
        zeros = ctx.zeros((1, HEADS, 128), DType.F32)
        with pytest.raises(ml.NotSupportedError):
            cache.put(ctx, zeros, zeros)
        assert cache.nbytes == 0
