"""MooncakeStore on a real pool: its protocol's corners, hosts that die, memory of the caller's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

import ml
from kvcache.stores import (
    MooncakeStore,
    SnapshotCorruptError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from kvcache.stores.mooncake import client
from kvcache.stores.mooncake import store as mooncake_store
from kvcache.stores.mooncake.client import Client
from kvcache.stores.mooncake.connecting import LIMITS, set_limits
from kvcache.stores.mooncake.staging import Staging
from kvcache.stores.mooncake.transfer import HEADER
from kvcache.testing.stores import content, read

from ...rigs.mooncake_pool import MooncakePool
from ...rigs.servers import wait_until
from ..prefix.rigs.conversing import LONG, ConversationSetup, Rig
from .stores_rig import MIB, Change, MooncakePlace, native, places, pool

__all__ = ["native", "places", "pool"]


@pytest.fixture
def place(places: Callable[[str], Any]) -> MooncakePlace:
    found = places("mooncake")
    assert isinstance(found, MooncakePlace)
    return found


@pytest.fixture
def store(place: MooncakePlace) -> MooncakeStore:
    made = place.open()
    assert isinstance(made, MooncakeStore)
    return made


# Damage.


def framed(place: MooncakePlace, store: MooncakeStore, change: Change) -> None:
    """Change what the pool holds of "a", its header too."""
    data = bytearray(place.native.get(store._name("a")))
    change(data)
    place.set(store, "a", data)


def test_a_flipped_bit_anywhere_is_found(place: MooncakePlace, store: MooncakeStore) -> None:
    for count, at in enumerate([0, 15, 16, 23, 24, 39, 40, 63, 64, -1], 1):
        store.put("a", [content("a")])
        framed(place, store, lambda data, at=at: data.__setitem__(at, data[at] ^ 1))  # type: ignore[misc]
        with pytest.raises(SnapshotCorruptError, match="a in mooncake://"):
            store.get_into("a", bytearray(1000))
        assert store.stat(["a"]) == [None]
        assert store.dropped == count


def test_what_is_too_short_for_a_header_is_dropped_once_by_stat(
    place: MooncakePlace, store: MooncakeStore
) -> None:
    store.put("a", [b""])
    framed(place, store, lambda data: data.__delitem__(slice(HEADER - 1, None)))
    assert store.stat(["a", "a"]) == [None, None]
    assert store.dropped == 1
    assert store.put("a", [b"again"]) is True


# A pool that is full, hosts that die, a put that fails.


def test_a_full_pool_makes_room_and_what_is_left_is_whole(native: Any) -> None:
    with MooncakePool("--default_kv_lease_ttl=20") as own, MooncakeStore(own.url, timeout=20) as store:
        own.add_host(16 * MIB)
        keys = [f"k{i}" for i in range(30)]

        def put(key: str) -> bool:
            try:
                return store.put(key, [content(key, MIB)])
            except StoreFullError:  # all was asked for just now, or the master is still evicting
                return False

        for key in keys:
            wait_until(lambda key=key: put(key))
        found = {key: data for key in keys if (data := read(store, key)) is not None}
        assert 0 < len(found) < 17
        assert found == {key: content(key, MIB) for key in found}


def test_a_failed_put_leaves_nothing_and_the_key_free(
    place: MooncakePlace, store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = Mock(side_effect=StoreUnavailableError("put: the cable was pulled"))
    with monkeypatch.context() as patched, pytest.raises(StoreUnavailableError, match="cable"):
        patched.setattr(Client, "write", pulled)
        store.put("a", [content("a")])
    assert store.stat(["a"]) == [None]
    name = [store._name("a")]
    assert place.native.batch_put_session_start(name, [10]) == [0]  # nobody's session is open
    assert place.native.batch_put_session_revoke(name) == [0]
    assert store.put("a", [content("a")]) is True
    assert read(store, "a") == content("a")


def test_an_entry_goes_with_its_host_unless_it_has_a_replica(native: Any) -> None:
    with MooncakePool() as own:
        first = own.add_host(64 * MIB)
        with (
            MooncakeStore(own.url, timeout=20) as store,
            MooncakeStore(own.url, timeout=20, replicas="2") as twice,
        ):
            assert store.put("a", [content("a")])
            second = own.add_host(16 * MIB)
            for key in "bcd":
                assert twice.put(key, [content(key)])
            own.kill(first)
            assert store.get_into("a", bytearray(1000)) is False
            wait_until(lambda: store.stat(["a"]) == [None])
            wait_until(lambda: all(read(twice, key) == content(key) for key in "bcd"))
            own.kill(second)
            with pytest.raises(StoreError):
                store.put("e", [content("e")])
            wait_until(lambda: store.stat(["b"]) == [None])
            with pytest.raises(StoreFullError):
                store.put("e", [content("e")])
            own.add_host(64 * MIB)
            assert store.put("a", [content("a")])
            assert read(store, "a") == content("a")


# A cache over it.


def test_caches_share_a_prefix_through_the_pool(place: MooncakePlace, numpy_backend: ml.Backend) -> None:
    for tokens, found in ((LONG, 0), ([*LONG[:18], 1, 2, 3], 16), ([*LONG, 7], 20)):
        r = Rig(ConversationSetup(), numpy_backend, tiers=[place.open()])
        assert r.keep(tokens) == found
        r.prefix.close()


# What needs no pool.


@pytest.mark.parametrize(("call", "answer"), [("size", None), ("remove", False)])
def test_a_master_that_has_no_such_entry_has_answered(call: str, answer: object) -> None:
    package = Mock()
    package.get_size.return_value = package.remove.return_value = -704
    assert getattr(Client(package, "here"), call)("a") is answer


def test_a_host_that_is_gone_is_a_miss_and_one_that_does_not_answer_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = Mock()
    package.get_into_ranges.return_value = [[[-800]]]
    assert Client(package, "here").read("a", [(0, 4, 0)]) is False
    monkeypatch.setattr(client, "_SLOW", -1.0)
    with pytest.raises(StoreUnavailableError, match=r"^read: a host of here could not be reached"):
        Client(package, "here").read("a", [(0, 4, 0)])


def test_after_a_failure_the_package_is_called_where_somebody_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package, knocks = Mock(), Mock(return_value="nobody listens")
    package.batch_is_exist.side_effect = [[-900], [1], [1]]
    monkeypatch.setattr(mooncake_store, "connect", lambda settings: package)
    monkeypatch.setattr(mooncake_store, "knock", knocks)
    with MooncakeStore("mooncake://127.0.0.1:1") as store:
        with pytest.raises(StoreUnavailableError, match=r"^exists: .* does not answer \(-900\)"):
            store.prefix(["a"])
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match=r"^prefix: nobody listens"):
                store.prefix(["a"])
        assert package.batch_is_exist.call_count == 1
        knocks.return_value = None
        assert store.prefix(["a"]) == store.prefix(["a"]) == 1
        assert knocks.call_count == 3, "it has answered: nobody asks before the last call"


def test_buffers_are_registered_once_and_unregistered_at_the_end() -> None:
    registered: dict[int, int] = {}
    codes = iter([-600])

    def register(address: int, nbytes: int) -> int:
        assert address not in registered
        if code := next(codes, 0):
            return code
        registered[address] = nbytes
        return 0

    staging = Staging(register, lambda address: registered.pop(address) * 0, 1 << 16, 2)
    with pytest.raises(StoreError, match="-600"), staging.lent():
        pass
    for _ in range(3):
        with staging.lent() as one, staging.lent() as other:
            assert one.nbytes == other.nbytes == 1 << 16
            assert one is not other
    assert sorted(registered.values()) == [1 << 16, 1 << 16]
    staging.close()
    assert not registered


def test_a_client_that_is_none_is_refused() -> None:
    with pytest.raises(StoreUnavailableError, match=r"0\.3\.13"), MooncakeStore(client=object()) as store:
        store.stat(["a"])


def test_limits_that_the_environment_sets_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "20000")
    set_limits(1.5)
    found = [os.environ[name] for name in LIMITS[:4]]
    assert found == ["20000", "1500", "2", "2"]
