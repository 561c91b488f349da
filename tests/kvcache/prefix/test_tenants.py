"""What one tenant computed is found by nobody else: in the cache, in tiers, in stores, or by any figure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from kvcache import HostTier, InvalidRangeError
from kvcache.prefix import alphabet
from kvcache.prefix.alphabet import Tenant
from kvcache.prefix.eviction_queue import TenantBudget
from kvcache.stores import MemoryStore, compose

from .models.digests import shared as common
from .rigs.conversing import LONG, Talk, some_caches
from .rigs.stores import FlakyStore, stored

Whose = dict[str, Any]


def visible(tokens: Sequence[int], whose: Whose, other: Sequence[int], others: Whose) -> int:
    """How many tokens a conversation may have from another one."""
    agreed = common(tokens, other)
    if repr(whose.get("variant")) != repr(others.get("variant")):  # True == 1
        return 0
    if whose == others:
        return agreed
    own = [tenant.get("shared", 0) for tenant in (whose, others) if tenant.get("salt")]
    return min([agreed, *own])


@pytest.mark.parametrize(
    ("count", "tiers"), [(200, [HostTier(64 << 20)]), (120, [MemoryStore()])], ids=["host", "store"]
)
def test_each_request_finds_what_its_tenant_may_see_and_no_more(
    talk: Talk, count: int, tiers: list[Any]
) -> None:
    """Three tenants and none, with system prompts that all may share or not, whose requests often agree.

    Some are computed by an adapter, with a name that is a salt of others.
    """
    r, rnd = talk(tiers=tiers, capacity=160, options={"block_size": 1}), random.Random(5)
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 9, 9]]
    done: list[tuple[list[int], Whose]] = []
    for _ in range(count):
        tokens = rnd.choice(prompts) + rnd.choices((6, 7), k=rnd.randint(1, 7))
        salt = rnd.choice(["", "a", "b", "c"])
        whose: Whose = {"salt": salt, "shared": rnd.choice([0, 5])} if salt else {}
        if (variant := rnd.choice([None, None, "a", 1, True])) is not None:
            whose["variant"] = variant
        expected = max((visible(tokens, whose, *other) for other in done), default=0)
        assert r.keep(tokens, **whose) == min(expected, len(tokens) - 1)
        if (tokens, whose) not in done:
            done.append((tokens, whose))
    r.prefix.close()


CROSSINGS: list[Whose] = [
    {}, {"salt": "a"}, {"salt": "a", "shared": 1}, {"variant": "a"}, {"variant": b"a"}, {"variant": ["a"]},
    {"variant": "a", "salt": "a"}, {"variant": "a", "salt": "a", "shared": 3}, {"variant": ""},
    {"variant": [None]}, {"variant": 1}, {"variant": True}, {"variant": 1.0}, {"salt": "1"},
    {"variant": {"a": None}}, {"variant": "aa"}, {"salt": compose("a").decode("latin-1")},
    {"salt": compose("a").hex()}, {"salt": repr(("", "a"))}, {"variant": ("a", 1)}, {"variant": "a1"},
]  # fmt: skip


def test_no_salt_and_no_variant_can_be_taken_for_another(talk: Talk) -> None:
    """Two of these share what both of them say that they share, and nothing else."""
    tokens, keys = [7, 8, 9, 10, 11], set()
    for one, other in itertools.permutations(CROSSINGS, 2):
        r = talk(capacity=16, max_sequences=2)
        r.keep(tokens, **one)
        assert r.keep([*tokens, 12], **other) == visible(tokens, one, tokens, other), (one, other)
        ids = r.prefix.alphabet.encode(
            tokens, Tenant.of(one.get("salt", ""), one.get("shared", 0), one.get("variant"))
        )
        keys.add(r.prefix.tree.keys.chain(r.prefix.alphabet.named(ids)).at(5))
    assert len(keys) == len(CROSSINGS)


@some_caches
def test_no_figure_tells_whether_a_stranger_has_computed_the_same(talk: Talk, cache: str) -> None:
    """A request costs and reports the same whether another tenant computed its prompt or one as long."""
    told = []
    for prompt in (LONG, [50 + token for token in LONG]):
        store = FlakyStore()
        r = talk(cache, tiers=[HostTier(1 << 20), store])
        r.keep(prompt, salt="a")
        r.prefix.flush()
        before, calls, evaluated = asdict(r.prefix.stats), store.calls, r.evaluated
        longest = r.prefix.longest(LONG, salt="b")
        chat = r.chat(LONG, salt="b")
        stats = {name: value - before[name] for name, value in asdict(r.prefix.stats).items()}
        told.append((chat.cached, longest, stats, store.calls - calls, r.evaluated - evaluated))
        chat.close()
        assert r.keep(LONG, salt="b") == len(LONG) - 1
        r.prefix.close()
    assert told[0] == told[1]
    assert told[0][0] == 0


def test_another_process_finds_in_a_store_what_is_its_tenants_alone(talk: Talk) -> None:
    store = stored(talk, LONG, salt="a", shared=8)
    for whose, found in (({"salt": "a", "shared": 8}, 19), ({"salt": "b"}, 0), ({}, 8), ({"salt": "a"}, 0)):
        second = talk(tiers=[store])
        assert second.keep(LONG, **whose) == found
        second.prefix.close()


@pytest.mark.parametrize("length", [2, 7, 8, 9, 15, 16, 20])
def test_another_process_finds_an_unchanged_prompt_but_for_its_last_token(talk: Talk, length: int) -> None:
    """In blocks of 8; the entry of its end is cut."""
    prompt = LONG[:length]
    store = stored(talk, prompt)
    second = talk(tiers=[store])
    for _ in range(2):
        chat = second.chat(prompt)
        assert (chat.cached, second.prefix.stats.spared) == (length - 1, 0)
        chat.say([3])
        chat.close()
    assert second.prefix.stats.store == length - 1


@some_caches
def test_another_process_finds_all_that_everyone_may_share(talk: Talk, cache: str) -> None:
    """Also for the first of all other tenants, and where it ends inside a block."""
    store = stored(talk, LONG, cache=cache, salt="a", shared=10)
    for salt in ("b", "c"):
        second = talk(cache, tiers=[store])
        assert second.keep(LONG, salt=salt, shared=10) == 10
        second.prefix.close(flush=False)


@pytest.mark.parametrize("first", [7, b"a picture"])
def test_a_session_shows_the_tokens_that_it_was_given(talk: Talk, first: int | bytes) -> None:
    """Also where the first one of its own is generated, and taken back."""
    r = talk("encoder" if isinstance(first, bytes) else "causal")
    for shared in (0, 2, 4):
        chat = r.chat([first, 1, 2], salt="a", shared=shared)
        chat.say([3])
        chat.say([4, 5])
        assert chat.session.tokens == [first, 1, 2, 3, 4, 5]
        chat.rewind(2)
        chat.say([3, 3, 3])
        chat.close()
        assert r.prefix.longest([first, 1, 3, 3, 3, 9], salt="a", shared=shared) == 5
        assert r.prefix.longest([first, 1, 3, 3, 3, 9], salt="b", shared=shared) == min(shared, 5)
        r.prefix.clear()


def test_tenants_that_are_gone_take_no_memory(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alphabet, "_SPARE", 64)
    r = talk(capacity=16)
    sizes = []
    for number in range(300):
        r.keep([1, 2], salt=f"tenant {number}")
        sizes.append(len(r.prefix.alphabet._items))
    assert max(sizes) < 150
    assert r.keep([1, 2], salt="tenant 299") == 1


@pytest.mark.parametrize(
    "whose", [{"salt": 3}, {"salt": None}, {"salt": "\ud800"}, {"salt": "a", "shared": -1}]
)
def test_a_salt_is_a_string_and_shared_a_count(talk: Talk, whose: Whose) -> None:
    r = talk()
    for call in (r.prefix.begin, r.prefix.longest):
        with pytest.raises(InvalidRangeError, match=r"salt=.*must be (a string|valid Unicode)|shared=-1"):
            call([1, 2], **whose)
    assert not r.prefix.sessions


def test_what_all_may_share_counts_for_nobody_after_it_was_lost_and_computed_again(talk: Talk) -> None:
    r = talk(options={"block_size": 4, "tenant_budget": TenantBudget("1GiB")})
    for _ in range(2):
        r.keep(LONG, salt="a", shared=8)
        nodes = {node.end: node for node in r.prefix.tree.radix_tree}
        assert {end: node.data and node.data.tenant for end, node in nodes.items()} == {8: "", 20: "a"}
        r.prefix.tree.drop(nodes[8])  # what follows it holds its place in the tree
