"""Snapshots of a model that has every kind of cache: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.caches.wrapper import unwrapped
from kvcache.snapshots.snapshot import WrapperSnapshot
from kvcache.testing.models import values
from kvcache.testing.models.states import CONV, DELTA, KINDS, state_values
from kvcache.testing.rigs.attention import look
from kvcache.testing.rigs.encoder import Output
from kvcache.testing.rigs.failing import every_failure, every_way_to_fail
from kvcache.testing.rigs.wrapper import ForeignCache
from ml import DType

from .small_passes import SUM, bound

WINDOW, MEMORY = 3, 5


class Everything:
    """A wrapper of a window, all of the past, states and encoder outputs; and what each sequence is.

    A sequence is the list of its tokens, and the output that came with one of them.
    """

    def __init__(self, backend: ml.Backend, ctx: ml.Context, capacity: int = 12) -> None:
        self.ctx, self.backend, self.capacity = ctx, backend, capacity
        shift = values.shift_positions
        self.window = kvcache.SlidingWindowCache(WINDOW, MEMORY, shift)
        self.causal = kvcache.CausalCache(shift)
        self.states = kvcache.RecurrentCache(CONV, DELTA, shift, checkpoint_interval=1)
        self.encoder = kvcache.EncoderCache()
        self.cache = kvcache.WrapperCache(self.window, self.causal, self.states, self.encoder)
        self.cache.set_config(ml.CacheConfig())
        self.init()
        self.tokens: dict[int, list[int]] = {seq: [] for seq in range(4)}
        self.outputs: dict[int, Output] = {}
        self.next_token, self.next_row = 1, 1

    def init(self) -> None:
        self.cache.init(self.backend, DType.F32, 4, self.capacity, 8)

    def batch(self, sequences: Sequence[int], items: Sequence[int] = ()) -> Batch:
        """The next tokens of ``sequences``; the batch indices ``items`` bring something to encode."""
        lengths = {seq: len(tokens) for seq, tokens in self.tokens.items()}
        positions = []
        for seq in sequences:
            positions.append(lengths[seq])
            lengths[seq] += 1
        return Batch(positions, list(sequences), multimodal=[(index, "an image") for index in items])

    def forward(self, *sequences: int, items: Sequence[int] = ()) -> None:
        """A pass, and what each of its tokens sees."""
        batch = self.batch(sequences, items)
        before = {seq: list(tokens) for seq, tokens in self.tokens.items()}
        self.cache.start_forward(self.ctx, batch)
        ids = list(range(self.next_token, self.next_token + len(sequences)))
        self.next_token += len(ids)
        for seq, token in zip(sequences, ids, strict=True):
            self.tokens[seq].append(token)
        self._put(batch, ids, before)
        self._look(batch)

    def _put(self, batch: Batch, ids: list[int], before: dict[int, list[int]]) -> None:
        key, value = values.keys(ids, batch.positions), values.values(ids)
        for layer_type in range(3):
            self.cache.set_layer_type(layer_type)
            self.cache.set_layer(0)
            self.cache.put(self.ctx, self.ctx.from_numpy(key), self.ctx.from_numpy(value))
        order = list(dict.fromkeys(batch.sequences))
        for kind in KINDS:
            old = np.stack([state_values(before[seq], kind, 0) for seq in order])
            new = np.stack([state_values(self.tokens[seq], kind, 0) for seq in order])
            get, put = (getattr(self.states, f"{verb}{kind}_state") for verb in ("", "set_"))
            np.testing.assert_array_equal(get(self.ctx, 0).to_numpy(), old)
            put(self.ctx, 0, self.ctx.from_numpy(new))
        self.cache.set_layer_type(3)
        for index, _ in batch.multimodal:
            self.outputs[batch.sequences[index]] = Output(batch.positions[index], self.next_row, 2)
            self.next_row += 2
        receivers = dict.fromkeys(batch.sequences[index] for index, _ in batch.multimodal)
        if receivers:
            parts = [self.outputs[seq].rows(0) for seq in receivers]
            rows = [self.ctx.from_numpy(np.concatenate([part[i] for part in parts])) for i in range(2)]
            self.cache.put(self.ctx, rows[0], rows[1])

    def _look(self, batch: Batch) -> None:
        pairs = list(zip(batch.positions, batch.sequences, strict=True))
        for attention, width in ((self.window, WINDOW), (self.causal, 99), (self.states.attention, 99)):
            seen = look(attention, self.ctx, len(pairs))
            for found, (position, seq) in zip(seen, pairs, strict=True):
                low = max(0, position - width)
                assert found == dict(zip(range(low, position + 1), self.tokens[seq][low:], strict=False))
        for seq in self.tokens:
            assert self.encoder.encoder_cached(seq) == (seq in self.outputs)
        if set(batch.sequences) <= self.outputs.keys():
            wanted = [self.outputs[seq].rows(0)[0] for seq in sorted(set(batch.sequences))]
            self.encoder.set_layer(0)
            outputs = self.encoder.get(self.ctx)[0].to_numpy()
            np.testing.assert_array_equal(outputs, np.concatenate(wanted))

    def check(self) -> None:
        """A further token shows all that its sequence is; then it is taken out again."""
        for seq, tokens in self.tokens.items():
            assert self.cache.offset(seq) == len(tokens)
            for attention in (self.causal, self.states.attention):
                assert attention.positions(seq).tolist() == list(range(len(tokens)))
            if tokens and self.causal.free_cells:
                self.forward(seq)
                self.remove(seq, len(tokens) - 1)

    def remove(self, seq: int, begin: int) -> None:
        self.cache.remove(seq, begin)
        del self.tokens[seq][begin:]
        if seq in self.outputs and self.outputs[seq].position >= begin:
            del self.outputs[seq]

    def saved(self, seq: int) -> tuple[list[int], Output | None]:
        return list(self.tokens[seq]), self.outputs.get(seq)

    def restored(self, seq: int, snapshot: WrapperSnapshot, tokens: list[int], output: Output | None) -> None:
        """The sequence is ``snapshot`` of one with ``tokens`` now."""
        begin, end = snapshot.begin, snapshot.end
        self.tokens[seq][begin:] = tokens[begin:end]
        held = self.outputs.pop(seq, None)
        if output is not None and begin <= output.position < end:
            self.outputs[seq] = output
        elif held is not None and held.position < begin:
            self.outputs[seq] = held

    def restore(self, seq: int, snapshot: WrapperSnapshot, tokens: list[int], output: Output | None) -> None:
        assert self.cache.restore(seq, snapshot)
        self.restored(seq, snapshot, tokens, output)
        self.check()


@pytest.fixture
def everything(backend: ml.Backend, ctx: ml.Context) -> Callable[..., Everything]:
    """``everything(capacity)``: the wrapper of all caches, and what its sequences are."""
    return lambda **named: Everything(backend, ctx, **named)


def test_all_caches_are_restored_together(everything: Callable[..., Everything]) -> None:
    r = everything()
    r.forward(0, 1, 0, 0, items=[2])
    r.forward(0, 0, 1, 0)
    first, saved = r.cache.snapshot(0, 0, 3), r.saved(0)
    snapshot, tail = r.cache.snapshot(0), r.cache.snapshot(0, 3)
    assert (snapshot.begin, snapshot.end, snapshot.divisible) == (0, 6, False)
    assert snapshot.in_cache
    size = snapshot.nbytes
    assert size == sum(part.nbytes for part in snapshot.parts)
    r.restore(2, snapshot, *saved)
    r.remove(0, 0)
    r.restore(0, first, *saved)
    r.restore(0, tail, *saved)
    snapshot.detach()
    assert (snapshot.in_cache, snapshot.nbytes) == (False, size)
    r.restore(3, snapshot, *saved)
    r.forward(3, 0, 2, 1)
    r.check()


@pytest.mark.parametrize("detached", [False, True], ids=["in the cache", "copied out"])
def test_a_snapshot_on_another_backend_is_refused_and_nothing_is_touched(
    everything: Callable[..., Everything], detached: bool
) -> None:
    r = everything()
    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        other = Everything(backend, ctx)
        for one in (r, other):
            one.forward(0, 0, 0, items=[1])
        snapshot = other.cache.snapshot(0)
        if detached:
            snapshot.detach()
        for cache, part in ((r.cache, snapshot), *zip(r.cache.caches, snapshot.parts, strict=True)):
            with pytest.raises(kvcache.InvalidRangeError, match=r"restore: the snapshot lies on .*serialize"):
                cache.restore(0, part)  # type: ignore[attr-defined]
        r.check()
        assert r.cache.restore(2, other.cache.snapshot(1)), "what holds nothing lies nowhere"
        moved = kvcache.deserialize(r.backend, kvcache.serialize(backend, snapshot))
        r.restore(1, moved, *other.saved(0))  # type: ignore[arg-type]


def test_one_that_cannot_be_restored_leaves_all_as_they_were(everything: Callable[..., Everything]) -> None:
    r = everything()
    r.forward(0, 0, 0, 1, 0, 0, 1, items=[0, 3])
    snapshot, tail = r.cache.snapshot(0), r.cache.snapshot(0, 4)
    for target in (0, 3, 4, 6):  # a state is that of its own position
        assert not r.cache.restore(1, snapshot, target)
    assert not r.cache.restore(1, tail), "[0, 4) is not there"
    assert not r.cache.restore(3, tail)
    r.check()


def test_scheduled_ones_are_taken_by_all_where_batches_end(everything: Callable[..., Everything]) -> None:
    r = everything()
    r.cache.schedule_snapshots(0, [2, 5, 6])
    while (end := r.cache.next_snapshot(0)) is not None:
        count = end - len(r.tokens[0])
        r.forward(*[0] * count, 1, items=[count - 1] if end == 5 else ())
    saved = r.saved(0)
    taken = r.cache.take_snapshots(0)
    assert [(s.begin, s.end) for s in taken] == [(0, 2), (2, 5), (5, 6)]
    assert r.cache.take_snapshots(0) == []
    r.remove(0, 0)
    for snapshot in taken:
        r.restore(2, snapshot, *saved)
    joined = r.cache.merge(r.cache.merge(taken[0], taken[1]), taken[2])
    assert (joined.begin, joined.end) == (0, 6)
    r.restore(0, joined, *saved)


@pytest.mark.parametrize("detached", [False, True], ids=["in the cache", "copied out"])
def test_what_one_took_where_another_could_not_is_joined_to_the_next(
    everything: Callable[..., Everything], detached: bool
) -> None:
    r = everything()
    r.cache.schedule_snapshots(0, [2, 4, 6])
    r.forward(0, 0, 0)  # 2 is inside: there is no state of it
    for snapshot in r.causal.snapshots_taken(0) if detached else ():
        snapshot.detach()
    assert r.cache.take_snapshots(0) == []
    assert r.cache.skipped_snapshots(0) == [2]
    assert r.cache.skipped_snapshots(0) == [], "it is said once"
    r.forward(0)
    assert [(s.begin, s.end) for s in r.cache.snapshots_taken(0)] == [(0, 4)]
    r.forward(0, 0)
    saved = r.saved(0)
    first, second = r.cache.take_snapshots(0)
    assert [(first.begin, first.end), (second.begin, second.end)] == [(0, 4), (4, 6)]
    r.restore(2, first, *saved)
    r.restore(2, second, *saved)


def test_a_start_that_one_refuses_takes_nothing(everything: Callable[..., Everything]) -> None:
    r = everything()
    r.forward(0, 0, items=[0])
    r.cache.schedule_snapshots(0, [4])
    with pytest.raises(kvcache.InvalidRangeError):
        r.cache.start_forward(r.ctx, Batch([2, 3], [0, 0], multimodal=[(5, None)]))
    assert r.causal.snapshots_taken(0) == r.window.snapshots_taken(0) == []
    r.check()
    r.forward(0, 0)
    saved, (snapshot,) = r.saved(0), r.cache.take_snapshots(0)
    assert (snapshot.begin, snapshot.end) == (2, 4)
    r.remove(0, 2)
    r.restore(0, snapshot, *saved)


def test_a_snapshot_of_all_outlives_the_caches(everything: Callable[..., Everything]) -> None:
    r = everything()
    r.forward(*[0] * 5, items=[2])
    saved, snapshot = r.saved(0), r.cache.snapshot(0)
    r.cache.close()
    assert not snapshot.in_cache
    r.init()
    r.tokens, r.outputs = {seq: [] for seq in range(4)}, {}
    r.restore(1, snapshot, *saved)


def test_those_asked_before_copies_are_those_of_all_caches(everything: Callable[..., Everything]) -> None:
    r = everything(capacity=4)
    missing: list[int] = []
    r.cache.on_pressure = missing.append
    assert r.cache.on_pressure == missing.append
    r.forward(*[0] * 8)
    snapshot, saved = r.cache.snapshot(0), r.saved(0)
    r.remove(0, 0)
    r.forward(*[1] * 8)
    assert missing == []
    r.forward(1)
    assert missing == [1, 1], "the past, and that beside the states; the window's has fewer tokens"
    r.remove(1, 0)
    r.restore(3, snapshot, *saved)


def test_a_cache_that_takes_none_refuses_for_all(backend: ml.Backend) -> None:
    inner = kvcache.CausalCache()
    cache = bound(kvcache.WrapperCache(inner, ForeignCache(kvcache.CausalCache())), backend, 2, 8, 8)
    none = WrapperSnapshot(0, 0, ())
    calls: list[Callable[[], Any]] = [
        lambda: cache.snapshot(0),
        lambda: cache.restore(0, none),
        lambda: cache.merge(none, none),
        lambda: cache.schedule_snapshots(0, [2]),
        lambda: cache.take_snapshots(0),
    ]
    for call in calls:
        with pytest.raises(ml.NotSupportedError, match="ForeignCache"):
            call()
    inner.schedule_snapshots(0, [1])
    assert inner.take_snapshots(0) == []


@every_way_to_fail
def test_a_failing_backend_restores_none_of_them_or_the_sequence_is_lost(
    backend: ml.Backend, when: str
) -> None:
    lost: list[bool] = []

    def make(limited: ml.Backend, ctx: ml.Context) -> tuple[Everything, WrapperSnapshot]:
        r = Everything(limited, ctx)
        r.forward(0, 0, 1, 0, items=[0, 2])
        snapshot = r.cache.snapshot(0)
        snapshot.detach()
        return r, snapshot

    def check(made: tuple[Everything, WrapperSnapshot]) -> None:
        r, snapshot = made
        saved = r.saved(0)
        lost.append(not r.cache.can_resume(1, 0))
        if lost[-1]:
            with pytest.raises(kvcache.SequenceLostError):
                r.cache.start_forward(r.ctx, Batch([r.cache.offset(1)], [1]))
            r.cache.remove(1, 0)
            r.tokens[1] = []
            r.outputs.pop(1, None)
        r.check()
        r.restore(1, snapshot, *saved)

    every_failure(backend, when, make, lambda made: made[0].cache.restore(1, made[1]), check)
    assert any(lost)
    assert not all(lost)


@every_way_to_fail
def test_a_failing_backend_hands_over_all_scheduled_snapshots_or_none(backend: ml.Backend, when: str) -> None:
    def make(limited: ml.Backend, ctx: ml.Context) -> Everything:
        r = Everything(limited, ctx)
        r.cache.schedule_snapshots(0, [1, 3, 4])
        r.forward(0, 0)
        for snapshot in r.causal.snapshots_taken(0):
            snapshot.detach()
        r.forward(0)
        r.forward(0)
        return r

    def check(r: Everything) -> None:
        r.check()
        saved = r.saved(0)
        taken = r.cache.take_snapshots(0)
        assert [(s.begin, s.end) for s in taken] == [(0, 3), (3, 4)]
        for snapshot in taken:
            r.restore(2, snapshot, *saved)

    every_failure(backend, when, make, lambda r: r.cache.take_snapshots(0), check, stride=3)


def test_what_was_passed_is_refused_and_scheduled_nowhere(everything: Callable[..., Everything]) -> None:
    r = everything()
    r.forward(0, 0)
    with pytest.raises(kvcache.InvalidRangeError):
        r.cache.schedule_snapshots(0, [4, 2])
    r.forward(0, 0)
    assert r.cache.next_snapshot(0) is None
    assert not r.cache.take_snapshots(0)
    assert not r.causal.take_snapshots(0)


def test_a_whole_part_keeps_all_whole(everything: Callable[..., Everything]) -> None:
    r = everything()
    r.forward(*[0] * 5)
    snapshot = r.cache.snapshot(0)
    assert r.cache.split(snapshot, 3) == (None, snapshot)
    assert r.cache.merge(None, snapshot) is snapshot


def tokens(ctx: ml.Context, count: int, dim: int = 2) -> ml.Tensor:
    return ctx.arange(0, count * dim, 1, DType.F32).reshape(ctx, count, 1, dim)


def test_what_is_no_whole_number_is_refused_by_name(backend: ml.Backend, ctx: ml.Context) -> None:
    encoder, causal = kvcache.EncoderCache(), kvcache.CausalCache()
    cache = bound(kvcache.WrapperCache(encoder, causal), backend, 2, 16, 8)
    cache.start_forward(ctx, Batch([0, 1, 2], [0] * 3))
    snapshot = causal.snapshot(0)
    calls: dict[str, Callable[[Any], object]] = {
        "at": lambda bad: causal.split(snapshot, bad),
        "target": lambda bad: causal.restore(1, snapshot, bad),
        "position": lambda bad: causal.evict(0, [0, bad]),
        "except_": lambda bad: causal.set_causal(ctx, [bad]),
        "multimodal index": lambda bad: encoder.start_forward(ctx, Batch([3], [0], multimodal=[(bad, 0)])),
        "set_layer_type": cache.set_layer_type,
    }
    for name, call in calls.items():
        for bad in (1.5, True, "1"):
            with pytest.raises(kvcache.InvalidRangeError, match=name):
                call(bad)
    for part in (cache, causal):
        with pytest.raises(kvcache.InvalidRangeError, match=r"position=8\.7"):
            part.schedule_snapshots(0, [8.7])  # type: ignore[list-item]


def test_a_lifted_mask_that_cannot_be_made_is_not_lifted(
    backend: ml.Backend, ctx: ml.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = bound(kvcache.CausalCache(), backend, 1, 8, 8)
    cache.start_forward(ctx, Batch([0, 1, 2], [0] * 3))
    cache.put(ctx, tokens(ctx, 3), tokens(ctx, 3))
    forward = cache.pass_under_way()
    assert forward is not None
    with monkeypatch.context() as patch:
        patch.setattr(type(forward), "fill", Mock(side_effect=MemoryError()))
        with pytest.raises(MemoryError):
            cache.set_causal(ctx, [0])
    assert not forward.reading.lifted


def scheduled(
    backend: ml.Backend, ctx: ml.Context, *parts: Any, at: Sequence[int]
) -> tuple[kvcache.WrapperCache, list[WrapperSnapshot]]:
    """A wrapper whose sequence 0 has four tokens of one pass, an image with the first; what was taken."""
    cache = bound(kvcache.WrapperCache(*parts), backend, 2, 16, 8)
    cache.schedule_snapshots(0, at)
    cache.start_forward(ctx, Batch(range(4), [0] * 4, multimodal=[(0, "an image")]))
    for part in unwrapped(cache):
        if isinstance(part, kvcache.StateCache):
            part.update_state(ctx, "sum", ctx.full((1, 1), 1.0, DType.F32), 0)
        else:
            part.put(ctx, tokens(ctx, 4), tokens(ctx, 4))
    return cache, cache.take_snapshots(0)


def test_scheduled_snapshots_of_windows_alone_are_joined_as_those_of_one_window(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    Window, Encoder, Wrapper = kvcache.SlidingWindowCache, kvcache.EncoderCache, kvcache.WrapperCache
    for parts in ((Window(3), Window(1)), (Window(3), Encoder()), (Wrapper(Window(3), Encoder()), Window(1))):
        cache, taken = scheduled(backend, ctx, *parts, at=[2, 4])
        assert [(snapshot.begin, snapshot.end) for snapshot in taken] == [(0, 2), (0, 4)]
        for joined in (cache.merge(*taken), cache.join(taken)):
            assert (joined.begin, joined.end) == (0, 4)
            assert cache.restore(1, joined)
            for part in unwrapped(cache):
                assert part.encoder_cached(1) if isinstance(part, Encoder) else part.offset(1) == 4


def test_what_a_nested_wrapper_of_windows_took_where_states_could_not_is_joined_to_the_next(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    inner = kvcache.WrapperCache(kvcache.SlidingWindowCache(3), kvcache.EncoderCache())
    states = kvcache.RecurrentCache.of(kvcache.StateCache(SUM))
    cache, taken = scheduled(backend, ctx, states, inner, kvcache.CausalCache(), at=[2, 4])
    assert [(snapshot.begin, snapshot.end) for snapshot in taken] == [(0, 4)]
    assert cache.restore(1, taken[0])


def test_a_snapshot_of_all_tokens_is_not_merged_into_one_of_the_same_beginning(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    parts = kvcache.CausalCache(), kvcache.SlidingWindowCache(3)
    cache, _ = scheduled(backend, ctx, *parts, at=[])
    with pytest.raises(kvcache.InvalidRangeError, match="must be adjacent"):
        cache.merge(cache.snapshot(0, 0, 2), cache.snapshot(0))
    with pytest.raises(kvcache.InvalidRangeError, match="are not adjacent"):
        cache.merge(cache.snapshot(0, 0, 2), cache.snapshot(0, 3))
