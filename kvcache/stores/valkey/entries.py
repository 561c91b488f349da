"""Entries as values on the server: looked at, published, refreshed, removed.

::

    <prefix>:<digests>:m:<key>        the manifest (JSON), set only where there is none
    <prefix>:<digests>:c:<writer>:<i> chunk i; ``writer`` is random for each put

A chunk belongs to one put for ever: whoever has read a manifest gets the bytes of that put, or finds that
they are gone. Nothing is removed that another has put meanwhile: removing compares the manifest.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from valkey.exceptions import ResponseError

from kvcache.stores.protocol import Stat
from kvcache.stores.valkey.link import Command, Wire, unless_error
from kvcache.stores.valkey.manifest import MAX_BYTES, Broken, RemoteManifest, understood
from kvcache.stores.valkey.replies import array, integer, names, status_or_nothing, value
from kvcache.stores.valkey.transfer import Reading, is_another_type

__all__ = ["SLACK", "Entries", "Found"]

SLACK: Final = 10_000
"""Milliseconds that chunks outlive their manifest by."""
_SEEN: Final = MAX_BYTES + 1
"""Bytes of a value that are looked at: one more than a manifest may have."""
_REMOVE: Final = (
    f"if redis.call('GETRANGE', KEYS[1], 0, {_SEEN - 1}) == ARGV[1] "
    "then return redis.call('UNLINK', KEYS[1]) end return 0"
)
"""A manifest, if it is still this one; of a value that is too long for one, its beginning is compared."""
_BATCH: Final = 512
"""Keys or chunks that are asked for, or entries that are refreshed, at a time."""
_ALL: Final = 1 << 63
_FIRST: Final = 16
"""Chunks of an entry that are asked for at once: 64 MiB."""
_MANIFEST: Final = value(_SEEN)


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

    def chunks(self, manifest: RemoteManifest, start: int = 0, stop: int = _ALL) -> Iterator[bytes]:
        """Of those of numbers ``[start, stop)``."""
        stem = f"{self._space}:c:{manifest.writer}:".encode("ascii")
        return (b"%b%d" % (stem, i) for i in range(start, min(stop, manifest.count)))

    # Looking.

    def look(self, wire: Wire, keys: Sequence[str]) -> list[Found | Broken | None]:
        """What is there of each key: one round trip, and a second one where something is."""
        entries: list[Found | Broken | None] = []
        for start in range(0, len(keys), _BATCH):
            entries += self._look(wire, keys[start : start + _BATCH])
        return entries

    def _look(self, wire: Wire, keys: Sequence[str]) -> list[Found | Broken | None]:
        raws = self.manifests(wire, keys)
        parsed = [None if raw is None else understood(raw, key) for raw, key in zip(raws, keys, strict=True)]
        questions: list[Command] = []
        for key, entry in zip(keys, parsed, strict=True):
            if isinstance(entry, RemoteManifest):
                questions.append(Command(["PTTL", self.name(key)], integer))
                questions += self._lengths(entry, 0, _FIRST)
        answers = iter(wire.answers(*questions))
        entries: list[Found | Broken | None] = []
        for raw, entry in zip(raws, parsed, strict=True):
            if isinstance(entry, RemoteManifest):
                assert raw is not None
                left, *lengths = itertools.islice(answers, 1 + min(entry.count, _FIRST))
                entries.append(self._judged(wire, raw, entry, left, lengths))
            else:
                entries.append(entry)
        return entries

    def _judged(
        self, wire: Wire, raw: bytes, manifest: RemoteManifest, left: Any, lengths: list[Any]
    ) -> Found | Broken | None:
        """What a manifest makes with the server's answers: the time it has left, lengths of its first chunks.

        Further ones are asked for when those are right: a manifest claims what it likes, and costs no more
        than what is stored.
        """
        sizes, asked = manifest.sizes, 0
        while lengths:
            for length, size in zip(lengths, sizes, strict=False):
                if length != size:
                    return _broken(raw, manifest, length)
            asked += len(lengths)
            lengths = wire.answers(*self._lengths(manifest, asked, asked + _BATCH))
        unless_error([left])
        if left == -2:  # it went meanwhile
            return None
        now = time.time()
        used = now if left < 0 else min(now, now - (self.ttl - left) / 1000)
        return Found(raw, manifest, Stat(manifest.nbytes, used))

    def _lengths(self, manifest: RemoteManifest, start: int, stop: int) -> list[Command]:
        return [Command(["STRLEN", chunk], integer) for chunk in self.chunks(manifest, start, stop)]

    def manifests(self, wire: Wire, keys: Sequence[str]) -> list[bytes | None]:
        words = ["MGET", *(self.name(key) for key in keys)]
        raws: list[bytes | None] = wire.ask(Command(words, array(*[_MANIFEST] * len(keys))))[0]
        return raws

    # Writing.

    def publish(self, wire: Wire, manifest: RemoteManifest) -> tuple[bool, int]:
        """Make the entry exist, unless another one does; and how many of its chunks are still there."""
        name = self.name(manifest.key)
        made, *kept = wire.transaction(
            Command(["SET", name, manifest.encoded(), "NX", "PX", self.ttl], status_or_nothing),
            *(_expiring(chunk, self.ttl + SLACK) for chunk in self.chunks(manifest)),
        )
        return made is not None, sum(kept)

    def discard(self, wire: Wire, manifest: RemoteManifest) -> None:
        """Remove the chunks of an entry that is not published, up to where there are none."""
        for start in range(0, manifest.count, _BATCH):
            (removed,) = wire.ask(Command(["UNLINK", *self.chunks(manifest, start, start + _BATCH)], integer))
            if not removed:
                return

    def remove(self, wire: Wire, key: str, raw: bytes, manifest: RemoteManifest | None) -> bool:
        """Remove an entry if it is still this one."""
        (removed,) = wire.ask(Command(["EVAL", _REMOVE, 1, self.name(key), raw], integer))
        if removed and manifest is not None:
            self.discard(wire, manifest)
        return bool(removed)

    def take(self, wire: Wire, key: str) -> bytes | None:
        """Remove a manifest; what it was, None where there was none."""
        taken: bytes | None = wire.ask(Command(["GETDEL", self.name(key)], _MANIFEST))[0]
        return taken

    # Reading.

    def read(
        self, wire: Wire, manifest: RemoteManifest, view: memoryview, update: Callable[[memoryview], object]
    ) -> tuple[bytes | None, str]:
        """Fill the view with chunks, and start their time to live anew, in one round trip.

        Returns the manifest that is there now, and "", MISSING or WRONG for the chunks.
        """
        now = Command(["MGET", self.name(manifest.key)], array(_MANIFEST))
        commands = [now, *self._refreshing(manifest)]
        reading = Reading(wire, self.chunks(manifest), manifest.sizes, view, update)
        wire.send(*commands)
        reading.begin()
        ((now_there,), *_) = unless_error([wire.reply(command.reply) for command in commands])
        return now_there, reading.finish()

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
            yield _expiring(chunk, self.ttl + SLACK)
        yield _expiring(self.name(manifest.key), self.ttl)

    def scan(self, wire: Wire) -> Iterator[str]:
        """The keys of all manifests, some perhaps twice; those that come or go meanwhile, or not."""
        stem = self.name("")
        cursor = b"0"
        while True:
            words = ["SCAN", cursor, "MATCH", stem + b"*", "COUNT", 1000]
            ((cursor, matched),) = wire.ask(Command(words, array(value(20), names)))
            yield from (name[len(stem) :].decode("ascii", "replace") for name in matched)
            if cursor == b"0":
                return

    def maxmemory(self, wire: Wire) -> int | None:
        """Bytes that the server may use in all, as it says; None: no limit, or it does not say."""
        (text,) = wire.ask(Command(["INFO", "memory"], value(1 << 16)))
        match = re.search(rb"^maxmemory:(\d{1,18})\b", text or b"", re.MULTILINE)
        return int(match[1]) or None if match else None


def _expiring(name: bytes, milliseconds: int) -> Command:
    return Command(["PEXPIRE", name, milliseconds], integer)


def _broken(raw: bytes, manifest: RemoteManifest, length: object) -> Broken:
    """An entry with a chunk that is another, or gone: what the server said of its length."""
    if isinstance(length, ResponseError) and not is_another_type(length):
        raise length
    if length == 0:
        return Broken(raw, manifest, "a chunk is not there", evicted=True)
    return Broken(raw, manifest, f"a chunk is another: {length}")
