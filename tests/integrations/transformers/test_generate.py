"""HFCache and HFStaticCache in ``generate()``: models by ways to call it, beside transformers' own cache."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

import torch
import transformers

from benchmarks.census import transformers as census
from kvcache import InvalidRangeError, NotSupportedError, OrderError
from kvcache.integrations.transformers import HFCache, HFStaticCache, install
from kvcache.stores import MemoryStore

from ...rigs import hf_models as hf

LOOKBACK = {"prompt lookup": 8, "assisted": 24}
"""Tokens that windows keep besides what they show: few, so that they evict and wrap."""
MODES = [(name, mode) for name in hf.MODELS for mode in hf.MODES if hf.applies(name, mode)]
FIXED = [case for case in MODES if case[1] in ("beams", "left padding", "chat", "chunked prefill")]
FIXED = [case for case in FIXED if case[0] != "gpt-oss"]  # layers of Gemma 3
FLEX = [("gemma3", "left padding"), ("llama4", "beams"), ("t5", "prompt lookup")]
"""gpt-oss and Qwen3-Next have none on a CPU; T5's fails with padding and beams on transformers' own cache."""
SCALED = [(name, "left padding") for name in ("gemma3", "t5")] + [
    (name, "beams") for name in hf.MODELS if name != "gpt-oss"
]
CASES = [
    *(("HFCache", name, mode, "eager") for name, mode in MODES),
    *(("HFStaticCache", name, mode, "eager") for name, mode in FIXED),
    *(("HFCache", name, mode, "sdpa") for name, mode in SCALED),
    *(("HFCache", name, mode, "flex_attention") for name, mode in FLEX),
    ("HFStaticCache", "gemma3", "left padding", "flex_attention"),
    *(("install", name, "beams", "eager") for name in ("gemma3", "qwen3-next", "t5", "whisper")),
    *(("install", name, "assisted", "eager") for name in ("gemma3", "t5")),
]


@pytest.fixture
def dynamo() -> Iterator[Any]:
    import torch._dynamo as module
    import torch._dynamo.utils as utils

    module.reset()
    utils.counters.clear()
    yield utils.counters
    module.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without:UserWarning")
@pytest.mark.parametrize(("way", "name", "mode", "attention"), CASES, ids=map(", ".join, CASES))
def test_tokens_and_logits_are_those_of_transformers_own_cache(
    way: str, name: str, mode: str, attention: str
) -> None:
    made, cache = hf.model(name, attention), None
    if way == "HFCache":
        cache = HFCache(made.config, capacity=64, lookback=LOOKBACK.get(mode, 2))
    elif way == "HFStaticCache":
        cache = HFStaticCache(made.config, capacity=48)
    with torch.compiler.set_stance("force_eager"):  # kernels of flex attention compile for minutes
        expected = hf.expected(name, mode, attention)
        if way == "install":
            with install(lookback=2):
                found = hf.MODES[mode](name, made, None)
        else:
            found = hf.MODES[mode](name, made, cache)
    if name != "whisper":  # whose generate takes the cache apart
        assert isinstance(found.cache, HFCache) if cache is None else found.cache is cache
    # A cache of fixed shapes is read whole; with SDPA steps without padding get a mask, and a faster kernel.
    exact = way != "HFStaticCache" and (attention != "sdpa" or mode == "left padding")
    assert found.distance(expected) <= (0.0 if exact else 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"num_return_sequences": 3, "do_sample": True},
        {"num_beams": 3, "do_sample": True},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"output_attentions": True},
        {"assistant_early_exit": 1},
        {},
    ],
    ids=lambda options: next(iter(options), "embeddings"),
)
def test_other_ways_to_generate(options: dict[str, Any]) -> None:
    made = hf.model("gemma3")
    batch = hf.inputs("gemma3", 1 if "assistant_early_exit" in options else 2, 3)
    if not options:
        batch["inputs_embeds"] = made.get_input_embeddings()(batch.pop("input_ids"))
    try:
        expected = hf.generate(made, batch, **options)
        found = hf.generate(made, batch, HFCache(made.config, capacity=64, lookback=8), **options)
    finally:
        made.config.num_hidden_layers = 2  # which leaving early changes for good
    assert found.distance(expected) == 0.0


class TestCompiled:
    @pytest.mark.parametrize(
        ("name", "changes"), [("qwen3-next", {"mlp_only_layers": (0, 1)}), ("t5", {"num_decoder_layers": 1})]
    )
    def test_generate_compiles_one_graph_without_breaks(
        self, name: str, changes: dict[str, int], dynamo: Any
    ) -> None:
        """``generate`` compiles the decoding step for it, as for its own static cache."""
        made = hf.model(name, **changes)
        settings = transformers.CompileConfig(backend="eager", fullgraph=True, mode=None)
        settings._compile_all_devices = True
        batch = hf.inputs(name, 3, 5)
        cache = HFStaticCache(made.config, capacity=48)
        found = hf.generate(made, batch, cache, compile_config=settings)
        assert found.distance(hf.generate(made, batch)) <= 1e-5
        assert dynamo["stats"]["unique_graphs"] == 1
        assert not dynamo["graph_break"]

    @pytest.mark.usefixtures("dynamo")
    def test_a_first_pass_in_chunks_that_generate_compiles_finds_the_installed_cache_allocated(self) -> None:
        """As transformers' own is: compiled code cannot allocate."""
        made, batch = hf.model("llama"), hf.inputs("llama", 1)
        settings = transformers.CompileConfig(backend="eager", fullgraph=True, mode=None)
        settings._compile_all_devices = True
        options = {"max_new_tokens": 3, "prefill_chunk_size": 4, "compile_config": settings}
        expected = hf.generate(made, batch, max_new_tokens=3)
        with install():
            found = hf.generate(made, batch, cache_implementation="static", **options)
        assert found.distance(expected) <= 1e-5

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers and torch, not ours
    @pytest.mark.skipif(not os.environ.get("ML_LONG"), reason="compiles kernels for long: ML_LONG=1")
    @pytest.mark.parametrize("name", ["llama", "gemma3"])
    def test_flex_attention(self, name: str) -> None:
        from torch._inductor.exc import InductorError

        made = hf.model(name, "flex_attention")
        try:
            expected = hf.generate(made, hf.inputs(name, 1))
        except InductorError as error:
            pytest.skip(f"{name} does not compile here, with transformers' own cache: {error!s:.80}")
        found = hf.generate(made, hf.inputs(name, 1), HFCache(made.config, capacity=64, lookback=2))
        assert found.distance(expected) <= 1e-5


@pytest.mark.parametrize("kind", [HFCache, HFStaticCache])
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "qwen3_next", "lfm2", "falcon_h1", "deepseek_v32", "whisper"]
)
def test_keys_values_and_states_of_several_dtypes_that_autocast_computes(name: str, kind: Any) -> None:
    """Whichever comes first: as close to what is right as with transformers' own cache."""
    case, ids = census.Case(name), hf.tokens(2, 20)
    cache, theirs = kind(case.config, capacity=32), transformers.DynamicCache(config=case.config)
    if kind is HFStaticCache:
        theirs = transformers.StaticCache(case.config, max_cache_len=32)
    right, errors = hf.feed(case.model, None, ids), []
    for each in (cache, theirs):
        with torch.autocast("cpu", torch.bfloat16):
            parts = [hf.feed(case.model, each, ids[:, b:e]) for b, e in ((0, 12), (12, 13), (13, 20))]
        errors.append(float((torch.cat(parts, 1).float() - right).abs().mean()))  # some choose other experts
    assert errors[0] <= 1.2 * errors[1]


class TestFixedShapes:
    def test_it_is_initialized_early_as_exporters_do(self) -> None:
        made, ids = hf.model("llama"), hf.tokens(2, 10)
        cache, plain = HFStaticCache(made.config, capacity=32), HFCache(made.config, capacity=32)
        cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
        assert all(layer.is_initialized and layer.keys.shape == (2, 2, 32, 16) for layer in cache.layers)
        hf.close(hf.feed(made, cache, ids), hf.feed(made, plain, ids))

    def test_the_buffers_are_those_of_our_cache_and_stay_where_they_are(self) -> None:
        made, ids = hf.model("llama"), hf.tokens(2, 20)
        cache = HFStaticCache(made.config, capacity=32)
        hf.feed(made, cache, ids[:, :10])
        buffers = cache.rows.pool.family.all._buffers
        addresses = [layer.keys.data_ptr() for layer in cache.layers]
        assert addresses == [buffers[i].key.tensor.native.data_ptr() for i in range(2)]
        assert cache.layers[0].keys.shape == (2, 2, 32, 16)
        hf.feed(made, cache, ids[:, 10:])
        cache.reorder_cache(torch.tensor([1, 0]))
        assert [layer.keys.data_ptr() for layer in cache.layers] == addresses
        assert cache.nbytes == 2 * 2 * 2 * 32 * 2 * 16 * 4

    def test_numbers_that_would_be_rounded_are_refused_and_count_as_no_token(self) -> None:
        made, ids = copy.deepcopy(hf.model("llama")).bfloat16(), hf.tokens(2, 10)
        cache = HFStaticCache(made.config, capacity=32)
        hf.feed(made, cache, ids[:, :6])
        with pytest.raises(InvalidRangeError, match=r"they must be \(2, 2, 4, 16\) in torch.bfloat16"):
            hf.feed(made.float(), cache, ids[:, 6:])
        hf.close(hf.feed(made.bfloat16(), cache, ids[:, 6:]), hf.fresh(made, ids[:, :6], ids[:, 6:]))

    @pytest.mark.parametrize("rows", [1, 3])
    @pytest.mark.parametrize("reset", [False, True])
    def test_a_batch_of_other_rows_is_refused_and_changes_no_state(self, rows: int, reset: bool) -> None:
        """But a step of one token, whose states the model takes without a call."""
        made, ids = hf.model("qwen3-next"), hf.tokens(2)
        cache, plain = HFStaticCache(made.config, capacity=32), HFCache(made.config, capacity=32)
        for each in (cache, plain):
            hf.feed(made, each, ids)
            if reset:
                each.reset()
        with pytest.raises(InvalidRangeError, match=rf"a batch of {rows} rows; .* fixed for 2"):
            hf.feed(made, cache, hf.tokens(rows, 4))
        hf.close(hf.feed(made, cache, ids), hf.feed(made, plain, ids))

    def test_crop_takes_back_and_reset_forgets(self) -> None:
        made, ids, other = hf.model("gemma3"), hf.tokens(2, 20), hf.tokens(2, 4, seed=3)
        cache, plain = HFStaticCache(made.config, capacity=32), HFCache(made.config, capacity=32)
        hf.close(hf.feed(made, cache, ids), hf.feed(made, plain, ids))
        for length in (-4, 12):
            cache.crop(length)
            plain.crop(length)
            hf.close(hf.feed(made, cache, other), hf.feed(made, plain, other))
        cache.reset()
        plain.reset()
        hf.close(hf.feed(made, cache, ids), hf.feed(made, plain, ids))

    def test_recurrent_states_are_not_cropped_silently(self) -> None:
        made, ids = hf.model("qwen3-next"), hf.tokens(2, 20)
        cache, plain = HFStaticCache(made.config, capacity=32), HFCache(made.config, capacity=32)
        hf.close(hf.feed(made, cache, ids), hf.feed(made, plain, ids))
        with pytest.raises(NotSupportedError, match="4 tokens of recurrent states"):
            cache.crop(-4)
        cache.crop(0)
        hf.close(hf.feed(made, cache, ids[:, :1]), hf.feed(made, plain, ids[:, :1]))

    def test_one_cache_serves_inputs_of_other_lengths_one_after_another(self) -> None:
        made = hf.model("t5")
        cache = HFStaticCache(made.config, capacity=32)
        for length in (9, 13, 5):
            batch = {"input_ids": hf.tokens(2, length)}
            assert hf.generate(made, batch, cache).distance(hf.generate(made, batch)) < 1e-4
            cache.reset()


def test_windows_of_single_layers_have_the_masks_and_what_is_read_of_transformers_own() -> None:
    """What a config says of them: four layers, two with windows of their own."""
    windows = {0: 4, 2: 7}
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=None,
        per_layer_config={layer: {"sliding_window": size} for layer, size in windows.items()},
    )  # fmt: skip
    own, cache = transformers.DynamicCache(config=config), HFCache(config, capacity=32, lookback=0)
    for each in (cache, HFStaticCache(config, capacity=32)):
        assert {i: layer.kind.size for i, layer in enumerate(each.layers) if layer.is_sliding} == windows
    torch.manual_seed(1)
    for tokens in (9, 1, 1, 3, 1):
        keys, values = torch.randn(2, 2, 2, tokens, 8)
        for layer in range(4):
            assert cache.get_mask_sizes(tokens, layer) == own.get_mask_sizes(tokens, layer)
            expected = own.update(keys, values, layer)
            found = cache.update(keys, values, layer)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_cache_shows_what_it_holds() -> None:
    made = hf.model("llama")
    cache = HFCache(made.config, capacity=32)
    assert repr(cache) == f"<HFCache, layers: {len(cache.layers)}; nothing stored yet>"
    made.generate(torch.arange(3, 9).reshape(1, -1), past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert repr(cache).startswith(
        f"<HFCache, layers: {len(cache.layers)}, rows: 1, tokens of each: 8; in <Caus"
    )
    static = HFStaticCache(made.config, capacity=32)
    hf.feed(made, static, hf.tokens(1, 5))
    assert repr(static) == "<HFStaticCache, layers: 2, capacity: 32, rows: 1, tokens of each: 5>"


@pytest.mark.parametrize("name", ["llama", "gemma3", "t5"])
def test_what_a_cache_tells_of_itself_is_what_transformers_own_tells(name: str) -> None:
    made = hf.model(name)
    cache, plain = HFCache(made.config), transformers.DynamicCache(config=made.config)
    assert cache.is_initialized is False
    if name == "t5":
        plain = transformers.EncoderDecoderCache(plain, transformers.DynamicCache())
    for each in (cache, plain):
        hf.generate(made, {"input_ids": hf.tokens(2)}, each)
    assert cache.is_initialized
    for ours, own in zip(cache, plain, strict=True):
        for one, two in zip(ours, own, strict=True):
            torch.testing.assert_close(one, two)
    assert [cache.get_seq_length(i) for i in (0, 1, 9)] == [plain.get_seq_length(i) for i in (0, 1, 9)]


@pytest.mark.parametrize("name", ["gemma3", "llama4", "qwen3-next", "t5"])
def test_one_layer_alone_is_not_changed(name: str) -> None:
    made, ids = hf.model(name), hf.tokens(1, 12)
    cache = HFCache(made.config, capacity=40)
    first, more = hf.generate(made, {"input_ids": ids}, cache).sequences, hf.tokens(1, 3)
    caches = [cache.self_attention_cache, cache.cross_attention_cache] if name == "t5" else [cache]
    calls = {"reset": (), "crop": (-1,), "reorder_cache": (torch.tensor([0]),), "offload": ()}
    calls |= {"batch_repeat_interleave": (2,), "batch_select_indices": ([0],), "prefetch": ()}
    for layer in (layer for each in caches for layer in each.layers):
        for op, given in calls.items():
            with pytest.raises(NotSupportedError, match=f"call {op} of the cache"):
                getattr(layer, op)(*given)
    if name != "t5":
        hf.close(hf.feed(made, cache, more), hf.fresh(made, first[:, :-1], more))


PAGE = Path(__file__).resolve().parents[3] / "docs" / "embedding-transformers.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_runs_as_written(dynamo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/embedding-transformers.md: its blocks, in order, in one session.

    One graph serves its loop with fixed shapes, past the end of the windows.
    """
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    session: dict[str, Any] = {}
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert blocks
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), session)
    assert dynamo["stats"]["unique_graphs"] == 1
    hf.close(session["logits"], hf.feed(session["model"], None, session["out"])[:, -1:])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_gradients_are_refused_instead_of_given_in_part(name: str) -> None:
    made, prompt = copy.deepcopy(hf.model(name)).requires_grad_(True), torch.arange(3, 9).reshape(1, -1)
    cache = HFCache(made.config, capacity=32)
    with torch.enable_grad():
        logits = made(prompt, past_key_values=cache).logits
        with pytest.raises(NotSupportedError, match="gradients do not flow through a cache"):
            logits.sum().backward()
        made.set_attn_implementation("kvcache")
        logits = made(prompt, past_key_values=HFCache(made.config, capacity=32)).logits
        with pytest.raises(NotSupportedError, match="gradients do not flow through a cache"):
            logits.sum().backward()


def test_what_failed_in_its_first_pass_is_neither_saved_nor_copied() -> None:
    cache, keys = HFCache(hf.model("llama").config, max_sequences=2, capacity=32), torch.zeros(1, 2, 3, 16)
    cache.update(keys, keys, 0)
    for act in (cache.snapshot, cache.fork, lambda: cache.save(MemoryStore(), "a")):
        with pytest.raises(OrderError, match=r"did not reach all layers. Call reset\(\)"):
            act()


@pytest.mark.parametrize("name", ["llama", "qwen3-next"])
def test_growing_says_that_the_pass_of_a_fork_is_to_be_taken_back_first(name: str) -> None:
    made = hf.model(name)
    cache = HFCache(made.config, max_sequences=2, capacity=16, grow=True)
    hf.feed(made, cache, hf.tokens(1))
    fork = cache.fork()
    failing = made.model.layers[1].register_forward_pre_hook(Mock(side_effect=KeyError))
    with pytest.raises(KeyError):
        hf.feed(made, fork, hf.tokens(1, 1))
    failing.remove()
    with pytest.raises(OrderError, match=r"capacity=100 .* crop\(-n\) .* reset\(\), on that cache"):
        cache.reserve(100)
    fork.reset()
    cache.reserve(100)
