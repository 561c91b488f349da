"""Stores beside plain files, memory or a socket that move the same bytes: ``python -m benchmarks.stores``.

``file``: files, beside plain reading and writing, and memory beside memcpy. ``valkey``: on loopback with real
servers, one at its memory limit, which evicts and so uses its memory again; one that is emptied before each
put, and gives most of its memory back to the system; one that has room for all that is put, each time in
memory that it never used. ``mooncake``: a real pool whose memory is another process's, allocated beforehand.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import machine
from benchmarks.transfer import MIB, SOCKET, floors, page, plain_socket, show, show_calls
from kvcache.stores import FileStore, Keys, MemoryStore, SnapshotStore
from kvcache.testing.bench import Contender

Found = dict[str, dict[str, Contender]]
PART = 128 << 10
"""Bytes of an entry of 512 tokens that lie in a run: one head of 128 in a 16-bit dtype."""
FULL = 16
"""Entries that the Valkey server has room for, which is at its limit."""
AGE = 2.5
"""Seconds after which what fills it is older than what is put: servers count them whole."""


class Entry:
    """The parts of an entry, all of it in a row, and a buffer for it that was touched before."""

    def __init__(self, nbytes: int) -> None:
        self.parts = page(nbytes)
        self.whole = np.concatenate(self.parts)
        self.size = self.whole.nbytes
        self.buffer = np.zeros(self.size, np.uint8)
        self.view = memoryview(self.buffer)

    def check(self) -> None:
        assert np.array_equal(self.buffer, self.whole)
        self.buffer.fill(0)

    def put(self, store: SnapshotStore, parts: Sequence[np.ndarray] | None = None) -> Contender:
        """The entry anew, which is not there."""
        return Contender(lambda: store.put("page", parts or self.parts), lambda: store.delete("page"))

    def get(self, store: SnapshotStore, key: str = "page") -> Contender:
        return Contender(lambda: store.get_into(key, self.buffer), finish=self.check)


# Files and memory.


def in_files(entry: Entry, folder: Path) -> Found:
    stores = {durable: FileStore(folder / f"store-{durable}", durable=durable) for durable in (False, True)}
    memory, plain = MemoryStore(), folder / "plain"
    for store in (memory, stores[False]):
        store.put("read", entry.parts)
    path = folder / "store-False" / "pages" / "read.entry"

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            done = 0
            while done < entry.size:
                done += file.readinto(entry.view[done:])

    def read_in_parts() -> None:
        reader = stores[False].reader("read")
        assert reader is not None
        reader.fill([entry.buffer[start : start + PART] for start in range(0, entry.size, PART)])

    def write(durable: bool) -> None:
        with open(plain, "wb", buffering=0) as file:
            for part in entry.parts:
                done = 0
                while done < part.nbytes:
                    done += file.write(memoryview(part)[done:])
            if durable:
                os.fsync(file.fileno())

    def remove() -> None:
        plain.unlink(missing_ok=True)

    return {
        "read": {
            "plain readinto": Contender(read),
            "FileStore.get_into": Contender(lambda: stores[False].get_into("read", entry.buffer)),
            "FileStore.reader": Contender(read_in_parts),
        },
        "written": {
            "plain write": Contender(lambda: write(False), remove),
            "FileStore.put, durable=False": entry.put(stores[False]),
        },
        "written to the device": {
            "plain write and fsync": Contender(lambda: write(True), remove),
            "FileStore.put, durable=True": entry.put(stores[True]),
        },
        "copied in memory": {
            "memcpy": Contender(lambda: np.copyto(entry.buffer, entry.whole)),
            "MemoryStore.get_into": Contender(lambda: memory.get_into("read", entry.buffer)),
        },
    }


def files(entry: Entry, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        show(in_files(entry, Path(folder)), entry.size, options.rounds)
        tokens, keys = list(range(100_000)), Keys({"model": "m"})
        chain = keys.chain(tokens).aligned
        store = FileStore(Path(folder) / "keys", durable=False)
        for key in chain:
            store.put(key, [b"x"])
        calls = {
            "Keys.chain of 100,000 tokens": lambda: keys.chain(tokens),
            f"FileStore.stat of {len(chain)} keys": lambda: store.stat(chain),
            f"FileStore.prefix of {len(chain)} keys": lambda: store.prefix(chain),
        }
        show_calls(calls, options.rounds)


# Valkey.


class Puts:
    """Entries of the same bytes under a new key each time."""

    def __init__(self, store: SnapshotStore, parts: Sequence[np.ndarray]) -> None:
        self._store, self._parts = store, parts
        self._count = 0

    def __call__(self) -> None:
        self._count += 1
        assert self._store.put(self.last, self._parts)

    @property
    def last(self) -> str:
        return f"page{self._count}"

    def fill(self) -> None:
        """Bring the server to its limit, and let what is there grow older than what comes."""
        for _ in range(2):
            for _ in range(FULL // 2):
                self()
            time.sleep(AGE)


def in_valkey(entry: Entry, stores: Sequence[SnapshotStore], client: Any) -> Found:
    """``stores``: in a server at its limit, one that is emptied, one with room for all; and one in the first
    server that reads its replies by the client's library."""
    full, emptied, growing, library = stores
    put_full = Puts(full, entry.parts)
    names = {f"client:{start}": start for start in range(0, entry.size, 4 * MIB)}

    def client_put() -> None:
        with client.pipeline(transaction=False) as pipe:
            for name, start in names.items():
                pipe.set(name, entry.whole[start : start + 4 * MIB].data)
            pipe.execute()

    def client_get() -> None:
        for name, start in names.items():
            value = client.get(name)
            entry.view[start : start + len(value)] = value

    def get(store: SnapshotStore) -> Contender:
        return Contender(lambda: store.get_into(put_full.last, entry.buffer), finish=entry.check)

    put_full.fill()
    return {
        "put": {
            "ValkeyStore.put, a server at its maxmemory": Contender(put_full),
            "ValkeyStore.put, a server that is empty": entry.put(emptied),
            "ValkeyStore.put, a server's fresh memory": Contender(Puts(growing, entry.parts)),
            "the client's own SETs, no digest": Contender(client_put),
        },
        "get": {
            "ValkeyStore.get_into": get(full),
            "the same, replies read by libvalkey": get(library),
            "the client's own GETs, no digest": Contender(client_get, finish=entry.check),
        },
    }


def valkey(entry: Entry, options: argparse.Namespace) -> None:
    from valkey import Valkey

    from benchmarks.library import read_by_library
    from kvcache.stores import ValkeyStore
    from tests.rigs.servers import ValkeyServer

    further = [f"--{word}" if i % 2 == 0 else word for i, word in enumerate(options.server)]
    limit = ("--maxmemory", str(FULL * entry.size), "--maxmemory-policy", "allkeys-lru")
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ValkeyServer(*of, *further)) for of in (limit, (), ())]
        places = [*servers, servers[0]]
        stores = [stack.enter_context(ValkeyStore(place.url, digest=options.digest)) for place in places]
        with read_by_library():
            stores[-1].ping()  # its one connection, which serves all its calls
        client = stack.enter_context(Valkey(port=servers[0].port))
        beside_a_socket(entry, in_valkey(entry, stores, client), options, stores[1])


# Mooncake.


def in_pool(entry: Entry, store: Any) -> Found:
    """The package's own calls use memory that is registered."""
    native = store._linked()[0].native
    for memory in (entry.whole, entry.buffer):
        native.register_buffer(memory.ctypes.data, memory.nbytes)
    address, own = entry.whole.ctypes.data, entry.buffer.ctypes.data
    return {
        "put": {
            "MooncakeStore.put": entry.put(store),
            "the package's own put_from, no digest": Contender(
                lambda: native.put_from("own", address, entry.size), lambda: native.remove("own", True)
            ),
        },
        "get": {
            "MooncakeStore.get_into": entry.get(store),
            "the package's own get_into, no digest": Contender(
                lambda: native.get_into("own", own, entry.size), finish=entry.check
            ),
        },
    }


def mooncake(entry: Entry, options: argparse.Namespace) -> None:
    from kvcache.stores import MooncakeStore
    from tests.rigs.mooncake_pool import MooncakePool

    if reason := MooncakePool.missing():
        raise SystemExit(f"no pool can run here: {reason}")
    with MooncakePool() as pool:
        pool.add_host(8 * entry.size)
        with MooncakeStore(pool.url) as store:
            beside_a_socket(entry, in_pool(entry, store), options, store)


def beside_a_socket(entry: Entry, found: Found, options: argparse.Namespace, store: SnapshotStore) -> None:
    with plain_socket(entry.size) as plain:
        get = Contender(lambda: plain.get(entry.view), finish=entry.check)
        beside = {"put": floors(plain, entry.parts) | found["put"], "get": {SOCKET: get} | found["get"]}
        show(beside, entry.size, options.rounds)
    store.put("small", [bytes(1000)])
    keys, buffer = [f"k{i}" for i in range(256)], bytearray(1000)
    calls = {
        "stat of one key": lambda: store.stat(["small"]),
        "stat of 256 keys that are not there": lambda: store.stat(keys),
        "get_into of 1,000 bytes": lambda: store.get_into("small", buffer),
    }
    show_calls(calls, 20 * options.rounds)


KINDS = {"file": files, "valkey": valkey, "mooncake": mooncake}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stores", description=__doc__)
    parser.add_argument("kinds", nargs="*", default=["file"], help=f"of {', '.join(KINDS)} (file)")
    parser.add_argument("--mib", type=int, nargs="+", default=[64], help="sizes of entries (64)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--folder", type=Path, help="on the file system to be measured; default: the system's"
    )
    parser.add_argument("--digest", default="xxh3_128", help="of ValkeyStore")
    parser.add_argument(
        "--server", nargs="*", default=[], help="further options of Valkey's server, without --"
    )
    options = parser.parse_args()
    print("Median [10th, 90th percentile] of rounds in turn; ratios are those of the rounds' own throughput.")
    print(f"\n{machine()}; {options.rounds} rounds.")
    for kind in options.kinds:
        for mib in options.mib:
            print(f"\n## {kind}, {mib} MiB")
            KINDS[kind](Entry(mib * MIB), options)


if __name__ == "__main__":
    main()
