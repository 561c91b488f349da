"""ValkeyStore against a plain TCP socket that moves the same bytes: ``python -m benchmarks.remote``.

Everything is on loopback and in turn: a process that receives the bytes into memory that it has used before
and sends them back, and real servers with the store: one at its memory limit, which evicts and so uses its
memory again, and one that is empty, whose system has to give it fresh pages for every put. The first round of
each is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvcache.bench_timing import Contender, Trial, machine
from kvcache.stores import ValkeyStore
from kvcache.testing.servers import ValkeyServer

__all__ = ["main"]

MIB = 1 << 20
LAYERS = 32
FULL = 16
"""Entries that the server has room for, which is at its limit."""
AGE = 2.5
"""Seconds after which what fills it is older than what is put: servers count them whole."""


def page(nbytes: int) -> list[np.ndarray]:
    """Parts as those of a page: a short header, and K and V of 32 layers."""
    rng = np.random.default_rng(0)
    header = rng.integers(0, 256, 4096, np.uint8)
    each = (nbytes - header.size) // (2 * LAYERS)
    arrays = [rng.integers(0, 256, each, np.uint8) for _ in range(2 * LAYERS)]
    return [header, *arrays]


class Plain:
    """A socket to a process that keeps ``size`` bytes: ``p`` and the bytes, or ``g`` for the bytes."""

    def __init__(self, address: tuple[str, int], size: int) -> None:
        self._socket = socket.create_connection(address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._size = size

    def put(self, parts: Sequence[np.ndarray]) -> None:
        self._socket.sendall(b"p")
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
    """The other process of :class:`Plain`."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    kept = memoryview(bytearray(size))
    while command := connection.recv(1):
        if command == b"g":
            connection.sendall(kept)
            continue
        done = 0
        while done < size:
            count = connection.recv_into(kept[done:])
            if not count:
                return
            done += count
        connection.sendall(b"k")


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


class Keys:
    """A new key for each put, and the last one."""

    def __init__(self) -> None:
        self._count = 0

    def new(self) -> str:
        self._count += 1
        return self.last

    @property
    def last(self) -> str:
        return f"page{self._count}"


def contenders(
    plain: Plain, full: ValkeyStore, empty: ValkeyStore, client: Any, parts: Sequence[np.ndarray]
) -> dict[str, dict[str, Contender]]:
    whole = np.concatenate(parts)
    size = whole.nbytes
    buffer = np.zeros(size, np.uint8)
    view = memoryview(buffer)
    keys = Keys()
    names = [f"client:{start}" for start in range(0, size, 4 * MIB)]

    def check() -> None:
        assert np.array_equal(buffer, whole)
        buffer.fill(0)

    def client_put() -> None:
        with client.pipeline(transaction=False) as pipe:
            for i, name in enumerate(names):
                pipe.set(name, whole[i * 4 * MIB : (i + 1) * 4 * MIB].data)
            pipe.execute()

    def client_get() -> None:
        at = 0
        for name in names:
            value = client.get(name)
            view[at : at + len(value)] = value
            at += len(value)

    def put_full() -> None:
        assert full.put(keys.new(), parts)

    def put_empty() -> None:
        assert empty.put("page", parts)

    def get() -> None:
        assert full.get_into(keys.last, buffer)

    for _ in range(FULL):
        put_full()
    time.sleep(AGE)
    return {
        "put": {
            "plain TCP socket": Contender(lambda: plain.put(parts)),
            "ValkeyStore.put, a server at its maxmemory": Contender(put_full),
            "ValkeyStore.put, a server that is empty": Contender(put_empty, lambda: empty.delete("page")),
            "the client's own SETs, no digest": Contender(client_put),
        },
        "get": {
            "plain TCP socket": Contender(lambda: plain.get(view), finish=check),
            "ValkeyStore.get_into": Contender(get, finish=check),
            "the client's own GETs, no digest": Contender(client_get, finish=check),
        },
    }


def timed(found: dict[str, dict[str, Contender]], rounds: int) -> dict[str, Trial]:
    """Every round runs each once, a put before the get of the same bytes; the order turns."""
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


def table(op: str, trial: Trial, size: int) -> list[str]:
    lines = ["", f"| {op} | GB/s | milliseconds | x the socket's throughput |", "|---|---|---|---|"]
    for name, sample in trial.samples().items():
        figures = [f"{value / 1000:,.1f}" for value in (sample.median, sample.low, sample.high)]
        speed = size / sample.median / 1e3
        lines.append(
            f"| {name} | {speed:.2f} | {figures[0]} [{figures[1]}, {figures[2]}] | {1 / sample.ratio:.2f} |"
        )
    return lines


def round_trips(store: ValkeyStore, rounds: int) -> list[str]:
    """Small calls, for which the way there and back counts."""
    store.put("small", [bytes(1000)])
    buffer = bytearray(1000)
    keys = [f"k{i}" for i in range(256)]
    calls: dict[str, Callable[[], object]] = {
        "stat of one key": lambda: store.stat(["small"]),
        "stat of 256 keys that are not there": lambda: store.stat(keys),
        "get_into of 1,000 bytes": lambda: store.get_into("small", buffer),
    }
    lines = ["", "| small calls | microseconds |", "|---|---|"]
    for name, call in calls.items():
        times = []
        for _ in range(20 * rounds):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        lines.append(f"| {name} | {np.median(times):,.0f} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[64], help="sizes of entries")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--digest", default="xxh3_128")
    parser.add_argument("--server", nargs="*", default=[], help="further options of the server, without --")
    options = parser.parse_args(arguments)
    options.server = [f"--{word}" if i % 2 == 0 else word for i, word in enumerate(options.server)]
    print("# A remote store on loopback\n")
    print("Median [10th, 90th percentile] of rounds in turn; the ratio is the median of the rounds' own.")
    print(f"\n{machine()}; {options.rounds} rounds; digest {options.digest}; {ValkeyServer.program()}.")
    for mib in options.mib:
        parts = page(mib * MIB)
        size = sum(part.nbytes for part in parts)
        with contextlib.ExitStack() as stack:
            plain = stack.enter_context(plain_socket(size))
            limit = ("--maxmemory", str(FULL * size), "--maxmemory-policy", "allkeys-lru")
            full = stack.enter_context(ValkeyServer(*limit, *options.server))
            empty = stack.enter_context(ValkeyServer(*options.server))
            stores = [
                stack.enter_context(ValkeyStore(server.url, digest=options.digest))
                for server in (full, empty)
            ]
            client = stack.enter_context(_client(full.port))
            print(f"\n## {mib} MiB")
            for op, trial in timed(contenders(plain, *stores, client, parts), options.rounds).items():
                print("\n".join(table(op, trial, size)))
            print("\n".join(round_trips(stores[1], options.rounds)))


def _client(port: int) -> Any:
    from valkey import Valkey

    return Valkey(port=port)


if __name__ == "__main__":
    main()
