"""Threads of tests: several at once that take turns often, and another one that goes on living."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    """Threads take turns hundreds of times as often as they do otherwise."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def at_once(work: Callable[[Any], object], arguments: Sequence[Any]) -> None:
    """``work(argument)`` for each, in as many threads, which take turns often."""
    with switching_often(), ThreadPoolExecutor(len(arguments)) as pool:
        list(pool.map(work, arguments))


@pytest.fixture
def other() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Makes a call in another thread, which goes on living, and gives or raises what it does."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda call: pool.submit(call).result(timeout=60)
