"""The manifest of one entry on disk: written last, it is what makes the entry exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvcache.stores import strict_json
from kvcache.stores.digests import BLAKE3, XXH3, Digest, Digests, is_family
from kvcache.stores.protocol import is_key

__all__ = [
    "DATA",
    "ENTRY_FORMAT",
    "MANIFEST",
    "MAX_BYTES",
    "TEMPORARY",
    "Manifest",
    "Naming",
    "is_stem",
    "unkeyed_digest",
]

ENTRY_FORMAT: Final = "kvcache.entry/1"
DATA, MANIFEST, TEMPORARY = ".safetensors", ".json", ".tmp"
"""What the names of data files, manifests and files not finished end in."""
MAX_BYTES = 4096
"""A manifest is far smaller; a larger file is something else."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the data file of ``key`` must be: ``nbytes`` bytes of this digest (hex) of an ``algorithm``."""

    key: str
    nbytes: int
    digest: str
    algorithm: str = XXH3

    def encoded(self) -> bytes:
        fields = {
            "format": ENTRY_FORMAT,
            "key": self.key,
            "nbytes": self.nbytes,
            self.algorithm: self.digest,
        }
        return strict_json.encode(fields).encode("utf-8") + b"\n"

    @classmethod
    def parse(cls, data: bytes, stem: str) -> Manifest:
        """Raises ValueError for anything but the manifest of the entry whose files' names have this stem."""
        key, _, family = stem.partition(".")
        algorithm = BLAKE3 if family else XXH3
        fields = strict_json.decode(data)
        if not isinstance(fields, dict) or fields.keys() != {"format", "key", "nbytes", algorithm}:
            raise ValueError("its manifest has other fields")
        if fields["format"] != ENTRY_FORMAT or fields["key"] != key:
            raise ValueError(f"its manifest is of {fields['key']!r} in the format {fields['format']!r}")
        nbytes, digest = fields["nbytes"], fields[algorithm]
        if type(nbytes) is not int or nbytes < 0 or not isinstance(digest, str):
            raise ValueError("its manifest has no size or digest")
        return cls(key, nbytes, digest, algorithm)


class Naming:
    """The files of one store's entries: what their names begin with, and how they are digested."""

    def __init__(self, digests: Digests) -> None:
        self._digests = digests
        self.keyed = digests.keyed
        self._suffix = "" if digests.name == XXH3 else f".{digests.family}"

    def stem(self, key: str) -> str:
        """``<key>``, or ``<key>.<family>`` where the digest is not XXH3."""
        return key + self._suffix

    def key(self, stem: str) -> str | None:
        """The key of a stem; None where the entry is of a store that digests otherwise."""
        key = stem.removesuffix(self._suffix)
        return key if is_key(key) and key + self._suffix == stem else None

    def start(self, key: str, nbytes: int) -> Digest:
        """A digest of the data alone for XXH3, else one that knows whose they are."""
        if self._suffix:
            return self._digests.start(ENTRY_FORMAT, key, nbytes)
        return self._digests.start()

    def manifest(self, key: str, nbytes: int, digest: str) -> Manifest:
        return Manifest(key, nbytes, digest, self._digests.name)


def is_stem(text: str) -> bool:
    """Whether names of an entry's files may begin so."""
    key, dot, family = text.partition(".")
    return is_key(key) and (not dot or is_family(family))


def unkeyed_digest(stem: str, nbytes: int) -> Digest | None:
    """A digest to check the data of an entry with; None where that takes a secret."""
    key, _, family = stem.partition(".")
    if family not in ("", BLAKE3):
        return None
    return Naming(Digests("inspect", "disk", family or XXH3)).start(key, nbytes)
