"""What K, V and states of a conversation are: digests of its tokens, so that all that is seen can be checked.

K and V of position i in a layer are a digest of the tokens up to i, a recurrent state is one of all tokens
that it has seen, and the first item of a conversation has an encoder's output, a digest too. A session that
was given another one's prefix has to see, bit for bit, what computing its own tokens from nothing would have
stored: no run of a second cache is needed to know it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from kvcache.cache import CacheDType
from kvcache.storage.formats import CacheFormat
from ml import DType

Token = int | bytes
HEADS, KEY_DIM, VALUE_DIM = 2, 8, 5
BLOCK_KEY_DIM, BLOCK_VALUE_DIM = 32, 64
"""Where the cache is not plain."""
OUTPUT_ROWS = 3
"""Length of an encoder's output."""
CONV, STATE = (2, 3), (2, 2, 2)


def shared(one: Sequence[Token], other: Sequence[Token]) -> int:
    """How many tokens two conversations have in common from the first on."""
    for i, (mine, yours) in enumerate(zip(one, other, strict=False)):
        if mine != yours:
            return i
    return min(len(one), len(other))


@functools.lru_cache(1 << 16)
def _link(digest: bytes, token: Token) -> bytes:
    item = b"b" + token if isinstance(token, bytes) else b"i%d" % token
    return hashlib.blake2b(digest + item, digest_size=16).digest()


def digests(tokens: Sequence[Token]) -> list[bytes]:
    """One for each prefix of 1, 2, ... tokens."""
    found, digest = [], b""
    for token in tokens:
        digest = _link(digest, token)
        found.append(digest)
    return found


@functools.lru_cache(1 << 16)
def _numbers(digest: bytes, place: bytes, count: int) -> np.ndarray:
    """Eighths of small integers, which all floats hold exactly."""
    raw = hashlib.shake_128(digest + place).digest(count)
    return np.frombuffer(raw, np.int8).astype(np.float32) / 8


_BLOCKS: dict[str, tuple[tuple[int, ...], int]] = {
    "Q8_0": ((-127,), 253), "Q4_0": ((-8,), 15), "F8_E4M3": ((448,), 31), "AFFINE4_32": ((-8, 7), 15),
}  # fmt: skip
"""What a block of 32 begins with for a scale of 1, and how many integers, around 0, the rest may be."""


@functools.lru_cache(1 << 16)
def _codes(digest: bytes, place: bytes, count: int, name: str) -> np.ndarray:
    """Integers (HEADS, count) that a format holds exactly: each is its own code, but for scale and bias."""
    raw = np.frombuffer(hashlib.shake_128(digest + place).digest(HEADS * count), np.uint8).astype(np.float32)
    head, others = _BLOCKS.get(name, ((), 15))
    found = raw % others - others // 2
    for i, number in enumerate(head):
        found[i::32] = number
    return found.reshape(HEADS, count)


def rows(prefixes: Sequence[bytes], layer: int, dtype: CacheDType) -> tuple[np.ndarray, np.ndarray]:
    """K (tokens, HEADS, key dim) and V (tokens, HEADS, value dim) of the last tokens of these prefixes."""
    place = b"kv%d" % layer
    stored = CacheFormat.of(dtype)
    if stored.plain is None:
        dim, wide = BLOCK_KEY_DIM, BLOCK_KEY_DIM + BLOCK_VALUE_DIM
        halves = (b"k", dim, stored.key.name), (b"v", BLOCK_VALUE_DIM, stored.value.name)
        both = [
            np.concatenate([_codes(digest, place + part, count, name) for part, count, name in halves], 1)
            for digest in prefixes
        ]
    else:
        dim, wide = KEY_DIM, KEY_DIM + VALUE_DIM
        both = [_numbers(digest, place, HEADS * wide) for digest in prefixes]
    stacked = np.stack(both) if both else np.zeros(0, np.float32)
    stacked = stacked.reshape(len(both), HEADS, wide)
    return stacked[:, :, :dim], stacked[:, :, dim:]


def item_of(tokens: Sequence[Token]) -> int | None:
    """The position of the conversation's item, if it has one."""
    found = (i for i, token in enumerate(tokens) if isinstance(token, bytes) or token % 7 == 4)
    return next(found, None)


def encoder_output(tokens: Sequence[Token], item: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V (OUTPUT_ROWS, HEADS, dim) of the item's encoder output."""
    digest = digests(tokens[: item + 1])[-1]
    return rows([_link(digest, row) for row in range(OUTPUT_ROWS)], layer, DType.F32)


def state(tokens: Sequence[Token], kind: str, layer: int) -> np.ndarray:
    """The state (1, *shape) that has seen these tokens: zero at first."""
    shape = CONV if kind == "conv" else STATE
    if not tokens:
        return np.zeros((1, *shape), np.float32)
    place = f"{kind}{layer}".encode()
    return _numbers(digests(tokens)[-1], place, int(np.prod(shape))).reshape(1, *shape)
