"""ValkeyStore over a server that is killed at random moments, and shared by many processes at once."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("valkey", reason="the package valkey is not installed: pip install 'ml-kvcache[valkey]'")

from valkey import Valkey

from kvcache.stores import StoreUnavailable, ValkeyStore
from kvcache.stores.valkey.manifest import CHUNK
from kvcache.testing.servers import ValkeyServer
from kvcache.testing.stores import content

pytestmark = pytest.mark.skipif(
    ValkeyServer.program() is None, reason="neither valkey-server nor redis-server is installed"
)
PROGRAM = Path(__file__).with_name("stores_valkey_sharing.py")
SIZES = [10, 50_000, CHUNK - 1, CHUNK + 7, 2 * CHUNK + 3]
CONTENTS = {f"k{i}": content(f"k{i}", size) for i, size in enumerate(SIZES)}
KILLS = 200
PERSISTENT_KILLS = 12


@dataclass
class Life:
    """Which life of the server this is: odd while it runs. Read before and after a call, to judge it."""

    number: int = 0
    over: bool = False
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def unbroken(self) -> int | None:
        return self.number if self.number % 2 else None


def call_all_the_time(store: ValkeyStore, life: Life, seed: int, problems: list[str]) -> None:
    """Put and get until it is over. Whatever happens to the server, what comes back is right."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    keys = [key for i, key in enumerate(CONTENTS) if i % 2 == seed or i == 4]
    buffers = {key: bytearray(len(CONTENTS[key])) for key in keys}
    mine: set[str] = set()
    started = None
    while not life.over:
        if started is None or started != life.unbroken:
            started = life.unbroken
            mine.clear()
        call = rng.choice(["put", "get", "get"])
        key = rng.choice(sorted(mine) if call == "get" and mine and rng.random() < 0.7 else keys)
        before = life.unbroken
        try:
            if call == "put":
                found = store.put(key, [CONTENTS[key][:99], CONTENTS[key][99:]])
                if found:
                    mine.add(key)
            else:
                buffers[key][:] = bytes(len(buffers[key]))
                found = store.get_into(key, buffers[key])
                if found and buffers[key] != CONTENTS[key]:
                    problems.append(f"{key} came back as something else")
            seen[f"{call} {found}"] += 1
            same = before is not None and before == life.number and before == started
            if call == "get" and not found and same and key in mine:
                problems.append(f"{key} was acknowledged and is lost")
        except StoreUnavailable as error:
            seen[f"{call} unavailable"] += 1
            seen["cut off"] += "Connection refused" not in str(error)
            time.sleep(0.0005)
        except Exception as error:
            problems.append(f"{call} {key}: {error!r}")
            return
    life.seen.update(seen)


def test_killed_at_any_moment_200_times_nothing_wrong_comes_back_and_the_client_goes_on() -> None:
    rng, life, problems, kills = random.Random(1), Life(), list[str](), 0
    with ValkeyServer() as server, ValkeyStore(server.url, timeout=5, connect_timeout=5) as store:
        workers = [
            threading.Thread(target=call_all_the_time, args=(store, life, seed, problems)) for seed in (0, 1)
        ]
        life.number = 1
        for worker in workers:
            worker.start()
        try:
            for _ in range(KILLS):
                time.sleep(rng.random() * 0.05)
                life.number += 1
                server.kill()
                kills += 1
                server.start()
                life.number += 1
                assert not problems
            key = rng.choice(list(CONTENTS))
            store.put(key, [CONTENTS[key]])  # the same client, at once
            assert store.stat([key])[0] is not None
        finally:
            life.over = True
            for worker in workers:
                worker.join(60)
        assert not any(worker.is_alive() for worker in workers)
    assert not problems
    assert kills == KILLS
    seen = life.seen
    assert min(seen["put True"], seen["get True"], seen["cut off"]) > KILLS / 10, seen


def test_of_a_server_that_keeps_its_data_all_that_was_acknowledged_is_there_after_each_kill() -> None:
    """With an append-only file, whatever it had half written when it was killed."""
    rng, acknowledged, cut = random.Random(2), dict[str, bytes](), 0
    options = ("--appendonly", "yes", "--appendfsync", "no", "--auto-aof-rewrite-percentage", "0")
    with ValkeyServer(*options) as server, ValkeyStore(server.url) as store:
        for kill in range(PERSISTENT_KILLS):
            timer = threading.Timer(rng.random() * 0.1, server.kill)
            timer.start()
            try:
                for i in range(1000):
                    key, data = f"p{kill}-{i}", CONTENTS[f"k{rng.randrange(4)}"]
                    assert store.put(key, [data])
                    acknowledged[key] = data
            except StoreUnavailable:
                cut += 1
            timer.join()
            server.start()
            for key, data in acknowledged.items():
                buffer = bytearray(len(data))
                assert store.get_into(key, buffer), key
                assert buffer == data
            assert store.usage().dropped == 0
            for key in rng.sample(sorted(acknowledged), len(acknowledged) // 2):
                assert store.delete(key)
                del acknowledged[key]
    assert cut == PERSISTENT_KILLS


class CutConnection:
    """A way to the server that ends, in both directions, after so many bytes in one of them."""

    def __init__(self, port: int, up: int | None = None, down: int | None = None) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"valkey://127.0.0.1:{self._listener.getsockname()[1]}"
        self._limits = up, down
        self._port = port
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._port))
        self._listener.close()  # whoever comes again is refused
        ways = ((client, server, self._limits[0]), (server, client, self._limits[1]))
        self._threads += [threading.Thread(target=self._pump, args=way) for way in ways]
        for thread in self._threads[1:]:
            thread.start()
        for thread in self._threads[1:]:
            thread.join()
        client.close()
        server.close()

    def _pump(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        with contextlib.suppress(OSError):
            while (limit is None or limit > 0) and (data := source.recv(1 << 16 if limit is None else limit)):
                target.sendall(data)
                limit = None if limit is None else limit - len(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._threads[0].join(30)
        assert not self._threads[0].is_alive()


def cuts(total: int, count: int) -> list[int]:
    """Numbers of bytes: all of the first and the last ones, and some between."""
    edges = [*range(40), *range(total - 40, total)]
    return sorted({cut for cut in (*edges, *range(0, total, max(1, total // count))) if 0 <= cut < total})


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_put_that_is_cut_off_anywhere_has_put_all_or_nothing(way: str) -> None:
    data, done, failed = content("a", 3000), 0, 0
    with ValkeyServer() as server, ValkeyStore(server.url) as direct, Valkey(port=server.port) as client:
        for cut in cuts(3700 if way == "up" else 150, 60):
            connection = CutConnection(server.port, **{way: cut})
            try:
                with ValkeyStore(connection.url, connections=1) as store:
                    acknowledged = store.put("a", [data])
            except StoreUnavailable:
                acknowledged = False
                failed += 1
            connection.close()
            (found,) = direct.stat(["a"])
            assert found is not None or not acknowledged
            if found is not None:
                buffer = bytearray(3000)
                assert direct.get_into("a", buffer)
                assert buffer == data
                done += 1
            assert all(client.pttl(name) > 0 for name in client.keys("*")), "what nobody finds expires"
            client.flushall()
    assert failed > 40
    assert done > 0, "some were cut off after all was there"


def test_a_get_that_is_cut_off_anywhere_fails_or_is_right() -> None:
    data, right, failed = content("a", 3000), 0, 0
    with ValkeyServer() as server, ValkeyStore(server.url) as direct:
        direct.put("a", [data])
        for cut in cuts(3600, 60):
            connection, buffer = CutConnection(server.port, down=cut), bytearray(3000)
            try:
                with ValkeyStore(connection.url, connections=1) as store:
                    assert store.get_into("a", buffer)
                assert buffer == data
                right += 1
            except StoreUnavailable:
                failed += 1
            connection.close()
        assert direct.get_into("a", buffer)
        assert direct.usage().dropped == 0
    assert failed > 60
    assert right > 0


def run(scenario: str, url: str, bug: str = "none") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), scenario, url, bug]
    environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parents[1])}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=200)


def test_eight_writers_and_eight_readers_nothing_is_torn_and_nothing_is_lost() -> None:
    with ValkeyServer() as server:
        done = run("sharing", server.url)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "16 processes" in done.stdout


def test_eight_writers_and_eight_readers_and_deletes_nothing_is_torn() -> None:
    with ValkeyServer() as server:
        done = run("deleting", server.url)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "16 processes" in done.stdout


def test_eight_writers_and_eight_readers_on_a_server_that_evicts_nothing_is_torn() -> None:
    with ValkeyServer("--maxmemory", "60mb", "--maxmemory-policy", "allkeys-lru") as server:
        done = run("evicting", server.url)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "16 processes" in done.stdout


@pytest.mark.parametrize("bug", ["write over", "share a writer id", "manifest first"])
def test_the_scenario_notices_what_it_is_for(bug: str) -> None:
    with ValkeyServer() as server:
        done = run("sharing", server.url, bug)
    assert done.returncode == 1, done.stdout
    assert "Traceback" in done.stderr
