"""HFCache and HFStaticCache where the layers of a model lie on several devices.

PyTorch's "cpu:0" and "cpu:1" are places of their own on the one CPU: what is stored where can be seen, and
results be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")
import torch
import transformers

import ml
from kvcache import NotSupportedError
from kvcache.integrations.transformers import HFCache, HFStaticCache
from kvcache.integrations.transformers.places import layer_devices
from kvcache.integrations.transformers.versions import check_version
from kvcache.stores import MemoryStore

from . import hf_models as hf

LAYERS = 4


@pytest.fixture
def split() -> Iterator[ml.Backend]:
    """Layer 0 and 3 lie on the second of two devices."""
    with ml.open_backend("torch", devices=["cpu:0", "cpu:1"], layers=[1, 0, 0, 1]) as backend:
        yield backend


def made(name: str) -> Any:
    types = {
        "gemma3": ("sliding_attention", "full_attention") * 2,
        "qwen3-next": ("linear_attention", "full_attention") * 2,
    }
    layers = {"layer_types": types[name]} if name in types else {}
    return hf.model(name, num_hidden_layers=LAYERS, **layers)


def devices(cache: Any) -> dict[int, set[str]]:
    """Where what is stored for each layer lies."""
    found: dict[int, set[str]] = {}
    family = cache.rows.pool.family
    for kind in family.caches.values():
        for layer, buffers in kind.storage.buffers.items():
            tensors = [getattr(part, "codes", part).tensor for part in (buffers.key, buffers.value)]
            found[layer] = {tensor.device for tensor in tensors}
    return found


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-next"])
@pytest.mark.parametrize("kind", [HFCache, HFStaticCache])
def test_layers_lie_where_the_backend_places_them(split: ml.Backend, name: str, kind: Any) -> None:
    model, batch = made(name), hf.inputs(name, 2, 3)
    cache = kind(model.config, capacity=64, backend=split)
    options = {"disable_compile": True} if kind is HFStaticCache else {}
    found = hf.generate(model, batch, cache, **options)
    assert found.distance(hf.generate(model, batch)) < 1e-4
    held = devices(cache)
    assert held == {layer: {f"cpu:{[1, 0, 0, 1][layer]}"} for layer in held}
    assert len(held) == (2 if name == "qwen3-next" else LAYERS)


@pytest.mark.parametrize("dtype", [None, ml.DType.Q8_0])
def test_a_model_that_attends_by_the_cache_does_so_on_each_device(
    split: ml.Backend, dtype: ml.DType | None
) -> None:
    model = hf.model("llama", "kvcache", num_hidden_layers=LAYERS, head_dim=32)
    batch, results = hf.inputs("llama", 3, 6), []
    for backend in (split, "torch"):
        cache = HFCache(model.config, capacity=64, backend=backend, dtype=dtype)
        results.append(hf.generate(model, batch, cache))
    assert results[0].distance(results[1]) == 0


def test_what_was_stored_goes_on_over_other_devices(split: ml.Backend) -> None:
    """Fork, snapshot, beams and a store, from two devices to one and back."""
    model, ids = made("gemma3"), hf.tokens(1)
    store, one = MemoryStore(), HFCache(model.config, capacity=64)
    hf.feed(model, one, ids)
    one.save(store, "a")
    two = HFCache(model.config, capacity=64, backend=split)
    assert two.load(store, "a")
    expected = hf.feed(model, one, ids[:, :3])
    assert torch.equal(hf.feed(model, two, ids[:, :3]), expected)
    assert devices(two)[3] == {"cpu:1"}
    beams = {"num_beams": 3, "max_new_tokens": 5}
    wide = HFCache(model.config, capacity=64, backend=split, max_sequences=6)
    found = hf.generate(model, hf.inputs("gemma3", 1), wide, **beams)
    assert found.distance(hf.generate(model, hf.inputs("gemma3", 1), **beams)) < 1e-4


def test_a_device_map_names_the_devices_of_layers() -> None:
    found = layer_devices(
        {
            "model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "cuda:1", "model.layers.2": "cpu",
            "model.layers.11.self_attn": 3, "model.layers.11.mlp": 2, "lm_head": 0, "transformer.h.4": 1,
            "model.encoder.layers.5": 1, "model.vision_tower.encoder.layers.6": 1, "": 0,
        }
    )  # fmt: skip
    assert found == {layer: torch.device("cuda", i) for layer, i in {0: 0, 1: 1, 11: 3, 4: 1}.items()}


@pytest.mark.parametrize("version", ["5.17.0", "5.18.2", "4.57.1"])
def test_versions_of_transformers_with_other_layouts_are_refused(version: str) -> None:
    with pytest.raises(NotSupportedError, match=rf"transformers {version}.* 5\.19"):
        check_version(version)
    check_version("5.19.0.dev0")


def test_a_config_that_names_no_layers_is_refused() -> None:
    with pytest.raises(NotSupportedError, match="names no layers"):
        HFCache(transformers.LlamaConfig(num_hidden_layers=0))
