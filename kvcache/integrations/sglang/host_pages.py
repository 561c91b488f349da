"""The pages of SGLang's host pools as bytes: in place where a pool says where they lie, else copied."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from kvcache.cache import InvalidRangeError

__all__ = ["FlatPages", "HostPages", "as_bytes", "page_size", "pages_of"]


class HostPages(Protocol):
    """The pages of one pool, each for a number of consecutive slots."""

    form: str
    """Says in what order a page's bytes stand."""
    sizes: tuple[int, ...]
    """Bytes by part of a page."""

    def split(self, indices: torch.Tensor, count: int) -> Sequence[Any]:
        """The places of ``count`` pages; ``indices`` (count * page size,) are their slots."""

    def source(self, place: Any) -> Sequence[np.ndarray]:
        """A page's parts as they are, uint8 (bytes,) each; copied where they do not lie in one piece."""

    def target(self, place: Any) -> Sequence[np.ndarray]:
        """Where a page's parts are to be written, uint8 (bytes,) each; ``filled`` is to be called then."""

    def filled(self, place: Any, parts: Sequence[np.ndarray]) -> None:
        """Have the pool hold what ``target`` was filled with."""


class _PagesInPlace:
    """Pages whose parts are runs of bytes of the pool's memory."""

    form = "in place"

    def __init__(self, pool: Any, sizes: tuple[int, ...]) -> None:
        self._pool, self.sizes = pool, sizes

    def split(self, indices: torch.Tensor, count: int) -> Sequence[Any]:
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
        return [_memory(address, size) for address, size in zip(place, self.sizes, strict=True)]

    target = source

    def filled(self, place: Any, parts: Sequence[np.ndarray]) -> None:
        pass


class FlatPages:
    """Pages that the pool copies out of its memory, and into it."""

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


def pages_of(pool: Any) -> HostPages:
    """How the pages of a pool are reached. Its layout decides whether they lie in runs."""
    try:
        _, sizes = pool.get_page_buffer_meta(torch.arange(page_size(pool)))
    except (AttributeError, ValueError, NotImplementedError):
        return FlatPages(pool)
    return _PagesInPlace(pool, tuple(int(nbytes) for nbytes in sizes))


def as_bytes(page: torch.Tensor) -> np.ndarray:
    """A flat page as uint8 (bytes,): its own memory where that is contiguous, as SGLang's pages are."""
    found: np.ndarray = page.contiguous().view(torch.uint8).reshape(-1).numpy()
    return found


def page_size(pool: Any) -> int:
    """Slots that a page takes."""
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
