"""Tenants stay within their budgets: who has more loses its own, the least recently used first."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvcache import HostTier, InvalidRangeError
from kvcache.prefix.eviction_queue import TenantBudget

from .rigs.conversing import ConversationSetup, Rig, Talk, longest, some_caches
from .test_tenants import visible

ONE, TWO, THREE = ([base + i for i in range(20)] for base in (100, 200, 300))
TOKEN = ConversationSetup().token_bytes


def options(**named: Any) -> dict[str, Any]:
    return {"options": {"block_size": 4, "interval": 8, **named}}


def test_what_is_no_budget_is_refused(talk: Talk) -> None:
    with pytest.raises(InvalidRangeError, match="tenant_budget=1048576; it must be a TenantBudget"):
        talk(**options(tenant_budget=1 << 20))
    with pytest.raises(InvalidRangeError, match="TenantBudget: device=-1"):
        TenantBudget(-1)
    with pytest.raises(InvalidRangeError, match="TenantBudget: host='many'"):
        TenantBudget(host="many")
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
    assert r.prefix.over_tenant_budget == 18
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
def test_tenants_find_what_is_theirs_and_stay_within_budgets(talk: Talk, cache: str) -> None:
    rnd = random.Random(cache)
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
