"""The shipped suite of stores on ValkeyStore, against a real server on loopback, and over TLS."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvcache.stores import SnapshotStore
from kvcache.testing.servers import ValkeyServer
from kvcache.testing.stores import Called, Model, StoreTests, content, present

pytest.importorskip("valkey", reason="the package valkey is not installed: pip install 'ml-kvcache[valkey]'")
pytestmark = pytest.mark.skipif(
    ValkeyServer.program() is None, reason="neither valkey-server nor redis-server is installed"
)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as running:
        yield running


class ValkeyTests(StoreTests):
    """Every test has a prefix of its own on one server."""

    persistent = True
    budgeted = False
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _server(self, server: ValkeyServer) -> None:
        self.server = server

    def make(self, folder: Path, budget: int | None = None) -> SnapshotStore:
        from kvcache.stores import ValkeyStore

        return ValkeyStore(self.server.url, prefix=folder.name[-64:], timeout=30, **self.options)

    def damage(self, store: SnapshotStore, folder: Path, key: str) -> bool:
        from valkey import Valkey

        from kvcache.stores.valkey.manifest import RemoteManifest

        with Valkey(port=self.server.port) as client:
            (name,) = client.keys(f"{folder.name[-64:]}:*:m:{key}")
            manifest = RemoteManifest.parse(client.get(name), key)
            chunk = name.replace(b":m:" + key.encode(), b":c:" + manifest.writer.encode() + b":0")
            client.setbit(chunk, 4001, 1 - client.getbit(chunk, 4001))
        return True


class TestValkeyStore(ValkeyTests):
    @pytest.mark.parametrize("seed", range(4))
    def test_any_sequence_of_calls_of_two_hosts_agrees_with_a_plain_dictionary(
        self, store: SnapshotStore, tmp_path: Path, seed: int
    ) -> None:
        model, rng = Model(1 << 40), random.Random(seed)
        stores = [store, self.make(tmp_path)]
        for step in range(200):
            call, key = rng.choice(["put", "put", "get", "get", "prefix", "delete"]), rng.choice("abcdef")
            args: Any = key
            if call == "put":
                args = (key, content(f"{key} {step}", rng.choice([0, 1, 900, 70_000])))
            elif call == "prefix":
                args = rng.sample("abcdef", 3)
            found = getattr(Called(rng.choice(stores)), call)(args)
            assert found == getattr(model, call)(args), (seed, step, call, args)
            assert present(rng.choice(stores), "abcdef") == "".join(sorted(model.entries)), (seed, step)
        stores[1].close()


class TestValkeyStoreWithKeyedBlake3(ValkeyTests):
    options: ClassVar[dict[str, Any]] = {"digest": "blake3", "secret": "known to the hosts"}

    @pytest.fixture(autouse=True)
    def _blake3(self) -> None:
        pytest.importorskip("blake3", reason="the package blake3 is not installed")
