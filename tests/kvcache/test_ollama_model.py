"""The model of Ollama's Go caches: what their own tests expect, and our caches beside it.

The tables say what ``kvcache/causal_test.go`` says at the model's commit. What we do otherwise on purpose is
listed in ``test_meant_*``; in all else random calls have to give the same on both, cell by cell.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

import kvcache
import ml
from benchmarks.peers_ollama import Causal, Encoder, OllamaError, Wrapper

# A pass: tokens, sequences, positions, the keys of the cells that are shown, what each query sees of them.
Pass = tuple[str, str, str, str, str]
FIRST: Pass = ("1 2 3 4", "0 0 0 0", "0 1 2 3", "1 2 3 4", "#... ##.. ###. ####")
TWO: Pass = ("1 2 3 4", "0 0 1 1", "0 1 0 1", "1 2 3 4", "#... ##.. ..#. ..##")
SLID: Pass = ("1 2 3 4", "0 0 0 0", "0 1 2 3", "1 2 3 4", "#... ##.. .##. ..##")
KNOWN: dict[str, tuple[Causal, tuple[int, int, int], list[Pass | tuple]]] = {
    "store": (Causal(), (1, 16, 16), [FIRST, ("5", "0", "4", "1 2 3 4 5", "#####")]),
    "window": (Causal(1), (1, 16, 16), [SLID, ("5 6", "0 0", "4 5", "5 6 3 4", "#..# ##..")]),
    "window in separate batches": (
        Causal(1),
        (2, 16, 2),
        [
            ("1 2", "0 0", "0 1", "1 2", "#. ##"),
            ("3 4", "0 0", "2 3", "2 3 4", "##. .##"),
            ("5 6", "1 1", "0 1", "5 6", "#. ##"),
            ("7 8", "1 1", "2 3", "6 3 4 7 8", "#..#. ...##"),
            ("9 10", "0 0", "4 5", "9 10 3 4", "#..# ##.."),
        ],
    ),
    "window with memory": (
        Causal(1, 3), (1, 16, 16), [SLID, ("5 6", "0 0", "4 5", "5 2 3 4 6", "#..#. #...#")],
    ),
    "chunk": (
        Causal(chunk=2),
        (1, 16, 16),
        [
            ("1 2 3 4", "0 0 0 0", "0 1 2 3", "1 2 3 4", "#... ##.. ..#. ..##"),
            ("5 6 7", "0 0 0", "4 5 6", "1 2 3 4 5 6 7", "....#.. ....##. ......#"),
            ("8 9", "0 0", "7 8", "1 2 3 4 5 6 7 8 9", "......##. ........#"),
        ],
    ),
    "sequences": (Causal(), (1, 16, 16), [TWO, ("5 6", "0 1", "2 2", "1 2 3 4 5 6", "##..#. ..##.#")]),
    "remove": (
        Causal(),
        (1, 16, 16),
        [
            TWO,
            ("remove", 0, 1, None),
            ("5 6", "0 1", "1 2", "1 5 3 4 6", "##... ..###"),
            ("remove", 0, 0, 1),
            ("7 8", "0 0", "1 2", "7 4 3 4 6 8", "##.... ##...#"),  # 5 was shifted by one, as the sum tells
        ],
    ),
    "copy": (
        Causal(),
        (1, 16, 16),
        [FIRST, ("copy_prefix", 0, 1, 2), ("5 6", "1 1", "3 4", "1 2 3 4 5 6", "##..#. ##..##")],
    ),
}  # fmt: skip
FULL_SIZE = (1, 16, 16)


def feed(cache: Causal | Wrapper, positions: Sequence[int], seq: int = 0, tokens: Sequence[int] = ()) -> None:
    """One pass of one sequence."""
    cache.start_forward(positions, [seq] * len(positions))
    cache.put(tokens or [1 + position for position in positions])


@pytest.mark.parametrize("name", KNOWN)
def test_the_model_does_what_ollamas_own_tests_expect(name: str) -> None:
    cache, size, steps = KNOWN[name]
    cache = copy.deepcopy(cache)
    cache.init(*size)
    for step in steps:
        if step[0] in ("remove", "copy_prefix"):
            getattr(cache, step[0])(*step[1:])
            continue
        tokens, sequences, positions, *shown = ([*map(int, text.split())] for text in step[:4])
        cache.start_forward(positions, sequences)
        cache.put(tokens)
        keys, mask = cache.get()
        assert [token + moved for token, moved in keys] == shown[0]
        assert ["".join(".#"[seen] for seen in row) for row in mask] == step[4].split()


@pytest.mark.parametrize(
    ("memory", "first", "then", "at"), [(0, 5, 5, {5}), (5, 7, 7, {6, 7})], ids=["window", "with memory"]
)
def test_the_model_resumes_where_ollamas_own_tests_expect(
    memory: int, first: int, then: int, at: set[int]
) -> None:
    cache = Causal(4, memory)
    cache.init(*FULL_SIZE)
    feed(cache, range(first))
    assert all(cache.can_resume(0, position) for position in range(first))
    feed(cache, [then])
    assert {position for position in range(then + 1) if cache.can_resume(0, position)} == at


# Beside ours.


def renumbered(ctx: ml.Context, layer: int, key: ml.Tensor, offsets: ml.Tensor) -> ml.Tensor:
    """A key is its token and its position: the shift function of both."""
    rows = key.to_numpy().copy()
    rows[:, 0, 1] += offsets.to_numpy()
    return ctx.from_numpy(rows)


Kind = tuple[int, int, int]
"""Window, memory and chunk, as Go's constructors take them."""


def ours_of(kind: Kind) -> kvcache.CausalCache:
    window, memory, chunk = kind
    if window:
        return kvcache.SlidingWindowCache(window, memory or None, renumbered)
    return kvcache.ChunkedCache(chunk, renumbered) if chunk else kvcache.CausalCache(renumbered)


class Pair:
    """Ours and the model, given the same calls; several kinds are wrapped."""

    def __init__(self, kinds: Sequence[Kind], sizes: tuple[int, int, int], padding: int = 1) -> None:
        self.backend = ml.open_backend("numpy")
        self.ctx = self.backend.new_context()
        self.parts = [ours_of(kind) for kind in kinds]
        self.ours: kvcache.Cache = kvcache.WrapperCache(*self.parts) if len(kinds) > 1 else self.parts[0]
        self.ours.set_config(ml.CacheConfig(cache_padding=padding))
        self.ours.init(self.backend, ml.DType.F32, *sizes)
        self.model = Wrapper(*(Causal(*kind) for kind in kinds))
        self.model.init(*sizes, padding)
        self.sequences = range(sizes[0])
        self.written: dict[int, int] = {}
        """By token, the position that it was put at."""

    @property
    def models(self) -> list[Causal]:
        return [cache for cache in self.model.caches if isinstance(cache, Causal)]

    def positions(self, seq: int) -> list[int]:
        """Those that are stored in any of the caches, in the cells' order."""
        return [cache.cells[i].position for cache in self.models for i in cache.of(seq)]

    def both(self, ours: Callable[[], None], model: Callable[[], None], error: type[Exception]) -> bool:
        """Whether it was done. Both refuse the same; the model, too, is then as it was."""
        before = copy.deepcopy(self.model.caches)
        try:
            model()
        except OllamaError:
            self.model.caches = before
            with pytest.raises(error):
                ours()
            return False
        ours()
        return True

    def forward(self, positions: Sequence[int], sequences: Sequence[int], lifted: Sequence[int] = ()) -> None:
        batch = kvcache.Batch(positions, sequences)
        if not self.both(
            lambda: self.ours.start_forward(self.ctx, batch),
            lambda: self.model.start_forward(positions, sequences),
            kvcache.CacheFullError,
        ):
            return
        tokens = range(len(self.written) + 1, len(self.written) + 1 + len(positions))
        self.written |= dict(zip(tokens, positions, strict=True))
        rows = np.array([*zip(tokens, positions, strict=True)], np.float32)[:, None]
        self.model.put(tokens)
        for i, (ours, model) in enumerate(zip(self.parts, self.models, strict=True)):
            if isinstance(self.ours, kvcache.WrapperCache):
                self.ours.set_layer_type(i)
            self.ours.set_layer(0)
            self.ours.put(self.ctx, self.ctx.from_numpy(rows), self.ctx.from_numpy(rows[:, :, :1]))
            if lifted:
                ours.set_causal(self.ctx, except_=lifted)
                model.set_causal(lifted)
            assert self.seen_by_ours() == self.seen_by(model)

    def seen_by_ours(self) -> list[set[tuple[int, int]]]:
        """What each query sees, as (token, position of its key)."""
        key, value, mask = self.ours.get(self.ctx)
        assert isinstance(mask, ml.Tensor)
        rows, visible = key.to_numpy()[:, 0].astype(int), mask.to_numpy() == 0
        for query in visible:
            assert (rows[query, 0] == value.to_numpy()[query, 0, 0]).all()
        return [{(token, position) for token, position in rows[query].tolist()} for query in visible]

    def seen_by(self, cache: Causal) -> list[set[tuple[int, int]]]:
        keys, mask = cache.get()
        return [
            {
                (token, self.written[token] + moved)
                for (token, moved), see in zip(keys, row, strict=True)
                if see
            }
            for row in mask
        ]

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        self.ours.copy_prefix(src, dst, length)
        self.model.copy_prefix(src, dst, length)

    def remove(self, seq: int, begin: int, end: int | None) -> None:
        if end is not None and self.leaves_a_hole(seq, begin, end):
            return  # Ollama does it, ours refuses: test_meant_a_removal_leaves_no_window_with_a_hole
        self.both(
            lambda: self.ours.remove(seq, begin, end),
            lambda: self.model.remove(seq, begin, end),
            kvcache.NotSupportedError,
        )

    def leaves_a_hole(self, seq: int, begin: int, end: int) -> bool:
        """Whether some window at the end of what is left has tokens that are not stored."""
        for cache in self.models:
            stored = [cache.cells[i].position for i in cache.of(seq)]
            left = [p for p in stored if p < begin] + [p + begin - end for p in stored if p >= end]
            if cache.window and left and max(0, max(left) + 1 - cache.window) < min(left):
                return True
        return False

    def resume(self) -> None:
        """Alike everywhere; where a window's memory is the whole sequence, Go says yes to everything."""
        if any(cache.window and cache.kept is None for cache in self.models):
            return
        for seq in self.sequences:
            for position in range(max(self.positions(seq), default=0) + 3):
                answers = self.ours.can_resume(seq, position), self.model.can_resume(seq, position)
                assert answers[0] == answers[1], (seq, position)


def random_calls(rnd: random.Random, pair: Pair) -> None:
    last = [max(pair.positions(seq), default=-1) for seq in pair.sequences]
    roll, seq = rnd.random(), rnd.choice(pair.sequences)
    if roll < 0.6:
        batch = []
        for _ in range(rnd.randint(1, 5)):
            row = rnd.choice(pair.sequences)
            last[row] += rnd.choice((1, 1, 1, 1, 1, 1, 2))
            batch.append((last[row], row))
        rnd.shuffle(batch)
        lifted = rnd.sample(range(len(batch)), 1) if rnd.random() < 0.15 else []
        pair.forward([position for position, _ in batch], [row for _, row in batch], lifted)
    elif roll < 0.72 and len(pair.sequences) > 1:
        pair.copy_prefix(*rnd.sample(pair.sequences, 2), rnd.randrange(10))
    else:
        begin = rnd.randrange(last[seq] + 2)
        pair.remove(seq, begin, rnd.choice((None, begin + rnd.randrange(1, 4))))
    pair.resume()


@pytest.mark.parametrize("kind", ["full", "window", "memory", "chunk", "wrapped"])
def test_random_calls_give_the_same_on_ours(kind: str) -> None:
    for seed in range(40):
        rnd = random.Random(seed)
        window = rnd.randint(1, 4)
        kinds = {
            "full": [(0, 0, 0)],
            "window": [(window, 0, 0)],
            "memory": [(window, window + rnd.randrange(5), 0)],
            "chunk": [(0, 0, rnd.randint(1, 4))],
            "wrapped": [(window, window + rnd.randrange(3), 0), (0, 0, 0), (0, 0, 3)],
        }[kind]
        pair = Pair(kinds, (rnd.randint(1, 3), rnd.choice((6, 10, 16)), 6), rnd.choice((1, 1, 4)))
        for _ in range(rnd.randint(4, 16)):
            random_calls(rnd, pair)
        for seq in pair.sequences:  # the end of each sequence shows what it holds
            pair.forward([max(pair.positions(seq), default=-1) + 1], [seq])


# What differs on purpose. In each pair, the model's answer comes first.


def pair_of(*kinds: Kind, sizes: tuple[int, int, int] = (2, 16, 8)) -> Pair:
    """Sequence 0 has tokens at 0..3."""
    pair = Pair(kinds or [(0, 0, 0)], sizes)
    pair.forward(range(4), [0] * 4)
    return pair


def held(pair: Pair, seq: int, position: int) -> tuple[list[int], list[int]]:
    """The positions that are stored before this one, as the model says and as a token there sees in ours."""
    ours = pair.parts[0]
    model = sorted(p for p in pair.positions(seq) if p < position)
    ours.start_forward(pair.ctx, kvcache.Batch([position], [seq]))
    row = pair.ctx.from_numpy(np.array([[[0, position]]], np.float32))
    ours.put(pair.ctx, row, pair.ctx.from_numpy(np.zeros((1, 1, 1), np.float32)))
    return model, sorted(found for _, found in pair.seen_by_ours()[0] if found < position)


def test_meant_a_batch_that_does_not_fit_evicts_nothing() -> None:
    pair = pair_of((2, 3, 0), sizes=(1, 16, 4))
    with pytest.raises(OllamaError):
        pair.model.start_forward(range(4, 12), [0] * 8)
    with pytest.raises(kvcache.CacheFullError):
        pair.ours.start_forward(pair.ctx, kvcache.Batch(range(4, 12), [0] * 8))
    assert [cache.can_resume(0, 2) for cache in (pair.model, pair.ours)] == [False, True]


def test_meant_a_wrapper_takes_back_the_batch_alone() -> None:
    """Go removes all that follows a token of the batch."""
    pair = pair_of((0, 0, 0), (1, 1, 0), sizes=(1, 16, 4))
    pair.remove(0, 1, 2)  # in a window, too: 0 1 2 are left
    pair.forward([6], [0])
    with pytest.raises(OllamaError):
        pair.model.start_forward([3, 4, 5, 7, 8, 9], [0] * 6)
    with pytest.raises(kvcache.CacheFullError):
        pair.ours.start_forward(pair.ctx, kvcache.Batch([3, 4, 5, 7, 8, 9], [0] * 6))
    full = pair.models[0]
    assert [full.cells[i].position for i in full.of(0)] == [0, 1, 2]
    assert pair.parts[0].offset(0) == 7


@pytest.mark.parametrize("batch", [([4, 4], [0, 0]), ([3], [0]), ([-1], [0]), ([0], [2])], ids=str)
def test_meant_a_token_is_stored_once_in_a_sequence_that_exists(batch: tuple[list[int], ...]) -> None:
    pair = pair_of()
    pair.model.start_forward(*batch)
    with pytest.raises(kvcache.InvalidBatchError):
        pair.ours.start_forward(pair.ctx, kvcache.Batch(*batch))


def test_meant_a_removal_that_is_refused_moves_nothing() -> None:
    """Go has moved the tokens whose cells come before the shared one."""
    pair = pair_of()
    pair.remove(0, 0, None)
    pair.forward([4, 5], [0, 0])
    pair.forward(range(4), [0] * 4)
    pair.copy_prefix(0, 1, 4)
    for cache, error in ((pair.model, OllamaError), (pair.ours, kvcache.NotSupportedError)):
        with pytest.raises(error):
            cache.remove(0, 1, 2)
    assert held(pair, 0, 6) == ([0, 2, 3, 3, 4], [0, 1, 2, 3, 4, 5])


def test_meant_a_removal_needs_a_shift_function_where_something_moves() -> None:
    model, ours = Causal(shifts=False), kvcache.CausalCache()
    model.init(1, 16, 8)
    feed(model, range(4))
    for end in (5, 2):
        with pytest.raises(OllamaError):
            model.remove(0, 1, end)
    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        ours.init(backend, ml.DType.F32, 1, 16, 8)
        ours.start_forward(ctx, kvcache.Batch(range(4), [0] * 4))
        with pytest.raises(kvcache.NotSupportedError):
            ours.remove(0, 1, 2)
        ours.remove(0, 1, 5)
        assert ours.offset(0) == 1


def test_meant_a_removal_leaves_no_window_with_a_hole() -> None:
    """A TODO of Go's: the end of the sequence then lacks tokens of its window."""
    pair = pair_of((2, 2, 0), sizes=(1, 16, 8))
    pair.forward(range(4, 6), [0, 0])
    pair.model.remove(0, 2, 5)
    with pytest.raises(kvcache.NotSupportedError):
        pair.ours.remove(0, 2, 5)
    assert not pair.model.can_resume(0, 3)
    assert pair.ours.can_resume(0, 6)


def test_meant_a_range_that_is_empty_moves_nothing_and_one_that_is_reversed_is_refused() -> None:
    pair = pair_of()
    pair.copy_prefix(0, 1, 4)
    with pytest.raises(OllamaError):
        pair.model.remove(0, 1, 1)
    pair.ours.remove(0, 1, 1)
    pair.copy_prefix(0, 1, 0)
    pair.model.remove(0, 3, 2)
    with pytest.raises(kvcache.InvalidRangeError):
        pair.ours.remove(0, 3, 2)
    assert held(pair, 0, 6) == ([0, 1, 3, 4], [0, 1, 2, 3])


def test_meant_a_window_is_asked_for_also_where_nothing_is_evicted() -> None:
    pair = pair_of((2, 16, 0))
    assert [cache.can_resume(1, 9) for cache in (pair.model, pair.ours)] == [True, False]


def test_meant_a_sequence_is_not_copied_onto_itself() -> None:
    """In Go it is empty then."""
    pair = pair_of()
    pair.model.copy_prefix(0, 0, 3)
    with pytest.raises(kvcache.InvalidRangeError):
        pair.ours.copy_prefix(0, 0, 3)
    assert held(pair, 0, 6) == ([], [0, 1, 2, 3])


def test_meant_a_window_of_zero_shows_a_token_to_itself() -> None:
    """In Go it is no window."""
    model, ours = Causal(0), kvcache.SlidingWindowCache(0)
    model.init(1, 16, 8)
    feed(model, range(2))
    assert model.get()[1] == [[True, False], [True, True]]
    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        ours.init(backend, ml.DType.F32, 1, 16, 8)
        ours.start_forward(ctx, kvcache.Batch([0, 1], [0, 0]))
        ours.put(ctx, *(ctx.zeros((2, 1, 1), ml.DType.F32) for _ in range(2)))
        mask = ours.get(ctx)[2]
        assert isinstance(mask, ml.Tensor)
        assert (mask.to_numpy() == 0).tolist() == [[True, False], [False, True]]


# Encoders.


class Encoders:
    """One sequence with ours and the model, whose outputs are numbers."""

    def __init__(self) -> None:
        self.backend = ml.open_backend("numpy")
        self.ctx = self.backend.new_context()
        self.ours, self.model = kvcache.EncoderCache(), Encoder()
        self.ours.init(self.backend, ml.DType.F32, 1, 16, 8)
        self.model.init(1, 16, 8)

    def forward(self, positions: Sequence[int], images: Sequence[int], output: Sequence[int] = ()) -> None:
        sequences = [0] * len(positions)
        batch = kvcache.Batch(positions, sequences, multimodal=[(index, "an image") for index in images])
        self.ours.start_forward(self.ctx, batch)
        self.model.start_forward(positions, sequences, images)
        if images:
            rows = self.ctx.from_numpy(np.array(output, np.float32)[:, None, None])
            self.ours.put(self.ctx, rows, rows)
            self.model.put(output)
        if self.model.cached:
            assert tuple(self.ours.get(self.ctx)[0].to_numpy().ravel()) == self.model.get()

    def remove(self, begin: int, end: int | None = None) -> None:
        self.ours.remove(0, begin, end)
        self.model.remove(0, begin, end)


@pytest.mark.parametrize("seed", range(5))
def test_an_encoders_output_stays_until_its_token_goes(seed: int) -> None:
    rnd, both, end = random.Random(seed), Encoders(), 0
    for step in range(20):
        if rnd.random() < 0.7:
            count = rnd.randint(1, 4)
            images = [rnd.randrange(count)] if rnd.random() < 0.5 else []
            both.forward(range(end, end + count), images, [step, step + 1])
            end += count
        elif end:
            end = rnd.randrange(end)
            both.remove(end)
        assert both.ours.encoder_cached(0) == both.model.cached
        assert both.ours.can_resume(0, end) == both.model.can_resume(0, end)


def test_meant_an_encoders_output_moves_with_its_token() -> None:
    """In Go it keeps its old position, at which another token is now."""
    both = Encoders()
    both.forward(range(4), [2], [7])
    both.remove(0, 1)
    both.remove(1, 2)
    assert (both.model.cached, both.ours.encoder_cached(0)) == (True, False)


def test_meant_each_sequence_has_an_encoders_output_of_its_own() -> None:
    with pytest.raises(OllamaError):
        Encoder().init(2, 16, 8)
    with pytest.raises(OllamaError):
        Encoder().copy_prefix(0, 1, 4)
    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        ours = kvcache.EncoderCache()
        ours.init(backend, ml.DType.F32, 2, 16, 8)
        ours.start_forward(ctx, kvcache.Batch([0], [0], multimodal=[(0, "an image")]))
        ours.put(ctx, *(ctx.zeros((3, 1, 1), ml.DType.F32) for _ in range(2)))
        ours.copy_prefix(0, 1, 1)
        ours.remove(0, 0)
        assert [ours.encoder_cached(seq) for seq in (0, 1)] == [False, True]
