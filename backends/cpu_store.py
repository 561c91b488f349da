"""Writing codes in host memory with a numba kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backends.cpu_attention import BITS, BLOCK, Array, Stored, kernels
from ml.base import BaseBackend

_kernel = functools.partial(kernels, "cpu_quantize")


def floats(array: np.ndarray) -> np.ndarray:
    """An array as F32 in the kernels' layout; itself if it already is."""
    if array.dtype == np.float32 and array.flags.c_contiguous and array.flags.aligned:
        return array
    return np.require(array, np.float32, ("C", "A"))


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes and scales of a buffer, each (cells, kv_heads, ...), as arguments of the kernel."""

    codes: np.ndarray
    scales: np.ndarray
    bits: int

    @classmethod
    def of(cls, parts: Sequence[np.ndarray], name: str) -> Codes | None:
        """From a format's arrays, in place; None for another format, or if codes are not contiguous."""
        if name not in BITS or len(parts) != 2 or Stored.of([Array.of(x) for x in parts], name) is None:
            return None
        codes, scales = parts
        return cls(codes.view(np.int8), scales.view(np.uint16), BITS[name])

    @property
    def dim(self) -> int:
        """The number of values of a head."""
        blocks: int = self.scales.shape[2]
        return blocks * BLOCK

    @property
    def arguments(self) -> tuple[np.ndarray, np.ndarray, int]:
        return self.codes, self.scales, self.bits


def encoded(values: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Codes and scales (..., width) of floats (..., dim); None without kernels, and for another format."""
    bits = BITS.get(name)
    kernel = None if bits is None else _kernel()
    if kernel is None or bits is None:
        return None
    values = floats(values)
    *outer, dim = values.shape
    codes = np.empty((*outer, dim * bits // 8), np.int8 if bits == 8 else np.uint8)
    scales = np.empty((*outer, dim // BLOCK), np.float16)
    rows = math.prod(outer)
    flat = [array.reshape(rows, 1, array.shape[-1]) for array in (values, codes, scales)]
    kernel.store(flat[0], flat[1].view(np.int8), flat[2].view(np.uint16), bits, 0)
    return codes, scales


class CodesStore:
    """See ``ml.KVStore``: writes K and V of a backend in host memory as codes."""

    def __init__(
        self,
        backend: BaseBackend,
        host: Callable[[Any], np.ndarray | None],
        key: Codes,
        value: Codes,
        write: Callable[..., None],
    ) -> None:
        self._backend, self._host, self._write = backend, host, write
        self._cells = key.codes.shape[0]
        self._key, self._value = key.arguments, value.arguments
        self._key_shape = *key.codes.shape[1:2], key.dim
        self._value_shape = *value.codes.shape[1:2], value.dim

    @classmethod
    def over(
        cls,
        backend: BaseBackend,
        host: Callable[[Any], np.ndarray | None],
        key: Codes | None,
        value: Codes | None,
    ) -> CodesStore | None:
        """None without codes to write, or without numba. ``host`` returns a tensor's floats as an array; None
        for anything else.
        """
        if key is None or value is None or (kernel := _kernel()) is None:
            return None
        return cls(backend, host, key, value, kernel.store)

    def write(self, ctx: Any, start: int, count: int, key: Any, value: Any) -> bool:
        backend = self._backend
        if ctx.active_backend is not backend or backend.closed:
            return False
        if not 0 <= start <= self._cells - count or count < 1:
            return False
        keys, values = self._host(key), self._host(value)
        if keys is None or keys.shape != (count, *self._key_shape):
            return False
        if values is None or values.shape != (count, *self._value_shape):
            return False
        self._write(floats(keys), *self._key, start)
        self._write(floats(values), *self._value, start)
        return True

    def read(self, ctx: Any, start: int, count: int) -> None:
        """None: codes are decoded elsewhere."""
        return
