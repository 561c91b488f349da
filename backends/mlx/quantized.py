"""Attention over affine groups in place, with MLX's products of quantized matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from backends.mlx.arrays import MLX_DTYPES, from_host
from ml.block_formats import AFFINE
from ml.ragged import RaggedPlan

if TYPE_CHECKING:
    from backends.mlx.tensor import MlxTensor

MOST = 8
"""The most segments of a plan, each of which takes some dozen operations."""


def quantized_attention(
    query: MlxTensor,
    key: Sequence[MlxTensor],
    value: Sequence[MlxTensor],
    formats: tuple[str, str],
    plan: RaggedPlan,
    scale: float,
    sinks: MlxTensor | None,
) -> MlxTensor | None:
    """See ``ml.SupportsRaggedAttention``; None for other formats, and for many segments.

    The queries of a segment, and those of a KV head, are rows of one product; the softmax is in F32.
    """
    work = query.storage.work
    if any(name not in AFFINE for name in formats) or len(plan.segments) > MOST:
        return None
    if not (work.widens or mx.metal.is_available()):
        return None  # on CUDA, MLX 0.32 lacks quantized products for some of these shapes
    with work.lock, work.on_stream:
        keys, values = _Groups(key, formats[0]), _Groups(value, formats[1])
        tokens, heads, size = query.shape
        whole = mx.astype(query.read(), mx.float32) * scale
        whole = mx.reshape(whole, (tokens, keys.heads, heads // keys.heads, size))
        sums = mx.zeros((tokens, keys.heads, heads // keys.heads, values.dim))
        tops = mx.full((*sums.shape[:3], 1), -mx.inf)
        totals = mx.zeros(tops.shape)
        if sinks is not None:
            logits = mx.reshape(mx.astype(sinks.read(), mx.float32), (1, *tops.shape[1:]))
            tops, totals = mx.broadcast_to(logits, tops.shape), totals + 1.0
        for segment in range(len(plan.segments)):
            who, part = _attend(plan, segment, whole, keys, values)
            before = (sums, tops, totals) if who is None else (sums[who], tops[who], totals[who])
            merged = _merge(before, part)
            if who is None:
                sums, tops, totals = merged
            else:
                sums[who], tops[who], totals[who] = merged
        out = mx.reshape(sums / totals, (tokens, heads, values.dim))
        return query.wrap(mx.astype(out, MLX_DTYPES[query.dtype]))


@dataclass(slots=True)
class _Groups:
    """K or V of a layer: words of codes, scales and biases."""

    parts: Sequence[MlxTensor]
    name: str

    @property
    def heads(self) -> int:
        return int(self.parts[0].shape[1])

    @property
    def dim(self) -> int:
        return int(self.parts[0].shape[2]) * 32 // AFFINE[self.name][0]

    def product(self, x: Any, rows: tuple[int, int] | np.ndarray, transpose: bool) -> Any:
        """x (kv_heads, n, dim or rows) times these rows, transposed or not."""
        bits, group = AFFINE[self.name]
        words, *rest = (_by_head(part, rows) for part in self.parts)
        scales, biases = (mx.astype(one, mx.float32) for one in rest)
        codes = mx.view(words, mx.uint32)
        return mx.quantized_matmul(x, codes, scales, biases, transpose, group, bits)


def _by_head(part: MlxTensor, rows: tuple[int, int] | np.ndarray) -> Any:
    """(kv_heads, rows, width): a run of rows (start, length), or those listed."""
    (cells, heads, width), (row, head, one) = part.shape, part.strides
    if isinstance(rows, tuple):
        start, length = rows
        return part.storage.read(part.offset + start * row, (heads, length, width), (head, row, one))
    whole = part.storage.read(part.offset, (heads, cells, width), (head, row, one))
    return mx.take(whole, from_host(rows), axis=1)


def _attend(plan: RaggedPlan, segment: int, query: Any, keys: _Groups, values: _Groups) -> tuple[Any, Any]:
    """The queries that read a segment (None: all in order), with their sums, highest scores and weights."""
    gathered, start, length, first, stop = plan.segments[segment].tolist()
    who, begin, end = plan.readers[first:stop].T
    rows = plan.index[start : start + length] if gathered else (start, length)
    everyone = np.array_equal(who, np.arange(query.shape[0]))
    some = query if everyone else query[from_host(np.ascontiguousarray(who))]
    count, heads, group, size = some.shape
    flat = mx.reshape(some.transpose(1, 0, 2, 3), (heads, count * group, size))
    scores = mx.reshape(keys.product(flat, rows, True), (heads, count, group, length))
    if begin.any() or (end < length).any():
        at, (low, high) = mx.arange(length), (from_host(np.ascontiguousarray(x)) for x in (begin, end))
        seen = (at >= low[:, None]) & (at < high[:, None])
        scores = mx.where(seen[None, :, None], scores, mx.array(-mx.inf))
    tops = mx.max(scores, axis=-1, keepdims=True)
    weights = mx.exp(scores - tops)
    totals = mx.sum(weights, axis=-1, keepdims=True)
    out = values.product(mx.reshape(weights, (heads, count * group, length)), rows, False)
    out = mx.reshape(out, (heads, count, group, values.dim))
    partial = tuple(part.transpose(1, 0, 2, 3) for part in (out, tops, totals))
    return (None if everyone else from_host(np.ascontiguousarray(who))), partial


def _merge(one: Any, other: Any) -> Any:
    """Merge sums, highest scores and weights of two parts."""
    top = mx.maximum(one[1], other[1])
    shares = mx.exp(one[1] - top), mx.exp(other[1] - top)
    sums, totals = (one[i] * shares[0] + other[i] * shares[1] for i in (0, 2))
    return sums, top, totals
