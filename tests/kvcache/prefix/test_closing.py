"""What is kept and not written says so when its PrefixCache ends without ``close``."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

import kvcache
import ml
from kvcache import Batch, CausalCache, PrefixCache
from kvcache.stores import MemoryStore


def kept() -> PrefixCache:
    """A PrefixCache that holds 20 tokens of 32 bytes."""
    backend = ml.open_backend("numpy")
    cache, ctx = CausalCache(), backend.new_context()
    cache.init(backend, ml.DType.F32, 2, 64, 64)
    prefix = PrefixCache(cache, tiers=[MemoryStore()], identity={"model": "m"}, block_size=8)
    with prefix.begin(range(20)) as session:
        cache.start_forward(ctx, Batch(range(20), [session.seq] * 20))
        new = ctx.zeros((20, 1, 4), ml.DType.F32)
        cache.put(ctx, new, new)
    return prefix


def test_a_process_that_ends_unwritten_says_what_is_lost() -> None:
    program = "from tests.kvcache.prefix.test_closing import kept; prefix = kept()"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "640 B that it kept are not in its stores; call close()" in done.stderr


@pytest.mark.parametrize(("ends", "warns"), [("", True), ("flush", False), ("close", False)])
def test_one_that_is_dropped_says_so_at_once(
    caplog: pytest.LogCaptureFixture, ends: str, warns: bool
) -> None:
    prefix = kept()
    if ends:
        getattr(prefix, ends)()
    del prefix
    gc.collect()
    assert ["ended without close()" in message for message in caplog.messages] == [True] * warns


def test_a_backend_that_was_closed_first_is_named_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefix = kept()
    prefix.cache.backend.close()
    prefix.close()
    first, last = caplog.records
    assert "640 bytes are lost, as the backend was closed before" in first.getMessage()
    assert first.exc_info is None
    assert "640 B could not be written to any store" in last.getMessage()


@pytest.mark.parametrize("keep", [True, False])
def test_a_session_whose_cache_was_closed_first_says_so(keep: bool) -> None:
    prefix = kept()
    session = prefix.begin([1, 2])
    prefix.cache.close()
    with pytest.raises(kvcache.ClosedError, match=r"^close: the cache was closed before this session"):
        session.close(keep)
    assert session.closed
    assert prefix.sessions == ()
    prefix.close()


def test_a_session_that_its_prefix_cache_closed_says_so() -> None:
    prefix = kept()
    session, other = prefix.begin([1, 2]), prefix.begin([3])
    other.close()
    with pytest.raises(kvcache.ClosedError, match=r"^extend: the session is closed$"):
        other.extend([3])
    prefix.close()
    with pytest.raises(kvcache.ClosedError, match=r"^extend: the session is closed, as its PrefixCache is"):
        session.extend([3])
