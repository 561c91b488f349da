"""Sessions of agents: what only one of them used can go first, or go at once; what others use stays."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ml
from kvcache import AgentSession, HostTier, InvalidRangeError, Retention, Tenant, TokenRange
from kvcache.prefix import agent_sessions
from kvcache.prefix.radix_tree import Node
from kvcache.prefix.tree_entry import TreeEntry
from kvcache.stores import FileStore, MemoryStore

from .rigs.conversing import DIVISIBLE, SOME, Chat, ConversationSetup, Rig, Talk, longest, room, some_caches

SYSTEM, ONE, TWO = list(range(10, 18)), list(range(20, 32)), list(range(40, 52))
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
@pytest.mark.parametrize("seed", range(6))
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
    books, chats, agents = Books(r), list[tuple[Chat, str, User]](), r.prefix.agent_sessions
    paths: list[tuple[str, list[int]]] = [("", SYSTEM), ("t", SYSTEM)]

    def begin() -> None:
        salt = rnd.choice(["", "", "t"])
        agent = rnd.choice([None, (salt, "a"), (salt, "b"), (salt, "c")])
        before = rnd.choice([path for owner, path in paths if owner == salt])
        cut = rnd.choice([len(before), rnd.randrange(1, len(before) + 1)])
        prompt = [*before[:cut], *(rnd.randrange(60, 64) for _ in range(rnd.randrange(1, 6)))][:28]
        name = {} if agent is None else {"session_id": agent[1]}
        ids = r.prefix.alphabet.encode(prompt, Tenant.of(salt, 0, None))
        known = r.prefix.tree.radix_tree.match(ids).length
        chat = r.begin(prompt, salt=salt, **name)
        assert chat.session.lookup is not None
        stored = chat.session.lookup.origins.get("store", 0)
        books.use(salt, agent, prompt, chat.cached - stored if stored else max(known, chat.cached))
        if agent is not None:
            books.requests[agent] = books.requests.get(agent, 0) + 1
            books.closed.discard(agent)
        if rnd.random() < 0.9:  # the others are cancelled before their first pass
            chat.prefill(rnd.choice([3, 1000]))
        chats.append((chat, salt, agent))

    def end() -> None:
        chat, salt, agent = chats.pop(rnd.randrange(len(chats)))
        if chat.done == len(chat.tokens) and rnd.random() < 0.7:
            chat.say([rnd.randrange(60, 64) for _ in range(rnd.randrange(1, 4))])
        tokens = chat.tokens[: chat.done]
        if not chat.session.stale:
            books.use(salt, agent, tokens)
        chat.close()
        if tokens:
            paths.append((salt, tokens))

    def close(agent: Agent) -> None:
        ranks = {node: node.data.rank for node, _ in books.nodes(agent[0]) if node.data}
        assert agents.close(agent[1], agent[0]) == (agent in books.requests)
        if agent not in books.requests:
            return
        books.closed.add(agent)
        for node, prefix in books.nodes(agent[0]):
            if agent in books.users.get(prefix, ()) and node.data is not None:
                if books.is_whole(agent, node, prefix):
                    assert (node.data.rank, node.data.used) == (0, 0)
                else:
                    assert node.data.rank == ranks.get(node, node.data.rank)

    def delete(agent: Agent) -> None:
        known = agent in books.requests
        gone = {prefix for prefix in books.of(agent) if books.is_own(agent, prefix)}
        before = [longest(r, path, salt=salt)[0] for salt, path in paths]
        assert agents.delete(agent[1], agent[0]) == known
        assert not {prefix for _, prefix in books.nodes(agent[0])} & gone
        for (salt, path), length in zip(paths, before, strict=True):
            if agent in [user for *_, user in chats]:
                continue  # what it has was found there, and is not given to others any more
            left = next((i for i in range(len(path)) if (salt, tuple(path[: i + 1])) in gone), len(path))
            if cache == "causal" or length <= left:  # else a snapshot before that, if there is one
                assert longest(r, path, salt=salt) == [min(length, left)]
        if r.prefix.tree.store is not None:
            for salt, tokens in gone:
                tenant = Tenant.of(salt, 0, None)
                chain = r.prefix.tree.chain(r.prefix.alphabet.encode(list(tokens), tenant))
                assert r.prefix.stores[0].stat([chain.at(len(tokens))]) == [None]
        if known:
            books.forget(agent)

    def evict() -> None:
        def of(rank: bool) -> int:
            entries = [node.data for node in r.prefix.tree.radix_tree if node.data]
            return sum(e.snapshot.nbytes for e in entries if e.snapshot and (e.rank == 0) == rank)

        first, others = of(True), of(False)
        r.prefix.evict(rnd.choice([1, 500, 2000]))
        assert of(False) == others or not of(True), "others went before what closed sessions left"
        assert first >= of(True)

    for _ in range(steps):
        agent = (rnd.choice(["", "t"]), rnd.choice("abc"))
        do = rnd.choice(["begin", "begin", "end", "end", "close", "delete", "evict", "expect", "retain"])
        if do == "begin" and len(chats) < 3:
            begin()
        elif do == "end" and chats:
            end()
        elif do == "close":
            close(agent)
        elif do == "delete" and rnd.random() < 0.5:
            delete(agent)
        elif do == "evict":
            evict()
        elif do == "expect":
            assert agents.expect(agent[1], rnd.choice([0, 5, 1e6]), agent[0]) == (
                agent in books.requests and agent not in books.closed
            )
        elif do == "retain":
            asked = Retention([TokenRange(0, None, rnd.choice([35, 60]))])
            assert agents.retain(agent[1], asked, agent[0]) == (agent in books.requests)
            books.closed.discard(agent)
        r.check_books()
        check_above(r)
        for salt in ("", "t"):
            found = {each.session_id: each for each in agents.list(salt)}
            assert {*found} == {name for owner, name in books.requests if owner == salt}
            for name, each in found.items():
                check_inspected(r, books, (salt, name), each, [user for *_, user in chats])
    while chats:
        end()
    r.prefix.close()
    assert agents.list() == ()
    r.check_empty()


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
