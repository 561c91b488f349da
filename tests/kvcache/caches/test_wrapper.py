"""Wrappers: several caches as one, all of them or none, also their snapshots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest

import kvcache
import ml
from kvcache import (
    Batch,
    CausalCache,
    EncoderCache,
    RecurrentCache,
    SlidingWindowCache,
    StateCache,
    WrapperCache,
)
from kvcache.caches import branches
from kvcache.testing.models import values
from kvcache.testing.models.attention import Setup
from kvcache.testing.rigs.failing import every_failure, every_way_to_fail
from kvcache.testing.rigs.wrapper import ForeignCache, WrapperRig
from kvcache.testing.traces import run_traces
from ml import DType

from .small_passes import SUM, bound

WIDE = Setup(max_sequences=3, capacity=12, max_batch=6)
NARROW = Setup(max_sequences=3, capacity=12, max_batch=6, window=2, memory=4)
CHUNKS = Setup(max_sequences=3, capacity=12, max_batch=6, chunk=4)
WINDOW, MEMORY = 3, 5


@pytest.fixture
def wrapped(backend: ml.Backend, ctx: ml.Context) -> Callable[..., WrapperRig]:
    """``wrapped(*setups, foreign=None)``: a wrapper and a model for each cache in it."""
    return lambda *setups, foreign=None: WrapperRig(setups or (NARROW, WIDE), backend, ctx, foreign)


@pytest.mark.parametrize("part", range(4))
def test_a_wrapper_follows_all_its_models_in_random_traces(backend: ml.Backend, part: int) -> None:
    assert run_traces(backend, range(part, 60, 4), cache="wrapper", most=1) == []


def test_layers_go_to_the_cache_of_their_type(wrapped: Callable[..., WrapperRig]) -> None:
    r = wrapped(NARROW, WIDE, CHUNKS)
    r.forward(range(6), [0] * 6)
    r.forward([6, 0, 7], [0, 1, 0])
    assert [len(model.tokens[0]) for model in r.models] == [6, 8, 8]
    r.cache.set_layer_type(1)
    r.forward([8], [0], lifted=[0])
    assert r.cache.current is r.rigs[2].cache, "a pass begins with type 0"
    r.drain()


@pytest.mark.parametrize("others", [[], [CausalCache]], ids=["two", "three"])
def test_a_forgotten_layer_type_is_refused_in_the_second_pass(
    backend: ml.Backend, ctx: ml.Context, others: list[type[CausalCache]]
) -> None:
    window = SlidingWindowCache(1)
    cache = WrapperCache(window, CausalCache(), *(make() for make in others))
    with pytest.raises(kvcache.OrderError, match=r"^start_forward: the cache has not been init"):
        cache.start_forward(ctx, Batch([0], [0]))
    bound(cache, backend, 2, 8, 8)

    def evaluate(position: int, seq: int = 0, layers: int = 2) -> None:
        cache.start_forward(ctx, Batch([position], [seq]))
        for layer in range(layers):
            cache.set_layer(layer)
            cache.put(ctx, ctx.zeros((1, 1, 4), DType.F32), ctx.zeros((1, 1, 4), DType.F32))

    evaluate(0, layers=1)  # the first pass fails behind its first layer, and is taken back
    cache.remove(0, 0)
    evaluate(0)
    evaluate(0, seq=1)  # nothing of this sequence is lacking yet
    held = window.held()
    with pytest.raises(
        kvcache.OrderError, match=r"sequence 0 continues.*CausalCache \(type 1\).*set_layer_type"
    ):
        evaluate(1)
    assert window.held() == held
    cache.set_layer_type(0)  # all layers are of the first cache, on purpose
    evaluate(1)
    cache.close()
    with pytest.raises(kvcache.ClosedError, match=r"^start_forward"):
        evaluate(2)


def test_a_cache_of_an_encoder_may_stay_without_layers(backend: ml.Backend, ctx: ml.Context) -> None:
    cache = bound(WrapperCache(CausalCache(), EncoderCache()), backend, 1, 8, 8)
    for position in range(3):  # text only
        cache.start_forward(ctx, Batch([position], [0]))
        for layer in range(2):
            cache.set_layer(layer)
            cache.put(ctx, ctx.zeros((1, 1, 4), DType.F32), ctx.zeros((1, 1, 4), DType.F32))
    assert cache.offset(0) == 3
    cache.close()


@pytest.mark.parametrize("broken", [0, 1])
def test_a_shift_function_that_raises_leaves_all_as_they_were(
    wrapped: Callable[..., WrapperRig], broken: int
) -> None:
    r = wrapped(WIDE, CHUNKS)
    r.forward(range(6), [0] * 6)
    cache = r.rigs[broken].cache
    shift, cache.editor.shift = cache.editor.shift, Mock(side_effect=ValueError("no shift today"))
    with pytest.raises(ValueError, match="no shift today"):
        r.cache.remove(0, 1, 3)
    r.check()
    cache.editor.shift = shift
    assert r.remove(0, 1, 3)
    r.extend(0)
    r.drain()


@pytest.mark.parametrize("reserve", [False, True])
def test_an_encoder_pass_goes_on_where_another_cache_refuses(
    backend: ml.Backend, ctx: ml.Context, reserve: bool
) -> None:
    encoder, other = kvcache.EncoderCache(), ForeignCache(kvcache.CausalCache())
    wrapper = bound(kvcache.WrapperCache(encoder, other), backend, 2, 8, 4)
    key = ctx.from_numpy(values.keys(range(1, 5), range(4), 0))
    value = ctx.from_numpy(values.values(range(1, 5), 0))
    wrapper.start_forward(ctx, Batch([0, 0], [0, 1]))
    wrapper.put(ctx, key, value)
    other.refuses = "start_forward"
    with pytest.raises(kvcache.KVCacheError, match="this cache refuses"):
        wrapper.start_forward(ctx, Batch([1], [1]), reserve)
    wrapper.set_layer(1)
    wrapper.put(ctx, key, value)  # the second layer of the same pass, for both sequences
    for layer in range(2):
        wrapper.set_layer(layer)
        found = wrapper.get(ctx)[0].to_numpy()
        assert (found == key.to_numpy()).all()


def test_states_and_views_of_them_go_on_where_another_cache_refuses(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    recurrent = kvcache.RecurrentCache((2,), (3,), checkpoint_interval=1)
    other = ForeignCache(kvcache.CausalCache())
    wrapper = bound(kvcache.WrapperCache(recurrent, other), backend, 4, 8, 8)
    wrapper.start_forward(ctx, Batch([0, 0, 0], [2, 0, 1]))
    recurrent.set_recurrent_state(ctx, 0, ctx.from_numpy([[2.0] * 3, [0.5] * 3, [1.0] * 3]))
    recurrent.copy_prefix(2, 3, 1)
    wrapper.start_forward(ctx, Batch([1, 1], [0, 1]))
    state = recurrent.recurrent_state(ctx, 0)
    other.refuses = "start_forward"
    for sequences in ([1, 2, 0, 3], [2], [3, 0], [0, 1]):
        positions = [recurrent.offset(seq) for seq in sequences]
        with pytest.raises(kvcache.KVCacheError, match="this cache refuses"):
            wrapper.start_forward(ctx, Batch(positions, sequences))
        assert recurrent.sequences == (0, 1)
        assert state.to_numpy().tolist() == [[0.5] * 3, [1.0] * 3]
        assert recurrent.recurrent_state(ctx, 0).to_numpy().tolist() == [[0.5] * 3, [1.0] * 3]
    recurrent.set_recurrent_state(ctx, 0, ctx.from_numpy([[5.0] * 3, [7.0] * 3]))
    other.refuses = None
    assert state.to_numpy().tolist() == [[5.0] * 3, [7.0] * 3]  # it is the same view still
    wrapper.start_forward(ctx, Batch([2, 1, 1, 2], [0, 2, 3, 1]))
    assert recurrent.recurrent_state(ctx, 0).to_numpy()[:, 0].tolist() == [5.0, 2.0, 2.0, 7.0]


def test_a_context_shift_moves_all(wrapped: Callable[..., WrapperRig]) -> None:
    r = wrapped(WIDE, CHUNKS)
    for _ in range(2):
        r.extend(0, 6)
    assert r.cache.shift_context(0, 2) == 5
    for model in r.models:
        model.remove(0, 2, 7)
    r.check()
    r.extend(0, 2)
    r.drain()


def test_where_one_goes_back_to_a_checkpoint_the_others_go_with_it(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    states = RecurrentCache.of(StateCache(SUM, checkpoint_interval=4))
    cache = bound(
        WrapperCache(WrapperCache(states, CausalCache()), SlidingWindowCache(16)), backend, 2, 32, 8
    )

    def evaluate(begin: int) -> None:
        cache.start_forward(ctx, Batch([begin, begin + 1], [0, 0]))
        states.update_state(ctx, "sum", ctx.full((1, 1), begin, ml.DType.F32), 0)
        for one in (cache.caches[0].caches[1], cache.caches[1]):
            one.put(ctx, *[ctx.zeros((2, 1, 4), ml.DType.F32)] * 2)

    for begin in range(0, 10, 2):
        evaluate(begin)
    assert cache.prepare_restore(0, 9) == 8
    cache.copy_prefix(0, 1, 9)
    cache.remove(0, 9)
    for seq in (0, 1):
        assert [cache.offset(seq)] * 2 == [one.offset(seq) for one in cache.caches] == [8, 8]
    evaluate(8)
    assert cache.snapshot(0).end == 10
    cache.remove(0, 3)  # before the first checkpoint
    assert [one.offset(0) for one in cache.caches] == [0, 0]


def test_an_init_that_fails_closes_what_was_opened(backend: ml.Backend) -> None:
    first, last = kvcache.CausalCache(), ForeignCache(kvcache.CausalCache())
    last.refuses = "init"
    wrapper = kvcache.WrapperCache(first, last)
    with pytest.raises(kvcache.KVCacheError):
        wrapper.init(backend, DType.F32, 2, 8, 4)
    with pytest.raises(kvcache.ClosedError):
        first.positions(0)
    last.refuses = None
    wrapper.init(backend, DType.F32, 2, 8, 4)
    assert first.cells >= 16  # more where the backend asks for padding


def test_a_config_that_one_refuses_is_taken_by_none(backend: ml.Backend, ctx: ml.Context) -> None:
    inner: list[Any] = [
        kvcache.CausalCache(), kvcache.EncoderCache(), kvcache.RecurrentCache((2,), (3,)),
    ]  # fmt: skip
    busy = kvcache.CausalCache()
    for last in (busy, ForeignCache(kvcache.CausalCache())):
        wrapper = bound(kvcache.WrapperCache(kvcache.WrapperCache(*inner), last), backend, 2, 8, 4)
        before = [cache.config for cache in (inner[0], inner[1], inner[2].attention)]
        if isinstance(last, ForeignCache):
            last.refuses = "set_config"
        else:
            last.start_forward(ctx, Batch([0], [0]))
        with pytest.raises(kvcache.KVCacheError):
            wrapper.set_config(ml.CacheConfig(permuted_v=True, cache_padding=7))
        assert [cache.config for cache in (inner[0], inner[1], inner[2].attention)] == before
        assert inner[0].cells == -(-16 // before[0].cache_padding) * before[0].cache_padding
        wrapper.close()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("refuses", ["start_forward", "copy_prefix", "remove"])
def test_a_foreign_cache_is_asked_last_and_its_refusal_is_everyones(
    wrapped: Callable[..., WrapperRig], place: int, refuses: str
) -> None:
    r = wrapped(foreign=place)
    r.forward(range(6), [0] * 6)
    assert r.foreign is not None
    calls: dict[str, Callable[[], object]] = {
        "start_forward": lambda: r.cache.start_forward(r.ctx, Batch([6, 0], [0, 1])),
        "copy_prefix": lambda: r.cache.copy_prefix(0, 1, 3),
        "remove": lambda: r.cache.remove(0, 4),
    }
    r.foreign.refuses = refuses
    with pytest.raises(kvcache.KVCacheError, match="this cache refuses"):
        calls[refuses]()
    r.foreign.refuses = None
    r.check()
    r.copy_prefix(0, 1, 3)
    r.remove(0, 5)
    r.forward([5, 3], [0, 1])
    r.drain()


def test_one_foreign_cache_may_be_wrapped_and_not_two() -> None:
    foreign = [ForeignCache(kvcache.CausalCache()) for _ in range(2)]
    kvcache.WrapperCache(foreign[0], kvcache.CausalCache())
    with pytest.raises(kvcache.InvalidRangeError, match="ForeignCache"):
        kvcache.WrapperCache(*foreign)
    with pytest.raises(kvcache.InvalidRangeError, match="WrapperCache, ForeignCache"):
        kvcache.WrapperCache(kvcache.WrapperCache(foreign[0]), foreign[1])
    with pytest.raises(kvcache.KVCacheError):
        kvcache.WrapperCache(foreign[0]).undo_forward()


def test_a_wrapper_of_a_foreign_cache_is_asked_last_too(backend: ml.Backend, ctx: ml.Context) -> None:
    full = CausalCache()
    wrapper = WrapperCache(WrapperCache(ForeignCache(full)), SlidingWindowCache(1))
    bound(wrapper, backend, 2, 16, 4)
    with pytest.raises(kvcache.CacheFullError):
        wrapper.start_forward(ctx, Batch(range(14), [0] * 14))
    assert full.held() == {}


@every_way_to_fail
def test_where_one_cannot_go_back_the_others_do_and_it_says_what_is_lost(
    backend: ml.Backend, when: str
) -> None:
    def make(limited: ml.Backend, ctx: ml.Context) -> WrapperCache:
        states, window = RecurrentCache.of(StateCache(SUM)), SlidingWindowCache(1)
        wrapper = bound(WrapperCache(CausalCache(), states, window), limited, 4, 8, 6)
        for positions, sequences in (([0, 1, 0], [0, 0, 1]), ([0, 2], [2, 0])):
            wrapper.start_forward(ctx, Batch(positions, sequences))
            states.update_state(ctx, "sum", ctx.full((2, 1), 1.0, DType.F32), 0)
        return wrapper

    def act(wrapper: WrapperCache) -> None:
        with wrapper.backend.new_context() as ctx, pytest.raises(kvcache.CacheFullError):
            wrapper.start_forward(ctx, Batch([1, 3, *range(1, 10)], [1, 0, *[2] * 9]))

    def check(wrapper: WrapperCache) -> None:
        full, states, window = wrapper.caches
        assert full.held() == window.held() == {0: 3, 1: 1, 2: 1}
        assert [states.computed(seq) for seq in range(4)] == [3, 1, 1, 0]

    every_failure(backend, when, make, act, check, stride=2)


@pytest.mark.parametrize("what", ["start", "copy", "remove", "shift"])
@every_way_to_fail
def test_a_failing_backend_leaves_all_caches_as_they_were_or_the_sequence_lost(
    backend: ml.Backend, what: str, when: str
) -> None:
    def make(limited: ml.Backend, ctx: ml.Context) -> WrapperRig:
        r = WrapperRig((CHUNKS, WIDE), limited, ctx)
        r.forward([0, 1, 2, 3, 0, 1], [0, 0, 0, 0, 1, 1])
        return r

    acts: dict[str, Callable[[WrapperRig], object]] = {
        "start": lambda r: r.cache.start_forward(r.ctx, Batch([4, 2], [0, 1])),
        "copy": lambda r: r.cache.copy_prefix(0, 2, 3),
        "remove": lambda r: r.cache.remove(0, 2),
        "shift": lambda r: r.cache.remove(0, 0, 2),
    }

    def check(r: WrapperRig) -> None:
        if r.cache.can_resume(0, 4):
            r.check()
            acts[what](r)
            return
        assert what == "shift"
        with pytest.raises(kvcache.SequenceLostError):
            r.cache.start_forward(r.ctx, Batch([9], [0]))
        r.cache.remove(0, 0)
        for model in r.models:
            model.remove(0, 0)
        r.check()
        r.forward([0, 2], [0, 1])
        r.drain()

    every_failure(backend, when, make, acts[what], check, stride=3)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_wrapper_reads_in_all_caches_or_in_none(
    backend: ml.Backend, ctx: ml.Context, order: tuple[int, int]
) -> None:
    caches = kvcache.SlidingWindowCache(2), kvcache.CausalCache()
    wrapper = kvcache.WrapperCache(*(caches[i] for i in order))
    wrapper.set_config(ml.CacheConfig())
    wrapper.init(backend, DType.F32, 2, 8, 8)
    key, value = ctx.from_numpy(values.keys(range(1, 7), range(6))), ctx.zeros((6, 2, 5), DType.F32)
    wrapper.start_forward(ctx, Batch(range(6), [0] * 6))

    def read() -> list[int]:
        seen = []
        for i in range(2):
            wrapper.set_layer_type(order.index(i))
            mask = wrapper.get(ctx)[2]
            assert isinstance(mask, ml.Tensor)
            seen.append(int((mask.to_numpy() == 0).sum()))
        return seen

    for i in range(2):
        wrapper.set_layer_type(i)
        wrapper.put(ctx, key, value)
    everything = read()
    with pytest.raises(kvcache.InvalidBatchError):
        wrapper.start_forward(ctx, Batch([8], [0]), read_only=True)  # past the window
    assert read() == everything, "the pass before goes on"
    wrapper.start_forward(ctx, Batch([4], [0]), read_only=True)
    assert read() == [3, 5]


def test_a_wrapped_cache_that_cannot_says_so(backend: ml.Backend, ctx: ml.Context) -> None:
    class Older(ForeignCache):
        def start_forward(self, ctx: ml.Context, batch: Batch, reserve: bool = False) -> None:  # type: ignore[override]
            self._ask("start_forward", ctx, batch, reserve)

    older: Any = Older(kvcache.CausalCache())
    wrapper = bound(kvcache.WrapperCache(kvcache.EncoderCache(), older), backend, 2, 8, 8)
    wrapper.start_forward(ctx, Batch([0], [0]))
    with pytest.raises(kvcache.NotSupportedError, match="Older does not support read_only"):
        wrapper.start_forward(ctx, Batch([0], [0]), read_only=True)


@pytest.mark.parametrize("place", [0, 1])
def test_tokens_are_evicted_from_all_caches_or_none(wrapped: Callable[..., WrapperRig], place: int) -> None:
    r = wrapped(WIDE, WIDE, foreign=place)
    r.forward(range(6), [0] * 6)
    with pytest.raises(kvcache.NotSupportedError, match="evict: ForeignCache cannot forget single tokens"):
        r.cache.evict(0, [1, 2])
    r.check()
    r.drain()


@pytest.mark.parametrize("nested", [False, True])
def test_tokens_are_evicted_through_a_nested_wrapper_too(
    backend: ml.Backend, ctx: ml.Context, nested: bool
) -> None:
    window, full, encoder = SlidingWindowCache(8), CausalCache(), EncoderCache()
    inner = [WrapperCache(window, encoder)] if nested else [window, encoder]
    cache = bound(WrapperCache(full, *inner), backend, 2, 16, 8)
    described(cache, ctx, [window, full], encoder, 4)
    for wrong in ([1, 3], [-1]):
        with pytest.raises(kvcache.InvalidRangeError, match=r"evict: position(=-1| 3)"):
            cache.evict(0, wrong)
    assert window.positions(0).tolist() == full.positions(0).tolist() == [0, 1, 2, 3]
    cache.evict(0, iter([1]))
    assert window.positions(0).tolist() == full.positions(0).tolist() == [0, 2, 3]
    assert encoder.encoder_cached(0), "its output has no position of its own"
    with pytest.raises(kvcache.NotSupportedError, match=r"position 1 .* end it at 1"):
        cache.snapshot(0, 0, 2)


def test_a_nested_wrapper_refuses_for_all_what_one_in_it_cannot_evict(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    full, states = CausalCache(), RecurrentCache.of(StateCache(SUM))
    cache = bound(WrapperCache(full, WrapperCache(states)), backend, 2, 16, 8)
    cache.start_forward(ctx, Batch(range(4), [0] * 4))
    for gone in ([1], []):
        with pytest.raises(kvcache.NotSupportedError, match="evict: StateCache cannot forget single tokens"):
            cache.evict(0, gone)
    assert full.positions(0).tolist() == [0, 1, 2, 3]


def test_a_wrapped_cache_without_snapshots_is_named_with_all_that_it_lacks(backend: ml.Backend) -> None:
    class Half(ForeignCache):
        nbytes = 0

        def settings(self) -> dict[str, object]:
            return {}

        def snapshot(self, *_: object) -> None: ...
        def restore(self, *_: object) -> None: ...
        def split(self, *_: object) -> None: ...

    wrapper = bound(WrapperCache(CausalCache(), Half(CausalCache())), backend, 2, 8, 8)
    lacking = "settings: Half .* lacked prepare_restore_snapshot, merge, join of what"
    with pytest.raises(kvcache.NotSupportedError, match=lacking):
        wrapper.settings()


@pytest.mark.parametrize("reserve", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_the_pass_under_way_goes_on_where_one_refuses_the_next(
    wrapped: Callable[..., WrapperRig], place: int, reserve: bool
) -> None:
    r = wrapped(foreign=place)
    positions, sequences = [0, 1, 2, 3, 0, 1], [0, 0, 0, 0, 1, 1]
    r.forward(positions, sequences)
    assert r.foreign is not None
    r.foreign.refuses = "start_forward"
    with pytest.raises(kvcache.KVCacheError, match="this cache refuses"):
        r.cache.start_forward(r.ctx, Batch([4, 0], [0, 2]), reserve)
    r.foreign.refuses = None
    r.go_on()
    r.check()
    r.forward([2, 4], [1, 0])
    r.drain()


def described(
    cache: WrapperCache, ctx: ml.Context, attention: Sequence[Any], encoder: EncoderCache, tokens: int
) -> None:
    """Sequence 0 is of ``tokens`` tokens, put one by one; an image came with the third."""
    row = ctx.full((1, 1, 4), 1.0, DType.F32)
    for position in range(tokens):
        items = [(0, "an image")] if position == 2 else []
        cache.start_forward(ctx, Batch([position], [0], multimodal=items))
        for part in (*attention, encoder) if items else attention:
            part.put(ctx, row, row)


def cut_to(cache: Any, change: str, length: int) -> int:
    """The sequence that has the first tokens of sequence 0 after this."""
    if change == "remove":
        cache.remove(0, length)
        return 0
    cache.copy_prefix(0, 1, length)
    return 1


@pytest.mark.parametrize("change", ["remove", "copy_prefix"])
def test_an_output_whose_token_a_window_let_go_of_goes_with_the_rest(
    backend: ml.Backend, ctx: ml.Context, change: str
) -> None:
    window, encoder = SlidingWindowCache(2), EncoderCache()
    cache = bound(WrapperCache(window, encoder), backend, 2, 16, 4)
    described(cache, ctx, [window], encoder, 12)
    seq = cut_to(cache, change, 5)
    assert (cache.offset(seq), encoder.encoder_cached(seq)) == (0, False)


@pytest.mark.parametrize("change", ["remove", "copy_prefix"])
def test_an_output_whose_token_was_evicted_before_the_cut_goes_with_the_rest(
    backend: ml.Backend, ctx: ml.Context, change: str
) -> None:
    causal, encoder = CausalCache(), EncoderCache()
    cache = bound(WrapperCache(causal, encoder), backend, 2, 16, 4)
    described(cache, ctx, [causal], encoder, 5)
    cache.evict(0, [2])
    assert encoder.encoder_cached(0), "the sequence goes on behind it"
    seq = cut_to(cache, change, 3)
    assert (cache.offset(seq), encoder.encoder_cached(seq)) == (2, False)


@pytest.mark.parametrize("nested", [False, True])
def test_an_output_stays_where_a_window_is_gone_and_the_rest_of_its_sequence_is_not(
    backend: ml.Backend, ctx: ml.Context, nested: bool
) -> None:
    window, causal, encoder = SlidingWindowCache(2), CausalCache(), EncoderCache()
    parts = (WrapperCache(window, encoder), causal) if nested else (window, encoder, causal)
    cache = bound(WrapperCache(*parts), backend, 2, 16, 4)
    described(cache, ctx, [window, causal], encoder, 12)
    cache.copy_prefix(0, 1, 5)
    cache.remove(0, 5)
    for seq in (0, 1):
        assert (cache.offset(seq), window.offset(seq), encoder.encoder_cached(seq)) == (5, 0, True)


@pytest.mark.parametrize("nested", [False, True])
def test_encoders_in_a_wrapper_of_their_own_take_nothing_from_the_rest(
    backend: ml.Backend, ctx: ml.Context, nested: bool
) -> None:
    causal, encoder = CausalCache(), EncoderCache()
    cache = bound(WrapperCache(causal, WrapperCache(encoder) if nested else encoder), backend, 3, 16, 4)
    cache.schedule_snapshots(0, [2, 4])
    described(cache, ctx, [causal], encoder, 4)
    assert cache.computed(0) == cache.resume_point(0, 4) == cache.snapshot(0).end == 4
    assert [snapshot.end for snapshot in cache.take_snapshots(0)] == [2, 4]
    cache.copy_prefix(0, 1, 4)
    cache.remove(0, 3)
    assert [(cache.offset(seq), encoder.encoder_cached(seq)) for seq in (0, 1)] == [(3, True), (4, True)]
    branches.keep(cache, 0, 2)
    assert [cache.offset(seq) for seq in range(3)] == [0, 4, 3]
    cache.remove(1, 2)
    assert (cache.offset(1), encoder.encoder_cached(1)) == (2, False)


@pytest.mark.parametrize("nested", [False, True])
def test_an_output_is_restored_behind_all_that_may_fail(
    backend: ml.Backend, ctx: ml.Context, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    causal, encoder = CausalCache(), EncoderCache()
    cache = bound(WrapperCache(WrapperCache(encoder) if nested else encoder, causal), backend, 2, 16, 4)
    described(cache, ctx, [causal], encoder, 4)
    snapshot = cache.snapshot(0)
    snapshot.detach()
    with monkeypatch.context() as patch:
        patch.setattr(type(ctx.zeros((1,), DType.F32)), "copy", Mock(side_effect=MemoryError()))
        with pytest.raises(MemoryError):
            cache.restore(1, snapshot)
    assert (cache.offset(1), encoder.encoder_cached(1)) == (0, False)
    assert cache.restore(1, snapshot)
    assert (cache.offset(1), encoder.encoder_cached(1)) == (4, True)
