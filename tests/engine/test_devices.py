"""Layers over several devices of one machine: the same text, each layer's weights and cache on its device.

PyTorch's "cpu:0", "cpu:1" are places of their own on the one CPU. The double of CuPy (fake_cupy.py) has two
devices and refuses work on what lies on the other one, so that what has to be moved is seen to be moved.
"""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import Batch, CausalCache, HostTier
from kvcache.snapshots.serialize import deserialize, serialize
from kvcache.snapshots.snapshot import EncoderSnapshot
from kvcache.stores import MemoryStore
from kvcache_engine.device_map import open_on_devices, parse_devices
from kvcache_engine.engine import Engine, EngineOptions
from kvcache_engine.generate import Generator
from kvcache_engine.loading import bundled_model, load_config, load_model
from kvcache_engine.memory import available_bytes
from kvcache_engine.models.families import FAMILIES, family_of
from kvcache_engine.requests import GenerationOptions
from kvcache_engine.saved import adopt, capture
from kvcache_engine.tokenizer import Tokenizer

from ..conftest import one_torch_thread
from ..rigs import cupy_double, model_passes
from ..rigs.each_backend import need_backend
from ..rigs.small_models import KINDS

pytest.importorskip("torch")

Make = Callable[..., Path]
TWO = ("cpu:0", "cpu:1")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_torch_thread("torch"):
        yield


def open_torch(devices: Sequence[str], layers: int) -> ml.Backend:
    return ml.open_backend("torch", devices=list(devices), layers=layers)


def open_double(count: int, layers: int) -> ml.Backend:
    found: ml.Backend = cupy_double.module.CupyBackend(devices=list(range(count)), layers=layers)
    return found


def texts(model: Any, prompts: Sequence[Sequence[int]], count: int, **options: Any) -> list[tuple[int, ...]]:
    options = {"capacity": 96, "max_sequences": 2, **options}
    with Generator(model, None, options=EngineOptions(**options)) as generator:
        answers = generator.complete([list(p) for p in prompts], GenerationOptions(count, ignore_eos=True))
    return [answer.tokens for answer in answers]


def devices_of(tensors: Sequence[Any]) -> list[str]:
    return [tensor.device for tensor in tensors]


# Weights and caches.


def test_the_bundled_model_says_the_same_on_one_device_and_on_several() -> None:
    config, tokenizer = load_config(bundled_model()), Tokenizer.load(bundled_model())
    prompts = [tokenizer.encode(text) for text in ("And the LORD said unto", "In the beginning")]
    said = []
    for names in (["cpu"], *([f"cpu:{i}" for i in range(count)] for count in (2, 3, 4))):
        with open_torch(names, config.layers) as backend:
            said.append(texts(load_model(bundled_model(), backend), prompts, 12))
    assert said == said[:1] * 4


def test_each_device_holds_the_weights_and_the_cache_of_its_own_layers() -> None:
    config = load_config(bundled_model())
    shapes = family_of(config).model.shapes(config)
    sizes = collections.Counter[int]()
    for name, shape in shapes.items():
        parts = name.split(".")
        layer = int(parts[2]) if parts[:2] == ["model", "layers"] else 0
        sizes[layer * 2 // config.layers] += 4 * math.prod(shape)
    with open_torch(TWO, config.layers) as backend:
        model = load_model(bundled_model(), backend)
        assert allocated(backend) == [sizes[0], sizes[1]]
        with Generator(model, None, options=EngineOptions(max_sequences=1, capacity=64)) as generator:
            generator.complete([[1, 300, 400]], GenerationOptions(4, ignore_eos=True))
            half = generator.cache_bytes // 2
            extra = [now - before for now, before in zip(allocated(backend), sizes.values(), strict=True)]
            assert extra == [half, half]
        assert allocated(backend) == [sizes[0], sizes[1]]


def allocated(backend: ml.Backend) -> list[int]:
    return [row.allocated for row in backend.memory().devices]


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, ml.DType.F32) for kind in KINDS), ("full", ml.DType.Q8_0)], ids=str
)
def test_every_kind_of_cache_says_the_same_on_devices_that_refuse_each_others_tensors(
    kind: str, dtype: ml.DType, make_model: Make
) -> None:
    folder = make_model(**KINDS[kind])
    layers = load_config(folder).layers
    prompts = [np.random.default_rng(1).integers(3, 259, size).tolist() for size in (21, 4)]
    said = []
    for count in (1, 2):
        with open_double(count, layers) as backend:
            said.append(texts(load_model(folder, backend), prompts, 12, prefill_chunk=8, cache_dtype=dtype))
            rows = allocated(backend)
    assert said[0] == said[1]
    assert len(rows) == 2


def test_passes_of_fixed_shapes_read_each_layer_on_its_device() -> None:
    said = []
    for count in (1, 2):
        with open_double(count, 2) as backend, backend.new_context() as ctx:
            cache, rng = CausalCache(), np.random.default_rng(0)
            cache.set_config(ml.CacheConfig(fixed_context=8))
            cache.init(backend, ml.DType.F32, 1, 16, 4)
            for begin in (0, 4):
                cache.start_forward(ctx, Batch(range(begin, begin + 4), [0] * 4))
                for layer in range(2):
                    place = ctx.layer(layer)
                    new = [place.from_numpy(rng.random((4, 2, 8), np.float32)) for _ in range(3)]
                    cache.set_layer(layer)
                    cache.put(ctx, *new[:2])
                    said.append(cache.attend(ctx, new[2], 0.3).to_numpy().round(5).tolist())
    assert said[:4] == said[4:]


def test_get_reads_each_layer_and_its_mask_on_the_device_of_the_layer() -> None:
    with open_torch(TWO, 2) as backend, backend.new_context() as ctx:
        cache = CausalCache()
        cache.set_config(ml.CacheConfig(elide_mask=False))
        cache.init(backend, ml.DType.F32, 1, 8, 4)
        for begin in (0, 2):
            cache.start_forward(ctx, Batch([begin, begin + 1], [0, 0]))
            for layer, device in enumerate(TWO):
                own = ctx.layer(layer)
                new = own.zeros((2, 1, 4), ml.DType.F32)
                cache.set_layer(layer)
                cache.put(own, new, new)
                assert devices_of(cache.get(own)) == [device] * 3


def test_an_encoders_output_lies_with_the_layer_that_reads_it() -> None:
    raw = {
        "architectures": ["WhisperForConditionalGeneration"], "vocab_size": 31, "d_model": 16,
        "decoder_layers": 4, "decoder_attention_heads": 2, "decoder_ffn_dim": 24, "max_target_positions": 16,
    }  # fmt: skip
    family = FAMILIES["WhisperForConditionalGeneration"]
    config, random = family.parse(raw, {}), np.random.default_rng(3)
    weights = {
        n: random.normal(size=s).astype(np.float32) * 0.3 for n, s in family.model.shapes(config).items()
    }
    states = [random.normal(size=(frames, 16)).astype(np.float32) for frames in (5, 3)]
    first = Batch([0, 0], [0, 1], multimodal=[*enumerate(states)], inputs=[1, 1])
    batches = (first, Batch([1, 1], [0, 1], inputs=[7, 9]))
    said = []
    for count in (1, 2):
        with open_double(count, 4) as backend:
            model = family.model(backend, config, weights, ml.DType.F32, None)
            cache = model.make_cache()
            cache.init(backend, ml.DType.F32, max_sequences=2, capacity=16, max_batch=8)
            for batch in batches:
                with backend.new_context() as ctx:
                    cache.start_forward(ctx, batch)
                    said.append(model.forward(ctx, batch, cache).to_numpy())
            taken = cache.snapshot(0)
            snapshots: list[Any] = [taken, deserialize(backend, serialize(backend, taken))]
            for snapshot in snapshots:
                (encoded,) = (part for part in snapshot.parts if isinstance(part, EncoderSnapshot))
                found = [devices_of(pair) for _, pair in sorted(encoded.layers.items())]
                assert found == [[f"cuda:{i * count // 4}"] * 2 for i in range(4)]
    np.testing.assert_array_equal(said[0], said[2])
    np.testing.assert_array_equal(said[1], said[3])


@pytest.mark.parametrize(
    ("kind", "sequences", "tokens"),
    [("full", 1, 1), ("full", 2, 1), ("sliding", 1, 12)],
    ids=["one token sees all", "two sequences lie apart: the cells they are put to", "a window"],
)
def test_a_pass_moves_as_much_between_devices_however_many_layers_there_are(
    kind: str, sequences: int, tokens: int, make_model: Make
) -> None:
    """The hidden state and the rotation's two tables there, the hidden state back.

    What is written and read is a plan that each device gets from the host.
    """
    moved = []
    for layers in (2, 6):
        types = {} if kind == "full" else {"layer_types": ["sliding_attention"] * layers}
        folder = make_model(**{**KINDS[kind], "num_hidden_layers": layers, **types})
        with open_double(2, layers) as backend:
            model: Any = load_model(folder, backend)
            cache = model.make_cache()
            cache.init(backend, ml.DType.F32, max_sequences=2, capacity=64, max_batch=32)
            for seq, position, count in ((0, 0, 9), (1, 0, 5), (0, 9, 9)):
                step(model, cache, [seq] * count, range(position, position + count))
            begins = enumerate([18, 5][:sequences])
            places = [(seq, begin + i) for seq, begin in begins for i in range(tokens)]
            with cupy_double.double.logged() as log:
                step(model, cache, *zip(*places, strict=True))
        moved.append(collections.Counter(device for op, device, _ in log if op == "copy_from_device"))
    assert moved[0] == moved[1]
    assert (moved[0][1], moved[0][0]) == (3, 1)


def step(model: Any, cache: Any, sequences: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    text = [3 + 7 * p % 250 for p in range(64)]
    return model_passes.run(model, cache, [*zip(sequences, positions, strict=True)], [text] * 2)


# Snapshots, sessions, stores.


def held(cache: Any) -> list[list[str]]:
    return [devices_of((b.key.tensor, b.value.tensor)) for _, b in sorted(cache._buffers.items())]


def test_snapshots_restores_pages_and_shifts_keep_each_layer_on_its_device(make_model: Make) -> None:
    folder = make_model(num_hidden_layers=4)
    expected = [[name] * 2 for name in ("cuda:0", "cuda:0", "cuda:1", "cuda:1")]
    with open_double(2, 4) as backend:
        model: Any = load_model(folder, backend)
        cache, other = model.make_cache(), model.make_cache()
        for each in (cache, other):
            each.init(backend, ml.DType.F32, max_sequences=2, capacity=32, max_batch=32)
        step(model, cache, [0] * 8, range(8))
        assert held(cache) == expected
        taken = cache.snapshot(0)
        cache.remove(0, 2, 4)
        step(model, cache, [0], [6])
        cache.defrag()
        first, second = cache.split(taken, 5)
        parts: list[Any] = [taken, first, second, deserialize(backend, serialize(backend, taken))]
        for part in parts:
            part.detach()
            layers = sorted(part.read().items())
            assert [devices_of(layer.tensors) for _, layer in layers] == expected
        assert other.restore(1, cache.merge(first, second))
        assert held(other) == expected
        plain = model.make_cache()
        plain.init(backend, ml.DType.F32, max_sequences=1, capacity=32, max_batch=32)
        step(model, plain, [0] * 8, range(8))
        ahead = step(model, other, [1], [8]), step(model, plain, [0], [8])
        np.testing.assert_array_equal(*ahead)


@pytest.mark.parametrize("kind", KINDS)
def test_sessions_are_paged_out_and_restored_on_their_devices(kind: str, make_model: Make) -> None:
    """Two conversations in turn, in a cache that has room for one: what is left goes to host memory."""
    folder = make_model(**KINDS[kind])
    layers = load_config(folder).layers
    random = np.random.default_rng(2)
    prompts = [random.integers(3, 259, 30).tolist() for _ in range(2)]
    said, reused = [], []
    for opened in (open_torch(["cpu"], layers), open_torch(TWO, layers), open_double(2, layers)):
        with opened as backend:
            options = EngineOptions(capacity=48, max_sequences=1, budget=0, interval=8)
            with Engine(load_model(folder, backend), None, options, [HostTier()]) as engine:
                answers = []
                for _ in range(2):
                    for prompt in prompts:
                        tokens = engine.complete([prompt], GenerationOptions(4, ignore_eos=True))[0].tokens
                        answers.append(tokens)
                        engine.prefix.flush()  # what left the device has come to host memory
                said.append(answers)
                reused.append(engine.prefix.stats.host)
    assert said[0] == said[1]
    assert [a[0] for a in said[0]] == [a[0] for a in said[2]]
    assert reused[0] == reused[1] == reused[2] > 0


def test_a_conversation_goes_on_from_what_other_devices_and_another_backend_have_stored() -> None:
    config = load_config(bundled_model())
    tokens = Tokenizer.load(bundled_model()).encode("And God said, Let there be light: and there was")
    store, turns = MemoryStore(), [list(tokens)]
    places = (("torch", TWO), ("torch", ["cpu"]), ("torch", ["cpu:1", "cpu:0", "cpu:2"]), ("numpy", ["cpu"]))
    for name, names in places:
        with open_on_devices(name, names, config) as backend, conversing(backend, store) as engine:
            answer = engine.complete([turns[-1]], GenerationOptions(6, ignore_eos=True))[0].tokens
            assert engine.statistics.computed_tokens == (1 if len(turns) > 1 else len(tokens))
            assert engine.prefix.stats.store == (len(turns[-1]) - 1 if len(turns) > 1 else 0)
            engine.prefix.flush()
        turns.append([*turns[-1], *answer])
    with open_on_devices("torch", ["cpu"], config) as backend, conversing(backend) as engine:
        whole = engine.complete([tokens], GenerationOptions(24, ignore_eos=True))[0].tokens
    assert turns[-1][len(tokens) :] == list(whole)


def conversing(backend: ml.Backend, *tiers: MemoryStore) -> Engine:
    options = EngineOptions(capacity=96, max_sequences=1)
    return Engine(load_model(bundled_model(), backend), None, options, tiers)


def test_a_captured_conversation_goes_on_on_other_devices() -> None:
    config = load_config(bundled_model())
    prompt = Tokenizer.load(bundled_model()).encode("In the beginning")
    with open_torch(TWO, config.layers) as backend, conversing(backend) as engine:
        whole = engine.complete([prompt], GenerationOptions(16, ignore_eos=True))[0].tokens
        saved = capture(engine, [*prompt, *whole[:6]])
    names = ["cpu:1", "cpu:0", "cpu:2", "cpu:3"]
    with open_torch(names, config.layers) as backend, conversing(backend) as engine:
        adopt(engine, saved)
        rest = engine.complete([[*prompt, *whole[:6]]], GenerationOptions(10, ignore_eos=True))[0].tokens
        assert engine.statistics.computed_tokens == 1
    assert rest == whole[6:]


# What is refused.


def test_devices_that_are_not_there_named_twice_or_too_many_are_refused_by_name() -> None:
    config = load_config(bundled_model())
    for names, message in (
        (["cpu:0", "cuda:99"], r"no device 'cuda:99'"),
        (["cpu:0", "cpu:128"], r"no device 'cpu:128' .*places on the CPU are cpu and cpu:0 to cpu:127"),
        (["cpu:1", "cpu:1"], r"\['cpu:1', 'cpu:1'\]; each must be named once"),
        ([f"cpu:{i}" for i in range(5)], r"5 devices for 4 layers: .*; each must have at least one layer"),
        ([], r"devices=\[\]"),
    ):
        with pytest.raises(ml.DeviceError, match=message):
            open_on_devices("torch", names, config)


@pytest.mark.parametrize("text", ["", "cpu:0,", ",cpu:0", "cpu:0,,cpu:1"])
def test_a_list_of_devices_leaves_no_name_out(text: str) -> None:
    with pytest.raises(ml.DeviceError, match="a name is empty; write them as cuda:0,cuda:1"):
        parse_devices(text)
    assert parse_devices(" cuda:0, cuda:1") == ["cuda:0", "cuda:1"]


def test_layers_are_placed_by_an_index_for_each() -> None:
    with ml.open_backend("torch", devices=TWO, layers=[1, 0, 1]) as backend, backend.new_context() as ctx:
        assert [ctx.layer(i).device for i in range(3)] == ["cpu:1", "cpu:0", "cpu:1"]
        with pytest.raises(ml.BoundsError, match="layer: 3 of 3; the backend was opened with layers=3"):
            ctx.layer(3)
    with pytest.raises(ml.BoundsError, match="device 2 of 2; a layer needs an index in devices="):
        ml.open_backend("torch", devices=TWO, layers=[0, 2])
    with pytest.raises(ml.ShapeError, match=r"layers=\[\]; a model must have at least one"):
        ml.open_backend("torch", devices=TWO, layers=[])


@pytest.mark.parametrize("layers", [2.5, "ab", ["a"], [0, None], np.array([0, 1])])
def test_what_is_no_number_of_layers_is_refused(layers: Any) -> None:
    for name, devices in (("torch", TWO), ("numpy", ["cpu"])):
        with pytest.raises(ml.ShapeError, match="it must be a number of layers, or a list"):
            ml.open_backend(name, devices=devices, layers=layers)


@pytest.mark.parametrize("name", ["numpy", "mlx"])
def test_a_backend_of_one_device_takes_one_and_refuses_more(name: str) -> None:
    need_backend(name)
    config = load_config(bundled_model())
    with open_on_devices(name, ["cpu"], config) as backend:
        assert [device.name for device in backend.devices] == ["cpu"]
    with pytest.raises(ml.DeviceError, match=f"{name} keeps all layers on one device.* torch and cupy"):
        open_on_devices(name, ["cpu", "gpu"], config)
    for wrong in (
        {"device": "cpu", "devices": ["cpu"]},
        {"devices": "cpu"},
        {"devices": 5},
        {"devices": ["nowhere"]},
    ):
        with pytest.raises(ml.DeviceError):
            ml.open_backend(name, **wrong)
    with pytest.raises(ml.ShapeError, match="layers=0"):
        ml.open_backend(name, devices=["cpu"], layers=0)


class OneDevice:
    """A plugin whose backend knows of one device and has no option for more."""

    @staticmethod
    @ml.hookimpl
    def ml_backend() -> ml.BackendSpec:
        def open_one(device: str = "cpu") -> ml.Backend:
            return ml.open_backend("numpy", device=device)

        return ml.BackendSpec("one-device", -5, (), "", lambda: ml.Availability(True), open_one)


def test_a_backend_without_the_options_is_named_in_the_refusal() -> None:
    registry = ml.plugins.registry()
    plugin = OneDevice()
    registry.register(plugin, "one-device")
    try:
        with pytest.raises(ml.DeviceError, match="'one-device' takes no devices= and layers="):
            open_on_devices("one-device", ["cpu", "npu"], load_config(bundled_model()))
    finally:
        registry.unregister(plugin)


def test_the_hosts_memory_counts_once_however_many_places_lie_in_it() -> None:
    with open_torch(["cpu"], 4) as one, open_torch(TWO, 4) as two:
        free = available_bytes(one), available_bytes(two)
    assert free[0] is not None
    assert free[1] is not None
    assert free[1] < 1.5 * free[0]


# The command line.


def run(*arguments: object) -> Any:
    from ..command.cli_rig import run as command

    return command(*arguments)


def test_generate_takes_devices_and_prints_the_same() -> None:
    line = ["generate", "--backend", "torch", "--prompt", "In the beginning", "--max-tokens", 12, "--json"]
    found = [run(*line, *more) for more in ([], ["--devices", "cpu:0,cpu:1"], ["--devices", "cpu:3"])]
    assert [result.exit_code for result in found] == [0, 0, 0], found[1].stderr
    answers = [json.loads(result.stdout)["outputs"][0]["tokens"] for result in found]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0]


def test_save_and_load_take_devices(tmp_path: Path) -> None:
    file = tmp_path / "c.kv"
    line = ["--backend", "torch", "--devices", "cpu:0,cpu:1"]
    saved = run("save", "--prompt", "In the beginning", "--max-tokens", 6, "--out", file, *line)
    assert saved.exit_code == 0, saved.stderr
    loaded = [run("load", file, "--max-tokens", 6, "--json", *more) for more in ([], line)]
    assert [result.exit_code for result in loaded] == [0, 0], loaded[1].stderr
    records = [json.loads(result.stdout) for result in loaded]
    assert records[0]["outputs"][0]["tokens"] == records[1]["outputs"][0]["tokens"]
