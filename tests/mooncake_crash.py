"""Processes that write to one pool, and die in it. Run by test_stores_mooncake.py as its own program.

It imports once and forks before anything is connected: a child connects, and is killed with SIGKILL, or
ends without closing, which would take a second.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

from kvcache.stores import SnapshotCorrupt, StoreFull, StoreUnavailable
from kvcache.stores.mooncake import MooncakeStore
from kvcache.stores.mooncake.connecting import load
from kvcache.testing.stores import content, read

T = TypeVar("T")
SIZE = 1_200_000
opened: list[MooncakeStore] = []
"""Kept: letting go of one closes it."""
KEYS = [f"k{i}" for i in range(6)]


def open_store(url: str, **options: object) -> MooncakeStore:
    opened.append(MooncakeStore(url, prefix="crash", staging=1 << 16, **{"timeout": 20, **options}))
    return opened[-1]


def child(work: Callable[[int], object]) -> tuple[int, int]:
    """Fork; (process, what it writes to)."""
    source, sink = os.pipe()
    pid = os.fork()
    if pid:
        os.close(sink)
        return pid, source
    try:
        os.close(source)
        work(sink)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def output(source: int) -> list[str]:
    """The whole lines that a child wrote."""
    with os.fdopen(source, "rb") as pipe:
        return pipe.read().decode("ascii").rpartition("\n")[0].split()


def killed_while_writing(url: str, kills: str) -> None:
    """What was acknowledged is there and whole; what was not is whole or a miss."""
    rng = random.Random(7)
    acknowledged: set[str] = set()
    for kill in range(int(kills)):

        def work(sink: int, kill: int = kill) -> None:
            store = open_store(url)
            store.stat(["x"])
            os.write(sink, b"connected\n")
            for i in range(4):
                key = f"r{kill}-{i}"
                assert store.put(key, [content(key, SIZE)])
                os.write(sink, f"{key}\n".encode())

        pid, source = child(work)
        assert os.read(source, 10) == b"connected\n"
        time.sleep(0.06 * rng.random())
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        acknowledged.update(output(source))

    def check(sink: int) -> None:
        store = open_store(url)
        for key in (f"r{kill}-{i}" for kill in range(int(kills)) for i in range(4)):
            found = read(store, key)
            assert found == content(key, SIZE) or (found is None and key not in acknowledged), key

    finished(*child(check))
    print(int(kills), "kills,", len(acknowledged), "acknowledged")


def orphans_are_taken_over(url: str) -> None:
    """A key whose writer died in the middle is a miss, and is put by another when the master gives it up."""

    def die(sink: int) -> None:
        store = open_store(url)
        client, _ = store._linked()
        with client.putting("crash:orphan", SIZE + 64):
            os.kill(os.getpid(), signal.SIGKILL)

    pid, source = child(die)
    os.waitpid(pid, 0)
    os.close(source)

    def take_over(sink: int) -> None:
        store = open_store(url)
        assert store.stat(["orphan"]) == [None]
        tries = 0
        while not store.put("orphan", [content("orphan", SIZE)]):
            tries += 1
            assert store.stat(["orphan"]) == [None]
            assert tries < 100
            time.sleep(0.1)
        assert read(store, "orphan") == content("orphan", SIZE)

    finished(*child(take_over))
    print("taken over")


def late_writers_are_told(url: str) -> None:
    """A writer that the master gave up before it was done is told so, and what came after it stays."""
    slow, quick = open_store(url), open_store(url)
    client, _ = slow._linked()
    told = ""
    try:
        with client.putting("crash:late", SIZE + 64) as new:
            assert new
            for _ in range(100):
                if quick.put("late", [content("late", SIZE)]):
                    break
                time.sleep(0.1)
    except StoreUnavailable as error:
        told = str(error)
    assert read(quick, "late") == content("late", SIZE)
    print(told)


def one_writer_of_many(url: str, processes: str) -> None:
    """Of all processes that put a key one is told True; what any of them reads is whole and that one's."""

    def work(sink: int, number: int) -> None:
        store = open_store(url)
        for key in KEYS:
            if store.put(key, [content(f"{key} by {number}", SIZE)]):
                os.write(sink, f"{key}:{number}\n".encode())
            found = read(store, key)
            assert found is None or found in [content(f"{key} by {n}", SIZE) for n in range(int(processes))]

    children = [child(lambda sink, number=number: work(sink, number)) for number in range(int(processes))]
    won = [line for pid, source in children for line in finished(pid, source)]
    assert sorted(line.split(":")[0] for line in won) == KEYS, won

    def check(sink: int) -> None:
        store = open_store(url)
        for key, number in (line.split(":") for line in won):
            assert read(store, key) == content(f"{key} by {number}", SIZE)

    finished(*child(check))
    print(len(won), "keys")


def nobody_waits_for_a_frozen_master(url: str, master: str) -> None:
    """One call waits for the time limit, the next ones are refused at once; with the master it goes on."""
    store = open_store(url, timeout=1)
    until_it_answers(lambda: store.stat(["frozen"]))
    os.kill(int(master), signal.SIGSTOP)
    reasons = []
    for _ in range(4):
        try:
            store.stat(["frozen"])
        except StoreUnavailable as error:
            reasons.append(str(error))
    os.kill(int(master), signal.SIGCONT)
    assert len(reasons) == 4
    assert "does not answer (-90" in reasons[0], reasons
    assert all("asked again in" in reason for reason in reasons[1:]), reasons
    assert until_it_answers(lambda: store.stat(["frozen"])) == [None]
    until_it_answers(lambda: store.put("thawed", [b"x"]) or store.stat(["thawed"])[0])
    assert until_it_answers(lambda: read(store, "thawed")) == b"x"
    print("went on")


def until_it_answers(call: Callable[[], T]) -> T:
    """The first true answer, of a master that may have been away."""
    for _ in range(400):
        with contextlib.suppress(StoreUnavailable, StoreFull):  # full: its hosts have not come back to it
            if found := call():
                return found
        time.sleep(0.05)
    raise AssertionError("no answer for 20 s")


def a_fork_is_noticed(url: str) -> None:
    store = open_store(url)
    assert store.put("forked", [b"x"])

    def work(sink: int) -> None:
        try:
            store.stat(["forked"])
        except StoreUnavailable as error:
            os.write(sink, b"noticed\n" if "fork" in str(error) else b"no word of it\n")

    assert finished(*child(work)) == ["noticed"]
    assert read(store, "forked") == b"x"


def finished(pid: int, source: int) -> list[str]:
    lines = output(source)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"a child ended with {status}"
    return lines


SCENARIOS = (
    killed_while_writing,
    orphans_are_taken_over,
    late_writers_are_told,
    one_writer_of_many,
    nobody_waits_for_a_frozen_master,
    a_fork_is_noticed,
)

if __name__ == "__main__":
    load()
    scenario = {found.__name__: found for found in SCENARIOS}[sys.argv[2]]
    try:
        scenario(sys.argv[1], *sys.argv[3:])
    except SnapshotCorrupt as error:
        raise AssertionError(f"torn: {error}") from error
    sys.stdout.flush()
    os._exit(0)
