"""Bugs planted in ValkeyStore: its tests notice each of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from kvcache.stores import StoreUnavailable
from kvcache.stores.digests import Digests
from kvcache.stores.valkey import entries, link, transfer
from kvcache.stores.valkey import store as store_module
from kvcache.stores.valkey.entries import Entries
from kvcache.stores.valkey.link import Link
from kvcache.stores.valkey.manifest import RemoteManifest
from kvcache.stores.valkey.replies import value

from . import test_stores_faults, test_stores_valkey
from .stores_rig import native, places, pool
from .valkey_rig import client, open_here, served, server, store

__all__ = ["client", "native", "open_here", "places", "pool", "server", "store"]

pytestmark = served
SUITE: dict[str, Any] = {
    name: value
    for module in (test_stores_valkey, test_stores_faults)
    for name, value in vars(module).items()
    if name.startswith("test_")
}
Patch = pytest.MonkeyPatch
BUGS: dict[str, tuple[Callable[[Patch], None], str, dict[str, Any]]] = {}


def bug(test: str, **arguments: Any) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """The bug, the test that has to notice it, and what that one is given besides fixtures."""

    def add(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS[plant.__name__] = plant, test, arguments
        return plant

    return add


@bug("test_damaged_data_are_never_served", kind="valkey", damage="one bit at the start", options={})
def a_digest_that_nobody_compares(patch: Patch) -> None:
    class Agreeing(str):
        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = str.__hash__

    class Agreed:
        def __init__(self, digest: Any) -> None:
            self.update = digest.update

        def hexdigest(self) -> str:
            return Agreeing("0" * 32)

    original = Digests.start
    patch.setattr(Digests, "start", lambda self, *of: Agreed(original(self, *of)))


@bug("test_damaged_data_are_never_served", kind="valkey", damage="a byte too many", options={})
def a_longer_chunk_taken_for_the_chunk(patch: Patch) -> None:
    def exactly(*arguments: Any) -> Any:
        for ((call, name, start, _), reply), wanted in original(*arguments):
            yield link.Command([call, name, start, start + wanted - 1], reply), wanted

    original = transfer._pieces
    patch.setattr(transfer, "_pieces", exactly)


@bug("test_the_data_of_one_key_are_not_those_of_another", kind="valkey", options={})
def a_digest_of_the_data_alone(patch: Patch) -> None:
    patch.setattr(Digests, "start", lambda self, *of: self._new())


@bug("test_an_entry_of_which_a_part_is_gone_is_a_miss_and_nothing_of_it_stays", kind="valkey", asked="stat")
def a_look_that_trusts_the_manifest(patch: Patch) -> None:
    def whole(self: Entries, manifest: RemoteManifest, start: int, stop: int) -> Any:
        sizes = list(manifest.sizes)[start:stop]
        return [link.Command(["ECHO", size], stated) for size in sizes]

    def stated(replies: Any) -> int:
        return int(replies.read(value(20)))

    patch.setattr(Entries, "_lengths", whole)


@bug("test_nothing_is_removed_that_another_has_put_meanwhile")
def whatever_is_there_removed(patch: Patch) -> None:
    patch.setattr(entries, "_REMOVE", "return redis.call('UNLINK', KEYS[1])")


@bug("test_a_put_that_is_late_gives_way")
def a_manifest_written_over(patch: Patch) -> None:
    def transaction(self: Any, first: link.Command, *rest: Any) -> Any:
        words = [word for word in first.words if word != "NX"]
        return original(self, link.Command(words, first.reply), *rest)

    original = link.Wire.transaction
    patch.setattr(link.Wire, "transaction", transaction)


@bug("test_a_put_that_is_late_gives_way")
def chunks_of_the_loser_left(patch: Patch) -> None:
    patch.setattr(Entries, "discard", lambda self, wire, manifest: None)


@bug("test_a_manifest_that_the_server_has_no_room_for_leaves_no_chunks")
def chunks_of_the_refused_left(patch: Patch) -> None:
    patch.setattr(Entries, "discard", lambda self, wire, manifest: None)


@bug("test_chunks_that_nobody_published_expire")
def unpublished_chunks_kept_as_long_as_entries(patch: Patch) -> None:
    patch.setattr(store_module, "_UNFINISHED", 1 << 40)


@bug("test_a_hit_starts_the_time_anew_and_chunks_outlive_their_manifest")
def the_manifest_alone_refreshed(patch: Patch) -> None:
    patch.setattr(
        Entries, "_refreshing", lambda self, manifest: [entries._expiring(self.name(manifest.key), self.ttl)]
    )


@bug("test_a_hit_starts_the_time_anew_and_chunks_outlive_their_manifest")
def chunks_that_go_with_their_manifest(patch: Patch) -> None:
    patch.setattr(entries, "SLACK", 0)


@bug("test_an_entry_that_was_replaced_after_the_look_is_read_as_it_is_now")
def a_remembered_manifest_that_is_not_compared(patch: Patch) -> None:
    original = Entries.read
    patch.setattr(
        Entries,
        "read",
        lambda self, wire, manifest, *rest: (manifest.encoded(), original(self, wire, manifest, *rest)[1]),
    )


@bug("test_a_server_that_quotes_the_password_in_its_error_does_not_make_it_known")
def errors_passed_on_as_they_are(patch: Patch) -> None:
    patch.setattr(Link, "_translated", lambda self, op, error: StoreUnavailable(f"{op}: {error}"))


@bug("test_every_name_begins_with_the_prefix_and_prefixes_do_not_mix")
def names_without_the_prefix(patch: Patch) -> None:
    patch.setattr(Entries, "name", lambda self, key: f"kvcache:xxh3:m:{key}".encode())


@pytest.mark.parametrize("name", list(BUGS))
def test_a_planted_bug_is_noticed(name: str, request: pytest.FixtureRequest) -> None:
    plant, test, arguments = BUGS[name]
    function = SUITE[test]
    wanted = inspect.signature(function).parameters.keys() - arguments.keys()
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        given = {fixture: request.getfixturevalue(fixture) for fixture in wanted}
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            function(**given, **arguments)


@pytest.mark.parametrize("name", list(BUGS))
def test_without_the_bug_the_same_test_passes(name: str, request: pytest.FixtureRequest) -> None:
    _, test, arguments = BUGS[name]
    function = SUITE[test]
    wanted = inspect.signature(function).parameters.keys() - arguments.keys()
    function(**{fixture: request.getfixturevalue(fixture) for fixture in wanted}, **arguments)
