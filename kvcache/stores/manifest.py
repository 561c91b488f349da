"""The manifest of an entry on disk: the last 512 bytes of its file, which describe the bytes before them."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Final

from kvcache.stores import strict_json
from kvcache.stores.digests import BLAKE3, XXH3, Digest, Digests, is_family
from kvcache.stores.protocol import is_key

__all__ = [
    "ENTRY",
    "ENTRY_FORMAT",
    "MANIFEST_BYTES",
    "TEMPORARY",
    "Manifest",
    "Naming",
    "is_stem",
    "unkeyed_digest",
]

ENTRY_FORMAT: Final = "kvcache.entry/2"
ENTRY, TEMPORARY = ".entry", ".tmp"
"""The suffixes of the files of entries, and of files being written or removed."""
MANIFEST_BYTES: Final = 512
"""The longest manifest, for a key of 128 characters and a sealed digest, takes about 350 bytes."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Describes the file of ``key``: its first ``nbytes`` bytes have this digest (hex) by ``algorithm``.

    If the digest is keyed, ``seal`` is the keyed digest of the manifest itself, so that nobody else can claim
    a size.
    """

    key: str
    nbytes: int
    digest: str
    algorithm: str = XXH3
    seal: str | None = None

    def encoded(self) -> bytes:
        fields = {
            "format": ENTRY_FORMAT,
            "key": self.key,
            "nbytes": self.nbytes,
            self.algorithm: self.digest,
            **({} if self.seal is None else {"seal": self.seal}),
        }
        return strict_json.encode(fields).encode("ascii").ljust(MANIFEST_BYTES - 1) + b"\n"

    @classmethod
    def parse(cls, data: bytes, stem: str) -> Manifest:
        """Parse a manifest. Raises ValueError unless it belongs to the entry with this stem."""
        key, _, family = stem.partition(".")
        algorithm, sealed = BLAKE3 if family else XXH3, {"seal"} if family not in ("", BLAKE3) else set()
        if len(data) != MANIFEST_BYTES:
            raise ValueError(f"its manifest has {len(data)} bytes of {MANIFEST_BYTES}")
        try:
            fields = strict_json.decode(data)
        except ValueError as error:
            raise ValueError(f"its manifest is {error}") from error
        if not isinstance(fields, dict) or fields.keys() != {"format", "key", "nbytes", algorithm, *sealed}:
            raise ValueError("its manifest has other fields")
        if fields["format"] != ENTRY_FORMAT or fields["key"] != key:
            raise ValueError(f"its manifest is of {fields['key']!r} in the format {fields['format']!r}")
        nbytes, digest, seal = fields["nbytes"], fields[algorithm], fields.get("seal")
        if type(nbytes) is not int or not 0 <= nbytes < 2**63 or not isinstance(digest, str):
            raise ValueError("its manifest has no size or digest")
        if sealed and not isinstance(seal, str):
            raise ValueError("its manifest has no seal")
        return cls(key, nbytes, digest, algorithm, seal)


class Naming:
    """The names and digests of one store's files."""

    def __init__(self, digests: Digests) -> None:
        self._digests = digests
        self.keyed = digests.keyed
        self._suffix = "" if digests.name == XXH3 else f".{digests.family}"

    def stem(self, key: str) -> str:
        """``<key>``, or ``<key>.<family>`` if the digest is not XXH3."""
        return key + self._suffix

    def key(self, stem: str) -> str | None:
        """The key of a stem; None if the entry belongs to a store with another digest."""
        key = stem.removesuffix(self._suffix)
        return key if is_key(key) and key + self._suffix == stem else None

    def start(self, key: str, nbytes: int) -> Digest:
        """A digest of the data alone for XXH3, otherwise one that includes the key."""
        if self._suffix:
            return self._digests.start(ENTRY_FORMAT, key, nbytes)
        return self._digests.start()

    def manifest(self, key: str, nbytes: int, digest: str) -> Manifest:
        return Manifest(key, nbytes, digest, self._digests.name, self._seal(key, nbytes, digest))

    def parse(self, data: bytes, stem: str) -> Manifest:
        """As ``Manifest.parse``; also raises ValueError if the seal was not made with this store's secret."""
        manifest = Manifest.parse(data, stem)
        seal = self._seal(manifest.key, manifest.nbytes, manifest.digest)
        if seal is not None and not hmac.compare_digest(seal.encode(), (manifest.seal or "").encode()):
            raise ValueError("its manifest was not written with this secret")
        return manifest

    def _seal(self, key: str, nbytes: int, digest: str) -> str | None:
        """The seal; None if digests are not keyed."""
        words = "seal", ENTRY_FORMAT, key, nbytes, digest
        return self._digests.start(*words).hexdigest() if self.keyed else None


def is_stem(text: str) -> bool:
    """Whether ``text`` may be the stem of an entry's file."""
    key, dot, family = text.partition(".")
    return is_key(key) and (not dot or is_family(family))


def unkeyed_digest(stem: str, nbytes: int) -> Digest | None:
    """A digest for checking the data of an entry; None if that requires a secret."""
    key, _, family = stem.partition(".")
    if family not in ("", BLAKE3):
        return None
    return Naming(Digests("inspect", "disk", family or XXH3)).start(key, nbytes)
