"""What users of other engines complain of, as scenarios: none of it happens over a PrefixCache."""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch, CausalCache
from kvcache.offload.tiers import HostTier
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.stores import FileStore, MemoryStore
from kvcache.testing.conversing import CACHES, DIVISIBLE, Chat, ConversationSetup, Rig
from kvcache.testing.rigs.protocol import Plan, only_protocol

SYSTEM = list(range(1000, 1020))
"""A system prompt of twenty tokens."""
every_cache = pytest.mark.parametrize("cache", list(CACHES))
whole = pytest.mark.parametrize("cache", [name for name in CACHES if name not in DIVISIBLE])


@pytest.fixture(scope="module")
def backend() -> Iterator[ml.Backend]:
    with ml.open_backend("numpy") as backend:
        yield backend


def turn(r: Rig, history: list[int], rnd: random.Random) -> int:
    """A question of three tokens and an answer of four; how many tokens were computed for it."""
    before = r.evaluated
    history += rnd.choices(range(50), k=3)
    chat = r.chat(history)
    for _ in range(4):
        token = rnd.randrange(50)
        chat.say([token])
        history.append(token)
    chat.close()
    return r.evaluated - before


@every_cache
def test_a_whole_chat_is_not_evaluated_again(backend: ml.Backend, cache: str) -> None:
    """ollama #5303."""
    r, rnd = Rig(ConversationSetup(cache, capacity=120), backend), random.Random(1)
    history = [*SYSTEM]
    computed = [turn(r, history, rnd) for _ in range(10)]
    assert computed == [27, *[7] * 9], "the question and the answer, and nothing twice"


@every_cache
def test_who_dies_loses_what_was_computed_since_it_last_wrote_through(
    backend: ml.Backend, cache: str
) -> None:
    store, rnd = MemoryStore(), random.Random(3)
    r = Rig(ConversationSetup(cache, capacity=120), backend, tiers=[store])
    history = [*SYSTEM]
    for _ in range(3):
        turn(r, history, rnd)
        kept = r.prefix.nbytes["device"]
        assert not r.prefix.write_through()
        assert r.prefix.nbytes["device"] == kept, "nothing is evicted for it"
    assert r.prefix.tree.store is not None
    r.prefix.tree.store.flush()
    written = len(history)
    turn(r, history, rnd)
    other = Rig(ConversationSetup(cache, capacity=120), backend, tiers=[store])
    assert other.keep(history) == written, "r was never closed"
    other.prefix.close()


def test_writing_through_waits_for_no_store(backend: ml.Backend) -> None:
    """One that has stopped answering: what is handed over goes as far as the backlog."""
    answers = threading.Event()

    class Slow(MemoryStore):
        def put(self, key: str, parts: Any) -> bool:
            answers.wait(60)
            return super().put(key, parts)

    r = Rig(ConversationSetup(capacity=120, options={"backlog": 6000}), backend, tiers=[Slow()])
    for first in range(4):
        r.keep(range(100 * first, 100 * first + 12))
    try:
        for _ in range(6):
            assert r.prefix.write_through(500)
        assert 0 < r.prefix.nbytes["writing"] <= 6000
    finally:
        answers.set()
    r.prefix.flush()
    assert not r.prefix.write_through(500)
    r.prefix.close()


@every_cache
def test_conversations_that_alternate_share_their_system_prompt(backend: ml.Backend, cache: str) -> None:
    setup = ConversationSetup(cache, max_sequences=2, capacity=60)
    r, rnd = Rig(setup, backend, tiers=[HostTier()]), random.Random(2)
    r.keep(SYSTEM)
    histories = [[*SYSTEM, number] for number in range(8)]
    computed = 20
    for _ in range(4):
        computed += sum(turn(r, history, rnd) for history in histories)
    assert r.evaluated == computed
    assert computed == 20 + 8 * (1 + 4 * 7), "only what nobody had computed"
    r.check_books()


@whole
def test_prefix_reuse_works_on_hybrid_and_sliding_models(backend: ml.Backend, cache: str) -> None:
    """mlx-lm #980: a prompt that diverges reuses nothing there."""
    r = Rig(ConversationSetup(cache), backend)
    r.keep([*SYSTEM, 1, 2, 3])
    first = r.keep([*SYSTEM, 4, 5, 6])
    assert first == 16, "the nearest of the snapshots taken at intervals"
    assert r.keep([*SYSTEM, 7, 8, 9]) == 20, "by now it is known where they part"


@every_cache
def test_reuse_returns_the_k_and_v_that_match_their_key(backend: ml.Backend, cache: str) -> None:
    """mlx-lm #1494. Three sessions at a time, which part, go back and go on; every row seen is judged."""
    r, rnd = Rig(ConversationSetup(cache), backend, tiers=[HostTier(4000)]), random.Random(3)
    open_: list[Chat] = []
    for step in range(60):
        if len(open_) < 3:
            open_.append(r.chat([*SYSTEM[: rnd.randrange(1, 20)], rnd.randrange(4)]))
        chat = rnd.choice(open_)
        if step % 5 == 4:
            chat.rewind(rnd.randrange(1, len(chat.tokens) + 1))
        elif len(chat.tokens) < 30:
            chat.say(rnd.choices(range(4), k=rnd.randrange(1, 4)))
        if step % 7 == 6:
            open_.pop(rnd.randrange(3)).close()
    assert r.prefix.stats.reused > 80
    r.check_books()


def test_reuse_does_not_double_peak_memory(backend: ml.Backend) -> None:
    """mlx-lm #1395."""
    heads, dim, tokens = 2, 64, 1024
    cache = CausalCache()
    cache.init(backend, ml.DType.F32, 4, tokens + 8, tokens)
    prefix, prompt = PrefixCache(cache), list(range(tokens))
    with prefix.begin(prompt) as session, backend.new_context() as ctx:
        cache.start_forward(ctx, Batch(prompt, [session.seq] * tokens))
        rows = ctx.zeros((tokens, heads, dim), ml.DType.F32)
        cache.put(ctx, rows, rows)
    content = tokens * heads * dim * 2 * 4
    assert prefix.nbytes == {"device": content}
    tracemalloc.start()
    try:
        sessions = [prefix.begin([*prompt, number]) for number in range(4)]
        for session in sessions:
            session.close()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [session.cached for session in sessions] == [tokens] * 4
    assert peak < content / 4


@every_cache
def test_no_panic_when_the_cache_is_full(backend: ml.Backend, cache: str) -> None:
    """ollama #10127, #7949: "could not find a kv cache slot"."""
    setup = ConversationSetup(cache, max_sequences=3, capacity=12, max_batch=12)
    for tiers in ((), (HostTier(),)):
        r = Rig(setup, backend, tiers=tiers)
        for number in range(12):
            r.keep([number, *range(11)])
        chats = [r.chat([100 + number, *range(11)]) for number in range(3)]
        full = cache not in ("sliding", "sliding with memory", "encoder and sliding")
        if full:
            with pytest.raises(kvcache.CacheFullError) as caught:
                chats[0].say([1])
            assert caught.value.held == {chat.seq: 12 for chat in chats}
            chats[0].session.rewind(12)
        chats[2].close()
        chats[1].say([1])
        for chat in chats:
            chat.close()
        assert r.prefix.sessions == ()
        r.check_books()


@pytest.mark.parametrize("cache", ["causal", "sliding", "wrapper"])
def test_the_first_token_waits_for_no_data_to_be_moved(backend: ml.Backend, cache: str) -> None:
    """ollama #13051: seconds of defragmentation before the first token."""
    plan = Plan()
    r = Rig(ConversationSetup(cache, max_sequences=4), only_protocol(backend, plan))
    chats = [r.chat([number, *SYSTEM]) for number in range(3)]
    for step in range(5):
        for chat in chats:
            chat.say([step])
    chats[1].close()
    plan.arm(None)
    chat = r.begin([1, *SYSTEM, 0, 1, 2, 3, 4, 5])
    assert chat.cached == 26
    assert plan.calls == []


@every_cache
def test_the_position_after_reuse_is_the_number_of_tokens_reused(backend: ml.Backend, cache: str) -> None:
    """transformers #36151."""
    r = Rig(ConversationSetup(cache), backend)
    r.keep(SYSTEM)
    chat = r.begin([*SYSTEM, 1, 2])
    session = chat.session
    assert (session.cached, session.remaining, r.cache.offset(session.seq)) == (20, [1, 2], 20)
    with backend.new_context() as ctx, pytest.raises(kvcache.InvalidBatchError):
        r.cache.start_forward(ctx, Batch([19], [session.seq]))
    chat.prefill()
    chat.say([3])


def test_memory_is_there_from_the_first_pass_on(backend: ml.Backend) -> None:
    """transformers #33270: buffers that grow."""
    r = Rig(ConversationSetup(capacity=60), backend)
    chat = r.chat(SYSTEM)
    nbytes = r.cache.nbytes
    for token in range(30):
        chat.say([token])
    others = [r.chat([*SYSTEM, number]) for number in range(2)]
    assert r.cache.nbytes == nbytes
    for other in (chat, *others):
        other.close()


@whole
def test_going_back_takes_the_state_along_or_says_how_far(backend: ml.Backend, cache: str) -> None:
    """transformers: ``crop`` is accepted, and a recurrent state stays what it was."""
    r = Rig(ConversationSetup(cache), backend)
    chat = r.chat(SYSTEM)
    chat.say([1, 2, 3, 4])
    session = chat.session
    cached = session.rewind(22)
    assert cached <= 22
    assert session.tokens == [*SYSTEM, 1, 2]
    assert session.remaining == session.tokens[cached:]
    assert r.cache.offset(session.seq) == cached
    chat.tokens, chat.done = [*SYSTEM, 1, 2], cached
    chat.prefill()
    chat.say([5, 6])
    chat.close()
    assert r.keep([*SYSTEM, 1, 2, 5, 6, 7]) == 24


@every_cache
def test_what_the_device_has_no_room_for_goes_to_host_memory_and_disk(
    backend: ml.Backend, cache: str, tmp_path: Path
) -> None:
    """transformers #28738: offloading. Each tier within its budget, and nothing computed twice."""
    setup = ConversationSetup(cache, max_sequences=1, capacity=30)
    budgets = 4000, 3000
    with FileStore(tmp_path / "store", durable=False) as store:
        r = Rig(setup, backend, budgets[0], [HostTier(budgets[1]), store])
        prompts = [[number, *SYSTEM] for number in range(6)]
        for prompt in prompts:
            r.keep(prompt)
            assert r.prefix.nbytes["device"] <= budgets[0]
            assert r.prefix.nbytes["host"] <= budgets[1]
        r.prefix.flush()
        computed = r.evaluated
        assert [r.keep([*prompt, 1]) for prompt in prompts] == [21] * 6
        assert r.evaluated == computed + 6
        assert r.prefix.stats.store > 0
        r.prefix.close()
    with FileStore(tmp_path / "store", durable=False) as again:
        other = Rig(setup, backend, None, [again])
        assert [other.peek([*prompt, 1, 2]) for prompt in prompts] == [22] * 6, "after a restart"


@pytest.mark.parametrize("cache", ["causal", "wrapper", "recurrent"])
def test_a_conversation_goes_on_on_another_backend(
    backend: ml.Backend, cache: str, tmp_path: Path, open_any: Callable
) -> None:
    setup = ConversationSetup(cache)
    history, computed = [*SYSTEM], []
    for name in ("numpy", "torch", "mlx", "numpy"):
        with open_any(name) as other, FileStore(tmp_path / "store", durable=False) as store:
            r = Rig(setup, other, tiers=[store])
            computed.append(turn(r, history, random.Random(len(history))))
            r.prefix.close()
    assert computed == [27, 7, 7, 7]


def test_a_window_that_moved_on_is_found_again_where_it_was(backend: ml.Backend) -> None:
    """Sliding caches evict what a second question about the same text needs."""
    r = Rig(ConversationSetup("sliding", capacity=200, max_batch=64), backend)
    text = list(np.random.default_rng(5).integers(0, 50, 40))
    text = [int(token) for token in text]
    chat = r.chat(text)
    for token in range(30):
        chat.say([token])
    chat.close()
    assert r.keep([*text, 60]) >= 39
    assert r.keep([*text[:-1], 61]) == 39
