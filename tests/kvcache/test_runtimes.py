"""One conversation in several runtimes, through one store: what one has computed, the others go on from.

The runtimes are driven as examples/many_runtimes.py drives them.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from examples import many_runtimes
from kvcache.stores import MemoryStore

from ..integrations.vllm.running.models import prompt, write_model

PROMPT = prompt(7, 50)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_runtimes, "PAGE", 16)


def reference(folder: Path, count: int) -> list[int]:
    """The prompt, and the greedy answer of transformers without any of this."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    found: list[int] = model.generate(torch.tensor([PROMPT]), **options)[0].tolist()
    return found


def talk(folder: Path, runtimes: list[str], store: Any) -> list[int]:
    """Turns of 20 tokens; how many each had from the store."""
    expected, tokens, restored = reference(folder, 20 * len(runtimes)), PROMPT, []
    for runtime in runtimes:
        answer, found, _ = many_runtimes.turn(runtime, folder, store, tokens, 20)
        tokens = [*tokens, *answer]
        assert tokens == expected[: len(tokens)]
        restored.append(found)
    return restored


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_conversation_goes_on_in_mlx_lm_and_back(kind: str, tmp_path: Path) -> None:
    """mlx-lm evaluates its last token too, whose entry the next turn cuts."""
    pytest.importorskip("mlx_lm")
    folder = write_model(tmp_path / "model", kind)
    runtimes = ["transformers", "mlx-lm", "engine", "mlx-lm"]
    assert talk(folder, runtimes, MemoryStore()) == [0, 69, 89, 109]


@pytest.mark.parametrize(
    ("kind", "backend"), [("qwen3", "numpy"), ("llama", "numpy"), ("llama", "torch"), ("llama", "mlx")]
)
def test_a_conversation_goes_on_from_runtime_to_runtime(
    kind: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn begins with all that the turns before have stored."""
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    engine = functools.partial(many_runtimes.in_engine, backend=backend)
    monkeypatch.setitem(many_runtimes.RUNTIMES, "engine", engine)
    folder = write_model(tmp_path / "model", kind)
    store = f"file://{tmp_path / 'store'}?durable=no"
    assert talk(folder, ["transformers", "engine", "transformers"], store) == [0, 69, 89]


def test_what_another_model_computed_is_a_miss(tmp_path: Path) -> None:
    store: Any = MemoryStore()
    many_runtimes.turn("transformers", write_model(tmp_path / "one", "llama"), store, PROMPT, 4)
    rotated = {"rope_type": "default", "rope_theta": 500.0}
    others = [
        write_model(tmp_path / "rotated", "llama", rope_parameters=rotated),
        write_model(tmp_path / "qwen3", "qwen3"),
    ]
    for folder in others:
        answer, restored, _ = many_runtimes.turn("engine", folder, store, PROMPT, 4)
        assert restored == 0
        assert [*PROMPT, *answer] == reference(folder, 4)


def test_the_example_begins_with_a_model_and_a_store_that_are_empty(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2}  # fmt: skip
    folder = many_runtimes.write_model(tmp_path / "model", **sizes)
    assert talk(folder, ["transformers", "engine"], "") == [0, 0]
