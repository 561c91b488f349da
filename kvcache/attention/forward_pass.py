"""The state of one forward pass: which tokens, where they are written, what is read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

import ml
from kvcache.attention.batch import SequenceTokens
from kvcache.attention.device_copies import DeviceCopies, device_copies, near
from kvcache.attention.fixed_shapes import FixedPass, read_everything
from kvcache.attention.masks import KeptMask, build_mask
from kvcache.attention.read_plan import LowerBound, ReadPlan, plan_own, plan_read
from kvcache.cache import Mask
from kvcache.storage.cell_table import CellTable
from kvcache.storage.layer_buffers import LayerBuffers

__all__ = ["ForwardPass"]


@dataclass(slots=True)
class ForwardPass:
    """One pass over a batch, between two ``start_forward`` calls.

    Masks and index tensors are made when they are first asked for, and then serve all layers.
    """

    table: CellTable
    config: ml.CacheConfig
    lower: LowerBound | None
    tokens: int
    groups: list[SequenceTokens]
    cells: int | np.ndarray | None
    """Where the batch is written, in its own order: the first of a run, or one cell per token.

    None where nothing is written.
    """
    layers: Mapping[int, LayerBuffers]
    """All that the cache stores."""
    reserve: bool = False
    stamp: int = field(default_factory=itertools.count(1).__next__)
    """What ``put`` gives to ``LayerBuffers.stamp``; layers with an earlier one are not to be read."""
    lifted: frozenset[int] = frozenset()
    kept: KeptMask | None = None
    """What the pass before left: the mask that this one may go on with."""
    fixed: FixedPass | None = None
    """Slots and mask of this batch size, where shapes are fixed."""
    run: int = field(init=False)
    """The first cell of the run that the batch is written to; -1 where it is none."""
    _targets: ml.Tensor | DeviceCopies | None = None
    _shared: tuple[ReadPlan, Mask | DeviceCopies] | None = None
    _merge: bool | None = None
    _own: dict[int, tuple[ReadPlan, Mask | DeviceCopies]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.run = self.cells if isinstance(self.cells, int) and self.fixed is None else -1

    @property
    def read_only(self) -> bool:
        """Whether the batch is queries only, and takes no cells."""
        return self.cells is None and not self.reserve

    def on_fixed_shapes(self, ctx: ml.Context, known: dict[int, FixedPass]) -> ForwardPass:
        """This pass on the tensors of its batch size, which are brought to it; ``known`` has them by size."""
        found = known.get(self.tokens)
        if found is None:
            dtype = self.config.mask_dtype
            found = FixedPass(ctx, self.tokens, self._rows(), self.table.cells, dtype)
        fixed = replace(self, fixed=found)
        fixed.fill(ctx)
        known[self.tokens] = found
        return fixed

    def reserved_mask(self, ctx: ml.Context) -> ml.Tensor:
        """A mask over every cell, which hides none."""
        return ctx.input().zeros((self._rows(), self.table.cells), self.config.mask_dtype)

    def _rows(self) -> int:
        """The rows of a mask of the whole batch, padding included."""
        padding = self.config.mask_batch_padding
        return -(-self.tokens // padding) * padding

    def fill(self, ctx: ml.Context) -> None:
        """Bring the tensors of fixed shapes to this pass, unless they are its own already."""
        if self.fixed is None or (self.fixed.owner is self and self._shared is not None):
            return
        reading, padding = read_everything(self.table, self.groups), self.config.mask_batch_padding
        first = self.cells
        slots = np.arange(first, first + self.tokens) if isinstance(first, int) else first
        mask = reading.mask(self.tokens, self.lower, self.lifted, padding)
        self.fixed.write(ctx, self, slots, mask)
        self._shared = reading, self.fixed.mask

    def targets(self, ctx: ml.Context) -> int | ml.Tensor:
        """The first cell of the run to write, or all cells as an I32 tensor."""
        if self.fixed is not None:
            self.fill(ctx)
            return self.fixed.slots
        if isinstance(self.cells, int):
            return self.cells
        assert self.cells is not None
        if self._targets is None:
            self._targets = device_copies(ctx, ctx.from_numpy(self.cells, ml.DType.I32))
        return near(ctx, self._targets)

    def lift(self, indices: frozenset[int]) -> None:
        self.lifted = indices
        self._shared = None
        self._own.clear()

    def shared(self, ctx: ml.Context) -> tuple[ReadPlan, Mask]:
        """What ``get`` reads: all groups together, arranged as the config says."""
        self.fill(ctx)
        if self._shared is None:
            reading = plan_read(self.table, self.groups, self.config.cache_padding)
            self._blank(ctx, reading)
            self._shared = reading, device_copies(ctx.input(), self._mask(ctx, reading, self.config))
        reading, mask = self._shared
        return reading, near(ctx, mask)

    def own(self, ctx: ml.Context, group: SequenceTokens) -> tuple[ReadPlan, Mask]:
        """What one group reads on its own; the mask has a row for each of its tokens."""
        found = self._own.get(group.seq)
        if found is None:
            reading = plan_own(self.table, group, self.config.cache_padding)
            self._blank(ctx, reading)
            found = reading, device_copies(ctx.input(), self._own_mask(ctx, reading))
            self._own[group.seq] = found
        reading, mask = found
        return reading, near(ctx, mask)

    def _blank(self, ctx: ml.Context, reading: ReadPlan) -> None:
        """Write zeros into the free cells of a view, where what they held may be NaN; in every layer.

        A weight of 0 does not hide NaN. A little more than the view is cleared: the next tokens' are, too.
        """
        if self.table.blank is None or reading.index is not None:
            return
        start, stop = reading.start, reading.start + reading.length
        if len(reading.rows) == 1 and isinstance(reading.columns[0], int) and not reading.columns[0]:
            start += len(reading.rows[0])
        if not self.table.stale(start, stop).size:
            return
        cells = self.table.stale(start, stop + self.config.cache_padding)
        first, count = int(cells[0]), cells.size
        is_run = int(cells[-1]) - first + 1 == count
        scattered = None if is_run else device_copies(ctx, ctx.from_numpy(cells, ml.DType.I32))
        for layer, buffers in self.layers.items():
            place = ctx.layer(layer)
            buffers.blank(place, first if scattered is None else near(place, scattered), count)
        self.table.blank[cells] = True

    def _mask(self, ctx: ml.Context, reading: ReadPlan, config: ml.CacheConfig) -> Mask:
        if config.elide_mask:
            elided = reading.elided(self.lower, self.lifted)
            if not isinstance(elided, bool):
                return elided
        shape = self._rows(), reading.length
        if shape[0] == 1 and reading.elided(self.lower, self.lifted) is None:
            return ctx.input().zeros(shape, config.mask_dtype)  # a decoded token that sees everything
        if self.lower is None and not self.lifted and self._keep(ctx, reading, shape[0]):
            assert self.kept is not None
            return self.kept.shown(ctx, reading.length)
        large = self._large(ctx, reading, shape)
        if large is not None:
            return large
        host = reading.mask(self.tokens, self.lower, self.lifted, config.mask_batch_padding)
        return ctx.input().from_numpy(host, config.mask_dtype)

    def _keep(self, ctx: ml.Context, reading: ReadPlan, rows: int) -> bool:
        """Whether ``kept`` is the mask of this pass now: the one of the pass before, or a new one."""
        place = ctx.input()
        if self.kept is None or not self.kept.follow(place, reading):
            self.kept = KeptMask.build(place, reading, rows, self.config.mask_dtype)
        return self.kept is not None

    def _own_mask(self, ctx: ml.Context, reading: ReadPlan) -> Mask:
        elided = reading.elided(self.lower, self.lifted)
        if not isinstance(elided, bool):
            return elided
        padding = self.config.mask_batch_padding
        rows = -(-len(reading.groups[0]) // padding) * padding
        large = self._large(ctx, reading, (rows, reading.length), own=True)
        if large is not None:
            return large
        host = reading.own_mask(self.lower, self.lifted, padding)
        return ctx.input().from_numpy(host, self.config.mask_dtype)

    def _large(
        self, ctx: ml.Context, reading: ReadPlan, shape: tuple[int, int], own: bool = False
    ) -> ml.Tensor | None:
        dtype = self.config.mask_dtype
        return build_mask(ctx.input(), reading, shape, self.lower, self.lifted, dtype, own)

    def worth_merging(self) -> bool:
        """Whether one masked call over all cells is cheaper than a call per sequence."""
        if self._merge is None:
            self._merge = self.fixed is not None or (len(self.groups) > 1 and self._is_dense())
        return self._merge

    def _is_dense(self) -> bool:
        spans = [self.table.rows[group.seq].span() for group in self.groups]
        together = self.tokens * (max(high for _, high in spans) - min(low for low, _ in spans))
        apart = sum(len(group) * len(self.table.rows[group.seq]) for group in self.groups)
        return together - apart <= _PAIRS_PER_CALL * len(self.groups)


_PAIRS_PER_CALL = 64
"""(query, key) pairs that cost about what one more attention call does."""
