"""Any interleaving of sessions, evictions, crashes and damage, against computing every token from nothing."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

import ml
from kvcache.prefix.prefix_cache import PrefixCache, PrefixStats
from kvcache.testing.conversing import CACHES, DIVISIBLE
from kvcache.testing.prefix_traces import NAMES, prefix_failure, random_ops, random_prefix_setup, run_ops
from ml import DType

DTYPES = (DType.F32, DType.F16, DType.BF16, DType.Q8_0, DType.Q4_0)
LONG = 10 if "ML_LONG" in os.environ else 1
NUMPY = range(96 * LONG)

Open = Callable[[str], AbstractContextManager[ml.Backend]]


@pytest.fixture(scope="module")
def numpy() -> Iterator[ml.Backend]:
    with ml.open_backend("numpy") as backend:
        yield backend


@pytest.mark.parametrize("part", range(8))
def test_sessions_see_what_computing_from_nothing_would_store(numpy: ml.Backend, part: int) -> None:
    for seed in NUMPY[part::8]:
        failure = prefix_failure(numpy, seed, DTYPES)
        assert failure is None, failure


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_on_other_backends_too(name: str, open_any: Open) -> None:
    with open_any(name) as backend:
        for seed in range(10000, 10000 + 10 * LONG):
            failure = prefix_failure(backend, seed, DTYPES)
            assert failure is None, failure


def test_the_traces_reuse_from_every_tier_and_do_everything() -> None:
    """What these traces never do, they do not test."""
    setups = [random_prefix_setup(random.Random(seed), DTYPES) for seed in NUMPY]
    assert {setup.talk.cache for setup in setups} == set(CACHES)
    assert {setup.talk.dtype for setup in setups} == set(DTYPES)
    assert {setup.store for setup in setups} == {"", "memory", "file"}
    names: Counter[str] = Counter()
    for seed in NUMPY:
        rnd = random.Random(seed)
        random_prefix_setup(rnd, DTYPES)
        names.update(op[0] for op in random_ops(rnd, rnd.randrange(5, 40)))
    assert min(names[name] for name in NAMES) > 10


@pytest.mark.parametrize("cache", list(CACHES))
def test_the_traces_share_much(cache: str, numpy: ml.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[PrefixStats] = []
    original = PrefixCache.__init__

    def init(self: PrefixCache, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        seen.append(self.stats)

    monkeypatch.setattr(PrefixCache, "__init__", init)
    count = 0
    for seed in NUMPY:
        rnd = random.Random(seed)
        setup = random_prefix_setup(rnd, DTYPES)
        if setup.talk.cache == cache and setup.store and count < 4:
            count += 1
            assert run_ops(setup, numpy, random_ops(rnd, 40)) is None
    total = PrefixStats()
    for stats in seen:
        for origin in ("sessions", "tokens", "live", "device", "host", "store"):
            setattr(total, origin, getattr(total, origin) + getattr(stats, origin))
    assert total.reused > total.tokens / (4 if cache in DIVISIBLE else 20), total
    assert total.device + total.host + total.store > 0
