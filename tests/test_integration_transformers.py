"""HFCache in ``generate()`` of transformers, against transformers' own cache in the same test."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

import torch

from kvcache.integrations.transformers import HFCache

from . import hf_models as hf

CASES = [(name, mode) for name in hf.MODELS for mode in hf.MODES if hf.applies(name, mode)]
LOOKBACK = {"prompt lookup": 8, "assisted": 24}
"""Tokens that windows keep besides what they show: few, so that they evict and wrap."""


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "mode"), CASES, ids=[f"{name}, {mode}" for name, mode in CASES])
def test_tokens_and_logits_are_those_of_transformers_own_cache(name: str, mode: str) -> None:
    made = hf.model(name)
    expected = hf.MODES[mode](name, made, None)
    cache = HFCache(made.config, capacity=64, lookback=LOOKBACK.get(mode, 2))
    found = hf.MODES[mode](name, made, cache)
    assert found.cache is cache or name == "whisper"  # whose generate takes the cache apart
    assert found.distance(expected) == 0.0


@pytest.mark.parametrize("mode", ["left padding", "beams"])
@pytest.mark.parametrize("name", [name for name in hf.MODELS if name != "gpt-oss"])
def test_the_same_with_scaled_dot_product_attention(name: str, mode: str) -> None:
    if not hf.applies(name, mode):
        mode = "sampling"
    made = hf.model(name, "sdpa")
    expected = hf.MODES[mode](name, made, None)
    found = hf.MODES[mode](name, made, HFCache(made.config, capacity=64, lookback=0))
    # Steps without padding get a mask with HFCache, by which transformers comes to a faster kernel.
    assert found.distance(expected) <= (0.0 if mode == "left padding" else 1e-5)


FLEX = [
    *((name, mode) for name in ("llama", "qwen3", "gemma3", "llama4") for mode in ("left padding", "beams")),
    *((name, "prompt lookup") for name in ("gemma3", "t5", "whisper")),
]
"""gpt-oss and Qwen3-Next have none on a CPU; T5's fails with padding and beams on transformers' own cache."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without:UserWarning")
@pytest.mark.parametrize(("name", "mode"), FLEX, ids=[f"{name}, {mode}" for name, mode in FLEX])
def test_the_same_with_flex_attention_that_is_not_compiled(name: str, mode: str) -> None:
    made = hf.model(name, "flex_attention")
    with torch.compiler.set_stance("force_eager"):  # its kernels compile for minutes, and some not at all
        expected = hf.MODES[mode](name, made, None)
        found = hf.MODES[mode](name, made, HFCache(made.config, capacity=64, lookback=8))
    assert made.config._attn_implementation == "flex_attention"
    assert found.distance(expected) == 0.0


@pytest.mark.parametrize(
    "options",
    [
        {"num_return_sequences": 3, "do_sample": True},
        {"num_beams": 3, "do_sample": True},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"output_attentions": True},
        {"assistant_early_exit": 1},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_other_ways_to_generate(name: str, options: dict[str, Any]) -> None:
    made = hf.model(name)
    batch = hf.inputs(name, 1 if "assistant_early_exit" in options else 2, 3)
    try:
        expected = hf.generate(made, batch, **options)
        found = hf.generate(made, batch, HFCache(made.config, capacity=64, lookback=8), **options)
    finally:
        made.config.num_hidden_layers = 2  # which leaving early changes for good
    assert found.distance(expected) == 0.0


def test_embeddings_instead_of_tokens() -> None:
    made = hf.model("gemma3")
    batch = hf.inputs("gemma3", 2, 3)
    batch["inputs_embeds"] = made.get_input_embeddings()(batch.pop("input_ids"))
    expected = hf.generate(made, batch)
    assert hf.generate(made, batch, HFCache(made.config, capacity=64, lookback=2)).distance(expected) == 0.0
