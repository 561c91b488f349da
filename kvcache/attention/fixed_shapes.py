"""Fixed shapes: a captured or compiled graph reads tensors of the same address and shape in every pass.

A CUDA graph replays kernels on the addresses it was captured with, and torch.compile compiles a program for
each shape. With ``CacheConfig(fixed_context=C)``, a pass of n tokens therefore has, besides a layer's whole
buffers,

=======  ===========================  =================================================================
targets  I32 (n,)                     the cell that each token is written to
cells    I32 (rows, context)          those of a sequence, in order; its first one from there on
mask     (n rounded up, context)      which of them each token sees, 0 and -inf
=======  ===========================  =================================================================

There is one row for each sequence if all sequences have equally many adjacent tokens in the pass, as in
decoding and in a chunk of a prompt; otherwise one for each token. ``context`` is the smallest of C, 2C, 4C,
... that holds the longest sequence of the pass. There is thus one graph for each n, rows and context, and the
cost of a pass grows with the length of its sequences. (Compare the block tables of Kwon et al., "Efficient
Memory Management for Large Language Model Serving with PagedAttention", 2023; blocks have one token here.)
``start_forward`` writes all three in place.

``get`` has no fixed shapes, and a read-only pass has no targets: do not replay a graph that writes in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

import ml
from kvcache.attention.batch import SequenceTokens
from kvcache.attention.history import History
from kvcache.cache import NotSupportedError
from kvcache.storage.cell_table import CellTable
from kvcache.storage.device_copies import HostArray, device_of
from kvcache.storage.layer_buffers import LayerBuffers


class GraphRows(NamedTuple):
    """What the graph of one layer, batch size and context reads and writes: the same storage in every pass.

    A graph writes ``key[targets] = new`` and ``value[targets] = new``; each n // rows adjacent tokens attend
    over one row of ``cells``, with ``mask``. Value is (kv_heads, head_dim, cells) if the configuration has
    ``permuted_v``.
    """

    key: ml.Tensor
    value: ml.Tensor
    targets: ml.Tensor
    cells: ml.Tensor
    mask: ml.Tensor


class FixedPass:
    """Targets, mask and cells of one batch size, on each device that has a layer."""

    __slots__ = ("_calls", "_current", "_kinds", "_loaded", "_near", "brought", "owner", "tables")

    def __init__(self, tokens: int, mask: tuple[int, int], dtype: ml.DType, tables: tuple[int, int]) -> None:
        """``mask`` and ``tables`` are shapes."""
        self.tables = tables
        self._kinds: list[tuple[tuple[int, ...], ml.DType]] = [
            ((tokens,), ml.DType.I32), (mask, dtype), (tables, ml.DType.I32)
        ]  # fmt: skip
        self._near: dict[int, list[ml.Tensor]] = {}
        self._calls: dict[tuple[int, int], list[ml.AttentionCall]] = {}
        self._loaded: list[HostArray | None] = []
        self._current: set[int] = set()
        """The devices that have the tensors loaded last."""
        self.brought = False
        """Whether ``bring`` has uploaded everything to all requested devices."""
        self.owner: object = None
        """The pass that these tensors belong to."""

    @classmethod
    def of(
        cls,
        known: dict[tuple[int, ...], FixedPass],
        config: ml.CacheConfig,
        table: CellTable,
        groups: list[SequenceTokens],
        tokens: int,
    ) -> FixedPass:
        """The tensors of such a pass, whose tokens are placed, from ``known`` by batch size and tables."""
        tables = tables_of(config, table, groups, tokens)
        fixed = known.get((tokens, *tables))
        if fixed is None:
            padding = config.mask_batch_padding
            mask = -(-tokens // padding) * padding, tables[1]
            fixed = known[tokens, *tables] = cls(tokens, mask, config.mask_dtype, tables)
        return fixed

    def load(self, owner: object, *arrays: HostArray | None) -> None:
        """Take targets, mask and cells of a pass, for ``bring``; targets None, in a read-only pass: leave
        them unchanged.
        """
        self.owner, self._loaded = owner, list(arrays)
        self._current, self.brought = set(), False

    def bring(self, places: Iterable[ml.Context]) -> None:
        """Upload everything to the devices of ``places``; other devices get it on first use."""
        for place in places:
            self.on(place)
        self.brought = True

    def on(self, ctx: ml.Context) -> list[ml.Tensor]:
        """Targets, mask and cells on the device of ``ctx``."""
        device = device_of(ctx)
        tensors = self._near.get(device)
        if tensors is not None and device in self._current:
            return tensors
        if tensors is None:
            tensors = [ctx.zeros(shape, dtype) for shape, dtype in self._kinds]
        for new, target in zip(self._loaded, tensors, strict=True):
            if new is not None:
                ctx.forward(new.on(ctx).copy(ctx, target))
        self._near[device] = tensors
        self._current.add(device)
        return tensors

    def calls(self, ctx: ml.Context, worth: int) -> list[list[ml.AttentionCall]]:
        """The queries of each row over its cells, in calls that gather ``worth`` cells each, or a single row.

        The same tensors in every pass.
        """
        (tokens,), (rows, context) = self._kinds[0][0], self.tables
        _, mask, cells = self.on(ctx)
        key = device_of(ctx), worth
        calls = self._calls.get(key)
        if calls is None:
            each, together = tokens // rows, max(1, worth // context)
            shown = mask.slice(ctx, 0, 0, tokens).reshape(ctx, rows, each, context)
            calls = self._calls[key] = []
            for begin in range(0, rows, together):
                end = min(rows, begin + together)
                where = cells.slice(ctx, 0, begin, end).reshape(ctx, (end - begin) * context)
                queries, seen = slice(begin * each, end * each), shown.slice(ctx, 0, begin, end)
                calls.append(ml.AttentionCall(queries, end - begin, context, 0, 0, where, seen))
        return [calls]


def check_graph(layer: int, buffers: LayerBuffers) -> None:
    """Raise NotSupportedError if the layer's storage is read as copies."""
    if buffers.is_quantized:
        raise NotSupportedError(
            f"graph_rows: layer {layer} stores {'/'.join(buffers.formats)} and is read as copies, in which "
            "what a graph writes would be lost; call put and attend, or init with plain F32, F16 or BF16"
        )


def tables_of(
    config: ml.CacheConfig, table: CellTable, groups: list[SequenceTokens], tokens: int
) -> tuple[int, int]:
    """The shape (rows, context) of a pass's tables of cells."""
    context = config.fixed_context
    longest = max(len(table.rows[group.seq]) for group in groups)
    while context < longest:
        context *= 2
    each = tokens // len(groups)
    even = all(
        isinstance(group.batch_indices, slice) and len(group) == each and group.first_token % each == 0
        for group in groups
    )
    return len(groups) if even else tokens, context


def read_own(
    table: CellTable, groups: list[SequenceTokens], tokens: int, shape: tuple[int, int]
) -> tuple[History, np.ndarray]:
    """Every sequence as a history of its own that begins at column 0, and the cells (rows, context)."""
    rows = [table.rows[group.seq] for group in groups]
    cells = np.empty(shape, np.int64)
    for group, row in zip(groups, rows, strict=True):
        line = np.full(shape[1], row.cells[0])
        line[: len(row)] = row.cells
        cells[group.batch_indices if shape[0] == tokens else group.first_token * shape[0] // tokens] = line
    return History(groups, rows, shape[1], [0] * len(rows)), cells
