"""docs/embedding-mlx-lm.md works as written: its code is run, in order, on models that mlx-lm loads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import mlx.core as mx
import mlx_lm
from mlx_lm import server

PAGE = Path(__file__).resolve().parents[1] / "docs" / "embedding-mlx-lm.md"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with "model" and "draft" as Hugging Face stores them, and a byte-level tokenizer."""
    for name, layers in (("model", 3), ("draft", 2)):
        made = make_model(num_hidden_layers=layers, rms_norm_eps=1e-6)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        (made / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        made.rename(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_code_of_the_page_runs_and_says_what_mlx_lm_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "load", server.load)  # which the page replaces
    blocks = FENCE.findall(PAGE.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    model, tokenizer, prompts = names["model"], names["tokenizer"], names["prompts"]
    plain = mlx_lm.generate(model, tokenizer, "Once upon", max_tokens=20)
    assert names["text"] == names["spoken"] == plain != ""
    assert names["batch"].texts == names["batch_again"].texts
    assert names["batch"].texts == mlx_lm.batch_generate(model, tokenizer, prompts, max_tokens=12).texts
    assert names["position"] == 6
    assert server.load("model")[0].make_cache()[0].rows.pool.max_sequences == 8
    assert all(cache[0].empty() for cache in names["caches"])  # what goes into a batch stays as it was
    responses = mlx_lm.stream_generate(model, tokenizer, "!", prompt_cache=names["story_again"], max_tokens=6)
    again = mlx_lm.stream_generate(model, tokenizer, "!", prompt_cache=names["story"], max_tokens=6)
    assert [x.token for x in responses] == [x.token for x in again]
    assert (folder / "story.safetensors").is_file()
    mx.clear_cache()


def test_the_page_names_every_option() -> None:
    import inspect

    from kvcache.integrations.mlx_lm import CachePool

    text = PAGE.read_text(encoding="utf-8")
    options = set(inspect.signature(CachePool).parameters) - {"model", "backend"}
    assert [name for name in sorted(options) if f"`{name}`" not in text and f"{name}=" not in text] == []
