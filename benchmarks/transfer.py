"""What benchmarks of stores share: an entry's bytes, a plain TCP socket beside the stores, tables.

The socket leads to a process that keeps what it gets, as a server does: either in memory that it has used
before, or in fresh memory, which its system has to find and clear page by page on the way.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from benchmarks.pages import milliseconds, table
from kvcache.testing.bench import Contender, Trial

MIB = 1 << 20
LAYERS = 32
SOCKET = "plain TCP socket"
FRESH = "plain TCP socket, into fresh memory"

Contenders = Mapping[str, Mapping[str, Contender]]
"""By operation, and by name; the first of an operation is its floor."""


def page(nbytes: int) -> list[np.ndarray]:
    """Parts as those of a page: a short header, and K and V of 32 layers."""
    rng = np.random.default_rng(0)
    header = rng.integers(0, 256, 4096, np.uint8)
    each = (nbytes - header.size) // (2 * LAYERS)
    arrays = [rng.integers(0, 256, each, np.uint8) for _ in range(2 * LAYERS)]
    return [header, *arrays]


class Plain:
    """A socket to a process that keeps ``size`` bytes: ``p`` or ``f`` and the bytes, ``g`` for the bytes."""

    def __init__(self, address: tuple[str, int], size: int) -> None:
        self._socket = socket.create_connection(address, timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._size = size

    def put(self, parts: Sequence[np.ndarray], fresh: bool = False) -> None:
        self._socket.sendall(b"f" if fresh else b"p")
        for part in parts:
            self._socket.sendall(part)
        assert self._socket.recv(1) == b"k"

    def get(self, buffer: memoryview) -> None:
        self._socket.sendall(b"g")
        done = 0
        while done < self._size:
            done += self._socket.recv_into(buffer[done:])

    def close(self) -> None:
        self._socket.close()


def _keep(listener: socket.socket, size: int) -> None:
    """The other process of ``Plain``."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    used = memoryview(bytearray(size))
    kept = used
    while command := connection.recv(1):
        if command == b"g":
            connection.sendall(kept)
            continue
        into = memoryview(mmap.mmap(-1, size, mmap.MAP_PRIVATE)) if command == b"f" else used
        done = 0
        while done < size:
            count = connection.recv_into(into[done:])
            if not count:
                return
            done += count
        connection.sendall(b"k")
        kept = into  # and what was kept goes, when that is timed no more


@contextlib.contextmanager
def plain_socket(size: int) -> Iterator[Plain]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = multiprocessing.get_context("spawn").Process(target=_keep, args=(listener, size), daemon=True)
        other.start()
        plain = Plain(listener.getsockname(), size)
        try:
            yield plain
        finally:
            plain.close()
            other.join(10)


def floors(plain: Plain, parts: Sequence[np.ndarray]) -> dict[str, Contender]:
    """The socket, into memory that was used before, and into fresh memory."""
    return {
        SOCKET: Contender(lambda: plain.put(parts)),
        FRESH: Contender(lambda: plain.put(parts, fresh=True)),
    }


def timed(found: Contenders, rounds: int) -> dict[str, Trial]:
    """Every round runs each once, a put before the get of the same bytes; the order turns.

    The first round is not counted.
    """
    times: dict[str, dict[str, list[float]]] = {op: {name: [] for name in of} for op, of in found.items()}
    for i in range(rounds + 1):
        for op, of in found.items():
            order = list(of.items())
            turn = i % len(order)
            for name, contender in order[turn:] + order[:turn]:
                contender.prepare()
                start = time.perf_counter()
                contender.call()
                if i:
                    times[op][name].append((time.perf_counter() - start) * 1e6)
                contender.finish()
    return {op: Trial(of, floor=next(iter(of))) for op, of in times.items()}


# What is printed.


def show(found: Contenders, size: int, rounds: int) -> None:
    """Time them, and print a table for each operation: medians, and multiples of the floors' throughput."""
    for op, trial in timed(found, rounds).items():
        against = [trial.floor, *(name for name in (FRESH,) if name in trial.times)]
        rows = []
        for name, sample in trial.samples().items():
            ratios = (_ratio(trial, name, floor) for floor in against)
            rows.append([name, f"{size / sample.median / 1e3:.2f}", milliseconds(sample), *ratios])
        print(f"\n{table([op, 'GB/s', 'milliseconds', *(f'x {name}' for name in against)], rows)}")


def _ratio(trial: Trial, name: str, floor: str) -> str:
    """How many times the floor's throughput, round by round."""
    pairs = zip(trial.times[floor], trial.times[name], strict=True)
    return milliseconds(Trial({"": [1e3 * theirs / mine for theirs, mine in pairs]}, floor="").sample(""))


def show_calls(calls: Mapping[str, Callable[[], object]], rounds: int) -> None:
    """Print what small calls take, for which the way there and back counts."""
    rows = []
    for name, call in calls.items():
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        rows.append((name, f"{statistics.median(times):,.0f}"))
    print(f"\n{table(('small calls', 'microseconds'), rows)}")
