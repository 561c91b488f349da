"""The cache for cross attention: K and V of an encoder's output, which have no positions.

After Ollama's kvcache/encoder.go, which holds one sequence; this one holds several. An output belongs to
sequences of the batch and stays until the token that it came with is removed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import get_ident

import numpy as np

import ml
from kvcache.attention.batch import (
    SequenceTokens,
    check_modes,
    check_query,
    check_sequence,
    check_tensors,
    split_batch,
)
from kvcache.cache import (
    Batch,
    CacheDType,
    InvalidBatchError,
    InvalidRangeError,
    Mask,
    OrderError,
    check_context,
    check_thread,
    check_whole,
)
from kvcache.caches.base import BoundCache
from kvcache.caches.one_thread import is_foreign, one_call, one_thread
from kvcache.snapshots.snapshot import EncoderSnapshot, check_following, check_inside, check_kind, replaces
from kvcache.storage.device_copies import HostArray, HostArrays, near
from kvcache.storage.formats import CacheFormat
from ml import nn


@dataclass(slots=True)
class _Entry:
    """An encoder output of a sequence: K and V of each layer (length, kv_heads, dim), written once."""

    position: int
    length: int
    layers: dict[int, tuple[ml.Tensor, ml.Tensor]] = field(default_factory=dict)
    before: _Entry | None = None
    """The output of the previous item, kept in case the pass fails until all layers have this one."""


@dataclass(slots=True)
class _Pass:
    """One forward pass: the batch, the sequences that receive an output, and what was stored before."""

    groups: list[SequenceTokens]
    receivers: list[tuple[int, int]]
    tokens: int
    reserve: bool
    previous: dict[int, _Entry]
    first: bool
    """Whether it is the cache's first pass: if it is undone, the cache may be configured again."""
    read_only: bool
    mask: Mask | HostArray | bool = False
    shown: dict[tuple[int, int], tuple[ml.Tensor, ml.Tensor]] = field(default_factory=dict)
    """What was put in a reserve pass."""
    put: dict[int, bool] = field(default_factory=dict)
    """The layers that were put, and whether they have been read since."""
    thread: int = field(default_factory=get_ident)
    """The thread that the pass belongs to."""
    host: HostArrays = field(default_factory=HostArrays)
    _rows: dict[tuple[int, ...], slice | HostArray] = field(default_factory=dict)

    def note_read(self, layer: int) -> None:
        if layer in self.put:
            self.put[layer] = True

    def rows(self, members: tuple[int, ...]) -> slice | HostArray:
        """The rows of these groups in the batch: a slice if they are adjacent, else a list."""
        if members not in self._rows:
            rows = self.groups[members[0]].batch_indices
            if len(members) > 1 or not isinstance(rows, slice):
                listed = np.concatenate([self.groups[i].indices() for i in members])
                self._rows[members] = self.host.add(listed)
            else:
                self._rows[members] = rows
        return self._rows[members]


class EncoderCache(BoundCache[_Pass, EncoderSnapshot]):
    """K and V of each sequence's encoder output, stored once and read by every later token.

    ``put`` stores an output for each sequence that has an item in ``batch.multimodal`` (pairs of batch index
    and item), or for every sequence of the batch if there are no items. ``get`` returns the outputs of the
    batch's sequences, concatenated, with a mask that lets every token see only its own sequence's output.

    >>> import ml
    >>> from kvcache import Batch, EncoderCache
    >>> cache = EncoderCache()
    >>> with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
    ...     cache.init(backend, ml.DType.F32, max_sequences=1, capacity=16, max_batch=4)
    ...     cache.start_forward(ctx, Batch([0, 1], [0, 0], multimodal=[(0, "an image")]))
    ...     output = ctx.full((9, 1, 4), 0.5, ml.DType.F32)      # 9 rows of the encoder
    ...     cache.put(ctx, output, output)
    ...     print(cache.attend(ctx, ctx.zeros((2, 1, 4), ml.DType.F32), 0.5).shape, cache.encoder_cached(0))
    ...     cache.close()
    (2, 1, 4) True
    """

    def __init__(self) -> None:
        super().__init__()
        self._reset()

    def _reset(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._layers: set[int] = set()
        """The layers for which anything has been put."""
        self._layer = 0
        self._pass = None
        self._used = False

    def init(
        self, backend: ml.Backend, dtype: CacheDType, max_sequences: int, capacity: int, max_batch: int
    ) -> None:
        """Bind to ``backend``. ``capacity`` does not limit an encoder's output, which has a length of its
        own.
        """
        sizes = {"max_sequences": max_sequences, "capacity": capacity, "max_batch": max_batch}
        asked, (max_sequences, *_) = self._check_init(backend, dtype, **sizes)
        # An encoder's output is read whole at every step: a quantized one would be decoded every time.
        self._stored = ml.DType.F16 if asked.plain is None else asked.plain
        self._dtype = CacheFormat.of(self._stored)
        self._check_stored(backend, self._dtype)
        self._max_sequences = max_sequences
        self._backend = backend
        self._closed = False

    def prepare_set_config(self, config: ml.CacheConfig) -> Callable[[], None]:
        if self._used:
            raise OrderError(
                "set_config: batches have been started already; call set_config before the first batch"
            )

        def commit() -> None:
            self._config = config

        return commit

    @one_call
    def close(self) -> None:
        self._reset()
        self._backend = None
        self._closed = True

    # One pass.

    @one_call
    def start_forward(
        self, ctx: ml.Context, batch: Batch, reserve: bool = False, *, read_only: bool = False
    ) -> None:
        """Begin a pass over the batch's sequences, some of which may bring an item for the encoder.

        The output of an earlier item is never read in place of a later one: it is dropped once all layers
        have the later output, and comes back if the later item is removed before that. With ``read_only``,
        items are ignored and ``put`` raises OrderError. The pass belongs to the calling thread, as in
        CausalCache.
        """
        check_context("start_forward", ctx, self._bound("start_forward"))
        check_modes(reserve, read_only)
        groups = split_batch(batch, self._max_sequences)
        receivers, first = _receivers(batch), not self._used
        self._pass = _Pass(groups, receivers, len(batch), reserve, dict(self._entries), first, read_only)
        self._used = True
        for seq, position in () if reserve or read_only or not batch.multimodal else receivers:
            if seq not in self._entries or self._entries[seq].position != position:
                self._begin(seq, position, 0)

    def _begin(self, seq: int, position: int, length: int) -> _Entry:
        before = _without(self._entries.get(seq), position)
        entry = self._entries[seq] = _Entry(position, length, before=before)
        return entry

    def foreign_pass(self) -> bool | None:
        """See PreparedCalls. A pass is in the middle while a layer lacks an output that others have, or has
        not been read.
        """
        current = self._pass
        if current is None or current.reserve or current.read_only or not is_foreign(current):
            return False
        if not current.put:
            return None
        return not all(current.put.values()) or any(
            self.lacking(seq) is not None for seq, _ in current.receivers
        )

    def pass_under_way(self) -> object:
        """The pass that the last ``start_forward`` began, for ``undo_forward``; None if it has ended."""
        return self._pass

    def undo_forward(self, resume: object = None) -> None:
        """Discard the pass and what was put in it, and continue with ``resume``, the previous pass."""
        self._bound("undo_forward")
        current = self._pass
        if current is not None:
            check_thread("undo_forward", current.thread)
            self._entries, self._used = current.previous, not current.first
        self._pass = resume if isinstance(resume, _Pass) else None

    def encoder_cached(self, seq: int | None = None) -> bool:
        """Whether an encoder's output is stored for ``seq``, or (None) for all sequences of the batch."""
        self._bound("encoder_cached")
        if seq is not None:
            check_sequence("encoder_cached", seq, self._max_sequences)
            return self._has_output(seq)
        return all(self._has_output(group.seq) for group in self._started("encoder_cached").groups)

    def _has_output(self, seq: int) -> bool:
        return seq in self._entries and bool(self._entries[seq].layers)

    def lacking(self, seq: int) -> int | None:
        """The position of an item whose output some layers lack, for example after a failed pass."""
        self._check_sequence("lacking", seq)
        entry = self._entries.get(seq)
        return None if entry is None or entry.layers.keys() >= self._layers else entry.position

    def put(
        self, ctx: ml.Context, key: ml.Tensor, value: ml.Tensor, lengths: Sequence[int] | None = None
    ) -> None:
        """Store K (total, kv_heads, head_dim) and V of the encoder's output for this layer.

        ``lengths`` is the number of rows of each receiving sequence, in the order of their first items in
        ``batch.multimodal``, or in the order of the batch if there are no items; None divides the rows
        equally. The rows are copied. Raises OrderError in a read-only pass, and for a layer that has already
        been put and read in this pass.
        """
        current = self._started("put")
        if current.read_only:
            raise OrderError("put: this pass is read-only; call start_forward without read_only to store")
        check_context("put", ctx, self._bound("put"))
        check_tensors("put", self._bound("put"), key=key, value=value)
        if len(key.shape) != 3 or len(value.shape) != 3 or key.shape[:2] != value.shape[:2]:
            raise InvalidRangeError(
                f"put: key {key.shape} and value {value.shape}; they are (total, kv_heads, head_dim) and "
                "(total, kv_heads, v_dim)"
            )
        sizes = _lengths(len(current.receivers), key.shape[0], lengths)
        if not current.reserve:
            self._check_lengths(current, sizes)
        if current.put.get(self._layer):
            raise OrderError(
                f"put: layer {self._layer} was put in this pass and read, and would now be replaced; call "
                "set_layer before each layer, and start_forward before the next pass"
            )
        parts = _split(ctx.layer(self._layer), key, value, sizes, self._stored)
        ctx.forward(*(tensor for pair in parts for tensor in pair))
        self._layers.add(self._layer)
        if current.reserve:
            for (seq, _), tensors in zip(current.receivers, parts, strict=True):
                current.shown[seq, self._layer] = tensors
            current.put[self._layer] = False
            return
        for (seq, position), size, tensors in zip(current.receivers, sizes, parts, strict=True):
            self._store(current, seq, position, size, tensors)
        current.mask = False
        current.put[self._layer] = False

    def _check_lengths(self, current: _Pass, sizes: Sequence[int]) -> None:
        """Refuse a layer whose length differs from that of the layers put before it in this pass."""
        for (seq, _), size in zip(current.receivers, sizes, strict=True):
            entry = self._fresh(current, seq)
            others = () if entry is None else entry.layers.keys() - {self._layer}
            if entry is not None and others and entry.length != size:
                raise InvalidRangeError(
                    f"put: {size} rows for sequence {seq} in layer {self._layer}, and {entry.length} in "
                    f"layers {sorted(others)}; an encoder output must have the same length in all layers"
                )

    def _fresh(self, current: _Pass, seq: int) -> _Entry | None:
        entry = self._entries.get(seq)
        return None if entry is current.previous.get(seq) else entry

    def _store(
        self, current: _Pass, seq: int, position: int, size: int, tensors: tuple[ml.Tensor, ml.Tensor]
    ) -> None:
        """Add a layer to the entry that this pass began, or begin one."""
        entry = self._fresh(current, seq)
        if entry is None or entry.length != size:
            entry = self._begin(seq, position, size)
        entry.layers[self._layer] = tensors
        if self.lacking(seq) is None:
            entry.before = None

    def get(self, ctx: ml.Context) -> tuple[ml.Tensor, ml.Tensor, Mask]:
        """K (history, kv_heads, head_dim), V likewise, and a mask, which is None if every token sees all
        rows.

        With ``permuted_v``, V is (kv_heads, v_dim, history). For one sequence the mask is None whatever
        ``elide_mask`` says, as there is nothing to hide. Raises OrderError for a sequence that has no output
        in this layer.
        """
        current = self._started("get")
        check_context("get", ctx, self._bound("get"))
        outputs = [self._held(current, group.seq) for group in current.groups]
        key, value = outputs[0]
        for other_key, other_value in outputs[1:]:
            key, value = key.concat(ctx, other_key, 0), value.concat(ctx, other_value, 0)
        if self.config.permuted_v:
            value = value.permute(ctx, 1, 2, 0)
        mask = self._batch_mask(ctx, current, [part.shape[0] for part, _ in outputs])
        current.note_read(self._layer)
        return key, value, mask

    def encoder_output(self, seq: int, layer: int) -> tuple[ml.Tensor, ml.Tensor] | None:
        """K (length, kv_heads, head_dim) and V of a sequence in a layer; None if nothing is stored."""
        return self._entries[seq].layers.get(layer) if self.encoder_cached(seq) else None

    def attend(
        self, ctx: ml.Context, query: ml.Tensor, scale: float, sinks: ml.Tensor | None = None
    ) -> ml.Tensor:
        """Attention of query (tokens, heads, head_dim) over its own sequence's encoder output.

        An output that several sequences share (``copy_prefix``) is read once for the queries of all of them.
        """
        current = self._started("attend")
        readers: dict[int, list[int]] = {}
        outputs = [self._held(current, group.seq) for group in current.groups]
        key_shape = outputs[0][0].shape[1:]
        scale = check_query(ctx, self._bound("attend"), query, current.tokens, key_shape, scale, sinks)
        current.note_read(self._layer)
        for i, (key, _) in enumerate(outputs):
            readers.setdefault(id(key), []).append(i)
        if len(readers) == 1:
            return nn.attention(ctx, query, *outputs[0], None, scale, sinks)
        result = ctx.empty((*query.shape[:2], outputs[0][1].shape[2]), query.dtype)
        tokens = [current.rows(tuple(members)) for members in readers.values()]
        for rows, (first, *_) in zip(tokens, readers.values(), strict=True):
            output = outputs[first]
            if isinstance(rows, slice):
                own = query.slice(ctx, 0, rows.start, rows.stop)
                out = nn.attention(ctx, own, *output, None, scale, sinks)
                out.copy(ctx, result.slice(ctx, 0, rows.start, rows.stop))
            else:
                own = query.rows(ctx, rows.on(ctx))
                result.set_rows(ctx, nn.attention(ctx, own, *output, None, scale, sinks), rows.on(ctx))
        return result

    def _held(self, current: _Pass, seq: int) -> tuple[ml.Tensor, ml.Tensor]:
        if (seq, self._layer) in current.shown:
            return current.shown[seq, self._layer]
        entry = self._entries.get(seq)
        if entry is None or self._layer not in entry.layers:
            raise OrderError(
                f"get: sequence {seq} has no encoder output in layer {self._layer}; call put first"
            )
        return entry.layers[self._layer]

    def _batch_mask(self, ctx: ml.Context, current: _Pass, sizes: list[int]) -> Mask:
        if len(current.groups) == 1:
            return None
        if isinstance(current.mask, bool):
            padding = self.config.mask_batch_padding
            host = np.full((-(-current.tokens // padding) * padding, sum(sizes)), -np.inf, dtype=np.float32)
            start = 0
            for group, size in zip(current.groups, sizes, strict=True):
                host[np.arange(current.tokens)[group.batch_indices], start : start + size] = 0
                start += size
            current.mask = current.host.add(host, self.config.mask_dtype)
        return near(ctx, current.mask)

    # Sequences.

    def prepare_copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> Callable[[], None]:
        self._check_copy(src_seq, dst_seq, length)

        def commit() -> None:
            self._pass = None
            self._set(dst_seq, _without(self._entries.get(src_seq), length))

        return commit

    def can_resume(self, seq: int, position: int) -> bool:
        self._check_sequence("can_resume", seq)
        check_whole("can_resume", "position", position)
        return True

    def prepare_remove(self, seq: int, begin: int, end: int | None = None) -> Callable[[], None]:
        self._check_remove(seq, begin, end)

        def commit() -> None:
            self._pass = None
            self._set(seq, _without(self._entries.get(seq), begin, end))

        return commit

    def _set(self, seq: int, entry: _Entry | None) -> None:
        self._entries.pop(seq, None)
        if entry is not None:
            self._entries[seq] = entry

    def resume_point(self, seq: int, position: int) -> int:
        """``position`` itself, since an encoder's output serves every later token."""
        self.can_resume(seq, position)
        return int(position)

    # Snapshots.

    @one_thread
    def snapshot(self, seq: int, begin: int = 0, end: int | None = None) -> EncoderSnapshot:
        """The output that came with a token of ``[begin, end)`` (``end`` None: to the end), shared and not
        copied.
        """
        self._check_sequence("snapshot", seq)
        entry = self._entries.get(seq)
        begin = check_whole("snapshot", "begin", begin)
        if end is None:
            end = begin if entry is None else max(begin, entry.position + 1)
        end = check_whole("snapshot", "end", end)
        if end < begin:
            raise InvalidRangeError(f"snapshot: [{begin}, {end}); the range must satisfy 0 <= begin <= end")
        entry = _without(entry, end)
        if entry is None or entry.position < begin:
            return EncoderSnapshot(begin, end, None, 0, {})
        return EncoderSnapshot(begin, end, entry.position, entry.length, dict(entry.layers))

    def prepare_restore_snapshot(
        self, seq: int, snapshot: EncoderSnapshot, target: int | None = None
    ) -> Callable[[], None] | None:
        self._check_restore(seq, snapshot, EncoderSnapshot)
        end = snapshot.end if target is None else target
        if not snapshot.begin <= end <= snapshot.end:
            return None
        dtypes = {tensor.dtype for pair in snapshot.layers.values() for tensor in pair}
        if dtypes - {self._stored}:
            raise InvalidRangeError(
                f"restore: a snapshot of {', '.join(sorted(dtype.name for dtype in dtypes))}; this cache "
                f"stores {self._dtype.name}"
            )

        def commit() -> None:
            self._pass = None
            self._layers |= snapshot.layers.keys()
            self._set(seq, _without(self._entries.get(seq), snapshot.begin))
            if snapshot.position is not None and snapshot.position < end:
                self._entries[seq] = _Entry(snapshot.position, snapshot.length, dict(snapshot.layers))

        return commit

    def merge(self, parent: EncoderSnapshot | None, child: EncoderSnapshot) -> EncoderSnapshot:
        """Join ``[a, b)``, and ``[b, c)`` or ``[a, c)``, to ``[a, c)``; the later output is kept."""
        check_kind("merge", self, EncoderSnapshot, [child] if parent is None else [parent, child])
        if parent is None or replaces(child, parent):
            return child
        check_following(parent, child)
        last = parent if child.position is None else child
        return replace(last, begin=parent.begin, end=child.end)

    def join(self, parts: Sequence[EncoderSnapshot]) -> EncoderSnapshot:
        """``merge`` one or more snapshots, in order."""
        check_kind("join", self, EncoderSnapshot, parts)
        return functools.reduce(self.merge, parts)

    def split(self, snapshot: EncoderSnapshot, at: int) -> tuple[EncoderSnapshot | None, EncoderSnapshot]:
        """Split ``[a, c)`` into ``[a, at)`` and ``[at, c)``; the output stays with its token."""
        check_kind("split", self, EncoderSnapshot, [snapshot])
        at = check_inside(snapshot, at)
        if at == snapshot.begin:
            return None, snapshot
        empty = EncoderSnapshot(snapshot.begin, snapshot.end, None, 0, {})
        first = snapshot.position is not None and snapshot.position < at
        return (
            replace(snapshot if first else empty, end=at),
            replace(empty if first else snapshot, begin=at),
        )

    @property
    def outputs(self) -> Mapping[int, _Entry]:
        """The encoder output of each sequence; sequences that share one have the same object."""
        self._bound("outputs")
        return self._entries

    @property
    def nbytes(self) -> int:
        """Bytes of all stored outputs; a shared output counts once."""
        entries, tensors = list(self._entries.values()), dict[int, int]()
        for entry in entries:
            tensors |= {id(t): t.nbytes for pair in [*entry.layers.values()] for t in pair}
            if entry.before is not None:
                entries.append(entry.before)
        return sum(tensors.values())


def _without(entry: _Entry | None, begin: int, end: int | None = None) -> _Entry | None:
    """A sequence's outputs without those of the tokens ``[begin, end)``; the entry may be shared and is not
    changed.
    """
    if entry is None or entry.position < begin:
        return entry
    before = _without(entry.before, begin, end)
    if end is None or entry.position < end:
        return before
    return replace(entry, position=entry.position - (end - begin), before=before)


def _lengths(count: int, total: int, lengths: Sequence[int] | None) -> list[int]:
    """The number of rows of each of ``count`` sequences, ``total`` together."""
    if lengths is None:
        if total % count:
            raise InvalidRangeError(f"put: {total} rows for {count} sequences; pass lengths=")
        return [total // count] * count
    sizes = [check_whole("put", "lengths", size) for size in lengths]
    if len(sizes) != count or sum(sizes) != total:
        raise InvalidRangeError(f"put: lengths={sizes} for {total} rows of {count} sequences")
    return sizes


def _receivers(batch: Batch) -> list[tuple[int, int]]:
    """(sequence, position of its item), in the order of the items; a sequence's last item counts.

    Without items: all sequences in the order of the batch, with their first positions in it.
    """
    receivers: dict[int, int] = {}
    try:
        indices = [index for index, *_ in batch.multimodal]
    except TypeError as error:
        raise InvalidBatchError(
            f"start_forward: multimodal={batch.multimodal!r:.60}; it must be pairs of (index, item)"
        ) from error
    for index in indices:
        check_whole("start_forward", "multimodal index", index)
    for index in map(int, indices) if indices else range(len(batch)):
        if index >= len(batch):
            raise InvalidRangeError(f"start_forward: multimodal index {index} of a batch of {len(batch)}")
        seq, position = int(batch.sequences[index]), int(batch.positions[index])
        if batch.multimodal or seq not in receivers:
            receivers[seq] = position
    return list(receivers.items())


def _split(
    ctx: ml.Context, key: ml.Tensor, value: ml.Tensor, sizes: Sequence[int], dtype: ml.DType
) -> list[tuple[ml.Tensor, ml.Tensor]]:
    parts, start = [], 0
    for size in sizes:
        k, v = (x.slice(ctx, 0, start, start + size).cast(ctx, dtype) for x in (key, value))
        parts.append((k, v))
        start += size
    return parts
