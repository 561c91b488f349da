"""Our stores below vLLM's manager of tiers, without an engine: what is in host memory goes and comes back."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

CHUNKS, TOKENS, ROW = 8, 16, 4096
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(6)]
NOBODY = ScheduleEndContext((), ())
_opened = itertools.count()


def open_manager(
    folder: Path, tokens: int, identity: dict[str, Any], dtype: str = "float32", ranks: int = 1, **tier: Any
) -> Any:
    """A manager over a host memory of its own and the store in a folder, as in a process of its own."""
    below = {
        "type": "KVCacheTier", "module_path": "kvcache.integrations.vllm",
        "store": f"file://{folder / 'store'}?durable=no", "identity": identity, **tier,
    }  # fmt: skip
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens, ("layer",), 0),), worker_kv_bytes_per_block=1000,
        enable_kv_cache_events=True, engine_id=f"kvcache-test-{os.getpid()}-{next(_opened)}",
        extra_config={"cpu_bytes_to_use": CHUNKS * ROW, "secondary_tiers": [below]},
        model=OffloadingModelConfig("m", dtype), cache=OffloadingCacheConfig(tokens, 1),
        parallel=OffloadingParallelConfig(0, ranks, ranks, 1, 1, 1, 0, 1, None, True),
    )  # fmt: skip
    return TieringOffloadingSpec(config).get_manager()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(identity: dict[str, Any] | None = None, **options: Any) -> Any:
        made.append(open_manager(tmp_path, TOKENS, identity or {"model": "m"}, **options))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


def rows(one: Any) -> np.ndarray:
    """vLLM's host memory, uint8 (chunks, bytes)."""
    return np.asarray(one.primary_tier.get_kv_memoryview()).view(np.uint8)


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, ROW, np.uint8)


def request(name: str = "r") -> ReqContext:
    context = ReqContext(name)
    for number, key in enumerate(KEYS):
        context.set_offload_key_position(key, (number + 1) * TOKENS)
    return context


def until(one: Any, done: Callable[[], bool]) -> None:
    """Steps of the scheduler, until something is done."""
    for _ in range(2000):
        one.on_schedule_end(NOBODY)
        if done():
            return
        time.sleep(0.01)
    raise AssertionError("not within 20 s")


def keep(one: Any, count: int) -> None:
    """Chunks as a worker leaves them in host memory, each with the content of its number; stored then."""
    context = request()
    one.on_new_request(context)
    output = one.prepare_store(KEYS[:count], context)
    for number, row in enumerate(output.store_spec.chunk_ids):
        rows(one)[row] = content(number)
    one.complete_store(KEYS[:count], context)
    until(one, lambda: not one.has_pending_work())
    one.on_request_finished(context)


def found(one: Any, name: str = "r") -> list[bool]:
    """Which chunks a request finds, after as many steps as it takes; those are in host memory then."""
    context = request(name)
    one.on_new_request(context)
    last: list[LookupResult] = []

    def asked() -> bool:
        last[:] = [one.lookup(key, context) for key in KEYS]
        return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(last)

    until(one, asked)
    for number, (key, result) in enumerate(zip(KEYS, last, strict=True)):
        if result is LookupResult.HIT:
            (row,) = one.prepare_load([key], context).chunk_ids
            assert np.array_equal(rows(one)[row], content(number))
            one.complete_load([key], context)
    one.on_request_finished(context)
    return [result is LookupResult.HIT for result in last]


def test_another_manager_finds_what_was_stored(manager: Callable[..., Any]) -> None:
    first = manager(enable_kv_events=True)
    keep(first, 4)
    (event,) = [event for event in first.take_events() if event.medium.value == "STORAGE"]
    assert [*event.keys] == KEYS[:4]
    assert found(manager()) == [True] * 4 + [False] * 2
    assert not any(found(manager(identity={"model": "of other weights"})))


def test_damaged_chunks_are_misses_and_the_others_come(manager: Callable[..., Any], tmp_path: Path) -> None:
    keep(manager(), 4)
    (file, *_) = sorted((tmp_path / "store").rglob("*.entry"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    one = manager()
    assert sum(found(one)) == 3
    assert sum(found(one, "again")) == 3, "and it is not asked for again and again"


def test_a_reset_waits_for_transfers_and_renames(manager: Callable[..., Any]) -> None:
    one = manager()
    keep(one, 4)
    one.reset_cache()
    assert not any(found(one))
    assert found(manager()) == [True] * 4 + [False] * 2, "another process finds what was stored before"
