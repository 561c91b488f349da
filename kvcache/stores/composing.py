"""Unambiguous encoding of everything that must keep cached content apart.

K and V computed for one salt, adapter, image or rank must never be used for another. A name made of several
such parts therefore does not join them with a separator, which a part could contain: each part is preceded by
its kind and length.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from kvcache.stores.errors import StoreValueError

__all__ = ["Part", "compose", "digest_of", "framed"]

Part = None | bool | int | float | str | bytes | Sequence["Part"] | Mapping[Any, "Part"]
"""The types that can be composed; lists and tuples are equivalent, and so are mappings in any order."""


def framed(kind: bytes, content: bytes) -> bytes:
    """Content preceded by its kind (one byte) and its length."""
    return kind + len(content).to_bytes(8, "little") + content


def compose(*parts: Part) -> bytes:
    """Bytes that are equal only for equal parts, in the same order and of the same types.

    Raises StoreValueError for a part of another type, and for one that contains itself.

    >>> from kvcache.stores import compose
    >>> compose("ab", "c") == compose("a", "bc")
    False
    """
    try:
        return b"".join(map(_of, parts))
    except RecursionError as error:
        raise StoreValueError("compose: a part contains itself, or is nested too deep") from error


def digest_of(*parts: Part) -> str:
    """The sha256 of ``compose``, in hexadecimal: a key of stores."""
    return hashlib.sha256(compose(*parts)).hexdigest()


def _of(part: Part) -> bytes:
    if part is None:
        return framed(b"n", b"")
    if isinstance(part, bool):
        return framed(b"?", b"1" if part else b"0")
    if isinstance(part, int):
        return framed(b"i", b"%d" % part)
    if isinstance(part, float):
        return framed(b"f", struct.pack("<d", part or 0.0))  # -0.0 equals 0.0
    if isinstance(part, str):
        return framed(b"s", part.encode("utf-8", "surrogatepass"))
    if isinstance(part, bytes | bytearray):
        return framed(b"b", bytes(part))
    if isinstance(part, Mapping):
        return framed(b"m", b"".join(sorted(_of(key) + _of(value) for key, value in part.items())))
    if isinstance(part, Sequence):
        return framed(b"l", b"".join(map(_of, part)))
    raise StoreValueError(
        f"compose: {part!r:.60} is {type(part).__name__}; parts must be None, numbers, strings, bytes, or "
        "lists and mappings of these"
    )
