"""The protocol of stores, each of which is one tier of offloaded snapshots, and checks common to all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvcache.stores.buffers import Buffer, WritableBuffer
from kvcache.stores.errors import StoreValueError
from kvcache.stores.options import parse_bytes

__all__ = [
    "AdvisedStore",
    "MappedStore",
    "Reader",
    "ReadingStore",
    "SnapshotStore",
    "Stat",
    "Usage",
    "check_budget",
    "check_key",
    "check_keys",
    "is_key",
]

_KEY = re.compile(r"[0-9a-z][0-9a-z_-]{0,127}")


@dataclass(frozen=True, slots=True)
class Stat:
    """One entry: the number of bytes that ``get_into`` writes, and the time of last use (Unix seconds)."""

    nbytes: int
    last_used: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a store contains now, and the events that this object has seen.

    ``nbytes`` is the sum of the entries' ``Stat.nbytes``. ``evicted`` counts entries removed to make room,
    ``dropped`` those that were corrupt, truncated or foreign, and ``swept`` files left by dead writers.
    """

    entries: int
    nbytes: int
    budget: int | None
    evicted: int = 0
    dropped: int = 0
    swept: int = 0


@runtime_checkable
class SnapshotStore(Protocol):
    """Bytes by key, written once. All calls are thread-safe.

    A key consists of 1 to 128 characters ``0-9 a-z _ -`` and does not begin with ``_`` or ``-``; any other
    key raises StoreValueError. Every call raises StoreUnavailableError if the store cannot be reached, and
    StoreClosedError after ``close``.
    """

    def put(self, key: str, parts: Sequence[Buffer]) -> bool:
        """Store the concatenated bytes of ``parts`` as one entry.

        Returns False, without writing anything, if the key exists. The entry appears completely or not at
        all. Least recently used entries are evicted to make room.

        Raises StoreFullError if it does not fit even then.
        """

    def stat(self, keys: Sequence[str]) -> list[Stat | None]:
        """The Stat of each key, in order; None for a missing key. Does not count as use."""

    def get_into(self, key: str, buffer: WritableBuffer) -> bool:
        """Fill ``buffer``, of exactly ``Stat.nbytes`` bytes. Returns False if the entry does not exist (any
        more).

        A hit makes the entry the most recently used. After False or an exception, the content of the buffer
        is unspecified.

        Raises SnapshotCorruptError if the stored data is not what was put, and drops the entry, so that the
        next ``stat`` is a miss. Raises StoreValueError for a buffer of another size, or a read-only one.
        """

    def prefix(self, keys: Sequence[str]) -> int:
        """The number of leading keys of this chain that exist, up to the first missing one.

        They become the most recently used, the first key most of all, so that the deepest entry of a chain is
        evicted first.
        """

    def delete(self, key: str) -> bool:
        """Delete an entry. Returns False if it did not exist."""

    def close(self) -> None:
        """Release resources after the calls in flight have ended. A second call has no effect."""


class Reader(Protocol):
    """Sequential access to the bytes of one entry; the caller must close it."""

    left: int
    """The number of bytes that have not been read yet."""

    def fill(self, buffers: Sequence[WritableBuffer]) -> None:
        """Fill the buffers, one after another, with the next bytes.

        Reading the last byte verifies the whole entry and counts as a hit; bytes returned before that may be
        damaged. Raises SnapshotCorruptError if verification fails (``get_into`` finds out whether the entry
        is damaged or has merely changed during the read, and drops a damaged one), StoreUnavailableError if
        the bytes cannot be read, StoreValueError for buffers of more than ``left`` bytes.
        """

    def close(self) -> None:
        """Release the entry. A second call has no effect."""


@runtime_checkable
class ReadingStore(Protocol):
    """Optional for a store: reading bytes directly to their destination, without an intermediate copy."""

    def reader(self, key: str) -> Reader | None:
        """A Reader of the entry's bytes; None if the entry does not exist, or is damaged.

        The bytes do not change if the entry is evicted meanwhile.
        """


@runtime_checkable
class MappedStore(Protocol):
    """Optional for a store: an entry's bytes in place."""

    def view(self, key: str) -> memoryview | None:
        """The entry's bytes, read-only and without a copy; None if there is no such entry. Counts as a hit.

        The view stays valid if the entry is evicted. Raises SnapshotCorruptError as ``get_into`` does.
        """


@runtime_checkable
class AdvisedStore(Protocol):
    """Optional for a store: loading entries in advance."""

    def advise(self, keys: Sequence[str]) -> None:
        """Announce that these entries will be read soon, in this order; loads them to memory without waiting.

        This does not count as use. Missing keys are ignored.
        """


def is_key(key: object) -> bool:
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def check_key(key: str) -> str:
    """The key, if it is valid; StoreValueError otherwise. Keys become names of files and remote values."""
    if not is_key(key):
        shown = repr(key) if len(repr(key)) < 200 else f"{repr(key)[:200]}..."
        raise StoreValueError(
            f"the key {shown}; a key must be 1 to 128 characters of 0-9 a-z _ -, starting with 0-9 a-z"
        )
    return key


def check_keys(keys: Sequence[str]) -> None:
    for key in keys:
        check_key(key)


def check_budget(budget: int | str | None) -> int | None:
    """The bytes of a number, or of a size such as "64MiB"; None: no limit. StoreValueError otherwise."""
    return parse_bytes(budget, "budget")
