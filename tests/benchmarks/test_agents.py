"""What requests find again in little room, against models that are known by hand."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from benchmarks.agents import found_by_belady, found_by_blocks, found_by_prefix_cache, read_trace

MODELS = (found_by_prefix_cache, found_by_blocks, found_by_belady)
A, B, C = (np.arange(first, first + size) for first, size in ((100, 10), (200, 10), (300, 10)))


@pytest.mark.parametrize("model", MODELS)
def test_with_room_for_all_a_prompt_finds_the_longest_prefix_that_was_there(model: object) -> None:
    prompts = [A, B, A, A[:5], np.append(A[:3], B), A]
    assert model(prompts, 100) == 9 + 4 + 3 + 9  # type: ignore[operator]


@pytest.mark.parametrize(
    ("prompts", "lru", "belady"),
    [([A, B, A, C, A], 9 + 9, 9 + 9), ([A, B, C, A], 0, 9), ([A, B, C, B, A], 9, 9 + 9)],
    ids=["used lately", "a scan", "a loop"],
)
def test_with_room_for_two_of_three_the_least_recently_used_goes(
    prompts: list[np.ndarray], lru: int, belady: int
) -> None:
    assert found_by_prefix_cache(prompts, 20) == found_by_blocks(prompts, 20) == lru
    assert found_by_belady(prompts, 20) == belady


def test_of_random_requests_a_prefix_cache_finds_about_what_single_blocks_would() -> None:
    rng = np.random.default_rng(4)
    histories = [rng.integers(i << 20, (i + 1) << 20, 30) for i in range(12)]
    prompts = []
    for _ in range(300):
        i = min(int(rng.exponential(3)), 11)
        histories[i] = np.append(histories[i], rng.integers(0, 1 << 19, 4))
        prompts.append(histories[i])
    for budget in (200, 400, 800):
        ours, blocks, best = (model(prompts, budget) for model in MODELS)
        assert 0.97 * blocks < ours <= best


def test_a_trace_is_read_in_the_order_of_time_compressed_or_not(tmp_path: Path) -> None:
    rows = [{"timestamp": at, "hash_ids": ids} for at, ids in ((5, [1, 2]), (3, [7]), (9, []), (4, [1]))]
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "b.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    for name in ("a.jsonl", "b.jsonl.xz"):
        assert [ids.tolist() for ids in read_trace(tmp_path / name)] == [[7], [1], [1, 2]]
    assert len(read_trace(tmp_path / "a.jsonl", 2)) == 2
