"""A fast path that copies a model's K and V directly into the cache's memory and returns views of it.
Decoding with a small model takes more time in Python than in arithmetic. If rows are evenly spaced, which is
determined once for a pass, each layer needs only four views of its buffers and two copies.
"""

from __future__ import annotations

import torch

import ml
from kvcache import DenseBatch, LayerCells
from kvcache.integrations.transformers.bridge import Bridge
from kvcache.integrations.transformers.passes import Pair

__all__ = ["LayerViews"]


class LayerViews:
    """The cells of one layer, in memory shared with torch."""

    __slots__ = ("_device", "_dtype", "_key", "_value", "_view", "cells")

    def __init__(self, cells: LayerCells, bridge: Bridge) -> None:
        self.cells, self._view = cells, bridge.view
        whole = bridge.alias(cells.key)
        self._dtype, self._device = whole.dtype, whole.device
        self._key = _half(whole, cells.key)
        self._value = _half(bridge.alias(cells.value), cells.value)

    def step(self, reading: DenseBatch, key: torch.Tensor, value: torch.Tensor) -> Pair | None:
        """Store K and V (rows, heads, new tokens, dim) and return views of everything that ``reading`` reads.
        The new tokens are the last of every row of ``reading``. Returns None, and does nothing, if the
        general ``put`` and ``read`` are needed: for the first pass of a layer, rows that are not evenly
        spaced, and tensors with other dtypes, shapes or devices than the layer's, or in its own memory.

        One function, since what it calls would take as long as what it does: the processor has forgotten all
        of it since the last layer.
        """
        even, dtype, cells = reading.even, self._dtype, self.cells
        if (
            even is None
            or not type(key) is type(value) is torch.Tensor
            or not key.dtype is value.dtype is dtype
            or not key.device == value.device == self._device
            or not cells.writable()
        ):
            return None
        keys, k_heads, k_dim, (k_cell, k_head, k_one), k_low, k_high = self._key
        values, v_heads, v_dim, (v_cell, v_head, v_one), v_low, v_high = self._value
        rows, heads, new, dim = shape = key.shape
        key_at, value_at, value_shape = key.data_ptr(), value.data_ptr(), value.shape
        if (
            heads != k_heads
            or dim != k_dim
            or value_shape != (rows, v_heads, new, v_dim)
            or k_low <= key_at < k_high  # the copy would read what it writes
            or k_low <= value_at < k_high  # keys are written first
            or v_low <= value_at < v_high
        ):
            return None
        (first, apart), tokens, view = even, reading.tokens, self._view
        behind = first + tokens - new
        try:
            strides = (apart * k_cell, k_head, k_cell, k_one)
            view(keys, shape, strides, behind * k_cell).copy_(key)
            seen = view(keys, (rows, heads, tokens, dim), strides, first * k_cell)
            strides = (apart * v_cell, v_head, v_cell, v_one)
            view(values, value_shape, strides, behind * v_cell).copy_(value)
            pair = seen, view(values, (rows, v_heads, tokens, v_dim), strides, first * v_cell)
        except RuntimeError:  # for example of the device: ``put`` writes both again and reports it
            return None
        cells.note_written()
        return pair


def _half(whole: torch.Tensor, cells: ml.Tensor) -> _Half:
    """All cells of K, or of V: the tensor, heads, dim, strides, and the addresses of both its ends."""
    _, heads, dim = cells.shape
    low = whole.data_ptr()
    return whole, heads, dim, cells.strides, low, low + whole.nbytes


_Half = tuple[torch.Tensor, int, int, tuple[int, ...], int, int]
