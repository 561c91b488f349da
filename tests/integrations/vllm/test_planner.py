"""The connector's two sides in a plain model of vLLM: every pass reads what it should, whatever happens."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kvcache.integrations.vllm.counters import Counters
from kvcache.integrations.vllm.lookups import Lookups
from kvcache.integrations.vllm.steps import Report
from kvcache.integrations.vllm.work import Workers
from kvcache.stores import MemoryStore, StoreFullError, StoreUnavailableError, get_snapshot

from .vllm_rig import PAGE, Engine, Request, content, entries

PROMPT = [*range(30)]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def make(store: MemoryStore) -> Iterator[Any]:
    engines: list[Engine] = []

    def new(store: MemoryStore = store, **options: Any) -> Engine:
        engines.append(Engine([store], **options))
        return engines[-1]

    yield new
    for engine in engines:
        engine.close()


def run(engine: Engine, *prompts: list[int], answer: int = 3, **named: Any) -> int:
    """How many tokens went through the model."""
    before = engine.computed
    for number, prompt in enumerate(prompts):
        engine.add(Request(f"{before}-{number}", [*prompt], answer, **named))
    engine.run()
    for tier in engine.tiers:
        tier.writes.flush()
    engine.step()
    return engine.computed - before


def test_what_is_stored_is_not_computed_again(make: Any) -> None:
    assert run(make(), PROMPT) == 33
    assert run(make(), PROMPT) == 33 - 24
    assert run(make(), PROMPT[:13]) == 16 - 8
    assert run(make(), PROMPT[:8]) == 11  # of a prompt one token is always computed
    assert run(make(), [*PROMPT[:20], 49, 48]) == 25 - 16


def test_every_page_holds_what_its_key_says(make: Any, store: MemoryStore) -> None:
    run(make(ranks=2), PROMPT, PROMPT[:17], [*PROMPT[:9], 3, 3, 3, 3, 3, 3, 3, 3])
    request = Request("r", PROMPT, 0)
    for rank, keys in enumerate(make(ranks=2).pages.keys(request, 24)):
        for page, key in enumerate(keys):
            found = get_snapshot(store, key)
            expected = [(1 + rank) * content(request, page * PAGE + i) for i in range(PAGE)]
            np.testing.assert_array_equal(found.arrays["0.0"].reshape(-1), np.array(expected, np.float32))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_prefix_counts_where_all_ranks_have_it(make: Any, store: MemoryStore, rank: int) -> None:
    run(make(ranks=2), PROMPT)
    engine = make(ranks=2)
    store.delete(engine.pages.keys(Request("r", PROMPT, 0), 24)[rank][1])
    assert run(engine, PROMPT) == 33 - 8
    assert "pages_lost" not in engine.counters.take()
    assert [*entries(store, engine.pages, Request("r", PROMPT, 0))] == [[True] * 3, [True] * 3]
    assert run(make(ranks=2), PROMPT) == 33 - 24
    assert run(make(ranks=1), PROMPT) == 33  # other heads


@pytest.mark.parametrize("reads", [True, False])
def test_what_a_store_has_evicted_is_written_again(make: Any, store: MemoryStore, reads: bool) -> None:
    engine = make(reads=reads)
    run(engine, PROMPT)
    for key in engine.pages.keys(Request("r", PROMPT, 0), 24)[0][1:]:
        store.delete(key)
    assert run(engine, PROMPT) == 33 - 8 * reads
    assert [*entries(store, engine.pages, Request("r", PROMPT, 0))] == [[True] * 3]
    assert run(engine, PROMPT) == 33 - 24 * reads


def test_what_is_stored_is_not_copied_again_for_a_store_that_answers_late(make: Any) -> None:
    class Slow(MemoryStore):
        def prefix(self, keys: Any) -> int:
            time.sleep(0.05)
            return super().prefix(keys)

    engine = make(store=Slow(), reads=False, wait=0.002)
    run(engine, PROMPT)
    copied = engine.devices[0].gathered
    run(engine, PROMPT)
    assert engine.devices[0].gathered == copied


def test_a_request_that_reads_nothing_waits_for_no_store(make: Any) -> None:
    engine = make(reads=False, wait=0.0)
    assert run(engine, PROMPT) == 33
    planner, hang = engine.planner, threading.Event()
    planner._lookups._count = lambda keys: hang.wait() and 3
    assert planner.match(Request("r", PROMPT, 0), 0) == (0, False)
    hang.set()


def test_salts_are_apart_and_the_first_token_decides(make: Any) -> None:
    run(make(), PROMPT, cache_salt="a")
    assert run(make(), PROMPT) == run(make(), PROMPT, cache_salt="b") == 33
    assert run(make(), PROMPT, cache_salt="a") == 33 - 24


def test_requests_that_cannot_be_named_are_left_alone(
    make: Any, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert run(make(), PROMPT, PROMPT, prompt_embeds=object()) == 66
    assert not store.usage().entries
    assert len([line for line in caplog.messages if "embeddings" in line]) == 2  # once for each engine


def test_a_role_that_only_reads_or_only_writes(make: Any, store: MemoryStore) -> None:
    run(make(writes=False), PROMPT)
    assert not store.usage().entries
    run(make(), PROMPT)
    assert run(make(reads=False), PROMPT) == 33
    assert run(make(writes=False), PROMPT) == 33 - 24


def test_answers_are_stored_unless_they_are_not_wanted(make: Any, store: MemoryStore) -> None:
    run(make(save_generated=False), PROMPT, answer=12)
    assert store.usage().entries == 3
    run(make(), PROMPT, answer=12)
    assert store.usage().entries == 5


def test_requests_at_once_copy_a_page_once(make: Any) -> None:
    engine = make()
    run(engine, PROMPT, PROMPT, PROMPT)
    assert engine.devices[0].gathered == 4


def test_reset_finds_nothing_of_before_and_what_comes_after(make: Any) -> None:
    engine = make()
    run(engine, PROMPT)
    engine.planner.reset()
    assert run(engine, PROMPT) == 33
    assert run(engine, PROMPT) == 33 - 24
    assert run(make(), PROMPT) == 33 - 24


def test_a_load_that_fails_is_not_tried_again_by_the_same_request(make: Any, store: MemoryStore) -> None:
    """A store that says that it has a page and never gives it."""
    run(make(), PROMPT)
    engine = make()
    read = engine.tiers[0].serialized
    engine.tiers[0].serialized = nothing = Mock(side_effect=lambda key: read("0" * 64))
    assert run(engine, PROMPT) == 33
    assert 1 <= nothing.call_count <= 3


def test_a_step_with_no_room_leaves_pages_for_a_later_one(make: Any, store: MemoryStore) -> None:
    engine = make(backlog=1, chunk=30)
    assert run(engine, PROMPT) == 33
    assert engine.devices[0].gathered >= 1
    for _ in range(4):
        run(engine, PROMPT)
    assert store.usage().entries == 4


def test_of_a_page_that_vllm_has_in_part_the_rest_is_loaded(make: Any) -> None:
    run(make(), PROMPT)
    planner = make().planner
    request = Request("r", PROMPT, 0)
    assert planner.match(request, 12) == (12, True)
    planner.admitted(request, [1, 2, 3, 4, 5, 6, 7], 12)
    (loads,) = planner.plan([], lambda name: []).loads.values()
    assert [(page.begin, page.blocks) for page in loads] == [(8, (None, 4)), (16, (5, 6))]
    assert planner.match(request, 24) == (0, False)


def test_drafts_and_tokens_to_come_are_not_stored(make: Any) -> None:
    planner = make().planner
    request = Request("r", PROMPT[:20], 0)
    planner.match(request, 0)
    saves = planner.plan([("r", 26)], lambda name: [*range(1, 8)]).saves
    assert [page.begin for page in saves] == [0, 8]
    request.all_token_ids += [1, 2, 3, 4, 5]
    assert [page.begin for page in planner.plan([("r", 27)], lambda name: [*range(1, 8)]).saves] == [16]


def test_a_page_that_was_postponed_is_due_again_and_one_that_failed_is_not(make: Any) -> None:
    planner = make().planner
    request = Request("r", PROMPT, 0)
    planner.match(request, 0)

    def due() -> list[int]:
        return [page.begin for page in planner.plan([("r", 30)], lambda name: [*range(1, 9)]).saves]

    keys = planner._pages.keys(request, 24)[0]
    assert due() == [0, 8, 16]
    assert due() == []
    planner.heard(Report(stored={keys[0]}, postponed={keys[1], keys[2]}))
    assert due() == [8, 16]
    planner.heard(Report(failed={keys[1], keys[2]}))
    assert due() == []
    planner.finished("r")
    planner.heard(Report(postponed={keys[1]}))


def test_what_is_not_sure_yet_is_stored_later_and_not_if_it_was_computed_in_vain(make: Any) -> None:
    planner = make().planner
    planner.match(Request("r", PROMPT, 0), 0)

    def due(computed: int, unsure: int = 0, admitted: tuple[str, ...] = ()) -> list[int]:
        step = planner.plan([("r", computed)], lambda name: [*range(1, 9)], unsure, admitted)
        return [page.begin for page in step.saves]

    assert [due(24, 2, ("r",)), due(30), due(17), due(24)] == [[], [], [0, 8], [16]]


@pytest.mark.parametrize("admitted", ["before", "at once", "in the next step"])
def test_loads_of_others_hold_up_only_requests_that_are_admitted_meanwhile(make: Any, admitted: str) -> None:
    planner = make().planner
    planner.match(Request("r", PROMPT, 0), 0)
    saved = []
    for step, computed in enumerate((8, 16, 24)):
        now = ("r",) if (admitted, step) in {("at once", 0), ("in the next step", 1)} else ()
        planned = planner.plan([("r", computed)], lambda name: [*range(1, 9)], 2 if not step else 0, now)
        saved.append([page.begin for page in planned.saves])
    assert (
        saved
        == {
            "before": [[0], [8], [16]],
            "at once": [[], [], [0, 8, 16]],
            "in the next step": [[0], [], [8, 16]],
        }[admitted]
    )


def test_windows_that_have_passed_a_block_leave_its_page_alone(make: Any) -> None:
    engine = make()
    request = Request("r", PROMPT, 0)
    engine.planner.match(request, 0)
    step = engine.planner.plan([("r", 24)], lambda name: [0, 2, 3, 4, 5, 6])
    assert [page.begin for page in step.saves] == [8, 16]
    assert not step.idle
    assert engine.planner.plan([], lambda name: []).idle


@pytest.mark.parametrize("seed", range(12))
def test_random_requests(seed: int) -> None:
    """Shared prefixes, salts, preemption, aborts, little room, stores that fail, evict and lose pages."""
    chance = random.Random(seed)
    store = FaultyStore(chance)
    sizes = {"blocks": chance.choice([14, 20, 60]), "chunk": chance.choice([3, 8, 40])}
    options = {"ranks": chance.choice([1, 1, 2]), "backlog": chance.choice([1, 200, 1 << 20])}
    first = [[chance.randrange(3) for _ in range(40)] for _ in range(2)]
    for _ in range(2):
        engine = Engine([store], wait=chance.choice([0.0, 0.0, 5.0]), **sizes, **options)
        for tier in (engine.tier, *engine.tiers):
            tier.outages._clock = Hurried()  # type: ignore[attr-defined]
        for number in range(25):
            prompt = [*chance.choice(first)[: chance.randrange(1, 36)], chance.randrange(3)]
            salt = chance.choice([None, None, "a"])
            engine.add(Request(f"{number}", prompt, chance.randrange(1, 12), cache_salt=salt))
            for _ in range(chance.randrange(4)):
                engine.step()
                for tier in engine.tiers:
                    tier.writes.flush()
            if engine.requests and chance.random() < 0.2:
                engine.finish(chance.choice(engine.requests))
            running = [one for one in engine.requests if one.state == "running"]
            if running and chance.random() < 0.2:
                engine.preempt(chance.choice(running))
        engine.run()
        assert not engine.planner._tracked
        assert len(engine.free) == sizes["blocks"] - 1
        assert all(not one._loading for one in engine.transfers)
        engine.close()
    assert store.hits > 0 or store.budget or store.rate


class Hurried:
    """A clock that runs fast, so that a store is not left alone for the whole test."""

    def __call__(self) -> float:
        return 1000 * time.monotonic()


class FaultyStore(MemoryStore):
    def __init__(self, chance: random.Random) -> None:
        super().__init__(budget=chance.choice([None, 2000]))
        self._chance = random.Random(chance.random())
        self.rate = chance.choice([0.0, 0.02, 0.2])
        self.hits = 0

    def _dice(self) -> None:
        dice = self._chance.random()
        if dice < self.rate / 3:
            raise StoreUnavailableError("injected")
        if dice < self.rate / 2:
            raise StoreFullError("injected")
        if dice < self.rate:
            raise OSError("injected")

    def put(self, key: str, parts: Any) -> bool:
        self._dice()
        return super().put(key, parts)

    def stat(self, keys: Any) -> Any:
        self._dice()
        return super().stat(keys)

    def prefix(self, keys: Any) -> int:
        self._dice()
        return super().prefix(keys)

    def view(self, key: str) -> memoryview | None:
        self._dice()
        if self._chance.random() < self.rate:
            super().delete(key)
        found = super().view(key)
        self.hits += found is not None
        return found


# Lookups.


def lookups(count: Any, clock: Any = time.monotonic, wait: float = 5.0) -> Lookups:
    return Lookups(count, Workers("lookup", 1), wait, 10.0, Counters(), clock)


def answered(one: Lookups, request: str, tokens: int, keys: list[str]) -> int:
    while (found := one.pages(request, tokens, lambda: [keys])) is None:
        time.sleep(0.001)
    return found


def test_a_slow_store_is_asked_once_and_answers_later() -> None:
    asked, answer = [], threading.Event()

    def count(keys: Any) -> int:
        asked.append(keys)
        answer.wait()
        return 2

    one = lookups(count, wait=0.0)
    assert one.pages("r", 9, lambda: [["a"]]) is None
    assert one.pages("r", 9, lambda: [["a"]]) is None
    answer.set()
    assert answered(one, "r", 9, ["a"]) == 2
    assert one.pages("r", 9, lambda: [["a"]]) == 2
    assert len(asked) == 1
    answered(one, "r", 10, ["a", "b"])  # other tokens: another question
    one.forget("r")
    answered(one, "r", 10, ["a", "b"])
    assert asked == [[["a"]], [["a", "b"]], [["a", "b"]]]


def test_no_answer_in_time_is_a_miss_until_the_request_is_another() -> None:
    hang, now = threading.Event(), [0.0]
    one = lookups(lambda keys: hang.wait() and 3, lambda: now[0], wait=0.0)
    assert one.pages("r", 9, lambda: [["a"]]) is None
    now[0] = 9.9
    assert one.pages("r", 9, lambda: [["a"]]) is None
    now[0] = 10.0
    assert one.pages("r", 9, lambda: [["a"]]) == 0
    hang.set()
    assert one.pages("r", 9, lambda: [["a"]]) == 0


@pytest.mark.parametrize("late", [False, True], ids=["forgotten", "too late"])
def test_a_store_is_not_asked_what_nobody_waits_for_any_more(late: bool) -> None:
    asked, hang, now = [], threading.Event(), [0.0]

    def count(keys: Any) -> int:
        asked.append(keys)
        return int(hang.wait())

    one, names = lookups(count, lambda: now[0], wait=0.0), ["hangs", *"abc"]
    assert [one.pages(name, 9, lambda: [["a"]]) for name in names] == [None] * 4
    now[0] = 10.0 if late else 0.0
    assert not late or [one.pages(name, 9, lambda: [["a"]]) for name in names] == [0] * 4
    for name in [] if late else names:
        one.forget(name)
    hang.set()
    answered(one, "d", 9, ["d"])
    assert asked[-1] == [["d"]]
    assert len(asked) <= 2  # the first one, where a thread had taken it


def test_a_lookup_that_raises_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    def broken(keys: Any) -> int:
        raise KeyError("what")

    workers = Workers("lookup", 1)
    assert Lookups(broken, workers, 5.0, 10.0, Counters()).pages("r", 9, lambda: [["a"]]) == 0
    workers.close()
    assert "lookup: a job failed" in caplog.text
