"""DeepSeek-V4.1, whose entries hold a window, latents of groups of tokens, and the group that is open."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache as own_prompt_cache

import kvcache
from benchmarks.census import mlx_lm_types
from kvcache.integrations.mlx_lm import CachePool, adopt, layers_of, make_prompt_cache, rewind

from . import mlx_lm_models as models

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model() -> Any:
    return mlx_lm_types.build("deepseek_v41")


def feed(model: Any, prompt_cache: Any, tokens: list[int], *sizes: int) -> list[mx.array]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    assert ends[-1] == len(tokens)
    parts = [tokens[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return [model(mx.array([part]), cache=prompt_cache)[0] for part in parts]


def same(ours: list[mx.array], theirs: list[mx.array]) -> None:
    assert models.largest(ours, theirs) <= TOLERANCE


def test_layers_say_how_their_states_grow(model: Any) -> None:
    first, second, third, *_, last = layers_of(model, capacity=30)
    assert (first.names, first.shapes, first.capacity) == (("window",), ((7, 16),), None)
    assert first == last, "layers that read what another one compressed keep a window alone"
    assert second.names == ("window", "compress_kv", "index_k")
    assert second.shapes == ((7, 16), (30, 16), (30, 8)), "groups of one token"
    assert third.names == ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")
    assert third.shapes == ((7, 16), (7, 16), (7, 8), (3, 16), (3, 16)), "groups of four"


def test_what_an_entry_shows_is_what_mlx_lms_own_shows(model: Any) -> None:
    ours, theirs = make_prompt_cache(model, capacity=40), own_prompt_cache(model)
    for size in (1, 2, 1, 5, 1, 1, 1, 4, 9):
        tokens = models.prompt_of(size, seed=size)
        same(*(feed(model, cache, tokens, size) for cache in (ours, theirs)))
        for mine, its in zip(ours, theirs, strict=True):
            assert (mine.offset, mine.window_size, mine.empty()) == (its.offset, its.window_size, False)
            assert len(mine.state) == len(its.state)
            for one, other in zip(mine.state, its.state, strict=True):
                if other is None or not other.size:
                    assert one is None or not one.size
                else:
                    assert models.largest([one], [other]) <= TOLERANCE


def test_a_copy_and_its_original_go_on_and_back_on_their_own(model: Any) -> None:
    pool = CachePool(model, capacity=40, max_sequences=2, checkpoint_interval=3, checkpoints=8)
    first, tokens = pool.make_prompt_cache(), models.prompt_of(24)
    feed(model, first, tokens[:12], 5, 7)
    other = copy.deepcopy(first)
    feed(model, other, models.prompt_of(9, seed=5), 4, 1, 1, 3)
    reached = rewind(other, 11)
    assert 0 < reached <= 11
    theirs = own_prompt_cache(model)
    feed(model, theirs, tokens[:12], 5, 7)
    same(*(feed(model, cache, tokens[12:], 1, 1, 10) for cache in (first, theirs)))
    feed(model, other, tokens[reached:], 24 - reached)
    rest = models.prompt_of(3, seed=8)
    same(feed(model, other, rest, 1, 2), feed(model, theirs, rest, 1, 2))


@pytest.mark.parametrize("count", [3, 12, 13])
def test_a_prompt_cache_of_mlx_lms_is_taken_over(model: Any, count: int) -> None:
    theirs, pool = own_prompt_cache(model), CachePool(model, capacity=40)
    feed(model, theirs, models.prompt_of(count), count)
    ours = adopt(theirs, pool)
    assert ours[0].offset == count
    rest = models.prompt_of(11, seed=2)
    same(feed(model, ours, rest, 1, 6, 1, 3), feed(model, theirs, rest, 1, 6, 1, 3))
    assert adopt(own_prompt_cache(model), CachePool(model, capacity=8))[0].empty()


def test_a_row_longer_than_its_capacity_is_refused_and_stays_as_it_was(model: Any) -> None:
    cache = CachePool(model, capacity=10, max_sequences=3).make_prompt_cache()
    theirs, tokens = own_prompt_cache(model), models.prompt_of(10)
    for one in (cache, theirs):
        feed(model, one, tokens[:8], 8)
    with pytest.raises(kvcache.CacheFullError, match=r"3 cells are needed and 2 are free .* larger capacity"):
        feed(model, cache, tokens[:3], 3)
    same(feed(model, cache, tokens[8:], 2), feed(model, theirs, tokens[8:], 2))
