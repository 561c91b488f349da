"""The causal cache, and what windows and chunks (windows.py) change of it.

A query at position p of sequence s attends to the stored tokens of
s with position <= p; a window w adds position >= p - w, a chunk c adds position >= p - p % c::

    position       0 1 2 3 4 5 6 7        what the query at 6 sees
    causal         x x x x x x x .
    window 2       . . . . x x x .        itself and the 2 before it
    chunk 4        . . . . x x x .        from the start of its chunk of 4

Cell metadata lives in cells.py, the tensors in buffers.py, what a pass reads in reading.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

import ml
from kvcache import attending, moving
from kvcache.batches import Group, check_sequence, group_batch
from kvcache.buffers import LayerBuffers
from kvcache.cache import (
    Batch,
    Cache,
    CacheFullError,
    ClosedError,
    InvalidBatchError,
    InvalidRangeError,
    KVCacheError,
    Mask,
    NotSupportedError,
    OrderError,
    SequenceLostError,
    ShiftFunction,
)
from kvcache.capturing import AttentionSnapshots
from kvcache.cells import CellTable, SavedRow
from kvcache.fixed import FixedPass, GraphTensors
from kvcache.forward import Forward
from kvcache.reading import LowerBound
from kvcache.scheduling import Schedule
from kvcache.snapshots import AttentionSnapshot
from ml import nn

if TYPE_CHECKING:
    from kvcache.views.models import CachePicture

__all__ = ["CausalCache", "drop_middle"]


class CausalCache(AttentionSnapshots):
    """Keeps every token; a query sees all of its own sequence up to itself.

    ``shift`` re-encodes stored keys for new positions; without it, tokens cannot be removed from the
    middle of a sequence.
    """

    def __init__(self, shift: ShiftFunction | None = None) -> None:
        self._shift = shift
        self._config: ml.CacheConfig | None = None
        self._backend: ml.Backend | None = None
        self._closed = False
        self._layer = 0
        self._forward: Forward | None = None
        self._buffers: dict[int, LayerBuffers] = {}
        self._fixed: dict[int, FixedPass] = {}
        self._undo: dict[int, SavedRow] = {}
        self._lazy = []
        self._schedule: Schedule[AttentionSnapshot] = Schedule()

    # Setting up and closing.

    def init(
        self, backend: ml.Backend, dtype: ml.DType, max_sequences: int, capacity: int, max_batch: int
    ) -> None:
        """Bind to ``backend``: ``max_sequences`` of up to ``capacity`` tokens each, stored as ``dtype``.

        Nothing is allocated before the first ``put``. ``max_batch`` is the largest batch expected.
        """
        if self._backend is not None:
            raise OrderError("init: the cache is already bound to a backend; close it first")
        for name, value in (
            ("max_sequences", max_sequences),
            ("capacity", capacity),
            ("max_batch", max_batch),
        ):
            if value < 1:
                raise InvalidRangeError(f"init: {name}={value}; it is >= 1")
        self._dtype = dtype
        self._max_sequences, self._capacity, self._max_batch = max_sequences, capacity, max_batch
        self._backend = backend
        try:
            self._make_table()
        except BaseException:
            self._backend = None
            raise
        self._closed = False

    def set_config(self, config: ml.CacheConfig) -> None:
        """Arrange tensors by ``config`` instead of what the backend asks for.

        Before ``init``, or after it while nothing has been stored; OrderError later.
        """
        self.prepare_set_config(config)()

    def prepare_set_config(self, config: ml.CacheConfig) -> Callable[[], None]:
        """Check all that ``set_config`` may refuse; the callable returned then does it."""
        if self._buffers or self._forward is not None or (self._backend and any(self._table.occupied())):
            raise OrderError("set_config: tokens are stored already; configure before the first batch")

        def commit() -> None:
            self._config = config
            if self._backend is not None:
                self._make_table()

        return commit

    def close(self) -> None:
        """Drop all tensors and metadata. ``init`` may bind the cache anew.

        Snapshots that still lie in the cache are copied out first.
        """
        self._detach_all()
        self._schedule = Schedule()
        self._buffers = {}  # a new one: a snapshot may know the old
        self._fixed = {}
        self._changed()
        self._backend = None
        self._layer = 0
        self._closed = True

    @property
    def config(self) -> ml.CacheConfig:
        """What holds: the one set, else the backend's own, else the defaults."""
        if self._config is not None:
            return self._config
        backend = self._bound("config")
        if isinstance(backend, ml.SupportsCacheConfig):
            return backend.cache_config()
        return ml.CacheConfig()

    def _make_table(self) -> None:
        self._active = self.config
        self._fixed = {}
        padding = self._active.cache_padding
        self._table = CellTable(-(-self._cells() // padding) * padding, self._max_sequences)

    # What windows and chunks change.

    def _cells(self) -> int:
        """How many cells the cache has, before rounding up to ``cache_padding``."""
        return self._max_sequences * self._capacity

    def _lower(self) -> LowerBound | None:
        """The lowest position that queries see, by their own position; None: from 0."""
        return None

    def _evictions(self, groups: Iterable[Group]) -> list[tuple[int, int]]:
        """(sequence, position): what lies below goes before the batch is placed."""
        return []

    def can_resume(self, seq: int, position: int) -> bool:
        """Whether all that a token at ``position`` attends to is still stored: always, without a window."""
        self._bound("can_resume")
        check_sequence("can_resume", seq, self._max_sequences)
        return not self._table.rows[seq].lost

    def resume_point(self, seq: int, position: int) -> int:
        """The last position up to ``position`` from which the sequence can go on exactly; 0: from nothing."""
        reached = min(position, self.offset(seq))
        return reached if reached > 0 and self.can_resume(seq, reached) else 0

    # One pass.

    def start_forward(self, ctx: ml.Context, batch: Batch, reserve: bool = False) -> None:
        """Find a cell for every token of ``batch``; the previous pass ends.

        With ``reserve`` nothing is stored: ``get`` spans the whole capacity.

        Raises InvalidBatchError for a batch that cannot be stored, CacheFullError for one that does
        not fit, SequenceLostError for a sequence that a device failure took. All of them leave the
        cache, evictions included, as it was.
        """
        self._bound("start_forward")
        groups = group_batch(batch, self._max_sequences)
        table = self._table
        if reserve:
            self._changed()
            self._forward = Forward(table, self._active, self._lower(), len(batch), groups, 0, reserve=True)
            return
        for group in groups:
            row = table.rows[group.seq]
            if row.lost:
                raise _lost("start_forward", group.seq)
            if len(row) and row.holds_any(group.positions):
                raise InvalidBatchError(
                    f"start_forward: sequence {group.seq} holds one of positions {group.positions[0]} to "
                    f"{group.positions[-1]} already; remove them first"
                )
        cells = self._place(len(batch), groups)
        kept = None if self._forward is None else self._forward.kept
        forward = Forward(table, self._active, self._lower(), len(batch), groups, cells, kept=kept)
        if self._active.fixed_shapes:
            forward = self._fix(ctx, forward)
        self._forward = forward
        if self._schedule:
            for group in groups:
                self._capture(group.seq)

    def _fix(self, ctx: ml.Context, forward: Forward) -> Forward:
        """The pass on the tensors of its batch size, which are brought to it; else all is as it was."""
        try:
            tokens = forward.tokens
            found = self._fixed.get(tokens)
            if found is None:
                padding = self._active.mask_batch_padding
                rows, dtype = -(-tokens // padding) * padding, self._active.mask_dtype
                found = FixedPass(ctx, tokens, rows, self._table.cells, dtype)
            fixed = replace(forward, fixed=found)
            fixed.fill(ctx)
            self._fixed[tokens] = found
        except BaseException:
            saved, self._undo = self._undo, {}
            self._restore(saved)
            raise
        return fixed

    def graph_tensors(self, ctx: ml.Context, layer: int) -> GraphTensors:
        """What a captured or compiled graph of this pass's batch size works on, for one layer.

        Aliases of the cache, the same ones in every pass of as many tokens: capture once, then call
        ``start_forward`` before each replay. Raises NotSupportedError without ``fixed_shapes``,
        OrderError before the first ``put`` of the layer (a reserve pass will do) or outside a pass.
        """
        forward = self._started("graph_tensors")
        if forward.fixed is None:
            raise NotSupportedError(
                "graph_tensors: this pass has no fixed shapes; set_config with fixed_shapes=True, and start "
                "a pass without reserve"
            )
        if layer not in self._buffers:
            raise OrderError(f"graph_tensors: layer {layer} stores nothing yet; put comes first")
        forward.fill(ctx)
        key, value = self._buffers[layer].read_as_configured(ctx, 0, self._table.cells)
        return GraphTensors(key, value, forward.fixed.slots, forward.fixed.mask)

    def _place(self, tokens: int, groups: list[Group]) -> int | np.ndarray:
        """Evict, then give every token a cell; everything or nothing."""
        table = self._table
        evictions = self._evictions(groups)
        saved = {seq: table.save_row(seq) for seq, _ in evictions}
        for group in groups:
            saved[group.seq] = table.save_row(group.seq)
        for seq, position in evictions:
            table.drop(seq, 0, table.rows[seq].index(position))
        try:
            if tokens > table.free:
                self._reclaim(tokens)
                if tokens > table.free:
                    raise CacheFullError(tokens, table.unowned, table.held())
        except BaseException:
            self._restore(saved)
            raise
        self._undo = saved
        if len(groups) == 1:
            return self._place_one(groups[0])
        cells = np.empty(tokens, dtype=np.int64)
        for group in groups:
            chosen = self._place_group(group)
            cells[group.rows] = chosen if len(group) == 1 else group.spread(chosen)
        first = int(cells[0])
        return first if bool((cells == np.arange(first, first + tokens)).all()) else cells

    def _place_one(self, group: Group) -> int | np.ndarray:
        chosen = self._place_group(group)
        if isinstance(group.rows, slice):
            return chosen
        cells = np.empty(len(group), dtype=np.int64)
        cells[group.rows] = group.spread(chosen)
        return cells

    def _place_group(self, group: Group) -> int | np.ndarray:
        """Cells for a group's ascending positions, taken."""
        table, count = self._table, len(group)
        if count == 1 and (cell := table.append(group.seq, group.lowest)) is not None:
            return cell
        chosen = table.choose(group.seq, count)
        if isinstance(chosen, int):
            if group.is_run() and group.lowest > table.rows[group.seq].last:
                table.take_run(group.seq, group.lowest, chosen, count)
            else:
                table.take(group.seq, group.positions, np.arange(chosen, chosen + count))
        else:
            table.take(group.seq, group.positions, chosen)
        return chosen

    def pass_under_way(self) -> object:
        """The pass that the last ``start_forward`` began, for ``undo_forward``; None where it is over."""
        return self._forward

    def undo_forward(self, resume: object = None) -> None:
        """Take back the last ``start_forward``, evictions included, as if it had not been called.

        For caches that start together: where one refuses, the others go back. Only right after
        ``start_forward``; once another sequence operation has followed there is nothing to undo.
        The pass ends, or goes on with ``resume``: what ``pass_under_way`` gave before that start.
        """
        self._bound("undo_forward")
        saved, self._undo = self._undo, {}
        self._restore(saved)
        for seq in saved:
            self._schedule.cut(seq, self._table.rows[seq].last + 1)
        self._forward = resume if isinstance(resume, Forward) else None

    def _restore(self, saved: dict[int, SavedRow]) -> None:
        for seq, row in saved.items():
            self._table.restore_row(seq, row)

    def set_causal(self, ctx: ml.Context, except_: Iterable[int] = ()) -> None:
        """Let the batch's tokens at the indices ``except_`` see what comes after them too.

        For tokens of an image, which see one another. Holds until the next ``start_forward`` or
        ``set_causal``; a window or chunk still bounds what lies before.
        """
        forward = self._started("set_causal")
        indices = frozenset(int(index) for index in except_)
        if any(not 0 <= index < forward.tokens for index in indices):
            raise InvalidRangeError(
                f"set_causal: except_={sorted(indices)}; indices of the batch are 0 to {forward.tokens - 1}"
            )
        forward.lift(indices)
        forward.fill(ctx)

    def set_layer(self, layer: int) -> None:
        if layer < 0:
            raise InvalidRangeError(f"set_layer: {layer}; layers count from 0")
        self._layer = layer

    def put(self, ctx: ml.Context, key: ml.Tensor, value: ml.Tensor) -> None:
        """Store K (tokens, kv_heads, head_dim) and V (tokens, kv_heads, v_dim) of the current layer.

        In the order of the batch, converted to the cache's dtype. The first one fixes the layer's
        shapes and allocates its buffers. Raises InvalidRangeError for other shapes.
        """
        forward = self._forward or self._started("put")
        buffers = self._buffers.get(self._layer)
        if (
            buffers is not None
            and forward.run >= 0
            and (store := buffers.store) is not None
            and store.write(ctx, forward.run, forward.tokens, key, value)
        ):
            return
        key_shape, value_shape = key.shape, value.shape
        if (
            len(key_shape) != 3
            or len(value_shape) != 3
            or key_shape[0] != forward.tokens
            or key_shape[:2] != value_shape[:2]
        ):
            raise InvalidRangeError(
                f"put: key {key_shape} and value {value_shape} for a batch of {forward.tokens}; "
                "they are (tokens, kv_heads, head_dim) and (tokens, kv_heads, v_dim)"
            )
        fresh = buffers is None
        if buffers is None:
            buffers = self._allocate(ctx, self._layer, key_shape, value_shape, key.dtype)
        buffers.check(self._layer, key_shape, value_shape)
        if forward.reserve and fresh:
            buffers.touch(ctx.layer(self._layer))
        elif not forward.reserve:
            buffers.write(ctx, forward.targets(ctx), key, value)
        self._buffers[self._layer] = buffers  # last: a failed write fixes no shapes

    def _allocate(
        self,
        ctx: ml.Context,
        layer: int,
        key: tuple[int, ...],
        value: tuple[int, ...],
        activations: ml.DType,
    ) -> LayerBuffers:
        place, cells = ctx.layer(layer), self._table.cells
        return LayerBuffers(
            place, self._dtype, self._active, cells, (key[1], key[2]), (value[1], value[2]), activations
        )

    def get(self, ctx: ml.Context) -> tuple[ml.Tensor, ml.Tensor, Mask]:
        """K (history, kv_heads, head_dim), V likewise, and the mask (tokens, history) of this layer.

        V is (kv_heads, head_dim, history) when the config says ``permuted_v``. Views of the cache
        where the cells lie close together, else gathered copies.
        """
        forward = self._forward or self._started("get")
        buffers = self._buffers.get(self._layer) or self._stored("get")
        if forward.reserve:
            return (*buffers.read_as_configured(ctx, 0, self._table.cells), self._reserve_mask(ctx, forward))
        reading, mask = forward.shared(ctx)
        if reading.index is None and (store := buffers.store) is not None:
            found = store.read(ctx, reading.start, reading.length)
            if found is not None:
                return found[0], found[1], mask
        return (*buffers.read_as_configured(ctx, reading.cells(ctx), reading.length), mask)

    def attend(
        self, ctx: ml.Context, query: ml.Tensor, scale: float, sinks: ml.Tensor | None = None
    ) -> ml.Tensor:
        """Attention of query (tokens, heads, head_dim) -> (tokens, heads, v_dim).

        Each sequence reads its own cells, so that n sequences cost n and not n * n.
        """
        forward = self._forward or self._started("attend")
        buffers = self._stored("attend")
        if query.shape[0] != forward.tokens:
            raise InvalidRangeError(f"attend: query {query.shape} for a batch of {forward.tokens} tokens")
        if forward.reserve:
            key, value = buffers.read(ctx, 0, self._table.cells)
            return nn.attention(ctx, query, key, value, self._reserve_mask(ctx, forward), scale, sinks)
        return attending.attend(ctx, forward, buffers, query, scale, sinks)

    def _reserve_mask(self, ctx: ml.Context, forward: Forward) -> ml.Tensor:
        rows = -(-forward.tokens // self._active.mask_batch_padding) * self._active.mask_batch_padding
        return ctx.input().zeros((rows, self._table.cells), self._active.mask_dtype)

    # Sequences.

    def copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> None:
        """Empty ``dst_seq``, then let it share the cells of ``src_seq`` at positions ``[0, length)``."""
        self.prepare_copy_prefix(src_seq, dst_seq, length)()

    def prepare_copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> Callable[[], None]:
        """Check all that ``copy_prefix`` may refuse; the callable returned then does it."""
        self._bound("copy_prefix")
        check_sequence("copy_prefix", src_seq, self._max_sequences)
        check_sequence("copy_prefix", dst_seq, self._max_sequences)
        if src_seq == dst_seq:
            raise InvalidRangeError(f"copy_prefix: sequence {src_seq} to itself; remove(seq, length) cuts it")
        if length < 0:
            raise InvalidRangeError(f"copy_prefix: length {length}; it is >= 0")
        source = self._table.rows[src_seq]
        if source.lost:
            raise _lost("copy_prefix", src_seq)

        def commit() -> None:
            self._changed()
            self._clear(dst_seq)
            self._schedule.replace(dst_seq)
            self._table.share(src_seq, dst_seq, source.index(length))

        return commit

    def remove(self, seq: int, begin: int, end: int | None = None) -> None:
        """Forget positions ``[begin, end)`` of a sequence; None: to its end.

        Tokens at or after ``end`` move down by ``end - begin``, their keys re-encoded by the shift
        function. A shared token only loses this sequence.

        Raises NotSupportedError where something has to move and there is no shift function, the
        token is shared, or (with a window) the sequence could then not resume at its end;
        InvalidRangeError for a range that means nothing. Nothing is touched before all that is known.
        """
        self.prepare_remove(seq, begin, end)()

    def prepare_remove(self, seq: int, begin: int, end: int | None = None) -> Callable[[], None]:
        """Check all that ``remove`` may refuse and compute shifted keys; the callable then does it."""
        backend = self._bound("remove")
        check_sequence("remove", seq, self._max_sequences)
        if begin < 0 or (end is not None and end < begin):
            raise InvalidRangeError(f"remove: [{begin}, {end}); it needs 0 <= begin <= end")
        row, table = self._table.rows[seq], self._table
        start = row.index(begin)
        stop = len(row) if end is None else row.index(end)
        if row.lost and (start or stop < len(row)):
            raise _lost("remove", seq)
        if end is None or end == begin or stop == len(row):
            return functools.partial(self._drop, seq, begin, start, stop)
        self._check_shift(seq, stop, end - begin, start)
        self._detach_shared(row.cells[stop:])
        write = moving.prepare_shift(backend, self._buffers, table, seq, stop, begin - end, self._shift)

        def commit() -> None:
            self._changed()
            write()
            positions = row.positions.copy()
            positions[stop:] -= end - begin
            row.assign(positions, row.cells.copy())
            self._drop(seq, begin, start, stop)

        return commit

    def _drop(self, seq: int, begin: int, start: int, stop: int) -> None:
        self._changed()
        self._schedule.cut(seq, begin)
        self._table.drop(seq, start, stop)
        row = self._table.rows[seq]
        row.lost = row.lost and len(row) > 0

    def _changed(self) -> None:
        """Sequences changed: the pass under way ends, and cannot be undone any more."""
        self._forward = None
        self._undo = {}

    def _check_shift(self, seq: int, stop: int, distance: int, start: int) -> None:
        """Refuse what a removal from the middle cannot do, before anything is touched."""
        row = self._table.rows[seq]
        if self._shift is None:
            raise NotSupportedError(
                f"remove: {len(row) - stop} tokens of sequence {seq} have to move down by {distance}, and "
                "this cache has no shift function; pass shift= to its constructor, or remove to the end"
            )
        if self._table.shared(seq, row.cells[stop:]):
            raise NotSupportedError(
                f"remove: a token of sequence {seq} that has to move is shared with another sequence; "
                "remove that one first, or compute this one anew"
            )

    def shift_context(self, seq: int, keep: int) -> int:
        """Make room in a full sequence: keep the first ``keep`` tokens, drop the older half of the rest.

        What stays moves down and its keys are re-encoded (see ``remove``); returns how many tokens went.
        As Ollama's runner does when a conversation outgrows its context.
        """
        self._bound("shift_context")
        check_sequence("shift_context", seq, self._max_sequences)
        return drop_middle(self, seq, keep, self._table.rows[seq].last + 1)

    def defrag(self) -> None:
        """Move cells so that every sequence lies in one run, with room to grow. Views go stale."""
        backend = self._bound("defrag")
        self._changed()
        moving.defragment(backend, self._buffers, self._table)

    def mark_lost(self, seq: int) -> None:
        """Let a sequence say that it is lost wherever it is used, until it is removed."""
        row = self._table.rows[seq]
        row.lost = len(row) > 0

    def _clear(self, seq: int) -> None:
        row = self._table.rows[seq]
        self._table.drop(seq, 0, len(row))
        row.lost = False

    # Looking in.

    @property
    def backend(self) -> ml.Backend:
        return self._bound("backend")

    @property
    def max_sequences(self) -> int:
        self._bound("max_sequences")
        return self._max_sequences

    def settings(self) -> dict[str, object]:
        """What decides the content of a snapshot, JSON-able: two caches that agree in it may share them."""
        self._bound("settings")
        return {"kind": type(self).__name__, "dtype": self._dtype.name}

    @property
    def cells(self) -> int:
        """How many cells the cache has."""
        self._bound("cells")
        return self._table.cells

    @property
    def free_cells(self) -> int:
        """Cells that no sequence holds; snapshots that lie in some make room when it is needed."""
        self._bound("free_cells")
        return self._table.unowned

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers that are allocated."""
        return sum(buffers.nbytes for buffers in self._buffers.values())

    def held(self) -> dict[int, int]:
        """How many cells each sequence holds, shared ones counted for each."""
        self._bound("held")
        return self._table.held()

    def positions(self, seq: int) -> np.ndarray:
        """The stored positions of a sequence, ascending (a copy)."""
        self._bound("positions")
        check_sequence("positions", seq, self._max_sequences)
        return self._table.rows[seq].positions.copy()

    def render(self) -> CachePicture:
        """A picture of who holds which cells: ``print`` it, or ``save`` it as .html, .svg or .json.

        Plain data that the next pass leaves as it is; taking it changes nothing and copies no tensor.
        """
        from kvcache.views.caches import look

        return look(self)

    # Guards.

    def _bound(self, op: str) -> ml.Backend:
        if self._backend is None:
            if self._closed:
                raise ClosedError(f"{op}: the cache is closed; init binds it anew")
            raise OrderError(f"{op}: the cache is bound to no backend; call init first")
        return self._backend

    def _started(self, op: str) -> Forward:
        self._bound(op)
        if self._forward is None:
            raise OrderError(f"{op}: no pass is under way; call start_forward first")
        return self._forward

    def _stored(self, op: str) -> LayerBuffers:
        try:
            return self._buffers[self._layer]
        except KeyError:
            raise OrderError(f"{op}: layer {self._layer} stores nothing yet; put comes first") from None


def drop_middle(cache: Cache, seq: int, keep: int, length: int) -> int:
    """Remove half of what follows the first ``keep`` of ``length`` positions; returns how many."""
    if keep < 0 or keep >= length:
        raise InvalidRangeError(f"shift_context: keep={keep} of {length} tokens; 0 <= keep < length")
    count = max(1, (length - keep) // 2)
    cache.remove(seq, keep, keep + count)
    return count


def _lost(op: str, seq: int) -> KVCacheError:
    return SequenceLostError(
        f"{op}: the device failed while sequence {seq} was being moved, its data is lost; "
        f"call remove({seq}, 0) and compute it again"
    )
