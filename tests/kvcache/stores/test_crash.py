"""Stores whose clients, servers or machines are killed, shared by processes, cut off, or only to be read."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvcache.stores import StoreUnavailableError
from kvcache.testing.stores import content

from ...needs import need_server
from ...rigs.mooncake_pool import MooncakePool
from ...rigs.servers import ValkeyServer
from .stores_crash import IN_FOLDERS, ON_SERVERS
from .stores_rig import MIB, pool, posix, server

__all__ = ["pool", "server"]

pytestmark = posix
Passes = Callable[..., str]
PROGRAM = Path(__file__).with_name("stores_crash.py")
KILLS = 20
MOST_KILLS = 400
"""Where other programs leave the clients little time between two."""
PERSISTENT_KILLS = 4


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that another user may enter, which pytest's own may not be."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path / "store"
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def passes() -> Iterator[Passes]:
    """``passes(url, scenario, *numbers)`` is what a scenario printed that ended well."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
    with (
        tempfile.TemporaryFile("a+") as told,
        subprocess.Popen(
            [sys.executable, PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=told,
            text=True, env={**environ, "PYTHONPATH": str(PROGRAM.parents[3])},
        ) as program,
    ):  # fmt: skip
        assert program.stdin is not None
        assert program.stdout is not None

        def run(url: str, scenario: str, *numbers: object) -> str:
            told.truncate(0)
            print(json.dumps([url, scenario, [*map(str, numbers)]]), file=program.stdin, flush=True)
            in_time, _, _ = select.select([program.stdout], [], [], 200)
            assert in_time, f"{scenario} has not ended"
            ended, said = json.loads(program.stdout.readline())
            told.seek(0)
            assert ended == 0, told.read()[-4000:]
            return str(said)

        yield run
        program.stdin.close()


def in_folder(folder: Path, budget: int | None = None) -> str:
    return f"file://{folder}?durable=no" + ("" if budget is None else f"&budget={budget}")


def in_pool(pool: MooncakePool) -> str:
    return f"{pool.url}?prefix=crash&staging=64KiB&timeout=20"


# Processes that are killed.


def test_killed_before_and_after_every_call_to_the_system_only_whole_entries_remain(
    passes: Passes, folder: Path
) -> None:
    assert int(passes(in_folder(folder), "killed_at_each_call").split()[0]) > 60


def test_killed_at_any_moment_what_was_acknowledged_is_there(passes: Passes, folder: Path) -> None:
    """Only the oldest have made room."""
    assert int(passes(in_folder(folder, 40_000), "killed_while_writing", 8).split()[2]) > 8


@pytest.mark.parametrize("budget", [None, 40_000])
def test_killed_beside_another_process_whatever_becomes_of_the_index(
    passes: Passes, folder: Path, budget: int | None
) -> None:
    assert int(passes(in_folder(folder, budget), "killed_beside_another", 5).split()[0]) == 10


def test_killed_at_any_moment_what_a_server_acknowledged_is_whole(
    passes: Passes, server: ValkeyServer
) -> None:
    assert int(passes(server.url, "killed_while_writing", 6).split()[2]) > 6


def test_killed_at_any_moment_what_a_pool_acknowledged_is_whole(passes: Passes, pool: MooncakePool) -> None:
    assert int(passes(in_pool(pool), "killed_while_writing", 3).split()[0]) == 3


@pytest.mark.parametrize("scenario", ["orphans_are_taken_over", "late_writers_are_told", "a_fork_is_noticed"])
def test_a_writer_to_a_pool_that_died_hands_over_and_one_that_was_given_up_or_forked_is_told(
    passes: Passes, pool: MooncakePool, scenario: str
) -> None:
    passes(in_pool(pool), scenario)


def test_nobody_waits_for_a_frozen_master(passes: Passes) -> None:
    if reason := MooncakePool.missing():
        pytest.skip(reason)
    with MooncakePool() as own:
        own.add_host(16 * MIB)
        passes(own.url, "nobody_waits_for_a_frozen_master", own.master.pid)


# Processes that share.


def test_two_writers_and_two_readers_share_a_folder_with_eviction(passes: Passes, folder: Path) -> None:
    assert passes(in_folder(folder, 64_000), "sharing", 2, 2, "delete") == "4 processes\n"


@pytest.mark.parametrize("mode", ["keep", "delete", "evict"])
def test_writers_and_readers_of_a_server_nothing_is_torn_and_nothing_is_lost(
    passes: Passes, mode: str
) -> None:
    need_server()
    with ValkeyServer(
        *(["--maxmemory", "30mb", "--maxmemory-policy", "allkeys-lru"] if mode == "evict" else ())
    ) as own:
        assert passes(own.url, "sharing", 4, 1, mode) == "5 processes\n"


def test_of_many_processes_that_put_one_key_into_a_pool_one_writes(
    passes: Passes, pool: MooncakePool
) -> None:
    assert passes(in_pool(pool), "sharing", 3, 0, "keep") == "3 processes\n"


def test_a_folder_that_may_only_be_read_is_served_and_not_touched(passes: Passes, folder: Path) -> None:
    passes(in_folder(folder), "reading_only")


def test_the_scenarios_notice_what_they_are_for_in_folders(passes: Passes, folder: Path) -> None:
    found = passes(in_folder(folder, 64_000), "bugs")
    assert (found.count(" noticed"), found.count(" not ")) == (len(IN_FOLDERS), 0), found


def test_the_scenarios_notice_what_they_are_for_on_servers(passes: Passes, server: ValkeyServer) -> None:
    found = passes(server.url[:-1], "bugs")
    assert (found.count(" noticed"), found.count(" not ")) == (len(ON_SERVERS), 0), found


# A server that is killed.

SIZES = [10, 50_000, 4_190_207, 4_190_215, 8_380_419]
"""Bytes, around the size of one chunk and of two."""
CONTENTS = {f"k{i}": content(f"k{i}", size) for i, size in enumerate(SIZES)}


@dataclass
class Life:
    """Which life of the server this is: odd while it runs. Read before and after a call, to judge it."""

    number: int = 0
    over: bool = False
    seen: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))
    """What became of the calls of each worker."""

    @property
    def fewest(self) -> int:
        """Of calls that did what they were asked, and of those that were cut off."""
        both = self.seen[0] + self.seen[1]
        return min(both[kind] for kind in ("put True", "get True", "cut off"))

    @property
    def unbroken(self) -> int | None:
        return self.number if self.number % 2 else None


def call_all_the_time(store: object, life: Life, seed: int, problems: list[str]) -> None:
    """Put and get until it is over. Whatever happens to the server, what comes back is right."""
    rng, seen = random.Random(seed), life.seen[seed]
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
                found = store.put(key, [CONTENTS[key][:99], CONTENTS[key][99:]])  # type: ignore[attr-defined]
                if found:
                    mine.add(key)
            else:
                buffers[key][:] = bytes(len(buffers[key]))
                found = store.get_into(key, buffers[key])  # type: ignore[attr-defined]
                if found and buffers[key] != CONTENTS[key]:
                    problems.append(f"{key} came back as something else")
            seen[f"{call} {found}"] += 1
            same = before is not None and before == life.number and before == started
            if call == "get" and not found and same and key in mine:
                problems.append(f"{key} was acknowledged and is lost")
        except StoreUnavailableError as error:
            seen["cut off"] += "Connection refused" not in str(error)
            time.sleep(0.0005)
        except Exception as error:
            problems.append(f"{call} {key}: {error!r}")
            return


def valkey_store(url: str, **options: object) -> contextlib.AbstractContextManager:
    from kvcache.stores import ValkeyStore

    return ValkeyStore(url, **options)


def test_killed_at_any_moment_again_and_again_nothing_wrong_comes_back_and_the_client_goes_on() -> None:
    need_server()
    rng, life, problems = random.Random(1), Life(), list[str]()
    with ValkeyServer() as server, valkey_store(server.url, timeout=5, connect_timeout=5) as store:
        workers = [
            threading.Thread(target=call_all_the_time, args=(store, life, seed, problems)) for seed in (0, 1)
        ]
        life.number = 1
        for worker in workers:
            worker.start()
        try:
            for kill in range(MOST_KILLS):
                if kill >= KILLS and life.fewest > KILLS / 10:
                    break
                time.sleep(rng.random() * 0.05)
                life.number += 1
                server.kill()
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
    assert life.fewest > KILLS / 10, life.seen


def test_of_a_server_that_keeps_its_data_all_that_was_acknowledged_is_there_after_each_kill() -> None:
    """With an append-only file, whatever it had half written when it was killed."""
    need_server()
    rng, acknowledged, cut = random.Random(2), dict[str, bytes](), 0
    options = ["--appendonly", "yes", "--appendfsync", "no", "--auto-aof-rewrite-percentage", "0"]
    with ValkeyServer(*options) as server, valkey_store(server.url) as store:
        for kill in range(PERSISTENT_KILLS):
            timer = threading.Timer(rng.random() * 0.1, server.kill)
            timer.start()
            try:
                for i in range(1000):
                    key, data = f"p{kill}-{i}", CONTENTS[f"k{rng.randrange(4)}"]
                    assert store.put(key, [data])
                    acknowledged[key] = data
            except StoreUnavailableError:
                cut += 1
            timer.join()
            server.start()
            for key, data in acknowledged.items():
                buffer = bytearray(len(data))
                assert store.get_into(key, buffer), key
                assert buffer == data
            assert store.usage().dropped == 0
            for key in rng.sample(sorted(acknowledged), len(acknowledged) * 3 // 4):
                assert store.delete(key)
                del acknowledged[key]
    assert cut == PERSISTENT_KILLS


# A connection that is cut.


@contextlib.contextmanager
def cut(way: str, left: int) -> Iterator[None]:
    """Every connection ends, in both directions, after so many bytes that went up, or came down."""
    from valkey.exceptions import ConnectionError as LostError

    from kvcache.stores.valkey.link import Wire
    from kvcache.stores.valkey.replies import Replies

    stream, received = Wire.stream, Replies._received

    def send(wire: Any, pieces: Iterable[bytes | memoryview]) -> None:
        nonlocal left
        for data in pieces:
            stream(wire, [data[:left]])
            left -= len(data)
            if left < 0:
                wire._connection.disconnect()
                raise LostError("cut off")

    def receive(replies: Any, view: memoryview) -> int:
        nonlocal left
        if not left:
            replies._sock.shutdown(socket.SHUT_RDWR)
            raise LostError("cut off")
        count = received(replies, view[:left])
        left -= count
        return count

    with pytest.MonkeyPatch.context() as patch:
        if way == "up":
            patch.setattr(Wire, "stream", send)
        else:
            patch.setattr(Replies, "_received", receive)
        yield


def cuts(total: int, count: int) -> list[int]:
    """Numbers of bytes: the first and the last ones, and some between."""
    edges = [*range(0, 40, 4), *range(total - 40, total, 4)]
    return sorted({cut for cut in (*edges, *range(0, total, max(1, total // count))) if 0 <= cut < total})


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("call", ["put", "get_into"])
def test_a_call_that_is_cut_off_anywhere_does_all_or_nothing(
    server: ValkeyServer, way: str, call: str
) -> None:
    from valkey import Valkey

    data, done, failed = content("a", 3000), 0, 0
    with valkey_store(server.url) as direct, Valkey(port=server.port) as client:
        for limit in cuts(
            {"putup": 3700, "putdown": 150, "get_intoup": 300, "get_intodown": 3600}[call + way], 20
        ):
            client.flushall()
            assert call == "put" or direct.put("a", [data])
            buffer = bytearray(3000)
            with cut(way, limit), valkey_store(server.url, connections=1) as store:
                try:
                    acknowledged = store.put("a", [data]) if call == "put" else store.get_into("a", buffer)
                except StoreUnavailableError:
                    acknowledged = False
                    failed += 1
            (found,) = direct.stat(["a"])
            assert found is not None or (call == "put" and not acknowledged)
            assert call == "put" or not acknowledged or buffer == data
            if found is not None:
                assert direct.get_into("a", buffer)
                assert buffer == data
                done += 1
            assert all(client.pttl(name) > 0 for name in client.keys("*")), "what nobody finds expires"
        assert direct.usage().dropped == 0
    assert failed > 12
    assert done > 0, "some were cut off after all was there"
