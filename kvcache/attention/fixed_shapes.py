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
With ``CacheConfig(fixed_context=C)`` besides, there are tables of the cells of each sequence:

=======  ===========================  =================================================================
cells    I32 (rows, context)          those of a sequence, in order; its first one from there on
mask     (n rounded up, context)      which of them each token sees
=======  ===========================  =================================================================

There is a row for each sequence where all have as many tokens in the pass, side by side, as in decoding and
in a prompt's chunk; else one for each token. ``context`` is the least of C, 2C, 4C, ... that holds the
longest sequence of the pass: one graph for each n, rows and context, and what a pass costs grows with what
its sequences store. (As the block tables of Kwon et al., "Efficient Memory Management for Large Language
Model Serving with PagedAttention", 2023, in blocks of one.)

A pass that only reads (``read_only``) has the same key, value and mask by ``get``, and no slots: a graph
that writes is not to be replayed in it. With ``fixed_context``, ``get`` has no fixed shapes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

import ml
from kvcache.attention.batch import SequenceTokens
from kvcache.attention.read_plan import ReadPlan
from kvcache.cache import NotSupportedError
from kvcache.storage.cell_table import CellTable
from kvcache.storage.device_copies import HostArray, device_of
from kvcache.storage.layer_buffers import LayerBuffers


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
    """As GraphTensors, where n // rows tokens side by side read a row of ``cells``, under ``mask``."""

    key: ml.Tensor
    value: ml.Tensor
    slots: ml.Tensor
    cells: ml.Tensor
    mask: ml.Tensor


class FixedPass:
    """Slots, mask and perhaps cells of one batch size, on each device that a layer lies on."""

    __slots__ = ("_current", "_kinds", "_loaded", "_near", "brought", "owner", "tables")

    def __init__(
        self, tokens: int, mask: tuple[int, int], dtype: ml.DType, tables: tuple[int, int] | None
    ) -> None:
        """``mask`` and ``tables`` are shapes; no tables: over every cell."""
        self.tables = tables
        self._kinds: list[tuple[tuple[int, ...], ml.DType]] = [((tokens,), ml.DType.I32), (mask, dtype)]
        if tables is not None:
            self._kinds.append((tables, ml.DType.I32))
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


def check_graph(op: str, fixed: FixedPass, layer: int, buffers: LayerBuffers) -> None:
    """Raise NotSupportedError where a graph needs the other call, or what is stored is read as copies."""
    if fixed.tables is None and op == "graph_rows":
        raise NotSupportedError("graph_rows: set_config with fixed_context, or call graph_tensors")
    if fixed.tables is not None and op == "graph_tensors":
        raise NotSupportedError("graph_tensors: fixed_context gives each token a table; call graph_rows")
    if buffers.is_quantized:
        raise NotSupportedError(
            f"{op}: layer {layer} stores {'/'.join(buffers.formats)} and is read as copies, in which what a "
            "graph writes would be lost; call put and attend, or init with plain F32, F16 or BF16"
        )


def read_everything(table: CellTable, groups: list[SequenceTokens]) -> ReadPlan:
    """A reading of every cell there is, whoever's it is."""
    rows = [table.rows[group.seq] for group in groups]
    columns = [row.span()[0] if row.contiguous else row.cells for row in rows]
    return ReadPlan(groups, rows, table.cells, columns)


def tables_of(
    config: ml.CacheConfig, table: CellTable, groups: list[SequenceTokens], tokens: int
) -> tuple[int, int] | None:
    """The shape (rows, context) of a pass's tables of cells; None: every cell is read."""
    context = config.fixed_context
    if not context:
        return None
    longest = max(len(table.rows[group.seq]) for group in groups)
    while context < longest:
        context *= 2
    each = tokens // len(groups)
    even = all(
        isinstance(group.rows, slice) and len(group) == each and group.first_token % each == 0
        for group in groups
    )
    return len(groups) if even else tokens, context


def read_own(
    table: CellTable, groups: list[SequenceTokens], tokens: int, shape: tuple[int, int]
) -> tuple[ReadPlan, np.ndarray]:
    """A reading of every sequence by itself, which begins at column 0, and the cells (rows, context)."""
    rows = [table.rows[group.seq] for group in groups]
    cells = np.empty(shape, np.int64)
    for group, row in zip(groups, rows, strict=True):
        line = np.full(shape[1], row.cells[0])
        line[: len(row)] = row.cells
        cells[group.rows if shape[0] == tokens else group.first_token * shape[0] // tokens] = line
    return ReadPlan(groups, rows, shape[1], [0] * len(rows)), cells
