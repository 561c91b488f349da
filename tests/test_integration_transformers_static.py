"""HFStaticCache: fixed shapes and torch.compile, against transformers' own caches in the same test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

import torch
import transformers

from kvcache import InvalidRangeError, NotSupportedError
from kvcache.integrations.transformers import HFCache, HFStaticCache

from . import hf_models as hf

OTHER_LAYOUT = ("gemma3", "gpt-oss", "llama4", "t5", "whisper")
MODES = ("sampling", "beams", "left padding", "chat", "chunked prefill")
CASES = [(name, mode) for name in hf.MODELS for mode in MODES if hf.applies(name, mode)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def dynamo() -> Iterator[Any]:
    import torch._dynamo as module
    import torch._dynamo.utils as utils

    module.reset()
    utils.counters.clear()
    yield utils.counters
    module.reset()


def feed(made: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = made(input_ids=ids, past_key_values=cache, use_cache=True).logits
    return logits


def theirs(made: Any, name: str, capacity: int) -> Any:
    """transformers' static cache; an encoder's output is 13 tokens or 20 frames long."""
    config = made.config
    if name not in hf.ENCODER_DECODERS:
        return transformers.StaticCache(config, max_cache_len=capacity)
    lengths = capacity, 20 if name == "whisper" else hf.PROMPT
    return transformers.EncoderDecoderCache(
        *(transformers.StaticCache(config, max_cache_len=length) for length in lengths)
    )


@pytest.mark.parametrize(("name", "mode"), CASES, ids=[f"{name}, {mode}" for name, mode in CASES])
def test_tokens_and_logits_are_those_of_transformers_static_cache(name: str, mode: str) -> None:
    """Exactly where the kernels see the same layout: not for windows, which are stored and shown whole here,
    and cross attention, whose heads lie in another order."""
    made = hf.model(name)
    expected = hf.MODES[mode](name, made, theirs(made, name, 48))
    found = hf.MODES[mode](name, made, HFStaticCache(made.config, capacity=48))
    assert found.distance(expected) <= (1e-5 if name in OTHER_LAYOUT else 0.0)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-next", "t5"])
def test_generate_compiles_one_graph_without_breaks(name: str, dynamo: Any) -> None:
    """``generate`` compiles the decoding step for it, as for its own static cache."""
    made = hf.model(name)
    settings = transformers.CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    settings._compile_all_devices = True
    batch = hf.inputs(name, 2, 3)
    expected = hf.generate(made, batch, theirs(made, name, 48))
    found = hf.generate(made, batch, HFStaticCache(made.config, capacity=48), compile_config=settings)
    assert found.distance(expected) <= 1e-5
    assert dynamo["stats"]["unique_graphs"] == 1
    assert not dynamo["graph_break"]


def test_a_loop_of_ones_own_compiles_one_graph_past_the_end_of_the_window(dynamo: Any) -> None:
    made, ids = hf.model("gemma3"), hf.tokens(1, 24)
    step = torch.compile(made, backend="aot_eager", fullgraph=True, dynamic=False)
    ours, reference = HFStaticCache(made.config, capacity=32), transformers.DynamicCache(config=made.config)
    found, expected = feed(made, ours, ids[:, :4]), feed(made, reference, ids[:, :4])
    for i in range(4, 16):
        found, expected = (feed(*each, ids[:, i : i + 1]) for each in ((step, ours), (made, reference)))
        assert float((found - expected).abs().max()) < 1e-5
    assert dynamo["stats"]["unique_graphs"] == 1


def test_compiled_code_steps_out_of_the_graph_for_a_cache_that_grows(dynamo: Any) -> None:
    """A cell table is not traced: the graph breaks, and the numbers are right."""
    config = hf.model("llama").config
    ours, reference = HFCache(config, capacity=32), transformers.DynamicCache(config=config)

    def attend(cache: Any, key: torch.Tensor) -> torch.Tensor:
        keys, values = cache.update(key * 2, key + 1, 0)
        return torch.nn.functional.scaled_dot_product_attention(key, keys, values)

    step = torch.compile(attend, backend="eager", dynamic=True)
    for count in (5, 1, 1, 3):
        key = torch.randn(2, 2, count, 16, generator=torch.Generator().manual_seed(count))
        ours.layers[1].rows.reached(1)  # a pass of one layer
        assert torch.equal(step(ours, key), attend(reference, key))
    assert dynamo["graph_break"]


def test_the_buffers_are_those_of_our_cache_and_stay_where_they_are() -> None:
    made, ids = hf.model("llama"), hf.tokens(2, 20)
    cache = HFStaticCache(made.config, capacity=32)
    feed(made, cache, ids[:, :10])
    buffers = cache.rows.pool.family.all._buffers
    addresses = [layer.keys.data_ptr() for layer in cache.layers]
    assert addresses == [buffers[i].key.tensor.native.data_ptr() for i in range(2)]
    assert cache.layers[0].keys.shape == (2, 2, 32, 16)
    feed(made, cache, ids[:, 10:])
    cache.reorder_cache(torch.tensor([1, 0]))
    assert [layer.keys.data_ptr() for layer in cache.layers] == addresses
    assert cache.nbytes == 2 * 2 * 2 * 32 * 2 * 16 * 4


def test_crop_takes_back_and_reset_forgets() -> None:
    for name in ("llama", "gemma3"):
        made, ids, other = hf.model(name), hf.tokens(2, 20), hf.tokens(2, 4, seed=3)
        cache, plain = HFStaticCache(made.config, capacity=32), HFCache(made.config, capacity=32)
        feed(made, cache, ids)
        feed(made, plain, ids)
        for length in (-4, 12):
            cache.crop(length)
            plain.crop(length)
            found, expected = feed(made, cache, other), feed(made, plain, other)
            assert float((found - expected).abs().max()) < 1e-5
        with pytest.raises(InvalidRangeError, match="20 of 16"):
            cache.crop(20)
        cache.reset()
        plain.reset()
        assert float((feed(made, cache, ids) - feed(made, plain, ids)).abs().max()) < 1e-5


def test_recurrent_states_are_not_cropped_silently() -> None:
    made, ids = hf.model("qwen3-next"), hf.tokens(2, 20)
    cache, plain = HFStaticCache(made.config, capacity=32), HFCache(made.config, capacity=32)
    feed(made, cache, ids)
    feed(made, plain, ids)
    with pytest.raises(NotSupportedError, match="4 tokens of recurrent states"):
        cache.crop(-4)
    cache.crop(0)
    assert float((feed(made, cache, ids[:, :1]) - feed(made, plain, ids[:, :1])).abs().max()) < 1e-5


def test_one_cache_serves_inputs_of_other_lengths_one_after_another() -> None:
    made = hf.model("t5")
    cache = HFStaticCache(made.config, capacity=32)
    for length in (9, 13, 5):
        batch = {"input_ids": hf.tokens(2, length)}
        found = hf.generate(made, batch, cache)
        assert found.distance(hf.generate(made, batch)) < 1e-4
        cache.reset()


def test_another_batch_size_is_refused() -> None:
    made = hf.model("llama")
    cache = HFStaticCache(made.config, capacity=32)
    feed(made, cache, hf.tokens(2))
    with pytest.raises((InvalidRangeError, RuntimeError)):
        feed(made, cache, hf.tokens(3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers and torch, not ours
@pytest.mark.skipif(not os.environ.get("ML_LONG"), reason="compiles kernels for long: ML_LONG=1")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_flex_attention(name: str) -> None:
    from torch._inductor.exc import InductorError

    made = hf.model(name, "flex_attention")
    try:
        expected = hf.MODES["greedy"](name, made, None)
    except InductorError as error:
        pytest.skip(
            f"flex attention of {name} does not compile here, with transformers' own cache: {error!s:.80}"
        )
    found = hf.MODES["greedy"](name, made, HFCache(made.config, capacity=64, lookback=2))
    assert found.distance(expected) <= 1e-5
