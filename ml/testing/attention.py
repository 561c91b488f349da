"""Attention: over a whole history, over part of one, merged from parts, and for a ragged batch."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from ml.backend_spec import Features
from ml.capabilities import (
    CAUSAL,
    AttentionCall,
    SupportsAttention,
    SupportsPartialAttention,
    SupportsRaggedAttention,
)
from ml.dtypes import DType
from ml.errors import DeviceError
from ml.nn import generic_attention, generic_partial_attention, latent_attention, merge_attention
from ml.nn.partial import Part
from ml.protocols import Backend, Context, Tensor
from ml.ragged import RaggedPlan
from ml.testing.harness import BackendCase, each, needs, refused, unchanged
from ml.testing.ragged import ragged_reference, random_plan
from ml.testing.samples import FLOATS, exact, float_limits, normal

Attend = Callable[..., Tensor]
"""attend(query, key, value, mask, scale, sinks=None), of tensors or host arrays."""
Partial = Callable[..., Part]
"""partial(query, key, value, mask, scale), of tensors or host arrays."""
HEADS = {"one": (1, 1), "each its own": (4, 4), "grouped": (4, 2), "one for all": (6, 1)}
"""The numbers of query heads and of KV heads."""
Misfit = tuple[tuple[str, tuple[int, ...], DType], ...]
"""Names, shapes and dtypes of tensors."""
MISFITS: Mapping[str, Misfit] = {
    "a mask of one row": (("mask", (1, 5), DType.F32),),
    "a mask of a row less": (("mask", (2, 5), DType.F32),),
    "a mask of one column": (("mask", (3, 1), DType.F32),),
    "a mask for fewer keys": (("mask", (3, 4), DType.F32),),
    "a mask for more keys": (("mask", (3, 6), DType.F32),),
    "a mask of BOOL": (("mask", (3, 5), DType.BOOL),),
    "a mask of integers": (("mask", (3, 5), DType.I32),),
    "heads that are no multiple of the KV heads": (("query", (3, 3, 8), DType.F32),),
    "keys of another size": (("key", (5, 2, 4), DType.F32),),
    "more keys than values": (("key", (6, 2, 8), DType.F32),),
    "no keys": (("key", (0, 2, 8), DType.F32), ("value", (0, 2, 6), DType.F32), ("mask", (3, 0), DType.F32)),
    "values of another dtype": (("value", (5, 2, 6), DType.F16),),
    "keys and values of another dtype": (("key", (5, 2, 8), DType.F16), ("value", (5, 2, 6), DType.F16)),
    "queries of another dtype": (("query", (3, 4, 8), DType.F16),),
    "queries of integers": (("query", (3, 4, 8), DType.I32),),
}
"""The operands that replace those of a valid call of 3 queries over 5 keys."""
TOLERANCE = {DType.F32: 2e-5, DType.F16: 4e-3, DType.BF16: 3e-2}


def definition(
    q: Any, k: Any, v: Any, mask: Any, scale: float, sinks: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Attention and its log-sum-exp in float64, one query and head at a time; mask is a matrix or None."""
    q, k, v = exact(q), exact(k), exact(v)
    bias = np.zeros((len(q), len(k))) if mask is None else exact(mask)
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    out, lse = np.zeros((tokens, heads, v.shape[2])), np.zeros((tokens, heads))
    for t in range(tokens):
        for h in range(heads):
            scores = k[:, h // group] @ q[t, h] * scale + bias[t]
            top = scores.max() if sinks is None else max(scores.max(), float(sinks[h]))
            weights = np.exp(scores - top)
            total = weights.sum() + (0 if sinks is None else math.exp(float(sinks[h]) - top))
            out[t, h] = (weights / total) @ v[:, h // group]
            lse[t, h] = top + math.log(total)
    return out, lse


def reference(q: Any, k: Any, v: Any, mask: Any, scale: float, sinks: Any = None) -> np.ndarray:
    """The attention part of ``definition``."""
    return definition(q, k, v, mask, scale, sinks)[0]


def causal_matrix(tokens: int, history: int) -> np.ndarray:
    """0 where query i sees key j (bottom-right aligned), else -inf."""
    rows, columns = np.indices((tokens, history))
    return np.where(columns <= rows + history - tokens, 0.0, -np.inf).astype(np.float32)


def assert_attention(result: Tensor, expected: np.ndarray, dtype: DType, slack: float = 0.0) -> None:
    actual, tolerance = result.to_numpy(), TOLERANCE[dtype] + slack
    assert result.dtype is dtype
    assert actual.shape == expected.shape
    np.testing.assert_allclose(exact(actual), expected, rtol=tolerance, atol=tolerance)


def assert_part(part: Part, q: Any, k: Any, v: Any, masks: Any, scale: float, dtype: DType) -> None:
    """``masks``: None, one matrix for all batches, or one per batch."""
    rows = [None] * len(q) if masks is None else np.broadcast_to(masks, (len(q), *masks.shape[-2:]))
    out, lse = zip(*(definition(*one, scale) for one in zip(q, k, v, rows, strict=True)), strict=True)
    largest = float(np.abs(lse).max())
    # A weight's relative error is the absolute error of its F32 score.
    assert_attention(part[0], np.stack(out), dtype, slack=largest * float(np.finfo(np.float32).eps))
    assert part[1].dtype is DType.F32
    # Scores may be rounded to the dtype of the keys, and so may their sums.
    atol = TOLERANCE[dtype] * max(1.0, largest)
    np.testing.assert_allclose(exact(part[1].to_numpy()), np.stack(lse), rtol=0, atol=atol)


class AttentionTests(BackendCase):
    # Over a whole history.

    @pytest.fixture
    def attend(self, backend: Backend, ctx: Context, declared: Features) -> Attend:
        """The backend's own attention, or the generic implementation on its operations."""
        if isinstance(backend, SupportsAttention):
            body: Callable[..., Tensor] = backend.attention
        elif declared.has("matmul") and declared.has("softmax"):
            body = generic_attention
        else:
            pytest.skip("declared absent: matmul and softmax, and no SupportsAttention")

        def attend(q: Any, k: Any, v: Any, mask: Any, scale: float, sinks: Any = None) -> Tensor:
            *tensors, logits = _tensors(ctx, q, k, v, mask, sinks)
            return body(ctx, *tensors, scale, logits)

        return attend

    @each(dtype=FLOATS, heads=HEADS, sizes=[(1, 1), (1, 9), (5, 9), (5, 5), (33, 70), (1, 600)])
    def test_attention_matches_float64_with_and_without_a_mask(
        self, attend: Attend, dtype: DType, heads: tuple[int, int], sizes: tuple[int, int]
    ) -> None:
        tokens, history = sizes
        (q,), (k,), (v,) = self._batches(
            1, tokens, heads[0], history, heads[1], dtype, v_dim=4 + 2 * heads[1]
        )
        assert_attention(attend(q, k, v, None, 0.3), reference(q, k, v, None, 0.3), dtype)
        mask = causal_matrix(tokens, history)
        expected = reference(q, k, v, mask, 0.3)
        assert_attention(attend(q, k, v, mask, 0.3), expected, dtype)
        assert_attention(attend(q, k, v, CAUSAL, 0.3), expected, dtype)

    @each(dtype=FLOATS, scale=(0.0, -0.5))
    def test_the_scale_may_be_zero_or_negative(self, attend: Attend, dtype: DType, scale: float) -> None:
        (q,), (k,), (v,) = self._batches(1, 5, 4, 5, 2, dtype)
        expected = reference(q, k, v, causal_matrix(5, 5), scale)
        assert_attention(attend(q, k, v, CAUSAL, scale), expected, dtype)

    @each(dtype=FLOATS, mask_dtype=FLOATS)
    def test_the_mask_may_have_any_float_dtype_and_padded_rows(
        self, attend: Attend, dtype: DType, mask_dtype: DType
    ) -> None:
        (q,), (k,), (v,) = self._batches(1, 3, 4, 8, 2, dtype)
        mask = np.full((16, 8), -np.inf, np.float32)
        mask[:3] = causal_matrix(3, 8)
        mask[1, 2:5] = -np.inf
        mask[2, 0] = -1.5
        result = attend(q, k, v, mask.astype(mask_dtype.numpy), 0.5)
        assert_attention(result, reference(q, k, v, mask[:3], 0.5), dtype)

    @each(dtype=FLOATS, kind=("causal", "mask"), tokens=(1, 6))
    def test_what_a_mask_hides_takes_no_part_however_large_it_is(
        self, ctx: Context, attend: Attend, dtype: DType, kind: str, tokens: int
    ) -> None:
        """A masked weight that is not exactly 0 lets large values through."""
        (q,), (k,), (v,) = self._batches(1, tokens, 4, 9, 2, dtype)
        mask = causal_matrix(tokens, 9)
        if kind == "mask":
            mask[:, -1] = -np.inf
        seeing = tokens if kind == "mask" else tokens - 1  # the last query sees the last key
        expected = reference(q, k, np.where(np.arange(9)[:, None, None] == 8, 0, v), mask, 0.3)
        v[-1] = float_limits(dtype).max
        actual = attend(q, k, v, CAUSAL if kind == "causal" else mask, 0.3)
        assert_attention(actual.slice(ctx, 0, 0, seeing), expected[:seeing], dtype)

    @each(dtype=FLOATS, kind=["none", "causal", "mask"], tokens=(1, 4))
    def test_sinks_take_part_in_the_softmax_and_are_dropped(
        self, attend: Attend, dtype: DType, kind: str, tokens: int
    ) -> None:
        (q,), (k,), (v,) = self._batches(1, tokens, 4, 7, 2, dtype)
        sinks = np.array([0.5, -2.0, 3.0, 0.0]).astype(dtype.numpy)
        matrix = None if kind == "none" else causal_matrix(tokens, 7)
        result = attend(q, k, v, CAUSAL if kind == "causal" else matrix, 0.4, sinks)
        assert_attention(result, reference(q, k, v, matrix, 0.4, sinks), dtype)

    @each(dtype=FLOATS)
    def test_keys_and_values_are_read_as_a_cache_hands_them_out(
        self, ctx: Context, attend: Attend, dtype: DType
    ) -> None:
        """Views of (kv_heads, cells, head_dim), values also (kv_heads, head_dim, cells); v_dim differs."""
        (q,), (k,), (v,) = self._batches(1, 2, 4, 6, 2, dtype, v_dim=5)
        expected = reference(q, k, v, causal_matrix(2, 6), 0.3)
        keys, values = ctx.zeros((2, 10, 8), dtype), ctx.zeros((2, 5, 10), dtype)
        ctx.from_numpy(k).permute(ctx, 1, 0, 2).copy(ctx, keys.slice(ctx, 1, 2, 8))
        ctx.from_numpy(v).permute(ctx, 1, 2, 0).copy(ctx, values.slice(ctx, 2, 2, 8))
        key = keys.slice(ctx, 1, 2, 8).permute(ctx, 1, 0, 2)
        value = values.slice(ctx, 2, 2, 8).permute(ctx, 2, 0, 1)
        query = ctx.from_numpy(np.ascontiguousarray(q.transpose(1, 0, 2))).permute(ctx, 1, 0, 2)
        mask = ctx.from_numpy(np.pad(causal_matrix(2, 6), 1)).slice(ctx, 0, 1, 3).slice(ctx, 1, 1, 7)
        for one_mask in (CAUSAL, mask):
            assert_attention(attend(query, key, value, one_mask, 0.3), expected, dtype)

    @each(dtype=FLOATS)
    def test_large_scores_do_not_overflow(self, attend: Attend, dtype: DType) -> None:
        q, k = np.full((1, 1, 64), 20).astype(dtype.numpy), np.full((3, 1, 64), 20).astype(dtype.numpy)
        k[1] = 19
        v = np.arange(3 * 8).reshape(3, 1, 8).astype(dtype.numpy)
        assert_attention(attend(q, k, v, None, 0.125), reference(q, k, v, None, 0.125), dtype)

    def test_attention_writes_into_nothing_it_was_given(self, ctx: Context, attend: Attend) -> None:
        (q,), (k,), (v,) = self._batches(1, 3, 4, 6, 2, DType.F32)
        tensors = [ctx.from_numpy(x) for x in (q, k, v, causal_matrix(3, 6))]
        result = attend(tensors[0], tensors[1], tensors[2], tensors[3], 0.3)
        ctx.zeros(result.shape, result.dtype).copy(ctx, result)
        for tensor, before in zip(tensors, (q, k, v, causal_matrix(3, 6)), strict=True):
            np.testing.assert_array_equal(tensor.to_numpy(), before)

    @each(misfit=MISFITS)
    def test_attention_refuses_what_does_not_fit(self, ctx: Context, attend: Attend, misfit: Misfit) -> None:
        operands = _call(ctx, misfit)
        refused(lambda: attend(*operands, 0.3), keep=operands)

    def test_attention_refuses_causal_queries_that_see_no_key_and_sinks_of_other_heads(
        self, ctx: Context, attend: Attend
    ) -> None:
        query, key, value, mask = _call(ctx)
        more = ctx.zeros((6, 4, 8), DType.F32)
        refused(
            lambda: attend(more, key, value, CAUSAL, 0.3),
            lambda: attend(query, key, value, mask, 0.3, ctx.zeros((1,), DType.F32)),
            lambda: attend(query, key, value, mask, 0.3, ctx.zeros((4, 1), DType.F32)),
            lambda: attend(query, key, value, mask, 0.3, ctx.zeros((4,), DType.I32)),
            keep=(more, query, key, value, mask),
        )

    def test_attention_refuses_tensors_of_other_backends(
        self, ctx: Context, foreign: Context, open_backend: Callable[[], Backend], attend: Attend
    ) -> None:
        own = [*_call(ctx), ctx.zeros((4,), DType.F32)]
        for other in (foreign, open_backend().new_context()):
            for operands in _partly_of(other, own):
                with unchanged(*operands):
                    attend(*operands[:4], 0.3, operands[4])

    # Over latents.

    @needs("matmul")
    @each(dtype=FLOATS, heads=(1, 3), sizes=[(1, 1), (1, 9), (5, 9), (5, 5)])
    def test_attention_over_latents_is_attention_over_the_keys_and_values_made_of_them(
        self, ctx: Context, attend: Attend, dtype: DType, heads: int, sizes: tuple[int, int]
    ) -> None:
        tokens, history = sizes
        nope, rope, up_key, up_value, stored = (
            normal(shape, dtype, 60 + i, spread=0.5)
            for i, shape in enumerate(
                [(tokens, heads, 6), (tokens, heads, 4), (heads, 6, 8), (heads, 8, 5), (history, 1, 12)]
            )
        )
        mask, (latent, rotated) = causal_matrix(tokens, history), np.split(exact(stored)[:, 0], [8], 1)
        common = np.broadcast_to(rotated[:, None], (history, heads, 4))
        key = np.concatenate([np.einsum("hnr,tr->thn", exact(up_key), latent), common], 2)
        value = np.einsum("tr,hrv->thv", latent, exact(up_value))
        query = np.concatenate([exact(nope), exact(rope)], 2)

        def absorbed(absorbed_query: Tensor) -> Tensor:
            assert absorbed_query.shape == (tokens, heads, 12)
            return attend(absorbed_query, stored, np.ascontiguousarray(stored[..., :8]), mask, 0.3)

        query_nope, query_rope, *up = _tensors(ctx, nope, rope, up_key, up_value)
        actual = latent_attention(ctx, query_nope, query_rope, up[0], up[1], absorbed)
        assert_attention(actual, reference(query, key, value, mask, 0.3), dtype, slack=TOLERANCE[dtype])

    # Over part of a history.

    @pytest.fixture
    def partial(self, backend: Backend, ctx: Context, declared: Features) -> Partial:
        """The backend's own partial attention, or the generic implementation on its operations."""
        needed = ("scale", "matmul", "max", "sub", "exp", "sum", "div", "log", "add")
        if isinstance(backend, SupportsPartialAttention):
            body: Callable[..., Part] = backend.partial_attention
        elif not (absent := [name for name in needed if not declared.has(name)]):
            body = generic_partial_attention
        else:
            pytest.skip(f"declared absent: {absent[0]}, and no SupportsPartialAttention")

        def partial(q: Any, k: Any, v: Any, mask: Any, scale: float) -> Part:
            return body(ctx, *_tensors(ctx, q, k, v, mask), scale)

        return partial

    @each(dtype=FLOATS, heads=HEADS, sizes=[(1, 1), (1, 9), (5, 9), (9, 9), (9, 70)])
    def test_part_of_a_history_is_attended_to_with_its_log_sum_exp(
        self, partial: Partial, dtype: DType, heads: tuple[int, int], sizes: tuple[int, int]
    ) -> None:
        """Values of the keys' size, for which frameworks have kernels, and of a different size."""
        causal = causal_matrix(*sizes)
        for batch, v_dim in ((3, 6), (3, 8), (1, 8)):
            q, k, v = self._batches(batch, sizes[0], heads[0], sizes[1], heads[1], dtype, v_dim)
            assert_part(partial(q, k, v, None, 0.3), q, k, v, None, 0.3, dtype)
            assert_part(partial(q, k, v, CAUSAL, 0.3), q, k, v, causal, 0.3, dtype)
            assert_part(partial(q, k, v, causal[None], 0.3), q, k, v, causal, 0.3, dtype)

    @each(sizes=[(1, 0), (0, 2), (0, 0)])
    def test_no_queries_give_empty_parts(self, partial: Partial, sizes: tuple[int, int]) -> None:
        q, k, v = self._batches(sizes[0], sizes[1], 4, 9, 2, DType.F32)
        assert [part.shape for part in partial(q, k, v, None, 0.3)] == [(*sizes, 4, 8), (*sizes, 4)]

    @each(dtype=FLOATS, mask_dtype=FLOATS)
    def test_each_batch_has_a_mask_of_any_float_dtype_and_padded_rows(
        self, partial: Partial, dtype: DType, mask_dtype: DType
    ) -> None:
        q, k, v = self._batches(2, 3, 4, 8, 2, dtype)
        masks = np.full((2, 16, 8), -np.inf, np.float32)
        masks[:, :3] = causal_matrix(3, 8)
        masks[0, 1, 2:5], masks[1, 2, 0], masks[1, 0, 0] = -np.inf, -1.5, -np.inf
        part = partial(q, k, v, masks.astype(mask_dtype.numpy), 0.5)
        assert_part(part, q, k, v, masks[:, :3], 0.5, dtype)

    @each(dtype=FLOATS, permuted=(False, True))
    def test_parts_are_read_as_a_cache_hands_them_out(
        self, ctx: Context, partial: Partial, dtype: DType, permuted: bool
    ) -> None:
        """Sequences side by side in (kv_heads, cells, size), and values also (kv_heads, size, cells)."""
        q, k, v = self._batches(3, 2, 4, 6, 2, dtype, v_dim=5)
        keys, values = ctx.zeros((2, 31, 8), dtype), ctx.zeros((2, 31, 5), dtype)
        if permuted:
            values = ctx.zeros((2, 5, 31), dtype).permute(ctx, 0, 2, 1)
        for number, (one, other) in enumerate(zip(k, v, strict=True)):
            start = 2 + 9 * number
            for host, buffer in ((one, keys), (other, values)):
                ctx.from_numpy(host).permute(ctx, 1, 0, 2).copy(ctx, buffer.slice(ctx, 1, start, start + 6))
        key, value = (
            whole.view(ctx, 2 * whole.strides[1], (3, 6, 2, whole.shape[2]), (9 * cell, cell, head, size))
            for whole in (keys, values)
            for head, cell, size in [whole.strides]
        )
        query = ctx.from_numpy(np.ascontiguousarray(q.transpose(2, 0, 1, 3))).permute(ctx, 1, 2, 0, 3)
        for mask in (None, CAUSAL):
            matrix = None if mask is None else causal_matrix(2, 6)
            assert_part(partial(query, key, value, mask, 0.3), q, k, v, matrix, 0.3, dtype)

    @each(dtype=FLOATS)
    def test_large_scores_do_not_overflow_the_log_sum_exp(self, partial: Partial, dtype: DType) -> None:
        q, k = np.full((1, 1, 1, 64), 20).astype(dtype.numpy), np.full((1, 3, 1, 64), 20).astype(dtype.numpy)
        k[0, 1] = 19
        v = np.arange(3 * 8).reshape(1, 3, 1, 8).astype(dtype.numpy)
        assert_part(partial(q, k, v, None, 0.125), q, k, v, None, 0.125, dtype)

    def test_partial_attention_writes_into_nothing_it_was_given(self, ctx: Context, partial: Partial) -> None:
        hosts = [*self._batches(2, 3, 4, 6, 2, DType.F32), causal_matrix(3, 6)[None]]
        tensors = [ctx.from_numpy(host) for host in hosts]
        for result in partial(*tensors, 0.3):
            ctx.zeros(result.shape, result.dtype).copy(ctx, result)
        for tensor, before in zip(tensors, hosts, strict=True):
            np.testing.assert_array_equal(tensor.to_numpy(), before)

    @each(misfit=MISFITS)
    def test_partial_attention_refuses_what_does_not_fit(
        self, ctx: Context, partial: Partial, misfit: Misfit
    ) -> None:
        operands = _call(ctx, misfit, (2,))
        refused(lambda: partial(*operands, 0.3), keep=operands)

    def test_partial_attention_refuses_other_batches_and_causal_queries_that_see_no_key(
        self, ctx: Context, partial: Partial
    ) -> None:
        query, key, value, mask = _call(ctx, batch=(2,))
        _, *three = _call(ctx, batch=(3,))
        more = ctx.zeros((2, 6, 4, 8), DType.F32)
        refused(
            lambda: partial(more, key, value, CAUSAL, 0.3),
            lambda: partial(query, key, value, three[2], 0.3),
            lambda: partial(query, *three[:2], None, 0.3),
            lambda: partial(query, key, value, ctx.zeros((3, 5), DType.F32), 0.3),
            keep=(query, key, value, mask, more, *three),
        )

    def test_partial_attention_refuses_tensors_of_other_backends(
        self, ctx: Context, foreign: Context, open_backend: Callable[[], Backend], partial: Partial
    ) -> None:
        own = _call(ctx, batch=(1,))
        for other in (foreign, open_backend().new_context()):
            for operands in _partly_of(other, own):
                with unchanged(*operands):
                    partial(*operands, 0.3)

    def _batches(
        self, batch: int, tokens: int, heads: int, history: int, kv_heads: int, dtype: DType, v_dim: int = 8
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return (
            normal((batch, tokens, heads, 8), dtype, 24, spread=1),
            normal((batch, history, kv_heads, 8), dtype, 25, spread=1),
            normal((batch, history, kv_heads, v_dim), dtype, 26, spread=1),
        )

    # Merged from parts.

    @each(dtype=FLOATS, edges=[(0, 9), (0, 1, 9), (0, 4, 5, 7, 9)], sunk=(False, True))
    def test_parts_merge_into_the_whole(
        self, ctx: Context, partial: Partial, dtype: DType, edges: tuple[int, ...], sunk: bool
    ) -> None:
        (q,), (k,), (v,) = self._batches(1, 3, 4, 9, 2, dtype, v_dim=6)
        sinks = np.array([0.5, -2.0, 3.0, 0.0]).astype(dtype.numpy) if sunk else None
        parts = []
        for start, stop in itertools.pairwise(edges):
            out, lse = partial(q[None], k[None, start:stop], v[None, start:stop], None, 0.4)
            parts.append((out.reshape(ctx, 3, 4, 6), lse.reshape(ctx, 3, 4)))
        merged = merge_attention(ctx, parts, None if sinks is None else ctx.from_numpy(sinks))
        assert_attention(merged, reference(q, k, v, None, 0.4, sinks), dtype)

    @each(dtype=FLOATS, op=["softmax"])
    def test_a_part_that_a_query_sees_nothing_of_has_no_weight(
        self, ctx: Context, dtype: DType, op: str
    ) -> None:
        outs = [normal((2, 4, 6), dtype, seed, spread=1) for seed in (27, 28)]
        unseen = np.full((2, 4), -np.inf, np.float32)
        some = np.zeros((2, 4), np.float32)
        some[1, 2] = -300.0  # however small the other weights are
        for order in (1, -1):
            parts = [
                (ctx.from_numpy(out), ctx.from_numpy(lse))
                for out, lse in zip(outs, (some, unseen), strict=True)
            ]
            assert_attention(merge_attention(ctx, parts[::order]), exact(outs[0]), dtype)

    # For a ragged batch.

    @each(
        dtype=FLOATS,
        heads=HEADS,
        case=["1 of 9 cells", "3 of 40 cells", "20 of 70 cells", "2 of 900 cells"],
    )
    def test_each_query_attends_to_the_rows_that_its_plan_names(
        self, backend: Backend, ctx: Context, dtype: DType, heads: tuple[int, int], case: str
    ) -> None:
        """Rows in no segment contain NaN; buffers are head-major, some values (kv_heads, size, cells).

        With sinks if queries share keys: a kernel may be compiled separately for each.
        """
        sunk = heads[0] != heads[1]
        tokens, cells = (int(word) for word in case.split() if word.isdigit())
        plan = random_plan(tokens + heads[0], tokens, cells)
        q = normal((tokens, heads[0], 8), dtype, 29, spread=1)
        k, v = (normal((cells + 3, heads[1], size), dtype, 30 + size, spread=1) for size in (8, 5))
        named = np.concatenate([plan.rows(number) for number in range(len(plan.segments))])
        unnamed = np.setdiff1d(np.arange(cells + 3), named)
        k[unnamed] = v[unnamed] = np.nan
        sinks = normal((heads[0],), dtype, 31) if sunk else None
        if not isinstance(backend, SupportsRaggedAttention):
            pytest.skip("no SupportsRaggedAttention: caches use partial attention")
        query, logits = _tensors(ctx, q, sinks)
        key, rows = (ctx.from_numpy(x.transpose(1, 0, 2)).permute(ctx, 1, 0, 2) for x in (k, v))
        actual = []
        for value in (rows, ctx.from_numpy(v.transpose(1, 2, 0)).permute(ctx, 2, 0, 1)):
            result = backend.ragged_attention(ctx, query, key, value, plan, 0.3, logits)
            if result is not None:
                actual.append(result)
                assert_attention(result, ragged_reference(q, k, v, plan, 0.3, sinks), dtype)
            repeated = None if plan.again is None else plan.again(ctx, query, key, value, 0.3)
            if repeated is not None:
                assert_attention(repeated, ragged_reference(q, k, v, plan, 0.3, None), dtype)
        if not actual:
            pytest.skip("the kernel leaves this case to partial attention")

    def test_the_kernel_attends_to_no_tensors_of_other_backends(
        self, backend: Backend, ctx: Context, foreign: Context, open_backend: Callable[[], Backend]
    ) -> None:
        """Neither at first nor after it has attended with the plan; it may leave them to partial
        attention.
        """
        if not isinstance(backend, SupportsRaggedAttention):
            pytest.skip("no SupportsRaggedAttention: caches use partial attention")
        plan = random_plan(3, 3, 20)
        own = [ctx.zeros(shape, DType.F32) for shape in ((3, 4, 8), (20, 2, 8), (20, 2, 8))]
        for _ in range(2):
            for other in (foreign, open_backend().new_context()):
                for query, key, value in _partly_of(other, own):
                    assert plan.again is None or plan.again(ctx, query, key, value, 0.3) is None
                    with contextlib.suppress(DeviceError):
                        assert backend.ragged_attention(ctx, query, key, value, plan, 0.3) is None
            query, key, value = own
            for other in (foreign, open_backend().new_context()):
                sinks = other.zeros((4,), DType.F32)
                with contextlib.suppress(DeviceError):
                    assert backend.ragged_attention(ctx, query, key, value, plan, 0.3, sinks) is None
            backend.ragged_attention(ctx, query, key, value, plan, 0.3)

    # Several calls at once.

    @each(dtype=FLOATS, layout=["token major", "head major"], with_sinks=[False, True])
    def test_several_calls_come_to_attention_over_all_that_they_read(
        self, backend: Backend, ctx: Context, dtype: DType, layout: str, with_sinks: bool
    ) -> None:
        """Evenly spaced runs, listed rows, and a run shared by three of the four queries."""
        if not isinstance(backend, SupportsPartialAttention):
            pytest.skip("no SupportsPartialAttention: the calls are made one by one")
        query, key, value = (
            normal(shape, dtype, 40 + i, spread=1)
            for i, shape in enumerate([(4, 4, 8), (24, 2, 8), (24, 2, 8)])
        )
        sinks = normal((4,), dtype, 43, spread=1) if with_sinks else None
        segments = [(0, 0, 3, 0, 1), (0, 4, 2, 1, 2), (1, 0, 3, 2, 4), (0, 10, 6, 4, 7)]
        readers = [(0, 0, 3), (1, 0, 2), (2, 0, 3), (3, 0, 2), (0, 0, 6), (2, 0, 6), (3, 0, 6)]
        plan = RaggedPlan(4, np.array(segments), np.array(readers), np.array([23, 8, 20]))
        mask = np.zeros((2, 1, 3), np.float32)
        mask[1, 0, 2] = -np.inf
        listed = np.array([[0, 0, 0], [0, 0, -np.inf]], np.float32)[None]
        levels = [
            [
                AttentionCall(slice(0, 2), 2, 3, 0, 4, None, ctx.from_numpy(mask)),
                AttentionCall(
                    slice(2, 4), 1, 3, 0, 0, ctx.from_numpy(np.array([23, 8, 20], np.int32)),
                    ctx.from_numpy(listed),
                ),
            ],
            [AttentionCall(ctx.from_numpy(np.array([0, 2, 3], np.int32)), 1, 6, 10, 6, None, None)],
        ]  # fmt: skip
        keys, values = ctx.from_numpy(key), ctx.from_numpy(value)
        if layout == "head major":
            keys, values = (
                x.permute(ctx, 1, 0, 2).contiguous(ctx).permute(ctx, 1, 0, 2) for x in (keys, values)
            )
        sink_tensor = None if sinks is None else ctx.from_numpy(sinks)
        actual = backend.attention_calls(ctx, ctx.from_numpy(query), keys, values, levels, 0.3, sink_tensor)
        if actual is None:
            pytest.skip("the backend does not run several calls at once")
        expected = ragged_reference(query, key, value, plan, 0.3, sinks)
        assert_attention(actual, expected, dtype)


def _call(ctx: Context, misfit: Misfit = (), batch: tuple[int, ...] = ()) -> list[Tensor]:
    """Query, key, value and mask of a call, all 0; a row of MISFITS replaces some of them."""
    shapes = {"query": (3, 4, 8), "key": (5, 2, 8), "value": (5, 2, 6), "mask": (3, 5)}
    operands = {name: (shape, DType.F32) for name, shape in shapes.items()}
    operands |= {name: (shape, dtype) for name, shape, dtype in misfit}
    return [ctx.zeros((*batch, *shape), dtype) for shape, dtype in operands.values()]


def _partly_of(other: Context, operands: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors like ``operands``: all of them made by ``other``, then one at a time."""
    theirs = [other.zeros(x.shape, x.dtype) for x in operands]
    yield theirs
    for number, foreign in enumerate(theirs):
        yield [*operands[:number], foreign, *operands[number + 1 :]]


def _tensors(ctx: Context, *values: Any) -> list[Any]:
    """Host arrays as tensors; anything else unchanged."""
    return [ctx.from_numpy(value) if isinstance(value, np.ndarray) else value for value in values]
