"""What a policy says goes first does; what leads to something outlasts it; tenants stay within budgets."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

import ml
from kvcache import HostTier, InvalidRangeError
from kvcache.prefix.eviction_policy import GDSF, LRU, PrefixEvictionPolicy, Use, policy_of
from kvcache.prefix.tenant_budget import TenantBudget
from kvcache.stores import MemoryStore

from .rigs.conversing import SOME, ConversationSetup, Rig, Talk, longest, room, some_caches
from .test_tenants import visible

ONE, TWO, THREE = ([base + i for i in range(20)] for base in (100, 200, 300))
TOKEN = ConversationSetup().token_bytes


def options(**named: Any) -> dict[str, Any]:
    return {"options": {"block_size": 4, "interval": 8, **named}}


@dataclass
class Anything:
    """Scores by chance, never lower than before."""

    random: random.Random
    given: dict[int, float] = field(default_factory=dict)

    def score(self, use: Use) -> float:
        found = max(self.given.get(use.begin, 0.0), self.random.random())
        self.given[use.begin] = found
        return found


@pytest.mark.parametrize(("named", "left"), [({}, [0, 20]), ({"eviction_policy": "gdsf"}, [20, 0])])
def test_by_default_the_least_recently_used_goes_else_what_is_used_seldom(
    talk: Talk, named: dict[str, Any], left: list[int]
) -> None:
    r = talk(**options(**named))
    for prompt in (ONE, ONE, ONE, TWO):
        r.keep(prompt)
    room(r, 20)
    assert longest(r, ONE, TWO) == left


def test_what_was_used_often_long_ago_goes(talk: Talk) -> None:
    r = talk(capacity=96, **options(eviction_policy="gdsf"))
    for _ in range(4):
        r.keep(ONE)
    room(r, 40)
    gone = []
    for i in range(40):
        r.keep([1000 + 30 * i + j for j in range(20)])
        gone.append(longest(r, ONE) == [0])
    assert not any(gone[:4])
    assert gone[-1]


def test_what_is_dear_to_compute_outlasts_what_is_cheap(talk: Talk) -> None:
    """Of two times twenty tokens that were used once, those behind a long prompt."""
    r = talk(capacity=96, **options(eviction_policy=GDSF(cost_doubles_at=10)))
    start = [*range(500, 540)]
    r.keep(start)
    r.keep([*start, *ONE])
    r.keep(TWO)
    room(r, 60)
    assert longest(r, [*start, *ONE], TWO) == [60, 0]


@pytest.mark.parametrize("below", [False, True])
def test_what_a_further_tier_keeps_costs_its_bytes(talk: Talk, below: bool) -> None:
    tiers = [HostTier()] if below else []
    seen: list[bool] = []

    class Listening(LRU):
        def score(self, use: Use) -> float:
            seen.append(use.computed)
            return super().score(use)

    r = talk(tiers=tiers, **options(eviction_policy=Listening()))
    r.keep(ONE)
    assert set(seen) == ({True, False} if below else {True})


def test_a_use_tells_where_how_large_and_how_often(talk: Talk) -> None:
    told: list[Use] = []

    class Listening(LRU):
        def score(self, use: Use) -> float:
            told.append(use)
            return super().score(use)

    r = talk(**options(eviction_policy=Listening()))
    r.keep(ONE)
    assert [(use.begin, use.end, use.nbytes, use.count) for use in told] == [(0, 20, 20 * TOKEN, 1)]
    r.keep([*ONE, 7, 8])
    later = told[1:]
    assert [(use.begin, use.end, use.count) for use in later] == [(0, 20, 2), (20, 22, 1), (0, 20, 3)]
    assert all(one.time < other.time for one, other in zip(told, later[:1], strict=False))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cache", ["causal", *SOME[1:]])
def test_whatever_the_policy_says_answers_are_right_and_what_leads_somewhere_stays(
    talk: Talk, cache: str, seed: int
) -> None:
    rnd = random.Random(seed)
    policy: PrefixEvictionPolicy = GDSF(rnd.choice((1, 30))) if seed % 3 == 0 else Anything(rnd)
    tiers = [[], [HostTier(rnd.choice((200, 2000)) * TOKEN)], [HostTier(500 * TOKEN), MemoryStore()]][
        seed % 3
    ]
    r = talk(cache, 60 * TOKEN, tiers, **options(eviction_policy=policy))
    for _ in range(40):
        prompt = [1, 2, 3] * rnd.randint(0, 2) + rnd.choices((4, 5, 6), k=rnd.randint(1, 12))
        r.keep(prompt, rnd.choice((3, 1000)))
        r.prefix.tree.drain()
        r.check_books()
        for node in r.prefix.tree.radix_tree if r.prefix.tree.divisible and len(tiers) < 2 else ():
            above = node.parent
            assert above is not None
            assert above.parent is None or (above.data is not None and above.data.present)
            if above.data is not None and node.data is not None:
                assert above.data.scores >= node.data.scores
    r.prefix.close()


def test_other_backends_too(other: ml.Backend) -> None:
    r = Rig(
        ConversationSetup(capacity=96), other, eviction_policy="gdsf", tenant_budget=TenantBudget(36 * TOKEN)
    )
    for prompt, salt in ((ONE, "a"), (ONE, "a"), (TWO, "b"), (THREE, "a")):
        r.keep(prompt, salt=salt)
    assert r.peek([*TWO, 0]) == 0
    assert longest(r, TWO, salt="b") == [20]
    assert longest(r, ONE, THREE, salt="a") == [20, 16]
    r.prefix.close()


def test_policies_by_name() -> None:
    assert policy_of("lru") == LRU()
    assert policy_of("gdsf") == GDSF()
    mine = Anything(random.Random(0))
    assert policy_of(mine) is mine


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"eviction_policy": "arc"}, "eviction_policy='arc'; it must be 'lru', 'gdsf'"),
        ({"eviction_policy": None}, "eviction_policy=None"),
        ({"tenant_budget": 1 << 20}, "tenant_budget=1048576; it must be a TenantBudget"),
    ],
)
def test_what_is_neither_is_refused(talk: Talk, named: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRangeError, match=says):
        talk(**options(**named))


def test_budgets_and_costs_below_what_they_may_be_are_refused() -> None:
    with pytest.raises(InvalidRangeError, match="TenantBudget: device=-1"):
        TenantBudget(-1)
    with pytest.raises(InvalidRangeError, match="TenantBudget: host='many'"):
        TenantBudget(host="many")
    with pytest.raises(InvalidRangeError, match="cost_doubles_at=0"):
        GDSF(0)
    assert TenantBudget("1KiB", "2KiB") == TenantBudget(1024, 2048)


def tenants(talk: Talk, budget: Any, tiers: Any = (), **named: Any) -> Rig:
    return talk(tiers=tiers, capacity=160, **options(tenant_budget=budget, **named))


def test_a_tenant_over_its_budget_loses_its_own_and_no_other_does(talk: Talk) -> None:
    r = tenants(talk, TenantBudget(36 * TOKEN))
    r.keep(TWO, salt="b")
    r.keep(ONE, salt="a")
    r.keep(TWO, salt="a")
    assert longest(r, ONE, TWO, salt="a") == [16, 20]
    assert longest(r, TWO, salt="b") == [20]
    assert r.prefix.over_tenant_budget == 1


def test_who_is_over_its_budget_makes_nothing_of_others_older(talk: Talk) -> None:
    r = tenants(talk, TenantBudget(0, 0), [HostTier()], eviction_policy="gdsf")
    for _ in range(4):
        r.keep(ONE, salt="a")
        r.prefix.tree.drain()
    host = r.prefix.tree.host
    assert host is not None
    assert r.prefix.over_tenant_budget == 4
    assert (r.prefix.tree.device.age, host.age) == (0.0, 0.0)


def test_what_everyone_shares_counts_for_nobody(talk: Talk) -> None:
    r = tenants(talk, TenantBudget(10 * TOKEN))
    for salt in ("a", "b"):
        r.keep([*ONE, *range(50, 58)], salt=salt, shared=20)
        assert longest(r, [*ONE, *range(50, 58)], salt=salt, shared=20) == [28]
    assert longest(r, ONE) == [20]
    r.keep([*ONE, *range(60, 68)], salt="a", shared=20)
    left = longest(r, [*ONE, *range(50, 58)], [*ONE, *range(60, 68)], salt="a", shared=20)
    assert (left[1], left[0] < 28) == (28, True)
    assert longest(r, [*ONE, *range(50, 58)], salt="b", shared=20) == [28]


def test_who_has_no_salt_has_no_budget(talk: Talk) -> None:
    r = tenants(talk, TenantBudget(5 * TOKEN, 5 * TOKEN), [HostTier()])
    r.keep(ONE)
    r.keep(TWO)
    assert longest(r, ONE, TWO) == [20, 20]


def test_each_tenant_may_have_a_budget_of_its_own(talk: Talk) -> None:
    sizes = {"a": TenantBudget(16 * TOKEN), "b": TenantBudget(), "c": None}
    r = tenants(talk, sizes.__getitem__)
    for salt in sizes:
        r.keep(ONE, salt=salt)
        r.keep(TWO, salt=salt)
    assert longest(r, ONE, TWO, salt="a") == [0, 16]
    assert longest(r, ONE, TWO, salt="b") == longest(r, ONE, TWO, salt="c") == [20, 20]


def test_what_the_device_may_not_keep_goes_to_host_memory_within_its_budget_there(talk: Talk) -> None:
    sizes = {"b": TenantBudget(0)}
    r = tenants(talk, sizes.__getitem__, [HostTier()])
    r.keep(ONE, salt="b")
    r.prefix.tree.drain()
    one = r.prefix.nbytes["host"]
    sizes["a"] = TenantBudget(0, 3 * one)
    for i in range(10, 20):
        r.keep([1000 * i + j for j in range(20)], salt="a")
    r.prefix.tree.drain()
    assert r.prefix.nbytes["host"] == 4 * one
    assert [r.prefix.longest([1000 * i + j for j in range(21)], salt="a") for i in (16, 17, 18, 19)] == [
        0, 20, 20, 20,
    ]  # fmt: skip
    assert r.keep([*ONE, 7], salt="b") == 20
    assert r.prefix.stats.host > 0


def test_what_a_tenant_may_never_have_is_not_copied_to_host_memory(talk: Talk) -> None:
    r = tenants(talk, TenantBudget(0, 8), [HostTier()])
    r.keep(ONE, salt="a")
    r.prefix.tree.drain()
    assert (r.prefix.nbytes["host"], r.prefix.over_tenant_budget) == (0, 1)


@some_caches
@pytest.mark.parametrize("seed", range(2))
def test_tenants_find_what_is_theirs_and_stay_within_budgets(talk: Talk, cache: str, seed: int) -> None:
    rnd = random.Random(seed)
    limit = TenantBudget(80 * TOKEN, 2000 * TOKEN)
    r = talk(cache, 300 * TOKEN, [HostTier()], capacity=160, **options(tenant_budget=limit))
    done: list[tuple[list[int], dict[str, Any]]] = []
    for _ in range(45):
        tokens = [1, 2, 3, 4, 5, *rnd.choices((6, 7), k=rnd.randint(1, 9))]
        salt = rnd.choice(["", "a", "b"])
        whose: dict[str, Any] = {"salt": salt, "shared": rnd.choice([0, 5])} if salt else {}
        most = max((visible(tokens, whose, *other) for other in done), default=0)
        assert r.keep(tokens, **whose) <= min(most, len(tokens) - 1)
        done.append((tokens, whose))
        r.prefix.tree.drain()
        r.check_books()
        for queue, most in ((r.prefix.tree.device, limit.device), (r.prefix.tree.host, limit.host)):
            assert queue is not None
            assert most is not None
            for tenant in "ab":
                own = [node.data for node in queue if node.data is not None and node.data.tenant == tenant]
                parts = [held.snapshot if queue is r.prefix.tree.device else held.serialized for held in own]
                assert sum(part.nbytes for part in parts if part is not None) <= most
    r.prefix.close()
