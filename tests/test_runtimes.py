"""One conversation in two runtimes, through one store: what one has computed, the other goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

import ml
from kvcache.integrations.transformers import HFPrefixCache
from kvcache.runner import Engine, EngineOptions, GenerationOptions, load_model
from kvcache.runner.fingerprint import identity_of
from kvcache.stores import MemoryStore

from .vllm.models import prompt, write_model

PAGE = 16
PROMPT = prompt(7, 50)


def reference(folder: Path, count: int) -> list[int]:
    """The prompt, and the greedy answer of transformers without any of this."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    found: list[int] = model.generate(torch.tensor([PROMPT]), **options)[0].tolist()
    return found


def in_transformers(folder: Path, store: MemoryStore, tokens: list[int], count: int) -> tuple[list[int], int]:
    """All tokens after a greedy answer, and how many came from the store."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    identity = identity_of(folder, ml.DType.F32)
    options: dict[str, Any] = {"tiers": [store], "identity": identity, "block_size": PAGE}
    with HFPrefixCache(model, max_sequences=1, capacity=256, **options) as cache:
        given = torch.tensor([tokens])
        out = cache.generate(given, max_new_tokens=count, do_sample=False, eos_token_id=None)
        return out[0].tolist(), cache.prefix.stats.store


def in_engine(
    folder: Path, store: MemoryStore, tokens: list[int], count: int, backend: str = "numpy"
) -> tuple[list[int], int]:
    options = EngineOptions(capacity=256, max_sequences=1, block_size=PAGE)
    with (
        ml.open_backend(backend) as opened,
        Engine(load_model(folder, opened), None, options, tiers=[store]) as engine,
    ):
        (found,) = engine.complete([tokens], GenerationOptions(max_new_tokens=count, ignore_eos=True))
        return [*tokens, *found.tokens], engine.prefix.stats.store


def in_mlx_lm(folder: Path, store: MemoryStore, tokens: list[int], count: int) -> tuple[list[int], int]:
    from mlx_lm.utils import load_model as load_mlx

    from kvcache.integrations.mlx_lm import MLXPrefixCache

    model, _ = load_mlx(folder)
    identity = identity_of(folder, ml.DType.F32)
    options: dict[str, Any] = {"tiers": [store], "identity": identity, "block_size": PAGE}
    with MLXPrefixCache(model, max_sequences=1, capacity=256, **options) as cache:
        said = [token for token, _ in cache.generate(tokens, max_tokens=count)]
        return [*tokens, *said], cache.prefix.stats.store


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_conversation_goes_on_in_mlx_lm_and_back(kind: str, tmp_path: Path) -> None:
    """Four turns: transformers, mlx-lm, the engine, mlx-lm again.

    mlx-lm evaluates its last token too, so that the next turn begins at the block before it.
    """
    pytest.importorskip("mlx_lm")
    folder, store = write_model(tmp_path / "model", kind), MemoryStore()
    expected = reference(folder, 80)
    tokens, _ = in_transformers(folder, store, PROMPT, 20)
    for turn, (run, restored) in enumerate(((in_mlx_lm, 69), (in_engine, 80), (in_mlx_lm, 109))):
        tokens, found = run(folder, store, tokens, 20)
        assert tokens == expected[: 90 + 20 * turn]
        assert found == restored


@pytest.mark.parametrize(
    ("kind", "backend"), [("qwen3", "numpy"), ("llama", "numpy"), ("llama", "torch"), ("llama", "mlx")]
)
def test_a_conversation_goes_on_from_runtime_to_runtime(kind: str, backend: str, tmp_path: Path) -> None:
    """Three turns; each begins with all that the turns before have stored."""
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    folder, store = write_model(tmp_path / "model", kind), MemoryStore()
    expected = reference(folder, 60)
    tokens, restored = in_transformers(folder, store, PROMPT, 20)
    assert (tokens, restored) == (expected[:70], 0)
    tokens, restored = in_engine(folder, store, tokens, 20, backend)
    assert (tokens, restored) == (expected[:90], 69)
    tokens, restored = in_transformers(folder, store, tokens, 20)
    assert (tokens, restored) == (expected, 89)


def test_what_another_model_computed_is_a_miss(tmp_path: Path) -> None:
    store = MemoryStore()
    in_transformers(write_model(tmp_path / "one", "llama"), store, PROMPT, 4)
    rotated = {"rope_type": "default", "rope_theta": 500.0}
    others = [
        write_model(tmp_path / "rotated", "llama", rope_parameters=rotated),
        write_model(tmp_path / "qwen3", "qwen3"),
    ]
    for folder in others:
        tokens, restored = in_engine(folder, store, PROMPT, 4)
        assert restored == 0
        assert tokens == reference(folder, 4)
