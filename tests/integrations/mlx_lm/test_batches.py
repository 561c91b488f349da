"""Batches of mlx-lm on our caches: its BatchGenerator, and random traces against plain lists."""

from __future__ import annotations

import copy
import gc
import importlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import ArraysCache, KVCache
from mlx_lm.models.cache import make_prompt_cache as own_prompt_cache

import kvcache
from benchmarks.census import mlx_lm as census
from benchmarks.census import mlx_lm_types
from kvcache.integrations.mlx_lm import (
    Attention,
    CachePool,
    SequencesTakenError,
    make_prompt_cache,
    rewind,
    storage,
)

from ...rigs import mlx_lm_models as models

loops: Any = importlib.import_module("mlx_lm.generate")
TOLERANCE = 1e-5
SMALL = {"completion_batch_size": 4, "prefill_batch_size": 3, "prefill_step_size": 6}


@pytest.fixture(params=list(models.MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    return models.shared(request.param)


def prompts_of(*lengths: int) -> list[list[int]]:
    return [models.prompt_of(length, seed=i) for i, length in enumerate(lengths)]


# mlx-lm's own loops.


@pytest.mark.parametrize(
    ("least", "long"),
    [(storage.WORTH, math.inf), (-1, math.inf), (storage.WORTH, 10)],
    ids=["rows padded", "by attend", "by attend from the tenth token on"],
)
def test_batch_generation_gives_the_tokens_and_logits_of_mlx_lms_own_caches(
    model: Any, least: float, long: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five prompts of different lengths in batches of three, rows leaving and joining."""
    monkeypatch.setattr(storage, "WORTH", least)
    monkeypatch.setattr(storage, "LONG", long)
    prompts = prompts_of(5, 19, 12, 3, 9)
    theirs = models.run_batch(model, prompts, None, 9, **SMALL)
    pool = CachePool(model, capacity=64, max_sequences=6)
    caches = [pool.make_prompt_cache() for _ in prompts]
    ours = models.run_batch(model, prompts, caches, 9, **SMALL)
    for uid, (tokens, logprobs, _) in ours.items():
        assert tokens == theirs[uid][0]
        assert models.largest(logprobs, theirs[uid][1]) <= TOLERANCE
        assert tokens == models.greedy(model, prompts[uid], 9, own_prompt_cache(model))


@pytest.mark.parametrize(
    ("lengths", "shared", "dtype", "long", "by_attend"),
    [
        ((30, 31, 32), 0, None, storage.LONG, False),
        ((30, 400, 20), 0, None, math.inf, True),
        ((5, 6, 7), 300, None, math.inf, True),
        ((30, 31, 32), 0, "AFFINE8_32", math.inf, True),
        ((storage.LONG - 20,), 0, None, storage.LONG, False),
        ((storage.LONG,), 0, None, storage.LONG, not mx.is_available(mx.gpu)),
        ((30, 400, 20), 0, mx.bfloat16, 10, False),
    ],
    ids=[
        "of one length",
        "of many lengths",
        "that share a prefix",
        "codes",
        "short",
        "long, on a CPU",
        "of another dtype, to which queries would be rounded",
    ],
)
def test_rows_read_their_own_cells_where_that_is_faster(
    lengths: tuple[int, ...],
    shared: int,
    dtype: Any,
    long: float,
    by_attend: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what is not attended to is never computed."""
    model = models.make_llama(head_dim=32)
    monkeypatch.setattr(storage, "WORTH", 0.05)
    monkeypatch.setattr(storage, "LONG", long)
    pool = CachePool(model, capacity=800, max_sequences=6, dtype=dtype)
    first, prefix = pool.make_prompt_cache(), models.prompt_of(shared, seed=9) if shared else []
    if shared:
        model(mx.array([prefix]), cache=first)
    caches = [copy.deepcopy(first) for _ in lengths]
    del first
    calls: list[Any] = []
    attend = storage.Storage.attend
    monkeypatch.setattr(
        storage.Storage, "attend", lambda self, *given: calls.append(given) or attend(self, *given)
    )
    whole = {**SMALL, "prefill_step_size": 512}  # so that all rows are decoded together
    found = models.run_batch(model, prompts_of(*lengths), caches, 4, **whole)
    assert bool(calls) is by_attend
    if dtype is None:
        for (tokens, _, _), prompt in zip(found.values(), prompts_of(*lengths), strict=True):
            assert tokens == models.greedy(model, [*prefix, *prompt], 4, own_prompt_cache(model))


class Rounded(KVCache):  # type: ignore[misc]
    """K and V as a pool stores them, and nothing else, in another dtype than the model's."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(*(x.astype(mx.bfloat16).astype(x.dtype) for x in (keys, values)))


def test_only_what_is_stored_is_rounded_to_the_pools_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = models.make_llama(), models.prompt_of(20)
    monkeypatch.setattr(storage, "LONG", 10)
    ours = CachePool(model, capacity=40, dtype=mx.bfloat16).make_prompt_cache()
    theirs = [Rounded() for _ in model.layers]
    for begin, end in ((0, 8), *((i, i + 1) for i in range(8, 20))):
        tokens = mx.array([prompt[begin:end]])
        found, expected = (model(tokens, cache=cache)[:, -1] for cache in (ours, theirs))
        assert float(mx.abs(found - expected).max()) <= TOLERANCE


def test_no_sequence_is_leaked(model: Any) -> None:
    pool = CachePool(model, capacity=64, max_sequences=5)
    for _ in range(2):
        caches = [pool.make_prompt_cache() for _ in range(4)]
        found = models.run_batch(model, prompts_of(4, 9, 2, 7), caches, 5, **SMALL)
        del caches
        assert pool.free_sequences == 1  # the four that are handed back
        del found
        assert pool.free_sequences == 5
    pool.sequences.reclaim()
    assert all(cache.held() == {} for cache in pool.storage.attention if cache is not None)


def test_rows_that_are_removed_and_inserted_while_others_run(model: Any) -> None:
    prompts = prompts_of(6, 11, 8, 5)
    found = []
    for make in (lambda: None, CachePool(model, capacity=64, max_sequences=6).make_prompt_cache):
        generator = BatchGenerator(model, max_tokens=10, **SMALL)
        first = generator.insert(prompts[:3], caches=[make() for _ in range(3)])
        seen: dict[int, list[int]] = {uid: [] for uid in range(4)}
        for step in range(40):
            if step == 5:
                generator.remove([first[1]])
                generator.insert([prompts[3]], caches=[make()])
            for response in generator.next()[1]:
                seen[response.uid].append(response.token)
        generator.close()
        found.append(seen)
    assert found[0] == found[1]
    assert [len(tokens) for tokens in found[1].values()].count(10) == 3


def test_conversations_go_on_from_the_prompt_caches_that_a_batch_hands_back(model: Any) -> None:
    prompts, more = prompts_of(6, 13), [5, 7, 11]
    pool = CachePool(model, capacity=64, max_sequences=6)
    kept = [pool.make_prompt_cache() for _ in prompts]
    firsts = [models.greedy(model, prompt, 4, cache) for prompt, cache in zip(prompts, kept, strict=True)]
    batch = models.run_batch(model, [more, more[:1]], kept, 6, **SMALL)
    for i, (prompt, first) in enumerate(zip(prompts, firsts, strict=True)):
        said = [*prompt, *first, *(more if i == 0 else more[:1])]
        assert batch[i][0] == models.greedy(model, said, 6, own_prompt_cache(model))
        assert models.greedy(model, [3], 5, batch[i][2]) == models.greedy(
            model, [*said, *batch[i][0], 3], 5, own_prompt_cache(model)
        )
        assert kept[i][-1].offset == len(prompt) + 4  # what went in stays as it was
        assert models.greedy(model, [9], 5, kept[i]) == models.greedy(
            model, [*prompt, *first, 9], 5, own_prompt_cache(model)
        )


def test_a_model_called_with_several_rows_needs_no_batch_entries(model: Any) -> None:
    tokens = np.random.default_rng(0).integers(3, 97, (3, 24))
    ours, theirs = make_prompt_cache(model, capacity=32, max_sequences=3), own_prompt_cache(model)
    for begin, end in ((0, 9), (9, 10), (10, 24)):
        chunk = mx.array(tokens[:, begin:end])
        assert models.largest([model(chunk, cache=ours)], [model(chunk, cache=theirs)]) <= 4 * TOLERANCE


@pytest.mark.parametrize("merged", [True, False])
def test_left_padding_is_computed_and_never_stored(model: Any, merged: bool) -> None:
    prompts = prompts_of(4, 11, 7)
    pool = CachePool(model, capacity=32, max_sequences=4)
    alone = [pool.make_prompt_cache() for _ in prompts] if merged else []
    batch = models.merged(alone) if merged else pool.make_prompt_cache()
    padding = [11 - len(prompt) for prompt in prompts]
    for entry in batch:
        entry.prepare(left_padding=padding)
    padded = np.array([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
    parts = padded[:, :8], padded[:, 8:], np.array([[5]] * 3)
    logits = [model(mx.array(part), cache=batch)[:, -1] for part in parts][1:]
    for row, prompt in enumerate(prompts):
        tokens, own = mx.array([[*prompt, 5]]), own_prompt_cache(model)
        expected = [model(tokens[:, begin:end], cache=own)[:, -1] for begin, end in ((0, -1), (-1, None))]
        assert models.largest([one[row : row + 1] for one in logits], expected) <= 4 * TOLERANCE
    assert batch[-1].offset.tolist() == [5, 12, 8]


def test_left_padding_of_a_row_that_holds_tokens_is_refused_where_there_are_states(model: Any) -> None:
    pool = CachePool(model, capacity=32, max_sequences=4)
    rows = [pool.make_prompt_cache() for _ in range(2)]
    for entries in rows:
        model(mx.array([[5, 6, 7]]), cache=entries)
    batch = models.merged(rows)
    if pool.storage.states is not None:
        with pytest.raises(
            kvcache.NotSupportedError, match=r"left_padding=2 of row 1, which holds 3 .*lengths="
        ):
            batch[0].prepare(left_padding=[0, 2])
        for entry in batch:
            entry.prepare(lengths=[3, 1], right_padding=[0, 2])
        logits, last = model(mx.array([[11, 12, 13], [14, 0, 0]]), cache=batch), 0
    else:
        for entry in batch:
            entry.prepare(left_padding=[0, 2])
        logits, last = model(mx.array([[11, 12, 13], [0, 0, 14]]), cache=batch), 2
    alone = model(mx.array([[5, 6, 7, 14]]), cache=own_prompt_cache(model))[:, -1]
    assert models.largest([logits[1:, last]], [alone]) <= 4 * TOLERANCE


def test_rows_join_or_merge_only_when_right_padding_was_finalized(model: Any) -> None:
    pool = CachePool(model, capacity=32, max_sequences=6)
    alone, *rows = [pool.make_prompt_cache() for _ in range(3)]
    prompts = prompts_of(5, 3, 8)
    for entries in (alone, *rows):
        model(mx.array([[7, 8]]), cache=entries)
    batch = models.merged(rows)
    for entry in batch:
        entry.prepare(lengths=[3, 8], right_padding=[5, 0])
    padded = mx.array([[*prompts[1], *[0] * 5], prompts[2]])
    model(padded[:, :4], cache=batch)
    for refused in (
        lambda: batch[0].extend(alone[0]),
        lambda: alone[0].extend(batch[0]),
        lambda: type(batch[0]).merge([alone[0], batch[0]]),
    ):
        with pytest.raises(kvcache.OrderError, match=r"\[0, 4\] tokens remaining.*call finalize\(\) first"):
            refused()
    model(padded[:, 4:], cache=batch)
    for entry in batch:
        entry.finalize()
    for entry, one in zip(batch, alone, strict=True):
        entry.extend(one)
    assert batch[-1].offset.tolist() == [5, 10, 2]


# Random traces: keys carry marks, and what a query sees is read off them.

WINDOWS = (None, 4, 9)
ACTIONS = ("prompt", "step", "step", "filter", "extend", "extract", "copy", "trim")


class Marked:
    """A prompt cache of three layers beside lists of marks, one for each row."""

    def __init__(self, entries: list[Any], rows: list[list[int]], marks: Iterator[int]) -> None:
        self.entries, self.rows, self.marks = entries, [list(row) for row in rows], marks

    def call(self, name: str, *arguments: Any, **named: Any) -> list[Any]:
        return [getattr(entry, name)(*arguments, **named) for entry in self.entries]

    def run(self, lengths: list[int]) -> None:
        """A pass over rows of ``lengths`` tokens, padded at the right."""
        tokens = max(lengths)
        new = [[next(self.marks) for _ in range(length)] for length in lengths]
        padding = [tokens - length for length in lengths]
        if max(padding):
            self.call("prepare", lengths=lengths, right_padding=padding)
        padded = [row + [-1] * pad for row, pad in zip(new, padding, strict=True)]
        keys = mx.array(np.array(padded, np.float32)[:, None, :, None])
        for entry, window in zip(self.entries, WINDOWS, strict=True):
            mask = entry.make_mask(tokens, window_size=window)
            found, values = entry.update_and_fetch(keys, -keys)
            assert bool((found == -values).all())
            self.check(np.array(found)[:, 0, :, 0].astype(int), mask, new, window)
        if max(padding):
            self.call("finalize")
        for row, more in zip(self.rows, new, strict=True):
            row += more

    def check(self, stored: np.ndarray, mask: Any, new: list[list[int]], window: int | None) -> None:
        tokens, history = max(len(more) for more in new), stored.shape[1]
        if mask is None:
            mask = np.ones((1, history), bool)
        elif isinstance(mask, str):
            mask = np.arange(history)[None] <= np.arange(history - tokens, history)[:, None]
        visible = np.broadcast_to(np.array(mask), (len(new), 1, tokens, history))[:, 0]
        for i, more in enumerate(new):
            for k in range(len(more)):
                sees = [*self.rows[i], *more[: k + 1]]
                sees = sees if window is None else sees[-window:]
                assert sorted(stored[i][visible[i, k]].tolist()) == sorted(sees)


class Trace:
    """A batch, and single rows taken out of it that go on by themselves."""

    def __init__(self, pool: CachePool, seed: int) -> None:
        self.pool, self.random = pool, np.random.default_rng(seed)
        self.marks = iter(range(1, 10**6))
        self.aside: list[Marked] = []
        self.batch = self.merged([self.one(), self.one()])

    def one(self) -> Marked:
        return Marked(self.pool.make_prompt_cache(), [[]], self.marks)

    def merged(self, several: list[Marked]) -> Marked:
        rows = [row for one in several for row in one.rows]
        return Marked(models.merged([one.entries for one in several]), rows, self.marks)

    def act(self) -> None:
        getattr(self, self.random.choice(ACTIONS))()
        for alone in self.aside:
            if self.random.random() < 0.3:
                alone.run([int(self.random.integers(1, 4))])
        assert self.batch.entries[0].offset.tolist() == [len(row) for row in self.batch.rows]

    def prompt(self) -> None:
        self.batch.run([int(n) for n in self.random.integers(1, 7, len(self.batch.rows))])

    def step(self) -> None:
        self.batch.run([1] * len(self.batch.rows))

    def filter(self) -> None:
        count = len(self.batch.rows)
        size = self.random.integers(1, count + 1)
        keep = sorted(self.random.choice(count, size=size, replace=False).tolist())
        self.batch.call("filter", keep)
        self.batch.rows = [self.batch.rows[i] for i in keep]

    def extend(self) -> None:
        if len(self.batch.rows) < 4:
            other = self.merged([self.aside.pop() if self.aside else self.one()])
            for entry, more in zip(self.batch.entries, other.entries, strict=True):
                entry.extend(more)
            self.batch.rows += other.rows

    def extract(self) -> None:
        if len(self.aside) < 2:
            i = int(self.random.integers(len(self.batch.rows)))
            self.aside.append(Marked(self.batch.call("extract", i), [self.batch.rows[i]], self.marks))

    def copy(self) -> None:
        if len(self.batch.rows) < 3:
            original = self.batch
            self.batch = Marked(copy.deepcopy(original.entries), original.rows, self.marks)
            original.run([1] * len(original.rows))

    def trim(self) -> None:
        n = int(self.random.integers(1, 4))
        if min(len(row) for row in self.batch.rows) >= n:
            assert self.batch.call("trim", n) == [n] * 3
            for row in self.batch.rows:
                del row[-n:]


@pytest.mark.parametrize("seed", range(4))
def test_random_batches_see_what_plain_lists_hold(seed: int) -> None:
    layers = [Attention(window) for window in WINDOWS]
    pool = CachePool(layers, capacity=200, max_sequences=9, rollback=5, max_batch=64)
    trace = Trace(pool, seed)
    for _ in range(45):
        trace.act()
    del trace
    assert pool.free_sequences == 9


def test_rows_of_a_batch_are_read_without_copying_where_they_grow_from_their_homes() -> None:
    pool = CachePool([Attention()], capacity=32, max_sequences=4)
    entries = pool.make_prompt_cache()
    entries[0].update_and_fetch(mx.zeros((4, 2, 5, 4)), mx.zeros((4, 2, 5, 4)))
    one = entries[0].rows.last
    assert pool.storage.reading(pool.storage.attention_of(0), one).is_view
    entries[0].filter([0, 2, 3])
    entries[0].update_and_fetch(mx.zeros((3, 2, 1, 4)), mx.zeros((3, 2, 1, 4)))
    assert not pool.storage.reading(pool.storage.attention_of(0), entries[0].rows.last).is_view


def test_more_rows_than_sequences_are_refused_with_advice(model: Any) -> None:
    pool = CachePool(model, capacity=16, max_sequences=2)
    entries = pool.make_prompt_cache()
    with pytest.raises(SequencesTakenError, match="larger max_sequences"):
        model(mx.zeros((3, 4), mx.int32), cache=entries)
    del entries
    again = pool.make_prompt_cache()
    mx.eval(model(mx.zeros((2, 4), mx.int32), cache=again))


def test_a_trim_that_lacks_a_sequence_takes_nothing_from_any_row(model: Any) -> None:
    pool = CachePool(model, capacity=32, max_sequences=3)
    one, other = pool.make_prompt_cache(), pool.make_prompt_cache()
    model(mx.array([[5, 6, 7, 8, 9]]), cache=one)
    model(mx.array([[15, 16, 17, 18]]), cache=other)
    both = models.merged([one, other])
    recurrent = pool.storage.states is not None  # whose states are those of some positions only
    with pytest.raises(kvcache.NotSupportedError if recurrent else SequencesTakenError):
        both[0].trim(2)  # both rows are shared, and one sequence is free
    assert (both[0].offset.tolist(), pool.free_sequences) == ([5, 4], 1)
    if recurrent:
        return
    del one, other
    assert [entry.trim(2) for entry in both] == [2] * len(both)
    found = model(mx.array([[1], [2]]), cache=both)[:, -1]
    for row, tokens in enumerate(([5, 6, 7, 1], [15, 16, 2])):
        assert mx.allclose(found[row], model(mx.array([tokens]))[0, -1], atol=1e-4).item()


def test_what_is_done_to_some_entries_only_is_noticed() -> None:
    entries = CachePool([Attention()] * 2, capacity=16, max_sequences=2).make_prompt_cache()
    x = mx.zeros((2, 1, 3, 4))
    for entry in entries:
        entry.update_and_fetch(x, x)
    entries[0].trim(1)
    entries[0].trim(1)
    with pytest.raises(kvcache.OrderError, match="did not take part"):
        entries[1].trim(1)


# Padding and the states of layers.


class Dropping(nn.Module):
    """Asks its entry for a mask, and lets what follows a row's tokens into its state nevertheless."""

    honours = False

    def __call__(self, inputs: Any, cache: Any = None) -> Any:
        entry = cache[0]
        mask = entry.make_mask(inputs.shape[1])
        x = (inputs % 7 + 1).astype(mx.float32)
        if mask is not None and self.honours:
            x = x * mask
        before = 0 if entry[0] is None else entry[0]
        sums = before + mx.cumsum(x, axis=1)[..., None]
        entry[0] = sums[:, -1:]
        entry.advance(inputs.shape[1])
        return sums

    def make_cache(self) -> list[Any]:
        return [ArraysCache(1)]


class Honouring(Dropping):
    honours = True


@pytest.mark.parametrize("kind", [Dropping, Honouring])
@pytest.mark.parametrize("left", [False, True])
def test_each_row_of_a_padded_batch_gets_what_it_gets_alone(kind: Any, left: bool) -> None:
    """In the first pass and in later ones; rows are computed apart only where padding would get in."""
    model = kind()
    pool = CachePool(model, capacity=64, max_sequences=4)
    assert (pool.storage.alike_from > 0) is (kind is Dropping)
    rows, batch = [[3, 4], [5, 6, 7, 8, 9]], models.merged([pool.make_prompt_cache() for _ in range(2)])
    columns = mx.array([[0, 0, 0, 3, 4] if left else [3, 4, 0, 0, 0], rows[1]])
    batch[0].prepare(**({"left_padding": [3, 0]} if left else {"lengths": [2, 5], "right_padding": [3, 0]}))
    model(columns[:, :4], cache=batch)
    model(columns[:, 4:], cache=batch)
    batch[0].finalize()
    batch[0].prepare(lengths=[3, 1], right_padding=[0, 2])
    found = model(mx.array([[1, 2, 3], [4, 0, 0]]), cache=batch)
    assert (float(found[0, 2, 0]), float(found[1, 0, 0])) == (18.0, 24.0)  # 4 5 2 3 4, and 6 7 1 2 3 5


@pytest.mark.parametrize("name", ["jamba", "nemotron_h", "bailing_moe_linear", "olmo_hybrid", "mamba2"])
def test_models_with_states_say_in_a_padded_batch_what_each_row_says_alone(name: str) -> None:
    case = census.Case(name)
    for mode in (census.batch, census.padding, census.left):
        assert census.is_right(case, mode.__name__, mode(census.Ours(case)))


def test_a_row_that_ends_with_a_step_of_mamba_2_keeps_its_state() -> None:
    model = mlx_lm_types.build("mamba2")
    pool, rows = (
        CachePool(model, capacity=512, max_sequences=3),
        [models.prompt_of(256), models.prompt_of(300)],
    )
    alone = [model(mx.array([[*row, 7]]), cache=pool.make_prompt_cache())[0, -1] for row in rows]
    batch = models.merged([pool.make_prompt_cache() for _ in rows])
    for entry in batch:
        entry.prepare(lengths=[256, 300], right_padding=[44, 0])
    model(mx.array([[*rows[0], *[0] * 44], rows[1]]), cache=batch)
    for entry in batch:
        entry.finalize()
    assert models.largest(list(model(mx.array([[7], [7]]), cache=batch)[:, -1]), alone) < 1e-4


def test_prompts_that_can_never_fit_are_refused_before_anything_is_computed(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """And answers end where the room ends, which the log says."""
    if model is models.shared("gemma"):
        pool = CachePool(model, capacity=24, max_sequences=1, max_batch=24)
    else:
        pool = CachePool(model, capacity=24)
    long, short = models.prompt_of(24), models.prompt_of(20)
    generator = BatchGenerator(model, max_tokens=8)
    for refused in (
        lambda: loops.generate_step(mx.array(long), model, prompt_cache=pool.make_prompt_cache()),
        lambda: generator.insert([long], caches=[pool.make_prompt_cache()]),
    ):
        with pytest.raises(
            kvcache.InvalidRangeError, match="a prompt of 24 tokens; the pool has room for 24"
        ):
            refused()
    assert pool.free_sequences == 1
    assert not caplog.records
    prompt_cache = pool.make_prompt_cache()
    said = [
        token
        for token, _ in loops.generate_step(mx.array(short), model, prompt_cache=prompt_cache, max_tokens=9)
    ]
    assert said == models.greedy(model, short, 4, own_prompt_cache(model))
    assert "will end after 4, because the pool has no more room" in caplog.text
    generator.close()


# Threads.


def test_threads_with_a_prompt_cache_each_wait_for_one_another(model: Any) -> None:
    """Also where they copy, trim or save, and where garbage is collected in their midst."""
    pool = CachePool(model, capacity=48, max_sequences=6)
    rows = prompts_of(5, 11, 8)
    right = [models.greedy(model, row, 6, own_prompt_cache(model)) for row in rows]

    def answer(i: int) -> list[int]:
        said = []
        for k in range(4):
            one = pool.make_prompt_cache()
            said = models.greedy(model, rows[(i + k) % 3], 6, one)
            assert said == right[(i + k) % 3]
            other = copy.deepcopy(one)
            assert [entry.state for entry in other]
            assert rewind(other, 0) == 0
            assert models.greedy(model, rows[i % 3], 6, other) == right[i % 3]
        return said

    with ThreadPoolExecutor(3) as threads:
        for found in [threads.submit(answer, i) for i in range(3)]:
            found.result()
    gc.collect()
    assert pool.free_sequences == 6


def test_a_pass_that_fails_in_one_thread_leaves_the_pool_to_the_others(model: Any) -> None:
    pool = CachePool(model, capacity=48, max_sequences=2)
    one, two = pool.make_prompt_cache(), pool.make_prompt_cache()
    broken = [*one[:-1], object()]
    row = models.prompt_of(9)
    with ThreadPoolExecutor(1) as thread:
        for _ in range(2):
            with pytest.raises(Exception):  # noqa: B017, PT011
                thread.submit(model, mx.array([row]), cache=broken).result()
    assert models.greedy(model, row, 6, two) == models.greedy(model, row, 6, own_prompt_cache(model))
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(rewind, one, 0).result() == 0
        thread.submit(model, mx.array([row]), cache=one).result()
