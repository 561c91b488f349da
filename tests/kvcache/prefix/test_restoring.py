"""What is being restored stays on the device, also where the cache needs cells for it."""

from __future__ import annotations

import contextlib
from unittest.mock import Mock

import pytest

import kvcache
import ml
from kvcache import CacheFullError
from kvcache.prefix import loading, matcher
from kvcache.prefix.retention import Retention, TokenRange
from kvcache.prefix.tiers import HostTier
from kvcache.stores import MemoryStore, SerializedSnapshot
from kvcache.testing.rigs.protocol import InjectedError

from .models.digests import CONV, STATE
from .rigs import conversing
from .rigs.conversing import WINDOW, Rig, Talk

PROMPT = list(range(100, 107))
OTHER = list(range(200, 210))


@pytest.fixture(params=["wrapper", "full first", "recurrent and sliding"])
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Caches with a window beside all of the past, in either order."""
    _, (window, full) = conversing.CACHES["wrapper"]
    full_first = lambda: kvcache.WrapperCache(kvcache.CausalCache(), kvcache.SlidingWindowCache(WINDOW))  # noqa: E731
    monkeypatch.setitem(conversing.CACHES, "full first", (full_first, (full, window)))
    return str(request.param)


def in_want_of_window_cells(talk: Talk, cache: str, host: bool = False) -> Rig:
    """Kept of PROMPT: a window that was copied out for want of cells, and the rest, which lies in cells.

    With host memory there is something in it, too, that nobody asks for.
    """
    options = {"max_batch": 8, "capacity": 60, "options": {"block_size": 4, "interval": 4}, "in_flight": 0}
    r = talk(cache, tiers=[HostTier("1MiB")] if host else (), **options)
    if host:
        r.keep(OTHER, 8, retention=Retention([TokenRange(priority=100)]))
        r.prefix.evict()
    first = r.chat(PROMPT, 8)
    r.chat(list(range(21)), 8)
    first.close()
    r.chat(list(range(50, 59)), 8)
    return r


@pytest.mark.parametrize("host", [False, True])
def test_what_longest_finds_begin_restores_where_window_cells_are_short(
    talk: Talk, cache: str, host: bool, caplog: pytest.LogCaptureFixture
) -> None:
    r = in_want_of_window_cells(talk, cache, host)
    found = r.prefix.longest([*PROMPT, 7])
    assert found in (6, 7)
    assert r.chat([*PROMPT, 7, 8], 8).cached == found
    assert not caplog.messages
    r.check_books()


@pytest.mark.parametrize("error", [InjectedError(), CacheFullError(1, 0, {}), KeyboardInterrupt()])
def test_whatever_ends_a_restoration_its_snapshots_can_go_after_it(
    talk: Talk, cache: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = in_want_of_window_cells(talk, cache)
    with monkeypatch.context() as patched, contextlib.suppress(CacheFullError, KeyboardInterrupt):
        patched.setattr(r.cache, "restore", Mock(side_effect=error))
        assert r.begin([*PROMPT, 7, 8]).cached == 0
    assert all(node.data is None or not node.data.restoring for node in r.prefix.tree.radix_tree)
    assert r.prefix.evict() > 0
    assert r.prefix.tree.device.nbytes == 0


# Of a chain, the last state alone.

HYBRIDS = {
    "recurrent": conversing.CACHES["recurrent"],
    "window": conversing.CACHES["wrapper"],
    "recurrent and window": conversing.CACHES["recurrent and sliding"],
    "recurrent without attention": (
        lambda: kvcache.WrapperCache(kvcache.RecurrentCache(CONV, STATE), kvcache.CausalCache()),
        (conversing.Layers(layers=(), states=(0, 1)), conversing.Layers(layers=(2,))),
    ),
    "recurrent and encoder": (
        lambda: kvcache.WrapperCache(kvcache.RecurrentCache(CONV, STATE), kvcache.EncoderCache()),
        (conversing.Layers(layers=(1,), states=(0,)), conversing.Layers(layers=(2,), encoder=True)),
    ),
}
STRAIGHT = [name for name in HYBRIDS if name != "recurrent and encoder"]
TOKENS = list(range(100, 141))
ON_HOST = {"capacity": 120, "max_batch": 64, "in_flight": 0, "options": {"block_size": 4, "interval": 4}}


@pytest.fixture(params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(conversing.CACHES, "hybrid", HYBRIDS[request.param])
    return str(request.param)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Steps that bring something from host memory."""
    counted = Mock(side_effect=loading.restore_serialized)
    monkeypatch.setattr(loading, "restore_serialized", counted)
    return counted


@pytest.mark.parametrize("way", ["straight", "joined"])
def test_a_chain_in_host_memory_goes_in_one_step_with_its_last_state(
    talk: Talk, hybrid: str, way: str, calls: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "joined":  # as where the cells do not lie in a run, or only a device can write them
        monkeypatch.setattr(loading._Approach, "find", Mock(return_value=None))
    decoded = Mock(side_effect=loading.deserialize)
    monkeypatch.setattr(loading, "deserialize", decoded)
    r = talk("hybrid", tiers=[HostTier()], **ON_HOST)
    before = r.chat(TOKENS[:38], 4)
    before.say(TOKENS[38:])
    before.close()
    r.prefix.evict()
    kept = [node for node in r.prefix.tree.radix_tree if node.data is not None]
    assert len(kept) > 9, "there are as many windows or states"
    chat = r.begin([*TOKENS, 7])
    assert (chat.cached, r.prefix.stats.host, calls.call_count) == (41, 41, 1)
    assert decoded.call_count <= (1 if hybrid in STRAIGHT and way == "straight" else 2)
    chat.prefill()
    r.check_books()
    again = r.chat([*TOKENS, 8])
    assert (again.cached, calls.call_count) == (41, 1), "what was restored is shared"
    again.close()
    chat.close()
    r.prefix.evict()
    assert r.peek([*TOKENS, 7, 9]) == 42
    assert r.peek([*TOKENS[:30], 9]) == 28
    r.check_books()


def test_what_conversations_have_in_common_comes_from_host_memory_once(
    talk: Talk, hybrid: str, calls: Mock
) -> None:
    r = talk("hybrid", tiers=[HostTier()], **ON_HOST)
    one, other = [*TOKENS[:24], *range(200, 217)], [*TOKENS[:24], *range(300, 317)]
    r.keep(one, 4)
    r.keep(other, 4)
    r.prefix.evict()
    first = r.chat([*one, 7])
    assert (first.cached, calls.call_count) == (41, 2), "up to where they part, and from there on"
    second = r.chat([*other, 7])
    assert (second.cached, calls.call_count) == (41, 3)
    assert second.session.lookup is not None
    assert second.session.lookup.origins == {"device": 24, "host": 17}, "the first part is shared"
    r.check_books()


def test_what_was_restored_leaves_again_when_host_memory_has_lost_it(talk: Talk, hybrid: str) -> None:
    r = talk("hybrid", tiers=[HostTier()], **ON_HOST)
    r.keep(TOKENS, 4)
    r.prefix.evict()
    chat = r.chat([*TOKENS, 7])
    tree = r.prefix.tree
    assert tree.host is not None
    for node in [*tree.radix_tree]:
        if node in tree.host:
            tree._leave_host(node)
    assert not len(tree.host)
    r.check_books()
    chat.close()
    r.prefix.evict()
    assert not len(tree.device)
    assert r.peek([*TOKENS, 7, 9]) == 42
    r.check_books()


def test_what_was_put_into_cells_is_kept_as_it_is(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree keeps the snapshot that was restored, and takes no second one of the same cells."""
    r = talk(tiers=[HostTier()], capacity=120)
    r.keep(TOKENS)
    r.prefix.evict()
    taken = Mock(side_effect=r.cache.snapshot)
    monkeypatch.setattr(r.cache, "snapshot", taken)
    chat = r.chat([*TOKENS, 7])
    assert (chat.cached, r.prefix.stats.host, taken.call_count) == (41, 41, 0)
    (node,) = r.prefix.tree.radix_tree
    assert node.data is not None
    assert node.data.tier == "cache"
    r.check_books()
    chat.close(keep=False)
    assert r.peek([*TOKENS, 7]) == 41
    assert r.prefix.stats.device == 41


def test_a_chain_in_a_store_goes_in_one_step_with_its_last_state(
    talk: Talk, hybrid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    first = talk("hybrid", tiers=[store], **ON_HOST)
    first.keep(TOKENS, 4)
    first.prefix.close()
    r = talk("hybrid", tiers=[store], **ON_HOST)
    steps = Mock(side_effect=loading.restore_serialized)
    monkeypatch.setattr(matcher, "restore_serialized", steps)
    assert r.peek([*TOKENS, 7]) == 41
    assert steps.call_count == 1
    assert len(steps.call_args.args[2]) > 1 or "window" in hybrid
    r.check_books()


def test_of_a_damaged_chain_what_is_whole_is_restored(
    talk: Talk, hybrid: str, caplog: pytest.LogCaptureFixture
) -> None:
    r = talk("hybrid", tiers=[HostTier()], **ON_HOST)
    r.keep(TOKENS, 4)
    r.prefix.evict()
    _, chain = r.prefix.tree.along(r.prefix.tree.walk(r.prefix.alphabet.encode([*TOKENS, 7])))
    damaged = chain[-3] if len(chain) > 2 else chain[-1]
    assert damaged.data is not None
    assert damaged.data.serialized is not None
    assert damaged.parent is not None
    whole = damaged.parent.end
    arrays = damaged.data.serialized.arrays
    of_all_tokens = (at for at in ("0/0/1.0", "1/2.0", "0/1.0") if at in arrays)
    name = next(of_all_tokens)
    damaged.data.serialized = SerializedSnapshot(
        damaged.data.serialized.meta, {**arrays, name: arrays[name][..., :1].copy()}
    )
    assert r.peek([*TOKENS, 7]) == whole
    assert [message for message in caplog.messages if "is dropped" in message]
    r.check_books()


def test_a_chain_comes_back_on_other_backends(other: ml.Backend, hybrid: str, calls: Mock) -> None:
    setup = {name: value for name, value in ON_HOST.items() if name != "in_flight"}
    r = Rig(conversing.ConversationSetup("hybrid", **setup), other, tiers=[HostTier()])
    r.keep(TOKENS, 4)
    for round_ in (1, 2):
        r.prefix.evict()
        assert r.peek([*TOKENS, 7]) == 41
        assert calls.call_count == round_
        r.check_books()
    r.prefix.close()
