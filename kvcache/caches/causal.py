"""The causal cache, the base of windows and chunks (windows.py).

A query at position p of sequence s attends to the stored tokens of
s with position <= p; a window w adds position >= p - w, a chunk c adds position >= p - p % c::

    position       0 1 2 3 4 5 6 7        what the query at 6 sees
    causal         x x x x x x x .
    window 2       . . . . x x x .        itself and the 2 before it
    chunk 4        . . . . x x x .        from the start of its chunk of 4

The cache puts together its ``storage`` (a cell table and the buffers of each layer), the forward pass
(kvcache.attention), ``editor`` (what is done to sequences between passes) and ``snapshots``. The class reads
from top to bottom: it is set up, a pass finds cells for its tokens, layers put and attend, sequences are
shared, shortened and snapshotted between passes. What takes a pass back, for caches that start together,
comes last. Checks that all caches make are in base.py, those of threads in one_thread.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import get_ident

import numpy as np

import ml
from kvcache.attention.attend import Kernels, attend, check_select
from kvcache.attention.batch import SequenceTokens, check_modes, check_query, split_batch
from kvcache.attention.fixed_shapes import FixedPass, GraphRows
from kvcache.attention.forward_pass import ForwardPass, place, put_layer, put_stored_layer
from kvcache.attention.history import History, LowerBound, kept_entries
from kvcache.attention.plan import ReadPlan, Reads, Uploads
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
from kvcache.caches.sequences import SequenceEditor, check_groups
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
    """

    def __init__(
        self, shift: ShiftFunction | None = None, *, shift_extra: ExtraShiftFunction | None = None
    ) -> None:
        super().__init__()
        self.snapshots: AttentionSnapshots = AttentionSnapshots()
        """Takes and restores what sequences hold."""
        self.editor = SequenceEditor(self.snapshots, shift, shift_extra)
        """Shares, removes and moves what sequences hold."""
        self._buffers: dict[int, LayerBuffers] = {}
        self._fixed: dict[tuple[int, ...], FixedPass] = {}
        self._reads: Reads | None = None
        self._uploads: Uploads | None = None
        self._undo: UndoLog | None = None

    # Setting up.

    def init(
        self, backend: ml.Backend, dtype: CacheDType, max_sequences: int, capacity: int, max_batch: int
    ) -> None:
        """Bind to ``backend``: ``max_sequences`` of up to ``capacity`` tokens each, stored as ``dtype`` says.

        Nothing is allocated before the first ``put``. ``max_batch`` is the largest batch expected, and how
        many tokens are re-encoded at a time where some move (32 at least).
        """
        sizes = {"max_sequences": max_sequences, "capacity": capacity, "max_batch": max_batch}
        self._dtype = self._check_init(backend, dtype, **sizes)
        self._check_stored(backend, self._dtype)
        self._max_sequences, self._capacity, self._max_batch = max_sequences, capacity, max_batch
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
        self._table, self._buffers = storage.table, storage.buffers  # at hand for each put and get
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
        """The lowest position that queries see, by their own position; None: from 0."""
        return None

    def _window(self) -> Window | None:
        """The window that bounds what is stored of a sequence; None: all is."""
        return None

    def _evictions(self, groups: Iterable[SequenceTokens]) -> list[tuple[int, int, int]]:
        """(sequence, begin, end): positions ``[begin, end)``, which go before the batch is placed."""
        return []

    def _go_on_to(self, forward: ForwardPass) -> None:
        if forward.cells is None and self._pass is not None:  # else it has ended, for room
            self._pass.end()
        self._pass = forward
        forward.begin()

    def _full(self, tokens: int) -> CacheFullError:
        return CacheFullError(tokens, self._table.unowned, self._table.held())

    # One pass.

    @one_call
    def start_forward(
        self, ctx: ml.Context, batch: Batch, reserve: bool = False, *, read_only: bool = False
    ) -> None:
        """Find a cell for every token of ``batch``; the previous pass ends, whichever thread began it.

        The pass is this thread's: a call in it from another one raises OrderError.

        With ``reserve`` nothing is stored: ``get`` spans the whole capacity. With ``read_only`` the batch is
        queries: each sees of what is stored what a token at its position would see, no cell is taken,
        nothing is evicted, and ``put`` raises OrderError. Snapshots that are scheduled stay due, and
        ``undo_forward`` only ends the pass.

        Raises InvalidBatchError for a batch that cannot be stored (``read_only``: for a query that would see
        nothing), CacheFullError for one that does not fit, SequenceLostError for a sequence that a device
        failure took. All of them leave the cache, evictions included, as it was.
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
        check_groups(self._table, groups, lower, read_only)
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
        """End the pass and evict what windows no longer see; ``tokens`` cells are free then. Or neither."""
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
        """The next pass, whose tokens have their cells: there is room."""
        table, before = self._table, self._pass
        if table.arrivals:  # it comes after what is on its way to its sequences, and into cells it may take
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
        """Let the batch's tokens at the indices ``except_`` also see the tokens after them.

        For tokens of an image, which see one another. Holds until the next ``start_forward`` or
        ``set_causal``; a window or chunk still bounds what lies before.
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

        In the order of the batch, converted to the cache's dtype. Without ``value`` the first ``v_dim``
        numbers of the keys are the values (None: all). ``extra`` (tokens, ...) are stored in their own
        dtypes, also where K and V are quantized. The first ``put`` fixes the layer's shapes and allocates.

        Another ``put`` before the layer is read replaces it. Raises InvalidRangeError for other shapes,
        OrderError in a pass that only reads, in another thread's, and for a layer that was put in this pass
        and read behind that.
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
                else forward.slots_for is ctx
                and (rows := buffers.row_store) is not None
                and rows.write_rows(ctx, forward.slots, key, value)
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
        """As ``put``, of K's parts and then V's, (tokens, kv_heads, width) each, as the formats make them.

        With ``v_dim`` there are no parts of V. Raises InvalidRangeError for what the formats do not make of
        ``activations``, or the layer does not store.
        """
        forward = self._started("put_stored")
        if forward.reserve or (forward.cells is None and forward.read_only):
            raise OrderError("put_stored: this pass stores nothing")
        put_stored_layer(ctx, forward, self.snapshots.storage, self._layer, parts, activations, v_dim)

    def get(self, ctx: ml.Context) -> tuple[ml.Tensor, ml.Tensor, Mask]:
        """K (history, kv_heads, head_dim), V likewise, and the mask (tokens, history) of this layer.

        V is (kv_heads, head_dim, history) when the config says ``permuted_v``. Views of the cache
        where the cells lie close together, else gathered copies.

        OrderError for a layer that was not put in this pass: a layer that shares another's K and V is read
        by ``set_layer`` of that one.
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
        """What ``get`` reads, from rows that no other thread is changing."""
        if not self._calls.acquire(False):
            raise busy("get")
        try:
            forward.fill(ctx)
            return forward.reading.shared(ctx)
        finally:
            self._calls.release()

    def get_extra(self, ctx: ml.Context, name: str) -> ml.Tensor:
        """An extra of this layer, (history, ...), in the order of the rows of ``get``; OrderError as there.

        A view of the cache where the cells lie close together, else a gathered copy.
        """
        forward = self._started("get_extra")
        check_context("get_extra", ctx, self._bound("get_extra"))
        return forward.read_extra(ctx, self._layer, name)

    @one_call  # what is read would change meanwhile
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

        Each sequence reads its own cells, so that n sequences cost n and not n * n. OrderError as ``get``.

        ``select``, I32 (tokens, k), are rows of ``get`` and ``get_extra``, as a top-k indexer gives them
        (DeepSeek-AI, "DeepSeek-V3.2", 2025): a query attends to those of its rows that it sees, as often as
        each is named. Negative numbers, and rows that it does not see, are left out; a query with none left
        gives an unspecified row.
        """
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

    def graph_rows(self, ctx: ml.Context, layer: int) -> GraphRows:
        """The tensors for a captured or compiled graph of this pass, for one layer; see ``fixed_shapes``.

        Aliases of the cache, the same ones in every pass of as many tokens, rows and cells: capture once for
        each, then call ``start_forward`` before each replay. Asking for them stands for the layer's ``put``
        in this pass: where ``get``, ``attend`` or a pass that only reads follows a replay, ask in its pass
        again. Raises NotSupportedError without ``fixed_context`` or plain storage, OrderError before the
        first ``put`` of the layer (a reserve pass will do), outside a pass, or in one that only reads.
        """
        return self._started("graph_rows").graph_rows(ctx, layer)

    # Sequences.

    def offset(self, seq: int) -> int:
        """One past the last stored position of a sequence: where its next token belongs; 0 if empty."""
        self._check_sequence("offset", seq)
        return self._table.rows[seq].last + 1

    def computed(self, seq: int) -> int:
        """How many tokens of a sequence, from position 0 on, every layer stores: ``offset(seq)`` as a rule.

        Less where a pass put only some layers, as one that failed: the tokens of the pass under way count
        when the last layer was put. Less where positions are missing, other than before a window.
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
        """Whether all that a token at ``position`` attends to is still stored: always, without a window.

        Tokens that were evicted by name (``evict``) are not asked for; see ``resume_point``.
        """
        self._check_sequence("can_resume", seq)
        check_whole("can_resume", "position", position)
        return not self._table.rows[seq].lost

    def resume_point(self, seq: int, position: int) -> int:
        """The last position up to ``position`` from which the sequence can continue exactly; 0: none.

        It lies right behind a token that is stored, so that the sequence cut there has it as its ``offset``.
        """
        self.offset(seq)  # refuses an unknown sequence
        check_whole("resume_point", "position", position)
        row = self._table.rows[seq]
        below = row.index(position)
        reached = int(row.positions[below - 1]) + 1 if below else 0
        return reached if reached > 0 and self.can_resume(seq, reached) else 0

    @one_thread
    def evict(self, seq: int, positions: Iterable[int]) -> None:
        """Evict some tokens of a sequence in all layers; no other token moves, no key is re-encoded.

        Those that stay keep their positions, with gaps between them, and the next token belongs where it
        would have. Positions that are not stored are passed over. Where another sequence or a snapshot
        holds a token too, only this sequence lets go of it. A window that lost a token at its beginning goes
        on, and cannot be resumed or snapshotted until it has slid past it. As KV-cache compression does:
        H2O (Zhang et al., 2023), SnapKV (Li et al., 2024), kvpress.

        Raises InvalidRangeError for the sequence's last position, or one after it (``remove`` takes the end
        off), or below 0, SequenceLostError for a lost sequence.
        """
        self.prepare_evict(seq, positions)()

    @one_thread
    def defrag(self) -> None:
        """Make every sequence one contiguous run of cells, with room to grow. Views become invalid."""
        self._bound("defrag")
        self._ending_pass(self.editor.defrag)()

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

        A window is taken whole, whatever ``begin``. Raises InvalidRangeError for a range that is not
        within ``[0, offset(seq)]``, NotSupportedError where a window no longer reaches back from ``end``, or
        the token before ``end`` is not stored.
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
        """What the pass under way has not put is noted, before its cells go to others; it may go on after."""
        if self._pass is not None:
            self._pass.end()
        try:
            yield
        finally:
            if self._pass is not None:
                self._pass.resume()

    @property
    def on_pressure(self) -> Callable[[int], bool | None] | None:
        """Called with the number of cells that are missing, before lazy snapshots are copied out.

        It may drop or detach some, and says whether it did; it is asked again while cells are missing.
        """
        return self.snapshots.on_pressure

    @on_pressure.setter
    def on_pressure(self, call: Callable[[int], bool | None] | None) -> None:
        self.snapshots.on_pressure = call

    @one_thread
    def land(self, seq: int, incoming: IncomingSnapshot) -> CellReservation | None:
        """Hold free cells behind what the sequence has, for a snapshot whose content is still to come.

        What comes of it lies in the cache, and ``restore`` shares it; the pass under way ends. None, and
        nothing touched, where the cells free do not lie in a run, the host cannot write there, or it does not
        follow the sequence.
        """
        self._check_sequence("land", seq)
        reservation = self.snapshots.land(seq, incoming)
        if reservation is not None:
            self._changed()
        return reservation

    # Looking in.

    @property
    def cells(self) -> int:
        """How many cells the cache has."""
        self._bound("cells")
        return self._table.cells

    @property
    def free_cells(self) -> int:
        """Cells that no sequence holds; snapshots in some of them are moved when the room is needed."""
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
        """How many of its stored tokens the next token of a sequence attends to."""
        self._check_sequence("visible", seq)
        row, lower = self._table.rows[seq], self.lower_bound()
        if lower is None:
            return len(row)
        hidden = row.index(int(lower(np.array([row.last + 1]))[0])) - kept_entries(row, lower)
        return len(row) - max(0, hidden)

    @property
    def storage(self) -> CellStorage:
        """The cell table, and the buffers of the layers that were put."""
        self._bound("storage")
        return self.snapshots.storage

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers that are allocated."""
        return sum(buffers.nbytes for buffers in self._buffers.values())

    def _told(self) -> list[str]:
        table = self._table
        alone = table.unowned - table.free
        used = f"cells: {table.cells - table.free} of {table.cells}"
        used += f" ({alone} held by snapshots alone)" if alone else ""
        return [used, f"{bytes_text(self.nbytes)} of K and V"]

    # A pass ends, or is taken back.

    def _changed(self) -> None:
        """Sequences change: the pass under way ends, and cannot be undone any more."""
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
        if forward is None or forward.finished or not is_foreign(forward):
            return False
        return True if self._buffers else None

    def pass_under_way(self) -> ForwardPass | None:
        """The pass that the last ``start_forward`` began, for ``undo_forward``; None where it is over."""
        return self._pass

    def undo_forward(self, resume: object = None) -> None:
        """Undo the last ``start_forward``, including evictions, as if it had not been called.

        For caches that start together: where one refuses, the others go back. Only right after
        ``start_forward``; once another sequence operation has followed there is nothing to undo.
        The pass ends, or goes on with ``resume``: what ``pass_under_way`` gave before that start.
        """
        self._bound("undo_forward")
        if self._pass is not None:
            check_thread("undo_forward", self._pass.thread)
        if self._pass is not None and self._undo is not None and not self._undo.evicts:
            self._pass.end()  # snapshots of it are said to lack what was never put
        saved = self._take_back()
        for seq in saved:
            self.snapshots.schedule.undone(seq, self._table.rows[seq].last + 1)
        self._pass = resume if isinstance(resume, ForwardPass) else None
        self._table.placed = None
        self._resume()

    def _take_back(self) -> Iterable[int]:
        """Undo what the last pass changed when it began; the sequences that this was about."""
        undo, self._undo = self._undo, None
        if undo is None:
            return ()
        undo.restore()
        return undo.rows

    def _resume(self) -> None:
        """The pass goes on after it was ended: snapshots of its tokens are taken anew, with what follows."""
        forward = self._pass
        if forward is None:
            return
        forward.resume()
        for group in forward.groups if forward.cells is not None else ():
            self.snapshots.schedule.again(group.seq, group.lowest)
            self.snapshots.capture(group.seq)

    def upload_with(self, uploads: Uploads | None) -> None:
        """Let what the next pass needs of the host go to devices with that of other caches' passes.

        For caches that start together. What has fixed shapes waits for ``upload_fixed`` then.
        """
        self._uploads = uploads

    def upload_fixed(self, ctx: ml.Context) -> None:
        """After ``upload_with`` and ``start_forward``: bring what has fixed shapes to the pass."""
        self._started("upload_fixed").fill(ctx)

    # Closing.

    def close(self) -> None:
        """Drop all tensors and metadata. ``init`` may bind the cache anew.

        Snapshots that are still in the cache are copied out first.
        """
        self._changed()
        self.snapshots.close()
        self._buffers = {}  # a new one: a snapshot may know the old
        self._fixed = {}
        self._backend = None
        self._layer = 0
        self._closed = True
