"""The capabilities that a backend may have: fused attention and rope, and its wishes for caches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ml
from ml.capabilities import (
    CAUSAL,
    Features,
    SupportsAttention,
    SupportsCacheConfig,
    SupportsHostWrite,
    SupportsRope,
    SupportsZeroCopyRead,
)
from ml.dtypes import DType
from ml.nn import (
    LinearScaling,
    Llama3Scaling,
    RopeSpec,
    YarnScaling,
    apply_rope,
    generic_attention,
    rope_tables,
)
from ml.protocols import Backend, Context, Tensor
from ml.testing.harness import BackendCase, assert_close, each
from ml.testing.samples import DTYPES, FLOATS, exact, normal

__all__ = ["CapabilityTests"]

Attend = Callable[..., Tensor]
"""attend(query, key, value, mask, scale, sinks=None), of tensors or host arrays."""
HEADS = {"one": (1, 1), "each its own": (4, 4), "grouped": (4, 2), "one for all": (6, 1)}
"""Of queries, and of keys and values."""
TOLERANCE = {DType.F32: 2e-5, DType.F16: 4e-3, DType.BF16: 3e-2}


SPECS = [
    RopeSpec(16), RopeSpec(16, base=500000.0, interleaved=True), RopeSpec(8), RopeSpec(8, interleaved=True),
    RopeSpec(16, scaling=LinearScaling(4.0)), RopeSpec(16, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)),
    RopeSpec(16, scaling=YarnScaling(4.0, 4096)),
]  # fmt: skip


def reference(q: Any, k: Any, v: Any, mask: Any, scale: float, sinks: Any = None) -> np.ndarray:
    """Attention in float64 from its definition, one query and head at a time; mask is a matrix or None."""
    q, k, v = exact(q), exact(k), exact(v)
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    out = np.zeros((tokens, heads, v.shape[2]))
    for t in range(tokens):
        for h in range(heads):
            scores = k[:, h // group] @ q[t, h] * scale
            if mask is not None:
                scores = scores + exact(mask)[t]
            top = scores.max() if sinks is None else max(scores.max(), float(sinks[h]))
            weights = np.exp(scores - top)
            total = weights.sum() + (0 if sinks is None else math.exp(float(sinks[h]) - top))
            out[t, h] = (weights / total) @ v[:, h // group]
    return out


def _any_bits(dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    """Elements of any bit pattern, NaN and denormals too."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.random.default_rng(7).integers(0, 2 if dtype is DType.BOOL else 256, nbytes, np.uint8)
    return raw.view(dtype.numpy).reshape(shape)


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def causal_matrix(tokens: int, history: int) -> np.ndarray:
    """0 where key j comes no later than query i when both end together, else -inf."""
    rows, columns = np.indices((tokens, history))
    return np.where(columns <= rows + history - tokens, 0.0, -np.inf).astype(np.float32)


def assert_attention(result: Tensor, expected: np.ndarray, dtype: DType) -> None:
    actual = result.to_numpy()
    assert result.dtype is dtype
    assert actual.shape == expected.shape
    np.testing.assert_allclose(exact(actual), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


class CapabilityTests(BackendCase):
    # Attention.

    @pytest.fixture
    def attend(self, backend: Backend, ctx: Context, declared: Features) -> Attend:
        """The backend's own attention, or the generic body on its operations."""
        if isinstance(backend, SupportsAttention):
            body: Callable[..., Tensor] = backend.attention
        elif declared.has("matmul") and declared.has("softmax"):
            body = generic_attention
        else:
            pytest.skip("declared absent: matmul and softmax, and no SupportsAttention")

        def attend(q: Any, k: Any, v: Any, mask: Any, scale: float, sinks: Any = None) -> Tensor:
            tensors = [ctx.from_numpy(x) if isinstance(x, np.ndarray) else x for x in (q, k, v, mask, sinks)]
            return body(ctx, *tensors[:4], scale, tensors[4])

        return attend

    @each(dtype=FLOATS, heads=HEADS, sizes=[(1, 1), (1, 9), (5, 9), (5, 5), (33, 70), (1, 600)])
    def test_attention_matches_float64_with_and_without_a_mask(
        self, attend: Attend, dtype: DType, heads: tuple[int, int], sizes: tuple[int, int]
    ) -> None:
        tokens, history = sizes
        q, k, v = self._qkv(tokens, heads[0], history, heads[1], dtype, v_dim=4 + 2 * heads[1])
        assert_attention(attend(q, k, v, None, 0.3), reference(q, k, v, None, 0.3), dtype)
        mask = causal_matrix(tokens, history)
        expected = reference(q, k, v, mask, 0.3)
        assert_attention(attend(q, k, v, mask, 0.3), expected, dtype)
        assert_attention(attend(q, k, v, CAUSAL, 0.3), expected, dtype)

    @each(dtype=FLOATS, mask_dtype=FLOATS)
    def test_the_mask_may_have_any_float_dtype_and_padded_rows(
        self, attend: Attend, dtype: DType, mask_dtype: DType
    ) -> None:
        q, k, v = self._qkv(3, 4, 8, 2, dtype)
        mask = np.full((16, 8), -np.inf, np.float32)
        mask[:3] = causal_matrix(3, 8)
        mask[1, 2:5] = -np.inf
        mask[2, 0] = -1.5
        result = attend(q, k, v, mask.astype(mask_dtype.numpy), 0.5)
        assert_attention(result, reference(q, k, v, mask[:3], 0.5), dtype)

    @each(dtype=FLOATS, kind=["none", "causal", "mask"], tokens=(1, 4))
    def test_sinks_take_part_in_the_softmax_and_are_dropped(
        self, attend: Attend, dtype: DType, kind: str, tokens: int
    ) -> None:
        q, k, v = self._qkv(tokens, 4, 7, 2, dtype)
        sinks = np.array([0.5, -2.0, 3.0, 0.0]).astype(dtype.numpy)
        matrix = None if kind == "none" else causal_matrix(tokens, 7)
        result = attend(q, k, v, CAUSAL if kind == "causal" else matrix, 0.4, sinks)
        assert_attention(result, reference(q, k, v, matrix, 0.4, sinks), dtype)

    @each(dtype=FLOATS)
    def test_keys_and_values_are_read_as_a_cache_hands_them_out(
        self, ctx: Context, attend: Attend, dtype: DType
    ) -> None:
        """Views of (kv_heads, cells, head_dim), values also (kv_heads, head_dim, cells); v_dim differs."""
        q, k, v = self._qkv(2, 4, 6, 2, dtype, v_dim=5)
        expected = reference(q, k, v, causal_matrix(2, 6), 0.3)
        keys, values = ctx.zeros((2, 10, 8), dtype), ctx.zeros((2, 5, 10), dtype)
        ctx.from_numpy(k).permute(ctx, 1, 0, 2).copy(ctx, keys.slice(ctx, 1, 2, 8))
        ctx.from_numpy(v).permute(ctx, 1, 2, 0).copy(ctx, values.slice(ctx, 2, 2, 8))
        key = keys.slice(ctx, 1, 2, 8).permute(ctx, 1, 0, 2)
        value = values.slice(ctx, 2, 2, 8).permute(ctx, 2, 0, 1)
        query = ctx.from_numpy(np.ascontiguousarray(q.transpose(1, 0, 2))).permute(ctx, 1, 0, 2)
        mask = ctx.from_numpy(np.pad(causal_matrix(2, 6), 1)).slice(ctx, 0, 1, 3).slice(ctx, 1, 1, 7)
        for given in (CAUSAL, mask):
            assert_attention(attend(query, key, value, given, 0.3), expected, dtype)

    @each(dtype=FLOATS)
    def test_large_scores_do_not_overflow(self, attend: Attend, dtype: DType) -> None:
        q, k = np.full((1, 1, 64), 20).astype(dtype.numpy), np.full((3, 1, 64), 20).astype(dtype.numpy)
        k[1] = 19
        v = np.arange(3 * 8).reshape(3, 1, 8).astype(dtype.numpy)
        assert_attention(attend(q, k, v, None, 0.125), reference(q, k, v, None, 0.125), dtype)

    def test_attention_writes_into_nothing_it_was_given(self, ctx: Context, attend: Attend) -> None:
        q, k, v = self._qkv(3, 4, 6, 2, DType.F32)
        tensors = [ctx.from_numpy(x) for x in (q, k, v, causal_matrix(3, 6))]
        result = attend(tensors[0], tensors[1], tensors[2], tensors[3], 0.3)
        ctx.zeros(result.shape, result.dtype).copy(ctx, result)
        for tensor, before in zip(tensors, (q, k, v, causal_matrix(3, 6)), strict=True):
            np.testing.assert_array_equal(tensor.to_numpy(), before)

    def _qkv(
        self, tokens: int, heads: int, history: int, kv_heads: int, dtype: DType, v_dim: int = 8
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return (
            normal((tokens, heads, 8), dtype, 20, spread=1),
            normal((history, kv_heads, 8), dtype, 21, spread=1),
            normal((history, kv_heads, v_dim), dtype, 22, spread=1),
        )

    # Rope.

    @each(dtype=FLOATS, spec=SPECS)
    def test_rope_is_the_generic_rope(
        self, backend: Backend, ctx: Context, dtype: DType, spec: RopeSpec
    ) -> None:
        if not isinstance(backend, SupportsRope):
            pytest.skip("no SupportsRope: ml.nn runs its generic body")
        x = ctx.from_numpy(normal((5, 3, 16), dtype, 23))
        positions = np.array([0, 1, 7, 500, 3000], np.int32)
        for given in (x, x.permute(ctx, 1, 0, 2).contiguous(ctx).permute(ctx, 1, 0, 2)):
            fused = backend.rope(ctx, given, ctx.from_numpy(positions), spec)
            if fused is None:
                pytest.skip("the kernel leaves this spec to the generic body")
            generic = apply_rope(ctx, x, *rope_tables(ctx, positions, spec), spec)
            assert_close(fused, exact(generic.to_numpy()), dtype, slack=100 if dtype is DType.F32 else 2)

    # Arrays in host memory.

    @each(dtype=DTYPES)
    def test_a_borrowed_array_reads_as_it_is(self, backend: Backend, ctx: Context, dtype: DType) -> None:
        if not isinstance(backend, SupportsZeroCopyRead):
            pytest.skip("no SupportsZeroCopyRead: arrays are copied")
        array = _any_bits(dtype, (2, 3, 4))
        for given in (array, array[:, ::2], _read_only(array), array[:0]):
            tensor = backend.borrow(ctx, given)
            assert (tensor.shape, tensor.dtype) == (given.shape, dtype)
            assert tensor.to_numpy().tobytes() == given.tobytes()
            whole = ctx.zeros(given.shape, dtype)
            tensor.copy(ctx, whole)
            assert whole.to_numpy().tobytes() == given.tobytes()

    @each(dtype=DTYPES)
    def test_what_is_written_over_a_tensor_from_outside_is_what_it_holds(
        self, backend: Backend, ctx: Context, dtype: DType
    ) -> None:
        if not isinstance(backend, SupportsHostWrite):
            pytest.skip("no SupportsHostWrite: arrays are copied")
        host = _any_bits(dtype, (2, 4, 6))
        whole = ctx.from_numpy(np.zeros((2, 4, 6), dtype.numpy))
        # Others that may share the memory, pending or not: they stay what they were.
        result = whole.reshape(ctx, 8, 6).contiguous(ctx)
        twin = ctx.zeros((2, 4, 6), dtype)
        twin.copy(ctx, whole)
        held = np.zeros((2, 4, 6), dtype.numpy)
        for part, mine in (
            (whole.slice(ctx, 1, 1, 3), held[:, 1:3]),
            (whole.slice(ctx, 0, 1, 2), held[1:2]),
            (whole, held),
            (whole.permute(ctx, 2, 0, 1), held.transpose(2, 0, 1)),
        ):
            for values in (host.reshape(-1)[: mine.size].reshape(mine.shape), np.zeros_like(mine)):
                place = backend.overwrite(ctx, part)
                if place is None:
                    pytest.skip("this memory is not the host's")
                assert (place.shape, place.dtype) == (part.shape, dtype.numpy)
                place[...] = mine[...] = values
                del place
                assert whole.to_numpy().tobytes() == held.tobytes()  # and nothing beside it
        assert not result.to_numpy().astype(np.float32).any()
        assert not twin.to_numpy().astype(np.float32).any()
        ctx.from_numpy(host).copy(ctx, whole)  # what follows in the ordinary way is seen too
        assert whole.to_numpy().tobytes() == host.tobytes()

    def test_what_shows_an_element_twice_is_not_written_over(self, backend: Backend, ctx: Context) -> None:
        if not isinstance(backend, SupportsHostWrite):
            pytest.skip("no SupportsHostWrite: arrays are copied")
        tensor = ctx.zeros((1, 4), DType.F32)
        assert backend.overwrite(ctx, tensor.view(ctx, 0, (3, 4), (0, 1))) is None
        empty = backend.overwrite(ctx, tensor.slice(ctx, 1, 2, 2))
        assert empty is None or empty.shape == (1, 0)

    # Caches.

    def test_cache_config_is_a_cache_config(self, backend: Backend) -> None:
        if not isinstance(backend, SupportsCacheConfig):
            pytest.skip("no SupportsCacheConfig: caches use the defaults")
        config = backend.cache_config()
        assert isinstance(config, ml.CacheConfig)
        assert config == backend.cache_config()
