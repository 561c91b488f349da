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

from typing import NamedTuple

import numpy as np

import ml
from kvcache.attention.batch import SequenceTokens
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
    """Slots and mask of one batch size."""

    __slots__ = ("mask", "owner", "slots")

    def __init__(self, ctx: ml.Context, tokens: int, rows: int, cells: int, dtype: ml.DType) -> None:
        place = ctx.input()
        self.slots = place.zeros((tokens,), ml.DType.I32)
        self.mask = place.zeros((rows, cells), dtype)
        self.owner: object = None
        """The pass that they are those of."""

    def write(self, ctx: ml.Context, owner: object, slots: np.ndarray | None, mask: np.ndarray) -> None:
        """Bring both to a pass; where that fails they belong to none, and are brought anew when asked for.

        A pass that only reads has no ``slots``, and leaves them.
        """
        place = ctx.input()
        new = [(place.from_numpy(mask, self.mask.dtype), self.mask)]
        if slots is not None:
            new.append((place.from_numpy(slots, ml.DType.I32), self.slots))
        self.owner = None
        place.forward(*(source.copy(place, target) for source, target in new))
        self.owner = owner


def read_everything(table: CellTable, groups: list[SequenceTokens]) -> ReadPlan:
    """A reading of every cell there is, whoever's it is."""
    rows = [table.rows[group.seq] for group in groups]
    columns = [row.span()[0] if row.contiguous else row.cells for row in rows]
    return ReadPlan(groups, rows, table.cells, columns)
