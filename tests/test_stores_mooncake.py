"""MooncakeStore: the shipped suite on a real pool, its protocol's corners, and what dies."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import kvcache
import ml
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.stores import (
    SnapshotCorrupt,
    SnapshotStore,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StoreValueError,
    open_store,
)
from kvcache.stores.digests import Digests
from kvcache.stores.mooncake import MooncakeOptions, MooncakeStore
from kvcache.stores.mooncake.client import Client
from kvcache.stores.mooncake.connecting import LIMITS, connect, load, set_limits
from kvcache.stores.mooncake.frame import HEADER, Digest
from kvcache.stores.mooncake.outage import Outage
from kvcache.stores.mooncake.staging import Staging
from kvcache.testing.mooncake_pool import MooncakePool, wait_until
from kvcache.testing.stores import StoreTests, content, read

PROGRAM = Path(__file__).with_name("mooncake_crash.py")
MIB = 1 << 20


@pytest.fixture(scope="module")
def pool() -> Iterator[MooncakePool]:
    if reason := MooncakePool.missing():
        pytest.skip(reason)
    with MooncakePool() as started:
        started.add_host(256 * MIB)
        yield started


@pytest.fixture(scope="module")
def native(pool: MooncakePool) -> Iterator[Any]:
    """One client of the package for all tests: closing one takes a second."""
    made = connect(MooncakeOptions.of(pool.url, {"timeout": 20}))
    yield made
    made.close()


Make = Callable[..., MooncakeStore]


@pytest.fixture
def make(pool: MooncakePool, native: Any, request: pytest.FixtureRequest) -> Iterator[Make]:
    """``make(**options)``: a store with names of this test's own."""
    made: list[MooncakeStore] = []
    prefix = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]

    def store(**options: Any) -> MooncakeStore:
        made.append(MooncakeStore(pool.url, client=native, **{"prefix": prefix, **options}))
        return made[-1]

    yield store
    for opened in made:
        opened.close()
    native.remove_by_regex(f"^{prefix}:.*", True)


class MooncakeTests(StoreTests):
    persistent = True
    budgeted = False
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _made_with(self, make: Make) -> None:
        self._make = make

    def make(self, folder: Path, budget: int | None = None) -> SnapshotStore:
        return self._make(**self.options)

    def damage(self, store: SnapshotStore, folder: Path, key: str) -> bool:
        assert isinstance(store, MooncakeStore)
        replace(store, key, lambda data: data.__setitem__(len(data) // 2, data[len(data) // 2] ^ 0x10))
        return True


class TestMooncakeStore(MooncakeTests):
    pass


class TestMooncakeStoreWithSmallBuffers(MooncakeTests):
    """Nearly every entry passes in several pieces, and calls wait for one another's buffer."""

    options: ClassVar[dict[str, Any]] = {"staging": "64KiB", "lanes": 1}
    big = MIB + 3


def replace(store: MooncakeStore, key: str, change: Callable[[bytearray], object]) -> None:
    """Change what the pool holds of an entry."""
    client = store._linked()[0].native
    data = bytearray(client.get(store._name(key)))
    change(data)
    assert client.upsert(store._name(key), bytes(data)) == 0


# Damage.


@pytest.mark.parametrize("at", [0, 15, 16, 23, 24, 39, 40, 63, 64, -1], ids=lambda at: f"byte {at}")
def test_a_flipped_bit_anywhere_is_found(make: Make, at: int) -> None:
    store = make()
    store.put("a", [content("a")])
    replace(store, "a", lambda data: data.__setitem__(at, data[at] ^ 1))
    with pytest.raises(SnapshotCorrupt, match="a in mooncake://"):
        store.get_into("a", bytearray(1000))
    assert store.stat(["a"]) == [None]
    assert store.dropped == 1


def test_the_value_of_another_key_is_not_taken(make: Make) -> None:
    store = make()
    store.put("a", [content("a")])
    store.put("b", [content("b")])
    other = store._linked()[0].native.get(store._name("b"))
    replace(store, "a", lambda data: data.__setitem__(slice(None), other))
    with pytest.raises(SnapshotCorrupt):
        store.get_into("a", bytearray(1000))
    assert read(store, "b") == content("b")


@pytest.mark.parametrize("secret", ["a guess", None], ids=["another secret", "none"])
def test_who_does_not_know_the_secret_can_forge_nothing(make: Make, secret: str | None) -> None:
    pytest.importorskip("blake3", reason="the package blake3 is not installed")
    mine = make(digest="blake3", secret="of the hosts")
    others = make(digest="blake3", secret=secret)
    mine.put("a", [content("a")])
    assert others.stat(["a"]) == make().stat(["a"]) == [None]
    others.put("a", [content("forged")])
    assert (read(mine, "a"), read(others, "a")) == (content("a"), content("forged"))
    forged = others._linked()[0].native.get(others._name("a"))
    replace(mine, "a", lambda data: data.__setitem__(slice(None), forged))
    with pytest.raises(SnapshotCorrupt, match="digest"):
        mine.get_into("a", bytearray(1000))
    assert "of the hosts" not in f"{mine!r} {mine._settings!r}"


def test_what_was_cut_off_is_found(make: Make) -> None:
    store = make()
    store.put("a", [content("a")])
    replace(store, "a", lambda data: data.__delitem__(slice(-10, None)))
    assert store.stat(["a"])[0] == kvcache.stores.Stat(990)
    with pytest.raises(SnapshotCorrupt):
        store.get_into("a", bytearray(990))


def test_what_is_too_short_for_a_header_is_dropped_by_stat(make: Make) -> None:
    store = make()
    store.put("a", [b""])
    replace(store, "a", lambda data: data.__delitem__(slice(HEADER - 1, None)))
    assert store.stat(["a", "a"]) == [None, None]
    assert store.dropped == 1
    assert store.put("a", [b"again"]) is True


def test_what_is_too_short_for_a_header_is_no_entry_to_get(make: Make) -> None:
    store = make()
    store.put("a", [b""])
    replace(store, "a", lambda data: data.__delitem__(slice(HEADER - 1, None)))
    with pytest.raises(SnapshotCorrupt):
        store.get_into("a", bytearray(0))
    assert store.put("a", [b"again"]) is True


# Registered memory.


def test_registered_memory_is_put_from_and_read_into_where_it_lies(make: Make) -> None:
    store = make(staging="64KiB")
    source, target = np.frombuffer(content("s", 500_000), np.uint8).copy(), np.zeros(500_000, np.uint8)
    store.register(source)
    store.register(target)
    staging = store._linked()[1]
    assert staging.covers(memoryview(source)[7:400_000])
    assert not staging.covers(memoryview(bytes(8)))
    parts = [b"head", source[:100_000], source[100_000:300_000].copy(), source[300_000:], b"tail"]
    assert store.put("a", parts)
    assert read(store, "a") == b"head" + source.tobytes() + b"tail"
    assert store.put("b", [source])
    assert store.get_into("b", target)
    assert np.array_equal(source, target)
    with pytest.raises(StoreValueError, match="already"):
        store.register(target[10:20])


def test_damage_is_found_in_registered_memory_too(make: Make) -> None:
    store = make()
    target = np.zeros(1000, np.uint8)
    store.register(target)
    store.put("a", [content("a")])
    replace(store, "a", lambda data: data.__setitem__(-1, data[-1] ^ 1))
    with pytest.raises(SnapshotCorrupt):
        store.get_into("a", target)


def test_closing_lets_go_of_registered_memory(make: Make) -> None:
    target = np.zeros(1000, np.uint8)
    for _ in range(3):
        with make() as store:
            store.register(target)


# A pool that is full, a host that dies, a master that dies.


def test_what_the_pool_has_no_room_for_is_refused_and_leaves_nothing(make: Make) -> None:
    store = make()
    with pytest.raises(StoreFull, match="no room"):
        store.put("a", [np.zeros(1, np.uint8)] * 3 + [np.zeros(300 * MIB, np.uint8)])
    assert store.stat(["a"]) == [None]
    assert store.put("a", [b"small"]) is True


def test_a_full_pool_makes_room_and_what_is_left_is_whole(native: Any) -> None:
    with MooncakePool("--default_kv_lease_ttl=20") as own, MooncakeStore(own.url, timeout=20) as store:
        own.add_host(16 * MIB)
        keys = [f"k{i}" for i in range(40)]

        def put(key: str) -> bool:
            try:
                return store.put(key, [content(key, MIB)])
            except StoreFull:  # all that is there was asked for just now, or the master is still evicting
                return False

        for key in keys:
            wait_until(lambda key=key: put(key))
        found = [read(store, key) for key in keys]
        left = [key for key, data in zip(keys, found, strict=True) if data is not None]
        assert 0 < len(left) < 17
        assert [data for data in found if data is not None] == [content(key, MIB) for key in left]


def test_a_failed_put_leaves_nothing_and_the_key_free(
    make: Make, native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make()

    def fail(self: object, name: str, pieces: object) -> None:
        raise StoreUnavailable("put: the cable was pulled")

    with monkeypatch.context() as patched, pytest.raises(StoreUnavailable, match="cable"):
        patched.setattr(Client, "write", fail)
        store.put("a", [content("a")])
    assert store.stat(["a"]) == [None]
    assert native.batch_put_session_start([store._name("a")], [10]) == [0]  # nobody's session is open
    assert native.batch_put_session_revoke([store._name("a")]) == [0]
    assert store.put("a", [content("a")]) is True
    assert read(store, "a") == content("a")


def test_an_entry_goes_with_its_host_and_is_a_miss(native: Any) -> None:
    with MooncakePool() as own:
        host = own.add_host(64 * MIB)
        with MooncakeStore(own.url, timeout=20) as store:
            assert store.put("a", [content("a")])
            own.kill(host)
            assert store.get_into("a", bytearray(1000)) is False
            with pytest.raises(StoreError):
                store.put("b", [content("b")])
            wait_until(lambda: store.stat(["a"]) == [None])
            with pytest.raises(StoreFull):
                store.put("b", [content("b")])
            own.add_host(64 * MIB)
            assert store.put("a", [content("a")])
            assert read(store, "a") == content("a")


def test_of_two_replicas_one_outlives_the_death_of_a_host(native: Any) -> None:
    with MooncakePool() as own:
        hosts = [own.add_host(16 * MIB) for _ in range(2)]
        with MooncakeStore(own.url, timeout=20, replicas="2") as store:
            for key in "abcd":
                assert store.put(key, [content(key)])
            own.kill(hosts[0])
            wait_until(lambda: all(read(store, key) == content(key) for key in "abcd"))


def test_a_master_that_dies_is_unavailable_and_the_same_store_works_when_it_is_back() -> None:
    if reason := MooncakePool.missing():
        pytest.skip(reason)
    with MooncakePool() as own, MooncakeStore(own.url, timeout=20) as store:
        own.add_host(64 * MIB)
        assert store.put("a", [content("a")])
        own.kill(own.master)
        calls: list[Callable[[], object]] = [
            lambda: store.get_into("a", bytearray(1000)),
            lambda: store.put("b", [b"x"]),
            lambda: store.stat(["a"]),
            lambda: store.prefix(["a"]),
            lambda: store.delete("a"),
        ]
        for call in calls:
            with pytest.raises(StoreUnavailable, match="asked again in" if call is not calls[0] else None):
                call()
        own.start_master()

        def works() -> bool:
            try:
                return store.put("c", [content("c")])
            except (StoreUnavailable, StoreFull):  # full: its host has not come back to it yet
                return False

        wait_until(works)
        assert read(store, "c") == content("c")
        assert store.stat(["a"]) == [None]


def test_a_store_opens_before_its_master_and_connects_when_that_is_there() -> None:
    if reason := MooncakePool.missing():
        pytest.skip(reason)
    with MooncakePool() as own:
        own.kill(own.master)
        with open_store(f"{own.url}?timeout=20&lanes=2") as store:
            with pytest.raises(StoreUnavailable, match="no master"):
                store.stat(["a"])
            own.start_master()

            def works() -> bool:
                try:
                    return store.stat(["a"]) == [None]
                except StoreUnavailable:
                    return False

            wait_until(works)


# Several processes.


def passes(pool: MooncakePool, scenario: str, *numbers: object) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
    command = [sys.executable, str(PROGRAM), pool.url, scenario, *map(str, numbers)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**kept, "PYTHONPATH": str(PROGRAM.parents[1])},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_killed_at_any_moment_what_was_acknowledged_is_whole(pool: MooncakePool) -> None:
    kills, _, acknowledged, _ = passes(pool, "killed_while_writing", 30).split()
    assert int(kills) == 30
    assert int(acknowledged) > 0


def test_a_key_whose_writer_died_is_free_again(pool: MooncakePool) -> None:
    assert passes(pool, "orphans_are_taken_over") == "taken over\n"


def test_a_writer_that_was_given_up_is_told_so(pool: MooncakePool) -> None:
    assert "refused with code -601" in passes(pool, "late_writers_are_told")


def test_of_many_processes_that_put_one_key_one_writes(pool: MooncakePool) -> None:
    assert passes(pool, "one_writer_of_many", 4) == "6 keys\n"


def test_a_store_that_was_forked_says_so(pool: MooncakePool) -> None:
    passes(pool, "a_fork_is_noticed")


def test_nobody_waits_for_a_frozen_master(native: Any) -> None:
    with MooncakePool() as own:
        own.add_host(16 * MIB)
        assert passes(own, "nobody_waits_for_a_frozen_master", own.master.pid) == "went on\n"


# A cache over it.


def evaluate(cache: kvcache.CausalCache, seq: int, begin: int, tokens: list[int]) -> None:
    """Stands for a model: one layer whose K and V are the token."""
    with cache.backend.new_context() as ctx:
        cache.start_forward(ctx, kvcache.Batch(range(begin, begin + len(tokens)), [seq] * len(tokens)))
        cache.set_layer(0)
        key = ctx.from_numpy(np.repeat(np.array(tokens, np.float32), 4).reshape(-1, 1, 4))
        cache.put(ctx, key, key)


def cached(tiers: list[Any], tokens: list[int]) -> int:
    """A cache of its own meets a conversation; how much of it the tiers have."""
    with ml.open_backend("numpy") as backend:
        cache = kvcache.CausalCache()
        cache.init(backend, ml.DType.F32, max_sequences=1, capacity=64, max_batch=64)
        with PrefixCache(cache, tiers=tiers, identity={"model": "test"}, block_size=8) as prefix:
            with prefix.begin(tokens) as session:
                found = session.cached
                evaluate(cache, session.seq, found, [int(token) for token in session.remaining])
            prefix.flush()
    return found


def test_two_caches_share_a_prefix_through_the_pool(make: Make) -> None:
    tokens = list(range(100, 130))
    assert cached([make()], tokens) == 0
    assert cached([make()], [*tokens[:20], 1, 2, 3]) == 16
    assert cached([make()], [*tokens, 7]) == 30


def test_a_cache_goes_on_without_its_pool(make: Make) -> None:
    if reason := MooncakePool.missing():
        pytest.skip(reason)
    tokens = list(range(100, 130))
    with MooncakePool() as own, MooncakeStore(own.url, timeout=20) as store:
        own.add_host(16 * MIB)
        assert cached([store], tokens) == 0
        assert cached([store], [*tokens, 7]) == 30
        own.kill(own.master)
        assert cached([store], [*tokens, 7]) == 0


# What needs no pool.


def test_after_a_failure_calls_are_refused_for_ever_longer_times() -> None:
    now = [0.0]
    outage = Outage(lambda: now[0])
    assert outage.admit("get") is False
    waits = []
    for _ in range(8):
        outage.failed("the master does not answer")
        began = now[0]
        while refused(outage):
            now[0] += 0.5
        waits.append(now[0] - began)
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]


def refused(outage: Outage) -> bool:
    try:
        return not outage.admit("get")
    except StoreUnavailable:
        return True


def test_a_refusal_says_why_and_until_when() -> None:
    outage = Outage(lambda: 0.0)
    outage.failed("the master does not answer")
    with pytest.raises(StoreUnavailable, match=r"^get: the master does not answer; asked again in 1\.0 s$"):
        outage.admit("get")


def test_only_one_call_tries_again_until_the_master_has_answered() -> None:
    now = [0.0]
    outage = Outage(lambda: now[0])
    outage.failed("gone")
    now[0] = 1.0
    assert outage.admit("get") is True
    with pytest.raises(StoreUnavailable):
        outage.admit("get")
    outage.over()
    assert outage.admit("get") is False
    outage.failed("gone")
    now[0] += 1.0
    assert outage.admit("get") is True


def test_the_header_says_whose_bytes_follow_and_how_many() -> None:
    headers = []
    for key, data in (("a", b"xy"), ("b", b"xy"), ("a", b"xz"), ("a", b"x"), ("a", b"")):
        digest = Digest(Digests("MooncakeStore", "mooncake"), key, len(data))
        digest.update(data)
        headers.append(digest.header())
    assert len(set(headers)) == 5
    assert {len(header) for header in headers} == {HEADER}
    assert headers[0][:24] == b"kvcache.frame/1\n" + (2).to_bytes(8, "little")


def test_buffers_are_registered_once_and_unregistered_at_the_end() -> None:
    registered: dict[int, int] = {}

    def register(address: int, nbytes: int) -> int:
        assert address not in registered
        registered[address] = nbytes
        return 0

    staging = Staging(register, lambda address: registered.pop(address) * 0, 1 << 16, 2)
    for _ in range(3):
        with staging.lent() as one, staging.lent() as other:
            assert one.nbytes == other.nbytes == 1 << 16
            assert one is not other
    assert sorted(registered.values()) == [1 << 16, 1 << 16]
    staging.close()
    assert not registered


def test_a_buffer_that_cannot_be_registered_is_an_error_and_the_lane_stays() -> None:
    codes = iter([-600, 0])
    staging = Staging(lambda address, nbytes: next(codes), lambda address: 0, 1 << 16, 1)
    with pytest.raises(StoreError, match="-600"), staging.lent():
        pass
    with staging.lent() as buffer:
        assert buffer.nbytes == 1 << 16


@pytest.mark.parametrize(
    ("url", "options", "error"),
    [
        ("mooncake://", {}, "master"),
        ("http://here", {}, "mooncake://host"),
        ("mooncake://me:secret@here", {}, "user"),
        ("mooncake://here:99999", {}, "Port"),
        ("mooncake://here/folder", {}, "mooncake://host"),
        ("mooncake://here", {"host": "there"}, "beside"),
        ("mooncake://here", {"prefix": "a b"}, "prefix"),
        ("mooncake://here", {"staging": "1KiB"}, "staging"),
        ("mooncake://here", {"segment": "some"}, "some"),
        ("mooncake://here", {"segment": "15MiB"}, "segment"),
        ("mooncake://here", {"segment": -1}, "segment"),
        ("mooncake://here", {"lanes": "0"}, "lanes"),
        ("mooncake://here", {"digest": "md5"}, "digest"),
        ("mooncake://here", {"replicas": 0}, "replicas"),
        ("mooncake://here", {"timeout": "soon"}, "timeout"),
        ("mooncake://here", {"timeout": -1}, "timeout"),
    ],
)
def test_settings_that_make_no_sense_are_refused(url: str, options: dict[str, Any], error: str) -> None:
    with pytest.raises(StoreValueError, match=error) as raised:
        MooncakeStore(url, **options)
    assert "secret" not in str(raised.value)


def test_an_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="prefix"):
        MooncakeStore("mooncake://here", ttl=3)


def test_options_of_the_url_are_understood() -> None:
    found = MooncakeOptions.of("mooncake://[::1]:7", {"segment": "4GiB", "lanes": "2", "timeout": "1.5"})
    assert (found.segment, found.lanes, found.timeout) == (4 << 30, 2, 1.5)
    assert (found.master, found.url) == ("[::1]:7", "mooncake://[::1]:7")
    assert MooncakeOptions.of("mooncake://here", {}).port == 50051


def test_a_client_that_is_none_is_refused() -> None:
    with pytest.raises(StoreUnavailable, match=r"0\.3\.13"), MooncakeStore(client=object()) as store:
        store.stat(["a"])


@pytest.mark.usefixtures("unprobed")
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(StoreUnavailable, match=r"ml-kvcache\[mooncake\]"):
        load()
    with pytest.raises(StoreUnavailable, match=r"ml-kvcache\[mooncake\]"):
        open_store("mooncake://here")


def test_limits_that_the_environment_sets_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "20000")
    set_limits(1.5)
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "20000"
    assert os.environ["MC_RPC_CONNECT_TIMEOUT_MS"] == "1500"
    assert os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "2"
