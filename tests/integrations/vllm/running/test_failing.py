"""Stores that are lost, damaged, slow or full: the prompt is computed, and no token is another."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.integrations.vllm import KVCacheConnector
from kvcache.prefix.outages import Outages
from kvcache.stores import SnapshotCorruptError, StoreFullError, StoreUnavailableError, open_store
from kvcache.stores.file import FileStore

from ....rigs.servers import ValkeyServer
from .engines import Engine, answer, beside_rejecting, engine, sampling, tokens_of, transfer, worker
from .models import prompt

PROMPTS = [prompt(1, 300), prompt(2, 200), [*prompt(1, 130), *prompt(3, 90)]]


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[list[int]]:
    with engine(llama) as plain:
        return plain.tokens(PROMPTS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def filled(llama: Path, folder: Path, expected: list[list[int]]) -> Iterator[Engine]:
    """An engine that has forgotten what its store has."""
    with engine(llama, f"file://{folder}?durable=no") as one:
        assert tokens_of(one.keep(PROMPTS)) == expected
        yield one


def damage(folder: Path, key: str) -> None:
    path = folder / "pages" / f"{key}.entry"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_a_damaged_page_is_computed_and_written_again(
    filled: Engine, folder: Path, expected: list[list[int]]
) -> None:
    keys = filled.keys(PROMPTS[0], 256)
    damage(folder, keys[2])
    found = filled.generate(PROMPTS[:1])[0]
    assert found.tokens == expected[0]
    assert filled.counts()["pages_lost"] == 1
    filled.written()
    filled.forget()
    with open_store(f"file://{folder}") as held:
        assert held.prefix(keys) == 4
    found = filled.generate(PROMPTS[:1])[0]
    assert (found.tokens, found.cached) == (expected[0], 256)


def test_a_page_that_vanishes_between_lookup_and_load(
    filled: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, read = filled.keys(PROMPTS[0], 256), worker()._worker._stores.tier.serialized

    def vanish(key: str) -> Any:
        if key in (keys[0], keys[3]):
            worker()._worker._stores.tier.drop(key)
        return read(key)

    monkeypatch.setattr(worker()._worker._stores.tier, "serialized", vanish)
    assert filled.tokens(PROMPTS) == expected
    assert filled.counts()["pages_lost"] >= 1


def test_requests_fail_where_the_policy_says_so(llama: Path, folder: Path) -> None:
    config = transfer(f"file://{folder}?durable=no", policy="fail")
    with engine(llama, config) as one:
        one.keep(PROMPTS[:1])
        damage(folder, one.keys(PROMPTS[0], 256)[2])
        assert one.generate(PROMPTS[:1])[0].reason == "error"
        assert one.generate(PROMPTS[:1])[0].reason == "length"


@pytest.mark.parametrize("first", [True, False], ids=["ours first", "ours second"])
def test_what_was_computed_behind_a_load_of_another_connector_that_failed_is_not_stored(
    llama: Path, folder: Path, expected: list[list[int]], first: bool
) -> None:
    store = f"file://{folder}?durable=no"
    with engine(llama, beside_rejecting(store, first)) as both:
        assert both.tokens(PROMPTS) == expected
    with engine(llama, store) as one:
        found = one.generate(PROMPTS)
    assert tokens_of(found) == expected
    assert [answer.cached for answer in found] == [256, 192, 192]  # stored when it was computed again


def test_a_server_that_is_killed_midway(llama: Path, expected: list[list[int]]) -> None:
    if ValkeyServer.program() is None:
        pytest.skip("needs redis-server: apt-get install redis-server")
    with ValkeyServer() as server, engine(llama, server.url) as one:
        assert tokens_of(one.keep(PROMPTS)) == expected
        assert [found.cached for found in one.generate(PROMPTS)] == [256, 192, 192]
        one.forget()
        front = one.llm.llm_engine
        for number, tokens in enumerate(PROMPTS):
            front.add_request(f"{number}", {"prompt_token_ids": tokens}, sampling(12))
        answers, steps = {}, 0
        while front.has_unfinished_requests():
            for output in front.step():
                answers[output.request_id] = answer(output).tokens
            steps += 1
            if steps == 1:
                server.kill()
        assert [answers[f"{number}"] for number in range(3)] == expected
        one.forget()
        assert one.tokens(PROMPTS) == expected  # left aside now


def test_a_store_that_does_not_answer_is_a_miss_after_a_while(
    llama: Path, folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = threading.Event()
    with engine(llama, transfer(f"file://{folder}?durable=no", lookup_timeout=0.2)) as one:
        one.keep(PROMPTS[:1])
        monkeypatch.setattr(FileStore, "prefix", lambda self, keys: hang.wait(60) and 0)
        found = one.generate(PROMPTS)
        assert tokens_of(found) == expected
        assert found[0].cached == 0
        assert one.counts()["lookups_timed_out"] == 3
        hang.set()


def test_an_answer_that_takes_a_while_is_waited_for_between_steps(
    filled: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = FileStore.prefix
    monkeypatch.setattr(FileStore, "prefix", lambda self, keys: time.sleep(0.05) or prefix(self, keys))
    found = filled.generate(PROMPTS)
    assert tokens_of(found) == expected
    assert [one.cached for one in found] == [256, 192, 192]


def test_a_store_with_no_room_and_one_with_little(
    llama: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    for budget in (1000, 200_000):  # none of the pages of 66,000 bytes, and three
        url = f"file://{tmp_path}/{budget}?durable=no&budget={budget}"
        with engine(llama, url) as one:
            for _ in range(2):
                assert tokens_of(one.keep(PROMPTS)) == expected
            counts = one.counts()
            assert (counts["pages_stored"] == 0) == (budget == 1000)
            assert (counts["pages_refused"] > 0) == (budget == 1000)


def test_little_host_memory_and_a_slow_store(
    llama: Path, folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    put, most = FileStore.put, 0

    def slow(self: FileStore, key: str, parts: Any) -> bool:
        nonlocal most
        most = max(most, worker()._worker._stores.tier.writes.waiting)
        time.sleep(0.05)
        return put(self, key, parts)

    monkeypatch.setattr(FileStore, "put", slow)
    config = transfer(f"file://{folder}?durable=no", host_memory=140_000, save_wait=0.0)
    with engine(llama, config) as one:
        assert one.tokens(PROMPTS, 12) == expected
        assert most <= 140_000
        assert one.counts()["pages_postponed"] > 0
        for _ in range(8):  # what was left out is written as it is seen again
            one.written()
            one.forget()
            assert one.tokens(PROMPTS, 12) == expected
        one.forget()
        assert one.generate(PROMPTS)[0].cached == 256


@pytest.mark.parametrize("seed", range(6))
def test_mixed_faults(
    llama: Path, folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Any call of a store may fail in any way, be slow, or be told that an entry is damaged."""
    chance = random.Random(seed)
    lock = threading.Lock()

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            with lock:
                dice = chance.random()
            if dice < 0.06:
                raise StoreUnavailableError("injected")
            if dice < 0.10:
                raise SnapshotCorruptError("injected")
            if dice < 0.13:
                raise StoreFullError("injected")
            if dice < 0.15:
                raise OSError("injected")
            if dice < 0.25:
                time.sleep(0.01)
            return call(*given, **named)

        return wrapped

    options = chance.choice(
        [{}, {"max_num_batched_tokens": 48}, {"num_gpu_blocks_override": 20, "max_model_len": 512}]
    )
    for name in ("put", "prefix", "stat", "get_into", "view", "delete"):
        monkeypatch.setattr(FileStore, name, failing(getattr(FileStore, name)))
    config = transfer(
        f"file://{folder}?durable=no", host_memory=chance.choice([70_000, 1 << 28]), lookup_timeout=0.05
    )
    loaded = 0.0
    with engine(llama, config, **options) as one:
        for side in (one.connector._scheduler, worker()._worker):
            side._stores.tier.outages = Outages(lambda: 200 * time.monotonic())  # not for long
        for _ in range(12):
            order = [*range(3)]
            chance.shuffle(order)
            count = chance.randint(1, 3)
            found = one.generate([PROMPTS[i] for i in order[:count]])
            assert [one.tokens for one in found] == [expected[i] for i in order[:count]]
            if chance.random() < 0.7:
                one.written()
                one.forget()
        loaded = one.counts()["pages_loaded"]
        pool = one.core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert loaded > 0


def test_an_engine_that_cannot_be_made_leaves_nothing_to_the_next(
    llama: Path, tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, store = (f"file://{tmp_path / name}?durable=no" for name in ("failed", "store"))
    with monkeypatch.context() as patch:
        patch.setattr(KVCacheConnector, "register_kv_caches", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), engine(llama, failed):
            pass
    with engine(llama, store) as one:
        assert tokens_of(one.keep(PROMPTS[:1])) == expected[:1]
        assert one.generate(PROMPTS[:1])[0].cached == 256
