"""Processes that share a store, and die in it. Run by test_stores_crash.py as its own program.

It imports once and forks: a child opens the store, and is killed with SIGKILL, or ends without closing. The
parent opens nothing but folders: what it connected to would not outlive a fork.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest

from kvcache.prefix.outages import Outages
from kvcache.prefix.tiers import StoreTier
from kvcache.stores import FileStore, SnapshotCorruptError, StoreFullError, StoreUnavailableError, open_store
from kvcache.stores.folder import Folder
from kvcache.stores.index import Index
from kvcache.stores.manifest import MANIFEST_BYTES
from kvcache.stores.mooncake.connecting import load
from kvcache.testing.stores import content, read
from tests.rigs.child_processes import child, ended, finished, killed, output

T = TypeVar("T")
UNIT = 8_000
SIZES = {"file": UNIT, "valkey": 300_000, "mooncake": 1_200_000}
PAUSES = {"file": 0.003, "valkey": 0.01, "mooncake": 0.06}
"""Seconds within which a child is killed."""
opened: list[Any] = []
"""Kept: letting go of one may close it."""


def open_here(url: str, **options: Any) -> Any:
    opened.append(open_store(url, **options))
    return opened[-1]


def kind_of(url: str) -> str:
    return urlsplit(url).scheme


def folder_of(url: str) -> Path:
    return Path(urlsplit(url).path)


# Any store.


def killed_while_writing(url: str, kills: str) -> None:
    """SIGKILL at any moment: what was acknowledged is there, or made room; all else is whole or a miss."""
    kind, rng = kind_of(url), random.Random(int(kills))
    known: list[str] = []
    for kill in range(int(kills)):

        def work(sink: int, kill: int = kill) -> None:
            store = open_here(url)
            if kind == "mooncake":
                store.stat(["x"])
                os.write(sink, b"connected\n")
            for i in range(1000):
                key = f"k{kill}-{i}"
                assert store.put(key, [content(key, SIZES[kind])])
                os.write(sink, f"{key}\n".encode())

        pid, source = child(work)
        head = os.read(source, 1)  # it has begun
        time.sleep(rng.random() * PAUSES[kind])
        killed(pid)
        mine = (head.decode() + "\n".join(output(source))).removeprefix("connected").split()
        known += mine
        if kind == "file":
            with open_here(url) as store:
                there = check_whole(store)
                # One more may have made room for the entry that was being put, or came in unacknowledged.
                safe = mine[-(store.budget // UNIT - 1) :]
                assert there >= set(safe), set(safe) - there

    def check(sink: int) -> None:
        store = open_here(url)
        for key in {*known, *(f"k{kill}-{i}" for kill in range(int(kills)) for i in range(4))}:
            found = read(store, key)
            assert found == content(key, SIZES[kind]) or (found is None and key not in known), key

    if kind != "file":
        finished(*child(check))
    print(kills, "kills,", len(known), "acknowledged")


class Sharing:
    """Processes that share some keys, each writer with data of its own for them."""

    keys = tuple(f"s{i}" for i in range(14))

    def __init__(self, url: str, mode: str) -> None:
        self.url, self.mode, self.kind = url, mode, kind_of(url)
        size = SIZES[self.kind]
        self.sizes = [1000, size, 4_200_000, 90_000] if self.kind == "valkey" else [size]

    def data_of(self, key: str, writer: int) -> bytes:
        size = self.sizes[int(key[1:]) % len(self.sizes)]
        return (bytes([writer]) + content(key, 999) + bytes([writer]) * 50) * (size // 1050) + bytes([writer])

    def seen(self, store: Any, key: str) -> int | None:
        """Whose entry there is of a key."""
        found = read(store, key)
        assert found is None or found == self.data_of(key, found[0]), f"{key} is torn"
        return None if found is None else found[0]

    def write(self, sink: int, number: int) -> None:
        rng, store, deletes = random.Random(number), open_here(self.url), self.mode != "keep"
        count = 250 if self.kind == "file" else 20
        for key in rng.choices(self.keys, k=count) if deletes else rng.sample(self.keys, len(self.keys)):
            with contextlib.suppress(StoreFullError):
                if store.put(key, [self.data_of(key, number)]):
                    os.write(sink, f"{key}:{number}\n".encode())
            if deletes and rng.random() < 0.2:
                store.delete(rng.choice(self.keys))
            self.seen(store, key)
        assert self.kind == "mooncake" or store.usage().dropped == 0

    def look(self, sink: int, number: int) -> None:
        rng, store = random.Random(number), open_here(self.url)
        for _ in range(600 if self.kind == "file" else 25):
            self.seen(store, rng.choice(self.keys))
            assert 0 <= store.prefix(self.keys) <= len(self.keys)
        assert store.usage().dropped == 0

    def check(self, said: set[str]) -> None:
        store = open_here(self.url)
        there = {f"{key}:{writer}" for key in self.keys if (writer := self.seen(store, key)) is not None}
        assert there <= said, there - said
        assert self.mode != "keep" or there == said, said - there
        if self.kind == "valkey" and self.mode != "evict":
            check_nothing_else(store, self.keys)
            for key in self.keys:
                store.delete(key)
            check_nothing_else(store, self.keys)


def sharing(url: str, writers: str, readers: str, mode: str) -> None:
    """Writers of the same keys and readers: nothing is torn, nothing is lost.

    In the mode "keep" each key is acknowledged to one writer, and is that one's in the end; else what is
    there was acknowledged.
    """
    shared = Sharing(url, mode)
    tasks = [(shared.write, i) for i in range(int(writers))] + [(shared.look, i) for i in range(int(readers))]
    children = [child(lambda sink, work=work, i=i: work(sink, i)) for work, i in tasks]
    for pid, _ in children if shared.kind == "file" else ():
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            with open_here(url) as store:  # sweeps, and must not touch the living
                assert store.usage().swept == 0
    said = {line for pid, source in children for line in finished(pid, source)}
    assert mode != "keep" or sorted(line.split(":")[0] for line in said) == sorted(shared.keys)
    finished(*child(lambda sink: shared.check(said)))
    print(len(children), "processes")


def check_nothing_else(store: Any, keys: Sequence[str]) -> None:
    """As many values on the server as the entries that are whole need."""
    from kvcache.stores.valkey.link import Command
    from kvcache.stores.valkey.manifest import CHUNK
    from kvcache.stores.valkey.replies import integer

    found = [stat.nbytes for stat in store.stat(keys) if stat is not None]
    with store._wire("test") as wire:
        (count,) = wire.ask(Command(["DBSIZE"], integer))
    assert count == sum(1 + -(-nbytes // CHUNK) for nbytes in found), (count, found)


# Folders.


def files(folder: Path) -> dict[str, int]:
    """Names and sizes of entries' files, and of those that come or go."""
    return {
        path.name: path.stat().st_size for sub in ("pages", "changing") for path in (folder / sub).iterdir()
    }


def check_whole(store: FileStore) -> set[str]:
    """The keys there, after it is checked that nothing but whole, exact, counted entries is there."""
    found = files(store.path)
    keys = {name[: -len(".entry")] for name in found if name.endswith(".entry")}
    assert len(found) == len(keys), found.keys()
    for key in keys:
        assert read(store, key) == content(key, UNIT), key
    check_counted(found, store)
    return keys


def check_counted(found: dict[str, int], store: FileStore) -> None:
    usage = store.usage()
    sizes = [size - MANIFEST_BYTES for name, size in found.items() if name.endswith(".entry")]
    assert (usage.entries, usage.nbytes) == (len(sizes), sum(sizes))
    assert store.budget is None or usage.nbytes <= store.budget


def index_of(folder: Path) -> Path:
    return folder / "index" / "entries.sqlite"


def _damage_index(folder: Path, rng: random.Random) -> None:
    with open(index_of(folder), "r+b") as file:
        for _ in range(rng.choice([1, 1, 20])):
            file.seek(rng.randrange(index_of(folder).stat().st_size))
            file.write(rng.randbytes(1))


INDEXES: list[Callable[[Path, random.Random], object]] = [
    lambda folder, rng: None,
    lambda folder, rng: index_of(folder).unlink(),
    lambda folder, rng: shutil.rmtree(folder / "index"),
    lambda folder, rng: os.truncate(index_of(folder), rng.randrange(index_of(folder).stat().st_size)),
    lambda folder, rng: Path(f"{index_of(folder)}-journal").write_bytes(rng.randbytes(5000)),
    _damage_index,
]
"""What may become of an index between one opening and the next."""


def killed_beside_another(url: str, kills: str) -> None:
    """Of two processes one is killed while the other goes on, then that one; and the index is damaged."""
    rng, folder, acknowledged = random.Random(int(kills)), folder_of(url), 0

    def putting(sink: int, name: str) -> None:
        """Put, read and delete; a delete is said before."""
        mine = random.Random(name)
        store = open_here(url)
        for i in range(1000):
            key = f"{name}x{i}"
            assert store.put(key, [content(key, UNIT)])
            os.write(sink, f"{key}\n".encode())
            assert read(store, key) in (content(key, UNIT), None)
            if mine.random() < 0.3:
                gone = f"{name}x{mine.randrange(i + 1)}"
                os.write(sink, f"-{gone}\n".encode())
                store.delete(gone)

    for i in range(int(kills)):
        children = [child(lambda sink, n=f"{name}{i}": putting(sink, n)) for name in "ab"]
        heads = [os.read(source, 1) for _, source in children]
        time.sleep(rng.random() * 0.005)
        killed(children[0][0])
        heads[1] += os.read(children[1][1], 40) + os.read(children[1][1], 40)  # it goes on
        time.sleep(rng.random() * 0.005)
        killed(children[1][0])
        rests = ["\n".join(output(source)) for _, source in children]
        said = "\n".join(head.decode() + rest for head, rest in zip(heads, rests, strict=True)).split()
        kept = {key for key in said if key[0] != "-" and f"-{key}" not in said}
        acknowledged += len(said)
        rng.choice(INDEXES)(folder, rng)
        with open_here(url) as store:
            there = check_whole(store)
            assert store.usage().dropped == 0
            assert store.budget is not None or kept <= there, kept - there
            for key in there:
                store.delete(key)
            assert store.usage().entries == 0
    print(2 * int(kills), "kills,", acknowledged, "acknowledged")


CALLS = (
    *("open", "close", "writev", "fsync", "rename", "unlink", "utime"),
    *("pwrite", "pread", "scandir", "listdir", "mkdir", "stat"),
)


def stepping_database(step: Callable[[str], None]) -> type[sqlite3.Connection]:
    """A connection that calls ``step(name)`` before and after every statement."""

    class Stepping(sqlite3.Connection):
        def execute(self, sql: str, *args: Any) -> Any:
            name = sql.split()[0]
            step(name)
            result = super().execute(sql, *args)
            step(f"after {name}")
            return result

    return Stepping


@contextlib.contextmanager
def stepping(step: Callable[[str], None]) -> Iterator[None]:
    """``step(name)`` before and after every call to the system and statement; of writes, also halfway."""

    def wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            step(name)
            if name == "writev":
                args = (args[0], [bytes(args[1][0][: max(UNIT // 4, len(args[1][0]) // 2)])])
            result = original(*args, **options)
            step(f"after {name}")
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in [*((os, name) for name in CALLS), (fcntl, "flock")]:
            patch.setattr(module, name, wrapped(name, getattr(module, name)))
        connect = functools.partial(sqlite3.connect, factory=stepping_database(step))
        patch.setattr(sqlite3, "connect", wrapped("connect", connect))
        yield


def killed_at_each_call(url: str, first: str = "1") -> None:
    """SIGKILL before and after each single call to the system of a put that evicts."""
    folder, budget = folder_of(url), 3 * UNIT
    other = FileStore(folder, budget, durable=False)  # open all the time: it has to notice what the dead did

    def work(at: int) -> None:
        count, begun = 0, False

        def step(name: str) -> None:
            nonlocal count
            count += begun
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

        with stepping(step):
            store = FileStore(folder, budget, durable=True)
            begun = True
            assert store.put(f"new{at}", [content(f"new{at}", UNIT)])
            begun = False

    for at in itertools.count(int(first)):
        for key in check_whole(other):  # from the same state, so that each call has the same number
            other.delete(key)
        for key in ("a", "b", "c"):
            other.put(key, [content(key, UNIT)])
            read(other, key)
        pid, source = child(lambda sink, at=at: work(at))
        output(source)
        signal_number = ended(pid)
        assert signal_number >= 0
        assert other.put(f"after{at}", [content(f"after{at}", UNIT)])
        keys = check_whole(other)  # all is in order for whoever has the folder open
        with FileStore(folder, budget, durable=False) as again:
            assert check_whole(again) == keys
        assert f"after{at}" in keys
        if not signal_number:
            assert f"new{at}" in keys
            print(at - 1, "places to die")
            return


def reading_only(url: str) -> None:
    """A folder that this user may read and not change."""
    folder = folder_of(url)
    with FileStore(folder, durable=False) as store:
        for key in "abc":
            store.put(key, [content(key, UNIT)])
    data = folder / "pages" / "b.entry"
    data.write_bytes(b"?" + data.read_bytes()[1:])
    os.truncate(folder / "pages" / "c.entry", UNIT)
    (folder / "changing" / f"d.{'0' * 32}.tmp").write_bytes(b"left behind")
    before = files(folder)
    for path in (folder / "pages").iterdir():
        path.chmod(0o444)
    for path, mode in ((folder / "kvcache.lock", 0o444), (folder / "pages", 0o555), (folder, 0o555)):
        path.chmod(mode)

    def work(sink: int) -> None:
        if os.geteuid() == 0:
            os.setuid(65534)
        with FileStore(folder) as store:
            assert read(store, "a") == content("a", UNIT)
            assert store.prefix(["a", "x"]) == 1
            for call in (lambda: store.put("d", [b"x"]), lambda: store.delete("a")):
                with pytest.raises(StoreUnavailableError, match="read"):
                    call()
            assert not store.put("a", [b"x"])
            with pytest.raises(SnapshotCorruptError, match="digest"):
                read(store, "b")
            assert store.stat(["a", "b", "c"])[1:] == [None, None]
            assert (store.usage().entries, store.usage().dropped) == (1, 2)

    try:
        finished(*child(work))
        assert files(folder) == before
    finally:
        for path in (folder, folder / "pages"):
            path.chmod(0o755)


# Mooncake.


def orphans_are_taken_over(url: str) -> None:
    """A key whose writer died in the middle is a miss, and is put by another when the master gives it up."""

    def die(sink: int) -> None:
        client, _ = open_here(url)._linked()
        with client.putting("crash:orphan", 4096):
            os.kill(os.getpid(), signal.SIGKILL)

    pid, source = child(die)
    assert ended(pid) == signal.SIGKILL
    os.close(source)

    def take_over(sink: int) -> None:
        store = open_here(url)
        for _ in range(100):
            assert store.stat(["orphan"]) == [None]
            if store.put("orphan", [content("orphan")]):
                break
            time.sleep(0.1)
        assert read(store, "orphan") == content("orphan")

    finished(*child(take_over))


def late_writers_are_told(url: str) -> None:
    """A writer that the master gave up before it was done is told so, and what came after it stays."""
    slow, quick = open_here(url), open_here(url)
    client, _ = slow._linked()
    with (
        pytest.raises(StoreUnavailableError, match="refused with code -601"),
        client.putting("crash:late", 4096) as new,
    ):
        assert new
        for _ in range(100):
            if quick.put("late", [content("late")]):
                break
            time.sleep(0.1)
    assert read(quick, "late") == content("late")


def nobody_waits_for_a_frozen_master(url: str, master: str) -> None:
    """One call waits for the time limit, and the store is asked no more then; with the master it goes on."""
    store = open_here(url, timeout=1)
    until_it_answers(lambda: store.stat(["frozen"]))
    os.kill(int(master), signal.SIGSTOP)
    while Path(f"/proc/{master}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    tier = StoreTier([store], 1 << 20)
    tier.outages = Outages(lambda: 0.0)
    for _ in range(4):
        assert tier.prefix(["frozen"]) == 0
    assert tier.errors["read"] == 1, "the others did not ask"
    with pytest.raises(StoreUnavailableError, match=r"does not answer \(-90"):
        store.stat(["frozen"])
    os.kill(int(master), signal.SIGCONT)
    assert until_it_answers(lambda: store.stat(["frozen"])) == [None]
    until_it_answers(lambda: store.put("thawed", [b"x"]) or store.stat(["thawed"])[0])
    assert until_it_answers(lambda: read(store, "thawed")) == b"x"


def until_it_answers(call: Callable[[], T]) -> T:
    """The first true answer, of a master that may have been away."""
    for _ in range(400):
        with contextlib.suppress(StoreUnavailableError, StoreFullError):  # full: no host is back yet
            if found := call():
                return found
        time.sleep(0.05)
    raise AssertionError("no answer for 20 s")


def a_fork_is_noticed(url: str) -> None:
    store = open_here(url)
    assert store.put("forked", [b"x"])

    def work(sink: int) -> None:
        with pytest.raises(StoreUnavailableError, match="fork"):
            store.stat(["forked"])

    finished(*child(work))
    assert read(store, "forked") == b"x"


# Bugs that the scenarios have to notice.


def _remove_at_once(self: Folder, stem: str) -> str | None:
    os.unlink(f"{stem}.entry", dir_fd=self._entries)
    return None


def _sweep_and_look_at_nothing(self: Index) -> None:
    for name in self._look_for_writers():
        self._folder.discard(name)


def _write_over() -> None:
    from kvcache.stores.valkey import link
    from kvcache.stores.valkey.entries import Entries
    from kvcache.stores.valkey.replies import status

    def publish(self: Entries, wire: Any, manifest: Any) -> tuple[bool, int]:
        wire.ask(link.Command(["SET", self.name(manifest.key), manifest.encoded()], status))
        return True, manifest.count

    Entries.publish = publish  # type: ignore[method-assign]


def _share_a_writer_id() -> None:
    from kvcache.stores.valkey.entries import Entries

    def chunks(self: Entries, manifest: Any, start: int = 0, stop: int = 1 << 60) -> Iterator[bytes]:
        return (
            f"kvcache:xxh3:c:{manifest.key}:{i}".encode() for i in range(start, min(stop, manifest.count))
        )

    Entries.chunks = chunks  # type: ignore[method-assign]


def _manifest_first() -> None:
    from kvcache.stores.valkey.entries import Entries

    publish = Entries.publish

    def early(self: Entries, wire: Any, manifest: Any) -> tuple[bool, int]:
        made, count = publish(self, wire, manifest)
        self.discard(wire, manifest)
        return made, count

    Entries.publish = early  # type: ignore[method-assign]


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


LATE = killed_at_each_call, ("40",)
"""From the call on at which all parts of an entry are written."""
IN_FOLDERS: dict[str, tuple[Callable[[], None], Callable[..., None], tuple[str, ...]]] = {
    "sweep nothing": (_set(Folder, "changing", lambda self: ()), killed_at_each_call, ()),
    "say not what goes": (_set(Folder, "withdraw", _remove_at_once), killed_at_each_call, ()),
    "count what did not come": (_set(Index, "_settle", _sweep_and_look_at_nothing), *LATE),
    "sweep the living": (_set(Folder, "_is_locked", lambda self, name: False), sharing, ("2", "2", "delete")),
    "lock nothing": (_set(fcntl, "flock", lambda fd, operation: None), sharing, ("2", "2", "delete")),
}
ON_SERVERS: dict[str, tuple[Callable[[], None], Callable[..., None], tuple[str, ...]]] = {
    "write over": (_write_over, sharing, ("4", "1", "keep")),
    "share a writer id": (_share_a_writer_id, sharing, ("4", "1", "keep")),
    "manifest first": (_manifest_first, sharing, ("4", "1", "keep")),
}


ROUNDS = 5
"""In how many a bug that needs two processes to meet has to show."""


def bugs(url: str) -> None:
    """Each of these makes its scenario fail, in a place of its own."""
    planted = (IN_FOLDERS if kind_of(url) == "file" else ON_SERVERS).values()
    for number, (plant, scenario, numbers) in enumerate(planted):
        noticed = False
        for place in range(number, ROUNDS * len(planted), len(planted)):

            def work(sink: int) -> None:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                plant()  # noqa: B023
                path, _, query = url.partition("?")
                scenario(f"{path}{place}?{query}", *numbers)  # noqa: B023

            pid, source = child(work)
            output(source)
            if noticed := ended(pid) == -1:
                break
        print(number, "noticed" if noticed else "not noticed")


def main() -> None:
    """Each line of the input: the arguments of ``run``; of the output: how it ended, and what it printed."""
    importlib.import_module("kvcache.stores.valkey.store")  # what children would import, each for itself
    with contextlib.suppress(StoreUnavailableError):
        load()
    for line in sys.stdin:
        pid, source = child(functools.partial(run, *json.loads(line)))
        with os.fdopen(source) as pipe:
            said = pipe.read()
        print(json.dumps([ended(pid), said]), flush=True)


def run(url: str, scenario: str, numbers: list[str], sink: int) -> None:
    os.dup2(sink, 1)
    globals()[scenario](url, *numbers)


if __name__ == "__main__":
    main()
