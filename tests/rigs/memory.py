"""What a call allocates, and where."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """``most()``: the bytes that Python and NumPy have held at most since it began."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def may_be_huge(address: int, smaps: Path = Path("/proc/self/smaps")) -> bool:
    """Whether huge pages were requested for this page (``madvise``); False where the system does not say."""
    within = False
    page = address // 4096 * 4096 + 4096  # the first that lies in the allocation as a whole
    for line in smaps.read_text().splitlines() if smaps.exists() else ():
        first = line.split(" ", 1)[0]
        if "-" in first:
            begin, end = (int(bound, 16) for bound in first.split("-"))
            within = begin <= page < end
        elif within and first == "VmFlags:":
            return "hg" in line.split()
    return False
