"""The causal cache, and the base class of windows and chunks (windows.py).

A query at position p of sequence s attends to the stored tokens of
s with position <= p; a window w adds position >= p - w, a chunk c adds position >= p - p % c::

    position       0 1 2 3 4 5 6 7        what the query at 6 sees
    causal         x x x x x x x .
    window 2       . . . . x x x .        itself and the 2 before it
    chunk 4        . . . . x x x .        from the start of its chunk of 4

The cache composes its ``storage`` (a cell table and the buffers of each layer), the forward pass
(kvcache.attention), ``editor`` (changes of sequences between passes) and ``snapshots``. The class reads from
top to bottom: it is set up, a pass finds cells for its tokens, layers put and attend, and between passes
sequences are shared, shortened and snapshotted. Undoing a pass, for caches that start together, comes last.
Checks common to all caches are in base.py, those of threads in one_thread.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import get_ident

import numpy as np

import ml
from kvcache.attention.attend import KERNEL_WORTH, Kernels, attend, check_select
from kvcache.attention.batch import SequenceTokens, check_modes, check_query, split_batch
from kvcache.attention.fixed_shapes import FixedPass, GraphRows
from kvcache.attention.forward_pass import ForwardPass, place, put_layer, put_stored_layer
from kvcache.attention.history import History, LowerBound, kept_entries
from kvcache.attention.layer_cells import LayerCells
from kvcache.attention.pass_reads import PassReads
from kvcache.attention.plan import NEVER, ReadPlan, Reads, Uploads, worth
from kvcache.attention.step_reads import StepReads, step_reads
from kvcache.cache import (
    Batch,
    CacheDType,
    CacheFullError,
    ExtraShiftFunction,
    InvalidRangeError,
    Mask,
    OrderError,
    ShiftFunction,
    check_context,
    check_thread,
    check_whole,
    whole_numbers,
)
from kvcache.caches.base import BoundCache, ManagedSnapshots
from kvcache.caches.one_thread import busy, is_foreign, one_call, one_thread
from kvcache.caches.sequences import SequenceEditor, check_groups, lost_error
from kvcache.caches.undo_log import UndoLog
from kvcache.snapshots.attention import AttentionSnapshots, Window, first_missing
from kvcache.snapshots.reservation import CellReservation, IncomingSnapshot
from kvcache.snapshots.snapshot import AttentionSnapshot
from kvcache.storage.cell_storage import CellStorage
from kvcache.storage.cell_table import CellTable
from kvcache.storage.layer_buffers import LayerBuffers
from kvcache.storage.sizes import bytes_text
from ml import nn


class CausalCache(BoundCache[ForwardPass, AttentionSnapshot], ManagedSnapshots[AttentionSnapshot]):
    """Keeps every token; a query attends to all tokens of its own sequence up to its own position.

    ``shift`` re-encodes stored keys for new positions, and ``shift_extra`` re-encodes stored extras. Without
    them, tokens cannot be removed from the middle of a sequence.

    >>> import ml
    >>> from kvcache import Batch, CausalCache
    >>> cache = CausalCache()
    >>> with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
    ...     cache.init(backend, ml.DType.F32, max_sequences=2, capacity=16, max_batch=8)
    ...     cache.start_forward(ctx, Batch(positions=[0, 1, 2], sequences=[0, 0, 0]))
    ...     cache.set_layer(0)
    ...     key = ctx.full((3, 1, 4), 0.5, ml.DType.F32)         # (tokens, kv_heads, head_dim)
    ...     cache.put(ctx, key, key)
    ...     out = cache.attend(ctx, ctx.full((3, 2, 4), 1.0, ml.DType.F32), scale=0.5)
    ...     print(out.shape, cache.offset(0))
    ...     cache.copy_prefix(0, 1, 2)                           # sequence 1 shares two tokens
    ...     print(cache.positions(1).tolist(), cache.free_cells)
    ...     cache.close()
    (3, 2, 4) 3
    [0, 1] 29
    """

    def __init__(
        self, shift: ShiftFunction | None = None, *, shift_extra: ExtraShiftFunction | None = None
    ) -> None:
        super().__init__()
        self.snapshots: AttentionSnapshots = AttentionSnapshots()
        """Takes and restores snapshots of sequences."""
        self.editor = SequenceEditor(self.snapshots, shift, shift_extra)
        """Shares, removes and moves tokens of sequences."""
        self._buffers: dict[int, LayerBuffers] = {}
        self._fixed: dict[tuple[int, ...], FixedPass] = {}
        self._reads: Reads | None = None
        self._uploads: Uploads | None = None
        self._undo: UndoLog | None = None

    # Setting up.

    def init(
        self, backend: ml.Backend, dtype: CacheDType, max_sequences: int, capacity: int, max_batch: int
    ) -> None:
        """Bind to ``backend``, for up to ``max_sequences`` sequences of ``capacity`` tokens each, stored as
        ``dtype``.

        Nothing is allocated before the first ``put``. ``max_batch`` is the largest expected batch, in tokens;
        when tokens move, max(``max_batch``, 32) of them are re-encoded at a time.
        """
        sizes = {"max_sequences": max_sequences, "capacity": capacity, "max_batch": max_batch}
        self._dtype, whole = self._check_init(backend, dtype, **sizes)
        self._check_stored(backend, self._dtype)
        self._max_sequences, self._capacity, self._max_batch = whole
        self._backend = backend
        try:
            self._make_table()
        except BaseException:
            self._backend = None
            raise
        self._closed = False

    def _make_table(self) -> None:
        self._active, backend = self.config, self._bound("init")
        self._fixed = {}
        padding = self._active.cache_padding
        cells = -(-self._cells() // padding) * padding
        table = CellTable(cells, self._max_sequences)
        storage = CellStorage(backend, self._dtype, self._active, table, self._max_batch)
        self._table, self._buffers = storage.table, storage.buffers  # looked up by every put and get
        self._kernels = Kernels(backend)
        self.snapshots.detach_all()
        self.snapshots.bind(storage, self._window())

    def prepare_set_config(self, config: ml.CacheConfig) -> Callable[[], None]:
        if self._buffers or self._pass is not None or (self._backend and any(self._table.occupied())):
            raise OrderError("set_config: tokens are already stored; call set_config before the first batch")

        def commit() -> None:
            self._config = config
            if self._backend is not None:
                self._make_table()

        return commit

    # What windows and chunks change.

    def _cells(self) -> int:
        """How many cells the cache has, before rounding up to ``cache_padding``."""
        return self._max_sequences * self._capacity

    def lower_bound(self) -> LowerBound | None:
        """The lowest position that a query sees, as a function of its own position; None: 0."""
        return None

    def _window(self) -> Window | None:
        """The window that bounds how much of a sequence is stored; None: all of it."""
        return None

    def _evictions(self, groups: Iterable[SequenceTokens]) -> list[tuple[int, int, int]]:
        """(sequence, begin, end): positions ``[begin, end)``, which are evicted before the batch is
        placed.
        """
        return []

    def _go_on_to(self, forward: ForwardPass) -> None:
        if forward.cells is None and self._pass is not None:  # else it has ended, to make room
            self._pass.end()
        self._pass = forward
        forward.begin()

    def _full(self, tokens: int) -> CacheFullError:
        return self.snapshots.full(tokens, "start_forward")

    # One pass.

    @one_call
    def start_forward(
        self, ctx: ml.Context, batch: Batch, reserve: bool = False, *, read_only: bool = False
    ) -> None:
        """Find a cell for every token of ``batch``. The previous pass ends, whichever thread began it.

        The pass belongs to the calling thread: calls in it from other threads raise OrderError.

        With ``reserve`` nothing is stored, and ``get`` spans the whole capacity. With ``read_only`` the
        tokens of the batch are queries over stored tokens: each sees what a token at its position would see,
        no cell is taken, nothing is evicted, and ``put`` raises OrderError. Scheduled snapshots stay
        scheduled, and ``undo_forward`` only ends the pass.

        Raises InvalidBatchError for a batch that cannot be stored (``read_only``: for a query that would see
        nothing), CacheFullError for one that does not fit, SequenceLostError for a sequence that was lost in
        a device failure. The cache is then unchanged: evictions are undone as well.
        """
        check_context("start_forward", ctx, self._bound("start_forward"))
        groups, count, lower = split_batch(batch, self._max_sequences), len(batch), self.lower_bound()
        together, self._uploads = self._uploads, None
        if reserve:
            check_modes(reserve, read_only)
            self._changed()
            plan = ReadPlan(self.snapshots.storage, groups, count, lower)
            self._pass = ForwardPass(plan, None, reserve=True, stamp=-1)
            return
        check_groups(self._table, groups, lower, read_only, self.snapshots.owner)
        if read_only:
            self._undo = None
        else:
            self._make_room(count, groups)
        try:
            forward = self._begun(ctx, groups, count, lower, read_only, together)
        except BaseException:
            self._take_back()
            if not read_only:
                self._resume()
            raise
        self._go_on_to(forward)
        if self.snapshots.schedule and not read_only:
            for group in groups:
                self.snapshots.capture(group.seq)

    def _make_room(self, tokens: int, groups: list[SequenceTokens]) -> None:
        """End the pass and evict what windows no longer see, so that ``tokens`` cells are free; all or
        nothing.
        """
        if self._pass is not None:
            self._pass.end()  # noted before snapshots are copied out
        undo = UndoLog(self._table, groups)
        try:
            if evictions := self._evictions(groups):
                undo.evict(evictions)
            if tokens > self._table.free:
                self.snapshots.reclaim(tokens)
                if tokens > self._table.free:
                    raise self._full(tokens)
        except BaseException:
            undo.restore()
            self._resume()
            raise
        self._undo = undo

    def _begun(
        self, ctx: ml.Context, groups: list[SequenceTokens], count: int, lower: LowerBound | None,
        read_only: bool, together: Uploads | None,
    ) -> ForwardPass:  # fmt: skip
        """The next pass, with a cell for each of its tokens; there is room."""
        table, before = self._table, self._pass
        if table.arrivals:  # wait for data on its way to these sequences and to cells it may take
            table.join_arrivals(np.concatenate([table.rows[group.seq].cells for group in groups]))
        cells = None if read_only else place(table, groups, count)
        fixed = None
        if self._active.fixed_context:
            fixed = FixedPass.of(self._fixed, self._active, table, groups, count)
        plan = ReadPlan(self.snapshots.storage, groups, count, lower, fixed)
        if together is not None:
            plan.upload_with(together)
        if before is None or before.reserve:
            plan.expected = self._reads
        else:
            plan.expected = before.reading.reads()
        if read_only:
            forward = ForwardPass(plan, None, stamp=0 if before is None else before.stamp)
        else:
            forward = ForwardPass(plan, cells)
            if before is not None:
                plan.follow(before.reading)
        if fixed is not None:
            forward.load()
            if together is None:
                forward.fill(ctx)
        return forward

    def set_causal(self, ctx: ml.Context, except_: Iterable[int] = ()) -> None:
        """Let the tokens at the batch indices ``except_`` also see the tokens after them.

        For the tokens of an image, which all see one another. Applies until the next ``start_forward`` or
        ``set_causal``. A window or chunk still limits how far back they see.
        """
        forward = self._started("set_causal")
        indices = frozenset(whole_numbers("set_causal", "except_", except_))
        if any(index >= forward.tokens for index in indices):
            raise InvalidRangeError(
                f"set_causal: except_={sorted(indices)}; the indices must be in 0 to {forward.tokens - 1}"
            )
        before = forward.reading.lifted
        forward.lift(indices)
        try:
            forward.fill(ctx)
        except BaseException:
            forward.lift(before)
            raise

    # Its layers.

    def put(
        self,
        ctx: ml.Context,
        key: ml.Tensor,
        value: ml.Tensor | None = None,
        *,
        v_dim: int | None = None,
        extra: Mapping[str, ml.Tensor] | None = None,
    ) -> None:
        """Store K (tokens, kv_heads, head_dim) and V (tokens, kv_heads, v_dim) of the current layer.

        Rows are in the order of the batch and are converted to the cache's dtype. Without ``value``, the
        first ``v_dim`` numbers of each key are the value (None: all of them). Each tensor of ``extra``
        (tokens, ...) is stored in its own dtype, even if K and V are quantized. The first ``put`` fixes the
        layer's shapes and allocates.

        A second ``put`` before the layer is read replaces the first. Raises InvalidRangeError for other
        shapes, OrderError in a read-only pass, in a pass of another thread, and for a layer that has already
        been put and read in this pass.
        """
        forward = self._pass
        if forward is None or forward.thread != get_ident():
            forward = self._started("put")
        buffers = self._buffers.get(self._layer)
        if (
            buffers is not None
            and value is not None
            and v_dim is None
            and not extra
            and buffers.stamp <= forward.storable
            and (store := buffers.store) is not None
            and (
                store.write(ctx, forward.run, forward.tokens, key, value)
                if forward.run >= 0
                else forward.scattered_for is ctx
                and (rows := buffers.row_store) is not None
                and rows.write_rows(ctx, forward.scattered, key, value)
            )
        ):
            if buffers.absent is None:
                buffers.stamp = forward.stamp
            else:
                forward.note_put(buffers)
            return
        if forward.cells is None and forward.read_only:
            raise OrderError("put: this pass is read-only; call start_forward without read_only to store")
        put_layer(ctx, forward, self.snapshots.storage, self._layer, key, value, v_dim, extra)

    def put_stored(
        self, ctx: ml.Context, parts: Sequence[ml.Tensor], activations: ml.DType, v_dim: int | None = None
    ) -> None:
        """Like ``put``, for encoded data: the parts of K and then those of V, (tokens, kv_heads, width) each.

        With ``v_dim`` there are no parts of V. Raises InvalidRangeError for parts that the formats do not
        produce from ``activations``, or that the layer does not store.
        """
        forward = self._started("put_stored")
        if forward.reserve or (forward.cells is None and forward.read_only):
            raise OrderError("put_stored: this pass stores nothing")
        put_stored_layer(ctx, forward, self.snapshots.storage, self._layer, parts, activations, v_dim)

    def get(self, ctx: ml.Context) -> tuple[ml.Tensor, ml.Tensor, Mask]:
        """K (history, kv_heads, head_dim), V likewise, and the mask (tokens, history) of this layer.

        V is (kv_heads, head_dim, history) if the configuration has ``permuted_v``. The tensors are views of
        the cache if the cells lie close together, else gathered copies.

        Raises OrderError for a layer that was not put in this pass: to read a layer that shares the K and V
        of another, call ``set_layer`` with that other layer.
        """
        forward = self._pass
        if forward is None or forward.thread != get_ident():
            forward = self._started("get")
        buffers = self._buffers.get(self._layer)
        if buffers is None or buffers.stamp < forward.stamp or buffers.absent is not None:
            buffers = forward.readable("get", self._layer)
        plan = forward.reading
        if plan.ready_for is ctx:
            history, mask = plan.ready
        else:
            check_context("get", ctx, self._bound("get"))
            if forward.reserve:
                key, value = buffers.read_as_configured(ctx, 0, self._table.cells)
                return key, value, forward.reserved_mask(ctx)
            history, mask = self._shared(ctx, forward)
        if buffers.stamp:  # as note_read
            buffers.stamp |= 1
        if history.index is None and (store := buffers.store) is not None:
            views = store.read(ctx, history.start, history.length)
            if views is not None:
                return views[0], views[1], mask
        place = ctx.layer(self._layer)
        return (*buffers.read_as_configured(place, history.cells(place), history.length), mask)

    def _shared(self, ctx: ml.Context, forward: ForwardPass) -> tuple[History, Mask]:
        """What ``get`` reads, while no other thread changes rows."""
        if not self._calls.acquire(False):
            raise busy("get")
        try:
            forward.fill(ctx)
            return forward.reading.shared(ctx)
        finally:
            self._calls.release()

    def get_extra(self, ctx: ml.Context, name: str) -> ml.Tensor:
        """An extra of this layer, (history, ...), in the row order of ``get``. Raises OrderError as ``get``
        does.

        It is a view of the cache if the cells lie close together, else a gathered copy.
        """
        forward = self._started("get_extra")
        check_context("get_extra", ctx, self._bound("get_extra"))
        return forward.read_extra(ctx, self._layer, name)

    def attend(
        self,
        ctx: ml.Context,
        query: ml.Tensor,
        scale: float,
        sinks: ml.Tensor | None = None,
        *,
        select: ml.Tensor | None = None,
    ) -> ml.Tensor:
        """Attention of query (tokens, heads, head_dim) -> (tokens, heads, v_dim).

        Each sequence reads only its own cells, so that the cost grows with the number of sequences and not
        with its square. Queries of another dtype than that of a plain cache are cast to it, and the result
        back. Raises OrderError as ``get`` does.

        ``select``, I32 (tokens, k), lists for each query the rows of ``get`` and ``get_extra`` to attend to,
        as a top-k indexer returns them (DeepSeek-AI, "DeepSeek-V3.2", 2025). A row that is listed twice
        counts twice. Negative numbers, and rows that the query does not see, are ignored; the output of a
        query with no row left is unspecified.
        """
        if not self._calls.acquire(False):  # rows must not change while they are read
            raise busy("attend")
        try:
            forward = self._pass
            if forward is None or forward.thread != get_ident():
                forward = self._started("attend")
            buffers = self._buffers.get(self._layer)
            if buffers is None or buffers.stamp < forward.stamp or buffers.absent is not None:
                buffers = forward.readable("attend", self._layer)
            plan = forward.reading
            if plan.bound_to is ctx and select is None and sinks is None and type(scale) is float:
                result = plan.bound(buffers, query, scale)
                if result is not None:
                    if buffers.stamp:  # as note_read
                        buffers.stamp |= 1
                    return result
            scale = check_query(ctx, self._backend, query, forward.tokens, buffers.shape.key, scale, sinks)
            if select is not None:
                check_select(forward.tokens, select)
            if forward.reserve:
                key, value = buffers.read(ctx, 0, self._table.cells)
                return nn.attention(ctx, query, key, value, forward.reserved_mask(ctx), scale, sinks)
            here = ctx.layer(self._layer)
            forward.fill(here)
            result = attend(here, plan, self._kernels, buffers, query, scale, sinks, select)
            buffers.note_read()
            # A cast to its own dtype moves a tensor to the device of ``ctx``.
            return result if here is ctx else result.cast(ctx, result.dtype)
        finally:
            self._calls.release()

    def graph_rows(self, ctx: ml.Context, layer: int) -> GraphRows:
        """The tensors of one layer for a captured or compiled graph of this pass; see ``fixed_shapes``.

        They alias the cache, and are the same tensors in every pass with the same number of tokens, rows and
        cells: capture one graph for each of these, then call ``start_forward`` before each replay. This call
        counts as the layer's ``put`` in this pass: if ``get``, ``attend`` or a read-only pass follows a
        replay, call it in the pass of the replay too. Raises NotSupportedError without ``fixed_context`` or
        plain storage, OrderError before the first ``put`` of the layer (in a reserve pass, for example),
        outside a pass, or in a read-only pass.
        """
        return self._started("graph_rows").graph_rows(ctx, layer)

    def layer_cells(self, layer: int) -> LayerCells | None:
        """K and V of a layer at all cells, for a runtime that writes there itself; see ``LayerCells``.

        None before the layer's first ``put``, and unless it stores K and V alone, in plain numbers.
        """
        buffers = self.storage.buffers.get(layer)
        if buffers is None or buffers.is_quantized or buffers.shape.is_latent or buffers.extra:
            return None
        return LayerCells(self, layer, buffers)

    def pass_reads(self) -> PassReads:
        """What the queries of the current pass see. Raises OrderError outside a pass."""
        return PassReads(self, self._pass or self._started("pass_reads"))

    # Sequences.

    def offset(self, seq: int) -> int:
        """The position of a sequence's next token: one past the last stored position, 0 if it is empty."""
        self._check_sequence("offset", seq)
        return self._table.rows[seq].last + 1

    def computed(self, seq: int) -> int:
        """How many tokens of a sequence, from position 0 on, are stored in every layer: normally
        ``offset(seq)``.

        Fewer if a pass put only some of the layers, for example because it failed: the tokens of the current
        pass count once the last layer has been put. Fewer if positions are missing, except before a window.
        """
        end = self.offset(seq)
        row, forward = self._table.rows[seq], self._pass
        if not end or not self._buffers:
            return 0
        if len(row) < end:
            end = first_missing(row.positions, self._window())
        if forward is not None and not forward.whole:
            end = min([end, *(group.lowest for group in forward.groups if group.seq == seq)])
        for _, lacking in self.snapshots.storage.missing(row.cells):
            end = min(end, int(row.positions[lacking][0]))
        return end

    def can_resume(self, seq: int, position: int) -> bool:
        """Whether everything that a token at ``position`` would attend to is still stored: always, without a
        window.

        Tokens removed by ``evict`` are not considered missing; see ``resume_point``.
        """
        self._check_sequence("can_resume", seq)
        position = check_whole("can_resume", "position", position)
        return not self._table.rows[seq].lost

    def resume_point(self, seq: int, position: int) -> int:
        """The last position up to ``position`` from which the sequence can continue exactly; 0: none.

        It directly follows a stored token, so that it becomes the ``offset`` of a sequence that is cut there.
        """
        self.offset(seq)  # refuses an unknown sequence
        position = check_whole("resume_point", "position", position)
        row = self._table.rows[seq]
        below = row.index(position)
        reached = int(row.positions[below - 1]) + 1 if below else 0
        return reached if reached > 0 and self.can_resume(seq, reached) else 0

    @one_thread
    def evict(self, seq: int, positions: Iterable[int]) -> None:
        """Evict individual tokens of a sequence from all layers; no other token moves, and no key is
        re-encoded.

        The remaining tokens keep their positions, with gaps between them, and the position of the next token
        does not change. Positions that are not stored are ignored. A token that another sequence or a
        snapshot also holds is evicted from this sequence only. A window that has lost one of its tokens
        continues, but cannot be resumed or snapshotted until it has moved past the gap. KV-cache compression
        works this way: H2O (Zhang et al., 2023), SnapKV (Li et al., 2024), kvpress.

        Raises InvalidRangeError for the sequence's last position, one after it (use ``remove`` there) or one
        below 0, SequenceLostError for a lost sequence.
        """
        self.prepare_evict(seq, positions)()

    @one_thread
    def defrag(self, sequences: Sequence[int] | None = None, room: int = 64) -> bool:
        """Move every sequence into one contiguous run of cells, with room to grow. Views become invalid.

        With ``sequences``, only what keeps these from being evenly spaced runs, each with at least ``room``
        free cells behind it: then a ``DenseBatch`` of them is a view, and stays one for ``room`` more tokens
        each. If cells are missing, snapshots are dropped or copied out for them, as in ``start_forward``;
        those in the way are moved. Returns False, and moves nothing, if two of the sequences share cells, if
        there is not enough room, or if a token of another sequence would have to move.

        Raises InvalidSequenceError, InvalidRangeError for no sequences, or one that is given twice,
        SequenceLostError for a lost one.
        """
        self._bound("defrag")
        if sequences is not None:
            room = check_whole("defrag", "room", room)
            distinct = whole_numbers("defrag", "sequence", sequences)
            if len(distinct) < max(1, len(sequences)):
                raise InvalidRangeError(f"defrag: sequences={sequences}; they must be one or more, each once")
            for seq in distinct:
                self._check_sequence("defrag", seq)
                if self._table.rows[seq].lost:
                    raise lost_error("defrag", seq)
        self._changed()
        return self.editor.defrag(sequences, room)

    def prepare_copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> Callable[[], None]:
        self._check_copy(src_seq, dst_seq, length)
        return self._ending_pass(self.editor.prepare_copy_prefix(src_seq, dst_seq, length))

    def prepare_remove(self, seq: int, begin: int, end: int | None = None) -> Callable[[], None]:
        self._check_remove(seq, begin, end)
        return self._ending_pass(self.editor.prepare_remove(seq, begin, end))

    def prepare_evict(self, seq: int, positions: Iterable[int]) -> Callable[[], None]:
        self._check_sequence("evict", seq)
        return self._ending_pass(self.editor.prepare_evict(seq, positions))

    def _ending_pass(self, change: Callable[[], None]) -> Callable[[], None]:
        def commit() -> None:
            self._changed()
            change()

        return commit

    def mark_lost(self, seq: int) -> None:
        """Mark a sequence as lost: using it raises SequenceLostError until it is removed."""
        self.editor.mark_lost(seq)

    # Snapshots.

    @one_thread
    def snapshot(self, seq: int, begin: int = 0, end: int | None = None) -> AttentionSnapshot:
        """A snapshot of positions ``[begin, end)`` (None: to the end). Nothing is copied yet.

        A window is always taken whole, whatever ``begin`` is. Raises InvalidRangeError for a range that is
        not within ``[0, offset(seq)]``, NotSupportedError if the window before ``end`` or the token before
        ``end`` is no longer stored.
        """
        self.offset(seq)  # refuses an unknown sequence
        return self.snapshots.snapshot(seq, begin, end)

    def prepare_restore_snapshot(
        self, seq: int, snapshot: AttentionSnapshot, target: int | None = None
    ) -> Callable[[], None] | None:
        self._check_restore(seq, snapshot, AttentionSnapshot)
        with self._ended():
            put_back = self.snapshots.prepare_restore_snapshot(seq, snapshot, target)
        if put_back is None:
            return None

        def commit() -> None:
            with self._ended():
                put_back()
                self._forget_pass()

        return commit

    @contextlib.contextmanager
    def _ended(self) -> Iterator[None]:
        """Record what the current pass has not put, before its cells are reused; the pass may continue."""
        if self._pass is not None:
            self._pass.end()
        try:
            yield
        finally:
            if self._pass is not None:
                self._pass.resume()

    @property
    def on_pressure(self) -> Callable[[int], bool | None] | None:
        """Called with the number of missing cells before snapshots are copied out of the cache.

        It may drop or detach snapshots, and returns whether it did; it is called again while cells are
        missing.
        """
        return self.snapshots.on_pressure

    @on_pressure.setter
    def on_pressure(self, call: Callable[[int], bool | None] | None) -> None:
        self.snapshots.on_pressure = call

    @one_thread
    def land(self, seq: int, incoming: IncomingSnapshot) -> CellReservation | None:
        """Reserve free cells after the sequence's last token, for a snapshot whose content arrives later.

        The content lies in the cache once it has arrived, and ``restore`` shares it. The current pass ends.
        Returns None, without a change, if the free cells are not contiguous, if the host cannot write to
        them, or if the snapshot does not start where the sequence ends.
        """
        self._check_sequence("land", seq)
        reservation = self.snapshots.land(seq, incoming)
        if reservation is not None:
            self._changed()
        return reservation

    # Inspection.

    @property
    def cells(self) -> int:
        """How many cells the cache has."""
        self._bound("cells")
        return self._table.cells

    @property
    def free_cells(self) -> int:
        """The number of cells that no sequence holds; snapshots in them are moved out when the room is
        needed.
        """
        self._bound("free_cells")
        return self._table.unowned

    def held(self) -> dict[int, int]:
        """How many cells each sequence holds; shared ones count for each."""
        self._bound("held")
        return self._table.held()

    def positions(self, seq: int) -> np.ndarray:
        """The stored positions of a sequence, ascending (a copy)."""
        self._check_sequence("positions", seq)
        return self._table.rows[seq].positions.copy()

    def visible(self, seq: int) -> int:
        """How many stored tokens the next token of a sequence attends to."""
        self._check_sequence("visible", seq)
        row, lower = self._table.rows[seq], self.lower_bound()
        if lower is None:
            return len(row)
        hidden = row.index(int(lower(np.array([row.last + 1]))[0])) - kept_entries(row, lower)
        return len(row) - max(0, hidden)

    def step_reads(self) -> StepReads | None:
        """What a step that decodes a token of each sequence would read; None while nothing is stored."""
        table, buffers = self.storage.table, next(iter(self._buffers.values()), None)
        if buffers is None or not any(table.occupied()):
            return None
        most = KERNEL_WORTH if nn.offers(self.backend, ml.SupportsRaggedAttention) else NEVER
        least = worth(self.config, buffers.bytes_per_cell, most)
        return step_reads(table, self.config, self.lower_bound(), least)

    @property
    def storage(self) -> CellStorage:
        """The cell table and the buffers of the layers that have been put."""
        self._bound("storage")
        return self.snapshots.storage

    @property
    def nbytes(self) -> int:
        """Bytes of all allocated buffers."""
        return sum(buffers.nbytes for buffers in [*self._buffers.values()])  # at once: threads may ask

    @property
    def capacity_nbytes(self) -> int:
        """The bytes that ``max_sequences * capacity`` tokens take without a window."""
        return self.nbytes * self._max_sequences * self._capacity // self.cells

    def _told(self) -> list[str]:
        table = self._table
        alone = table.unowned - table.free
        used = f"cells: {table.cells - table.free} of {table.cells}"
        used += f" ({alone} held by snapshots alone)" if alone else ""
        return [used, f"{bytes_text(self.nbytes)} of K and V"]

    # Ending and undoing a pass.

    def _changed(self) -> None:
        """Sequences are about to change: the current pass ends and can no longer be undone."""
        if self._pass is not None:
            self._pass.end()
        self._forget_pass()

    def _forget_pass(self) -> None:
        if self._pass is not None and not self._pass.reserve:
            self._reads = self._pass.reading.reads()
        self._pass = None
        self._undo = None

    def foreign_pass(self) -> bool | None:
        forward = self._pass
        if not is_foreign(forward) or forward is None or forward.finished:
            return False
        return True if self._buffers else None

    def pass_under_way(self) -> ForwardPass | None:
        """The pass that the last ``start_forward`` began, for ``undo_forward``; None if it has ended."""
        return self._pass

    def undo_forward(self, resume: object = None) -> None:
        """Undo the last ``start_forward``, including evictions, as if it had not been called.

        For caches that start a pass together: if one refuses, the others undo theirs. Works only directly
        after ``start_forward``; after any other call on sequences there is nothing left to undo. The pass
        ends, or the cache continues with ``resume``, which ``pass_under_way`` returned before that start.
        """
        self._bound("undo_forward")
        if self._pass is not None:
            check_thread("undo_forward", self._pass.thread)
        if self._pass is not None and self._undo is not None and not self._undo.evicts:
            self._pass.end()  # record in its snapshots what was never put
        saved = self._take_back()
        for seq in saved:
            self.snapshots.schedule.undone(seq, self._table.rows[seq].last + 1)
        self._pass = resume if isinstance(resume, ForwardPass) else None
        self._table.placed = None
        self._resume()

    def _take_back(self) -> Iterable[int]:
        """Undo the changes that the last pass made when it began; returns the affected sequences."""
        undo, self._undo = self._undo, None
        if undo is None:
            return ()
        undo.restore()
        return undo.rows

    def _resume(self) -> None:
        """Continue a pass that was ended: snapshots of its tokens are taken again, with what follows."""
        forward = self._pass
        if forward is None:
            return
        forward.resume()
        for group in forward.groups if forward.cells is not None else ():
            self.snapshots.schedule.again(group.seq, group.lowest)
            self.snapshots.capture(group.seq)

    def upload_with(self, uploads: Uploads | None) -> None:
        """Upload the host data of the next pass together with that of other caches' passes.

        For caches that start a pass together. Tensors of fixed shapes are then filled by ``upload_fixed``.
        """
        self._uploads = uploads

    def upload_fixed(self, ctx: ml.Context) -> None:
        """Fill the tensors of fixed shapes; call it after ``upload_with`` and ``start_forward``."""
        self._started("upload_fixed").fill(ctx)

    # Closing.

    @one_call
    def close(self) -> None:
        """Release all tensors and metadata. ``init`` can bind the cache again.

        Snapshots whose data still lies in the cache are copied out first.
        """
        self._changed()
        self.snapshots.close()
        self._buffers = {}  # a new table: a snapshot may still refer to the old one
        self._fixed = {}
        self._backend = None
        self._layer = 0
        self._closed = True
