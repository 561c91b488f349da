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

    __slots__ = ("_device", "_dtype", "_key", "_value", "cells")

    def __init__(self, cells: LayerCells, bridge: Bridge) -> None:
        self.cells = cells
        self._key, self._value = _Half(cells.key, bridge), _Half(cells.value, bridge)
        self._dtype, self._device = self._key.whole.dtype, self._key.whole.device

    def step(self, reading: DenseBatch, key: torch.Tensor, value: torch.Tensor) -> Pair | None:
        """Store K and V (rows, heads, new tokens, dim) and return views of everything that ``reading`` reads.
        The new tokens are the last of every row of ``reading``. Returns None, and does nothing, if the
        general ``put`` and ``read`` are needed: for the first pass of a layer, rows that are not evenly
        spaced, and tensors with other dtypes, shapes or devices than the layer's, or in its own memory.
        """
        if (
            reading.even is None
            or not self.cells.writable()
            or not type(key) is type(value) is torch.Tensor
            or not key.dtype is value.dtype is self._dtype
            or not key.device == value.device == self._device
        ):
            return None
        rows, heads, new, dim = key.shape
        k, v = self._key, self._value
        key_at, value_at = key.data_ptr(), value.data_ptr()
        if (
            heads != k.heads
            or dim != k.dim
            or value.shape != (rows, heads, new, v.dim)
            or k.begin <= key_at < k.end  # the copy would read what it writes
            or k.begin <= value_at < k.end  # keys are written first
            or v.begin <= value_at < v.end
        ):
            return None
        try:
            views = k.step(key, reading.even, reading.tokens), v.step(value, reading.even, reading.tokens)
        except RuntimeError:  # for example of the device: ``put`` writes both again and reports it
            return None
        self.cells.note_written()
        return views


class _Half:
    """All cells of K, or of V; ``begin`` and ``end`` are their addresses."""

    __slots__ = ("_offset", "_strides", "begin", "dim", "end", "heads", "whole")

    def __init__(self, cells: ml.Tensor, bridge: Bridge) -> None:
        self.whole = whole = bridge.alias(cells)
        _, self.heads, self.dim = cells.shape
        self._strides, self._offset = cells.strides, int(whole.storage_offset())
        self.begin = whole.data_ptr()
        self.end = self.begin + whole.nbytes

    def step(self, x: torch.Tensor, even: tuple[int, int], tokens: int) -> torch.Tensor:
        """Write ``x`` (rows, heads, new, dim) to the ends of runs of ``tokens`` cells, and return the runs.

        The run of row i begins at cell ``even[0] + i * even[1]``.
        """
        rows, heads, new, dim = x.shape
        cell, head, one = self._strides
        strides, begin = (even[1] * cell, head, cell, one), self._offset + even[0] * cell
        self.whole.as_strided(x.shape, strides, begin + (tokens - new) * cell).copy_(x)
        return self.whole.as_strided((rows, heads, tokens, dim), strides, begin)
