"""What an entry takes of the server's memory, and entries in chunks of other sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("valkey", reason="the package valkey is not installed: pip install 'ml-kvcache[valkey]'")

import numpy as np
from valkey import Valkey

from kvcache.stores import ValkeyStore
from kvcache.stores.valkey import store as store_module
from kvcache.stores.valkey import transfer
from kvcache.stores.valkey.manifest import CHUNK
from kvcache.testing.servers import ValkeyServer

pytestmark = pytest.mark.skipif(
    ValkeyServer.program() is None, reason="neither valkey-server nor redis-server is installed"
)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as started:
        yield started


def content(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


def test_an_entry_takes_hardly_more_of_the_servers_memory_than_its_bytes(server: ValkeyServer) -> None:
    size = 6 * CHUNK
    with ValkeyStore(server.url) as store, Valkey(port=server.port) as client:
        assert store.put("a", [content(size)])
        chunks = [client.memory_usage(name, samples=0) for name in client.scan_iter("*:c:*")]
    assert len(chunks) == 6
    assert sum(chunks) < 1.01 * size


def test_entries_in_chunks_of_another_size_are_read(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As hosts with another version of this package put them."""
    data = content(3 * CHUNK + 17)
    with ValkeyStore(server.url, prefix="others") as theirs, ValkeyStore(server.url, prefix="others") as ours:
        with monkeypatch.context() as patched:
            for module in (store_module, transfer):
                patched.setattr(module, "CHUNK", 4 << 20)
            assert theirs.put("a", [data])
        buffer = bytearray(data.nbytes)
        assert ours.get_into("a", buffer)
        assert buffer == data.tobytes()
        assert not ours.put("a", [data])
        assert ours.delete("a")
