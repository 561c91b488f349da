"""HFCache and HFStaticCache where the layers of a model lie on several devices.

PyTorch's "cpu:0" and "cpu:1" are places of their own on the one CPU: what is stored where can be seen, and
results be compared. A double stands in for CUDA devices (cuda_double.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
import torch
import transformers
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

import ml
from benchmarks.census import transformers as census
from kvcache import CacheFullError, NotSupportedError
from kvcache.integrations.transformers import HFCache, HFPrefixCache, HFStaticCache
from kvcache.integrations.transformers.deferred import Deferred
from kvcache.integrations.transformers.places import layer_devices
from kvcache.integrations.transformers.stored import decode_over_views
from kvcache.integrations.transformers.versions import check_version
from kvcache.stores import MemoryStore

from ...rigs import hf_models as hf
from ...rigs.cuda_double import cuda_double

LAYERS = 4


@pytest.fixture
def split() -> Iterator[ml.Backend]:
    """Layer 0 and 3 lie on the second of two devices."""
    with ml.open_backend("torch", devices=["cpu:0", "cpu:1"], layers=[1, 0, 0, 1]) as backend:
        yield backend


def test_a_token_on_cuda_is_not_left_to_cudnn_which_plans_at_every_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []

    def attention(query: Any, *_: Any, **__: Any) -> Any:
        asked.append(torch.backends.cuda.cudnn_sdp_enabled())
        if len(asked) == 3:
            raise RuntimeError("out of memory")
        return query

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    with cuda_double(1):
        for device in ("cpu", "cuda:0"):
            x = torch.zeros(1, 2, 1, 8, device=device)
            assert decode_over_views(x, x, x, 1.0, None).shape == (1, 1, 2, 8)
        with pytest.raises(RuntimeError, match="out of memory"):
            decode_over_views(x, x, x, 1.0, None)
    assert asked == [True, False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()


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


# On CUDA devices that are not there.


def onto(module: torch.nn.Module, device: str) -> None:
    """Move a module's weights; ``to`` would put them into the parameters that the CPU's copy has."""
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    moved = tensor.to(device)
                    held[name] = torch.nn.Parameter(moved, False) if held is part._parameters else moved


def carry(module: torch.nn.Module, device: str) -> None:
    """As accelerate does: what a module on another device is called with is brought there."""

    def moved(x: Any) -> Any:
        return tuple(map(moved, x)) if isinstance(x, tuple) else x.to(device) if torch.is_tensor(x) else x

    def before(_: Any, args: Any, kwargs: Any) -> Any:
        return moved(args), {name: moved(x) for name, x in kwargs.items()}

    module.register_forward_pre_hook(before, with_kwargs=True)


@pytest.mark.parametrize("kind", [HFCache, HFStaticCache])
def test_a_model_over_two_devices_keeps_what_it_stores_where_its_layers_are(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What crosses from one device to the other is what crosses with transformers' own cache."""

    def begin(layer: Any, key: torch.Tensor, value: torch.Tensor) -> None:  # no torch.tensor([]) on a double
        layer.keys, layer.values, layer.is_initialized = key[:, :, :0], value[:, :, :0], True

    monkeypatch.setattr(DynamicLayer, "lazy_initialization", begin)
    model, ids = made("llama"), hf.tokens(2)
    alone, split = HFCache(model.config, capacity=64, backend="torch"), copy.deepcopy(model)
    pieces = (ids[:, :9], ids[:, 9:10], ids[:, 10:11])
    expected = [hf.feed(model, alone, piece) for piece in pieces]
    with cuda_double(2) as log:
        onto(split, "cuda:0")
        for layer in split.model.layers[2:]:
            onto(layer, "cuda:1")
            carry(layer, "cuda:1")
        carry(split.model.norm, "cuda:0")
        ours = kind(split.config, capacity=64)
        theirs = StaticCache(split.config, 64) if kind is HFStaticCache else DynamicCache(config=split.config)
        for piece, wanted in zip(pieces, expected, strict=True):
            crossed = []
            for cache in (ours, theirs):
                placed = piece.to("cuda:0")
                log.clear()
                found = hf.feed(split, cache, placed)
                crossed.append([(noted.device, noted.nbytes) for noted in log.of("crossing")])
                assert not log.of("wait")
                assert float((found.cpu() - wanted).abs().max()) < 1e-4
            assert crossed[0] == crossed[1]
        assert [str(x.keys.device) for x in ours.layers] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


def test_layers_on_a_device_of_another_kind_are_served_from_the_first_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = HFCache(made("llama").config, capacity=64)
    with cuda_double(1):
        for layer, device in enumerate(("cuda:0", "cuda:0", "cpu", "cpu")):
            key = torch.randn(1, 2, 3, 16)
            found = cache.update(key.to(device), key.to(device), layer)
            assert str(found[0].device) == device
            assert torch.equal(found[0].cpu(), key)
    (said,) = caplog.messages
    assert "layers on cpu, but its HFCache is on cuda:0" in said


def test_what_was_stored_moves_to_the_devices_of_the_layers_after_the_first_pass() -> None:
    config, store = made("llama").config, MemoryStore()
    random = np.random.default_rng(0)

    def step(cache: HFCache, tokens: int, place: Callable[[int], str]) -> list[torch.Tensor]:
        rows = random.standard_normal((LAYERS, 2, 1, 2, tokens, 16)).astype(np.float32)
        pairs = [[torch.from_numpy(x).to(place(i)) for x in pair] for i, pair in enumerate(rows)]
        return [cache.update(*pair, i)[0] for i, pair in enumerate(pairs)]

    on_cpu = HFCache(config, capacity=64)
    stored = step(on_cpu, 5, lambda layer: "cpu")
    on_cpu.save(store, "a")
    with cuda_double(2) as log:
        for device_map in (None, {f"model.layers.{i}": i // 2 for i in range(LAYERS)}):
            cache = HFCache(config, capacity=64)
            assert cache.load(store, "a", "cuda:0", device_map)
            for count in (1, 1, 1):
                log.clear()
                found = step(cache, count, lambda layer: f"cuda:{layer // 2}")
            assert not log.of("crossing")
            for i, layer in enumerate(found):
                assert str(layer.device) == f"cuda:{i // 2}"
                assert torch.equal(layer[:, :, :5].cpu(), stored[i])


def test_the_keys_of_indexers_lie_where_their_layers_do() -> None:
    config, store = census.Case("deepseek_v32").config, MemoryStore()
    layers = range(config.num_hidden_layers)

    def step(cache: Any, place: Callable[[int], str]) -> None:
        for i in layers:
            latent, turned = torch.full((1, 1, 2, 24), i + 1.0), torch.ones(1, 1, 2, 8)
            cache.update(latent.to(place(i)), turned.to(place(i)), i)
            found = cache.update_indexer(torch.full((1, 2, 16), i + 1.0).to(place(i)), i)
            assert str(found.device) == place(i)
            assert bool((found[:, :2] == i + 1.0).all())

    on_cpu = HFCache(config, capacity=64)
    step(on_cpu, lambda layer: "cpu")
    on_cpu.save(store, "a")
    with cuda_double(2) as log:
        loaded = HFCache(config, capacity=64)
        assert loaded.load(store, "a", "cuda:0", {f"model.layers.{i}": i // 3 for i in layers})
        for cache in (loaded, HFCache(config, capacity=64), HFStaticCache(config, capacity=64)):
            log.clear()
            step(cache, lambda layer: f"cuda:{layer // 3}")
            assert not log.of("crossing")


def test_fixed_shapes_refuse_what_does_not_fit_without_asking_the_device() -> None:
    cache = HFStaticCache(made("llama").config, capacity=8)
    with cuda_double(1) as log:
        layer = cache.layers[0]
        layer.update(*(torch.randn(1, 2, 5, 16).to("cuda:0") for _ in "kv"))
        log.clear()
        assert layer.get_mask_sizes(3) == (8, 0)
        for call in (lambda: layer.get_mask_sizes(4), lambda: layer.update(*[torch.zeros(1, 2, 4, 16)] * 2)):
            with pytest.raises(CacheFullError, match="4 cells are needed and 3 are free"):
                call()
        layer.crop(-2)
        assert layer.get_mask_sizes(5) == (8, 0)
        layer.reset()
        assert layer.get_mask_sizes(8) == (8, 0)
        assert not log.waits


def test_a_mask_that_is_not_made_yet_moves_to_another_device_unmade() -> None:
    made_of: list[int] = []

    def make() -> torch.Tensor:
        made_of.append(1)
        return torch.ones(2, 3)

    mask = Deferred.of(torch.empty(()), (2, 3), make)
    mask.pattern = pattern = object()
    for moved in (mask.to("meta"), mask.to(device=torch.device("meta"), non_blocking=True)):
        assert isinstance(moved, Deferred)
        assert (moved.device.type, tuple(moved.shape), moved.pattern) == ("meta", (2, 3), pattern)
    assert not made_of
    assert mask.to(torch.float64).sum() == 6  # another dtype is asked for: it is made
    assert made_of == [1]


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
    with pytest.raises(NotSupportedError, match="lists no layers"):
        HFCache(transformers.LlamaConfig(num_hidden_layers=0))


@pytest.mark.parametrize("name", ["gemma3", "qwen3-next"])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_prefixes_of_a_model_whose_weights_are_offloaded(name: str, place: str, tmp_path: Path) -> None:
    """It says that it is on the meta device, and computes where accelerate's hooks bring its weights."""
    accelerate = pytest.importorskip("accelerate")
    own, ids = hf.model(name), hf.tokens(1)
    made = copy.deepcopy(own)
    if place == "cpu":
        made = accelerate.cpu_offload(made, execution_device="cpu")
    else:
        made = accelerate.disk_offload(made, str(tmp_path), execution_device="cpu")
    assert made.device.type == "meta"
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    for backend in (None, "numpy"):
        with HFPrefixCache(made, max_sequences=2, capacity=64, backend=backend) as prefix:
            for prompt in (ids, torch.cat((ids, hf.tokens(1, 4)), 1)):
                found = prefix.generate(prompt, **settings)
                assert torch.equal(found, own.generate(prompt, **settings))
            assert prefix.stats.reused == 12


def test_weights_that_are_nowhere_are_named() -> None:
    own = hf.model("llama")  # kept for other tests: it must lie somewhere
    with torch.device("meta"):
        made = type(own)(own.config)
    with pytest.raises(NotSupportedError, match="the weights of LlamaForCausalLM are on the meta device"):
        HFPrefixCache(made)
