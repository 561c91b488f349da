"""The state of one forward pass: which tokens, where they are written, what is read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

import ml
from kvcache.attention.batch import SequenceTokens
from kvcache.attention.calls import plan_calls
from kvcache.attention.fixed_shapes import (
    FixedPass,
    GraphRows,
    check_graph,
    read_own,
    tables_of,
)
from kvcache.attention.masks import KeptMask, build_mask
from kvcache.attention.planned import PlannedLevel
from kvcache.attention.read_plan import LowerBound, ReadPlan, plan_read, rows_seen
from kvcache.attention.segments import KeptSegments, Segment
from kvcache.attention.uploads import Reads, Uploads
from kvcache.cache import InvalidRangeError, Mask, NotSupportedError, OrderError
from kvcache.storage.cell_table import CellTable
from kvcache.storage.device_copies import HostArray, OnDevices, near
from kvcache.storage.layer_buffers import LayerBuffers


@dataclass(slots=True, weakref_slot=True)
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
    """The first cell of the run that the batch is written to, and nowhere else; -1 where it is none."""
    read_table: CellTable = field(init=False)
    read_groups: list[SequenceTokens] = field(init=False)
    """What reads are planned of: ``table`` and ``groups``, or others that hide some of what is stored."""
    expected: Reads | None = None
    """How the pass before was read; None: there was none."""
    _uploads: Uploads | None = None
    _targets: HostArray | None = None
    _reading: ReadPlan | None = None
    _seen: tuple[HostArray, HostArray | None] | None = None
    ready: tuple[ReadPlan, Mask] = field(init=False, repr=False, compare=False)
    ready_for: ml.Context | None = None
    """The context that ``shared`` was last called with, and what it gave; None: it has to be called."""
    _shared: tuple[ReadPlan, Mask | OnDevices | HostArray] | None = None
    _loaded: bool = False
    """Whether the tensors of fixed shapes were given what is this pass's."""
    _worth: int | None = None
    _levels: list[PlannedLevel] | None = None
    _plan: ml.RaggedPlan | None = None
    _asked: Reads = field(default_factory=Reads)
    """What was asked for, not merely foreseen."""
    _unfit: list[tuple[np.ndarray, HostArray | None]] = field(default_factory=list)
    """Free cells that are going to be read, and have to be blanked before."""
    _whole: bool = False

    def __post_init__(self) -> None:
        self.run = self.cells if isinstance(self.cells, int) and self.fixed is None else -1
        self.read_table, self.read_groups = self.table, self.groups

    @property
    def uploads(self) -> Uploads:
        """What the host makes for the pass, on its way to devices."""
        if self._uploads is None:
            self.upload_with(Uploads())
            assert self._uploads is not None
        return self._uploads

    def upload_with(self, uploads: Uploads) -> None:
        """Let it go with what ``uploads`` has; nothing was made for the pass yet."""
        self._uploads = uploads
        uploads.serve(self)

    def begin(self) -> None:
        self.table.placed = None
        if self.cells is not None and self.fixed is None:
            self.table.placed = self.stamp, self.cells, self.tokens

    @property
    def read_only(self) -> bool:
        """Whether the batch is queries only, and takes no cells."""
        return self.cells is None and not self.reserve

    def on_fixed_shapes(self, known: dict[tuple[int, ...], FixedPass]) -> ForwardPass:
        """This pass on the tensors of its batch size and tables, for ``fill``; by these in ``known``."""
        tables = tables_of(self.config, self.table, self.groups, self.tokens)
        key = self.tokens, *tables
        found = known.get(key)
        if found is None:
            mask = self._rows(), tables[1]
            found = known[key] = FixedPass(self.tokens, mask, self.config.mask_dtype, tables)
        fixed = replace(self, fixed=found, _uploads=None)
        if self._uploads is not None:
            fixed.upload_with(self._uploads)
        fixed.load()
        return fixed

    def note_put(self, buffers: LayerBuffers) -> None:
        """A layer has the tokens of the pass now."""
        buffers.stamp = self.stamp
        if buffers.absent is not None and self.cells is not None:
            buffers.absent[self._where()] = 0
            owned = np.flatnonzero(self.table.references)
            if buffers.lacks(self.table.taken, owned) is None:
                buffers.absent = None

    @property
    def whole(self) -> bool:
        """Whether all layers that store anything have its tokens; what a graph has put is not known."""
        if not self._whole:
            self._whole = self.cells is None or self.fixed is not None or self._is_put()
        return self._whole

    def _is_put(self) -> bool:
        stamp = self.stamp
        for held in self.layers.values():
            if held.stamp < stamp:
                return False
        return bool(self.layers)

    def end(self) -> None:
        """The pass is over: note which layers lack its tokens."""
        self.table.placed = None
        if not self.whole:
            for held in self.layers.values():
                if held.stamp < self.stamp:
                    held.lack(self.table.taken, self._where())

    def resume(self) -> None:
        """It goes on after ``end``: layers may still be given its tokens."""
        for held in self.layers.values() if self.cells is not None else ():
            if held.stamp < self.stamp and held.absent is not None:
                held.absent[self._where()] = 0
        self.begin()

    def _where(self) -> slice | np.ndarray:
        """The cells of the batch, as an index; it has some."""
        cells = self.cells
        assert cells is not None
        return slice(cells, cells + self.tokens) if isinstance(cells, int) else cells

    def readable(self, op: str, layer: int) -> LayerBuffers:
        """What the layer stores; OrderError where it lacks tokens of the pass, or of its sequences."""
        buffers = self.layers.get(layer) or self._stored(op, layer)
        if buffers.stamp >= self.stamp:
            if buffers.absent is not None and not self.reserve:
                self._check_present(op, layer, buffers)
            return buffers
        if self.read_only:
            raise OrderError(
                f"{op}: layer {layer} was not put in the last pass that stored tokens, and lacks them; "
                "remove them, or evaluate them in all layers"
            )
        raise OrderError(
            f"{op}: layer {layer} was not put in this pass, and lacks its tokens; put them, set_layer "
            "to the layer whose K and V it shares, or start_forward(..., read_only=True) to read the past"
        )

    def _stored(self, op: str, layer: int) -> LayerBuffers:
        if layer not in self.layers:
            raise OrderError(f"{op}: layer {layer} stores nothing yet; call put first")
        return self.layers[layer]

    def _check_present(self, op: str, layer: int, buffers: LayerBuffers) -> None:
        for group in self.groups:
            row = self.table.rows[group.seq]
            lacking = buffers.lacks(self.table.taken, row.cells)
            if lacking is not None:
                first = int(row.positions[lacking][0])
                # What a window no longer has, the tokens from there on would lack.
                begin = first if self.lower is None else f"resume_point({group.seq}, {first})"
                raise OrderError(
                    f"{op}: layer {layer} lacks position {first} of sequence {group.seq}, as it was not put "
                    f"in the pass that stored the token; call remove({group.seq}, {begin}), and evaluate the "
                    "tokens from there on in all layers"
                )

    def reserved_mask(self, ctx: ml.Context) -> ml.Tensor:
        """A mask over every cell, which hides none."""
        return ctx.input().zeros((self._rows(), self.table.cells), self.config.mask_dtype)

    def _rows(self) -> int:
        """The rows of a mask of the whole batch, padding included."""
        padding = self.config.mask_batch_padding
        return -(-self.tokens // padding) * padding

    def fill(self, ctx: ml.Context) -> None:
        """Bring the tensors of fixed shapes to this pass, unless they are its own already."""
        fixed = self.fixed
        if fixed is None:
            return
        if fixed.owner is not self or not self._loaded:
            self.load()
        if not fixed.brought:
            fixed.bring([ctx.input(), *map(ctx.layer, self.layers)])

    def graph_rows(self, ctx: ml.Context, layer: int) -> GraphRows:
        if self.read_only:
            raise OrderError("graph_rows: this pass is read-only, and a graph writes; read it by get")
        if self.fixed is None:
            raise NotSupportedError(
                "graph_rows: this pass has no fixed shapes; set_config with fixed_context, and start a pass "
                "without reserve"
            )
        buffers = self._stored("graph_rows", layer)
        check_graph(layer, buffers)
        self.fill(ctx)
        self.note_put(buffers)
        key, value = buffers.read_as_configured(ctx, 0, self.table.cells)
        slots, mask, cells = self.fixed.on(ctx.layer(layer))
        return GraphRows(key, value, slots, cells, mask)

    def load(self) -> None:
        """Put together what ``fill`` brings."""
        assert self.fixed is not None
        first, host = self.cells, self.uploads
        slots = np.arange(first, first + self.tokens) if isinstance(first, int) else first
        reading, own = read_own(self.read_table, self.read_groups, self.tokens, self.fixed.tables)
        padding = self.config.mask_batch_padding
        mask = host.add(reading.mask(self.tokens, self.lower, self.lifted, padding), self.config.mask_dtype)
        self.fixed.load(self, None if slots is None else host.add(slots), mask, host.add(own))
        self._loaded = True

    def own_cells(self, ctx: ml.Context) -> tuple[ml.Tensor, ml.Tensor] | None:
        """Cells (rows, context) and mask where each token reads its own sequence's; None: not so here."""
        if self.fixed is None:
            return None
        self.fill(ctx)
        _, mask, cells = self.fixed.on(ctx)
        return cells, mask

    def write(self, ctx: ml.Context, buffers: LayerBuffers, new: Sequence[ml.Tensor]) -> None:
        """Store what is ``new``, of the batch, in its cells; in the order of ``LayerBuffers.stored``.

        Where it is not known yet what else goes to the device, cells that lie scattered are written run by
        run: they go there with the rest, for further layers.
        """
        if isinstance(self.cells, int) and self.fixed is None:
            buffers.write(ctx, self.cells, new)
            return
        known = self.expected is not None or self.fixed is not None
        if known or not self.uploads.pending(ctx):
            buffers.write(ctx, self.targets(ctx), new)
            return
        cells = self._targeted()
        cuts = np.flatnonzero(np.diff(cells) != 1) + 1
        for begin, end in itertools.pairwise([0, *cuts.tolist(), self.tokens]):
            buffers.write(ctx, int(cells[begin]), [one.slice(ctx, 0, begin, end) for one in new])

    def targets(self, ctx: ml.Context) -> int | ml.Tensor:
        """The first cell of the run to write, or all cells as an I32 tensor."""
        if self.fixed is not None:
            self.fill(ctx)
            return self.fixed.on(ctx)[0]
        if isinstance(self.cells, int):
            return self.cells
        self._targeted()
        assert self._targets is not None
        return self._targets.on(ctx)

    def _targeted(self) -> np.ndarray:
        """The cells of the batch, which lie scattered; they go with the other arrays."""
        assert isinstance(self.cells, np.ndarray)
        if self._targets is None:
            self._targets = self.uploads.add(self.cells)
        return self.cells

    def reads(self) -> Reads | None:
        """How this pass was read so far; one that was not, or reserves, as it was expected."""
        expected = self.expected
        return expected if self.reserve or (expected is not None and not self._asked) else self._asked

    def foresee(self, reads: Reads | None) -> None:
        """Plan what ``reads`` says, so that all arrays go to a device together."""
        if self.fixed is not None or reads is None:
            return
        if isinstance(self.cells, np.ndarray):
            self._targeted()
        if reads.shared and self._shared is None:
            self._share()
        if reads.rows:
            self._make_seen()
        if reads.worth is None:
            return
        if reads.levels and self._levels is None:
            self._make_levels(reads.worth)
        if reads.packers and self._plan is None:
            plan = self._make_plan(reads.worth)
            for kind, pack in reads.packers.items():
                plan.lay(kind, pack)

    def lift(self, indices: frozenset[int]) -> None:
        self.lifted, self._loaded = indices, False
        self.ready_for = self._shared = self._seen = self.segmented = self._levels = self._plan = None

    def shared(self, ctx: ml.Context) -> tuple[ReadPlan, Mask]:
        """What ``get`` reads: all groups together, arranged as the config says."""
        self._asked.shared = True
        self.fill(ctx)
        reading, mask = self._shared or self._share()
        if self._unfit:
            self._blank(ctx)
        found = reading, near(ctx, mask)
        if self.fixed is None:
            self.ready_for, self.ready = ctx, found
        return found

    def _share(self) -> tuple[ReadPlan, Mask | OnDevices | HostArray]:
        reading = self._plan_rows()
        found = self._shared = reading, self._mask(reading)
        return found

    def rows(self, ctx: ml.Context) -> ReadPlan:
        """The rows of ``get``, without their mask."""
        self._asked.rows = True
        self.fill(ctx)
        found = self._plan_rows()
        self._make_seen()  # goes to devices with the rows themselves
        if self._unfit:
            self._blank(ctx)
        return found

    def _plan_rows(self) -> ReadPlan:
        if self._reading is None:
            self._reading = plan_read(self.read_table, self.read_groups, self.config.cache_padding)
            if self._reading.index is None:
                self._note_view(self._reading)
            else:
                self._reading.gather(self.uploads)
        return self._reading

    def seen_rows(self, ctx: ml.Context) -> tuple[ml.Tensor, ml.Tensor | None]:
        """I32 (tokens, 1) each: a row that the query sees, and where its rows are a range [first, stop).

        The second is None where the rows of some query are no range, or shapes are fixed.
        """
        self.rows(ctx)
        first, stop = (None if one is None else one.on(ctx).reshape(ctx, self.tokens, 1)
                       for one in self._make_seen())  # fmt: skip
        assert first is not None
        return first, stop

    def _make_seen(self) -> tuple[HostArray, HostArray | None]:
        if self._seen is None:
            first, stop = rows_seen(self._plan_rows(), self.tokens, self.lower, self.lifted)
            self._seen = self.uploads.add(first), None if stop is None else self.uploads.add(stop)
        return self._seen

    def read_extra(self, ctx: ml.Context, layer: int, name: str) -> ml.Tensor:
        buffers, here = self.readable("get_extra", layer), ctx.layer(layer)
        if name not in buffers.extra:
            raise InvalidRangeError(
                f"get_extra: {name!r:.40} of layer {layer}; it stores {sorted(buffers.extra) or 'none'}"
            )
        if self.reserve:
            return buffers.read_extra(here, name, 0, self.table.cells)
        reading = self.rows(ctx)
        return buffers.read_extra(here, name, reading.cells(here), reading.length)

    def read_rows(
        self, ctx: ml.Context, buffers: LayerBuffers, rows: ml.Tensor
    ) -> tuple[ml.Tensor, ml.Tensor]:
        """K and V of rows I32 (count,) of ``rows``: (count, heads, dim) each, copies."""
        reading, count = self.rows(ctx), rows.shape[0]
        where = reading.cells(ctx)
        if not isinstance(where, int):
            cells = where.rows(ctx, rows)
        else:
            cells = rows.add(ctx, ctx.full((1,), where, ml.DType.I32)) if where else rows
        return buffers.read(ctx, cells, count)

    def segments(self, worth: int) -> list[Segment]:
        """What the queries read; runs and shares of fewer cells than ``worth`` do not stand alone."""
        return self._segmented(worth).found

    def _segmented(self, worth: int) -> KeptSegments:
        if self.segmented is None or self._worth != worth:
            before, self._worth = (self.segmented if self._worth is None else None), worth
            self.segmented = (
                before.next(self.read_table, self.read_groups) if before and not self.lifted else None
            )
            if self.segmented is None:
                table, groups = self.read_table, self.read_groups
                self.segmented = KeptSegments.find(table, groups, self.lower, self.lifted, worth)
        return self.segmented

    def levels(self, ctx: ml.Context, worth: int) -> list[PlannedLevel]:
        """The calls of attention of this pass; reading ``worth`` cells costs as much as a call does."""
        self._asked.levels, self._asked.worth = True, worth
        found = self._make_levels(worth) if self._levels is None else self._levels
        if self._unfit:
            self._blank(ctx)
        return found

    def _make_levels(self, worth: int) -> list[PlannedLevel]:
        levels, padding = plan_calls(self.segments(worth), self.tokens, self.table, self.config, worth)
        found = [PlannedLevel.of(self.uploads, level, self.config) for level in levels]
        self._levels = found
        if padding:
            self._note(np.unique(np.concatenate([self.table.stale(*gap) for gap in padding])))
        return found

    def plan(self, worth: int) -> ml.RaggedPlan:
        """What the queries read, for a backend with one kernel for all."""
        plan = self._make_plan(worth)
        self._asked.worth, self._asked.packers = worth, plan.packers
        return plan

    def _make_plan(self, worth: int) -> ml.RaggedPlan:
        if self._plan is None:
            self._plan = self._segmented(worth).plan(self.tokens)
            uploads = self.uploads
            self._plan.upload = lambda array: uploads.add(array).on
        return self._plan

    def _note_view(self, reading: ReadPlan) -> None:
        """The free cells of a view. And a little more: the next tokens' are to be blanked, too."""
        start, stop = reading.start, reading.start + reading.length
        if len(reading.rows) == 1 and isinstance(reading.columns[0], int) and not reading.columns[0]:
            start += len(reading.rows[0])
        if start < stop and self.table.stale(start, stop).size:
            self._note(self.table.stale(start, stop + self.config.cache_padding))

    def _note(self, cells: np.ndarray) -> None:
        """Let free cells (ascending) be blanked before anything is read."""
        if cells.size:
            is_run = int(cells[-1]) - int(cells[0]) + 1 == cells.size
            self._unfit.append((cells, None if is_run else self.uploads.add(cells)))

    def _blank(self, ctx: ml.Context) -> None:
        """Write zeros into free cells, which may hold NaN: a weight of 0 does not hide that."""
        while self._unfit:
            cells, scattered = self._unfit[0]
            for layer, buffers in self.layers.items():
                place = ctx.layer(layer)
                where = int(cells[0]) if scattered is None else scattered.on(place)
                buffers.blank(place, where, cells.size)
            self.table.blank[cells] = True
            del self._unfit[0]

    def _mask(self, reading: ReadPlan) -> Mask | OnDevices | HostArray:
        config, elided = self.config, reading.elided(self.lower, self.lifted)
        if config.elide_mask and not isinstance(elided, bool):
            return elided
        shape, dtype = (self._rows(), reading.length), config.mask_dtype
        if shape[0] == 1 and elided is None:
            return OnDevices(lambda ctx: ctx.zeros(shape, dtype))  # a decoded token that sees everything
        if self.lower is None and not self.lifted:
            if self.kept is None or not self.kept.follow(self.uploads, reading):
                self.kept = KeptMask.build(reading, shape[0], dtype)
            if self.kept is not None:
                return OnDevices(partial(self.kept.shown, length=reading.length))
        large = build_mask(self.uploads, reading, shape, self.lower, self.lifted, dtype)
        if large is not None:
            return large
        mask = reading.mask(self.tokens, self.lower, self.lifted, config.mask_batch_padding)
        return self.uploads.add(mask, dtype)
