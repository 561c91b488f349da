"""What may befall a store, of each kind: damage, forgery, no room, nobody there, a fork, two at once."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from kvcache.stores import (
    MooncakeStore,
    SnapshotCorruptError,
    StoreFullError,
    StoreUnavailableError,
    open_store,
)
from kvcache.testing.stores import CALLS, content, present, read

from ...needs import need_server
from ...rigs.mooncake_pool import MooncakePool
from ...rigs.servers import ValkeyServer, wait_until
from .stores_rig import MIB, FilePlace, Place, every_kind, native, places, pool, posix, server

__all__ = ["native", "places", "pool", "server"]

pytestmark = posix
Places = Callable[[str], Any]
SECRET = {"digest": "blake3", "secret": "of the hosts"}
both_digests = pytest.mark.parametrize("options", [{}, SECRET], ids=["xxh3", "keyed"])


@pytest.fixture(autouse=True)
def _blake3() -> None:
    pytest.importorskip("blake3", reason="the package blake3 is not installed")


def filled(place: Place, keys: str, **options: Any) -> Any:
    store = place.open(**options)
    for key in keys:
        assert store.put(key, [content(key, place.size)])
    return store


def dropped(store: Any) -> int:
    return int(store.dropped if isinstance(store, MooncakeStore) else store.usage().dropped)


# Damage.

DAMAGE: dict[str, Callable[[bytearray], object]] = {
    "one bit at the start": lambda data: data.__setitem__(0, data[0] ^ 1),
    "one bit at the end": lambda data: data.__setitem__(-1, data[-1] ^ 0x80),
    "a byte too few": lambda data: data.pop(),
    "a byte too many": lambda data: data.append(7),
    "hardly anything left": lambda data: data.__delitem__(slice(1, None)),
    "two parts exchanged": lambda data: data.extend([data.pop(0) for _ in range(len(data) // 2)]),
    "zeros": lambda data: data.__setitem__(slice(None), bytes(len(data))),
}


@both_digests
@pytest.mark.parametrize("damage", DAMAGE)
@every_kind
def test_damaged_data_are_never_served(
    places: Places, kind: str, damage: str, options: dict[str, Any]
) -> None:
    place = places(kind)
    store, before = filled(place, "abc", **options), place.values()
    for count, (asked, last) in enumerate(itertools.product(place.reads, place.ends), 1):
        nbytes = place.change(store, "b", DAMAGE[damage], last)
        with pytest.raises(SnapshotCorruptError, match=rf"{asked}: b in .* it was dropped"):
            getattr(store, asked)(*(("b", bytearray(nbytes)) if asked == "get_into" else "b"))
        assert store.stat(["b"]) == [None]
        assert not store.get_into("b", bytearray(nbytes))
        assert dropped(store) == count
        assert store.put("b", [content("b", place.size)]) is True
        assert [read(store, key) for key in "abc"] == [content(key, place.size) for key in "abc"]
    assert before is None or len(place.values()) == len(before)


@pytest.mark.parametrize("asked", ["stat", "get_into", "prefix", "put"])
@every_kind
def test_an_entry_of_which_a_part_is_gone_is_a_miss_and_nothing_of_it_stays(
    places: Places, kind: str, asked: str
) -> None:
    place = places(kind)
    left = filled(place, "ac") and place.values()
    store = filled(place, "b")
    place.lose(store, "b")
    other = place.open()
    if asked == "stat":
        assert present(other, "abc") == "ac"
    elif asked == "prefix" and kind != "mooncake":  # which asks for no size
        assert other.prefix(["a", "b", "c"]) == 1
    elif asked == "put" and kind != "mooncake":
        assert other.put("b", [b"anew"]) is True
        assert read(other, "b") == b"anew"
        other.delete("b")
    else:
        with contextlib.suppress(SnapshotCorruptError):
            assert other.get_into("b", bytearray(place.size)) is False
    assert place.values() == left
    assert store.put("b", [content("b")]) is True
    assert present(store, "abc") == "abc"


@pytest.mark.parametrize("secret", ["a guess", None])
@every_kind
def test_who_does_not_know_the_secret_can_forge_nothing(
    places: Places, kind: str, secret: str | None
) -> None:
    place = places(kind)
    mine, others = filled(place, "a", **SECRET), place.open(digest="blake3", secret=secret)
    assert others.stat(["a"]) == place.open().stat(["a"]) == [None]
    others.put("a", [content("forged", place.size)])
    assert [read(store, "a") for store in (mine, others)] == [
        content(of, place.size) for of in ("a", "forged")
    ]
    place.move("a", others, mine, "a")
    with pytest.raises(SnapshotCorruptError):
        mine.get_into("a", bytearray(place.size))
    assert mine.stat(["a"]) == [None]
    assert "of the hosts" not in repr(mine)


@both_digests
@every_kind
def test_the_data_of_one_key_are_not_those_of_another(
    places: Places, kind: str, options: dict[str, Any]
) -> None:
    if kind == "file" and not options:
        pytest.skip("the digest of a file without a secret is of its data alone: whoever moves it may say so")
    place = places(kind)
    store = filled(place, "ab", **options)
    place.move("a", store, store, "b")
    with pytest.raises(SnapshotCorruptError, match=r"digest|secret"):
        store.get_into("b", bytearray(place.size))


# No room.


@contextlib.contextmanager
def without_room(place: Any) -> Iterator[None]:
    """Nothing more of 256 KiB fits."""
    import resource

    if isinstance(place, FilePlace):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, before[1]))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    else:
        place.client.config_set("maxmemory", place.client.info("memory")["used_memory"] + (1 << 19))
        yield
        place.client.config_set("maxmemory", 0)


@pytest.mark.parametrize("kind", ["file", "valkey"])
def test_what_there_is_no_room_for_is_refused_and_leaves_nothing(places: Places, kind: str) -> None:
    place = places(kind)
    store = filled(place, "a")
    before = place.values()
    with without_room(place):
        for _ in range(2):
            with pytest.raises(StoreFullError):
                store.put("b", [content("b", MIB)])
            assert place.values() == before
        assert store.stat(["b"]) == [None]
        assert read(store, "a") == content("a", place.size)
    assert store.put("b", [content("b", MIB)]) is True


def test_what_a_pool_has_no_room_for_is_refused_and_leaves_nothing(places: Places) -> None:
    store = filled(places("mooncake"), "a")
    with pytest.raises(StoreFullError, match="no room"):
        store.put("b", [b"x", bytes(160 * MIB)])
    assert present(store, "ab") == "a"
    assert store.put("b", [b"small"]) is True


# Nobody there.


class Answering:
    """A store whose server may be killed, frozen and started again."""

    def __init__(self, kind: str, stack: contextlib.ExitStack, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        if kind == "valkey":
            need_server()
            self.server = stack.enter_context(ValkeyServer())
            self.url, self.named = f"{self.server.url}?timeout=1", self.server.url
        elif kind == "mooncake":
            if reason := MooncakePool.missing():
                pytest.skip(reason)
            self.pool = stack.enter_context(MooncakePool())
            self.pool.add_host(64 * MIB)
            self.url, self.named = f"{self.pool.url}?timeout=20", self.pool.url
        else:
            self.url = self.named = f"file://{folder}"

    def kill(self) -> None:
        if self.kind == "file":
            shutil.rmtree(self.folder)
        elif self.kind == "valkey":
            self.server.kill()
        else:
            self.pool.kill(self.pool.master)

    def start(self) -> None:
        if self.kind == "valkey":
            self.server.start()
        else:
            self.pool.start_master()


@every_kind
def test_a_place_that_is_gone_is_unavailable_and_used_again_when_it_is_back(
    tmp_path: Path, kind: str
) -> None:
    with contextlib.ExitStack() as stack:
        there = Answering(kind, stack, tmp_path / "store")
        early = open_store(there.url) if kind != "file" else None  # opening contacts nobody
        store: Any = stack.enter_context(contextlib.closing(open_store(there.url)))
        assert store.put("a", [content("a")])
        there.kill()
        where = there.named.removeprefix("file://")
        calls = CALLS | ({"view": lambda store, key: store.view(key)} if kind == "file" else {})
        for name, call in calls.items():
            with pytest.raises(StoreUnavailableError, match=rf"^{name}: .*{where}"):
                call(store, "a")
        if early is None:
            return
        with pytest.raises(StoreUnavailableError):
            early.stat(["a"])
        there.start()

        def works(one: Any) -> bool:
            with contextlib.suppress(StoreUnavailableError, StoreFullError):  # full: no host is back yet
                return bool(one.put("c", [content("c")])) or read(one, "c") == content("c")
            return False

        for one in (store, early):
            wait_until(lambda one=one: works(one))
            assert read(one, "c") == content("c")
        assert store.stat(["a"]) == [None]
        early.close()


def test_a_server_that_is_frozen_is_unavailable_after_the_time_limit(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        there = Answering("valkey", stack, tmp_path)
        from kvcache.stores import ValkeyStore

        store = stack.enter_context(ValkeyStore(there.named, timeout=0.3, connect_timeout=0.3))
        patient = stack.enter_context(ValkeyStore(there.named))
        patient.put("a", [content("a", 9 * MIB)])
        patient.put("small", [b"x"])
        there.server.freeze()
        for call in (
            lambda: store.get_into("a", bytearray(9 * MIB)),
            lambda: store.put("b", [bytes(20 * MIB)]),
        ):
            with pytest.raises(StoreUnavailableError, match=r"[Tt]im"):
                call()
        there.server.thaw()
        assert read(patient, "a") == content("a", 9 * MIB)
        assert patient.stat(["b"]) == [None]
        assert read(store, "small") == b"x"


# Several at once.


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX, where another test has imported it
@pytest.mark.parametrize("kind", ["file", "valkey"])
def test_a_forked_child_goes_on_with_its_parents_store(places: Places, kind: str) -> None:
    store = filled(places(kind), "a")
    expected = read(store, "a")
    pid = os.fork()
    if not pid:
        right = all(read(store, "a") == expected for _ in range(20)) and store.put("child", [b"x"])
        os._exit(0 if right else 1)
    assert all(read(store, "a") == expected for _ in range(20))
    assert store.put("parent", [b"y"])
    assert os.waitpid(pid, 0)[1] == 0
    assert (read(store, "child"), read(store, "parent")) == (b"x", b"y")


@pytest.mark.parametrize("kind", ["file", "valkey"])
def test_of_two_that_put_one_key_at_once_one_writes_and_the_other_leaves_nothing(
    places: Places, kind: str
) -> None:
    place = places(kind)
    stores = [place.open() for _ in range(2)]
    for round_ in range(15):
        barrier, key = Barrier(2), f"k{round_}"

        def put(i: int, barrier: Barrier = barrier, key: str = key) -> bool:
            data = content(f"{key} {i}", place.size)
            barrier.wait(30)
            return bool(stores[i].put(key, [data]))

        with ThreadPoolExecutor(2) as threads:
            wrote = list(threads.map(put, range(2)))
        assert sorted(wrote) == [False, True]
        assert read(stores[0], key) == content(f"{key} {wrote.index(True)}", place.size)
        assert stores[1].delete(key)
        assert place.values() == []
