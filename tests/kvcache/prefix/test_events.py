"""A router that only follows events knows which prefixes are in which tier."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvcache import HostTier
from kvcache.prefix.alphabet import Tenant
from kvcache.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, encode
from kvcache.prefix.prefix_tree import PrefixTree
from kvcache.prefix.tree_entry import TreeEntry
from kvcache.snapshots.snapshot import SnapshotChain
from kvcache.stores import MemoryStore

from .rigs.conversing import CACHES, DIVISIBLE, LONG, WHOLE, WINDOW, Rig, Talk
from .rigs.stores import stored

SIZE = 4
SALTS = ("", "a", "b")


class Router:
    """What a router knows: by medium, hashes; by hash, the one before and its tokens."""

    def __init__(self) -> None:
        self.media: dict[str, set[bytes]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        self.parents: dict[bytes, bytes | None] = {}
        self.batches: list[EventBatch] = []

    def __call__(self, batch: EventBatch) -> None:
        self.batches.append(batch)
        for event in batch.events:
            if isinstance(event, BlockStored):
                assert event.medium is not None
                parent = event.parent_block_hash
                assert len(event.token_ids) in (0, len(event.block_hashes) * event.block_size)
                if event.medium != "STORAGE":  # where what has left is told again when it is read
                    assert self.media[event.medium].isdisjoint(event.block_hashes)
                for key in event.block_hashes:
                    assert self.parents.setdefault(key, parent) == parent
                    self.media[event.medium].add(key)
                    parent = key
            elif isinstance(event, BlockRemoved):
                assert event.medium is not None
                if event.medium != "STORAGE":
                    assert self.media[event.medium].issuperset(event.block_hashes)
                self.media[event.medium].difference_update(event.block_hashes)
            else:
                for hashes in self.media.values():
                    hashes.clear()


def held(tree: PrefixTree) -> dict[str, set[bytes]]:
    """By medium, the blocks that a walk over the whole tree finds, token by token."""
    found: dict[str, set[bytes]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
    for node in tree.radix_tree:
        path = node.path()
        where = [media(part.data) for part in path for _ in part.tokens]
        keys = tree.keys.chain(tree.alphabet.named(node.prefix())).aligned
        for i, key in enumerate(keys):
            block = where[i * SIZE : (i + 1) * SIZE]
            there = set(frozenset.intersection(*block))
            if "GPU" not in there and all(part & {"GPU", "CPU"} for part in block):
                there.add("CPU")
            for medium in there:
                found[medium].add(bytes.fromhex(key))
    return found


def blocks_of(r: Rig, router: Router, tokens: Sequence[int], **whose: Any) -> tuple[int, int]:
    """How many leading blocks ``begin`` finds, but for open sessions and stores, and a router knows of."""
    tree, ids = r.prefix.tree, r.prefix.alphabet.encode(list(tokens), Tenant(**whose))
    keys = [bytes.fromhex(key) for key in tree.keys.chain(r.prefix.alphabet.named(ids)).aligned]
    near = router.media["GPU"] | router.media["CPU"]
    known = next((i for i, key in enumerate(keys) if key not in near), len(keys))
    return tree.along(tree.walk(ids))[0] // SIZE, known


def media(kept: TreeEntry | None) -> frozenset[str]:
    if kept is None:
        return frozenset()
    host = kept.serialized is not None or kept.leaving is not None
    host |= kept.store_write is not None and kept.snapshot is None
    found = {"GPU": kept.snapshot is not None, "CPU": host, "STORAGE": kept.stored}
    return frozenset(name for name, there in found.items() if there)


def known(r: Rig) -> Router:
    router = Router()
    r.prefix.publish_events(router)
    return router


Asked = list[tuple[list[int], dict[str, Any]]]
"""Prompts, and whose they are."""


def changes(r: Rig, rnd: random.Random, steps: int, most: int) -> Iterator[Asked]:
    """Conversations of up to ``most`` tokens of their own, and evictions; after each step: what was asked."""
    chats: list[Any] = []
    asked: Asked = []
    for step in range(steps):
        roll = rnd.random()
        if roll < 0.5 and len(chats) < 3:
            first = rnd.choice(([1, 2, 3, 4, 5, 6], [1, 2, 3, 9]))
            tokens = first + rnd.choices((6, 7), k=rnd.randint(1, most))
            asked.append((tokens, {"salt": rnd.choice(SALTS), "shared": rnd.choice((0, 3))}))
            chats.append(r.chat(tokens, **asked[-1][1]))
        elif roll < 0.85 and chats:
            chats.pop(rnd.randrange(len(chats))).close(keep=rnd.random() < 0.9)
        elif roll < 0.92:
            r.prefix.evict(rnd.choice((None, 500)))
        elif roll < 0.97:
            r.prefix.flush()
        elif step % 5 == 0:
            r.prefix.clear()
        r.prefix.flush() if rnd.random() < 0.1 else r.prefix.tree.settle()
        yield asked


TIERS = ("none", "host", "store", "both")


@pytest.mark.parametrize(
    ("cache", "tiers"),
    [(cache, TIERS[(i + step) % 4]) for i, cache in enumerate(DIVISIBLE) for step in (0, 2)],
)
def test_a_router_that_follows_events_knows_every_tier(talk: Talk, cache: str, tiers: str) -> None:
    store = MemoryStore()
    places = {"none": [], "host": [HostTier(3000)], "store": [store], "both": [HostTier(3000), store]}
    r, rnd = talk(cache, 6000, places[tiers]), random.Random(cache + tiers)
    router = known(r)
    moved: set[str] = set()
    for asked in changes(r, rnd, 60, most=9):
        truth = held(r.prefix.tree)
        assert {name: router.media[name] for name in ("GPU", "CPU")} == {
            name: truth[name] for name in ("GPU", "CPU")
        }
        for tokens, whose in asked:
            found, told = blocks_of(r, router, tokens, **whose)
            assert found == told
        assert truth["STORAGE"] <= router.media["STORAGE"]
        assert all(store.stat([key.hex()])[0] is not None for key in router.media["STORAGE"])
        moved |= {name for name, keys in router.media.items() if keys}
    expected = {"none": {"GPU"}, "host": {"GPU", "CPU"}}.get(tiers, {"GPU", "STORAGE"})
    assert moved >= expected
    r.prefix.close()


def test_a_block_in_two_tiers_is_told_in_the_lower_and_a_stored_one_once(talk: Talk) -> None:
    store = MemoryStore()
    r = talk(tiers=[HostTier(1 << 20), store])
    router = known(r)
    r.keep(LONG[:12])
    r.prefix.flush()
    r.keep([*LONG[:6], 90])  # parts the edge inside the second block
    r.keep(LONG[:12])
    r.prefix.evict(6 * r.setup.token_bytes)
    assert len({node.data.tier for node in r.prefix.tree.radix_tree}) == 2
    assert blocks_of(r, router, LONG[:12]) == (3, 3)
    r.prefix.flush()
    told = [
        key
        for batch in router.batches
        for event in batch.events
        if isinstance(event, BlockStored) and event.medium == "STORAGE"
        for key in event.block_hashes
    ]
    assert len(told) == len(set(told)) == 3
    r.prefix.close()


def test_a_prefix_is_stored_moves_and_is_removed(talk: Talk) -> None:
    r = talk(tiers=[HostTier(1 << 20)])
    router = known(r)
    r.keep(LONG)
    (stored,) = router.batches[-1].events
    keys = [bytes.fromhex(key) for key in r.prefix.tree.keys.chain(LONG).aligned]
    assert stored == BlockStored(keys, None, LONG, SIZE, medium="GPU")
    r.prefix.evict()
    moved = [event for batch in router.batches[1:] for event in batch.events]
    assert BlockStored(keys, None, LONG, SIZE, medium="CPU") in moved
    assert BlockRemoved(sorted(keys), "GPU") in moved
    r.prefix.clear()
    assert router.batches[-1].events == [AllBlocksCleared()]


def test_what_a_pass_evicts_is_told_before_the_next_pass(talk: Talk) -> None:
    """Not when a conversation next begins or ends: while all are busy, that can be long after."""
    r = talk()
    router = known(r)
    r.keep(LONG)
    capacity = r.setup.capacity
    chats = [r.begin(range(100 * n, 100 * n + capacity)) for n in range(1, 1 + r.setup.max_sequences)]
    for chat in chats:
        r.start_only(chat.seq, 0, capacity)
        assert router.media["GPU"] == held(r.prefix.tree)["GPU"]
    assert router.media["GPU"] == set()


def test_who_listens_before_or_while_a_prefix_is_written_is_told_the_same(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, gate = MemoryStore(), threading.Event()
    put = store.put
    monkeypatch.setattr(store, "put", lambda key, parts: gate.wait() and put(key, parts))
    r = talk(tiers=[store])
    before = known(r)
    r.keep(LONG)
    r.prefix.write_through()
    r.prefix.tree.settle()
    while_written = known(r)
    assert before.media == while_written.media == held(r.prefix.tree)
    assert {name for name, keys in before.media.items() if keys} == {"GPU"}
    r.prefix.evict()
    assert {name for name, keys in while_written.media.items() if keys} == {"CPU"}
    gate.set()
    r.prefix.close()


def test_what_follows_a_prefix_names_the_block_before_it(talk: Talk) -> None:
    r = talk()
    router = known(r)
    r.keep(LONG[:9])
    r.keep(LONG)
    keys = [bytes.fromhex(key) for key in r.prefix.tree.keys.chain(LONG).aligned]
    (stored,) = router.batches[-1].events
    assert stored == BlockStored(keys[2:], keys[1], LONG[8:], SIZE, medium="GPU")


def test_who_listens_later_is_told_what_is_kept_and_who_left_nothing(talk: Talk) -> None:
    r = talk()
    r.keep(LONG)
    router = known(r)
    assert router.media["GPU"] == held(r.prefix.tree)["GPU"] != set()
    r.prefix.publish_events(None)
    r.prefix.clear()
    assert len(router.batches) == 1


@pytest.mark.parametrize(
    ("token_ids", "private"), [(True, False), (True, True), (False, True), (False, False)]
)
def test_a_tenants_tokens_and_salt_are_told_only_where_asked(
    talk: Talk, token_ids: bool, private: bool
) -> None:
    r = talk()
    router = Router()
    r.prefix.publish_events(router, token_ids=token_ids, private=private)
    r.keep(LONG, salt="secret", shared=8)
    shared, own = router.batches[-1].events
    assert isinstance(shared, BlockStored)
    assert isinstance(own, BlockStored)
    assert (shared.token_ids, shared.extra_keys) == (LONG[:8] if token_ids else [], None)
    assert own.parent_block_hash == shared.block_hashes[-1]
    assert own.token_ids == (LONG[8:] if token_ids and private else [])
    assert own.extra_keys == ([("secret",)] * 3 if private else None)
    assert ("secret" in repr(router.batches)) == private


def test_an_entry_that_a_store_drops_is_removed(talk: Talk) -> None:
    store = stored(talk)
    second = talk(tiers=[store])
    key = second.prefix.tree.keys.chain(LONG).aligned[1]
    store.delete(key)
    store.put(key, [b"not a snapshot"])
    router = known(second)
    second.keep(LONG)
    removed = [e for batch in router.batches for e in batch.events if isinstance(e, BlockRemoved)]
    assert BlockRemoved([bytes.fromhex(key)], "STORAGE") in removed
    second.prefix.close()


def test_a_subscriber_that_fails_loses_a_batch_and_nothing_else(
    talk: Talk, caplog: pytest.LogCaptureFixture
) -> None:
    r = talk()
    r.prefix.publish_events(Mock(side_effect=OSError("no")))
    r.keep(LONG)
    assert "was not published" in caplog.text
    assert r.keep(LONG) == len(LONG) - 1


class HybridRouter:
    """What a router knows of each group, and how far it takes a prompt to be there, as vLLM looks it up."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, str], set[bytes]] = defaultdict(set)
        self.groups: dict[int, tuple[str, int | None]] = {}
        self.parents: dict[bytes, bytes | None] = {}

    def __call__(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                continue
            assert event.group_idx is not None
            assert event.medium is not None
            known = self.blocks[event.group_idx, event.medium]
            if isinstance(event, BlockRemoved):
                assert known.issuperset(event.block_hashes)
                known.difference_update(event.block_hashes)
                continue
            assert known.isdisjoint(event.block_hashes)
            known.update(event.block_hashes)
            assert event.kv_cache_spec_kind is not None
            described = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
            assert self.groups.setdefault(event.group_idx, described) == described
            parent = event.parent_block_hash
            for key in event.block_hashes:
                assert self.parents.setdefault(key, parent) == parent
                parent = key

    def hit(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks can be had in every group."""
        near = {i: self.blocks[i, "GPU"] | self.blocks[i, "CPU"] for i in self.groups}
        reached = [k for k in range(len(keys) + 1) if all(self._has(i, near[i], keys[:k]) for i in near)]
        return reached[-1]

    def _has(self, group: int, near: set[bytes], keys: Sequence[bytes]) -> bool:
        kind, window = self.groups[group]
        count = {"mamba": 1, "sliding_window": -(-((window or 1) - 1) // SIZE)}.get(kind, len(keys))
        return near.issuperset(keys[max(0, len(keys) - count) :])


def held_by_groups(r: Rig) -> dict[tuple[int, str], set[bytes]]:
    """By group and medium, the blocks in which a position lies that resuming at a snapshot needs."""
    found: dict[tuple[int, str], set[bytes]] = defaultdict(set)
    for node in r.prefix.tree.radix_tree:
        keys = r.prefix.tree.keys.chain(r.prefix.alphabet.named(node.prefix())).aligned
        snapshot = None if node.data is None else node.data.snapshot
        chained = snapshot.parts if isinstance(snapshot, SnapshotChain) else ()
        spans = [(part.begin, part.end) for part in chained] or [(getattr(node.data, "begin", 0), node.end)]
        for begin, end in spans:
            reached, lows = end // SIZE * SIZE, []
            for part in CACHES[r.setup.cache][1]:
                lows.append(begin if part.lower(reached) == part.lower(99) == 0 else part.lower(reached))
                lows += [max(0, reached - 1)] if part.states else []
            for group, low in enumerate(lows):
                for medium in media(node.data):
                    blocks = range(low // SIZE, reached // SIZE)
                    found[group, medium].update(bytes.fromhex(keys[i]) for i in blocks)
    return found


@pytest.mark.parametrize("cache", WHOLE)
@pytest.mark.parametrize("tiers", ["host", "both"])
def test_of_windows_and_states_a_router_knows_where_they_resume(talk: Talk, cache: str, tiers: str) -> None:
    store = MemoryStore()
    places = {"host": [HostTier(3000)], "both": [HostTier(3000), store]}
    r, rnd, router = talk(cache, 6000, places[tiers]), random.Random(cache + tiers), HybridRouter()
    r.prefix.publish_events(router)
    hits = 0
    for asked in changes(r, rnd, 50, most=19):
        truth = held_by_groups(r)
        for (group, medium), keys in truth.items():
            known = router.blocks[group, medium]
            assert known >= keys if medium == "STORAGE" else known == keys
        for tokens, whose in asked:
            tree, ids = r.prefix.tree, r.prefix.alphabet.encode(list(tokens), Tenant(**whose))
            named = tree.keys.chain(r.prefix.alphabet.named(ids)).aligned
            found = tree.along(tree.walk(ids))[0] // SIZE
            hits += found > 0
            assert found <= router.hit([bytes.fromhex(key) for key in named])
    assert hits > 10
    everyone = known_groups(r)
    assert all(everyone[place] <= router.blocks[place] for place in everyone)
    r.prefix.close()


def known_groups(r: Rig) -> dict[tuple[int, str], set[bytes]]:
    """What a router that listens from now on is told."""
    router = HybridRouter()
    r.prefix.publish_events(router)
    return router.blocks


def test_each_group_is_described_and_a_conversation_is_found_whole(talk: Talk) -> None:
    r, router = talk("recurrent and sliding"), HybridRouter()
    r.prefix.publish_events(router)
    r.keep(LONG)
    keys = [bytes.fromhex(key) for key in r.prefix.tree.keys.chain(LONG).aligned]
    assert router.groups == {
        0: ("full_attention", None),
        1: ("mamba", None),
        2: ("sliding_window", WINDOW + 1),
    }
    assert {group: router.blocks[group, "GPU"] for group in router.groups} == {
        0: set(keys),
        1: {keys[1], keys[3], keys[4]},
        2: {keys[1], keys[3], keys[4]},
    }
    assert [router.hit(keys[:count]) for count in range(6)] == [0, 0, 2, 2, 4, 5]


def test_what_a_store_drops_of_windows_and_states_is_removed(talk: Talk) -> None:
    store = MemoryStore()
    r, batches = talk("recurrent", tiers=[store]), list[EventBatch]()
    r.prefix.publish_events(batches.append)
    r.keep(LONG)
    r.prefix.evict()
    r.prefix.flush()
    keys = r.prefix.tree.keys.chain(LONG)
    block = bytes.fromhex(keys.at(16))  # where the snapshots at 16 and at 19 are resumed

    def told_of(block: bytes) -> list[type]:
        events = [event for batch in batches for event in batch.events]
        of_states = [event for event in events if (event.group_idx, event.medium) == (1, "STORAGE")]
        return [type(event) for event in of_states if block in event.block_hashes]

    def damage(end: int) -> None:
        store.delete(keys.at(end))
        store.put(keys.at(end), [b"not a snapshot"])

    damage(19)
    assert r.peek(LONG) == 16
    assert told_of(block) == [BlockStored]
    r.prefix.evict()
    damage(16)
    assert r.peek(LONG) == 8
    assert told_of(block) == [BlockStored, BlockRemoved]
    r.prefix.close()


# As vLLM decodes them: vllm/distributed/kv_events.py of 0.32.


@pytest.fixture
def decode() -> Callable[[bytes], Any]:
    msgspec = pytest.importorskip("msgspec", reason="pip install 'ml-kvcache[events]'")

    def event(name: str, fields: Sequence[Any]) -> Any:
        return msgspec.defstruct(name, fields, omit_defaults=True, gc=False, tag=True)

    stored = event(
        "BlockStored",
        [
            ("block_hashes", list[bytes]), ("parent_block_hash", bytes | None), ("token_ids", list[int]),
            ("block_size", int), ("lora_id", int | None), ("medium", str | None), ("lora_name", str | None),
            ("extra_keys", list[tuple[Any, ...] | None] | None, None), ("group_idx", int | None, None),
            ("kv_cache_spec_kind", str | None, None), ("kv_cache_spec_sliding_window", int | None, None),
            ("locality", str | None, None), ("ownership", str | None, None), ("session_id", str | None, None),
        ],
    )  # fmt: skip
    removed = event(
        "BlockRemoved",
        [("block_hashes", list[bytes]), ("medium", str | None), ("group_idx", int | None, None)],
    )
    cleared = event("AllBlocksCleared", [])
    fields = [
        ("ts", float), ("events", list[stored | removed | cleared]), ("data_parallel_rank", int | None, None)
    ]  # fmt: skip
    batch = msgspec.defstruct("KVEventBatch", fields, array_like=True, omit_defaults=True, gc=False)
    return msgspec.msgpack.Decoder(batch).decode


def test_vllms_structures_decode_every_event(talk: Talk, decode: Callable[[bytes], Any]) -> None:
    import msgspec

    r = talk(tiers=[HostTier(1 << 20)])
    router = Router()
    r.prefix.publish_events(router, private=True)
    r.keep(LONG, salt="a")
    r.prefix.evict()
    r.prefix.clear()
    for batch in router.batches:
        found = decode(msgspec.msgpack.encode(encode(batch)))
        assert found.ts == batch.ts
        assert [type(event).__name__ for event in found.events] == [type(e).__name__ for e in batch.events]
        for event, told in zip(found.events, batch.events, strict=True):
            for name in getattr(told, "__slots__", ()):
                assert getattr(event, name) == getattr(told, name)


@pytest.fixture
def addresses(tmp_path: Path) -> tuple[str, str]:
    pytest.importorskip("zmq", reason="pip install 'ml-kvcache[events]'")
    pytest.importorskip("msgspec", reason="pip install 'ml-kvcache[events]'")
    return f"inproc://{tmp_path.name}-pub", f"inproc://{tmp_path.name}-replay"


def test_over_zmq_a_subscriber_gets_topic_number_and_batch_and_replays_what_it_missed(
    talk: Talk, addresses: tuple[str, str], decode: Callable[[bytes], Any]
) -> None:
    import zmq

    from kvcache.prefix.zmq_publisher import ZmqPublisher

    r = talk()
    context = zmq.Context.instance()
    with ZmqPublisher(*addresses, topic="kv") as publisher, context.socket(zmq.SUB) as sub:
        sub.connect(addresses[0])
        sub.subscribe("kv")
        sub.rcvtimeo = 20000
        r.prefix.publish_events(publisher)
        for prompt in (LONG, [*LONG[:8], 1, 2, 3, 4]):
            r.keep(prompt)
        replayed = replay(context, addresses[1], 0)
        while len(replayed) < 2:  # the thread that sends may not have come to both
            replayed = replay(context, addresses[1], 0)
        assert [number for number, _ in replayed] == [0, 1]
        assert replay(context, addresses[1], 1) == replayed[1:]
        assert len(decode(replayed[0][1]).events[0].block_hashes) == len(LONG) // SIZE
        topic, number, payload = sub.recv_multipart()
        assert (topic, int.from_bytes(number, "big")) == (b"kv", 0)
        assert payload == replayed[0][1]
    assert publisher.lost == 0


def test_over_zmq_a_replay_is_whole_for_who_reads_it_late(addresses: tuple[str, str]) -> None:
    """Of more messages than ZeroMQ queues by default."""
    import zmq

    from kvcache.prefix.zmq_publisher import ZmqPublisher

    context, count = zmq.Context.instance(), 3000
    with (
        ZmqPublisher(*addresses) as publisher,
        context.socket(zmq.SUB) as sub,
        context.socket(zmq.DEALER) as asking,
    ):
        sub.rcvhwm, sub.rcvtimeo, asking.rcvtimeo = 0, 20000, 20000
        sub.connect(addresses[0])
        sub.subscribe("")
        asking.connect(addresses[1])

        def publish(batches: int) -> None:
            for _ in range(batches):
                publisher(EventBatch(0.0, []))
            for _ in range(batches):
                sub.recv_multipart()

        publish(count)
        asking.send_multipart((b"", bytes(8)))
        publish(2)  # between the two it has answered
        assert [number for number, _ in answered(asking)][:count] == [*range(count)]


def replay(context: Any, address: str, start: int) -> list[tuple[int, bytes]]:
    import zmq

    with context.socket(zmq.DEALER) as asking:  # a REQ socket takes one answer alone
        asking.connect(address)
        asking.rcvtimeo = 20000
        asking.send_multipart((b"", start.to_bytes(8, "big")))
        return answered(asking)


def answered(asking: Any) -> list[tuple[int, bytes]]:
    """What comes of a replay until its end."""
    found = []
    while True:
        _, number, payload = asking.recv_multipart()
        if not payload:
            assert int.from_bytes(number, "big", signed=True) == -1
            return found
        found.append((int.from_bytes(number, "big"), payload))
