"""Attention over codes, and the way into codes, in host memory: what the kernels of numba are given.

``kernels`` imports numba, which takes a moment, when quantized storage is first used and not before.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from backends.ragged_kernel import BLOCKS, layout
from ml.base import BaseBackend
from ml.errors import BoundsError, ShapeError
from ml.ragged import RaggedPlan

__all__ = [
    "BITS", "Codes", "CodesStore", "attend_codes", "check_shapes", "encoded", "floats", "kernels",
    "values_shape",
]  # fmt: skip

BITS = {"Q8_0": 8, "Q4_0": 4}
"""Of a code, by the names of the formats that the kernels read."""
BLOCK = 32
"""Values that share a scale."""
READERS = 32
"""Of a segment, for whom its codes are widened together."""
UNITS = 128
"""What work is divided into, about, where it is long enough: a KV head over a piece of a segment."""
WORTH = 1 << 14
"""Cells of one KV head, each read for four queries, that are worth asking another thread for."""
NO_SINKS = np.empty(0, np.float32)


@functools.lru_cache(maxsize=1)
def kernels() -> ModuleType | None:
    """The kernels; None where numba is not installed, or does not run here."""
    try:
        return importlib.import_module("backends.quantized_kernel")
    except Exception:  # whatever keeps a JIT compiler from working: the general way does the same
        return None


def floats(array: np.ndarray) -> np.ndarray:
    """As F32, and as the kernels take it: itself, where it is so."""
    if array.dtype == np.float32 and array.flags.c_contiguous and array.flags.aligned:
        return array
    return np.require(array, np.float32, ("C", "A"))


def values_shape(codes: Sequence[int], scales: Sequence[int], name: str) -> tuple[int, int, int]:
    """(cells, kv_heads, dim) of what codes and scales of these shapes stand for; ShapeError for others."""
    bits, (cells, kv_heads, blocks) = BITS[name], (*scales, 0, 0, 0)[:3]
    if len(scales) != 3 or tuple(codes) != (cells, kv_heads, blocks * BLOCK * bits // 8):
        raise ShapeError(
            f"quantized_attention: codes {tuple(codes)} and scales {tuple(scales)} of {name}; they are "
            f"(cells, kv_heads, dim * {bits} / 8) and (cells, kv_heads, dim / {BLOCK})"
        )
    return cells, kv_heads, blocks * BLOCK


def check_shapes(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> None:
    """Raise ShapeError unless these are heads of one attention."""
    shapes = tuple(query), tuple(key), tuple(value)
    if (
        len(query) != 3
        or query[2] != key[2]
        or shapes[1][:2] != shapes[2][:2]
        or not key[1]
        or query[1] % key[1]
    ):
        raise ShapeError(
            f"quantized_attention: query, key, value {shapes}; each must be (tokens, heads, size), "
            "with one size of queries and keys, and heads a multiple of KV heads"
        )


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes and scales of a buffer, (cells, kv_heads, ...) each, as the kernels take them."""

    codes: np.ndarray
    scales: np.ndarray
    bits: int

    @classmethod
    def of(cls, parts: Sequence[np.ndarray], name: str) -> Codes | None:
        """Of a format's arrays where they lie; None where it is another format, or codes lie apart."""
        bits = BITS.get(name)
        if bits is None or len(parts) != 2:
            return None
        codes, scales = parts
        if codes.itemsize != 1 or codes.strides[-1] != 1 or scales.itemsize != 2 or not scales.flags.aligned:
            return None
        values_shape(codes.shape, scales.shape, name)
        return cls(codes.view(np.int8), scales.view(np.uint16), bits)

    @property
    def dim(self) -> int:
        """Values of a head."""
        blocks: int = self.scales.shape[2]
        return blocks * BLOCK

    @property
    def given(self) -> tuple[np.ndarray, np.ndarray, int]:
        return self.codes, self.scales, self.bits


@dataclass(frozen=True, slots=True)
class Work:
    """A plan as ``ragged_kernel.Launch`` has it, in arrays. The same whatever the number of threads."""

    tasks: np.ndarray
    slots: np.ndarray
    edges: np.ndarray
    piece: int
    count: int
    """All slots."""
    rows: int
    """Places of segments that the tasks read, each for all of its readers."""
    reach: int
    """Rows that the buffers have to have."""

    @classmethod
    def of(cls, plan: RaggedPlan, kv_heads: int) -> Work:
        name = f"codes {kv_heads}"
        found: Work | None = plan.memo.get(name)
        if found is None:
            packed, tasks, count = layout(plan, READERS, kv_heads * BLOCKS // UNITS)
            piece, slots, edges = packed[:3].tolist()
            found = plan.memo[name] = cls(
                packed[8:slots].reshape(tasks, 4), packed[slots:edges], packed[edges:], piece, count,
                int(plan.segments[:, 2].sum()), _reach(plan),
            )  # fmt: skip
        return found


def _reach(plan: RaggedPlan) -> int:
    """One more than the largest row that is read. Raises BoundsError for what no buffer could have."""
    gathered, start, length, first, stop = plan.segments.T
    order = np.argsort(first, kind="stable")
    inside = np.repeat(length[order], (stop - first)[order])
    begins, ends = plan.readers[:, 1], plan.readers[:, 2]
    if inside.size != ends.size or (begins < 0).any() or (begins >= ends).any() or (ends > inside).any():
        raise BoundsError(
            "quantized_attention: a reader of the plan sees rows outside of its segment, or none"
        )
    listed, reached = gathered == 1, start + length
    if (start < 0).any() or (reached[listed] > plan.index.size).any() or plan.index.min(initial=0) < 0:
        raise BoundsError("quantized_attention: a segment of the plan has rows that no buffer has")
    return max(int(reached[~listed].max(initial=0)), int(plan.index.max(initial=-1)) + 1)


def attend_codes(
    query: np.ndarray,
    key: Codes,
    value: Codes,
    plan: RaggedPlan,
    sinks: np.ndarray | None,
    threads: int,
) -> np.ndarray | None:
    """Attention of F32 queries (tokens, heads, head_dim), scaled, C-contiguous: F32 (tokens, heads, v_dim).

    None without kernels. Each byte of codes is read once for up to ``READERS`` queries of a segment. What
    memory this takes is a few chunks of cells, and the result as often as histories are cut into pieces.
    """
    found = kernels()
    if found is None:
        return None
    tokens, heads, _ = query.shape
    cells, kv_heads = key.codes.shape[:2]
    check_shapes(query.shape, (cells, kv_heads, key.dim), (*value.codes.shape[:2], value.dim))
    if tokens != plan.tokens:
        raise ShapeError(f"quantized_attention: {tokens} queries; the plan is for {plan.tokens}")
    if sinks is not None and sinks.shape != (heads,):
        raise ShapeError(f"quantized_attention: sinks {sinks.shape}; they must be floats ({heads},)")
    work = Work.of(plan, kv_heads)
    if work.reach > cells:
        raise BoundsError(f"quantized_attention: the plan names row {work.reach - 1} of {cells}")
    parts = np.empty((work.count, heads, value.dim), np.float32)
    totals = np.empty((work.count, heads, 2), np.float32)
    given: tuple[Any, ...] = (
        query, *key.given, *value.given, work.tasks, plan.segments, plan.readers, work.slots, plan.index,
        work.piece, parts, totals,
    )  # fmt: skip
    scratch = functools.partial(_scratch, found.CHUNK, key.dim, value.dim, heads // kv_heads)
    units = len(work.tasks) * kv_heads
    threads = max(1, min(threads, units, work.rows * kv_heads // WORTH))
    edges = [units * i // threads for i in range(threads + 1)]
    others = [
        _pool(os.getpid(), threads - 1).submit(found.attend, *given, *scratch(), *edges[i : i + 2])
        for i in range(1, threads)
    ]
    found.attend(*given, *scratch(), 0, edges[1])
    for other in others:
        other.result()
    out = np.empty((tokens, heads, value.dim), np.float32)
    found.merge(parts, totals, work.edges, NO_SINKS if sinks is None else sinks, out)
    return out


def _scratch(chunk: int, head_dim: int, v_dim: int, group: int) -> list[np.ndarray]:
    """What a thread has of its own: a chunk of keys and of values, weights, and what readers see."""
    shapes = (chunk, head_dim), (chunk, v_dim), (READERS * group, chunk)
    return [*(np.empty(shape, np.float32) for shape in shapes), np.empty((READERS, 3), np.int64)]


@functools.lru_cache(maxsize=4)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """``process``: a fork has none of its parent's threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="quantized-attention")


def encoded(values: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Codes and scales (..., width) of floats (..., dim); None without kernels, and of another format."""
    bits = BITS.get(name)
    found = None if bits is None else kernels()
    if found is None or bits is None:
        return None
    values = floats(values)
    *outer, dim = values.shape
    codes = np.empty((*outer, dim * bits // 8), np.int8 if bits == 8 else np.uint8)
    scales = np.empty((*outer, dim // BLOCK), np.float16)
    rows = math.prod(outer)
    flat = [array.reshape(rows, 1, array.shape[-1]) for array in (values, codes, scales)]
    found.store(flat[0], flat[1].view(np.int8), flat[2].view(np.uint16), bits, 0)
    return codes, scales


class CodesStore:
    """See :class:`ml.KVStore`: writes K and V of a backend in host memory as codes."""

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
        self._key, self._value = key.given, value.given
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
        """None without codes to write into, or without numba.

        ``host``: the floats of a tensor of the backend as an array; None for what is no such tensor.
        """
        if key is None or value is None or (found := kernels()) is None:
            return None
        return cls(backend, host, key, value, found.store)

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
        """Never: codes are read as floats elsewhere."""
        return
