"""What is kept and not written says so when its PrefixCache ends without ``close``."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

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
