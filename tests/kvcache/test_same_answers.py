"""The same answers everywhere: what a model says, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import ml
from kvcache_engine.generate import Generator
from kvcache_engine.loading import load_model
from kvcache_engine.options import EngineOptions
from kvcache_engine.requests import GenerationOptions
from kvcache_engine.tokenizer import Tokenizer

OpenAny = Callable[[str], AbstractContextManager[ml.Backend]]


@pytest.mark.parametrize(("name", "count"), [("numpy", 200), ("torch", 200), ("mlx", 200), ("jax", 80)])
def test_the_known_answer(open_any: OpenAny, stories: Path, stories_text: str, name: str, count: int) -> None:
    """stories260K, greedy."""
    options = EngineOptions(max_sequences=1, capacity=256)
    with (
        open_any(name) as backend,
        Generator(load_model(stories, backend), Tokenizer.load(stories), options=options) as generator,
    ):
        (answer,) = generator.complete([""], GenerationOptions(count))
    assert len(answer.tokens) == count
    assert answer.text == stories_text if count == 200 else stories_text.startswith(answer.text)
