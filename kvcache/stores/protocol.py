"""The protocol of a store, which is one tier of offloaded snapshots, and what all stores check alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvcache.stores.buffers import Buffer, WritableBuffer
from kvcache.stores.errors import StoreValueError

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
    """One entry: the bytes that ``get_into`` will write, and when it was last used (Unix seconds)."""

    nbytes: int
    last_used: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a store holds now, and what this object has seen happen.

    ``nbytes`` is the sum of the entries' ``Stat.nbytes``. ``evicted`` entries made room for others;
    ``dropped`` ones were corrupt, truncated or foreign; ``swept`` counts files left by writers that died.
    """

    entries: int
    nbytes: int
    budget: int | None
    evicted: int = 0
    dropped: int = 0
    swept: int = 0


@runtime_checkable
class SnapshotStore(Protocol):
    """Bytes by key, written once. Every call may come from any thread.

    A key is 1 to 128 of the characters ``0-9 a-z _ -`` and does not begin with one of the last two; any
    other is a StoreValueError. Any call raises StoreUnavailableError where the store cannot be reached,
    StoreClosedError after ``close``.
    """

    def put(self, key: str, parts: Sequence[Buffer]) -> bool:
        """Store the parts' bytes, one after another, as one entry.

        False when the key is there already: nothing is written. The entry appears whole or not at
        all. Least recently used entries are evicted to make room.

        Raises StoreFullError when it does not fit even then.
        """

    def stat(self, keys: Sequence[str]) -> list[Stat | None]:
        """What is known of each key, in order; None: not there. Refreshes nothing."""

    def get_into(self, key: str, buffer: WritableBuffer) -> bool:
        """Fill ``buffer``, of exactly ``Stat.nbytes`` bytes. False: not there (any more).

        A hit makes the entry the most recently used. After False or an exception the buffer's content
        is unspecified.

        Raises SnapshotCorruptError when what is stored is not what was put, and drops it: the next ``stat``
        is a miss. Raises StoreValueError for a buffer of another size, or a read-only one.
        """

    def prefix(self, keys: Sequence[str]) -> int:
        """How many leading keys of this chain are there, up to the first that is not.

        They become the most recently used, the first key most of all: of one chain the deepest entry
        is evicted first.
        """

    def delete(self, key: str) -> bool:
        """Forget an entry. False: it was not there."""

    def close(self) -> None:
        """Let go of what the store holds open, after the calls under way. A second close does nothing."""


class Reader(Protocol):
    """The bytes of one entry, from the first on; to be closed."""

    left: int
    """Bytes that were not read yet."""

    def fill(self, buffers: Sequence[WritableBuffer]) -> None:
        """Fill the buffers, one after another, with the bytes that follow.

        With the last byte of the entry all of them are verified, and it is a hit: what was filled before
        that may be damaged. Raises SnapshotCorruptError where they do not hold (``get_into`` tells whether
        they were damaged or have changed on the way, and drops them), StoreUnavailableError where they
        cannot be read, StoreValueError for buffers of more than ``left`` bytes.
        """

    def close(self) -> None:
        """Let go of the entry. A second close does nothing."""


@runtime_checkable
class ReadingStore(Protocol):
    """What a store may offer besides: bytes straight to where they belong, with no copy in between."""

    def reader(self, key: str) -> Reader | None:
        """The entry's bytes, to be read on the way; None: not there, or no longer whole.

        They stay what they are when the entry is evicted meanwhile.
        """


@runtime_checkable
class MappedStore(Protocol):
    """What a store may offer besides: an entry's bytes in place."""

    def view(self, key: str) -> memoryview | None:
        """The entry's bytes, read-only and not copied; None: not there. A hit, as ``get_into`` is.

        The view stays good when the entry is evicted. Raises SnapshotCorruptError as ``get_into``.
        """


@runtime_checkable
class AdvisedStore(Protocol):
    """What a store may offer besides: entries brought nearer before they are read."""

    def advise(self, keys: Sequence[str]) -> None:
        """These entries are read soon, in this order: have them brought to memory, and wait for nothing.

        It uses none of them. Keys that are not there are passed over.
        """


def is_key(key: object) -> bool:
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def check_key(key: str) -> str:
    """The key, if it is one. Keys become names of files and of remote values: nothing else is let in."""
    if not is_key(key):
        shown = repr(key) if len(repr(key)) < 200 else f"{repr(key)[:200]}..."
        raise StoreValueError(
            f"the key {shown}; a key must be 1 to 128 characters of 0-9 a-z _ -, starting with 0-9 a-z"
        )
    return key


def check_keys(keys: Sequence[str]) -> None:
    for key in keys:
        check_key(key)


def check_budget(budget: int | None) -> int | None:
    if budget is not None and (type(budget) is not int or budget < 0):
        raise StoreValueError(f"budget={budget!r}; it must be a number of bytes from 0, or None for no limit")
    return budget
