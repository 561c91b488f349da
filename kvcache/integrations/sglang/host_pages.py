"""The pages of SGLang's host pools as bytes: in place if a pool exposes their addresses, else copied."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from kvcache.cache import InvalidRangeError

__all__ = ["FlatPages", "HostPages", "as_bytes", "page_size", "pages_of"]


class _PagesInPlace:
    """Pages of consecutive slots, whose parts are runs of bytes in the pool's memory."""

    form = "in place"
    """The name of the order of a page's bytes."""

    def __init__(self, pool: Any, sizes: tuple[int, ...]) -> None:
        """``sizes``: the bytes of each part of a page."""
        self._pool, self.sizes = pool, sizes

    def split(self, indices: torch.Tensor, count: int) -> Sequence[Any]:
        """The addresses of ``count`` pages; ``indices`` (count * page size,) are their slots."""
        _check_count(self._pool, indices, count)
        addresses, sizes = self._pool.get_page_buffer_meta(indices)
        parts = len(self.sizes)
        if [*sizes] != [*self.sizes] * count:
            raise InvalidRangeError(
                f"HiCacheStore: {type(self._pool).__name__} has {count} pages in parts of {sizes} bytes; "
                f"each page must have {[*self.sizes]}"
            )
        return [addresses[i * parts : (i + 1) * parts] for i in range(count)]

    def source(self, place: Any) -> Sequence[np.ndarray]:
        """A page's current parts, each uint8 (bytes,). ``target``: arrays to write, then to pass to
        ``filled``.
        """
        return [_memory(address, size) for address, size in zip(place, self.sizes, strict=True)]

    target = source

    def filled(self, place: Any, parts: Sequence[np.ndarray]) -> None:
        """Store the content of a filled ``target`` in the pool."""


class FlatPages:
    """Pages that the pool copies from and to its memory."""

    form = "flat"

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.sizes: tuple[int, ...] = (as_bytes(pool.get_dummy_flat_data_page()).nbytes,)

    def split(self, indices: torch.Tensor, count: int) -> Sequence[Any]:
        _check_count(self._pool, indices, count)
        return [int(index) for index in indices[:: page_size(self._pool)].tolist()]

    def source(self, place: Any) -> Sequence[np.ndarray]:
        return [as_bytes(self._pool.get_data_page(place, flat=True))]

    def target(self, place: Any) -> Sequence[np.ndarray]:
        return [np.empty(self.sizes[0], np.uint8)]

    def filled(self, place: Any, parts: Sequence[np.ndarray]) -> None:
        page = self._pool.get_dummy_flat_data_page()
        as_bytes(page)[:] = parts[0]
        self._pool.set_from_flat_data_page(place, page)


HostPages: TypeAlias = _PagesInPlace | FlatPages


def pages_of(pool: Any) -> HostPages:
    """The accessor of a pool's pages, chosen by its layout."""
    try:
        _, sizes = pool.get_page_buffer_meta(torch.arange(page_size(pool)))
    except (AttributeError, ValueError, NotImplementedError):
        return FlatPages(pool)
    return _PagesInPlace(pool, tuple(int(nbytes) for nbytes in sizes))


def as_bytes(page: torch.Tensor) -> np.ndarray:
    """A flat page as uint8 (bytes,), without a copy if it is contiguous, as SGLang's pages are."""
    raw: np.ndarray = page.contiguous().view(torch.uint8).reshape(-1).numpy()
    return raw


def page_size(pool: Any) -> int:
    """The number of slots of a page."""
    return int(getattr(pool, "logical_page_size", None) or getattr(pool, "page_size", 1) or 1)


def _check_count(pool: Any, indices: torch.Tensor, count: int) -> None:
    if len(indices) != count * page_size(pool):
        raise InvalidRangeError(
            f"HiCacheStore: {len(indices)} slots for {count} pages; there must be {page_size(pool)} for each"
        )


@functools.lru_cache(64)
def _array_type(size: int) -> Any:
    return ctypes.c_uint8 * size


def _memory(address: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array(_array_type(size).from_address(address))
