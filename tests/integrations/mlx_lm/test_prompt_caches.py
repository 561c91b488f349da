"""Prompt caches of mlx-lm on our caches: trimmed, kept, copied, saved, and used to speculate."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import mlx.core as mx
from mlx_lm.models.cache import KVCache as OwnKVCache
from mlx_lm.models.cache import (
    LRUPromptCache,
    QuantizedKVCache,
    can_trim_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.models.cache import load_prompt_cache as own_load
from mlx_lm.models.cache import make_prompt_cache as own_prompt_cache

import kvcache
import ml
from benchmarks.census import mlx_lm_types
from kvcache.integrations.mlx_lm import (
    CachePool,
    ChunkedKVCache,
    KVCache,
    Recurrent,
    RotatingKVCache,
    SequencesTakenError,
    adopt,
    install,
    layers_of,
    load_prompt_cache,
    make_prompt_cache,
    rewind,
)

from ...rigs import mlx_lm_models as models

PROMPT = 12
loops: Any = importlib.import_module("mlx_lm.generate")  # whose function is replaced: not imported by name


@pytest.fixture(params=list(models.MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    return models.shared(request.param)


@pytest.fixture
def gemma() -> Any:
    return models.shared("gemma")


def own_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    return models.greedy(model, prompt, count, own_prompt_cache(model))


# Speculative decoding.


@pytest.mark.parametrize("make", [models.make_llama, models.make_gemma], ids=["llama", "gemma"])
@pytest.mark.parametrize("drafted", [1, 4])
def test_speculative_decoding_says_what_greedy_does_past_the_windows_wrap(make: Any, drafted: int) -> None:
    """The window is 8 tokens; the draft model is right about half of the time."""
    model, draft = make(), models.seeded(make(), 3, noise=0.3)
    prompt = models.prompt_of(PROMPT, seed=5)
    prompt_cache = [*make_prompt_cache(model, capacity=64), *make_prompt_cache(draft, capacity=64)]
    loop = loops.speculative_generate_step(
        mx.array(prompt), model, draft, num_draft_tokens=drafted, max_tokens=30, prompt_cache=prompt_cache
    )
    found = [(token, from_draft) for token, _, from_draft in loop]
    assert [token for token, _ in found] == own_greedy(model, prompt, 30)
    accepted = sum(from_draft for _, from_draft in found)
    assert 3 <= accepted <= 27


# Trimming.


def test_tokens_are_trimmed_and_the_same_is_said_again(model: Any) -> None:
    prompt_cache = make_prompt_cache(model, capacity=64)
    prompt = models.prompt_of(PROMPT)
    first = models.greedy(model, prompt, 6, prompt_cache)
    if isinstance(layers_of(model)[0], Recurrent):
        assert not can_trim_prompt_cache(prompt_cache)  # as with mlx-lm's own
        assert trim_prompt_cache(prompt_cache, 3) == 0
        return
    assert trim_prompt_cache(prompt_cache, 6) == 6
    assert prompt_cache[0].offset == PROMPT
    assert models.greedy(model, first[:1], 5, prompt_cache) == first[1:]
    assert trim_prompt_cache(prompt_cache, 6) == 6
    assert prompt_cache[0].offset == PROMPT
    assert trim_prompt_cache(prompt_cache, 1000) == PROMPT
    assert all(entry.empty() for entry in prompt_cache)
    assert models.greedy(model, prompt, 6, prompt_cache) == first


def test_more_than_the_rollback_is_refused_and_nothing_is_trimmed(gemma: Any) -> None:
    prompt_cache = make_prompt_cache(gemma, capacity=64, rollback=4)
    said = models.greedy(gemma, models.prompt_of(PROMPT), 20, prompt_cache)
    with pytest.raises(kvcache.NotSupportedError, match="rollback=4"):
        trim_prompt_cache(prompt_cache, 6)
    assert prompt_cache[0].offset == PROMPT + 20
    assert trim_prompt_cache(prompt_cache, 4) == 4
    assert models.greedy(gemma, said[16:17], 3, prompt_cache) == said[17:]


def test_without_rollback_a_wrapped_window_is_not_trimmable_as_in_mlx_lm(gemma: Any) -> None:
    prompt_cache, theirs = make_prompt_cache(gemma, capacity=64, rollback=0), own_prompt_cache(gemma)
    trimmable = []
    for _ in range(3):
        for one in (prompt_cache, theirs):
            mx.eval(gemma(mx.array([models.prompt_of(5)]), cache=one))
        trimmable.append((can_trim_prompt_cache(prompt_cache), can_trim_prompt_cache(theirs)))
    # After 10 tokens nothing has been evicted yet: the next pass does that.
    assert trimmable == [(True, True), (True, False), (False, False)]


def test_rewind_goes_as_far_back_as_states_were_kept(model: Any) -> None:
    prompt = models.prompt_of(40)
    expected = own_greedy(model, prompt, 6)
    prompt_cache = make_prompt_cache(model, capacity=96, checkpoint_interval=8, rollback=16)
    models.greedy(model, prompt, 6, prompt_cache, step=8)
    at = rewind(prompt_cache, 35)
    assert at in (32, 35)
    assert models.greedy(model, prompt[at:], 6, prompt_cache) == expected
    assert rewind(prompt_cache, 0) == 0
    assert models.greedy(model, prompt, 6, prompt_cache) == expected


# Copies and mlx-lm's LRU.


def test_a_copy_shares_what_is_stored_and_goes_its_own_way(model: Any) -> None:
    pool = CachePool(model, capacity=64, max_sequences=3)
    prompt_cache, prompt = pool.make_prompt_cache(), models.prompt_of(PROMPT)
    said = models.greedy(model, prompt, 4, prompt_cache)
    full = next(cache for cache in pool.storage.attention if cache is not None)
    free, before = full.free_cells, mx.get_active_memory()
    copies = [copy.deepcopy(prompt_cache) for _ in range(2)]
    assert full.free_cells == free
    assert mx.get_active_memory() - before < 1 << 12
    for one, more in zip([*copies, prompt_cache], ([3], [4, 5], [6]), strict=True):
        found = models.greedy(model, more, 5, one)
        assert found == own_greedy(model, [*prompt, *said, *more], 5)
    assert free - full.free_cells == 6 + 7 + 6


def test_one_copy_too_many_says_what_to_do(model: Any) -> None:
    prompt_cache = make_prompt_cache(model, capacity=64)
    models.greedy(model, models.prompt_of(PROMPT), 4, prompt_cache)
    other = copy.deepcopy(prompt_cache)
    with pytest.raises(SequencesTakenError, match="all 1 sequences"):
        models.greedy(model, [3], 4, other)
    del other
    assert models.greedy(model, [3], 4, prompt_cache)


def test_mlx_lms_lru_keeps_and_gives_our_prompt_caches(model: Any) -> None:
    pool = CachePool(model, capacity=64, max_sequences=4, rollback=0)
    lru = LRUPromptCache(max_size=2)
    prompts = [models.prompt_of(PROMPT, seed=i) for i in range(3)]
    for prompt in prompts:
        prompt_cache, rest = lru.fetch_nearest_cache("model", prompt)
        assert prompt_cache is None
        prompt_cache = pool.make_prompt_cache()
        models.greedy(model, rest, 1, prompt_cache)
        mx.eval(model(mx.array([[7, 7]]), cache=prompt_cache))
        lru.insert_cache("model", [*prompt, *own_greedy(model, prompt, 1), 7, 7], prompt_cache)
        assert lru.nbytes == sum(entry.nbytes for entry in prompt_cache) * len(lru)
        del prompt_cache
    assert len(lru) == 2
    assert pool.free_sequences == 2  # what was evicted is free again
    said = [*prompts[2], *own_greedy(model, prompts[2], 1), 7, 7]
    prompt_cache, rest = lru.fetch_nearest_cache("model", [*said, 8, 9])
    assert rest == [8, 9]
    assert models.greedy(model, rest, 5, prompt_cache) == own_greedy(model, [*said, 8, 9], 5)
    again, rest = lru.fetch_nearest_cache("model", [*said, 5])
    assert models.greedy(model, rest, 5, again) == own_greedy(model, [*said, 5], 5)


def test_mlx_lms_lru_trims_a_longer_conversation() -> None:
    model = models.shared("llama")
    pool, lru = CachePool(model, capacity=64, max_sequences=3), LRUPromptCache()
    prompt_cache, prompt = pool.make_prompt_cache(), models.prompt_of(20)
    said = models.greedy(model, prompt, 5, prompt_cache)
    lru.insert_cache("model", [*prompt, *said], prompt_cache)
    del prompt_cache
    found, rest = lru.fetch_nearest_cache("model", [*prompt[:15], 4, 5])
    assert rest == [4, 5]
    assert found[0].offset == 15
    assert models.greedy(model, rest, 5, found) == own_greedy(model, [*prompt[:15], 4, 5], 5)
    exact, rest = lru.fetch_nearest_cache("model", [*prompt, *said])
    assert rest == []
    assert models.greedy(model, [3], 5, exact) == own_greedy(model, [*prompt, *said, 3], 5)
    del found, exact
    with ThreadPoolExecutor(1) as thread:
        thread.submit(pool.clear).result()
    assert len(lru) == 0
    assert pool.free_sequences == 3


# Files.


def test_what_is_saved_is_loaded_by_us_and_by_mlx_lm(gemma: Any, tmp_path: Path) -> None:
    model, file = gemma, str(tmp_path / "prompt.safetensors")
    pool = CachePool(model, capacity=64, max_sequences=2)
    prompt_cache, prompt = pool.make_prompt_cache(), models.prompt_of(PROMPT)
    said = models.greedy(model, prompt, 9, prompt_cache)
    save_prompt_cache(file, prompt_cache, {"model": "small"})
    expected = own_greedy(model, [*prompt, *said, 3], 12)
    ours, metadata = load_prompt_cache(file, pool, return_metadata=True)
    assert metadata == {"model": "small"}
    for one in (ours, own_load(file), prompt_cache):
        assert models.greedy(model, [3], 12, one) == expected


@pytest.mark.parametrize(("length", "decoded"), [(3, 5), (9, 0), (9, 12), (30, 1)])
def test_a_prompt_cache_of_mlx_lm_is_taken_over(model: Any, length: int, decoded: int) -> None:
    """Before the window is full, just when it is, and after it has wrapped by a chunk or token by token."""
    theirs, prompt = own_prompt_cache(model), models.prompt_of(length)
    mx.eval(model(mx.array([prompt]), cache=theirs))
    more = models.prompt_of(decoded, seed=9)
    for token in more:
        mx.eval(model(mx.array([[token]]), cache=theirs))
    pool = CachePool(model, capacity=64, max_batch=64)
    ours = adopt(theirs, pool)
    x = mx.array([[5, 6]])
    assert models.largest([model(x, cache=ours)], [model(x, cache=theirs)]) <= 4e-5
    assert models.largest([model(x, cache=ours)], [model(x, cache=theirs)]) <= 4e-5


def test_of_a_long_prompt_sliding_layers_take_over_what_they_keep() -> None:
    """mlx-lm's hold all of a pass until the next one; max_batch is for passes."""
    model, tokens = models.shared("gemma"), models.prompt_of(40)
    theirs = own_prompt_cache(model)
    mx.eval(model(mx.array([tokens]), cache=theirs))
    ours = adopt(theirs, CachePool(model, capacity=64, max_batch=1, rollback=2))
    assert models.greedy(model, [5], 4, ours) == own_greedy(model, [*tokens, 5], 4)
    ours = adopt(theirs, CachePool(model, capacity=64, max_batch=1, rollback=2))
    assert rewind(ours, 38) == 38
    assert models.greedy(model, [*tokens[38:], 5], 4, ours, step=1) == own_greedy(model, [*tokens, 5], 4)


def test_states_alone_are_adopted_with_the_number_of_tokens_that_one_tells() -> None:
    model, tokens = mlx_lm_types.build("mamba2"), models.prompt_of(9)
    theirs, pool = own_prompt_cache(model), CachePool(model, capacity=64, max_sequences=3)
    mx.eval(model(mx.array([tokens]), cache=theirs))
    with pytest.raises(kvcache.InvalidRangeError, match="tokens=0 of a prompt cache that holds"):
        adopt(theirs, pool, tokens=0)
    for told, length in ((None, 1), (9, 9)):
        ours = adopt(theirs, pool, tokens=told)
        assert ours[0].offset == length
        assert models.greedy(model, [5], 4, ours) == own_greedy(model, [*tokens, 5], 4)


def test_entries_that_hold_different_numbers_of_tokens_are_refused() -> None:
    model = models.shared("qwen")
    theirs, empty = own_prompt_cache(model), own_prompt_cache(model)
    mx.eval(model(mx.zeros((1, 3), mx.int32), cache=theirs))
    pool = CachePool(model, capacity=64)
    with pytest.raises(kvcache.InvalidRangeError, match=r"of \[3\] tokens and states that are not set"):
        adopt([empty[0], theirs[1]], pool)
    with pytest.raises(kvcache.InvalidRangeError, match=r"of \[0\] tokens and states that are set"):
        adopt([theirs[0], empty[1]], pool)
    theirs[0][1] = None
    with pytest.raises(kvcache.NotSupportedError, match="partly filled"):
        adopt(theirs, pool)


def test_a_quantized_prompt_cache_is_saved_as_what_it_reads(tmp_path: Path) -> None:
    file = str(tmp_path / "prompt.safetensors")
    model = models.make_gemma(head_dim=32)
    pool = CachePool(model, capacity=64, max_sequences=2, dtype=ml.DType.Q8_0)
    prompt_cache, plain = pool.make_prompt_cache(), make_prompt_cache(model, capacity=64)
    found, exact = (model(mx.array([models.prompt_of(20)]), cache=each) for each in (prompt_cache, plain))
    assert 0 < models.largest([found], [exact]) < 0.1 * float(mx.abs(exact).max())
    assert prompt_cache[2].nbytes == plain[2].nbytes * 34 // (32 * 4)
    save_prompt_cache(file, prompt_cache)
    x = mx.array([[5, 6]])
    exact = model(x, cache=own_load(file))
    assert models.largest([model(x, cache=prompt_cache)], [exact]) < 0.02 * float(mx.abs(exact).max())
    again = model(x, cache=load_prompt_cache(file, pool))
    assert models.largest([again], [exact]) < 0.02 * float(mx.abs(exact).max())


def filled(model: Any, pool: CachePool) -> tuple[Any, list[int]]:
    """A prompt cache of 22 tokens, by three passes, and these tokens with one more."""
    one, prompt = pool.make_prompt_cache(), models.prompt_of(23)
    for begin, end in ((0, 20), (20, 21), (21, 22)):
        mx.eval(model(mx.array([prompt[begin:end]]), cache=one))
    return one, prompt


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("stored", ["Q8_0", ("Q8_0", "AFFINE4_32")], ids=str)
@pytest.mark.parametrize("make", [models.make_llama, models.make_gemma, models.make_llama4])
def test_a_pool_reads_the_codes_that_one_of_its_format_saved(
    make: Any, stored: Any, dtype: Any, tmp_path: Path
) -> None:
    """Bit by bit, past windows and chunks; mlx-lm's own classes read the values."""
    model, file = make(head_dim=32), str(tmp_path / "prompt.safetensors")
    model.set_dtype(dtype)
    pool = CachePool(model, capacity=64, max_sequences=2, dtype=stored, rollback=4)
    one, prompt = filled(model, pool)
    save_prompt_cache(file, one, {"of": "a story"})
    again, metadata = load_prompt_cache(file, pool, return_metadata=True)
    assert (metadata, again[0].offset) == ({"of": "a story"}, 22)
    for mine, read, theirs in zip(one, again, own_load(file), strict=True):
        assert mx.array_equal(mine.keys, read.keys)
        assert mx.array_equal(mine.values, read.values)
        kept = min(theirs.keys.shape[2], 7)
        assert mx.array_equal(theirs.keys[..., -kept:, :], mine.keys[..., -kept:, :])
    x = mx.array([prompt[22:]])
    assert mx.array_equal(model(x, cache=again), model(x, cache=one))
    other = load_prompt_cache(file, CachePool(model, capacity=64))  # stores the values as they are
    assert mx.array_equal(other[-1].keys[..., :5, :], own_load(file)[-1].keys[..., :5, :])


def stored(prompt_cache: Any, kinds: Any) -> list[Any]:
    """All that the pool stores for the entries of these kinds, part by part: the codes, not the values."""
    entries = [entry for entry in prompt_cache if isinstance(entry, kinds)]
    codes = [entry.rows.pool.storage.codes(entry.layer, entry.rows.claimed[0].seq) for entry in entries]
    return [part for one in codes for part in one.parts]


def same(one: Any, other: Any, kinds: Any = (KVCache, RotatingKVCache, ChunkedKVCache)) -> bool:
    pairs = list(zip(stored(one, kinds), stored(other, kinds), strict=True))
    return bool(pairs) and all(x.dtype == y.dtype and mx.array_equal(x, y) for x, y in pairs)


@pytest.mark.parametrize(
    ("make", "bits", "dtype"),
    [
        (models.make_llama, 8, mx.float32),
        (models.make_llama, 4, mx.bfloat16),
        (models.make_gemma, 8, mx.bfloat16),
        (models.make_gemma, 4, mx.float32),
        (models.make_llama4, 4, mx.bfloat16),
        (models.make_qwen, 8, mx.float32),
    ],
)
def test_groups_are_saved_as_mlx_lms_own_and_stay_bit_by_bit(
    make: Any, bits: int, dtype: Any, tmp_path: Path
) -> None:
    """Through both loaders, and again; mlx-lm's model goes on from them. Windows and chunks are values."""
    model, file = make(head_dim=32), str(tmp_path / "prompt.safetensors")
    model.set_dtype(dtype)
    pool = CachePool(model, capacity=64, max_sequences=3, dtype=f"AFFINE{bits}_32", rollback=4)
    one, prompt = filled(model, pool)
    save_prompt_cache(file, one)
    theirs = own_load(file)
    full = [i for i, entry in enumerate(own_prompt_cache(model)) if type(entry) is OwnKVCache]
    assert [i for i, entry in enumerate(theirs) if type(entry) is QuantizedKVCache] == full
    assert {(theirs[i].offset, theirs[i].bits, theirs[i].group_size) for i in full} == {(22, bits, 32)}
    assert same(one, load_prompt_cache(file, pool))
    adopted = adopt(theirs, pool)
    assert same(one, adopted, KVCache)
    for i in full:
        for mine, their in zip(adopted[i].state[:2], theirs[i].state[:2], strict=True):
            assert all(mx.array_equal(x, y) for x, y in zip(mine, their, strict=True))
    x = mx.array([prompt[22:]])
    exact = model(x, cache=one)
    close = 1e-5 if len(full) == len(theirs) and dtype is mx.float32 else 0.1  # mlx-lm's windows store values
    assert models.largest([model(x, cache=theirs)], [exact]) <= close * float(mx.abs(exact).max())
    save_prompt_cache(file, adopted)
    assert same(adopted, load_prompt_cache(file, pool))


def test_a_model_that_does_not_compute_over_groups_has_values_in_the_file(tmp_path: Path) -> None:
    """mlx-lm's attention over groups refuses sinks; its model goes on, and a pool of ours reads the codes."""
    model, file = models.make_gpt_oss(head_dim=32), str(tmp_path / "prompt.safetensors")
    pool = CachePool(model, capacity=64, max_sequences=2, dtype="AFFINE8_32")
    one, prompt = filled(model, pool)
    save_prompt_cache(file, one)
    assert [type(entry).__name__ for entry in own_load(file)] == ["RotatingKVCache", "KVCache"]
    assert same(one, load_prompt_cache(file, pool))
    x = mx.array([prompt[22:]])
    exact = model(x, cache=one)
    assert models.largest([model(x, cache=own_load(file))], [exact]) < 0.02 * float(mx.abs(exact).max())


def test_rows_without_padding_become_mlx_lms_groups_together(tmp_path: Path) -> None:
    model, file = models.make_llama(head_dim=32), str(tmp_path / "prompt.safetensors")
    pool, ids = CachePool(model, capacity=64, max_sequences=2, dtype="AFFINE8_32"), models.prompt_of(20)
    both, theirs = pool.make_prompt_cache(), own_prompt_cache(model)
    for entries in (both, theirs):
        mx.eval(model(mx.array([ids[:9], ids[9:18]]), cache=entries))
    save_prompt_cache(file, both)
    read, expected = own_load(file), theirs[0].to_quantized(group_size=32, bits=8)
    assert mx.array_equal(read[0].keys[0], expected.keys[0][..., :9, :])  # both rows
    for mine, their in zip(both, read, strict=True):
        same_groups(mine.to_quantized(group_size=32, bits=8), their)


def test_a_file_that_is_none_or_of_another_model_or_does_not_fit_is_told_so(tmp_path: Path) -> None:
    pool, other = CachePool(models.shared("llama"), capacity=64), models.make_llama(head_dim=32)
    unknown, weights, made = (str(tmp_path / name) for name in ("a.kv", "b.safetensors", "c.safetensors"))
    Path(unknown).write_bytes(b"anything")
    mx.save_safetensors(weights, {"model.embed_tokens.weight": mx.zeros((4, 4))})
    for file in (unknown, weights, str(tmp_path / "none.safetensors")):
        with pytest.raises(kvcache.InvalidRangeError, match="cannot be read as what save_prompt"):
            load_prompt_cache(file, pool)
    kept = own_prompt_cache(other)
    mx.eval(other(mx.array([models.prompt_of(30)]), cache=kept))
    save_prompt_cache(made, kept)
    with pytest.raises(kvcache.InvalidRangeError, match=r"load_.* made for another model \(put"):
        load_prompt_cache(made, pool)
    with pytest.raises(kvcache.CacheFullError, match="load_prompt_cache: 30 cells are needed and 16 "):
        load_prompt_cache(made, CachePool(other, capacity=16))
    assert pool.sequences.free == 1


def same_groups(one: Any, other: Any) -> None:
    """The same tokens in the same words, scales and biases, of the same dtypes."""
    assert type(one) is type(other) is QuantizedKVCache
    assert (one.offset, one.bits, one.group_size) == (other.offset, other.bits, other.group_size)
    parts = [[part for half in entry.keys_and_values() for part in half] for entry in (one, other)]
    for mine, yours in zip(*parts, strict=True):
        assert mine.dtype == yours.dtype
        assert mx.array_equal(mine, yours)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "group"), [(8, 32), (4, 64)])
def test_quantized_entries_of_mlx_lms_go_in_and_out_code_by_code(
    bits: int, group: int, dtype: Any, tmp_path: Path
) -> None:
    """Of a file that mlx-lm wrote; what ours stores itself is, in the next steps, what mlx-lm would."""
    model, file = models.make_llama(head_dim=64), str(tmp_path / "prompt.safetensors")
    model.set_dtype(dtype)
    theirs = [QuantizedKVCache(group_size=group, bits=bits) for _ in own_prompt_cache(model)]
    mx.eval(model(mx.array([models.prompt_of(20)]), cache=theirs))
    save_prompt_cache(file, theirs)
    pool = CachePool(model, capacity=64, dtype=f"AFFINE{bits}_{group}")
    found = load_prompt_cache(file, pool)
    key, value = (mx.random.normal((1, theirs[0].keys[0].shape[1], 3, 64)).astype(dtype) for _ in "kv")
    for step in range(2):
        for ours, own in zip(found, theirs, strict=True):
            same_groups(ours.to_quantized(group_size=group, bits=bits), own)
        for entry in (*found, *theirs) if step == 0 else ():
            entry.update_and_fetch(key, value)


def test_quantized_entries_are_read_where_the_pool_stores_something_else() -> None:
    model = models.make_llama(head_dim=64)
    theirs = [QuantizedKVCache(group_size=64, bits=8) for _ in own_prompt_cache(model)]
    mx.eval(model(mx.array([models.prompt_of(20)]), cache=theirs))
    found = adopt(theirs, CachePool(model, capacity=64))
    for ours, own in zip(found, theirs, strict=True):
        assert mx.array_equal(ours.keys, mx.dequantize(*own.keys_and_values()[0], group_size=64, bits=8))
    other = adopt(theirs, CachePool(model, capacity=64, dtype=("AFFINE8_64", "AFFINE4_64")))
    assert 0 < models.largest([other[0].values], [found[0].values]) < 1  # quantized again, to 4 bits
    narrow = models.make_llama(head_dim=32)
    with pytest.raises(kvcache.InvalidRangeError):
        adopt(theirs, CachePool(narrow, capacity=64, dtype="AFFINE8_32"))


def test_a_batch_is_not_saved_as_if_it_were_one_prompt_cache(gemma: Any, tmp_path: Path) -> None:
    model, pool = gemma, CachePool(gemma, capacity=64, max_sequences=2)
    batch = models.merged([pool.make_prompt_cache() for _ in range(2)])
    mx.eval(model(mx.zeros((2, 3), mx.int32), cache=batch))
    with pytest.raises(ValueError, match=r"extract\(row\)"):
        save_prompt_cache(str(tmp_path / "batch.safetensors"), batch)
    save_prompt_cache(str(tmp_path / "row.safetensors"), [entry.extract(1) for entry in batch])


def test_prompt_caches_of_another_model_are_refused(model: Any) -> None:
    pool = CachePool(model, capacity=64)
    others = [other for other in map(models.shared, models.MODELS) if type(other) is not type(model)]
    for other in others:
        theirs = own_prompt_cache(other)
        mx.eval(other(mx.zeros((1, 3), mx.int32), cache=theirs))
        with pytest.raises(kvcache.InvalidRangeError, match="adopt"):
            adopt(theirs, pool)
    assert pool.free_sequences == 1


def test_what_does_not_fit_is_refused_when_loaded(tmp_path: Path) -> None:
    model = models.shared("llama")
    theirs = own_prompt_cache(model)
    mx.eval(model(mx.zeros((1, 30), mx.int32), cache=theirs))
    pool = CachePool(model, capacity=20)
    with pytest.raises(kvcache.CacheFullError):
        adopt(theirs, pool)
    prompt_cache = pool.make_prompt_cache()
    assert models.greedy(model, [5, 6, 7], 4, prompt_cache) == own_greedy(model, [5, 6, 7], 4)


def test_speculation_is_refused_where_drafts_could_not_be_taken_back() -> None:
    """mlx-lm asks only before it starts, when the window is not full yet."""
    model, draft = models.shared("gemma"), models.make_llama()
    drafts = make_prompt_cache(draft, capacity=64)
    prompt = mx.array(models.prompt_of(8))
    without = make_prompt_cache(model, capacity=64, rollback=0)
    with pytest.raises(kvcache.NotSupportedError, match="make it with rollback=1 or more"):
        list(
            loops.speculative_generate_step(prompt, model, draft, prompt_cache=without + drafts, max_tokens=4)
        )
    alone = make_prompt_cache(model, capacity=64)
    with pytest.raises(kvcache.InvalidRangeError, match=r"make_prompt_cache\(draft_model\)"):
        list(loops.speculative_generate_step(prompt, model, draft, prompt_cache=alone, max_tokens=4))
    with_it = make_prompt_cache(model, capacity=64, rollback=1)
    assert list(
        loops.speculative_generate_step(prompt, model, draft, prompt_cache=with_it + drafts, max_tokens=4)
    )
    both = make_prompt_cache(draft, capacity=64) + with_it  # which drafts token by token
    with pytest.raises(kvcache.NotSupportedError, match="make it with rollback=3 or more"):
        list(loops.speculative_generate_step(prompt, draft, model, prompt_cache=both, num_draft_tokens=4))


def test_speculation_on_pools_that_are_installed_is_refused_likewise() -> None:
    model, draft, prompt = models.make_gemma(), models.make_gemma(seed=9), models.prompt_of(8)
    expected = own_greedy(model, prompt, 12)
    for rollbacks, least in (((0, 3), 1), ((1, 2), 3), ((1, 3), None)):
        for one, rollback in zip((model, draft), rollbacks, strict=True):
            install(one, capacity=64, max_sequences=2, rollback=rollback)
        loop = functools.partial(
            loops.speculative_generate_step, mx.array(prompt), model, draft, num_draft_tokens=4, max_tokens=12
        )
        if least is None:
            assert [int(token) for token, *_ in loop()] == expected
        else:
            with pytest.raises(kvcache.NotSupportedError, match=f"make it with rollback={least} or more"):
                loop()


@contextlib.contextmanager
def failing(layer: Any) -> Iterator[None]:
    """A pass in the block ends at this layer."""
    kind, original = type(layer), type(layer).__call__

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if self is layer:
            raise MemoryError("the device is full")
        return original(self, *arguments, **options)

    kind.__call__ = call
    try:
        with pytest.raises(MemoryError, match="the device is full"):
            yield
    finally:
        kind.__call__ = original


def extended(pool: CachePool, prompt_cache: list[Any]) -> None:
    for entry, other in zip(pool.make_prompt_cache(), prompt_cache, strict=True):
        entry.extend(other)


@pytest.mark.parametrize("name", ["mamba2", "rwkv7", "granitemoehybrid"])
def test_a_prompt_cache_whose_pass_failed_half_way_is_not_taken_for_whole(name: str) -> None:
    """Its last layers are recurrent: the caches have all K and V of that pass."""
    model = mlx_lm_types.build(name)
    pool = CachePool(model, capacity=64, max_sequences=4, checkpoint_interval=3)
    prompt_cache = pool.make_prompt_cache()
    mx.eval(model(mx.array([[5, 6, 7]]), cache=prompt_cache))
    with failing(model.layers[-1]):
        model(mx.array([[8, 9]]), cache=prompt_cache)
    for op, take in (
        ("merge", lambda: models.merged([prompt_cache])),
        ("extract", lambda: [entry.extract(0) for entry in prompt_cache]),
        ("extend", lambda: extended(pool, prompt_cache)),
    ):
        with pytest.raises(kvcache.OrderError, match=f"{op}: this entry did not take part"):
            take()
    for one in (copy.deepcopy(prompt_cache), prompt_cache):
        at = rewind(one, 5)
        assert at in (0, 3)
        rest = [5, 6, 7, 8, 9][at:]
        assert models.greedy(model, rest, 4, one) == models.greedy(
            model, [5, 6, 7, 8, 9], 4, own_prompt_cache(model)
        )


@pytest.mark.parametrize("name", models.MODELS)
def test_a_copy_of_a_prompt_cache_whose_pass_failed_before_all_layers_goes_on(name: str) -> None:
    model = models.MODELS[name]()
    prompt_cache = make_prompt_cache(model, capacity=64, max_sequences=2)
    mx.eval(model(mx.array([[5, 6, 7]]), cache=prompt_cache))
    with failing(model.layers[0]):  # the caches were asked for masks alone
        model(mx.array([[8, 9]]), cache=prompt_cache)
    expected = models.greedy(model, [5, 6, 7, 8], 4, own_prompt_cache(model))
    for one in (copy.deepcopy(prompt_cache), prompt_cache):
        assert models.greedy(model, [8], 4, one) == expected


def test_dtypes_of_mlx_are_understood() -> None:
    model = models.make_llama()
    pool = CachePool(model, capacity=16, dtype=(mx.float16, mx.bfloat16))
    assert "F16/BF16" in repr(pool)


class FailsAt:
    """A part of a model that raises in its n-th call."""

    def __init__(self, part: Any, at: int) -> None:
        self.part, self.left = part, at

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise MemoryError("the device is full")
        return self.part(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)


PLACES = ["draft", "layer of the draft", "target", "layer of the target", "sampler"]


@pytest.mark.parametrize(
    ("where", "at", "make"),
    [
        (where, at, (models.make_llama, models.make_gemma)[(i + j) % 2])
        for i, where in enumerate(PLACES)
        for j, at in enumerate((1, 3, 8))
    ],
)
def test_a_round_of_speculation_that_fails_leaves_both_where_it_began(make: Any, where: str, at: int) -> None:
    """The error is the one that was raised, and both go on from there as if the round had never been."""
    target, draft = make(seed=1), make(seed=2)
    mine, drafts = (make_prompt_cache(model, capacity=96, rollback=12) for model in (target, draft))
    prompt, said, parts = models.prompt_of(20), list[int](), {"draft": draft, "target": target}
    failing, options = dict(parts), {}
    if where.startswith("layer"):
        layers = parts[where.split()[-1]].model.layers
        layers[1] = FailsAt(layers[1], at)
    elif where == "sampler":
        options["sampler"] = FailsAt(lambda logs: mx.argmax(logs, axis=-1), at)
    else:
        failing[where] = FailsAt(parts[where], at)
    steps = loops.speculative_generate_step(
        mx.array(prompt), failing["target"], failing["draft"], max_tokens=12, num_draft_tokens=4,
        prompt_cache=mine + drafts, prefill_step_size=64, **options,
    )  # fmt: skip
    with pytest.raises(MemoryError, match="the device is full"):
        said.extend(token for token, _, _ in steps)
    begun = len(prompt) - 1 + len(said) if mine[0].offset else 0
    assert [entry.offset for entry in mine] == [begun] * len(mine)
    assert len({entry.offset for entry in drafts}) == 1
    assert drafts[0].offset <= len(prompt) - 1 + len(said)
    if where.startswith("layer"):
        layers[1] = layers[1].part
    rest = [*prompt, *said][begun:]
    assert models.greedy(target, rest, 6, mine) == own_greedy(target, [*prompt, *said], 6)
