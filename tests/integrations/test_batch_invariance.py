"""``batch_invariant`` inside transformers and mlx-lm: answers are those of an empty cache, bit for bit."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("mlx_lm")

import mlx.core as mx
import numpy as np
import torch

from kvcache.integrations.mlx_lm import MLXPrefixCache, storage
from kvcache.integrations.transformers import HFPrefixCache

from ..rigs import hf_models, mlx_lm_models

BLOCK, ANSWER = 8, 3
Asked = tuple[list[bytes], list[int], int]
"""Bits of the logits, all tokens, and how many of them were reused."""


@contextlib.contextmanager
def hf(kind: str, dtype: str) -> Iterator[tuple[Any, Callable[[Any, list[int]], Asked]]]:
    made = hf_models.model.__wrapped__({"full": "llama", "window": "gemma3"}[kind], "sdpa")
    made = made.to(getattr(torch, dtype))

    def ask(prefix: HFPrefixCache, prompt: list[int]) -> Asked:
        before = prefix.stats.reused
        out = prefix.generate(
            torch.tensor([prompt]), max_new_tokens=ANSWER, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        bits = [one.float().numpy().tobytes() for one in out.logits]
        return bits, out.sequences[0].tolist(), prefix.stats.reused - before

    yield lambda **options: HFPrefixCache(made, **options), ask


@contextlib.contextmanager
def mlx(kind: str, dtype: str) -> Iterator[tuple[Any, Callable[[Any, list[int]], Asked]]]:
    made = {"full": mlx_lm_models.make_llama, "window": mlx_lm_models.make_gemma}[kind]()
    made.set_dtype(getattr(mx, dtype))

    def ask(prefix: MLXPrefixCache, prompt: list[int]) -> Asked:
        before = prefix.stats.reused
        said = [*prefix.generate(prompt, max_tokens=ANSWER)]
        bits = [np.array(one.astype(mx.float32)).tobytes() for _, one in said]
        return bits, [*prompt, *(token for token, _ in said)], prefix.stats.reused - before

    yield lambda **options: MLXPrefixCache(made, **options), ask


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["full", "window"])
@pytest.mark.parametrize(
    ("runtime", "long"),
    [(hf, 0), (mlx, storage.LONG), (mlx, 20)],
    ids=["transformers", "mlx-lm", "mlx-lm, by the kernel from position 20 on"],
)
def test_logits_are_those_of_an_empty_cache_whatever_is_found(
    runtime: Any, long: int, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "LONG", long)
    options: dict[str, Any] = {
        "max_sequences": 3, "capacity": 96, "block_size": BLOCK, "interval": BLOCK, "batch_invariant": True
    }  # fmt: skip
    draw, known, reused = random.Random(5), [[7, 8, 9]], 0
    with runtime(kind, dtype) as (opened, ask), opened(**options) as warm:
        for _ in range(6):
            before = draw.choice(known)
            prompt = before[: draw.randint(len(before) // 2, len(before))]
            prompt = [*prompt, *(draw.randrange(3, 90) for _ in range(draw.randint(1, 24)))][:60]
            found = ask(warm, prompt)
            with opened(**options) as cold:
                assert found[:2] == ask(cold, prompt)[:2]
            assert found[2] % BLOCK == 0
            reused += found[2]
            known.append(found[1])
        assert warm.prefix.cache.config.batch_invariant if kind == "full" else True
    assert reused >= BLOCK
