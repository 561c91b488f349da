"""The calls of attention that a pass takes, with the tensors that all layers use: masks, cells, queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

import ml
from kvcache.attention.calls import Call, Level
from kvcache.attention.masks import seen_mask
from kvcache.attention.quantized_calls import attend_quantized
from kvcache.cache import Mask
from kvcache.storage.device_copies import HostArray, HostArrays, OnDevices, near
from kvcache.storage.layer_buffers import LayerBuffers
from ml import nn

BLOCK_CALLS = 4
"""Calls' worth of K and V that are gathered or read back at a time."""


@dataclass(slots=True)
class PlannedCall:
    """One call, ready for any layer."""

    call: Call
    _tokens: HostArray | None
    """Which queries, where they do not lie side by side."""
    _cells: HostArray | None
    _mask: Mask | OnDevices | HostArray
    block_bytes: int
    """Of K and V that are read back at a time, where they are stored quantized."""
    _ready: tuple[ml.Context, ml.AttentionCall] | None = None

    @classmethod
    def of(cls, host: HostArrays, call: Call, config: ml.CacheConfig) -> Self:
        def indices(found: np.ndarray | slice | None) -> HostArray | None:
            return host.add(found) if isinstance(found, np.ndarray) else None

        seen, block = call.seen, BLOCK_CALLS * config.call_bytes
        tokens, cells = indices(call.tokens), indices(call.cells)
        if not isinstance(seen, np.ndarray):
            return cls(call, tokens, cells, seen, block)
        rows = -(-seen.shape[2] // config.mask_batch_padding) * config.mask_batch_padding
        mask = seen_mask(host, seen, rows, call.length, config.mask_dtype)
        return cls(call, tokens, cells, mask, block)

    def on(self, ctx: ml.Context) -> ml.AttentionCall:
        """This call with its tensors on the device of ``ctx``."""
        if self._ready is None or self._ready[0] is not ctx:
            call = self.call
            tokens = call.tokens if isinstance(call.tokens, slice) else near(ctx, self._tokens)
            assert tokens is not None
            cells, mask = near(ctx, self._cells), near(ctx, self._mask)
            made = ml.AttentionCall(tokens, call.batch, call.length, call.start, call.step, cells, mask)
            self._ready = ctx, made
        return self._ready[1]

    def queries(self, ctx: ml.Context, query: ml.Tensor) -> ml.Tensor:
        """This call's of query (tokens, heads, head_dim), segment by segment."""
        tokens = self.on(ctx).tokens
        if not isinstance(tokens, slice):
            return query.rows(ctx, tokens)
        if tokens.stop - tokens.start == query.shape[0]:
            return query
        return query.slice(ctx, 0, tokens.start, tokens.stop)

    def store(self, ctx: ml.Context, found: ml.Tensor, whole: ml.Tensor) -> None:
        """Write what was found for this call's queries into (tokens, ...)."""
        tokens = self.on(ctx).tokens
        if isinstance(tokens, slice):
            found.copy(ctx, whole.slice(ctx, 0, tokens.start, tokens.stop))
        else:
            whole.set_rows(ctx, found, tokens)

    def attend(
        self, ctx: ml.Context, buffers: LayerBuffers, query: ml.Tensor, scale: float, sinks: ml.Tensor | None
    ) -> ml.Tensor:
        """Attention where this call is all that its queries see; (queries, heads, v_dim)."""
        call = self.on(ctx)
        if call.batch > 1 or buffers.is_quantized:
            return nn.merge_attention(ctx, [self.partial(ctx, buffers, query, scale)], sinks)
        mask = call.mask
        if mask is not None and mask is not ml.CAUSAL:
            mask = mask.reshape(ctx, *mask.shape[1:])
        key, value = buffers.read(ctx, call.start if call.cells is None else call.cells, call.length)
        return nn.attention(ctx, query, key, value, mask, scale, sinks)

    def partial(self, ctx: ml.Context, buffers: LayerBuffers, query: ml.Tensor, scale: float) -> nn.Part:
        """Attention over what this call reads: (queries, heads, v_dim), and its log-sum-exp."""
        call = self.on(ctx)
        if buffers.is_quantized:
            return attend_quantized(ctx, buffers, query, call, scale, self.block_bytes)
        count, heads, size = query.shape
        stacked = query.reshape(ctx, call.batch, count // call.batch, heads, size)
        if call.cells is None:
            key, value = buffers.read_batch(ctx, call.start, call.step, call.batch, call.length)
        else:
            key, value = buffers.gather_batch(ctx, call.cells, call.batch, call.length)
        out, lse = nn.partial_attention(ctx, stacked, key, value, call.mask, scale)
        return out.reshape(ctx, count, heads, out.shape[3]), lse.reshape(ctx, count, heads)


@dataclass(slots=True)
class PlannedLevel:
    """Calls that no query is in twice."""

    calls: list[PlannedCall]
    whole: bool

    @classmethod
    def of(cls, host: HostArrays, level: Level, config: ml.CacheConfig) -> Self:
        return cls([PlannedCall.of(host, call, config) for call in level.calls], level.whole)

    @property
    def in_one(self) -> bool:
        """Whether one call has all queries in the order of the batch."""
        return self.whole and len(self.calls) == 1 and isinstance(self.calls[0].call.tokens, slice)

    def attend(
        self, ctx: ml.Context, buffers: LayerBuffers, query: ml.Tensor, scale: float, sinks: ml.Tensor | None
    ) -> ml.Tensor:
        """Attention where this level is all there is."""
        if self.in_one:
            return self.calls[0].attend(ctx, buffers, query, scale, sinks)
        result = ctx.empty((*query.shape[:2], buffers.value.dim), query.dtype)
        for call in self.calls:
            call.store(ctx, call.attend(ctx, buffers, call.queries(ctx, query), scale, sinks), result)
        return result

    def partial(self, ctx: ml.Context, buffers: LayerBuffers, query: ml.Tensor, scale: float) -> nn.Part:
        """Attention over this level; queries that are not in it have zeros, and a log-sum-exp of -inf."""
        if self.in_one:
            return self.calls[0].partial(ctx, buffers, query, scale)
        shape = (*query.shape[:2], buffers.value.dim)
        out = ctx.empty(shape, query.dtype) if self.whole else ctx.zeros(shape, query.dtype)
        lse = ctx.full(shape[:2], -np.inf, ml.DType.F32)
        for call in self.calls:
            found = call.partial(ctx, buffers, call.queries(ctx, query), scale)
            call.store(ctx, found[0], out)
            call.store(ctx, found[1], lse)
        return out, lse
