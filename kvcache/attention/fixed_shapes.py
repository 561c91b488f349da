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

That attends over all cells, whoever's they are: its cost grows with the cells of the cache times the tokens.
With ``CacheConfig(fixed_context=C)`` besides, each token has a table of the cells of its own sequence:

=======  ===========================  =================================================================
cells    I32 (n, context)             those of the token's sequence, in order; its first one from there on
mask     (n rounded up, context)      which of them the token sees
=======  ===========================  =================================================================

``context`` is the least of C, 2C, 4C, ... that holds the longest sequence of the pass: one graph for each n
and context, and what a pass costs grows with what its sequences store. (As the block tables of Kwon et al.,
"Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023, in blocks of one.)

A pass that only reads (``read_only``) has the same key, value and mask by ``get``, and no slots: a graph
that writes is not to be replayed in it. With ``fixed_context``, ``get`` has no fixed shapes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

import ml
from kvcache.attention.batch import SequenceTokens
from kvcache.attention.device_copies import HostArray, device_of
from kvcache.attention.read_plan import ReadPlan
from kvcache.cache import NotSupportedError
from kvcache.storage.cell_table import CellTable
from kvcache.storage.formats import CacheFormat

__all__ = [
    "FixedPass",
    "GraphRows",
    "GraphTensors",
    "check_window",
    "context_of",
    "read_everything",
    "read_own",
]


class GraphTensors(NamedTuple):
    """What a graph of one layer and one batch size reads and writes; the same storage in every pass.

    A graph writes ``key[slots] = new`` and ``value[slots] = new``, and attends over ``key``, ``value`` and
    ``mask``. Value is (kv_heads, head_dim, cells) where the config says ``permuted_v``.
    """

    key: ml.Tensor
    value: ml.Tensor
    slots: ml.Tensor
    mask: ml.Tensor


class GraphRows(NamedTuple):
    """As GraphTensors, where each token reads by its own row of ``cells``; ``mask`` is over these."""

    key: ml.Tensor
    value: ml.Tensor
    slots: ml.Tensor
    cells: ml.Tensor
    mask: ml.Tensor


class FixedPass:
    """Slots, mask and perhaps cells of one batch size, on each device that a layer lies on."""

    __slots__ = ("_current", "_kinds", "_loaded", "_near", "brought", "context", "owner")

    def __init__(self, tokens: int, mask: tuple[int, int], dtype: ml.DType, context: int) -> None:
        """``mask`` is its shape; ``context`` 0: over every cell."""
        self.context = context
        slots, cells = ((tokens,), ml.DType.I32), ((tokens, context), ml.DType.I32)
        self._kinds = [slots, (mask, dtype), *([cells] if context else [])]
        self._near: dict[int, list[ml.Tensor]] = {}
        self._loaded: list[HostArray | None] = []
        self._current: set[int] = set()
        """Devices that have what was loaded last."""
        self.brought = False
        """Whether ``bring`` had all on all devices that it was told of."""
        self.owner: object = None
        """The pass that this is of."""

    def load(self, owner: object, *arrays: HostArray | None) -> None:
        """Take slots, mask and cells of a pass, for ``bring``; None, of one that only reads: as they are."""
        self.owner, self._loaded = owner, list(arrays)
        self._current, self.brought = set(), False

    def bring(self, places: Iterable[ml.Context]) -> None:
        """Have all on the devices of ``places``; on others they are brought when asked for there."""
        for place in places:
            self.on(place)
        self.brought = True

    def on(self, ctx: ml.Context) -> list[ml.Tensor]:
        """Slots, mask and cells on the device of ``ctx``."""
        device = device_of(ctx)
        held = self._near.get(device)
        if held is not None and device in self._current:
            return held
        if held is None:
            held = [ctx.zeros(shape, dtype) for shape, dtype in self._kinds]
        for new, target in zip(self._loaded, held, strict=True):
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


def context_of(config: ml.CacheConfig, table: CellTable, groups: list[SequenceTokens]) -> int:
    """How many cells the tables of a pass have: a power of two times ``fixed_context``."""
    context = config.fixed_context
    longest = max(len(table.rows[group.seq]) for group in groups)
    while 0 < context < longest:
        context *= 2
    return context


def read_own(
    table: CellTable, groups: list[SequenceTokens], tokens: int, context: int
) -> tuple[ReadPlan, np.ndarray]:
    """A reading of every sequence by itself, which begins at column 0, and the cells (tokens, context)."""
    rows = [table.rows[group.seq] for group in groups]
    cells = np.empty((tokens, context), np.int64)
    for group, row in zip(groups, rows, strict=True):
        own = row.cells
        line = np.full(context, own[0])
        line[: own.size] = own
        cells[group.rows] = line
    return ReadPlan(groups, rows, context, [0] * len(rows)), cells
