"""What is being restored stays on the device, also where the cache needs cells for it."""

from __future__ import annotations

import contextlib

import pytest

import kvcache
from kvcache import CacheFullError
from kvcache.offload.tiers import HostTier
from kvcache.prefix.retention import Retention, TokenRange
from kvcache.testing.rigs.protocol import InjectedError

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

    def fail(*_: object) -> bool:
        raise error

    with monkeypatch.context() as patched, contextlib.suppress(CacheFullError, KeyboardInterrupt):
        patched.setattr(r.cache, "restore", fail)
        assert r.begin([*PROMPT, 7, 8]).cached == 0
    assert all(node.data is None or not node.data.restoring for node in r.prefix.tree.radix_tree)
    assert r.prefix.evict() > 0
    assert r.prefix.tree.device.nbytes == 0
