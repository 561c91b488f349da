"""Processes that share a store's folder, and die in it. Run by test_stores_crash.py as its own program.

It imports once and forks: a forked child is killed with SIGKILL, and what it left is looked at.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import random
import resource
import shutil
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.stores import FileStore, SnapshotCorrupt, StoreFull, StoreUnavailable
from kvcache.stores.catalog import Catalog
from kvcache.stores.folder import Folder
from kvcache.stores.lockfile import HeldLock
from kvcache.testing.stores import content, read

UNIT = 8_000


def child(work: Callable[[], object]) -> int:
    """Fork; the child does its work and ends with 0, or 1 after a traceback."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def died_by(pid: int) -> int:
    """The signal that ended it, or minus its exit status."""
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)


def files(folder: Path) -> dict[str, int]:
    """Names and sizes of what belongs to entries, and of what is being written."""
    return {
        path.name: path.stat().st_size for sub in ("pages", "writing") for path in (folder / sub).iterdir()
    }


def check_whole(folder: Path, store: FileStore) -> list[str]:
    """The keys there, after it is checked that nothing but whole, exact, counted entries is there."""
    found = files(folder)
    keys = sorted(name[: -len(".json")] for name in found if name.endswith(".json"))
    expected = {key + suffix for key in keys for suffix in (".json", ".safetensors")}
    assert found.keys() == expected, found.keys() ^ expected
    for key in keys:
        assert read(store, key) == content(key, UNIT), key
    check_counted(found, store)
    return keys


def check_counted(found: dict[str, int], store: FileStore) -> None:
    usage = store.usage()
    sizes = [size for name, size in found.items() if name.endswith(".safetensors")]
    assert (usage.entries, usage.nbytes) == (len(sizes), sum(sizes))
    assert store.budget is None or usage.nbytes <= store.budget


def acknowledging(folder: Path, budget: int | None, pipe: int, first: int) -> None:
    """Put one entry after another, and say of each that it was put."""
    with FileStore(folder, budget, durable=False) as store:
        for i in range(first, first + 1000):
            assert store.put(f"k{i}", [content(f"k{i}", UNIT)])
            os.write(pipe, f"k{i}\n".encode())


def killed_at_random(folder: Path, kills: int, budget: int | None) -> None:
    """SIGKILL at any moment; what was acknowledged is there, whole, unless it had to make room."""
    rng = random.Random(kills)
    known: list[str] = []
    for _ in range(kills):
        reader, writer = os.pipe()
        first = int(known[-1][1:]) + 5 if known else 0
        pid = child(lambda f=first, w=writer: acknowledging(folder, budget, w, f))
        os.close(writer)
        head = os.read(reader, 1)  # it has begun
        time.sleep(rng.random() * 0.003)
        os.kill(pid, signal.SIGKILL)
        assert died_by(pid) == signal.SIGKILL
        with os.fdopen(reader, "rb") as rest:
            mine = (head + rest.read()).decode().split()
        known += mine
        with FileStore(folder, budget, durable=False) as store:
            there = set(check_whole(folder, store))
        # One more may have been evicted for the entry that was being put, or that came in unacknowledged.
        safe = known if budget is None else mine[-(budget // UNIT - 1) :]
        assert there >= set(safe), set(safe) - there
    print(f"{kills} kills, {len(known)} acknowledged")


def putting(folder: Path, budget: int | None, pipe: int, name: str) -> None:
    """As ``acknowledging``; and read and delete what is there meanwhile, which is said before."""
    rng = random.Random(name)
    with FileStore(folder, budget, durable=False) as store:
        for i in range(1000):
            key = f"{name}x{i}"
            assert store.put(key, [content(key, UNIT)])
            os.write(pipe, f"{key}\n".encode())
            assert read(store, key) in (content(key, UNIT), None)
            if rng.random() < 0.3:
                gone = f"{name}x{rng.randrange(i + 1)}"
                os.write(pipe, f"-{gone}\n".encode())
                store.delete(gone)


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


def killed_beside_another(folder: Path, kills: int, budget: int | None) -> None:
    """Of two processes one is killed while the other goes on, then that one; and the index is damaged."""
    rng = random.Random(kills)
    acknowledged = 0
    for i in range(kills):
        pids, pipes = [], []
        for name in "ab":
            reader, writer = os.pipe()
            pids.append(child(lambda w=writer, n=f"{name}{i}": putting(folder, budget, w, n)))
            os.close(writer)
            pipes.append(os.fdopen(reader, "rb", buffering=0))
        heads = [pipe.read(1) for pipe in pipes]
        time.sleep(rng.random() * 0.005)
        os.kill(pids[0], signal.SIGKILL)
        assert died_by(pids[0]) == signal.SIGKILL
        heads[1] += pipes[1].read(40) + pipes[1].read(40)  # it goes on
        time.sleep(rng.random() * 0.005)
        os.kill(pids[1], signal.SIGKILL)
        assert died_by(pids[1]) == signal.SIGKILL
        said = b"".join(head + pipe.read() for head, pipe in zip(heads, pipes, strict=True)).decode().split()
        for pipe in pipes:
            pipe.close()
        kept = {key for key in said if key[0] != "-" and f"-{key}" not in said}
        acknowledged += len(said)
        rng.choice(INDEXES)(folder, rng)
        with FileStore(folder, budget, durable=False) as store:
            there = check_whole(folder, store)
            assert store.usage().dropped == 0
            assert budget is not None or kept <= set(there), kept - set(there)
            for key in there:
                store.delete(key)
            assert store.usage().entries == 0
    print(f"{2 * kills} kills, {acknowledged} acknowledged")


CALLS = (
    "open",
    "close",
    "writev",
    "fsync",
    "rename",
    "unlink",
    "utime",
    "pwrite",
    "pread",
    "scandir",
    "listdir",
    "mkdir",
    "stat",
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
    saved: list[tuple[Any, str, Any]] = [(os, name, getattr(os, name)) for name in CALLS]
    saved.append((fcntl, "flock", fcntl.flock))
    connect = sqlite3.connect
    saved.append((sqlite3, "connect", connect))

    def wrap(module: Any, name: str, original: Callable[..., Any]) -> None:
        def call(*args: Any, **options: Any) -> Any:
            step(name)
            if name == "writev":
                args = (args[0], [bytes(args[1][0][: max(1, len(args[1][0]) // 2)])])
            result = original(*args, **options)
            step(f"after {name}")
            return result

        setattr(module, name, call)

    for module, name, original in saved:
        wrap(module, name, original)
    sqlite3.connect = functools.partial(connect, factory=stepping_database(step))  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, name, original in saved:
            setattr(module, name, original)


def killed_at_each_call(folder: Path) -> None:
    """SIGKILL before and after each single call to the system of a put that evicts."""
    budget = 3 * UNIT
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

    for at in range(1, 1000):
        for key in ("a", "b", "c"):
            other.put(key, [content(key, UNIT)])
            read(other, key)
        signal_number = died_by(child(lambda a=at: work(a)))
        assert other.put(f"after{at}", [content(f"after{at}", UNIT)])
        # Temporaries wait for the next open; all else is in order for whoever has the folder open.
        found = {name: size for name, size in files(folder).items() if not name.endswith(".tmp")}
        assert signal_number or found.keys() == files(folder).keys()
        check_counted(found, other)
        with FileStore(folder, budget, durable=False) as again:
            check_whole(folder, again)
        keys = check_whole(folder, other)
        assert f"after{at}" in keys
        if not signal_number:
            assert f"new{at}" in keys
            print(f"{at - 1} places to die")
            return
    raise AssertionError("the put never came to its end")


def sharing(folder: Path) -> None:
    """Two writers and two readers on the same keys, with eviction, and a fifth that opens and closes."""
    budget = 8 * UNIT
    keys = [f"s{i}" for i in range(14)]

    def write(seed: int) -> None:
        rng = random.Random(seed)
        with FileStore(folder, budget, durable=False) as store:
            written = 0
            for _ in range(250):
                key = rng.choice(keys)
                written += store.put(key, [content(key, UNIT)])
                if rng.random() < 0.1:
                    store.delete(rng.choice(keys))
            assert written > 20
            assert store.usage().dropped == 0

    def look(seed: int) -> None:
        rng = random.Random(seed)
        hits = 0
        with FileStore(folder, budget, durable=False) as store:
            for _ in range(1200):
                key = rng.choice(keys)
                found = read(store, key)
                assert found is None or found == content(key, UNIT), key
                assert 0 <= store.prefix(keys) <= len(keys)
                hits += found is not None
            assert hits > 20
            assert store.usage().dropped == 0

    with FileStore(folder, budget, durable=False) as store:
        for key in keys[:4]:
            store.put(key, [content(key, UNIT)])
    pids = [child(lambda s=seed: write(s)) for seed in (1, 2)] + [
        child(lambda s=seed: look(s)) for seed in (3, 4)
    ]
    opened = 0
    while pids:
        with FileStore(folder, budget, durable=False) as store:  # sweeps, and must not touch the living
            opened += 1
            assert store.usage().swept == 0
        pid, status = os.waitpid(pids[0], os.WNOHANG)
        if pid:
            assert status == 0, status
            pids.pop(0)
    with FileStore(folder, budget, durable=False) as store:
        check_whole(folder, store)
    print(f"opened {opened} times meanwhile")


def no_room(folder: Path) -> None:
    """The system's own refusal, by a limit on the size of files."""
    store = FileStore(folder, durable=False)
    store.put("a", [content("a", UNIT)])

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (UNIT + UNIT // 2, UNIT + UNIT // 2))
        with FileStore(folder, durable=False) as mine:
            before = files(folder)
            for _ in range(3):
                with contextlib.suppress(StoreFull):
                    mine.put("b", [content("b", 40 * UNIT)])
                    raise AssertionError("it fitted")
                assert files(folder) == before
            assert mine.put("c", [content("c", UNIT)])

    assert died_by(child(work)) == 0
    assert check_whole(folder, store) == ["a", "c"]


def reading_only(folder: Path) -> None:
    """A folder that this user may read and not change."""
    with FileStore(folder, durable=False) as store:
        for key in "abc":
            store.put(key, [content(key, UNIT)])
    data = folder / "pages" / "b.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    (folder / "pages" / "c.safetensors").unlink()
    (folder / "pages" / f"{'0' * 32}.tmp").write_bytes(b"left behind")
    before = files(folder)
    for path in (folder / "pages").iterdir():
        path.chmod(0o444)
    for path, mode in ((folder / "kvcache.lock", 0o444), (folder / "pages", 0o555), (folder, 0o555)):
        path.chmod(mode)

    def work() -> None:
        if os.geteuid() == 0:
            os.setuid(65534)
        with FileStore(folder) as store:
            assert read(store, "a") == content("a", UNIT)
            assert store.prefix(["a", "x"]) == 1
            with pytest.raises(StoreUnavailable, match="read"):
                store.put("d", [b"x"])
            with pytest.raises(StoreUnavailable, match="read"):
                store.delete("a")
            assert not store.put("a", [b"x"])
            with pytest.raises(SnapshotCorrupt, match="digest"):
                read(store, "b")
            assert store.stat(["a", "b", "c"])[1:] == [None, None]
            assert (store.usage().entries, store.usage().dropped) == (1, 2)

    try:
        assert died_by(child(work)) == 0
        assert files(folder) == before
    finally:
        for path in (folder, folder / "pages"):
            path.chmod(0o755)


def forked(folder: Path) -> None:
    """A child goes on with its parent's store, while the parent does."""
    with FileStore(folder) as store:

        def put(name: str) -> None:
            for key in (f"{name}{i}" for i in range(3)):
                assert store.put(key, [content(key, UNIT)])

        put("before")
        other = child(lambda: put("child"))
        put("parent")
        assert died_by(other) == 0
        assert len(check_whole(folder, store)) == 9


def _sweep_nothing() -> None:
    Folder.sweep = lambda self: 0  # type: ignore[method-assign]


def _sweep_the_living() -> None:
    def sweep(self: Folder, name: str, where: int) -> bool:
        os.unlink(name, dir_fd=where)
        return True

    Folder._sweep = sweep  # type: ignore[method-assign]


def _say_nothing_of_changes() -> None:
    HeldLock.announce = lambda self, stems: self.changes  # type: ignore[method-assign]


def _say_not_what_changes() -> None:
    announce = HeldLock.announce
    HeldLock.announce = lambda self, stems: announce(self, [])  # type: ignore[method-assign]


def _forget_the_halves() -> None:
    Catalog._clear = lambda self, stem, foreign: None  # type: ignore[method-assign]


def _keep_what_failed() -> None:
    Folder.discard = lambda self, temporary: None  # type: ignore[method-assign]


def _lock_nothing() -> None:
    fcntl.flock = lambda fd, operation: None  # type: ignore[assignment]


BUGS = {
    "sweep nothing": _sweep_nothing,
    "sweep the living": _sweep_the_living,
    "say nothing of changes": _say_nothing_of_changes,
    "say not what changes": _say_not_what_changes,
    "forget the halves": _forget_the_halves,
    "keep what failed": _keep_what_failed,
    "lock nothing": _lock_nothing,
}
"""What these scenarios have to notice."""


def main() -> None:
    scenario, folder, bug, *numbers = sys.argv[1:]
    BUGS.get(bug, lambda: None)()
    arguments = [None if number == "none" else int(number) for number in numbers]
    globals()[scenario](Path(folder), *arguments)


if __name__ == "__main__":
    main()
