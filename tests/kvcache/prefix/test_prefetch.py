"""What stores have of a prompt is read ahead by threads, in bounded memory, once for all who want it."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvcache.cache import InvalidRangeError
from kvcache.prefix.prefetch import Prefetch
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.stores import FileStore, StoreUnavailableError

from .rigs.conversing import LONG, Rig, Talk, every_cache, some_caches
from .rigs.stores import GatedStore, stored

PROMPT = [*LONG, 9]
OTHER = [*LONG, 8, 8]
THREAD = "kvcache-prefetch"


def ahead(r: Rig, prompt: Any, **whose: Any) -> Prefetch:
    """A prompt that is being read ahead."""
    found = r.prefix.prefetch(prompt, **whose)
    assert found is not None
    return found


def read(r: Rig, prompt: Any) -> Prefetch:
    """A prompt that was read ahead."""
    found = ahead(r, prompt)
    found.wait()
    return found


def gated(talk: Talk, *prompts: Any, cache: str = "causal", **whose: Any) -> tuple[Rig, GatedStore]:
    """A cache of which nothing is kept but what its store has of the prompts (LONG)."""
    store = GatedStore(stored(talk, *prompts, cache=cache, **whose))
    return talk(cache, tiers=[store]), store


def being_read(talk: Talk, cache: str = "causal") -> tuple[Rig, GatedStore, Prefetch]:
    """PROMPT, of which a first entry is being read: its store's gate is shut."""
    r, store = gated(talk, cache=cache)
    store.gate.clear()
    prefetch = ahead(r, PROMPT)
    assert store.entered.wait(60)
    return r, store, prefetch


def held(prefix: PrefixCache) -> int:
    return prefix.nbytes["ahead"]


@some_caches
def test_a_session_begins_from_what_was_read_ahead_and_asks_no_store(talk: Talk, cache: str) -> None:
    r, store = gated(talk, cache=cache)
    prefetch = read(r, PROMPT)
    assert set(store.threads) == {THREAD}
    calls, size = len(store.threads), held(r.prefix)
    assert size > 0
    chat = r.chat(PROMPT)
    assert (chat.cached, len(store.threads)) == (20, calls)
    assert held(r.prefix) == size
    prefetch.release()
    assert held(r.prefix) == 0
    assert (r.prefix.stats.store, r.prefix.stats.reused, r.prefix.stats.sessions) == (20, 20, 1)
    assert r.prefix.break_even.counts == {"unmeasured": 1}, "one look-up"
    chat.close()
    r.check_books()


@some_caches
def test_a_session_that_begins_before_all_is_read_waits_for_what_is_under_way_and_reads_the_rest(
    talk: Talk, cache: str
) -> None:
    r, store, prefetch = being_read(talk, cache)
    assert not prefetch.done
    opening = threading.Timer(0.05, store.gate.set)
    opening.start()
    assert r.keep(PROMPT) == 20
    prefetch.release()
    opening.join()
    assert len(store.read) == len(set(store.read))
    assert held(r.prefix) == 0


@some_caches
def test_prompts_that_share_entries_have_them_read_once_and_hold_them_together(
    talk: Talk, cache: str
) -> None:
    r, store = gated(talk, cache=cache)
    store.gate.clear()
    prefetches = [ahead(r, prompt) for prompt in (PROMPT, OTHER, PROMPT)]
    store.gate.set()
    for prefetch in prefetches:
        prefetch.wait()
    assert len(store.read) == len(set(store.read))
    size = held(r.prefix)
    first, second = r.chat(PROMPT), r.chat(OTHER)
    assert (first.cached, second.cached) == (20, 20)
    assert (r.prefix.stats.store, r.prefix.stats.live) == (20, 20), "placed once, and shared from there"
    assert set(store.threads) == {THREAD}
    for prefetch in prefetches[:2]:
        prefetch.release()
        assert held(r.prefix) == size
    prefetches[2].release()
    assert held(r.prefix) == 0
    first.close()
    second.close()


@some_caches
def test_what_is_read_ahead_never_takes_more_than_its_room(talk: Talk, cache: str) -> None:
    r, store = gated(talk, cache=cache)
    prefetch = read(r, PROMPT)
    limit = held(r.prefix) - 1
    prefetch.release()
    r = talk(cache, tiers=[store], read_ahead=limit)
    seen: list[int] = []
    store.look = lambda: seen.append(held(r.prefix))
    prefetch = read(r, PROMPT)
    assert seen
    assert max(seen) <= limit
    assert held(r.prefix) <= limit
    assert r.keep(PROMPT) == 20, "the rest is read when its turn comes"
    prefetch.release()
    assert held(r.prefix) == 0


def test_who_finds_no_room_waits_for_what_others_hold_and_those_behind_for_their_turn(talk: Talk) -> None:
    lines = [list(range(first, first + 20)) for first in (100, 200, 300)]
    r, store = gated(talk, *lines)
    prefetch = read(r, [*lines[0], 9])
    limit = held(r.prefix)
    prefetch.release()
    r = talk(tiers=[store], read_ahead=limit)
    first = read(r, [*lines[0], 9])
    second, third, unknown = (ahead(r, [*line, 9]) for line in (lines[1], lines[2], [7] * 9))
    unknown.wait()
    assert not second.done, "a look-up waits for nobody's pages"
    assert not third.done
    first.release()
    second.wait()
    assert not third.done
    assert r.keep([*lines[1], 9]) == 20
    assert set(store.threads) == {THREAD}
    second.release()
    third.wait()
    assert r.keep([*lines[2], 9]) == 20
    for prefetch in (third, unknown):
        prefetch.release()
    assert held(r.prefix) == 0


def test_what_is_let_go_of_while_it_is_read_is_not_kept(talk: Talk) -> None:
    r, store, prefetch = being_read(talk)
    prefetch.release()
    store.gate.set()
    prefetch.wait()
    assert held(r.prefix) == 0
    assert len(store.read) < 5, "nothing more was begun"
    assert r.keep(PROMPT) == 20


@some_caches
@pytest.mark.parametrize("error", [StoreUnavailableError("gone"), OSError("odd")])
def test_an_entry_that_cannot_be_read_is_a_miss(talk: Talk, cache: str, error: Exception) -> None:
    r, store = gated(talk, cache=cache)
    store.broken, store.error = lambda key: True, error
    prefetch = read(r, PROMPT)
    assert r.prefix.store_errors["read"] > 0
    assert r.keep(PROMPT) == 0
    prefetch.release()
    assert held(r.prefix) == 0


def test_what_lies_before_an_entry_that_is_damaged_is_used_and_the_rest_is_computed(talk: Talk) -> None:
    kept = stored(talk)
    r = talk(tiers=[kept])
    key = r.prefix.tree.keys.chain(LONG).at(12)
    (stat,) = kept.stat([key])
    assert stat is not None
    kept.delete(key)
    kept.put(key, [bytes(stat.nbytes)])
    store = GatedStore(kept)
    r = talk(tiers=[store])
    prefetch = read(r, PROMPT)
    assert r.prefix.store_errors["corrupt"] == 1
    assert r.keep(PROMPT) == 8
    prefetch.release()
    assert (r.prefix.store_errors["corrupt"], held(r.prefix)) == (1, 0)


def test_where_the_system_has_no_thread_a_session_reads_when_its_turn_comes(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    r, store = gated(talk)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("told to fail")))
        prefetch = ahead(r, PROMPT)
        prefetch.wait()
    assert r.keep(PROMPT) == 20
    prefetch.release()
    ahead(r, OTHER).wait()
    assert THREAD in store.threads
    r.prefix.close()


def test_pages_of_one_tenant_are_not_those_of_another(talk: Talk) -> None:
    r, store = gated(talk, LONG, salt="a")
    prefetch = ahead(r, PROMPT, salt="a")
    stranger = ahead(r, PROMPT, salt="b")
    for each in (prefetch, stranger):
        each.wait()
    calls = len(store.threads)
    assert r.keep(PROMPT, salt="b") == 0
    assert len(store.threads) == calls, "both were looked up ahead"
    stranger.release()
    assert r.keep(PROMPT, salt="a") == 20
    prefetch.release()


def test_what_the_tree_has_lost_meanwhile_is_asked_for_again(talk: Talk) -> None:
    r, _ = gated(talk)
    assert r.keep(LONG[:9]) == 8
    prefetch = read(r, PROMPT)
    assert prefetch.floor == 9
    r.prefix.clear()
    assert r.keep(PROMPT) == 20
    prefetch.release()


@some_caches
@pytest.mark.parametrize("when", ["looked up", "being read", "read"])
def test_what_was_read_ahead_is_forgotten_with_all_else(talk: Talk, cache: str, when: str) -> None:
    """By ``clear``, as where the weights have changed and the store is emptied."""
    if when == "being read":
        r, store, prefetch = being_read(talk, cache)
    else:
        r, store = gated(talk, cache=cache)
        prefetch = ahead(r, PROMPT)
    if when == "read":
        prefetch.wait()
        assert held(r.prefix) > 0
    r.prefix.clear()
    for key in list(store.store._entries):
        store.delete(key)
    again = ahead(r, PROMPT)
    store.gate.set()
    again.wait()
    prefetch.wait()
    assert r.peek(PROMPT) == 0
    prefetch.release()
    assert r.peek(PROMPT) == 0
    again.release()
    assert held(r.prefix) == 0
    r.prefix.close()


def test_what_was_let_go_of_by_clear_is_not_let_go_of_again(talk: Talk) -> None:
    r, store = gated(talk)
    old = read(r, PROMPT)
    r.prefix.clear()
    new = read(r, PROMPT)
    size, calls = held(r.prefix), len(store.threads)
    old.release()
    assert held(r.prefix) == size > 0
    assert r.keep(PROMPT) == 20
    assert len(store.threads) == calls
    new.release()
    assert held(r.prefix) == 0


def test_a_cache_that_is_closed_waits_for_what_is_being_read(talk: Talk) -> None:
    r, store, prefetch = being_read(talk)
    opening = threading.Timer(0.05, store.gate.set)
    opening.start()
    r.prefix.close()
    opening.join()
    calls = len(store.threads)
    prefetch.release()
    assert prefetch.done
    assert len(store.threads) == calls
    assert not [each for each in threading.enumerate() if each.name == THREAD]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice about files")
@some_caches
def test_of_a_folder_the_system_reads_what_is_asked_for_next(
    talk: Talk, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(tmp_path) as store:
        advised: list[tuple[str, int]] = []
        r = talk(cache, tiers=[store])
        advise = os.posix_fadvise

        def noted(fd: int, offset: int, size: int, what: int) -> None:
            assert (offset, size, what) == (0, 0, os.POSIX_FADV_WILLNEED)
            advised.append((threading.current_thread().name, os.fstat(fd).st_ino))
            advise(fd, offset, size, what)

        stored(talk, cache=cache, store=store)
        monkeypatch.setattr(os, "posix_fadvise", noted)
        prefetch = read(r, PROMPT)
        assert {name for name, _ in advised} == {THREAD}
        assert {inode for _, inode in advised} <= {path.stat().st_ino for path in tmp_path.rglob("*")}
        assert len(advised) == (5 if r.prefix.tree.divisible else 1), "all blocks, or the last entry"
        assert held(r.prefix) == 0
        looked = r.prefix.break_even.counts.total()
        assert r.keep(PROMPT) == 20
        assert r.prefix.break_even.counts.total() == looked, "one look-up"
        prefetch.release()
        r.prefix.close()


def test_there_is_nothing_to_read_ahead_without_a_store_that_is_far(talk: Talk) -> None:
    kept = stored(talk)
    assert talk().prefix.prefetch(PROMPT) is None
    assert talk(tiers=[kept]).prefix.prefetch(PROMPT) is None, "its bytes come straight into the cache"
    assert talk(tiers=[GatedStore(kept)], read_ahead=0).prefix.prefetch(PROMPT) is None
    r = talk(tiers=[GatedStore(kept)])
    r.keep(PROMPT)
    assert r.prefix.prefetch(PROMPT) is None, "all of it is here"
    assert r.prefix.prefetch([]) is None
    with pytest.raises(InvalidRangeError, match="read_ahead=-1"):
        talk(tiers=[kept], read_ahead=-1)


@every_cache
def test_whatever_is_read_ahead_every_session_begins_as_it_would_without(talk: Talk, cache: str) -> None:
    """Conversations that part anywhere, begun in any order, with room for all pages or few of them."""
    rnd = random.Random(cache)
    prompts = [
        [*LONG[: rnd.randrange(1, 20)], *rnd.choices(range(40, 60), k=rnd.randrange(1, 9))] for _ in range(9)
    ]
    kept = stored(talk, *prompts, cache=cache)
    asked = [[*prompt, rnd.randrange(60, 70)] for prompt in rnd.choices(prompts, k=6)]
    plain = talk(cache, tiers=[GatedStore(kept)])
    expected = [plain.peek(prompt) for prompt in asked]
    plain.prefix.close(flush=False)
    r = talk(cache, tiers=[GatedStore(kept)], read_ahead=rnd.choice([1000, 4000, 1 << 20]))
    waiting = [(prompt, r.prefix.prefetch(prompt)) for prompt in asked]
    found = []
    for prompt, prefetch in waiting:
        if prefetch is not None and rnd.random() < 0.3:
            prefetch.release()
            prefetch = None
        found.append(r.peek(prompt))
        if prefetch is not None:
            prefetch.release()
    assert found == expected
    for _, prefetch in waiting:
        if prefetch is not None:
            prefetch.wait()  # what was being read as it was let go of goes when it is there
    assert held(r.prefix) == 0
    r.check_books()
