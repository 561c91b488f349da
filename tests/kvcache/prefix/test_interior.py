"""Close snapshots inside conversations go before the end of any, where what goes is gone for good."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

import ml
from kvcache.prefix.eviction_queue import TenantBudget
from kvcache.prefix.retention import Retention, TokenRange
from kvcache.prefix.tiers import HostTier
from kvcache.prefix.tree_entry import is_folded
from kvcache.snapshots.snapshot import AttentionSnapshot, unwrapped_snapshot
from kvcache.stores import MemoryStore
from kvcache.testing.rigs.protocol import only_protocol

from .rigs.conversing import LONG, STATEFUL, WHOLE, ConversationSetup, Rig, Talk, line, read
from .rigs.stores import Way

ROOMY = 1 << 40
"""A budget beside which what wide gaps between snapshots waste is nothing: no snapshot inside is worth its
room."""

every_whole = pytest.mark.parametrize("cache", WHOLE)


def ends(r: Rig) -> list[int]:
    """Where conversations can be gone on with."""
    nodes = (node for node in r.prefix.tree.radix_tree if node.data is not None)
    return sorted(end for node in nodes for end in (node.end, *(each.end for each in _chain(node)[:-1])))


def _chain(node: Any) -> Sequence[Any]:
    """The snapshots of a node that has several."""
    return node.data.snapshot.parts if is_folded(node) else ()


FOLDING = ("wrapper", "recurrent", "recurrent and sliding")
"""Caches whose snapshots follow one another."""


@pytest.mark.parametrize("cache", FOLDING)
def test_a_new_prompt_is_one_edge_that_a_diverging_one_cuts_in_two(talk: Talk, cache: str) -> None:
    r = talk(cache, capacity=200)
    nodes = r.prefix.tree.radix_tree
    r.keep(line(100, 40))
    assert (len(nodes), ends(r)) == (1, [8, 16, 24, 32, 39, 40])
    assert r.keep([*line(100, 40), 7]) == 40
    assert (len(nodes), ends(r)) == (2, [8, 16, 24, 32, 39, 40, 41])
    r.check_books()
    assert r.keep([*line(100, 20), 900]) == 16
    assert {node.end for node in nodes} == {16, 20, 40, 41, 21}  # both sides of it are still folded
    assert ends(r) == [8, 16, 20, 21, 24, 32, 39, 40, 41]
    r.check_books()
    assert [r.peek([*line(100, at), 8]) for at in (8, 16, 24, 32, 39, 40)] == [8, 16, 24, 32, 39, 40]
    r.check_books()


@pytest.mark.parametrize("cache", FOLDING)
def test_a_lost_snapshot_costs_what_is_behind_it(talk: Talk, cache: str) -> None:
    r = talk(cache, capacity=200)
    r.keep(line(100, 40))
    (node,) = r.prefix.tree.radix_tree
    for part in unwrapped_snapshot(_chain(node)[2]):
        if isinstance(part, AttentionSnapshot) and part.source is not None:
            part.source.pin.lost = True
    assert r.peek([*line(100, 40), 7]) == 16
    r.check_books()


@every_whole
def test_points_inside_go_first_where_the_fewest_tokens_lie_between_their_neighbours(
    talk: Talk, cache: str
) -> None:
    r = talk(cache, capacity=100, budget=ROOMY)
    r.keep(line(100, 40))
    assert ends(r) == [8, 16, 24, 32, 39, 40]
    found = []
    while len(ends(r)) > 2:
        r.prefix.evict(1)
        found.append(ends(r))
        r.check_books()
    assert found == [[8, 16, 24, 39, 40], [16, 24, 39, 40], [16, 39, 40], [39, 40]]
    assert r.prefix.tree.evicted == 4
    assert r.keep([*line(100, 40), 1]) == 40
    assert r.keep([*line(100, 20), 1]) == 0


def test_what_is_divisible_has_no_points_inside(talk: Talk) -> None:
    r = talk("causal")
    for count in (8, 12, 16, 20):
        r.keep(LONG[:count])
    assert r.prefix.evictor.interior.first() is None


def test_of_a_conversation_that_has_to_go_the_beginning_stays(talk: Talk) -> None:
    """It goes from its end: the points inside that this needs are not let go of, however old they are."""
    one = talk("recurrent", capacity=100, max_batch=80)
    one.keep(line(100, 80))
    budget = int(2.6 * one.prefix.nbytes["device"])
    r = talk("recurrent", budget=budget, capacity=100, max_sequences=4, max_batch=80)
    for first in (100, 200, 300):
        r.keep(line(first, 80))
    assert [r.peek([*line(first, 80), 1]) for first in (200, 300)] == [80, 80]
    assert 16 <= r.peek([*line(100, 80), 1]) < 80
    r.check_books()


@every_whole
def test_where_room_is_short_no_points_are_taken_that_would_go_at_once(talk: Talk, cache: str) -> None:
    r = talk(cache, budget=ROOMY, capacity=200)
    r.keep(line(100, 40))
    assert ends(r) == [8, 16, 24, 32, 39, 40]
    r.prefix.evict(1)
    r.keep(line(500, 40))
    assert r.peek([*line(500, 38), 1]) == 0
    assert r.peek([*line(500, 40), 1]) == 40
    r.prefix.clear()
    r.keep(line(500, 40))
    assert ends(r) == [8, 16, 24, 32, 39, 40]


@pytest.mark.parametrize(("cache", "conversations"), [("wrapper", 4), ("sliding", 12)])
def test_cells_for_others_come_from_points_inside(talk: Talk, cache: str, conversations: int) -> None:
    """Where there is no room for all snapshots, but for all ends."""
    r = talk(cache, max_sequences=4, capacity=40, max_batch=8)
    said = [line(100 * i, 32) for i in range(conversations)]
    for tokens in said:
        read(r, tokens)
    assert [r.prefix.longest([*tokens, 1]) for tokens in said] == [32] * conversations


@every_whole
def test_where_prompts_part_and_what_has_a_priority_stays(talk: Talk, cache: str) -> None:
    r = talk(cache, capacity=100)
    r.keep(line(100, 40), retention=Retention([TokenRange(0, 8, 100)]))
    r.keep([*line(100, 20), *line(200, 12)])
    r.keep(line(300, 40), retention=Retention([TokenRange(0, 16, 80)]))
    kept = [*line(100, 20), 1], [*line(100, 8), 1], [*line(300, 16), 1]
    while (node := r.prefix.evictor.interior.first()) is not None:
        assert r.prefix.tree.absorb(node)
    assert [r.peek(prompt) for prompt in kept] == [20, 8, 16]
    r.check_books()


def test_a_tenant_that_has_too_much_loses_points_inside_its_own_conversations(talk: Talk) -> None:
    budgets: dict[str, TenantBudget] = {}
    options = {"block_size": 4, "interval": 8, "tenant_budget": budgets.get}
    r = talk("recurrent", capacity=100, budget=ROOMY, options=options)
    r.keep(line(100, 40), salt="bob")
    budgets["ada"] = TenantBudget(r.prefix.nbytes["device"] - 1)
    r.keep(line(100, 40), salt="ada")
    assert r.prefix.tree.over_budget
    assert r.prefix.longest([*line(100, 40), 1], salt="ada") == 40
    assert r.prefix.longest([*line(100, 24), 1], salt="bob") == 24


@pytest.mark.parametrize("tiers", ["host", "store"])
@every_whole
def test_nothing_goes_for_good_that_another_tier_has_room_for(talk: Talk, cache: str, tiers: str) -> None:
    r = talk(cache, capacity=100, tiers=[HostTier() if tiers == "host" else MemoryStore()])
    r.keep(line(100, 40))
    r.prefix.evict(1)
    r.prefix.evict()
    r.prefix.flush()
    assert [r.peek([*line(100, at), 1]) for at in (8, 16, 24, 32, 40)] == [8, 16, 24, 32, 40]


@every_whole
def test_with_full_host_memory_points_inside_go_before_what_it_has(talk: Talk, cache: str) -> None:
    r = talk(cache, capacity=100, budget=ROOMY, tiers=[HostTier()])
    r.keep(line(100, 20))
    r.prefix.evict()
    r.prefix.flush()
    r.prefix.tree.host.budget = r.prefix.nbytes["host"]
    before = r.prefix.nbytes["host"]
    r.keep(line(200, 40))
    r.prefix.evict(1)
    assert r.prefix.nbytes["host"] == before
    assert r.peek([*line(100, 20), 1]) == 20
    assert r.peek([*line(200, 40), 1]) == 40


@pytest.mark.parametrize("cache", STATEFUL)
def test_what_cannot_be_joined_stays_and_the_next_one_goes(
    talk: Talk, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = talk(cache, capacity=100, budget=ROOMY)
    r.keep(line(100, 40))
    join, failed = r.cache.join, []

    def fails_once(parts: Any) -> Any:
        failed.append(parts)
        if len(failed) == 1:
            raise MemoryError
        return join(parts)

    monkeypatch.setattr(r.cache, "join", fails_once)
    r.prefix.evict(1)
    assert ends(r) == [16, 24, 32, 39, 40]
    r.check_books()


# What stays.


def test_cells_for_all_of_the_past_come_from_no_point_inside(talk: Talk) -> None:
    """They stay with what follows: an end frees some."""
    r = talk("recurrent", max_sequences=1, capacity=90)
    r.keep(line(100, 40), 8)
    assert r.keep(line(200, 60), 8) == 0
    assert ends(r)[:3] == [8, 8, 16]
    assert r.prefix.longest([*line(100, 24), 1]) == 24
    r.check_books()


def test_after_one_request_with_a_priority_the_others_are_as_before(talk: Talk) -> None:
    r = talk("recurrent", capacity=200, budget=ROOMY)
    r.keep(line(500, 4), retention=Retention([TokenRange(0, 2, 80)]))
    r.keep(line(100, 40))
    r.prefix.evict(1)
    assert r.prefix.longest([*line(100, 40), 1]) == 40
    assert r.prefix.longest([*line(100, 32), 1]) == 24


def test_what_has_a_low_priority_goes_before_points_inside_others(talk: Talk) -> None:
    r = talk("recurrent", capacity=200)
    r.keep(line(100, 40), retention=Retention([TokenRange(0, None, 0)]))
    r.keep(line(200, 40))
    for _ in range(5):
        r.prefix.evict(1)
    assert [r.prefix.longest([*line(200, at), 1]) for at in (8, 16, 24, 32, 40)] == [8, 16, 24, 32, 40]


@pytest.mark.parametrize("keep", [True, False])
@every_whole
def test_what_an_open_session_goes_on_from_stays(talk: Talk, cache: str, keep: bool) -> None:
    r = talk(cache, capacity=200, max_sequences=3)
    r.keep(line(100, 40))
    new = [*line(100, 24), *line(800, 30)]
    chat = r.begin(new)
    assert chat.cached == 24
    while (node := r.prefix.evictor.interior.first()) is not None:
        assert node.end != 24
        r.prefix.tree.absorb(node)
    for part in chat.session.chunks(8):
        chat._evaluate(part)
        if keep:
            chat.session.keep()
    chat.close()
    tree = r.prefix.tree
    assert all(
        tree.along(tree.walk(node.prefix()))[0] == node.end
        for node in tree.radix_tree
        if node.data is not None
    )
    assert r.prefix.longest([*new, 1]) == 54
    assert not any(node.data.users for node in tree.radix_tree if node.data is not None)


@pytest.mark.parametrize("tiers", ["none", "host", "store"])
def test_nothing_is_remembered_of_conversations_that_are_gone(talk: Talk, tiers: str) -> None:
    kept: dict[str, list[Any]] = {"none": [], "host": [HostTier(4000)], "store": [MemoryStore()]}
    r = talk("wrapper", 4000, kept[tiers])
    for first in range(0, 4000, 40):
        r.keep(line(first, 30))
    interior = r.prefix.evictor.interior
    for heap in (interior._heap, *interior._of.values()):
        assert len(heap) <= 64 + 2 * len(r.prefix.tree.radix_tree)
    r.prefix.clear()
    assert not any((interior._changed, interior._saved, interior._heap, *interior._of.values()))


@pytest.mark.parametrize("quick", [True, False])
def test_what_host_memory_has_no_room_for_is_found_by_no_luck(
    backend: ml.Backend, way: Way, quick: bool
) -> None:
    """It fits as it lies on the device, and serialized it does not."""
    r = Rig(ConversationSetup("wrapper"), only_protocol(backend, way), tiers=[HostTier(1500)])
    r.keep(line(100, 7))
    if not quick:
        way.gate.clear()
    tree = r.prefix.tree
    while (node := tree.device.first()) is not None:
        tree.offload(node)
    if quick:
        r.prefix.flush()
    assert r.prefix.longest([*line(100, 6), 1]) == 0
    way.gate.set()


@every_whole
def test_what_is_left_after_any_of_them_went_is_what_was_said(talk: Talk, cache: str) -> None:
    r, rnd = talk(cache, capacity=100, max_sequences=4), random.Random(cache)
    said: list[list[int]] = [[]]
    for _ in range(15):
        tokens = [
            *rnd.choice(said)[: rnd.randrange(60)],
            *(rnd.randrange(50) for _ in range(rnd.randrange(1, 30))),
        ]
        r.keep(tokens[:90])
        said.append(tokens[:90])
        for _ in range(rnd.randrange(4)):
            if (node := r.prefix.evictor.interior.first()) is not None:
                deepest = [n for n in r.prefix.tree.radix_tree if not n.children]
                assert r.prefix.tree.absorb(node)
                assert [n for n in r.prefix.tree.radix_tree if not n.children] == deepest
        r.check_books()
