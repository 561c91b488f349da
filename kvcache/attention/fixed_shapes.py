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

import ml
from kvcache.attention.batch import SequenceTokens
from kvcache.attention.device_copies import HostArray, device_of
from kvcache.attention.read_plan import ReadPlan
from kvcache.cache import NotSupportedError
from kvcache.storage.cell_table import CellTable
from kvcache.storage.formats import CacheFormat

__all__ = ["FixedPass", "GraphTensors", "check_window", "read_everything"]


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

    __slots__ = ("_current", "_dtype", "_mask", "_near", "_shape", "_slots", "_tokens", "brought", "owner")

    def __init__(self, tokens: int, shape: tuple[int, int], dtype: ml.DType) -> None:
        """``shape`` is the mask's."""
        self._tokens, self._shape, self._dtype = tokens, shape, dtype
        self._near: dict[int, tuple[ml.Tensor, ml.Tensor]] = {}
        self._slots: HostArray | None = None
        self._mask: HostArray | None = None
        self._current: set[int] = set()
        """Devices that have what was loaded last."""
        self.brought = False
        """Whether ``bring`` had both on all devices that it was told of."""
        self.owner: object = None
        """The pass that this is of."""

    def load(self, owner: object, slots: HostArray | None, mask: HostArray) -> None:
        """Take what belongs to a pass, for ``bring``; one that only reads has and changes no ``slots``."""
        self.owner, self._slots, self._mask = owner, slots, mask
        self._current, self.brought = set(), False

    def bring(self, places: Iterable[ml.Context]) -> None:
        """Have both on the devices of ``places``; on others they are brought when asked for there."""
        for place in places:
            self.on(place)
        self.brought = True

    def on(self, ctx: ml.Context) -> tuple[ml.Tensor, ml.Tensor]:
        """Slots and mask on the device of ``ctx``."""
        device = device_of(ctx)
        held = self._near.get(device)
        if held is not None and device in self._current:
            return held
        if held is None:
            held = ctx.zeros((self._tokens,), ml.DType.I32), ctx.zeros(self._shape, self._dtype)
        for new, target in zip((self._slots, self._mask), held, strict=True):
            if new is not None:
                ctx.forward(new.on(ctx).copy(ctx, target))
        self._near[device] = held
        self._current.add(device)
        return held


def check_window(op: str, config: ml.CacheConfig, stored: CacheFormat) -> None:
    """Raise NotSupportedError for a residual window where shapes are fixed."""
    if config.fixed_shapes and stored.is_windowed:
        raise NotSupportedError(
            f"{op}: {stored} with fixed_shapes=True; a graph of fixed shapes has no residual window: "
            f"store {stored.name} alone, or init without fixed_shapes"
        )


def read_everything(table: CellTable, groups: list[SequenceTokens]) -> ReadPlan:
    """A reading of every cell there is, whoever's it is."""
    rows = [table.rows[group.seq] for group in groups]
    columns = [row.span()[0] if row.contiguous else row.cells for row in rows]
    return ReadPlan(groups, rows, table.cells, columns)
