"""The rows of a batch as sequences of our caches, and the forward pass that they are in.

transformers has no call that begins a pass: every layer puts its keys when it computes them. A pass therefore
begins with the first layer that has already taken part in the last one::

    layer 0   |=====|      all layers hold 5 tokens
    layer 1   |=====|
    layer 0   |=====|==|   layer 0 puts 2 more: a pass of 2 tokens begins, cells are found for all layers
    layer 1   |=====|==|   layer 1 joins it
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch

from kvcache import (
    Batch,
    CacheFullError,
    CausalCache,
    DenseBatch,
    EncoderCache,
    InvalidRangeError,
    KVCacheError,
    NotSupportedError,
    OrderError,
    Snapshot,
    WrapperSnapshot,
)
from kvcache.integrations.conversations import check_missing
from kvcache.integrations.rows.caches import CHUNKED, FULL, SLIDING, Kind, batch_of_rows
from kvcache.integrations.rows.sequences import ClaimedRows, SharedSequence
from kvcache.integrations.transformers.encoded import read_encoded
from kvcache.integrations.transformers.kinds import Trait, grows
from kvcache.integrations.transformers.passes import ForwardPass, Pair
from kvcache.integrations.transformers.pool import CachePool
from kvcache.integrations.transformers.rope import check_rotation
from kvcache.integrations.transformers.saving import HFSnapshot, Interior
from kvcache.integrations.transformers.stored import Stored, is_recorded, tokens_of, without_gradients

__all__ = ["BatchRows", "cannot_crop", "untraced"]

PREFILL = 16
"""The tokens of a prefill that drafting may remove, although windows keep only its end."""

Method = TypeVar("Method", bound=Callable[..., Any])
Found = TypeVar("Found")


def untraced(method: Method) -> Method:
    """Exclude from torch.compile: a cell table cannot be traced."""
    return cast("Method", torch.compiler.disable(method))  # type: ignore[no-untyped-call]


def cannot_crop(length: int, stored: int) -> InvalidRangeError:
    """The error for a crop of ``stored`` tokens to a ``length`` that is negative or larger."""
    wanted = f"keep {length}" if length > stored else f"take back {stored - length}"
    return InvalidRangeError(f"crop: cannot {wanted} tokens; the cache has {stored}")


class BatchRows(ClaimedRows):
    """One sequence for each row of the batch; all have the same length and grow together."""

    def __init__(self, pool: CachePool) -> None:
        super().__init__()
        self.pool = pool
        self.sequences: list[int] = []
        """The sequences of ``claimed``, one for each row."""
        self.length = 0
        """Tokens of every row, including those of the current pass."""
        self.seen = [0] * pool.plan.numbers
        """How many of them each layer has stored; after the layers, the same for states and others
        (``Plan.part``).
        """
        self.prompt, self.drafts = 0, 0
        """Tokens of the prompt that a single row began with (``HFSession``; 0: unknown), and how many may
        follow it in its last pass.
        """
        self.removed = 0
        """Tokens removed from the middle, which a caller may still count: see ``check_positions``."""
        self.limit: tuple[int, str] | None = None
        """The most tokens of a row, and the rotation that changes beyond; None: any number."""
        self.settled: int | None = None
        """While passes are recorded, the length that a crop may return to, regardless of windows."""
        self.inputs: dict[tuple[int, str], torch.Tensor] = {}
        """By layer and state, the convolution's inputs since then (rows, channels, tokens), after its state
        at that point.
        """
        self.interior: list[Interior] = []
        """What ``rewind`` can go back to, ascending."""
        self.session_snapshots: Callable[[int | None], Sequence[Snapshot]] | None = None
        """For the row of a session, ``Session.snapshots``."""
        self._pass: ForwardPass | None = None

    def most(self, rows: int) -> tuple[int, str] | None:
        """The most tokens of each of ``rows`` rows, and the reason; None: any number."""
        pool, options, limits = self.pool, self.pool.options, []
        if self.limit is not None:
            longest, kind = self.limit
            limits.append(
                (longest, f"of more the model rotates all keys otherwise ({kind}), and shares none")
            )
        whole = [kind for kind in pool.plan.kinds if kind.name in (FULL, CHUNKED)]
        if whole and not options.grow:
            count = (options.max_sequences or rows) if not pool.bound else pool.sequences.max_sequences
            caches = [pool.family.caches[kind] for kind in whole] if pool.bound else []
            if pool.given_away:  # conversations that are open may hold some of it
                tokens = min(cache.cells for cache in caches) // rows
            elif caches:
                tokens = self.length + min(cache.free_cells for cache in caches) // rows
            else:
                tokens = count * options.capacity // rows
            remedy = "" if pool.given_away else ", or grow=True"
            cells = f"{count} x capacity={options.capacity} cells"
            limits.append((tokens, f"there is no more room in {cells}; pass a larger capacity={remedy}"))
        return min(limits, default=None)

    # One pass.

    def enter(self, layer: int, tokens: int, batch: int, like: torch.Tensor | None = None) -> ForwardPass:
        """The pass of ``tokens`` new tokens of ``layer``; the first layer begins it. Call ``reached`` when
        the layer has stored them.
        """
        current = self._pass
        if self.seen[layer] == self.length:
            check_missing("HFCache", self.prompt, self.length, tokens, self.drafts)
            current = self._begin(tokens, batch, like)
        elif current is None or current is not self.pool.current or self.seen[layer] != current.begin:
            current = self.current(layer)  # raises the specific error
        if tokens != current.tokens or batch != len(self.sequences):
            raise InvalidRangeError(
                f"HFCache: layer {self._layer(layer)} puts {tokens} tokens of {batch} rows, in a pass of "
                f"{current.tokens} tokens of {len(self.sequences)} rows"
            )
        return current

    def reached(self, layer: int) -> None:
        """Record that ``layer`` has taken part in the current pass."""
        self.seen[layer] = self.length

    def current(self, layer: int) -> ForwardPass:
        """The current pass, in which ``layer`` has not taken part yet."""
        self.pool.check_current(self._pass)
        if self._pass is None or self.seen[layer] != self._pass.begin:
            what = f"layer {self._layer(layer)} has had {self.seen[layer]} tokens of {self.length}"
            raise self._unfinished(what, self.seen[layer])
        return self._pass

    def _layer(self, part: int) -> int:
        return part % len(self.pool.plan.layers)

    def begun_later(self, layer: int) -> bool:
        """Whether a layer after ``layer`` has taken part in the current pass."""
        count = len(self.pool.plan.layers)
        return self.length in (*self.seen[layer + 1 : count], *self.seen[count + layer + 1 :])

    @property
    def under_way(self) -> ForwardPass | None:
        """The last pass, unless these rows, or those of a fork, have changed since it began."""
        return self._pass if self.pool.current is self._pass else None

    def lengthen(self, layers: Collection[int], tokens: int) -> None:
        """Extend the current one-token pass, which only ``layers`` have begun, to ``tokens``; they enter it
        again.
        """
        begun = self.under_way
        assert begun is not None
        if begun.tokens != tokens and self.seen.count(self.length) == len(layers):
            for cache in reversed(self.pool.family.tops):
                cache.undo_forward()
            self._pass, self.length = None, begun.begin
        for layer in layers:
            self.seen[layer] = begun.begin

    def _unfinished(self, what: str, complete: int) -> KVCacheError:
        """The error for an incomplete pass; ``complete`` is the number of tokens that all layers have."""
        kept = self._reach(complete)
        return OrderError(
            f"HFCache: {what}; the previous forward pass did not reach all layers. "
            + (f"Call crop({kept - self.length}) to undo it" if kept else "Call reset() and start again")
            + (f": {self._why()}" if kept < complete else "")
        )

    def _begin(self, tokens: int, batch: int, like: torch.Tensor | None) -> ForwardPass:
        if self.seen.count(self.length) + self.seen.count(0) < len(self.seen):
            behind = {self._layer(i): n for i, n in enumerate(self.seen) if n not in (0, self.length)}
            raise self._unfinished(f"layers {[*behind]} are behind", min(behind.values()))
        if self.limit is not None:
            check_rotation("HFCache", self.length + tokens, self.limit)
        pool = self.pool
        if tokens > 1 and self.length:
            pool.plan.refuse("HFCache", Trait.BY_ONE, f"pass these {tokens} tokens one at a time")
        pool.make_given(self._pass)
        self._keep_interior()
        if like is not None:
            pool.bind(batch, like)
        pool.settle_places()
        self._make_windows_keep(tokens)
        last = self._pass
        if last is not None and not last.attends:
            gathered = [kind for kind, reading in last.readings.items() if not reading.is_view]
            if gathered:
                pool.family.line_up([pool.family.caches[kind] for kind in gathered], self.sequences, tokens)
        fresh = not self.sequences
        if fresh:
            self.become(pool.take(batch))
        try:
            if batch != len(self.sequences):
                raise InvalidRangeError(
                    f"HFCache: the batch has {batch} rows, and the cache holds {len(self.sequences)}; use "
                    "batch_repeat_interleave or batch_select_indices, or another cache"
                )
            current = self._growing(lambda: self._start(tokens), self.length + tokens)
        except BaseException:
            if fresh:
                self.become([])
            raise
        self._pass = pool.current = current
        self.length += tokens
        return current

    def _keep_interior(self) -> None:
        """With ``interval``, keep what windows and states hold at the end of the last pass."""
        interval = self.pool.options.interval
        if interval is None or Trait.INSIDE in self.pool.plan.traits:
            return
        last = self.interior[-1].length if self.interior else 0
        if self.length - last < interval:
            return
        rows = []
        for seq in self.sequences:
            row = {n: self.pool.family.tops[n].snapshot(seq) for n in self.pool.family.indivisible}
            for part in row.values():
                part.detach()
            rows.append(row)
        if any(rows):
            self.interior.append(Interior(self.length, tuple(rows)))

    def _make_windows_keep(self, tokens: int) -> None:
        """While passes are recorded, make windows keep what a crop after ``tokens`` more may return to."""
        last = self.under_way
        if self.settled is None or self.length <= self.settled:
            return
        if last is not None and last.stored:  # a prefill of which windows keep only the end
            self.settled = max(self.settled, self.length - PREFILL)
        aside = self._aside(self.length)
        if self.pool.look_back(self.length + tokens - self.settled):
            assert last is not None or not aside
            for kind in aside:
                for seq in self.sequences:
                    self.pool.family.caches[kind].remove(seq, 0)
                self._refill(last, kind, self.length)

    def _growing(self, act: Callable[[], Found], length: int) -> Found:
        """Call ``act``; with ``grow``, double the buffers, or enlarge them for ``length``, if it does not
        fit.
        """
        try:
            return act()
        except CacheFullError:
            if not self.pool.options.grow:
                raise
        self.pool.reserve(max(2 * self.pool.options.capacity, length))
        return act()

    def _start(self, tokens: int) -> ForwardPass:
        """Find cells in all caches, or in none."""
        family, ctx = self.pool.family, self.pool.ctx
        current = ForwardPass(self.length, tokens, self.pool.plan.attends)
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
                capacity, count = self.pool.options.capacity, self.pool.sequences.max_sequences
                remedy = (
                    f"{f'{count} rows share' if count > 1 else 'one row has'} {count} x capacity={capacity} "
                    "cells, and padding takes cells too: pass a larger capacity="
                    f"{'' if self.pool.given_away else ', or grow=True'}"
                )
                raise CacheFullError(error.asked, error.free, error.held, "HFCache", remedy) from error
            raise
        for kind, kept in current.stored.items():
            self._start_short(current, kind, family.caches[kind], kept)
        if current.attends:
            for cache in family.caches.values():
                forward = cache.pass_under_way()
                if forward is not None:  # a pass may complete no entries
                    forward.reading.expected = None  # a later mask may change what is read
        return current

    def _start_short(self, current: ForwardPass, kind: Kind, cache: CausalCache, kept: int) -> None:
        """Store only the last ``kept`` new tokens, which are all that later ones can see. Earlier tokens are
        read first.
        """
        if current.begin:
            current.readings[kind] = self.reading(kind, current.begin)
        for seq in self.sequences:
            cache.remove(seq, 0)
        cache.start_forward(self.pool.ctx, self._batch(current.tokens, kept))

    def _batch(self, tokens: int, kept: int) -> Batch:
        rows = len(self.sequences)
        return batch_of_rows(self.sequences, [self.length + tokens - kept] * rows, [kept] * rows)

    def reading(self, kind: Kind, begin: int) -> DenseBatch:
        """A reading of what tokens from ``begin`` on see."""
        first = max(0, begin - kind.size + 1) if kind.size else 0
        return DenseBatch(self.pool.family.caches[kind], self.sequences, first)

    # Attention layers.

    def update(
        self, layer: int, kind: Kind, key: torch.Tensor, value: torch.Tensor, defer: bool = False
    ) -> Pair:
        """Store K and V (rows, heads, new tokens, dim); returns everything that they see, (rows, heads,
        tokens, dim). With ``defer``, reading is deferred if our caches may compute attention.
        """
        rows, _, tokens, _ = key.shape
        current, pool = self.enter(layer, tokens, rows, key), self.pool
        if kind in current.stored:
            return self._update_short(current, layer, kind, key, value)
        reading = current.readings.get(kind)
        if reading is None:
            reading = current.readings[kind] = self.reading(kind, current.begin)
        recorded = torch.is_grad_enabled() and is_recorded(key, value)
        views = None if recorded else pool.views.get(layer)
        pair = None if views is None else views.step(reading, key, value)
        if pair is None:
            self._put(pool.family.caches[kind], layer, key, value)
            pool.learn_views(kind, layer, key)
        self.seen[layer] = self.length
        if defer and current.attends and not recorded:
            return Stored(pool, layer, kind, current, reading).pair(key, value, pair)
        if pair is None:
            pair = pool.read(reading, layer, key, value)
        return without_gradients(pair, key, value) if recorded else pair

    def _update_short(
        self, current: ForwardPass, layer: int, kind: Kind, key: torch.Tensor, value: torch.Tensor
    ) -> Pair:
        """``update`` for a pass of which the kind keeps only the end."""
        keys, values, kept = key, value, current.stored[kind]
        reading = current.readings.get(kind)
        if reading is not None:  # copied before new tokens reuse its cells
            past = [x.clone() for x in self.pool.read(reading, layer, key, value)]
            keys, values = torch.cat((past[0], key), 2), torch.cat((past[1], value), 2)
            current.aside[layer] = past[0], past[1]
        if self.settled is not None:
            current.aside[layer] = keys, values
        self._put(self.pool.family.caches[kind], layer, key[:, :, -kept:], value[:, :, -kept:])
        self.reached(layer)
        keys, values = without_gradients((keys, values), key, value)
        keys.stored = None  # type: ignore[attr-defined]
        return keys, values

    def _put(
        self, cache: CausalCache | EncoderCache, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        pool = self.pool
        ctx, bridge = pool.places.contexts.get(layer) or pool.place(layer, key), pool.bridge
        if not key.dtype is value.dtype is pool.like.dtype:
            pool.check_dtype(layer, key, value)
        new = (key.squeeze(2), value.squeeze(2)) if key.shape[2] == 1 else (tokens_of(key), tokens_of(value))
        cache.set_layer(layer)
        cache.put(ctx, bridge.to_backend(ctx, new[0]), bridge.to_backend(ctx, new[1]))

    @untraced
    def peek(self, layer: int, kind: Kind) -> Pair | None:
        """K and V of a layer that the next token may see; None if there are none."""
        if not self.seen[layer]:
            return None
        pool, like = self.pool, self.pool.places.like(layer)
        return pool.read(self.reading(kind, self.length), layer, like, like)

    # Cross attention.

    @untraced
    def put_encoded(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store K and V (rows, heads, length, dim) of the encoder's output, in the current pass. They are
        appended to those of earlier passes, for example after another image.
        """
        pool, current = self.pool, self._pass
        pool.check_current(current)
        assert current is not None
        if current.encoded is None:
            current.encoded = {i: self.encoded(i) for i in pool.plan.crossing}
        before = current.encoded.pop(layer, None)
        if before is not None:
            key, value = torch.cat((before[0], key), 2), torch.cat((before[1], value), 2)
        self._put(pool.family.cross, layer, key, value)

    @property
    def _waiting(self) -> dict[int, Pair | None]:
        """By layer, the encoder's output before the current pass, for layers that have not received the new
        one yet.
        """
        current = self.under_way
        return {} if current is None or current.encoded is None else current.encoded

    def has_encoded(self, layer: int) -> bool:
        """Whether every row has the encoder's output in a layer."""
        waiting = self._waiting
        if layer in waiting:
            return waiting[layer] is not None
        return bool(self.sequences) and all(map(self.pool.family.cross.encoder_cached, self.sequences))

    @untraced
    def encoded(self, layer: int) -> Pair | None:
        """K and V (rows, heads, length, dim) of the encoder's output; None before they are stored."""
        if not self.has_encoded(layer):
            return None
        if layer in self._waiting:
            return self._waiting[layer]
        pool = self.pool
        keys, values = read_encoded(pool.ctx.layer(layer), pool.family.cross, layer, self.sequences)
        like = pool.places.like(layer)
        return pool.bridge.to_torch(keys, like), pool.bridge.to_torch(values, like)

    # Sequences.

    def select(self, indices: Sequence[int]) -> None:
        """Replace row i by the previous row ``indices[i]``. Content used by several rows is shared, not
        copied.
        """
        if not self.sequences:
            return
        if not indices or any(not 0 <= index < len(self.sequences) for index in indices):
            raise InvalidRangeError(
                f"HFCache: rows {list(indices)} of {len(self.sequences)}; keep at least one, or call reset()"
            )
        chosen = [self.claimed[index] for index in indices]
        kept = list(dict.fromkeys(chosen))
        self.pool.check_free(len(chosen) - len(self.claimed))  # raises before anything changes
        self.become(kept)  # the dropped sequences are free for copies
        rows: list[SharedSequence] = []
        for one in chosen:
            rows.append(self.pool.fork(one, self.length) if one in rows else one)
        self.become(rows)
        self.interior = [replace(one, rows=tuple(one.rows[i] for i in indices)) for one in self.interior]
        self._pass = None
        self._settle()

    def become(self, claims: list[SharedSequence]) -> None:
        """Replace the sequences; those without other claims are emptied."""
        self.replace_all(claims)
        self.sequences = [one.seq for one in claims if one.seq is not None]
        if self.pool.bound:
            self.pool.sequences.reclaim()

    def fork(self) -> BatchRows:
        """Independent rows with the same content; cells are shared."""
        pool = self.pool
        pool.plan.refuse("fork", Trait.INSIDE, "generate without forks, or use another cache from the start")
        self.check_complete("fork", whole=True)
        copy = BatchRows(pool)
        copy.length, copy.seen, copy.removed = self.length, [*self.seen], self.removed
        copy.interior = [*self.interior]
        if self.claimed:
            pool.check_free(len(self.claimed))
            copy.become([pool.fork(one, self.length) for one in self.claimed])
        return copy

    def adopt(self, seq: int, length: int) -> BatchRows:
        """Use one row: an existing sequence with ``length`` tokens."""
        one = BatchRows(self.pool)
        one.become([self.pool.sequences.lent(seq)])
        one.length, one.seen = length, self._all_at(length)
        return one

    def _all_at(self, length: int) -> list[int]:
        """The count of each layer when all have ``length`` tokens; 0 for indices without content."""
        plan = self.pool.plan
        storing = [i for i, kind in enumerate(plan.layers) if grows(kind)]
        storing += [
            plan.part(i)
            for i, kind in enumerate(plan.layers)
            if (self._indexes(i) if i in plan.indexed else kind.attends and plan.states[i])
        ]
        for i, compression in plan.compressed.items():
            storing += [part for n in range(len(compression.names)) for part in plan.parts(i, n)]
        return [length if number in storing else 0 for number in range(plan.numbers)]

    def _indexes(self, layer: int) -> bool:
        """Whether a layer has its own indexer keys; some layers use the selection of another's indexer."""
        pool = self.pool
        return pool.plan.part(layer) in pool.family.caches[pool.plan.layers[layer]].storage.buffers

    def snapshot(self, whole: bool = True) -> HFSnapshot:
        """The current content of all rows; ``whole`` refuses a first pass that failed before its last
        layer.
        """
        self.pool.plan.refuse("snapshot", Trait.INSIDE, "what a cache holds is not the whole state")
        self.check_complete("snapshot", whole)
        if not self.sequences:
            raise OrderError("snapshot: the cache is empty; run a forward pass first")
        pool = self.pool
        rows = tuple(pool.family.all.snapshot(seq) for seq in self.sequences)
        interior = tuple(self.interior)
        return HFSnapshot(self.length, rows, pool.like, len(pool.plan.layers), self.removed, interior)

    def snapshot_to_save(self, inside: int | None) -> HFSnapshot:
        """``snapshot`` with at most ``inside`` bytes of ``interior``, which has those of a session, too."""
        snapshot = self.snapshot()
        if self.session_snapshots is not None:
            numbers, interior = self.pool.family.indivisible, []
            for one in self.session_snapshots(inside)[:-1]:
                parts = one.parts if isinstance(one, WrapperSnapshot) else (one,)
                interior.append(Interior(one.end, ({n: parts[n] for n in numbers},)))
            snapshot = replace(snapshot, interior=tuple(interior))
        return snapshot.thinned(inside)

    def restore(self, snapshot: HFSnapshot) -> None:
        """Replace the rows by a snapshot. An error leaves them unchanged."""
        rows, before = len(snapshot.rows), None
        if self.pool.given_away and rows != len(self.sequences):
            raise InvalidRangeError(
                f"restore: a snapshot of {rows} rows, into {len(self.sequences)} of an HFPrefixCache"
            )
        with self.pool.bound_to(rows, snapshot.like):
            if self.sequences and self.length:
                before = self.snapshot(whole=False)
            try:
                self._growing(lambda: self._put_back(snapshot), snapshot.length)
            except BaseException:
                self.clear()
                if before is not None:
                    self._put_back(before)
                raise

    def _put_back(self, snapshot: HFSnapshot) -> None:
        self.clear()
        if not self.claimed:
            self.become(self.pool.take(len(snapshot.rows)))
        for seq, row in zip(self.sequences, snapshot.rows, strict=True):
            self.pool.put_back(self.pool.family, seq, row)
        self.length, self.seen = snapshot.length, self._all_at(snapshot.length)
        self.removed, self.interior = snapshot.removed, [*snapshot.interior]
        self._settle()
        self.pool.current = None

    def complete(self, whole: bool = True) -> int:
        """The number of tokens that all layers have: ``length``, unless a pass failed. ``whole``: include
        layers without any tokens, as after a first pass that failed before its last layer, or with early
        exit.
        """
        full = self._all_at(self.length) if whole and self.length else self.seen
        pairs = zip(self.seen, full, strict=True)
        return min(
            (had for had, least in pairs if had < least or had not in (0, self.length)), default=self.length
        )

    def check_complete(self, op: str, whole: bool = False) -> None:
        """Raise OrderError after a failed pass; see ``complete``."""
        if (complete := self.complete(whole)) < self.length:
            raise self._unfinished(f"{op}: layers are behind", complete)

    def undo_failed(self) -> None:
        """After a failed pass, go back to its beginning, or to the last earlier length that all layers can
        reach.
        """
        if (complete := self.complete()) < self.length:
            self.cut(self._reach(complete))

    def rewind(self, length: int) -> int:
        """Keep at most ``length`` positions, the most that the rows can go back to; returns how many."""
        if not 0 <= length <= self.length:
            raise InvalidRangeError(f"rewind: to {length}; the cache has {self.length} tokens")
        length = min(length, self.complete())
        reached = self._reach(length)
        later = [one for one in self.interior if reached < one.length <= length]
        if later:
            self.cut(later[-1].length, later[-1].rows)
        else:
            self.cut(reached)
        return self.length

    def cut(self, length: int, marks: Sequence[Mapping[int, Snapshot]] = ()) -> None:
        """Keep positions ``[0, length)``. Raises NotSupportedError if the next token would miss something.
        ``marks``: for each row, snapshots at ``length`` by the number of the cache, if known.
        """
        if not 0 <= length <= self.length:
            raise cannot_crop(length, self.length)
        if length == self.length:
            self.check_complete("crop")
            self._settle()
            return
        complete = min((seen for seen in self.seen if seen), default=0)
        if length:
            self.pool.plan.refuse("crop", Trait.INSIDE, "call reset() and start again")
        if complete < length:
            raise self._unfinished(f"crop: to {length} of {self.length} tokens", complete)
        marked = {number for row in marks for number in row}
        if self._reach(length, marked) < length:
            raise NotSupportedError(f"crop: to {length} of {self.length} tokens: {self._why()}")
        family, aside, last = self.pool.family, self._aside(length), self.under_way
        aside = {kind: cache for kind, cache in aside.items() if family.tops.index(cache) not in marked}
        if complete == self.length:
            self.pool.make_given(self._pass)
        changes = []
        for i, seq in enumerate(self.sequences):
            for number, cache in enumerate(family.tops):
                if number in marked:
                    restored: Any = cache  # each takes its own kind of snapshot
                    change = restored.prepare_restore_snapshot(seq, marks[i][number])
                    assert change is not None, "the rows are longer than where their marks are"
                    changes.append(change)
                else:
                    changes.append(cache.prepare_remove(seq, 0 if cache in aside.values() else length, None))
        for change in changes:
            change()
        for kind in aside:
            self._refill(last, kind, length)
        self.pool.current = None
        self._now(length)

    def _reach(self, length: int, marked: Collection[int] = ()) -> int:
        """The last position up to ``length`` that all rows can go back to; the caches numbered in ``marked``
        can go back to ``length``.
        """
        family = self.pool.family
        while length:
            aside = self._aside(length)
            others = [
                cache
                for number, cache in enumerate(family.tops)
                if number not in marked and cache not in aside.values()
            ]
            reached = min(
                (c.resume_point(seq, length) for c in others for seq in self.sequences), default=length
            )
            if reached == length:
                break
            length, marked = reached, ()
        return length

    def _aside(self, length: int) -> dict[Kind, CausalCache]:
        """By kind of which the current pass stores only a part: the tokens before ``length`` that it set
        aside.
        """
        current = self.under_way
        if current is None or not length or length < current.begin:
            return {}
        if length > current.begin and (self.settled is None or length < self.settled):
            return {}  # it was not recorded
        return {kind: self.pool.family.caches[kind] for kind in current.stored}

    def _refill(self, current: ForwardPass | None, kind: Kind, length: int) -> None:
        """Put the tokens that a pass has set aside back into empty windows."""
        pool = self.pool
        assert current is not None
        cache, reading = pool.family.caches[kind], current.readings.get(kind)
        begin = current.begin if reading is None else reading.begin
        kept = min(pool.family.kept(kind) or length, length - begin)
        cache.start_forward(pool.ctx, self._batch(length - self.length, kept))
        for layer, other in pool.plan.held.items():
            if other != kind or not (layer in current.aside or self.seen[layer]):
                continue
            if layer in current.aside:
                keys, values = current.aside[layer]
            else:  # the pass did not reach it, and nothing was written
                assert reading is not None
                like = pool.places.like(layer)
                keys, values = (x.clone() for x in pool.read(reading, layer, like, like))
            part = slice(length - begin - kept, length - begin)
            self._put(cache, layer, keys[:, :, part], values[:, :, part])

    def _settle(self) -> None:
        """Declare the current tokens final."""
        self.inputs.clear()
        if self.settled is not None:
            self.settled = self.length
            if self._pass is not None:
                self._pass.aside.clear()

    def record(self, on: bool = True) -> None:
        """Record passes from now on, so that a crop can undo a whole pass, or ``lookback`` tokens of the
        first long one.
        """
        self.settled = self.length if on else None
        self.inputs.clear()

    def _why(self) -> str:
        family, reasons = self.pool.family, []
        if family.states is not None:
            points = [{*family.states.checkpoints(seq), family.states.offset(seq)} for seq in self.sequences]
            common = sorted(set.intersection(*points))
            reasons.append(
                f"recurrent states can go back to {common} and 0 only (call checkpoint() to add one)"
            )
        if any(kind.name == SLIDING for kind in family.caches):
            option = f"HFCache(lookback={self.pool.options.lookback})"
            reasons.append(
                f"sliding windows no longer have the tokens that are visible from there; {option} keeps more"
            )
        return ", and ".join(reasons)

    def remove(self, begin: int, end: int) -> None:
        """Remove positions ``[begin, end)`` of every row; later ones move down."""
        self.pool.plan.refuse("remove", Trait.INSIDE, "they would go on with what was removed")
        self.check_complete("remove")
        if not 0 <= begin <= end <= self.length:
            raise InvalidRangeError(f"remove: [{begin}, {end}) of {self.length} tokens")
        if end == self.length:
            self.cut(begin)
            return
        self.pool.plan.refuse("remove", Trait.COMPRESSED, "remove the end only, or start again")
        if self.pool.plan.indexed:
            raise NotSupportedError(
                f"remove: [{begin}, {end}) of {self.length} tokens: the keys of indexers "
                f"({self.pool.plan.model_type}) cannot be re-encoded; remove the end only, or start again"
            )
        self.pool.remove(self.sequences, begin, end)
        self.removed += end - begin
        self.interior = [one for one in self.interior if one.length <= begin]
        self._now(self.length - (end - begin))

    def clear(self) -> None:
        """Remove everything, and release the sequences of this pool."""
        if self.pool.given_away:
            for seq in self.sequences:
                self.pool.sequences.cut(seq, 0)
        else:
            self.become([])
        self.removed = 0
        self._now(0)

    def _now(self, length: int) -> None:
        self.length = length
        self.interior = [one for one in self.interior if one.length <= length]
        self.seen = [min(seen, length) for seen in self.seen]
        self._pass = None
        self._settle()
