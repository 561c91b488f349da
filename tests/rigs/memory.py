"""What a call allocates."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """``most()``: the bytes that Python and NumPy have held at most since it began."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
