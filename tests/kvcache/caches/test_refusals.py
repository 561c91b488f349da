"""What each class of cache refuses: a table of calls for each, with the error and how its message begins.

A refused call changes nothing, and the pass under way goes on. What takes more than a call to refuse is in
the files of its subject.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import (
    Batch,
    CausalCache,
    ChunkedCache,
    CompressedCache,
    HostTier,
    InvalidBatchError,
    InvalidRangeError,
    InvalidSequenceError,
    NotSupportedError,
    OrderError,
    PrefixCache,
    PrefixOptions,
    RecurrentCache,
    SlidingWindowCache,
    StateCache,
    StateSpec,
    StoreTier,
    WrapperCache,
)
from kvcache.caches import branches
from kvcache.stores import MemoryStore
from kvcache.testing.harness import every_kind
from kvcache.testing.models.attention import Setup
from kvcache.testing.models.states import CONV, DELTA
from kvcache.testing.rigs.encoder import EncoderRig
from kvcache.testing.rigs.snapshots import CopyRig
from kvcache.testing.rigs.states import StateRig
from kvcache.testing.rigs.wrapper import WrapperRig
from ml import DType

from ...rigs.refusals import Table, check_refused, refuses

MakeRig = Callable[..., CopyRig]


def zeros(ctx: ml.Context, *shape: int, dtype: DType = DType.F32) -> ml.Tensor:
    return ctx.zeros(shape, dtype)


def put(
    cache: Any,
    ctx: ml.Context,
    layer: int,
    *shapes: tuple[int, ...],
    dtype: DType = DType.F32,
    **lengths: Any,
) -> None:
    cache.set_layer(layer)
    cache.put(ctx, *(ctx.zeros(shape, dtype) for shape in shapes), **lengths)


def deliver(
    cache: Any, ctx: ml.Context, shape: tuple[int, ...], *at: tuple[int, int], layer: int = 0
) -> None:
    cache.deliver_states(ctx, "conv", ctx.zeros(shape, DType.F32), at, layer)


MAKING: Table = {
    InvalidRangeError: {
        "SlidingWindowCache: window='3'; it must be": lambda c: SlidingWindowCache("3"),
        "SlidingWindowCache: window=2.5; it must be": lambda c: SlidingWindowCache(2.5),
        "SlidingWindowCache: window=-1; it must be": lambda c: SlidingWindowCache(-1),
        "SlidingWindowCache: memory=3; it must be a whole number of at least 4": lambda c: SlidingWindowCache(
            4, 3
        ),
        "SlidingWindowCache: memory=-1; it must be": lambda c: SlidingWindowCache(3, -1),
        "ChunkedCache: chunk=0; it must be": lambda c: ChunkedCache(0),
        "ChunkedCache: chunk=0.5; it must be": lambda c: ChunkedCache(0.5),
        "StateSpec: shape (0,): size=0; it must be": lambda c: RecurrentCache((0,), (3,)),
        "StateSpec: shape (-1,): size=-1; it must be": lambda c: RecurrentCache((2,), (-1,)),
        "StateCache: checkpoint_interval=0; it must be": lambda c: RecurrentCache(
            (2,), (3,), checkpoint_interval=0
        ),
        "StateCache: states: layer -1; layers are numbered from 0": lambda c: StateCache({-1: {}}),
        "StateCache: state 'a/b'; a name must be": lambda c: StateCache({0: {"a/b": StateSpec((1,))}}),
        "StateSpec: shape (2, 0): size=0": lambda c: StateSpec((2, 0)),
        "WrapperCache: 3 is not a Cache; give it cache objects": lambda c: WrapperCache(3),
        "WrapperCache: <class 'kvcache.caches.causal.CausalCache'> is not a Cache": lambda c: WrapperCache(
            CausalCache
        ),
        "WrapperCache: <CausalCache: ": lambda c: WrapperCache(c, c),
        "WrapperCache: no cache given; it must wrap at least one": lambda c: WrapperCache(),
        "shift=3; it must be a function, or None": lambda c: CausalCache(3),
        "PrefixCache: 'cache' is not a cache": lambda c: PrefixCache("cache"),
        "PrefixCache: budget=-1; it must be a number of bytes": lambda c: PrefixCache(c, -1),
        "PrefixCache: options=8; it must be PrefixOptions(...)": lambda c: PrefixCache(c, options=8),
        "PrefixOptions: backlog=-1; it must be": lambda c: PrefixOptions(backlog=-1),
        "PrefixOptions: in_flight=-1; it must be": lambda c: PrefixOptions(in_flight=-1),
        "PrefixOptions: interval=-1; it must be": lambda c: PrefixOptions(interval=-1),
        "HostTier: budget=-1; it must be": lambda c: HostTier(-1),
        "CompressedCache: rate=0; it must be": lambda c: CompressedCache(0),
        "CompressedCache: rate=2.5; it must be": lambda c: CompressedCache(2.5),
        "StoreTier: stores=[]; it must be": lambda c: StoreTier([], 8),
        "StoreTier: stores='file:x'; it must be": lambda c: StoreTier("file:x", 8),
        "StoreTier: backlog=-1; it must be": lambda c: StoreTier([MemoryStore()], -1),
    },
    ml.DTypeError: {"StateSpec: dtype=DType.Q8_0; it must be": lambda c: StateSpec((2,), DType.Q8_0)},
    ml.OptionError: {
        "PrefixCache: no option 'interva'; PrefixOptions has interval, ": lambda c: PrefixCache(c, interva=8),
    },
    OrderError: {
        "PrefixCache: the cache has not been initialized; call init first": lambda c: PrefixCache(
            CausalCache()
        ),
    },
}
COMPRESSED: Table = {
    NotSupportedError: {
        "remove: [2, 6) of sequence 0: each entry represents 4 tokens; remove the end": lambda c, s: c.remove(
            0, 2, 6
        ),
        "snapshot: from 4: each entry represents 4 tokens": lambda c, s: c.snapshot(0, 4),
        "merge: of parts: each entry represents 4 tokens": lambda c, s: c.merge(None, s),
        "join: of 2 parts: each entry represents 4 tokens": lambda c, s: c.join([s, s]),
        "split: at 4: each entry represents 4 tokens": lambda c, s: c.split(s, 4),
    },
}
ATTENTION: Table = {
    ml.DTypeError: {
        "attend: query in I32": lambda c, x: c.attend(x, zeros(x, 5, 2, 8, dtype=DType.I32), 1.0),
        "attend: query in BOOL": lambda c, x: c.attend(x, zeros(x, 5, 2, 8, dtype=DType.BOOL), 1.0),
        "attend: sinks is a numpy.ndarray": lambda c, x: c.attend(
            x, zeros(x, 5, 2, 8), 1.0, np.zeros(2, np.float32)
        ),
        "put: keys and values in I32 and I32": lambda c, x: put(
            c, x, 0, (5, 2, 8), (5, 2, 5), dtype=DType.I32
        ),
        "put: keys and values in BOOL and BOOL": lambda c, x: put(
            c, x, 0, (5, 2, 8), (5, 2, 5), dtype=DType.BOOL
        ),
    },
    InvalidRangeError: {
        "attend: scale='x'; it must be a number": lambda c, x: c.attend(x, zeros(x, 5, 2, 8), "x"),
        "attend: scale=<": lambda c, x: c.attend(x, zeros(x, 5, 2, 8), zeros(x, 1)),
        "attend: query (5, 0, 8); it must be (5, heads, 8)": lambda c, x: c.attend(x, zeros(x, 5, 0, 8), 1.0),
        "attend: query (5, 3, 8)": lambda c, x: c.attend(x, zeros(x, 5, 3, 8), 1.0),
        "attend: query (5, 2, 4)": lambda c, x: c.attend(x, zeros(x, 5, 2, 4), 1.0),
        "attend: sinks (4,) in F32; they must be (2,)": lambda c, x: c.attend(
            x, zeros(x, 5, 2, 8), 1.0, zeros(x, 4)
        ),
        "attend: sinks (2,) in I32": lambda c, x: c.attend(
            x, zeros(x, 5, 2, 8), 1.0, zeros(x, 2, dtype=DType.I32)
        ),
        "put: key (5,) and value (5,) for a batch of 5": lambda c, x: put(c, x, 0, (5,), (5,)),
        "defrag: sequences=[]; they must be one or more, each once": lambda c, x: c.defrag([]),
        "defrag: sequences=[0, 1, 0]; they must be": lambda c, x: c.defrag([0, 1, 0]),
        "defrag: sequence=0; it must be a list": lambda c, x: c.defrag(0),
        "evict: position=3; it must be a list": lambda c, x: c.evict(0, 3),
        "evict: position=[3]; it must be a whole number": lambda c, x: c.evict(0, [[3]]),
        "set_causal: except_=3": lambda c, x: c.set_causal(x, except_=3),
        "set_config: None": lambda c, x: c.set_config(None),
        "set_layer: layer=-1": lambda c, x: c.set_layer(-1),
        "set_layer: layer='0'": lambda c, x: c.set_layer("0"),
        "copy_prefix: sequence 0 to itself": lambda c, x: c.copy_prefix(0, 0, 1),
        "copy_prefix: length=-1": lambda c, x: c.copy_prefix(0, 1, -1),
        "remove: begin=-1": lambda c, x: c.remove(0, -1),
        "remove: [3, 2)": lambda c, x: c.remove(0, 3, 2),
        "snapshot: begin=-1": lambda c, x: c.snapshot(0, -1),
        "snapshot: [0, 7) of sequence 0": lambda c, x: c.snapshot(0, 0, 7),
        "split: at 7; the snapshot is [0, 5)": lambda c, x: c.split(c.snapshot(0), 7),
        "merge: [0, 5) F32 and [2, 5) F32": lambda c, x: c.merge(c.snapshot(0), c.snapshot(0, 2)),
        "schedule_snapshots: position 3 of sequence 0, which is already at 5": lambda c, x: (
            c.schedule_snapshots(0, [9, 3])
        ),
        "can_resume: position=-1": lambda c, x: c.can_resume(0, -1),
        "can_resume: position=1.5": lambda c, x: c.can_resume(0, 1.5),
        "can_resume: position=None": lambda c, x: c.can_resume(0, None),
    },
    InvalidBatchError: {
        "start_forward: positions are object": lambda c, x: c.start_forward(x, Batch([5, [6, 7]], [0, 0])),
        "start_forward: reserve=True and read_only=True": lambda c, x: c.start_forward(
            x, Batch([1], [0]), True, read_only=True
        ),
    },
    InvalidSequenceError: {
        "copy_prefix: sequence 2; it must be in 0 to 1": lambda c, x: c.copy_prefix(0, 2, 1),
        "copy_prefix: sequence -1": lambda c, x: c.copy_prefix(-1, 0, 1),
        "remove: sequence 2": lambda c, x: c.remove(2, 0),
        "offset: sequence 4": lambda c, x: c.schedule_snapshots(4, [9]),
        "offset: sequence -1": lambda c, x: c.take_snapshots(-1),
        "can_resume: sequence -1": lambda c, x: c.can_resume(-1, 0),
    },
}
STATES: Table = {
    InvalidBatchError: {
        "start_forward: positions [3]": lambda c, x: c.start_forward(x, Batch([3], [0])),
        "start_forward: sequence 0 already holds position 1": lambda c, x: c.start_forward(
            x, Batch([1], [0])
        ),
        "start_forward: positions [2, 4]": lambda c, x: c.start_forward(x, Batch([2, 4], [0, 0])),
        "start_forward: positions [2, 3]": lambda c, x: c.start_forward(x, Batch([1, 3, 2], [1, 0, 0])),
        "start_forward: reserve=True and read_only=True": lambda c, x: c.start_forward(
            x, Batch([1], [0]), True, read_only=True
        ),
    },
    InvalidSequenceError: {
        "start_forward: sequence 3; it must be in 0 to 2": lambda c, x: c.start_forward(x, Batch([1], [3])),
        "offset: sequence 7": lambda c, x: c.want_states(7, [1]),
    },
    InvalidRangeError: {
        "remove: begin=-1": lambda c, x: c.remove(0, -1),
        "remove: [3, 2)": lambda c, x: c.remove(0, 3, 2),
        "copy_prefix: sequence 0 to itself": lambda c, x: c.copy_prefix(0, 0, 1),
        "copy_prefix: length=-1": lambda c, x: c.copy_prefix(0, 1, -1),
        "schedule_snapshots: position 2 of sequence 0, which is already at 2": lambda c, x: (
            c.schedule_snapshots(0, [2])
        ),
        "schedule_snapshots: position 1 of sequence 0": lambda c, x: c.schedule_snapshots(0, [5, 1]),
        "split: at 3; the snapshot is [0, 2)": lambda c, x: c.split(c.snapshot(0), 3),
        "want_states: position=-1": lambda c, x: c.want_states(0, [-1]),
    },
}
STATES_IN_A_PASS: Table = {
    InvalidRangeError: {
        "conv_state: layer=-1": lambda c, x: c.conv_state(x, -1),
        "state: layer='a'": lambda c, x: c.state(x, "conv", "a"),
        "update_state: state 'a b'": lambda c, x: c.update_state(x, "a b", zeros(x, 2, 4), 5),
        "set_conv_state: (1, 2, 3); of state 'conv' of layer 0 it must be (2, 2, 3)": lambda c, x: (
            c.set_conv_state(x, 0, zeros(x, 1, *CONV))
        ),
        "set_conv_state: (2, 6)": lambda c, x: c.set_conv_state(x, 0, zeros(x, 2, 6)),
        "set_conv_state: (2, 2, 2, 2)": lambda c, x: c.set_conv_state(x, 0, zeros(x, 2, *DELTA)),
        "set_conv_state: (2, 3)": lambda c, x: c.set_conv_state(x, 0, zeros(x, *CONV)),
        "set_recurrent_state: (1, 2, 2, 2)": lambda c, x: c.set_recurrent_state(x, 0, zeros(x, 1, *DELTA)),
        "deliver_states: (2, 2, 3); of state 'conv' of layer 0 it must be (1, 2, 3)": lambda c, x: deliver(
            c, x, (2, *CONV), (0, 1)
        ),
        "deliver_states: (1, 2, 2, 2)": lambda c, x: deliver(c, x, (1, *DELTA), (0, 1)),
        "deliver_states: after 0 tokens of sequence 0, which has 3": lambda c, x: deliver(
            c, x, (1, *CONV), (0, 0)
        ),
        "deliver_states: after 4 tokens of sequence 0": lambda c, x: deliver(c, x, (1, *CONV), (0, 4)),
        "deliver_states: after 1 tokens of sequence 2": lambda c, x: deliver(c, x, (1, *CONV), (2, 1)),
        "deliver_states: layer=-1": lambda c, x: deliver(c, x, (1, *CONV), (0, 1), layer=-1),
    },
    OrderError: {
        "state: the shape of state 'gate' of layer 5 is not known": lambda c, x: c.state(x, "gate", 5),
    },
    ml.DTypeError: {
        "deliver_states: states is a builtins.list": lambda c, x: c.deliver_states(
            x, "conv", [[0.0]], [(0, 1)], 0
        ),
    },
}
ENCODER: Table = {
    InvalidRangeError: {
        "start_forward: multimodal index 1 of a batch of 1": lambda c, x: c.start_forward(
            x, Batch([0], [0], multimodal=[(1, None)])
        ),
        "snapshot: begin=-1": lambda c, x: c.snapshot(0, -1),
        "snapshot: [3, 2)": lambda c, x: c.snapshot(0, 3, 2),
        "split: at 5; the snapshot is [0, 4)": lambda c, x: c.split(c.snapshot(0, 0, 4), 5),
        "merge: [0, 2) and [3, 5)": lambda c, x: c.merge(c.snapshot(0, 0, 2), c.snapshot(0, 3, 5)),
        "put: key (4, 8) and value (4, 8)": lambda c, x: put(c, x, 5, (4, 8), (4, 8)),
        "put: key (4, 2, 8) and value (3, 2, 8)": lambda c, x: put(c, x, 5, (4, 2, 8), (3, 2, 8)),
        "put: key (4, 2, 8) and value (4, 1, 8)": lambda c, x: put(c, x, 5, (4, 2, 8), (4, 1, 8)),
        "put: lengths=[2, 2] for 5 rows": lambda c, x: put(c, x, 5, (5, 2, 8), (5, 2, 8), lengths=[2, 2]),
        "put: lengths=[4] for 4 rows of 2 sequences": lambda c, x: put(
            c, x, 5, (4, 2, 8), (4, 2, 8), lengths=[4]
        ),
        "put: lengths=-1": lambda c, x: put(c, x, 5, (4, 2, 8), (4, 2, 8), lengths=[5, -1]),
        "put: 2 rows for sequence 1 in layer 5, and 3": lambda c, x: put(
            c, x, 5, (4, 2, 8), (4, 2, 8), lengths=[2, 2]
        ),
    },
}
WRAPPER: Table = {
    InvalidRangeError: {
        "set_layer_type: -1; it must be": lambda c, x: c.set_layer_type(-1),
        "set_layer_type: 2": lambda c, x: c.set_layer_type(2),
        "set_causal: except_=[6]; the indices must be in 0 to 5": lambda c, x: c.set_causal(x, except_=[6]),
        "remove: [3, 2)": lambda c, x: c.remove(0, 3, 2),
        "evict: position 9 of sequence 0": lambda c, x: c.evict(0, [1, 9]),
        "snapshot: [0, 7) of sequence 0": lambda c, x: c.snapshot(0, 0, 7),
    },
    InvalidBatchError: {
        "start_forward: sequence 0 already holds position 2": lambda c, x: c.start_forward(
            x, Batch([2], [0])
        ),
    },
}


@refuses(MAKING)
def test_what_no_cache_is_made_of_is_refused(backend: ml.Backend, error: Any, says: str, call: Any) -> None:
    cache = CausalCache()
    cache.init(backend, DType.F32, 2, 8, 8)
    check_refused(error, says, call, cache)
    PrefixCache(cache).close()


@refuses(ATTENTION)
def test_attention_refuses(rig: MakeRig, error: Any, says: str, call: Any) -> None:
    r = rig()
    r.forward(range(5), 0)
    check_refused(error, says, call, r.cache, r.ctx)
    r.check_figures()
    r.check_seen()


@refuses(STATES)
def test_states_refuse(states: Callable[..., StateRig], error: Any, says: str, call: Any) -> None:
    r = states()
    r.forward(0, 0, 1)
    check_refused(error, says, call, r.cache, r.ctx)
    r.check()
    r.forward(1, 0)


@refuses(STATES_IN_A_PASS)
def test_states_refuse_in_a_pass(states: Callable[..., StateRig], error: Any, says: str, call: Any) -> None:
    r = states()
    r.want(0, [1, 2])
    r.start([0, 1, 0, 0])
    check_refused(error, says, call, r.cache, r.ctx)
    assert r.cache.state_spec("gate", 5) is r.cache.state_spec("a b", 5) is None
    r.delivery = "wanted"
    r.step()
    r.remove(0, 2)
    assert r.cache.offset(0) == 2
    r.drain()


@refuses(ENCODER)
def test_an_encoder_refuses(encoders: Callable[..., EncoderRig], error: Any, says: str, call: Any) -> None:
    r = encoders()
    r.start([0, 0], [0, 1])
    r.put(2, 3)
    check_refused(error, says, call, r.cache, r.ctx)
    r.check(computes=False)


@refuses(WRAPPER)
def test_a_wrapper_refuses(backend: ml.Backend, ctx: ml.Context, error: Any, says: str, call: Any) -> None:
    wide = Setup(max_sequences=3, capacity=12, max_batch=6)
    r = WrapperRig((wide, wide), backend, ctx)
    r.forward(range(6), [0] * 6)
    check_refused(error, says, call, r.cache, r.ctx)
    r.go_on()
    r.check()
    r.drain()


# Batches and numbers, of every kind of attention.

REFUSED: dict[str, tuple[Any, Any]] = {
    "an empty batch": ([], []),
    "a negative position": ([3, -1], [0, 0]),
    "a pair given twice, apart": ([3, 5, 3], [0, 1, 0]),
    "a pair stored already, of another order": ([7, 0, 3], [1, 1, 0]),
    "a sequence beyond the last, among others": ([3, 0], [0, 9]),
    "a negative sequence": ([3], [-1]),
    "more positions than sequences": ([3, 4], [0]),
    "more sequences than positions": ([3], [0, 1]),
    "a position beyond I32": ([2**31], [0]),
    "a position beyond I64": ([2**63], [0]),
    "a position beyond I64, among others": ([3, 2**63], [0, 0]),
    "a position beyond U64": ([3, 2**64], [0, 0]),
    "a position below I64": ([3, -(2**63) - 1], [0, 0]),
    "positions of U64": (np.array([3, 2**64 - 1], np.uint64), [0, 0]),
    "a position that is a truth": ([True], [0]),
    "a sequence beyond I64": ([3, 0], [0, 2**63]),
    "a sequence beyond U64": ([3], [2**64]),
    "positions that are no integers": ([3.5], [0]),
    "sequences that are no integers": ([3], [0.5]),
}


@every_kind
@pytest.mark.parametrize("name", REFUSED)
def test_a_batch_that_cannot_be_stored_is_refused_and_changes_nothing(
    rig: MakeRig, kind: Setup, name: str
) -> None:
    r = rig(kind)
    r.forward([0, 1, 2, 0, 1], [0, 0, 0, 1, 1])
    for reserve in (False, name == "a negative sequence"):
        with pytest.raises(kvcache.InvalidBatchError) as caught:
            r.cache.start_forward(r.ctx, Batch(*REFUSED[name]), reserve)
        assert isinstance(caught.value, ValueError)
        assert len(str(caught.value)) > 20
        r.check_figures()
        r.check_seen()  # the pass before goes on


NUMBERS: list[Any] = [
    2**63,
    -(2**63),
    -(2**64),
    np.uint64(2**63),
    True,
    np.bool_(True),
    1.0,
    np.float64(1),
    "1",
    None,
]
WHOLE: dict[str, Callable[[CausalCache, Any], object]] = {
    "copy_prefix": lambda cache, n: cache.copy_prefix(0, 1, n),
    "can_resume": lambda cache, n: cache.can_resume(0, n),
    "resume_point": lambda cache, n: cache.resume_point(0, n),
    "remove": lambda cache, n: cache.remove(0, n),
    "remove to": lambda cache, n: cache.remove(0, 1, 2**63 if n is None else n),
    "snapshot": lambda cache, n: cache.snapshot(0, n),
    "snapshot to": lambda cache, n: cache.snapshot(0, 0, 2**63 if n is None else n),
    "evict": lambda cache, n: cache.evict(0, [n]),
    "a sequence of defrag": lambda cache, n: cache.defrag([n]),
    "the room of defrag": lambda cache, n: cache.defrag([0], n),
    "schedule_snapshots": lambda cache, n: cache.schedule_snapshots(0, [n]),
    "shift_context": lambda cache, n: cache.shift_context(0, n),
    "rollback": lambda cache, n: branches.rollback(cache, 0, n),
    "fork": lambda cache, n: branches.fork(cache, 0, [1], 2**63 if n is None else n),
    "branches.resume_point": lambda cache, n: branches.resume_point(cache, 0, n),
    "the sequence of remove": lambda cache, n: cache.remove(n, 0),
    "the sequence of offset": lambda cache, n: cache.offset(n),
    "the source of copy_prefix": lambda cache, n: cache.copy_prefix(n, 0, 1),
    "the target of copy_prefix": lambda cache, n: cache.copy_prefix(0, n, 1),
    "set_causal": lambda cache, n: cache.set_causal(cache.backend.new_context(), [n]),
}


@every_kind
@pytest.mark.parametrize("name", WHOLE)
def test_a_number_that_is_none_or_too_large_is_refused_and_changes_nothing(
    rig: MakeRig, kind: Setup, name: str
) -> None:
    r = rig(kind)
    r.forward(range(5), 0)
    for number in NUMBERS:
        with pytest.raises(
            (kvcache.InvalidRangeError, kvcache.InvalidBatchError), match=r"; it must be|; .*must"
        ):
            WHOLE[name](r.cache, number)
    r.check_figures()
    r.check_seen()


@refuses(COMPRESSED)
def test_of_compressed_entries(error: type[Exception], says: str, call: Callable[..., object]) -> None:
    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        cache = CompressedCache(4)
        cache.init(backend, DType.F32, 1, 16, 16)
        cache.start_forward(ctx, Batch(range(10), [0] * 10))
        put(cache.entries, ctx, 0, (2, 1, 4), (2, 1, 4))
        snapshot = cache.snapshot(0)
        check_refused(error, says, call, cache, snapshot)
        assert cache.entries.offset(0) == 2
        assert cache.restore(0, snapshot, 9)
        cache.close()
