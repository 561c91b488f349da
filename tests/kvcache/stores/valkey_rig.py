"""ValkeyStore and the server behind it, on loopback: fixtures and helpers of its tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("valkey", reason="the package valkey is not installed: pip install 'ml-kvcache[valkey]'")

from valkey import Valkey

from kvcache.stores import ValkeyStore
from kvcache.stores.valkey.manifest import CHUNK, RemoteManifest

from ...needs import NO_SERVER
from ...rigs.servers import ValkeyServer
from .stores_rig import server

__all__ = ["BIG", "Open", "chunk_of", "client", "names", "open_here", "served", "server", "store"]

served = pytest.mark.skipif(ValkeyServer.program() is None, reason=NO_SERVER)
BIG = 2 * CHUNK + 5
"""Bytes of an entry of three chunks."""
Open = Callable[..., ValkeyStore]


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[Valkey]:
    """The server, empty, without the store in between."""
    with Valkey(port=server.port) as client:
        client.flushall()
        yield client


@pytest.fixture
def open_here(server: ValkeyServer) -> Iterator[Open]:
    opened: list[ValkeyStore] = []

    def make(**options: Any) -> ValkeyStore:
        opened.append(ValkeyStore(server.url, **options))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def store(client: Valkey, open_here: Open) -> ValkeyStore:
    return open_here()


def names(client: Valkey, kind: str) -> list[bytes]:
    """Of the manifests ("m") or the chunks ("c") that are there."""
    return sorted(client.keys(f"*:{kind}:*"))


def chunk_of(client: Valkey, key: str, i: int = 0) -> bytes:
    manifest = RemoteManifest.parse(client.get(f"kvcache:xxh3:m:{key}"), key)
    return f"kvcache:xxh3:c:{manifest.writer}:{i}".encode()
