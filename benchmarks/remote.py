"""ValkeyStore against a plain TCP socket that moves the same bytes: ``python -m benchmarks.remote``.

Everything is on loopback and in turn, with real servers: one at its memory limit, which evicts and so uses
its memory again; one that is emptied before each put, and gives most of its memory back to the system; and
one that has room for all that is put, each time in memory that it never used. ``plain TCP socket`` is the
floor whose receiver uses its memory again; beside it stands the one that takes fresh memory each time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.remote_library import read_by_library
from benchmarks.transfer import MIB, SOCKET, Plain, floors, heading, options, page, plain_socket, show
from kvcache.bench.timing import Contender
from kvcache.stores import ValkeyStore
from kvcache.testing.servers import ValkeyServer

__all__ = ["main"]

FULL = 16
"""Entries that the server has room for, which is at its limit."""
AGE = 2.5
"""Seconds after which what fills it is older than what is put: servers count them whole."""


class Puts:
    """Entries of the same bytes under a new key each time."""

    def __init__(self, store: ValkeyStore, parts: Sequence[np.ndarray]) -> None:
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


def contenders(
    plain: Plain, stores: Sequence[ValkeyStore], client: Any, parts: Sequence[np.ndarray]
) -> dict[str, dict[str, Contender]]:
    """``stores``: in a server at its limit, one that is emptied, and one with room for all.

    And one in the first server that reads its replies by the client's library.
    """
    whole = np.concatenate(parts)
    size = whole.nbytes
    buffer = np.zeros(size, np.uint8)
    view = memoryview(buffer)
    full, emptied, growing, library = stores
    put_full = Puts(full, parts)
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

    def put_emptied() -> None:
        assert emptied.put("page", parts)

    def get(store: ValkeyStore) -> None:
        assert store.get_into(put_full.last, buffer)

    put_full.fill()
    return {
        "put": {
            **floors(plain, parts),
            "ValkeyStore.put, a server at its maxmemory": Contender(put_full),
            "ValkeyStore.put, a server that is empty": Contender(put_emptied, lambda: emptied.delete("page")),
            "ValkeyStore.put, a server's fresh memory": Contender(Puts(growing, parts)),
            "the client's own SETs, no digest": Contender(client_put),
        },
        "get": {
            SOCKET: Contender(lambda: plain.get(view), finish=check),
            "ValkeyStore.get_into": Contender(lambda: get(full), finish=check),
            "the same, replies read by libvalkey": Contender(lambda: get(library), finish=check),
            "the client's own GETs, no digest": Contender(client_get, finish=check),
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--digest", default="xxh3_128")
    parser.add_argument("--server", nargs="*", default=[], help="further options of the server, without --")
    chosen = parser.parse_args(arguments)
    further = [f"--{word}" if i % 2 == 0 else word for i, word in enumerate(chosen.server)]
    heading(
        "A remote store on loopback", chosen.rounds, f"digest {chosen.digest}", f"{ValkeyServer.program()}"
    )
    for mib in chosen.mib:
        parts = page(mib * MIB)
        size = sum(part.nbytes for part in parts)
        limit = ("--maxmemory", str(FULL * size), "--maxmemory-policy", "allkeys-lru")
        with contextlib.ExitStack() as stack:
            plain = stack.enter_context(plain_socket(size))
            servers = [stack.enter_context(ValkeyServer(*of, *further)) for of in (limit, (), ())]
            stores = [
                stack.enter_context(ValkeyStore(server.url, digest=chosen.digest)) for server in servers
            ]
            stores.append(stack.enter_context(ValkeyStore(servers[0].url, digest=chosen.digest)))
            with read_by_library():
                stores[-1].ping()  # its one connection, which serves all its calls
            client = stack.enter_context(_client(servers[0].port))
            print(f"\n## {mib} MiB")
            show(contenders(plain, stores, client, parts), size, chosen.rounds, stores[1])


def _client(port: int) -> Any:
    from valkey import Valkey

    return Valkey(port=port)


if __name__ == "__main__":
    main()
