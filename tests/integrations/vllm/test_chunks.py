"""Rows of vLLM's host memory as entries: K and V by token as in our caches, or bytes; and their names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import InvalidRangeError
from kvcache.integrations.vllm.chunks import BlockLayer, HashNames, TokenNames, raw_rows, token_rows
from kvcache.integrations.vllm.naming import Pages
from kvcache.integrations.vllm.options import TierOptions
from kvcache.integrations.vllm.packing import Strides
from kvcache.stores import SnapshotCorruptError

HEADS, DIM, TOKENS, BLOCKS = 2, 3, 4, 2
HEAD_MAJOR = BlockLayer(
    HEADS, DIM, DIM, HEADS * TOKENS * 2 * DIM, Strides(0, (2 * DIM, TOKENS * 2 * DIM, 1)),
    Strides(DIM, (2 * DIM, TOKENS * 2 * DIM, 1)),
)  # fmt: skip
"""Blocks of (heads, tokens, K then V)."""
TRANSPOSED = BlockLayer(
    HEADS, DIM, DIM, HEADS * TOKENS * 2 * DIM, Strides(0, (1, TOKENS * DIM, TOKENS)),
    Strides(HEADS * TOKENS * DIM, (DIM, TOKENS * DIM, 1)),
)  # fmt: skip
"""Blocks of K (heads, dim, tokens), then of V (heads, tokens, dim)."""


@pytest.mark.parametrize("dtype", [ml.DType.F32, ml.DType.BF16])
def test_a_row_is_a_page_with_k_and_v_by_token(dtype: ml.DType) -> None:
    numbers = np.random.default_rng(3).standard_normal((2, 2, BLOCKS * TOKENS, HEADS, DIM))
    kv = numbers.astype(dtype.numpy)
    parts = []
    for layer, (key, value) in zip((HEAD_MAJOR, TRANSPOSED), kv, strict=True):
        for block in range(BLOCKS):
            k, v = (one[block * TOKENS : (block + 1) * TOKENS] for one in (key, value))
            if layer is HEAD_MAJOR:
                parts.append(np.concatenate([k, v], 2).transpose(1, 0, 2).reshape(-1))
            else:
                parts += [k.transpose(1, 2, 0).reshape(-1), v.transpose(1, 0, 2).reshape(-1)]
    row = np.concatenate([np.concatenate(parts).view(np.uint8), np.zeros(5, np.uint8)])  # with padding
    rows = token_rows(dtype, TOKENS, BLOCKS, [HEAD_MAJOR, TRANSPOSED])
    entry = rows.pack(24, row)
    assert entry.meta["snapshot"]["begin"] == 16
    for number, layer in enumerate(kv):
        for part, expected in enumerate(layer):
            assert np.array_equal(entry.arrays[f"{number}.{part}"], expected)
    filled = np.zeros_like(row)
    rows.fill(24, entry, filled)
    assert np.array_equal(filled, row)


def test_a_page_of_other_tokens_or_layers_leaves_the_row_alone() -> None:
    rows = token_rows(ml.DType.F32, TOKENS, BLOCKS, [HEAD_MAJOR])
    row = np.arange(BLOCKS * HEAD_MAJOR.size, dtype=np.float32).view(np.uint8)
    other = np.zeros_like(row)
    for end, wrong in ((16, rows), (8, token_rows(ml.DType.F32, TOKENS, BLOCKS, [HEAD_MAJOR] * 2))):
        with pytest.raises(SnapshotCorruptError):
            wrong.fill(end, rows.pack(8, row), other)
    with pytest.raises(SnapshotCorruptError):
        raw_rows(row.size, "a layout").fill(8, raw_rows(row.size, "another").pack(8, row), other)
    assert not other.any()


def request(name: str, tokens: list[int], **more: Any) -> Any:
    plain = dict.fromkeys(("cache_salt", "lora_request", "prompt_embeds"))
    return SimpleNamespace(request_id=name, all_token_ids=tokens, mm_features=(), **{**plain, **more})


def chunk(group: int = 0) -> bytes:
    return b"hash" + group.to_bytes(4, "big")


def test_names_are_those_of_pages_by_tokens_salt_and_group() -> None:
    groups = {
        0: Pages({"model": "m"}, {"kind": "CausalCache"}, 8),
        3: Pages({"model": "m"}, {"group": 3}, 16),
    }
    names, tokens = TokenNames(groups), [*range(40)]
    names.begin(request("a", tokens))
    names.begin(request("b", tokens, cache_salt="of somebody else"))
    assert names.of(chunk(), "a", 16) == groups[0].keys(request("a", tokens), 16)[0][-1]
    assert names.of(chunk(3), "a", 16) not in (None, names.of(chunk(), "a", 16))
    assert names.of(chunk(), "b", 16) not in (None, names.of(chunk(), "a", 16))
    assert names.of(chunk(), "a", 12) is names.of(chunk(3), "a", 8) is None, "parts of chunks"
    assert names.of(chunk(), "nobody", 16) is None
    names.finished("a")
    assert names.of(chunk(), "a", 16) is None


def test_a_request_that_keys_cannot_identify_has_no_names(caplog: pytest.LogCaptureFixture) -> None:
    names = TokenNames({0: Pages({"model": "m"}, {}, 8)})
    names.begin(request("a", [*range(16)], prompt_embeds="embeddings"))
    assert names.of(chunk(), "a", 16) is None
    assert "its prompt has embeddings" in caplog.text


@pytest.mark.parametrize("kind", ["hashes", "tokens"])
def test_after_a_reset_nothing_earlier_is_found(kind: str) -> None:
    names: Any = HashNames({"model": "m"}, "layout")
    if kind == "tokens":
        names = TokenNames({0: Pages({"model": "m"}, {}, 8)})
        names.begin(request("a", [*range(16)]))
    before = names.of(chunk(), "a", 16)
    names.reset()
    if kind == "tokens":
        assert names.of(chunk(), "a", 16) is None, "its tokens mix both sets of weights"
        names.begin(request("b", [*range(16)]))
    assert names.of(chunk(), "b", 16) not in (None, before)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "identity is missing: vLLM's hashes of tokens do not cover the model"),
        ({"identity": {"model": "m"}, "threads": 0}, "threads=0; it must be at least 1"),
        ({"identity": {"model": "m"}, "locality": "near"}, "locality='near'; it must be LOCAL or REMOTE"),
        ({"identity": {"model": "m"}, "root_dir": "/x"}, "'root_dir' is not an option"),
    ],
)
def test_options_that_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRangeError, match="secondary_tiers: ") as refusal:
        TierOptions.parse({"store": "memory:", **given})
    assert told in str(refusal.value)
