"""The buffers that stores accept as bytes."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from kvcache.stores.errors import StoreValueError

__all__ = ["Buffer", "WritableBuffer", "as_bytes", "as_parts", "as_writable", "check_size"]

Buffer = bytes | bytearray | memoryview | mmap.mmap | np.ndarray
"""Any object with the buffer interface whose bytes are contiguous."""
WritableBuffer = bytearray | memoryview | mmap.mmap | np.ndarray


def as_bytes(buffer: Buffer) -> memoryview:
    """The buffer's bytes as a flat memoryview, without a copy. Raises StoreValueError if they are not
    contiguous.
    """
    if type(buffer) is memoryview and buffer.format == "B" and buffer.ndim == 1 and buffer.c_contiguous:
        return buffer
    try:
        # NumPy's buffer interface does not support bfloat16, so view it as bytes first.
        if isinstance(buffer, np.ndarray) and buffer.flags.c_contiguous:
            buffer = buffer.reshape(-1).view(np.uint8).data
        view = memoryview(buffer)  # type: ignore[arg-type]
        return view.cast("B") if view.nbytes else _empty(view.readonly)
    except (TypeError, ValueError, BufferError) as error:
        raise StoreValueError(
            f"a buffer of type {type(buffer).__name__} has no contiguous bytes: {error}"
        ) from error


def as_parts(buffers: Sequence[Buffer]) -> tuple[list[memoryview], int]:
    """The bytes of each buffer, and their total number."""
    views = [as_bytes(buffer) for buffer in buffers]
    return views, sum(map(len, views))


def as_writable(buffer: WritableBuffer, op: str) -> memoryview:
    """As ``as_bytes``; raises StoreValueError for a read-only buffer."""
    view = as_bytes(buffer)
    if view.readonly:
        raise StoreValueError(f"{op}: the buffer is read-only")
    return view


def check_size(op: str, view: memoryview, key: str, nbytes: int) -> None:
    if len(view) != nbytes:
        raise StoreValueError(f"{op}: a buffer of {len(view)} bytes; {key} has {nbytes}")


def _empty(readonly: bool) -> memoryview:
    """A view with a 0 in its shape cannot be cast."""
    return memoryview(b"" if readonly else bytearray())
