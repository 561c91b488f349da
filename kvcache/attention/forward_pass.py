"""The state of one forward pass: which tokens, where they are written, what is read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import ml
from kvcache.attention.batch import SequenceTokens
from kvcache.attention.calls import plan_calls
from kvcache.attention.device_copies import DeviceCopies, HostArray, HostArrays, device_copies, near
from kvcache.attention.fixed_shapes import FixedPass, read_everything
from kvcache.attention.masks import KeptMask, build_mask
from kvcache.attention.planned import PlannedLevel
from kvcache.attention.read_plan import LowerBound, ReadPlan, plan_read
from kvcache.attention.segments import KeptSegments, Segment, ragged_plan
from kvcache.cache import Mask
from kvcache.storage.cell_table import CellTable
from kvcache.storage.layer_buffers import LayerBuffers

__all__ = ["ForwardPass", "Reads"]

Packers = Mapping[str, Callable[[ml.RaggedPlan], tuple[Any, np.ndarray]]]


@dataclass(frozen=True, slots=True)
class Reads:
    """How a pass was read: the next, likely read so too, is planned before its first indices are uploaded."""

    worth: int | None
    levels: bool
    shared: bool
    packers: Packers
    """What a backend's kernel uploads of a plan; empty: no kernel was asked."""


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
    segmented: KeptSegments | None = None
    """What is read, or what the pass before read, until this one is asked."""
    fixed: FixedPass | None = None
    """Slots and mask of this batch size, where shapes are fixed."""
    run: int = field(init=False)
    """The first cell of the run that the batch is written to; -1 where it is none."""
    expected: Reads | None = None
    """How the pass before was read."""
    _host: HostArrays = field(default_factory=HostArrays)
    _targets: HostArray | None = None
    _shared: tuple[ReadPlan, Mask | DeviceCopies | HostArray] | None = None
    _worth: int | None = None
    _levels: list[PlannedLevel] | None = None
    _plan: ml.RaggedPlan | None = None

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
            found = FixedPass(self.tokens, (self._rows(), self.table.cells), self.config.mask_dtype)
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
        self.fixed.write([ctx.input(), *map(ctx.layer, self.layers)], self, slots, mask)
        self._shared = reading, None

    def targets(self, ctx: ml.Context) -> int | ml.Tensor:
        """The first cell of the run to write, or all cells as an I32 tensor."""
        if self.fixed is not None:
            self.fill(ctx)
            return self.fixed.on(ctx)[0]
        if isinstance(self.cells, int):
            return self.cells
        assert self.cells is not None
        if self._targets is None:
            self._targets = self._host.add(self.cells, ml.DType.I32)
            self._foresee(ctx)
        return self._targets.on(ctx)

    def reads(self) -> Reads:
        """How this pass was read so far."""
        packers = {} if self._plan is None else self._plan.packers
        return Reads(self._worth, self._levels is not None, self._shared is not None, packers)

    def _foresee(self, ctx: ml.Context) -> None:
        """Plan what the pass before was asked for, so that all arrays go to a device together."""
        before = self.expected
        if before is None:
            return
        if before.shared:
            self._share(ctx)
        if before.worth is not None and before.levels:
            self.levels(ctx, before.worth)
        if before.worth is not None and before.packers:
            plan = self.plan(before.worth)
            for name, pack in before.packers.items():
                kept, array = pack(plan)
                plan.packed_ahead[name] = kept, self._host.add(array, ml.DType.I32).on

    def lift(self, indices: frozenset[int]) -> None:
        self.lifted = indices
        self._shared = self.segmented = self._levels = self._plan = None

    def shared(self, ctx: ml.Context) -> tuple[ReadPlan, Mask]:
        """What ``get`` reads: all groups together, arranged as the config says."""
        self.fill(ctx)
        reading, mask = self._shared or self._share(ctx)
        return reading, near(ctx, mask) if self.fixed is None else self.fixed.on(ctx)[1]

    def _share(self, ctx: ml.Context) -> tuple[ReadPlan, Mask | DeviceCopies | HostArray]:
        reading = plan_read(self.table, self.groups, self.config.cache_padding)
        reading.gather(self._host)
        mask = self._mask(ctx, reading, self.config)
        found = reading, mask if isinstance(mask, HostArray) else device_copies(ctx.input(), mask)
        self._blank_view(ctx, reading)  # last, since it asks for its indices
        self._shared = found
        return found

    def segments(self, worth: int) -> list[Segment]:
        """What the queries read; runs and shares of fewer cells than ``worth`` do not stand alone."""
        if self.segmented is None or self._worth != worth:
            before, self._worth = (self.segmented if self._worth is None else None), worth
            self.segmented = before.next(self.table, self.groups) if before and not self.lifted else None
            if self.segmented is None:
                table, groups = self.table, self.groups
                self.segmented = KeptSegments.find(table, groups, self.lower, self.lifted, worth)
        return self.segmented.found

    def levels(self, ctx: ml.Context, worth: int) -> list[PlannedLevel]:
        """The calls of attention of this pass; reading ``worth`` cells costs as much as a call does."""
        if self._levels is None:
            segments = self.segments(worth)
            levels, padding = plan_calls(segments, self.tokens, self.table, self.config, worth)
            found = [PlannedLevel.of(ctx, self._host, level, self.config) for level in levels]
            if padding:
                self._blank(ctx, np.sort(np.concatenate([self.table.stale(*gap) for gap in padding])))
            self._levels = found
        return self._levels

    def plan(self, worth: int) -> ml.RaggedPlan:
        """What the queries read, for a backend with one kernel for all."""
        if self._plan is None:
            self._plan = ragged_plan(self.segments(worth), self.tokens)
        return self._plan

    def _blank_view(self, ctx: ml.Context, reading: ReadPlan) -> None:
        """Blank the free cells of a view. And a little more: the next tokens' are, too."""
        if reading.index is not None:
            return
        start, stop = reading.start, reading.start + reading.length
        if len(reading.rows) == 1 and isinstance(reading.columns[0], int) and not reading.columns[0]:
            start += len(reading.rows[0])
        if start < stop and self.table.stale(start, stop).size:
            self._blank(ctx, self.table.stale(start, stop + self.config.cache_padding))

    def _blank(self, ctx: ml.Context, cells: np.ndarray) -> None:
        """Write zeros into free cells (ascending), which may hold NaN: a weight of 0 does not hide that."""
        if not cells.size:
            return
        first, count = int(cells[0]), cells.size
        is_run = int(cells[-1]) - first + 1 == count
        scattered = None if is_run else self._host.add(cells, ml.DType.I32)
        for layer, buffers in self.layers.items():
            place = ctx.layer(layer)
            buffers.blank(place, first if scattered is None else scattered.on(place), count)
        self.table.blank[cells] = True

    def _mask(self, ctx: ml.Context, reading: ReadPlan, config: ml.CacheConfig) -> Mask | HostArray:
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
        large = build_mask(ctx.input(), reading, shape, self.lower, self.lifted, config.mask_dtype)
        if large is not None:
            return large
        host = reading.mask(self.tokens, self.lower, self.lifted, config.mask_batch_padding)
        return self._host.add(host, config.mask_dtype)

    def _keep(self, ctx: ml.Context, reading: ReadPlan, rows: int) -> bool:
        """Whether ``kept`` is the mask of this pass now: the one of the pass before, or a new one."""
        place = ctx.input()
        if self.kept is None or not self.kept.follow(place, reading):
            self.kept = KeptMask.build(place, reading, rows, self.config.mask_dtype)
        return self.kept is not None
