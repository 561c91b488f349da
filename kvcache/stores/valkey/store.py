"""A store in a Valkey or Redis server, shared by hosts.

``put`` goes: chunks of almost 4 MiB under a random id, over several connections in turn; then the manifest,
only where there is none, together with the chunks' time to live. The manifest is what makes the entry exist.
``get_into`` reads the chunks into the caller's buffer and checks the digest over all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

from valkey.exceptions import InvalidResponse, ResponseError

from kvcache.stores.buffers import Buffer, WritableBuffer, as_parts, as_writable, check_size
from kvcache.stores.closing import RemoteStore
from kvcache.stores.digests import Digests
from kvcache.stores.errors import SnapshotCorruptError, StoreFullError
from kvcache.stores.protocol import Stat, Usage, check_key, check_keys, is_key
from kvcache.stores.valkey.entries import SLACK, Entries, Found
from kvcache.stores.valkey.link import Command, Link, Wire
from kvcache.stores.valkey.manifest import CHUNK, ENTRY_FORMAT, MAX_BYTES, Broken, RemoteManifest, understood
from kvcache.stores.valkey.options import ValkeyOptions
from kvcache.stores.valkey.replies import status
from kvcache.stores.valkey.transfer import LANES, MISSING, WRONG, send_chunks

__all__ = ["ValkeyStore"]

_UNFINISHED: Final = 15 * 60 * 1000
"""Milliseconds after which chunks that nobody published are gone."""
_TRIES: Final = 3
"""How often a get follows a key whose entry is being replaced."""
_REMEMBERED: Final = 4096
"""Manifests."""
_COUNTED: Final = 1 << 20
"""Entries that ``usage`` counts at most: a server that names more never comes to its end."""


class ValkeyStore(RemoteStore):
    """Entries in the server at ``url`` (``valkey://[user:password@]host[:port][/db]``; ``valkeys`` for TLS).

    ``options`` are the fields of ``ValkeyOptions``, in their own types or as text: ``prefix``, ``ttl``,
    ``username``, ``password``, ``password_file``, ``digest``, ``secret``, ``connections``,
    ``connect_timeout``, ``timeout``, ``tls_ca``, ``tls_cert``, ``tls_key``, ``tls_verify``.

    The budget is the server's own (``maxmemory`` and its policy): an entry of which the server has evicted
    a chunk is a miss. A put that the server has no room for raises StoreFullError. Opening contacts nobody;
    a server that is not reached within the time limits is a StoreUnavailableError of that call, and the next
    call tries again. After a fork the child goes on with connections of its own; fork while no other
    thread is in a call.

    Raises StoreValueError for a URL or an option that makes no sense or does not exist,
    StoreUnavailableError where a package is missing.
    """

    def __init__(self, url: str = "valkey://localhost:6379/0", **options: Any) -> None:
        settings = ValkeyOptions.of(url, options)
        super().__init__(settings)
        self._digests = Digests("ValkeyStore", "valkey", settings.digest, settings.secret)
        self._link = Link(settings)
        self._entries = Entries(f"{settings.prefix}:{self._digests.family}", round(settings.ttl * 1000))
        self._lock = threading.Lock()
        self._seen: dict[str, Found] = {}
        self._evicted = self._dropped = 0

    def put(self, key: str, parts: Sequence[Buffer]) -> bool:
        check_key(key)
        views, nbytes = as_parts(parts)
        with self._wire("put", nbytes) as wire:
            if self._look(wire, [key])[0] is not None:
                return False
            manifest = RemoteManifest(key, nbytes, CHUNK, secrets.token_hex(16), "")
            try:
                manifest = self._send(wire, manifest, views)
                published, there = self._entries.publish(wire, manifest)
            except ResponseError:  # refused: nothing was published
                self._entries.discard(wire, manifest)
                raise
            if not published:
                self._entries.discard(wire, manifest)
            elif there < manifest.count:
                self._entries.remove(wire, key, manifest.encoded(), manifest)
                raise StoreFullError(_no_room(self.url, manifest, there))
            return published

    def stat(self, keys: Sequence[str]) -> list[Stat | None]:
        check_keys(keys)
        with self._wire("stat", MAX_BYTES * len(keys)) as wire:
            return [None if entry is None else entry.stat for entry in self._look(wire, keys)]

    def get_into(self, key: str, buffer: WritableBuffer) -> bool:
        check_key(key)
        view = as_writable(buffer, "get_into")
        with self._wire("get_into", len(view)) as wire:
            raw = self._recall(key, len(view)) or self._entries.manifests(wire, [key])[0]
            for again in range(_TRIES):
                if raw is None:
                    return False
                wire.deadline.allow(len(view) if again else 0)
                now = self._read(wire, key, raw, view)
                if now == raw:
                    return True
                raw = now
        return False

    def prefix(self, keys: Sequence[str]) -> int:
        check_keys(keys)
        with self._wire("prefix", 2 * MAX_BYTES * len(keys)) as wire:
            leading = list(itertools.takewhile(lambda entry: entry is not None, self._look(wire, keys)))
            self._entries.refresh(wire, [entry.manifest for entry in reversed(leading) if entry is not None])
            return len(leading)

    def delete(self, key: str) -> bool:
        check_key(key)
        with self._wire("delete") as wire:
            raw = self._entries.take(wire, key)
            manifest = None if raw is None else understood(raw, key)
            if isinstance(manifest, RemoteManifest):
                self._entries.discard(wire, manifest)
            return raw is not None

    def usage(self) -> Usage:
        """What is there now, of all hosts with this prefix and digest; it asks for every key.

        ``budget`` is the server's ``maxmemory``, for all that it holds. The counts are those of this object:
        ``evicted`` entries of which the server had let go of a chunk, and ``dropped`` ones.
        """
        with self._wire("usage") as wire:
            keys = sorted(self._scanned(wire))
            wire.deadline.allow(MAX_BYTES * len(keys))
            sizes = [entry.stat.nbytes for entry in self._look(wire, keys) if entry is not None]
            budget = self._entries.maxmemory(wire)
            return Usage(len(sizes), sum(sizes), budget, self._evicted, self._dropped)

    def ping(self) -> None:
        """Ask whether the server is there and lets us in; StoreUnavailableError says what is wrong."""
        with self._wire("ping") as wire:
            wire.ask(Command(["PING"], status))

    def _let_go(self) -> None:
        self._link.close()

    # One call.

    @contextlib.contextmanager
    def _wire(self, op: str, nbytes: int = 0) -> Iterator[Wire]:
        with self._in_flight.running(op), self._link.wire(op, nbytes) as wire:
            yield wire

    def _scanned(self, wire: Wire) -> set[str]:
        keys: set[str] = set()
        for key in filter(is_key, self._entries.scan(wire)):
            keys.add(key)
            if len(keys) > _COUNTED:
                raise InvalidResponse(f"more than {_COUNTED} entries")
        return keys

    def _look(self, wire: Wire, keys: Sequence[str]) -> list[Found | None]:
        """What is whole of these; what is not is removed."""
        looked = self._entries.look(wire, keys)
        whole: list[Found | None] = []
        for key, entry in zip(keys, looked, strict=True):
            if isinstance(entry, Broken):
                self._remove(wire, key, entry)
                entry = None
            whole.append(entry)
        self._remember([entry for entry in whole if entry is not None])
        return whole

    def _send(self, wire: Wire, manifest: RemoteManifest, views: Sequence[memoryview]) -> RemoteManifest:
        """Send the chunks, which expire if nobody publishes them; the manifest with their digest."""
        digest = self._digests.start(ENTRY_FORMAT, manifest.key, manifest.nbytes)
        ttl = min(_UNFINISHED, self._entries.ttl + SLACK)
        names, sizes = list(self._entries.chunks(manifest)), list(manifest.sizes)
        with self._link.more(min(LANES, len(names)) - 1, wire.deadline) as wires:
            send_chunks([wire, *wires], names, sizes, views, digest.update, ttl)
        return dataclasses.replace(manifest, digest=digest.hexdigest())

    def _read(self, wire: Wire, key: str, raw: bytes, view: memoryview) -> bytes | None:
        """Read the entry with this manifest; the manifest that is there. Raises where it does not hold."""
        manifest = understood(raw, key)
        if isinstance(manifest, Broken):
            raise self._corrupt(wire, key, manifest)
        check_size("get_into", view, key, manifest.nbytes)
        digest = self._digests.start(ENTRY_FORMAT, key, manifest.nbytes)
        now, result = self._entries.read(wire, manifest, view, digest.update)
        if now != raw:
            return now
        if result == MISSING:
            self._remove(wire, key, Broken(raw, manifest, "a chunk is not there", evicted=True))
            return None
        if result == WRONG:
            raise self._corrupt(wire, key, Broken(raw, manifest, "a chunk has another size"))
        if digest.hexdigest() != manifest.digest:
            raise self._corrupt(wire, key, Broken(raw, manifest, f"its digest is not {manifest.digest}"))
        return now

    def _corrupt(self, wire: Wire, key: str, broken: Broken) -> SnapshotCorruptError:
        self._entries.remove(wire, key, broken.raw, broken.manifest)
        with self._lock:
            self._dropped += 1
        return SnapshotCorruptError(f"get_into: {key} in {self.url}: {broken.reason}; it was dropped")

    def _remove(self, wire: Wire, key: str, broken: Broken) -> None:
        self._entries.remove(wire, key, broken.raw, broken.manifest)
        with self._lock:
            if broken.evicted:
                self._evicted += 1
            else:
                self._dropped += 1

    # Manifests that were seen lately: a get that follows a look spares a round trip.

    def _remember(self, entries: Sequence[Found]) -> None:
        with self._lock:
            if len(self._seen) + len(entries) > _REMEMBERED:
                self._seen.clear()
            self._seen.update((entry.manifest.key, entry) for entry in entries[:_REMEMBERED])

    def _recall(self, key: str, nbytes: int) -> bytes | None:
        with self._lock:
            entry = self._seen.pop(key, None)
        return entry.raw if entry is not None and entry.stat.nbytes == nbytes else None


def _no_room(url: str, manifest: RemoteManifest, there: int) -> str:
    return (
        f"put: {url} kept {there} of the {manifest.count} chunks of {manifest.key} "
        f"({manifest.nbytes} bytes): it evicts them for its maxmemory, was emptied, or the put took more "
        f"than {_UNFINISHED // 60_000} minutes"
    )
