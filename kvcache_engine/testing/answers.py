"""A complete model with a cache: the answer of the bundled one on this backend and on NumPy."""

from __future__ import annotations

import pytest

import ml
from kvcache.testing.harness import CacheCase
from ml.testing.harness import needs

PROMPT = (1, 298, 261, 344, 818, 323, 692, 14, 545, 14, 1461, 774, 323, 261, 503, 271, 434, 14, 270, 442)
"""And the LORD spake unto Moses, saying, Speak unto the children of Israel, and say

Its answer is unambiguous: the best token's logit exceeds the second by at least 0.18.
"""
TOKENS = 20

_model = needs(
    "add", "mul", "scale", "silu", "matmul", "softmax", "compare", "where", "rms_norm", "cos", "sin"
)


class AnswerTests(CacheCase):
    @_model
    def test_the_bundled_model_says_what_it_says_on_numpy(self, backend: ml.Backend) -> None:
        for package in ("safetensors", "tokenizers"):
            pytest.importorskip(package, reason=f"needs {package}: pip install 'ml-kvcache[engine]'")
        with ml.open_backend("numpy") as numpy:
            expected = _answer(numpy)
        assert len(expected) == TOKENS
        assert _answer(backend) == expected


def _answer(backend: ml.Backend) -> tuple[int, ...]:
    """The tokens that a greedy loop adds to the prompt: a pass for the prompt, then one for each token."""
    from kvcache_engine.generate import Generator
    from kvcache_engine.loading import bundled_model, load_model
    from kvcache_engine.options import EngineOptions
    from kvcache_engine.requests import GenerationOptions

    options = EngineOptions(max_sequences=1, capacity=64, prefill_chunk=len(PROMPT))
    with Generator(load_model(bundled_model(), backend), None, options=options) as generator:
        (answer,) = generator.complete([PROMPT], GenerationOptions(max_new_tokens=TOKENS))
    return answer.tokens
