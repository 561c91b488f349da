"""Attention by a plan over host memory: the arguments of numba's kernels. ``kernels`` imports numba, which is
slow, only when attention is first requested.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np

from backends.ragged_kernel import BLOCKS, layout
from ml.errors import BoundsError, ShapeError
from ml.ragged import RaggedPlan

KINDS = {"F32": 0, "F16": 1, "BF16": 2, "Q8_0": 8, "Q4_0": 4}
"""The kinds that the kernels read, with their numbers."""
BITS = {"Q8_0": 8, "Q4_0": 4}
"""Bits per code, for the formats that the kernels read."""
BLOCK = 32
"""Values that share a scale."""
ABREAST = 64
"""The most queries, each of one head, that read a chunk of a segment together."""
UNITS = 128
"""The approximate number of units that long work is divided into; a unit is a KV head over a piece of a
segment.
"""
WORTH = 1 << 14
"""Cells of one KV head that justify another thread, if they are read for up to ``SERVED`` queries each."""
SERVED = 4
LARGEST = 1 << 22
"""The most bytes that a thread keeps for its next attention."""


@functools.lru_cache
def kernels(module: str = "cpu_kernels") -> ModuleType | None:
    """A module of kernels; None if numba is not installed or does not work here."""
    try:
        return importlib.import_module(f"backends.{module}")
    except Exception:  # any failure of the JIT compiler: the generic implementation is used
        return None


def values_shape(codes: Sequence[int], scales: Sequence[int], name: str) -> tuple[int, int, int]:
    """The shape (cells, kv_heads, dim) of the values that codes and scales encode. Raises ShapeError for
    other shapes.
    """
    bits, (cells, kv_heads, blocks) = BITS[name], (*scales, 0, 0, 0)[:3]
    if len(scales) != 3 or tuple(codes) != (cells, kv_heads, blocks * BLOCK * bits // 8):
        raise ShapeError(
            f"ragged_attention: codes {tuple(codes)} and scales {tuple(scales)} of {name}; they are "
            f"(cells, kv_heads, dim * {bits} / 8) and (cells, kv_heads, dim / {BLOCK})"
        )
    return cells, kv_heads, blocks * BLOCK


def check_shapes(op: str, query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> None:
    """Raise ShapeError unless these are heads of one attention."""
    shapes = tuple(query), tuple(key), tuple(value)
    if (
        not len(query) == len(key) == len(value) == 3
        or query[2] != key[2]
        or shapes[1][:2] != shapes[2][:2]
        or not key[1]
        or query[1] % key[1]
    ):
        raise ShapeError(
            f"{op}: query, key, value {shapes}; each must be (tokens, heads, size), "
            "with one size of queries and keys, and heads a multiple of KV heads"
        )


def address(array: np.ndarray) -> int:
    """The address of an array."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(cast("Any", array)))  # the faster way
    except (TypeError, ValueError, BufferError):  # empty, read-only, BF16, or not C-contiguous
        location: int = array.__array_interface__["data"][0]
        return location


class Array(NamedTuple):
    """(rows, heads, numbers) in host memory; steps are in bytes."""

    address: int
    shape: Sequence[int]
    steps: Sequence[int]
    itemsize: int

    @classmethod
    def of(cls, array: np.ndarray) -> Array:
        return cls(address(array), array.shape, array.strides, array.itemsize)


class Stored(NamedTuple):
    """K, V or queries in host memory as arguments of the kernels. Its creator keeps the memory alive."""

    shape: Sequence[int]
    """(cells, kv_heads, dim) of the values."""
    arguments: tuple[int, ...]
    """Kind, address, steps of a cell and of a head; then the last three for scales, or zeros."""

    @classmethod
    def of(cls, parts: Sequence[Array], kind: str) -> Stored | None:
        """Plain numbers, or codes and scales (cells, kv_heads, ...); None for anything that kernels do not
        read.
        """
        if kind in BITS:
            return cls._coded(parts, kind)
        address, shape, steps, itemsize = parts[0]
        if kind not in KINDS or len(shape) != 3 or (steps[2] != itemsize and shape[2] > 1):
            return None
        return cls(shape, (KINDS[kind], address, steps[0], steps[1], 0, 0, 0))

    @classmethod
    def _coded(cls, parts: Sequence[Array], kind: str) -> Stored | None:
        codes, scales = parts
        shape = values_shape(codes.shape, scales.shape, kind)
        wrong = (codes.itemsize, scales.itemsize) != (1, 2) or scales.address % 2
        if wrong or codes.steps[2] != 1 or (scales.steps[2] != 2 and scales.shape[2] > 1):
            return None
        of_codes, of_scales = ((x.address, x.steps[0], x.steps[1]) for x in parts)
        return cls(shape, (KINDS[kind], *of_codes, *of_scales))


def stored_of(parts: Sequence[Any], kind: str, array_of: Callable[[Any], Array]) -> Stored | None:
    """The tensors of K or V in host memory, as ``Stored.of`` their arrays. Cached with the first tensor, in
    its ``on_cpu``, since caches pass the same ones in each pass.
    """
    first, asked = parts[0], (kind, *parts[1:])
    known, stored = getattr(first, "on_cpu", ((), None))
    if known != asked:
        stored = Stored.of([array_of(part.native) for part in parts], kind)
        first.on_cpu = asked, stored
    return cast("Stored | None", stored)


class Work(NamedTuple):
    """A plan in the arrays of ``ragged_kernel.Launch``, independent of the number of threads."""

    tasks: np.ndarray
    """Empty if each segment is a task."""
    task_count: int
    slots: np.ndarray
    edges: np.ndarray
    piece: int
    parts: int
    """The number of slots."""
    abreast: int
    """The most readers of a task."""
    cost: int
    """Cells of one KV head, in the sense of ``WORTH``."""
    reach: int
    """The number of rows that the buffers must have."""

    @classmethod
    def of(cls, op: str, plan: RaggedPlan, kv_heads: int, group: int) -> Work:
        """Raises BoundsError for invalid rows."""
        compiled: Any = kernels()
        reach, rows, pairs, longest, most = compiled.survey(plan.segments, plan.readers, plan.index)
        if reach == compiled.WRONG_READER:
            raise BoundsError(f"{op}: a reader of the plan sees rows outside of its segment, or none")
        if reach == compiled.WRONG_SEGMENT:
            raise BoundsError(f"{op}: a segment of the plan has rows that no buffer has")
        abreast = min(most, max(1, ABREAST // group))
        cost = max(rows, pairs * group // SERVED) * kv_heads
        if cost < 2 * WORTH and most == abreast:  # for one thread
            slots = np.empty_like(plan.parts)
            slots[plan.parts] = np.arange(slots.size)
            work = _NONE, len(plan.segments), slots, plan.part_starts, longest, slots.size
        else:
            packed, count, parts = layout(plan, abreast, kv_heads * BLOCKS // UNITS)
            piece, to_slots, to_edges = packed[:3].tolist()
            work = packed[8:to_slots], count, packed[to_slots:to_edges], packed[to_edges:], piece, parts
        return cls(*work, abreast, cost, reach)


_NONE = np.empty(0, np.int32)


class Launch(NamedTuple):
    """What the kernel needs for tensors of these shapes, checked once for all layers of a pass."""

    heads: int
    v_dim: int
    work: int
    """The address of ``kept[0]``: see ``cpu_kernels.attend``."""
    kept: tuple[np.ndarray, ...]
    """The work in integers, and the arrays whose addresses it contains."""
    parts: int
    """Bytes of the results of all pieces."""
    scratch: int
    """Bytes that a thread needs to compute them."""
    units: int
    threads: int
    """The most that the work is worth."""

    @classmethod
    def of(
        cls, op: str, plan: RaggedPlan, query: Sequence[int], key: Sequence[int], value: Sequence[int]
    ) -> Launch:
        check_shapes(op, query, key, value)
        (tokens, heads, head_dim), (cells, kv_heads, v_dim) = query, value
        if tokens != plan.tokens:
            raise ShapeError(f"{op}: {tokens} queries; the plan is for {plan.tokens}")
        group = heads // kv_heads
        work = Work.of(op, plan, kv_heads, group)
        if work.reach > cells:
            raise BoundsError(f"{op}: the plan refers to row {work.reach - 1} of {cells}")
        lists = work.tasks, plan.segments, plan.readers, work.slots, plan.index, work.edges
        tasks, segments, readers, slots, index, edges = (address(x) if x.size else 0 for x in lists)
        numbers = np.array([
            kv_heads, group, head_dim, v_dim, work.piece, tasks, work.task_count,
            segments, len(plan.segments), readers, len(plan.readers), slots, index, plan.index.size,
            work.abreast, edges, tokens,
        ])  # fmt: skip
        units = work.task_count * kv_heads
        threads = min(units, work.cost // WORTH)
        scratch = scratch_size(work.abreast, group, head_dim, v_dim)
        parts = -(-work.parts * heads * (v_dim + 2) // 16) * 64
        kept = numbers, *lists
        return cls(heads, v_dim, address(numbers), kept, parts, scratch, units, threads)

    def run(
        self, query: Sequence[int], key: Sequence[int], value: Sequence[int], scale: float,
        sinks: np.ndarray | None, threads: int, out: int,
    ) -> None:  # fmt: skip
        """Attention in F32 of queries (tokens, heads, head_dim); there must be ``kernels``.

        The operands are ``Stored.arguments``, of the query the first four. ``out`` is the address of the
        result: F32 (tokens, heads, v_dim), C-contiguous. Each byte of K and V is read once for up to
        ``ABREAST`` queries of a segment. The temporary memory is a few chunks of cells, and one result for
        each piece of a history.
        """
        compiled: Any = kernels()
        heads, _, work, _, size, scratch, units, most = self
        logits = 0
        if sinks is not None:
            if sinks.shape != (heads,):
                raise ShapeError(f"ragged_attention: sinks {sinks.shape}; they must be floats ({heads},)")
            logits = address(sinks)
        operands = work, query, scale, key, value, logits
        threads = min(threads, most)
        room = _Room.of(size + scratch)
        parts = room.address
        if threads < 2:
            compiled.attend(*operands, parts, parts + size, 0, units, out)
            return
        edges = [units * i // threads for i in range(threads + 1)]
        pool = _pool(os.getpid(), threads - 1)
        others: list[Future[None]] = []

        def part(begin: int, end: int) -> None:
            own = _Room.of(scratch)
            compiled.attend(*operands, room.address, own.address, begin, end, 0)

        try:
            others.extend(pool.submit(part, *edges[i : i + 2]) for i in range(1, threads))
            compiled.attend(*operands, parts, parts + size, *edges[:2], 0)
        finally:
            _wait(others)
        for other in others:
            other.result()
        compiled.attend(*operands, parts, 0, 0, 0, out)


def _wait(others: Sequence[Future[None]]) -> None:
    """Return when all have ended, which use memory that would be freed; only then is an interrupt raised."""
    interrupt: BaseException | None = None
    while True:
        try:
            wait(others)
        except BaseException as error:
            interrupt = error
        else:
            break
    if interrupt is not None:
        raise interrupt


def launch_of(
    op: str, plan: RaggedPlan, query: Sequence[int], key: Sequence[int], value: Sequence[int]
) -> Launch:
    """The launch for tensors of these shapes, kept with the plan for further layers."""
    shapes = query, key, value
    launch: Launch | None = plan.memo.get(shapes)
    if launch is None:
        launch = plan.memo[shapes] = Launch.of(op, plan, *shapes)
    return launch


class Repeated:
    """A plan's attention over plain storage, for further layers whose tensors look the same."""

    __slots__ = (
        "_attend", "_backend", "_dtype", "_key", "_launch", "_shape", "_size", "_stored_as", "_value", "kind",
        "v_dim",
    )  # fmt: skip

    def __init__(self, plan: RaggedPlan, query: Any, key: Any, value: Any) -> None:
        """``query``, ``key`` and ``value`` have been attended with ``plan``."""
        compiled: Any = kernels()
        self._attend, self._backend = compiled.attend, query.backend
        self._dtype, self._shape = query.dtype, query.shape
        self._stored_as, keys = key.on_cpu
        self._key, self._value = keys.shape, value.on_cpu[1].shape
        self._launch = launch = launch_of("ragged_attention", plan, self._shape, self._key, self._value)
        self._size = launch.parts + launch.scratch
        self.kind, self.v_dim = KINDS[self._dtype.name], launch.v_dim

    def operands(self, ctx: Any, query: Any, key: Any, value: Any) -> tuple[Any, Any] | None:
        """The arguments of K and V; None unless the tensors look the same. Raises ClosedError."""
        backend = self._backend
        if ctx.active_backend is not backend or backend.closed:
            ctx.check("ragged_attention")
            return None
        keys: Any
        values: Any
        keys_as, keys = getattr(key, "on_cpu", _NOT_STORED)
        values_as, values = getattr(value, "on_cpu", _NOT_STORED)
        if (
            getattr(query, "backend", None) is not backend
            or query.dtype is not self._dtype or query.shape != self._shape
            or keys_as != self._stored_as or values_as != self._stored_as
            or keys is None or values is None  # strides that the kernel does not read
            or keys.shape != self._key or values.shape != self._value
            or not key.backend is value.backend is backend
        ):  # fmt: skip
            return None
        return keys.arguments, values.arguments

    def run(
        self, query: Sequence[int], stored: tuple[Any, Any], scale: float, threads: int, out: int
    ) -> None:
        """As ``Launch.run``."""
        launch = self._launch
        if threads > 1 and launch.threads > 1:
            launch.run(query, *stored, scale, None, threads, out)
        else:
            room = _Room.of(self._size)
            parts = room.address
            scratch = parts + launch.parts
            self._attend(launch.work, query, scale, *stored, 0, parts, scratch, 0, launch.units, out)


_NOT_STORED: tuple[object, Any] = None, None


def scratch_size(readers: int, group: int, head_dim: int, v_dim: int) -> int:
    """The bytes of scratch memory of the kernel, for the most readers of a task."""
    compiled: Any = kernels()
    k_width, v_width = (-(-dim // compiled.LANES) * compiled.LANES for dim in (head_dim, v_dim))
    floats = readers * group * (k_width + v_width + compiled.CHUNK + 2) + compiled.CHUNK * (k_width + v_width)
    return int(readers * 24 + floats * 4 + 64)


class _Room:
    """Uninitialized memory, which a thread reuses so that it stays in the processor's cache."""

    __slots__ = ("address", "memory")
    own = threading.local()

    def __init__(self, size: int) -> None:
        self.memory = np.empty(size, np.uint8)
        self.address = address(self.memory)

    @classmethod
    def of(cls, size: int) -> _Room:
        """At least ``size`` bytes; not kept if they are more than ``LARGEST``."""
        kept: _Room | None = getattr(cls.own, "room", None)
        if kept is None or kept.memory.size < size:
            kept = cls(size)
            if size <= LARGEST:
                cls.own.room = kept
        return kept


@functools.lru_cache(maxsize=4)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """``process`` is the process id, since a fork has none of its parent's threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="cpu-attention")
