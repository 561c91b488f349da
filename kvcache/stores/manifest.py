"""The manifest of one entry on disk: written last, it is what makes the entry exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvcache.stores import strict_json
from kvcache.stores.streams import DIGEST

__all__ = ["DATA", "ENTRY_FORMAT", "MANIFEST", "MAX_BYTES", "TEMPORARY", "Manifest"]

ENTRY_FORMAT: Final = "kvcache.entry/1"
DATA, MANIFEST, TEMPORARY = ".safetensors", ".json", ".tmp"
"""What the names of data files, manifests and files not finished end in."""
MAX_BYTES = 4096
"""A manifest is far smaller; a larger file is something else."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the data file of ``key`` has to be: ``nbytes`` bytes of this xxh3_128 digest (hex)."""

    key: str
    nbytes: int
    digest: str

    def encoded(self) -> bytes:
        fields = {"format": ENTRY_FORMAT, "key": self.key, "nbytes": self.nbytes, DIGEST: self.digest}
        return strict_json.encode(fields).encode("utf-8") + b"\n"

    @classmethod
    def parse(cls, data: bytes, key: str) -> Manifest:
        """Raises ValueError for anything but the manifest of this key."""
        fields = strict_json.decode(data)
        if not isinstance(fields, dict) or fields.keys() != {"format", "key", "nbytes", DIGEST}:
            raise ValueError("its manifest has other fields")
        if fields["format"] != ENTRY_FORMAT or fields["key"] != key:
            raise ValueError(f"its manifest is of {fields['key']!r} in the format {fields['format']!r}")
        nbytes, digest = fields["nbytes"], fields[DIGEST]
        if type(nbytes) is not int or nbytes < 0 or not isinstance(digest, str):
            raise ValueError("its manifest has no size or digest")
        return cls(key, nbytes, digest)
