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

from ml import DType

Token = int | bytes
HEADS, KEY_DIM, VALUE_DIM = 2, 8, 5
BLOCK_KEY_DIM, BLOCK_VALUE_DIM = 32, 64
"""Where the cache is quantized."""
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


@functools.lru_cache(1 << 16)
def _codes(digest: bytes, place: bytes, count: int, dtype: DType) -> np.ndarray:
    """Integers whose blocks of 32 have the scale 1, so that each is its own code."""
    raw = np.frombuffer(hashlib.shake_128(digest + place).digest(count), np.uint8).astype(np.float32)
    peak, others = (-127.0, 253) if dtype is DType.Q8_0 else (-8.0, 15)
    found = raw % others - others // 2
    found[::32] = peak
    return found


def rows(prefixes: Sequence[bytes], layer: int, dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """K (tokens, HEADS, key dim) and V (tokens, HEADS, value dim) of the last tokens of these prefixes."""
    place = b"kv%d" % layer
    if dtype.is_quantized:
        dim, wide = BLOCK_KEY_DIM, BLOCK_KEY_DIM + BLOCK_VALUE_DIM
        both = [_codes(digest, place, HEADS * wide, dtype) for digest in prefixes]
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
