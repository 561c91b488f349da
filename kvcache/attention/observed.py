"""Watching what a pass attends to: who evicts tokens asks how much weight each has had.

An observer is called by ``attend`` after its own work, once a layer. What it computes is computed beside
attention, by the required operations of a backend: the kernels of ``attend`` do not say their weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

import ml
from kvcache.attention.batch import SequenceTokens
from kvcache.attention.read_plan import LowerBound, plan_read
from kvcache.storage.cell_table import CellTable
from kvcache.storage.device_copies import HostArrays, device_of
from kvcache.storage.layer_buffers import LayerBuffers

BLOCK = 1 << 22
"""Weights that are held at a time: long prompts go in blocks of queries."""


class AttentionObserver(Protocol):
    """What a cache's ``observer`` has to have."""

    def attended(self, ctx: ml.Context, seen: Attended) -> None:
        """A pass has attended in a layer; not called with ``select``, nor in a pass that reserves."""

    def moved(self, backend: ml.Backend, table: CellTable, target: np.ndarray) -> None:
        """``defrag`` has moved cells of ``table``.

        What lay in cell i lies in ``target[i]`` now; -1: nothing lay there.
        """


class ObservedRows:
    """The cells that a pass reads, and which of them each query sees; for all layers."""

    def __init__(
        self,
        table: CellTable,
        groups: Sequence[SequenceTokens],
        tokens: int,
        lower: LowerBound | None,
        lifted: frozenset[int],
    ) -> None:
        reading, host = plan_read(table, groups), HostArrays()
        cells = reading.index
        self.table, self.groups = table, groups
        self.cells = np.arange(reading.start, reading.start + reading.length) if cells is None else cells
        self.index = host.add(self.cells)
        self.seen = host.add(reading.mask(tokens, lower, lifted, 1) == 0, ml.DType.BOOL)

    def last(self, count: int | None) -> np.ndarray:
        """The tokens of the batch that are among the last ``count`` of their sequence in it; None: all."""
        return np.concatenate([group.indices()[-count if count else None :] for group in self.groups])


@dataclass(frozen=True, slots=True)
class Attended:
    """One layer of a pass, as ``attend`` had it."""

    rows: ObservedRows
    buffers: LayerBuffers
    layer: int
    query: ml.Tensor
    """(tokens, heads, head_dim), in the order of the batch."""
    scale: float
    sinks: ml.Tensor | None

    def keys(self, ctx: ml.Context) -> ml.Tensor:
        """F32 (history, kv_heads, head_dim), a copy: the keys of ``rows.cells``."""
        found, _ = self.buffers.read(ctx, self.rows.index.on(ctx), self.rows.cells.size)
        return found.cast(ctx, ml.DType.F32)

    def mass(self, ctx: ml.Context, last: int | None = None) -> ml.Tensor:
        """F32 (history,): the weight that each of ``rows.cells`` had, summed over heads and queries.

        ``last``: of each sequence's queries only the last so many.
        """
        chosen, key = self.rows.last(last), self.keys(ctx)
        total = ctx.zeros((self.rows.cells.size,), ml.DType.F32)
        size = max(1, BLOCK // (self.query.shape[1] * self.rows.cells.size))
        for start in range(0, chosen.size, size):
            weights = self._weights(ctx, key, chosen[start : start + size])
            total = total.add(ctx, weights.sum(ctx, 0).sum(ctx, 0))
        return total

    def _weights(self, ctx: ml.Context, key: ml.Tensor, tokens: np.ndarray) -> ml.Tensor:
        """F32 (heads, queries, history) of some queries."""
        (history, kv_heads, dim), heads, count = key.shape, self.query.shape[1], tokens.size
        each, chosen = heads // kv_heads, ctx.from_numpy(tokens, ml.DType.I32)
        query = self.query.rows(ctx, chosen).cast(ctx, ml.DType.F32).permute(ctx, 1, 0, 2).contiguous(ctx)
        stacked = query.reshape(ctx, kv_heads, each * count, dim)
        scores = stacked.matmul(ctx, key.permute(ctx, 1, 2, 0)).scale(ctx, self.scale)
        scores = scores.reshape(ctx, heads, count, history)
        hidden = ctx.full((1,), -np.inf, ml.DType.F32)
        scores = self.rows.seen.on(ctx).rows(ctx, chosen).where(ctx, scores, hidden)
        if self.sinks is not None:
            sinks = self.sinks.cast(ctx, ml.DType.F32).reshape(ctx, heads, 1, 1).repeat(ctx, 1, count)
            scores = scores.concat(ctx, sinks, 2)
        return scores.softmax(ctx).slice(ctx, 2, 0, history)


@dataclass(slots=True)
class _Total:
    """The mass of all cells on one device."""

    tensor: ml.Tensor
    """F32 (cells, 1)."""
    taken: np.ndarray
    """``CellTable.taken`` of what each cell's mass is of."""
    layer: int
    """One that lies there."""


_Totals = weakref.WeakKeyDictionary[CellTable, dict[int, _Total]]
"""By device, for the table of each cache, which has a new one when it is bound anew."""


class AttentionMass:
    """How much weight each stored token has had: an observer that adds up softmax weights.

    Over heads, queries and layers, since it was last cleared (H2O: Zhang et al., 2023). With ``last``, of
    each sequence's queries in a pass only the last so many count (SnapKV's observation window: Li et al.,
    2024). Set ``cache.observer`` to it before the pass. It takes about as long as attention without a kernel
    does, and stays on the device until ``of`` asks.
    """

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self._totals: _Totals = weakref.WeakKeyDictionary()

    def clear(self) -> None:
        self._totals.clear()

    def attended(self, ctx: ml.Context, seen: Attended) -> None:
        rows, table = seen.rows, seen.rows.table
        mass = seen.mass(ctx, self.last).reshape(ctx, rows.cells.size, 1)
        totals = self._totals.setdefault(table, {})
        total = totals.get(device_of(ctx))
        if total is None:
            zeros = ctx.zeros((table.cells, 1), ml.DType.F32)
            total = totals[device_of(ctx)] = _Total(zeros, table.taken.copy(), seen.layer)
        stale = rows.cells[total.taken[rows.cells] != table.taken[rows.cells]]
        if stale.size:  # other tokens lie there now
            total.tensor.set_rows(ctx, ctx.zeros((stale.size, 1), ml.DType.F32), stale.tolist())
            total.taken[stale] = table.taken[stale]
        where = rows.index.on(ctx)
        ctx.forward(total.tensor.set_rows(ctx, total.tensor.rows(ctx, where).add(ctx, mass), where))

    def moved(self, backend: ml.Backend, table: CellTable, target: np.ndarray) -> None:
        used = np.flatnonzero(target >= 0)
        totals = self._totals.pop(table, {})  # forgotten where the device fails
        with backend.new_context() as ctx:
            for total in totals.values():
                place = ctx.layer(total.layer)
                held = total.tensor.rows(place, used.tolist())
                ctx.forward(total.tensor.set_rows(place, held, target[used].tolist()))
                total.taken[target[used]] = total.taken[used]
            ctx.compute()
        self._totals[table] = totals

    def of(self, table: CellTable, seq: int) -> np.ndarray:
        """F64 (tokens,): the mass of each stored token of a sequence, by position. Waits for the device."""
        cells = table.rows[seq].cells
        found = np.zeros(cells.size)
        for total in self._totals.get(table, {}).values():
            known = total.taken[cells] == table.taken[cells]
            found += np.where(known, total.tensor.to_numpy()[cells, 0], 0)
        return found
