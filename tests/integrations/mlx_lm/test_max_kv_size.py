"""``max_kv_size``: first tokens that stay beside a window, held against mlx-lm's RotatingKVCache(keep=4)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import mlx.core as mx
from mlx_lm.models import gpt_bigcode, qwen3
from mlx_lm.models.cache import can_trim_prompt_cache, save_prompt_cache, trim_prompt_cache
from mlx_lm.models.cache import load_prompt_cache as own_load
from mlx_lm.models.cache import make_prompt_cache as own_prompt_cache

import kvcache
from kvcache.integrations.mlx_lm import (
    Attention,
    CachePool,
    adopt,
    load_prompt_cache,
    make_prompt_cache,
    rewind,
)

from ...rigs import mlx_lm_models as models

SIZE = 12
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model() -> Any:
    """Two layers of full attention, of a model that leaves its caches to mlx-lm."""
    arguments = qwen3.ModelArgs(
        model_type="qwen3",
        num_hidden_layers=2,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        **models.SHAPE,
    )
    return models.seeded(qwen3.Model(arguments), 3)


def passes(model: Any, prompt_cache: Any, tokens: list[int], sizes: list[int]) -> list[mx.array]:
    """The logits of passes of so many tokens each."""
    found, at = [], 0
    for size in sizes:
        found.append(model(mx.array([tokens[at : at + size]]), cache=prompt_cache)[0])
        at += size
    assert at == len(tokens)
    return found


@pytest.mark.parametrize(
    ("step", "size", "rollback"),
    [
        (step, size, 64 * ((i + j) % 2))
        for i, step in enumerate((1, 7, 40))
        for j, size in enumerate((5, SIZE, 29))
    ],
)
def test_generation_gives_the_tokens_and_logits_of_mlx_lms_own_cache(
    model: Any, step: int, size: int, rollback: int
) -> None:
    prompt = models.prompt_of(37)
    theirs = models.steps(model, prompt, 10, own_prompt_cache(model, size), step)
    ours = models.steps(
        model, prompt, 10, make_prompt_cache(model, max_kv_size=size, rollback=rollback), step
    )
    models.say_the_same(ours, theirs, TOLERANCE)


@pytest.mark.parametrize(
    "sizes", [[30], [11, 1, 5, 2, 1, 1, 3, 6], [12, 12, 6], [3, 9, 1, 8, 9], [5, 1, 1, 1, 1, 1, 1, 4, 15]]
)
def test_every_query_of_every_pass_sees_what_it_sees_with_mlx_lms_own_cache(
    model: Any, sizes: list[int]
) -> None:
    tokens = models.prompt_of(30)
    theirs = passes(model, own_prompt_cache(model, SIZE), tokens, sizes)
    ours = passes(model, make_prompt_cache(model, max_kv_size=SIZE), tokens, sizes)
    assert models.largest(ours, theirs) <= TOLERANCE


def test_the_first_tokens_matter_and_others_leave(model: Any) -> None:
    """So that the tests above can fail: not all of the past is seen, and more than a window."""
    prompt = models.prompt_of(37)

    def last(**options: Any) -> mx.array:
        return models.steps(model, prompt, 1, make_prompt_cache(model, **options), 1)[0][1]

    kept = last(max_kv_size=SIZE)
    window = CachePool([Attention(SIZE - 4)] * 2).make_prompt_cache()
    for other in (last(), models.steps(model, prompt, 1, window, 1)[0][1]):
        assert models.largest([kept], [other]) > 1e-3


def test_a_text_may_be_longer_than_any_capacity_and_memory_stays(model: Any) -> None:
    pool = CachePool(model, max_kv_size=SIZE, capacity=8, rollback=2, max_batch=16)
    before = pool.nbytes
    cache = pool.make_prompt_cache()
    theirs = models.greedy(model, models.prompt_of(70), 40, own_prompt_cache(model, SIZE))
    assert models.greedy(model, models.prompt_of(70), 40, cache) == theirs
    assert pool.nbytes == before
    assert pool.cache.cells <= SIZE + 2 + 16
    assert (cache[0].offset, cache[0].size(), cache[0].keep, cache[0].max_size) == (110, SIZE, 4, SIZE)


# Going back.


def test_without_rollback_it_is_trimmable_until_a_token_has_left_as_in_mlx_lm(model: Any) -> None:
    ours, theirs = make_prompt_cache(model, max_kv_size=SIZE, rollback=0), own_prompt_cache(model, SIZE)
    tokens = models.prompt_of(40)
    for cache in (ours, theirs):
        passes(model, cache, tokens[:9], [5, 4])
        assert can_trim_prompt_cache(cache)
        assert trim_prompt_cache(cache, 4) == 4
    assert models.largest(passes(model, ours, tokens, [40]), passes(model, theirs, tokens, [40])) <= TOLERANCE
    passes(model, ours, tokens[:1], [1])
    assert not can_trim_prompt_cache(ours)
    assert not can_trim_prompt_cache(theirs)


@pytest.mark.parametrize("back", [1, 3, 5])
def test_what_is_trimmed_behind_the_window_is_as_if_it_had_never_been(model: Any, back: int) -> None:
    tokens = models.prompt_of(40)
    ours, straight = make_prompt_cache(model, max_kv_size=SIZE, rollback=5), own_prompt_cache(model, SIZE)
    passes(model, ours, tokens[:30], [25, 5])
    assert can_trim_prompt_cache(ours)
    assert trim_prompt_cache(ours, back) == back
    passes(model, straight, tokens[: 30 - back], [25, 5 - back] if back < 5 else [25])
    sizes = [1, 4, 5 + back]
    rest = tokens[30 - back :]
    assert models.largest(passes(model, ours, rest, sizes), passes(model, straight, rest, sizes)) <= TOLERANCE


def test_more_than_the_rollback_is_refused_but_for_the_first_tokens(model: Any) -> None:
    tokens = models.prompt_of(30)
    cache = make_prompt_cache(model, max_kv_size=SIZE, rollback=2)
    passes(model, cache, tokens, [30])
    passes(model, cache, tokens[:1], [1])
    with pytest.raises(kvcache.NotSupportedError, match="trim: 20 of 31 tokens"):
        trim_prompt_cache(cache, 20)
    assert cache[0].offset == 31
    assert rewind(cache, 3) == 3
    own = own_prompt_cache(model, SIZE)
    passes(model, own, tokens[:3], [3])
    assert models.largest(passes(model, cache, tokens, [30]), passes(model, own, tokens, [30])) <= TOLERANCE


# Copies, files, batches.


@pytest.mark.parametrize("sizes", [[9], [30], [20, 1, 1, 1, 1, 6], [20, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
def test_files_go_both_ways(model: Any, tmp_path: Path, sizes: list[int]) -> None:
    tokens, rest = models.prompt_of(sum(sizes)), models.prompt_of(16, seed=2)
    pool = CachePool(model, max_kv_size=SIZE, max_sequences=4, rollback=3)
    own, ours = own_prompt_cache(model, SIZE), pool.make_prompt_cache()
    for name, cache in (("own", own), ("ours", ours)):
        passes(model, cache, tokens, sizes)
        save_prompt_cache(str(tmp_path / f"{name}.safetensors"), cache)
    loaded = [
        load_prompt_cache(str(tmp_path / "own.safetensors"), pool),
        own_load(str(tmp_path / "ours.safetensors")),
        adopt(own, pool),
    ]
    theirs = passes(model, own, rest, [1, 5, 1, 9])
    for cache in (copy.deepcopy(ours), ours, *loaded):
        assert cache[0].offset == len(tokens)
        assert models.largest(passes(model, cache, rest, [1, 5, 1, 9]), theirs) <= TOLERANCE


@pytest.mark.parametrize("steps", [[1, 5, 1, 9], [5, 1, 1, 9]])
@pytest.mark.parametrize("length", [SIZE, 30])
def test_a_window_that_lacks_its_oldest_token_is_saved_so(
    model: Any, tmp_path: Path, length: int, steps: list[int]
) -> None:
    tokens, rest, file = models.prompt_of(length), models.prompt_of(16, seed=2), str(tmp_path / "short")
    pool, own = CachePool(model, max_kv_size=SIZE, max_sequences=3), own_prompt_cache(model, SIZE)
    passes(model, own, tokens, [length - 1, 1])
    short = adopt(own, CachePool(model, max_kv_size=SIZE, rollback=0))
    save_prompt_cache(f"{file}.safetensors", short)
    back = load_prompt_cache(f"{file}.safetensors", pool)
    assert rewind(copy.deepcopy(back), length - 1) == 0
    theirs = passes(model, own, rest, steps)
    for cache in (own_load(f"{file}.safetensors"), back, short):
        assert models.largest(passes(model, cache, rest, steps), theirs) <= TOLERANCE


def test_a_prompt_cache_that_keeps_another_number_of_tokens_is_not_taken_over(model: Any) -> None:
    pool = CachePool([Attention(SIZE, keep=3)] * 2)
    with pytest.raises(kvcache.InvalidRangeError, match="entry 0 is RotatingKVCache; the layer is"):
        adopt(own_prompt_cache(model, SIZE), pool)


@pytest.mark.parametrize("rollback", [0, 4])
def test_rows_of_a_batch_keep_their_first_tokens_as_each_does_alone(model: Any, rollback: int) -> None:
    """mlx-lm's own batches lose them: ``BatchRotatingKVCache`` knows no ``keep``."""
    pool = CachePool(model, max_kv_size=SIZE, max_sequences=3, rollback=rollback)
    lengths = [23, 5, 16]
    prompts = [models.prompt_of(length, seed=length) for length in lengths]
    caches = [pool.make_prompt_cache() for _ in prompts]
    batch = models.merged(caches)
    for entry in batch:
        entry.prepare(lengths=lengths, right_padding=[max(lengths) - length for length in lengths])
    padded = mx.array([prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts])
    more = mx.array(np.random.default_rng(3).integers(3, models.VOCAB, (3, 14)))
    logits = model(padded, cache=batch)
    for entry in batch:
        entry.finalize()
    steps = mx.concatenate([model(more[:, i : i + 1], cache=batch) for i in range(9)], axis=1)
    chunk = model(more[:, 9:], cache=batch)
    for row, prompt in enumerate(prompts):
        own = own_prompt_cache(model, SIZE)
        found = [logits[row, : len(prompt)], *steps[row], chunk[row]]
        alone = passes(model, own, [*prompt, *more[row].tolist()], [len(prompt), *[1] * 9, 5])
        alone = [alone[0], *(x[0] for x in alone[1:-1]), alone[-1]]
        assert models.largest(found, alone) <= TOLERANCE


def test_models_with_one_length_for_all_rows_are_served_too() -> None:
    arguments = gpt_bigcode.ModelArgs(
        model_type="gpt_bigcode", n_embd=32, n_layer=2, n_inner=64, n_head=4, n_positions=128,
        layer_norm_epsilon=1e-5, vocab_size=models.VOCAB,
    )  # fmt: skip
    model = models.seeded(gpt_bigcode.Model(arguments), 3)
    prompt = models.prompt_of(37)
    theirs = models.steps(model, prompt, 12, own_prompt_cache(model, SIZE))
    ours = models.steps(model, prompt, 12, make_prompt_cache(model, max_kv_size=SIZE))
    models.say_the_same(ours, theirs, TOLERANCE)
