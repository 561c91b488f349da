"""Keys of prefixes: a sha256 chain over blocks of B tokens, whose root identifies the model and its settings.

Two prefixes have the same key exactly if model, settings and all tokens are the same::

    root = sha256(JSON of format, block_size and identity)
    key 0 = sha256(root  | block 0)          names tokens [0, B)
    key 1 = sha256(key 0 | block 1)          names tokens [0, 2B)
"""

from __future__ import annotations

import bisect
import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcache.stores import strict_json
from kvcache.stores.composing import framed
from kvcache.stores.errors import StoreValueError
from kvcache.stores.serialized_snapshot import SNAPSHOT_FORMAT

__all__ = ["Chain", "Keys", "SaltedToken"]

_INTEGERS, _MIXED, _SALTED, _VARIANT = b"i", b"m", b"s", b"v"
"""How a block is encoded for hashing: 8 bytes per token, or items preceded by their kind and length."""


@dataclass(frozen=True, slots=True)
class SaltedToken:
    """A token from which on a conversation shares nothing with conversations of another salt or variant.

    ``variant``: the bytes that ``compose`` returns for everything else that K and V depend on, such as an
    adapter. An empty salt is common to everyone.
    """

    salt: str
    token: int | bytes
    variant: bytes = b""


class Keys:
    """Keys for prefixes that one model computes with one set of settings.

    ``identity`` is JSON-able and contains everything that affects K and V: model and weights, dtype, layout,
    rope and window settings, tensor-parallel rank, a salt. The version of the snapshot format is added here,
    so that entries of another version are never read. ``block_size`` is the number of tokens between two
    consecutive aligned keys.

    Raises StoreValueError if ``identity`` is not JSON-able or ``block_size`` is less than 1.

    >>> from kvcache.stores import Keys
    >>> keys = Keys({"model": "my-model", "dtype": "F16"}, block_size=4)
    >>> chain = keys.chain([3, 1, 4, 1, 5, 9])
    >>> len(chain), len(chain.aligned)
    (6, 1)
    >>> chain.at(4) == keys.chain([3, 1, 4, 1, 2, 6]).at(4)      # the first four tokens are the same
    True
    """

    def __init__(self, identity: Mapping[str, Any], block_size: int = 128) -> None:
        if type(block_size) is not int or block_size < 1:
            raise StoreValueError(f"Keys: block_size={block_size!r}; it must be an integer of at least 1")
        record = {"format": SNAPSHOT_FORMAT, "chunk": block_size, "identity": dict(identity)}
        try:
            text = strict_json.encode(record, canonical=True)
        except ValueError as error:
            raise StoreValueError(
                f"identity: {error}; it must name the model and its weights by strings and numbers"
            ) from error
        self.block_size = block_size
        self._root = hashlib.sha256(text.encode("ascii")).digest()

    @property
    def root(self) -> str:
        """The key of the empty prefix."""
        return self._root.hex()

    def chain(
        self,
        tokens: Sequence[int | bytes | SaltedToken] | np.ndarray,
        after: str | None = None,
        others: Mapping[int, bytes | SaltedToken] | None = None,
        like: Chain | None = None,
        shared: int = 0,
    ) -> Chain:
        """The keys of all prefixes of ``tokens``: ids (int64), and bytes that identify multimodal items.

        ``after``: the aligned key of the preceding tokens (None: there are none). ``others``: for an array of
        ids, the items that stand at some indices instead; a SaltedToken keeps the id of the array. ``like``:
        a chain with the same first ``shared`` tokens, whose blocks are not hashed again. Raises
        StoreValueError for tokens of other types.
        """
        root = self._root if after is None else bytes.fromhex(after)
        return Chain(root, self.block_size, _items(tokens, others), like, shared)


class Chain:
    """The keys of the prefixes of one token sequence, of length ``len(chain)``."""

    def __init__(
        self, root: bytes, block_size: int, items: _Items, like: Chain | None = None, shared: int = 0
    ) -> None:
        """``like``, ``shared``: as for ``Keys.chain``."""
        self.block_size = block_size
        self._items = items
        self._digests: list[bytes] = [root] if like is None else like._digests[: shared // block_size + 1]
        known = (len(self._digests) - 1) * block_size
        for start in range(known, len(items) - block_size + 1, block_size):
            self._digests.append(_link(self._digests[-1], items.encoded(start, start + block_size)))

    def __len__(self) -> int:
        return len(self._items)

    @property
    def aligned(self) -> list[str]:
        """Key k covers tokens ``[0, (k + 1) * block_size)``; only full blocks have keys here."""
        return [digest.hex() for digest in self._digests[1:]]

    def at(self, position: int) -> str:
        """The key of tokens ``[0, position)``; 0 is the root. Raises StoreValueError outside [0,
        len(chain)].
        """
        if not 0 <= position <= len(self):
            raise StoreValueError(f"Chain.at: position {position}; the chain has [0, {len(self)}]")
        full, rest = divmod(position, self.block_size)
        if not rest:
            return self._digests[full].hex()
        return _link(self._digests[full], self._items.encoded(position - rest, position)).hex()


class _Items:
    """Tokens as int64, and the bytes items at some indices among them."""

    def __init__(self, tokens: np.ndarray, others: Mapping[int, bytes | SaltedToken] | None = None) -> None:
        self._tokens = np.ascontiguousarray(tokens, "<i8")
        self._others = others or {}
        self._places = sorted(self._others)

    def __len__(self) -> int:
        return int(self._tokens.size)

    def encoded(self, start: int, stop: int) -> list[bytes | memoryview]:
        """The bytes hashed for ``[start, stop)``; different items never have the same bytes."""
        first = bisect.bisect_left(self._places, start)
        if first == bisect.bisect_left(self._places, stop):
            return [_INTEGERS, self._tokens[start:stop].data]
        pieces: list[bytes | memoryview] = [_MIXED]
        for place in range(start, stop):
            other = self._others.get(place)
            if isinstance(other, SaltedToken):
                salt = other.salt.encode("utf-8", "surrogatepass")
                pieces += [framed(_VARIANT, other.variant)] if other.variant else []
                pieces += [framed(_SALTED, salt)] if salt else []
                other = other.token if isinstance(other.token, bytes) else None
            if other is None:
                pieces += [_INTEGERS, self._tokens[place : place + 1].data]
            else:
                pieces.append(framed(_MIXED, other))
        return pieces


def _link(before: bytes, parts: list[bytes | memoryview]) -> bytes:
    digest = hashlib.sha256(before)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _items(
    tokens: Sequence[int | bytes | SaltedToken] | np.ndarray,
    others: Mapping[int, bytes | SaltedToken] | None,
) -> _Items:
    if isinstance(tokens, np.ndarray):
        return _Items(_integers(tokens), others)
    if isinstance(tokens, str | bytes | bytearray):
        raise StoreValueError(f"Keys.chain: tokens of type {type(tokens).__name__}; pass a sequence of items")
    try:
        return _Items(_packed(tokens))
    except (TypeError, OverflowError):
        others = {i: item for i, item in enumerate(tokens) if isinstance(item, bytes | SaltedToken)}
    try:
        return _Items(_packed([_id(item) for item in tokens]), others)
    except (TypeError, OverflowError) as error:
        raise StoreValueError(f"Keys.chain: an item must be a 64-bit integer or bytes: {error}") from error


def _id(item: Any) -> Any:
    """The token's id; 0 for bytes."""
    token = item.token if isinstance(item, SaltedToken) else item
    return 0 if isinstance(token, bytes) else token


def _packed(tokens: Sequence[Any]) -> np.ndarray:
    return np.frombuffer(array("q", tokens), np.int64)


def _integers(tokens: np.ndarray) -> np.ndarray:
    if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and tokens.size):
        raise StoreValueError(
            f"Keys.chain: tokens {tokens.dtype} {tokens.shape}; they must be integers of shape (count,)"
        )
    if tokens.dtype == np.uint64 and tokens.size and int(tokens.max()) >= 2**63:
        raise StoreValueError(f"Keys.chain: the token {int(tokens.max())}; it must be below 2**63")
    return tokens
