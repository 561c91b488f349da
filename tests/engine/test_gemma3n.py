"""Gemma 3n: what layers that share keys and values leave out, snapshots, keys that move, configs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache_engine.errors import ModelError
from kvcache_engine.models import gemma3n
from kvcache_engine.models.families import parse_config

from ..rigs.model_passes import close, prompt
from .test_models import LENGTH, backend, expected_logits, feed, folders, models, new_cache, peer

__all__ = ["backend", "folders", "models"]

E4B: dict[str, Any] = {"architectures": ["Gemma3nForCausalLM"], "attention_bias": False}
"""A config.json that leaves everything to its defaults."""


def test_the_last_layers_read_the_last_of_their_type_that_has_keys() -> None:
    config: Any = parse_config(E4B)
    assert config.sources[:20] == tuple(range(20))
    assert [config.kinds[i] for i in (18, 19)] == ["sliding_attention", "full_attention"]
    assert config.sources[20:] == (18, 18, 18, 18, 19) * 3
    assert list(config.cached_layers) == list(range(20))
    assert config.sparsity == (0.95,) * 10 + (0.0,) * 25
    assert config.inner_sizes == (16384,) * 35
    shapes = gemma3n.Gemma3n.shapes(config)
    assert "model.layers.19.self_attn.k_norm.weight" in shapes
    shared = {name for name in shapes if name.startswith("model.layers.20.self_attn.")}
    assert {name.split(".")[4] for name in shared} == {"q_proj", "q_norm", "o_proj"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_kv_shared_layers": 31}, "num_kv_shared_layers=31 of 35 layers"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers=-1 of 35 layers"),
        ({"num_kv_shared_layers": 40}, "there must be a layer of each type"),
        ({"intermediate_size": [64, 64]}, "2 values in intermediate_size for 35 layers"),
        ({"activation_sparsity_pattern": [0.5]}, "1 values in activation_sparsity_pattern for 35 layers"),
        ({"activation_sparsity_pattern": 1.0}, r"shares must be in \[0, 1\)"),
        ({"altup_active_idx": 4}, "altup_active_idx=4 of altup_num_inputs=4"),
        ({"altup_num_inputs": 0}, "altup_active_idx=0 of altup_num_inputs=0"),
        ({"hidden_activation": "relu"}, "hidden_activation='relu' is not supported"),
    ],
)
def test_configs_that_do_not_fit_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        parse_config(E4B | changes)


def test_snapshots_go_on_in_another_cache(models: Any) -> None:
    """Taken inside a pass and serialized; what later layers share comes back with the layer that has it."""
    name = "gemma3n"
    model, tokens = models(name), prompt(LENGTH)
    cache = new_cache(model)
    cache.schedule_snapshots(0, [21])
    feed(model, cache, tokens, 0, 30)
    scheduled = cache.take_snapshots(0)
    assert [snapshot.end for snapshot in scheduled] == [21]
    page = kvcache.serialize(model.backend, scheduled[0])
    for snapshot in (scheduled[0], kvcache.deserialize(model.backend, page)):
        other = new_cache(model)
        assert other.restore(0, snapshot)
        close(feed(model, other, tokens, 21), expected_logits(name, tokens)[21:])


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
def test_removal_from_the_middle_shifts_keys(
    models: Any, backend: ml.Backend, shared: int, kind: str
) -> None:
    """Keys of one layer depend on position and token alone, also where a second one reads them."""
    count = 1 + shared
    config: Any = models("gemma3n").config
    config = dataclasses.replace(
        config, layers=count, kinds=(kind,) * count, sources=(0,) * count,
        inner_sizes=config.inner_sizes[:count], sparsity=(0.0,) * count,
    )  # fmt: skip
    draws = np.random.default_rng(0)
    shapes = gemma3n.Gemma3n.shapes(config)
    weights = {name: draws.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    model, tokens = gemma3n.Gemma3n(backend, config, weights), prompt(30)
    short = tokens[:4] + tokens[9:]
    caches = (gemma3n.Gemma3n.cache_of(config, memory=32) for _ in range(2))
    cache, fresh = (new_cache(model, cache=each) for each in caches)
    feed(model, cache, tokens, 0, 29)
    cache.remove(0, 4, 9)
    feed(model, fresh, short, 0, 24)
    close(feed(model, cache, short, 24), feed(model, fresh, short, 24))


def test_layers_that_share_take_no_memory(models: Any) -> None:
    model = models("gemma3n")
    cache = new_cache(model)
    feed(model, cache, prompt(LENGTH))
    snapshot = cache.snapshot(0)
    stored = set().union(*(part.layers for part in snapshot.parts))
    assert stored == set(model.config.cached_layers) == {0, 1, 2}
    assert peer("gemma3n").config.num_hidden_layers == model.config.layers == 6
