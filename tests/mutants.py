"""Deliberate bugs, each planted in its own copy of the NumPy backend. See test_conformance_mutations.py.

A mutant is a function that is given a fresh copy of the module ``backends.numpy.backend`` (its
classes are its own) and breaks one thing in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

import ml
from backends.numpylike import ArrayTensor
from ml.base import BaseTensor, SoloGroup
from ml.base.group import check_timeout
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
from ml.testing.reductions import ReductionTests
from ml.testing.refusals import RefusalTests
from ml.testing.rows import RowTests
from ml.testing.stores import KVStoreTests

__all__ = ["MUTANTS", "Mutant"]

Break = Callable[[ModuleType], None]


@dataclass(frozen=True)
class Mutant:
    """A bug, and the area of the suite that has to catch it."""

    name: str
    area: type[BackendCase]
    plant: Break


MUTANTS: list[Mutant] = []


def mutant(area: type[BackendCase]) -> Callable[[Break], Break]:
    def register(plant: Break) -> Break:
        MUTANTS.append(Mutant(plant.__name__, area, plant))
        return plant

    return register


def override(owner: Any, name: str) -> Callable[[Any], Any]:
    """Replace a method; the replacement is given the original as its first argument."""
    original = getattr(owner, name)

    def replace(function: Any) -> Any:
        setattr(owner, name, lambda *args, **kwargs: function(original, *args, **kwargs))
        return function

    return replace


# Creation and transfer.


@mutant(CreationTests)
def from_numpy_keeps_the_callers_memory(numpy: ModuleType) -> None:
    numpy.NumpyContext._from_array = lambda self, array, dtype: numpy.NumpyTensor.own(self, array, dtype)


@mutant(CreationTests)
def to_numpy_hands_out_the_storage(numpy: ModuleType) -> None:
    numpy.NumpyTensor.to_numpy = lambda self: self.native


@mutant(CreationTests)
def arange_drops_the_last_partial_step(numpy: ModuleType) -> None:
    @override(numpy.NumpyContext, "arange")
    def _(original: Any, self: Any, start: float, stop: float, step: float, dtype: DType) -> Any:
        whole = start + step * math.floor((stop - start) / step) if step else stop
        return original(self, start, whole, step, dtype)


@mutant(CreationTests)
def full_forgets_the_sign_of_zero(numpy: ModuleType) -> None:
    @override(numpy.NumpyContext, "_full")
    def _(original: Any, self: Any, shape: Any, value: float, dtype: DType) -> Any:
        return original(self, shape, value + 0.0 if value == 0 else value, dtype)


@mutant(CreationTests)
def memory_never_shrinks(numpy: ModuleType) -> None:
    kept: list[Any] = []

    @override(numpy.NumpyContext, "_allocate")
    def _(original: Any, self: Any, *args: Any) -> Any:
        kept.append(original(self, *args))
        return kept[-1]


# Movement.


@mutant(MovementTests)
def view_counts_from_the_storage(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "view")
    def _(original: Any, self: Any, ctx: Any, offset: int, *args: Any) -> Any:
        return original(self, ctx, offset - self.offset, *args)


@mutant(MovementTests)
def view_is_bound_by_what_is_shown(numpy: ModuleType) -> None:
    numpy.NumpyTensor._storage_size = lambda self: self.offset + extent(self.shape, self.strides)


@mutant(MovementTests)
def slice_ignores_its_step_beyond_the_first(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "slice")
    def _(original: Any, self: Any, ctx: Any, axis: int, start: int, stop: int, step: int = 1) -> Any:
        shown = original(self, ctx, axis, start, stop, step)
        return shown._alias(shown.offset, shown.shape, self.strides)


@mutant(MovementTests)
def slice_wraps_negative_positions(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "slice")
    def _(original: Any, self: Any, ctx: Any, axis: int, start: int, stop: int, step: int = 1) -> Any:
        size = self.shape[axis] if self.shape and -len(self.shape) <= axis < len(self.shape) else 0
        first, last = (int(n) + size if isinstance(n, int) and n < 0 else n for n in (start, stop))
        return original(self, ctx, axis, first, last, step)


@mutant(MovementTests)
def permute_applies_the_inverse(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "permute")
    def _(original: Any, self: Any, ctx: Any, *axes: int) -> Any:
        if sorted(axis % max(len(axes), 1) for axis in axes) != list(range(len(axes))) or not axes:
            return original(self, ctx, *axes)
        return original(self, ctx, *np.argsort([axis % len(axes) for axis in axes]).tolist())


@mutant(MovementTests)
def reshape_copies_when_it_has_to(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "reshape")
    def _(original: Any, self: Any, ctx: Any, *shape: int) -> Any:
        try:
            return original(self, ctx, *shape)
        except ml.ShapeError:
            return original(self.contiguous(ctx), ctx, *shape)


# Aliasing.


@mutant(AliasingTests)
def a_stepped_slice_is_a_copy(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "slice")
    def _(original: Any, self: Any, ctx: Any, axis: int, start: int, stop: int, step: int = 1) -> Any:
        shown = original(self, ctx, axis, start, stop, step)
        return shown.contiguous(ctx) if step > 1 else shown


@mutant(AliasingTests)
def reshape_merges_a_gap_of_one_row(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "reshape")
    def _(original: Any, self: Any, ctx: Any, *shape: int) -> Any:
        try:
            return original(self, ctx, *shape)
        except ml.ShapeError:
            steps = contiguous_strides(shape)
            if extent(shape, steps) + self.offset > self.storage.size or math.prod(shape) != math.prod(
                self.shape
            ):
                raise
            return self._alias(self.offset, shape, steps)


# Copies.


@mutant(CopyTests)
def an_overlapping_copy_trusts_numpy(numpy: ModuleType) -> None:
    """NumPy 2.4 gets ``a[0:10:2] = a[:5]`` wrong."""
    numpy.NumpyTensor._write = lambda self, src: np.copyto(self.native, src.native, casting="unsafe")


@mutant(CopyTests)
def an_overlapping_copy_runs_forward(numpy: ModuleType) -> None:
    def write(self: Any, src: Any) -> None:
        for index in np.ndindex(self.shape):
            self.native[index] = src.native[index].astype(self.dtype.numpy)

    numpy.NumpyTensor._write = write


@mutant(CopyTests)
def a_write_to_a_strided_destination_is_lost(numpy: ModuleType) -> None:
    def write(self: Any, src: Any) -> None:
        self.native.reshape(-1)[...] = src.native.reshape(-1).astype(self.dtype.numpy)

    numpy.NumpyTensor._write = write


@mutant(CopyTests)
def copy_broadcasts(numpy: ModuleType) -> None:
    def copy(self: Any, ctx: Any, dst: Any) -> Any:
        dst._check_writable("copy")
        try:
            np.copyto(dst.native, self.native.copy(), casting="unsafe")
        except ValueError as error:
            raise ml.ShapeError(str(error)) from error
        return dst

    numpy.NumpyTensor.copy = copy


@mutant(CopyTests)
def a_stride_0_destination_is_written(numpy: ModuleType) -> None:
    numpy.NumpyTensor._check_writable = lambda self, op: None


# Rows.


@mutant(RowTests)
def host_indices_wrap(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_indices")
    def _(original: Any, self: Any, op: str, indices: Any, size: int, distinct: bool = False) -> Any:
        if isinstance(indices, (list, np.ndarray)):
            host = np.asarray(indices, dtype=object)
            if host.ndim == 1 and all(isinstance(n, (int, np.integer)) for n in host) and size:
                indices = [int(n) + size if -size <= n < 0 else n for n in host]
        return original(self, op, indices, size, distinct)


@mutant(RowTests)
def an_index_tensor_is_read_without_its_strides(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_indices")
    def _(original: Any, self: Any, op: str, indices: Any, size: int, distinct: bool = False) -> Any:
        rows = original(self, op, indices, size, distinct)
        return rows._alias(rows.offset, rows.shape, (1,)) if isinstance(rows, BaseTensor) else rows


@mutant(RowTests)
def set_rows_reads_its_own_rows_while_writing(numpy: ModuleType) -> None:
    def scatter(self: Any, src: Any, indices: Any, axis: int) -> None:
        rows = indices.native if isinstance(indices, BaseTensor) else indices
        target, source = np.moveaxis(self.native, axis, 0), np.moveaxis(src.native, axis, 0)
        for i, row in enumerate(rows.tolist()):
            target[row] = source[i].astype(self.dtype.numpy)

    numpy.NumpyTensor._scatter = scatter


@mutant(RowTests)
def repeat_repeats_each_element(numpy: ModuleType) -> None:
    numpy.NumpyTensor._repeat = lambda self, ctx, axis, n: self.own(
        ctx, np.repeat(self.native, n, axis), self.dtype
    )


# Casts.


def narrowing(numpy: ModuleType, change: Callable[[np.ndarray, DType], np.ndarray]) -> None:
    """Change an array before it is converted to another dtype."""

    @override(numpy.NumpyTensor, "_cast")
    def _(original: Any, self: Any, ctx: Any, dtype: DType) -> Any:
        if self.dtype is dtype:
            return original(self, ctx, dtype)
        with np.errstate(all="ignore"):
            return original(self.own(ctx, change(self.native.copy(), dtype), self.dtype), ctx, dtype)


@mutant(CastTests)
def f32_truncates_to_bf16(numpy: ModuleType) -> None:
    def change(array: np.ndarray, dtype: DType) -> np.ndarray:
        if dtype is DType.BF16 and array.dtype == np.float32:
            keep = ~np.isnan(array)
            array.view(np.uint32)[keep] &= 0xFFFF0000
        return array

    narrowing(numpy, change)


@mutant(CastTests)
def subnormal_f16_flushes_to_zero(numpy: ModuleType) -> None:
    def change(array: np.ndarray, dtype: DType) -> np.ndarray:
        return np.where(np.abs(array) < 2.0**-14, array * 0, array) if dtype is DType.F16 else array

    narrowing(numpy, lambda array, dtype: change(array, dtype).astype(array.dtype))


@mutant(CastTests)
def overflow_saturates_at_the_largest_f16(numpy: ModuleType) -> None:
    def change(array: np.ndarray, dtype: DType) -> np.ndarray:
        if dtype is DType.F16 and array.dtype == np.float32:
            return np.clip(array, -65504, 65504)
        return array

    narrowing(numpy, change)


@mutant(CastTests)
def floats_round_to_integers(numpy: ModuleType) -> None:
    def change(array: np.ndarray, dtype: DType) -> np.ndarray:
        return np.rint(array).astype(array.dtype) if dtype.is_integer and array.dtype.kind == "f" else array

    narrowing(numpy, change)


@mutant(CastTests)
def copy_to_bool_takes_the_lowest_bit(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_write")
    def _(original: Any, self: Any, src: Any) -> None:
        if self.dtype is DType.BOOL and src.dtype.is_integer:
            self.native[...] = (src.native & 1).astype(bool)
        else:
            original(self, src)


# Compute.


@mutant(ComputeTests)
def matmul_accumulates_in_the_operands_dtype(numpy: ModuleType) -> None:
    def matmul(self: Any, ctx: Any, other: Any) -> Any:
        if self.dtype is DType.F32 or self.native.ndim < 2 or self.shape[-1] < 100:
            return ArrayTensor._matmul(self, ctx, other)
        columns = other.native if other.native.ndim > 1 else other.native[:, None]
        total = np.zeros((*self.shape[:-1], columns.shape[-1]), self.dtype.numpy)
        for k in range(self.shape[-1]):
            total = total + self.native[..., k : k + 1] * columns[k]
        return self.own(ctx, total if other.native.ndim > 1 else total[..., 0], self.dtype)

    numpy.NumpyTensor._matmul = matmul


@mutant(ComputeTests)
def gelu_is_always_the_tanh_one(numpy: ModuleType) -> None:
    numpy.NumpyTensor._gelu = lambda self, ctx, tanh: ArrayTensor._gelu(self, ctx, True)


@mutant(ComputeTests)
def clamp_without_bounds_returns_its_operand(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_clamp")
    def _(original: Any, self: Any, ctx: Any, lo: Any, hi: Any) -> Any:
        return self if lo is None and hi is None else original(self, ctx, lo, hi)


@mutant(ComputeTests)
def round_takes_halves_away_from_zero(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_unary")
    def _(original: Any, self: Any, ctx: Any, op: str) -> Any:
        if op != "round" or not self.dtype.is_float:
            return original(self, ctx, op)
        x = self._wide()
        return self._result(ctx, np.copysign(np.floor(np.abs(x) + np.float32(0.5)), x), self.dtype)


@mutant(ComputeTests)
def binary_operands_are_promoted(numpy: ModuleType) -> None:
    numpy.NumpyTensor._operand = lambda self, op, other: self._peer(op, other)


# Reductions.


@mutant(ReductionTests)
def sums_of_i32_stay_i32(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_reduce")
    def _(original: Any, self: Any, ctx: Any, op: str, axis: int, keepdims: bool) -> Any:
        if op == "sum" and self.dtype is DType.I32:
            return self.own(ctx, self.native.sum(axis=axis, keepdims=keepdims, dtype=np.int32), DType.I32)
        return original(self, ctx, op, axis, keepdims)


@mutant(ReductionTests)
def argmax_takes_the_last_of_ties(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_reduce")
    def _(original: Any, self: Any, ctx: Any, op: str, axis: int, keepdims: bool) -> Any:
        if op != "argmax" or self.native.size == 0:
            return original(self, ctx, op, axis, keepdims)
        back = np.flip(self._wide(), axis)
        last = self.shape[axis] - 1 - np.argmax(back, axis=axis, keepdims=keepdims)
        return self._result(ctx, last, DType.I32)


@mutant(ReductionTests)
def softmax_forgets_to_subtract_the_maximum(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_softmax")
    def _(original: Any, self: Any, ctx: Any, axis: int) -> Any:
        with np.errstate(all="ignore"):
            x = np.exp(self._wide())
            return self._result(ctx, x / x.sum(axis=axis, keepdims=True), self.dtype)


@mutant(ReductionTests)
def rms_norm_squares_in_the_operands_dtype(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_rms_norm")
    def _(original: Any, self: Any, ctx: Any, weight: Any, eps: float) -> Any:
        if weight is not None or 0 in self.shape or self.dtype is not DType.F16:
            return original(self, ctx, weight, eps)
        with np.errstate(all="ignore"):
            square = (self.native * self.native).astype(np.float32).mean(axis=-1, keepdims=True)
            return self._result(ctx, self._wide() / np.sqrt(square + np.float32(eps)), self.dtype)


@mutant(ReductionTests)
def argsort_is_not_stable(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_argsort")
    def _(original: Any, self: Any, ctx: Any, axis: int) -> Any:
        size = self.shape[axis]
        order = np.argsort(np.flip(self._wide(), axis), axis=axis, kind="stable")
        return self._result(ctx, size - 1 - order, DType.I32)


@mutant(ReductionTests)
def indices_are_i64(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_top_k")
    def _(original: Any, self: Any, ctx: Any, k: int) -> Any:
        values, indices = original(self, ctx, k)
        return values, indices.cast(ctx, DType.I64)


# Order.


@mutant(OrderTests)
def a_tensor_remembers_what_it_read(numpy: ModuleType) -> None:
    read: dict[Any, Any] = {}

    @override(numpy.NumpyTensor, "to_numpy")
    def _(original: Any, self: Any) -> Any:
        key = (id(self.storage), self.offset, self.shape, self.strides)
        _, array = read.setdefault(key, (self.storage, original(self)))
        return array.copy()


@mutant(OrderTests)
def copies_are_postponed_until_compute(numpy: ModuleType) -> None:
    pending: list[Any] = []

    @override(numpy.NumpyTensor, "_write")
    def _(original: Any, self: Any, src: Any) -> None:
        pending.append(lambda: original(self, src))

    @override(numpy.NumpyTensor, "to_numpy")
    def _(original: Any, self: Any) -> Any:
        while pending:
            pending.pop(0)()
        return original(self)


@mutant(OrderTests)
def reserve_clears_what_was_forwarded(numpy: ModuleType) -> None:
    forwarded: list[Any] = []
    numpy.NumpyContext._forward = lambda self, tensors: forwarded.extend(tensors)

    @override(numpy.NumpyContext, "reserve")
    def _(original: Any, self: Any) -> None:
        original(self)
        for tensor in forwarded:
            tensor.native[...] = 0
        forwarded.clear()


# Refusals.


@mutant(RefusalTests)
def a_closed_context_still_works(numpy: ModuleType) -> None:
    numpy.NumpyContext.close = lambda self: None


@mutant(RefusalTests)
def tensors_of_other_backends_are_taken(numpy: ModuleType) -> None:
    numpy.NumpyTensor._peer = lambda self, op, other: other


@mutant(RefusalTests)
def tensors_can_be_pickled(numpy: ModuleType) -> None:
    numpy.NumpyTensor.__reduce__ = lambda self: (list, ())


@mutant(RefusalTests)
def refusals_are_plain_builtin_errors(numpy: ModuleType) -> None:
    def check(self: Any, op: str, tensor: Any = None) -> None:
        if self.closed:
            raise RuntimeError("closed")

    numpy.NumpyContext.check = check


@mutant(RefusalTests)
def an_operation_is_left_out_without_a_word(numpy: ModuleType) -> None:
    numpy.NumpyTensor._softmax = BaseTensor._softmax


@mutant(RowTests)
def set_rows_writes_before_it_checks(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "set_rows")
    def _(original: Any, self: Any, ctx: Any, src: Any, indices: Any, axis: int = 0) -> Any:
        if isinstance(indices, list) and len(indices) == 2 and indices[0] == indices[1] and self.native.ndim:
            self.native[indices[0]] = 0
        return original(self, ctx, src, indices, axis)


# Capabilities.


def with_attention(numpy: ModuleType, attention: Any) -> None:
    numpy.NumpyBackend.attention = attention


def _attention(ctx: Any, *args: Any) -> Any:
    from ml.nn import generic_attention

    return generic_attention(ctx, *args)


@mutant(CapabilityTests)
def causal_is_top_left_aligned(numpy: ModuleType) -> None:
    def attention(
        self: Any, ctx: Any, q: Any, k: Any, v: Any, mask: Any, scale: float, sinks: Any = None
    ) -> Any:
        if mask is ml.CAUSAL:
            rows, columns = np.indices((q.shape[0], k.shape[0]))
            mask = ctx.from_numpy(np.where(columns <= rows, 0, -np.inf).astype(np.float32))
        return _attention(ctx, q, k, v, mask, scale, sinks)

    with_attention(numpy, attention)


@mutant(CapabilityTests)
def sinks_are_ignored(numpy: ModuleType) -> None:
    with_attention(numpy, lambda self, ctx, *args: _attention(ctx, *args[:5]))


@mutant(CapabilityTests)
def cache_config_is_a_dict(numpy: ModuleType) -> None:
    numpy.NumpyBackend.cache_config = lambda self: {"cache_padding": 32}


# Stores of K and V.


class SlowStore:
    """A store by way of slice and copy, which refuse by raising; the mutants get one thing wrong."""

    copies_reads = checks_both_first = aliases_declined = False
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


def with_store(numpy: ModuleType, **faults: Any) -> None:
    kind = type("Store", (SlowStore,), {"checks_both_first": True, "aliases_declined": True} | faults)
    numpy.NumpyBackend.kv_store = lambda self, key, value: kind(self, key, value)


@mutant(KVStoreTests)
def a_store_writes_a_row_late(numpy: ModuleType) -> None:
    with_store(numpy, late=1)


@mutant(KVStoreTests)
def a_store_reads_copies(numpy: ModuleType) -> None:
    with_store(numpy, copies_reads=True)


@mutant(KVStoreTests)
def a_store_writes_keys_before_it_looks_at_values(numpy: ModuleType) -> None:
    with_store(numpy, checks_both_first=False)


@mutant(KVStoreTests)
def a_store_takes_what_lies_in_its_own_memory(numpy: ModuleType) -> None:
    with_store(numpy, aliases_declined=False)


# Groups of ranks.


def with_group(numpy: ModuleType, exclusive: bool = True, closes: bool = True, **methods: Any) -> None:
    """A group of one rank for the NumPy backend, some of whose methods are others."""
    kind = type("Group", (SoloGroup,), methods)

    def distributed(self: Any, timeout: float = 60.0) -> Any:
        self.check("distributed")
        open_one = getattr(self, "group", None)
        if exclusive and open_one is not None and not open_one.closed:
            raise ml.GroupError(f"distributed: {open_one!r} is open on this backend; close it first")
        self.group = kind(self, check_timeout(timeout))
        return self.group

    numpy.NumpyBackend.distributed = distributed
    if closes:

        @override(numpy.NumpyBackend, "close")
        def _(original: Any, self: Any) -> None:
            if (group := getattr(self, "group", None)) is not None:
                group.close()
            original(self)


@mutant(GroupTests)
def a_sum_is_the_operand_itself(numpy: ModuleType) -> None:
    with_group(numpy, _all_reduce=lambda self, ctx, tensor: tensor)


@mutant(GroupTests)
def a_sum_counts_a_rank_twice(numpy: ModuleType) -> None:
    with_group(numpy, _all_reduce=lambda self, ctx, tensor: tensor.add(ctx, tensor))


@mutant(GroupTests)
def gathering_forgets_strides(numpy: ModuleType) -> None:
    def gather(self: Any, ctx: Any, tensor: Any, axis: int) -> Any:
        return ctx.from_numpy(tensor.native.ravel("K").reshape(tensor.shape), tensor.dtype)

    with_group(numpy, _all_gather=gather)


@mutant(GroupTests)
def a_closed_group_goes_on(numpy: ModuleType) -> None:
    with_group(numpy, _check_open=lambda self, op: None)


@mutant(GroupTests)
def a_second_group_opens_beside_the_first(numpy: ModuleType) -> None:
    with_group(numpy, exclusive=False)


@mutant(GroupTests)
def a_group_outlives_its_backend(numpy: ModuleType) -> None:
    with_group(numpy, closes=False)
