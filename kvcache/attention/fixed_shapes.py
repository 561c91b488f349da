"""Fixed shapes: what a captured or compiled graph reads lies at the same place, in the same shape, each pass.

A CUDA graph replays kernels on the addresses it was captured with, and torch.compile makes a program for
each shape. So with ``CacheConfig(fixed_shapes=True)`` a pass of n tokens always has

=======  ===========================  =================================================================
slots    I32 (n,)                     the cell that each token is written to
mask     (n rounded up, cells)        over every cell of the cache, 0 and -inf
key      (cells, kv_heads, head_dim)  all of a layer's buffer; value likewise
=======  ===========================  =================================================================

``start_forward`` writes slots and mask in place, one pair of tensors for each n, and a graph of n tokens
serves every later pass of n: one graph per batch size, however long the history grows.

A pass that only reads (``read_only``) has the same key, value and mask by ``get``, and no slots: a graph
that writes is not to be replayed in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

import ml
from kvcache.attention.batch import SequenceTokens
from kvcache.attention.device_copies import HostArray, HostArrays, device_of
from kvcache.attention.read_plan import ReadPlan
from kvcache.storage.cell_table import CellTable

__all__ = ["FixedPass", "GraphTensors", "read_everything"]


class GraphTensors(NamedTuple):
    """What a graph of one layer and one batch size reads and writes; the same storage in every pass.

    A graph writes ``key[slots] = new`` and ``value[slots] = new``, and attends over ``key``, ``value`` and
    ``mask``. Value is (kv_heads, head_dim, cells) where the config says ``permuted_v``.
    """

    key: ml.Tensor
    value: ml.Tensor
    slots: ml.Tensor
    mask: ml.Tensor


class FixedPass:
    """Slots and mask of one batch size, on each device that a layer lies on."""

    __slots__ = ("_dtype", "_mask", "_near", "_shape", "_slots", "_tokens", "owner")

    def __init__(self, tokens: int, shape: tuple[int, int], dtype: ml.DType) -> None:
        """``shape`` is the mask's."""
        self._tokens, self._shape, self._dtype = tokens, shape, dtype
        self._near: dict[int, tuple[ml.Tensor, ml.Tensor]] = {}
        self._slots: HostArray | None = None
        self._mask: HostArray | None = None
        self.owner: object = None
        """The pass that they are those of."""

    def write(
        self, places: Iterable[ml.Context], owner: object, slots: np.ndarray | None, mask: np.ndarray
    ) -> None:
        """Bring both to a pass; where that fails they belong to none, and are brought anew when asked for.

        On the devices of ``places``, and on others when they are asked for. A pass that only reads has no
        ``slots``, and leaves them.
        """
        self.owner = None
        host = HostArrays()
        self._mask = host.add(mask, self._dtype)
        self._slots = None if slots is None else host.add(slots, ml.DType.I32)
        for place in {device_of(place): place for place in places}.values():
            self._bring(place)
        self.owner = owner

    def on(self, ctx: ml.Context) -> tuple[ml.Tensor, ml.Tensor]:
        """Slots and mask on the device of ``ctx``."""
        return self._near.get(device_of(ctx)) or self._bring(ctx)

    def _bring(self, ctx: ml.Context) -> tuple[ml.Tensor, ml.Tensor]:
        device = device_of(ctx)
        held = self._near.get(device)
        if held is None:
            held = ctx.zeros((self._tokens,), ml.DType.I32), ctx.zeros(self._shape, self._dtype)
        for new, target in zip((self._slots, self._mask), held, strict=True):
            if new is not None:
                ctx.forward(new.on(ctx).copy(ctx, target))
        self._near[device] = held
        return held


def read_everything(table: CellTable, groups: list[SequenceTokens]) -> ReadPlan:
    """A reading of every cell there is, whoever's it is."""
    rows = [table.rows[group.seq] for group in groups]
    columns = [row.span()[0] if row.contiguous else row.cells for row in rows]
    return ReadPlan(groups, rows, table.cells, columns)
