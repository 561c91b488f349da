"""Both shipped suites, and a model, on NumPy arranged as compilers and ggml want it: padded and permuted.

Every 16th test of the caches' suite and every 40th of the backends'; all of them with ML_LONG=1, which
takes some 80 s of processor time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ml
from backends.numpy.backend import NumpyBackend
from kvcache.testing import CacheTests
from kvcache_engine.generate import Generator
from kvcache_engine.loading import load_model
from kvcache_engine.options import EngineOptions
from kvcache_engine.requests import GenerationOptions
from kvcache_engine.tokenizer import Tokenizer
from ml.testing import BackendTests

from ..rigs.each_backend import opener

LONG = "ML_LONG" in os.environ
CONFIG = ml.CacheConfig(cache_padding=64, mask_batch_padding=8, permuted_v=True, layout=ml.Layout.TOKEN_MAJOR)


class PaddedBackend(NumpyBackend):
    def cache_config(self) -> ml.CacheConfig:
        return CONFIG


class OnPadded:
    open_backend = opener(PaddedBackend)


def sampled(suite: type, step: int) -> Any:
    """Every ``step``-th test of the suite on that backend, or all of them."""
    tests = sorted(name for name in dir(suite) if name.startswith("test_"))
    left_out = {name: None for i, name in enumerate(tests) if i % step and not LONG}
    return type("Sampled", (OnPadded, suite), left_out)


class TestCaches(sampled(CacheTests, 16)):
    colours = (0, 1, 2, 3) if LONG else (2,)
    traces = 400 if LONG else 48
    state_traces = quantized_traces = encoder_traces = 32 if LONG else 4


class TestBackend(sampled(BackendTests, 40)):
    pass


def test_a_model_says_what_it_says_without_padding(stories: Path, stories_text: str) -> None:
    with PaddedBackend() as backend:
        model, tokenizer = load_model(stories, backend), Tokenizer.load(stories)
        with Generator(model, tokenizer, options=EngineOptions(max_sequences=2, capacity=250)) as generator:
            answers = generator.complete(["", ""], GenerationOptions(200))
    assert [answer.text for answer in answers] == [stories_text] * 2
