"""The manifest of one entry on the server: published last, it is what makes the entry exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvcache.stores import strict_json

__all__ = ["CHUNK", "ENTRY_FORMAT", "MAX_BYTES", "Broken", "RemoteManifest", "understood"]

ENTRY_FORMAT: Final = "kvcache.remote/1"
CHUNK: Final = (4 << 20) - 4096
"""Bytes of a chunk; the last one of an entry may be shorter. A page less than 4 MiB, so that the server's own
bytes around a value fit in as well: its allocator has sizes of 4 and 5 MiB, and none between."""
MAX_BYTES: Final = 4096
"""A manifest is far smaller; a longer value is something else."""

_HEX = re.compile(r"[0-9a-f]{32,64}")
_FIELDS = {"format", "key", "nbytes", "chunk", "writer", "digest"}
_LARGEST = 1 << 40
_SMALLEST = 1 << 16
"""Bytes of a chunk; so that an entry of many chunks has as many bytes."""


@dataclass(frozen=True, slots=True)
class RemoteManifest:
    """What the chunks of ``key`` must be: ``nbytes`` bytes in all, under the writer's random id."""

    key: str
    nbytes: int
    chunk: int
    writer: str
    digest: str

    @property
    def count(self) -> int:
        return -(-self.nbytes // self.chunk)

    @property
    def sizes(self) -> Iterator[int]:
        return (min(self.chunk, self.nbytes - at) for at in range(0, self.nbytes, self.chunk))

    def encoded(self) -> bytes:
        fields = {
            "format": ENTRY_FORMAT,
            "key": self.key,
            "nbytes": self.nbytes,
            "chunk": self.chunk,
            "writer": self.writer,
            "digest": self.digest,
        }
        return strict_json.encode(fields).encode("utf-8")

    @classmethod
    def parse(cls, data: bytes, key: str) -> RemoteManifest:
        """Raises ValueError for anything but a manifest of this key."""
        if len(data) > MAX_BYTES:
            raise ValueError(f"a manifest of {len(data)} bytes")
        fields = strict_json.decode(data)
        if not isinstance(fields, dict) or fields.keys() != _FIELDS:
            raise ValueError("its manifest has other fields")
        if fields["format"] != ENTRY_FORMAT or fields["key"] != key:
            raise ValueError(f"its manifest is of {fields['key']!r} in the format {fields['format']!r}")
        nbytes, chunk = fields["nbytes"], fields["chunk"]
        if type(nbytes) is not int or type(chunk) is not int or not 0 <= nbytes <= _LARGEST:
            raise ValueError("its manifest has no sizes")
        if chunk < _SMALLEST:
            raise ValueError(f"its manifest has chunks of {chunk} bytes")
        for name in ("writer", "digest"):
            if not isinstance(fields[name], str) or not _HEX.fullmatch(fields[name]):
                raise ValueError(f"its manifest has no {name}")
        return cls(key, nbytes, chunk, fields["writer"], fields["digest"])


@dataclass(frozen=True, slots=True)
class Broken:
    """What makes no entry: a value that is no manifest, or one whose chunks are not all there."""

    raw: bytes
    manifest: RemoteManifest | None
    reason: str
    evicted: bool = False
    """A chunk is not there: the server has made room."""


def understood(raw: bytes, key: str) -> RemoteManifest | Broken:
    try:
        return RemoteManifest.parse(raw, key)
    except ValueError as error:
        return Broken(raw, None, str(error))
