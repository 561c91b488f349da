"""Deliberate bugs, each planted in its own copy of the NumPy backend. See test_conformance_mutations.py."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

import ml
from backends.numpylike import ArrayTensor
from ml.base import BaseTensor, SoloGroup
from ml.distributed import check_timeout
from ml.dtypes import DType
from ml.strided import contiguous_strides, extent
from ml.testing.aliasing import AliasingTests
from ml.testing.casts import CastTests
from ml.testing.compute import ComputeTests
from ml.testing.copies import CopyTests
from ml.testing.creation import CreationTests
from ml.testing.groups import GroupTests
from ml.testing.harness import BackendCase
from ml.testing.movement import MovementTests
from ml.testing.optional import CapabilityTests
from ml.testing.order import OrderTests
from ml.testing.random_views import RandomViewTests
from ml.testing.refusals import RefusalTests
from ml.testing.rows import RowTests
from ml.testing.special import SpecialValueTests
from ml.testing.stores import KVStoreTests


@dataclass(frozen=True)
class Mutant:
    """A bug, the area of the suite that has to catch it, and how it gets into a fresh copy of the module."""

    name: str
    area: type[BackendCase]
    plant: Callable[[ModuleType], None]


MUTANTS: list[Mutant] = []


def mutant(area: type[BackendCase], method: str = "") -> Callable[[Any], Any]:
    """Either a function of the module, or one in place of a method, which it is given first."""

    def register(function: Any) -> Any:
        plant = in_place_of(method, function) if method else function
        MUTANTS.append(Mutant(function.__name__, area, plant))
        return function

    return register


def in_place_of(method: str, function: Any) -> Callable[[ModuleType], None]:
    owner, _, name = method.partition(".")
    return lambda module: override(getattr(module, owner), name, function)


def override(owner: Any, name: str, function: Any) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: function(original, *args, **kwargs))


# In one expression.

ROWS: list[tuple[type[BackendCase], str, str, Callable[..., Any]]] = [
    (CreationTests, "to_numpy_hands_out_the_storage", "NumpyTensor.to_numpy", lambda f, self: self.native),
    (CreationTests, "arange_drops_the_last_partial_step", "NumpyContext.arange",
     lambda f, self, start, stop, step, dtype: f(
         self, start, start + step * math.floor((stop - start) / step) if step else stop, step, dtype)),
    (CreationTests, "full_forgets_the_sign_of_zero", "NumpyContext._full",
     lambda f, self, shape, value, dtype: f(self, shape, value + 0.0 if value == 0 else value, dtype)),
    (MovementTests, "view_counts_from_the_storage", "NumpyTensor.view",
     lambda f, self, ctx, offset, *args: f(self, ctx, offset - self.offset, *args)),
    (MovementTests, "view_is_bound_by_what_is_shown", "NumpyTensor._storage_size",
     lambda f, self: self.offset + extent(self.shape, self.strides)),
    (MovementTests, "slice_ignores_its_step_beyond_the_first", "NumpyTensor.slice",
     lambda f, self, *args: (shown := f(self, *args))._alias(shown.offset, shown.shape, self.strides)),
    (MovementTests, "what_is_contiguous_is_not_copied", "NumpyTensor.contiguous", lambda f, self, ctx:
     self if self.strides == contiguous_strides(self.shape) else f(self, ctx)),
    (AliasingTests, "a_stepped_slice_is_a_copy", "NumpyTensor.slice",
     lambda f, self, ctx, *args: (
         f(self, ctx, *args).contiguous(ctx) if args[3:] > (1,) else f(self, ctx, *args))),
    (CopyTests, "an_overlapping_copy_trusts_numpy", "NumpyTensor.write_from",
     lambda f, self, src: np.copyto(self.native, src.native, casting="unsafe")),  # 2.4: a[0:10:2] = a[:5]
    (CopyTests, "a_write_to_a_strided_destination_is_lost", "NumpyTensor.write_from",
     lambda f, self, src: np.copyto(self.native.reshape(-1), src.native.reshape(-1), casting="unsafe")),
    (CopyTests, "overlap_is_judged_by_storage", "NumpyTensor._overlaps",
     lambda f, self, src: self.storage is src.storage and f(self, src)),
    (CopyTests, "a_stride_0_destination_is_written", "NumpyTensor.check_writable", lambda *args: None),
    (RowTests, "an_index_tensor_is_read_without_its_strides", "NumpyTensor._indices",
     lambda f, *args, **named: rows._alias(rows.offset, rows.shape, (1,))
     if isinstance(rows := f(*args, **named), BaseTensor) else rows),
    (RowTests, "repeat_repeats_each_element", "NumpyTensor._repeat",
     lambda f, self, ctx, axis, n: self.own(ctx, np.repeat(self.native, n, axis), self.dtype)),
    (ComputeTests, "gelu_is_always_the_tanh_one", "NumpyTensor._gelu",
     lambda f, self, ctx, tanh: ArrayTensor._gelu(self, ctx, True)),
    (ComputeTests, "clamp_without_bounds_returns_its_operand", "NumpyTensor._clamp",
     lambda f, self, ctx, lo, hi: self if lo is None and hi is None else f(self, ctx, lo, hi)),
    (ComputeTests, "sums_of_i32_stay_i32", "NumpyTensor._reduce",
     lambda f, self, ctx, op, axis, keepdims: self.own(
         ctx, self.native.sum(axis=axis, keepdims=keepdims, dtype=np.int32), DType.I32)
     if op == "sum" and self.dtype is DType.I32 else f(self, ctx, op, axis, keepdims)),
    (ComputeTests, "argsort_is_not_stable", "NumpyTensor._argsort", lambda f, self, ctx, axis: self._result(
        ctx, self.shape[axis] - 1 - np.argsort(np.flip(self.wide(), axis), axis, "stable"), DType.I32)),
    (ComputeTests, "indices_are_i64", "NumpyTensor._top_k", lambda f, self, ctx, k: (
        (found := f(self, ctx, k))[0], found[1].cast(ctx, DType.I64))),
    (ComputeTests, "ties_come_last_first", "NumpyTensor._largest", lambda f, self, x, k:
     np.argsort(-x[..., ::-1], axis=-1, kind="stable")[..., :k] * -1 + x.shape[-1] - 1),
    (CreationTests, "arange_counts_in_floats", "NumpyContext.arange",
     lambda f, self, start, stop, step, dtype: f(
         self, start, float(start) + math.ceil((stop - start) / step) * float(step), step, dtype)
     if step and math.isfinite(stop) else f(self, start, stop, step, dtype)),
    (RandomViewTests, "a_stride_of_0_is_taken_for_1", "NumpyTensor.view",
     lambda f, self, ctx, offset, shape, strides=None: f(
         self, ctx, offset, shape, strides and tuple(stride or 1 for stride in strides))),
    (SpecialValueTests, "equality_has_a_tolerance", "NumpyTensor._compare", lambda f, self, ctx, op, other:
     self._result(ctx, np.isclose(self.native, other.native, equal_nan=False), DType.BOOL)
     if op == "eq" and self.dtype is DType.F32 else f(self, ctx, op, other)),
    (SpecialValueTests, "exp_ends_before_the_range_does", "NumpyTensor._unary", lambda f, self, ctx, op:
     f(self._result(ctx, np.where(self.native > 88, np.inf, self.native), self.dtype), ctx, op)
     if op == "exp" else f(self, ctx, op)),
    (SpecialValueTests, "the_sine_of_minus_0_is_0", "NumpyTensor._unary", lambda f, self, ctx, op:
     f(self.own(ctx, self.native + self.dtype.numpy.type(0), self.dtype) if op == "sin" else self, ctx, op)),
    (SpecialValueTests, "gelu_of_infinity_is_nan", "NumpyTensor._gelu", lambda f, self, ctx, tanh:
     f(self._result(ctx, np.where(self.native == np.inf, np.nan, self.native), self.dtype), ctx, tanh)),
    (SpecialValueTests, "sums_drift", "NumpyTensor._reduce", lambda f, self, ctx, op, axis, keepdims:
     self._result(ctx, np.add.reduce(self.wide(), axis=axis, keepdims=keepdims), self.dtype)
     if op == "sum" and self.dtype is DType.F32 else f(self, ctx, op, axis, keepdims)),
    (RefusalTests, "binary_operands_are_promoted", "NumpyTensor._operand",
     lambda f, self, op, other, dtype=None: self.check_peer(op, other)),
    (RefusalTests, "a_closed_context_still_works", "NumpyContext.close", lambda f, self: None),
    (RefusalTests, "tensors_of_other_backends_are_taken", "NumpyTensor.check_peer",
     lambda f, self, op, other: other),
    (RefusalTests, "tensors_can_be_pickled", "NumpyTensor.__reduce__", lambda f, self: (list, ())),
    (RefusalTests, "an_operation_is_left_out_without_a_word", "NumpyTensor._softmax",
     lambda f, *args: BaseTensor._softmax(*args)),
]  # fmt: skip
MUTANTS += [Mutant(name, area, in_place_of(method, function)) for area, name, method, function in ROWS]


# Creation and transfer.


@mutant(CreationTests, "NumpyContext._from_native")
def from_native_forgets_where_a_view_begins(original: Any, self: Any, array: Any) -> Any:
    memory = array
    while isinstance(getattr(memory, "base", None), np.ndarray):
        memory = memory.base
    if memory is array:
        return original(self, array)
    return original(self, np.ndarray(array.shape, array.dtype, memory, 0, array.strides))


@mutant(CreationTests, "NumpyTensor.__dlpack__")
def a_refusal_of_dlpack_is_no_buffer_error(original: Any, self: Any, **options: Any) -> Any:
    try:
        return original(self, **options)
    except ml.ExportError as error:
        raise ml.NotSupportedError(str(error)) from None


@mutant(CreationTests)
def from_numpy_keeps_the_callers_memory(numpy: ModuleType) -> None:
    numpy.NumpyContext._from_array = lambda self, array, dtype: numpy.NumpyTensor.own(self, array, dtype)


@mutant(CreationTests)
def memory_never_shrinks(numpy: ModuleType) -> None:
    kept: list[Any] = []
    override(
        numpy.NumpyContext, "_allocate", lambda original, *args: kept.append(original(*args)) or kept[-1]
    )


# Movement.


@mutant(RefusalTests, "NumpyTensor.slice")
def slice_wraps_negative_positions(
    original: Any, self: Any, ctx: Any, axis: int, start: int, stop: int, step: int = 1
) -> Any:
    size = self.shape[axis] if self.shape and -len(self.shape) <= axis < len(self.shape) else 0
    first, last = (int(n) + size if isinstance(n, int) and n < 0 else n for n in (start, stop))
    return original(self, ctx, axis, first, last, step)


@mutant(MovementTests, "NumpyTensor.permute")
def permute_applies_the_inverse(original: Any, self: Any, ctx: Any, *axes: int) -> Any:
    if sorted(axis % max(len(axes), 1) for axis in axes) != list(range(len(axes))) or not axes:
        return original(self, ctx, *axes)
    return original(self, ctx, *np.argsort([axis % len(axes) for axis in axes]).tolist())


@mutant(RefusalTests, "NumpyTensor.reshape")
def reshape_copies_when_it_has_to(original: Any, self: Any, ctx: Any, *shape: int) -> Any:
    try:
        return original(self, ctx, *shape)
    except ml.ShapeError:
        return original(self.contiguous(ctx), ctx, *shape)


# Aliasing.


@mutant(AliasingTests, "NumpyTensor.reshape")
def reshape_merges_a_gap_of_one_row(original: Any, self: Any, ctx: Any, *shape: int) -> Any:
    try:
        return original(self, ctx, *shape)
    except ml.ShapeError:
        steps, count = contiguous_strides(shape), math.prod(self.shape)
        if extent(shape, steps) + self.offset > self.storage.size or math.prod(shape) != count:
            raise
        return self._alias(self.offset, shape, steps)


# Copies.


@mutant(CopyTests, "NumpyTensor.write_from")
def an_overlapping_copy_runs_forward(original: Any, self: Any, src: Any) -> None:
    for index in np.ndindex(self.shape):
        self.native[index] = src.native[index].astype(self.dtype.numpy)


@mutant(CopyTests, "NumpyTensor.copy")
def copy_broadcasts(original: Any, self: Any, ctx: Any, dst: Any) -> Any:
    dst.check_writable("copy")
    try:
        np.copyto(dst.native, self.native.copy(), casting="unsafe")
    except ValueError as error:
        raise ml.ShapeError(str(error)) from error
    return dst


# Rows.


@mutant(RowTests, "NumpyTensor._indices")
def host_indices_wrap(original: Any, self: Any, op: str, indices: Any, size: int, *distinct: bool) -> Any:
    if isinstance(indices, (list, np.ndarray)):
        host = np.asarray(indices, dtype=object)
        if host.ndim == 1 and all(isinstance(n, (int, np.integer)) for n in host) and size:
            indices = [int(n) + size if -size <= n < 0 else n for n in host]
    return original(self, op, indices, size, *distinct)


@mutant(RowTests, "NumpyTensor._gather")
def rows_are_read_in_the_order_of_memory(original: Any, self: Any, ctx: Any, *args: Any) -> Any:
    steps = contiguous_strides(self.shape)
    if self.offset + extent(self.shape, steps) <= self.storage.size:
        self = self._alias(self.offset, self.shape, steps)
    return original(self, ctx, *args)


@mutant(RowTests, "NumpyTensor._scatter")
def set_rows_reads_its_own_rows_while_writing(
    original: Any, self: Any, src: Any, indices: Any, axis: int
) -> None:
    rows = indices.native if isinstance(indices, BaseTensor) else indices
    target, source = np.moveaxis(self.native, axis, 0), np.moveaxis(src.native, axis, 0)
    for i, row in enumerate(rows.tolist()):
        target[row] = source[i].astype(self.dtype.numpy)


@mutant(RowTests, "NumpyTensor.set_rows")
def set_rows_writes_before_it_checks(
    original: Any, self: Any, ctx: Any, src: Any, indices: Any, axis: int = 0
) -> Any:
    if isinstance(indices, list) and len(indices) == 2 and indices[0] == indices[1] and self.native.ndim:
        self.native[indices[0]] = 0
    return original(self, ctx, src, indices, axis)


# Casts: an array is changed before it is converted to another dtype.


def narrowing(change: Callable[[np.ndarray, DType], np.ndarray | None]) -> None:
    def cast(original: Any, self: Any, ctx: Any, dtype: DType) -> Any:
        if self.dtype is dtype:
            return original(self, ctx, dtype)
        with np.errstate(all="ignore"):
            array = self.native.copy()
            changed = change(array, dtype)
            changed = array if changed is None else changed.astype(array.dtype)
            return original(self.own(ctx, changed, self.dtype), ctx, dtype)

    MUTANTS.append(
        Mutant(change.__name__, CastTests, lambda numpy: override(numpy.NumpyTensor, "_cast", cast))
    )


@narrowing
def f32_truncates_to_bf16(array: np.ndarray, dtype: DType) -> None:
    if dtype is DType.BF16 and array.dtype == np.float32:
        array.view(np.uint32)[~np.isnan(array)] &= 0xFFFF0000


@narrowing
def subnormal_f16_flushes_to_zero(array: np.ndarray, dtype: DType) -> np.ndarray | None:
    return np.where(np.abs(array) < 2.0**-14, array * 0, array) if dtype is DType.F16 else None


@narrowing
def overflow_saturates_at_the_largest_f16(array: np.ndarray, dtype: DType) -> np.ndarray | None:
    wide = dtype is DType.F16 and array.dtype == np.float32
    return np.clip(array, -65504, 65504) if wide else None


@narrowing
def floats_round_to_integers(array: np.ndarray, dtype: DType) -> np.ndarray | None:
    return np.rint(array) if dtype.is_integer and array.dtype.kind == "f" else None


@mutant(CastTests, "NumpyTensor.write_from")
def copy_to_bool_takes_the_lowest_bit(original: Any, self: Any, src: Any) -> None:
    if self.dtype is DType.BOOL and src.dtype.is_integer:
        self.native[...] = (src.native & 1).astype(bool)
    else:
        original(self, src)


# Compute.


@mutant(ComputeTests, "NumpyTensor._matmul")
def matmul_accumulates_in_the_operands_dtype(original: Any, self: Any, ctx: Any, other: Any) -> Any:
    if self.dtype is DType.F32 or self.native.ndim < 2 or self.shape[-1] < 100:
        return original(self, ctx, other)
    columns = other.native if other.native.ndim > 1 else other.native[:, None]
    total = np.zeros((*self.shape[:-1], columns.shape[-1]), self.dtype.numpy)
    for k in range(self.shape[-1]):
        total = total + self.native[..., k : k + 1] * columns[k]
    return self.own(ctx, total if other.native.ndim > 1 else total[..., 0], self.dtype)


@mutant(ComputeTests, "NumpyTensor._unary")
def round_takes_halves_away_from_zero(original: Any, self: Any, ctx: Any, op: str) -> Any:
    if op != "round" or not self.dtype.is_float:
        return original(self, ctx, op)
    x = self.wide()
    return self._result(ctx, np.copysign(np.floor(np.abs(x) + np.float32(0.5)), x), self.dtype)


@mutant(ComputeTests, "NumpyTensor._reduce")
def argmax_takes_the_last_of_ties(
    original: Any, self: Any, ctx: Any, op: str, axis: int, keepdims: bool
) -> Any:
    if op != "argmax" or self.native.size == 0:
        return original(self, ctx, op, axis, keepdims)
    back = np.argmax(np.flip(self.wide(), axis), axis=axis, keepdims=keepdims)
    return self._result(ctx, self.shape[axis] - 1 - back, DType.I32)


@mutant(ComputeTests, "NumpyTensor._softmax")
def softmax_forgets_to_subtract_the_maximum(original: Any, self: Any, ctx: Any, axis: int) -> Any:
    with np.errstate(all="ignore"):
        x = np.exp(self.wide())
        return self._result(ctx, x / x.sum(axis=axis, keepdims=True), self.dtype)


@mutant(SpecialValueTests, "NumpyTensor._softmax")
def a_logit_of_minus_infinity_keeps_a_little_weight(original: Any, self: Any, ctx: Any, axis: int) -> Any:
    if 0 in self.shape:
        return original(self, ctx, axis)
    x = self.wide()
    with np.errstate(all="ignore"):
        least = x.max(axis=axis, keepdims=True) - 30
    return original(self._result(ctx, np.maximum(x, least), self.dtype), ctx, axis)


@mutant(ComputeTests, "NumpyTensor._rms_norm")
def rms_norm_squares_in_the_operands_dtype(
    original: Any, self: Any, ctx: Any, weight: Any, eps: float
) -> Any:
    if weight is not None or 0 in self.shape or self.dtype is not DType.F16:
        return original(self, ctx, weight, eps)
    with np.errstate(all="ignore"):
        square = (self.native * self.native).astype(np.float32).mean(axis=-1, keepdims=True)
        return self._result(ctx, self.wide() / np.sqrt(square + np.float32(eps)), self.dtype)


# Order.


@mutant(OrderTests)
def a_tensor_remembers_what_it_read(numpy: ModuleType) -> None:
    read: dict[Any, Any] = {}

    def to_numpy(original: Any, self: Any) -> Any:
        key = (id(self.storage), self.offset, self.shape, self.strides)
        return read.setdefault(key, (self.storage, original(self)))[1].copy()

    override(numpy.NumpyTensor, "to_numpy", to_numpy)


@mutant(OrderTests)
def a_backend_works_in_the_thread_that_opened_it_alone(numpy: ModuleType) -> None:
    opened: dict[int, int] = {}

    def opening(original: Any, self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        opened[id(self)] = threading.get_ident()

    def check(original: Any, self: Any, *args: Any) -> None:
        if opened[id(self.backend)] != threading.get_ident():
            raise RuntimeError("no stream in this thread")
        original(self, *args)

    override(numpy.NumpyBackend, "__init__", opening)
    override(numpy.NumpyContext, "check", check)


@mutant(OrderTests)
def copies_are_postponed_until_compute(numpy: ModuleType) -> None:
    pending: list[Any] = []

    def to_numpy(original: Any, self: Any) -> Any:
        while pending:
            pending.pop(0)()
        return original(self)

    override(
        numpy.NumpyTensor,
        "write_from",
        lambda original, self, src: pending.append(lambda: original(self, src)),
    )
    override(numpy.NumpyTensor, "to_numpy", to_numpy)


@mutant(OrderTests)
def reserve_clears_what_was_forwarded(numpy: ModuleType) -> None:
    forwarded: list[Any] = []
    numpy.NumpyContext._forward = lambda self, tensors: forwarded.extend(tensors)

    def reserve(original: Any, self: Any) -> None:
        original(self)
        while forwarded:
            forwarded.pop().native[...] = 0

    override(numpy.NumpyContext, "reserve", reserve)


# Refusals.


@mutant(RefusalTests, "NumpyContext.check")
def refusals_are_plain_builtin_errors(original: Any, self: Any, op: str, tensor: Any = None) -> None:
    if self.closed:
        raise RuntimeError("closed")


# Capabilities.


@mutant(CapabilityTests)
def cache_config_is_a_dict(numpy: ModuleType) -> None:
    numpy.NumpyBackend.cache_config = lambda self: {"cache_padding": 32}


# Stores of K and V.


class SlowStore:
    """A store by way of slice and copy, which refuse by raising; the mutants get one thing wrong."""

    copies_reads = False
    checks_both_first = aliases_declined = True
    late = 0

    def __init__(self, backend: Any, key: Any, value: Any) -> None:
        self.backend, self.halves = backend, (key, value)

    def write(self, ctx: Any, start: int, count: int, *new: Any) -> bool:
        if not self._plain(ctx, start, count) or any(n.backend is not self.backend for n in new):
            return False
        begin = min(start + self.late, self.halves[0].shape[0] - count)
        wrong = [n.shape != (count, *half.shape[1:]) for n, half in zip(new, self.halves, strict=True)]
        shared = any(n.storage is half.storage for n, half in zip(new, self.halves, strict=True))
        if (self.checks_both_first and any(wrong)) or (self.aliases_declined and shared):
            return False
        try:
            for source, half in zip(new, self.halves, strict=True):
                source.copy(ctx, half.slice(ctx, 0, begin, begin + count))
        except ml.MLError:
            return False
        return True

    def _plain(self, ctx: Any, start: int, count: int) -> bool:
        inside = count > 0 and 0 <= start <= self.halves[0].shape[0] - count
        return inside and ctx.backend is self.backend and not ctx.closed

    def read(self, ctx: Any, start: int, count: int) -> Any:
        if not self._plain(ctx, start, count):
            return None
        found = [half.slice(ctx, 0, start, start + count) for half in self.halves]
        return tuple(part.contiguous(ctx) for part in found) if self.copies_reads else tuple(found)


def store_mutant(name: str, **fault: Any) -> Mutant:
    kind = type("Store", (SlowStore,), fault)

    def plant(numpy: ModuleType) -> None:
        numpy.NumpyBackend.kv_store = lambda self, key, value: kind(self, key, value)

    return Mutant(name, KVStoreTests, plant)


MUTANTS += [
    store_mutant("a_store_writes_a_row_late", late=1),
    store_mutant("a_store_reads_copies", copies_reads=True),
    store_mutant("a_store_writes_keys_before_it_looks_at_values", checks_both_first=False),
    store_mutant("a_store_takes_what_lies_in_its_own_memory", aliases_declined=False),
]


# Groups of ranks.


def group_mutant(name: str, exclusive: bool = True, closes: bool = True, **methods: Any) -> Mutant:
    """A group of one rank for the NumPy backend, some of whose methods are others."""
    kind = type("Group", (SoloGroup,), methods)

    def distributed(self: Any, timeout: float = 60.0) -> Any:
        self.check("distributed")
        open_one = getattr(self, "group", None)
        if exclusive and open_one is not None and not open_one.closed:
            raise ml.GroupError(f"distributed: {open_one!r} is open on this backend; close it first")
        self.group = kind(self, check_timeout(timeout))
        return self.group

    def close(original: Any, self: Any) -> None:
        if closes and (group := getattr(self, "group", None)) is not None:
            group.close()
        original(self)

    def plant(numpy: ModuleType) -> None:
        numpy.NumpyBackend.distributed = distributed
        override(numpy.NumpyBackend, "close", close)

    return Mutant(name, GroupTests, plant)


def gather_by_memory(self: Any, ctx: Any, tensor: Any, axis: int) -> Any:
    return ctx.from_numpy(tensor.native.ravel("K").reshape(tensor.shape), tensor.dtype)


MUTANTS += [
    group_mutant("a_sum_is_the_operand_itself", _all_reduce=lambda self, ctx, tensor: tensor),
    group_mutant("a_sum_counts_a_rank_twice", _all_reduce=lambda self, ctx, tensor: tensor.add(ctx, tensor)),
    group_mutant("gathering_forgets_strides", _all_gather=gather_by_memory),
    group_mutant("a_closed_group_goes_on", _check_open=lambda self, op: None),
    group_mutant("a_second_group_opens_beside_the_first", exclusive=False),
    group_mutant("a_group_outlives_its_backend", closes=False),
]
