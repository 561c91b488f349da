"""The formats of pages: K and V by token, as in our caches, or blocks in vLLM's layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

import ml
from kvcache import check_serialized
from kvcache.stores import SerializedSnapshot, SnapshotCorruptError

__all__ = ["PageFormat", "RawPages", "TokenPages"]

Widths = tuple[tuple[int, int], tuple[int, int]]
"""(heads, dim) of a layer's keys and of its values."""


@dataclass(frozen=True)
class TokenPages:
    """Serialized snapshots of an attention cache with ``layers``; the arrays are K and V of each layer in
    turn.

    Each is (tokens, heads, dim) of ``dtype``.
    """

    tokens: int
    dtype: ml.DType
    layers: tuple[Widths, ...]

    @property
    def nbytes(self) -> int:
        """The size of a page's arrays in bytes."""
        values = sum(heads * dim for layer in self.layers for heads, dim in layer)
        return self.tokens * (values * self.dtype.itemsize + np.dtype(np.int64).itemsize)

    def pack(self, begin: int, arrays: Sequence[np.ndarray]) -> SerializedSnapshot:
        """The page of tokens ``[begin, begin + tokens)`` as an entry of a store."""
        named = {f"{i // 2}.{i % 2}": array for i, array in enumerate(arrays)}
        layers = [
            [i, self.dtype.name, [[f"{i}.{n}", [0, 1, 2]] for n in range(2)]] for i in range(len(self.layers))
        ]
        meta = {
            "kind": "attention",
            "begin": begin,
            "end": begin + self.tokens,
            "dtype": self.dtype.name,
            "whole": False,
            "layers": layers,
        }
        positions = np.arange(begin, begin + self.tokens, dtype=np.int64)
        return SerializedSnapshot({"snapshot": meta}, {"positions": positions, **named})

    def unpack(self, begin: int, page: SerializedSnapshot) -> list[np.ndarray]:
        """The page's arrays, as views. Raises SnapshotCorruptError for a page of anything else."""
        span = check_serialized("load", page, complete=True)
        meta = page.meta["snapshot"]
        if span != (begin, begin + self.tokens) or meta["kind"] != "attention" or meta["whole"]:
            raise SnapshotCorruptError(
                f"load: a snapshot of {list(span)} under the key of [{begin}, {begin + self.tokens})"
            )
        if meta["dtype"] != self.dtype.name:
            raise SnapshotCorruptError(
                f"load: snapshot of {meta['dtype']}; the cache stores {self.dtype.name}"
            )
        parts = {i: [_by_token(page, *tensor) for tensor in tensors] for i, _, tensors in meta["layers"]}
        widths = {i: tuple(array.shape[1:] for array in arrays) for i, arrays in parts.items()}
        if widths != dict(enumerate(self.layers)):
            raise SnapshotCorruptError(f"load: layers of {widths}; the cache stores {self.layers}")
        return [array for i in range(len(self.layers)) for array in parts[i]]


def _by_token(page: SerializedSnapshot, name: str, axes: list[int]) -> np.ndarray:
    """An array as (tokens, heads, dim), for any stored order of axes."""
    return page.arrays[name].transpose([axes.index(axis) for axis in range(3)])


@dataclass(frozen=True)
class RawPages:
    """Blocks byte for byte: one array (blocks, bytes of a block) for each layer.

    ``layout`` describes their content; it is part of the key and of the page.
    """

    tokens: int
    blocks: int
    layers: tuple[int, ...]
    """The bytes of a block, by layer."""
    layout: str

    @property
    def nbytes(self) -> int:
        return self.blocks * sum(self.layers)

    def pack(self, begin: int, arrays: Sequence[np.ndarray]) -> SerializedSnapshot:
        named = {str(i): array for i, array in enumerate(arrays)}
        return SerializedSnapshot({"vllm_blocks": self._meta(begin)}, named)

    def unpack(self, begin: int, page: SerializedSnapshot) -> list[np.ndarray]:
        if page.meta.get("vllm_blocks") != self._meta(begin):
            raise SnapshotCorruptError(
                f"load: not vLLM's blocks of [{begin}, {begin + self.tokens}), {self.layout}"
            )
        arrays = [page.arrays.get(str(i)) for i in range(len(self.layers))]
        blocks = [
            array
            for array, nbytes in zip(arrays, self.layers, strict=True)
            if array is not None and array.shape == (self.blocks, nbytes) and array.dtype == np.uint8
        ]
        if len(blocks) != len(self.layers) or len(page.arrays) != len(blocks):
            raise SnapshotCorruptError(f"load: blocks of other layers than {list(self.layers)}")
        return blocks

    def _meta(self, begin: int) -> dict[str, Any]:
        return {"begin": begin, "end": begin + self.tokens, "layout": self.layout}


PageFormat: TypeAlias = TokenPages | RawPages
