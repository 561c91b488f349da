"""What is kept and not written says so when its PrefixCache ends without ``close``."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

import ml
from kvcache import Batch, CausalCache, PrefixCache
from kvcache.stores import MemoryStore

PROGRAM = """
import sys
from pathlib import Path

import ml
from kvcache import Batch, CausalCache, PrefixCache

backend = ml.open_backend("numpy")
cache, ctx = CausalCache(), backend.new_context()
cache.init(backend, ml.DType.F32, 2, 64, 64)
prefix = PrefixCache(cache, tiers=[Path(sys.argv[1])], identity={"model": "m"}, block_size=8)
with prefix.begin(range(20)) as session:
    cache.start_forward(ctx, Batch(range(20), [session.seq] * 20))
    new = ctx.zeros((20, 1, 4), ml.DType.F32)
    cache.put(ctx, new, new)
if sys.argv[2] == "flush":
    prefix.flush()
if sys.argv[2] == "close":
    prefix.close()
"""


@pytest.mark.parametrize(("ends", "warns"), [("", True), ("flush", False), ("close", False)])
def test_a_process_that_ends_unwritten_says_what_is_lost(tmp_path: Path, ends: str, warns: bool) -> None:
    pytest.importorskip("xxhash")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "kept"), ends]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert ("640 B that it kept are not in its stores; call close()" in done.stderr) is warns


def test_one_that_is_dropped_says_so_at_once(caplog: pytest.LogCaptureFixture) -> None:
    backend = ml.open_backend("numpy")
    cache, ctx = CausalCache(), backend.new_context()
    cache.init(backend, ml.DType.F32, 2, 64, 64)
    prefix = PrefixCache(cache, tiers=[MemoryStore()], identity={"model": "m"})
    with prefix.begin([1, 2, 3]) as session:
        cache.start_forward(ctx, Batch(range(3), [session.seq] * 3))
        new = ctx.zeros((3, 1, 4), ml.DType.F32)
        cache.put(ctx, new, new)
    del prefix, session
    gc.collect()
    assert ["ended without close()" in message for message in caplog.messages] == [True]
