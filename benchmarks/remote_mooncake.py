"""MooncakeStore against a TCP socket that moves the same bytes: ``python -m benchmarks.remote_mooncake``.

Everything is on loopback and in turn: a process that receives the bytes into memory of its own and sends
them back, and a real pool whose memory is another process's, allocated beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.transfer import MIB, SOCKET, Plain, floors, heading, options, page, plain_socket, show
from kvcache.bench.timing import Contender
from kvcache.stores import MooncakeStore
from tests.mooncake_pool import MooncakePool

__all__ = ["main"]


def contenders(
    plain: Plain, staged: MooncakeStore, registered: MooncakeStore, parts: Sequence[np.ndarray]
) -> dict[str, dict[str, Contender]]:
    """``registered`` has the parts and the buffer registered; the package's own calls use the same memory."""
    whole = np.concatenate(parts)
    buffer = np.zeros(whole.nbytes, np.uint8)
    native: Any = staged._linked()[0].native
    for memory in (whole, buffer):
        registered.register(memory)

    def check() -> None:
        assert np.array_equal(buffer, whole)
        buffer.fill(0)

    def put(store: MooncakeStore, what: Sequence[np.ndarray]) -> Contender:
        return Contender(lambda: store.put("page", what), lambda: store.delete("page"))

    def get(store: MooncakeStore) -> Contender:
        return Contender(lambda: store.get_into("page", buffer), finish=check)

    return {
        "put": {
            **floors(plain, parts),
            "MooncakeStore.put": put(staged, parts),
            "MooncakeStore.put of registered memory": put(registered, [whole]),
            "the package's own put_from, no digest": Contender(
                lambda: native.put_from("own", whole.ctypes.data, whole.nbytes),
                lambda: native.remove("own", True),
            ),
        },
        "get": {
            SOCKET: Contender(lambda: plain.get(memoryview(buffer)), finish=check),
            "MooncakeStore.get_into": get(staged),
            "MooncakeStore.get_into of registered memory": get(registered),
            "the package's own get_into, no digest": Contender(
                lambda: native.get_into("own", buffer.ctypes.data, buffer.nbytes), finish=check
            ),
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    chosen = parser.parse_args(arguments)
    if reason := MooncakePool.missing():
        parser.exit(1, f"no pool can run here: {reason}\n")
    heading("A Mooncake pool on loopback", chosen.rounds)
    for mib in chosen.mib:
        parts = page(mib * MIB)
        size = sum(part.nbytes for part in parts)
        with MooncakePool() as pool, plain_socket(size) as plain:
            pool.add_host(8 * size)
            with (
                MooncakeStore(pool.url, prefix="staged") as staged,
                MooncakeStore(pool.url, prefix="registered") as registered,
            ):
                print(f"\n## {mib} MiB")
                show(contenders(plain, staged, registered, parts), size, chosen.rounds, staged)


if __name__ == "__main__":
    main()
