"""Several caches behind one interface, for models whose layers need different ones.

After Ollama's kvcache/wrapper.go. A model with sliding and full attention wraps one cache of each and selects
one of them before each layer::

    cache = WrapperCache(SlidingWindowCache(window), CausalCache())
    cache.set_layer_type(0 if layer_is_sliding else 1)
    cache.set_layer(layer)

Calls on sequences apply to all caches, and succeed in all of them or in none.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from threading import get_ident
from typing import Any, Unpack

import ml
from kvcache.attention.plan import Uploads
from kvcache.cache import (
    Batch,
    Cache,
    CacheDType,
    InvalidRangeError,
    KVCacheError,
    Mask,
    NotSupportedError,
    OrderError,
    PutOptions,
    SupportsRollback,
    SupportsSnapshots,
    check_thread,
    check_whole,
    computed,
    whole_numbers,
)
from kvcache.caches.base import PreparedCalls
from kvcache.caches.causal import CausalCache
from kvcache.caches.encoder import EncoderCache
from kvcache.caches.one_thread import alone, joined, one_call, one_thread
from kvcache.caches.sequences import drop_middle
from kvcache.caches.states import StateCache
from kvcache.snapshots.snapshot import WrapperSnapshot, check_following, check_inside, check_kind, replaces


class WrapperCache(PreparedCalls[WrapperSnapshot]):
    """Delegates each layer to one of ``caches``, and calls on sequences to all of them.

    >>> import ml
    >>> from kvcache import Batch, CausalCache, SlidingWindowCache, WrapperCache
    >>> cache = WrapperCache(SlidingWindowCache(window=2), CausalCache())
    >>> with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
    ...     cache.init(backend, ml.DType.F32, max_sequences=1, capacity=16, max_batch=8)
    ...     cache.start_forward(ctx, Batch([0, 1, 2, 3], [0] * 4))
    ...     for layer, kind in enumerate([0, 1]):                # one sliding layer, one full layer
    ...         cache.set_layer_type(kind)
    ...         cache.set_layer(layer)
    ...         cache.put(ctx, ctx.zeros((4, 1, 4), ml.DType.F32), ctx.zeros((4, 1, 4), ml.DType.F32))
    ...     print(cache.offset(0), cache.resume_point(0, 3))
    ...     cache.close()
    4 3
    """

    def __init__(self, *caches: Cache) -> None:
        super().__init__()
        if not caches:
            raise InvalidRangeError("WrapperCache: no cache given; it must wrap at least one")
        for i, cache in enumerate(caches):
            if isinstance(cache, type) or not hasattr(cache, "start_forward"):
                raise InvalidRangeError(f"WrapperCache: {cache!r:.60} is not a Cache; give it cache objects")
            if any(cache is other for other in caches[:i]):
                raise InvalidRangeError(f"WrapperCache: {cache!r:.60} is given twice; each must be its own")
        self.caches = caches
        self._type = 0
        self._thread: int | None = None
        """The thread that began the last pass."""
        attending = [cache for cache in caches if isinstance(cache, CausalCache)]
        self._unselected = attending if len(attending) > 1 else []
        """Caches with attention, if there are several, until ``set_layer_type`` is first called."""
        self._prepared: list[Any] = [cache for cache in caches if _prepares(cache)]
        self._others = [cache for cache in caches if not _prepares(cache)]
        if len(self._others) > 1:
            raise InvalidRangeError(
                f"WrapperCache: {len(self._others)} caches cannot undo a started pass "
                f"({', '.join(type(cache).__name__ for cache in self._others)}); at most one may lack "
                "what kvcache.cache.SupportsRollback lists"
            )
        # What the wrapped caches offer, by their index in the constructor.
        self._positioned = _having(caches, "offset")
        self._in_cells = _having(caches, "mark_lost")
        self._returning = _having(caches, "prepare_restore")
        self._masked = _having(caches, "set_causal")
        self._uploading = _having(caches, "upload_with")
        self._lacking = _having(caches, "lacking")
        self._encoders = [part for part in unwrapped(self) if isinstance(part, EncoderCache)]
        self._uploads: Uploads | None = None
        self._kept = [cache for cache in caches if isinstance(cache, SupportsSnapshots)]
        self._keepless = [(cache, _lacked(cache)) for cache in caches if cache not in self._kept]
        scheduling = _having(caches, "schedule_snapshots")
        self._scheduling: dict[int, Any] = {i: cache for i, cache in enumerate(caches) if cache in scheduling}

    @property
    def current(self) -> Cache:
        return self.caches[self._type]

    def set_layer_type(self, i: int) -> None:
        """Select the cache for the following layers by its index in the constructor.

        A pass begins with 0.
        """
        if isinstance(i, float | bool) or i not in range(len(self.caches)):
            kinds = ", ".join(f"{j}: {type(cache).__name__}" for j, cache in enumerate(self.caches))
            raise InvalidRangeError(f"set_layer_type: {i!r:.40}; it must be the index of a cache ({kinds})")
        if self._thread is not None and self._thread != get_ident():
            check_thread("set_layer_type", self._thread)
        self._type, self._unselected = i, []

    def init(
        self, backend: ml.Backend, dtype: CacheDType, max_sequences: int, capacity: int, max_batch: int
    ) -> None:
        done: list[Cache] = []
        try:
            for cache in self.caches:
                cache.init(backend, dtype, max_sequences, capacity, max_batch)
                done.append(cache)
        except BaseException:
            for cache in done:
                cache.close()
            raise

    def prepare_set_config(self, config: ml.CacheConfig) -> Callable[[], None]:
        commits = [cache.prepare_set_config(config) for cache in self._prepared]

        def commit() -> None:
            for cache in self._others:
                cache.set_config(config)
            for change in commits:
                change()

        return commit

    @one_call
    def close(self) -> None:
        with alone("close", self.caches):  # all or none
            for cache in self.caches:
                cache.close()
        self._thread = None

    @one_call
    def start_forward(
        self, ctx: ml.Context, batch: Batch, reserve: bool = False, *, read_only: bool = False
    ) -> None:
        """Start a pass in all caches or in none: if one refuses, those that had started return to their
        previous pass.

        Raises OrderError if ``set_layer_type`` was never called, although several layers have been put, and
        the batch continues a sequence of which one of several caches with attention has stored nothing.
        """
        if self._unselected and self._thread is not None and isinstance(batch, Batch):
            self._check_selected(batch)
        options = {"read_only": True} if read_only else {}  # third-party caches may not have this parameter
        passes, started = [cache.pass_under_way() for cache in self._prepared], 0
        uploads = self._uploads
        if uploads is None and len(self._uploading) > 1:
            uploads = Uploads()
        try:
            if uploads is not None:
                self._together(uploads)
            # The one that cannot undo its start goes last: if it refuses, the others undo theirs.
            for cache in (*self._prepared, *self._others):
                if read_only and "read_only" not in inspect.signature(cache.start_forward).parameters:
                    raise NotSupportedError(
                        f"start_forward: {type(cache).__name__} does not support read_only"
                    )
                cache.start_forward(ctx, batch, reserve, **options)
                started += 1
            if uploads is not self._uploads:
                self.upload_fixed(ctx)
        except BaseException:
            self._take_back(passes[:started])
            raise
        finally:
            if uploads is not None:
                self._together(None)
            self._uploads = None
        self._type, self._thread = 0, get_ident()

    def _check_selected(self, batch: Batch) -> None:
        """Refuse to continue without ``set_layer_type`` if its calls were certainly forgotten.

        A pass may leave a cache without layers, so that the first pass may be right. The next one of the same
        sequence cannot be: a cache without the keys of that sequence's tokens can no longer attend to them.
        """
        count = max(len(cache.storage.buffers) for cache in self._unselected)
        for cache in self._unselected if count > 1 else ():
            if not cache.storage.buffers and (continued := cache.held().keys() & {*batch.sequences}):
                raise OrderError(
                    f"start_forward: sequence {min(continued)} continues, {count} layers were put into "
                    f"another cache, and none into {type(cache).__name__} (type {self.caches.index(cache)}); "
                    "call set_layer_type before each layer (once with 0 if all layers belong to the first "
                    "cache), and compute the sequence again"
                )

    def upload_with(self, uploads: Uploads | None) -> None:
        """As CausalCache.upload_with, of all wrapped caches."""
        self._uploads = uploads

    def upload_fixed(self, ctx: ml.Context) -> None:
        """As CausalCache.upload_fixed, of all wrapped caches."""
        for cache in self._uploading:
            cache.upload_fixed(ctx)

    def _together(self, uploads: Uploads | None) -> None:
        for cache in self._uploading:
            cache.upload_with(uploads)

    def foreign_pass(self) -> bool | None:
        return joined(part.foreign_pass() for part in unwrapped(self) if isinstance(part, PreparedCalls))

    def take_over(self) -> None:
        for part in unwrapped(self):
            if isinstance(part, PreparedCalls):
                part.take_over()
        self._thread = get_ident()

    def pass_under_way(self) -> tuple[list[object], int, int | None]:
        """The passes of all caches, the layer type and the thread, for ``undo_forward``."""
        return [cache.pass_under_way() for cache in self._prepared], self._type, self._thread

    def undo_forward(self, resume: object = None) -> None:
        """Undo the last ``start_forward`` of all caches. Raises KVCacheError if one of them cannot."""
        for cache in self._others:
            raise KVCacheError(f"undo_forward: {type(cache).__name__} cannot undo a started pass")
        if self._thread is not None:
            check_thread("undo_forward", self._thread)
        nothing = [None] * len(self._prepared), 0, None
        passes, self._type, self._thread = resume if isinstance(resume, tuple) else nothing
        self._take_back(passes)

    def _take_back(self, passes: Sequence[object]) -> None:
        """Undo the starts of the first caches, which continue with ``passes``, even if some of them raise."""
        with contextlib.ExitStack() as undo:
            for cache, under_way in zip(self._prepared, passes, strict=False):
                undo.callback(cache.undo_forward, under_way)

    def set_causal(self, ctx: ml.Context, except_: Iterable[int] = ()) -> None:
        """As CausalCache.set_causal, on every wrapped cache that has it."""
        indices = whole_numbers("set_causal", "except_", except_)
        for cache in self._masked:
            cache.set_causal(ctx, except_=indices)

    def set_layer(self, layer: int) -> None:
        for cache in self.caches:
            cache.set_layer(layer)

    def put(
        self, ctx: ml.Context, key: ml.Tensor, value: ml.Tensor | None = None, **more: Unpack[PutOptions]
    ) -> None:
        if value is None or more:
            self._with_extras("put").put(ctx, key, value, **more)
        else:
            self.caches[self._type].put(ctx, key, value)

    def get_extra(self, ctx: ml.Context, name: str) -> ml.Tensor:
        extra: ml.Tensor = self._with_extras("get_extra").get_extra(ctx, name)
        return extra

    def get(self, ctx: ml.Context) -> tuple[ml.Tensor, ml.Tensor, Mask]:
        return self.current.get(ctx)

    def attend(
        self,
        ctx: ml.Context,
        query: ml.Tensor,
        scale: float,
        sinks: ml.Tensor | None = None,
        *,
        select: ml.Tensor | None = None,
    ) -> ml.Tensor:
        if select is None:
            return self.current.attend(ctx, query, scale, sinks)
        output: ml.Tensor = self._with_extras("attend").attend(ctx, query, scale, sinks, select=select)
        return output

    def _with_extras(self, op: str) -> Any:
        """The current cache, which must store extras beside K and V; NotSupportedError otherwise."""
        if not hasattr(self.current, "get_extra"):
            raise NotSupportedError(f"{op}: {type(self.current).__name__} stores keys and values only")
        return self.current

    def prepare_copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> Callable[[], None]:
        """Where one of the caches goes back to a checkpoint, the others go there with it."""
        changes = self._prepare("copy_prefix", src_seq, dst_seq, length)
        reached = self._reached(src_seq, length)
        return changes if reached == length else self._prepare("copy_prefix", src_seq, dst_seq, reached)

    def can_resume(self, seq: int, position: int) -> bool:
        return all(cache.can_resume(seq, position) for cache in self.caches)

    def resume_point(self, seq: int, position: int) -> int:
        """The last position up to ``position`` from which all caches can continue exactly; 0: none."""
        keepers = self._keepers("resume_point")
        position = check_whole("resume_point", "position", position)
        while position > 0:
            lower = min(cache.resume_point(seq, position) for cache in keepers)
            if lower == position:
                break
            position = lower
        return position

    @property
    def backend(self) -> ml.Backend:
        backend: ml.Backend = self._keepers("backend")[0].backend
        return backend

    @property
    def max_sequences(self) -> int:
        return min(int(cache.max_sequences) for cache in self._keepers("max_sequences"))

    def settings(self) -> dict[str, object]:
        caches = [cache.settings() for cache in self._keepers("settings")]
        return {"kind": type(self).__name__, "caches": caches}

    def prepare_remove(self, seq: int, begin: int, end: int | None = None) -> Callable[[], None]:
        """Where one of the caches goes back to a checkpoint, the others go there with it."""
        changes, length = self._prepare("remove", seq, begin, end), self.offset(seq)
        reached = self._reached(seq, begin) if begin < length <= (length if end is None else end) else begin
        return changes if reached == begin else self._prepare("remove", seq, reached)

    def prepare_restore(self, seq: int, position: int) -> int | None:
        """Where ``remove(seq, position)`` would go: the earliest position that one of the caches goes back
        to.
        """
        position = check_whole("prepare_restore", "position", position)
        return self._reached(seq, min(position, self.offset(seq))) or None

    def _reached(self, seq: int, position: int) -> int:
        last = None
        while position != last:
            last = position
            for cache in self._returning:
                position = min(position, cache.prepare_restore(seq, position) or 0)
        return position

    @one_thread
    def evict(self, seq: int, positions: Iterable[int]) -> None:
        """As CausalCache.evict, in all wrapped caches except those of encoder outputs.

        Raises NotSupportedError if a cache cannot evict single tokens, as a recurrent state cannot.
        """
        self.prepare_evict(seq, positions)()

    def prepare_evict(self, seq: int, positions: Iterable[int]) -> Callable[[], None]:
        """Make all checks of ``evict``; the returned callable makes the change."""
        wanted, changes = whole_numbers("evict", "position", positions), []
        for cache in self.caches:
            if isinstance(cache, EncoderCache):
                continue
            if not hasattr(cache, "prepare_evict"):
                raise NotSupportedError(f"evict: {type(cache).__name__} cannot forget single tokens")
            changes.append(cache.prepare_evict(seq, wanted))

        def commit() -> None:
            for change in changes:
                change()

        return commit

    @one_thread
    def defrag(self) -> None:
        """As CausalCache.defrag, on every wrapped cache that has it."""
        for cache in self._in_cells:
            cache.defrag()

    def shift_context(self, seq: int, keep: int) -> int:
        """As CausalCache.shift_context, for the same range in all caches."""
        return drop_middle(self, seq, keep, self.offset(seq))

    def offset(self, seq: int) -> int:
        """The position of the next token of a sequence, according to the wrapped caches that know."""
        return max((cache.offset(seq) for cache in self._positioned), default=0)

    def computed(self, seq: int) -> int:
        """How many tokens of a sequence all wrapped caches have; caches that store nothing are ignored."""
        stored = (cache for cache in self._positioned if _stores(cache))
        end, lacking = min((computed(cache, seq) for cache in stored), default=0), self.lacking(seq)
        return end if lacking is None else min(end, lacking)

    def lacking(self, seq: int) -> int | None:
        """The position from which a layer lacks a state or an encoder's output; None if none does."""
        positions = (cache.lacking(seq) for cache in self._lacking)
        return min((position for position in positions if position is not None), default=None)

    # Snapshots.

    @one_thread
    def snapshot(self, seq: int, begin: int = 0, end: int | None = None) -> WrapperSnapshot:
        """A snapshot of every wrapped cache over ``[begin, end)``; None: to the sequence's end."""
        begin = check_whole("snapshot", "begin", begin)
        end = self.offset(seq) if end is None else check_whole("snapshot", "end", end)
        for cache in self._positioned:
            if cache.offset(seq) < end <= self.offset(seq):
                raise NotSupportedError(
                    f"snapshot: {type(cache).__name__} holds sequence {seq} up to {cache.offset(seq)} only, "
                    f"not to {end}"
                )
        return WrapperSnapshot(
            begin, end, tuple(cache.snapshot(seq, begin, end) for cache in self._keepers("snapshot"))
        )

    def prepare_restore_snapshot(
        self, seq: int, snapshot: WrapperSnapshot, target: int | None = None
    ) -> Callable[[], None] | None:
        keepers = self._takers("restore", [snapshot])
        end = snapshot.end if target is None else target
        commits = []
        for cache, part in zip(keepers, snapshot.parts, strict=True):
            commit = cache.prepare_restore_snapshot(seq, part, end)
            if commit is None:
                return None
            commits.append((cache in self._in_cells, commit))
        commits.sort(key=lambda one: not one[0])  # what cannot fail, such as an encoder's output, comes last

        def restore_all() -> None:
            for i, (_, commit) in enumerate(commits):
                try:
                    commit()
                except BaseException:
                    if i:  # some have changed already, and cannot change back
                        self.mark_lost(seq)
                    raise

        return restore_all

    def merge(self, parent: WrapperSnapshot | None, child: WrapperSnapshot) -> WrapperSnapshot:
        """Join ``[a, b)`` and ``[b, c)`` in all caches; a cache with indivisible content keeps the child's.

        If the content of all caches is indivisible, ``[a, c)`` replaces ``[a, b)``.
        """
        keepers = self._takers("merge", [child] if parent is None else [parent, child])
        if parent is None:
            return child
        if not replaces(child, parent):  # otherwise each cache decides whether its content may be replaced
            check_following(parent, child)
        triples = zip(keepers, parent.parts, child.parts, strict=True)
        parts = tuple(cache.merge(one, other) for cache, one, other in triples)
        return WrapperSnapshot(parent.begin, child.end, parts)

    def join(self, parts: Sequence[WrapperSnapshot]) -> WrapperSnapshot:
        """``merge`` one or more snapshots, in order."""
        keepers = self._takers("join", parts)
        columns = zip(*(part.parts for part in parts), strict=True)
        inner = (cache.join(column) for cache, column in zip(keepers, columns, strict=True))
        return WrapperSnapshot(parts[0].begin, parts[-1].end, tuple(inner))

    def split(self, snapshot: WrapperSnapshot, at: int) -> tuple[WrapperSnapshot | None, WrapperSnapshot]:
        """Split at a position; (None, snapshot) if the content of one of the caches is indivisible."""
        keepers = self._takers("split", [snapshot])
        at = check_inside(snapshot, at)
        if at == snapshot.begin or not snapshot.divisible:
            return None, snapshot
        pairs = [cache.split(part, at) for cache, part in zip(keepers, snapshot.parts, strict=True)]
        return (
            WrapperSnapshot(snapshot.begin, at, tuple(first for first, _ in pairs)),
            WrapperSnapshot(at, snapshot.end, tuple(second for _, second in pairs)),
        )

    def schedule_snapshots(self, seq: int, positions: Sequence[int]) -> None:
        """As CausalCache.schedule_snapshots; a batch must end where ``next_snapshot`` says."""
        offset, wanted = self.offset(seq), whole_numbers("schedule_snapshots", "position", positions)
        if wanted and wanted[0] <= offset:
            raise InvalidRangeError(
                f"schedule_snapshots: position {wanted[0]} of sequence {seq}, which is already at {offset}; "
                "call snapshot to take one now"
            )
        self._keepers("schedule_snapshots")
        for cache in self._scheduling.values():
            cache.schedule_snapshots(seq, wanted)

    def cancel_snapshots(self, seq: int, positions: Collection[int] | None = None) -> None:
        for cache in self._scheduling.values():
            cache.cancel_snapshots(seq, positions)

    def rolled_back(self, seq: int) -> int | None:
        """As CausalCache.rolled_back: the lowest of all wrapped caches."""
        positions = [cache.rolled_back(seq) for cache in self._scheduling.values()]
        return min((position for position in positions if position is not None), default=None)

    def next_snapshot(self, seq: int) -> int | None:
        """The next position at which a batch of this sequence should end; None: anywhere."""
        asked = (cache.next_snapshot(seq) for cache in self._scheduling.values())
        return min((position for position in asked if position is not None), default=None)

    def take_snapshots(self, seq: int, upto: int | None = None) -> list[WrapperSnapshot]:
        """The scheduled snapshots that all wrapped caches have taken since the last call, by position.

        A snapshot that only some of the caches took is joined to their next one. Returns those up to
        ``upto``.
        """
        taken = [snapshot for snapshot in self.snapshots_taken(seq) if upto is None or snapshot.end <= upto]
        for cache in self._scheduling.values() if taken else ():
            cache.take_snapshots(seq, taken[-1].end)
        return taken

    def skipped_snapshots(self, seq: int) -> list[int]:
        """As CausalCache.skipped_snapshots: the positions of which a wrapped cache took no snapshot."""
        asked = (cache.skipped_snapshots(seq) for cache in self._scheduling.values())
        return sorted({position for positions in asked for position in positions})

    def snapshots_taken(self, seq: int) -> list[WrapperSnapshot]:
        """The snapshots that ``take_snapshots`` would return, without removing them."""
        keepers = self._keepers("take_snapshots")
        taken = {i: cache.snapshots_taken(seq) for i, cache in self._scheduling.items()}
        if not taken:
            return []
        common = set.intersection(*({part.end for part in parts} for parts in taken.values()))
        ends = sorted(common)
        columns = {i: _joined_at(keepers[i], parts, common) for i, parts in taken.items()}
        begins = [max([part.begin for part in row]) for row in zip(*columns.values(), strict=True)]
        for i, cache in enumerate(keepers):
            if i not in columns:
                spans = zip(begins, ends, strict=True)
                columns[i] = [cache.snapshot(seq, begin, end) for begin, end in spans]
        rows = zip(*(columns[i] for i in range(len(keepers))), strict=True)
        return [WrapperSnapshot(*each) for each in zip(begins, ends, rows, strict=True)]

    def _keepers(self, op: str) -> list[Any]:
        """The wrapped caches, all of which must support snapshots."""
        for cache, lacking in self._keepless:
            raise NotSupportedError(
                f"{op}: {type(cache).__name__} does not support snapshots; when it was wrapped, it lacked "
                f"{', '.join(lacking)} of what kvcache.cache.SupportsSnapshots lists"
            )
        return list(self._kept)

    def _takers(self, op: str, snapshots: Sequence[WrapperSnapshot]) -> list[Any]:
        """The wrapped caches; refuses snapshots of another kind of cache, or of a different number of
        caches.
        """
        keepers = self._keepers(op)
        check_kind(op, self, WrapperSnapshot, snapshots)
        for count in {len(snapshot.parts) for snapshot in snapshots} - {len(keepers)}:
            raise InvalidRangeError(f"{op}: a snapshot of {count} caches for a wrapper of {len(keepers)}")
        return keepers

    @property
    def on_pressure(self) -> Callable[[int], bool | None] | None:
        """As CausalCache.on_pressure, of all wrapped caches."""
        calls = (getattr(cache, "on_pressure", None) for cache in self._in_cells)
        return next((call for call in calls if call is not None), None)

    @on_pressure.setter
    def on_pressure(self, call: Callable[[int], bool | None] | None) -> None:
        for cache in self._in_cells:
            if hasattr(cache, "on_pressure"):
                cache.on_pressure = call

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(map(repr, self.caches))}>"

    @property
    def nbytes(self) -> int:
        """Bytes of all wrapped caches that report them."""
        return sum(cache.nbytes for cache in self._kept)

    def mark_lost(self, seq: int) -> None:
        """Mark a sequence as lost in all caches that can, after some have changed it and others failed to."""
        for cache in self._in_cells:
            cache.mark_lost(seq)

    def _prepare(self, op: str, *arguments: Any) -> Callable[[], None]:
        """Make the checks of all caches; the returned callable changes them, first the one that may still
        refuse.

        An encoder's output is removed with its token, even if a window or an eviction leaves a sequence
        shorter than requested. Caches in nested wrappers are asked directly, since they may be shorter still.
        """
        seq = arguments[0] if op == "remove" else arguments[1]
        parts = [part for cache in self._prepared for part in unwrapped(cache)]
        commits = [getattr(part, f"prepare_{op}")(*arguments) for part in parts]

        def commit() -> None:
            for cache in self._others:
                getattr(cache, op)(*arguments)
            for i, change in enumerate(commits):
                try:
                    change()
                except BaseException:
                    if i or self._others:  # some have changed already, and cannot change back
                        self.mark_lost(seq)
                    raise
            for encoder in self._encoders if self._positioned else ():
                encoder.remove(seq, self.offset(seq))

        return commit


def unwrapped(cache: Any) -> list[Any]:
    """The innermost caches: those that a wrapper wraps, or the cache itself."""
    if isinstance(cache, WrapperCache):
        return [part for wrapped in cache.caches for part in unwrapped(wrapped)]
    return [cache]


def _having(caches: Iterable[Any], call: str) -> list[Any]:
    """The caches that offer a call. A wrapper itself has every call, so one of its wrapped caches must offer
    it.
    """
    return [cache for cache in caches if any(hasattr(part, call) for part in unwrapped(cache))]


def _stores(cache: Any) -> bool:
    """Whether anything may be stored in a cache."""
    if isinstance(cache, CausalCache):
        return bool(cache.storage.buffers)
    if isinstance(cache, StateCache) and cache.state_table.buffers.nbytes:  # its nbytes takes much longer
        return True
    return bool(getattr(cache, "nbytes", 1))


def _prepares(cache: Any) -> bool:
    """Whether a cache can undo changes; a wrapper can if all wrapped caches can."""
    return all(isinstance(part, SupportsRollback) for part in unwrapped(cache))


def _lacked(cache: Cache) -> list[str]:
    """The members of SupportsSnapshots that a cache does not have."""
    wanted = (name for name in vars(SupportsSnapshots) if not name.startswith("_"))
    return [name for name in wanted if not hasattr(cache, name)]


def _joined_at(cache: Any, parts: Sequence[Any], ends: Collection[int]) -> list[Any]:
    """Consecutive ``parts``, joined so that there is one part for each of ``ends``."""
    whole, carried = [], None
    for part in parts:
        carried = part if carried is None else cache.merge(carried, part)
        if part.end in ends:
            whole.append(carried)
            carried = None
    return whole
