"""Which stored cells each query of a pass sees: planned once per pass, and lowered for each way of reading.

============  ===============================================================================
``shared``    for ``get``: the cells of all sequences as one history, and a mask over it
``kernel``    for a backend with one kernel for a whole batch: segments, and who reads each
``calls``     for the others: a few calls of attention, over views where cells lie in runs
``tables``    for graphs of fixed shapes: each sequence's cells in a row of their own
============  ===============================================================================

Each form is made when it is first used, or in advance if the previous pass used it, and then serves all
layers. The host's data for it is uploaded in one transfer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import ml
from kvcache.attention.batch import SequenceTokens
from kvcache.attention.calls import BLOCK_CALLS, Call, plan_calls
from kvcache.attention.fixed_shapes import FixedPass, read_own
from kvcache.attention.history import History, LowerBound, find_history, rows_seen
from kvcache.attention.masks import KeptMask, build_mask
from kvcache.attention.segments import KeptSegments, Segment
from kvcache.cache import Mask
from kvcache.storage.cell_storage import CellStorage
from kvcache.storage.cell_table import CellTable
from kvcache.storage.device_copies import HostArray, HostArrays, OnDevices, device_of, near

NEVER = 1 << 40
"""Cells that no run has."""
Packers = Mapping[str, Callable[[ml.RaggedPlan], tuple[Any, np.ndarray]]]


@dataclass(slots=True)
class Reads:
    """How a pass was read. The next pass is expected to be read in the same way, and is planned accordingly
    before its first indices are uploaded.
    """

    shared: bool = False
    rows: bool = False
    calls: bool = False
    worth: int | None = None
    """The ``worth`` of the calls or the kernel's plan that were requested; None: neither was."""
    packers: Packers | None = None
    """What a backend's kernel uploads of a plan; None: no plan was requested."""

    def __bool__(self) -> bool:
        return self.shared or self.rows or self.worth is not None


class Uploads(HostArrays):
    """The host's data for a pass, or for the passes of several caches that start together, in one transfer.

    Before the upload, each plan is lowered the way the previous pass was read, or, if there was none, the way
    another of the plans is.
    """

    __slots__ = ("_plans",)

    def __init__(self) -> None:
        super().__init__()
        self._plans: list[weakref.ref[ReadPlan]] = []

    def serve(self, plan: ReadPlan) -> None:
        self._plans.append(weakref.ref(plan))

    def gather(self) -> None:
        plans = [plan for ref in self._plans if (plan := ref()) is not None]
        beside = next((reads for plan in plans if (reads := plan.reads())), None)
        for plan in plans:
            plan.foresee(beside if plan.expected is None else plan.expected)


def worth(config: ml.CacheConfig, bytes_per_cell: int, most: int = NEVER) -> int:
    """How many cells a run or a share needs, ``most`` at most, to be read apart from others."""
    return NEVER if config.batch_invariant else min(most, max(1, config.call_bytes // bytes_per_cell))


class ReadPlan:
    """The cells that the queries of a pass see."""

    __slots__ = (
        "__weakref__", "_asked", "_calls", "_history", "_kernel", "_seen", "_segments", "_shared", "_unfit",
        "_uploads", "_worth", "bound", "bound_to", "config", "expected", "fixed", "groups", "kept", "layers",
        "lifted", "lower", "ready", "ready_for", "table", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        storage: CellStorage,
        groups: list[SequenceTokens],
        tokens: int,
        lower: LowerBound | None,
        fixed: FixedPass | None = None,
    ) -> None:
        self.table, self.config, self.layers = storage.table, storage.config, storage.buffers
        self.groups, self.tokens, self.lower, self.fixed = groups, tokens, lower, fixed
        self.lifted: frozenset[int] = frozenset()
        """Tokens of the batch that also see the tokens after them."""
        self.expected: Reads | None = None
        """How the previous pass was read; None: there was none."""
        self.kept: KeptMask | None = None
        """The mask that the previous pass left for this one to extend."""
        self._segments: KeptSegments | None = None
        """The segments to read, or, while ``_worth`` is None, those of the previous pass."""
        self._worth: int | None = None
        self._asked = Reads()
        """What was requested, as opposed to planned in advance."""
        self._uploads: Uploads | None = None
        self._unfit: list[tuple[np.ndarray, HostArray | None]] = []
        """Free cells that will be read, and must be zeroed first."""
        self._history: History | None = None
        self.ready: tuple[History, Mask]
        """What ``shared`` returned for ``ready_for``."""
        self.bound: Callable[..., ml.Tensor | None]
        """How a layer attended in the context ``bound_to``; other layers reuse it if they fit."""
        self._forget()

    def _forget(self) -> None:
        """Discard everything that depends on which cells queries see."""
        self.ready_for: ml.Context | None = None
        self.bound_to: ml.Context | None = None
        self._shared: tuple[History, Mask | OnDevices | HostArray] | None = None
        self._seen: tuple[HostArray, HostArray | None] | None = None
        self._calls: tuple[list[list[Call]], dict[int, list[list[ml.AttentionCall]]]] | None = None
        self._kernel: ml.RaggedPlan | None = None

    def follow(self, before: ReadPlan) -> None:
        """Continue from the segments of the previous pass, if each of its sequences sees just one more
        cell.
        """
        self.kept, self._segments = before.kept, before._segments

    def lift(self, indices: frozenset[int]) -> None:
        """Let the tokens at ``indices`` see the tokens after them as well."""
        self.lifted, self._segments = indices, None
        self._forget()

    def hide(self, table: CellTable, groups: list[SequenceTokens]) -> None:
        """Read this table and these groups instead, which leave some tokens out; nothing may have been read
        yet.
        """
        self.table, self.groups = table, groups

    def start_anew(self) -> None:
        """Find all segments again instead of continuing from those of the previous pass."""
        self._segments = None

    # Uploads.

    @property
    def uploads(self) -> Uploads:
        """The host's data for the pass, to be uploaded."""
        if self._uploads is None:
            self.upload_with(Uploads())
            assert self._uploads is not None
        return self._uploads

    def upload_with(self, uploads: Uploads) -> None:
        """Upload this pass's data together with ``uploads``; nothing may have been made for the pass yet."""
        self._uploads = uploads
        uploads.serve(self)

    def reads(self) -> Reads:
        """How this pass has been read so far; if it has not been read, how it was expected to be."""
        return self._asked if self._asked or self.expected is None else self.expected

    def foresee(self, reads: Reads | None) -> None:
        """Make the forms that ``reads`` lists, so that all arrays are uploaded together."""
        if self.fixed is not None or reads is None:
            return
        if reads.shared and self._shared is None:
            self._share()
        if reads.rows:
            self._make_seen()
        if reads.worth is None:
            return
        if reads.calls and self._calls is None:
            self._make_calls(reads.worth)
        if reads.packers and self._kernel is None:
            plan = self._make_kernel(reads.worth)
            for kind, pack in reads.packers.items():
                plan.lay(kind, pack)

    # One history for all.

    def shared(self, ctx: ml.Context) -> tuple[History, Mask]:
        """What ``get`` reads: all sequences together, laid out as the configuration says."""
        self._asked.shared = True
        history, mask = self._shared or self._share()
        if self._unfit:
            self._blank(ctx)
        ready = history, near(ctx, mask)
        if self.fixed is None:
            self.ready_for, self.ready = ctx, ready
        return ready

    def _share(self) -> tuple[History, Mask | OnDevices | HostArray]:
        history = self._find_history()
        shared = self._shared = history, self._mask(history)
        return shared

    def rows(self, ctx: ml.Context) -> History:
        """The rows of ``get``, without the mask."""
        self._asked.rows = True
        history = self._find_history()
        self._make_seen()  # uploaded with the rows themselves
        if self._unfit:
            self._blank(ctx)
        return history

    def _find_history(self) -> History:
        if self._history is None:
            self._history = find_history(self.table, self.groups, self.config.cache_padding)
            if self._history.index is None:
                self._note_view(self._history)
            else:
                self._history.gather(self.uploads)
        return self._history

    def seen_rows(self, ctx: ml.Context) -> tuple[ml.Tensor, ml.Tensor | None]:
        """I32 (tokens, 1) each: a row that the query sees, and the end of the range of its rows.

        The second is None if the rows of some query are not a range.
        """
        self.rows(ctx)
        first, stop = (None if one is None else one.on(ctx).reshape(ctx, self.tokens, 1)
                       for one in self._make_seen())  # fmt: skip
        assert first is not None
        return first, stop

    def _make_seen(self) -> tuple[HostArray, HostArray | None]:
        if self._seen is None:
            first, stop = rows_seen(self._find_history(), self.tokens, self.lower, self.lifted)
            self._seen = self.uploads.add(first), None if stop is None else self.uploads.add(stop)
        return self._seen

    def _mask(self, history: History) -> Mask | OnDevices | HostArray:
        config, elided = self.config, history.elided(self.lower, self.lifted)
        if config.elide_mask and not isinstance(elided, bool):
            return elided
        shape, dtype = (self.padded_tokens, history.length), config.mask_dtype
        if shape[0] == 1 and elided is None:
            return OnDevices(lambda ctx: ctx.zeros(shape, dtype))  # a decoded token that sees everything
        if self.lower is None and not self.lifted:
            if self.kept is None or not self.kept.follow(self.uploads, history):
                self.kept = KeptMask.build(history, shape[0], dtype)
            if self.kept is not None:
                return OnDevices(partial(self.kept.shown, length=history.length))
        large = build_mask(self.uploads, history, shape, self.lower, self.lifted, dtype)
        if large is not None:
            return large
        mask = history.mask(self.tokens, self.lower, self.lifted, config.mask_batch_padding)
        return self.uploads.add(mask, dtype)

    @property
    def padded_tokens(self) -> int:
        """The number of rows of a mask of the whole batch, including padding."""
        padding = self.config.mask_batch_padding
        return -(-self.tokens // padding) * padding

    # Segments, for a kernel and for calls.

    def segments(self, worth: int) -> list[Segment]:
        """What the queries read; runs and shared ranges of fewer than ``worth`` cells are not segments of
        their own.
        """
        return self._segmented(worth).found

    def _segmented(self, worth: int) -> KeptSegments:
        if self._segments is None or self._worth != worth:
            before, self._worth = (self._segments if self._worth is None else None), worth
            self._segments = before.next(self.table, self.groups) if before and not self.lifted else None
            if self._segments is None:
                self._segments = KeptSegments.find(self.table, self.groups, self.lower, self.lifted, worth)
        return self._segments

    def kernel(self, worth: int) -> ml.RaggedPlan:
        """For a backend with one kernel for a whole batch."""
        plan = self._make_kernel(worth)
        self._asked.worth, self._asked.packers = worth, plan.packers
        return plan

    def _make_kernel(self, worth: int) -> ml.RaggedPlan:
        if self._kernel is None:
            self._kernel = self._segmented(worth).plan(self.tokens)
            uploads = self.uploads
            self._kernel.upload = lambda array: uploads.add(array).on
        return self._kernel

    def calls(self, ctx: ml.Context, worth: int) -> list[list[ml.AttentionCall]]:
        """Attention calls in levels, each of which has a query at most once; a call costs as much as
        ``worth`` cells.
        """
        if self.fixed is not None:
            return self.fixed.calls(ctx, BLOCK_CALLS * worth)
        self._asked.calls, self._asked.worth = True, worth
        levels, made = self._calls or self._make_calls(worth)
        if self._unfit:
            self._blank(ctx)
        uploaded = made.get(device_of(ctx))
        if uploaded is None:
            uploaded = made[device_of(ctx)] = [[call.on(ctx) for call in level] for level in levels]
        return uploaded

    def _make_calls(self, worth: int) -> tuple[list[list[Call]], dict[int, list[list[ml.AttentionCall]]]]:
        levels, padding = plan_calls(self.segments(worth), self.tokens, self.table, self.config, worth)
        for level in levels:
            for call in level:
                call.upload_with(self.uploads, self.config)
        if padding:
            self._note(np.unique(np.concatenate([self.table.stale(*gap) for gap in padding])))
        self._calls = levels, {}
        return self._calls

    # Tables of fixed shapes.

    def tables(self) -> tuple[HostArray, HostArray]:
        """The mask of ``fixed``, and the cells of each of its rows."""
        assert self.fixed is not None
        history, own = read_own(self.table, self.groups, self.tokens, self.fixed.tables)
        mask = history.mask(self.tokens, self.lower, self.lifted, self.config.mask_batch_padding)
        return self.uploads.add(mask, self.config.mask_dtype), self.uploads.add(own)

    # Free cells that are read.

    def _note_view(self, history: History) -> None:
        """Record the free cells of a view, and a few more, so that those of the next tokens are zeroed as
        well.
        """
        start, stop = history.start, history.start + history.length
        if len(history.rows) == 1 and isinstance(history.columns[0], int) and not history.columns[0]:
            start += len(history.rows[0])
        if start < stop and self.table.stale(start, stop).size:
            self._note(self.table.stale(start, stop + self.config.cache_padding))

    def _note(self, cells: np.ndarray) -> None:
        """Have free cells (ascending) zeroed before anything is read."""
        if cells.size:
            is_run = int(cells[-1]) - int(cells[0]) + 1 == cells.size
            self._unfit.append((cells, None if is_run else self.uploads.add(cells)))

    def _blank(self, ctx: ml.Context) -> None:
        """Write zeros into free cells, which may hold NaN: a weight of 0 does not cancel NaN."""
        while self._unfit:
            cells, scattered = self._unfit[0]
            for layer, buffers in self.layers.items():
                place = ctx.layer(layer)
                where = int(cells[0]) if scattered is None else scattered.on(place)
                buffers.blank(place, where, cells.size)
            self.table.blank[cells] = True
            del self._unfit[0]
