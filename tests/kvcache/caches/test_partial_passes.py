"""A pass that puts only some layers, as one that fails: its tokens are in no answer and in no snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ml
from kvcache import (
    Batch,
    CacheFullError,
    CausalCache,
    EncoderCache,
    InvalidRangeError,
    OrderError,
    RecurrentCache,
    SequenceLostError,
    SlidingWindowCache,
    StateCache,
    WrapperCache,
)
from kvcache.caches import branches

from .small_passes import SUM, bound

LAYERS, SEQUENCES, CELLS = 3, 3, 12


class Passes:
    """A cache, and by layer, sequence and position what it was given."""

    def __init__(self, backend: ml.Backend, cache: Any, capacity: int = CELLS) -> None:
        self.cache, self.ctx = bound(cache, backend, SEQUENCES, capacity, capacity), backend.new_context()
        self.number = 0
        self.stored: list[dict[tuple[int, int], float | None]] = [{} for _ in range(LAYERS)]

    def start(self, tokens: Sequence[tuple[int, int]]) -> None:
        self.tokens = list(tokens)
        self.cache.start_forward(self.ctx, Batch([pos for _, pos in tokens], [seq for seq, _ in tokens]))
        for layer in self.stored:
            layer.update(dict.fromkeys(tokens))

    def put(self, layer: int) -> None:
        self.cache.set_layer(layer)
        values = [self.number + i + 1.0 for i in range(len(self.tokens))]
        self.number += len(values)
        host = np.array(values, np.float32).reshape(-1, 1, 1).repeat(4, 2)
        self.cache.put(self.ctx, self.ctx.from_numpy(host), self.ctx.from_numpy(host))
        self.stored[layer].update(zip(self.tokens, values, strict=True))

    def seen(self, layer: int, token: tuple[int, int]) -> list[float | None]:
        stored = self.stored[layer]
        return [value for (s, p), value in stored.items() if s == token[0] and p <= token[1]]

    def check(self, layer: int) -> None:
        """Each query of the pass gets the mean of what it sees, or the layer says what it lacks."""
        self.cache.set_layer(layer)
        query = self.ctx.zeros((len(self.tokens), 1, 4), ml.DType.F32)
        wanted = [self.seen(layer, token) for token in self.tokens]
        sequences = {seq for seq, _ in self.tokens}
        lacks = any(value is None for (seq, _), value in self.stored[layer].items() if seq in sequences)
        for call in (lambda: self.cache.attend(self.ctx, query, 1.0), lambda: self.cache.get(self.ctx)):
            if lacks:
                with pytest.raises(OrderError, match=r"lacks|stores nothing"):
                    call()
        if not lacks:
            found = self.cache.attend(self.ctx, query, 1.0).to_numpy()[:, 0, 0]
            np.testing.assert_allclose(found, [np.mean(np.array(x, np.float64)) for x in wanted], rtol=1e-5)

    def computed(self, seq: int) -> int:
        """By the model: how many positions from 0 on all layers have."""
        count = 0
        while all(layer.get((seq, count)) is not None for layer in self.known()):
            count += 1
        return count

    def known(self) -> list[dict[tuple[int, int], float | None]]:
        return [layer for i, layer in enumerate(self.stored) if i in self.cache.storage.buffers] or [{}]

    def forget(self, seq: int, begin: int) -> None:
        self.cache.remove(seq, begin)
        self.forgotten(seq, begin)

    def forgotten(self, seq: int, begin: int) -> None:
        for layer in self.stored:
            for token in [token for token in layer if token[0] == seq and token[1] >= begin]:
                del layer[token]

    def share(self, src: int, dst: int, length: int) -> None:
        self.cache.copy_prefix(src, dst, length)
        self.shared(src, dst, length)

    def restore(self, src: int, dst: int, detached: bool) -> None:
        """All of one sequence as it is, in the middle of a pass or behind it, for another."""
        held = [(src, p) for p in range(self.offset(src))]
        lacking = {token for token in held for layer in self.known() if layer.get(token) is None}
        if lacking - set(self.tokens):
            with pytest.raises(OrderError, match=r"snapshot: layer \d lacks position"):
                self.cache.snapshot(src)
            return
        kept = self.cache.snapshot(src)
        if detached and lacking:
            with pytest.raises(OrderError, match="have yet to be given tokens"):
                kept.detach()
            return
        if detached and len(held) <= self.cache.free_cells:
            kept.detach()
        assert self.cache.restore(dst, kept)
        self.shared(src, dst, self.offset(src))

    def shared(self, src: int, dst: int, length: int) -> None:
        for layer in self.stored:
            kept = {(s, p): value for (s, p), value in layer.items() if s != dst}
            kept |= {(dst, p): value for (s, p), value in layer.items() if s == src and p < length}
            layer.clear()
            layer.update(kept)

    def offset(self, seq: int) -> int:
        return max((p + 1 for s, p in self.stored[0] if s == seq), default=0)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_passes_of_some_layers_never_show_what_was_not_put(data: Any) -> None:
    with ml.open_backend("numpy") as backend:
        p = Passes(backend, CausalCache())
        for _ in range(data.draw(st.integers(3, 14))):
            op = data.draw(st.sampled_from(["pass", "pass", "pass", "remove", "share", "defrag", "move"]))
            seq, other = data.draw(st.permutations(range(SEQUENCES)))[:2]
            if op == "pass":
                some = [s for s in range(SEQUENCES) if s == seq or data.draw(st.booleans())]
                tokens = [(s, p.offset(s) + i) for s in some for i in range(data.draw(st.integers(1, 3)))]
                if len(tokens) > p.cache.free_cells:
                    p.forget(seq, 0)
                    continue
                p.start(tokens)
                layers = data.draw(
                    st.sampled_from([range(LAYERS), range(LAYERS), range(1), range(2), (0, 2)])
                )
                for layer in layers:
                    p.put(layer)
                    p.check(layer)
                    assert [p.cache.computed(s) for s in range(SEQUENCES)] == [
                        *map(p.computed, range(SEQUENCES))
                    ]
                    if data.draw(st.integers(0, 5)) == 0:
                        p.restore(seq, other, detached=data.draw(st.booleans()))
                        break
            elif op == "remove":
                p.forget(seq, data.draw(st.integers(0, p.offset(seq))))
            elif op == "share":
                p.share(seq, other, data.draw(st.integers(0, p.offset(seq))))
            elif op == "defrag":
                p.cache.defrag()
            else:  # out of the cache and back
                whole = p.computed(seq)
                if whole:
                    kept = p.cache.snapshot(seq, 0, whole)
                    if data.draw(st.booleans()):
                        kept.detach()
                    p.forgotten(seq, whole)
                    assert p.cache.restore(seq, kept)
            for s in range(SEQUENCES):
                assert p.cache.computed(s) == p.computed(s)


def fail(p: Passes, tokens: Sequence[tuple[int, int]], layers: int) -> None:
    p.start(tokens)
    for layer in range(layers):
        p.put(layer)


def test_a_layer_that_was_skipped_says_so_instead_of_showing_what_the_cells_held_before(
    backend: ml.Backend,
) -> None:
    p = Passes(backend, CausalCache())
    fail(p, [(0, 0), (0, 1), (0, 2)], LAYERS)
    p.forget(0, 0)
    fail(p, [(1, 0), (1, 1)], 1)
    p.start([(1, 2)])
    for layer in range(LAYERS):
        p.put(layer)
    p.check(0)
    p.cache.set_layer(2)
    with pytest.raises(
        OrderError, match=r"attend: layer 2 lacks position 0 of sequence 1.* call remove\(1, 0\)"
    ):
        p.cache.attend(p.ctx, p.ctx.zeros((1, 1, 4), ml.DType.F32), 1.0)
    with pytest.raises(OrderError, match=r"snapshot: layer 1 lacks position 0 of sequence 1"):
        p.cache.snapshot(1)
    p.forget(1, 0)
    fail(p, [(1, 0)], LAYERS)
    for layer in range(LAYERS):
        p.check(layer)


def test_behind_a_window_a_failed_pass_is_taken_back_to_where_the_sequence_can_continue(
    backend: ml.Backend,
) -> None:
    p = Passes(backend, SlidingWindowCache(2))
    for position in range(6):
        fail(p, [(0, position)], LAYERS)
    fail(p, [(0, 6)], 1)
    p.start([(0, 7)])
    for layer in range(LAYERS):
        p.put(layer)
    p.cache.set_layer(1)
    with pytest.raises(OrderError, match=r"lacks position 6 .* call remove\(0, resume_point\(0, 6\)\)"):
        p.cache.attend(p.ctx, p.ctx.zeros((1, 1, 4), ml.DType.F32), 1.0)
    begin = p.cache.resume_point(0, 6)
    p.forget(0, begin)
    for position in range(begin, 9):
        p.start([(0, position)])
        for layer in range(LAYERS):
            p.put(layer)
            found = p.cache.attend(p.ctx, p.ctx.zeros((1, 1, 4), ml.DType.F32), 1.0).to_numpy()
            seen = [p.stored[layer][0, at] for at in range(max(0, position - 2), position + 1)]
            np.testing.assert_allclose(found[0, 0], np.mean(seen), rtol=1e-5)


@pytest.mark.parametrize(
    "how", ["a pass that is full", "a snapshot that is not restored", "a pass taken back"]
)
def test_a_pass_goes_on_where_another_call_is_refused_or_taken_back(backend: ml.Backend, how: str) -> None:
    p = Passes(backend, CausalCache(), capacity=4)
    fail(p, [(0, 0)], LAYERS)
    fail(p, [(1, 0), (1, 1), (1, 2)], LAYERS)
    other = p.cache.snapshot(1, 2, 3)
    fail(p, [(0, 1), (0, 2)], 1)
    kept, under_way = p.cache.snapshot(0), p.cache.pass_under_way()
    if how == "a pass that is full":
        with pytest.raises(CacheFullError):
            p.cache.start_forward(p.ctx, Batch(range(30), [2] * 30))
    elif how == "a pass taken back":
        p.cache.start_forward(p.ctx, Batch([0], [2]))
        p.cache.undo_forward(under_way)
    else:
        assert not p.cache.restore(0, other, 9)
    with pytest.raises(OrderError, match="have yet to be given tokens"):
        kept.detach()
    for layer in (1, 2):
        p.put(layer)
    assert p.cache.computed(0) == 3
    assert sorted(kept.layers) == [0, 1, 2]


def test_what_is_restored_after_a_pass_was_taken_back_is_copied_out(backend: ml.Backend) -> None:
    p = Passes(backend, CausalCache(), capacity=4)
    fail(p, [(0, at) for at in range(4)], LAYERS)
    kept = p.cache.snapshot(0)
    kept.detach()
    p.cache.remove(0, 0)
    p.cache.start_forward(p.ctx, Batch([0, 1], [1, 1]))
    p.cache.undo_forward()
    assert p.cache.restore(1, kept)
    assert sorted(p.cache.snapshot(1).layers) == [0, 1, 2]


def test_what_a_window_lacks_it_lacks_after_a_pass_that_evicted_it_was_taken_back(
    backend: ml.Backend,
) -> None:
    cache = SlidingWindowCache(3)
    p = Passes(backend, cache, capacity=32)
    cache.close()
    cache.init(backend, ml.DType.F32, 1, 32, 1)  # a pass takes the cells that it evicts
    for at in range(8):
        fail(p, [(0, at)], 1 if at == 4 else LAYERS)
    under_way = cache.pass_under_way()
    for _ in range(2):
        assert cache.computed(0) == 4
        cache.start_forward(p.ctx, Batch([8], [0]))
        cache.undo_forward(under_way)


def test_what_is_lacking_stays_so_after_all_behind_the_sinks_was_evicted_and_taken_back(
    backend: ml.Backend,
) -> None:
    cache = SlidingWindowCache(0, keep=1)
    p = Passes(backend, cache, capacity=32)
    cache.close()
    cache.init(backend, ml.DType.F32, 1, 32, 4)
    for at in range(2):
        fail(p, [(0, at)], LAYERS)
    kept = cache.snapshot(0)
    fail(p, [(0, 2)], 1)
    kept.detach()  # the cells that the next pass takes are not those that it evicts
    for _ in range(2):
        assert cache.computed(0) == 2
        cache.start_forward(p.ctx, Batch([3, 4], [0, 0]))
        cache.undo_forward()


@pytest.mark.parametrize("length", [1, 5])
def test_positions_that_are_missing_end_what_is_computed(backend: ml.Backend, length: int) -> None:
    p = Passes(backend, CausalCache())
    fail(p, [(0, at + 1) for at in range(length)], LAYERS)  # one off
    fail(p, [(1, 0), (1, 1), (1, 3)], LAYERS)
    assert (p.cache.computed(0), p.cache.computed(1)) == (0, 2)


def test_a_window_that_let_its_first_tokens_go_is_computed_all_the_same(backend: ml.Backend) -> None:
    p = Passes(backend, SlidingWindowCache(2, memory=3))
    for at in range(8):
        fail(p, [(0, at)], LAYERS)
    assert p.cache.computed(0) == 8
    fail(p, [(0, 8)], 1)
    assert p.cache.computed(0) == 8


def test_of_several_caches_the_one_that_has_least_counts(backend: ml.Backend, ctx: ml.Context) -> None:
    cache, unused = (
        WrapperCache(SlidingWindowCache(4), CausalCache()),
        WrapperCache(CausalCache(), CausalCache()),
    )
    new = ctx.full((2, 1, 4), 1, ml.DType.F32)
    for one in (cache, unused):
        one.init(backend, ml.DType.F32, 1, 8, 8)
        one.start_forward(ctx, Batch([0, 1], [0, 0]))
        one.set_layer(0)
        one.put(ctx, new, new)
    assert unused.computed(0) == 2  # a cache that no layer uses has nothing to lack
    cache.set_layer_type(1)
    assert cache.computed(0) == 2
    cache.set_layer(1)
    cache.put(ctx, new, new)
    cache.start_forward(ctx, Batch([2, 3], [0, 0]))
    cache.set_layer(0)
    cache.put(ctx, new, new)
    assert cache.computed(0) == 2
    cache.set_layer_type(1)
    cache.set_layer(1)
    cache.put(ctx, new, new)
    assert cache.computed(0) == 4


def test_states_that_a_pass_did_not_ask_for_end_what_is_computed(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    cache = bound(RecurrentCache((2,), (3,), checkpoints=4, checkpoint_interval=1), backend, 1, 16, 16)

    def run(positions: range, layers: int) -> None:
        cache.start_forward(ctx, Batch(positions, [0] * len(positions)))
        for layer in range(layers):
            cache.set_conv_state(ctx, layer, ctx.full((1, 2), 1, ml.DType.F32))
            cache.set_recurrent_state(ctx, layer, ctx.full((1, 3), 1, ml.DType.F32))

    run(range(3), 2)
    assert cache.computed(0) == 3
    run(range(3, 5), 1)
    assert (cache.computed(0), cache.offset(0)) == (3, 5)
    run(range(5, 6), 2)  # goes on from what is not there
    assert cache.computed(0) == 3
    assert 5 not in cache.checkpoints(0)
    cache.remove(0, 3)
    assert (cache.computed(0), cache.offset(0)) == (3, 3)
    run(range(3, 4), 2)
    assert cache.computed(0) == 4


class Sums:
    """Layers that count in their states the tokens that they have seen."""

    def __init__(self, backend: ml.Backend, declared: bool = False, **options: Any) -> None:
        specs = dict.fromkeys(range(2), SUM[None]) if declared else SUM
        attention = CausalCache(options.pop("shift", None))
        self.cache = bound(RecurrentCache.of(StateCache(specs, **options), attention), backend, 3, 16, 16)
        self.ctx = backend.new_context()

    def run(self, seq: int, count: int, layers: int = 2, read_only: bool = False) -> list[float]:
        """The states before the pass, in ``layers`` of the two; it fails after these."""
        begin, found = self.cache.offset(seq), []
        self.cache.start_forward(
            self.ctx, Batch(range(begin, begin + count), [seq] * count), read_only=read_only
        )
        for layer in range(layers):
            state = self.cache.state(self.ctx, "sum", layer)
            found += state.to_numpy().ravel().tolist()
            if not read_only:
                new = self.ctx.full((1, 1), begin + count, ml.DType.F32)
                self.cache.update_state(self.ctx, "sum", new, layer)
        return found


@pytest.mark.parametrize("first", ["a pass over it", "a pass that only reads it", "a pass over another"])
def test_a_state_that_comes_later_lacks_what_was_there_before(backend: ml.Backend, first: str) -> None:
    sums = Sums(backend, checkpoint_interval=1)
    cache = sums.cache
    sums.run(0, 2, layers=1)
    sums.run(0, 2, layers=1)
    assert (cache.computed(0), cache.checkpoints(0)) == (4, (2,))  # nobody knows yet of a second layer
    mark, kept = branches.mark(cache, 0), cache.snapshot(0)
    if first == "a pass over another":
        assert sums.run(1, 3) == [0, 0]
    read_only = first == "a pass that only reads it"
    for _ in range(2):
        with pytest.raises(OrderError, match=r"state: a pass before .* of sequence 0; call remove\(0, 0\)"):
            sums.run(0, 1, read_only=read_only)
    assert (cache.computed(0), cache.checkpoints(0)) == (0, ())
    with pytest.raises((SequenceLostError, InvalidRangeError), match=r"lack a layer|this cache has"):
        cache.restore(2, kept)
    with pytest.raises(InvalidRangeError, match="this cache has"):
        branches.rollback(cache, 0, 4, mark)
    assert cache.computed(0) == 0
    with pytest.raises(OrderError):
        sums.run(0, 1)
    cache.remove(0, 3)
    assert (cache.offset(0), sums.run(0, 5), sums.run(0, 1)) == (0, [0, 0], [5, 5])
    assert cache.computed(0) == 6


def test_a_state_that_comes_later_stays_missing_when_its_pass_is_taken_back(backend: ml.Backend) -> None:
    sums = Sums(backend)
    sums.run(0, 2, layers=1)
    with pytest.raises(OrderError):
        sums.run(0, 1)
    sums.cache.undo_forward()
    assert (sums.cache.offset(0), sums.cache.computed(0)) == (2, 0)


def test_a_state_that_was_restored_before_its_layer_was_used_is_not_missing(backend: ml.Backend) -> None:
    one, other = Sums(backend), Sums(backend)
    one.run(0, 4)
    assert other.cache.restore(0, one.cache.snapshot(0))
    assert (other.run(1, 2), other.run(0, 1)) == ([0, 0], [4, 4])


def test_where_passes_may_leave_states_out_one_that_comes_later_is_zero(backend: ml.Backend) -> None:
    sums = Sums(backend, declared=True, skips=True)
    sums.run(0, 2, layers=1)
    mark = branches.mark(sums.cache, 0)
    assert (sums.cache.computed(0), sums.run(0, 1), sums.cache.computed(0)) == (2, [2, 0], 3)
    branches.rollback(sums.cache, 0, 2, mark)
    assert (sums.cache.computed(0), sums.run(0, 1), sums.cache.computed(0)) == (2, [2, 0], 3)
    assert sums.cache.state(sums.ctx, "sum", 0).to_numpy() == 3


def test_of_states_that_are_declared_of_layers_the_first_pass_lacks_some_already(backend: ml.Backend) -> None:
    sums = Sums(backend, declared=True)
    sums.run(0, 2, layers=1)
    assert sums.cache.computed(0) == 0
    sums.run(1, 2, layers=0)
    sums.run(2, 2)
    assert [sums.cache.computed(seq) for seq in range(3)] == [0, 0, 2]


@pytest.mark.parametrize(("change", "seq", "computed"), [
    (lambda cache: cache.copy_prefix(0, 1, 12), 1, 10), (lambda cache: cache.remove(0, 12), 0, 10),
    (lambda cache: cache.remove(0, 2, 6), 0, 6), (lambda cache: cache.remove(0, 8, 11), 0, 8),
], ids=["a copy", "a cut at the end", "a gap before", "a gap over the edge"])  # fmt: skip
@pytest.mark.parametrize("over", [False, True])
def test_states_that_a_pass_left_out_stay_missing_when_the_sequence_is_changed(
    backend: ml.Backend, change: Any, seq: int, computed: int, over: bool
) -> None:
    sums = Sums(backend, shift=lambda ctx, layer, key, offsets: key)
    sums.run(0, 10)
    sums.run(0, 2, layers=1)
    if over:
        sums.run(2, 1)
    change(sums.cache)
    assert sums.cache.computed(seq) == computed < sums.cache.offset(seq)
    with pytest.raises(OrderError, match="not all layers have their states"):
        sums.cache.snapshot(seq)


def test_beside_other_caches_a_pass_that_has_yet_to_ask_for_a_state_lacks_it(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    states = RecurrentCache.of(StateCache(SUM))
    cache = bound(WrapperCache(SlidingWindowCache(3), WrapperCache(states)), backend, 1, 16, 16)
    cache.start_forward(ctx, Batch([0, 1], [0, 0]))
    cache.put(ctx, *[ctx.zeros((2, 1, 4), ml.DType.F32)] * 2)
    assert cache.computed(0) == 0
    states.state(ctx, "sum", 0)
    assert cache.computed(0) == 2


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("layers", range(3))
def test_an_item_that_a_failed_pass_left_out_leaves_the_output_of_the_one_before(
    backend: ml.Backend, ctx: ml.Context, layers: int, restored: bool
) -> None:
    caches = [EncoderCache(), EncoderCache()]

    def run(cache: EncoderCache, position: int, layers: int, value: float) -> None:
        cache.start_forward(ctx, Batch([position], [0], multimodal=[(0, "an image")]))
        for layer in range(layers):
            cache.set_layer(layer)
            output = ctx.full((2, 1, 4), value, ml.DType.F32)
            cache.put(ctx, output, output)

    for cache in caches:
        cache.init(backend, ml.DType.F32, 2, 32, 16)
    run(caches[0], 1, 2, 7.0)
    assert caches[1].restore(0, caches[0].snapshot(0))  # its layers are known from it
    cache = caches[restored]
    held = cache.nbytes
    for position in (4, 5):  # the second try does not follow the first
        run(cache, position, layers, 8.0)
    assert cache.nbytes == (held if layers in (0, 2) else 2 * held), "one whole, or the halves too"
    assert cache.snapshot(0, 0, 3).position == (None if layers == 2 else 1)
    cache.copy_prefix(0, 1, 3)
    cache.remove(0, 0, 1)
    cache.remove(0, 3)
    for seq in range(2):
        assert cache.lacking(seq) is None
        outputs = [cache.encoder_output(seq, layer) for layer in range(2)]
        assert [o and o[0].to_numpy().max() for o in outputs] == ([None] if layers == 2 else [7.0]) * 2
    assert cache.snapshot(0).position == (None if layers == 2 else 0)


def test_tokens_of_an_item_count_as_computed_when_all_layers_have_its_output(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    cache = bound(WrapperCache(CausalCache(), EncoderCache()), backend, 2, 32, 16)
    new = ctx.zeros((3, 1, 4), ml.DType.F32)

    def run(seq: int, layers: int) -> None:
        begin = cache.offset(seq)
        batch = Batch(range(begin, begin + 3), [seq] * 3, multimodal=[(1, "an image")])
        cache.start_forward(ctx, batch)
        cache.set_layer(0)
        cache.put(ctx, new, new)
        cache.set_layer_type(1)
        for layer in range(layers):
            cache.set_layer(layer)
            cache.put(ctx, new, new)

    run(0, 2)
    assert cache.computed(0) == 3
    for layers in range(2):
        run(0, layers)
        assert cache.computed(0) == 4
        cache.start_forward(ctx, Batch([0], [1]))
        assert cache.computed(0) == 4
        cache.remove(1, 0)
        cache.remove(0, 3)
        assert cache.computed(0) == 3
    run(0, 2)
    assert cache.computed(0) == 6


def test_a_state_whose_read_is_refused_or_whose_update_fails_was_not_given(backend: ml.Backend) -> None:
    sums = Sums(backend)
    cache, ctx = sums.cache, sums.ctx
    sums.run(0, 3, layers=1)
    cache.start_forward(ctx, Batch([3, 0, 1, 2], [0, 1, 1, 1]))
    cache.update_state(ctx, "sum", cache.state(ctx, "sum", 0), 0)
    with pytest.raises(OrderError, match=r"call remove\(0, 0\)"):
        cache.state(ctx, "sum", 1)
    assert cache.computed(1) == 0
    cache.remove(0, 0)
    cache.remove(1, 0)
    sums.run(0, 2)
    cache.start_forward(ctx, Batch([2], [0]))
    cache.update_state(ctx, "sum", ctx.full((1, 1), 3, ml.DType.F32), 0)
    closed = backend.new_context()
    closed.close()
    with pytest.raises(ml.MLError):
        cache.update_state(closed, "sum", ctx.full((1, 1), 3, ml.DType.F32), 1)
    assert cache.computed(0) == 2


def test_a_state_inside_a_pass_that_fails_counts_when_all_declared_layers_have_it(
    backend: ml.Backend,
) -> None:
    sums = Sums(backend, declared=True, delivers=True, checkpoints=0)
    cache, ctx = sums.cache, sums.ctx
    cache.schedule_snapshots(0, [2])
    cache.start_forward(ctx, Batch(range(4), [0] * 4))
    cache.state(ctx, "sum", 0)
    cache.deliver_states(ctx, "sum", ctx.full((1, 1), 2, ml.DType.F32), [(0, 2)], 0)
    assert (cache.take_snapshots(0), cache.skipped_snapshots(0)) == ([], [2])
    cache.remove(0, 2)
    assert (cache.offset(0), cache.computed(0)) == (0, 0)
