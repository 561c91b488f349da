"""Sessions of agents: what only one of them used can go first, or go at once; what others use stays."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import AgentSession, HostTier, InvalidRangeError, Retention, Tenant
from kvcache.prefix import agent_sessions
from kvcache.prefix.radix_tree import Node
from kvcache.prefix.tree_entry import TreeEntry
from kvcache.stores import FileStore, MemoryStore

from .rigs.conversing import (
    DIVISIBLE,
    SOME,
    Chat,
    ConversationSetup,
    Rig,
    Talk,
    asked,
    longest,
    room,
    some_caches,
)
from .rigs.stores import FlakyStore

SYSTEM = list(range(10, 18))
ONE, TWO, THREE = ([base + i for i in range(12)] for base in (20, 40, 70))
Agent = tuple[str, str]
User = Agent | None


class Books:
    """Plain sets beside a PrefixCache: who used which prefix, and who has closed its session."""

    def __init__(self, r: Rig) -> None:
        self.r = r
        self.users: dict[tuple[str, tuple[int, ...]], set[User]] = {}
        """By salt and tokens: prefixes of different tenants are never the same."""
        self.closed: set[User] = set()
        self.requests: dict[Agent, int] = {}

    def use(self, salt: str, agent: User, tokens: list[int], kept: int = 0) -> None:
        """``kept``: as many were in memory, whoever computed them."""
        prefixes = [(salt, tuple(tokens[: i + 1])) for i in range(len(tokens))]
        if agent is None:
            if self.requests:
                for prefix in prefixes:
                    if prefix in self.users:
                        self.users[prefix].add(None)
            return
        known = next((i for i, prefix in enumerate(prefixes) if prefix not in self.users), len(prefixes))
        for i, prefix in enumerate(prefixes):
            of = self.users.setdefault(prefix, set())
            of |= {agent, None} if i < kept > known else {agent}

    def of(self, agent: Agent) -> list[tuple[str, tuple[int, ...]]]:
        return [prefix for prefix, users in self.users.items() if agent in users]

    def is_own(self, agent: Agent, prefix: tuple[str, tuple[int, ...]], ended: bool = False) -> bool:
        return self.users.get(prefix, {None}) <= {agent, *(self.closed if ended else ())}

    def forget(self, agent: Agent) -> None:
        for prefix in self.of(agent):
            self.users[prefix].discard(agent)
        self.users = {prefix: users for prefix, users in self.users.items() if users - {None}}
        del self.requests[agent]
        self.closed.discard(agent)

    def nodes(self, salt: str) -> Iterator[tuple[Node[TreeEntry], tuple[str, tuple[int, ...]]]]:
        """The nodes of a tenant that hold something, and their prefixes."""
        tree = self.r.prefix.tree
        for node in tree.radix_tree:
            ids = node.prefix()
            if node.data is not None and tree.alphabet.tenant_of(ids)[0] == salt:
                yield node, (salt, tuple(tree.alphabet.decode(ids)))  # type: ignore[arg-type]

    def is_whole(self, agent: Agent, node: Node[TreeEntry], prefix: tuple[str, tuple[int, ...]]) -> bool:
        """Whether only closed sessions used all of a node: full attention is cut where that begins."""
        salt, tokens = prefix
        first = (salt, tokens[: node.begin + 1]) if self.r.prefix.tree.divisible else prefix
        return self.is_own(agent, prefix, True) and self.is_own(agent, first, True)


@pytest.mark.parametrize("cache", SOME)
@pytest.mark.parametrize("tiers", ["device", "host", "host and folder"])
@pytest.mark.parametrize("seed", range(3))
def test_random_sessions_beside_plain_sets(
    backend: ml.Backend, cache: str, tiers: str, seed: int, tmp_path: Path
) -> None:
    trace(backend, cache, tiers, seed, tmp_path, steps=60)


@pytest.mark.parametrize("cache", SOME)
def test_random_sessions_on_other_backends(other: ml.Backend, cache: str, tmp_path: Path) -> None:
    trace(other, cache, "host and folder", 7, tmp_path, steps=25)


def trace(backend: ml.Backend, cache: str, tiers: str, seed: int, folder: Path, steps: int) -> None:
    rnd = random.Random(f"{cache} {tiers} {seed}")
    given: list[Any] = [HostTier(rnd.choice([None, 6000]))] if "host" in tiers else []
    if "folder" in tiers:
        given.append(FileStore(folder, durable=False))
    r = Rig(ConversationSetup(cache), backend, rnd.choice([None, None, 8000]), given)
    one = Trace(r, rnd)
    calls = [one.begin, one.begin, one.end, one.end, one.close, one.delete, one.evict, one.expect, one.retain]
    for _ in range(steps):
        rnd.choice(calls)((rnd.choice(["", "t"]), rnd.choice("abc")))
        r.check_books()
        check_above(r)
        one.check()
    while one.chats:
        one.end(("", "a"))
    r.prefix.close()
    assert r.prefix.agent_sessions.list() == ()
    r.check_empty()


class Trace:
    """The calls of a trace; each gets an agent to do something with."""

    def __init__(self, r: Rig, rnd: random.Random) -> None:
        self.r, self.rnd, self.books, self.agents = r, rnd, Books(r), r.prefix.agent_sessions
        self.chats: list[tuple[Chat, str, User]] = []
        self.paths: list[tuple[str, list[int]]] = [("", SYSTEM), ("t", SYSTEM)]
        """What was said, by salt."""

    def words(self, most: int) -> list[int]:
        return [self.rnd.randrange(60, 64) for _ in range(self.rnd.randrange(1, most))]

    def begin(self, agent: Agent) -> None:
        """A request that leaves an earlier one somewhere, of a session or none."""
        if len(self.chats) == 3:
            return
        salt, rnd, books, r = agent[0], self.rnd, self.books, self.r
        before = rnd.choice([path for owner, path in self.paths if owner == salt])
        cut = rnd.choice([len(before), rnd.randrange(1, len(before) + 1)])
        prompt = [*before[:cut], *self.words(6)][:28]
        user = rnd.choice([agent, agent, None])
        known = r.prefix.tree.radix_tree.match(self.encoded(salt, prompt)).length
        chat = r.begin(prompt, salt=salt, session_id="" if user is None else user[1])
        assert chat.session.lookup is not None
        stored = chat.session.lookup.origins.get("store", 0)
        books.use(salt, user, prompt, chat.cached - stored if stored else max(known, chat.cached))
        if user is not None:
            books.requests[user] = books.requests.get(user, 0) + 1
            books.closed.discard(user)
        if rnd.random() < 0.9:  # the others are cancelled before their first pass
            chat.prefill(rnd.choice([3, 1000]))
        self.chats.append((chat, salt, user))

    def end(self, _: Agent) -> None:
        if not self.chats:
            return
        chat, salt, user = self.chats.pop(self.rnd.randrange(len(self.chats)))
        if chat.done == len(chat.tokens) and self.rnd.random() < 0.7:
            chat.say(self.words(4))
        tokens = chat.tokens[: chat.done]
        if not chat.session.stale:
            self.books.use(salt, user, tokens)
        chat.close()
        if tokens:
            self.paths.append((salt, tokens))

    def close(self, agent: Agent) -> None:
        books = self.books
        ranks = {node: node.data.rank for node, _ in books.nodes(agent[0]) if node.data}
        assert self.agents.close(agent[1], agent[0]) == (agent in books.requests)
        if agent not in books.requests:
            return
        books.closed.add(agent)
        for node, prefix in books.nodes(agent[0]):
            if agent in books.users.get(prefix, ()) and node.data is not None:
                if books.is_whole(agent, node, prefix):
                    assert (node.data.rank, node.data.used) == (0, 0)
                else:
                    assert node.data.rank == ranks.get(node, node.data.rank)

    def delete(self, agent: Agent) -> None:
        books, r, salt = self.books, self.r, agent[0]
        gone = {prefix for prefix in books.of(agent) if books.is_own(agent, prefix)}
        r.prefix.tree.drain()  # what is being written would be in stores alone afterwards
        before = [longest(r, path, salt=salt)[0] for salt, path in self.paths]
        assert self.agents.delete(agent[1], salt) == (agent in books.requests)
        assert not {prefix for _, prefix in books.nodes(salt)} & gone
        for (owner, path), length in zip(self.paths, before, strict=True):
            if agent in [user for *_, user in self.chats]:
                continue  # what it has was found there, and is not given to others any more
            left = next((i for i in range(len(path)) if (owner, tuple(path[: i + 1])) in gone), len(path))
            if r.setup.cache == "causal" or length <= left:  # else a snapshot before that, if there is one
                assert longest(r, path, salt=owner) == [min(length, left)]
        for _, tokens in gone if r.prefix.stores else ():
            key = r.prefix.tree.chain(self.encoded(salt, tokens)).at(len(tokens))
            assert r.prefix.stores[0].stat([key]) == [None]
        if agent in books.requests:
            books.forget(agent)

    def evict(self, _: Agent) -> None:
        first, others = self.on_device()
        self.r.prefix.evict(self.rnd.choice([1, 500, 2000]))
        first_left, others_left = self.on_device()
        assert others_left == others or not first_left, "others went before what closed sessions left"
        assert first >= first_left

    def on_device(self) -> tuple[int, int]:
        """The bytes of what is to go first, and of the rest."""
        sizes = [0, 0]
        for node in self.r.prefix.tree.radix_tree:
            if node.data is not None and node.data.snapshot is not None:
                sizes[node.data.rank > 0] += node.data.snapshot.nbytes
        return sizes[0], sizes[1]

    def expect(self, agent: Agent) -> None:
        is_open = agent in self.books.requests and agent not in self.books.closed
        assert self.agents.expect(agent[1], self.rnd.choice([0, 5, 1e6]), agent[0]) == is_open

    def retain(self, agent: Agent) -> None:
        retention = asked(self.rnd.choice([35, 60]))
        assert self.agents.retain(agent[1], retention, agent[0]) == (agent in self.books.requests)
        self.books.closed.discard(agent)

    def check(self) -> None:
        for salt in ("", "t"):
            listed = {each.session_id: each for each in self.agents.list(salt)}
            assert {*listed} == {name for owner, name in self.books.requests if owner == salt}
            for name, each in listed.items():
                check_inspected(self.r, self.books, (salt, name), each, [user for *_, user in self.chats])

    def encoded(self, salt: str, tokens: Sequence[int]) -> np.ndarray:
        return self.r.prefix.alphabet.encode(list(tokens), Tenant.of(salt, 0, None))


def check_above(r: Rig) -> None:
    """What leads to a node is kept for at least as long as the node."""
    for node in r.prefix.tree.radix_tree:
        if node.data is not None and node.parent is not None and node.parent.data is not None:
            above = node.parent.data
            assert above.rank >= node.data.rank
            assert above.rank > node.data.rank or above.used >= node.data.used


def check_inspected(r: Rig, books: Books, agent: Agent, each: AgentSession, running: list[User]) -> None:
    used = books.of(agent)
    own = [prefix for prefix in used if books.is_own(agent, prefix)]
    assert (each.tokens, each.own_tokens) == (len(used), len(own))
    assert (each.requests, each.running) == (books.requests[agent], running.count(agent))
    assert each.closed == (agent in books.closed)
    if r.setup.cache in DIVISIBLE:
        there = {
            (agent[0], prefix[1][:end])
            for node, prefix in books.nodes(agent[0])
            if node.data is not None and node.data.snapshot is not None
            for end in range(node.begin + 1, node.end + 1)
        }
        size = r.setup.token_bytes
        assert each.nbytes["device"] == size * len(there & {*used})
        assert each.own_nbytes["device"] == size * len(there & {*own})


# One by one.


@some_caches
def test_what_only_a_closed_session_used_goes_first_and_what_others_use_stays(talk: Talk, cache: str) -> None:
    r = talk(cache)
    r.keep([*SYSTEM, *ONE], session_id="one")
    r.keep([*SYSTEM, *TWO], session_id="two")
    assert r.prefix.agent_sessions.close("two")
    r.prefix.evict(1)
    assert longest(r, [*SYSTEM, *ONE]) == [20]
    assert longest(r, [*SYSTEM, *TWO])[0] < 20


def test_a_session_is_pinned_by_a_retention_and_released_by_another(talk: Talk) -> None:
    r = talk()
    agents = r.prefix.agent_sessions
    r.keep([*SYSTEM, *ONE], session_id="one")
    for tokens in (TWO, THREE):
        r.keep(tokens)
    assert agents.retain("one", asked(100))
    room(r, 20)
    assert longest(r, [*SYSTEM, *ONE], TWO, THREE) == [20, 0, 0]
    r.prefix.tree.device.budget = None
    r.keep([*SYSTEM, *THREE], retention=asked(60))
    assert agents.retain("one", Retention())
    room(r, 20)
    assert longest(r, [*SYSTEM, *ONE], [*SYSTEM, *THREE]) == [8, 20], (
        "what they share has the priority of both"
    )


@some_caches
def test_the_session_that_is_expected_last_goes_first(talk: Talk, cache: str) -> None:
    r, now = talk(cache, capacity=100), [1000.0]
    agents, prompts = r.prefix.agent_sessions, {"one": ONE, "two": TWO, "three": THREE}
    r.prefix.tree.now = lambda: now[0]
    for name, tokens in prompts.items():
        r.keep(tokens, session_id=name)
        now[0] += 1

    def first() -> str:
        node = r.prefix.tree.device.first()
        assert node is not None
        return next(name for name, tokens in prompts.items() if tokens[0] == node.prefix()[0])

    assert first() == "one"
    for name, seconds in (("one", 5), ("two", 60), ("three", 20), ("three", 20)):
        assert agents.expect(name, seconds)
    assert first() == "two", "idle for 61 of those seconds, the third one for 20"
    assert agents.expect("two", 7)
    assert first() == "three"
    assert agents.expect("three", 0)
    assert first() == "two"
    now[0] += 1
    r.keep([*TWO, 1], session_id="two")
    assert first() == "one"
    r.keep([*ONE, 1], session_id="one", next_use=60)
    assert first() == "one", "as the request said when it began"
    chat = r.chat([*ONE, 1, 2], session_id="one", next_use=60)
    assert agents.expect("one", 0), "of the request that is running"
    chat.close()
    assert first() == "three"
    for seconds in (-1, math.nan, math.inf, "soon"):
        with pytest.raises(InvalidRangeError, match="expect: seconds="):
            agents.expect("one", seconds)  # type: ignore[arg-type]
        with pytest.raises(InvalidRangeError, match="begin: next_use="):
            r.prefix.begin(ONE, next_use=seconds)  # type: ignore[arg-type]


@some_caches
def test_a_hint_makes_room_where_it_is_needed_and_host_memory_has_what_goes(talk: Talk, cache: str) -> None:
    r = talk(cache, tiers=[HostTier()])
    for name, tokens in (("one", ONE), ("two", TWO)):
        r.keep(tokens, session_id=name)
    r.prefix.agent_sessions.expect("two", 3600)
    r.prefix.evict(r.prefix.nbytes["device"] // 2)
    one, two = (r.prefix.agent_sessions.inspect(name) for name in ("one", "two"))
    assert one is not None
    assert two is not None
    assert one.nbytes["device"] > 0 == one.nbytes["host"]
    assert two.nbytes["host"] > 0 == two.nbytes["device"]
    assert longest(r, ONE, TWO) == [12, 12]


@some_caches
def test_after_a_restart_what_a_session_finds_in_a_store_is_its_own(
    talk: Talk, cache: str, tmp_path: Path
) -> None:
    first = talk(cache, tiers=[tmp_path])
    first.keep([*SYSTEM, *ONE], session_id="one")
    first.keep([*SYSTEM, *TWO], session_id="two")
    first.prefix.close()
    r = talk(cache, tiers=[tmp_path])
    agents = r.prefix.agent_sessions
    assert agents.list() == ()
    assert not agents.delete("one")
    assert r.keep([*SYSTEM, *TWO, 1], session_id="two") == 20
    assert r.keep([*SYSTEM, *ONE, 1], session_id="one") == 20
    assert agents.delete("one")
    assert longest(r, [*SYSTEM, *TWO, 1]) == [21]
    r.prefix.close()
    r = talk(cache, tiers=[tmp_path])
    assert r.peek([*SYSTEM, *TWO, 1]) == 20, "one token is left to evaluate"
    assert r.peek([*SYSTEM, *ONE, 1]) <= 8


def test_what_a_running_request_of_a_deleted_session_computes_is_not_kept(talk: Talk) -> None:
    r = talk(tiers=[MemoryStore()], options={"block_size": 4, "write_through": True})
    agents = r.prefix.agent_sessions
    chat = r.chat(ONE, session_id="one")
    other = r.chat(TWO, session_id="two")
    assert agents.delete("one")
    for each in (chat, other):
        each.say([1, 2])
        each.close()
    assert longest(r, ONE, TWO) == [0, 12]
    r.prefix.flush()
    assert r.prefix.stores[0].usage().entries == 4
    assert [each.session_id for each in agents.list()] == ["two"]


@pytest.mark.parametrize("call", ["stat", "delete"])
def test_a_store_that_does_not_delete_leaves_the_session_for_another_try(talk: Talk, call: str) -> None:
    store = FlakyStore()
    r = talk(tiers=[store])
    r.keep(ONE, session_id="one")
    r.prefix.flush()
    store.failing = frozenset({call})
    assert not r.prefix.agent_sessions.delete("one")
    assert r.prefix.agent_sessions.inspect("one") is not None
    store.failing = frozenset()
    assert r.prefix.agent_sessions.delete("one")
    assert store.usage().entries == 0


def test_the_least_recently_used_session_is_forgotten_and_what_it_used_is_nobodys_own(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_sessions, "MOST_SESSIONS", 2)
    r = talk()
    agents = r.prefix.agent_sessions
    for name, tokens in (("one", [*SYSTEM, *ONE]), ("two", TWO), ("one", [*SYSTEM, 1]), ("three", THREE)):
        r.keep(tokens, session_id=name)
    assert [each.session_id for each in agents.list()] == ["one", "three"]
    monkeypatch.setattr(agent_sessions, "MOST_TOKENS", 20)
    r.keep([*TWO, 1], session_id="four")
    (four,) = agents.list()
    assert (four.session_id, four.tokens, four.own_tokens) == ("four", 13, 1), "others used the rest"
    assert agents.delete("four")
    assert longest(r, [*TWO, 1]) == [12]


def test_a_session_is_known_by_its_salt_too_and_no_other_is_told_of(talk: Talk) -> None:
    r = talk()
    agents = r.prefix.agent_sessions
    r.keep([*SYSTEM, *ONE], session_id="one", salt="a", shared=8)
    r.keep([*SYSTEM, *ONE], session_id="one", salt="b", shared=8)
    assert agents.list() == ()
    assert agents.inspect("one") is None
    assert not any([agents.close("one"), agents.retain("one", asked(90)), agents.expect("one", 1)])
    assert agents.delete("one", "a")
    assert longest(r, [*SYSTEM, *ONE], salt="a", shared=8) == [8]
    assert longest(r, [*SYSTEM, *ONE], salt="b", shared=8) == [20]
    with pytest.raises(InvalidRangeError, match="session_id=7"):
        r.prefix.begin(ONE, session_id=7)  # type: ignore[arg-type]
    assert r.prefix.sessions == ()
