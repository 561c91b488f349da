"""The rows of a batch as sequences of our caches, and the forward pass that they are in.

transformers has no call that begins a pass: every layer brings its keys when it comes to them. A pass
therefore begins with the first layer that has had its share of the last one::

    layer 0   |=====|      all layers hold 5 tokens
    layer 1   |=====|
    layer 0   |=====|==|   layer 0 brings 2 more: a pass of 2 tokens begins, cells are found for all layers
    layer 1   |=====|==|   layer 1 joins it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import torch

from kvcache import (
    Batch,
    CacheFullError,
    EncoderCache,
    InvalidRangeError,
    KVCacheError,
    NotSupportedError,
    OrderError,
)
from kvcache.dense import DenseReading, read_encoded
from kvcache.integrations.transformers.kinds import Attending, Kind
from kvcache.integrations.transformers.saving import HFSnapshot
from kvcache.integrations.transformers.store import Store

__all__ = ["Pass", "Rows", "untraced"]

Method = TypeVar("Method", bound=Callable[..., Any])


def untraced(method: Method) -> Method:
    """Run as it is in code that torch.compile compiles around it: a cell table is nothing to trace."""
    return cast("Method", torch.compiler.disable(method))  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class Pass:
    """One forward pass over positions ``[begin, begin + tokens)`` of every row."""

    begin: int
    tokens: int
    stored: dict[Kind, int] = field(default_factory=dict)
    """How many of the new tokens a kind keeps, where a window keeps not all of them."""
    readings: dict[Kind, DenseReading] = field(default_factory=dict)
    """What each kind's layers read: the past alone where not all that is new is kept."""


class Rows:
    """As many sequences as the batch has rows, all of one length, growing in step."""

    def __init__(self, store: Store, layers: int) -> None:
        self.store = store
        self.sequences: list[int] = []
        self.length = 0
        """Tokens of every row, those of the pass under way included."""
        self.seen = [0] * layers
        """How many of them each layer has had."""
        self.expected: int | None = None
        """Tokens of the pass that a mask was made for and that has not begun."""
        self.like: torch.Tensor | None = None
        """An empty tensor with the dtype and on the device of the model's keys."""
        self._pass: Pass | None = None

    # One pass.

    def enter(self, layer: int, tokens: int, batch: int, like: torch.Tensor | None = None) -> Pass:
        """The pass that ``tokens`` new tokens of ``layer`` belong to; begins it where it is the first.

        ``reached`` says that the layer has had them.
        """
        seen = self.seen[layer]
        if seen == self.length:
            current = self._begin(tokens, batch, like)
        else:
            current = self.current(layer)
        if tokens != current.tokens or batch != len(self.sequences):
            raise InvalidRangeError(
                f"HFCache: layer {layer} brings {tokens} tokens of {batch} rows, in a pass of "
                f"{current.tokens} tokens of {len(self.sequences)} rows"
            )
        return current

    def reached(self, layer: int) -> None:
        """``layer`` has had its share of the pass under way."""
        self.seen[layer] = self.length

    def current(self, layer: int) -> Pass:
        """The pass under way, which ``layer`` has not reached yet."""
        self.store.check_current(self._pass)
        if self._pass is None or self.seen[layer] != self._pass.begin:
            raise self._unfinished(f"layer {layer} has had {self.seen[layer]} tokens of {self.length}")
        return self._pass

    def _unfinished(self, what: str) -> KVCacheError:
        complete = min((seen for seen in self.seen if seen), default=0)
        return OrderError(
            f"HFCache: {what}; the forward pass before did not reach all layers. Call "
            + (f"crop({complete - self.length})" if complete else "reset()")
            + " to take it back"
        )

    def _begin(self, tokens: int, batch: int, like: torch.Tensor | None) -> Pass:
        behind = [i for i, seen in enumerate(self.seen) if seen not in (0, self.length)]
        if behind:
            raise self._unfinished(f"layers {behind} are behind")
        store = self.store
        if like is not None:
            store.bind(batch, like)
        fresh = not self.sequences
        if fresh:
            self.sequences = store.take(batch)
        try:
            if batch != len(self.sequences):
                raise InvalidRangeError(
                    f"HFCache: a batch of {batch} rows, and the cache holds {len(self.sequences)}; use "
                    "batch_repeat_interleave or batch_select_indices, or another cache"
                )
            current = self._start_growing(tokens)
        except BaseException:
            if fresh:
                store.release(self.sequences)
                self.sequences = []
            raise
        self._pass = store.current = current
        self.length += tokens
        self.expected = None
        return current

    def _start_growing(self, tokens: int) -> Pass:
        """As :meth:`_start`; with ``grow`` in buffers of twice the size, where it does not fit."""
        capacity = self.store.options.capacity
        try:
            return self._start(tokens)
        except CacheFullError:
            if not self.store.options.grow:
                raise
        self.store.reserve(max(2 * capacity, self.length + tokens))
        return self._start(tokens)

    def _start(self, tokens: int) -> Pass:
        """Find cells in all caches, or in none."""
        family, ctx, current = self.store.family, self.store.ctx, Pass(self.length, tokens)
        for kind in family.caches:
            kept = family.kept(kind)
            if kept is not None and tokens > kept:
                current.stored[kind] = kept
        short = [family.caches[kind] for kind in current.stored]
        batch = self._batch(tokens, tokens)
        started = []
        try:
            for cache in family.tops:
                if not any(cache is other for other in short):
                    cache.start_forward(ctx, batch)
                    started.append(cache)
        except BaseException as error:
            for cache in reversed(started):
                cache.undo_forward()
            if isinstance(error, CacheFullError):
                error.add_note(f"HFCache: capacity={self.store.options.capacity} tokens per sequence")
            raise
        for kind, kept in current.stored.items():
            self._start_short(current, kind, family.caches[kind], kept)
        return current

    def _start_short(self, current: Pass, kind: Kind, cache: Attending, kept: int) -> None:
        """Keep the last ``kept`` new tokens only: all that later ones can see. The past is read first."""
        if current.begin:
            current.readings[kind] = self._reading(kind, current.begin)
        for seq in self.sequences:
            cache.remove(seq, 0)
        cache.start_forward(self.store.ctx, self._batch(current.tokens, kept))

    def _batch(self, tokens: int, kept: int) -> Batch:
        end = self.length + tokens
        positions = np.arange(end - kept, end)
        count = len(self.sequences)
        if count == 1:
            return Batch(positions, np.full(kept, self.sequences[0]))  # type: ignore[arg-type]
        return Batch(np.tile(positions, count), np.repeat(self.sequences, kept))  # type: ignore[arg-type]

    def _reading(self, kind: Kind, begin: int) -> DenseReading:
        """What tokens from ``begin`` on see."""
        first = max(0, begin - kind.size + 1) if kind.size else 0
        return DenseReading(self.store.family.caches[kind], self.sequences, first)

    # Attention layers.

    @untraced
    def update(
        self, layer: int, kind: Kind, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store K and V (rows, heads, new tokens, dim); all that they see, (rows, heads, tokens, dim)."""
        current = self.enter(layer, key.shape[2], key.shape[0], key)
        store = self.store
        cache, kept = store.family.caches[kind], current.stored.get(kind)
        reading = current.readings.get(kind)
        if kept is not None:
            keys, values = key, value
            if reading is not None:  # copied before its cells are given to what is new
                past = self._read(reading, layer, key, value)
                keys, values = torch.cat((past[0], key), 2), torch.cat((past[1], value), 2)
            self._put(cache, layer, key[:, :, -kept:], value[:, :, -kept:])
            self.reached(layer)
            return keys, values
        self._put(cache, layer, key, value)
        self.reached(layer)
        if self.like is None:
            self.like = torch.empty(0, dtype=key.dtype, device=key.device)
        if reading is None:
            reading = current.readings[kind] = self._reading(kind, current.begin)
        return self._read(reading, layer, key, value)

    def _put(
        self, cache: Attending | EncoderCache, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        ctx, bridge = self.store.ctx, self.store.bridge
        cache.set_layer(layer)
        cache.put(ctx, bridge.to_backend(ctx, _tokens(key)), bridge.to_backend(ctx, _tokens(value)))

    def _read(
        self, reading: DenseReading, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        store = self.store
        keys, values = reading.read(store.ctx, layer)
        return store.bridge.to_torch(keys, key), store.bridge.to_torch(values, value)

    @untraced
    def peek(self, layer: int, kind: Kind) -> tuple[torch.Tensor, torch.Tensor] | None:
        """K and V of a layer that the next token may see; None where there are none."""
        if self.like is None or not self.seen[layer]:
            return None
        return self._read(self._reading(kind, self.length), layer, self.like, self.like)

    # Cross attention.

    @untraced
    def put_encoded(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store K and V (rows, heads, length, dim) of the encoder's output, in the pass under way."""
        store = self.store
        store.check_current(self._pass)
        self._put(store.family.cross, layer, key, value)

    @untraced
    def encoded(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """K and V (rows, heads, length, dim) of the encoder's output; None before they are stored."""
        store = self.store
        if self.like is None or not all(store.family.cross.encoder_cached(seq) for seq in self.sequences):
            return None
        keys, values = read_encoded(store.ctx, store.family.cross, layer, self.sequences)
        return store.bridge.to_torch(keys, self.like), store.bridge.to_torch(values, self.like)

    # Sequences.

    def select(self, indices: Sequence[int]) -> None:
        """Row i becomes what row ``indices[i]`` was. What several rows take over is shared, not copied."""
        if not self.sequences:
            return
        if any(not 0 <= index < len(self.sequences) for index in indices):
            raise InvalidRangeError(f"HFCache: rows {list(indices)} of {len(self.sequences)}")
        chosen = [self.sequences[index] for index in indices]
        dropped = [seq for seq in self.sequences if seq not in chosen]
        copies = len(chosen) - len(set(chosen))
        store = self.store
        if copies > len(dropped):
            store.release(store.take(copies - len(dropped)))  # refuses before anything is touched
        store.release(dropped)
        spare = iter(store.take(copies))
        rows: list[int] = []
        for seq in chosen:
            if seq in rows:
                copy = next(spare)
                store.share(seq, copy, self.length)
                rows.append(copy)
            else:
                rows.append(seq)
        self.sequences, self._pass = rows, None

    def fork(self) -> Rows:
        """Rows with the same content, to be continued on their own; cells are shared."""
        store = self.store
        self.check_complete("fork")
        copy = Rows(store, len(self.seen))
        copy.length, copy.seen, copy.like = self.length, [*self.seen], self.like
        copy.sequences = store.take(len(self.sequences)) if self.sequences else []
        for source, target in zip(self.sequences, copy.sequences, strict=True):
            store.share(source, target, self.length)
        return copy

    def adopt(self, seq: int, length: int) -> Rows:
        """One row: a sequence that holds ``length`` tokens already."""
        one = Rows(self.store, len(self.seen))
        one.sequences, one.length, one.like = [seq], length, self.like
        one.seen = [length] * len(self.seen)
        return one

    def snapshot(self) -> HFSnapshot:
        """What all rows hold now."""
        self.check_complete("snapshot")
        if self.like is None:
            raise OrderError("snapshot: the cache is empty; a forward pass comes first")
        family = self.store.family
        return HFSnapshot(self.length, tuple(family.all.snapshot(seq) for seq in self.sequences), self.like)

    def restore(self, snapshot: HFSnapshot) -> None:
        """Become what the snapshot is of. What is raised leaves the rows as they were."""
        store, before = self.store, None
        store.bind(len(snapshot.rows), snapshot.like)
        if self.sequences and self.length:
            before = self.snapshot()
        self.clear()
        try:
            self._put_back(snapshot)
        except BaseException:
            self.clear()
            if before is not None:
                self._put_back(before)
            raise

    def _put_back(self, snapshot: HFSnapshot) -> None:
        self.sequences = self.store.take(len(snapshot.rows))
        for seq, row in zip(self.sequences, snapshot.rows, strict=True):
            self.store.put_back(self.store.family, seq, row)
        self.like, self.length = snapshot.like, snapshot.length
        self.seen = [snapshot.length] * len(self.seen)
        self.store.current = None

    def check_complete(self, op: str) -> None:
        if any(seen not in (0, self.length) for seen in self.seen):
            raise self._unfinished(f"{op}: layers are behind")

    def cut(self, length: int) -> None:
        """Keep positions ``[0, length)``. NotSupportedError where the next token would miss something."""
        if not 0 <= length <= self.length:
            raise InvalidRangeError(f"crop: to {length} of {self.length} tokens")
        if length == self.length:
            return
        if length and any(0 < seen < length for seen in self.seen):
            raise self._unfinished(f"crop: layers have had {sorted(set(self.seen))} tokens, not {length}")
        family = self.store.family
        for seq in self.sequences if length else ():
            if not family.all.can_resume(seq, length):
                raise NotSupportedError(
                    f"crop: to {length} of {self.length} tokens: {self._why(seq, length)}"
                )
        self.store.remove(self.sequences, length)
        self._now(length)

    def _why(self, seq: int, length: int) -> str:
        family = self.store.family
        if family.recurrent is not None and not family.recurrent.can_resume(seq, length):
            held = [*family.recurrent.checkpoints(seq), family.recurrent.offset(seq)]
            return f"recurrent states can go back to {held} and 0 only (call checkpoint() to add one)"
        lookback = self.store.options.lookback
        return (
            f"sliding windows have forgotten what is seen from there; HFCache(lookback={lookback}) keeps more"
        )

    def remove(self, begin: int, end: int) -> None:
        """Forget positions ``[begin, end)`` of every row; later ones move down."""
        self.check_complete("remove")
        if not 0 <= begin <= end <= self.length:
            raise InvalidRangeError(f"remove: [{begin}, {end}) of {self.length} tokens")
        if end == self.length:
            self.cut(begin)
            return
        self.store.remove(self.sequences, begin, end)
        self._now(self.length - (end - begin))

    def clear(self) -> None:
        """Forget everything, and give the sequences back."""
        if self.sequences:
            self.store.release(self.sequences)
        self.sequences = []
        self._now(0)

    def _now(self, length: int) -> None:
        self.length = length
        self.seen = [min(seen, length) for seen in self.seen]
        self._pass, self.expected = None, None


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """(rows, heads, tokens, dim) as (rows * tokens, heads, dim)."""
    if x.shape[0] == 1:
        return x[0].transpose(0, 1)
    return x.transpose(1, 2).flatten(0, 1)
