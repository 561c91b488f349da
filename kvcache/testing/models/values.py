"""The data that tests store: keys and values that encode their token, position and layer. A row read back
from a cache is decoded, then compared bit by bit with the row put. Numbers are written in digits that the
dtype represents exactly::

    key     id, position, tag = 8 * layer + head, 3 of noise
    value   id, 64 + tag, 2 of noise

F32, F16 and BF16 represent two digits in base 128 and multiples of 1/16. A block of codes represents small
integers exactly if it begins with the format's extreme numbers (``BLOCKS``); rows differ in their scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

import kvcache
import ml
from kvcache.storage.formats import CacheFormat
from ml import DType
from ml.block_formats import AFFINE

KV_HEADS, HEADS = 2, 4
_NOISE = np.random.default_rng(20250607).integers(-32, 33, (997, KV_HEADS, 5)).astype(np.float32) / 16
_HEAD = np.arange(KV_HEADS)

Ints = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Encoding:
    """The encoding of ids and positions for one kind of dtype."""

    key_dim: int
    value_dim: int
    base: int
    digits: int
    tags: int
    key_head: tuple[int, ...] = ()
    """The first numbers of a row, in units of its scale."""
    value_head: tuple[int, ...] = ()
    is_latent: bool = False
    """Whether a value is the first ``value_dim`` numbers of its key."""

    def pair(self, ids: Ints, positions: Ints, layer: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values."""
        keys = self.keys(ids, positions, layer)
        return keys, keys[:, :, : self.value_dim] if self.is_latent else self.values(ids, layer)

    def keys(self, ids: Ints, positions: Ints, layer: int = 0) -> np.ndarray:
        """Float32 (tokens, KV_HEADS, key_dim)."""
        return self._rows(
            np.asarray(ids), np.asarray(positions), 8 * layer, self.key_dim, self.key_head, slice(3)
        )

    def values(self, ids: Ints, layer: int = 0) -> np.ndarray:
        """Float32 (tokens, KV_HEADS, value_dim)."""
        return self._rows(np.asarray(ids), None, 64 + 8 * layer, self.value_dim, self.value_head, slice(3, 5))

    def _rows(
        self,
        ids: np.ndarray,
        positions: np.ndarray | None,
        tag: int,
        dim: int,
        head: Sequence[int],
        noise: slice,
    ) -> np.ndarray:  # fmt: skip
        result = np.zeros((ids.size, KV_HEADS, dim), np.float32)
        parts = [self._split(ids, self.digits)[:, None]]
        if positions is not None:
            parts.append(self._split(positions, self.digits)[:, None])
        parts += [self._split(tag + _HEAD, self.tags), _NOISE[ids % 997, :, noise]]
        at = len(head)
        result[:, :, :at] = head
        for part in parts:
            result[:, :, at : at + part.shape[-1]] = part
            at += part.shape[-1]
        if head:
            result[:, :, at - part.shape[-1] : at] = np.rint(part)
            result *= 2.0 ** -(ids % 3)[:, None, None]
        return result

    def _split(self, numbers: np.ndarray, count: int) -> np.ndarray:
        return numbers[:, None] // self.base ** np.arange(count) % self.base

    def _join(self, digits: np.ndarray) -> np.ndarray:
        return np.asarray(digits @ self.base ** np.arange(digits.shape[-1]))

    def decode(self, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ids and positions of keys (tokens, KV_HEADS, key_dim)."""
        rows, first, count = self._whole(key)[:, 0], len(self.key_head), self.digits
        digits = rows[:, first : first + 2 * count].astype(np.int64)
        return self._join(digits[:, :count]), self._join(digits[:, count:])

    def _whole(self, key: np.ndarray) -> np.ndarray:
        """The rows in units of their scales; arbitrary for rows that were never written."""
        if not self.key_head:
            return key
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.nan_to_num(key / (key[:, :1, :1] / self.key_head[0]))

    @property
    def content(self) -> int:
        """The index of the first number of a value that attention may average."""
        return self._tag + self.tags if self.is_latent else len(self.value_head) + self.digits + self.tags

    @property
    def _tag(self) -> int:
        """The index of a key's tag."""
        return len(self.key_head) + 2 * self.digits

    def queries(self, seed: int, tokens: int) -> np.ndarray:
        """Float32 (tokens, HEADS, key_dim), nonzero only for the noise: attention that is neither uniform nor
        one-hot.
        """
        result = np.zeros((tokens, HEADS, self.key_dim), np.float32)
        first = self._tag + self.tags
        result[:, :, first : first + 3] = (
            np.random.default_rng(seed).integers(-16, 17, (tokens, HEADS, 3)) / 16
        )
        return result

    def shift_positions(self, ctx: ml.Context, layer: int, key: ml.Tensor, offsets: ml.Tensor) -> ml.Tensor:
        """A shift function without compute: it rewrites the position encoded in a key."""
        assert offsets.dtype is DType.I32
        assert offsets.shape == (key.shape[0],)
        assert key.shape[1:] == (KV_HEADS, self.key_dim)
        host = key.to_numpy().astype(np.float32)
        ids, positions = self.decode(host)
        tag = self._whole(host)[:, 0, self._tag : self._tag + self.tags]
        assert (self._join(tag) == 8 * layer).all(), "the keys of another layer"
        return ctx.from_numpy(self.keys(ids, positions + offsets.to_numpy(), layer), key.dtype)


_FLOATS = Encoding(8, 5, base=128, digits=2, tags=1)
KEY_DIM, VALUE_DIM = _FLOATS.key_dim, _FLOATS.value_dim
keys, values, decode = _FLOATS.keys, _FLOATS.values, _FLOATS.decode
queries, shift_positions = _FLOATS.queries, _FLOATS.shift_positions


BLOCKS: dict[str, tuple[tuple[int, ...], int]] = {
    "Q8_0": ((127,), 32), "Q4_0": ((-8,), 32), "F8_E4M3": ((448,), 1),
    **{name: ((-(2**bits) // 2, 2**bits // 2 - 1), group) for name, (bits, group) in AFFINE.items()},
}  # fmt: skip
"""By name of a format: the first numbers of a block with scale 1, and the block size."""


def encoding(dtype: kvcache.CacheDType, latent: bool = False) -> Encoding:
    """The encoding for a cache's dtype; ``latent``: the value is its key without the last number."""
    stored = CacheFormat.of(dtype)
    if stored.plain is not None:
        plain = _FLOATS
    else:
        (key, wide), (value, other) = (BLOCKS.get(one.name, ((), 1)) for one in (stored.key, stored.value))
        plain = Encoding(max(64, wide), max(32, other), 8, 5, 3, key, value)
    return replace(plain, value_dim=plain.key_dim - 1, is_latent=True) if latent else plain


PLACE, NOISE = "place", "noise"
"""Names of extras."""


def extras(ids: Ints, positions: Ints, layer: int = 0) -> dict[str, np.ndarray]:
    """The extras stored besides K and V: I32 (tokens, 3) of id, position and layer; F32 (tokens, 2, 3)."""
    place = np.stack(np.broadcast_arrays(np.asarray(ids), np.asarray(positions), layer), axis=1)
    return {PLACE: place.astype(np.int32), NOISE: _NOISE[np.asarray(ids) % 997, :, :3] + layer}


def shift_extras(ctx: ml.Context, layer: int, name: str, extra: ml.Tensor, offsets: ml.Tensor) -> ml.Tensor:
    """A shift function for extras: it rewrites the encoded position, if any."""
    if name == NOISE:
        return extra
    host = extra.to_numpy().copy()
    assert (host[:, 2] == layer).all(), "the extras of another layer"
    host[:, 1] += offsets.to_numpy()
    return ctx.from_numpy(host, DType.I32)
