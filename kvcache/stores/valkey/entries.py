"""Entries as values on the server: looked at, published, refreshed, removed.

::

    <prefix>:<digests>:m:<key>        the manifest (JSON), set only where there is none
    <prefix>:<digests>:c:<writer>:<i> chunk i; ``writer`` is random for each put

A chunk belongs to one put for ever: whoever has read a manifest gets the bytes of that put, or finds that
they are gone. Nothing is removed that another has put meanwhile: removing compares the manifest.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvcache.stores.protocol import Stat
from kvcache.stores.valkey.link import Command, Wire, unless_error
from kvcache.stores.valkey.manifest import Broken, RemoteManifest, understood
from kvcache.stores.valkey.replies import SHORT
from kvcache.stores.valkey.transfer import Reading

__all__ = ["SLACK", "Entries", "Found"]

SLACK: Final = 10_000
"""Milliseconds that chunks outlive their manifest by."""
_REMOVE: Final = (
    f"if redis.call('GETRANGE', KEYS[1], 0, {SHORT - 1}) == ARGV[1] "
    "then return redis.call('UNLINK', KEYS[1]) end return 0"
)
"""A manifest, if it is still this one; of a value that is too long for one, its beginning is compared."""
_BATCH: Final = 512
"""Keys that are asked for, or entries that are refreshed, at a time."""


@dataclass(frozen=True, slots=True)
class Found:
    """A manifest as it was read, and when its entry was last used."""

    raw: bytes
    manifest: RemoteManifest
    stat: Stat


class Entries:
    """Names and commands; ``ttl`` in milliseconds. Keeps nothing."""

    def __init__(self, space: str, ttl: int) -> None:
        self._space = space
        self.ttl = ttl

    def name(self, key: str) -> bytes:
        return f"{self._space}:m:{key}".encode("ascii")

    def chunks(self, manifest: RemoteManifest) -> list[bytes]:
        stem = f"{self._space}:c:{manifest.writer}:".encode("ascii")
        return [b"%b%d" % (stem, i) for i in range(len(manifest.sizes))]

    # Looking.

    def look(self, wire: Wire, keys: Sequence[str]) -> list[Found | Broken | None]:
        """What is there of each key: one round trip, and a second one where something is."""
        found: list[Found | Broken | None] = []
        for start in range(0, len(keys), _BATCH):
            found += self._look(wire, keys[start : start + _BATCH])
        return found

    def _look(self, wire: Wire, keys: Sequence[str]) -> list[Found | Broken | None]:
        (raws,) = wire.ask(("MGET", *(self.name(key) for key in keys)))
        parsed = [None if raw is None else understood(raw, key) for raw, key in zip(raws, keys, strict=True)]
        questions: list[Command] = []
        for key, entry in zip(keys, parsed, strict=True):
            if isinstance(entry, RemoteManifest):
                questions += [("PTTL", self.name(key)), ("EXISTS", *self.chunks(entry), self.name(key))]
        answers = iter(wire.ask(*questions))
        return [
            self._judged(raw, entry, next(answers), next(answers))
            if isinstance(entry, RemoteManifest)
            else entry
            for raw, entry in zip(raws, parsed, strict=True)
        ]

    def _judged(self, raw: bytes, manifest: RemoteManifest, left: int, there: int) -> Found | Broken:
        count = len(manifest.sizes)
        if there <= count:
            return Broken(raw, manifest, f"{there - 1} of its {count} chunks are there")
        now = time.time()
        used = now if left < 0 else min(now, now - (self.ttl - left) / 1000)
        return Found(raw, manifest, Stat(manifest.nbytes, used))

    def manifest(self, wire: Wire, key: str) -> bytes | None:
        ((raw,),) = wire.ask(("MGET", self.name(key)))
        return raw if raw is None else bytes(raw)

    # Writing.

    def publish(self, wire: Wire, manifest: RemoteManifest) -> tuple[bool, int]:
        """Make the entry exist, unless another one does; and how many of its chunks are still there."""
        name, chunks = self.name(manifest.key), self.chunks(manifest)
        results = wire.transaction(
            ("SET", name, manifest.encoded(), "NX", "PX", self.ttl),
            *(("PEXPIRE", chunk, self.ttl + SLACK) for chunk in chunks),
        )
        return results[0] is not None, sum(results[1:])

    def discard(self, wire: Wire, manifest: RemoteManifest) -> None:
        """Remove the chunks of an entry that was never published."""
        if manifest.nbytes:
            wire.ask(("UNLINK", *self.chunks(manifest)))

    def remove(self, wire: Wire, key: str, raw: bytes, manifest: RemoteManifest | None) -> bool:
        """Remove an entry if it is still this one."""
        (removed,) = wire.ask(("EVAL", _REMOVE, 1, self.name(key), raw))
        if removed and manifest is not None:
            self.discard(wire, manifest)
        return bool(removed)

    def take(self, wire: Wire, key: str) -> bytes | None:
        """Remove a manifest, whichever it is; its chunks are then the caller's to remove."""
        (raw,) = wire.ask(("GETDEL", self.name(key)))
        return None if raw is None else bytes(raw)

    # Using.

    def read(
        self, wire: Wire, manifest: RemoteManifest, view: memoryview, update: Callable[[memoryview], object]
    ) -> tuple[bytes | None, str]:
        """Fill the view with chunks, and start their time to live anew, in one round trip.

        Returns the manifest that is there now, and "", MISSING or WRONG for the chunks.
        """
        name, chunks = self.name(manifest.key), self.chunks(manifest)
        commands: list[Command] = [("MGET", name), *self._refreshing(manifest)]
        reading = Reading(wire, chunks, manifest.sizes, view, update)
        wire.send(*commands)
        reading.begin()
        ((now,), *_) = unless_error([wire.reply() for _ in commands])
        return now, reading.finish()

    def refresh(self, wire: Wire, manifests: Sequence[RemoteManifest]) -> None:
        """Start the time to live anew, of the last entry last."""
        for start in range(0, len(manifests), _BATCH):
            part = manifests[start : start + _BATCH]
            wire.ask(*(command for manifest in part for command in self._refreshing(manifest)))

    def _refreshing(self, manifest: RemoteManifest) -> Iterator[Command]:
        """The chunks first, and for longer: a manifest does not outlive them.

        Not as a transaction, which a server without room refuses as it does a write.
        """
        for chunk in self.chunks(manifest):
            yield ("PEXPIRE", chunk, self.ttl + SLACK)
        yield ("PEXPIRE", self.name(manifest.key), self.ttl)

    def scan(self, wire: Wire) -> Iterator[str]:
        """The keys of all manifests, some perhaps twice; those that come or go meanwhile, or not."""
        stem = self.name("")
        cursor = b"0"
        while True:
            ((cursor, names),) = wire.ask(("SCAN", cursor, "MATCH", stem + b"*", "COUNT", 1000))
            yield from (name[len(stem) :].decode("ascii", "replace") for name in names)
            if cursor == b"0":
                return

    def maxmemory(self, wire: Wire) -> int | None:
        """Bytes that the server may use in all, as it says; None: no limit, or it does not say."""
        (text,) = wire.ask(("INFO", "memory"))
        found = re.search(rb"^maxmemory:(\d+)", text, re.MULTILINE)
        return int(found[1]) or None if found else None
