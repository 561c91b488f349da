"""What requests find again in little room, against models that are known by hand."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.agents import (
    BLOCK,
    KINDS,
    SETTINGS,
    Request,
    found_by_belady,
    found_by_blocks,
    measure_reuse,
    plot,
    read_trace,
    replay,
    room_beside,
    tables,
)

Prompts = Sequence[np.ndarray]


def requests_of(prompts: Prompts) -> list[Request]:
    return [Request(600.0 * i, prompt) for i, prompt in enumerate(prompts)]


def prefix_cache(prompts: Prompts, room: int) -> int:
    return replay(requests_of(prompts), KINDS["full"], room).found


def lru(prompts: Prompts, room: int) -> int:
    return found_by_blocks(requests_of(prompts), room)


def belady(prompts: Prompts, room: int) -> int:
    return found_by_belady(requests_of(prompts), room)


MODELS = (prefix_cache, lru, belady)
A, B, C = (np.arange(first, first + size) for first, size in ((100, 10), (200, 10), (300, 10)))


@pytest.mark.parametrize("model", MODELS)
def test_with_room_for_all_a_prompt_finds_the_longest_prefix_that_was_there(
    model: Callable[[Prompts, int], int],
) -> None:
    prompts = [A, B, A, A[:5], np.append(A[:3], B), A]
    assert model(prompts, 100) == 9 + 4 + 3 + 9


@pytest.mark.parametrize(
    ("prompts", "by_lru", "by_belady"),
    [([A, B, A, C, A], 9 + 9, 9 + 9), ([A, B, C, A], 0, 9), ([A, B, C, B, A], 9, 9 + 9)],
    ids=["used lately", "a scan", "a loop"],
)
def test_with_room_for_two_of_three_the_least_recently_used_goes(
    prompts: Prompts, by_lru: int, by_belady: int
) -> None:
    assert prefix_cache(prompts, 20) == lru(prompts, 20) == by_lru
    assert belady(prompts, 20) == by_belady


@pytest.mark.parametrize("kind", KINDS)
def test_snapshots_cost_what_the_best_even_gap_costs(kind: str) -> None:
    room, snapshot = 20000, KINDS[kind].snapshot / BLOCK
    costs = [room / gap * snapshot + (gap / 2 if snapshot else 0) for gap in range(1, room)]
    assert room - room_beside(KINDS[kind], room) == pytest.approx(min(costs), abs=1)


def histories(count: int, seed: int = 4) -> list[np.ndarray]:
    """Prompts of twelve conversations that grow, the first of which go on most."""
    rng = np.random.default_rng(seed)
    said = [rng.integers(i << 20, (i + 1) << 20, 30) for i in range(12)]
    prompts = []
    for _ in range(count):
        i = min(int(rng.exponential(3)), 11)
        said[i] = np.append(said[i], rng.integers(0, 1 << 19, 4))
        prompts.append(said[i])
    return prompts


def test_of_random_requests_a_prefix_cache_finds_about_what_single_blocks_would() -> None:
    prompts = histories(300)
    for room in (200, 400, 800):
        ours, blocks, best = (model(prompts, room) for model in MODELS)
        assert 0.97 * blocks < ours <= best


def test_windows_find_nearly_what_full_attention_finds_at_the_same_bytes() -> None:
    requests = requests_of(histories(300))
    for room in (400, 800):
        full, windows = (replay(requests, KINDS[kind], room).found for kind in ("full", "window + full"))
        assert windows > 0.9 * full


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_cancelled_and_sent_again_gets_further_each_time(kind: str) -> None:
    prompts = [np.arange(first, first + 2500) for first in (0, 10_000, 20_000)]
    outcome = replay(requests_of(prompts), KINDS[kind], 9000, "cancelled")
    assert outcome.repeated > 6
    assert outcome.stuck == outcome.again == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_costs_nothing_that_a_folder_has(kind: str) -> None:
    prompts = [A, B, np.append(A, C), np.append(B, C)]
    found = [
        replay(requests_of(prompts), KINDS[kind], 100, how, period=600.0).found
        for how in ("folder", "restarts")
    ]
    assert found == [20, 20]


def test_a_run_goes_on_where_it_ended_and_its_record_has_tables_and_a_plot() -> None:
    requests = requests_of(histories(20))
    record: dict[str, object] = {}
    cells = [("device", kind, percent) for percent in (10, 100) for kind in ("full", "states + full")]
    assert len(list(measure_reuse(record, requests, cells[:3]))) == 3
    assert len(list(measure_reuse(record, requests, cells))) == 1
    with pytest.raises(SystemExit, match="another trace"):
        next(measure_reuse(record, requests[:9], cells))
    assert f"| full: {SETTINGS['device']} |" in tables(record)["reuse"]
    assert plot(record).startswith(b"<?xml")


def test_a_trace_is_read_in_the_order_of_time_compressed_or_not(tmp_path: Path) -> None:
    rows = [{"timestamp": at, "hash_ids": ids} for at, ids in ((5, [1, 2]), (3, [7]), (9, []), (4, [1]))]
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "b.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    for name in ("a.jsonl", "b.jsonl.xz"):
        assert [one.blocks.tolist() for one in read_trace(tmp_path / name)] == [[7], [1], [1, 2]]
    assert len(read_trace(tmp_path / "a.jsonl", 2)) == 2


def test_what_a_closed_session_left_goes_first_and_so_does_what_is_used_last() -> None:
    asked = (("a", 0.0, A), ("b", 1.0, B), ("c", 2.0, C), ("a", 3.0, A), ("b", 500.0, B), ("c", 600.0, C))
    requests = [Request(at, prompt, session) for session, at, prompt in asked]
    found = {how: replay(requests, KINDS["full"], 20, how).found for how in ("device", "closed", "expected")}
    assert found == {"device": 0, "closed": 9, "expected": 18}
