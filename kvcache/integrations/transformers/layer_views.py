"""K and V of a layer where the model's own tensors can be copied into the cache's memory, and look into it.

A decoded token of a small model is more Python than arithmetic. Where rows lie at even distances, which is
known once for a pass, a layer's part in it is four views of its buffers and two copies.
"""

from __future__ import annotations

import torch

from kvcache.attention.forward_pass import ForwardPass
from kvcache.integrations.rows.dense_batch import DenseBatch
from kvcache.integrations.transformers.bridge import Bridge
from kvcache.integrations.transformers.passes import Pair
from kvcache.storage.buffer import Buffer
from kvcache.storage.layer_buffers import LayerBuffers

__all__ = ["LayerViews"]


class LayerViews:
    """The buffers of one layer, plain numbers in memory that torch shares."""

    __slots__ = ("_device", "_dtype", "_key", "_value", "buffers")

    def __init__(self, buffers: LayerBuffers, bridge: Bridge) -> None:
        key, value = buffers.key, buffers.value
        assert isinstance(key, Buffer)
        assert isinstance(value, Buffer)
        self.buffers = buffers
        self._key, self._value = _Half(key, bridge), _Half(value, bridge)
        self._dtype, self._device = self._key.whole.dtype, self._key.whole.device

    def step(
        self, layer: int, forward: ForwardPass, reading: DenseBatch, key: torch.Tensor, value: torch.Tensor
    ) -> Pair | None:
        """Store K and V (rows, heads, new tokens, dim) and give all that ``reading`` reads, as views.

        The new tokens are the last of every row of ``reading``. None, and nothing done, where ``put`` and
        ``read`` have to look closer: at the first pass of a layer, at rows that lie apart, at tensors of
        other dtypes, shapes or devices than the layer's, or in its own memory.
        """
        if (
            reading.even is None
            or not forward.goes_straight(layer, self.buffers)
            or not type(key) is type(value) is torch.Tensor
            or not key.dtype is value.dtype is self._dtype
            or not key.device == value.device == self._device
        ):
            return None
        rows, heads, new, dim = key.shape
        first, apart = reading.even
        tokens = reading.tokens
        last = first + tokens - new
        k, v = self._key, self._value
        if (
            heads != k.heads
            or dim != k.dim
            or value.shape != (rows, heads, new, v.dim)
            or k.holds(key)
            or k.holds(value)  # keys are written first
            or v.holds(value)
        ):
            return None
        try:
            k.view(rows, last, apart, new).copy_(key)
            v.view(rows, last, apart, new).copy_(value)
        except RuntimeError:  # of the device, say: ``put`` writes both anew, and says what it is
            return None
        forward.note_put(self.buffers)
        self.buffers.note_read()
        return k.view(rows, first, apart, tokens), v.view(rows, first, apart, tokens)


class _Half:
    """All cells of K, or of V."""

    __slots__ = ("_begin", "_end", "_offset", "_strides", "dim", "heads", "whole")

    def __init__(self, buffer: Buffer, bridge: Bridge) -> None:
        self.whole = whole = bridge.alias(buffer.tensor)
        self.heads, self.dim = buffer.heads, buffer.dim
        self._strides, self._offset = buffer.strides, int(whole.storage_offset())
        self._begin = whole.data_ptr()
        self._end = self._begin + whole.nbytes

    def holds(self, x: torch.Tensor) -> bool:
        """Whether ``x`` begins in this memory: the copy would read what it writes."""
        return self._begin <= x.data_ptr() < self._end

    def view(self, rows: int, first: int, apart: int, count: int) -> torch.Tensor:
        """(rows, heads, count, dim): of row i the cells from ``first + i * apart`` on."""
        cell, head, one = self._strides
        return self.whole.as_strided(
            (rows, self.heads, count, self.dim), (apart * cell, head, cell, one), self._offset + first * cell
        )
