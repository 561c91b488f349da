"""Pages of SGLang's host pools as entries of stores: named, found, written and read."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcache import StoreTier
from kvcache.integrations.open_stores import use_entry
from kvcache.stores import SerializedSnapshot, SnapshotCorruptError, digest_of

__all__ = ["PageKind", "PageStore"]

META = "sglang_page"


@dataclass(frozen=True)
class PageKind:
    """The pages of a pool: ``settings`` (JSON-able) describe everything they depend on, ``sizes`` are the
    bytes of each part. The settings are part of a page's key, so that a page with another layout is a miss.
    """

    settings: Mapping[str, Any]
    sizes: tuple[int, ...]
    prefix: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", digest_of(self.settings))

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    @property
    def meta(self) -> dict[str, Any]:
        return {META: dict(self.settings)}


class PageStore:
    """The pages of one rank in a tier of stores. May be called from any thread.

    A page is one entry: parts of bytes, in the order in which the pool lays them out.
    """

    def __init__(self, tier: StoreTier) -> None:
        self._tier = tier
        self._renamed = ""

    def rename(self) -> None:
        """Use new keys from now on, so that earlier pages are not found, for example after the weights have
        changed.
        """
        self._renamed = secrets.token_hex(16)

    def key(self, kind: PageKind, page: str) -> str:
        """An entry's key; ``page`` is SGLang's hash of the namespace and all tokens up to the page's end."""
        return digest_of(kind.prefix, self._renamed, page)

    def leading(self, kind: PageKind, pages: Sequence[str]) -> int:
        """The number of leading pages that are stored. They become the most recently used."""
        return self._tier.prefix([self.key(kind, page) for page in pages])

    def stored(self, kind: PageKind, pages: Sequence[str]) -> list[bool]:
        """Which of these pages are stored."""
        return self._tier.stored([self.key(kind, page) for page in pages])

    def write(self, kind: PageKind, page: str, parts: Sequence[np.ndarray]) -> bool:
        """Store a page, uint8 (bytes,) per part, unless it is stored already; False if no store accepted
        it.
        """
        return self._tier.write(self.key(kind, page), _entry(kind, parts))

    def read(self, kind: PageKind, page: str, parts: Sequence[np.ndarray]) -> bool:
        """Fill a page's parts, each uint8 (bytes,). False if no store has an intact copy; the parts are then
        unspecified.
        """
        key = self.key(kind, page)
        if self._tier.read_into(key, _entry(kind, parts)):
            return True

        def copy(page: SerializedSnapshot) -> bool:
            for part, array in zip(parts, _parts_of(page, kind), strict=True):
                part[:] = array
            return True

        return use_entry(self._tier, key, copy) is True


def _entry(kind: PageKind, parts: Sequence[np.ndarray]) -> SerializedSnapshot:
    return SerializedSnapshot(kind.meta, {str(i): part for i, part in enumerate(parts)})


def _parts_of(page: SerializedSnapshot, kind: PageKind) -> Iterator[np.ndarray]:
    parts = [page.arrays.get(str(i)) for i in range(len(kind.sizes))]
    right = [
        array
        for array, size in zip(parts, kind.sizes, strict=True)
        if array is not None and array.dtype == np.uint8 and array.shape == (size,)
    ]
    if page.meta != kind.meta or len(page.arrays) != len(right) or len(right) != len(kind.sizes):
        raise SnapshotCorruptError(f"load: not a page of {json.dumps(dict(kind.settings), sort_keys=True)}")
    return iter(right)
