"""Models with latent attention, small and random: what is stored of a token, and where it goes from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
from kvcache.snapshots.layer_shapes import layers_of_cache
from kvcache.storage.layer_shape import ExtraSpec, LayerShape
from kvcache.stores.file import FileStore
from kvcache_engine.engine import Engine
from kvcache_engine.generate import Generator
from kvcache_engine.memory import cache_bytes
from kvcache_engine.models import indexer
from kvcache_engine.options import EngineOptions
from kvcache_engine.requests import GenerationOptions
from ml import DType

from ..rigs.model_passes import close, prompt
from .test_models import (
    LENGTH,
    backend,
    expected_logits,
    expected_tokens,
    feed,
    folders,
    models,
    new_cache,
    whole_on_numpy,
)

pytest.importorskip("transformers")
__all__ = ["backend", "folders", "models"]

NAMES = ("deepseek-v2", "deepseek-v3", "deepseek-v3.2")
STORED, RANK, LAYERS, INDEX = 32, 24, 3, 14

pytestmark = whole_on_numpy(NAMES, ["deepseek-v3.2"])


@pytest.fixture
def model(models: Any, name: str) -> Any:
    return models(name)


def test_a_token_is_one_latent_its_rotated_numbers_and_an_index_key(model: Any, name: str) -> None:
    cache = new_cache(model)
    feed(model, cache, prompt(LENGTH))
    extra = (ExtraSpec("index", (INDEX,), DType.F32),) if name == "deepseek-v3.2" else ()
    shape = LayerShape((1, STORED), (1, RANK), True, extra)
    assert layers_of_cache(cache) == model.config.cached_layers == dict.fromkeys(range(LAYERS), shape)
    assert cache.nbytes == cache.cells * LAYERS * 4 * (STORED + (INDEX if extra else 0))
    with model.backend.new_context() as ctx:
        cache.start_forward(ctx, kvcache.Batch([LENGTH - 1], [0]), read_only=True)
        key, value, _ = cache.get(ctx)
        assert (key.shape[1:], value.shape[1:]) == ((1, STORED), (1, RANK))


def test_an_indexer_chooses_the_same_in_blocks_of_any_size(
    model: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if model.config.index is None:
        pytest.skip("no indexer")
    monkeypatch.setattr(indexer, "BLOCK", 4 * 12 * LENGTH * 3)
    tokens = prompt(LENGTH)
    close(feed(model, new_cache(model), tokens), expected_logits(name, tokens))


def test_snapshots_go_on_in_any_cache_from_any_position(model: Any, name: str) -> None:
    tokens = prompt(LENGTH)
    cache, other = new_cache(model, sequences=2), new_cache(model, sequences=2)
    cache.schedule_snapshots(0, [9, 17])
    for start, stop in ((0, 9), (9, 17), (17, 30)):
        feed(model, cache, tokens, start, stop)
    scheduled = cache.take_snapshots(0)
    assert [snapshot.end for snapshot in scheduled] == [9, 17]
    page = kvcache.serialize(model.backend, cache.snapshot(0))
    for snapshot, target in ((scheduled[0], 9), (cache.join(scheduled), 17)):
        cache.remove(0, 0)
        assert cache.restore(0, snapshot, target)
        close(feed(model, cache, tokens, target), expected_logits(name, tokens)[target:])
    for target in (30, 13):
        assert other.restore(0, kvcache.deserialize(model.backend, page), target)
        close(feed(model, other, tokens, target), expected_logits(name, tokens)[target:])


def test_an_engine_goes_on_from_pages_of_another(model: Any, name: str, tmp_path: Path) -> None:
    tokens = prompt(LENGTH)
    expected = expected_tokens(name, tokens, 12)
    turn = tokens
    for answered in (5, 7):
        with (
            FileStore(tmp_path, durable=False) as store,
            Engine(model, None, EngineOptions(capacity=64, prefill_chunk=16), tiers=[store]) as engine,
        ):
            (answer,) = engine.complete([turn], GenerationOptions(max_new_tokens=answered))
            assert answer.reused == engine.prefix.stats.store == (len(turn) - 1 if turn is not tokens else 0)
            turn = [*turn, *answer.tokens]
    assert turn == [*tokens, *expected]


@pytest.mark.parametrize("dtype", ["Q8_0", ("Q8_0", "Q4_0")], ids=str)
def test_codes_of_latents_give_almost_the_same_and_take_what_was_said(
    model: Any, name: str, dtype: kvcache.CacheDType
) -> None:
    tokens = prompt(LENGTH)
    cache, exact = new_cache(model, dtype=dtype), expected_logits(name, tokens)
    got = np.concatenate([feed(model, cache, tokens, 0, 24), feed(model, cache, tokens, 24)])
    assert (
        0 < np.median(np.abs(got - exact)) < 0.05 * exact.std()
    )  # an expert chosen otherwise is further off
    assert cache.nbytes == cache_bytes(model.config, dtype, 1, 64, 48)
    options = EngineOptions(max_sequences=2, capacity=64, prefill_chunk=16, cache_dtype=dtype)
    with Generator(model, None, options=options) as generator:
        (answer,) = generator.complete([tokens], GenerationOptions(max_new_tokens=4))
        assert len(answer.tokens) == 4
        bound: Any = generator.cache
        assert bound.nbytes == generator.cache_bytes


def test_bytes_of_a_cache_count_latents_once(model: Any, name: str) -> None:
    config, index = model.config, 4 * INDEX * (name == "deepseek-v3.2")
    assert cache_bytes(config, DType.F16, 3, 100) == 3 * 100 * LAYERS * (STORED * 2 + index)
    assert cache_bytes(config, DType.Q8_0, 3, 100) == 3 * 100 * LAYERS * (34 + index)
    with pytest.raises(kvcache.InvalidRangeError):
        cache_bytes(config, "AFFINE4_64", 1, 1)
