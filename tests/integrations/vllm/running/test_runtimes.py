"""What vLLM has computed goes on elsewhere, and back: transformers and our own runner, through one store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import ml
from kvcache.integrations.transformers import HFPrefixCache
from kvcache.stores import identity_of
from kvcache_engine import Engine, EngineOptions, GenerationOptions, load_model

from .engines import engine, transfer
from .models import SHARED, prompt, write_model

PAGE = 128
PROMPT = prompt(7, 300)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


def with_transformers(folder: Path, store: str, tokens: list[int], count: int) -> tuple[list[int], int]:
    """Tokens of a greedy continuation, and how many of the prompt came from the store."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    identity = identity_of(folder, ml.DType.F32)
    options: dict[str, Any] = {"tiers": [store], "identity": identity, "block_size": PAGE}
    with HFPrefixCache(model, max_sequences=1, capacity=2048, **options) as cache:
        given = torch.tensor([tokens])
        out = cache.generate(given, max_new_tokens=count, do_sample=False, eos_token_id=None)
        return out[0, len(tokens) :].tolist(), cache.prefix.stats.store


@pytest.mark.parametrize("kind", [*SHARED, "llama3"])
def test_a_conversation_goes_on_in_transformers_and_back(kind: str, tmp_path: Path) -> None:
    if kind == "llama3":
        folder = write_model(tmp_path / "model", "llama", rope_parameters=LLAMA3)
    else:
        folder = write_model(tmp_path / "model", kind)
    store = f"file://{tmp_path / 'store'}?durable=no"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=180, do_sample=False, eos_token_id=None
    )[0].tolist()

    with engine(folder, transfer(store, page_tokens=PAGE)) as one:
        first = one.tokens([PROMPT], 40)[0]
        assert [*PROMPT, *first] == reference[:340]
        one.written()
    second, restored = with_transformers(folder, store, reference[:340], 60)
    assert [*reference[:340], *second] == reference[:400]
    assert restored == 256
    with engine(folder, transfer(store, page_tokens=PAGE)) as one:
        third = one.generate([reference[:400]], 80)[0]
        assert [*reference[:400], *third.tokens] == reference
        assert third.cached == 384  # transformers has stored [256, 384)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_conversation_goes_on_in_our_engine_and_back(kind: str, tmp_path: Path) -> None:
    """Entries have as many tokens in both where nobody says otherwise."""
    folder, long = write_model(tmp_path / "model", kind), prompt(8, 1010)
    store = f"file://{tmp_path / 'store'}?durable=no"
    config = transfer(store, page_tokens=0)  # the default
    with engine(folder, max_model_len=2048) as plain:
        expected = plain.tokens([long], 60)[0]
    with engine(folder, config, max_model_len=2048) as one:
        one.tokens([long], 1)
        one.written()
    options = EngineOptions(capacity=2048, max_sequences=1)
    with ml.open_backend("numpy") as backend:
        model = load_model(folder, backend)
        with Engine(model, None, options, tiers=[store]) as ours:
            (found,) = ours.complete([long], GenerationOptions(max_new_tokens=40, ignore_eos=True))
            assert [*found.tokens] == expected[:40]
            assert ours.prefix.stats.store == 896
    with engine(folder, config, max_model_len=2048) as one:
        after = one.generate([[*long, *expected[:40]]], 20)[0]
        assert after.tokens == expected[40:]
        assert after.cached == 1024  # of which our engine has stored the end
