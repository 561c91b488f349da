"""A layer's stored K and V in a pass, which attention reads from the cache."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvcache import DenseBatch, NotSupportedError
from kvcache.integrations.rows.caches import CHUNKED, Kind
from kvcache.integrations.transformers.deferred import Deferred
from kvcache.integrations.transformers.passes import ForwardPass, Pair, Shown
from kvcache.integrations.transformers.pool import CachePool

__all__ = ["Stored", "decode_over_views", "is_recorded", "tokens_of", "without_gradients"]

CALLS = 4
"""Hidden tokens are skipped only if each row has this many calls' worth of them, since it takes more
calls.
"""


@dataclass(slots=True, eq=False)
class Stored:
    """A layer's part in a pass: the new tokens are stored, and everything visible can be read."""

    pool: CachePool
    layer: int
    kind: Kind
    current: ForwardPass
    reading: DenseBatch
    _read_pair: Pair | None = None

    def pair(self, key: torch.Tensor, value: torch.Tensor, read: Pair | None) -> Pair:
        """All K and V (rows, heads, tokens, dim) that the pass sees; their attribute ``stored`` is this
        object. They are ``read`` if read already, views if that copies nothing, else deferred tensors.
        """
        if read is None and self.reading.is_view and self.pool.aliased(self.layer, key):
            read = self.pool.read(self.reading, self.layer, key, value)
        elif read is None:
            one, heads, tokens = self.pool.places.like(self.layer), key.shape[:2], self.reading.tokens
            read = (
                Deferred.of(one, (*heads, tokens, key.shape[3]), lambda: self._read(key, value)[0]),
                Deferred.of(one, (*heads, tokens, value.shape[3]), lambda: self._read(key, value)[1]),
            )
            self.current.deferred += map(weakref.ref, read)
        for tensor in read:
            tensor.stored = self  # type: ignore[attr-defined]
        return read

    def _read(self, key: torch.Tensor, value: torch.Tensor) -> Pair:
        if self._read_pair is None:
            self.pool.check_current(self.current)
            self._read_pair = self.pool.read(self.reading, self.layer, key, value)
        return self._read_pair

    def attend(
        self,
        query: torch.Tensor,
        pair: Pair,
        scale: float,
        sinks: torch.Tensor | None,
        mask: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Attention (rows, tokens, heads, v_dim) of query (rows, heads, tokens, head_dim).

        ``pair`` is the result of ``pair``; ``mask`` (rows, tokens so far) marks tokens that are not padding.
        None if the cache's visibility differs: transformers counts chunks from the end of the padding.
        """
        self.pool.check_current(self.current)
        cache, tokens = self.pool.family.caches[self.kind], self.current.tokens
        plain = sinks is None and not isinstance(pair[0], Deferred)
        shown = self.current.masks.get(self.kind)
        if shown is None:
            shown = self.current.masks[self.kind] = self._shown(mask, plain)
        if not shown.served or (shown.mask is not mask and not _equal(shown.mask, mask)):
            return None
        if shown.dense and not plain:  # this layer has sinks, but the first of its kind has none
            return None
        if shown.dense:
            return decode_over_views(query, *pair, scale, None if shown.rows is None else mask)
        ctx, bridge = self.pool.ctx.layer(self.layer), self.pool.bridge
        cache.set_layer(self.layer)
        logits = None if sinks is None else bridge.to_backend(ctx, sinks)
        attended = cache.attend(ctx, bridge.to_backend(ctx, tokens_of(query)), scale, logits)
        out = bridge.to_torch(attended, query).view(query.shape[0], tokens, query.shape[1], -1)
        if shown.blind is not None:
            out[torch.from_numpy(shown.blind).to(out.device)] = 0
        return out

    def _shown(self, mask: torch.Tensor | None, plain: bool) -> Shown:
        """What ``mask`` shows of the visible tokens; unless views are read, limits the reading to them."""
        cache = self.pool.family.caches[self.kind]
        tokens, chunks = self.current.tokens, self.kind.name == CHUNKED
        rows: np.ndarray | None = None if mask is None else mask.cpu().numpy()
        if rows is not None and (rows.shape[1] != self.current.begin + tokens or (chunks and not rows.all())):
            return Shown(mask, rows, served=False)
        dense = tokens == 1 and not chunks and plain
        if rows is not None:
            seen = rows[:, -self.reading.tokens :]
            hidden = seen.size - int(np.count_nonzero(seen))
            call = cache.config.call_bytes // cache.storage.buffers[self.layer].bytes_per_cell
            dense = dense and hidden <= CALLS * len(rows) * call
            rows = rows if hidden else None
        continues = _goes_on(self.pool.shown.get(self.kind), rows)
        self.pool.shown[self.kind] = None if rows is None else rows.copy()  # the caller may change the mask
        blind = None if rows is None else self._blind(rows)
        cache.pass_reads().show_only(None if dense else rows, blind, continues=continues)
        return Shown(mask, rows, True, blind, dense)

    def _blind(self, rows: np.ndarray) -> np.ndarray | None:
        """Which of the new tokens (rows, tokens) see nothing; None if there are none."""
        seen = np.cumsum(np.pad(rows, ((0, 0), (1, 0))), 1, dtype=np.int32)
        ends = np.arange(self.current.begin, self.current.begin + self.current.tokens) + 1
        blind = seen[:, ends] == seen[:, np.maximum(ends - self.kind.size, 0) if self.kind.size else ends * 0]
        return blind if blind.any() else None


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _goes_on(before: np.ndarray | None, shown: np.ndarray | None) -> bool:
    """Whether a pass reads what the previous one read, followed by its new tokens; None if everything is
    shown. A new token's cell follows that of the last token, where the reading ended if that token was shown.
    """
    if before is None or shown is None:
        return before is shown
    length = before.shape[1]
    return np.array_equal(shown[:, :length], before) and bool(shown[:, length - 1 :].all())


def decode_over_views(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention of one token of each row, over views of the cache. Queries that share keys are rows of one
    product. Not cuDNN's, which PyTorch prefers on some devices from 2.10 on: it plans for tens of
    milliseconds at every new length.
    """
    rows, heads, _, dim = query.shape
    stacked = query.reshape(rows, key.shape[1], -1, dim)
    shown = None if mask is None else mask[:, None, None, -key.shape[2] :].to(query.device)
    switch: Any = torch.backends.cuda
    by_cudnn = query.is_cuda and switch.cudnn_sdp_enabled()
    try:
        if by_cudnn:
            switch.enable_cudnn_sdp(False)
        out = torch.nn.functional.scaled_dot_product_attention(stacked, key, value, shown, scale=scale)
    finally:
        if by_cudnn:
            switch.enable_cudnn_sdp(True)
    return out.reshape(rows, 1, heads, -1)


def tokens_of(x: torch.Tensor) -> torch.Tensor:
    """(rows, heads, tokens, dim) as (rows * tokens, heads, dim)."""
    rows, _, tokens, _ = x.shape
    if tokens == 1:
        return x.select(2, 0)
    if rows == 1:
        return x.select(0, 0).transpose(0, 1)
    return x.transpose(1, 2).flatten(0, 1)


def is_recorded(key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether gradients of new keys and values are being recorded."""
    return torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)


def without_gradients(pair: Pair, key: torch.Tensor, value: torch.Tensor) -> Pair:
    """``pair``; its ``backward`` raises NotSupportedError if gradients of ``key`` are recorded."""
    if not is_recorded(key, value):
        return pair
    apply: Any = _Refusing.apply
    keys, values = (apply(x, key, value) for x in pair)
    return keys, values


class _Refusing(torch.autograd.Function):
    """Gradients do not flow through a cache: requesting them raises instead of returning incomplete ones."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotSupportedError("HFCache: gradients do not flow through a cache; train with use_cache=False")
