"""What a FileStore's calls cost as its folder grows: ``python -m benchmarks.file_store``.

Entries are written as files first, without a store; they have a manifest and no content, since it is names
and sizes that the index is about. Two stores of one folder, as two processes have them, call in turn:
each put comes after another's. Beside what is evicted stands removing as many files without a store.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import xxhash

from benchmarks.pages import show
from benchmarks.timing import machine
from kvcache.stores import FileStore
from kvcache.stores.manifest import ENTRY, Manifest

NBYTES = 1000
"""Of each entry."""
USED = 20_000
"""Entries, the oldest ones, that are used before one is evicted."""
SECOND = 1_000_000_000
Cost = tuple[float, float]
"""Milliseconds on the clock, and of this process's processor time."""


def key(i: int) -> str:
    return hashlib.sha256(f"{i}".encode()).hexdigest()


def fill(folder: Path, count: int) -> None:
    """``count`` entries, the first one used least recently."""
    FileStore(folder, durable=False).close()
    now, digest = time.time_ns() - count * SECOND, xxhash.xxh3_128(bytes(NBYTES)).hexdigest()
    pages = os.open(folder / "pages", os.O_RDONLY)
    for i in range(count):
        used = now + i * SECOND
        fd = os.open(key(i) + ENTRY, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=pages)
        os.pwrite(fd, Manifest(key(i), NBYTES, digest).encoded(), NBYTES)
        os.utime(fd, ns=(used, used))
        os.close(fd)
    os.close(pages)


def cost(call: Callable[[], object]) -> Cost:
    began, processor = time.perf_counter(), time.process_time()
    call()
    return (time.perf_counter() - began) * 1e3, (time.process_time() - processor) * 1e3


def median(costs: Sequence[Cost]) -> Cost:
    return statistics.median(wall for wall, _ in costs), statistics.median(used for _, used in costs)


def costs(folder: Path, count: int, rounds: int) -> Iterator[tuple[str, Cost]]:
    def opened(budget: int | None = None) -> FileStore:
        return FileStore(folder, budget, durable=False)

    yield "open, the index to be made", cost(lambda: opened().close())
    yield "open", median([cost(lambda: opened().close()) for _ in range(rounds)])
    names = iter(range(count, 1 << 60))
    one, other = opened(), opened()

    def alternating(call: Callable[[FileStore], object]) -> Cost:
        return median(
            [cost(lambda store=store: call(store)) for _ in range(rounds) for store in (one, other)]
        )

    yield "put after another's put", alternating(lambda store: store.put(key(next(names)), [bytes(NBYTES)]))
    chain = [key(i) for i in range(count // 2, count // 2 + 16)]
    yield "prefix of 16 keys", alternating(lambda store: store.prefix(chain))
    yield "usage", alternating(lambda store: store.usage())
    budget = one.usage().nbytes
    for store in (one, other):
        store.close()
    one, other = opened(budget), opened(budget)
    yield (
        "put that evicts one, after another's",
        alternating(lambda store: store.put(key(next(names)), [bytes(NBYTES)])),
    )
    for start in range(0, min(count, USED), 1000):
        one.prefix([key(i) for i in range(start, start + 1000)])
    yield (
        "the first of these after the oldest were used",
        cost(lambda: other.put(key(next(names)), [bytes(NBYTES)])),
    )
    gone = min(count // 2, 50_000)
    budget = one.usage().nbytes - gone * NBYTES
    for store in (one, other):
        store.close()
    wall, processor = cost(lambda: opened(budget).close())
    yield "open that evicts, for each entry", (wall / gone, processor / gone)
    with os.scandir(folder / "pages") as found:
        left = [item.path for item in found][:gone]

    def remove() -> None:
        for path in left:
            os.unlink(path)  # noqa: PTH108

    wall, processor = cost(remove)
    yield "a file removed without a store", (wall / len(left), processor / len(left))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument(
        "--folder", type=Path, help="on the file system to be measured; default: the system's"
    )
    options = parser.parse_args()
    print(f"# A FileStore's index\n\n{machine()}; medians of {options.rounds} rounds, durable=False.")
    print("Milliseconds (of processor time).\n")
    columns: list[dict[str, Cost]] = []
    for count in options.entries:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        fill(folder / "store", count)
        FileStore(folder / "store", durable=False).close()
        index = (folder / "store" / "index" / "entries.sqlite").stat().st_size
        shutil.rmtree(folder / "store" / "index")
        columns.append({})
        for name, found in costs(folder / "store", count, options.rounds):
            print(
                f"{count:,} entries: {name}: {found[0]:,.2f} ({found[1]:,.2f})", file=sys.stderr, flush=True
            )
            columns[-1][name] = found
        shutil.rmtree(folder)
    head = ["", *(f"{count:,} entries" for count in options.entries)]
    show(head, ([name, *(f"{wall:,.2f} ({used:,.2f})" for wall, used in (column[name] for column in columns))]
                for name in columns[0]))  # fmt: skip
    print(f"\nThe index of {count:,} entries takes {index / count:.0f} bytes for each.")


if __name__ == "__main__":
    main()
