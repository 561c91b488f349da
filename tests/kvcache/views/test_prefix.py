"""Pictures of a PrefixCache: the radix tree, its tiers and sessions, and no order of use that changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import ml
from kvcache import CausalCache, ClosedError, HostTier, InvalidRangeError, SlidingWindowCache
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.stores import MemoryStore
from kvcache.views import render
from kvcache.views.blocks import NodeView
from kvcache.views.pictures import PrefixPicture

from .views_rig import bound, talk

CELL = 32
"""Bytes of K and V of one token."""


@pytest.fixture
def prefix(numpy_backend: ml.Backend) -> Iterator[PrefixCache]:
    with PrefixCache(bound(CausalCache(), numpy_backend, 3, 32, 32), tiers=[HostTier(100 * CELL)]) as found:
        yield found


def nodes_of(picture: PrefixPicture) -> list[tuple[int | None, int, int, str, int]]:
    return [(node.parent, node.begin, node.end, node.tier, node.nbytes) for node in picture.nodes]


def by_text(picture: PrefixPicture) -> dict[str, NodeView]:
    return {node.text: node for node in picture.nodes}


def test_two_conversations_that_begin_alike(prefix: PrefixCache, numpy_backend: ml.Backend) -> None:
    talk(prefix, numpy_backend, [1, 2, 3, 4, 5, 6]).close()
    talk(prefix, numpy_backend, [1, 2, 3, 7, 8]).close()
    session = talk(prefix, numpy_backend, [1, 2, 9, 10])
    session.extend([11])
    picture = render(prefix)
    assert nodes_of(picture) == [
        (None, 0, 3, "cache", 3 * CELL),
        (0, 3, 6, "cache", 3 * CELL),
        (0, 3, 5, "cache", 2 * CELL),
    ]
    assert [node.text for node in picture.nodes] == ["1 2 3", "4 5 6", "7 8"]
    assert [node.depth for node in picture.nodes] == [0, 1, 1]
    assert (picture.total, picture.hidden) == (3, 0)
    (view,) = picture.sessions
    assert (view.seq, view.tokens, view.cached, view.evaluated, view.text) == (
        session.seq, 5, 2, 4, "1 2 9 10 11",
    )  # fmt: skip
    assert (picture.tokens, picture.reused) == (15, 5)
    device, host = picture.tiers
    assert (device.name, device.nbytes, device.entries) == ("device", 8 * CELL, 3)
    assert (host.name, host.nbytes, host.budget, host.entries) == ("host", 0, 100 * CELL, 0)
    assert sum(node.nbytes for node in picture.nodes) == prefix.nbytes["device"]
    assert picture.cache.maps[0].count("kept") == 6, "the first two tokens are the session's too"


def test_what_was_paged_out_lies_in_host_memory(prefix: PrefixCache, numpy_backend: ml.Backend) -> None:
    talk(prefix, numpy_backend, [1, 2, 3]).close()
    talk(prefix, numpy_backend, [5, 6]).close()
    (node,) = [node for node in prefix.tree.radix_tree if node.end == 2]
    node.data.snapshot.detach()  # type: ignore[union-attr]
    assert by_text(render(prefix))["5 6"].tiers == ("device",)
    prefix.evict()
    picture = render(prefix)
    assert {node.text: node.tiers for node in picture.nodes} == {"1 2 3": ("host",), "5 6": ("host",)}
    assert sum(node.nbytes for node in picture.nodes) == prefix.nbytes["host"] > 0
    talk(prefix, numpy_backend, [1, 2, 3, 4])
    assert by_text(render(prefix))["1 2 3"].tiers == ("cache", "host"), "it came back, and its page stays"


def test_tiers_beyond_host_memory(numpy_backend: ml.Backend) -> None:
    store = MemoryStore()
    cache = bound(CausalCache(), numpy_backend)
    with PrefixCache(cache, tiers=[HostTier(), store], identity={"model": "test"}) as prefix:
        talk(prefix, numpy_backend, [1, 2, 3]).close()
        assert render(prefix).nodes[0].tiers == ("cache",)
        prefix.flush()
        picture = render(prefix)
        assert picture.nodes[0].tiers == ("cache", "store")
        assert [tier.name for tier in picture.tiers] == ["device", "host", "writing", "store"]
        assert picture.tiers[3].note == "MemoryStore"


def test_order_of_use_and_what_leaves_first(prefix: PrefixCache, numpy_backend: ml.Backend) -> None:
    for tokens in ([1, 2], [3, 4], [5, 6]):
        talk(prefix, numpy_backend, tokens).close()
    views = by_text(render(prefix))
    assert [views[text].next_out for text in ("1 2", "3 4", "5 6")] == [True, False, False]
    assert views["1 2"].idle > views["3 4"].idle > views["5 6"].idle == 0
    talk(prefix, numpy_backend, [1, 2, 9]).close(keep=False)
    assert by_text(render(prefix))["3 4"].next_out, "a hit makes 1 2 the last to go"


def test_looking_is_no_use_and_copies_nothing(prefix: PrefixCache, numpy_backend: ml.Backend) -> None:
    for tokens in ([1, 2, 3], [1, 2, 4], [5, 6]):
        talk(prefix, numpy_backend, tokens).close()
    prefix.tree.offload(next(node for node in prefix.tree.radix_tree if node.end == 2))
    session = talk(prefix, numpy_backend, [1, 2, 3, 9])
    tree = prefix.tree

    def state() -> Any:
        held = [
            (id(node), id(node.data), node.data and (node.data.used, node.data.tier, node.data.rank))
            for node in tree.radix_tree
        ]
        ledgers = [(len(ledger._heap), ledger.nbytes, len(ledger)) for ledger in (tree.device, tree.host)]  # type: ignore[union-attr]
        table = prefix.cache._table  # type: ignore[attr-defined]
        more = (session._tokens.tolist(), list(session._more), tree.clock, dict(tree.alphabet._codes))
        return held, ledgers, table.references.tolist(), len(table.pins), more, prefix.stats

    session.extend([7, b"picture"])
    before = state()
    picture = render(prefix, decode=lambda ids: "".join(map(chr, ids)))
    for drawn in (picture.text(), picture.svg(), picture.html(), picture.json()):
        assert drawn
    assert state() == before


def test_evictions_go_the_same_way_with_and_without_looking(numpy_backend: ml.Backend) -> None:
    """Random conversations under a tight budget, twice: once with a picture after every step."""

    def run(look: bool) -> list[Any]:
        rng = random.Random(5)
        cache = bound(CausalCache(), numpy_backend, 3, 32, 32)
        seen: list[Any] = []
        with PrefixCache(cache, budget=12 * CELL, tiers=[HostTier(20 * CELL)]) as prefix:
            for _ in range(60):
                tokens = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
                session = talk(prefix, numpy_backend, tokens)
                if look:
                    render(prefix).json()
                session.close()
                nbytes = {**prefix.nbytes, "leaving": None}  # how far a thread has got is no matter of ours
                seen.append((session.cached, nbytes, prefix.tree.evicted, len(prefix.tree.radix_tree)))
        return seen

    assert run(look=True) == run(look=False)


def test_a_node_without_content_is_as_recent_as_what_it_leads_to(numpy_backend: ml.Backend) -> None:
    cache = bound(SlidingWindowCache(2), numpy_backend, 3, 64, 32)
    with PrefixCache(cache) as prefix:
        talk(prefix, numpy_backend, [1, 2, 3, 4, 5, 6]).close()
        talk(prefix, numpy_backend, [1, 2, 3, 7, 8, 9]).close()
        talk(prefix, numpy_backend, [5, 5, 5]).close()
        (upper,) = [node for node in prefix.tree.radix_tree if node.end == 3 and node.children]
        prefix.tree.drop(upper)
        talk(prefix, numpy_backend, [1, 2, 3, 7, 8, 9, 9]).close(keep=False)
        whole, cut = render(prefix), render(prefix, nodes=2)
    views = by_text(whole)
    assert (views["1 2 3"].tier, views["1 2 3"].nbytes, views["1 2 3"].age) == ("none", 0, 0)
    assert "nothing kept here" in whole.text(120)
    assert [(node.text, node.begin) for node in cut.nodes] == [("1 2 3", 0), (cut.nodes[1].text, 3)]
    assert cut.nodes[1].text.startswith("7 8")


def test_a_large_trie_is_cut_to_what_was_used_last(numpy_backend: ml.Backend) -> None:
    with PrefixCache(bound(CausalCache(), numpy_backend, 3, 400, 64)) as prefix:
        for first in range(20):
            for second in range(3):
                talk(prefix, numpy_backend, [first, 100 + second, 7]).close()
        assert len(prefix.tree.radix_tree) == 80
        picture = render(prefix, nodes=10)
        assert len(picture.nodes) == 10
        shown = {node.text for node in picture.nodes if node.depth == 0}
        assert shown <= {str(first) for first in range(16, 20)}, "those that were used last"
        hidden = picture.hidden + sum(node.hidden for node in picture.nodes)
        assert hidden + len(picture.nodes) == picture.total == 80
        for index, node in enumerate(picture.nodes):
            assert node.parent is None or (
                node.parent < index and picture.nodes[node.parent].end == node.begin
            )
        assert f"... {picture.hidden} more" in picture.text()
        assert f"... {picture.hidden} more" in picture.svg()
        assert len(render(prefix).nodes) == 80
        nothing = render(prefix, nodes=0)
        assert (nothing.nodes, nothing.hidden) == ((), 80)


def test_tokens_are_shown_as_text_where_they_can_be_decoded(
    prefix: PrefixCache, numpy_backend: ml.Backend
) -> None:
    talk(prefix, numpy_backend, [72, 105, b"\xca\xfe\xba\xbe\x00", 33]).close()
    talk(prefix, numpy_backend, [ord(c) for c in "x" * 30]).close()
    decoded = render(prefix, decode=lambda ids: "".join(map(chr, ids)))
    assert [node.text for node in decoded.nodes] == ["Hi<item cafebabe>!", "x" * 30]
    assert render(prefix).nodes[0].text == "72 105 <item cafebabe> 33"


def test_ages_are_seconds_since_a_node_was_made(
    prefix: PrefixCache, numpy_backend: ml.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(prefix, numpy_backend, [1, 2]).close()
    (node,) = prefix.tree.radix_tree
    assert node.data is not None
    later = node.data.since + 7200.5
    monkeypatch.setattr("kvcache.views.rendering.time.monotonic", lambda: later)
    picture = render(prefix)
    assert picture.nodes[0].age == pytest.approx(7200.5)
    assert "2 h old" in picture.text()
    assert "2 h old" in picture.html()


def test_what_cannot_be_drawn_is_refused(numpy_backend: ml.Backend) -> None:
    prefix = PrefixCache(bound(CausalCache(), numpy_backend))
    with pytest.raises(InvalidRangeError, match="nodes=-1"):
        render(prefix, nodes=-1)
    prefix.close()
    with pytest.raises(ClosedError, match="render"):
        render(prefix)
